"""Which backend would serve each operation of a configuration on this machine, and why the others do not."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from dsattn.backends import TABLE, Call, choose, resolve_deterministic, size_class, standing
from dsattn.backends import explain as explain_call
from dsattn.backends import prepare as prepare_call
from dsattn.config import DSAConfig, GQAConfig, IndexerConfig, LayerType, MLAConfig, ModelConfig, RunConfig
from dsattn.errors import BackendUnavailable, InputError

_NUM_KEYS = 8192  # where nobody says how many
Subject = Call | DSAConfig | ModelConfig | RunConfig | Callable[[], RunConfig]


def explain(subject: Subject) -> str:
    """The table of backends for everything that `subject` would run, one line a backend.

    subject: a Call (every operation is shown for it); a RunConfig, or a recipe that makes one (its device, dtype, pack
    size and the modes of its stages count); a ModelConfig (every mode; this machine's device, up to 8K keys); a
    DSAConfig (the indexer's operations alone: attention's shapes are not in it).
    `serves` marks what will run, `can serve` what may be asked for by name, `raises` what no backend will do. A vendor
    that is preferred to our kernels comes with the ratio of its record.
    Raises InputError for anything else.
    """
    if isinstance(subject, Call):
        return explain_call(subject)
    if callable(subject) and not isinstance(subject, type):
        subject = subject()
    if isinstance(subject, RunConfig):
        return _table(_run_base(subject), subject.model.dsa.backend, run_calls(subject))
    if isinstance(subject, ModelConfig):
        base = _base(subject.dsa)
        calls = model_calls(subject, base, {"dense", "warmup", "sparse", "frozen"})
        return _table(base, subject.dsa.backend, calls)
    if isinstance(subject, DSAConfig):
        base = _base(subject)
        kept = replace(base, top_k=subject.indexer.top_k)
        calls = _selection(subject.indexer, base, _NUM_KEYS) | _loss(subject.indexer, kept)
        return _table(base, subject.backend, calls)
    raise InputError(
        f"subject is a {type(subject).__name__}; give a Call, DSAConfig, ModelConfig, RunConfig or a recipe"
    )


def prepare(config: RunConfig, model: ModelConfig) -> None:
    """Before a run's first step: what the vendors that will serve its operations do once, see `backends.prepare`.

    model: with one rank's heads. What no backend serves raises when it is called, not here.
    """
    calls = model_calls(model, _run_base(config), _modes(config), _num_keys(config))
    for operation, call in calls.items():
        with contextlib.suppress(BackendUnavailable):
            prepare_call(operation, call, _asked(operation, model.dsa.backend))


def run_calls(config: RunConfig) -> dict[str, Call]:
    """Operation -> the Call that the run's layers make on its device, for the modes of its stages."""
    return model_calls(config.model, _run_base(config), _modes(config), _num_keys(config))


def model_calls(config: ModelConfig, base: Call, modes: set[str], num_keys: int = _NUM_KEYS) -> dict[str, Call]:
    """Operation -> the Call that the model's layers make, for the operations that these modes run.

    base: device, dtype, size class and determinism. num_keys: how many keys there are, for KPool to make pools of.
    Where an operation is called with and without selection (the indexer's loss in warm-up and sparse training of GQA),
    the one with it is shown; where `dsa` layers and others call it, that of the others. Dense MLA is shown as it
    trains, expanded; decoding with a cache runs it absorbed, as `dense_mla`.
    """
    attention, indexer = config.attention, config.dsa.indexer
    kind = "gqa" if isinstance(attention, GQAConfig) else "mla"
    kept = replace(base, **_attention_sizes(attention), top_k=_width(indexer))
    has_dsa = "dsa" in config.types
    calls: dict[str, Call] = {}
    others = {"dense", "sliding"} & set(config.types)
    if others or (has_dsa and modes & {"dense", "warmup"}):
        calls |= _both("dense_gqa", replace(base, **_dense_sizes(config.attention_of("dense" if others else "dsa"))))
    if has_dsa and modes & {"sparse", "frozen"}:
        calls |= _selection(indexer, base, num_keys) | _both(f"sparse_{kind}", kept)
        if config.dsa.shares and base.deterministic and config.dsa.backend != "reference":
            calls["invert"] = replace(base, dtype="int32", top_k=_width(indexer), deterministic=False)
    if has_dsa and "warmup" in modes:
        calls |= _loss(indexer, replace(base, top_k=0))
    if has_dsa and "sparse" in modes and indexer.pool_size == 1:
        calls |= _loss(indexer, replace(base, top_k=indexer.top_k))
        calls |= _both("dsa_attention", kept) if kind == "mla" else {}
    return calls | _gates(config, base) | _experts_and_linear(config, base)


def _gates(config: ModelConfig, base: Call) -> dict[str, Call]:
    """Of the first type that has one: `dsa`, the others' attention, linear attention, whose product is fp32."""
    found = [(one.heads, _gated_width(one), one.output_gate, base.dtype) for one in _attentions(config)]
    if config.kda is not None:
        found.append((config.kda.heads, config.kda.head_dim, config.kda.output_gate, "float32"))
    for heads, width, gate, dtype in found:
        if gate != "none":
            return _both("output_gate", replace(base, heads=heads, width=width, dtype=dtype, deterministic=False))
    return {}


def _attentions(config: ModelConfig) -> list[MLAConfig | GQAConfig]:
    kinds: tuple[LayerType, ...] = ("dsa", "dense", "sliding")
    return [config.attention_of(kind) for kind in kinds if kind in config.types]


def _experts_and_linear(config: ModelConfig, base: Call) -> dict[str, Call]:
    calls, moe, kda = {}, config.moe, config.kda
    if moe is not None:  # the router ranks fp32 scores of experts
        router = replace(base, dtype="float32", size_class=size_class(moe.experts), deterministic=False)
        calls["select_topk"] = replace(router, top_k=moe.experts_per_token)
    if kda is not None:
        sizes = {"heads": kda.heads, "width": kda.head_dim, "value_width": kda.head_dim}
        calls["kda"] = replace(base, **sizes, deterministic=False)
    return calls


def _run_base(config: RunConfig) -> Call:
    return _base(config.model.dsa, config.train.device, config.train.dtype, _num_keys(config))


def _modes(config: RunConfig) -> set[str]:
    return {stage.mode for stage in config.train.stages}


def _num_keys(config: RunConfig) -> int:
    return config.data.pack_tokens * config.train.packs_per_micro_batch


def _base(dsa: DSAConfig, device: str = "auto", dtype: str | None = None, num_keys: int = _NUM_KEYS) -> Call:
    """What every call shares. dtype None: bfloat16 on a GPU, else float32."""
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device.partition(":")[0]
    capability = 0
    if kind == "cuda" and torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability(None if device in ("auto", "cuda") else device)
        capability = 10 * major + minor
    return Call(
        device=kind,
        capability=capability,
        dtype=dtype or ("bfloat16" if kind == "cuda" else "float32"),
        size_class=size_class(num_keys),
        deterministic=resolve_deterministic(dsa.deterministic),
    )


def _selection(indexer: IndexerConfig, base: Call, num_keys: int) -> dict[str, Call]:
    """KPool selects pools among pools: by `select_keys`, or in its arithmetic `hf` by an operation of its own."""
    size = indexer.pool_size
    # A selection has one value: there is no determinism to ask for.
    call = replace(base, heads=indexer.heads, width=indexer.head_dim, deterministic=False)
    if size > 1:
        call = replace(call, size_class=size_class(num_keys // size))
    if indexer.pool_arithmetic == "hf":
        return {"indexer_scores.forward": call}
    if indexer.pool_e4m3:
        call = replace(call, dtype="bfloat16")  # holds what was rounded to E4M3
    return {"select_keys": replace(call, top_k=indexer.top_k // size)}


def _loss(indexer: IndexerConfig, base: Call) -> dict[str, Call]:
    if indexer.pool_size > 1:
        return {}  # a pool's score teaches no single key
    return _both("indexer_kl", replace(base, heads=indexer.heads, width=indexer.head_dim))


def _width(indexer: IndexerConfig) -> int:
    """Slots for keys in a row of the selection: K, and with KPool's tail P - 1 more."""
    return indexer.top_k + (indexer.pool_size - 1 if indexer.pool_tail else 0)


def _both(operation: str, call: Call) -> dict[str, Call]:
    return {f"{operation}.forward": call, f"{operation}.backward": call}


def _attention_sizes(attention: MLAConfig | GQAConfig) -> dict[str, int]:
    if isinstance(attention, GQAConfig):
        return {"heads": attention.heads, "width": attention.head_dim, "value_width": attention.head_dim}
    return {"heads": attention.heads, "width": attention.latent_width, "value_width": attention.kv_lora_rank}


def _dense_sizes(attention: MLAConfig | GQAConfig) -> dict[str, int]:
    if isinstance(attention, GQAConfig):
        return _attention_sizes(attention)
    width = attention.qk_nope_head_dim + attention.qk_rope_head_dim
    return {"heads": attention.heads, "width": width, "value_width": attention.v_head_dim}


def _gated_width(attention: MLAConfig | GQAConfig) -> int:
    return attention.head_dim if isinstance(attention, GQAConfig) else attention.v_head_dim


def _table(base: Call, backend: str, calls: dict[str, Call]) -> str:
    device = f"{base.device} (capability {base.capability / 10:.1f})" if base.capability else base.device
    keys = {"8K": "up to 8K keys", "64K": "up to 64K keys"}.get(base.size_class, "above 64K keys")
    asked = "" if backend == "auto" else f", backend {backend!r} asked for"
    return "\n".join([f"on {device}, {base.dtype}, {keys}{asked}:", *_lines(backend, calls)])


def _lines(backend: str, calls: dict[str, Call]) -> Iterator[str]:
    for operation, call in calls.items():
        problem, chosen = "", ""
        try:
            chosen = choose(operation, call, _asked(operation, backend)).name
        except BackendUnavailable as error:
            problem = str(error).removeprefix(f"{operation}: ")
        for row in TABLE[operation]:
            yield f"  {operation:24s} {row.name:12s} {standing(row, call, row.name == chosen)}"
        if problem:
            yield f"  {operation:24s} {'none':12s} raises: {problem}"


def _asked(operation: str, backend: str) -> str:
    """The name that an operation is called with where the dsa layers ask for `backend`.

    Gates, routers, inverses and linear attention do not take it, and a composed operation hands a name that is not its
    own to its parts.
    """
    if backend == "auto" or operation.startswith(("output_gate", "select_topk", "kda", "invert")):
        return "auto"
    handed = operation.startswith("dsa_attention") and all(row.name != backend for row in TABLE[operation])
    return "composed" if handed else backend
