import torch

from dsattn.model.mlp import SwiGLU


def test_by_hand():
    mlp, x = SwiGLU(6, 10), torch.randn(4, 6)
    gate, up = x @ mlp.gate_proj.weight.T, x @ mlp.up_proj.weight.T
    torch.testing.assert_close(mlp(x), (gate * gate.sigmoid() * up) @ mlp.down_proj.weight.T)
    assert list(mlp.state_dict()) == ["gate_proj.weight", "up_proj.weight", "down_proj.weight"]
