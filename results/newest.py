"""The newest records of this folder, for what is made from them: performance.py, layer.py, readme.py."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent
PEERS = {
    "cudnn": "cuDNN",
    "flash_mla": "FlashMLA",
    "deep_gemm": "DeepGEMM (fp8)",
    "deep_gemm_torch": "DeepGEMM (fp8) and torch.topk",
    "bf16": "ours in bf16",
    "tilelang": "TileLang",
    "torch": "torch",
    "vendors": "vendors' parts",
}
TITLES = {
    "sparse_mla": "Sparse MLA",
    "sparse_gqa": "Sparse GQA",
    "select_keys": "Selection: scores and top-k",
    "select_topk": "Top-k of given scores",
    "indexer_kl": "The indexer's loss",
    "dense_gqa": "Dense attention",
    "dense_mla": "Dense attention, absorbed",
    "dsa_layer": "One layer: selection, attention and the indexer's loss, forward and backward",
}


def read(name: str) -> list[dict[str, Any]]:
    """The lines of a file; none where there is no such file yet."""
    path = RESULTS / name
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def clean(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those made on a GPU and from a clean tree."""
    return [record for record in records if record["gpu"] and not record["dirty"]]


def latest(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last record of each operation, shape and backend, on a GPU and from a clean tree, in order."""
    kept: dict[tuple[Any, ...], dict[str, Any]] = {}
    for record in clean(records):
        key = identity(record)
        if not record["peers"] and key in kept and kept[key]["peers"]:
            continue  # a line without peers says less than one with them
        kept[key] = record
    order = list(TITLES)
    return sorted(kept.values(), key=lambda record: (order.index(record["op"].partition(".")[0]), *identity(record)))


def latest_cases(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last record of each case of parallel.jsonl, model and dtype, in order."""

    def case(record: dict[str, Any]) -> tuple[str, ...]:
        shape = record["shape"].items()  # `compile` is in the case's name, and not in old shapes
        return record["case"], *(str(value) for name, value in shape if name != "compile")

    return list({case(one): one for one in clean(records)}.values())


def identity(record: dict[str, Any]) -> tuple[Any, ...]:
    shape = record["shape"]
    dense = shape.get("K") is None and record["op"].startswith("indexer_kl")
    return (
        record["op"],
        dense,
        str(shape.get("order")),
        str(shape.get("lengths")),
        str(record.get("precision")),
        str(record.get("inputs")),
        record["backend"],
        record.get("deterministic") or False,
        shape.get("H") or 0,
        shape.get("H_I") or 0,
        shape["S"],
    )
