"""Our operators and layers beside Megatron Core's own plain-torch ones, on fresh random cases.

    python tests/integrations/megatron_parity.py OUT.json MEGATRON [SEED]

Not a test: `test_megatron.py` starts it once and reads OUT.json: the seed, and rows of what, case and difference, the
largest absolute difference over the largest absolute value of Megatron's. Two processes (gloo) share the cases, then
form one context-parallel or tensor-parallel group. A case whose cut-off is undecided (the K-th and the next score are
closer than 1e-5 of the largest: torch.topk breaks ties as it likes) is drawn again. With --table it prints the rows of
the table in docs/megatron.md.
"""

import contextlib
import itertools
import json
import secrets
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import megatron_core as core
import torch
from torch import Tensor

from dsattn import KeyRange
from dsattn.config import source_number
from dsattn.integrations.megatron import Options, with_dsattn
from dsattn.integrations.megatron_layout import Groups, rows_of
from dsattn.ops import indexer_kl, select_keys, sparse_gqa, sparse_mla
from dsattn.selection import Selection

MEGATRON_ROWS = Options(rows="megatron")
COEFFICIENT = 0.5
DRAWS = 40


class Report:
    """What was found. One row a thing that was compared, in words that docs/megatron.md repeats."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(self, what: str, case: str, theirs: Tensor | None, ours: Tensor | None) -> None:
        if theirs is None or ours is None:
            difference = 0.0 if theirs is ours else float("inf")
        else:
            largest = theirs.abs().max().item() if theirs.numel() else 0.0
            difference = (theirs - ours).abs().max().item() / max(largest, 1e-30) if theirs.numel() else 0.0
        self.rows.append({"what": what, "case": case, "difference": difference})

    def exact(self, what: str, case: str, equal: bool) -> None:
        self.rows.append({"what": what, "case": case, "difference": 0.0 if equal else float("inf")})


@contextlib.contextmanager
def watching_cut_offs() -> Iterator[list[bool]]:
    """Whether each selection that Megatron makes meanwhile was decided."""
    from megatron.core.transformer.experimental_attention_variant import dsa

    original, decided = dsa.fused_qk_topk_naive, []

    def watched(q: Tensor, k: Tensor, weights: Tensor, top_k: int, **rest: Any) -> Any:
        scores, index = original(q, k, weights, top_k, **rest)
        masked = scores
        if rest.get("varlen_starts") is None and rest.get("mask") is None:
            masked = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
        decided.append(is_decided(masked, top_k))
        return scores, index

    dsa.fused_qk_topk_naive = watched
    yield decided
    dsa.fused_qk_topk_naive = original


def is_decided(scores: Tensor, top_k: int) -> bool:
    """scores [..., keys], -inf where a row may not read."""
    if scores.shape[-1] <= top_k:
        return True
    best = scores.topk(top_k + 1, dim=-1).values
    gap = best[..., -2] - best[..., -1]
    return bool((gap[best[..., -1].isfinite()] > 1e-5 * scores[scores.isfinite()].abs().max()).all())


def alone() -> Groups:
    return Groups(None, 1, 0, None, 1, 0, False, False, 24)


def draw(lengths: list[int], heads: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Random operands: of the indexer q, k, w; of attention absorbed query and key, and a value a head."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    rows = sum(lengths)
    return {
        "q_i": normal(rows, 1, 8, 16),
        "k_i": normal(rows, 1, 16),
        "w": normal(rows, 1, 8),
        "query": normal(rows, 1, heads, 40),
        "key": normal(rows, 1, 1, 40),
        "value": normal(rows, 1, heads, 12),
    }


def functions(report: Report, generator: torch.Generator) -> None:
    """Selection, attention absorbed and not, the loss and every gradient of them."""
    from megatron.core.transformer.experimental_attention_variant import dsa

    for lengths, relu in itertools.product(([24], [9, 1, 14]), (True, False)):
        keys = _ranges(lengths)
        starts, ends = keys.start.long(), keys.stop.long()
        bounds = {"varlen_starts": starts, "varlen_ends": ends}
        name = f"{'packed' if len(lengths) > 1 else 'causal'}, {'relu' if relu else 'no relu'}"
        for _ in range(DRAWS):
            one = draw(lengths, 3, generator)
            top_k = core.TOP_K
            scores, index = dsa.fused_qk_topk_naive(one["q_i"], one["k_i"], one["w"], top_k, use_relu=relu, **bounds)
            if is_decided(scores, top_k):
                break
        else:
            raise RuntimeError(f"{name}: no draw out of {DRAWS} had a decided cut-off")
        chosen = select_keys(one["q_i"][:, 0], one["k_i"][:, 0], one["w"][:, 0], keys, top_k, relu=relu)
        report.exact("selection", name, chosen.index.equal(Selection.from_index(index[0]).index))
        _attention(report, name, one, chosen, index, bounds, generator)
        for sparse, per_token, masked in itertools.product((True, False), (True, False), (True, False)):
            options = (sparse, per_token, masked, relu)
            case = f"{name}, {'sparse' if sparse else 'dense'}{', per token' * per_token}{', row mask' * masked}"
            _loss(report, case, one, chosen, keys, bounds, options)


def _attention(report, name, one, chosen, index, bounds, generator) -> None:
    from megatron.core.transformer.experimental_attention_variant import dsa

    scale = 0.3
    for kind in ("absorbed", "one key a head"):
        query, key, value = (one[part].clone().requires_grad_() for part in ("query", "key", "value"))
        again = [part.detach().clone().requires_grad_() for part in (query, key, value)]
        if kind == "absorbed":
            theirs = dsa._unfused_absorbed_dsa_fn(query, key, index, scale, 32, **bounds)
            ours, _ = sparse_mla(again[0][:, 0], again[1][:, 0, 0], chosen, scale=scale, value_dim=32)
            ours = ours[:, None]
        else:
            theirs = dsa.unfused_dsa_fn(query, key, value, index, scale, **bounds)
            wide = again[1][:, 0].expand(-1, 3, -1)
            ours, _ = sparse_gqa(again[0][:, 0], wide, again[2][:, 0], chosen, scale=scale)
            ours = ours.flatten(1)[:, None]
        grad = torch.randn(theirs.shape, generator=generator)
        theirs.backward(grad)
        ours.backward(grad)
        report.add("sparse attention: output", f"{name}, {kind}", theirs, ours)
        for part, mine in zip((query, key, value), again, strict=True):
            report.add("sparse attention: gradients", f"{name}, {kind}", part.grad, mine.grad)


def _loss(report, case, one, chosen, keys, bounds, options) -> None:
    from types import SimpleNamespace

    from megatron.core.transformer.experimental_attention_variant import dsa

    sparse, per_token, masked, relu = options
    rows = one["q_i"].shape[0]
    valid = torch.arange(rows) % 5 != 3 if masked else None
    scale, names = 0.3, ("q_i", "w", "k_i")
    theirs = [one[name].clone().requires_grad_() for name in names]
    groups = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1))
    wide = one["key"].expand(-1, -1, 3, -1)
    loss = dsa.FusedDSAIndexerLoss.apply(
        *(*theirs, one["query"], wide, scale, core.TOP_K, COEFFICIENT, None, sparse, groups),
        *(bounds["varlen_starts"], bounds["varlen_ends"], None, valid, per_token, relu),
    )[1]
    loss.backward(torch.tensor(3.0))
    ours = [one[name][:, 0].clone().requires_grad_() for name in names]
    q, kv = one["query"][:, 0], one["key"][:, 0, 0]
    selection = chosen if sparse else None
    every = Selection.from_index(torch.where(keys.mask(rows), torch.arange(rows), -1))
    _, lse = sparse_mla(q, kv, chosen if sparse else every, scale=scale, value_dim=32)
    divisor = 1.0 if per_token else float(rows if valid is None else valid.sum())
    q_i, w, k_i = ours
    given = {"scale": scale, "relu": relu, "real_rows": valid, "divisor": divisor}
    mine = COEFFICIENT * indexer_kl(q_i, k_i, w, q, kv, lse, keys, selection, **given)
    mine.backward(torch.tensor(3.0))
    report.add("indexer loss: value", case, loss, mine)
    for a, b in zip(theirs, ours, strict=True):
        report.add("indexer loss: gradients", case, a.grad, b.grad[:, None])


def _ranges(lengths: list[int]) -> KeyRange:
    starts = torch.tensor([0, *lengths]).cumsum(0)[:-1]
    start = torch.cat([torch.full((length,), int(first)) for first, length in zip(starts, lengths, strict=True)])
    return KeyRange(start.int(), torch.arange(1, sum(lengths) + 1).int(), every_row_has_a_key=True)


def tables(report: Report, generator: torch.Generator) -> None:
    """Masks, positions, key orders, index sharing, the schedule's loss scale: exact."""
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.experimental_attention_variant import dsa, dsa_layout, dsa_masking

    for cp_size, rank in [(1, 0), (2, 0), (2, 1), (4, 2)]:
        unit = 2 * cp_size
        lengths = [unit * int(n) for n in torch.randint(0, 4, (5,), generator=generator)] + [unit]
        micro_batch, count = core.packed(lengths), sum(lengths) // cp_size
        groups = Groups(None, cp_size, rank, None, 1, 0, False, False, count)
        ours = rows_of(1, torch.device("cpu"), groups, micro_batch, MEGATRON_ROWS)
        ends = micro_batch.cu_seqlens_q
        given = {"local_output_size": count, "key_local_output_size": count}
        positions, order = dsa_layout.build_packed_allgather_cp_query_positions_and_key_reorder(
            ends, ends, cp_size, rank, torch.device("cpu"), **given
        )
        _, bounds, _ = dsa_masking.build_dsattention_forward_mask(
            sq=count, skv=count * cp_size, b=1, device=torch.device("cpu"), cp_size=cp_size, cp_rank=rank,
            cp_comm_type="allgather", cp_group=None, attn_mask_type=AttnMaskType.causal, attention_mask=None,
            position_ids=None, packed_seq_params=micro_batch, packed_query_positions=positions,
        )  # fmt: skip
        case = f"packed, rank {rank} of {cp_size}"
        same = ours.keys.start.equal(bounds[0].int()) and ours.keys.stop.equal(bounds[1].int())
        report.exact("masks", case, same)
        report.exact("layouts: positions", case, (ours.keys.start + ours.positions).equal(positions))
        report.exact("layouts: key order", case, cp_size == 1 or ours.order.equal(order))
        places = dsa_layout.build_zigzag_cp_local_positions(4 * unit, cp_size, rank, torch.device("cpu"))
        ours = rows_of(
            1, torch.device("cpu"), Groups(None, cp_size, rank, None, 1, 0, False, False, 8), None, Options()
        )
        report.exact("layouts: positions", f"causal, rank {rank} of {cp_size}", ours.positions.equal(places))
        reorder = dsa_layout.build_zigzag_allgather_cp_key_reorder(8, cp_size, torch.device("cpu"))
        report.exact(
            "layouts: key order", f"causal, rank {rank} of {cp_size}", cp_size == 1 or ours.order.equal(reorder)
        )
    for every, offset in itertools.product((1, 2, 3, 4), (0, 1, 2, 3)):
        same = all(
            dsa.source_dsa_compute_layer(layer, offset, every) == source_number(layer, every, offset)
            for layer in range(1, 80)
        )
        report.exact("schedules: index sharing", f"every {every}, offset {offset}", same)


def differences(
    report: Report, row: str, case: str, theirs: Any, ours: Any, run: Any, generator: torch.Generator, *, rows: int = 24
) -> None:
    """Both modules on the same inputs: outputs, the gradient of the input and of every parameter."""
    ours.load_state_dict(theirs.state_dict())
    for _ in range(DRAWS):
        batch = run.get("batch", 1)
        hidden, grad = (torch.randn(rows, batch, core.HIDDEN, generator=generator) for _ in "ab")
        with watching_cut_offs() as decided:
            their_out, their_grad = once(theirs, hidden, grad, run)
        if all(decided):
            break
    else:
        raise RuntimeError(f"{case}: no draw out of {DRAWS} had a decided cut-off")
    our_out, our_grad = once(ours, hidden, grad, run)
    report.add(f"{row}: output", case, their_out, our_out)
    report.add(f"{row}: gradient of the input", case, their_grad, our_grad)
    for (name, a), b in zip(theirs.named_parameters(), ours.parameters(), strict=True):
        kind = "indexer" if "indexer" in name else "projections"
        report.add(f"{row}: gradients of the {kind}", f"{case}: {name}", a.grad, b.grad)


def once(module: Any, hidden: Tensor, grad: Tensor, run: dict[str, Any]) -> tuple[Tensor, Tensor]:
    module.train()
    module.zero_grad()
    hidden = hidden.clone().requires_grad_()
    lengths, slots = run.get("lengths"), run.get("slots")
    micro_batch = None if lengths is None else core.packed(lengths, slots, **run.get("packed", {}))
    out = hidden
    for layer in module if isinstance(module, torch.nn.ModuleList) else [module]:
        if run.get("recompute"):
            from torch.utils.checkpoint import checkpoint

            out = checkpoint(
                lambda x, one=layer: one(x, None, packed_seq_params=micro_batch)[0], out, use_reentrant=True
            )
        else:
            out = layer(out, None, packed_seq_params=micro_batch)[0]
    (out * grad).sum().backward()
    return out.detach(), hidden.grad


PACK = {"lengths": [9, 1, 14]}
PADDED = {"lengths": [5, 0, 9], "slots": [8, 4, 12]}
MODULES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("two samples, dense loss", {}, {"batch": 2}),
    ("two samples, sparse loss", {"dsa_indexer_use_sparse_loss": True}, {"batch": 2}),
    ("packed, dense loss", {}, PACK),
    ("packed, sparse loss", {"dsa_indexer_use_sparse_loss": True}, PACK),
    ("packed, per token", {"dsa_indexer_use_sparse_loss": True, "calculate_per_token_loss": True}, PACK),
    ("padded packs", {"dsa_indexer_use_sparse_loss": True}, PADDED),
    ("packed, no loss", {"dsa_indexer_loss_coeff": None}, PACK),
    ("yarn", {"rope_type": "yarn", "mscale_all_dim": 1.0, "rotary_scaling_factor": 4}, PACK),
    ("rope with yarn's softmax scale", {"mscale_all_dim": 1.0}, PACK),
    ("no relu, neighbouring lanes", {"dsa_indexer_scoring_relu": False, "dsa_indexer_rope_interleaved": True}, PACK),
    ("no query latent", {"q_lora_rank": None, "qk_layernorm": False}, PACK),
    ("key norm in fp32, epsilon", {"dsa_indexer_k_norm_fp32": True, "dsa_indexer_k_norm_epsilon": 1e-3}, PACK),
]


def modules(report: Report, world: core.World, generator: torch.Generator) -> None:
    """AbsorbedMLASelfAttention with DSAttention and DSAIndexer, each case by our core and by our whole layer."""
    cases = [(case, whole) for case in MODULES for whole in (False, True)]
    for (case, fields, run), whole in cases[world.rank :: 2]:
        config = core.config_of(**fields)
        spec = core.attention_spec(config)
        changed = with_dsattn(spec, config, whole=whole, options=MEGATRON_ROWS)
        pair = [core.build(one, config, world.groups()) for one in (spec, changed)]
        row = "self-attention" if whole else "core attention"
        differences(report, row, case, *pair, run, generator)


def shared(report: Report, world: core.World, generator: torch.Generator) -> None:
    """A selecting and a sharing layer, packed and not, and run again in the backward."""
    fields = {"dsa_indexer_topk_freq": 2, "dsa_indexer_use_sparse_loss": True}
    for case, more, run in (
        ("packed", {}, PACK),
        ("one sample", {}, {}),
        (
            "packed, full recompute",
            {"recompute_granularity": "full", "recompute_method": "uniform"},
            {**PACK, "recompute": True},
        ),
    ):
        if more:
            more = {**more, "recompute_num_layers": 1}
        config = core.config_of(**fields, **more)
        spec = core.attention_spec(config)
        both = []
        for one in (spec, with_dsattn(spec, config, options=MEGATRON_ROWS)):
            layers = [core.build(one, config, world.groups(), number) for number in (1, 2)]
            both.append(torch.nn.ModuleList(layers))
        differences(report, "shared selections", case, *both, run, generator)


def main(rank: int, rendezvous: str, out: str, seed: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # Megatron's: of old names in torch, of packages that are absent
    core.import_megatron()
    world = core.start(rank, 2, rendezvous)
    report, generator = Report(), torch.Generator().manual_seed(2 * seed + rank)
    torch.manual_seed(seed)
    import megatron_models as models
    import megatron_ranks as ranks

    if rank == 0:
        functions(report, generator)
        tables(report, generator)
    else:
        shared(report, world, generator)
        models.run(report, world, generator)
    modules(report, world, generator)

    ranks.schedule_scale(report)
    ranks.context_parallel(report, world, generator)
    ranks.tensor_parallel(report, world, generator)
    Path(f"{out}.{rank}").write_text(json.dumps(report.rows))


def table(rows: list[dict[str, Any]]) -> str:
    """The rows of docs/megatron.md: what, in how many comparisons, and the largest difference of them."""
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(row["what"], []).append(row["difference"])
    return "\n".join(
        f"| {what} | {len(each)} | {f'{max(each):.1g}' if max(each) else 'equal'} |"
        for what, each in sorted(found.items())
    )


if __name__ == "__main__":
    target, package = sys.argv[1:3]
    sys.path.insert(0, package)
    number = int(sys.argv[3]) if len(sys.argv) > 3 and sys.argv[3].isdigit() else secrets.randbelow(2**16)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(main, (f"{folder}/rendezvous", target, number), nprocs=2)
    held = [row for rank in range(2) for row in json.loads(Path(f"{target}.{rank}").read_text())]
    Path(target).write_text(json.dumps({"seed": number, "rows": held}))
    if sys.argv[-1] == "--table":
        sys.stdout.write(table(held) + "\n")
