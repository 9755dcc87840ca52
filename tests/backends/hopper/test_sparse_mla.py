"""Sparse MLA on Hopper: what needs no GPU, and on one the contract that holds for the Triton kernels, in bf16."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dsattn.backends import Call, settings
from dsattn.errors import BackendUnavailable
from dsattn.keys import Layout
from dsattn.selection import Selection, invert
from dsattn.testing import Case, Sizes, error_budget, make_case, naive_attention, random_selection, tensor_similarity

pytest.importorskip("triton")
INF, NAN = float("inf"), float("nan")
SMALL = Layout.packed([5, 0, 1, 12, 130], padded=[6, 2, 1, 12, 131], total=155)
HERE = Call(device="cuda", capability=90, dtype="bfloat16", heads=64, width=576, value_width=512, top_k=2048)


def sizes(heads: int, width: int = 576, top_k: int = 100) -> Sizes:
    return Sizes(heads=heads, groups=1, width=width, value_dim=512, top_k=top_k)


@pytest.mark.parametrize(
    ("changes", "lacks"),
    [
        ({}, []),
        ({"width": 512, "heads": 1, "top_k": 3, "deterministic": True}, []),
        ({"device": "cpu", "capability": 0}, ["a GPU of compute capability 9.0 (Hopper)"]),
        ({"capability": 100}, ["a GPU of compute capability 9.0 (Hopper)"]),
        ({"capability": 80, "dtype": "float16"}, ["a GPU of compute capability 9.0 (Hopper)", "bfloat16 operands"]),
        ({"dtype": "float32"}, ["bfloat16 operands"]),
        ({"width": 640}, ["a latent width of 512 or 576"]),
        ({"value_width": 256}, ["a value width of 512"]),
    ],
)
def test_requirements(changes: dict[str, object], lacks: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from dsattn.backends.hopper import sparse_mla

    monkeypatch.setattr(sparse_mla.triton, "__version__", "3.6.1")
    assert sparse_mla.requirements(replace(HERE, **changes)) == lacks


@pytest.mark.parametrize("version", ["3.5.1", "3.8.0", "3.60.0"])
def test_requires_a_triton_that_compiles_it(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from dsattn.backends.hopper import sparse_mla

    monkeypatch.setattr(sparse_mla.triton, "__version__", version)
    assert sparse_mla.requirements(HERE) == [f"triton 3.6 or 3.7, not {version}"]


@pytest.mark.parametrize("heads", [1, 64, 65, 128])
@pytest.mark.parametrize("width", [512, 576])
@pytest.mark.parametrize("slots", [1, 100, 2048])
@pytest.mark.parametrize("keys", [1, 4096, 2**20])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_runs_fit_the_scratch(heads: int, width: int, slots: int, keys: int, itemsize: int) -> None:
    """Contributions, and lines and records of the runs that are placed together; these have a part of it at most."""
    from dsattn.backends.hopper.sparse_mla import runs_of_rows

    line = slots * itemsize * width * -(-heads // 64)

    def places(rows: int) -> int:
        return 4 * rows * slots + 32 * keys * -(-rows // 224)

    for allowed in (2**31, 2**29, 2**26):
        with settings(scratch_bytes=allowed):
            rows, together = runs_of_rows(10**9, heads, width, slots, keys, itemsize)
            assert rows * line + together * places(rows) <= allowed
            # A row more may be the first of a group in each run; a group has whole bytes a row.
            assert allowed * 31 / 32 < (rows + 1) * line + together * (places(rows + 1) + 32 * keys + rows)
            assert together == 1 or together * places(rows) <= allowed // 32
            assert runs_of_rows(3, heads, width, slots, keys, itemsize) == (3, 1)
    with settings(scratch_bytes=2**60):  # a contribution is named by an int32
        assert runs_of_rows(2**40, heads, width, slots, keys, itemsize) == ((2**31 - 1) // slots, 1)


@pytest.mark.parametrize("heads", [1, 128, 200])
@pytest.mark.parametrize("slots", [1, 64, 2048])
def test_a_run_has_a_row(heads: int, slots: int) -> None:
    """However little scratch there is: also where it holds places of several rows, but what none contributes."""
    from dsattn.backends.hopper.sparse_mla import runs_of_rows

    for power, keys in itertools.product(range(28), (1, 100, 2**20)):
        for scratch in (2**power, 3 * 2**power // 2):
            with settings(scratch_bytes=scratch):
                assert runs_of_rows(5, heads, 576, slots, keys, 2).rows >= 1
    with settings(scratch_bytes=1):
        assert runs_of_rows(5, heads, 576, slots, 100, 2) == (1, 1)


def test_places_of_all_runs_are_found_together_where_keys_are_few() -> None:
    from dsattn.backends.hopper.sparse_mla import runs_of_rows

    rows, together = runs_of_rows(4096, 64, 576, 2048, 4096, 2)
    assert together == -(-4096 // rows) == 5
    assert runs_of_rows(4096, 64, 576, 2048, 2**20, 2).together == 1


@pytest.mark.parametrize(("rows", "heads", "keys", "top_k"), [(0, 2, 5, 3), (3, 0, 5, 3), (3, 2, 0, 2), (3, 2, 5, 0)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_nothing_to_do(launches: list, rows: int, heads: int, keys: int, top_k: int, deterministic: bool) -> None:
    """A backward without rows, heads, keys or slots starts no kernel; nor does a forward without rows or heads."""
    from dsattn.backends.hopper.sparse_mla import sparse_mla_backward, sparse_mla_forward

    q, kv = torch.randn(rows, heads, 576).bfloat16(), torch.randn(keys, 576).bfloat16()
    selection = Selection.from_index(torch.full((rows, top_k), -1))
    operands = (q, kv, selection.index, selection.length, None)
    out, lse = sparse_mla_forward(*operands, 1.0, 512)
    assert (out.shape, lse.shape) == ((rows, heads, 512), (rows, heads))
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert bool(launches) == (rows * heads > 0)
    launches.clear()
    dq, dkv = sparse_mla_backward(out, *operands, out, lse, 1.0, deterministic)
    assert (dq.shape, dkv.shape) == (q.shape, kv.shape)
    assert not dq.any()
    assert not dkv.any()
    assert launches == []


def test_refuses_other_dtypes() -> None:
    """Dispatch sees q only."""
    q, kv, index = torch.zeros(1, 1, 576), torch.zeros(1, 576), torch.zeros(1, 1, dtype=torch.int32)
    for operands in ((q, kv), (q.bfloat16(), kv), (q, kv.bfloat16()), (q.half(), kv.bfloat16())):
        case = (*operands, index, index[:, 0], None)
        with pytest.raises(BackendUnavailable, match="computes in bf16, but q is"):
            forward(*case, 1.0)
        with pytest.raises(BackendUnavailable, match="use backend='triton'"):
            backward(q, *case, q, q[:, :, 0], 1.0, False)


def forward(q: Tensor, kv: Tensor, index: Tensor, length: Tensor, sink: Tensor | None, scale: float):
    from dsattn.backends.hopper.sparse_mla import sparse_mla_forward

    return sparse_mla_forward(q, kv, index, length, sink, scale, 512)


def backward(*operands: object):
    from dsattn.backends.hopper.sparse_mla import sparse_mla_backward

    return sparse_mla_backward(*operands)


@pytest.mark.parametrize(
    ("keys", "deterministic", "atomic"),
    [(4, False, True), (40959, False, True), (40960, False, False), (4, True, False), (40960, True, False)],
)
def test_the_route_follows_from_keys_and_determinism(
    launches: list, keys: int, deterministic: bool, atomic: bool
) -> None:
    q, out = torch.zeros(2, 3, 512, dtype=torch.bfloat16), torch.zeros(2, 3, 512, dtype=torch.bfloat16)
    index = torch.zeros(2, 4, dtype=torch.int32)
    backward(out, q, q.new_zeros(keys, 512), index, index[:, 0], None, out, torch.zeros(2, 3), 1.0, deterministic)
    placing = ["_mark_kernel", "_count_kernel", "_place_kernel"]
    contributions, atomics = (
        [*placing, "backward_kernel", "_contributions_kernel"],
        ["backward_kernel", "_additions_kernel"],
    )
    assert [launch.kernel.__name__ for launch in launches] == (atomics if atomic else contributions)
    (launch,) = (launch for launch in launches if launch.kernel.__name__ == "backward_kernel")
    assert launch.constants["ATOMIC"] == atomic


def test_an_inverse_changes_no_launch(launches: list) -> None:
    """Each run sorts its own slots: lines from an inverse were measured to be no faster."""
    q, out = torch.zeros(3, 3, 512, dtype=torch.bfloat16), torch.zeros(3, 3, 512, dtype=torch.bfloat16)
    index = torch.tensor([[0, 2], [1, 2], [3, -1]], dtype=torch.int32)
    length = torch.tensor([2, 2, 1], dtype=torch.int32)
    operands = (out, q, q.new_zeros(4, 512), index, length, None, out, torch.zeros(3, 3), 1.0, True)
    seen = []
    for inverse in (None, invert(index, length, 4)):
        launches.clear()
        backward(*operands, inverse)
        seen.append([launch.kernel.__name__ for launch in launches])
    assert seen[0] == seen[1]


@pytest.mark.parametrize(
    ("keys", "deterministic", "asked", "dtype"),
    [(4, True, False, "bfloat16"), (4, True, True, "float32"), (40960, False, True, "float32"), (4, False, True, "")],
)
def test_contributions_are_what_settings_ask(
    launches: list, keys: int, deterministic: bool, asked: bool, dtype: str
) -> None:
    """The kernel writes, and the sum reads, one buffer of that dtype; atomics add in fp32 either way."""
    q, out = torch.zeros(2, 3, 512, dtype=torch.bfloat16), torch.zeros(2, 3, 512, dtype=torch.bfloat16)
    index = torch.zeros(2, 4, dtype=torch.int32)
    operands = (out, q, q.new_zeros(keys, 512), index, index[:, 0], None, out, torch.zeros(2, 3), 1.0, deterministic)
    with settings(fp32_contributions=asked):
        backward(*operands)
    sums = [launch for launch in launches if launch.kernel.__name__ == "_contributions_kernel"]
    (wrote,) = (launch for launch in launches if launch.kernel.__name__ == "backward_kernel")
    assert wrote.constants["ATOMIC"] == (not dtype)
    target = wrote.arguments[10]
    assert target.dtype == getattr(torch, dtype or "float32")
    assert [one.arguments[0] is target for one in sums] == ([True] if dtype else [])


@pytest.mark.parametrize("scratch", [2**31, 40000])
def test_token_counts_do_not_compile_anew(scratch: int) -> None:
    """Rows, keys, slots, runs, and slices that start anywhere: one compilation of a kernel and role."""
    from dsattn.backends.triton.launch import recording

    with settings(scratch_bytes=scratch), recording(start=False) as kept:
        for rows, keys, slots in ((1, 1, 3), (16, 32, 16), (33, 100, 7), (128, 77, 1)):
            q, out = torch.zeros(rows, 3, 576, dtype=torch.bfloat16), torch.zeros(rows, 3, 512, dtype=torch.bfloat16)
            kv, lse = q.new_zeros(keys, 576), torch.zeros(1 + rows * 3)[1:].view(rows, 3)
            index = torch.zeros(1 + rows * slots, dtype=torch.int32)[1:].view(rows, slots)
            length = torch.zeros(1 + rows, dtype=torch.int32)[1:]
            sink = torch.zeros(4)[1:]
            forward(q, kv, index, length, sink, 1.0)
            for deterministic in (False, True):
                backward(out, q, kv, index, length, sink, out, lse, 1.0, deterministic)
    counts = {name: len(forms) for name, forms in kept.items()}
    # Atomics and contributions; the first, the last, a middle run, and the only one.
    assert counts.pop("backward_kernel") == 2
    assert counts.pop("_contributions_kernel") == (1 if scratch > 40000 else 4)
    assert set(counts.values()) == {1}, counts


def test_operands_are_moved_to_16_bytes() -> None:
    from dsattn.backends.hopper.sparse_mla import aligned

    base = torch.arange(64, dtype=torch.bfloat16)
    for x in (base[1:33].view(2, 16), base[:32].view(16, 2).T):
        got = aligned(x)
        assert got.equal(x)
        assert got.is_contiguous()
        assert got.data_ptr() % 16 == 0
    assert aligned(base).data_ptr() == base.data_ptr()


def choose_keys(case: Case) -> Selection:
    return random_selection(case.keys, case.layout.num_keys, case.sizes.top_k)


def run(case: Case, selection: Selection, sink: Tensor | None, deterministic: bool = False) -> dict[str, Tensor]:
    operands = (case.q, case.kv, selection.index, selection.length, sink)
    out, lse = forward(*operands, case.scale)
    dq, dkv = backward(case.grad_out, *operands, out, lse, case.scale, deterministic)
    return {"out": out, "lse": lse, "q": dq, "kv": dkv}


def naive(case: Case, selection: Selection, sink: Tensor | None) -> dict[str, Tensor]:
    """In the case's dtype; rows that select nothing give and take nothing."""
    dead = (selection.length == 0)[:, None, None]
    q, kv = case.q.clone().requires_grad_(), case.kv.clone().requires_grad_()
    values, mask = kv[:, None, :512], selection.mask(kv.shape[0])
    sink = None if sink is None else sink.to(q.dtype)
    out, lse = naive_attention(q, kv[:, None], values, mask, scale=case.scale, sink=sink)
    dq, dkv = torch.autograd.grad(out, (q, kv), case.grad_out.masked_fill(dead, 0))
    return {"out": out.detach(), "lse": lse, "q": dq, "kv": dkv}


def assert_within_budget(got: dict[str, Tensor], case: Case, selection: Selection, sink: Tensor | None) -> None:
    low = naive(case, selection, sink)
    exact = naive(case.map(lambda x: x.double()), selection, None if sink is None else sink.double())
    torch.testing.assert_close(got["lse"].double(), exact["lse"], rtol=1e-5, atol=1e-4)
    for name in ("out", "q", "kv"):
        assert got[name].dtype == torch.bfloat16
        if not exact[name].any():  # the one key of a row has all its weight: no query can change that
            assert float(got[name].abs().max()) < 1e-4, name
            continue
        assert not error_budget(got[name], exact[name], low[name]), name
        assert tensor_similarity(got[name], exact[name]) > 1 - (1e-3 if name == "out" else 3e-3), name


def make(layout: Layout, of: Sizes, device: str, *, poison: bool = True) -> Case:
    return make_case(layout, of, dtype=torch.bfloat16, device=device, poison=poison)


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("heads", "width", "top_k", "with_sink"),
    [
        (64, 576, 200, False),
        (128, 576, 129, True),
        (64, 512, 64, True),
        (100, 512, 63, False),
        (16, 576, 65, True),
        (1, 576, 1, False),
        (65, 576, 7, True),
    ],
)
def test_is_within_budget(
    hopper: str, heads: int, width: int, top_k: int, with_sink: bool, deterministic: bool
) -> None:
    """More rows than processors, rows without keys between others; padding, unread keys and their gradients are NaN."""
    case = make(Layout.packed([300, 1, 150]), sizes(heads, width, top_k), hopper)
    selection = choose_keys(case)
    assert (selection.length == 0).any()
    sink = case.sink if with_sink else None
    assert_within_budget(run(case, selection, sink, deterministic), case, selection, sink)


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
def test_layouts(hopper: str, deterministic: bool) -> None:
    case = make(SMALL, sizes(64), hopper)
    selection = choose_keys(case)
    got = run(case, selection, case.sink, deterministic)
    assert_within_budget(got, case, selection, case.sink)
    empty = selection.length == 0
    assert not got["out"][empty].any()
    assert (got["lse"][empty] == -INF).all()
    assert not got["q"][empty].any()


@pytest.mark.gpu
def test_many_tiles(hopper: str) -> None:
    """Rows of 2048 keys: both stages of the forward, and every barrier, many times over."""
    case = make(Layout.continuation(4000, 60), sizes(64, top_k=2048), hopper)
    selection = choose_keys(case)
    for deterministic in (False, True):
        assert_within_budget(run(case, selection, None, deterministic), case, selection, None)


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
def test_empty_slots_never_read_memory(hopper: str, deterministic: bool) -> None:
    """The last key, which -1 would name, is poison; so is what lies past `length`; empty rows give exact zeros."""
    index = torch.tensor([[0, -1, -1], [0, 1, -1], [1, 2, 3], [-1, -1, -1]], dtype=torch.int32, device=hopper)
    length = torch.tensor([1, 2, 2, 0], dtype=torch.int32, device=hopper)
    for poison in (NAN, INF):
        case = make(Layout.causal(4), sizes(2, top_k=3), hopper)
        for tensor in (case.kv, case.q, case.grad_out):
            tensor[3] = poison
        got = run(case, Selection(index, length), case.sink, deterministic)
        assert got["out"].isfinite().all()
        assert not got["out"][3].any()
        assert (got["lse"][3] == -INF).all()
        assert got["lse"][:3].isfinite().all()
        assert not got["q"][3].any()
        assert not got["kv"][3].any()
        assert all(got[name].isfinite().all() for name in ("q", "kv"))


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
def test_holes_are_skipped(hopper: str, deterministic: bool) -> None:
    """A -1 before `length` is no key either, in a tile with keys or alone in one, first or last."""
    case = make(Layout.causal(80), sizes(64, top_k=200), hopper, poison=False)
    index = torch.full((80, 200), -1, dtype=torch.int32, device=hopper)
    index[:, 2], index[:, 70], index[:, 199] = 0, 4, 7
    index[1::4, :64] = -1
    index[2::4, 64:] = -1
    index[3::4] = -1
    selection = Selection(index, torch.full((80,), 200, dtype=torch.int32, device=hopper))
    got = run(case, selection, case.sink, deterministic)
    assert not got["out"][3::4].any()
    assert (got["lse"][3::4] == -INF).all()
    case.grad_out[3::4] = 0
    assert_within_budget(got, case, selection, case.sink)


@pytest.mark.gpu
@pytest.mark.parametrize("sink", [INF, -INF, 80.0, -80.0])
def test_sinks_at_the_ends(hopper: str, sink: float) -> None:
    case = make(Layout.causal(70), sizes(2), hopper)
    case.sink.fill_(sink)
    selection = choose_keys(case)
    got = run(case, selection, case.sink)
    if sink == INF:  # torch's softmax cannot say it: all the mass is the sink's
        assert not any(got[name].any() for name in ("out", "q", "kv"))
    elif sink == 80.0:  # next to nothing is left to the keys
        assert all(got[name].isfinite().all() for name in ("out", "q", "kv"))
        assert float(got["out"].abs().max()) < 1e-20
    else:
        assert_within_budget(got, case, selection, case.sink)


@pytest.mark.gpu
def test_logits_far_from_zero(hopper: str) -> None:
    """Where every logit is far below zero, or above, P comes back from lse all the same; empty slots stay finite."""
    case = make(Layout.causal(100), sizes(64, top_k=70), hopper, poison=False)
    case.kv[:, 0] = 8.0
    case.q[:, ::2, 0], case.q[:, 1::2, 0] = -500.0, 500.0
    selection = choose_keys(case)
    got = run(case, selection, None)
    assert float(got["lse"][got["lse"] > -INF].min()) < -150
    for name in ("out", "q", "kv"):
        assert got[name].isfinite().all(), name
    assert_within_budget(got, case, selection, None)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [-0.05, 0.0])
def test_scales_that_are_not_positive(hopper: str, scale: float) -> None:
    case = replace(make(Layout.causal(70), sizes(64), hopper), scale=scale)
    selection = choose_keys(case)
    got = run(case, selection, None)
    if scale == 0.0:
        assert not got["q"].any()
    assert tensor_similarity(got["out"], naive(case.map(Tensor.double), selection, None)["out"]) > 1 - 1e-3
    if scale:
        assert_within_budget(got, case, selection, None)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "keys", "top_k"), [(0, 5, 3), (3, 0, 2), (3, 5, 0), (0, 0, 0), (3, 5, 2)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_nothing_to_do_on_a_gpu(hopper: str, rows: int, keys: int, top_k: int, deterministic: bool) -> None:
    q, kv = (torch.randn(*shape, 576, device=hopper).bfloat16() for shape in ((rows, 2), (keys,)))
    selection = Selection.from_index(torch.full((rows, top_k), -1, device=hopper))
    operands = (q, kv, selection.index, selection.length, None)
    out, lse = forward(*operands, 1.0)
    assert not out.any()
    assert (lse == -INF).all()
    dq, dkv = backward(torch.randn_like(out), *operands, out, lse, 1.0, deterministic)
    assert (dq.shape, dkv.shape) == (q.shape, kv.shape)
    assert not dq.any()
    assert not dkv.any()


@pytest.mark.gpu
def test_strides_and_offsets(hopper: str) -> None:
    case = make(Layout.causal(70), sizes(64), hopper)
    selection = choose_keys(case)
    expected = run(case, selection, case.sink, True)

    def loose(x: Tensor) -> Tensor:
        return x.transpose(0, -1).contiguous().transpose(0, -1)

    def shifted(x: Tensor) -> Tensor:
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)

    for change in (loose, shifted):
        moved = Selection(change(selection.index), change(selection.length))
        turned = case.map(change)
        for name, value in run(turned, moved, turned.sink, True).items():
            assert value.equal(expected[name]), name


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("together", [1, 2, 3])
def test_runs_of_rows(hopper: str, heads: int, together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in three runs and in one give the same up to the order of fp32 sums; keys that a run does not hold too.

    Whether the runs' places are found one by one, two and then one, or at once changes no bit.
    """
    from dsattn.backends.hopper import sparse_mla

    case = make(Layout.packed([40, 60, 20]), sizes(heads), hopper)
    selection = choose_keys(case)
    monkeypatch.setattr(sparse_mla, "runs_of_rows", lambda *_: (50, together))
    got = run(case, selection, case.sink, True)
    assert_within_budget(got, case, selection, case.sink)
    monkeypatch.setattr(sparse_mla, "runs_of_rows", lambda *_: (50, 1))
    assert all(value.equal(got[name]) for name, value in run(case, selection, case.sink, True).items())


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("width", [512, 576])
def test_both_routes(hopper: str, heads: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal up to the order of sums, dq in every bit; chosen by the number of keys, contributions keep their bits."""
    from dsattn.backends.hopper import sparse_mla

    case = make(Layout.packed([40, 60, 20]), sizes(heads, width), hopper)
    selection = choose_keys(case)
    expected = run(case, selection, case.sink, True)
    got = run(case, selection, case.sink)
    assert_within_budget(got, case, selection, case.sink)
    assert got["q"].equal(expected["q"])
    monkeypatch.setattr(sparse_mla, "CONTRIBUTIONS_FROM", 120)
    for name, value in run(case, selection, case.sink).items():
        assert value.equal(expected[name]), name


@pytest.mark.gpu
def test_an_off_by_one_selection_is_seen(hopper: str) -> None:
    """Negative control: the neighbour of a key gives something else."""
    case = make(Layout.causal(80), sizes(64), hopper)
    selection = choose_keys(case)
    shifted = Selection(torch.where(selection.index > 0, selection.index - 1, selection.index), selection.length)
    with pytest.raises(AssertionError):
        assert_within_budget(run(case, shifted, None), case, selection, None)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [64, 128])
def test_deterministic_repeats(hopper: str, heads: int) -> None:
    case = make(Layout.causal(1000), sizes(heads, top_k=128), hopper)
    selection = choose_keys(case)
    first = run(case, selection, case.sink, True)
    for _ in range(100):
        again = run(case, selection, case.sink, True)
        assert all(again[name].equal(first[name]) for name in first)


@pytest.mark.gpu
def test_under_a_cuda_graph(hopper: str) -> None:
    """Nothing waits for the device, nothing is allocated by what it holds."""
    case = make(Layout.causal(200), sizes(64), hopper)
    selection = choose_keys(case)
    expected = run(case, selection, case.sink, True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(case, selection, case.sink, True)
    graph.replay()
    torch.cuda.synchronize()
    assert all(got[name].equal(expected[name]) for name in got)


@pytest.mark.gpu
@pytest.mark.parametrize("most", [120, 50])
@pytest.mark.parametrize(("heads", "width"), [(64, 576), (128, 576), (65, 512)])
def test_fp32_contributions(hopper: str, heads: int, width: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits repeat, and dkv is that of atomics up to the order of fp32 sums, which bf16 contributions are not.

    One run of rows and three.
    """
    from dsattn.backends.hopper import sparse_mla

    case = make(Layout.packed([40, 60, 20]), sizes(heads, width), hopper)
    selection = choose_keys(case)
    atomic, rounded = (run(case, selection, case.sink, deterministic) for deterministic in (False, True))
    monkeypatch.setattr(sparse_mla, "runs_of_rows", lambda *_: (most, 2))
    with settings(fp32_contributions=True):
        got, again = (run(case, selection, case.sink, True) for _ in range(2))
    assert_within_budget(got, case, selection, case.sink)
    assert all(got[name].equal(again[name]) for name in got)
    assert got["q"].equal(rounded["q"])

    def differ(found: dict[str, Tensor]) -> float:
        return float((found["kv"] != atomic["kv"]).float().mean())

    assert differ(got) < 0.01
    assert differ(rounded) > 5 * differ(got) + 0.05
