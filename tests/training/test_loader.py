import dataclasses

import pytest
import torch

from dsattn.accounting import kept_pairs, visible_pairs
from dsattn.config import ParallelConfig
from dsattn.errors import InputError
from dsattn.keys import Layout
from dsattn.model.mtp import look_ahead
from dsattn.nn.ranks import OneRank
from dsattn.parallel.mesh import ParallelMesh
from dsattn.training.loader import deal, micro_batches, place, spread, to_device
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
        ParallelConfig(cp=4, dp_shard=2, dynamic_cp=True),
        ParallelConfig(cp=2, tp=2, dynamic_cp=True),
    ],
    ids=lambda config: f"cp {config.cp} tp {config.tp} dp {config.batch_ranks} dynamic {config.dynamic_cp}",
)
def test_every_real_row_is_on_one_rank(config: ParallelConfig) -> None:
    """Tokens and labels of all ranks are those of the packs; ranks of tp have the same rows without row shards."""
    seen: list[tuple[int, int]] = []
    for mesh in ranks(config):
        if mesh.rank("tp") and not config.sequence_parallel:
            continue
        groups = dict.fromkeys((1, 2, 4)[: config.cp // 2 + 1]) if config.dynamic_cp else None
        for micro in micro_batches(PACKS, mesh, 1, 0, groups):
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


@pytest.mark.parametrize(
    ("lengths", "wanted"),
    [
        ([24, 24], [[0], [1]]),
        ([12] * 4, [[0], [1], [2], [3]]),
        ([44, 1, 3], [[0, 1, 2]]),  # no group has room for the first
        ([10, 14, 10, 14], [[0, 1], [2, 3]]),  # four groups would not weigh the same
        ([20] + [5] * 28, [list(range(29))]),  # nor two
        ([1] * 8, [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ([], [[], [], [], []]),
        ([0, 0], [[0, 1], [], [], []]),
    ],
)
def test_documents_go_to_the_smallest_groups_that_fit(lengths: list[int], wanted: list[list[int]]) -> None:
    assert spread(lengths, 4, 1, [1, 2, 4]) == wanted
    assert spread(lengths, 4, 1, [4]) == [list(range(len(lengths)))]
    rows = {mesh.rank("cp"): place([pack(lengths, 200)], mesh) for mesh in ranks(ParallelConfig(cp=4))}
    for mesh in ranks(ParallelConfig(cp=4, dynamic_cp=True)):
        micro = place([pack(lengths, 200)], mesh, 0, dict.fromkeys((1, 2, 4)))
        assert len(micro.tokens) <= len(rows[mesh.rank("cp")].tokens), "memory is planned for these"
        assert micro.layout.num_keys == len(micro.tokens) * 4 // len(wanted)


def test_a_micro_batch_says_who_shares_it() -> None:
    groups = {1: None, 2: OneRank(), 4: OneRank()}
    for lengths, size in (([24, 24], 2), ([12] * 4, 1), ([48], 4)):
        for mesh in ranks(ParallelConfig(cp=4, dynamic_cp=True)):
            assert place([pack(lengths, 48)], mesh, 1, groups).ranks is groups[size]


def test_context_parallel_ranks_have_nearly_as_many_pairs() -> None:
    """Exactly as many without padding, within 2 % for documents that are long beside 2 * cp."""
    for lengths, most in (([64, 32], 1.0), ([6001, 4003], 1.02)):
        packs = [pack(lengths, sum(lengths))]
        parts = [place(packs, mesh) for mesh in ranks(ParallelConfig(cp=4))]
        loads = [int(part.layout.keys.lengths().sum()) for part in parts]
        assert sum(loads) == visible_pairs(lengths)
        assert max(loads) <= most * sum(loads) / len(loads)


def test_context_parallel_ranks_keep_nearly_as_many_pairs() -> None:
    """Without `top_k` the first rows of all documents, which have few keys to keep, are rank 0's."""
    packs, top_k = [pack([640, 320, 160, 160], 1280)], 32

    def uneven(top_k_given: int | None) -> float:
        parts = [place(packs, mesh, top_k=top_k_given) for mesh in ranks(ParallelConfig(cp=2, tp=2))]
        loads = [int(part.layout.keys.lengths().clamp(max=top_k).sum()) for part in parts]
        assert sum(loads) == kept_pairs([640, 320, 160, 160], top_k)
        (seen,) = {part.layout.num_keys for part in parts}
        assert seen == 1280
        return max(loads) * len(loads) / sum(loads)

    assert uneven(None) > 1.04
    assert uneven(top_k) < 1.01


@pytest.mark.parametrize(
    ("packs", "size", "says"), [([], 1, "packs is empty"), (PACKS, 0, "size=0 must be at least 1")]
)
def test_micro_batches_of_nothing_are_refused(packs: list[Pack], size: int, says: str) -> None:
    with pytest.raises(InputError, match=says):
        micro_batches(packs, ParallelMesh(), size)


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
