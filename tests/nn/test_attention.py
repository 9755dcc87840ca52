"""What holds for MLA and GQA alike: modes, who learns from what, documents, padding, recompute, compile."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from dsattn.config import DSAConfig, GQAConfig, IndexerConfig, KDAConfig, MLAConfig
from dsattn.errors import InputError
from dsattn.keys import Layout
from dsattn.nn import GQASelfAttention, MLASelfAttention, gqa, linear_attention, mla
from dsattn.nn.attention import SelfAttention
from dsattn.nn.state import Handed, LayerCache, Pass
from dsattn.ops import indexer_kl, output_gate
from dsattn.selection import invert

MODEL, ROWS, TOP_K = 16, 24, 5
MODES = ("dense", "warmup", "sparse", "frozen")


def attention(kind: str, role: str = "selects", relu: bool = True, **dsa: Any) -> SelfAttention:
    source = "hidden" if kind == "gqa" else "q_latent"
    indexer = IndexerConfig(heads=2, head_dim=8, top_k=TOP_K, query_from=source, rope_dim=4, relu=relu)
    options = {"dsa": DSAConfig(indexer=indexer, **dsa), "role": role, "layer_index": 3}
    if kind == "gqa":
        made = GQASelfAttention(MODEL, GQAConfig(heads=4, kv_heads=2, head_dim=8, rope_dim=4, sink=True), **options)
    else:
        sizes = {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
        made = MLASelfAttention(MODEL, MLAConfig(heads=4, output_gate="headwise", **sizes), **options)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
    return made


@pytest.fixture(params=["mla", "gqa"])
def kind(request) -> str:
    return request.param


def gradients(module: SelfAttention) -> dict[str, torch.Tensor]:
    """What reached each parameter; exact zeros count as nothing."""
    return {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None and p.grad.any()}


def indexer_names(module: SelfAttention) -> set[str]:
    return {name for name, _ in module.named_parameters() if name.startswith("indexer.")}


@pytest.mark.parametrize("mode", MODES)
def test_the_output_teaches_everything_but_the_indexer(kind, mode):
    module = attention(kind)
    hidden = torch.randn(ROWS, MODEL, requires_grad=True)
    module(hidden, Layout.causal(ROWS), Pass(mode=mode)).hidden.square().sum().backward()
    everything = {name for name, _ in module.named_parameters()}
    assert set(gradients(module)) == everything - indexer_names(module)
    assert hidden.grad.abs().max() > 0


@pytest.mark.parametrize("mode", ["warmup", "sparse"])
def test_the_kl_teaches_the_indexer_alone(kind, mode):
    module = attention(kind)
    hidden = torch.randn(ROWS, MODEL, requires_grad=True)
    out = module(hidden, Layout.packed([10, 13], total=ROWS), Pass(mode=mode))
    assert out.kl.dtype == torch.float32
    assert out.kl > 1e-3
    out.kl.backward()
    assert set(gradients(module)) == indexer_names(module)
    assert hidden.grad is None or not hidden.grad.any()


@pytest.mark.parametrize("mode", ["warmup", "sparse"])
def test_both_losses_together_are_their_sum(kind, mode):
    module, hidden, layout = attention(kind), torch.randn(ROWS, MODEL), Layout.causal(ROWS)
    parts = {}
    for what in ("hidden", "kl", "both"):
        module.zero_grad()
        out = module(hidden, layout, Pass(mode=mode))
        loss = (out.hidden.square().sum() if what != "kl" else 0) + (3 * out.kl if what != "hidden" else 0)
        loss.backward()
        parts[what] = gradients(module)
    for name, grad in parts["both"].items():
        alone = parts["kl"] if name.startswith("indexer.") else parts["hidden"]
        torch.testing.assert_close(grad, alone[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("mode", MODES)
def test_when_the_kl_is_computed(kind, mode):
    module, hidden, layout = attention(kind), torch.randn(ROWS, MODEL), Layout.causal(ROWS)
    learns = mode in ("warmup", "sparse")
    assert (module(hidden, layout, Pass(mode=mode)).kl is not None) == learns
    assert module(hidden, layout, Pass(mode=mode, with_kl=False)).kl is None
    with torch.no_grad():
        assert module(hidden, layout, Pass(mode=mode)).kl is None
        asked = module(hidden, layout, Pass(mode=mode, with_kl=True)).kl
    assert (asked is not None) == learns
    assert asked is None or not asked.requires_grad
    module.eval()
    assert module(hidden, layout, Pass(mode=mode)).kl is None


@pytest.mark.parametrize("mode", ["warmup", "sparse"])
def test_the_kl_divisor_is_the_callers(kind, mode):
    module, hidden, layout = attention(kind), torch.randn(ROWS, MODEL), Layout.packed([9, 11], total=ROWS)
    own, by_five, by_tensor = (
        module(hidden, layout, Pass(mode=mode, kl_divisor=divisor)).kl for divisor in (None, 5, torch.tensor(5.0))
    )
    torch.testing.assert_close(own * 20, by_five * 5)
    torch.testing.assert_close(by_tensor, by_five)


def test_sparse_and_frozen_attend_alike_and_dense_and_warmup_do(kind):
    module, hidden, layout = attention(kind), torch.randn(ROWS, MODEL), Layout.causal(ROWS)
    out = {mode: module(hidden, layout, Pass(mode=mode)) for mode in MODES}
    torch.testing.assert_close(out["sparse"].hidden, out["frozen"].hidden)
    torch.testing.assert_close(out["dense"].hidden, out["warmup"].hidden)
    assert (out["sparse"].hidden - out["dense"].hidden).abs().max() > 1e-3
    assert out["dense"].selection is None
    assert out["warmup"].selection is None
    assert torch.equal(out["sparse"].selection.index, out["frozen"].selection.index)
    assert out["sparse"].selection.index.shape == (ROWS, TOP_K)
    assert out["sparse"].selection.every_row_has_a_key


def test_without_relu(kind):
    hidden, layout = torch.randn(ROWS, MODEL), Layout.causal(ROWS)
    outs = []
    for relu in (True, False):
        torch.manual_seed(5)
        outs.append(attention(kind, relu=relu)(hidden, layout))
    assert not torch.equal(outs[0].selection.index, outs[1].selection.index)
    assert (outs[0].kl - outs[1].kl).abs() > 1e-4


def test_the_indexer_does_not_run_in_dense_mode(kind):
    module, hidden, layout = attention(kind), torch.randn(ROWS, MODEL), Layout.causal(ROWS)
    with torch.no_grad():
        for parameter in module.indexer.parameters():
            parameter.fill_(float("nan"))
    module.indexer.register_forward_hook(lambda *_: pytest.fail("the indexer ran"))
    assert module(hidden, layout, Pass(mode="dense")).hidden.isfinite().all()
    with pytest.raises(pytest.fail.Exception):
        module(hidden, layout, Pass(mode="frozen"))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_packed_documents_equal_each_alone(kind, mode, side):
    """With NaN in every padding row, and an empty document, and a document of one token."""
    module, lengths, padded = attention(kind).double(), [9, 0, 1, 11], [12, 2, 1, 11]
    layout = Layout.packed(lengths, padded=padded, total=28, side=side)
    hidden = torch.randn(28, MODEL).double().masked_fill(~layout.real_rows[:, None], float("nan")).requires_grad_()
    out = module(hidden, layout, Pass(mode=mode, kl_divisor=21))
    assert torch.equal(out.hidden[~layout.real_rows], torch.zeros(7, MODEL).double())
    (out.hidden.square().sum() + (0 if out.kl is None else out.kl)).backward()
    packed, packed_input = gradients(module), hidden.grad
    assert torch.equal(packed_input[~layout.real_rows], torch.zeros(7, MODEL).double())

    module.zero_grad()
    kl = torch.zeros((), dtype=torch.float64)
    for number, length in enumerate(lengths):
        first = sum(padded[:number]) + (padded[number] - length if side == "left" else 0)
        rows = slice(first, first + length)
        part = hidden.detach()[rows].requires_grad_()
        alone = module(part, Layout.causal(length), Pass(mode=mode, kl_divisor=21))
        torch.testing.assert_close(out.hidden[rows], alone.hidden, rtol=1e-8, atol=1e-8)
        kl = kl + (0 if alone.kl is None else alone.kl.detach())
        (alone.hidden.square().sum() + (0 if alone.kl is None else alone.kl)).backward()
        if length:
            torch.testing.assert_close(packed_input[rows], part.grad, rtol=1e-8, atol=1e-8)
    if out.kl is not None:
        torch.testing.assert_close(out.kl, kl, rtol=1e-8, atol=1e-8)
    for name, grad in gradients(module).items():
        torch.testing.assert_close(packed[name], grad, rtol=1e-8, atol=1e-8)


def test_a_layout_of_the_wrong_documents_changes_the_output(kind):
    module, hidden = attention(kind), torch.randn(ROWS, MODEL)
    right, stale = (module(hidden, Layout.packed(lengths)).hidden for lengths in ([10, 14], [12, 12]))
    assert (right - stale)[10:].abs().max() > 1e-3
    torch.testing.assert_close(right[:10], stale[:10])


def test_a_sharing_layer_uses_the_selection_it_is_handed(kind):
    source, sharing = attention(kind), attention(kind, role="shares")
    hidden, layout = torch.randn(ROWS, MODEL), Layout.causal(ROWS)
    assert not indexer_names(sharing)
    chosen = source(hidden, layout).selection
    out = sharing(hidden, layout, selection=chosen)
    assert out.selection is chosen
    assert out.kl is None
    recent = source(hidden.flip(0), layout).selection
    assert (sharing(hidden, layout, selection=recent).hidden - out.hidden).abs().max() > 1e-4


@pytest.mark.parametrize("mode", ["sparse", "frozen"])
def test_a_selection_that_is_shared_carries_its_inverse(kind, mode):
    """Where gradients are deterministic; it changes none."""
    hidden, layout, found = torch.randn(ROWS, MODEL), Layout.packed([10, 13], total=ROWS), []
    for every in (1, 2):
        torch.manual_seed(0)
        source = attention(kind, deterministic=True, share_every=every)
        sharing = attention(kind, role="shares", deterministic=True, share_every=every)
        first = source(hidden, layout, Pass(mode=mode))
        second = sharing(hidden, layout, Pass(mode=mode), selection=first.selection)
        (first.hidden + second.hidden).square().sum().backward()
        found.append(gradients(source) | {f"shares.{name}": grad for name, grad in gradients(sharing).items()})
        inverse = first.selection.inverse_of(ROWS)
        assert (inverse is not None) == (every == 2)
        if inverse is not None:
            expected = invert(first.selection.index, first.selection.length, ROWS)
            assert all(got.equal(one) for got, one in zip(inverse, expected, strict=True))
        with torch.no_grad():
            assert source(hidden, layout, Pass(mode=mode)).selection.inverse is None
    assert found[0].keys() == found[1].keys()
    assert all(grad.equal(found[1][name]) for name, grad in found[0].items())
    for changed in ({"deterministic": False}, {"deterministic": True, "backend": "reference"}):
        other = attention(kind, share_every=2, **changed)
        assert other(hidden, layout, Pass(mode=mode)).selection.inverse is None


@pytest.mark.parametrize("mode", ["warmup", "sparse"])
def test_a_sharing_layer_teaches_the_indexer_it_is_handed(kind, mode):
    """Its own attention is the target; nothing else learns from it, and without the indexer there is no loss."""
    source, sharing = attention(kind), attention(kind, role="shares")
    layout = Layout.packed([10, 13], total=ROWS)
    first, hidden = torch.randn(ROWS, MODEL), torch.randn(ROWS, MODEL, requires_grad=True)
    run, seen = Pass(mode=mode), []
    out = source(first, layout, run)
    chosen = out.selection
    assert sharing(hidden, layout, run, selection=chosen).kl is None
    handed = Pass(mode=mode, handed=Handed(index=out.index), probe=lambda *what: seen.append(what[1]))
    kl = sharing(hidden, layout, handed, selection=chosen).kl
    what = seen[0]
    assert what.index is None  # of the layer that was seen
    wanted = indexer_kl(
        *out.index, what.q, what.kv, what.lse, layout.keys, chosen, scale=what.scale, real_rows=layout.real_rows
    )
    torch.testing.assert_close(kl, wanted)
    assert (kl - out.kl).abs() > 1e-4
    kl.backward()
    assert set(gradients(source)) == indexer_names(source)
    assert not gradients(sharing)
    assert hidden.grad is None or not hidden.grad.any()
    for quiet in (Pass(mode=mode, handed=handed.handed, with_kl=False), Pass(mode="dense", handed=handed.handed)):
        assert sharing(hidden, layout, quiet, selection=chosen if quiet.mode == "sparse" else None).kl is None


def test_keys_that_are_handed_to_a_layer_with_its_own_are_an_error():
    module, hidden, layout = attention("gqa"), torch.randn(ROWS, MODEL), Layout.causal(ROWS)
    entries = module(hidden, layout).entries
    with pytest.raises(InputError, match=r"handed\.entries is given, but layer 3 has keys of its own"):
        module(hidden, layout, Pass(handed=Handed(entries=entries)))


@pytest.mark.parametrize("mode", MODES)
def test_a_layer_hands_out_what_it_attended_to(kind, mode):
    module, hidden, layout = attention(kind), torch.randn(ROWS, MODEL, requires_grad=True), Layout.causal(ROWS)
    out = module(hidden, layout, Pass(mode=mode))
    assert all(x.shape[0] == ROWS and x.requires_grad for x in out.entries)
    assert len(out.entries) == (1 if kind == "mla" and mode in ("sparse", "frozen") else 2)
    assert (out.index is None) == (mode == "dense")
    if out.index is not None:
        assert {x.requires_grad for x in out.index} == {mode != "frozen"}


def test_a_selecting_layer_can_be_handed_a_selection_too(kind):
    module, hidden, layout = attention(kind), torch.randn(ROWS, MODEL), Layout.causal(ROWS)
    own = module(hidden, layout)
    module.indexer.register_forward_hook(lambda *_: pytest.fail("the indexer ran"))
    given = module(hidden, layout, selection=own.selection)
    assert given.selection is own.selection
    assert given.kl is None
    torch.testing.assert_close(given.hidden, own.hidden)


@pytest.mark.parametrize("mode", ["sparse", "frozen"])
def test_a_missing_selection_is_an_error(kind, mode):
    module = attention(kind, role="shares")
    with pytest.raises(InputError, match=r"layer 3 has role 'shares'.*pass the selection of its source layer"):
        module(torch.zeros(ROWS, MODEL), Layout.causal(ROWS), Pass(mode=mode))
    assert module(torch.zeros(ROWS, MODEL), Layout.causal(ROWS), Pass(mode="warmup")).selection is None


def test_a_selection_that_would_be_ignored_is_an_error(kind):
    module, hidden, layout = attention(kind), torch.randn(ROWS, MODEL), Layout.causal(ROWS)
    chosen = module(hidden, layout).selection
    for mode in ("dense", "warmup"):
        with pytest.raises(InputError, match=f"runs in mode '{mode}'"):
            module(hidden, layout, Pass(mode=mode), selection=chosen)
    with pytest.raises(InputError, match="has role 'dense'"):
        attention(kind, role="dense")(hidden, layout, selection=chosen)


def test_a_dense_layer_is_dense_in_every_mode(kind):
    module, hidden, layout = attention(kind, role="dense"), torch.randn(ROWS, MODEL), Layout.causal(ROWS)
    assert not indexer_names(module)
    outs = [module(hidden, layout, Pass(mode=mode)) for mode in MODES]
    assert all(torch.equal(out.hidden, outs[0].hidden) and out.kl is None for out in outs)


def test_an_unknown_role_is_an_error():
    with pytest.raises(InputError, match="role='select'"):
        attention("mla", role="select")
    with pytest.raises(InputError, match="dsa=None, but role='shares' needs a DSAConfig"):
        MLASelfAttention(MODEL, MLAConfig(), role="shares")


@pytest.mark.parametrize("shape", [(ROWS - 1, MODEL), (1, ROWS, MODEL)])
def test_hidden_states_that_do_not_fit_are_an_error(kind, shape):
    with pytest.raises(InputError, match=rf"hidden must be \[{ROWS}, M\]"):
        attention(kind)(torch.zeros(shape), Layout.causal(ROWS))


def test_keys_that_do_not_fit_are_an_error(kind):
    module, hidden = attention(kind).eval(), torch.randn(ROWS, MODEL)
    cache = module(hidden, Layout.causal(ROWS), cache=LayerCache()).cache
    with pytest.raises(InputError, match=r"layout has 20 keys, but there are 25.*Layout.continuation"):
        module(hidden[:1], Layout.continuation(19), cache=cache)
    with pytest.raises(InputError, match="layout has 24 keys, but there are 12"):
        module(hidden[:12], Layout.causal(ROWS).shard_rows(0, 2))
    dense = module(hidden, Layout.causal(ROWS), Pass(mode="dense"), cache=LayerCache()).cache
    with pytest.raises(InputError, match="without index keys"):
        module(hidden[:1], Layout.continuation(ROWS), cache=dense)


@pytest.mark.parametrize("mode", MODES)
def test_a_probe_sees_what_recall_needs(kind, mode):
    module, hidden, layout = attention(kind), torch.randn(ROWS, MODEL), Layout.causal(ROWS)
    seen = []
    with torch.no_grad():
        out = module(hidden, layout, Pass(mode=mode, probe=lambda *what: seen.append(what)))
    (index, what), *rest = seen
    assert (index, rest) == (3, [])
    assert what.selection is out.selection
    assert (what.index is None) == (mode == "dense")
    keys = what.kv if what.kv.dim() == 2 else what.kv.repeat_interleave(what.q.shape[1] // what.kv.shape[1], dim=1)
    product = "thd,sd->ths" if what.kv.dim() == 2 else "thd,shd->ths"
    read = layout.keys.mask(ROWS) if out.selection is None else out.selection.mask(ROWS)
    logits = (torch.einsum(product, what.q, keys) * what.scale).masked_fill(~read[:, None], -torch.inf)
    torch.testing.assert_close(what.lse, logits.logsumexp(-1), rtol=1e-5, atol=1e-5)
    if what.index is not None:
        assert [list(x.shape) for x in what.index] == [[ROWS, 2, 8], [ROWS, 8], [ROWS, 2]]


@pytest.mark.parametrize("mode", ["warmup", "sparse"])
def test_autocast_does_not_reach_into_the_ops(kind, mode):
    """Operands are bf16; products and softmax stay fp32, or the selection and the KL's target would be bf16 too."""
    module, layout, seen = attention(kind), Layout.causal(ROWS), []
    with torch.autocast("cpu", torch.bfloat16):
        out = module(torch.randn(ROWS, MODEL), layout, Pass(mode=mode, probe=lambda *what: seen.append(what[1])))
    what = seen[0]
    assert {what.q.dtype, what.kv.dtype, what.index.q.dtype, what.index.k.dtype} == {torch.bfloat16}
    assert (what.lse.dtype, out.kl.dtype) == (torch.float32, torch.float32)
    keys = what.kv if what.kv.dim() == 2 else what.kv.repeat_interleave(what.q.shape[1] // what.kv.shape[1], dim=1)
    product = "thd,sd->ths" if what.kv.dim() == 2 else "thd,shd->ths"
    read = layout.keys.mask(ROWS) if out.selection is None else out.selection.mask(ROWS)
    logits = (torch.einsum(product, what.q.double(), keys.double()) * what.scale).masked_fill(
        ~read[:, None], -torch.inf
    )
    torch.testing.assert_close(what.lse, logits.logsumexp(-1).float(), rtol=1e-5, atol=1e-5)
    again = indexer_kl(*what.index, what.q, what.kv, what.lse, layout.keys, out.selection, scale=what.scale)
    torch.testing.assert_close(out.kl, again, rtol=1e-5, atol=1e-6)


def test_a_probe_holds_no_graph(kind):
    seen = []
    attention(kind)(torch.randn(ROWS, MODEL), Layout.causal(ROWS), Pass(probe=lambda *what: seen.append(what)))
    what = seen[0][1]
    assert not any(x.requires_grad for x in (what.q, what.kv, what.lse, *what.index))


@pytest.mark.parametrize("mode", ["sparse", "frozen"])
def test_precision_changes_the_selection_alone(kind, mode, monkeypatch):
    """Given the selection of fp8, bf16 has the same output, loss and gradients, bit for bit."""
    module, hidden, layout = attention(kind), torch.randn(ROWS, MODEL), Layout.causal(ROWS)

    def run(precision):
        module.dsa = replace(module.dsa, precision=precision)
        module.zero_grad()
        out = module(hidden, layout, Pass(mode=mode))
        (out.hidden.square().sum() + (0 if out.kl is None else out.kl)).backward()
        return out, gradients(module)

    plain, _ = run("bf16")
    low, its = run("fp8")
    assert not torch.equal(low.selection.index, plain.selection.index), "or this shows nothing"
    monkeypatch.setattr("dsattn.nn.attention.select_keys", lambda *_, **options: low.selection)
    given, own = run("bf16")
    assert torch.equal(given.hidden, low.hidden)
    assert (mode == "frozen") == (given.kl is None)
    assert its.keys() == own.keys()
    assert all(torch.equal(grad, own[name]) for name, grad in its.items())


@pytest.mark.parametrize("mode", MODES)
def test_recompute_changes_no_bit(kind, mode):
    torch.use_deterministic_algorithms(True)
    module, layout = attention(kind), Layout.packed([9, 13], total=ROWS)
    hidden = torch.randn(ROWS, MODEL)

    def loss(hidden, recompute):
        def layer(hidden):
            out = module(hidden, layout, Pass(mode=mode))
            return out.hidden, out.kl

        out, kl = checkpoint(layer, hidden, use_reentrant=False) if recompute else layer(hidden)
        return out.square().sum() + (0 if kl is None else kl)

    results = []
    for recompute in (False, True):
        module.zero_grad()
        given = hidden.clone().requires_grad_()
        value = loss(given, recompute)
        value.backward()
        results.append((value, given.grad, gradients(module)))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert results[0][2].keys() == results[1][2].keys()
    assert all(torch.equal(grad, results[1][2][name]) for name, grad in results[0][2].items())


@pytest.mark.parametrize("mode", ["warmup", "sparse"])
def test_compiles_into_one_graph(kind, mode):
    module, layout = attention(kind), Layout.packed([9, 13], total=ROWS)
    hidden = torch.randn(ROWS, MODEL)

    def step(hidden):
        out = module(hidden, layout, Pass(mode=mode))
        return out.hidden, out.kl

    results = []
    for run in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        module.zero_grad()
        given = hidden.clone().requires_grad_()
        out, kl = run(given)
        (out.square().sum() + kl).backward()
        results.append((out, kl, given.grad, gradients(module)))
    for eager, compiled in zip(results[0][:3], results[1][:3], strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-6)
    for name, grad in results[0][3].items():
        torch.testing.assert_close(results[1][3][name], grad, rtol=1e-5, atol=1e-5)


def test_meta_device():
    for kind in ("mla", "gqa"):
        with torch.device("meta"):
            module = attention(kind)
        assert {p.device.type for p in module.parameters()} == {"meta"}


@pytest.mark.parametrize(
    ("kind", "granularity", "cast"),
    [
        ("mla", "elementwise", "before"),
        ("mla", "headwise", "before"),
        ("gqa", "elementwise", "after"),
        ("gqa", "headwise", "before"),
        ("kda", "elementwise", "after"),
        ("kda", "headwise", "after"),
    ],
)
def test_each_attention_gates_with_its_own_cast(kind, granularity, cast, monkeypatch):
    """One helper, and where each family of models rounds."""
    asked = []

    def spy(out, gate, **options):
        asked.append({"cast": "before", **options})  # the default
        return output_gate(out, gate, **options)

    for module in (mla, gqa, linear_attention):
        monkeypatch.setattr(module, "output_gate", spy)
    sizes = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
    layer = {
        "mla": lambda: MLASelfAttention(MODEL, MLAConfig(heads=2, output_gate=granularity, **sizes)),
        "gqa": lambda: GQASelfAttention(MODEL, GQAConfig(heads=2, kv_heads=1, head_dim=4, output_gate=granularity)),
        "kda": lambda: linear_attention.KDASelfAttention(
            MODEL, KDAConfig(heads=2, head_dim=4, output_gate=granularity)
        ),
    }[kind]()
    layer(torch.randn(5, MODEL), Layout.causal(5)).hidden.sum().backward()
    assert asked == [{"granularity": granularity, "cast": cast}]
    gates = [p.grad for name, p in layer.named_parameters() if "gate_proj" in name or "g_b_proj" in name]
    assert all(grad.any() for grad in gates)
    assert len(gates) == 1
