"""Divisors, row masks and the scale of the indexer's loss."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsattn.errors import InputError
from dsattn.integrations import megatron_loss
from dsattn.integrations.megatron_config import Options
from dsattn.integrations.megatron_layout import Groups, Rows, packed_rows
from dsattn.integrations.megatron_loss import Run, attach_loss, set_loss_scale

ALONE = Groups(None, 1, 0, None, 1, 0, False, False, 8)
ENDS = torch.tensor([0, 3, 5]), torch.tensor([0, 4, 8])


def of(rows: str, mask: Tensor | None = None, per_token: bool = False, groups: Groups = ALONE) -> dict[str, Any]:
    config = SimpleNamespace(calculate_per_token_loss=per_token, dsa_indexer_scoring_relu=False)
    options = Options(rows=rows)  # pyright: ignore[reportArgumentType]
    held: Rows = packed_rows(*ENDS, 8, padding_reads=rows == "megatron")
    return Run(config, options, held, mask, groups, {})._loss()


def test_divisors() -> None:
    mask = torch.tensor([True, False, True, True, True, True, True, True])
    assert float(of("real")["divisor"]) == 5
    assert of("real")["real_rows"].sum() == 5
    assert float(of("real", mask)["divisor"]) == 4
    assert of("real", mask)["real_rows"].sum() == 4
    assert of("megatron")["divisor"] == 8
    assert float(of("megatron", mask)["divisor"]) == 7
    for rows in ("real", "megatron"):
        assert of(rows, mask, per_token=True)["divisor"] == 1
    assert of("real")["relu"] is False


def test_a_mask_of_nothing_divides_by_one() -> None:
    for rows in ("real", "megatron"):
        assert float(of(rows, torch.zeros(8, dtype=torch.bool))["divisor"]) == 1


def test_a_mask_counts_on_every_context_parallel_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = Groups("the group", 4, 1, None, 1, 0, False, False, 8)
    seen = []

    def all_reduce(count: Tensor, group: Any) -> None:
        seen.append(group)
        count.mul_(4)

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    assert float(of("real", torch.ones(8, dtype=torch.bool), groups=groups)["divisor"]) == 20
    assert seen == ["the group"]
    assert float(of("real", groups=groups)["divisor"]) == 5  # cu_seqlens say it already


def test_masks_of_other_shapes() -> None:
    mask = torch.arange(8) != 1
    for shape in ((8,), (1, 8)):
        assert of("real", mask.view(shape))["real_rows"].sum() == 4
    real = torch.ones(16, dtype=torch.bool)
    assert megatron_loss._row_mask(mask, real).sum() == 14
    assert megatron_loss._row_mask(torch.stack((mask, mask)), real).sum() == 14
    for wrong in (torch.ones(5), torch.ones(3, 8)):
        with pytest.raises(InputError, match="real_token_mask_q"):
            megatron_loss._row_mask(wrong, real)


class Scaler:
    """As Megatron's DSAIndexerLossAutoScaler."""

    main_loss_backward_scale: Tensor | None = None

    @classmethod
    def set_loss_scale(cls, scale: Tensor) -> None:
        if not isinstance(scale, Tensor):
            raise TypeError("a tensor")
        cls.main_loss_backward_scale = scale


def test_the_scale_is_that_at_the_time_of_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron_loss, "_scaler", lambda: Scaler)
    output, loss = torch.ones(3, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    attached = attach_loss(output, loss)
    assert attached.equal(output)
    attached.sum().backward(retain_graph=True)
    assert loss.grad == 1
    set_loss_scale(torch.tensor([6.0]))
    loss.grad = None
    attached.sum().backward()
    assert loss.grad == 6
    assert output.grad is not None
    assert output.grad.equal(torch.full((3,), 2.0))
    with pytest.raises(TypeError):
        set_loss_scale(2.0)  # pyright: ignore[reportArgumentType]
