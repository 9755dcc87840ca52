from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dsattn.errors import InputError
from dsattn.integrations.families import FAMILIES
from dsattn.integrations.hooks import REPORT, after_head, before_body, before_head
from dsattn.integrations.microbatch import Report, Settings

SPARSE = Settings("sparse", "auto", 0.5, None)


class Model(nn.Module):
    def __init__(self, *, use_cache: bool = True):
        super().__init__()
        self.config = SimpleNamespace(use_cache=use_cache, output_attentions=False)
        self.config.get_text_config = lambda: self.config
        self.layers: list[Any] = []
        self.indexer = nn.ModuleDict({"indexer": nn.Linear(1, 1)})

    def forward(self, input_ids: Any = None, attention_mask: Any = None, **options: Any) -> None: ...


def test_arguments_by_position_are_named() -> None:
    ids, mask = torch.zeros(1, 2), torch.ones(1, 2)
    args, kwargs = before_body(SPARSE, FAMILIES["hy_v4"], Model(), (ids, mask), {"use_cache": False})
    assert args == ()
    assert kwargs["input_ids"] is ids
    assert kwargs["attention_mask"] == {"indexed_attention": None}


def test_only_calls_that_train_go_without_the_cache_of_the_configuration() -> None:
    evaluating, training = Model().eval(), Model().train()
    assert REPORT not in before_head(evaluating, (), {})[1]
    assert before_head(evaluating, (), {"labels": 1})[1]["use_cache"] is False
    assert before_head(Model(use_cache=False).eval(), (), {})[1]["use_cache"] is False
    assert REPORT in before_head(training, (), {})[1]
    with pytest.raises(InputError, match="use_cache=False"):
        before_head(training, (), {"past_key_values": object()})
    with torch.no_grad():
        assert REPORT not in before_head(training, (), {"past_key_values": object()})[1]


@pytest.mark.parametrize("shifted", [False, True])
def test_the_loss_counts_by_the_share_of_labels(shifted) -> None:
    labels = torch.tensor([[5, 1, -100, 2]])
    kwargs: dict[str, Any] = {"labels": labels}
    if shifted:
        kwargs["shift_labels"] = torch.tensor([[1, -100, 2, -100]])
    for items in (8, torch.tensor(8)):
        kwargs |= {REPORT: Report(True, {0: torch.tensor(2.0), 3: torch.tensor(4.0)}), "num_items_in_batch": items}
        got = after_head(SPARSE, Model(), (), kwargs, (torch.tensor(1.0), "logits"))
        assert got == (torch.tensor(1.0 + 0.5 * 6.0 * 2 / 8), "logits")


def test_a_head_that_reaches_no_indexer_says_so() -> None:
    with pytest.raises(InputError, match="Model reached no layer with an indexer"):
        after_head(SPARSE, Model().train(), (), {REPORT: Report(True)}, ())


def test_refuses() -> None:
    family, model = FAMILIES["dots3_note_text"], Model(use_cache=False)
    with pytest.raises(InputError, match="input_ids and inputs_embeds are both None"):
        before_body(SPARSE, family, model, (), {})
    square = torch.ones(1, 1, 2, 2).bool()
    with pytest.raises(InputError, match="4D attention_mask does not say what sliding layers see"):
        before_body(SPARSE, family, model, (torch.zeros(1, 2), square), {})
    edges = {"cu_seq_lens_q": torch.tensor([0, 2]), "cu_seq_lens_k": torch.tensor([0, 1])}
    with pytest.raises(InputError, match="cu_seq_lens_q and cu_seq_lens_k differ"):
        before_body(SPARSE, family, model, (torch.zeros(1, 2),), edges)
