import dataclasses

import pytest
import torch

from dsattn import accounting, settings
from dsattn.accounting import scratch
from dsattn.config import DataConfig, ParallelConfig
from dsattn.training.recipes import RECIPES

GIB = 2**30


def kept_of(tokens: int, mode: str = "sparse", deterministic: bool | None = None, **parallel: int):
    """(place, memory of a layer) of `small`."""
    run = RECIPES["small"]()
    dsa = dataclasses.replace(run.model.dsa, deterministic=deterministic)
    model = dataclasses.replace(run.model, dsa=dsa)
    run = dataclasses.replace(
        run, model=model, data=DataConfig(pack_tokens=tokens), parallel=ParallelConfig(**parallel)
    )
    here = accounting.place(run)
    return here, accounting.layers_kept(here, run, mode)[0]


def test_logits_are_those_of_a_chunk():
    assert scratch.logits(100, 5) == 3 * 4 * 100 * 5
    assert scratch.logits(100, 10**6) == scratch.logits(100, 4096)


@pytest.mark.parametrize(("tokens", "expected"), [(4096, 4 * 4096**2), (2**17, GIB)])
def test_a_selection_scores_within_its_budget(tokens, expected):
    here, one = kept_of(tokens)
    assert scratch.selection(one, here, "cuda") == expected
    assert scratch.selection(*reversed(kept_of(tokens, "warmup")), "cuda") == 0


def test_sums_over_keys_and_contributions():
    sums = 4 * 8192 * 576
    assert scratch.attention_backward(*reversed(kept_of(8192)), "cuda") == sums
    assert scratch.attention_backward(*reversed(kept_of(8192, deterministic=True)), "cuda") == sums + 2 * GIB
    assert scratch.attention_backward(*reversed(kept_of(2**15)), "cuda") == 4 * 2**15 * 576
    assert scratch.attention_backward(*reversed(kept_of(2**17)), "cuda") == 4 * 2**17 * 576 + 2 * GIB
    assert scratch.attention_backward(*reversed(kept_of(8192, "warmup")), "cuda") == 0


@pytest.mark.parametrize(("allowed", "fp32"), [(2**31, False), (2**28, True)])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize(("tokens", "deterministic"), [(8192, None), (8192, True), (8193, None), (3, None)])
@pytest.mark.parametrize("heads", [3, 16, 65, 200])
def test_a_run_of_rows_in_triton(heads, tokens, deterministic, itemsize, allowed, fp32):
    """What `sparse_mla_backward` allocates: gradients of logits by its blocks of heads, and contributions."""
    triton = pytest.importorskip("dsattn.backends.triton.sparse_mla", exc_type=ImportError)
    assert scratch.TRITON_ATOMIC_KEYS == triton.ATOMIC_KEYS
    here, one = kept_of(tokens, deterministic=deterministic)
    attention = dataclasses.replace(one.config.attention, heads=heads, kv_lora_rank=448)  # not Hopper's width
    one = dataclasses.replace(one, config=dataclasses.replace(one.config, attention=attention), itemsize=itemsize)
    dtype = {2: torch.bfloat16, 4: torch.float32}[itemsize]
    block = triton.backward_key_tiles(heads, 512, dtype, 232448).heads
    adds = 0 if tokens == 3 or (tokens, deterministic) == (8192, None) else 512 * (4 if fp32 else itemsize)
    a_row = -(-heads // block) * 2048 * (block * itemsize + adds)
    with settings(fp32_contributions=fp32, scratch_bytes=allowed):
        sums, run = 4 * tokens * 512, scratch.attention_backward(one, here, "cuda")
    runs = -(-tokens // (allowed // a_row))
    assert run == sums + a_row * -(-tokens // runs)
    assert run - sums <= allowed


def test_the_loss_takes_a_target():
    """Forward, then backward: there it is not made again, but each slot's part is, where bits must repeat."""
    sums = 4 * 8192 * 64
    sparse, fixed = reversed(kept_of(8192)), reversed(kept_of(8192, deterministic=True))
    assert scratch.loss_target(*reversed(kept_of(8192)), "cuda") == 4 * 8192 * 2048
    assert scratch.loss_target(*reversed(kept_of(2**20)), "cuda") == GIB
    assert scratch.indexer_loss(*sparse, "cuda") == sums
    rows = GIB // (2 * 2048 * 64)
    assert scratch.indexer_loss(*fixed, "cuda") == sums + rows * 2048 * (2 * 64 + 4) + 32 * 8192 * -(-rows // 224)
    assert scratch.loss_target(*reversed(kept_of(2048, "warmup")), "cuda") == 2 * 4 * 2048**2
    assert scratch.indexer_loss(*reversed(kept_of(8192, "warmup")), "cuda") == sums + GIB // 4
    for one in (scratch.loss_target, scratch.indexer_loss, scratch.probabilities):
        assert one(*reversed(kept_of(8192, "frozen")), "cuda") == 0


@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_that_sum_a_target_hold_their_parts_and_the_sum(tp):
    """Of my rows every rank's part; of all rows, where the indexer is whole, one. And of a selection my rows."""
    mine, all_rows = 4 * 8192 // tp * 2048, 4 * 8192 * 2048
    one, here = reversed(kept_of(8192, tp=tp))
    assert scratch.loss_target(one, here, "cuda") == (tp + 1) * mine + mine
    assert scratch.indexer_loss(one, here, "cuda") == 4 * 8192 * 64 + mine
    whole = reversed(kept_of(8192, tp=tp, split_indexer_rows=False))
    assert scratch.loss_target(*whole, "cuda") == 2 * all_rows
    warm = reversed(kept_of(1024, "warmup", tp=tp))
    assert scratch.loss_target(*warm, "cuda") == (1 + tp + 1) * 4 * 1024 // tp * 1024, "one block"
    some = scratch.loss_target(*reversed(kept_of(8192, "warmup", tp=tp)), "cuda")
    assert GIB // 16 < some < GIB // 4, "the last rows of a long document alone read all of it"
    most = scratch.loss_target(*reversed(kept_of(2**17, "warmup", tp=tp)), "cuda")
    assert most == pytest.approx(GIB // 4, rel=1e-6), "whole cells"
    with settings(scratch_bytes=2**20):
        assert scratch.loss_target(one, here, "cuda") == 2**20 + mine


def test_fp32_contributions_are_counted():
    """Twice the bytes of bf16 where they fit the budget, which stays."""
    sums, here_one = 4 * 100 * 576, kept_of(100, deterministic=True)
    before = scratch.attention_backward(*reversed(here_one), "cuda")
    assert before == sums + 2 * 100 * 2048 * 576
    with settings(fp32_contributions=True):
        assert scratch.attention_backward(*reversed(here_one), "cuda") == sums + 4 * 100 * 2048 * 576
        large = scratch.attention_backward(*reversed(kept_of(8192, deterministic=True)), "cuda")
        rows = GIB // (4 * 2048 * 64)
        loss = scratch.indexer_loss(*reversed(kept_of(8192, deterministic=True)), "cuda")
    assert large == 4 * 8192 * 576 + 2 * GIB
    assert loss == 4 * 8192 * 64 + rows * 2048 * (4 * 64 + 4) + 32 * 8192 * -(-rows // 224)


def test_a_smaller_budget_bounds_every_kernel():
    size = 2**20
    with settings(scratch_bytes=size):
        for tokens, mode, deterministic in ((2**17, "sparse", None), (8192, "sparse", True), (8192, "warmup", None)):
            here, one = kept_of(tokens, mode, deterministic)
            backward, loss = (f(one, here, "cuda") for f in (scratch.attention_backward, scratch.loss_target))
            assert backward == (0 if mode == "warmup" else 4 * tokens * 576 + size)
            assert loss == size
            sums = 4 * tokens * 64
            rows = size // (2 * 2048 * 64)
            added = (
                {None: 0, True: rows * 2048 * (2 * 64 + 4) + 32 * tokens}[deterministic] if mode == "sparse" else size
            )
            assert scratch.indexer_loss(one, here, "cuda") == sums + added


@pytest.mark.parametrize("allowed", [2**31, 2**27])
@pytest.mark.parametrize("tokens", [2, 4096, 8192, 2**15])
def test_probabilities_are_those_of_a_run(tokens, allowed):
    pytest.importorskip("triton")
    from dsattn.backends.hopper.dsa_attention import rows_of_run

    here, one = kept_of(tokens)
    with settings(scratch_bytes=allowed):
        rows = rows_of_run(tokens, 16, 2048)
        assert scratch.probabilities(one, here, "cuda") == rows * 2048 * 64 * (2 + 4 / 64) + 4 * tokens * 2048
    assert scratch.probabilities(one, here, "cpu") == 0
    assert scratch.probabilities(*reversed(kept_of(tokens, deterministic=True)), "cuda") == 0
    assert scratch.probabilities(dataclasses.replace(one, itemsize=4), here, "cuda") == 0


def test_budgets_are_those_of_the_kernels():
    pytest.importorskip("triton")
    from dsattn.backends.hopper import dsa_attention, sparse_mla
    from dsattn.backends.triton import indexer_kl, indexer_kl_dense, invert, sparse_gqa
    from dsattn.ops import blocks, indexer, select

    assert scratch.CONTRIBUTIONS_FROM == sparse_mla.CONTRIBUTIONS_FROM
    assert scratch.GQA_CONTRIBUTIONS == sparse_gqa.SCRATCH_BYTES
    assert (*scratch.HOPPER_WIDTHS, scratch.HOPPER_HEADS) == (*sparse_mla.WIDTHS, sparse_mla.HEADS)
    assert (scratch.HOPPER_VALUE_WIDTH, scratch.HOPPER_TILE) == (sparse_mla.VALUE_WIDTH, dsa_attention.KEYS)
    assert scratch.TARGET == indexer_kl.SCRATCH_BYTES
    assert (scratch.RECORDS, scratch.RECORD_ROWS) == (invert.SCRATCH_BYTES, invert.GROUP_ROWS)
    assert 4 * invert.WORDS.value == scratch.RECORD
    assert scratch.RANGES == indexer_kl_dense.SCRATCH_BYTES
    assert scratch.CPU_BLOCK == blocks._CPU_BYTES
    assert indexer.tile_shape(torch.device("cpu"))[0] == scratch.CPU_TILE_ROWS
    assert scratch.CPU_SCORE == select._BYTES_PER_SCORE
