"""A step's result into the state: vector operations whatever the batch; one by one only what ends,
what is new to the gateway, and what carries log-probabilities. Pure."""

from dataclasses import dataclass

import msgspec
import numpy as np

from phalanx.protocol.messages import FinishReason, TokenLogprobs, TokenRows, TokensItem
from phalanx.protocol.steps import StepResult
from phalanx.scheduler_svc.outputs import Int32, Spans
from phalanx.scheduler_svc.plan import Flight
from phalanx.scheduler_svc.rank import Rank
from phalanx.scheduler_svc.state import RUNNING, Ended, Sequence
from phalanx.scheduler_svc.stops import STATUS_NAN, Rows, sample_error

_ONE = np.int32(1)


class Commit(msgspec.Struct, eq=False):
    """Tokens to send, and the sequences that end with this step.

    `unsaid` are those of `ended` that have no item here for it: they end without a new token.
    """

    rows: TokenRows | None = None
    items: list[TokensItem] = []
    ended: list[Ended] = []
    unsaid: list[Sequence] = []

    def fail(self, sequence: Sequence, status: int, output: int) -> None:
        """No token was sampled for its output of this number."""
        self.ended.append((sequence, "error", *sample_error(status, output)))
        self.unsaid.append(sequence)


@dataclass(slots=True)
class Fresh:
    """New tokens of a step for `rows`, behind their `have[i]` outputs.

    `spans` are the tokens as they came. Of some rows not all of them count: none of a sequence that ended
    while the step was in flight, none after the one that ends it now.
    """

    rows: Rows
    have: Int32
    spans: Spans
    logprobs: tuple[TokenLogprobs | None, ...]  # parallel to the tokens; empty: none was asked for
    broken: list[int]  # rows that end for another reason, and get nothing


Ends = dict[int, tuple[FinishReason, int]]  # place -> why its sequence ends, tokens that count


def commit(rank: Rank, flight: Flight, result: StepResult) -> Commit:
    """Enter the step's tokens. Sequences that ended while it was in flight get nothing."""
    passes = rank.table.passes
    if passes is None or flight.scored or result.logprobs or result.prompt_logprobs:
        return _commit(rank, flight, result)
    rows, items, ended, unsaid, failed = passes.commit(rank.table, flight, result)
    done = Commit(rows, items, ended, unsaid)
    for sequence, status in failed:
        done.fail(sequence, status, sequence.num_outputs)
    return done


def _commit(rank: Rank, flight: Flight, result: StepResult) -> Commit:
    t, rows, table = rank.t, flight.sampled, rank.table
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
    fresh = Fresh(rows, t.output_tokens.take(rows), spans, result.logprobs, broken)
    behind = fresh.have + counts
    full = table.outputs.append(rows, fresh.have, behind, spans)
    ends = _ends(rank, fresh, full)
    t.output_tokens[rows] = behind
    if len(tokens):  # those that get none end, and what stands there does not matter any more
        t.last_token[rows] = tokens.take(spans.ends - 1)
    if ends:
        ended = [table.by_row[row] for row in rows.take(list(ends)).tolist()]
        for sequence, (why, count) in zip(ended, ends.values(), strict=True):
            done.ended.append((sequence, why, None, ""))
            if not count:
                done.unsaid.append(sequence)
    _say(rank, fresh, ends, result, done)
    if result.status.count(0) < len(result.status):
        status = np.frombuffer(result.status, np.uint8)
        for place in status.nonzero()[0].tolist():
            row = rows.item(place)
            if t.state.item(row) == RUNNING and row not in broken and place not in ends:
                sequence = table.by_row[row]
                done.fail(sequence, status.item(place), sequence.num_outputs)
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
            done.fail(sequence, STATUS_NAN, 0)
            broken.append(sequence.row)
        elif sequence.scores.count > have:
            done.items.append(sequence.score_item(have, sequence.scores.count))
    assert next(given, None) is None, "log-probabilities of a prompt that nobody asked for"
    return broken


def _ends(rank: Rank, fresh: Fresh, full: list[int]) -> Ends:
    """Which places end; those in `full` have all the outputs they may have."""
    t, rows, have, broken = rank.t, fresh.rows, fresh.have, fresh.broken
    state, least, most = t.state, t.min_tokens, t.max_tokens
    ends: Ends = {}
    for place, row, nth in rank.table.stop_ids.hits(rows, fresh.spans):
        if state.item(row) != RUNNING or row in broken or place in ends:
            continue
        if least.item(row) <= have.item(place) + nth <= most.item(row):
            ends[place] = "stop", nth
    for place in full:
        row = rows.item(place)
        if state.item(row) == RUNNING and row not in broken and place not in ends:
            ends[place] = "length", most.item(row) - have.item(place)
    return ends


def _say(rank: Rank, fresh: Fresh, ends: Ends, result: StepResult, done: Commit) -> None:
    """As rows what goes on and is known to the gateway by its handle; the rest one by one."""
    t, rows, have = rank.t, fresh.rows, fresh.have
    odd = t.named.take(rows) == 0
    if ends:
        odd[list(ends)] = True
    if 0 in result.counts:
        odd |= fresh.spans.counts == 0
    places = odd.nonzero()[0]
    if not len(places):
        if len(rows):
            handles = t.handle.take(rows).tobytes()
            done.rows = TokenRows(handles, have.tobytes(), result.counts, result.tokens)
        return
    _say_items(rank, fresh, places, ends, done)
    plain = ~odd
    if len(places) < len(rows):
        done.rows = TokenRows(
            t.handle.take(rows[plain]).tobytes(),
            have[plain].tobytes(),
            np.frombuffer(result.counts, np.uint8)[plain].tobytes(),
            fresh.spans.tokens[fresh.spans.spread(plain)].tobytes(),
        )


def _say_items(rank: Rank, fresh: Fresh, places: Rows, ends: Ends, done: Commit) -> None:
    """An item for each that gets tokens; from now on the gateway knows the handles of those that go on."""
    t, by_row, broken = rank.t, rank.table.by_row, fresh.broken
    tokens, logprobs, spans = fresh.spans.tokens.data, fresh.logprobs, fresh.spans
    kept: tuple[TokenLogprobs, ...] = ()
    named: list[int] = []
    rows = fresh.rows.take(places)
    columns = (
        t.state.take(rows),
        *(c.take(places) for c in (fresh.have, spans.starts, spans.counts)),
    )
    parts = zip(places.tolist(), rows.tolist(), *(c.tolist() for c in columns), strict=True)
    for place, row, state, offset, start, count in parts:
        if state != RUNNING or row in broken:
            t.output_tokens[row] = offset
            continue
        reason: FinishReason | None = None
        if place in ends:
            reason, count = ends[place]
            t.output_tokens[row] = offset + count
        if not count:
            continue
        sequence = by_row[row]
        if logprobs:
            asked = logprobs[start : start + count]
            kept = tuple([logprob for logprob in asked if logprob is not None])
            sequence.logprobs += kept
        request_id, index = sequence.key
        item = TokensItem(
            request_id,
            index,
            sequence.attempt,
            offset,
            tuple(tokens[start : start + count]),
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
        t.named[named] = 1
