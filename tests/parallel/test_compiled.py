import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from dsattn.config import DSAConfig, IndexerConfig, MLAConfig, ModelConfig, MoEConfig, TrainConfig
from dsattn.model.decoder import Decoder
from dsattn.model.mlp import SwiGLU
from dsattn.parallel import compiled
from dsattn.parallel.apply import apply
from dsattn.parallel.mesh import ParallelMesh

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo hides it
MODEL = ModelConfig(
    hidden_size=16,
    num_layers=3,
    intermediate_size=24,
    attention=MLAConfig(heads=2, q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4),
    dsa=DSAConfig(indexer=IndexerConfig(heads=2, head_dim=8, top_k=4, rope_dim=4)),
    moe=MoEConfig(experts=4, experts_per_token=2, intermediate_size=8, first_dense_layers=1),
)


def mlps(model: torch.nn.Module) -> list[SwiGLU]:
    return [module for module in model.modules() if isinstance(module, SwiGLU)]


def test_mlps_and_shared_experts_are_compiled_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[torch.nn.Module, dict[str, object]] = {}
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **options: asked.update({self: options}))
    model = apply(MODEL, ParallelMesh(), TrainConfig(compile=True)).model
    assert set(asked) == set(mlps(model))
    assert len(asked) == MODEL.num_layers
    assert next(iter(asked.values())) == {"backend": "inductor", "fullgraph": True, "dynamic": True}
    asked.clear()
    apply(MODEL, ParallelMesh(), TrainConfig())
    assert not asked


def test_one_graph_serves_all_layers_of_a_width_and_any_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(compiled, "BACKEND", counter)
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Decoder(MODEL)
    names = list(model.state_dict())
    given = [torch.randn(rows, MODEL.hidden_size, requires_grad=True) for rows in (5, 6, 40)]

    def found() -> list[torch.Tensor]:
        outs = [mlp(x) for mlp in mlps(model) for x in given]
        return [*outs, *torch.autograd.grad(sum(out.sum() for out in outs), given)]

    wanted = found()
    compiled.compile_mlps(model)
    assert list(model.state_dict()) == names
    for one, other in zip(found(), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert counter.frame_count == 2, "the dense layer's width, and the shared experts'"


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of inductor's own imports
def test_inductor_agrees_in_bfloat16() -> None:
    torch.manual_seed(0)
    mlp = SwiGLU(256, 1024).cuda()
    x = torch.randn(999, 256, device="cuda", requires_grad=True)

    def found(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
        with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.float32):
            out = mlp.to(dtype)(x.to(dtype))
        return [out, *torch.autograd.grad(out.sum(), [x, *mlp.parameters()])]

    exact = found(torch.float64)
    eager = found()
    compiled.compile_mlps(mlp)
    for name, one, other, truth in zip(("out", "x", "gate", "up", "down"), found(), eager, exact, strict=True):
        limit = 1.5 * (other - truth).abs().max()
        assert (one - truth).abs().max() <= limit, name
