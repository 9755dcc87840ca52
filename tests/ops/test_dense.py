"""Dense attention against the formula over whole matrices, and against everything that must not reach it."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dsattn.errors import BackendUnavailable, InputError
from dsattn.keys import KeyRange, Layout
from dsattn.ops import blocks, dense, dense_gqa, dense_mla, ranged, sparse_gqa, sparse_mla
from dsattn.selection import Selection
from dsattn.testing import LAYOUTS, Case, Sizes, error_budget, make_case, naive_attention, strided

KINDS = ("mla", "gqa")
OPERANDS = {"mla": ("q", "kv"), "gqa": ("q", "k", "v")}
TINY = Sizes(heads=2, groups=1, width=4, value_dim=3)


@dataclass(frozen=True)
class Run:
    """What one forward and backward gave; grads by operand."""

    out: Tensor
    lse: Tensor
    grads: dict[str, Tensor]


def leaves(kind: str, case: Case, *, sink: bool = False) -> dict[str, Tensor]:
    names = OPERANDS[kind] + (("sink",) if sink else ())
    return {name: getattr(case, name).detach().clone().requires_grad_() for name in names}


def dense_attention(kind: str, case: Case, keys: KeyRange, **operands: Tensor) -> tuple[Tensor, Tensor]:
    if kind == "mla":
        return dense_mla(**operands, keys=keys, scale=case.scale, value_dim=case.sizes.value_dim)
    return dense_gqa(**operands, keys=keys, scale=case.scale)


def naive(kind: str, case: Case, keys: KeyRange, **operands: Tensor) -> tuple[Tensor, Tensor]:
    q, sink = operands["q"], operands.get("sink")
    k = operands["kv"][:, None] if kind == "mla" else operands["k"]
    v = k[..., : case.sizes.value_dim] if kind == "mla" else operands["v"]
    return naive_attention(q, k, v, keys.mask(k.shape[0]), scale=case.scale, sink=sink)


def run(attention, kind: str, case: Case, *, keys: KeyRange | None = None, sink: bool = False) -> Run:
    operands = leaves(kind, case, sink=sink)
    out, lse = attention(kind, case, case.keys if keys is None else keys, **operands)
    grad = case.grad_out.nan_to_num(0.0) if attention is naive else case.grad_out  # autograd would meet 0 * NaN
    out.backward(grad)
    return Run(out.detach(), lse.detach(), {name: x.grad for name, x in operands.items() if x.grad is not None})


def pairs(a: Run, b: Run) -> Iterator[tuple[str, Tensor, Tensor]]:
    assert a.grads.keys() == b.grads.keys()
    yield "out", a.out, b.out
    yield "lse", a.lse, b.lse
    yield from ((f"d{name}", a.grads[name], b.grads[name]) for name in a.grads)


def assert_runs_close(got: Run, want: Run, rtol: float) -> None:
    for name, a, b in pairs(got, want):
        size = max(1.0, float(b.nan_to_num(0, 0, 0).abs().max())) if b.numel() else 0.0
        torch.testing.assert_close(a.to(b.dtype), b, rtol=rtol, atol=rtol * size, msg=lambda m, n=name: f"{n}: {m}")


def assert_runs_equal(got: Run, want: Run) -> None:
    for name, a, b in pairs(got, want):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("sink", [False, True], ids=["", "sink"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_whole_matrices(kind: str, layout: str, sink: bool) -> None:
    case = make_case(layout, dtype=torch.float64)
    got = run(dense_attention, kind, case, sink=sink)
    assert_runs_close(got, run(naive, kind, case, sink=sink), 1e-12)
    visible = case.keys.mask(case.layout.num_keys)
    rows, keys = ~visible.any(1), ~visible.any(0)
    assert got.out[rows].eq(0).all()
    assert got.lse[rows].eq(-torch.inf).all()
    assert got.grads["q"][rows].eq(0).all()
    for name in OPERANDS[kind][1:]:
        assert got.grads[name][keys].eq(0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_oracle_sees_a_range_off_by_one(kind: str) -> None:
    case = make_case("padded", dtype=torch.float64, poison=False)
    late = KeyRange(case.keys.start, case.keys.stop - 1)
    with pytest.raises(AssertionError, match="out"):
        assert_runs_close(run(dense_attention, kind, case, keys=late), run(naive, kind, case), 1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_fp32_is_accurate(kind: str) -> None:
    case = make_case("packed", Sizes(heads=8, groups=4, width=96, value_dim=64))
    exact = run(naive, kind, case.map(Tensor.double), sink=True)
    assert_runs_close(run(dense_attention, kind, case, sink=True), exact, 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_keeps_the_error_budget(kind: str) -> None:
    case = make_case("causal", dtype=torch.bfloat16)
    exact, plain = run(naive, kind, case.map(Tensor.double)), run(naive, kind, case)
    got = run(dense_attention, kind, case)
    assert got.lse.dtype == torch.float32
    torch.testing.assert_close(got.lse.double(), exact.lse, rtol=1e-5, atol=1e-5)
    for name in ("out", *got.grads):
        ours, wanted, theirs = (x.out if name == "out" else x.grads[name] for x in (got, exact, plain))
        assert ours.dtype == torch.bfloat16
        assert not error_budget(ours, wanted, theirs), name


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(kind: str) -> None:
    case = make_case(Layout.packed([5, 0, 3], padded=[6, 0, 4]), TINY, dtype=torch.float64, poison=False)
    operands = leaves(kind, case, sink=True)

    def out_of(*values: Tensor) -> Tensor:
        return dense_attention(kind, case, case.keys, **dict(zip(operands, values, strict=True)))[0]

    assert torch.autograd.gradcheck(out_of, tuple(operands.values()))


@pytest.mark.parametrize("kind", KINDS)
def test_ranges_may_leave_the_keys_and_say_anything(kind: str) -> None:
    """More rows than keys; ranges that start below 0, end past the keys, lie outside, or are upside down."""
    whole = make_case(Layout.causal(12), TINY, dtype=torch.float64, poison=False)
    case = whole.map(lambda x: x[:5].clone() if x.shape[:1] == (12,) and x.dim() == 2 else x)
    case = Case(**{**vars(case), "k": whole.k[:5].clone(), "v": whole.v[:5].clone()})
    start = [-3, -9, 0, 2, 4, 5, 90, 3, 2**31 - 2, -(2**31), 1, 0]
    stop = [2, -4, 99, 99, 5, 9, 99, 1, 2**31 - 1, 2**31 - 1, 2, 0]
    keys = KeyRange(torch.tensor(start, dtype=torch.int32), torch.tensor(stop, dtype=torch.int32))
    assert_runs_close(run(dense_attention, kind, case, keys=keys), run(naive, kind, case, keys=keys), 1e-12)
    empty = ~keys.mask(5).any(1)
    for name in ("q", "grad_out"):
        getattr(case, name)[empty] = torch.nan
    got = run(dense_attention, kind, case, keys=keys)
    assert_runs_close(got, run(naive, kind, case, keys=keys), 1e-12)
    assert empty.sum() == 6
    assert got.grads["q"][empty].eq(0).all()


@pytest.mark.parametrize("fill", [torch.nan, torch.inf, -torch.inf, 1e38])
@pytest.mark.parametrize("operand", ["q", "keys", "grad_out", "all"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_document_does_not_touch_another(kind: str, operand: str, fill: float) -> None:
    """Three documents in one block of rows; the middle one breaks, the others keep every bit, gradients too."""
    layout = Layout.packed([9, 14, 11])
    middle = slice(9, 23)
    calm = make_case(layout)
    wild = make_case(layout)
    names = {"keys": OPERANDS[kind][1:], "all": (*OPERANDS[kind], "grad_out")}.get(operand, (operand,))
    for name in names:
        getattr(wild, name)[middle] = fill
    a, b = run(dense_attention, kind, calm), run(dense_attention, kind, wild)
    others = torch.cat([torch.arange(9), torch.arange(23, 34)])
    for name, x, y in pairs(a, b):
        assert torch.equal(x[others], y[others]), name
    assert any(not torch.equal(x[middle], y[middle]) for _, x, y in pairs(a, b))


@pytest.mark.parametrize(("row", "operand"), [(20, "q"), (20, "grad_out"), (18, "v"), (18, "k")])
def test_nan_reaches_all_who_read_it_and_nobody_else(row: int, operand: str) -> None:
    case = make_case(Layout.packed([15, 8, 4]), dtype=torch.float64)
    clean = run(dense_attention, "gqa", case)
    getattr(case, operand)[row] = torch.nan
    got = run(dense_attention, "gqa", case)
    visible = case.keys.mask(27)
    keyed = operand in ("k", "v")
    rows = visible[:, row] if keyed else torch.arange(27) == row
    keys = visible[rows].any(0)
    for name, broken, here, there in (
        ("out", operand != "grad_out", got.out, clean.out),
        ("lse", operand != "grad_out", got.lse, clean.lse),
        ("dq", True, got.grads["q"], clean.grads["q"]),
        ("dk", True, got.grads["k"], clean.grads["k"]),
        ("dv", True, got.grads["v"], clean.grads["v"]),
    ):
        bad = (keys if name in ("dk", "dv") else rows) & broken
        assert here[bad].isnan().all(), name
        assert torch.equal(here[~bad], there[~bad]), name


@pytest.mark.parametrize("kind", KINDS)
def test_sink_takes_everything_or_nothing(kind: str) -> None:
    case = make_case("padded", dtype=torch.float64)
    none = run(dense_attention, kind, case)
    case.sink.fill_(-torch.inf)
    silent = run(dense_attention, kind, case, sink=True)
    assert silent.grads.pop("sink").eq(0).all()
    assert_runs_close(silent, none, 1e-14)
    case.sink.fill_(torch.inf)
    greedy = run(dense_attention, kind, case, sink=True)
    assert greedy.out.eq(0).all()
    assert torch.equal(greedy.lse, none.lse)
    assert all(grad.eq(0).all() for grad in greedy.grads.values())


@pytest.mark.parametrize("scale", [0.0, 1e4, -1.0])
def test_any_scale(scale: float) -> None:
    case = make_case("packed", dtype=torch.float64)
    case = Case(**{**vars(case), "scale": scale})
    assert_runs_close(run(dense_attention, "mla", case), run(naive, "mla", case), 1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_equals_sparse_attention_to_every_key(kind: str) -> None:
    case = make_case("padded", dtype=torch.float64)
    column = torch.arange(case.layout.num_keys).expand(len(case.q), -1)
    everything = Selection.from_index(torch.where(case.keys.mask(case.layout.num_keys), column, -1))

    def sparse(kind: str, case: Case, keys: KeyRange, **operands: Tensor) -> tuple[Tensor, Tensor]:
        if kind == "mla":
            flags = {"scale": case.scale, "value_dim": case.sizes.value_dim}
            return sparse_mla(**operands, selection=everything, **flags)
        return sparse_gqa(**operands, selection=everything, scale=case.scale)

    assert_runs_close(run(dense_attention, kind, case, sink=True), run(sparse, kind, case, sink=True), 1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_streaming_changes_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case("packed", dtype=torch.float64)
    whole = run(dense_attention, kind, case, sink=True)
    monkeypatch.setattr(ranged, "key_runs", lambda device: 5)
    monkeypatch.setattr(blocks, "_CPU_BYTES", 4096)
    assert_runs_close(run(dense_attention, kind, case, sink=True), whole, 1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_strides_do_not_matter(kind: str) -> None:
    case = make_case("left_padded")
    assert_runs_equal(run(dense_attention, kind, case.map(strided)), run(dense_attention, kind, case))


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_stays_outside(kind: str) -> None:
    case = make_case("padded")
    with torch.autocast("cpu", torch.bfloat16):
        got = run(dense_attention, kind, case)
    assert_runs_equal(got, run(dense_attention, kind, case))


@pytest.mark.parametrize("deterministic", [False, True, None])
def test_repeats_bit_for_bit(deterministic: bool | None) -> None:
    case = make_case("packed")
    operands = leaves("mla", case)
    grads = []
    for _ in range(2):
        out, _ = dense_mla(**operands, keys=case.keys, scale=1.0, value_dim=16, deterministic=deterministic)
        grads.append(torch.autograd.grad(out, tuple(operands.values()), case.grad_out))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_compiles_whole(kind: str) -> None:
    case = make_case("padded")
    compiled = torch.compile(dense_attention, fullgraph=True, backend="aot_eager")
    assert_runs_equal(run(compiled, kind, case, sink=True), run(dense_attention, kind, case, sink=True))


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoint_gives_the_same_bits(kind: str) -> None:
    case = make_case("padded")
    recomputed = functools.partial(checkpoint, dense_attention, use_reentrant=False)
    assert_runs_equal(run(recomputed, kind, case), run(dense_attention, kind, case))


@pytest.mark.parametrize("sink", [False, True], ids=["", "sink"])
@pytest.mark.parametrize("kind", KINDS)
def test_opcheck(kind: str, sink: bool) -> None:
    case = make_case("padded", poison=False)
    keys = strided(case.kv[:, None]) if kind == "mla" else strided(case.k)
    values = None if kind == "mla" else strided(case.v).requires_grad_()
    operands = (strided(case.q).requires_grad_(), keys.requires_grad_(), values)
    logit = case.sink.requires_grad_() if sink else None
    flags = (case.scale, case.sizes.value_dim, True, "auto")
    torch.library.opcheck(dense._forward, (*operands, case.keys.start, case.keys.stop, logit, *flags))


def test_lse_takes_no_gradient() -> None:
    case = make_case("causal")
    out, lse = dense_attention("mla", case, case.keys, **leaves("mla", case))
    assert out.requires_grad
    assert not lse.requires_grad


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 3)}, r"q must be \[T, H, C\]"),
        ({"kv": torch.zeros(8, 5)}, r"kv must be \[S, 6\]"),
        ({"value_dim": 7}, "value_dim=7 must be between 1 and the latent width 6"),
        ({"sink": torch.zeros(3)}, r"sink must be \[2\]"),
        ({"keys": Layout.causal(7).keys}, "keys has 7 rows, q has 8"),
        ({"keys": Layout.causal(8).keys.to("meta")}, r"keys is on meta, q on cpu; use layout.to\(q.device\)"),
    ],
)
def test_refuses_mla(change: dict[str, object], message: str) -> None:
    call = {"q": torch.zeros(8, 2, 6), "kv": torch.zeros(8, 6), "keys": Layout.causal(8).keys, "value_dim": 4}
    with pytest.raises(InputError, match=message):
        dense_mla(**{**call, **change}, scale=1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(8, 2, 5)}, r"k must be \[S, G, 6\]"),
        ({"v": torch.zeros(7, 2, 3)}, r"v must be \[8, 2, V\]"),
        ({"k": torch.zeros(8, 3, 6), "v": torch.zeros(8, 3, 3)}, "4 heads, not a multiple of the 3 groups"),
        ({"keys": Layout.causal(9).keys}, "keys has 9 rows, q has 8"),
    ],
)
def test_refuses_gqa(change: dict[str, object], message: str) -> None:
    call = {"q": torch.zeros(8, 4, 6), "k": torch.zeros(8, 2, 6), "v": torch.zeros(8, 2, 3)}
    with pytest.raises(InputError, match=message):
        dense_gqa(**{**call, "keys": Layout.causal(8).keys, **change}, scale=1.0)


def test_unknown_backend_raises_before_the_forward() -> None:
    case = make_case("causal")
    with pytest.raises(BackendUnavailable, match="no backend named 'abacus'"):
        dense_mla(case.q, case.kv, case.keys, scale=1.0, value_dim=16, backend="abacus")
