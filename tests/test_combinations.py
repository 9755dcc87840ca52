"""Features together: each combination trains 20 steps with the losses and gradients of the plainest run.

The plainest run has the same weights and data, and for each axis the plain twin of a feature:

    axis        plain twin (`Plainest`, `plan`)
    sharing     every layer that shares a selection makes it again, from its source's input; every layer that teaches
                runs the indexer that it teaches again
    MTP         depths written out; what a depth shares it makes again, from the first depth's input
    recompute   none; besides, losses and gradients have the same bits as this library's own run without
    KPool       a loop over complete pools
    gate        a sigmoid and a product
    documents   each document alone, from its first row, without padding
    attention   keys and values of every head, a mask [T, S], a softmax; its gradients are autograd's

Projections, norms, RoPE, MLPs and experts are the model's own modules. Both runs have an optimiser of their own and use
fp64: in fp32, where they agree to 1e-5 in the first step, AdamW makes rounding errors larger until selections differ.

The rows below hold every pair of values that may go together. `python tests/test_combinations.py` writes the tables of
docs/guide.md.
"""

import dataclasses
import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dsattn.config import (
    DSAConfig,
    GQAConfig,
    IndexerConfig,
    MLAConfig,
    Mode,
    ModelConfig,
    MoEConfig,
    MTPConfig,
    RunConfig,
    SharedComponent,
    StageConfig,
    TrainConfig,
)
from dsattn.errors import ConfigError
from dsattn.keys import Layout
from dsattn.model import Decoder
from dsattn.model.moe import MoE, Routing
from dsattn.model.mtp import IGNORED_LABEL, look_ahead
from dsattn.nn.rope import rotary_table
from dsattn.nn.state import Pass
from dsattn.training.data import Pack
from dsattn.training.stages import make_optimizer, set_mode
from dsattn.training.step import Losses, accumulate_gradients

GUIDE = Path(__file__).parents[1] / "docs" / "guide.md"
STEPS, ROWS, VOCAB, POOL = 20, 48, 40, 4
BAR = {"rtol": 1e-7, "atol": 1e-9}

MLA = MLAConfig(heads=2, q_lora_rank=16, kv_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)
GQA = GQAConfig(heads=4, kv_heads=2, head_dim=8, rope_dim=4, qk_norm=True)
EXPERTS = MoEConfig(experts=4, experts_per_token=2, intermediate_size=16, first_dense_layers=1)
REPEATED = partial(MTPConfig, depths=2, repeated=True)  # tests/model/test_mtp.py has three
KV: tuple[SharedComponent, ...] = ("latent_kv",)
INDEX: tuple[SharedComponent, ...] = ("sparse_attention_index",)

# Each value of each axis, as the table names it, and what it sets.
AXES: dict[str, dict[str, Any]] = {
    "sharing": {
        "none": {},
        "every 2": {"share_every": 2},
        "every 2, all teach": {"share_every": 2, "multi_layer_teacher": True},
    },
    "MTP": {
        "none": MTPConfig(),
        "2 layers": MTPConfig(depths=2),
        "1 repeated": REPEATED(),
        "latent_kv": REPEATED(shared_components=KV),
        "sparse_attention_index": REPEATED(shared_components=INDEX),
        "both": REPEATED(shared_components=KV + INDEX),
    },
    "recompute": {
        "none": {},
        "selective": {"recompute": "selective"},
        "full": {"recompute": "full"},
    },
    "KPool": {
        "none": {},
        "with tail": {"pool_size": POOL},
        "without tail": {"pool_size": POOL, "pool_tail": False},
    },
    "gate": {name: name for name in ("none", "headwise", "elementwise")},
    "documents": {"one": (ROWS,), "packed": (27, 0, 13)},
    "attention": {"MLA": MLA, "GQA": GQA},
    "MLP": {"dense": None, "experts": EXPERTS},
}


class Combination(NamedTuple):
    """One value of each axis."""

    sharing: str
    mtp: str
    recompute: str
    pools: str
    gate: str
    documents: str
    attention: str
    mlp: str


COMBINATIONS = [
    Combination(*cells)
    for cells in (
        ("none", "none", "none", "none", "none", "one", "MLA", "dense"),
        ("none", "none", "selective", "with tail", "headwise", "one", "MLA", "dense"),
        ("none", "2 layers", "selective", "without tail", "elementwise", "packed", "MLA", "experts"),
        ("none", "1 repeated", "full", "with tail", "none", "one", "MLA", "dense"),
        ("none", "latent_kv", "full", "without tail", "headwise", "one", "MLA", "dense"),
        ("none", "sparse_attention_index", "full", "without tail", "headwise", "packed", "GQA", "dense"),
        ("none", "both", "none", "without tail", "none", "packed", "MLA", "dense"),
        ("every 2", "none", "none", "without tail", "none", "one", "GQA", "experts"),
        ("every 2", "2 layers", "full", "with tail", "none", "one", "MLA", "dense"),
        ("every 2", "1 repeated", "selective", "without tail", "headwise", "one", "MLA", "experts"),
        ("every 2", "latent_kv", "none", "with tail", "elementwise", "packed", "MLA", "experts"),
        ("every 2", "sparse_attention_index", "selective", "with tail", "none", "one", "GQA", "dense"),
        ("every 2", "both", "none", "none", "elementwise", "one", "MLA", "dense"),
        ("every 2", "both", "full", "with tail", "headwise", "one", "MLA", "experts"),
        ("every 2, all teach", "none", "full", "none", "elementwise", "packed", "MLA", "dense"),
        ("every 2, all teach", "2 layers", "none", "none", "headwise", "one", "GQA", "dense"),
        ("every 2, all teach", "1 repeated", "none", "none", "elementwise", "packed", "GQA", "dense"),
        ("every 2, all teach", "latent_kv", "selective", "none", "none", "one", "MLA", "dense"),
        ("every 2, all teach", "sparse_attention_index", "none", "none", "elementwise", "one", "MLA", "experts"),
        ("every 2, all teach", "both", "selective", "none", "headwise", "one", "MLA", "dense"),
    )
]


def model_config(one: Combination) -> ModelConfig:
    """Two decoder layers; raises ConfigError where the values do not go together."""
    sharing, mtp, _, pools, gate, _, attention, mlp = (AXES[a][v] for a, v in zip(AXES, one, strict=True))
    source = "hidden" if attention is GQA else "q_latent"
    indexer = IndexerConfig(heads=2, head_dim=8, top_k=8, query_from=source, rope_dim=4, **pools)
    return ModelConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_layers=2,
        intermediate_size=48,
        attention=dataclasses.replace(attention, output_gate=gate),
        dsa=DSAConfig(indexer=indexer, deterministic=True, **sharing),
        mtp=mtp,
        moe=mlp,
        init_std=0.2,
    )


def stage_of(one: Combination) -> StageConfig:
    """Indexers learn where they can: not through pools."""
    mode: Mode = "sparse" if one.pools == "none" else "frozen"
    balance = 0.02 if one.mlp == "experts" else 0.0
    return StageConfig(mode=mode, steps=STEPS, lr=3e-3, kl_weight=0.5, mtp_weight=0.3, balance_weight=balance)


def new_model(config: ModelConfig, mode: Mode, dtype: torch.dtype) -> Decoder:
    """Its norms and pools' gates are not the identity."""
    torch.manual_seed(0)
    model = Decoder(config).to(dtype).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "kpool" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    set_mode(model, mode)
    return model


def pack_of(lengths: tuple[int, ...], number: int) -> Pack:
    layout = Layout.packed(lengths, total=ROWS)
    tokens = torch.randint(VOCAB, (ROWS,), generator=torch.Generator().manual_seed(number))
    labels = look_ahead(tokens, layout, 1)[0]
    return Pack(tokens, labels, layout, int((labels != IGNORED_LABEL).sum()))


# The plainest run


class Step(NamedTuple):
    """One layer of the stack written out: decoder layers, then depths. `layer` owns its weights; the rest name steps.

    chooser: whose input and indexer make the selection. keys: whose input makes keys and values. teaches: whether this
    step's attention teaches that indexer.
    """

    layer: int
    chooser: int
    keys: int
    teaches: bool


def plan(config: ModelConfig) -> list[Step]:
    """Which step takes what from where."""
    layers, mtp = config.num_layers, config.mtp
    steps: list[Step] = []
    for number in range(layers + mtp.depths):
        layer = layers if number >= layers and mtp.repeated else number
        source = config.selection_sources[layer]
        assert source is not None
        chooser, keys = number if source == layer else source, number
        teaches = chooser == number or config.dsa.multi_layer_teacher
        if number > layers and mtp.shares("sparse_attention_index"):  # the first depth teaches for all
            chooser, teaches = steps[layers].chooser, False
        if number > layers and mtp.shares("latent_kv"):
            keys = layers
        steps.append(Step(layer, chooser, keys, teaches))
    return steps


class Plainest:
    """Gradients of a training step. model: the weights. config: the features that they are run with."""

    def __init__(self, model: Decoder, config: ModelConfig, stage: StageConfig):
        self.config, self.stage, self.steps = config, stage, plan(config)
        self.model: Any = model

    def accumulate_gradients(self, pack: Pack) -> Losses:
        """One document after the other: forward, backward."""
        rows, depths = pack.layout.num_real_rows, self.config.mtp.depths
        lm, mtp, balance = 0.0, [0.0] * depths, 0.0
        kls: dict[int, float] = defaultdict(float)
        loads: dict[int, Any] = defaultdict(int)
        for tokens in filter(len, pack.tokens[:rows].split(pack.layout.lengths)):
            outputs, taught, routing = self.forward(tokens, rows)
            first, *further = (self.loss(out, tokens, n) / pack.num_labels for n, out in enumerate(outputs, 1))
            losses = [first, *(self.stage.mtp_weight / depths * one for one in further)]
            for chooser, parts in taught.items():
                kl = torch.stack(parts).mean() / rows
                losses.append(self.stage.kl_weight * kl)
                kls[chooser] += kl.item()
            for layer, one in routing:
                assert one.balance is not None
                losses.append(self.stage.balance_weight * one.balance)
                loads[layer] = loads[layer] + one.load
                balance += one.balance.item()
            torch.stack(losses).sum().backward()
            lm += first.item()
            mtp = [total + one.item() for total, one in zip(mtp, further, strict=True)]
        pairs = sum(row + 1 for length in pack.layout.lengths for row in range(length))
        return Losses(lm, dict(kls), rows, tuple(mtp), balance if loads else None, dict(loads), (pairs,))

    def loss(self, hidden: Tensor, tokens: Tensor, ahead: int) -> Tensor:
        """Summed over the rows whose token `ahead` is in the document."""
        rows = max(len(tokens) - ahead, 0)
        return F.cross_entropy(self.model.logits(hidden[:rows]), tokens[ahead:], reduction="sum")

    def forward(
        self, tokens: Tensor, rows: int
    ) -> tuple[list[Tensor], dict[int, list[Tensor]], list[tuple[int, Routing]]]:
        """(hidden states [T, M] of the decoder and of each depth, KL sums by chooser, routing by layer)."""
        embedded = hidden = self.model.model.embed_tokens(tokens)
        layout, run = Layout.causal(len(tokens)), Pass(kl_divisor=rows, with_balance=True)
        inputs: list[Tensor] = []
        outputs: list[Tensor] = []
        taught: dict[int, list[Tensor]] = defaultdict(list)
        routing: list[tuple[int, Routing]] = []
        for number, step in enumerate(self.steps):
            layer, depth = self.model.model.layers[step.layer], number - self.config.num_layers + 1
            if depth > 0:
                missing = torch.zeros_like(embedded[:depth])
                ahead = torch.cat((embedded[depth:], missing))
                hidden = layer.eh_proj(torch.cat((layer.enorm(ahead), layer.hnorm(hidden)), -1))
            inputs.append(layer.input_layernorm(hidden))
            out, kl = self.attend(step, inputs)
            if kl is not None:
                taught[step.chooser].append(kl)
            hidden = hidden + out
            out = layer.post_attention_layernorm(hidden)
            if isinstance(layer.mlp, MoE):
                out, where = layer.mlp(out, layout, run)
                routing.append((step.layer, where))
            else:
                out = layer.mlp(out)
            hidden = hidden + out
            if depth >= 0:
                hidden = layer.shared_head["norm"](hidden) if depth else self.model.model.norm(hidden)
                outputs.append(hidden)
        return outputs, taught, routing

    def attend(self, step: Step, inputs: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        """(the attention of one step [T, M], the KL that it teaches)."""
        attention, x = self.model.model.layers[step.layer].self_attn, inputs[-1]
        chooser = self.model.model.layers[self.steps[step.chooser].layer].self_attn
        teaches = step.teaches and self.stage.mode == "sparse"
        with torch.set_grad_enabled(teaches):
            scores, allowed = self.select(chooser, inputs[step.chooser])
        q, k, v = heads(attention, x)
        if step.keys != len(inputs) - 1:
            _, k, v = heads(attention, inputs[step.keys])
        logits = torch.einsum("thd,shd->hts", q, k) * self.config.attention.scale
        weights = softmax(logits, allowed)
        out = torch.einsum("hts,shd->thd", weights, v)
        if self.config.attention.output_gate != "none":
            out = out * attention.gate_proj(x).sigmoid().unflatten(-1, (out.shape[1], -1))
        kl = None
        if teaches:
            target = weights.detach().mean(0)
            kl = torch.xlogy(target, target / softmax(scores, allowed).clamp(min=torch.finfo(scores.dtype).tiny)).sum()
        return attention.o_proj(out.flatten(1)), kl

    def select(self, attention: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        """(scores [T, S], which keys are read [T, S] bool)."""
        rows, indexer = torch.arange(len(x)), self.config.dsa.indexer
        q_latent = None if indexer.query_from == "hidden" else attention.q_a_layernorm(attention.q_a_proj(x))
        q, k, w = attention.indexer(x, q_latent, rows)
        if indexer.pool_size == 1:
            scores = torch.einsum("th,ths->ts", w, torch.einsum("thd,sd->ths", q, k).relu())
            return scores, best(scores, rows[:, None] >= rows, indexer.top_k)
        k, gates = k.chunk(2, -1)
        pools = rows.split(POOL)[: len(x) // POOL]
        shares = [(gates[pool] + attention.indexer.index_kpool_compress_ape).softmax(0) for pool in pools]
        pooled = [(share * k[pool]).sum(0) for share, pool in zip(shares, pools, strict=True)]
        complete = (rows[:, None] + 1) // POOL
        allowed = torch.zeros(len(x), len(x), dtype=torch.bool)
        if pools:
            scores = torch.einsum("th,ths->ts", w, torch.einsum("thd,sd->ths", q, torch.stack(pooled)).relu())
            chosen = best(scores, complete > torch.arange(len(pools)), indexer.top_k // POOL)
            allowed[:, : len(pools) * POOL] = chosen.repeat_interleave(POOL, 1)
        if indexer.pool_tail:
            allowed |= (rows[:, None] >= rows) & (rows >= complete * POOL)
        return torch.zeros(len(x), len(x)), allowed


def heads(attention: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A query, a key and a value of every head, [T, H, .]."""
    positions, config = torch.arange(len(x)), attention.config
    if isinstance(config, GQAConfig):
        q, k, v = attention.heads(x, positions)
        return q, *(one.repeat_interleave(config.heads // config.kv_heads, 1) for one in (k, v))
    table = rotary_table(positions, config.rope, config.qk_rope_head_dim, dtype=x.dtype)
    _, *q = attention.queries(x, table)
    return torch.cat(q, -1), *attention.expanded(*attention.latents(x, table))


def softmax(logits: Tensor, allowed: Tensor) -> Tensor:
    """Over the allowed keys; zeros in rows that may read none."""
    return logits.masked_fill(~allowed, torch.finfo(logits.dtype).min).softmax(-1) * allowed


def best(scores: Tensor, visible: Tensor, count: int) -> Tensor:
    """[T, S] bool: the best of the visible keys, the first one of equals."""
    order = scores.masked_fill(~visible, -torch.inf).sort(descending=True, stable=True).indices
    return torch.zeros_like(visible).scatter_(1, order[:, :count], True) & visible


# Runs


class Update(NamedTuple):
    """What one optimiser step was made of."""

    losses: Losses
    gradients: dict[str, Tensor]


def updates(one: Combination, accumulate: Callable[[Decoder, Pack], Losses], dtype: torch.dtype) -> Iterator[Update]:
    """Optimiser steps, on two packs in turn; what they were made of."""
    stage = stage_of(one)
    model = new_model(model_config(one), stage.mode, dtype)
    optimizer = make_optimizer(model, TrainConfig(), stage)
    packs = [pack_of(AXES["documents"][one.documents], number) for number in range(2)]
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = accumulate(model, packs[step % 2])
        yield Update(losses, {name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        model.move_routing_biases(losses.loads, stage.router_bias_rate)


def ours(one: Combination, *, dtype: torch.dtype = torch.float64, **recompute: Any) -> Iterator[Update]:
    """By the trainer."""
    train = TrainConfig(packs_per_step=1, packs_per_micro_batch=1, **recompute)
    return updates(one, lambda model, pack: accumulate_gradients(model, [pack], stage_of(one), train), dtype)


Change = Callable[[Plainest, Pack], Pack | None]


def plainest(one: Combination, change: Change | None = None, *, dtype: torch.dtype = torch.float64) -> Iterator[Update]:
    """change: spoils the plainest run, in place, or gives it another pack."""

    def accumulate(model: Decoder, pack: Pack) -> Losses:
        twin = Plainest(model, model_config(one), stage_of(one))
        other = None if change is None else change(twin, pack)
        return twin.accumulate_gradients(other or pack)

    return updates(one, accumulate, dtype)


def assert_equal(got: Update, expected: Update, **bar: Any) -> None:
    ours, theirs = (dataclasses.asdict(update.losses) for update in (got, expected))
    for name, value in ours.items():
        if value is None:
            assert theirs[name] is None
        else:
            torch.testing.assert_close(value, theirs[name], **bar)
    assert got.gradients.keys() == expected.gradients.keys()
    assert not [name for name, g in got.gradients.items() if not torch.allclose(g, expected.gradients[name], **bar)]


@pytest.mark.parametrize("one", COMBINATIONS, ids=", ".join)
def test_trains_as_the_plainest_run(one: Combination) -> None:
    lm = []
    for got, expected in zip(ours(one, **AXES["recompute"][one.recompute]), plainest(one), strict=True):
        assert_equal(got, expected, **BAR)
        lm.append(got.losses.lm)
    assert lm[-1] < 0.5 * lm[0]
    told = dict(rows_told())[one]
    assert told == pytest.approx((lm[0], lm[-1]), abs=0.02), "python tests/test_combinations.py writes the table"


@pytest.mark.parametrize("one", COMBINATIONS, ids=", ".join)
def test_fp32_has_the_gradients_of_the_plainest_run(one: Combination) -> None:
    got, expected = (next(run(one, dtype=torch.float32)) for run in (ours, plainest))
    assert got.gradients.keys() == expected.gradients.keys()
    assert got.losses.lm == pytest.approx(expected.losses.lm, rel=1e-5)
    for name, gradient in expected.gradients.items():
        bar = 1e-5 * gradient.abs().max().item()
        torch.testing.assert_close(
            got.gradients[name], gradient, rtol=0, atol=bar, msg=lambda why, n=name: f"{n}: {why}"
        )


@pytest.mark.parametrize("one", [one for one in COMBINATIONS if one.recompute != "none"], ids=", ".join)
def test_recompute_changes_no_bit(one: Combination) -> None:
    """With the first pass's selections, and with new ones. The second step shows what the first one learned."""
    policy = AXES["recompute"][one.recompute]
    runs = (ours(one), ours(one, **policy), ours(one, **policy, recompute_reuse_selection=False))
    for plain, *others in itertools.islice(zip(*runs, strict=True), 2):
        for other in others:
            assert_equal(other, plain, rtol=0, atol=0)


def row_with(**values: str) -> Combination:
    return next(one for one in COMBINATIONS if all(getattr(one, name) == value for name, value in values.items()))


def at_step(number: int, **changes: Any) -> Change:
    def change(twin: Plainest, _: Pack) -> None:
        twin.steps[number] = twin.steps[number]._replace(**changes)

    return change


def configured(**changes: Any) -> Change:
    def change(twin: Plainest, _: Pack) -> None:
        config = twin.config
        indexer = dataclasses.replace(config.dsa.indexer, **changes.get("indexer", {}))
        attention = dataclasses.replace(config.attention, **changes.get("attention", {}))
        dsa = dataclasses.replace(config.dsa, indexer=indexer)
        twin.config = dataclasses.replace(config, dsa=dsa, attention=attention)

    return change


def joined(_: Plainest, pack: Pack) -> Pack:
    lengths = (sum(pack.layout.lengths),)
    return dataclasses.replace(pack, layout=Layout.packed(lengths, total=ROWS))


@pytest.mark.parametrize(
    ("one", "change"),
    [
        (row_with(sharing="every 2", mtp="2 layers"), at_step(3, chooser=0)),
        (row_with(sharing="every 2, all teach", mtp="none"), at_step(1, teaches=False)),
        (row_with(mtp="latent_kv"), at_step(3, keys=3)),
        (row_with(mtp="both", pools="none"), at_step(3, keys=3)),
        (row_with(mtp="sparse_attention_index"), at_step(3, chooser=3)),
        (row_with(mtp="sparse_attention_index", pools="none"), at_step(3, teaches=True)),
        (row_with(pools="with tail"), configured(indexer={"pool_tail": False})),
        (row_with(pools="without tail"), configured(indexer={"top_k": 12})),
        (row_with(gate="headwise"), configured(attention={"output_gate": "none"})),
        (row_with(documents="packed", mtp="none"), joined),
    ],
)
def test_a_feature_run_otherwise_is_seen(one: Combination, change: Change) -> None:
    """Negative control: a plainest run that takes one thing from elsewhere differs in the first step."""
    got, expected = next(ours(one)), next(plainest(one, change))
    with pytest.raises(AssertionError):
        assert_equal(got, expected, rtol=1e-3, atol=1e-4)


# Which go together

Pair = tuple[tuple[int, str], tuple[int, str]]


def pairs(rows: list[Combination]) -> set[Pair]:
    return {pair for row in rows for pair in itertools.combinations(enumerate(row), 2)}


def test_every_pair_that_may_go_together_is_in_a_row() -> None:
    values = [list(axis) for axis in AXES.values()]
    plain, missing = COMBINATIONS[0], set()
    for (i, a), (j, b) in itertools.combinations(enumerate(values), 2):
        missing |= set(itertools.product(((i, one) for one in a), ((j, one) for one in b))) - pairs(COMBINATIONS)
    for pair in missing:
        cells = {Combination._fields[axis]: value for axis, value in pair}
        with pytest.raises(ConfigError):
            model_config(plain._replace(**cells))
    assert len(missing) == 4, "each is among the refusals"
    for row in COMBINATIONS:
        assert pairs([other for other in COMBINATIONS if other != row]) < pairs(COMBINATIONS), f"{row} adds nothing"


def pooled_run(**stage: Any) -> RunConfig:
    model = dataclasses.replace(model_config(row_with(pools="with tail")), vocab_size=259)
    return RunConfig(model=model, train=TrainConfig(stages=(StageConfig(**stage),)))


PLAIN = COMBINATIONS[0]
REFUSED: dict[str, Callable[[], Any]] = {
    "KPool, an indexer that learns": lambda: pooled_run(mode="sparse"),
    "KPool, all teach": lambda: model_config(PLAIN._replace(sharing="every 2, all teach", pools="with tail")),
    "all teach, no sharing": lambda: DSAConfig(multi_layer_teacher=True),
    "latent_kv, GQA": lambda: model_config(PLAIN._replace(mtp="latent_kv", attention="GQA")),
    "latent_kv, depths with layers of their own": lambda: MTPConfig(depths=2, shared_components=KV),
    "latent_kv, one depth": lambda: MTPConfig(depths=1, repeated=True, shared_components=KV),
    "latent_kv, a last layer that reads every key": lambda: dataclasses.replace(
        model_config(PLAIN._replace(mtp="latent_kv")), layer_types=("dsa", "dense")
    ),
    "replays that select again, gradients that may not repeat": lambda: RunConfig(
        train=TrainConfig(recompute="full", recompute_reuse_selection=False)
    ),
}


def refusal(make: Callable[[], Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        make()
    (problem,) = caught.value.problems
    return problem


# The guide's tables


def tables(losses: dict[Combination, tuple[float, float]]) -> str:
    lines = [f"| {' | '.join(AXES)} | loss |", "|---" * (len(AXES) + 1) + "|"]
    lines += [f"| {' | '.join(one)} | {first:.2f}, {last:.2f} |" for one, (first, last) in losses.items()]
    lines += ["", "| refused | why |", "|---|---|"]
    lines += [f"| {what} | `{refusal(make)}` |" for what, make in REFUSED.items()]
    return "\n".join(lines) + "\n"


def told() -> str:
    """The tables as they stand in the guide."""
    found = re.search(r"^\| sharing \| MTP .*?\n(?=\n(?!\| refused))", GUIDE.read_text(encoding="utf-8"), re.M | re.S)
    assert found, f"{GUIDE} has no table of combinations"
    return found.group()


def rows_told() -> Iterator[tuple[Combination, tuple[float, float]]]:
    for line in told().split("\n\n")[0].splitlines()[2:]:
        *cells, losses = line.strip("| ").split(" | ")
        first, last = map(float, losses.split(", "))
        yield Combination(*cells), (first, last)


def test_guide_has_these_tables() -> None:
    losses = dict(rows_told())
    assert list(losses) == COMBINATIONS
    assert told() == tables(losses), "python tests/test_combinations.py writes them"


if __name__ == "__main__":
    trained = {one: [update.losses.lm for update in ours(one)] for one in COMBINATIONS}
    made = tables({one: (lm[0], lm[-1]) for one, lm in trained.items()})
    GUIDE.write_text(GUIDE.read_text(encoding="utf-8").replace(told(), made), encoding="utf-8")
