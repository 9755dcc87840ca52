"""The agreement matrix: one step on many ranks has the losses and gradients of one process.

Started with arguments, this file forks the ranks of every launch; the tests read what they wrote.
"""

import contextlib
import dataclasses
import functools
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import unittest.mock
import warnings
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from dsattn.config import (
    DSAConfig,
    GQAConfig,
    IndexerConfig,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    MTPConfig,
    ParallelConfig,
    StageConfig,
    TrainConfig,
)
from dsattn.keys import Layout
from dsattn.model.decoder import Decoder
from dsattn.model.stage import MicroBatch
from dsattn.parallel import compiled
from dsattn.parallel.apply import Parallel, apply
from dsattn.parallel.gloo import one_thread_a_group
from dsattn.parallel.gradients import clip
from dsattn.parallel.mesh import ParallelMesh, build_mesh
from dsattn.training import loader
from dsattn.training.data import IGNORED_LABEL, Pack
from dsattn.training.evaluation import evaluate
from dsattn.training.health import Health
from dsattn.training.stages import audit, set_mode
from dsattn.training.step import accumulate_gradients

BAR = 1e-5
SECONDS = 240  # of one launch, before it is killed

INDEXER = IndexerConfig(heads=2, head_dim=8, top_k=4, rope_dim=4)
PLAIN = ModelConfig(
    hidden_size=16,
    num_layers=4,
    intermediate_size=16,
    attention=MLAConfig(heads=4, q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4),
    dsa=DSAConfig(indexer=INDEXER),
    init_std=0.1,
)
REPEATED = MTPConfig(depths=2, repeated=True, shared_components=("latent_kv",))
MODELS = {
    "plain": PLAIN,
    "sharing": dataclasses.replace(
        PLAIN, dsa=DSAConfig(indexer=INDEXER, share_every=2, multi_layer_teacher=True), mtp=REPEATED
    ),
    "ahead": dataclasses.replace(PLAIN, mtp=MTPConfig(depths=2)),
    "gqa": dataclasses.replace(
        PLAIN,
        num_layers=2,
        attention=GQAConfig(
            heads=4, kv_heads=4, head_dim=4, rope_dim=4, qk_norm=True, sink=True, output_gate="headwise"
        ),
        dsa=DSAConfig(indexer=dataclasses.replace(INDEXER, query_from="hidden")),
        tie_embeddings=True,
    ),
    "pools": dataclasses.replace(PLAIN, num_layers=2, dsa=DSAConfig(indexer=dataclasses.replace(INDEXER, pool_size=2))),
    "experts": dataclasses.replace(
        PLAIN,
        num_layers=2,
        moe=MoEConfig(experts=4, experts_per_token=2, intermediate_size=8, first_dense_layers=1),
    ),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One cell: a mesh, a model, a mode, settings of the step, its documents, whether an evaluation follows, and how
    many calls add up their gradients.
    """

    name: str
    mesh: dict[str, Any]
    model: str = "plain"
    mode: Any = "sparse"
    train: dict[str, Any] = dataclasses.field(default_factory=dict)
    balance_weight: float = 0.0
    evaluates: bool = False
    documents: str = "mixed"
    calls: int = 1

    @property
    def parallel(self) -> ParallelConfig:
        return ParallelConfig(**self.mesh)

    @property
    def alone(self) -> str:
        """Cases of one name have one reference: neither micro-batches nor recompute change what one process finds."""
        return f"{self.model}, {self.mode}, {self.balance_weight}, {self.documents}"


ONE = {"packs_per_micro_batch": 1}
FULL = {"recompute": "full"}
SELECTIVE = {"recompute": "selective"}
COMPILED = {"compile": True}
INTERLEAVED: dict[str, Any] = {"pp": 2, "vpp": 2, "schedule": "Interleaved1F1B"}
COPIES = INTERLEAVED | {"pipeline_layout": "Et|tt|tm|mL"}
WHOLE_ROWS = {"tp": 2, "sequence_parallel": False, "check_ranks": True}

CASES = [
    Case("shards", {"dp_shard": 2}),
    Case("shards, micro-batches, sharing, recompute", {"dp_shard": 2}, "sharing", train=ONE | FULL, evaluates=True),
    Case("shards, dense", {"dp_shard": 2}, mode="dense"),
    Case("shards, warm-up", {"dp_shard": 2}, "sharing", "warmup", ONE),
    Case("shards, warm-up, recompute", {"dp_shard": 2}, "sharing", "warmup", ONE | FULL),
    Case("shards, fixed indexers", {"dp_shard": 2}, "gqa", "frozen", SELECTIVE),
    Case("shards, experts", {"dp_shard": 2}, "experts", balance_weight=0.1),
    Case("shards, a rank without documents", {"dp_shard": 2}, "sharing", train=ONE, documents="one in four"),
    Case("context, a rank without documents", {"cp": 2, "dp_shard": 2}, train=ONE, documents="one in four"),
    Case("replicas", {"dp_replicate": 2}, "sharing", train=ONE | SELECTIVE),
    Case("replicas of shards", {"dp_replicate": 2, "dp_shard": 2}, "sharing", train=ONE | FULL),
    Case("context", {"cp": 2}, "plain", train=ONE),
    Case("context, sharing, recompute", {"cp": 2}, "sharing", train=SELECTIVE, evaluates=True),
    Case("context of four", {"cp": 4}, "sharing", train=FULL),
    Case("context, shards", {"cp": 2, "dp_shard": 2}, "sharing", train=ONE | FULL),
    Case("tensor", {"tp": 2}, "plain"),
    Case("tensor, shards, two calls", {"tp": 2, "dp_shard": 2}, "sharing", calls=2),
    Case("compiled, tensor, shards, recompute", {"tp": 2, "dp_shard": 2}, train=ONE | FULL | COMPILED),
    Case("compiled, shards, experts", {"dp_shard": 2}, "experts", train=ONE | COMPILED),
    Case("tensor, whole rows, two calls", WHOLE_ROWS, "gqa", calls=2),
    Case("pipeline, two calls", {"pp": 2}, "sharing", train=ONE, calls=2),
    Case("tensor, sharing, recompute", {"tp": 2}, "sharing", train=FULL),
    Case("tensor, whole rows", WHOLE_ROWS, "sharing", train=SELECTIVE, evaluates=True),
    Case("tensor, context", {"tp": 2, "cp": 2}, "sharing", train=SELECTIVE, evaluates=True),
    Case("tensor, shards", {"tp": 2, "dp_shard": 2}, "sharing", "warmup"),
    Case("pipeline", {"pp": 2}, "sharing", train=ONE),
    Case("pipeline, MTP alone, recompute", {"pp": 2, "pipeline_layout": "Etttt|mmL"}, "sharing", train=ONE | FULL),
    Case("pipeline, interleaved", INTERLEAVED, "plain", train=ONE, evaluates=True),
    Case("pipeline, interleaved, two copies on a rank", COPIES, "ahead", train=ONE, evaluates=True),
    Case("pipeline, interleaved, shards", INTERLEAVED | {"dp_shard": 2}, "plain", train=ONE | FULL),
    Case("pipeline, experts", {"pp": 2, "dp_shard": 2, "ep": 2}, "experts", train=ONE, balance_weight=0.1),
    Case("pipeline, context", {"pp": 2, "cp": 2}, "sharing", train=ONE | FULL),
    Case("pipeline, context, pools", {"pp": 2, "cp": 2}, "pools", "frozen", ONE),
    Case("pipeline, tensor", {"pp": 2, "tp": 2}, "gqa", train=ONE, evaluates=True),
    Case("pipeline, shards", {"pp": 2, "dp_shard": 2}, "sharing", train=ONE | SELECTIVE),
    Case("pipeline, shards, warm-up", {"pp": 2, "dp_shard": 2}, "sharing", "warmup", ONE | SELECTIVE),
    Case("groups of context", {"cp": 4, "dynamic_cp": True}, "sharing", train=ONE, documents="short"),
    Case("groups of context, tensor", {"cp": 2, "tp": 2, "dynamic_cp": True}, train=ONE, documents="short"),
    Case("groups of context, pipeline", {"cp": 2, "pp": 2, "dynamic_cp": True}, train=ONE, documents="short"),
    Case("experts", {"dp_shard": 2, "ep": 2}, "experts", balance_weight=0.1),
    Case("experts, shards", {"dp_shard": 4, "ep": 2}, "experts", train=ONE | FULL, balance_weight=0.1),
    Case("experts, tensor, context", {"tp": 2, "cp": 2, "ep": 2}, "experts", balance_weight=0.1),
]


DOCUMENTS = {  # of 1, 2, 3 and 7 tokens among longer ones, a pack that is padded, one nearly empty
    "mixed": ([30, 18], [1, 2, 3, 7, 21], [44, 1, 3], [2]),
    "one in four": ([30, 18], [0], [0], [0]),
    "short": ([24, 24], [12, 12, 12, 12], [44, 1, 3], [10, 14, 10, 14]),  # for 2, 1, 4 and 2 of four ranks
}


def packs(documents: str) -> list[Pack]:
    """Four packs of 48 rows."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for lengths in DOCUMENTS[documents]:
        layout = Layout.packed(lengths, total=48)
        tokens = torch.randint(0, 256, (48,), generator=generator)
        labels = tokens.roll(-1)
        labels[torch.tensor(lengths).cumsum(0) - 1] = IGNORED_LABEL
        labels[~layout.real_rows] = IGNORED_LABEL
        made.append(Pack(tokens, labels, layout, sum(lengths) - len(lengths)))
    return made


def run_alone(case: Case) -> dict[str, Any]:
    """Losses and gradients of one process."""
    stage = StageConfig(mode=case.mode, balance_weight=case.balance_weight)
    torch.manual_seed(0)
    model = Decoder(MODELS[case.model])
    set_mode(model, case.mode)
    losses = accumulate_gradients(
        model, packs(case.documents), stage, TrainConfig(packs_per_step=4, packs_per_micro_batch=2)
    )
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3))
    whole = Parallel(model, ParallelMesh())
    held_out = evaluate(whole, packs(case.documents), stage, TrainConfig())
    said = audit(whole, case.mode)
    return {"losses": losses, "gradients": gradients, "norm": norm, "held_out": held_out, "audit": said}


@contextlib.contextmanager
def seeing_groups() -> Iterator[set[int]]:
    """How many context-parallel ranks shared a micro-batch, each number once."""
    sizes: set[int] = set()
    place = loader.place

    def seen(*args: Any) -> MicroBatch:
        micro = place(*args)
        rows = micro.layout if micro.layout.whole is None else micro.layout.whole
        sizes.add(rows.num_keys // len(rows.rows))
        return micro

    with unittest.mock.patch.object(loader, "place", seen):
        yield sizes


@functools.cache
def groups_of(parallel: ParallelConfig) -> ParallelMesh:
    """Groups of processes cost more than a step here, and cases may share them."""
    return build_mesh(parallel, "cpu")


def mesh_of(parallel: ParallelConfig) -> ParallelMesh:
    """How micro-batches go to groups, and checks, are no matter of the mesh."""
    return dataclasses.replace(
        groups_of(dataclasses.replace(parallel, dynamic_cp=False, check_ranks=False)), config=parallel
    )


def run_case(case: Case, alone: dict[str, Any]) -> dict[str, Any]:
    """Losses and gradients of this rank beside those of one process: the largest differences, relative."""
    model, stage = MODELS[case.model], StageConfig(mode=case.mode, balance_weight=case.balance_weight)
    train = TrainConfig(**{"packs_per_step": 4, "packs_per_micro_batch": 2} | case.train)
    torch.manual_seed(0)
    with unittest.mock.patch.object(compiled, "BACKEND", "aot_eager"):  # inductor's code is a GPU's to run
        whole = apply(model, mesh_of(case.parallel), train)
    set_mode(whole.model, case.mode)
    with seeing_groups() as sizes:
        for _ in range(case.calls):
            found = accumulate_gradients(whole, packs(case.documents), stage, train)
    for parameter in whole.model.parameters():
        if parameter.grad is not None:
            parameter.grad /= case.calls
    expected, wanted = alone["losses"], alone["gradients"]
    gradients = {}
    for name, parameter in whole.model.named_parameters():
        reference, gradient = wanted[name], parameter.grad
        if reference is None or gradient is None:
            gradients[name] = 0.0 if reference is gradient else float("inf")
            continue
        gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        gradients[name] = float((gradient - reference).abs().max() / reference.abs().max().clamp(min=1e-12))
    clipped = clip(whole.model.named_parameters(), 1e-3, whole.mesh, whole.copies)
    measured = {}
    if case.evaluates:
        loss, health = evaluate(whole, packs(case.documents), stage, train)
        expected_loss, expected_health = alone["held_out"]
        measured = {"held out": _relative(loss, expected_loss), "health": _apart(health, expected_health)}
    return {
        "gradients": gradients,
        "losses": {
            "lm": _relative(found.lm, expected.lm),
            "norm": _relative(clipped, alone["norm"]),
            "rows": abs(found.rows - expected.rows),
            "audit": _apart(audit(whole, case.mode), alone["audit"]),
            "pairs": _apart([len(found.pairs), sum(found.pairs)], [whole.mesh.size("loss"), *expected.pairs]),
            "groups": float(case.parallel.dynamic_cp and sizes != {1, 2, case.parallel.cp}),
            "balance": _relative(found.balance or 0.0, expected.balance or 0.0),
            **measured,
            **{f"kl {layer}": _relative(found.kl.get(layer, 0.0), value) for layer, value in expected.kl.items()},
            **{
                f"mtp {depth}": _relative(a, b)
                for depth, (a, b) in enumerate(zip(found.mtp, expected.mtp, strict=True))
            },
            **{
                f"loads {layer}": float((found.loads[layer] - load).abs().max())
                for layer, load in expected.loads.items()
            },
        },
        "names": sorted(set(wanted)),
    }


def _relative(a: float, b: float) -> float:
    """A loss near zero is a difference of numbers near one, and rounded as they are."""
    return abs(a - b) / max(abs(b), 0.1)


def _apart(found: Any, expected: Any) -> float:
    """The largest difference of two trees of numbers; infinite where they have other shapes, or nothing is there."""
    if isinstance(expected, Health) and isinstance(found, Health):
        return _apart(found.to_dict(), expected.to_dict()) if expected.layers else float("inf")
    if isinstance(expected, dict):
        return max(_apart(found.get(name), value) for name, value in expected.items())
    if isinstance(expected, list):
        return max((_apart(a, b) for a, b in zip_longest(found, expected)), default=0.0)
    if isinstance(expected, float) and found is not None:
        return _relative(found, expected)
    return 0.0 if found == expected else float("inf")


@one_thread_a_group()
def main(rank: int, world: int, folder: Path, references: Path) -> None:
    """One rank of a launch: every case that has as many processes."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # dynamo's, which hides it
    alone = torch.load(references, weights_only=False)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    for number, case in enumerate(CASES):
        if case.parallel.world_size == world:
            began = time.monotonic()
            result = run_case(case, alone[case.alone])
            everyone: list[Any] = [None] * world
            dist.all_gather_object(everyone, result)
            if rank == 0:
                summary = {
                    "losses": {name: max(one["losses"][name] for one in everyone) for name in result["losses"]},
                    "gradients": {
                        name: max(
                            (one["gradients"][name] for one in everyone if name in one["gradients"]), default=None
                        )
                        for name in result["names"]
                    },
                    "seconds": time.monotonic() - began,
                }
                (folder / f"{number}.json").write_text(json.dumps(summary))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, str]]:
    """For each number of processes: the folder with results, and what went wrong."""
    folders = {world: tmp_path_factory.mktemp(f"launch-{world}") for world in (2, 4)}
    command = [sys.executable, "-W", "error", __file__, json.dumps({w: str(folder) for w, folder in folders.items()})]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        ranks.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(ranks.pid, signal.SIGKILL)
        ranks.wait()
    return {
        world: (folder, "\n".join(f"{path.name}: {path.read_text()[-3000:]}" for path in sorted(folder.glob("*.err"))))
        for world, folder in folders.items()
    }


def _refer(file: Path) -> None:
    """Write what one process finds, from a process of its own: one that has run a backward cannot be forked."""
    if os.fork() == 0:
        torch.set_num_threads(1)
        torch.save({case.alone: run_alone(case) for case in {case.alone: case for case in CASES}.values()}, file)
        sys.exit()
    os.wait()


def _launch(world: int, folder: Path, references: Path) -> None:
    """One forked process a rank, until all have ended; where one fails, the others are killed."""
    ranks = set[int]()
    for rank in range(world):
        if (number := os.fork()) == 0:
            signal.alarm(SECONDS)
            os.dup2(os.open(folder / f"rank-{rank}.err", os.O_WRONLY | os.O_CREAT), 2)
            main(rank, world, folder, references)
            sys.exit()
        ranks.add(number)
    while ranks:
        ended, status = os.wait()
        ranks.remove(ended)
        if status:
            for other in ranks:
                os.kill(other, signal.SIGKILL)


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: CASES[number].name)
def test_a_step_on_many_ranks_is_that_of_one(launched: dict[int, tuple[Path, str]], number: int) -> None:
    folder, said = launched[CASES[number].parallel.world_size]
    path = folder / f"{number}.json"
    assert path.exists(), f"the launch ended before this case:\n{said}"
    found = json.loads(path.read_text())
    missing = [name for name, value in found["gradients"].items() if value is None]
    assert not missing, f"no rank holds {missing}"
    apart = {name: value for kind in ("losses", "gradients") for name, value in found[kind].items() if not value <= BAR}
    assert not apart, apart


if __name__ == "__main__":  # forked ranks: torch, and what its optimizers import late, are imported once
    importlib.import_module("torch._dynamo")
    gc.freeze()
    folders_of = json.loads(sys.argv[1])
    found_alone = Path(folders_of["2"]) / "alone.pt"
    _refer(found_alone)
    for size, where in folders_of.items():
        _launch(int(size), Path(where), found_alone)
