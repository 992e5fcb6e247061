"""What a plan means to the worker: lengths it alone knows, drafts that pass by equality, nothing after a miss.

The oracle is plain Python over one sequence at a time; hypothesis mixes them into batches.
"""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.protocol.messages import Sampling
from phalanx.protocol.steps import NewSequence, StepPlan
from phalanx.worker_svc.slots import Slots


@dataclass
class Asked:
    """One sequence of a plan."""

    slot: int
    start: int
    tokens: list[int]  # of the rows before the drafts
    drafts: int = 0
    sample: bool = True
    carry: bool = False


def plan(asked: list[Asked]) -> StepPlan:
    def int32(values: list[int]) -> bytes:
        return np.array(values, np.int32).tobytes()

    return StepPlan(
        seq=1,
        seen=0,
        new=(),
        slots=int32([a.slot for a in asked]),
        starts=int32([a.start for a in asked]),
        seqlens_q=int32([len(a.tokens) + a.drafts for a in asked]),
        drafts=bytes(a.drafts for a in asked),
        sample=bytes(a.sample for a in asked),
        carry=bytes(a.carry for a in asked),
        token_ids=int32([t for a in asked for t in a.tokens]),
        block_counts=int32([0] * len(asked)),
        block_ids=b"",
    )


def new(slot: int, num_prompt: int, predicted: list[int] | None = None) -> NewSequence:
    sampling = Sampling(predicted_token_ids=tuple(predicted or ()))
    return NewSequence(slot, slot, num_prompt, sampling, b"")


def no_status(count: int) -> "np.typing.NDArray[np.uint8]":
    return np.zeros(count, np.uint8)


def test_a_carried_sequence_goes_on_where_its_slot_is() -> None:
    slots = Slots(4)
    slots.admit(new(2, 3))
    rows = slots.resolve(plan([Asked(2, 0, [7, 8, 9])]))
    assert rows.positions.tolist() == [3] and rows.sample_rows.tolist() == [2]
    slots.settle(rows, np.array([50]), no_status(1))
    rows = slots.resolve(plan([Asked(2, 99, [-1], carry=True)]))
    assert rows.starts.tolist() == [3] and rows.token_ids.tolist() == [50]
    assert rows.positions.tolist() == [4]


def test_drafts_pass_until_the_first_miss() -> None:
    slots = Slots(1)
    slots.admit(new(0, 1, predicted=[10, 11, 12, 13, 14, 15]))
    rows = slots.resolve(plan([Asked(0, 0, [5], drafts=3)]))
    assert rows.token_ids.tolist() == [5, 10, 11, 12]
    assert rows.positions.tolist() == [1, 2, 3, 4]
    outcome = slots.settle(rows, np.array([10, 11, 99, 13]), no_status(4))
    assert outcome.counts.tolist() == [3] and outcome.kept.tolist() == [0, 1, 2]
    assert outcome.accepted.tolist() == [3], "the anchor and two drafts; the third was wrong"
    rows = slots.resolve(plan([Asked(0, 99, [-1], drafts=3, carry=True)]))
    assert rows.starts.tolist() == [3] and rows.token_ids.tolist() == [99, 13, 14, 15]


def test_fewer_predictions_than_asked_and_none_in_the_prompt() -> None:
    slots = Slots(2)
    slots.admit(new(0, 1, predicted=[10]))
    slots.admit(new(1, 1))
    rows = slots.resolve(plan([Asked(0, 0, [5], drafts=5), Asked(1, 0, [6], drafts=5)]))
    assert rows.token_ids.tolist() == [5, 10, 6]
    assert rows.lengths.tolist() == [2, 1] and rows.cu.tolist() == [0, 2, 3]


def test_a_failed_sample_ends_its_sequence_alone() -> None:
    slots = Slots(2)
    slots.admit(new(0, 1, predicted=[10, 11]))
    slots.admit(new(1, 1))
    rows = slots.resolve(plan([Asked(0, 0, [5], drafts=2), Asked(1, 0, [6])]))
    status = np.array([0, 2, 0, 0], np.uint8)
    outcome = slots.settle(rows, np.array([10, -1, 3, 40]), status)
    assert outcome.counts.tolist() == [1, 1] and outcome.status.tolist() == [2, 0]
    assert outcome.kept.tolist() == [0, 3]


def test_a_chunk_that_is_not_the_last_samples_nothing() -> None:
    slots = Slots(1)
    slots.admit(new(0, 5))
    rows = slots.resolve(plan([Asked(0, 0, [1, 2, 3], sample=False)]))
    assert rows.sample_rows.tolist() == []
    outcome = slots.settle(rows, np.empty(0, np.int64), no_status(0))
    assert outcome.counts.tolist() == [] and outcome.accepted.tolist() == [3]


def test_an_abandoned_step_changes_nothing() -> None:
    slots = Slots(1)
    slots.admit(new(0, 1, predicted=[10, 11]))
    first = slots.resolve(plan([Asked(0, 0, [5], drafts=2)]))
    again = slots.resolve(plan([Asked(0, 0, [5], drafts=2)]))
    assert first.token_ids.tolist() == again.token_ids.tolist()
    assert first.starts.tolist() == again.starts.tolist()


@dataclass
class Oracle:
    """One sequence that produces `truth`, with predictions that are right here and there."""

    prompt: int
    truth: list[int]
    predicted: list[int]
    outputs: list[int] = field(default_factory=list)

    def expect(self, drafts: int) -> int:
        """How many tokens a step with so many drafts yields."""
        at, passed = len(self.outputs), 0
        while (
            passed < min(drafts, len(self.predicted) - at)
            and self.predicted[at + passed] == self.truth[at + passed]
        ):
            passed += 1
        return passed + 1


@st.composite
def oracle(draw: st.DrawFn) -> Oracle:
    truth = draw(st.lists(st.integers(3, 5), min_size=40, max_size=40))
    wrong = draw(st.sets(st.integers(0, 29), max_size=12))
    count = draw(st.integers(0, 30))
    return Oracle(
        draw(st.integers(1, 4)), truth, [t + (i in wrong) for i, t in enumerate(truth[:count])]
    )


@given(st.lists(oracle(), min_size=1, max_size=4), st.data())
def test_any_batch_of_any_drafts_equals_one_by_one(
    sequences: list[Oracle], data: st.DataObject
) -> None:
    slots = Slots(len(sequences))
    asked = []
    for slot, s in enumerate(sequences):
        slots.admit(new(slot, s.prompt, s.predicted))
        asked.append(Asked(slot, 0, list(range(s.prompt)), data.draw(st.integers(0, 5))))
    for _ in range(5):
        rows = slots.resolve(plan(asked))
        sampled = [sequences[asked[i].slot] for i in rows.sample_seqs]
        places = zip(sampled, rows.positions.tolist(), strict=True)
        tokens = np.array([s.truth[position - s.prompt] for s, position in places])
        outcome = slots.settle(rows, tokens, no_status(len(tokens)))
        produced = np.split(tokens[outcome.kept], np.cumsum(outcome.counts)[:-1])
        for a, got in zip(asked, produced, strict=True):
            s = sequences[a.slot]
            count = s.expect(a.drafts)
            assert got.tolist() == s.truth[len(s.outputs) :][:count]
            s.outputs += got.tolist()
        order = data.draw(st.permutations(range(len(sequences))))
        asked = [Asked(i, 999, [-1], data.draw(st.integers(0, 5)), carry=True) for i in order]


@pytest.mark.parametrize("drafts", [0, 5])
def test_resolving_is_cheap_to_repeat(drafts: int) -> None:
    """A large batch resolves to arrays of the right shape."""
    slots = Slots(256)
    for slot in range(256):
        slots.admit(new(slot, 1, predicted=[9] * 10))
    rows = slots.resolve(plan([Asked(slot, 0, [5], drafts) for slot in range(256)]))
    assert len(rows.token_ids) == 256 * (1 + drafts) == len(rows.positions)
