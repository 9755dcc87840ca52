from pathlib import Path

from dsattn.training import folders


def make(run: Path, *names: str) -> Path:
    for name in names:
        (run / "checkpoints" / name).mkdir(parents=True)
        (run / "checkpoints" / name / "manifest.json").write_text("{}")
    return run / "checkpoints"


def test_complete_folders_come_in_order_and_the_former_one_gives_way(tmp_path: Path) -> None:
    make(tmp_path, "step-00000010", "step-00000002", ".step-00000002.replaced", ".step-00000003.partial")
    (tmp_path / "checkpoints/step-00000011").mkdir()  # no manifest
    assert [path.name for path in folders.list_checkpoints(tmp_path)] == ["step-00000002", "step-00000010"]
    newest = folders.latest(tmp_path)
    assert newest is not None
    assert folders.step_of(newest) == 10
    assert folders.latest(tmp_path / "nowhere") is None


def test_a_replacement_that_was_cut_short_is_put_back(tmp_path: Path) -> None:
    root = make(tmp_path, ".step-00000002.replaced", ".step-00000003.partial", ".step-00000001.removed")
    folders.put_back(root)
    folders.remove_leftovers(root)
    assert [path.name for path in root.iterdir()] == ["step-00000002"]


def test_old_ones_go_and_later_steps_stay(tmp_path: Path) -> None:
    root = make(tmp_path, *(f"step-{step:08d}" for step in (1, 2, 3, 9)))
    folders.prune(root, 3, 2)
    assert sorted(path.name for path in root.iterdir()) == ["step-00000002", "step-00000003", "step-00000009"]
    assert folders.hidden(root / "step-00000009", "removed").name == ".step-00000009.removed"
