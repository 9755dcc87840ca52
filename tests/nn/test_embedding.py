import torch

from dsattn.nn.embedding import Embedding
from dsattn.nn.embedding import take_rows as imported


def test_determinism_is_passed_on(monkeypatch):
    asked = []

    def spy(table, index, *, deterministic):
        asked.append(deterministic)
        return imported(table, index, deterministic=deterministic)

    monkeypatch.setattr("dsattn.nn.embedding.take_rows", spy)
    tokens = torch.tensor([2, 0, 2])
    for deterministic in (None, True, False):
        layer = Embedding(4, 3, deterministic=deterministic)
        assert torch.equal(layer(tokens), layer.weight[tokens])
    assert asked == [None, True, False]


def test_rows_are_wide_under_autocast():
    """FSDP2 gathers bf16 weights; what all layers add to stays fp32, as on one process."""
    layer, tokens = Embedding(4, 3), torch.tensor([2, 0, 2])
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(tokens).dtype == layer.bfloat16()(tokens).dtype == torch.float32
        assert layer.double()(tokens).dtype == torch.float64
    assert layer.bfloat16()(tokens).dtype == torch.bfloat16
