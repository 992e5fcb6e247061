"""A step's result into the state: vector operations whatever the batch; one by one only what ends,
what is new to the gateway, and what carries log-probabilities. Pure."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from phalanx.protocol.errors import Code
from phalanx.protocol.messages import FinishReason, TokenLogprobs, TokenRows, TokensItem
from phalanx.protocol.steps import StepResult
from phalanx.scheduler_svc.outputs import Int32, Spans
from phalanx.scheduler_svc.plan import Flight
from phalanx.scheduler_svc.rank import Rank
from phalanx.scheduler_svc.state import RUNNING, Sequence
from phalanx.scheduler_svc.stops import STATUS_NAN, Rows, sample_error

Bool = npt.NDArray[np.bool_]

_ONE = np.int32(1)

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
    """New tokens of a step for `rows`, behind their `have[i]` outputs.

    `spans` are the tokens as they came; only the first `counts[i]` of each span count: none of a
    sequence that ended while the step was in flight, none after the one that ends it now.
    """

    rows: Rows
    have: Int32
    counts: Int32
    alive: Bool
    whole: bool  # all are alive and have got some
    spans: Spans
    logprobs: tuple[TokenLogprobs | None, ...]  # parallel to the tokens; empty: none was asked for


def commit(rank: Rank, flight: Flight, result: StepResult) -> Commit:
    """Enter the step's tokens. Sequences that ended while it was in flight get nothing."""
    t, rows = rank.t, flight.sampled
    counts: Int32 = np.frombuffer(result.counts, np.uint8).astype(np.int32)
    tokens = np.frombuffer(result.tokens, np.int32)
    assert len(counts) == len(result.status) == len(rows), "not of this plan"
    spans = Spans(counts, tokens)
    assert not len(counts) or spans.ends[-1] == len(tokens), (
        "the result's counts are not its tokens"
    )
    _settle(rank, flight, counts)
    done = Commit()
    broken = _take_scores(flight, result, done)
    alive = t.state.take(rows) == RUNNING
    if broken:
        alive &= ~np.isin(rows, broken)
    whole = len(counts) > 0 and 0 not in result.counts
    if np.count_nonzero(alive) < len(alive):
        counts, whole = counts * alive, False
    fresh = Fresh(rows, t.output_tokens.take(rows), counts, alive, whole, spans, result.logprobs)
    reasons = _enter(rank, fresh)
    by_row = rank.table.by_row
    if reasons:
        ended = [by_row[row] for row in rows.take(list(reasons)).tolist()]
        done.ended += [(s, why, None, "") for s, why in zip(ended, reasons.values(), strict=True)]
    _say(rank, fresh, reasons, result, done)
    if result.status.count(0) < len(result.status):
        status = np.frombuffer(result.status, np.uint8) * alive
        for place in status.nonzero()[0].tolist():
            if place not in reasons:
                sequence = by_row[rows.item(place)]
                why = sample_error(status.item(place), sequence.num_outputs)
                done.ended.append((sequence, "error", *why))
    return done


def _settle(rank: Rank, flight: Flight, counts: Int32) -> None:
    """What the plan asked for becomes what was computed: rejected drafts are not."""
    t, rows, decoding = rank.t, flight.rows, len(flight.decoders.rows)
    if not flight.drafted:
        t.committed[rows] += flight.asked
        return
    computed = flight.asked.copy()
    # A row whose sample failed was computed, too.
    np.maximum(counts[:decoding], _ONE, out=computed[:decoding])
    t.committed[rows] += computed
    t.planned[rows] += computed - flight.asked


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
    t, rows, spans = rank.t, fresh.rows, fresh.spans
    reasons = _ends(rank, fresh)
    rank.table.outputs.append(rows, fresh.have, spans)
    t.output_tokens[rows] = fresh.have + fresh.counts
    if fresh.whole and not reasons:
        t.last_token[rows] = spans.tokens.take(spans.ends - 1)
    else:
        got = fresh.counts.nonzero()[0]
        last = spans.starts.take(got) + fresh.counts.take(got) - 1
        t.last_token[rows.take(got)] = spans.tokens.take(last)
    return reasons


def _ends(rank: Rank, fresh: Fresh) -> dict[int, FinishReason]:
    """Which places end, and why; their counts are cut to what they may still get."""
    t, rows = rank.t, fresh.rows
    room = t.max_tokens.take(rows) - fresh.have
    full = (fresh.counts >= room).nonzero()[0].tolist()
    hits = rank.table.stop_ids.hits(rows, fresh.spans)
    reasons: dict[int, FinishReason] = {}
    if not full and not hits:
        return reasons
    cut, least = np.minimum(fresh.counts, room), t.min_tokens.take(rows) - fresh.have
    for place, nth in hits:
        if least.item(place) <= nth <= cut.item(place) and place not in reasons:
            reasons[place], cut[place] = "stop", nth
    for place in full:
        if fresh.alive.item(place) and place not in reasons:
            reasons[place] = "length"
    fresh.counts = cut
    return reasons


def _say(
    rank: Rank, fresh: Fresh, reasons: dict[int, FinishReason], result: StepResult, done: Commit
) -> None:
    """As rows what goes on and is known to the gateway by its handle; the rest as items."""
    t, rows, have, counts = rank.t, fresh.rows, fresh.have, fresh.counts
    plain = t.named.take(rows)
    if fresh.whole and not reasons and np.count_nonzero(plain) == len(plain):
        handles = t.handle.take(rows).tobytes()
        done.rows = TokenRows(handles, have.tobytes(), result.counts, result.tokens)
        return
    got = counts > 0
    plain = got & (plain != 0)
    if reasons:
        plain[list(reasons)] = False
    _say_items(rank, fresh, (got > plain).nonzero()[0], reasons, done)
    places = plain.nonzero()[0]
    if len(places):
        done.rows = TokenRows(
            t.handle.take(rows.take(places)).tobytes(),
            have.take(places).tobytes(),
            counts.take(places).astype(np.uint8).tobytes(),
            fresh.spans.tokens[fresh.spans.spread(plain)].tobytes(),
        )


def _say_items(
    rank: Rank, fresh: Fresh, places: Rows, reasons: dict[int, FinishReason], done: Commit
) -> None:
    """One item each; from now on the gateway knows the handles of those that go on."""
    tokens, logprobs, by_row = fresh.spans.tokens.data, fresh.logprobs, rank.table.by_row
    named: list[int] = []
    kept: tuple[TokenLogprobs, ...] = ()
    columns = (fresh.rows, fresh.have, fresh.spans.starts, fresh.counts)
    spans = zip(places.tolist(), *(column.take(places).tolist() for column in columns), strict=True)
    for place, row, offset, start, count in spans:
        sequence, reason = by_row[row], reasons.get(place)
        if logprobs:
            asked = logprobs[start : start + count]
            kept = tuple([logprob for logprob in asked if logprob is not None])
            sequence.logprobs += kept
        ids, (request_id, index) = tuple(tokens[start : start + count]), sequence.key
        item = TokensItem(
            request_id,
            index,
            sequence.attempt,
            offset,
            ids,
            reason,
            None,
            "",
            sequence.cached,
            kept,
            sequence.handle,
        )
        done.items.append(item)
        if reason is None and sequence.plain:
            named.append(row)
    if named:
        rank.t.named[named] = 1
