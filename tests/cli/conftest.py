from collections.abc import Callable
from pathlib import Path

import pytest

from dsattn.cli.__main__ import main

STEPS = {"dense": 2, "warmup": 2, "sparse": 2}


def options(run_dir: Path, source: Path) -> list[str]:
    """A run of seconds: 2 layers, packs of 64, 16 keys kept."""
    stages = [
        word
        for index, steps in enumerate(STEPS.values())
        for word in (f"--train.stages.{index}.steps", str(steps), f"--train.stages.{index}.lr-warmup", "0")
    ]
    return (
        f"""--model.num-layers 2 --model.hidden-size 32 --model.intermediate-size 48 --model.attention.heads 2
        --model.dsa.indexer.top-k 16 --data.pack-tokens 64 --data.source {source} --data.held-out 0.3
        --train.eval-packs 2 --train.log-every 1 --train.device cpu --train.run-dir {run_dir}""".split()
        + stages
    )


@pytest.fixture
def tiny_options() -> Callable[[Path, Path], list[str]]:
    """`options`, for tests that train a run of their own."""
    return options


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    """A folder of text."""
    folder = tmp_path_factory.mktemp("text")
    for number in range(6):
        lines = (f"line {line} of file {number}: the quick brown fox" for line in range(30))
        (folder / f"{number}.txt").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory, text) -> Path:
    """A finished run of all three stages."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    assert main(["train", "tiny", *options(folder, text)]) == 0
    return folder


@pytest.fixture(scope="session")
def dense_run_dir(tmp_path_factory, text) -> Path:
    """A run whose indexers have not learned: it stopped with the dense stage's checkpoint."""
    folder = tmp_path_factory.mktemp("runs") / "dense"
    modes = [word for index in range(3) for word in (f"--train.stages.{index}.mode", "dense")]
    assert main(["train", "tiny", *options(folder, text), *modes]) == 0
    return folder
