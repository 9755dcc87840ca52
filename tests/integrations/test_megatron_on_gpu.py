"""One absorbed self-attention of Megatron's beside ours on a GPU: what results/record_megatron.py records."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """results/record_megatron.py, with the package imported and one process joined."""
    unpacked = ROOT / ".venv" / "megatron"
    if (unpacked / "megatron" / "core").is_dir():
        sys.path.insert(0, str(unpacked))
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("no megatron-core: unpack its wheel into .venv/megatron")
    sys.path.insert(0, str(ROOT / "results"))
    import record_megatron

    record_megatron.join(str(tmp_path_factory.mktemp("gloo")))
    yield record_megatron
    torch.distributed.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("lengths", [(4096,), (2500, 96, 1500)], ids=["one document", "packed"])
@pytest.mark.parametrize("backend", ["none", "tilelang", "cudnn"])
def test_a_layer_beside_megatrons_own(record: Any, backend: str, lengths: tuple[int, ...]) -> None:
    found = record.compare(backend, lengths)
    sys.stdout.write(json.dumps(found) + "\n")
    if reason := found.get("refused") or found.get("failed"):
        assert backend != "none", reason
        pytest.skip(f"Megatron's {backend}: {reason}")
    assert record.worse(found) == []
