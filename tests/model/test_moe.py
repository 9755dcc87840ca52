"""Who goes to which expert, what comes back, how loads are balanced: against loops over rows and Hugging Face's."""

import copy
import dataclasses
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dsattn.config import MoEConfig
from dsattn.errors import InputError
from dsattn.keys import Layout
from dsattn.model.moe import Experts, MoE, Routing, grouped_linear, grouped_linear_reference, sequence_balance
from dsattn.nn.state import SPARSE, Pass
from dsattn.parallel.recompute import Checkpoints

WIDTH = 16
PLAIN = MoEConfig(experts=8, experts_per_token=3, intermediate_size=8)
GROUPED = dataclasses.replace(PLAIN, experts_per_token=2, groups=4, groups_per_token=2)
CONFIGS = {
    "plain": PLAIN,
    "grouped": GROUPED,
    "raw": dataclasses.replace(PLAIN, normalise=False, routed_scaling=1.5, shared_experts=0),
    "two shared": dataclasses.replace(GROUPED, shared_experts=2, experts_per_token=4),
    "one": MoEConfig(experts=1, experts_per_token=1, intermediate_size=8),
}
LENGTHS, PADDED, TOTAL = [7, 0, 9, 1], [9, 2, 9, 2], 24
LAYOUT = Layout.packed(LENGTHS, padded=PADDED, total=TOTAL)
BALANCED = Pass(with_balance=True)


def mixture(config: MoEConfig = PLAIN, dtype: torch.dtype = torch.float64) -> MoE:
    """With biases, so that scores and ranks differ."""
    moe = MoE(WIDTH, config)
    moe.reset_parameters(0.4, 0.4)
    moe.gate.e_score_correction_bias += 0.2 * torch.randn(config.experts)
    return moe.to(dtype)


def rows(layout: Layout = LAYOUT, dtype: torch.dtype = torch.float64) -> Tensor:
    """NaN in padding."""
    return torch.randn(len(layout.real_rows), WIDTH, dtype=dtype).masked_fill(~layout.real_rows[:, None], torch.nan)


def chosen_by_hand(moe: MoE, x: Tensor) -> list[int]:
    config, scores = moe.config, (moe.gate.weight @ x).sigmoid()
    ranks = (scores + moe.gate.e_score_correction_bias).tolist()
    size = config.experts // config.groups
    groups = [range(first, first + size) for first in range(0, config.experts, size)]
    groups.sort(key=lambda group: -sum(sorted((ranks[expert] for expert in group), reverse=True)[:2]))
    allowed = [expert for group in groups[: config.groups_per_token] for expert in group]
    return sorted(sorted(allowed, key=lambda expert: -ranks[expert])[: config.experts_per_token])


def by_hand(moe: MoE, x: Tensor) -> Tensor:
    """One row."""
    config, chosen = moe.config, chosen_by_hand(moe, x)
    scores = (moe.gate.weight @ x).sigmoid()[chosen]
    weights = config.routed_scaling * (scores / scores.sum() if config.normalise else scores)
    out = torch.zeros(WIDTH, dtype=x.dtype) if moe.shared_experts is None else moe.shared_experts(x)
    for expert, weight in zip(chosen, weights, strict=True):
        gate, up = (moe.experts.gate_up_proj[expert] @ x).chunk(2)
        out = out + weight * (moe.experts.down_proj[expert] @ (F.silu(gate) * up))
    return out


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_equals_a_loop_over_rows(config):
    moe, hidden = mixture(config), rows()
    out, routing = moe(hidden, LAYOUT, SPARSE)
    grad = torch.randn_like(out)
    learned = torch.autograd.grad(out, list(moe.parameters()), grad)
    real = LAYOUT.real_rows.nonzero().flatten().tolist()
    expected = {row: by_hand(moe, hidden[row]) for row in real}
    for row in range(TOTAL):
        torch.testing.assert_close(out[row], expected.get(row, torch.zeros(WIDTH, dtype=out.dtype)))
    together = sum((grad[row] * one).sum() for row, one in expected.items())
    for got, exact in zip(learned, torch.autograd.grad(together, list(moe.parameters())), strict=True):
        torch.testing.assert_close(got, exact)
    load = torch.zeros(config.experts, dtype=torch.int64)
    for row in real:
        load[chosen_by_hand(moe, hidden[row])] += 1
    assert torch.equal(routing.load, load)
    assert routing.balance is None


def test_groups_change_who_is_chosen():
    """Otherwise the loop above would not see them."""
    moe, hidden = mixture(GROUPED), rows(Layout.causal(50))
    chosen, _, _ = moe.gate(hidden, torch.ones(50, dtype=torch.bool))
    assert all(len({expert // 2 for expert in row}) <= 2 for row in chosen.tolist())
    moe.gate.config = dataclasses.replace(GROUPED, groups=1, groups_per_token=1)
    assert not torch.equal(moe.gate(hidden, torch.ones(50, dtype=torch.bool))[0], chosen)


@pytest.mark.parametrize("config", [PLAIN, GROUPED], ids=["plain", "grouped"])
def test_equals_hugging_face(config):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        modeling = pytest.importorskip("transformers.models.deepseek_v32.modeling_deepseek_v32", reason="needs hf")
        from transformers.models.deepseek_v32.configuration_deepseek_v32 import DeepseekV32Config
    theirs = modeling.DeepseekV32MoE(
        DeepseekV32Config(
            hidden_size=WIDTH,
            moe_intermediate_size=config.intermediate_size,
            n_routed_experts=config.experts,
            num_experts_per_tok=config.experts_per_token,
            n_group=config.groups,
            topk_group=config.groups_per_token,
            routed_scaling_factor=config.routed_scaling,
        )
    )
    ours = mixture(config, torch.float32)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    hidden = torch.randn(40, WIDTH)
    got, _ = ours(hidden, Layout.causal(40), SPARSE)
    torch.testing.assert_close(got, theirs(hidden[None])[0], rtol=1e-5, atol=1e-5)


def test_padding_goes_nowhere_and_changes_nothing():
    moe, hidden = mixture(), rows()
    real = LAYOUT.real_rows
    learned = []
    for x, layout in ((hidden, LAYOUT), (hidden[real], Layout.packed(LENGTHS))):
        x = x.clone().requires_grad_()
        out, routing = moe(x, layout, BALANCED)
        loss = out[layout.real_rows].square().sum() + routing.balance
        learned.append((routing.load, *torch.autograd.grad(loss, [*moe.parameters(), x])))
    padded, alone = learned
    assert padded[0].sum() == sum(LENGTHS) * 3
    assert torch.equal(padded[-1][~real], torch.zeros(TOTAL - sum(LENGTHS), WIDTH, dtype=torch.float64))
    for got, exact in zip((*padded[:-1], padded[-1][real]), alone, strict=True):
        torch.testing.assert_close(got, exact)


@pytest.mark.parametrize("layout", [Layout.packed([], total=5), Layout.packed([0])], ids=["all padding", "no rows"])
def test_no_real_rows(layout):
    moe = mixture()
    out, routing = moe(rows(layout), layout, BALANCED)
    (out.sum() + routing.balance).backward()
    assert not out.any()
    assert not routing.load.any()
    assert routing.balance == 0
    assert all(p.grad is None or not p.grad.any() for p in moe.parameters())


def test_ties_go_to_the_expert_that_comes_first():
    moe = mixture()
    torch.nn.init.zeros_(moe.gate.weight)
    moe.gate.e_score_correction_bias.zero_()[5] = 1e-3
    chosen, weights, _ = moe.gate(rows(), LAYOUT.real_rows)
    real = LAYOUT.real_rows
    assert (chosen[real] == torch.tensor([0, 1, 5])).all()
    assert (chosen[~real] == -1).all()
    torch.testing.assert_close(weights, real[:, None].expand(-1, 3) * torch.tensor(2.5 / 3).double())


def test_the_bias_decides_who_is_chosen_and_no_weight():
    moe, hidden = mixture(MoEConfig(experts=8, experts_per_token=8, intermediate_size=8)), rows()
    before, _ = moe(hidden, LAYOUT, SPARSE)
    moe.gate.e_score_correction_bias += torch.randn(8)
    assert torch.equal(moe(hidden, LAYOUT, SPARSE)[0], before)  # all are chosen anyway
    few = mixture()
    before, _ = few(hidden, LAYOUT, SPARSE)
    few.gate.e_score_correction_bias[4] += 100
    after, routing = few(hidden, LAYOUT, SPARSE)
    assert routing.load[4] == sum(LENGTHS)
    assert not torch.equal(before, after)


def test_the_bias_moves_a_step_towards_equal_loads():
    moe = mixture(MoEConfig(experts=4, experts_per_token=1, intermediate_size=8), torch.float32)
    bias = moe.gate.e_score_correction_bias.clone()
    moe.move_bias(torch.tensor([7, 1, 4, 4]), 0.25)
    torch.testing.assert_close(moe.gate.e_score_correction_bias - bias, torch.tensor([-0.25, 0.25, 0, 0]))
    moe.move_bias(torch.zeros(4, dtype=torch.int64), 0.25)
    torch.testing.assert_close(moe.gate.e_score_correction_bias - bias, torch.tensor([-0.25, 0.25, 0, 0]))


def test_biases_level_a_skewed_load_without_a_loss():
    torch.manual_seed(0)
    moe, layout = mixture(dtype=torch.float32), Layout.causal(200)
    hidden = torch.randn(200, WIDTH) + 2 * torch.randn(WIDTH)  # a common part that favours some experts
    loads = []
    for _ in range(300):
        with torch.no_grad():
            loads.append(moe(hidden, layout, SPARSE)[1].load)
        moe.move_bias(loads[-1], 0.005)
    worst = [load.max().item() / load.double().mean().item() for load in loads]
    assert worst[0] > 2
    assert max(worst[-10:]) < 1.3


def balance_by_hand(scores: Tensor, top: int, layout: Layout) -> Tensor:
    """Eq. 17 to 20 of the report for each document, weighed by its rows, over all real rows."""
    total, experts, first = 0.0, scores.shape[1], 0
    for length, padded in zip(LENGTHS, PADDED, strict=True):
        document = scores[first : first + length]
        first += padded
        if not length:
            continue
        for expert in range(experts):
            times = sum(expert in row.topk(top).indices.tolist() for row in document)
            f = experts / (top * length) * times
            p = (document[:, expert] / document.sum(1)).mean()
            total = total + length * f * p
    return total / layout.num_real_rows


def test_the_balance_loss_is_that_of_each_document():
    scores = torch.rand(TOTAL, 8, dtype=torch.float64).masked_fill(~LAYOUT.real_rows[:, None], torch.nan)
    scores.requires_grad_()
    got, exact = sequence_balance(scores, 3, LAYOUT), balance_by_hand(scores, 3, LAYOUT)
    torch.testing.assert_close(got, exact)
    ours, theirs = (torch.autograd.grad(loss, scores)[0] for loss in (got, exact))
    torch.testing.assert_close(ours, theirs.nan_to_num(0.0))
    torch.testing.assert_close(sequence_balance(scores, 3, LAYOUT, 34), got / 2)
    one_document = sequence_balance(scores[LAYOUT.real_rows], 3, Layout.causal(17))
    assert abs(one_document - got) > 1e-3  # documents are balanced one by one


def test_equal_loads_cost_one_and_the_worst_cost_most():
    layout = Layout.causal(8)
    even = torch.full((8, 8), 0.01) + torch.eye(8)  # row t goes to expert t
    assert sequence_balance(even, 1, layout) == pytest.approx(1.0)
    skewed = torch.full((8, 8), 1e-6) + torch.eye(8)[:1]
    assert sequence_balance(skewed, 1, layout) == pytest.approx(8.0, rel=1e-3)


def test_the_balance_loss_wants_whole_documents():
    shard = Layout.causal(8).shard_rows(0, 2)
    with pytest.raises(InputError, match="layout has 8 keys for 4 rows, but the balance loss reads whole documents"):
        sequence_balance(torch.rand(4, 8), 1, shard)
    assert mixture()(rows(shard), shard, SPARSE)[1].load.sum() == 12


def test_the_balance_loss_teaches_the_router_alone():
    moe = mixture()
    moe(rows(), LAYOUT, BALANCED)[1].balance.backward()
    assert [name for name, p in moe.named_parameters() if p.grad is not None and p.grad.any()] == ["gate.weight"]


def test_routings_add_up():
    one, two = Routing(torch.tensor([1, 2]), torch.tensor(0.5)), Routing(torch.tensor([3, 0]), torch.tensor(1.0))
    both = one + two
    assert both.load.tolist() == [4, 2]
    assert both.balance == 1.5
    assert (one + Routing(two.load)).balance is None


def test_experts_gradcheck():
    experts = Experts(4, MoEConfig(experts=3, experts_per_token=2, intermediate_size=8)).double()
    torch.nn.init.normal_(experts.gate_up_proj)
    torch.nn.init.normal_(experts.down_proj)
    chosen = torch.tensor([[0, 2], [2, -1], [-1, -1], [0, 2]], dtype=torch.int32)
    hidden = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(4, 2, dtype=torch.float64, requires_grad=True)

    def run(hidden: Tensor, weights: Tensor, *_: Tensor) -> Tensor:
        return experts(hidden * (chosen[:, :1] >= 0), chosen, weights * (chosen >= 0))[0]

    assert torch.autograd.gradcheck(run, (hidden, weights, *experts.parameters()))


@pytest.mark.parametrize("ends", [[3, 3, 10], [0, 0, 10], [10, 10, 10], [0, 10, 10]])
def test_grouped_products_are_one_an_expert(ends):
    x, weight = torch.randn(10, 6, dtype=torch.float64), torch.randn(3, 5, 6, dtype=torch.float64)
    got = grouped_linear(x, weight, torch.tensor(ends, dtype=torch.int32))
    for row in range(10):
        expert = sum(end <= row for end in ends)
        torch.testing.assert_close(got[row], weight[expert] @ x[row])


@pytest.mark.parametrize("policy", ["selective", "full"])
def test_a_replay_chooses_no_expert_again(policy, monkeypatch):
    moe, hidden, keep = mixture(dtype=torch.float32), rows(dtype=torch.float32), []
    wanted = torch.autograd.grad(moe(hidden, LAYOUT, BALANCED)[0].square().sum(), list(moe.parameters()))
    choose = moe.gate._choose
    monkeypatch.setattr(moe.gate, "_choose", lambda *given: keep.append(1) or choose(*given))
    part = "mlp" if policy == "selective" else "layer"
    run = dataclasses.replace(BALANCED, recompute=Checkpoints(policy))
    out, routing = run.part(part, lambda run, x: moe(x, LAYOUT, run), hidden)
    with torch.no_grad():
        moe.gate.e_score_correction_bias += torch.randn(8)  # would send rows elsewhere
    for got, exact in zip(torch.autograd.grad(out.square().sum(), list(moe.parameters())), wanted, strict=True):
        assert torch.equal(got, exact)
    assert len(keep) == 1
    assert routing.load.sum() == sum(LENGTHS) * 3


def test_repeats_to_the_bit():
    moe, hidden = mixture(dtype=torch.float32), rows(dtype=torch.float32)
    first, second = (
        torch.autograd.grad(moe(hidden, LAYOUT, BALANCED)[0].square().sum(), list(moe.parameters())) for _ in range(2)
    )
    assert all(map(torch.equal, first, second))


def test_autocast_rounds_the_experts_and_not_the_router():
    moe, hidden = mixture(dtype=torch.float32), rows(dtype=torch.float32)
    out, _ = moe(hidden, LAYOUT, SPARSE)
    chosen, weights, scores = moe.gate(hidden.nan_to_num(0), LAYOUT.real_rows)
    with torch.autocast("cpu", torch.bfloat16):
        low, _ = moe(hidden, LAYOUT, SPARSE)
        again = moe.gate(hidden.nan_to_num(0), LAYOUT.real_rows)
    assert low.dtype == torch.bfloat16
    assert all(map(torch.equal, again, (chosen, weights, scores)))
    error = (low.double() - out.double()).norm() / out.double().norm()
    assert 1e-4 < error < 2e-2


def test_names_and_shapes():
    shapes = {name: tuple(p.shape) for name, p in MoE(WIDTH, PLAIN).state_dict().items()}
    assert shapes == {
        "gate.weight": (8, 16),
        "gate.e_score_correction_bias": (8,),
        "experts.gate_up_proj": (8, 16, 16),
        "experts.down_proj": (8, 16, 8),
        "shared_experts.gate_proj.weight": (8, 16),
        "shared_experts.up_proj.weight": (8, 16),
        "shared_experts.down_proj.weight": (16, 8),
    }


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
class TestOnGPU:
    """The grouped product in bf16: 64 experts, some without a token."""

    CONFIG = MoEConfig(experts=64, experts_per_token=8, intermediate_size=128, groups=8, groups_per_token=4)
    LAYOUT = Layout.packed([700, 0, 1, 322], padded=[704, 3, 1, 322], total=1040)
    DEVICE = "cuda"

    def _made(self) -> tuple[MoE, Tensor, Layout]:
        """In bf16 but for the router."""
        torch.manual_seed(0)
        moe = MoE(256, self.CONFIG)
        moe.reset_parameters(0.1, 0.1)
        moe.gate.e_score_correction_bias[:5] = -10  # nobody goes there
        moe.bfloat16().gate.float()
        return moe.to(self.DEVICE), torch.randn(1040, 256).bfloat16().to(self.DEVICE), self.LAYOUT.to(self.DEVICE)

    def test_equals_one_product_an_expert_in_fp64(self):
        moe, hidden, layout = self._made()
        found = []
        for module, x in ((moe, hidden), (copy.deepcopy(moe).double(), hidden.double())):
            x.requires_grad_()
            out, routing = module(x, layout, BALANCED)
            grads = torch.autograd.grad(out.double().square().sum(), [x, *module.experts.parameters()])
            found.append((routing.load, out, *grads))
        (load, *low), (exact_load, *exact) = found
        assert torch.equal(load, exact_load)
        assert load.sum() == 1023 * 8
        assert not load[:5].any()
        for got, want in zip(low, exact, strict=True):
            assert got.isfinite().all()
            assert (got.double() - want).norm() < 1e-2 * want.norm()
        for weight in low[2:]:
            assert not weight[:5].any()  # experts without a token learn nothing

    def test_gradients_repeat_to_the_bit_and_nothing_waits(self):
        moe, hidden, layout = self._made()
        found = []
        for attempt in range(3):
            torch.cuda.set_sync_debug_mode("error" if attempt else "default")  # the first warms up
            try:
                out, _ = moe(hidden, layout, BALANCED)
                found.append(torch.autograd.grad(out.float().square().sum(), list(moe.experts.parameters())))
            finally:
                torch.cuda.set_sync_debug_mode("default")
        assert all(map(torch.equal, found[1], found[2]))

    def test_a_graph_of_the_balance_loss_would_hold_for_one_packing(self):
        scores, layout = torch.rand(1040, 64, device="cuda"), self.LAYOUT.to("cuda")
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            scores.sum()  # torch warns of a graph without work
            with pytest.raises(InputError, match="counts documents on the host"):
                sequence_balance(scores, 8, layout)

    def test_a_graph_replays_on_another_packing(self):
        """Without it: loads and outputs follow the rows and the layout."""
        moe, hidden, layout = self._made()
        other = Layout.packed([1, 400, 500], padded=[3, 400, 500], total=1040).to("cuda")
        with torch.no_grad():
            wanted = [moe(hidden, one, SPARSE) for one in (layout, other)]
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out, routing = moe(hidden, layout, SPARSE)
            for one, (exact, told) in zip((layout, other), wanted, strict=True):
                layout.copy_(one)
                graph.replay()
                assert torch.equal(out, exact)
                assert torch.equal(routing.load, told.load)

    def test_the_reference_waits(self):
        """The control: one product an expert reads where each ends."""
        x, weight = torch.randn(8, 16, device="cuda"), torch.randn(2, 8, 16, device="cuda")
        ends = torch.tensor([3, 8], dtype=torch.int32, device="cuda")
        torch.cuda.set_sync_debug_mode("error")
        try:
            with pytest.raises(RuntimeError, match="synchroniz"):
                grouped_linear_reference(x, weight, ends)
        finally:
            torch.cuda.set_sync_debug_mode("default")
