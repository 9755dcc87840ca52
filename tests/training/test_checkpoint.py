import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsattn.errors import CheckpointError, InputError
from dsattn.training import checkpoint


def tensors() -> dict[str, Tensor]:
    return {
        "transposed": torch.randn(3, 4).t(),
        "slice": torch.randn(100)[7:9],
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 3),
        "bf16": torch.tensor([1.0, float("nan"), -0.0, float("-inf")], dtype=torch.bfloat16),
        "fp64": torch.randn(2, dtype=torch.float64),
        "bool": torch.tensor([True, False]),
        "int64": torch.tensor([2**62]),
        "a.b": torch.ones(2),
    }


def full_state() -> dict[str, Any]:
    plain = {"position": 3, "empty": {}, "list": [], "tuple": (1, (2, None)), "int keys": {1: "x"}, "bytes": b"\0"}
    return {"model": tensors(), "deep": {"er": {"t": torch.ones(1), "plain": {}}}, "data": plain, "none": None}


def same_bits(a: Tensor, b: Tensor) -> bool:
    raw = [x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)]
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(*raw)


def save(run_dir: Path, step: int, value: float = 0.0, keep: int = 2) -> Path:
    return checkpoint.save(run_dir, step, {"w": torch.full((50,), value or float(step))}, keep=keep)


def value_of(path: Path) -> float:
    return checkpoint.load(path, {"w": torch.zeros(50)})["w"][0].item()


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_every_value_comes_back(tmp_path: Path) -> None:
    saved = full_state()
    generators = torch.get_rng_state()
    path = checkpoint.save(tmp_path, 100, saved, keep=1, meta={"stage": 2, "of": (1, 2)})
    assert torch.equal(generators, torch.get_rng_state())
    assert path == tmp_path / "checkpoints" / "step-00000100"
    assert path == checkpoint.latest(tmp_path)

    template = full_state()
    template.update(data=None, none={"wrong": 1})
    template["model"] = {name: torch.zeros_like(tensor) for name, tensor in saved["model"].items()}
    given = dict(template["model"])
    loaded = checkpoint.load(path, template)
    assert loaded is template
    assert all(loaded["model"][name] is tensor for name, tensor in given.items()), "tensors are filled in place"
    assert all(same_bits(loaded["model"][name], tensor) for name, tensor in saved["model"].items())
    assert loaded["data"] == saved["data"]
    assert loaded["none"] is None
    assert loaded["deep"]["er"]["plain"] == {}
    assert checkpoint.load_meta(path) == {"stage": 2, "of": [1, 2]}
    assert checkpoint.verify(path)["step"] == 100
    assert checkpoint.contents(path)["model.bf16"] == ((4,), torch.bfloat16)
    assert checkpoint.contents(path)["data"] is None


def test_views_are_stored_without_their_base(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 0, {"row": torch.randn(1_000_000)[:2]}, keep=1)
    assert sum(file.stat().st_size for file in path.iterdir()) < 100_000


def test_parameters_that_require_grad_are_filled(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 0, {"w": nn.Parameter(torch.ones(3))}, keep=1)
    target = nn.Parameter(torch.zeros(3))
    checkpoint.load(path, {"w": target})
    assert target.requires_grad
    assert target.is_leaf
    assert target.tolist() == [1, 1, 1]


def test_keeps_the_newest(tmp_path: Path) -> None:
    assert checkpoint.list_checkpoints(tmp_path) == []
    assert checkpoint.latest(tmp_path) is None
    for step in (1, 2, 3, 100_000_000):
        save(tmp_path, step)
    assert names(tmp_path) == ["step-00000003", "step-100000000"]
    save(tmp_path, 4, keep=1)
    assert names(tmp_path) == ["step-00000004", "step-100000000"], "higher steps are not this save's to remove"
    assert [value_of(path) for path in checkpoint.list_checkpoints(tmp_path)] == [4.0, 100_000_000.0]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 1)
    path = save(tmp_path, 1, value=7.0)
    assert value_of(path) == 7.0
    assert names(tmp_path) == ["step-00000001"]


def test_incomplete_folders_do_not_count(tmp_path: Path) -> None:
    good = save(tmp_path, 5)
    root = tmp_path / "checkpoints"
    shutil.copytree(good, root / ".step-00000006.partial")
    shutil.copytree(good, root / ".step-00000007.removed")
    shutil.copytree(good, root / "step-00000008")
    (root / "step-00000008" / "manifest.json").unlink()
    shutil.copytree(good, root / "step-9")
    (root / "notes.txt").touch()
    assert checkpoint.list_checkpoints(tmp_path) == [good]
    good.rename(root / ".step-00000005.replaced")
    assert checkpoint.latest(tmp_path) == root / ".step-00000005.replaced", "the only one of its step"
    save(tmp_path, 10)
    assert names(tmp_path) == ["notes.txt", "step-00000005", "step-00000008", "step-00000010", "step-9"]


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp", "manifest.json"])
@pytest.mark.parametrize("how", ["missing", "truncated", "altered", "empty"])
def test_damage_is_named(tmp_path: Path, file: str, how: str) -> None:
    save(tmp_path, 1, keep=3)
    middle, newest = save(tmp_path, 2, keep=3), save(tmp_path, 3, keep=3)
    (tmp_path / "checkpoints" / "step-00000001" / ".metadata").unlink()
    damaged = newest / file
    content = damaged.read_bytes()
    if how == "missing":
        damaged.unlink()
    else:
        half = len(content) // 2
        flipped = content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :]
        damaged.write_bytes({"truncated": content[:half], "altered": flipped, "empty": b""}[how])
    target = torch.zeros(50)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(newest, {"w": target})
    message = str(caught.value)
    assert file in message
    assert how in message or how == "empty" or file == "manifest.json"
    assert str(middle) in message, "the newest other intact checkpoint"
    assert not target.any(), "nothing was filled"
    assert value_of(middle) == 2.0


def test_no_intact_checkpoint_is_said(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    (path / ".metadata").unlink()
    with pytest.raises(CheckpointError, match="no other intact checkpoint"):
        checkpoint.verify(path)
    with pytest.raises(CheckpointError, match="no such folder"):
        checkpoint.load_meta(tmp_path / "nowhere")


def test_a_damaged_manifest_has_a_way_out_too(tmp_path: Path) -> None:
    intact, newest = save(tmp_path, 1), save(tmp_path, 2)
    (newest / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match=rf"{newest} is damaged: .*truncated.*intact checkpoint is {intact}"):
        checkpoint.load_meta(newest)


def test_mismatches_are_listed_together(tmp_path: Path) -> None:
    given = {"a": torch.ones(2), "b": {"c": torch.ones(2, 3), "d": torch.ones(1)}, "e": 1, "f": torch.ones(1)}
    path = checkpoint.save(tmp_path, 0, given, keep=1)
    target = torch.zeros(2)
    wrong = {"a": target, "b": {"c": torch.ones(3, 2), "d": torch.ones(1).double()}, "f": None, "new": None}
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(path, wrong)
    listed = str(caught.value).splitlines()
    assert "5 problem(s)" in listed[0]
    for sentence, part in zip(listed[1:], ["new is missing", "e is in", "b.c is", "b.d is", "f is"], strict=True):
        assert part in sentence
    assert "[2, 3]" in listed[3]
    assert "float64" in listed[4]
    assert not target.any(), "nothing was filled"


def test_partial_load_still_wants_what_it_asks_for(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 0, {"a": torch.ones(2), "b": torch.ones(2)}, keep=1)
    assert checkpoint.load(path, {"b": torch.zeros(2)}, partial=True)["b"].tolist() == [1, 1]
    with pytest.raises(CheckpointError, match="c is missing"):
        checkpoint.load(path, {"c": torch.zeros(2)}, partial=True)


@pytest.mark.parametrize(
    ("state", "rule"),
    [
        ({"a": [torch.ones(1)]}, "a is a list"),
        ({"a": {"b": ({"c": torch.ones(1)},)}}, "a.b is a tuple"),
        ({"a": {"b": (torch.ones(1),), "c": torch.ones(1)}}, "a.b is a tuple"),
        ({"a": nn.Linear(1, 1)}, "a is a Linear"),
        ({"a": {1: torch.ones(1)}}, "must be a string"),
        ({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, "both named 'a.b'"),
    ],
)
def test_state_that_cannot_be_told_apart_is_refused(tmp_path: Path, state: dict[str, Any], rule: str) -> None:
    with pytest.raises(InputError, match=rule):
        checkpoint.save(tmp_path, 0, state, keep=1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("wrong", [{"step": -1}, {"keep": 0}, {"meta": {"a": torch.ones(1)}}])
def test_arguments_are_checked_before_writing(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        checkpoint.save(tmp_path, state={}, **{"step": 0, "keep": 1, **wrong})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("step", [3, 2], ids=["new step", "same step"])
@pytest.mark.parametrize("function", ["fsync", "replace"])
@pytest.mark.parametrize("call", range(7))
def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, function: str, call: int) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    calls = iter(range(1000))
    real = getattr(os, function)

    def full(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args, **kwargs)

    monkeypatch.setattr(os, function, full)
    try:
        save(tmp_path, step, value=9.0)
        failed = None
    except CheckpointError as error:
        failed = str(error)
    reached = next(calls) > call
    monkeypatch.undo()
    assert (failed is not None) == reached
    values = [value_of(path) for path in checkpoint.list_checkpoints(tmp_path)]
    if failed is None:
        assert values == ([2.0, 9.0] if step == 3 else [1.0, 9.0])
    else:
        assert "No space left on device" in failed
        assert values[0] == 1.0, "nothing older is lost"
        assert 2.0 in values or values[-1] == 9.0
        assert not [name for name in names(tmp_path) if name.endswith(".partial")]
    save(tmp_path, 4, keep=1)
    assert names(tmp_path) == ["step-00000004"]


def test_file_size_limit_of_the_system(tmp_path: Path, run_python: Callable[[str], None]) -> None:
    run_python(f"""
import resource, torch
from pathlib import Path
from dsattn.errors import CheckpointError
from dsattn.training import checkpoint
run = Path({str(tmp_path)!r})
good = checkpoint.save(run, 1, {{"w": torch.ones(3)}}, keep=1)
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
for limit in (0, 100, 3000, 100_000, 390_000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        checkpoint.save(run, 2, {{"w": torch.ones(100_000), "x": torch.ones(2)}}, keep=1)
        raise SystemExit(f"saved within {{limit}} bytes")
    except CheckpointError as error:
        assert "File too large" in str(error), error
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000001"]
    checkpoint.verify(good)
checkpoint.save(run, 2, {{"w": torch.ones(100_000)}}, keep=1)
""")


def test_everything_is_synced_before_its_name_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    fsync, replace = os.fsync, os.replace
    opened = lambda descriptor: Path(os.readlink(f"/proc/self/fd/{descriptor}")).name  # noqa: E731
    monkeypatch.setattr(os, "fsync", lambda fd: (order.append(opened(fd)), fsync(fd))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (order.append(f"-> {Path(b).name}"), replace(a, b))[1])
    save(tmp_path, 1, keep=1)
    order.clear()
    save(tmp_path, 2, keep=1)
    renamed, removed = order.index("-> step-00000002"), order.index("-> .step-00000001.removed")
    assert {"__0_0.distcp", ".metadata.tmp", "manifest.json", ".step-00000002.partial"} <= set(order[:renamed])
    assert order.index("manifest.json") > order.index(".metadata.tmp")
    assert "checkpoints" in order[renamed:removed], "removed only after the rename is durable"


def test_interrupt_inside_torch_is_not_turned_into_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is one that the caller is handling already taken for the cause of an error."""

    def interrupted(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(".distcp"):
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    try:
        save(tmp_path, 1)
    except KeyboardInterrupt:
        with pytest.raises(CheckpointError, match="pickle"):
            checkpoint.save(tmp_path, 1, {"f": lambda: None}, keep=1)
    else:
        pytest.fail("the interrupt was swallowed")


def test_value_that_cannot_be_pickled(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="pickle"):
        checkpoint.save(tmp_path, 1, {"f": lambda: None}, keep=1)
    assert names(tmp_path) == []


def test_old_ones_that_cannot_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    monkeypatch.setattr(shutil, "rmtree", lambda path: (_ for _ in ()).throw(PermissionError(13, "denied", str(path))))
    with pytest.raises(CheckpointError, match=r"step 2 is saved.*denied"):
        save(tmp_path, 2, keep=1)
    assert value_of(tmp_path / "checkpoints" / "step-00000002") == 2.0


@pytest.mark.gpu
def test_gpu_tensors_keep_their_device(tmp_path: Path) -> None:
    saved = {name: tensor.cuda() for name, tensor in tensors().items()}
    path = checkpoint.save(tmp_path, 1, {"model": saved}, keep=1)
    loaded = checkpoint.load(path, {"model": {name: torch.zeros_like(tensor) for name, tensor in saved.items()}})
    for name, tensor in saved.items():
        assert loaded["model"][name].is_cuda
        assert same_bits(loaded["model"][name], tensor)
