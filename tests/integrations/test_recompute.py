"""`patch(model, recompute=...)` on DeepSeek-V3.2; the other families are in test_transformers.py."""

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from dsattn.errors import InputError
from dsattn.integrations.microbatch import Mode
from dsattn.integrations.transformers import patch
from dsattn.selection import Selection

pytest.importorskip("transformers")

POLICIES = ["selective", "full"]
VOCAB, ROWS, LATENT = 61, 2 * 20, 18  # no other width is LATENT


def tiny() -> Any:
    """Two layers, one with experts: 8 of up to 20 keys kept."""
    from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

    torch.manual_seed(0)
    mla = {"q_lora_rank": LATENT, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
    config = DeepseekV32Config(
        vocab_size=VOCAB,
        hidden_size=24,
        intermediate_size=16,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        first_k_dense_replace=1,
        index_n_heads=4,
        index_head_dim=16,
        index_topk=8,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        **mla,
        **experts,
    )
    return DeepseekV32ForCausalLM(config).train()


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny()


def loss_of(model: Any, seed: int = 1) -> Tensor:
    ids = torch.randint(1, VOCAB, (2, 20), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss


def gradients(model: nn.Module) -> dict[str, Tensor]:
    taken = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return taken


def step(
    model: Any, recompute: Any = "none", mode: Mode = "sparse", again: int = 1
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and gradients of `again` backwards through one graph."""
    with patch(model, mode=mode, recompute=recompute, deterministic=True):
        loss = loss_of(model)
        for left in reversed(range(again)):
            loss.backward(retain_graph=left > 0)
    return loss.detach(), gradients(model)


def assert_same_bits(got: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    assert torch.equal(got[0], expected[0])
    assert got[1].keys() == expected[1].keys()
    assert [name for name, grad in got[1].items() if not torch.equal(grad, expected[1][name])] == []


def checkpoint_itself(model: Any, *, on: bool = True) -> None:
    """What gradient_checkpointing_enable does, whose name is in flux."""
    run = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    for layer in model.model.layers:
        layer.gradient_checkpointing, layer._gradient_checkpointing_func = on, run


class Calls(TorchDispatchMode):
    """Counts dsattn's operators by name, and products by the shape of their result."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == "dsattn":
            self.count[func.__name__.split(".")[0]] += 1
        if func is torch.ops.aten.mm.default:
            self.count[tuple(out.shape)] += 1
        return out


def replayed(model: Any, recompute: Any, mode: Mode = "sparse") -> Counter[Any]:
    """What a backward calls."""
    with patch(model, mode=mode, recompute=recompute):
        loss = loss_of(model)
        with Calls() as calls:
            loss.backward()
    gradients(model)
    return calls.count


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
        return sum(one() is not None for one in made)

    return alive


@pytest.mark.parametrize("mode", ["sparse", "warmup", "frozen"])
def test_losses_and_gradients_are_those_without(model, mode) -> None:
    expected = step(model, mode=mode)
    assert any(grad.any() for grad in expected[1].values())
    for policy in POLICIES:
        assert_same_bits(step(model, policy, mode), expected)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_replay_selects_nothing_and_repeats_no_loss(model, policy) -> None:
    calls = replayed(model, policy)
    assert calls["select_keys"] == calls["indexer_kl"] == calls["dsa_attention"] == 0
    assert calls["sparse_mla"] == calls["sparse_mla_backward"] == calls["indexer_kl_backward"] == 2
    assert replayed(model, "none")["sparse_mla"] == 0, "negative control"
    calls = replayed(model, policy, "warmup")
    assert calls["indexer_kl"] == 0
    assert calls["indexer_kl_backward"] == 2


@pytest.mark.parametrize("policy", POLICIES)
def test_a_fixed_indexer_does_not_run_again(model, policy) -> None:
    names = [name for name, _ in model.named_modules() if name.endswith("indexer.wq_b")]
    runs: list[str] = []
    hooks = [model.get_submodule(name).register_forward_hook(lambda *_: runs.append("")) for name in names]
    step(model, policy, "frozen")
    fixed = len(runs)
    step(model, policy, "sparse")
    for hook in hooks:
        hook.remove()
    assert (fixed, len(runs) - fixed) == (2, 4)


def test_selective_repeats_no_projection_of_hidden_states(model) -> None:
    counts = {policy: replayed(model, policy, "frozen")[ROWS, LATENT] for policy in POLICIES}
    backward = 2  # the gradient of q_b_proj's input has that shape too, once a layer
    assert counts == {"selective": backward, "full": backward + 2}


def test_each_policy_hands_less_to_autograd(model) -> None:
    kept = {}
    for policy in ("none", *POLICIES):
        sizes: list[int] = []
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda x, s=sizes: (s.append(x.numel()), x)[1], lambda x: x)
        with patch(model, recompute=policy), hooks:
            loss_of(model)
        kept[policy] = sum(sizes)
    assert kept["full"] < kept["selective"] < kept["none"]


class Dropped(nn.Module):
    """What an adapter with dropout does to a projection."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base, self.dropout = base, nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.base(self.dropout(x))


def test_dropout_of_adapters_repeats() -> None:
    model = tiny()
    layer = model.model.layers[0]
    layer.self_attn.q_a_proj, layer.mlp.down_proj = Dropped(layer.self_attn.q_a_proj), Dropped(layer.mlp.down_proj)
    results = []
    for policy in ("none", *POLICIES):
        torch.manual_seed(3)
        results.append(step(model, policy))
    torch.manual_seed(4)
    assert not torch.equal(step(model)[0], results[0][0]), "negative control"
    for result in results[1:]:
        assert_same_bits(result, results[0])


@pytest.mark.parametrize("policy", POLICIES)
def test_a_retained_graph_runs_again_and_micro_batches_never_meet(model, policy) -> None:
    assert_same_bits(step(model, policy, again=2), step(model, again=2))
    results = []
    for recompute in ("none", policy):
        with patch(model, recompute=recompute, deterministic=True):
            first, second = loss_of(model, 1), loss_of(model, 2)
            first.backward()
            second.backward()
        results.append((first.detach() + second.detach(), gradients(model)))
    assert_same_bits(results[1], results[0])


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_kept_goes_with_the_graph(model, policy, selections) -> None:
    with patch(model, recompute=policy):
        loss = loss_of(model)
        assert selections() == 2
        loss.backward()
        assert selections() == 0
        loss = loss_of(model)
        del loss
        assert selections() == 0
        with torch.no_grad():
            loss_of(model)
        assert selections() == 0
        breaks = model.model.layers[1].self_attn.o_proj.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss_of(model)
        breaks.remove()
        assert selections() == 0
    gradients(model)


def test_a_graph_of_the_models_own_checkpointing_goes_too(selections) -> None:
    model = tiny()
    checkpoint_itself(model)
    with patch(model):
        loss = loss_of(model)
        assert selections() == 2
        del loss
        assert selections() == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_positions_that_change_before_the_backward_are_seen(model, policy) -> None:
    ids, positions = torch.ones(1, 9, dtype=torch.long), torch.arange(9)[None]
    with patch(model, recompute=policy):
        loss = model(ids, position_ids=positions, labels=ids).loss
        positions.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    gradients(model)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("policy", "mode"), [("none", "sparse"), ("selective", "sparse"), ("full", "sparse"), ("full", "warmup")]
)
def test_under_fsdp(model, policy, mode) -> None:
    """FSDP copies containers of tensors that enter a layer; a copy of a report would lose its losses."""
    expected, sharded = step(model, mode=mode), tiny()
    options: dict[str, Any] = {
        "mesh": init_device_mesh("cpu", (1,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.float32),  # then it copies more
        "reshard_after_forward": mode != "warmup",
    }
    with patch(sharded, mode=mode, recompute=policy, deterministic=True):
        for layer in sharded.model.layers:
            fully_shard(layer, **options)
        fully_shard(sharded, **options)
        loss = loss_of(sharded)
        loss.backward()
        got = {name: cast(Any, grad).full_tensor() for name, grad in gradients(sharded).items()}
    assert_same_bits((loss.detach(), got), expected)


@pytest.mark.parametrize("policy", POLICIES)
def test_undo_leaves_no_trace_and_generation_is_not_touched(model, policy) -> None:
    ids = torch.ones(1, 12, dtype=torch.long)
    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **options)
    patched = patch(model, recompute=policy)
    assert str(patched).endswith(f"recompute {policy}")
    assert torch.equal(model.generate(ids, **options), expected)
    with pytest.raises(InputError, match="has a forward of its own"):
        patch(model, recompute=policy)
    patched.undo()
    assert not any("forward" in m.__dict__ or m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_refuses_checkpoints_around_checkpoints() -> None:
    model = tiny()
    with pytest.raises(InputError, match="recompute='most' must be one of none, selective, full"):
        patch(model, recompute="most")
    checkpoint_itself(model)
    with pytest.raises(InputError, match=r"recompute='full' and the model's own .*gradient_checkpointing_disable"):
        patch(model, recompute="full")
    assert not any("forward" in m.__dict__ for m in model.modules())
    checkpoint_itself(model, on=False)
    with patch(model, recompute="selective"):
        checkpoint_itself(model)
        with pytest.raises(InputError, match="recompute='selective' and the model's own gradient checkpointing"):
            loss_of(model)
    checkpoint_itself(model, on=False)
    expected = step(model)
    model.model.layers[0] = checkpoint_wrapper(model.model.layers[0])
    with pytest.raises(InputError, match="recompute='full' and the model's own"):
        patch(model, recompute="full")
    got = step(model)
    assert_same_bits(
        (got[0], {name.replace("_checkpoint_wrapped_module.", ""): g for name, g in got[1].items()}), expected
    )
    model.model.layers[0] = model.model.layers[0]._checkpoint_wrapped_module
    model.model.layers[1].mlp.forward = lambda x: x
    with pytest.raises(InputError, match=r"layers\.1\.mlp has a forward of its own"):
        patch(model, recompute="selective")
    assert not any("forward" in m.__dict__ for m in model.model.layers[0].modules()), "nothing stays of a failed patch"
