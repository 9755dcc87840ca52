"""The key-to-slots index of a selection, made once for all backwards that sum key by key: see `Selection.with_inverse`.

    slots of key s = the flat slots t K + j with index[t, j] = s, ascending

`dsattn.selection` names the operator, so that a Selection needs no backend; here it is served.
Letters: T query rows, S keys, K kept keys.
"""

import torch
from torch import Tensor

from dsattn.backends import Call, choose, resolve_deterministic
from dsattn.ops.first_use import serve
from dsattn.selection import MOST_SLOTS, Inverse, Selection, invert, inverted


@inverted.register_kernel(("cpu", "cuda"))
def _(index: Tensor, length: Tensor, num_keys: int) -> tuple[Tensor, Tensor]:
    choice = choose("invert", Call.of(index, num_keys, top_k=index.shape[1]))
    slot, offset = serve("invert", choice, invert)(index, length, num_keys)
    return slot, offset


def to_share(selection: Selection, num_keys: int, *, deterministic: bool | None, backend: str) -> Selection:
    """A selection that several layers will attend by: with its inverse, where their backwards sum key by key.

    That is with gradients on and where they are `deterministic`; None asks `dsattn.settings` and torch's switch. Others
    add in any order wherever that is faster. A selection of too many slots stays as it is, as does one for the
    `reference`, which reads no inverse: who names it is not to depend on a kernel.
    """
    sums = torch.is_grad_enabled() and resolve_deterministic(deterministic) and backend != "reference"
    return selection.with_inverse(num_keys) if sums and selection.index.numel() <= MOST_SLOTS else selection


def fields(selection: Selection | None, num_keys: int) -> tuple[Tensor | None, Tensor | None]:
    """(slot, offset) of the inverse that a selection carries for so many keys: what operators take, or nothing."""
    inverse = None if selection is None else selection.inverse_of(num_keys)
    return (None, None) if inverse is None else inverse


def joined(slot: Tensor | None, offset: Tensor | None) -> Inverse | None:
    """What `fields` took apart."""
    return None if slot is None or offset is None else Inverse(slot, offset)
