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
