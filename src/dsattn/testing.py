"""Cases, oracles and judges for every implementation of an operation: tests, benchmarks and `doctor` share them.

A case is a layout with random operands whose unread memory is NaN. An oracle is the formula over whole matrices, for
small sizes, differentiable by autograd. A judge says what is wrong with a result, and nothing where it is right.
Letters: T query rows, S keys, H heads, G groups, C key width, V value width, H_I/D indexer heads/width, K kept keys.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from dsattn.errors import InputError
from dsattn.keys import KeyRange, Layout
from dsattn.selection import Selection

LAYOUTS: dict[str, Callable[[], Layout]] = {
    "causal": lambda: Layout.causal(97),
    "batch": lambda: Layout.causal(31, batch=3),
    # Empty documents, documents of one token, and an edge on the 128 rows of the reference's tiles.
    "packed": lambda: Layout.packed([5, 0, 1, 121, 1, 0, 60, 7]),
    # Edges on the 512 keys of those tiles too.
    "tile_edge": lambda: Layout.packed([128, 384, 6]),
    "padded": lambda: Layout.packed([3, 0, 11, 1, 40], padded=[4, 3, 16, 1, 48], total=80),
    "left_padded": lambda: Layout.packed([3, 0, 11, 1, 40], padded=[4, 3, 16, 1, 48], total=80, side="left"),
    "context_parallel": lambda: Layout.packed(
        [13, 0, 16, 1, 37], padded=[16, 4, 16, 4, 40], total=84, cp_size=2, cp_rank=1
    ),
    "decode": lambda: Layout.continuation(70, 3),
    "one_token": lambda: Layout.causal(1),
    "only_padding": lambda: Layout.packed([0, 0], padded=[4, 0], total=6),
    "nothing": lambda: Layout.packed([]),
}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What a case has besides rows and keys: H, G, C, V, H_I, D, K."""

    heads: int = 4
    groups: int = 2
    width: int = 24
    value_dim: int = 16
    index_heads: int = 3
    index_width: int = 8
    top_k: int = 7


@dataclass(frozen=True, kw_only=True)
class Case:
    """Operands of all operations over one layout.

    q: [T, H, C]. kv: [S, C], latents whose leading `sizes.value_dim` channels are values. k: [S, G, C], v: [S, G, V].
    q_i: [T, H_I, D], k_i: [S, D], w: [T, H_I] of the indexer. sink: [H] logits. grad_out: [T, H, V].
    scale: of the attention's logits.
    """

    layout: Layout
    sizes: Sizes
    q: Tensor
    kv: Tensor
    k: Tensor
    v: Tensor
    q_i: Tensor
    k_i: Tensor
    w: Tensor
    sink: Tensor
    grad_out: Tensor
    scale: float

    @property
    def keys(self) -> KeyRange:
        """The layout's ranges."""
        return self.layout.keys

    def map(self, change: Callable[[Tensor], Tensor]) -> "Case":
        """The same case with every operand changed: another dtype, other strides, fresh leaves of autograd."""
        return replace(self, **{f.name: change(getattr(self, f.name)) for f in fields(self) if f.type is Tensor})


def make_case(
    layout: str | Layout,
    sizes: Sizes | None = None,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    poison: bool = True,
) -> Case:
    """Normally distributed operands over a layout, or over one of LAYOUTS by name. The same numbers on every device.

    poison: rows that may read nothing and keys that nobody may read are NaN throughout.
    """
    if isinstance(layout, str):
        if layout not in LAYOUTS:
            raise InputError(f"layout={layout!r} must be one of {', '.join(LAYOUTS)}, or a Layout")
        layout = LAYOUTS[layout]()
    sizes = sizes or Sizes()
    host = layout.to("cpu")
    visible = host.keys.mask(host.num_keys)
    reads, read = visible.any(1), visible.any(0)
    generator = torch.Generator().manual_seed(seed)

    def normal(live: Tensor | None, *shape: int) -> Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        if poison and live is not None:
            values[~live] = torch.nan
        return values.to(device, dtype)

    rows, keys = visible.shape
    return Case(
        layout=layout.to(device),
        sizes=sizes,
        q=normal(reads, rows, sizes.heads, sizes.width),
        kv=normal(read, keys, sizes.width),
        k=normal(read, keys, sizes.groups, sizes.width),
        v=normal(read, keys, sizes.groups, sizes.value_dim),
        q_i=normal(reads, rows, sizes.index_heads, sizes.index_width),
        k_i=normal(read, keys, sizes.index_width),
        w=normal(reads, rows, sizes.index_heads),
        sink=normal(None, sizes.heads),
        grad_out=normal(reads, rows, sizes.heads, sizes.value_dim),
        scale=sizes.width**-0.5,
    )


def random_selection(
    keys: KeyRange, num_keys: int, top_k: int, *, seed: int = 0, sparse_rows: bool = True
) -> Selection:
    """`top_k` random keys of each row's range, or all where there are fewer.

    sparse_rows: every fifth row keeps half of its keys and every seventh none, as rows of NaN scores would.
    """
    generator = torch.Generator().manual_seed(seed)
    visible = keys.to("cpu").mask(num_keys)
    order = torch.rand(visible.shape, generator=generator).masked_fill(~visible, -1).sort(dim=1, descending=True)
    index = torch.full((keys.num_rows, top_k), -1, dtype=torch.int64)
    kept = min(top_k, num_keys)
    index[:, :kept] = torch.where(order.values >= 0, order.indices, -1)[:, :kept]
    if sparse_rows:
        index[::5, : top_k // 2] = -1
        index[::7] = -1
    selection = Selection.from_index(index, every_row_has_a_key=keys.every_row_has_a_key)
    return selection.to(keys.start.device)


def strided(x: Tensor) -> Tensor:
    """The same values, dense nowhere: every other element of a buffer whose rest is NaN, with its axes turned round."""
    axes = tuple(reversed(range(x.dim())))
    buffer = x.new_full((*(x.shape[axis] for axis in axes), 2), torch.nan)
    view = buffer[..., 0].permute(axes)
    return view.copy_(x)


def _near_equal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    low = torch.randint(0, 2**10, (rows, columns), generator=generator, dtype=torch.int32)
    return (low + 0x3F900000).view(torch.float32)  # about 1.125, telling apart in the last 10 bits only


def _from(values: list[float], rows: int, columns: int, generator: torch.Generator) -> Tensor:
    return torch.tensor(values)[torch.randint(0, len(values), (rows, columns), generator=generator)]


SCORES: dict[str, Callable[[int, int, torch.Generator], Tensor]] = {
    "normal": lambda rows, columns, generator: torch.randn(rows, columns, generator=generator),
    "relu_plateau": lambda rows, columns, generator: torch.randn(rows, columns, generator=generator).sub(1.5).relu(),
    "ties": functools.partial(_from, [0.0, 1.0, 2.0]),
    "signed_zeros": functools.partial(_from, [0.0, -0.0]),
    "all_equal": functools.partial(_from, [3.0]),
    "infinities": functools.partial(_from, [torch.inf, -torch.inf, 1.0, -1.0]),
    "nan": functools.partial(_from, [torch.nan, 1.0, 2.0, -torch.inf]),
    "only_nan": functools.partial(_from, [torch.nan]),
    "only_minus_infinity": functools.partial(_from, [-torch.inf]),
    "beyond_half": functools.partial(_from, [65504.0, 65505.0, 1e5, -65505.0, 3e38, -3e38]),
    "subnormal": functools.partial(_from, [1e-45, -1e-45, 0.0, 3e-45]),
    "near_equal": _near_equal,
}


def hostile_scores(name: str, rows: int, columns: int, *, seed: int = 0) -> Tensor:
    """[rows, columns] fp32 scores that break careless rankings; `name` is one of SCORES."""
    return SCORES[name](rows, columns, torch.Generator().manual_seed(seed))


def naive_ranking(scores: Tensor, keys: KeyRange, top_k: int) -> tuple[list[list[int]], list[int]]:
    """(index, length) by sorting Python numbers: the ranking rule in two lines. scores: [T, S]."""
    index, length = [], []
    ranges = zip(keys.start.tolist(), keys.stop.tolist(), strict=True)
    for row, (start, stop) in zip(scores.double().tolist(), ranges, strict=True):
        visible = range(max(start, 0), min(stop, len(row)))
        candidates = [key for key in visible if row[key] > -torch.inf]  # neither -inf nor NaN is above -inf
        best = sorted(candidates, key=lambda key: (-row[key], key))[:top_k]
        index.append(sorted(best) + [-1] * (top_k - len(best)))
        length.append(len(best))
    return index, length


def naive_scores(q: Tensor, k: Tensor, w: Tensor, keys: KeyRange, *, relu: bool = True) -> Tensor:
    """The indexer's scores [T, S] in the operands' dtype, -inf outside the ranges."""
    visible = keys.mask(k.shape[0])
    q, w, k = _without(q, ~visible.any(1)), _without(w, ~visible.any(1)), _without(k, ~visible.any(0))
    dot = torch.einsum("thd,sd->ths", q, k)
    scores = torch.einsum("ths,th->ts", dot.relu() if relu else dot, w)
    return scores.masked_fill(~visible, -torch.inf)


def naive_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *, scale: float, sink: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(out [T, H, V], lse [T, H]) of a masked softmax over whole matrices, in the operands' dtype.

    q: [T, H, C], k: [S, G, C], v: [S, G, V], mask: [T, S] bool, True where the row attends. Rows that attend to nothing
    give 0 and -inf. For MLA: k = kv[:, None], v = k[..., :value_dim].
    """
    q, k, v = _without(q, ~mask.any(1)), _without(k, ~mask.any(0)), _without(v, ~mask.any(0))
    share = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
    logits = torch.einsum("thc,shc->ths", q, k) * scale
    logits = logits.masked_fill(~mask[:, None], -torch.inf)
    lse = logits.detach().logsumexp(-1)
    top = logits if sink is None else torch.cat([logits, sink.to(q.dtype)[None, :, None].expand(len(q), -1, 1)], -1)
    empty = ~mask.any(1)[:, None, None]
    p = top.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)[..., : k.shape[0]]
    return torch.einsum("ths,shv->thv", p, v), lse


def naive_kl(scores: Tensor, q: Tensor, k: Tensor, mask: Tensor, *, scale: float, divisor: float) -> Tensor:
    """The indexer's loss: sum over rows of KL(target || softmax(scores over mask)) / divisor.

    scores: [T, S], q: [T, H, C], k: [S, G, C], mask: [T, S] bool, of selected or visible keys with scores above -inf.
    The target is the mean over heads of the attention's probabilities, no gradient.
    """
    identity = torch.eye(k.shape[0], dtype=k.dtype, device=k.device)[:, None].expand(-1, k.shape[1], -1)
    target = naive_attention(q.detach(), k.detach(), identity, mask, scale=scale)[0].mean(1)
    row = mask.any(1)
    scores = torch.where(mask, scores, -torch.inf)[row]
    log_share = scores.log_softmax(-1).masked_fill(~mask[row], 0.0)
    return (torch.special.xlogy(target[row], target[row]) - target[row] * log_share).sum() / divisor


def _without(x: Tensor, dead: Tensor) -> Tensor:
    return x.masked_fill(dead.view(-1, *[1] * (x.dim() - 1)), 0.0)


def error_budget(got: Tensor, exact: Tensor, low_precision: Tensor, *, factor: float = 2.0) -> list[str]:
    """What is wrong with `got`: its largest and its mean error may be `factor` times those of plain low precision.

    exact: the oracle in fp64. low_precision: the same oracle in got's dtype. To the largest error is added one rounding
    of the largest value, so that an oracle that happens to be exact leaves room for rounding; to the mean nothing.
    """
    if got.shape != exact.shape:
        return [f"shape {list(got.shape)}, expected {list(exact.shape)}"]
    if not got.isfinite().all():
        return [f"{int((~got.isfinite()).sum())} of {got.numel()} values are not finite"]
    if not got.numel():
        return []
    ours, plain = (got.double() - exact).abs(), (low_precision.double() - exact).abs()
    floor = torch.finfo(got.dtype).eps * float(exact.abs().max())
    problems = []
    for name, error, limit in (
        ("largest", float(ours.max()), factor * (float(plain.max()) + floor)),
        ("mean", float(ours.mean()), factor * float(plain.mean())),
    ):
        if error > limit:
            problems.append(f"{name} error {error:.2e} is above {limit:.2e}")
    return problems


def tensor_similarity(got: Tensor, exact: Tensor) -> float:
    """2 <a, b> / (<a, a> + <b, b>) in fp64: 1 for equal tensors (two of zeros too), NaN where a value is NaN."""
    a, b = got.double().flatten(), exact.double().flatten()
    norms = float(a @ a + b @ b)
    return 1.0 if norms == 0 else float(2 * (a @ b)) / norms
