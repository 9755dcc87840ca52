"""Tensors on disk: read when asked for, written in shards, summed."""

import hashlib
import json
import struct
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dsattn.errors import CheckpointError
from dsattn.integrations.stored import (
    INDEX,
    LastRead,
    Stored,
    digests,
    open_safetensors,
    stored,
    write_safetensors,
)

pytest.importorskip("safetensors")

WEIGHTS = {
    "b": torch.arange(6.0).view(2, 3),
    "a": torch.tensor(1.5, dtype=torch.bfloat16),
    "empty": torch.zeros(0, 4),
    "c": torch.arange(4, dtype=torch.int64),
}


def write(folder: Path, shard_bytes: int) -> None:
    write_safetensors(folder, {name: stored(one) for name, one in WEIGHTS.items()}, shard_bytes, {"format": "pt"})


@pytest.mark.parametrize(("shard_bytes", "files"), [(10**9, 1), (32, 2), (1, 4)])
def test_shards_come_back(shard_bytes: int, files: int, tmp_path: Path) -> None:
    write(tmp_path, shard_bytes)
    names = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(names) == files
    assert (tmp_path / INDEX).exists() == (files > 1)
    if files > 1:
        index = json.loads((tmp_path / INDEX).read_text())
        assert sorted(set(index["weight_map"].values())) == names
        assert index["metadata"]["total_size"] == 24 + 2 + 32
        assert names[0] == f"model-00001-of-0000{files}.safetensors"
    found = open_safetensors(tmp_path)
    assert found.keys() == WEIGHTS.keys()
    for name, one in found.items():
        assert (one.shape, one.dtype) == (tuple(WEIGHTS[name].shape), WEIGHTS[name].dtype)
        assert one.read().equal(WEIGHTS[name])
        assert one.nbytes == WEIGHTS[name].nbytes


def test_a_folder_that_is_not_whole_lists_everything(tmp_path: Path) -> None:
    write(tmp_path, 1)
    (tmp_path / "model-00001-of-00004.safetensors").unlink()
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["ghost"] = "model-00002-of-00004.safetensors"
    (tmp_path / INDEX).write_text(json.dumps(index))
    (tmp_path / "model-00004-of-00004.safetensors").write_bytes(b"cut")
    with pytest.raises(CheckpointError, match="5 problem") as error:
        open_safetensors(tmp_path)
    text = str(error.value)
    assert "model-00001-of-00004.safetensors is missing" in text
    assert "model-00004-of-00004.safetensors cannot be read" in text
    assert f"ghost is named by {INDEX} and in no file" in text


def test_folders_without_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no \.safetensors files$"):
        open_safetensors(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match="files are pickles"):
        open_safetensors(tmp_path)


def test_unknown_dtype(tmp_path: Path) -> None:
    header = json.dumps({"x": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0")
    with pytest.raises(CheckpointError, match="F4"):
        open_safetensors(tmp_path)


def test_files_beside_the_index_are_not_read(tmp_path: Path) -> None:
    write(tmp_path, 1)
    (tmp_path / "consolidated.safetensors").write_bytes(b"another copy of it all")
    assert open_safetensors(tmp_path).keys() == WEIGHTS.keys()


def test_digests_are_of_the_bytes() -> None:
    found = digests({name: stored(one) for name, one in WEIGHTS.items()})
    assert found["b"] == hashlib.sha256(WEIGHTS["b"].numpy().tobytes()).hexdigest()
    assert found["a"] == hashlib.sha256(b"\xc0\x3f").hexdigest()
    assert found["empty"] == hashlib.sha256(b"").hexdigest()
    turned = stored(WEIGHTS["b"].t())
    assert digests({"t": turned})["t"] == hashlib.sha256(WEIGHTS["b"].t().contiguous().numpy().tobytes()).hexdigest()


def test_lazy_tensor_keeps_nothing() -> None:
    reads: list[Tensor] = []

    def read() -> Tensor:
        reads.append(torch.arange(6.0).view(2, 3))
        return reads[-1]

    lazy = Stored((2, 3), torch.float32, read).lazy()
    assert (lazy.shape, lazy.dtype, lazy.is_pinned()) == ((2, 3), torch.float32, False)
    assert not reads
    plain = lazy.detach()
    assert type(plain) is Tensor
    assert plain.equal(torch.arange(6.0).view(2, 3))
    assert (lazy + 1).sum() == 21
    assert len(reads) == 2


def test_other_dtype_keeps_values() -> None:
    one = stored(torch.tensor([1.0, 2.5]))
    assert one.to(torch.float32) is one
    half = one.to(torch.bfloat16)
    assert half.dtype == half.read().dtype == torch.bfloat16
    assert half.read().tolist() == [1.0, 2.5]


def test_last_read_is_kept_once() -> None:
    reads: list[str] = []
    a, b = (Stored((), torch.float32, lambda name=name: reads.append(name) or torch.zeros(())) for name in "ab")
    last = LastRead()
    for one in (a, a, b, b, a):
        last.read(one)
    assert reads == ["a", "b", "a"]
    last.forget()
    last.read(a)
    assert reads == ["a", "b", "a", "a"]
