"""Which ranks work together; what process groups do with it is in test_agreement.py."""

import pytest
import torch

from dsattn.config import ParallelConfig
from dsattn.errors import ConfigError, InputError
from dsattn.parallel.mesh import VIEWS, ParallelMesh, build_mesh, coordinates, processes, sizes

BIG = ParallelConfig(dp_replicate=2, dp_shard=2, cp=2, tp=2, pp=2, ep=4)


def test_ranks_count_with_tp_fastest() -> None:
    assert [coordinates(BIG, rank)["tp"] for rank in range(4)] == [0, 1, 0, 1]
    assert [coordinates(BIG, rank)["cp"] for rank in range(4)] == [0, 0, 1, 1]
    assert [coordinates(BIG, rank)["pp"] for rank in (0, 15, 16, 31)] == [0, 0, 1, 1]


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_holds_every_rank_once(view: str) -> None:
    places = [tuple(coordinates(BIG, rank)[name] for name in VIEWS[view]) for rank in range(BIG.world_size)]
    assert len(set(places)) == BIG.world_size
    assert places == sorted(places)


def test_groups_made_of_others() -> None:
    """fsdp = dp_shard x cp, batch = dp_replicate x dp_shard, loss = batch x cp, experts' ranks = dp_shard x cp x tp."""
    count = sizes(BIG)
    assert (count["fsdp"], count["batch"], count["loss"], count["efsdp"], count["keys"]) == (4, 4, 8, 2, 4)
    for rank in range(BIG.world_size):
        at = coordinates(BIG, rank)
        assert at["fsdp"] == 2 * at["dp_shard"] + at["cp"]
        assert at["batch"] == 2 * at["dp_replicate"] + at["dp_shard"]
        assert at["loss"] == 2 * at["batch"] + at["cp"]
        assert at["keys"] == 2 * at["cp"] + at["tp"]
        assert 4 * at["efsdp"] + at["ep"] == 4 * at["dp_shard"] + 2 * at["cp"] + at["tp"]


def test_one_process_has_no_groups() -> None:
    mesh = build_mesh(ParallelConfig(), "cpu")
    assert all(mesh.size(name) == 1 and mesh.rank(name) == 0 and mesh.group(name) is None for name in sizes(BIG))
    assert mesh.device == torch.device("cpu")
    with pytest.raises(InputError, match="one process has no device mesh"):
        mesh.device_mesh("tp")
    with pytest.raises(InputError, match="name='dp' is no group"):
        mesh.size("dp")


def test_wrong_numbers_of_processes_and_ranks() -> None:
    with pytest.raises(ConfigError, match=r"= 32, but 1 process\(es\) were started"):
        build_mesh(BIG, "cpu")
    with pytest.raises(InputError, match="rank=32 must be at least 0 and below the 32 ranks"):
        coordinates(BIG, 32)


def test_a_place_is_known_without_process_groups() -> None:
    mesh = ParallelMesh(BIG, global_rank=31)
    assert [mesh.rank(name) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")] == [1, 1, 1, 1, 1, 3]


def test_a_process_alone_joins_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with processes("cpu"):
        assert not torch.distributed.is_initialized()
