"""Which keys each query row selects in a benchmark.

A pattern is a density over how far back a key lies, and how long a key stays selected while the rows move on. Keys are
drawn from it without replacement (the K largest of log density + Gumbel noise), so it can be replayed at any number of
rows, keys and slots. `uniform` is the worst case for caches; a recorded pattern is measured on a trained model.
Letters: T query rows, S keys, K kept keys, B bins.
"""

import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from dsattn.errors import InputError
from dsattn.keys import KeyRange
from dsattn.selection import Selection

Order = Literal["ascending", "random", "recency", "recorded"]
BINS = 64
_FIELDS = ("density", "stay", "rows", "source")


@dataclass(frozen=True)
class Pattern:
    """density: [B], relative chance of a key by log(1 + distance) / log(visible keys), 0 .. 1 in B equal bins.

    stay: rows for which a selected key stays selected, on average; 1 draws every row afresh.
    rows: rows it was measured on, 0 for a made one. source: where it comes from.
    """

    density: np.ndarray
    stay: float = 1.0
    rows: int = 0
    source: str = ""

    def save(self, path: Path) -> None:
        """Write an .npz of a few hundred bytes."""
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(path, density=self.density, stay=self.stay, rows=self.rows, source=self.source)

    @classmethod
    def load(cls, path: Path) -> "Pattern":
        """Read what `save` wrote. Raises InputError where there is no such pattern."""
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
                density, stay, rows, source = (stored[name] for name in _FIELDS)
            if density.shape != (BINS,) or not (np.isfinite(density).all() and density.min() >= 0 and stay >= 1):
                raise ValueError(f"its density is not {BINS} shares, or its stay less than 1")
        except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
            raise InputError(
                f"pattern={str(path)!r} holds no recorded selection ({error}); make one with `dsattn bench record RUN`"
            ) from error
        return cls(density.astype(np.float64), float(stay), int(rows), str(source))


UNIFORM = Pattern(np.ones(BINS))
RECENCY = Pattern(np.exp(-6.0 * np.linspace(0.0, 1.0, BINS)), stay=8.0)
"""The newest key is 400 times as likely as the oldest one."""


def measure(selections: Iterable[tuple[Selection, KeyRange]], source: str) -> Pattern:
    """The pattern of real selections, over rows that see more than K keys.

    A bin counts selected keys relative to visible ones, so that a uniform selection gives a flat density. `stay` comes
    from the share of a row's keys that the row before it selected too.
    """
    chosen, visible = np.zeros(BINS), np.zeros(BINS)
    kept = expected = 0.0
    rows = 0
    for selection, keys in selections:
        index, start, stop = selection.index.cpu().long(), keys.start.cpu().long(), keys.stop.cpu().long()
        counted = (stop - start > selection.width).nonzero().flatten()
        rows += len(counted)
        for row in counted.tolist():
            low, high = int(start[row]), int(stop[row])
            own = index[row][index[row] >= 0]
            chosen += _histogram(high - 1 - own, high - low)
            visible += _histogram(torch.arange(high - low), high - low)
            if row and int(start[row - 1]) == low and int(stop[row - 1]) == high - 1:
                kept += float(torch.isin(own, index[row - 1]).sum())
                expected += len(own)
    if not rows:
        raise InputError("selections: no row sees more keys than it selects; record longer packs or a smaller top_k")
    density = np.divide(chosen, visible, out=np.zeros(BINS), where=visible > 0)
    leaves = 1.0 - kept / expected if expected else 1.0
    return Pattern(density / density.max(), 1.0 / max(leaves, 1e-3), rows, source)


def _histogram(distance: Tensor, visible: int) -> np.ndarray:
    place = _bin(distance, torch.tensor(visible))
    return torch.bincount(place, minlength=BINS).double().numpy()


def _bin(distance: Tensor, visible: Tensor) -> Tensor:
    """int64: the bin of keys that lie `distance` >= 0 rows back, of `visible` that the row sees."""
    return (torch.log1p(distance.float()) / (1 + visible).float().log() * BINS).long().clamp(0, BINS - 1)


def draw(pattern: Pattern, keys: KeyRange, num_keys: int, top_k: int, *, shuffled: bool = False) -> Selection:
    """min(K, visible) distinct keys for each row of causal ranges from key 0 on; the same for the same arguments.

    shuffled: in random order instead of ascending, as raw top-k kernels leave them; then no Selection in the strict
    sense, only operands for kernels. Rows that see nothing select nothing.
    """
    rows, device = keys.num_rows, keys.start.device
    index = torch.full((rows, top_k), -1, dtype=torch.int32, device=device)
    log_density = torch.from_numpy(np.log(np.maximum(pattern.density, 1e-12))).float().to(device)
    step = max(1, 2**26 // max(num_keys, 1))
    kept = min(top_k, num_keys)
    for first in range(0, rows, step):
        stop = keys.stop[first : first + step, None].long()
        key = torch.arange(num_keys, device=device)
        score = log_density[_bin((stop - 1 - key).clamp(min=0), stop)] + _gumbel(stop, key, pattern.stay)
        best = score.masked_fill_(key >= stop, -torch.inf).topk(kept, dim=1)
        index[first : first + step, :kept] = best.indices.int().masked_fill(best.values == -torch.inf, -1)
    length = (index >= 0).sum(1, dtype=torch.int32)
    if not shuffled:
        last = torch.iinfo(torch.int32).max
        ordered = torch.where(index < 0, last, index).sort(dim=1).values
        return Selection(ordered.masked_fill(ordered == last, -1), length)
    generator = torch.Generator(device).manual_seed(0)
    place = torch.rand(index.shape, generator=generator, device=device).masked_fill_(index < 0, 2.0).argsort(dim=1)
    return Selection(index.gather(1, place), length)


def _gumbel(stop: Tensor, key: Tensor, stay: float) -> Tensor:
    """Noise of (row, key) that a key keeps for `stay` rows on average, each key from another row on."""
    epoch = ((stop + (_hash(key) % 4093) / 4093.0 * stay) / stay).floor().long()
    uniform = (_hash(key + epoch * 1_000_003) % (2**24)).float() / 2**24
    return -torch.log(-torch.log(uniform.clamp(1e-7, 1 - 1e-7)))


def _hash(x: Tensor) -> Tensor:
    """Non-negative int64 that look random: splitmix64, in products that wrap."""
    x = x - 7046029254386353131
    x = (x ^ (x >> 30)) * -4658895280553007687
    x = (x ^ (x >> 27)) * -7723592293110705685
    return (x ^ (x >> 31)) & (2**62 - 1)
