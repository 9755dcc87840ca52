"""How many threads gloo's groups have."""

import datetime
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from dsattn.parallel import mesh
from dsattn.parallel.gloo import one_thread_a_group


def options(group: Any) -> Any:
    return group._get_backend(torch.device("cpu")).options


def start() -> None:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())


@pytest.fixture(autouse=True)
def alone_again() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_groups_made_inside_have_one() -> None:
    with one_thread_a_group():
        start()
        later = dist.new_group([0], timeout=datetime.timedelta(seconds=7))
        groups = (dist.group.WORLD, later, init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))["b"].get_group())
        assert [options(group)._threads for group in groups] == [1, 1, 1]
    assert options(later)._timeout == datetime.timedelta(seconds=7)
    x = torch.ones(2)
    dist.all_reduce(x, group=later)
    assert x.tolist() == [1, 1]


def test_others_are_as_torch_makes_them() -> None:
    """If torch had one thread too, or a lock, none of this were needed: see docs/decisions/014."""
    with one_thread_a_group(), one_thread_a_group():
        mine = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        mine._threads, mine._devices = 3, [dist.ProcessGroupGloo.create_default_device()]
        assert dist.ProcessGroupGloo(dist.HashStore(), 0, 1, mine).options._threads == 3
    start()
    assert options(dist.group.WORLD)._threads == 2


def test_interfaces_are_those_that_torch_would_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,lo")
    with one_thread_a_group():
        start()
        x = torch.ones(2)
        dist.all_reduce(x)
        assert x.tolist() == [1, 1]
        assert (len(options(dist.group.WORLD)._devices), options(dist.group.WORLD)._threads) == (2, 1)
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
        with pytest.raises(RuntimeError, match="nosuch0"):
            dist.new_group([0])


def test_processes_that_join_have_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")  # but who meets here is alone
    monkeypatch.setattr(mesh, "rendezvous", lambda _: iter([(dist.HashStore(), 0, 1)]))
    with mesh.processes("cpu"):
        assert options(dist.group.WORLD)._threads == options(dist.new_group([0]))._threads == 1
    assert not dist.is_initialized()


def test_nothing_to_do_without_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    monkeypatch.delattr(dist, "ProcessGroupGloo")
    with one_thread_a_group():
        pass
