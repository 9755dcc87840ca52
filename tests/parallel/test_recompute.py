"""A model whose layers run again has the gradients of one whose layers do not, and chooses nothing twice."""

import dataclasses
import gc
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dsattn import settings
from dsattn.config import (
    DSAConfig,
    GQAConfig,
    IndexerConfig,
    MLAConfig,
    Mode,
    ModelConfig,
    MoEConfig,
    MTPConfig,
    Recompute,
    TrainConfig,
)
from dsattn.errors import InputError
from dsattn.keys import Layout
from dsattn.model.decoder import Decoder, DecoderOutput
from dsattn.nn.attention import SelfAttention
from dsattn.nn.state import Pass
from dsattn.parallel.recompute import Checkpoints, Stash, checkpoints
from dsattn.selection import Selection
from dsattn.training.stages import set_mode

ROWS = 60
LAYOUTS = (
    Layout.packed([31, 0, 1, 20], total=ROWS),
    Layout.causal(ROWS),
    Layout.packed([7, 40], padded=[10, 50], side="left"),
)
MODES = get_args(Mode)
POLICIES: tuple[Recompute, ...] = ("selective", "full")
INDEXER = IndexerConfig(heads=2, head_dim=8, top_k=4, rope_dim=4)
HIDDEN = dataclasses.replace(INDEXER, query_from="hidden")
PLAIN = ModelConfig(
    hidden_size=16,
    num_layers=2,
    intermediate_size=24,
    attention=MLAConfig(heads=2, q_lora_rank=12, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4),
    dsa=DSAConfig(indexer=INDEXER, deterministic=True),
    init_std=0.3,
)


def variant(*, attention: Any = PLAIN.attention, indexer: IndexerConfig = INDEXER, **rest: Any) -> ModelConfig:
    dsa = {name: rest.pop(name) for name in ("share_every", "multi_layer_teacher") if name in rest}
    dsa = DSAConfig(indexer=indexer, deterministic=True, **dsa)
    return dataclasses.replace(PLAIN, attention=attention, dsa=dsa, **rest)


BOTH = ("latent_kv", "sparse_attention_index")
MODELS = {
    "mla": PLAIN,
    "a gate, no query latent": variant(
        attention=dataclasses.replace(PLAIN.attention, q_lora_rank=None, output_gate="headwise", sink=True),
        indexer=HIDDEN,
    ),
    "gqa, norms and a gate": variant(
        attention=GQAConfig(heads=4, kv_heads=2, head_dim=8, rope_dim=4, qk_norm=True, output_gate="elementwise"),
        indexer=HIDDEN,
    ),
    "sharing": variant(num_layers=4, share_every=2),
    "sharing, all teach": variant(num_layers=4, share_every=2, multi_layer_teacher=True),
    "a dense layer": dataclasses.replace(PLAIN, layer_types=("dsa", "dense")),
    "experts": dataclasses.replace(
        PLAIN, moe=MoEConfig(experts=4, experts_per_token=2, intermediate_size=8, first_dense_layers=1)
    ),
    "mtp": dataclasses.replace(PLAIN, mtp=MTPConfig(depths=2)),
    "mtp shares keys": dataclasses.replace(PLAIN, mtp=MTPConfig(depths=3, repeated=True, shared_components=BOTH[:1])),
    "mtp shares selections": dataclasses.replace(
        PLAIN, mtp=MTPConfig(depths=3, repeated=True, shared_components=BOTH[1:])
    ),
    "mtp shares both, so do layers, all teach": variant(
        num_layers=3,
        share_every=2,
        multi_layer_teacher=True,
        mtp=MTPConfig(depths=2, repeated=True, shared_components=BOTH),
    ),
}
POOLED = variant(indexer=dataclasses.replace(INDEXER, pool_size=2))

Gradients = dict[str, Tensor]


class Calls(TorchDispatchMode):
    """Counts what is called: operators of dsattn by name, matrix products by the shape of their result."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == "dsattn":
            self.count[func.name().removeprefix("dsattn::")] += 1
        elif func == torch.ops.aten.mm.default:
            self.count[tuple(out.shape)] += 1
        return out


def new_model(config: ModelConfig, mode: Mode) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(config).train()
    set_mode(model, mode)
    return model


def attention_of(model: Decoder, layer: int) -> SelfAttention:
    return next(one for one in model.modules() if isinstance(one, SelfAttention) and one.layer_index == layer)


def loss_of(model: Decoder, recompute: Checkpoints | None, mode: Mode, number: int = 0) -> tuple[Tensor, DecoderOutput]:
    """The loss of the number-th micro-batch, which has a layout and tokens of its own."""
    layout = LAYOUTS[number]
    tokens, labels = torch.randint(259, (2, ROWS), generator=torch.Generator().manual_seed(number))
    labels = labels.masked_fill(~layout.real_rows, -100)
    out = model(tokens, layout, Pass(mode=mode, kl_divisor=17, recompute=recompute))
    losses = [] if out.kl_sum is None else [out.kl_sum]
    if mode != "warmup":
        losses.append(model.lm_loss(out.hidden, labels, 19))
        if out.ahead:
            losses.append(model.mtp_losses(out.ahead, labels, layout, 19).sum())
    return torch.stack(losses).sum(), out


def gradients(model: Decoder) -> Gradients:
    taken = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return taken


def train_step(model: Decoder, recompute: Checkpoints | None, mode: Mode) -> tuple[Tensor, Gradients]:
    loss, _ = loss_of(model, recompute, mode)
    loss.backward()
    return loss.detach(), gradients(model)


def assert_same_bits(got: Gradients, expected: Gradients) -> None:
    assert got.keys() == expected.keys()
    assert [name for name, grad in got.items() if not torch.equal(grad, expected[name])] == []


LARGEST = "mtp shares both, so do layers, all teach"
OTHER_MODES = [(name, mode) for name in ("mla", LARGEST) for mode in MODES if mode != "sparse"]


@pytest.mark.parametrize(("name", "mode"), [*((name, "sparse") for name in MODELS), *OTHER_MODES])
def test_losses_and_gradients_are_those_of_the_plain_run(name: str, mode: Mode) -> None:
    model = new_model(MODELS[name], mode)
    loss, expected = train_step(model, None, mode)
    assert any(grad.any() for grad in expected.values())
    for recompute in (*map(Checkpoints, POLICIES), Checkpoints("full", reuse_selection=False)):
        again, got = train_step(model, recompute, mode)
        assert torch.equal(again, loss)
        assert_same_bits(got, expected)


@pytest.mark.parametrize("policy", POLICIES)
def test_autocast_is_repeated_too(policy: Recompute) -> None:
    model = new_model(MODELS["mtp shares keys"], "sparse")
    with torch.autocast("cpu", torch.bfloat16):
        (loss, _), (again, _) = loss_of(model, None, "sparse"), loss_of(model, Checkpoints(policy), "sparse")
    loss.backward()
    expected = gradients(model)
    again.backward()
    assert_same_bits(gradients(model), expected)


def replayed(config: ModelConfig, mode: Mode, recompute: Checkpoints) -> tuple[Counter[Any], int]:
    """What a backward calls, and how often it runs an indexer."""
    model = new_model(config, mode)
    loss, _ = loss_of(model, recompute, mode)
    indexed: list[object] = []
    for indexer in model.indexers():
        indexer.register_forward_hook(lambda *_: indexed.append(None))
    with Calls() as calls:
        loss.backward()
    return calls.count, len(indexed)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["mla", "gqa, norms and a gate"])
def test_a_replay_selects_nothing_and_repeats_no_loss(name: str, policy: Recompute) -> None:
    attention = "sparse_mla" if name == "mla" else "sparse_gqa"
    calls, indexed = replayed(MODELS[name], "sparse", Checkpoints(policy))
    assert calls["select_keys"] == calls["indexer_kl"] == 0
    assert calls[attention] == calls[f"{attention}_backward"] == calls["indexer_kl_backward"] == indexed == 2
    calls, indexed = replayed(MODELS[name], "sparse", Checkpoints(policy, reuse_selection=False))
    assert calls["select_keys"] == indexed == 2, "negative control: without reuse it does"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_replay_inverts_no_selection(policy: Recompute) -> None:
    """One that is shared was inverted where it was made, in the first pass, for its own and the later layer."""
    model = new_model(MODELS["sharing"], "sparse")
    with Calls() as calls:
        loss_of(model, Checkpoints(policy), "sparse")
    assert calls.count["invert"] == calls.count["select_keys"] == 2
    calls, _ = replayed(MODELS["sharing"], "sparse", Checkpoints(policy))
    assert calls["invert"] == 0
    assert calls["sparse_mla_backward"] == 4
    calls, _ = replayed(MODELS["sharing"], "sparse", Checkpoints(policy, reuse_selection=False))
    assert calls["invert"] == 2, "negative control: without reuse it does"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("config", [PLAIN, POOLED], ids=["keys", "pools"])
def test_a_fixed_indexer_does_not_run_again(config: ModelConfig, policy: Recompute) -> None:
    selecting = {"select_keys", "pool_keys", "expand_pools"}
    calls, indexed = replayed(config, "frozen", Checkpoints(policy))
    assert indexed == 0
    assert not selecting & calls.keys()
    assert calls["sparse_mla"] == 2
    calls, indexed = replayed(config, "frozen", Checkpoints(policy, reuse_selection=False))
    assert indexed == 2
    assert selecting & calls.keys(), "negative control"


def test_selective_repeats_no_projection_of_hidden_states() -> None:
    counts = {policy: replayed(PLAIN, "frozen", Checkpoints(policy))[0] for policy in POLICIES}
    latent, keys = (ROWS, 12), (ROWS, 8 + 4)  # both are 12 wide
    assert latent == keys
    backward = 2  # the gradient of q_b_proj's input has that shape too, once a layer
    assert counts["selective"][latent] == backward
    assert counts["full"][latent] == backward + 2 * 2


@pytest.mark.parametrize(("name", "policy"), [("mla", "selective"), (LARGEST, "full")])
@pytest.mark.parametrize(
    "order",
    ["f0 f1 b0 b1", "f0 f1 b1 b0", "f0 f1 b0 f2 b1 b2", "f0 f1 f2 b2 b0 b1"],
    ids=["both, then both", "last first", "1f1b", "interleaved"],
)
def test_micro_batches_in_flight_never_see_each_other(name: str, policy: Recompute, order: str) -> None:
    model = new_model(MODELS[name], "sparse")
    expected: dict[int, Gradients] = {}
    for number in range(3):
        loss_of(model, None, "sparse", number)[0].backward()
        expected[number] = gradients(model)
    losses: dict[int, Tensor] = {}
    for kind, number in ((one[0], int(one[1])) for one in order.split()):
        if kind == "f":
            losses[number], _ = loss_of(model, Checkpoints(policy), "sparse", number)
        else:
            losses.pop(number).backward()
            assert_same_bits(gradients(model), expected[number])
    assert any(not torch.equal(expected[0][name], expected[1][name]) for name in expected[0]), "they differ"


@pytest.fixture
def selections(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many selections are alive."""
    made: list[weakref.ref[Tensor]] = []
    init = Selection.__post_init__

    def watched(self: Selection) -> None:
        init(self)
        made.append(weakref.ref(self.index))

    monkeypatch.setattr(Selection, "__post_init__", watched)

    def alive() -> int:
        gc.collect()
        return sum(one() is not None for one in made)

    return alive


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_kept_goes_with_the_graph(policy: Recompute, selections: Callable[[], int]) -> None:
    model = new_model(PLAIN, "sparse")
    loss, out = loss_of(model, Checkpoints(policy), "sparse")
    del out
    assert selections() == 2
    loss.backward()
    assert selections() == 0
    loss, out = loss_of(model, Checkpoints(policy), "sparse")
    del loss, out
    assert selections() == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_forward_that_fails_leaves_nothing_behind(policy: Recompute, selections: Callable[[], int]) -> None:
    model = new_model(PLAIN, "sparse")
    _, expected = train_step(model, None, "sparse")
    breaks = attention_of(model, 1).get_submodule("o_proj").register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(model, Checkpoints(policy), "sparse")
    assert selections() == 0
    breaks.remove()
    assert_same_bits(train_step(model, Checkpoints(policy), "sparse")[1], expected)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_retained_graph_runs_again_for_each_backward(policy: Recompute) -> None:
    model = new_model(PLAIN, "sparse")
    _, expected = train_step(model, None, "sparse")
    loss, _ = loss_of(model, Checkpoints(policy), "sparse")
    for _ in range(2):
        loss.backward(retain_graph=True)
        assert_same_bits(gradients(model), expected)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_layout_refreshed_before_the_backward_is_seen(policy: Recompute) -> None:
    model, layout = new_model(PLAIN, "sparse"), Layout.packed([31, 29])
    run = Pass(kl_divisor=17, recompute=Checkpoints(policy))
    out = model(torch.arange(ROWS), layout, run)
    layout.copy_(Layout.packed([40, 20]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.hidden.sum().backward()


def run_part(function: Callable[..., Tensor], *operands: Any, policy: Recompute = "full") -> Tensor:
    return Checkpoints(policy)("layer" if policy == "full" else "attention", function, Pass(kl_divisor=17), *operands)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_layer_that_runs_twice_inside_one_checkpoint_is_refused(policy: Recompute) -> None:
    attention = attention_of(new_model(PLAIN, "sparse"), 0)

    def twice(run: Pass, hidden: Tensor, layout: Layout) -> Tensor:
        return attention(attention(hidden, layout, run).hidden, layout, run).hidden

    with pytest.raises(InputError, match="runs twice inside one checkpoint"):
        run_part(twice, torch.randn(ROWS, 16), LAYOUTS[1], policy=policy)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_replay_that_selects_again_must_repeat(policy: Recompute) -> None:
    recompute = Checkpoints(policy, reuse_selection=False)
    model = new_model(dataclasses.replace(PLAIN, dsa=dataclasses.replace(PLAIN.dsa, deterministic=None)), "sparse")
    with pytest.raises(InputError, match="reuse_selection=False, but layer 0 is not deterministic"):
        loss_of(model, recompute, "sparse")
    loss_of(model, recompute, "dense")  # selects nothing
    with settings(deterministic=True):
        loss_of(model, recompute, "sparse")


def test_a_replay_of_other_rows_is_refused() -> None:
    attention, rows = attention_of(new_model(PLAIN, "sparse"), 0), [ROWS]

    def some(run: Pass, hidden: Tensor) -> Tensor:
        return attention(hidden[: rows[0]], Layout.causal(rows[0]), run).hidden

    out = run_part(some, torch.randn(ROWS, 16))
    rows[0] = 40
    with pytest.raises(InputError, match="selection has 60 rows, q has 40"):
        out.sum().backward()


def test_a_replay_that_runs_more_products_is_refused() -> None:
    weight, times = torch.randn(4, 4, requires_grad=True), [1]

    def products(x: Tensor) -> Tensor:
        for _ in range(times[0] - 1):
            torch.mm(x, weight.detach())
        return x @ weight

    out = run_part(lambda run, x: run.graph("loss", products, x).exp(), torch.randn(4, 4))
    times[0] = 2
    with pytest.raises(InputError, match="once more than the first pass"):
        out.sum().backward()


def test_a_probe_sees_the_first_pass_only() -> None:
    model, seen = new_model(PLAIN, "sparse"), []
    run = Pass(kl_divisor=17, recompute=Checkpoints("full"), probe=lambda layer, _: seen.append(layer))
    out = model(torch.arange(ROWS), LAYOUTS[1], run)
    (out.hidden.sum() + out.kl_sum).backward()
    assert seen == [0, 1]


def test_without_gradients_nothing_is_kept(selections: Callable[[], int]) -> None:
    model = new_model(PLAIN, "sparse")
    with torch.no_grad():
        hidden = model(torch.arange(ROWS), LAYOUTS[1], Pass(recompute=Checkpoints("full"))).hidden
        assert selections() == 0
        assert torch.equal(hidden, model(torch.arange(ROWS), LAYOUTS[1]).hidden)


def test_pools_have_no_loss_to_replay() -> None:
    with pytest.raises(InputError, match="a pool's score teaches no single key"):
        loss_of(new_model(POOLED, "sparse"), Checkpoints("full"), "sparse")


def test_compiled_layers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(InputError, match="recompute runs layers that are not compiled"):
        run_part(lambda run, x: x, torch.ones(1))


def test_the_policy_of_a_training_run() -> None:
    assert checkpoints(TrainConfig()) is None
    train = TrainConfig(recompute="full", recompute_reuse_selection=False)
    assert checkpoints(train) == Checkpoints("full", reuse_selection=False)
    with pytest.raises(InputError, match="policy='some' must be one of none, selective, full"):
        Checkpoints("some")  # pyright: ignore[reportArgumentType]


def test_a_stash_that_keeps_nothing_makes_everything_again() -> None:
    stash, made = Stash(lambda name: False), []
    for replaying in (False, True):
        stash.begin(replaying=replaying)
        stash.value("selection", lambda: made.append(None))
        assert not stash.holds("selection")
    assert len(made) == 2
