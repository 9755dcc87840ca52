"""The fused operation is its two parts, bit for bit, and gradients do not cross between them."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from dsattn import backends, settings
from dsattn.backends import COMPOSED, TABLE, Call, Choice, Row
from dsattn.errors import BackendUnavailable, InputError
from dsattn.keys import Layout
from dsattn.ops import distill, dsa, dsa_attention, indexer_kl, sparse_mla
from dsattn.selection import Selection
from dsattn.testing import LAYOUTS, Case, Sizes, make_case, random_selection, strided

TRUNK = ("q", "kv", "sink")
INDEXER = ("q_i", "k_i", "w")
WEIGHT = 0.37


def leaves(case: Case) -> dict[str, Tensor]:
    return {name: getattr(case, name).detach().clone().requires_grad_() for name in TRUNK + INDEXER}


def selection_of(case: Case) -> Selection:
    return random_selection(case.keys, case.layout.num_keys, case.sizes.top_k)


def fused(case: Case, q, kv, sink, q_i, k_i, w, **flags) -> tuple[Tensor, Tensor, Tensor]:
    shape = {"scale": case.scale, "value_dim": case.sizes.value_dim, "kl_weight": WEIGHT, "sink": sink}
    return dsa_attention(q, kv, selection_of(case), q_i, k_i, w, case.keys, **shape, **flags)


def parts(case: Case, q, kv, sink, q_i, k_i, w, **flags) -> tuple[Tensor, Tensor, Tensor]:
    selection = selection_of(case)
    out, lse = sparse_mla(q, kv, selection, scale=case.scale, value_dim=case.sizes.value_dim, sink=sink)
    loss = indexer_kl(q_i, k_i, w, q, kv, lse, case.keys, selection, scale=case.scale, **flags)
    return out, lse, WEIGHT * loss


def run(how, case: Case, **flags) -> dict[str, Tensor]:
    """Outputs, and gradients of out . grad_out + 3 kl."""
    operands = leaves(case)
    out, lse, kl = how(case, **operands, **flags)
    torch.autograd.backward((out, 3.0 * kl), (case.grad_out, torch.ones_like(kl)))
    grads = {f"d{name}": x.grad for name, x in operands.items() if x.grad is not None}
    return {"out": out.detach(), "lse": lse, "kl": kl.detach(), **grads}


def assert_equal(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name in got:
        assert torch.equal(got[name], want[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_is_its_parts_bit_for_bit(layout: str, dtype: torch.dtype) -> None:
    case = make_case(layout, dtype=dtype)
    got = run(fused, case)
    assert all(x.dtype == dtype for name, x in got.items() if name not in ("lse", "kl"))
    assert not any(x.isnan().any() for x in got.values())
    assert_equal(got, run(parts, case))


@pytest.mark.parametrize("name", ["k_i", "w", "kv"])
def test_one_fp64_operand_is_as_in_the_parts(name: str) -> None:
    case = make_case("packed")
    case = replace(case, **{name: getattr(case, name).double()})
    got = run(fused, case)
    assert got["kl"].dtype == torch.float64
    assert_equal(got, run(parts, case))
    selection, shape = selection_of(case), {"scale": 1.0, "value_dim": case.sizes.value_dim, "kl_weight": 1.0}
    with FakeTensorMode(allow_non_fake_inputs=True):
        rest = (case.q_i, case.k_i, case.w, case.keys)
        assert dsa_attention(case.q, case.kv, selection, *rest, **shape)[2].dtype == torch.float64


@pytest.mark.parametrize(
    "flags",
    [
        {"relu": False},
        {"divisor": 7},
        {"divisor": torch.tensor(7)},
        {"real_rows": torch.arange(80) % 3 > 0},
        {"deterministic": True},
    ],
    ids=lambda flags: "-".join(flags),
)
def test_hands_its_options_on(flags: dict[str, object]) -> None:
    case = make_case("padded")
    got = run(fused, case, **flags)
    assert_equal(got, run(parts, case, **flags))
    if "deterministic" not in flags:
        assert not torch.equal(got["dk_i"], run(fused, case)["dk_i"])


def test_weight_is_in_the_loss() -> None:
    case = make_case("padded")
    with pytest.raises(AssertionError, match="kl"):
        assert_equal(run(lambda *a, **k: (*fused(*a, **k)[:2], fused(*a, **k)[2] / WEIGHT), case), run(parts, case))


@pytest.mark.parametrize("poison", [False, True], ids=["", "poison"])
def test_gradients_do_not_cross(poison: bool) -> None:
    """out moves q, kv and sink only; kl moves the indexer only. What is not moved gets None or exact zeros."""
    case = make_case("padded", poison=poison)

    def still(x: Tensor) -> bool:
        return x.grad is None or bool(x.grad.eq(0).all())

    operands = leaves(case)
    fused(case, **operands)[0].backward(case.grad_out)
    assert all(still(operands[name]) for name in INDEXER)
    assert not any(still(operands[name]) for name in TRUNK)
    operands = leaves(case)
    fused(case, **operands)[2].backward()
    assert all(still(operands[name]) for name in TRUNK)
    assert not any(still(operands[name]) for name in INDEXER)


def test_weight_zero_leaves_exact_zeros() -> None:
    case = make_case("padded")
    operands = leaves(case)
    shape = {"scale": case.scale, "value_dim": 16, "kl_weight": 0.0}
    q, kv, _, *indexer = operands.values()
    _, _, kl = dsa_attention(q, kv, selection_of(case), *indexer, case.keys, **shape)
    kl.backward()
    assert float(kl.detach()) == 0.0
    assert all(x.grad is not None and x.grad.eq(0).all() for x in indexer)


def test_gradcheck() -> None:
    sizes = Sizes(heads=2, groups=1, width=4, value_dim=3, index_heads=2, index_width=3, top_k=2)
    case = make_case(Layout.packed([5, 0, 3], padded=[6, 0, 4]), sizes, dtype=torch.float64, poison=False)
    operands = leaves(case)

    def out_of(*values: Tensor) -> Tensor:
        return fused(case, *values)[0]

    def kl_of(q_i: Tensor, k_i: Tensor, w: Tensor) -> Tensor:
        return fused(case, case.q, case.kv, case.sink, q_i, k_i, w)[2]

    assert torch.autograd.gradcheck(out_of, tuple(operands.values()))
    assert torch.autograd.gradcheck(kl_of, tuple(operands[name] for name in INDEXER))


def test_only_the_loss_takes_part_in_the_teacher() -> None:
    """A finite difference in q does move kl: that its gradient is zero is by detaching, not by chance."""
    case = make_case("padded", dtype=torch.float64)
    moved = replace(case, q=case.q + 0.1)
    assert run(fused, case)["kl"] != run(fused, moved)["kl"]


@pytest.mark.parametrize("sink", [True, False], ids=["sink", ""])
def test_compiles_whole(sink: bool) -> None:
    case = make_case("padded")
    selection = selection_of(case)

    def step(q, kv, sink, q_i, k_i, w) -> tuple[Tensor, Tensor, Tensor]:
        flags = {"scale": case.scale, "kl_weight": WEIGHT, "value_dim": 16, "sink": sink}
        return dsa_attention(q, kv, selection, q_i, k_i, w, case.keys, **flags)

    def grads_of(function) -> dict[str, Tensor]:
        return run(lambda _, sink, **kw: function(sink=sink if with_sink else None, **kw), case)

    with_sink = sink
    assert_equal(grads_of(torch.compile(step, fullgraph=True, backend="aot_eager")), grads_of(step))


def test_checkpoint_gives_the_same_bits() -> None:
    case = make_case("padded")
    assert_equal(run(lambda *a, **k: checkpoint(fused, *a, use_reentrant=False, **k), case), run(fused, case))


def test_strides_do_not_matter() -> None:
    case = make_case("left_padded")
    assert_equal(run(fused, case.map(strided)), run(fused, case))


@pytest.mark.parametrize("sink", [True, False], ids=["sink", ""])
def test_opcheck(sink: bool) -> None:
    case = make_case("padded", poison=False)
    selection = selection_of(case)
    q, kv, logit, *indexer = (strided(getattr(case, name)).requires_grad_() for name in TRUNK + INDEXER)
    rows = (selection.index, selection.length, *distill.row_weights(case.keys, None, None, torch.float32))
    flags = (case.scale, WEIGHT, case.sizes.value_dim, True, "", 0, True, "auto")
    operands = (q, kv, logit if sink else None, *indexer)
    torch.library.opcheck(dsa._forward, (*operands, *rows, case.keys.start, case.keys.stop, *flags))


def test_lse_takes_no_gradient() -> None:
    case = make_case("padded")
    out, lse, kl = fused(case, **leaves(case))
    assert out.requires_grad
    assert kl.requires_grad
    assert not lse.requires_grad


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv": torch.zeros(8, 5)}, r"kv must be \[S, 6\]"),
        ({"value_dim": 7}, "value_dim=7"),
        ({"sink": torch.zeros(2)}, r"sink must be \[3\]"),
        ({"selection": Selection.from_index(torch.zeros(7, 2, dtype=torch.long))}, "selection has 7 rows, q has 8"),
        ({"w": torch.zeros(8, 3)}, r"w must be \[8, 2\]"),
        ({"k_i": torch.zeros(9, 4)}, r"kv must be \[9, 6\]"),
        ({"keys": Layout.causal(7).keys}, "keys has 7 rows"),
        ({"divisor": 0}, "divisor=0 must be positive"),
        ({"real_rows": torch.ones(8)}, "real_rows must be bool"),
    ],
)
def test_refuses(change: dict[str, object], message: str) -> None:
    indexer = {"q_i": torch.zeros(8, 2, 4), "k_i": torch.zeros(8, 4), "w": torch.zeros(8, 2)}
    trunk = {"q": torch.zeros(8, 3, 6), "kv": torch.zeros(8, 6), "value_dim": 4, "keys": Layout.causal(8).keys}
    selection = Selection.from_index(torch.zeros(8, 2, dtype=torch.long))
    with pytest.raises(InputError, match=message):
        dsa_attention(**{**indexer, **trunk, "selection": selection, "scale": 1.0, "kl_weight": 1.0, **change})


def _made_up(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any]) -> None:
    module = ModuleType("dsattn.backends.made_up")
    module.dsa_attention_forward = function
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(TABLE, "dsa_attention.forward", (Row("made_up", "made_up", lambda _: []), COMPOSED))
    backends._choose.cache_clear()


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A fused forward is the first choice; the rows of each of its calls."""
    calls: list[int] = []

    def counted(q: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        calls.append(len(q))
        return dsa.shares_reference(q, *rest)

    _made_up(monkeypatch, counted)
    with settings(first_use_checks=False):
        yield calls
    backends._choose.cache_clear()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_fused_forward_changes_nothing(layout: str, made_up: list[int]) -> None:
    """Its shares are the target: value, gradients and all, with gradients, without, replayed and compiled."""
    case = make_case(layout)
    want = run(fused, case, backend="composed")
    assert not made_up
    assert_equal(run(fused, case), want)
    assert made_up == [len(case.q)]
    with torch.no_grad():
        assert fused(case, **leaves(case))[2].equal(want["kl"])
    assert_equal(run(lambda *a, **k: checkpoint(fused, *a, use_reentrant=False, **k), case), want)
    assert len(made_up) == 4


def test_a_fused_forward_compiles_and_goes_back_twice(made_up: list[int]) -> None:
    case = make_case("padded")
    selection, want = selection_of(case), run(fused, case, backend="composed")

    def step(q, kv, sink, q_i, k_i, w) -> tuple[Tensor, Tensor, Tensor]:
        flags = {"scale": case.scale, "kl_weight": WEIGHT, "value_dim": 16, "sink": sink}
        return dsa_attention(q, kv, selection, q_i, k_i, w, case.keys, **flags)

    whole = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert_equal(run(lambda _, **kw: whole(**kw), case), want)
    assert len(made_up) == 1
    operands = leaves(case)
    out, _, kl = fused(case, **operands)
    for _ in range(2):
        torch.autograd.backward((out, 3.0 * kl), (case.grad_out, torch.ones_like(kl)), retain_graph=True)
    for name, x in operands.items():
        torch.testing.assert_close(x.grad, 2 * want[f"d{name}"])


def test_names_go_to_the_operation_or_to_its_parts(made_up: list[int]) -> None:
    """The fused row's name is for it alone, and does not ask the loss for a row that it has not."""
    case = make_case("padded")
    want = run(fused, case, backend="composed")
    assert_equal(run(fused, case, backend="reference"), want)
    assert not made_up
    assert_equal(run(fused, case, backend="made_up"), want)
    assert len(made_up) == 1
    call = Call.of((case.q, case.kv), len(case.kv))
    served = {name: dsa.choose_whole("forward", call, name).name for name in ("auto", "made_up", "triton", "composed")}
    assert served == {"auto": "made_up", "made_up": "made_up", "triton": "composed", "composed": "composed"}


def test_a_loss_from_wrong_shares_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    case = make_case("padded")
    want = run(fused, case)

    def wrong(*operands: Any) -> tuple[Tensor, ...]:
        out, lse, shares = dsa.shares_reference(*operands)
        return out, lse, shares.roll(1, 1)

    _made_up(monkeypatch, wrong)
    with settings(first_use_checks=False), pytest.raises(AssertionError, match="kl"):
        assert_equal(run(fused, case), want)
    backends._choose.cache_clear()


def test_unknown_backend_raises() -> None:
    case = make_case("padded")
    with pytest.raises(BackendUnavailable, match="no backend named 'abacus'"):
        fused(case, **leaves(case), backend="abacus")


def test_the_parts_are_served_by_their_own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel for one part serves it inside too, and a name is handed to the parts."""
    asked = []
    module = sys.modules["dsattn.ops.sparse_mla"]  # `dsattn.ops.sparse_mla` is the function
    choose = module.choose

    def record(operation: str, call: Call, backend: str = "auto") -> Choice:
        asked.append((operation, backend))
        return choose(operation, call, backend)

    monkeypatch.setattr(module, "choose", record)
    case = make_case("packed")
    selection = random_selection(case.keys, case.layout.num_keys, case.sizes.top_k)
    operands = (case.q, case.kv, selection, case.q_i, case.k_i, case.w, case.keys)
    flags = {"scale": case.scale, "kl_weight": 1.0, "value_dim": case.sizes.value_dim}
    for backend, part in (("auto", "auto"), ("composed", "auto"), ("reference", "reference")):
        asked.clear()
        dsa_attention(*operands, **flags, backend=backend)
        assert ("sparse_mla.forward", part) in asked
    with pytest.raises(BackendUnavailable, match="no backend named 'nobody'"):
        dsa_attention(*operands, **flags, backend="nobody")
