"""Each collective, forward and backward, on two processes against sums in one.

The processes run this file once; what they saw is written to a folder, and the tests read it.
"""

import datetime
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dsattn.parallel import collectives
from dsattn.parallel.collectives import Axis, begin_gather, exchange, finish_gather
from dsattn.parallel.gloo import one_thread_a_group

RANKS = 2
NAMES = ("gather", "scatter_sum", "sum_forward", "sum_backward")
ROWS = (4, 0)


def operand(rank: int, rows: int) -> Tensor:
    """[rows, 3], not contiguous."""
    torch.manual_seed(rank)
    return torch.randn(3, rows, dtype=torch.float64).T


def weight(rank: int, rows: int) -> Tensor:
    """What each rank's result is multiplied with, so that the gradient of the result is its own."""
    torch.manual_seed(10 + rank)
    return torch.randn(rows, 3, dtype=torch.float64)


def act(rank: int, axis: Axis) -> dict[Any, Any]:
    seen: dict[Any, Any] = {}
    for name in NAMES:
        for rows in ROWS:
            x = operand(rank, rows).requires_grad_()
            out = getattr(collectives, name)(x, axis)
            (out * weight(rank, len(out)) ** 2).sum().backward()
            seen[name, rows] = (out.detach(), x.grad)
    seen["exchange"] = exchange(operand(rank, 4), axis)
    x, kind = operand(rank, 4).requires_grad_(), torch.full((4, 1), rank, dtype=torch.int32)
    begun, kinds = begin_gather((x, kind), axis)
    order = torch.tensor([7, 0, 6, 1, 5, 2, 4, 3])
    ordered = finish_gather(x, begun, axis, (order, order.argsort()))
    (ordered * weight(rank, 8)).sum().backward()
    seen["ordered"] = (ordered.detach(), x.grad, finish_gather(kind, kinds, axis))
    return seen


@one_thread_a_group()
def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=RANKS,
        timeout=datetime.timedelta(seconds=120),
    )
    axis = Axis.of(dist.group.WORLD)
    assert (axis.size, axis.rank) == (RANKS, rank)
    torch.save(act(rank, axis), folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    """What each process saw."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-W", "error", __file__, str(folder)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", NAMES)
def test_equals_one_process(seen, name, rows):
    """The gradient of rank r's x is that of the sum of all ranks' results times their weights, seen from x.

    But for sum_forward: what follows it is the same on all ranks, and counts once.
    """
    xs = [operand(rank, rows).requires_grad_() for rank in range(RANKS)]
    total = torch.stack(xs).sum(0)
    outs = {
        "gather": [torch.cat(xs)] * RANKS,
        "scatter_sum": list(total.chunk(RANKS)) if rows else [total] * RANKS,
        "sum_forward": [total] * RANKS,
        "sum_backward": xs,
    }[name]
    scores = [(out * weight(rank, len(out)) ** 2).sum() for rank, out in enumerate(outs)]
    for rank in range(RANKS):
        if name == "sum_backward":  # x is one tensor, the same on every rank
            right = torch.stack([weight(one, rows) ** 2 for one in range(RANKS)]).sum(0)
        else:
            score = scores[rank] if name == "sum_forward" else torch.stack(scores).sum()
            (right,) = torch.autograd.grad(score, xs[rank], retain_graph=True)
        out, grad = seen[rank][name, rows]
        torch.testing.assert_close(out, outs[rank].detach())
        torch.testing.assert_close(grad, right)


def test_an_order_is_undone_in_the_backward(seen):
    xs = [operand(rank, 4).requires_grad_() for rank in range(RANKS)]
    ordered = torch.cat(xs)[[7, 0, 6, 1, 5, 2, 4, 3]]
    score = sum((ordered * weight(rank, 8)).sum() for rank in range(RANKS))
    for rank, grad in enumerate(torch.autograd.grad(score, xs)):
        out, found, kinds = seen[rank]["ordered"]
        assert torch.equal(out, ordered)
        torch.testing.assert_close(found, grad)
        assert kinds.flatten().tolist() == [0] * 4 + [1] * 4


def test_exchange_sends_each_rank_its_rows(seen):
    for rank in range(RANKS):
        right = torch.stack([operand(other, 4)[2 * rank :][:2] for other in range(RANKS)])
        assert torch.equal(seen[rank]["exchange"], right)


def test_no_group_is_no_axis():
    assert Axis.of(None) is None


if __name__ == "__main__":
    rank = next((rank for rank in range(1, RANKS) if os.fork() == 0), 0)  # forked: torch is imported once
    signal.alarm(240)
    main(rank, Path(sys.argv[1]))
    if rank == 0:
        assert not any(os.wait()[1] for _ in range(1, RANKS))
