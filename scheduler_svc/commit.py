"""A step's result into the state: a handful of vector operations, then one loop over new tokens. Pure."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from phalanx.protocol.errors import Code
from phalanx.protocol.messages import FinishReason, TokenLogprobs, TokensItem
from phalanx.protocol.queues import State
from phalanx.protocol.steps import StepResult
from phalanx.scheduler_svc.plan import Flight
from phalanx.scheduler_svc.rank import Rank
from phalanx.scheduler_svc.state import Rows, Sequence
from phalanx.scheduler_svc.stops import hits_stop_id, sample_error, stop_now

Ended = tuple[Sequence, FinishReason, Code | None, str]


@dataclass(slots=True)
class Commit:
    """Tokens to send, and the sequences that end with this step.

    Those that end with an error have no item here: no token was sampled for them.
    """

    items: list[TokensItem] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)


def commit(rank: Rank, flight: Flight, result: StepResult) -> Commit:
    """Enter the step's tokens. Sequences that ended while it was in flight get nothing."""
    t, done = rank.t, Commit()
    rows, firsts = flight.decoders.rows, [c.sequence for c in flight.chunks if c.samples]
    counts = np.frombuffer(result.counts, np.uint8).astype(np.int32)
    tokens = np.frombuffer(result.tokens, np.int32)
    status = np.frombuffer(result.status, np.uint8)
    sampled = len(rows) + len(firsts)
    assert len(counts) == len(status) == sampled, "the result is not one of this plan"
    assert int(counts.sum()) == len(tokens), "the result's counts are not its tokens"
    accepted = np.maximum(counts[: len(rows)], 1)  # a row whose sample failed was computed, too
    t.committed[rows] += accepted
    t.planned[rows] -= flight.decoders.drafts + 1 - accepted
    t.in_flight[rows] -= 1
    for chunk in flight.chunks:
        t.committed[chunk.sequence.row] = chunk.end
        t.in_flight[chunk.sequence.row] -= 1
    sequences = flight.decoders.sequences + firsts
    if firsts:
        rows = np.concatenate((rows, np.array([s.row for s in firsts], np.intp)))
    alive = t.state[rows] == State.RUNNING
    logprobs = result.logprobs or (None,) * len(tokens)
    if alive.all() and not status.any() and len(tokens) == sampled:
        _enter_one_each(rank, sequences, rows, tokens, logprobs, done)
        return done
    ends = np.cumsum(counts)
    for place in np.flatnonzero(alive):
        span = slice(int(ends[place] - counts[place]), int(ends[place]))
        ended = _enter_several(rank, sequences[place], tokens[span].tolist(), logprobs[span], done)
        if status[place] and not ended:
            sequence = sequences[place]
            why = sample_error(int(status[place]), len(sequence.outputs))
            done.ended.append((sequence, "error", *why))
    return done


def _enter_one_each(
    rank: Rank,
    sequences: list[Sequence],
    rows: Rows,
    tokens: npt.NDArray[np.int32],
    logprobs: tuple[TokenLogprobs | None, ...],
    done: Commit,
) -> None:
    """The common step: everybody gets one token."""
    t = rank.t
    t.output_tokens[rows] += 1
    t.last_token[rows] = tokens
    stopped, full = stop_now(t, rows, tokens)
    ends = (stopped | full).tolist()
    places = zip(sequences, tokens.tolist(), ends, stopped.tolist(), logprobs, strict=True)
    for sequence, token, end, stop, logprob in places:
        offset = len(sequence.outputs)
        sequence.outputs.append(token)
        reason: FinishReason | None = None
        if end:
            reason = "stop" if stop else "length"
        if sequence.sampling.stop_token_ids and hits_stop_id(sequence, token):
            reason = "stop"
        if reason is not None:
            done.ended.append((sequence, reason, None, ""))
        kept: tuple[TokenLogprobs, ...] = ()
        if logprob is not None:
            sequence.logprobs.append(logprob)
            kept = (logprob,)
        done.items.append(
            TokensItem(
                sequence.request_id,
                sequence.index,
                sequence.attempt,
                offset,
                (token,),
                reason,
                logprobs=kept,
            )
        )


def _enter_several(
    rank: Rank,
    sequence: Sequence,
    tokens: list[int],
    logprobs: tuple[TokenLogprobs | None, ...],
    done: Commit,
) -> bool:
    """Tokens of a step with accepted drafts; those after one that ends the sequence do not count.

    Returns whether it ended.
    """
    t, row, offset = rank.t, sequence.row, len(sequence.outputs)
    reason: FinishReason | None = None
    for token in tokens:
        sequence.outputs.append(token)
        count = len(sequence.outputs)
        if (
            token == t.end_token[row]
            and count >= t.min_tokens[row]
            or sequence.sampling.stop_token_ids
            and hits_stop_id(sequence, token)
        ):
            reason = "stop"
        elif count >= t.max_tokens[row]:
            reason = "length"
        if reason is not None:
            break
    new = sequence.outputs[offset:]
    if not new:
        return False
    t.output_tokens[row] += len(new)
    t.last_token[row] = new[-1]
    kept = tuple(logprob for logprob in logprobs[: len(new)] if logprob is not None)
    sequence.logprobs += kept
    if reason is not None:
        done.ended.append((sequence, reason, None, ""))
    done.items.append(
        TokensItem(
            sequence.request_id,
            sequence.index,
            sequence.attempt,
            offset,
            tuple(new),
            reason,
            logprobs=kept,
        )
    )
    return reason is not None
