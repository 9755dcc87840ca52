"""The indexer's loss whose heads are on two GPUs, over NCCL, against one GPU that has them all.

Each GPU has half of the heads and takes the loss of every row, or of every other one. Two processes run this file.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dsattn.keys import Layout
from dsattn.ops import dense_gqa, dense_mla, dsa_attention, indexer_kl, sparse_gqa, sparse_mla
from dsattn.ops.first_use import error_of
from dsattn.testing import Case, Sizes, make_case, random_selection

HEADS = 32
SIZES = Sizes(heads=HEADS, groups=4, width=576, value_dim=512, index_heads=16, index_width=64, top_k=512)
NARROW = Sizes(heads=HEADS, groups=4, width=128, value_dim=128, index_heads=16, index_width=64, top_k=512)
LAYOUT = Layout.packed([700, 1, 0, 1347])
CASES = ("fused", "sparse MLA", "sparse GQA", "warm-up, MLA", "warm-up, GQA")
Results = dict[str, Tensor]


def loss(name: str, case: Case, heads: slice, rows: slice, group: dist.ProcessGroup | None) -> Results:
    """Loss and gradients of the indexer's rows, from these heads of all rows."""
    q, grouped = case.q[:, heads].contiguous(), "GQA" in name
    groups = slice(heads.start * 4 // HEADS, heads.stop * 4 // HEADS)
    k, v = (x[:, groups].contiguous() for x in (case.k, case.v))
    learners = [x.clone().requires_grad_() for x in (case.q_i[rows], case.k_i, case.w[rows])]
    flags = {"scale": case.scale, "deterministic": False}
    last = {"divisor": 1000, "head_group": group, "real_rows": torch.arange(len(q), device=q.device) % 9 != 5}
    selection = None
    if not name.startswith("warm-up"):
        selection = random_selection(case.keys, case.layout.num_keys, case.sizes.top_k)
    if name == "fused":
        operands = (q, case.kv, selection, *learners, case.keys)
        kl = dsa_attention(*operands, **flags, **last, kl_weight=1.0, value_dim=case.sizes.value_dim)[2]
    else:
        if selection is None:
            attend = dense_gqa(q, k, v, case.keys, **flags) if grouped else dense_mla(q, case.kv, case.keys, **flags)
        else:
            attend = sparse_gqa(q, k, v, selection, **flags) if grouped else sparse_mla(q, case.kv, selection, **flags)
        target = (q, k if grouped else case.kv, attend[1])
        kl = indexer_kl(*learners, *target, case.keys, selection, **flags, **last)
    grads = torch.autograd.grad(kl, learners)
    return dict(zip(("loss", "q_i", "k_i", "w"), (kl.detach(), *grads), strict=True))


def main(rank: int, folder: Path) -> None:
    """Write the largest errors of shared and of whole rows by case, and those of one GPU's heads alone."""
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/meeting", rank=rank, world_size=2, device_id=device)
    every, mine = slice(0, HEADS), slice(rank * HEADS // 2, (rank + 1) * HEADS // 2)
    found = {}
    for name in CASES:
        sizes = NARROW if "GQA" in name else SIZES
        case = make_case(LAYOUT, sizes, dtype=torch.bfloat16, device=device)
        rows = slice(rank, None, 2)
        right = loss(name, case, every, slice(None), None)
        whole = loss(name, case, mine, slice(None), dist.group.WORLD)
        alone = loss(name, case, mine, slice(None), None)
        part = loss(name, case, mine, rows, dist.group.WORLD)
        for summed in ("loss", "k_i"):
            part[summed] = part[summed].float()
            dist.all_reduce(part[summed])
        right_part = right | {one: right[one][rows] for one in ("q_i", "w")}
        found[name] = {
            "whole rows": errors(whole, right),
            "shared rows": errors(part, right_part),
            "half of the heads": errors(alone, right),
        }
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


def errors(got: Results, right: Results) -> dict[str, float]:
    return {name: error_of(got[name].nan_to_num(), one.nan_to_num()) for name, one in right.items()}


@pytest.mark.gpu
def test_heads_on_two_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA GPUs; results/parallel.jsonl holds runs on two")
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(tmp_path), str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)
    for rank in range(2):
        for case, found in torch.load(tmp_path / f"{rank}.pt").items():
            with capsys.disabled():
                sys.stdout.write(f"\n{rank}: {case}: {found}")
            for rows in ("whole rows", "shared rows"):
                assert found[rows]["loss"] < 2e-3, (case, rows, found)
                assert max(found[rows].values()) < 2e-2, (case, rows, found)
            assert max(found["half of the heads"].values()) > 5e-2, (case, found)


if __name__ == "__main__":
    main(int(sys.argv[2]), Path(sys.argv[1]))
