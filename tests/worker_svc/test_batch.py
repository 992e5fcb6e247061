"""A step's geometry is that of the definition, row by row, and an impossible batch is refused."""

import random

import numpy as np
import pytest
from forward_world import TINY

from phalanx.worker_svc.model.batch import (
    SequenceRows,
    StepBatch,
    step_pages,
    step_rows,
    step_windows,
)
from phalanx.worker_svc.model.config import ModelConfig

CONFIG = ModelConfig.load(TINY)
RING, WINDOW = 22, 16


def random_sequences(seed: int) -> list[SequenceRows]:
    choose = random.Random(seed)
    sequences = []
    for slot in choose.sample(range(20), choose.randint(1, 7)):
        start, count = choose.choice((0, 1, 7, 127, 128, 300)), choose.choice((1, 2, 6, 40, 130))
        blocks = choose.sample(range(1, 90), -(-(start + count) // 128))
        sequences.append(SequenceRows(slot, start, [1] * count, blocks, True, copy_key=slot))
    return sequences


@pytest.mark.parametrize("seed", range(20))
def test_geometry(seed: int) -> None:
    sequences = random_sequences(seed)
    batch = StepBatch.of(sequences)
    rows = step_rows(batch, CONFIG)
    windows = step_windows(batch, rows, CONFIG, RING)
    assert rows.num_padded % 8 == 0 and 0 <= rows.num_padded - rows.num_rows < 8
    real = [(i, s, s.start + k) for i, s in enumerate(sequences) for k in range(len(s.token_ids))]
    assert rows.num_rows == len(real)
    before = WINDOW - 1
    first = {
        i: next(r for r, (j, _, _) in enumerate(real) if j == i) for i in range(len(sequences))
    }
    for row, (i, s, position) in enumerate(real):
        at = rows.seqs[row], rows.positions[row], rows.slots[row]
        assert [int(value) for value in at] == [i, position, s.slot]
        for place in range(WINDOW):
            wanted = position - before + place
            assert windows.empty[row, place] == (wanted < 0)
            if wanted < 0:
                continue
            entry = int(windows.places[row, place])
            if wanted >= s.start:
                assert entry == len(sequences) * before + first[i] + wanted - s.start
            else:
                ring = entry - i * before
                assert 0 <= ring < before and windows.ring_indices[i, ring] == wanted % RING
    for row in range(len(real), rows.num_padded):
        assert windows.empty[row].tolist() == [True] * before + [False]
        assert windows.places[row, -1] == len(sequences) * before + row


@pytest.mark.parametrize("seed", range(20))
def test_entries(seed: int) -> None:
    sequences = random_sequences(seed)
    batch = StepBatch.of(sequences)
    rows = step_rows(batch, CONFIG)
    real = [(i, s, s.start + k) for i, s in enumerate(sequences) for k in range(len(s.token_ids))]
    for ratio, entries in rows.entries.items():
        size, places = 128 // ratio, step_pages(batch, rows, ratio)
        closing = [row for row, (_, _, position) in enumerate(real) if (position + 1) % ratio == 0]
        assert entries.rows.tolist() == closing
        for n, row in enumerate(closing):
            i, s, position = real[row]
            entry = position // ratio
            assert entries.blocks[n] == s.blocks[entry // size]
            assert entries.offsets[n] == entry % size
            assert entries.positions[n] == entry * ratio
            partner = len(sequences) + row - 1 if position > s.start else i
            assert ratio == 1 or entries.partners[n] == partner
        pairs: dict[int, list[int]] = {}
        columns: dict[int, list[int]] = {}
        for row, page, column in zip(
            places.pair_rows.tolist(),
            places.pair_pages.tolist(),
            places.pair_columns.tolist(),
            strict=True,
        ):
            pairs.setdefault(row, []).append(int(places.blocks[page]))
            columns.setdefault(row, []).append(column)
        for page, column, start, end in places.spans:
            for row in range(start, end):
                pairs.setdefault(row, []).append(int(places.blocks[page]))
                columns.setdefault(row, []).append(column)
        for row, (_, s, position) in enumerate(real):
            visible = (position + 1) // ratio
            assert entries.visible[row] == visible
            pages = -(-visible // size)
            assert pairs.get(row, []) == list(s.blocks[:pages])
            assert columns.get(row, []) == list(range(pages))
        assert set(pairs) <= set(range(len(real)))
        assert entries.visible[len(real) :].eq(0).all()
        assert entries.num_columns == max(map(len, pairs.values()), default=0)


def test_wanted_rows() -> None:
    batch = StepBatch.of(
        [
            SequenceRows(3, 0, [1, 2, 3], [1], True),
            SequenceRows(0, 5, [4], [2]),
            SequenceRows(1, 9, [5, 6, 7], [3], [0, 2]),
        ]
    )
    assert batch.logit_rows.tolist() == [2, 4, 6]
    assert batch.cu_seqlens_q.tolist() == [0, 3, 4, 7]
    assert batch.block_table.tolist() == [[1], [2], [3]]


@pytest.mark.parametrize(
    ("sequences", "message"),
    [
        ([], "no rows"),
        ([SequenceRows(0, 0, [1], [1]), SequenceRows(1, 0, [], [2])], "has no rows"),
        ([SequenceRows(0, 0, [1], [1]), SequenceRows(0, 0, [1], [2])], "share a state slot"),
        ([SequenceRows(0, 250, [1] * 7, [1, 2, 3])], "would reach 257 tokens.*room for 256"),
        ([SequenceRows(0, 0, [512], [1])], "token id 512 is outside the vocabulary of 512"),
        ([SequenceRows(0, 0, [-1], [1])], "token id -1"),
        ([SequenceRows(0, 127, [1, 1], [4])], "sequence 0 .* has 1 blocks; 129 tokens need 2"),
    ],
)
def test_refusals(sequences: list[SequenceRows], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StepBatch.of(sequences).check(CONFIG, 256)


def test_refused_batches_change_nothing() -> None:
    from forward_world import World

    world = World("tiny-a")
    before = world.pools.history.clone(), world.pools.blocks.clone()
    with pytest.raises(ValueError):
        world.forward(SequenceRows(0, 0, [1, 2, 600], world.blocks[0]))
    assert np.array_equal(world.pools.history, before[0])
    assert np.array_equal(world.pools.blocks, before[1])
