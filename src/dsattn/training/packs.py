"""A pack: documents laid end to end, T rows, and what is known about them on the host."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dsattn.errors import InputError
from dsattn.keys import Layout

IGNORED_LABEL = -100
"""Label of rows that have no next token; what `torch.nn.functional.cross_entropy` ignores."""


class RawPack(NamedTuple):
    """At most T int32 ids and the lengths of their documents, in order."""

    tokens: np.ndarray
    lengths: list[int]


@dataclass(frozen=True, eq=False)
class Pack:
    """T token rows and what is known about them.

    tokens: [T] int64. labels: [T] int64, the next token of the same document; IGNORED_LABEL on each document's last
    token and on padding. layout: T rows; padding, if any, comes last. num_labels: labels that count; may be 0.
    """

    tokens: Tensor
    labels: Tensor
    layout: Layout
    num_labels: int

    def to(self, device: torch.device | str) -> "Pack":
        """A copy on `device`; does not wait for the transfer."""
        return replace(
            self,
            tokens=self.tokens.to(device, non_blocking=True),
            labels=self.labels.to(device, non_blocking=True),
            layout=self.layout.to(device),
        )


def fold(packs: Sequence[Pack]) -> Pack:
    """Several packs, on the host, as one stream: a micro-batch. Each pack's padding stays behind its documents.

    Raises InputError where there is none.
    """
    if not packs:
        raise InputError("packs is empty; give at least one")
    lengths: list[int] = []
    padded: list[int] = []
    for pack in packs:
        real = list(pack.layout.lengths) or [0]
        rows = pack.tokens.shape[0]
        lengths += real
        padded += [*real[:-1], real[-1] + rows - sum(real)]
    return Pack(
        tokens=torch.cat([pack.tokens for pack in packs]),
        labels=torch.cat([pack.labels for pack in packs]),
        layout=Layout.packed(lengths, padded=padded),
        num_labels=sum(pack.num_labels for pack in packs),
    )


def finish(raw: RawPack, rows: int, pad: int) -> Pack:
    """Tensors, labels and layout of a raw pack, padded to `rows`."""
    filled = len(raw.tokens)
    tokens = np.full(rows, pad, np.int64)
    tokens[:filled] = raw.tokens
    labels = np.full(rows, IGNORED_LABEL, np.int64)
    labels[: filled - 1] = tokens[1:filled]
    labels[np.cumsum(raw.lengths) - 1] = IGNORED_LABEL
    return Pack(
        tokens=torch.from_numpy(tokens),
        labels=torch.from_numpy(labels),
        layout=Layout.packed(raw.lengths, total=rows),
        num_labels=filled - len(raw.lengths),
    )
