import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from dsattn.config import DSAConfig, IndexerConfig, MLAConfig, ModelConfig
from dsattn.errors import CheckpointError, DataError, InputError
from dsattn.keys import Layout
from dsattn.model import Decoder
from dsattn.nn.state import Pass
from dsattn.training.data import IGNORED_LABEL, Pack
from dsattn.training.health import Health, LayerHealth
from dsattn.training.metrics import MetricsWriter, Stage, held_out_loss, last_health, read_metrics, stages_of

MODES = ("dense", "warmup", "sparse", "frozen")


def train_event(step: int, **changes) -> dict:
    event = {"kind": "train", "step": step, "stage": 0, "mode": "sparse", "lm_loss": 5 / step, "kl": 0.5}
    rest = {
        "kl_layers": {0: 0.4, 2: 0.6},
        "lr": 1e-3,
        "grad_norm": 1.0,
        "tokens_per_second": 9.0,
        "seconds": 2.0 * step,
    }
    return {**event, **rest, **changes}


def layer_health(layer: int = 0, **changes) -> LayerHealth:
    shares = {"recall": 0.8, "random": 0.2, "recency": 0.5, "oracle": 0.9, "worst_head": 0.7, "top1": 0.6}
    quartiles = {f"{name}_quartiles": [shares[name]] * 4 for name in ("recall", "random", "recency")}
    rest = {"kl": 0.3, "kl_uniform": 1.2, "captured": 0.75, "distances": [3, 1], "oracle_distances": [2, 2]}
    return LayerHealth(**{"layer": layer, "rows": 40, **shares, **quartiles, **rest, **changes})


def eval_event(step: int, health: Health | None = None, **changes) -> dict:
    event = {"kind": "eval", "step": step, "stage": 0, "mode": "sparse", "lm_loss": 2.0, "seconds": 1.0}
    return {**event, "health": None if health is None else health.to_dict(), **changes}


def write(run_dir: Path, *events: dict, resume: int | None = None, tensorboard: bool = False) -> None:
    writer = MetricsWriter(run_dir, tensorboard)
    if resume is not None:
        writer.resume_from(resume)
    for event in events:
        writer.write(event)
    writer.close()


def steps(run_dir: Path) -> list[int]:
    return [event["step"] for event in read_metrics(run_dir)]


# Held-out loss


def model_and_packs() -> tuple[Decoder, list[Pack]]:
    indexer = IndexerConfig(heads=2, head_dim=8, top_k=3, rope_dim=4)
    mla = MLAConfig(heads=2, q_lora_rank=12, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)
    sizes = {"vocab_size": 30, "hidden_size": 16, "num_layers": 2, "intermediate_size": 24, "init_std": 0.3}
    model = Decoder(ModelConfig(attention=mla, dsa=DSAConfig(indexer=indexer), **sizes))
    packs = []
    for lengths, total in (([10, 2], 12), ([1, 7], 14)):
        layout = Layout.packed(lengths, total=total)
        tokens = torch.randint(0, 30, (total,))
        labels = torch.full((total,), IGNORED_LABEL)
        same = layout.real_rows[1:] & (layout.positions[1:] > 0)
        labels[:-1][same] = tokens[1:][same]
        packs.append(Pack(tokens, labels, layout, int(same.sum())))
    return model, packs


@pytest.mark.parametrize("mode", MODES)
def test_held_out_loss_is_the_mean_over_all_labels(mode):
    model, packs = model_and_packs()
    assert [pack.num_labels for pack in packs] == [10, 6]
    total = 0.0
    with torch.no_grad():
        for pack in packs:
            logits = model.logits(model(pack.tokens, pack.layout, Pass(mode=mode)).hidden)
            kept = pack.labels != IGNORED_LABEL
            total += F.cross_entropy(logits[kept], pack.labels[kept], reduction="sum").item()
    found = held_out_loss(model, packs, mode)
    assert found == pytest.approx(total / 16, rel=1e-6)
    means = [held_out_loss(model, [pack], mode) for pack in packs]
    assert found != pytest.approx(sum(means) / 2, rel=1e-4)  # a mean of means would weigh short packs more


def test_held_out_loss_leaves_no_trace():
    model, packs = model_and_packs()
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    held_out_loss(model, packs, "sparse")
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())
    assert held_out_loss(model, packs, "sparse") != held_out_loss(model, packs, "dense")


def test_held_out_loss_needs_a_label():
    model, _ = model_and_packs()
    empty = Pack(torch.zeros(1, dtype=torch.int64), torch.full((1,), IGNORED_LABEL), Layout.causal(1), 0)
    for packs in ([], [empty]):
        with pytest.raises(InputError, match="no label"):
            held_out_loss(model, packs, "dense")


# metrics.jsonl


def test_events_are_read_back(tmp_path):
    events = [train_event(1, kl=None, kl_layers=None), eval_event(1, Health([layer_health()], 4, 40, [4] * 5))]
    write(tmp_path / "new" / "run", *events)
    assert read_metrics(tmp_path / "new" / "run") == events
    assert len((tmp_path / "new" / "run" / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_run_without_metrics_has_none_and_no_run_is_an_error(tmp_path):
    assert read_metrics(tmp_path) == []
    with pytest.raises(InputError, match="no folder"):
        read_metrics(tmp_path / "absent")


def test_what_is_not_finite_becomes_null(tmp_path):
    write(tmp_path, train_event(1, lm_loss=math.nan, grad_norm=math.inf, kl_layers={0: -math.inf, 1: 2.0}))
    (found,) = read_metrics(tmp_path)
    assert (found["lm_loss"], found["grad_norm"], found["kl_layers"]) == (None, None, {"0": None, "1": 2.0})
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()


def test_resuming_drops_what_will_be_written_again(tmp_path):
    write(tmp_path, *(train_event(step) for step in range(1, 8)), eval_event(7))
    write(tmp_path, train_event(5, lm_loss=9.0), resume=4)
    assert steps(tmp_path) == [1, 2, 3, 4, 5]
    assert read_metrics(tmp_path)[-1]["lm_loss"] == 9.0
    write(tmp_path, resume=0)
    assert steps(tmp_path) == []


def test_resuming_at_an_evaluation_keeps_it(tmp_path):
    write(tmp_path, train_event(4), eval_event(4), train_event(5))
    write(tmp_path, resume=4)
    assert [event["kind"] for event in read_metrics(tmp_path)] == ["train", "eval"]


def test_resuming_where_nothing_was_written(tmp_path):
    write(tmp_path, train_event(3), resume=2)
    assert steps(tmp_path) == [3]


def lines_of(count: int) -> bytes:
    return b"".join(json.dumps(train_event(step)).encode() + b"\n" for step in range(1, count + 1))


@pytest.mark.parametrize("cut", [1, 2, 40, len(lines_of(1))])
def test_a_torn_last_line_is_dropped(tmp_path, cut):
    """Cut everywhere in the last line, at its very end too: then only the line break is missing."""
    (tmp_path / "metrics.jsonl").write_bytes(lines_of(3)[:-cut])
    assert steps(tmp_path) == [1, 2]
    write(tmp_path, train_event(3), resume=2)
    assert steps(tmp_path) == [1, 2, 3]
    assert (tmp_path / "metrics.jsonl").read_bytes().count(b"\n") == 3


def test_an_unhurt_last_line_is_kept(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(lines_of(3))
    write(tmp_path, resume=3)
    assert steps(tmp_path) == [1, 2, 3]


@pytest.mark.parametrize("line", [b"{", b"\0\0", b"[1]", b"7", b"{}", b'{"step": "1"}', b"\xff"])
def test_a_damaged_line_in_the_middle_is_named(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_bytes(lines_of(2) + line + b"\n" + lines_of(1))
    with pytest.raises(DataError, match=r"metrics.jsonl: line 3 is damaged"):
        read_metrics(tmp_path)


def test_a_new_run_moves_old_lines_aside(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(lines_of(3)[:-5])
    write(tmp_path, train_event(1), train_event(2))
    assert steps(tmp_path) == [1, 2]
    assert (tmp_path / "metrics.old.jsonl").read_bytes() == lines_of(3)[:-5]


def test_a_writer_that_writes_nothing_moves_nothing(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(lines_of(3))
    write(tmp_path)
    assert steps(tmp_path) == [1, 2, 3]


def test_a_killed_writer_leaves_whole_lines(tmp_path):
    """A real kill -9 of a process that writes as fast as it can."""
    code = f"""
from itertools import count
from pathlib import Path
from dsattn.training.metrics import MetricsWriter
writer = MetricsWriter(Path({str(tmp_path)!r}), False)
for step in count(1):
    writer.write({{"kind": "train", "step": step, "text": "x" * 5000}})
    if step == 20:
        print("ready", flush=True)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "ready\n"
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    found = steps(tmp_path)
    assert found == list(range(1, len(found) + 1))
    assert len(found) >= 20
    write(tmp_path, train_event(11), resume=10)
    assert steps(tmp_path) == list(range(1, 12))


def test_a_full_disk_is_told_and_tears_no_line(tmp_path, monkeypatch):
    write(tmp_path, train_event(1))
    before = (tmp_path / "metrics.jsonl").read_bytes()
    writer = MetricsWriter(tmp_path, False)
    writer.resume_from(1)

    real = Path.open

    class Full:
        """A file on a disk with room for 20 more bytes."""

        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def write(self, data):
            self.file.write(data[:20])
            self.file.flush()
            raise OSError(28, "No space left on device")

    def open_full(path, mode="r", *args, **kwargs):
        file = real(path, mode, *args, **kwargs)
        return Full(file) if mode == "ab" else file

    monkeypatch.setattr(Path, "open", open_full)
    with pytest.raises(CheckpointError, match=r"metrics.jsonl.*No space left"):
        writer.write(train_event(2))
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    monkeypatch.undo()
    writer.write(train_event(2))
    assert steps(tmp_path) == [1, 2]


# TensorBoard


def board(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    return {tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_shows_every_number(tmp_path):
    health = Health([layer_health(0), layer_health(2, recall=0.6, captured=None)], 4, 40, [4] * 5)
    write(tmp_path, train_event(5, mtp_losses=[2.5, 3.5]), eval_event(5, health), tensorboard=True)
    found = board(tmp_path)
    assert found["train/lm_loss"] == [(5, pytest.approx(1.0))]
    assert found["train/kl/layer_2"] == [(5, pytest.approx(0.6))]
    assert found["train/mtp/depth_2"] == [(5, pytest.approx(3.5))]
    assert found["health/recall"] == [(5, pytest.approx(0.7))]
    assert found["health_layers/recall/layer_2"] == [(5, pytest.approx(0.6))]
    assert found["eval/lm_loss"] == [(5, pytest.approx(2.0))]
    assert "health_layers/captured/layer_2" not in found
    assert not {tag for tag in found if tag.endswith(("/step", "/seconds", "/mode", "/kind"))}


def test_tensorboard_forgets_what_a_resumed_run_writes_again(tmp_path):
    write(tmp_path, *(train_event(step) for step in (1, 2, 3)), tensorboard=True)
    write(tmp_path, train_event(3, lm_loss=9.0), resume=2, tensorboard=True)
    assert board(tmp_path)["train/lm_loss"] == [(1, 5.0), (2, 2.5), (3, 9.0)]


def test_tensorboard_is_not_written_unasked(tmp_path):
    write(tmp_path, train_event(1))
    assert not (tmp_path / "tensorboard").exists()


def test_missing_tensorboard_is_an_error_at_once(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(InputError, match=r"pip install 'dsattn\[report\]'"):
        MetricsWriter(tmp_path, True)
    MetricsWriter(tmp_path, False)


# Reading events


def test_stages_follow_one_another():
    events = [
        train_event(1, stage=0, mode="dense"),
        train_event(10, stage=0, mode="dense"),
        train_event(15, stage=1, mode="warmup"),
        eval_event(20, stage=1, mode="warmup"),
        train_event(30, stage=2, mode="dense"),
    ]
    assert stages_of(events) == [Stage("dense", 1, 10), Stage("warmup", 11, 20), Stage("dense", 21, 30)]
    assert stages_of([]) == []


def test_the_last_health_is_one_with_rows():
    measured, empty = Health([layer_health()], 4, 40, [4] * 5), Health([], 4, 0, [], "nothing")
    first = Health([layer_health(recall=0.1)], 4, 40, [4] * 5)
    events = [eval_event(1, first), eval_event(2, measured), eval_event(3, empty), eval_event(4)]
    assert last_health(events) == measured
    assert last_health([eval_event(2, empty), train_event(3)]) is None
