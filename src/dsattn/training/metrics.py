"""What a run writes down: the lines of metrics.jsonl, the scalars of TensorBoard, and what fills them.

    {"kind": "train", "step", "stage", "mode", "lm_loss", "mtp_losses", "kl", "kl_layers",
     "balance_loss", "expert_max_violation", "rank_imbalance", "lr", "grad_norm", "tokens_per_second", "tflops", "mfu",
     "seconds"}
    {"kind": "eval", "step", "stage", "mode", "lm_loss", "health", "seconds"}

step: optimiser steps done, over all stages. Losses in nats: a label, or for the KL a row. mtp_losses:
one a depth of multi-token prediction. balance_loss: of the experts, summed over layers, 1 a layer for equal loads.
expert_max_violation: the busiest expert's load over the mean, less 1, averaged over layers. rank_imbalance: the same of
the visible pairs of rows and keys of the ranks that have rows of their own. None where there is no value.
"""

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsattn.config import Mode
from dsattn.errors import CheckpointError, DataError, InputError
from dsattn.keys import Layout
from dsattn.model.decoder import Decoder
from dsattn.nn.state import Pass
from dsattn.training.data import Pack
from dsattn.training.health import Health, LayerHealth, indexer_health
from dsattn.training.observed import evaluating

__all__ = ["Health", "LayerHealth", "MetricsWriter", "NoMetrics", "held_out_loss", "indexer_health", "read_metrics"]

Events = Sequence[Mapping[str, Any]]

METRICS_FILE = "metrics.jsonl"
_OLD_FILE = "metrics.old.jsonl"
_HEALTH_SCALARS = ("recall", "random", "recency", "oracle", "worst_head", "top1", "kl", "captured")


def held_out_loss(model: Decoder, packs: Sequence[Pack], mode: Mode) -> float:
    """Language-model loss in nats a label, over all labels of all packs, attending as `mode` does.

    Modes of the model's modules are put back. Raises InputError where the packs hold no label.
    """
    labels = count_labels(packs)
    device = next(model.parameters()).device
    total = torch.zeros((), dtype=torch.float64, device=device)
    with torch.no_grad(), evaluating(model):
        for pack in packs:
            pack = pack.to(device)
            total += summed_loss(model, pack.tokens, pack.labels, pack.layout, Pass(mode=mode, with_kl=False))
    return total.item() / labels


def count_labels(packs: Sequence[Pack]) -> int:
    """Labels of all packs. Raises InputError where there is none."""
    labels = sum(pack.num_labels for pack in packs)
    if not labels:
        raise InputError(f"packs: {len(packs)} of them hold no label; give documents of two tokens or more")
    return labels


def summed_loss(model: Decoder, tokens: Tensor, labels: Tensor, layout: Layout, run: Pass) -> Tensor:
    """Of these rows. A function of its own, so that nothing of them is held while the next ones run."""
    return model.lm_loss(model(tokens, layout, run).hidden, labels, 1)


class MetricsWriter:
    """Appends events to `run_dir/metrics.jsonl`, a whole line at a time, and to `run_dir/tensorboard`.

    A run that goes on calls `resume_from` before its first event. Otherwise the run is new: lines that an earlier one
    left in the folder are moved to metrics.old.jsonl. A half-written last line, left by a kill, is dropped.
    Raises InputError where TensorBoard is asked for and missing, CheckpointError where the disk refuses a line.
    """

    def __init__(self, run_dir: Path, tensorboard: bool):
        self.path = run_dir / METRICS_FILE
        self._new_run = True
        self._board_class = _board_class() if tensorboard else None
        self._board: Any = None
        self._first_step = 1
        run_dir.mkdir(parents=True, exist_ok=True)

    def resume_from(self, step: int) -> None:
        """Keep events up to `step`; drop those after it, which the resumed run will write again."""
        self._new_run, self._first_step = False, step + 1
        kept = 0
        for event, size in _lines(self.path):
            if event["step"] > step:
                break
            kept += size
        _truncate(self.path, kept)

    def write(self, event: Mapping[str, Any]) -> None:
        """Append one event. Numbers that are not finite are written as null: JSON has none."""
        if self._new_run and self.path.exists():
            self.path.replace(self.path.with_name(_OLD_FILE))
        self._new_run = False
        line = json.dumps(_finite(event), allow_nan=False) + "\n"
        size = self.path.stat().st_size if self.path.exists() else 0
        try:
            with self.path.open("ab") as file:
                file.write(line.encode())
        except OSError as error:
            with contextlib.suppress(OSError):
                _truncate(self.path, size)
            raise CheckpointError(f"cannot write {self.path}: {error}; free the disk, then resume the run") from error
        self._write_board(event)

    def close(self) -> None:
        """End the TensorBoard file; metrics.jsonl is complete after every event."""
        if self._board is not None:
            self._board.close()
            self._board = None

    def _write_board(self, event: Mapping[str, Any]) -> None:
        if self._board_class is None:
            return
        if self._board is None:
            self._board = self._board_class(str(self.path.parent / "tensorboard"), purge_step=self._first_step)
        for name, value in _scalars(event):
            self._board.add_scalar(name, value, event["step"])
        self._board.flush()


class NoMetrics:
    """The writer of a rank that leaves writing to rank 0."""

    def resume_from(self, step: int) -> None:
        """Nothing."""

    def write(self, event: Mapping[str, Any]) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Every complete event, in order; none where the run has written none.

    Raises InputError where there is no such folder, DataError where a line is damaged.
    """
    if not run_dir.is_dir():
        raise InputError(f"run_dir={str(run_dir)!r} is no folder; give the folder of a run")
    return [event for event, _ in _lines(run_dir / METRICS_FILE)]


class Stage(NamedTuple):
    """Steps first .. last of one stage, 1-based over the whole run."""

    mode: str
    first: int
    last: int


def stages_of(events: Events) -> list[Stage]:
    """The stages that events come from, in order; each begins behind the one before it."""
    ends: dict[int, tuple[str, int]] = {}
    for event in events:
        ends[event["stage"]] = (event["mode"], event["step"])
    stages: list[Stage] = []
    for mode, last in ends.values():
        stages.append(Stage(mode, stages[-1].last + 1 if stages else 1, last))
    return stages


def last_health(events: Events) -> Health | None:
    """The newest health in which rows were counted."""
    measured = (Health.from_dict(event["health"]) for event in reversed(events) if event.get("health"))
    return next((health for health in measured if health.rows), None)


def _lines(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """(event, bytes of its line); a last line without its end is passed over: whoever wrote it was killed."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            event: Any = None
            with contextlib.suppress(ValueError):
                event = json.loads(line)
            if not isinstance(event, dict) or not isinstance(event.get("step"), int):
                raise DataError(f"{path}: line {number} is damaged; remove that line to read the rest")
            yield event, len(line)


def _truncate(path: Path, size: int) -> None:
    if path.exists():
        with path.open("r+b") as file:
            file.truncate(size)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _scalars(event: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """(tag, number) of everything that TensorBoard can draw."""
    kind = event["kind"]
    for name, value in event.items():
        if isinstance(value, int | float) and name not in ("step", "seconds"):
            yield f"{kind}/{name}", value
    for depth, value in enumerate(event.get("mtp_losses") or [], start=1):
        yield f"{kind}/mtp/depth_{depth}", value
    for layer, value in (event.get("kl_layers") or {}).items():
        yield f"{kind}/kl/layer_{layer}", value
    if event.get("health"):
        health = Health.from_dict(event["health"])
        for name in _HEALTH_SCALARS:
            mean = health.mean(name)
            if mean is not None:
                yield f"health/{name}", mean
            for layer in health.layers:
                if (value := getattr(layer, name)) is not None:
                    yield f"health_layers/{name}/layer_{layer.layer}", value


def _board_class() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise InputError(
            "train.tensorboard=True needs tensorboard: pip install 'dsattn[report]', or set train.tensorboard=False"
        ) from error
    return SummaryWriter
