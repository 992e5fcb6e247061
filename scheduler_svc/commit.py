"""A step's result into the state: vector operations whatever the batch; one by one only what ends,
what is new to the gateway, and what carries log-probabilities. Pure."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from phalanx.protocol.errors import Code
from phalanx.protocol.messages import FinishReason, TokenLogprobs, TokenRows, TokensItem
from phalanx.protocol.queues import State
from phalanx.protocol.steps import StepResult
from phalanx.scheduler_svc.outputs import Int32
from phalanx.scheduler_svc.plan import Flight
from phalanx.scheduler_svc.rank import Rank
from phalanx.scheduler_svc.state import Sequence
from phalanx.scheduler_svc.stops import STATUS_NAN, Rows, sample_error

Bool = npt.NDArray[np.bool_]
RUNNING = int(State.RUNNING)  # numpy takes an IntEnum for an object: four times slower

Ended = tuple[Sequence, FinishReason, Code | None, str]


@dataclass(slots=True)
class Commit:
    """Tokens to send, and the sequences that end with this step.

    Those that end without a new token have no item here for that.
    """

    rows: TokenRows | None = None
    items: list[TokensItem] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)


@dataclass(slots=True)
class Fresh:
    """New tokens of a step: `counts[i]` of `tokens` are for `rows[i]`, behind its `have[i]` outputs."""

    rows: Rows
    have: Int32
    counts: Int32
    tokens: Int32
    logprobs: tuple[TokenLogprobs | None, ...]  # parallel to tokens; empty: none was asked for

    def keep(self, kept: Bool) -> None:
        """Only the tokens marked; the caller has seen to the counts."""
        self.tokens = self.tokens[kept]
        if self.logprobs:
            self.logprobs = tuple(self.logprobs[at] for at in kept.nonzero()[0])


def commit(rank: Rank, flight: Flight, result: StepResult) -> Commit:
    """Enter the step's tokens. Sequences that ended while it was in flight get nothing."""
    t, done = rank.t, Commit()
    rows = flight.decoders.rows
    counts = np.frombuffer(result.counts, np.uint8).astype(np.int32)
    tokens = np.frombuffer(result.tokens, np.int32)
    firsts = [chunk.sequence.row for chunk in flight.chunks if chunk.samples]
    assert len(counts) == len(result.status) == len(rows) + len(firsts), "not of this plan"
    assert int(np.add.reduce(counts)) == len(tokens), "the result's counts are not its tokens"
    accepted = np.maximum(counts[: len(rows)], 1)  # a row whose sample failed was computed, too
    t.committed[rows] += accepted
    t.planned[rows] -= flight.decoders.drafts + 1 - accepted
    t.in_flight[rows] -= 1
    for chunk in flight.chunks:
        t.committed[chunk.sequence.row] = chunk.end
        t.in_flight[chunk.sequence.row] -= 1
    if firsts:
        rows = np.concatenate((rows, np.array(firsts, np.intp)))
    fresh = Fresh(rows, t.output_tokens.take(rows), counts, tokens, result.logprobs)
    broken = _take_scores(flight, result, done)
    alive = t.state.take(rows) == RUNNING
    if broken:
        alive &= ~np.isin(rows, broken)
    if np.count_nonzero(alive) < len(alive):
        fresh.keep(np.repeat(alive, counts))
        fresh.rows, fresh.have, fresh.counts = rows[alive], fresh.have[alive], counts[alive]
    reasons = _enter(rank, fresh)
    by_row = rank.table.by_row
    for place, reason in reasons.items():
        done.ended.append((by_row[int(fresh.rows[place])], reason, None, ""))
    if any(result.status):
        status = np.frombuffer(result.status, np.uint8)[alive]
        for place in status.nonzero()[0].tolist():
            if place not in reasons:
                sequence = by_row[int(fresh.rows[place])]
                why = sample_error(int(status[place]), sequence.num_outputs)
                done.ended.append((sequence, "error", *why))
    _say(rank, fresh, reasons, done)
    return done


def _take_scores(flight: Flight, result: StepResult, done: Commit) -> list[int]:
    """Enter log-probabilities of prompts; the rows of those whose numbers are broken, which end."""
    broken = []
    given = iter(result.prompt_logprobs)
    for chunk in flight.chunks:
        if not chunk.scored:
            continue
        records, sequence = next(given), chunk.sequence
        if sequence.finish is not None:
            continue
        have = sequence.scores.count
        if not sequence.scores.add(chunk.start, records):
            why = sample_error(STATUS_NAN, 0)
            done.ended.append((sequence, "error", *why))
            broken.append(sequence.row)
        elif sequence.scores.count > have:
            done.items.append(sequence.score_item(have, sequence.scores.count))
    assert next(given, None) is None, "log-probabilities of a prompt that nobody asked for"
    return broken


def _enter(rank: Rank, fresh: Fresh) -> dict[int, FinishReason]:
    """Put the tokens behind the outputs, up to those that end a sequence; place -> why it ends."""
    t, rows = rank.t, fresh.rows
    given, reasons = fresh.counts, _ends(rank, fresh)
    if fresh.counts is not given:  # tokens after the one that ends a sequence do not count
        nth = np.arange(len(fresh.tokens)) - np.repeat(np.cumsum(given) - given, given)
        fresh.keep(nth < np.repeat(fresh.counts, given))
    rank.table.outputs.append(rows, fresh.have, fresh.counts, fresh.tokens)
    t.output_tokens[rows] += fresh.counts
    last = np.cumsum(fresh.counts) - 1
    got = fresh.counts > 0
    if np.count_nonzero(got) == len(got):
        t.last_token[rows] = fresh.tokens[last]
    else:
        t.last_token[rows[got]] = fresh.tokens[last[got]]
    return reasons


def _ends(rank: Rank, fresh: Fresh) -> dict[int, FinishReason]:
    """Which places end, and why; their counts are cut to what they may still get."""
    t, rows, counts = rank.t, fresh.rows, fresh.counts
    room = t.max_tokens.take(rows) - fresh.have
    full = (counts >= room).nonzero()[0]
    hits = rank.table.stop_ids.hits(rows, counts, fresh.tokens)
    reasons: dict[int, FinishReason] = {}
    if not len(full) and not hits:
        return reasons
    cut = counts.copy()
    for place, nth in hits:
        enough = fresh.have[place] + nth >= t.min_tokens[rows[place]]
        if enough and nth <= room[place] and place not in reasons:
            reasons[place], cut[place] = "stop", nth
    for place in full.tolist():
        if place not in reasons:
            reasons[place], cut[place] = "length", room[place]
    fresh.counts = cut
    return reasons


def _say(rank: Rank, fresh: Fresh, reasons: dict[int, FinishReason], done: Commit) -> None:
    """As rows what goes on and is known to the gateway by its handle; the rest as items."""
    t = rank.t
    plain = (t.named.take(fresh.rows) != 0) & (fresh.counts > 0)
    for place in reasons:
        plain[place] = False
    rows, have, counts, tokens = fresh.rows, fresh.have, fresh.counts, fresh.tokens
    if np.count_nonzero(plain) < len(plain):
        odd = (~plain & (counts > 0)).nonzero()[0]
        starts = np.cumsum(counts) - counts
        columns = (column[odd].tolist() for column in (rows, have, starts, counts))
        for place, row, offset, start, count in zip(odd.tolist(), *columns, strict=True):
            span, sequence = slice(start, start + count), rank.table.by_row[row]
            done.items.append(_item(sequence, fresh, offset, span, reasons.get(place)))
            rank.table.name(sequence)
        tokens = tokens[np.repeat(plain, counts)]
        rows, have, counts = rows[plain], have[plain], counts[plain]
    if len(rows):
        done.rows = TokenRows(
            t.handle.take(rows).tobytes(),
            have.tobytes(),
            counts.astype(np.uint8).tobytes(),
            tokens.tobytes(),
        )


def _item(
    sequence: Sequence, fresh: Fresh, offset: int, span: slice, reason: FinishReason | None
) -> TokensItem:
    kept: tuple[TokenLogprobs, ...] = ()
    if fresh.logprobs:
        kept = tuple(logprob for logprob in fresh.logprobs[span] if logprob is not None)
        sequence.logprobs += kept
    return TokensItem(
        sequence.request_id,
        sequence.index,
        sequence.attempt,
        offset,
        tuple(fresh.tokens[span].tolist()),
        reason,
        cached_tokens=sequence.cached,
        logprobs=kept,
        handle=sequence.handle,
    )
