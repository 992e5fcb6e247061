"""What the worker itself knows of each sequence between steps, and what a plan means by it. No torch.

A plan may be made before the result of the step before it is known. So length and newest token of a
running sequence live here, by state slot, and change only when a step is settled.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from phalanx.protocol.steps import NewSequence, StepPlan

Int = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]
_NO_TOKENS: Int = np.empty(0, np.int64)


def ints(encoded: bytes) -> Int:
    """int32 bytes of a plan as int64."""
    return np.frombuffer(encoded, np.int32).astype(np.int64)


@dataclass(frozen=True)
class PlanRows:
    """A plan with everything filled in that only the worker knows. S sequences, R rows.

    Attributes:
        slots, starts, lengths: int64 [S]; lengths count rows, draft rows included.
        drafts: int64 [S], draft rows; the last ones of each sequence.
        cu: int64 [S + 1], row ranges.
        token_ids: int64 [R], input ids, drafts included.
        sampled: bool [S], whether tokens are sampled for the sequence.
        sample_rows: int64 [L], the rows after which a token is sampled, sequence by sequence.
        sample_seqs: int64 [L], the sequence of each.
        positions: int64 [L], index in the sequence of the token each makes.
    """

    slots: Int
    starts: Int
    lengths: Int
    drafts: Int
    cu: Int
    token_ids: Int
    sampled: Bool
    sample_rows: Int
    sample_seqs: Int
    positions: Int


@dataclass(frozen=True)
class Outcome:
    """What sampling made of a step's rows.

    Attributes:
        accepted: int64 [S], rows of each sequence that count.
        counts: int64 [sampled sequences], new tokens of each.
        kept: int64 [sum(counts)], which of the L samples are those tokens.
        status: uint8 [sampled sequences], 0 or why no more tokens came.
    """

    accepted: Int
    counts: Int
    kept: Int
    status: npt.NDArray[np.uint8]


class Slots:
    """Length, newest token and predicted outputs of the sequence in each slot."""

    def __init__(self, num_slots: int) -> None:
        self._committed = np.zeros(num_slots, np.int64)
        self._last_token = np.zeros(num_slots, np.int64)
        self.num_prompt = np.zeros(num_slots, np.int64)
        self._predicted: list[Int] = [_NO_TOKENS] * num_slots
        self._forced: list[Int] = [_NO_TOKENS] * num_slots
        self._num_forced = np.zeros(num_slots, np.int64)

    def admit(self, new: NewSequence) -> None:
        """Give the slot to a new sequence; whatever it held is forgotten."""
        self._committed[new.slot] = self._last_token[new.slot] = 0
        self.num_prompt[new.slot] = new.num_prompt
        self._predicted[new.slot] = np.array(new.sampling.predicted_token_ids, np.int64)
        self._forced[new.slot] = np.array(new.sampling.forced_token_ids, np.int64)
        self._num_forced[new.slot] = len(self._forced[new.slot])

    def resolve(self, plan: StepPlan) -> PlanRows:
        """Fill in lengths, newest tokens and drafts. Changes nothing."""
        slots, starts, planned = ints(plan.slots), ints(plan.starts), ints(plan.seqlens_q)
        drafts = np.frombuffer(plan.drafts, np.uint8).astype(np.int64)
        carry = np.frombuffer(plan.carry, np.uint8).astype(bool)
        base = planned - drafts
        known = ints(plan.token_ids)
        if carry.any():
            starts[carry] = self._committed[slots[carry]]
            known[(np.cumsum(base) - 1)[carry]] = self._last_token[slots[carry]]
        guesses: dict[int, Int] = {}
        for i in np.flatnonzero(drafts):
            guesses[int(i)] = guess = self._guess(slots[i], starts[i] + base[i], drafts[i])
            drafts[i] = len(guess)
        lengths = base + drafts
        cu = np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths)))
        token_ids = known
        if guesses:
            pieces = np.split(known, np.cumsum(base)[:-1])
            token_ids = np.concatenate(
                [np.concatenate((p, guesses.get(i, _NO_TOKENS))) for i, p in enumerate(pieces)]
            )
        sampled = np.frombuffer(plan.sample, np.uint8).astype(bool)
        per_seq = np.where(sampled, drafts + 1, 0)
        seqs = np.repeat(np.arange(len(slots)), per_seq)
        within = np.arange(len(seqs)) - np.repeat(np.cumsum(per_seq) - per_seq, per_seq)
        first = base[seqs] - 1 + within
        return PlanRows(
            slots=slots,
            starts=starts,
            lengths=lengths,
            drafts=drafts,
            cu=cu,
            token_ids=token_ids,
            sampled=sampled,
            sample_rows=cu[seqs] + first,
            sample_seqs=seqs,
            positions=starts[seqs] + first + 1,
        )

    def forced(self, rows: PlanRows) -> Int:
        """int64 [L]: the token that each sample must be, whatever was drawn; -1 where it is free."""
        slots = rows.slots[rows.sample_seqs]
        outputs = rows.positions - self.num_prompt[slots]
        found = np.full(len(slots), -1, np.int64)
        for at in np.flatnonzero(outputs < self._num_forced[slots]):
            found[at] = self._forced[slots[at]][outputs[at]]
        return found

    def _guess(self, slot: int, position: int, most: int) -> Int:
        """Predicted tokens from `position` on, at most `most`."""
        at = position - int(self.num_prompt[slot])
        return self._predicted[slot][at : at + most] if at >= 0 else _NO_TOKENS

    def settle(self, rows: PlanRows, tokens: Int, status: npt.NDArray[np.uint8]) -> Outcome:
        """Decide which rows count, and move on: the one place where a step changes a slot.

        A draft passes when it equals the token sampled before it; what comes after a draft that does
        not was computed on a wrong input.

        Args:
            tokens, status: [L], as sampled.
        """
        if rows.drafts.any():
            good = self._passed(rows, tokens, status)
        else:
            good = np.ones(len(tokens), bool)
        # Samples up to the first failed one count; a failed status ends its sequence there.
        failed = good & (status != 0)
        per_seq = np.bincount(rows.sample_seqs, weights=good, minlength=len(rows.slots))
        samples = per_seq.astype(np.int64)
        accepted = rows.lengths - rows.drafts + np.where(rows.sampled, samples - 1, 0)
        ends = np.cumsum(samples) - 1  # of each sequence's good samples, among the good ones
        chosen = np.flatnonzero(good)
        last = chosen[ends[rows.sampled]]
        self._committed[rows.slots] = rows.starts + accepted
        self._last_token[rows.slots[rows.sampled]] = tokens[last]
        kept = good & ~failed
        counts = np.bincount(rows.sample_seqs, weights=kept, minlength=len(rows.slots))
        return Outcome(
            accepted=accepted,
            counts=counts.astype(np.int64)[rows.sampled],
            kept=np.flatnonzero(kept),
            status=status[last],
        )

    def _passed(self, rows: PlanRows, tokens: Int, status: npt.NDArray[np.uint8]) -> Bool:
        """bool [L]: every draft before the sample equals the token sampled in its place."""
        good = np.ones(len(tokens), bool)
        for at in range(1, len(tokens)):
            if rows.sample_seqs[at] == rows.sample_seqs[at - 1]:
                draft = rows.token_ids[rows.sample_rows[at]]
                before = good[at - 1] and status[at - 1] == 0
                good[at] = before and tokens[at - 1] == draft
        return good
