"""The scrubber: two ranks make the same steps, a third one votes, and the rank that is wrong is named."""

import msgspec
import pytest
from gateway_desk import Desk

from phalanx.protocol.errors import Code
from phalanx.protocol.messages import (
    AbortSequence,
    Finding,
    Generate,
    Sampling,
    Scrubbed,
    SeatLoad,
    Submit,
    TokenLogprobs,
    Tokens,
    TokensItem,
)
from phalanx.services.gateway.scrub import OUTPUTS_MAX, PROMPT_TOKENS_MAX

SAMPLING = Sampling(max_tokens=40, seed=3, temperature=0.5, stop=("zz",), frequency_penalty=1.0)


class Bench(Desk):
    """A gateway with a scrubber, and ranks of which some compute wrong numbers."""

    def __init__(self, seats: int, *wrong: int) -> None:
        super().__init__(seats=seats, scrub_every_s=10.0)
        self.wrong = set(wrong)
        self.seq = 100

    def request(self, outputs: int = 20, prompt: int = 1) -> str:
        """One that ends: what the scrubber makes again."""
        self.asks(Generate(1, prompt_token_ids=(5,) * prompt, sampling=SAMPLING))
        ((seat, submit),) = self.submits()
        self.produces(seat, submit, 0, *range(10, 10 + outputs), finish="length")
        self.decodes()
        self.told()
        return submit.request_id

    def probes(self, ms: int = 10_100) -> list[tuple[int, Submit]]:
        """(seat, what it was asked to make) after some time."""
        self.passes(ms)
        return [(int(peer[10:11]), submit) for peer, submit in self.submits()]

    def answer(self, seat: int, submit: Submit) -> None:
        forced = submit.sampling.forced_token_ids
        noise = 2.0**-40 * (1 + seat) if seat in self.wrong else 0.0
        told = tuple(
            TokenLogprobs(-1.5, (token, 3), (-1.5, -2.0 + noise * (at >= 4)))
            for at, token in enumerate(forced)
        )
        item = TokensItem(submit.request_id, 0, submit.attempt, 0, forced, "length", logprobs=told)
        self.seq += 1
        self.says(b"scheduler-%d#1" % seat, Tokens(seat, 1, self.seq, (item,)))

    def compare(self) -> list[int]:
        """One comparison to its end; the ranks that were asked."""
        asked, open_probes = [], self.probes()
        while open_probes:
            asked += [seat for seat, _ in open_probes]
            for seat, submit in open_probes:
                self.answer(seat, submit)
            open_probes = self.probes(0)
        return asked

    def found(self) -> Scrubbed | None:
        report = self.core.take_scrub_report()
        return report.scrubbed if report is not None else None


def test_equal_ranks_are_compared_in_turn_and_nothing_is_found() -> None:
    bench = Bench(3)
    assert bench.probes(60_000) == []  # nothing has ended yet
    bench.request()
    assert [bench.compare() for _ in range(3)] == [[0, 1], [2, 0], [1, 2]]
    assert bench.found() == Scrubbed(3, 0)
    assert bench.found() is None and bench.core.idle


def test_a_probe_is_the_beginning_of_a_request_with_its_tokens_given() -> None:
    bench = Bench(2)
    rid = bench.request(outputs=20)
    bench.clear()
    (_, first), (_, second) = bench.probes()
    assert rid not in (first.request_id, second.request_id)
    forced = tuple(range(10, 10 + OUTPUTS_MAX))
    for submit in (first, second):
        sampling, length = submit.sampling, len(forced)
        assert (sampling.forced_token_ids, sampling.max_tokens) == (forced, length)
        assert (sampling.logprobs, sampling.raw_logprobs, sampling.ignore_eos) == (20, True, True)
        assert sampling.stop == () and sampling.frequency_penalty == 0 and submit.priority < 0
    assert not bench.ops and bench.told() == []


def test_all_ranks_ask_the_same_copies_of_experts() -> None:
    """A copy that is wrong at some rank would make a difference between two that are well."""
    bench = Bench(3, 1)
    rid, asked = bench.request(), list[Submit]()
    open_probes = bench.probes()
    while open_probes:
        for seat, submit in open_probes:
            asked.append(submit)
            bench.answer(seat, submit)
        open_probes = bench.probes(0)
    assert [(submit.copies_as, submit.afresh) for submit in asked] == [(rid, True)] * 3
    assert len({submit.request_id for submit in asked}) == 3


def test_of_two_ranks_that_differ_nobody_can_tell_which_is_wrong() -> None:
    bench = Bench(2, 1)
    rid = bench.request()
    bench.compare()
    assert bench.found() == Scrubbed(1, 1, (Finding((0, 1), (1, 1), (), rid, 4),))


def test_a_third_rank_votes() -> None:
    for wrong in range(3):
        bench = Bench(3, wrong)
        rid = bench.request()
        while sorted(bench.compare()) != [0, 1, 2]:
            pass  # two that agree
        others = tuple(seat for seat in range(3) if seat != wrong)
        found = bench.found()
        assert found is not None and found.differed == 1
        assert found.findings == (Finding((wrong,), (1,), others, rid, 4),)


def test_more_ranks_are_asked_until_two_agree() -> None:
    bench = Bench(4, 0, 1)
    rid = bench.request()
    assert bench.compare() == [0, 1, 2, 3]
    found = bench.found()
    assert found is not None and found.findings == (Finding((0, 1), (1, 1), (2, 3), rid, 4),)


def test_a_worker_that_was_started_again_is_not_the_one_that_was_found() -> None:
    bench = Bench(3, 1)
    bench.request()
    bench.compare()
    found = bench.found()
    assert found is not None and len(found.findings) == 1
    bench.wrong.clear()
    seats = list(bench.topology.seats)
    seats[1] = msgspec.structs.replace(seats[1], worker_incarnation=2)
    bench.core.on_topology(msgspec.structs.replace(bench.topology, seats=tuple(seats)), bench.now)
    bench.passes(200)
    assert bench.found() == Scrubbed(1, 1)


@pytest.mark.parametrize("replaced", [0, 1, 2])
def test_a_comparison_in_which_a_worker_was_replaced_blames_nobody(replaced: int) -> None:
    """The rows of all ranks went through that one's experts, wrong ones perhaps; then through its successor's."""
    bench = Bench(3, 1)
    bench.request()
    for seat, submit in bench.probes():
        bench.answer(seat, submit)
    ((third, submit),) = bench.probes(0)
    seats = list(bench.topology.seats)
    seats[replaced] = msgspec.structs.replace(seats[replaced], worker_incarnation=2)
    topology = msgspec.structs.replace(bench.topology, seats=tuple(seats))
    bench.core.on_topology(topology, bench.now)
    bench.turn()
    bench.answer(third, submit)
    assert bench.found() is None
    # A later one does.
    bench.says(
        b"scheduler-%d#1" % replaced,
        SeatLoad(replaced, 1, True, total_blocks=9, worker_incarnation=2),
    )
    bench.compare()
    bench.compare()
    found = bench.found()
    assert found is not None and {finding.seats for finding in found.findings} == {(1,)}


def test_a_lost_rank_is_no_finding() -> None:
    bench = Bench(3)
    bench.request()
    asked = bench.probes()
    assert [seat for seat, _ in asked] == [0, 1]
    seats = list(bench.topology.seats)
    seats[0] = msgspec.structs.replace(seats[0], state="lost")
    bench.core.on_topology(msgspec.structs.replace(bench.topology, seats=tuple(seats)), bench.now)
    bench.turn()
    assert [type(m) for _, m in bench.sent(AbortSequence)] == [AbortSequence]  # of the other one
    assert bench.found() is None and bench.core.idle
    assert bench.compare() == [2, 1] and bench.found() == Scrubbed(1, 0)


def test_a_probe_that_ends_for_want_of_blocks_says_nothing() -> None:
    bench = Bench(2)
    bench.request()
    (seat, submit), (other, same) = bench.probes()
    item = TokensItem(
        submit.request_id, 0, submit.attempt, 0, (), "length", Code.KV_PRESSURE, "full"
    )
    bench.says(b"scheduler-%d#1" % seat, Tokens(seat, 1, 99, (item,)))
    bench.answer(other, same)
    assert bench.found() is None
    assert sorted(bench.compare()) == [0, 1] and bench.found() == Scrubbed(1, 0)


def test_broken_numbers_are_numbers_too() -> None:
    bench = Bench(3)
    bench.request()
    (seat, submit), (other, same) = bench.probes()
    item = TokensItem(submit.request_id, 0, submit.attempt, 0, (), "error", Code.NAN_LOGITS, "nan")
    bench.says(b"scheduler-%d#1" % seat, Tokens(seat, 1, 99, (item,)))
    bench.answer(other, same)
    ((third, more),) = bench.probes(0)
    bench.answer(third, more)
    found = bench.found()
    assert found is not None and found.findings[0].seats == (seat,)


def test_long_prompts_busy_ranks_and_a_node_that_stops_are_left_alone() -> None:
    bench = Bench(2)
    bench.says(b"scheduler-0#1", SeatLoad(0, 1, True, total_blocks=9, worker_incarnation=1))
    bench.says(b"scheduler-1#1", SeatLoad(1, 1, True, total_blocks=9, worker_incarnation=1))
    assert PROMPT_TOKENS_MAX > 900
    bench.request(prompt=900, outputs=5)
    bench.says(b"scheduler-1#1", SeatLoad(1, 1, False, total_blocks=9, worker_incarnation=1))
    assert bench.probes() == []
    bench.says(b"scheduler-1#1", SeatLoad(1, 1, True, total_blocks=9, worker_incarnation=1))
    bench.core.drain()
    assert bench.probes() == [] and bench.core.idle
