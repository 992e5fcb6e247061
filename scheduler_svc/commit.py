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
    t.committed[flight.rows] += 1
    t.told[flight.rows] = flight.told
    for chunk in flight.chunks:
        _commit_chunk(rank, chunk.sequence, chunk.end)
    firsts = [chunk.sequence for chunk in flight.chunks if chunk.samples]
    sampled = flight.decoders + firsts
    rows = flight.rows
    if firsts:
        rows = np.concatenate((rows, np.array([s.row for s in firsts], np.intp)))
    tokens = np.frombuffer(result.tokens, np.int32)
    status = np.frombuffer(result.status, np.uint8)
    assert len(tokens) == len(status) == len(sampled), "the result is not one of this plan"
    for sequence in firsts:
        if sequence.finish is None:
            rank.to_decode(sequence)
    logprobs = result.logprobs or (None,) * len(sampled)
    alive = t.state[rows] == State.RUNNING
    good = alive & (status == 0)
    if not good.all():
        for place in np.flatnonzero(alive & (status != 0)):
            sequence = sampled[place]
            done.ended.append(
                (sequence, "error", *sample_error(int(status[place]), len(sequence.outputs)))
            )
        places = np.flatnonzero(good)
        rows, tokens = rows[places], tokens[places]
        sampled = [sampled[place] for place in places]
        logprobs = tuple(logprobs[place] for place in places)
    _enter_tokens(rank, sampled, rows, tokens, logprobs, done)
    return done


def _commit_chunk(rank: Rank, sequence: Sequence, end: int) -> None:
    row = sequence.row
    rank.t.committed[row] = end
    rank.t.told[row] = rank.t.blocks[row]
    sequence.known = True


def _enter_tokens(
    rank: Rank,
    sampled: list[Sequence],
    rows: Rows,
    tokens: npt.NDArray[np.int32],
    logprobs: tuple[TokenLogprobs | None, ...],
    done: Commit,
) -> None:
    t = rank.t
    t.output_tokens[rows] += 1
    t.last_token[rows] = tokens
    stopped, full = stop_now(t, rows, tokens)
    ends = (stopped | full).tolist()
    places = zip(sampled, tokens.tolist(), ends, stopped.tolist(), logprobs, strict=True)
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
