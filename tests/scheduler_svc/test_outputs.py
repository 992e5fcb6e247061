"""The one array of outputs: any order of growing, ending and reusing rows keeps every row's tokens."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from phalanx.scheduler_svc.outputs import FIRST_TOKENS, Outputs, Spans

ROWS, MOST = 5, 300
STEP = st.tuples(
    st.lists(st.integers(0, 6), min_size=ROWS, max_size=ROWS),  # new tokens of each row
    st.lists(st.integers(0, 400), max_size=2),  # rows that end and begin again with so many tokens
)


@given(st.lists(STEP, max_size=60), st.integers(0, 3 * FIRST_TOKENS))
def test_every_row_keeps_its_tokens(steps: list[tuple[list[int], list[int]]], first: int) -> None:
    outputs, expected, serial = Outputs(ROWS), [], 0
    for row in range(ROWS):
        begin = np.arange(first, dtype=np.int32) + 1000 * row
        outputs.open(row, begin.tobytes(), MOST)
        expected.append(begin.tolist())
    for counts, again in steps:
        tokens = np.arange(serial, serial + sum(counts), dtype=np.int32)
        serial += len(tokens)
        have = np.array([len(row) for row in expected], np.int32)
        spans = Spans(np.array(counts, np.int32), tokens)
        full = outputs.append(np.arange(ROWS), have, have + spans.counts, spans)
        assert full == (have + spans.counts >= MOST).nonzero()[0].tolist()
        at = 0
        for row, count in enumerate(counts):
            expected[row] += tokens[at : at + count].tolist()
            at += count
        for row, count in enumerate(again):
            closed = outputs.close(np.array([row]), [len(expected[row])])
            assert closed == [np.array(expected[row], np.int32).tobytes()]
            expected[row] = list(range(serial, serial + count))
            outputs.open(row, np.array(expected[row], np.int32).tobytes(), MOST)
        for row in range(ROWS):
            assert outputs.of(row, len(expected[row])).tolist() == expected[row]
