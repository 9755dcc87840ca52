"""The forward of a layer is tested with whole models, in test_transformers.py; here is what they do not reach."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dsattn.errors import InputError
from dsattn.integrations.attention import _selection, _table, _up_projections, attention_forward
from dsattn.integrations.microbatch import Microbatch, Report, Settings
from dsattn.keys import Layout

NO_INPUTS = (torch.empty(3, 0), None, None, None)


def test_a_shared_layer_without_a_source_says_which() -> None:
    layout = Layout.causal(3)
    microbatch = Microbatch(Settings("sparse", "auto", 1.0, None), layout, False, Report(True), None)
    attn = SimpleNamespace(layer_idx=7, indexer=None, config=SimpleNamespace())
    with pytest.raises(InputError, match="layer 7 shares a selection"):
        _selection(attn, microbatch, layout, None, NO_INPUTS, None)
    handed = torch.tensor([[[0, -1], [0, 1], [1, -1]]], dtype=torch.int32)
    selection = _selection(attn, microbatch, layout, None, NO_INPUTS, handed)
    assert selection.length.tolist() == [1, 2, 1]
    assert selection.every_row_has_a_key
    attn.config.index_kpool_always_select_tail = False  # then early rows of the source may have read nothing
    assert not _selection(attn, microbatch, layout, None, NO_INPUTS, handed).every_row_has_a_key


def test_tables_are_the_first_half_for_every_row() -> None:
    cos = torch.arange(6.0).view(1, 3, 2).repeat(1, 1, 2)
    table = _table((cos, -cos), batch=2, tokens=3)
    assert torch.equal(table.cos, torch.arange(6.0).view(3, 2).repeat(2, 1))
    assert torch.equal(table.sin, -table.cos)


def test_hooks_on_a_projection_count() -> None:
    """What hooks do to kv_b_proj (dequantise, gather, adapt) must reach the folded weights."""
    attn = SimpleNamespace(num_heads=2, qk_nope_head_dim=3, v_head_dim=1, kv_lora_rank=4)
    attn.kv_b_proj = nn.Linear(4, 8, bias=False)
    plain = _up_projections(attn, torch.float32)
    attn.kv_b_proj.register_forward_hook(lambda module, args, out: 2 * out)
    for half, doubled in zip(plain, _up_projections(attn, torch.float32), strict=True):
        assert torch.allclose(doubled, 2 * half)


def test_a_layer_on_its_own_does_not_train() -> None:
    attn = SimpleNamespace(training=True, layer_idx=2)
    with pytest.raises(InputError, match="layer 2 is patched, but runs without the hooks"):
        attention_forward(attn, torch.zeros(1, 1, 1))
