"""KPool against loops over rows, pools and numbers, and against Hugging Face's glm5_next."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dsattn import settings
from dsattn.errors import BackendUnavailable, InputError
from dsattn.keys import KeyRange, Layout
from dsattn.ops import expand_pools, pool_keys, select_keys, select_topk
from dsattn.ops.pool import PooledKeys, round_to_e4m3, select_pools_hf
from dsattn.selection import Selection
from dsattn.testing import LAYOUTS, make_case, strided

GPU = "cuda"


class Operands(NamedTuple):
    """q [T, H, D], k and gate [S, D], w [T, H], ape [P, D]; what nobody reads is NaN."""

    q: Tensor
    k: Tensor
    gate: Tensor
    w: Tensor
    ape: Tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> "Operands":
        return Operands(*map(change, self))

    def of(self, rows: slice) -> "Operands":
        return Operands(self.q[rows], self.k[rows], self.gate[rows], self.w[rows], self.ape)


def operands(layout: Layout, pool_size: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Operands:
    case, other = make_case(layout, seed=seed, dtype=dtype), make_case(layout, seed=seed + 1, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    ape = torch.randn(pool_size, case.k_i.shape[1], generator=generator, dtype=torch.float64)
    return Operands(case.q_i, case.k_i, other.k_i, case.w, ape.to(dtype))


def pooled_of(given: Operands, layout: Layout, arithmetic: Any = "fp32") -> PooledKeys:
    return pool_keys(given.k, given.gate, given.ape, layout, given.ape.shape[0], arithmetic=arithmetic)


def pick(given: Operands, layout: Layout, top_k: int, *, tail: bool = True, arithmetic: Any = "fp32") -> Selection:
    pooled, pools = pooled_of(given, layout, arithmetic), top_k // given.ape.shape[0]
    if arithmetic == "hf":
        chosen = select_pools_hf(given.q, pooled, given.w, pools)
    else:
        chosen = select_keys(given.q, pooled.keys, given.w, pooled.ranges, pools)
    return expand_pools(chosen, pooled, layout, tail=tail)


def naive_pool(given: Operands, first: int) -> Tensor:
    """The key of the pool that starts at key `first`."""
    keys = slice(first, first + given.ape.shape[0])
    weight = (given.gate[keys] + given.ape).exp()
    return (weight * given.k[keys]).sum(0) / weight.sum(0)


def ends(keys: KeyRange) -> list[tuple[int, int]]:
    return list(zip(keys.start.tolist(), keys.stop.tolist(), strict=True))


def naive_selection(given: Operands, keys: KeyRange, top_k: int, tail: bool) -> list[list[int]]:
    """The keys of every row: pools counted from the row's first key, sorted as Python numbers."""
    size, selected = given.ape.shape[0], []
    firsts = sorted({f for a, b in ends(keys) for f in range(a, b - size + 1, size)})
    pools = torch.stack([naive_pool(given, first) for first in firsts]) if firsts else given.k[:0]
    scores = torch.einsum("th,thn->tn", given.w, torch.einsum("thd,nd->thn", given.q, pools).relu()).tolist()
    for row, (start, stop) in enumerate(ends(keys)):
        scored = [(-scores[row][firsts.index(first)], first) for first in range(start, stop - size + 1, size)]
        kept = [first + j for _, first in sorted(scored)[: top_k // size] for j in range(size)]
        rest = range(stop - max(stop - start, 0) % size, stop) if tail else range(0)
        selected.append(sorted([*kept, *rest]))
    return selected


def listed(selection: Selection) -> list[list[int]]:
    return [row[:length] for row, length in zip(selection.index.tolist(), selection.length.tolist(), strict=True)]


@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("pool_size", [1, 3, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_selections_are_those_of_loops(layout: str, pool_size: int, tail: bool) -> None:
    made = LAYOUTS[layout]()
    given = operands(made, pool_size)
    got = pick(given, made, 12, tail=tail)
    assert listed(got) == naive_selection(given, made.keys, 12, tail)
    assert got.width == 12 + (pool_size - 1 if tail else 0)
    beyond = torch.arange(got.width) >= got.length[:, None]
    assert ((got.index == -1) == beyond).all()
    assert (got.index.dtype, got.length.dtype, got.score) == (torch.int32, torch.int32, None)


def test_oracle_sees_a_pool_that_starts_a_key_late() -> None:
    layout = Layout.packed([40])
    given = operands(layout, 4)
    moved = KeyRange(layout.keys.start + 1, layout.keys.stop)
    assert listed(pick(given, layout, 12)) != naive_selection(given, moved, 12, True)


def test_pools_are_complete_and_restart_in_every_document() -> None:
    """[0 1 2|3 4][5][6 7 8|9 10 11|12]: three pools of three keys; slot 1, where keys 3 .. 5 would be, holds none."""
    layout = Layout.packed([5, 1, 7])
    pooled = pool_keys(torch.arange(13.0)[:, None], torch.zeros(13, 1), torch.zeros(3, 1), layout, 3)
    torch.testing.assert_close(pooled.keys, torch.tensor([[1.0], [0.0], [7.0], [10.0]]))
    one, other = [(0, 0)] * 2 + [(0, 1)] * 3, [(2, 2)] * 2 + [(2, 3)] * 3 + [(2, 4)] * 2
    assert ends(pooled.ranges) == [*one, (1, 1), *other]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fp32_pools_once_rounded(layout: str) -> None:
    made = LAYOUTS[layout]()
    given = operands(made, 4, torch.bfloat16)
    wide = given.map(Tensor.double)
    pooled = pooled_of(given, made)
    assert pooled.keys.dtype == torch.bfloat16
    first_key = {start // 4 + j: start + 4 * j for start, stop in ends(made.keys) for j in range((stop - start) // 4)}
    assert pooled.keys.shape[0] == made.num_keys // 4
    for slot, key in enumerate(pooled.keys):
        exact = naive_pool(wide, first_key[slot]) if slot in first_key else torch.zeros(8, dtype=torch.float64)
        torch.testing.assert_close(key.double(), exact, rtol=2**-8, atol=1e-6)


def hf_pool(k: Tensor, gate: Tensor, ape: Tensor) -> Tensor:
    """One pool [P, D] of glm5_next: softmax in fp32, rounded to the keys' dtype, as are the products and their sum."""
    logits = gate.float() + ape.float()
    weight = (logits - logits.amax(0)).exp()
    share = (weight / weight.sum(0)).to(k.dtype)
    return torch.stack([share[j] * k[j] for j in range(len(k))]).float().sum(0).to(k.dtype)


def test_hf_rounds_to_the_dtype_of_the_keys() -> None:
    layout = Layout.packed([200, 101])
    given = operands(layout, 4, torch.bfloat16)
    pooled, ours = pooled_of(given, layout, "hf"), pooled_of(given, layout)
    slots = [(slot, 4 * slot) for slot in range(75)]  # the second document starts on the grid of pools
    expected = torch.stack([hf_pool(given.k[s : s + 4], given.gate[s : s + 4], given.ape) for _, s in slots])
    assert pooled.keys.equal(expected)
    assert not ours.keys.equal(expected)


def hf_selection(given: Operands, mask: Tensor, top_k: int, tail: bool) -> list[list[int]]:
    """glm5_next's indexer on a padded batch, a query at a time. given: folded [B * S, ...], w not scaled by D^-1/2."""
    size, (batch, width) = given.ape.shape[0], mask.shape
    selected = []
    for b in range(batch):
        q, k, gate, w = (x[b * width : (b + 1) * width] for x in given[:4])
        real = mask[b].nonzero().flatten().tolist()
        first = real[0] if real else width
        starts = [s for s in range(first, width - size + 1, size) if mask[b, s : s + size].all()]
        pools = [hf_pool(k[s : s + size], gate[s : s + size], given.ape).float() for s in starts]
        for row in range(width):
            if not mask[b, row]:
                selected.append([])
                continue
            seen = [i for i, s in enumerate(starts) if s + size - 1 <= row]
            scores = [-float(w[row].float() @ (q[row].float() @ pools[i] * q.shape[-1] ** -0.5).relu()) for i in seen]
            best = [i for _, i in sorted(zip(scores, seen, strict=True))][: top_k // size]
            visible = sum(first <= s <= row for s in real)
            rest = range(first + visible - visible % size, first + visible) if tail else ()
            chosen = sorted([*(starts[i] + j for i in best for j in range(size)), *rest])
            selected.append([b * width + key for key in chosen])
    return selected


def padded_batch() -> Tensor:
    mask = torch.ones(4, 41, dtype=torch.bool)
    mask[1, :7] = False
    mask[2, 30:] = False
    mask[3] = False
    return mask


@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hf_selects_as_its_transcription(dtype: torch.dtype, tail: bool) -> None:
    mask = padded_batch()
    layout = Layout.from_attention_mask(mask)
    given = operands(layout, 4, dtype)._replace(w=operands(layout, 4, torch.float32).w)
    got = pick(given, layout, 12, tail=tail, arithmetic="hf")
    assert listed(got) == hf_selection(given, mask, 12, tail)


def test_transcription_sees_the_other_arithmetic() -> None:
    layout = Layout.from_attention_mask(torch.ones(2, 200))
    given = operands(layout, 4, torch.bfloat16)
    assert listed(pick(given, layout, 12)) != hf_selection(given, torch.ones(2, 200, dtype=torch.bool), 12, True)


@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize(
    ("dtype", "arithmetic"), [(torch.float32, "hf"), (torch.float32, "fp32"), (torch.bfloat16, "hf")]
)
def test_no_row_differs_from_transformers(dtype: torch.dtype, arithmetic: str, tail: bool) -> None:
    """With 32 heads no score is exactly 0, so that ties, which transformers breaks in any order, do not occur."""
    module = pytest.importorskip("transformers.models.glm5_next.modeling_glm5_next", reason="needs the hf extra")
    sizes = {"hidden_size": 64, "q_lora_rank": 24, "index_n_heads": 32, "index_head_dim": 32, "qk_rope_head_dim": 0}
    pools = {"index_topk": 12, "index_kpool": 4, "index_kpool_always_select_tail": tail}
    theirs = module.Glm5NextTextIndexer(SimpleNamespace(**sizes, **pools), 0)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    theirs = theirs.to(dtype)
    mask = padded_batch()
    x, latent = torch.randn(*mask.shape, 64).to(dtype), torch.randn(*mask.shape, 24).to(dtype)
    index = theirs(x, latent, mask, None)
    first = torch.arange(len(mask), dtype=torch.int32)[:, None, None] * mask.shape[1]
    expected = Selection.from_index(torch.where(index >= 0, index + first, -1).flatten(0, 1))

    with torch.no_grad():
        x, latent = x.flatten(0, 1), latent.flatten(0, 1)
        q, k = theirs.wq_b(latent).unflatten(-1, (32, 32)), theirs.k_norm(theirs.wk(x))
        gate, w = F.linear(x, theirs.index_kpool_compress_gate), theirs.weights_proj(x).float() * 32**-0.5
    w = w if arithmetic == "hf" else w * 32**-0.5
    given = Operands(q, k, gate, w, theirs.index_kpool_compress_ape)
    got = pick(given, Layout.from_attention_mask(mask), 12, tail=tail, arithmetic=arithmetic)
    assert got.width == expected.width
    assert int((got.index != expected.index).any(1).sum()) == 0
    assert int(got.length.max()) == got.width


@pytest.mark.parametrize("arithmetic", ["fp32", "hf"])
def test_left_padding_moves_pools_along(arithmetic: str) -> None:
    alone, padded = Layout.packed([45]), Layout.packed([45], padded=[50], side="left")
    given = operands(padded, 4, torch.float32)
    inside = given.of(slice(5, 50))
    got, expected = pick(given, padded, 12, arithmetic=arithmetic), pick(inside, alone, 12, arithmetic=arithmetic)
    assert got.length[5:].equal(expected.length)
    assert got.index[5:].equal(torch.where(expected.index < 0, -1, expected.index + 5))
    assert not got.length[:5].any()
    on_the_grid = pick(given.map(lambda x: x.nan_to_num(0)), Layout.causal(50), 12, arithmetic=arithmetic)
    assert not on_the_grid.index[5:].equal(got.index[5:]), "pools counted from row 0 should differ"


@pytest.mark.parametrize("arithmetic", ["fp32", "hf"])
def test_a_document_is_pooled_alike_alone_and_in_company(arithmetic: str) -> None:
    lengths = [1500, 0, 3, 700, 1, 130]
    layout = Layout.packed(lengths)
    given = operands(layout, 4, torch.float32)
    whole, pools, first = pick(given, layout, 64, arithmetic=arithmetic), pooled_of(given, layout, arithmetic), 0
    for length in lengths:
        rows = slice(first, first + length)
        part, own = given.of(rows), Layout.packed([length])
        alone = pick(part, own, 64, arithmetic=arithmetic)
        assert whole.index[rows].equal(torch.where(alone.index < 0, -1, alone.index + first))
        slots = slice(first // 4, first // 4 + length // 4)
        assert pools.keys[slots].equal(pooled_of(part, own, arithmetic).keys[: length // 4])
        first += length


@pytest.mark.parametrize("arithmetic", ["fp32", "hf"])
def test_blocks_strides_and_threads_keep_bits(arithmetic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = LAYOUTS["packed"]()
    given = operands(layout, 4, torch.float32)
    keys, picked = pooled_of(given, layout, arithmetic).keys, pick(given, layout, 12, arithmetic=arithmetic)
    other = given.map(strided)
    assert pooled_of(other, layout, arithmetic).keys.equal(keys)
    assert pick(other, layout, 12, arithmetic=arithmetic).index.equal(picked.index)
    monkeypatch.setattr("dsattn.ops.blocks._CPU_BYTES", 1)
    assert pooled_of(given, layout, arithmetic).keys.equal(keys)
    assert pick(given, layout, 12, arithmetic=arithmetic).index.equal(picked.index)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert pooled_of(given, layout, arithmetic).keys.equal(keys)
        assert pick(given, layout, 12, arithmetic=arithmetic).index.equal(picked.index)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("cp_size", [2, 4])
def test_context_parallel_gates_follow_the_keys(cp_size: int) -> None:
    """Each rank gathers keys and gates and puts both in global order; then it selects what one rank would."""
    lengths, padded = [37, 0, 90, 5], [40, 8, 96, 8]
    whole = Layout.packed(lengths, padded=padded)
    given = operands(whole, 4, torch.float32)
    expected = pick(given, whole, 12)
    ranks = [Layout.packed(lengths, padded=padded, cp_size=cp_size, cp_rank=rank) for rank in range(cp_size)]
    gathered_k, gathered_gate = (torch.cat([x[rank.rows] for rank in ranks]) for x in (given.k, given.gate))
    astray = False
    for rank in ranks:
        k, gate = gathered_k[rank.key_order], gathered_gate[rank.key_order]
        local = Operands(given.q[rank.rows], k, gate, given.w[rank.rows], given.ape)
        assert pick(local, rank, 12).index.equal(expected.index[rank.rows])
        unordered = pick(local._replace(gate=gathered_gate), rank, 12)
        astray |= not unordered.index.equal(expected.index[rank.rows])
    assert astray, "gates in the order of the ranks should select other keys"


def test_sequence_shards_and_decoding_select_what_the_whole_does() -> None:
    layout = Layout.packed([29, 31])
    given = operands(layout, 4, torch.float32)
    expected = pick(given, layout, 12)
    for rank in range(4):
        shard = layout.shard_rows(rank, 4)
        local = given._replace(q=given.q[shard.rows], w=given.w[shard.rows])
        assert pick(local, shard, 12).index.equal(expected.index[shard.rows])
    one = operands(Layout.causal(70), 4, torch.float32)
    last = one._replace(q=one.q[67:], w=one.w[67:])
    assert pick(last, Layout.continuation(67, 3), 12).index.equal(pick(one, Layout.causal(70), 12).index[67:])


def test_the_tail_is_always_read_and_the_own_pool_is_not() -> None:
    layout = Layout.causal(40)
    with_tail, without = (pick(operands(layout, 4), layout, 8, tail=tail) for tail in (True, False))
    own = torch.arange(40)
    reads_itself = (with_tail.index == own[:, None]).any(1)
    assert reads_itself[own % 4 != 3].all()
    assert not reads_itself.all(), "a row that completes a pool may pass its own pool over"
    assert without.length[:3].tolist() == [0, 0, 0]
    assert with_tail.length[:3].tolist() == [1, 2, 3]
    for both, tail_free in zip(listed(with_tail), listed(without), strict=True):
        assert both[: len(tail_free)] == tail_free


@pytest.mark.parametrize("layout", ["causal", "padded"])
def test_no_certificate_without_the_tail(layout: str) -> None:
    made = LAYOUTS[layout]()
    given = operands(made, 4)
    assert not pooled_of(given, made).ranges.every_row_has_a_key
    assert pick(given, made, 12).every_row_has_a_key == made.every_row_has_a_key == (layout == "causal")
    assert not pick(given, made, 12, tail=False).every_row_has_a_key


def test_more_pools_than_there_are() -> None:
    layout = Layout.packed([9, 6, 2])
    got = pick(operands(layout, 4), layout, 400)
    assert got.width == 403
    assert listed(got)[:9] == [list(range(row + 1)) for row in range(9)]


@pytest.mark.parametrize("pool_size", [4, 50])
def test_without_rows_or_without_a_complete_pool(pool_size: int) -> None:
    whole = Layout.causal(30)
    given = operands(whole, pool_size)
    nobody = Layout.continuation(30, 0)
    none = pick(given._replace(q=given.q[:0], w=given.w[:0]), nobody, pool_size)
    assert (tuple(none.index.shape), tuple(none.length.shape)) == ((0, 2 * pool_size - 1), (0,))
    if pool_size == 50:
        got = pick(given, whole, pool_size)
        assert listed(got) == [list(range(row + 1)) for row in range(30)], "what there is is all tail"
        assert not pick(given, whole, pool_size, tail=False).length.any()


def test_pools_with_nan_are_passed_over() -> None:
    layout = Layout.causal(24)
    given = operands(layout, 4)
    given.k[5], given.gate[9, 2] = torch.nan, torch.nan
    last = listed(pick(given, layout, 16))[-1]
    assert last == [*range(4), *range(12, 24)]
    given.k[:] = torch.nan
    everything = pick(given, layout, 16)
    assert listed(everything) == [list(range(row - row % 4, row + 1)) if row % 4 != 3 else [] for row in range(24)]


def test_hf_reads_a_nan_gate_as_no_weight() -> None:
    layout = Layout.causal(8)
    given = operands(layout, 4, torch.float32)
    given.gate[2] = torch.nan
    assert not pooled_of(given, layout, "hf").keys[0].any()
    assert pooled_of(given, layout).keys[0].isnan().all()


def test_no_gradient() -> None:
    layout = Layout.causal(20)
    given = operands(layout, 4).map(lambda x: x.requires_grad_())
    for arithmetic in ("fp32", "hf"):
        assert not pooled_of(given, layout, arithmetic).keys.requires_grad
        picked = pick(given, layout, 8, arithmetic=arithmetic)
        assert not picked.index.requires_grad


def test_select_topk_takes_scores_of_pools() -> None:
    layout = Layout.packed([13, 10])
    pooled = pooled_of(operands(layout, 4), layout)
    scores = torch.arange(5.0).expand(23, 5)
    got = expand_pools(select_topk(scores, pooled.ranges, 1), pooled, layout)
    assert listed(got)[12] == [8, 9, 10, 11, 12]
    assert listed(got)[22] == [17, 18, 19, 20, 21, 22]


def test_a_window_is_refused() -> None:
    layout = Layout.causal(12)
    window = KeyRange((layout.keys.stop - 6).clamp(min=0), layout.keys.stop)
    sliding = Layout(**{**vars(layout), "keys": window})
    with pytest.raises(
        InputError, match=r"row 1 reads keys 0 \.\. 1 and another row starts among them.*start together"
    ):
        pooled_of(operands(layout, 4), sliding)


def test_ranges_outside_the_keys_are_cut() -> None:
    layout = Layout.causal(12)
    given = operands(layout, 4)
    every = KeyRange(torch.full_like(layout.keys.start, -3), torch.full_like(layout.keys.stop, 40))
    loose = Layout(**{**vars(layout), "keys": every})
    cut = KeyRange(every.start.clamp(min=0), every.stop.clamp(max=12))
    assert listed(pick(given, loose, 8)) == naive_selection(given, cut, 8, True)
    swapped = Layout(**{**vars(layout), "keys": KeyRange(layout.keys.stop, layout.keys.start)})
    assert not pick(given, swapped, 8).length.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pool_size": 0}, "pool_size=0 must be an integer of at least 1"),
        ({"pool_size": 2.0}, "pool_size=2.0 must be an integer"),
        ({"arithmetic": "bf16"}, "arithmetic='bf16' must be one of fp32, hf"),
        ({"k": torch.zeros(9, 8)}, r"k must be \[10, D\] to meet the layout, got \[9, 8\]"),
        ({"gate": torch.zeros(10, 1)}, r"gate must be \[10, 8\], a logit for each number of k, got \[10, 1\]"),
        ({"ape": torch.zeros(3, 8)}, r"ape must be \[4, 8\] for pool_size=4, got \[3, 8\]"),
        ({"gate": torch.zeros(10, 8, dtype=torch.int64)}, "gate must be floating point"),
    ],
)
def test_refuses(change: dict[str, Any], message: str) -> None:
    given = {"k": torch.zeros(10, 8), "gate": torch.zeros(10, 8), "ape": torch.zeros(4, 8), "pool_size": 4}
    with pytest.raises(InputError, match=message):
        pool_keys(**{**given, "layout": Layout.causal(10), **change})


def test_expand_refuses_what_is_not_of_its_pools() -> None:
    layout, other = Layout.causal(12), Layout.causal(9)
    given = operands(layout, 4)
    pooled = pooled_of(given, layout)
    chosen = select_keys(given.q, pooled.keys, given.w, pooled.ranges, 2)
    with pytest.raises(InputError, match="selection has 12 rows, pooled 12, layout 9; expand with the layout"):
        expand_pools(chosen, pooled, other)
    keys = select_keys(given.q, given.k, given.w, layout.keys, 2)
    with pytest.raises(IndexError, match=r"holds pool \d+, but there are 3 slots of pools"):
        expand_pools(keys, pooled, layout)


def test_hf_runs_as_asked_or_raises() -> None:
    layout = Layout.causal(12)
    given = operands(layout, 4)
    pooled = pooled_of(given, layout, "hf")
    assert select_pools_hf(given.q, pooled, given.w, 2, backend="reference").num_rows == 12
    with pytest.raises(BackendUnavailable, match="no backend named 'triton'"):
        select_pools_hf(given.q, pooled, given.w, 2, backend="triton")
    with pytest.raises(InputError, match="top_k=0 must be an integer of at least 1"):
        select_pools_hf(given.q, pooled, given.w, 0)


def e4m3_grid() -> Tensor:
    """Every finite value of E4M3 from its definition: 4 exponent bits with bias 7, 3 mantissa bits, 448 the largest."""
    normal = [2.0 ** (e - 7) * (1 + m / 8) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)]
    positive = [2.0**-6 * m / 8 for m in range(8)] + normal
    return torch.tensor(sorted({*positive, *(-value for value in positive)}), dtype=torch.float64)


def test_e4m3_is_the_nearest_value_of_its_grid() -> None:
    x = torch.randn(50, 16) * torch.logspace(-6, 6, 50)[:, None]
    x[0] = 0
    x[1] = 448.0 * 2**-10  # its own scale, exactly
    rounded = round_to_e4m3(x)
    assert rounded.dtype == torch.bfloat16
    for row, got in zip(x.double(), rounded.double(), strict=True):
        scale = 2.0 ** float(torch.ceil(torch.log2(row.abs().max().clamp(min=float(torch.tensor(1e-4))) / 448)))
        grid = e4m3_grid() * scale
        assert torch.isin(got, grid).all()
        nearest = (row[:, None] - grid).abs().amin(1)
        torch.testing.assert_close((row - got).abs(), nearest, rtol=0, atol=0)
    assert round_to_e4m3(x.bfloat16()).equal(round_to_e4m3(x.bfloat16().float()))


def test_e4m3_of_what_is_not_finite_is_nan() -> None:
    x = torch.ones(3, 4)
    x[0, 1], x[1, 1] = torch.nan, torch.inf
    assert round_to_e4m3(x).isnan().all(1).tolist() == [True, True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(dtype: torch.dtype) -> None:
    layout = Layout.packed([9, 0, 6])
    given = operands(layout, 4, dtype)
    ends = (layout.keys.start, layout.keys.stop)
    torch.library.opcheck(torch.ops.dsattn.pool_keys.default, (given.k, given.gate, given.ape, *ends, False))
    pooled = pooled_of(given, layout)
    pools = (pooled.ranges.start, pooled.ranges.stop)
    torch.library.opcheck(torch.ops.dsattn.select_pools_hf.default, (given.q, pooled.keys, given.w, *pools, 2, "auto"))
    chosen = select_keys(given.q, pooled.keys, given.w, pooled.ranges, 2)
    torch.library.opcheck(torch.ops.dsattn.expand_pools.default, (chosen.index, chosen.length, *ends, 15, 4, True))


@pytest.mark.parametrize("arithmetic", ["fp32", "hf"])
def test_compiles_whole(arithmetic: str) -> None:
    layout = LAYOUTS["packed"]()
    given = operands(layout, 4, torch.float32)

    def run(given: Operands) -> Tensor:
        return pick(given, layout, 12, arithmetic=arithmetic).index

    assert torch.compile(run, fullgraph=True, backend="aot_eager")(given).equal(run(given))


def test_autocast_does_not_reach_inside() -> None:
    layout = Layout.causal(60)
    given = operands(layout, 4, torch.float32)
    for arithmetic in ("fp32", "hf"):
        plain = pick(given, layout, 12, arithmetic=arithmetic).index
        with torch.autocast("cpu", torch.bfloat16):
            assert pick(given, layout, 12, arithmetic=arithmetic).index.equal(plain)


def test_a_refreshed_layout_pools_anew() -> None:
    layout, other = Layout.packed([11, 13, 6]), Layout.packed([3, 20, 7])
    given = operands(layout, 4)
    stale = pick(given, layout, 8).index
    layout.copy_(other)
    assert pick(given, layout, 8).index.equal(pick(given, other, 8).index)
    assert not stale.equal(pick(given, other, 8).index)


@pytest.mark.gpu
@pytest.mark.parametrize("arithmetic", ["fp32", "hf"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_the_cpu(layout: str, arithmetic: str) -> None:
    made = LAYOUTS[layout]()
    given = operands(made, 4, torch.float64)
    expected = pick(given, made, 12, arithmetic=arithmetic)
    got = pick(given.map(lambda x: x.to(GPU)), made.to(GPU), 12, arithmetic=arithmetic)
    assert got.index.cpu().equal(expected.index)
    assert got.length.cpu().equal(expected.length)


@pytest.mark.gpu
def test_bits_do_not_depend_on_company_on_a_gpu() -> None:
    layout = Layout.packed([5000, 3, 1200, 70]).to(GPU)
    given = operands(layout.to("cpu"), 16, torch.bfloat16).map(lambda x: x.to(GPU))
    torch.use_deterministic_algorithms(True)
    alone = pooled_of(given.of(slice(5003, 6203)), Layout.packed([1200]).to(GPU)).keys
    assert pooled_of(given, layout).keys[5003 // 16 : 5003 // 16 + 75].equal(alone)


@pytest.mark.gpu
@pytest.mark.parametrize("arithmetic", ["fp32", "hf"])
def test_replays_on_another_packing(arithmetic: str) -> None:
    """Captured on one packing, the graph follows the layout that is refreshed in place."""
    layout, other = Layout.packed([300, 212]).to(GPU), Layout.packed([100, 401, 11]).to(GPU)
    given = operands(Layout.causal(512), 4, torch.float32).map(lambda x: x.to(GPU))

    def run() -> Tensor:
        pooled = pooled_of(given, layout, arithmetic)
        chosen = select_topk(given.k[:, :1].expand(-1, 128).contiguous(), pooled.ranges, 8)
        if arithmetic == "hf":
            chosen = select_pools_hf(given.q, pooled, given.w, 8)
        return expand_pools(chosen, pooled, layout).index

    stale = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    layout.copy_(other)
    graph.replay()
    assert captured.equal(run())
    assert not captured.equal(stale)


@pytest.mark.gpu
def test_strict_forbids_hf_scores_on_a_gpu() -> None:
    layout = Layout.causal(12).to(GPU)
    given = operands(layout.to("cpu"), 4).map(lambda x: x.to(GPU))
    with settings(strict=True), pytest.raises(BackendUnavailable, match="strict forbids the reference on cuda"):
        select_pools_hf(given.q, pooled_of(given, layout, "hf"), given.w, 2)
