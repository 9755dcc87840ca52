import dataclasses

import pytest
import torch

from dsattn.accounting import visible_pairs
from dsattn.config import ParallelConfig
from dsattn.errors import InputError
from dsattn.keys import Layout
from dsattn.model.mtp import look_ahead
from dsattn.parallel.mesh import ParallelMesh
from dsattn.training.loader import deal, micro_batches, place, to_device
from dsattn.training.packs import IGNORED_LABEL, Pack


def pack(lengths: list[int], total: int) -> Pack:
    layout = Layout.packed(lengths, total=total)
    tokens = torch.arange(total) + 100 * len(lengths)
    labels = (tokens + 1).masked_fill(~layout.real_rows, IGNORED_LABEL)
    return Pack(tokens, labels, layout, sum(lengths))


PACKS = [pack([30, 2], 32), pack([8] * 4, 32), pack([31], 32), pack([1, 1, 1], 32)]


def ranks(config: ParallelConfig) -> list[ParallelMesh]:
    """The meshes of all ranks, without process groups."""
    return [ParallelMesh(config, global_rank=rank) for rank in range(config.world_size)]


def test_packs_are_dealt_by_visible_pairs() -> None:
    assert visible_pairs([3, 1]) == 3 + 2 + 1 + 1
    hands = deal(PACKS, 2)
    loads = [[visible_pairs(one.layout.lengths) for one in hand] for hand in hands]
    assert loads == [[31 * 16, 3], [30 * 31 // 2 + 3, 4 * 36]]
    assert deal(PACKS, 1) == [PACKS]
    with pytest.raises(InputError, match="4 packs cannot be dealt to 3 ranks"):
        deal(PACKS, 3)


@pytest.mark.parametrize(
    "config",
    [
        ParallelConfig(dp_shard=2),
        ParallelConfig(cp=2),
        ParallelConfig(tp=2, cp=2),
        ParallelConfig(tp=2, dp_replicate=2, sequence_parallel=False),
    ],
    ids=str,
)
def test_every_real_row_is_on_one_rank(config: ParallelConfig) -> None:
    """Tokens and labels of all ranks are those of the packs; ranks of tp have the same rows without row shards."""
    seen: list[tuple[int, int]] = []
    for mesh in ranks(config):
        if mesh.rank("tp") and not config.sequence_parallel:
            continue
        for micro in micro_batches(PACKS, mesh, 1):
            real = micro.layout.real_rows
            seen += list(zip(micro.tokens[real].tolist(), micro.labels[real].tolist(), strict=True))
            assert (micro.labels[~real] == IGNORED_LABEL).all()
    rows = [one.layout.real_rows for one in PACKS]
    tokens = torch.cat([one.tokens[real] for one, real in zip(PACKS, rows, strict=True)]).tolist()
    labels = torch.cat([one.labels[real] for one, real in zip(PACKS, rows, strict=True)]).tolist()
    assert sorted(seen) == sorted(zip(tokens, labels, strict=True))


def test_ranks_see_the_tokens_ahead_that_the_whole_pack_has() -> None:
    whole = place(PACKS[:1], ParallelMesh(), depths=2)
    ahead = {int(row): whole.tokens_ahead[:, place_].tolist() for place_, row in enumerate(whole.tokens)}
    assert torch.equal(whole.tokens_ahead, look_ahead(whole.tokens, whole.layout, 2))
    for mesh in ranks(ParallelConfig(cp=2, tp=2)):
        part = place(PACKS[:1], mesh, depths=2)
        for column, token in enumerate(part.tokens.tolist()):
            if part.layout.real_rows[column]:
                assert part.tokens_ahead[:, column].tolist() == ahead[token]
        assert part.layout.whole is not None
        assert part.layout.whole.rows.shape[0] == 2 * len(part.tokens)


def test_context_parallel_ranks_have_nearly_as_many_pairs() -> None:
    """Exactly as many without padding, within 2 % for documents that are long beside 2 * cp."""
    for lengths, most in (([64, 32], 1.0), ([6001, 4003], 1.02)):
        packs = [pack(lengths, sum(lengths))]
        parts = [place(packs, mesh) for mesh in ranks(ParallelConfig(cp=4))]
        loads = [int(part.layout.keys.lengths().sum()) for part in parts]
        assert sum(loads) == visible_pairs(lengths)
        assert max(loads) <= most * sum(loads) / len(loads)


def test_one_process_gets_its_packs_as_they_are() -> None:
    (first, _) = micro_batches(PACKS, ParallelMesh(), 2)
    assert torch.equal(first.tokens, torch.cat([PACKS[0].tokens, PACKS[1].tokens]))
    assert first.tokens_ahead is None
    moved = to_device(first, torch.device("cpu"))
    assert torch.equal(moved.labels, first.labels)
    assert dataclasses.asdict(moved.layout).keys() == dataclasses.asdict(first.layout).keys()


def test_a_batch_of_nothing_but_padding_has_rows_for_every_rank() -> None:
    empty = Pack(torch.zeros(8, dtype=torch.int64), torch.full((8,), IGNORED_LABEL), Layout.packed([], total=8), 0)
    for mesh in ranks(ParallelConfig(cp=2, tp=2)):
        assert place([empty], mesh, depths=1).tokens.shape == (1,)
