"""What one forward of a patched model knows: its layout, its settings, and what its layers report."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from dsattn.config import Recompute
from dsattn.errors import InputError
from dsattn.keys import KeyRange, Layout
from dsattn.nn.state import Kept
from dsattn.selection import Selection

Mode = Literal["sparse", "warmup", "frozen"]
MICROBATCH = "dsattn_microbatch"
"""The argument by which a model's call hands its Microbatch to the layers."""


class Watch:
    """Sees where the indexers' loss is dropped: a backward that passed a call's outputs and not its indexer loss.

    So it is where a trainer makes a loss of its own from logits (label smoothing, preference losses).
    """

    def __init__(self) -> None:
        self._calls: deque[set[str]] = deque(maxlen=64)

    def follow(self, outputs: Iterable[Any], indexer_loss: Tensor) -> None:
        """Remember which of the two get a gradient. outputs: what a loss could be made from."""
        if not indexer_loss.requires_grad:
            return
        reached: set[str] = set()
        for output in outputs:
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(lambda _: reached.add("outputs"))
        indexer_loss.register_hook(lambda _: reached.add("loss"))
        self._calls.append(reached)

    def check(self) -> None:
        """Raise InputError where an earlier call's loss was dropped."""
        dropped = any(reached == {"outputs"} for reached in self._calls)
        if dropped:
            self._calls.clear()
            raise InputError(
                "the indexers' loss of the last call was dropped: its logits got a gradient and the loss got none. "
                "Who makes the loss without outputs.loss (label smoothing, a loss function of your own, a trainer of "
                "preferences) must add outputs.indexer_loss to it; or patch with mode='frozen'"
            )


@dataclass(frozen=True)
class Settings:
    """What `patch` was asked for. watch: of the calls of this patch."""

    mode: Mode
    backend: str
    indexer_loss_coeff: float
    deterministic: bool | None
    recompute: Recompute = "none"
    watch: Watch = field(default_factory=Watch)


class Report:
    """The indexers' losses of one forward, in nats a real row, by layer: from the layers to who adds them up.

    owned: a loss head waits for them. closed: they were taken; what replays report then is the same again.
    No dataclass, as Microbatch: FSDP copies those that hold tensors on their way into a layer.
    """

    def __init__(self, owned: bool, losses: dict[int, Tensor] | None = None, *, closed: bool = False):
        self.owned = owned
        self.losses = {} if losses is None else losses
        self.closed = closed

    def add(self, layer: int, loss: Tensor) -> None:
        """A layer's loss."""
        if not self.closed:
            self.losses[layer] = loss

    def take(self) -> list[Tensor]:
        """All losses. The report forgets them: a replay, which a loss's graph holds, holds the report."""
        losses = list(self.losses.values())
        self.losses.clear()
        self.closed = True
        return losses


class Microbatch:
    """One forward. Every layer gets it as an argument; nothing else outlives the call.

    learns: the indexers' losses are wanted. selections: by layer, kept for replays under the model's own gradient
    checkpointing; None where it is off. documents: of glm5_next, see `packed_documents`; empty elsewhere.
    kept: what `patch(recompute=...)` keeps of one part of one layer for its replay; None outside such a part.
    """

    def __init__(
        self,
        settings: Settings,
        layout: Layout,
        learns: bool,
        report: Report,
        selections: dict[int, Selection] | None,
        documents: tuple[Any, ...] = (),
        kept: Kept | None = None,
    ):
        self.settings = settings
        self.layout = layout
        self.learns = learns
        self.report = report
        self.selections = selections
        self.documents = documents
        self.kept = kept

    def part(self, kept: Kept, report: Report) -> "Microbatch":
        """The same for one part of one layer, which may run again."""
        return Microbatch(self.settings, self.layout, self.learns, report, self.selections, self.documents, kept)

    def chosen(self, layer: int) -> bool:
        """Whether the first pass's selection is at hand: this is a replay."""
        if self.kept is not None:
            return self.kept.holds("selection")
        return self.selections is not None and layer in self.selections

    def selected(self, layer: int, make: Callable[..., Selection], *operands: Any) -> Selection:
        """`make(*operands)`; a replay has that of the first pass."""
        if self.kept is not None:
            return self.kept.value("selection", make, *operands)
        if self.selections is None:
            return make(*operands)
        if layer not in self.selections:
            self.selections[layer] = make(*operands)
        return self.selections[layer]

    def graph(self, name: str, make: Callable[..., Tensor], *operands: Any) -> Tensor:
        """`make(*operands)`; a replay of selective recompute repeats its graph, not its products."""
        return make(*operands) if self.kept is None else self.kept.graph(name, make, *operands)


def layout_of(
    batch: int,
    tokens: int,
    mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens: Tensor | None = None,
) -> Layout:
    """The layout of a batch [B, S] folded to [B * S] rows, on the CPU. Reads its arguments: one device sync each.

    mask: [B, S], 1 for real tokens, padding left, right or both; or [B, 1, S, S], boolean or additive, whose rows each
        show one run of keys. position_ids: [B or 1, S]; a document starts where they restart at 0.
    cu_seq_lens: [documents + 1], the documents of one row, and padding behind them.
    Raises InputError for what a KeyRange cannot say.
    """
    if mask is not None and mask.dim() == 4:
        return _from_square_mask(batch, tokens, mask)
    real = np.ones((batch, tokens), bool)
    if mask is not None:
        if tuple(mask.shape) != (batch, tokens):
            raise InputError(f"attention_mask must be [{batch}, {tokens}] or 4D, got {list(mask.shape)}")
        real = Layout.from_attention_mask(mask.cpu()).real_rows.view(batch, tokens).numpy()
    if cu_seq_lens is not None:
        if not real.all():
            raise InputError("cu_seq_lens and an attention_mask with padding both say where documents are; give one")
        return _from_cu_seq_lens(batch, tokens, cu_seq_lens)
    if position_ids is None:
        return Layout.causal(tokens, batch=batch) if mask is None else Layout.from_attention_mask(mask.cpu())
    if position_ids.dim() not in (1, 2) or position_ids.shape[-1] != tokens:
        raise InputError(f"position_ids must be [{batch}, {tokens}], got {list(position_ids.shape)}")
    return _from_positions(real, np.broadcast_to(position_ids.detach().cpu().numpy(), real.shape))


def _from_positions(real: np.ndarray, positions: np.ndarray) -> Layout:
    lengths: list[int] = []
    padded: list[int] = []
    for row, (kept, position) in enumerate(zip(real, positions, strict=True)):
        columns = np.flatnonzero(kept)
        first, stop = (int(columns[0]), int(columns[-1]) + 1) if columns.size else (kept.size, kept.size)
        starts = first + 1 + np.flatnonzero(np.diff(position[first:stop]) != 1)
        if (wrong := starts[position[starts] != 0]).size:
            raise InputError(
                f"position_ids[{row}] jump to {position[wrong[0]]} at column {wrong[0]}; a document must start at 0"
            )
        edges = [first, *starts.tolist(), stop] if columns.size else []
        documents = np.diff(edges).astype(int).tolist()
        lengths += [0, *documents, 0]  # padding is the room of an empty document
        padded += [first, *documents, kept.size - stop]
    return Layout.packed(lengths, padded=padded)


def _from_cu_seq_lens(batch: int, tokens: int, cu_seq_lens: Tensor) -> Layout:
    if batch != 1:
        raise InputError(f"cu_seq_lens describe one packed row, but the batch has {batch}; fold it into one")
    edges = cu_seq_lens.detach().cpu().reshape(-1).tolist()
    lengths = np.diff(edges).tolist()
    if not edges or edges[0] != 0 or edges[-1] > tokens or any(n < 0 for n in lengths):
        raise InputError(f"cu_seq_lens={_short(edges)} must start at 0, never fall, and end at most at {tokens}")
    return Layout.packed(lengths, total=tokens)


def _from_square_mask(batch: int, tokens: int, mask: Tensor) -> Layout:
    if mask.shape[0] not in (1, batch) or tuple(mask.shape[1:]) != (1, tokens, tokens):
        raise InputError(
            f"attention_mask must be [{batch}, {tokens}] or [{batch}, 1, {tokens}, {tokens}], got {list(mask.shape)}"
        )
    seen = mask if mask.dtype == torch.bool else mask == 0
    if mask.is_floating_point() and not (seen | (mask <= torch.finfo(mask.dtype).min / 2)).all():
        raise InputError("attention_mask adds values other than 0 and minus infinity; a KeyRange cannot say a bias")
    if not mask.is_floating_point() and mask.dtype != torch.bool:
        raise InputError(f"attention_mask of 4 dimensions must be boolean or additive, got {mask.dtype}")
    seen = seen[:, 0].expand(batch, -1, -1).cpu()
    count, start = seen.sum(-1), seen.int().argmax(-1)
    stop = tokens - seen.flip(-1).int().argmax(-1)
    if (holes := ((count > 0) & (stop - start != count)).nonzero()).numel():
        sample, row = holes[0].tolist()
        raise InputError(
            f"attention_mask[{sample}, 0, {row}] has a hole between visible keys; a KeyRange cannot say it"
        )
    first = torch.arange(batch)[:, None] * tokens
    empty = count == 0
    start, stop = (torch.where(empty, 0, x + first).flatten().int() for x in (start, stop))
    keys, real = KeyRange(start, stop, every_row_has_a_key=not bool(empty.any())), ~empty.flatten()
    return replace(Layout.causal(tokens, batch=batch), keys=keys, real_rows=real, num_real_rows=int(real.sum()))


def _short(values: Sequence[int]) -> str:
    return str(list(values)) if len(values) <= 8 else f"[{', '.join(map(str, values[:8]))}, ...]"
