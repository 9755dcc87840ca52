"""A training step that is replayed on other packs does what the same step does without a graph."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dsattn import settings
from dsattn.config import DSAConfig, IndexerConfig, MLAConfig, ModelConfig, MTPConfig, Recompute
from dsattn.errors import InputError
from dsattn.keys import Layout
from dsattn.model.decoder import Decoder
from dsattn.model.mtp import IGNORED_LABEL
from dsattn.nn.state import Pass
from dsattn.parallel.graphs import GraphedStep, copied, refresh
from dsattn.parallel.recompute import Checkpoints

GPU = torch.device("cuda")
ROWS = 512
MODEL = ModelConfig(
    hidden_size=128,
    num_layers=3,
    intermediate_size=256,
    attention=MLAConfig(
        heads=16, q_lora_rank=96, kv_lora_rank=128, qk_nope_head_dim=32, qk_rope_head_dim=64, v_head_dim=32
    ),
    dsa=DSAConfig(
        indexer=IndexerConfig(heads=8, head_dim=64, top_k=64, rope_dim=64), share_every=2, deterministic=True
    ),
    mtp=MTPConfig(depths=2, repeated=True, shared_components=("latent_kv", "sparse_attention_index")),
    init_std=0.1,
)
PACKS = ([200, 0, 1, 300], [512], [64, 64, 380], [17, 33, 450, 5], [128, 128, 128, 100])
Step = Callable[..., tuple[Tensor, Tensor]]


def inputs(number: int) -> tuple[Any, ...]:
    """(tokens, labels, layout, labels that count, real rows) of the number-th pack, all on the GPU."""
    generator = torch.Generator().manual_seed(number)
    layout = Layout.packed(PACKS[number], total=ROWS)
    tokens, labels = torch.randint(259, (2, ROWS), generator=generator)
    labels = labels.masked_fill(~layout.real_rows, IGNORED_LABEL)
    counts = [torch.tensor(float(x)) for x in ((labels != IGNORED_LABEL).sum(), layout.num_real_rows)]
    return tuple(x.to(GPU) for x in (tokens, labels, layout, *counts))


def new_step(recompute: Checkpoints | None) -> tuple[Decoder, Step]:
    """A fresh model, always the same one, and a whole training step of it."""
    torch.manual_seed(0)
    model = Decoder(MODEL).to(GPU).train()
    lr = torch.tensor(1e-2, device=GPU)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, eps=1e-3, fused=True, capturable=True)

    def step(tokens: Tensor, labels: Tensor, layout: Layout, num_labels: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            out = model(tokens, layout, Pass(kl_divisor=rows, recompute=recompute))
            lm = model.lm_loss(out.hidden, labels, num_labels)
            ahead = model.mtp_losses(out.ahead, labels, layout, num_labels)
        assert out.kl_sum is not None
        (lm + ahead.mean() + out.kl_sum).backward()
        optimizer.step()
        return lm.detach(), out.kl_sum.detach()

    return model, step


def trained(step: Step, numbers: list[int], stale: bool = False) -> list[list[float]]:
    """The losses of steps on these packs. stale: the layout stays that of the first one."""
    losses = []
    for number in numbers:
        given = list(inputs(number))
        if stale:
            given[2] = inputs(numbers[0])[2]
        losses.append([loss.item() for loss in step(*given)])
    return losses


NUMBERS = [0, 0, 0, 1, 2, 3, 4, 1]  # two to warm up, one that is captured, and replays


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["none", "full"])
def test_replays_on_other_packings_equal_eager_steps(policy: Recompute) -> None:
    recompute = Checkpoints(policy)
    (eager, eager_step), (model, step) = new_step(recompute), new_step(recompute)
    expected = trained(eager_step, NUMBERS)
    got = trained(GraphedStep(step), NUMBERS)
    torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), rtol=1e-4, atol=1e-6)
    start = dict(new_step(None)[0].named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, eager.get_parameter(name), rtol=1e-3, atol=1e-4, msg=name)
    assert any((parameter - start[name]).abs().max() > 1e-2 for name, parameter in model.named_parameters())


@pytest.mark.gpu
def test_a_stale_layout_is_seen() -> None:
    """Negative control: everything but the layout is refreshed."""
    numbers = [0, 0, 0, 1]
    expected = trained(new_step(None)[1], numbers)[-1]
    stale = trained(GraphedStep(new_step(None)[1]), numbers, stale=True)[-1]
    assert max(abs(a - b) / abs(b) for a, b in zip(stale, expected, strict=True)) > 1e-3


@pytest.mark.gpu
def test_nothing_in_a_step_waits_for_the_gpu() -> None:
    _, step = new_step(Checkpoints("selective"))
    given = inputs(0)
    step(*given)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(*given)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_a_step_that_waits_for_the_gpu_cannot_be_captured() -> None:
    step = GraphedStep(lambda x: x * x.sum().item())
    x = torch.ones(4, device=GPU)
    for _ in range(2):
        step(x)
    with pytest.raises(InputError, match=r"the step cannot be captured.*may wait for the GPU"):
        step(x)
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_an_operation_that_reads_ranges_on_the_host_cannot_be_captured() -> None:
    slow = dataclasses.replace(MODEL, dsa=dataclasses.replace(MODEL.dsa, backend="reference"))
    model, (tokens, _, layout, *_) = Decoder(slow).to(GPU), inputs(0)
    with torch.no_grad():
        step = GraphedStep(lambda *given: model(*given).hidden)
        for _ in range(2):
            step(tokens, layout)
        with pytest.raises(InputError, match="the step cannot be captured"):
            step(tokens, layout)
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_inputs_that_a_graph_has_no_room_for_are_refused() -> None:
    with settings(deterministic=True):
        step = GraphedStep(lambda x, layout, scale: x * scale + layout.positions, warmups=1)
        x, layout = torch.ones(8, device=GPU), Layout.causal(8).to(GPU)
        for _ in range(3):
            assert torch.equal(step(x, layout, 2.0), 2 * x + layout.positions)
        with pytest.raises(InputError, match="every_row_has_a_key is False"):
            step(x, Layout.packed([7], total=8).to(GPU), 2.0)


def test_graphs_need_a_gpu() -> None:
    with pytest.raises(InputError, match="on a GPU, got cpu, cpu; move them"):
        GraphedStep(lambda *given: given)(torch.ones(2), Layout.causal(2))
    with pytest.raises(InputError, match="on a GPU, got none"):
        copied((1, 2))
    for inside in (
        [torch.ones(2)],
        {"tokens": torch.ones(2)},
        dataclasses.make_dataclass("Pack", ["x"])(torch.ones(2)),
    ):
        with pytest.raises(
            InputError, match=r"input 1 is a (list|dict|Pack) with tensors inside; give each on its own"
        ):
            copied((torch.ones(2), inside))
    with pytest.raises(InputError, match="warmups=0 must be at least 1"):
        GraphedStep(lambda: None, warmups=0)


def test_refresh_writes_in_place_or_refuses() -> None:
    given = (torch.arange(4), Layout.packed([3], total=4), 2.0)
    static = copy.deepcopy(given)
    tables = (static[0].data_ptr(), static[1].positions.data_ptr())
    refresh(static, (torch.ones(4, dtype=torch.int64), Layout.packed([1, 2], total=4), 2.0))
    assert static[0].tolist() == [1, 1, 1, 1]
    assert static[1].positions.tolist() == [0, 0, 1, 0]
    assert static[1].lengths == (1, 2)
    assert tables == (static[0].data_ptr(), static[1].positions.data_ptr())
    assert given[0].tolist() == [0, 1, 2, 3], "what the first call gave is not written"
    for wrong, says in (
        ((given[0][:3], *given[1:]), "input 0 is torch.int64 \\[3\\]; the graph has room for torch.int64 \\[4\\]"),
        ((given[0].float(), *given[1:]), "input 0 is torch.float32"),
        ((*given[:2], 3.0), "input 2 is 3.0, but the graph repeats 2.0: give what changes as a tensor"),
        ((given[1], *given[1:]), "input 0 is a Layout, but the graph repeats torch.int64"),
        ((3, *given[1:]), "input 0 is 3, but the graph repeats torch.int64"),
        ((given[0], given[0], 2.0), "input 1 is torch.int64 .*, but the graph repeats a Layout"),
        ((*given[:2], torch.tensor(2.0)), "input 2 is torch.float32 .*, but the graph repeats 2.0"),
        ((given[0], Layout.packed([5]), 2.0), "other has 5 rows and 5 keys, this layout 4 and 4"),
        (given[:2], "captured with 3 inputs, got 2"),
    ):
        with pytest.raises(InputError, match=says):
            refresh(static, wrong)
    assert static[0].tolist() == [1, 1, 1, 1], "refused before anything was written"
