"""The core attention on a stand-in for Megatron's class: padding, samples, sharing, replays, refusals.

That it is Megatron's function is the business of megatron_parity.py.
"""

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsattn.errors import ConfigError, InputError
from dsattn.integrations import megatron_attention
from dsattn.integrations.megatron_attention import CoreAttention, Shared
from dsattn.integrations.megatron_config import Options
from dsattn.selection import Selection

HEADS, LATENT, ROPE, VALUE, HIDDEN, QUERY = 2, 12, 4, 6, 10, 8
FIELDS: dict[str, Any] = {
    "dsa_indexer_n_heads": 3,
    "dsa_indexer_head_dim": 8,
    "dsa_indexer_topk": 3,
    "dsa_indexer_topk_freq": 2,
    "dsa_indexer_loss_coeff": 0.5,
    "dsa_indexer_use_sparse_loss": True,
    "dsa_indexer_rotate_activation": True,
    "dsa_indexer_rope_interleaved": False,
    "dsa_indexer_scoring_relu": True,
    "dsa_indexer_k_norm_fp32": False,
    "kv_lora_rank": LATENT,
    "qk_pos_emb_head_dim": ROPE,
    "rope_type": "rope",
    "sequence_parallel": False,
    "deterministic_mode": False,
    "attention_backend": SimpleNamespace(name="auto"),
    "calculate_per_token_loss": False,
    "recompute_granularity": None,
    "recompute_modules": None,
}


class Linear(nn.Linear):
    def forward(self, input: Tensor) -> tuple[Tensor, None]:
        return super().forward(input), None


class Indexer(nn.Module):
    def __init__(self, config: Any):
        super().__init__()
        heads, width = config.dsa_indexer_n_heads, config.dsa_indexer_head_dim
        self.linear_wq_b = Linear(QUERY, heads * width, bias=False)
        self.linear_wk = Linear(HIDDEN, width, bias=False)
        self.k_norm = nn.LayerNorm(width)
        self.linear_weights_proj = Linear(HIDDEN, heads, bias=False)


class Base(nn.Module):
    """As much of Megatron's DSAttention as is called: its constructor."""

    def __init__(self, config: Any, submodules: Any, layer_number: int, source: int | None = None):
        super().__init__()
        self.config, self.layer_number, self.softmax_scale = config, layer_number, 0.3
        self.source_layer = layer_number if source is None else source
        self.index_share = config.shares
        self.pg_collection = SimpleNamespace(tp=None, cp=None)
        self.indexer = Indexer(config) if source is None else None


class Core(CoreAttention, Base): ...


def config_of(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**FIELDS, "shares": False, **fields})


@pytest.fixture(autouse=True)
def losses(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Losses as they are logged; attached without Megatron's scale."""
    held: list[Tensor] = []
    monkeypatch.setattr(megatron_attention, "log_loss", lambda layer, loss, groups: held.append(loss))
    monkeypatch.setattr(megatron_attention, "attach_loss", lambda out, loss: out + (loss - loss.detach()))
    return held


def packed(lengths: list[int], slots: list[int]) -> SimpleNamespace:
    ends = [torch.tensor([0, *one]).cumsum(0).int() for one in (lengths, slots)]
    names = dict(zip(("cu_seqlens_q", "cu_seqlens_q_padded"), ends, strict=True))
    return SimpleNamespace(qkv_format="thd", local_cp_size=None, cp_group=None, **names)


def inputs(rows: int, batch: int = 1, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(rows, batch, *shape, generator=generator)

    width = LATENT + ROPE
    held = {"query": normal(HEADS, width), "key": normal(1, width), "x": normal(HIDDEN), "qr": normal(QUERY)}
    return held | {"up_v_weight": torch.randn(HEADS, VALUE, LATENT, generator=generator)}


def run(core: Any, given: dict[str, Tensor], micro_batch: Any = None, **rest: Any) -> Tensor:
    options = {"attn_mask_type": SimpleNamespace(name="causal"), "packed_seq_params": micro_batch, **rest}
    return core(value=None, attention_mask=None, **given, **options)


def gradients(core: nn.Module, given: dict[str, Tensor], micro_batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    core.train().zero_grad()
    given = {name: one.clone().requires_grad_() for name, one in given.items()}
    out = run(core, given, micro_batch)
    (out * torch.arange(out.numel()).view(out.shape).sin()).sum().backward()
    held = {name: given[name].grad for name in ("query", "key", "up_v_weight")}
    return out.detach(), held | {name: one.grad for name, one in core.named_parameters()}


def test_poisoned_padding_reaches_nothing() -> None:
    """[5 of 8] [0 of 2] [4 of 4] and two rows behind, NaN in every padding row."""
    core = Core(config_of(), None, 1)
    micro_batch = packed([5, 0, 4], [8, 2, 4])
    real = torch.tensor([True] * 5 + [False] * 5 + [True] * 4 + [False] * 2)
    clean = inputs(16)
    poisoned = {name: one.clone() for name, one in clean.items()}
    for name in ("query", "key", "x", "qr"):
        clean[name][~real] = 0
        poisoned[name][~real] = torch.nan
    wanted, found = (gradients(core, one, micro_batch) for one in (clean, poisoned))
    assert found[0].equal(wanted[0])
    assert not found[0][~real].any()
    for name, one in wanted[1].items():
        assert found[1][name].equal(one), name
    assert not found[1]["query"][~real].any()
    assert not found[1]["key"][~real].any()


def test_the_mean_is_over_real_rows(losses: list[Tensor]) -> None:
    """Padded and not: the same loss. Per token: their sum."""
    core, given = Core(config_of(), None, 1).train(), inputs(9)
    run(core, given, packed([5, 4], [5, 4]))
    rows = [0, 1, 2, 3, 4, 0, 0, 0, 5, 6, 7, 8]
    wide = {name: one if name == "up_v_weight" else one[rows] for name, one in given.items()}
    run(core, wide, packed([5, 4], [8, 4]))
    torch.testing.assert_close(losses[1], losses[0])
    core.config.calculate_per_token_loss = True
    run(core, wide, packed([5, 4], [8, 4]))
    torch.testing.assert_close(losses[2], 9 * losses[0])


def test_samples_do_not_see_each_other(losses: list[Tensor]) -> None:
    core, both = Core(config_of(), None, 1).train(), inputs(7, batch=2)
    out = run(core, both)
    for sample in (0, 1):
        one = {name: x if name == "up_v_weight" else x[:, sample : sample + 1] for name, x in both.items()}
        torch.testing.assert_close(run(core, one), out[:, sample : sample + 1])
    torch.testing.assert_close(losses[0], (losses[1] + losses[2]) / 2)


def test_a_packed_query_may_lack_the_batch() -> None:
    core, given = Core(config_of(), None, 1), inputs(6)
    flat = {name: x.squeeze(1) if name in ("query", "key") else x for name, x in given.items()}
    assert run(core, flat, packed([6], [6])).equal(run(core, given, packed([6], [6])))


@pytest.mark.parametrize("fields", [{"dsa_indexer_loss_coeff": None}, {"dsa_indexer_loss_coeff": 0.0}])
def test_no_loss_without_coefficient_in_eval_or_without_gradients(fields: dict[str, Any], losses: list[Tensor]) -> None:
    run(Core(config_of(**fields), None, 1).train(), inputs(6))
    run(Core(config_of(), None, 1).eval(), inputs(6))
    with torch.no_grad():
        run(Core(config_of(), None, 1).train(), inputs(6))
    assert not losses


class Counting:
    """select_keys, and what it gave."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self._select, self.made = megatron_attention.select_keys, []
        monkeypatch.setattr(megatron_attention, "select_keys", self)

    def __call__(self, *args: Any, **rest: Any) -> Selection:
        self.made.append(self._select(*args, **rest))
        return self.made[-1]


FULL = {"recompute_granularity": "full"}


def test_a_replay_does_not_select_again(monkeypatch: pytest.MonkeyPatch, losses: list[Tensor]) -> None:
    """Two micro-batches in flight: each replay has the selections of its own first pass."""
    layers = [Core(config_of(**FULL, shares=True), None, 1).train()]
    layers.append(Core(layers[0].config, None, 2, source=1).train())
    counting = Counting(monkeypatch)
    batches = [(inputs(9, seed=seed), packed([5, 4], [5, 4])) for seed in (1, 2)]
    first = []
    with torch.no_grad():
        for given, micro_batch in batches:
            first.append([run(layer, given, micro_batch) for layer in layers])
    assert len(counting.made) == 2
    assert not losses
    for (given, micro_batch), before in zip(batches, first, strict=True):
        for layer, out in zip(reversed(layers), reversed(before), strict=True):
            assert run(layer, given, micro_batch).detach().equal(out)
    assert len(counting.made) == 2
    assert len(losses) == 2


def test_replays_may_select_again(monkeypatch: pytest.MonkeyPatch) -> None:
    core, micro_batch = (
        Core(config_of(**FULL), None, 1, options=Options(reuse_selection=False)).train(),
        packed([6], [6]),
    )
    counting = Counting(monkeypatch)
    with torch.no_grad():
        run(core, inputs(6), micro_batch)
    run(core, inputs(6), micro_batch)
    assert len(counting.made) == 2
    assert not hasattr(micro_batch, Shared.NAME)


def test_a_first_pass_with_gradients_is_no_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's block method leaves layers out of recompute; their packed parameters may come twice."""
    core, micro_batch = Core(config_of(**FULL), None, 1).train(), packed([6], [6])
    counting = Counting(monkeypatch)
    for _ in range(2):
        run(core, inputs(6), micro_batch)
    assert len(counting.made) == 2


def test_sharing_without_packed_parameters() -> None:
    config = config_of(shares=True)
    layers = [Core(config, None, 1).train(), Core(config, None, 2, source=1).train(), Core(config, None, 3).train()]
    with pytest.raises(InputError, match="layer 2 shares the selection of layer 1, which did not run"):
        run(layers[1], inputs(6))
    wanted = run(layers[0], inputs(6))
    assert run(layers[1], inputs(6)).equal(wanted)
    run(layers[2], inputs(6))
    assert list(Shared.of(config).selections) == [3]
    config.recompute_granularity, config.recompute_modules = "selective", ["core_attn"]
    with pytest.raises(InputError, match="needs packed_seq_params"):
        run(layers[1], inputs(6))


def test_nothing_is_kept_that_nobody_asks_for() -> None:
    config, micro_batch = config_of(), packed([6], [6])
    core = Core(config, None, 1).train()
    run(core, inputs(6))
    run(core, inputs(6), micro_batch)
    assert not hasattr(config, Shared.NAME)
    assert not hasattr(micro_batch, Shared.NAME)


def test_copies_of_a_config_share_nothing() -> None:
    held = Shared()
    held.keep(1, Selection.from_index(torch.tensor([[0]])), first_pass=True)
    assert not copy.deepcopy(held).selections
    assert not pickle.loads(pickle.dumps(held)).selections


def test_arguments_that_are_refused() -> None:
    core, given = Core(config_of(), None, 1).train(), inputs(6)
    with pytest.raises(InputError, match="attn_mask_type=padding must be causal"):
        run(core, given, attn_mask_type=SimpleNamespace(name="padding"))
    with pytest.raises(InputError, match="attention_bias None"):
        run(core, given, attention_bias=torch.zeros(1))
    with pytest.raises(InputError, match="value=None needs absorbed queries"):
        run(core, {**given, "up_v_weight": None})
    with pytest.raises(InputError, match="value=None needs absorbed queries"):
        run(core, {**given, "query": given["query"][..., 1:]})
    with pytest.raises(InputError, match="there are 5 keys for 6 rows"):
        run(core, {**given, "key": given["key"][1:]})
    with pytest.raises(InputError, match="got \\[6, 1\\]"):
        run(core, {**given, "query": torch.zeros(6, 1)})
    core.config.sequence_parallel, core.pg_collection.tp = True, SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    with pytest.raises(InputError, match="same query rows on every tensor-parallel rank"):
        run(core, given)
    with pytest.raises(ConfigError, match="qk_clip"):
        Core(config_of(qk_clip=True), None, 1)


def test_options_reach_the_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def select(*operands: Any, **options: Any) -> Selection:
        asked.update(options)
        return Selection.from_index(torch.arange(6)[:, None])

    monkeypatch.setattr(megatron_attention, "select_keys", select)
    options = Options(precision="fp8", block_bytes=64, backend="reference")
    run(Core(config_of(dsa_indexer_scoring_relu=False), None, 1, options=options).eval(), inputs(6))
    assert asked == {"relu": False, "precision": "fp8", "block_bytes": 64, "backend": "reference"}


def test_flags_and_numbers() -> None:
    core = Core(config_of(deterministic_mode=True), None, 1, layer_offset=4)
    assert core.layer_number == 5
    assert core._flags() == {"backend": "auto", "deterministic": True}
    core.config.attention_backend.name = "unfused"
    assert core._flags()["backend"] == "reference"
    named = Core(config_of(attention_backend="unfused"), None, 1, options=Options(backend="composed"))
    assert named._flags() == {"backend": "composed", "deterministic": None}
    FIELDS["attention_backend"].name = "auto"
