"""Who waits at a full rank is asked back when another one has room, and goes there; and what keeps it from
going to and fro."""

from typing import Any

import pytest
from gateway_desk import MS, Desk

from phalanx.protocol.messages import (
    Abort,
    Final,
    FinalSeen,
    Generate,
    HandBack,
    Replay,
    Sampling,
    SeatLoad,
    SequenceInfo,
    Stats,
    StatsReply,
    Submit,
    Submitted,
)
from phalanx.protocol.topology import Seat, Topology
from phalanx.services.gateway.entries import Accept, Fell, Recovered
from phalanx.services.gateway.streams import SUSPECT_FALLS

PROMPT = (5,) * 300  # 3 blocks
SEATS = (b"scheduler-0#1", b"scheduler-1#1")


class Two(Desk):
    """Two ranks: the first one full, the second one as told."""

    asleep = False  # what comes waits for the next turn

    def __init__(self, *recovered: Recovered, **options: Any) -> None:
        super().__init__(*recovered, seats=2, capacity=20, **options)
        self.seq = [0, 0]
        self.seen = set[tuple[str, int, int]]()
        self.load(0)
        self.load(1)

    def turn(self, commit: bool = True) -> None:
        if not self.asleep:
            super().turn(commit)

    def load(
        self, seat: int, *stuck: Submit, room: int = 0, sequences: int = 9, spare: int = 0
    ) -> None:
        names = tuple((submit.request_id, submit.index, submit.attempt) for submit in stuck)
        said = SeatLoad(
            seat,
            1,
            True,
            waiting=len(stuck),
            running=1,
            total_blocks=100,
            worker_incarnation=1,
            room_blocks=room,
            room_sequences=sequences if room or spare else 0,
            spare_blocks=spare,
            stuck=names,
        )
        self.says(SEATS[seat], said)

    def ask(self, n: int = 1, prompt: tuple[int, ...] = PROMPT) -> list[tuple[int, Submit]]:
        """Where its sequences went."""
        self.asks(Generate(1, prompt_token_ids=prompt, sampling=Sampling(max_tokens=40), n=n))
        return self.placed()

    def placed(self) -> list[tuple[int, Submit]]:
        """Where sequences went since, each place once, acknowledged."""
        found = [(SEATS.index(p), s) for p, s in self.submits() if name(s) not in self.seen]
        self.seen.update([name(submit) for _, submit in found])
        for seat, submit in found:
            self.says(SEATS[seat], Submitted(submit.call, seat, 1))
        return found

    def asked_back(self) -> list[tuple[int, tuple[tuple[str, int, int], ...]]]:
        sent = self.sent(HandBack)
        return [(SEATS.index(p), m.sequences) for p, m in sent if isinstance(m, HandBack)]

    def gives_back(self, seat: int, submit: Submit, *tokens: int) -> None:
        self.seq[seat] += 1
        self.produces(SEATS[seat], submit, 0, *tokens, finish="abort", seq=self.seq[seat])


def name(submit: Submit) -> tuple[str, int, int]:
    return submit.request_id, submit.index, submit.attempt


def stuck_at_0(desk: Two, count: int = 1) -> list[Submit]:
    """So many requests that wait at seat 0, which was the only one to take them."""
    desk.load(0, room=100)
    found = [desk.ask() for _ in range(count)]
    assert all(seat == 0 for ((seat, _),) in found)
    return [submit for ((_, submit),) in found]


def test_who_waits_goes_where_there_is_room() -> None:
    desk = Two()
    (first,) = stuck_at_0(desk)
    desk.load(0, first)
    assert not desk.asked_back(), "nowhere is room"
    desk.load(1, room=2)
    assert not desk.asked_back(), "it needs 3 blocks"
    desk.load(1, room=3)
    assert desk.asked_back() == [(0, (name(first),))]
    desk.gives_back(0, first)
    assert desk.sent(FinalSeen) == [(SEATS[0], FinalSeen((name(first),)))]
    ((seat, again),) = desk.placed()
    assert seat == 1 and again.attempt == first.attempt + 1
    assert again.resumed, "it goes ahead of arrivals, and no full queue refuses it"
    assert (again.request_id, again.prompt, again.sampling) == (
        first.request_id,
        first.prompt,
        first.sampling,
    )


def test_it_takes_its_tokens_along_and_late_words_of_the_old_rank_are_ignored() -> None:
    desk = Two()
    (first,) = stuck_at_0(desk)
    desk.produces(SEATS[0], first, 0, 10, 11, seq=1)
    desk.load(0, first)  # preempted since
    desk.load(1, room=9)
    assert desk.asked_back()
    desk.seq[0] = 1
    desk.gives_back(0, first, 10, 11, 12)
    ((seat, again),) = desk.placed()
    assert seat == 1 and again.outputs == b"".join(t.to_bytes(4, "little") for t in (10, 11, 12))
    desk.produces(SEATS[0], first, 3, 50, 51, seq=3)  # cannot be, and would do no harm
    desk.produces(SEATS[1], again, 3, 13, seq=1)
    desk.decodes()
    desk.decodes()
    tokens = [token for delta in desk.told() for token in getattr(delta, "token_ids", ())]
    assert tokens == [10, 11, 12, 13]


def test_room_is_promised_once() -> None:
    desk = Two()
    first, second, third = stuck_at_0(desk, 3)
    desk.load(1, room=7)
    desk.load(0, first, second, third)
    assert desk.asked_back() == [(0, (name(first), name(second)))], "the oldest first"
    desk.load(0, first, second, third)
    assert not desk.asked_back()
    desk.gives_back(0, first)
    assert [seat for seat, _ in desk.placed()] == [1]
    desk.load(0, second, third)
    assert not desk.asked_back(), "what is on its way counts as well as what is placed"
    desk.load(1, room=10)  # with the first one in it
    desk.load(0, second, third)
    assert desk.asked_back() == [(0, (name(third),))]


def test_small_ones_go_first_and_those_that_ran_before_arrivals() -> None:
    """Most streams go on soonest; where the large one waits, nobody overtakes it."""
    desk = Two()
    desk.load(0, room=100)
    ((_, large),), ((_, small),), ((_, other),) = desk.ask(), desk.ask(prompt=(5,)), desk.ask()
    desk.load(1, room=3)
    desk.load(0, large, small, other)
    assert desk.asked_back() == [(0, (name(small),))], "then no other has room"
    desk.gives_back(0, small)
    desk.placed()
    desk.produces(SEATS[0], other, 0, 10, seq=2)  # and is preempted
    desk.load(1, room=3)
    desk.load(0, large, other)
    assert desk.asked_back() == [(0, (name(other),))]


def test_a_rank_has_room_for_so_many_sequences() -> None:
    desk = Two()
    first, second = stuck_at_0(desk, 2)
    desk.load(1, room=90, sequences=1)
    desk.load(0, first, second)
    assert desk.asked_back() == [(0, (name(first),))]


def test_who_has_begun_meanwhile_stays_and_its_promise_is_void() -> None:
    desk = Two()
    first, second = stuck_at_0(desk, 2)
    desk.load(1, room=3)
    desk.load(0, first)
    assert desk.asked_back() == [(0, (name(first),))]
    desk.load(0, second)  # the first one was not given back: it runs
    assert desk.asked_back() == [(0, (name(second),))]
    assert not desk.placed()


def test_a_lost_word_is_said_again() -> None:
    desk = Two()
    (first,) = stuck_at_0(desk)
    desk.load(1, room=3)
    desk.load(0, first)
    assert desk.asked_back()
    desk.now += 99 * MS
    desk.load(0, first)
    assert not desk.asked_back()
    desk.now += MS
    desk.load(0, first)
    assert desk.asked_back() == [(0, (name(first),))]


def test_it_stays_longer_each_time() -> None:
    """Whatever the ranks say of themselves, it does not go to and fro."""
    desk = Two()
    (one,) = stuck_at_0(desk)
    seat, stays_ms = 0, 0
    for expected_ms in (0, 200, 400, 800, 1600, 3200, 3200):
        stays_ms = 0
        while True:
            desk.load(1 - seat, room=50)
            desk.load(seat, one)
            if desk.asked_back():
                break
            desk.now += 100 * MS
            stays_ms += 100
        assert stays_ms == expected_ms
        desk.gives_back(seat, one)
        ((other, one),) = desk.placed()
        assert other == 1 - seat
        seat = other


def test_an_arrival_does_not_take_the_room_of_one_on_its_way() -> None:
    desk = Two()
    (first,) = stuck_at_0(desk)
    desk.load(1, room=3)
    desk.load(0, first)
    assert desk.asked_back()
    ((seat, _),) = desk.ask()
    assert seat == 0, "though fewer run at the other one"
    desk.gives_back(0, first)
    assert [seat for seat, _ in desk.placed()] == [1]


def test_no_room_is_kept_for_those_of_a_rank_that_is_silent() -> None:
    """Its scheduler sleeps: what is asked back does not come, and others wait as well."""
    desk = Two()
    (first,) = stuck_at_0(desk)
    desk.load(1, room=3)
    desk.load(0, first)
    assert desk.asked_back()
    desk.now += 100 * MS
    desk.load(1, room=3)
    assert not desk.asked_back()
    ((seat, _),) = desk.ask()
    assert seat == 1
    desk.load(1, room=3)
    assert not desk.asked_back(), "however much room there is"
    desk.load(0, first)
    assert desk.asked_back() == [(0, (name(first),))], "it speaks again"


def test_a_suspect_is_not_asked_back_for_a_rank_that_tries_another_one() -> None:
    """It would come back to where it was: they are tried apart."""
    before = Desk()
    names = [before.start(Sampling(max_tokens=200)) for _ in range(2)]
    entries = [op.entry for op in before.ops if isinstance(op, Accept)]
    assert [entry.request_id for entry in entries] == names
    falls = [(Fell(entry.request_id, 0, SUSPECT_FALLS, 0),) for entry in entries]
    desk = Two(*(Recovered(one, falls=fell) for one, fell in zip(entries, falls, strict=True)))
    desk.passes(500)
    (_, first), (_, second) = sorted(desk.placed(), key=lambda one: one[0])
    desk.load(1, room=90)
    desk.load(0, first)
    assert not desk.asked_back()
    desk.produces(SEATS[1], second, 0, 10)
    desk.load(0, first)
    assert desk.asked_back() == [(0, (name(first),))], "the other one is no suspect any more"


def test_an_arrival_goes_where_it_can_start() -> None:
    desk = Two()
    desk.load(0, room=2)
    desk.load(1, room=90)
    assert [desk.ask()[0][0] for _ in range(4)] == [1, 1, 1, 1]
    assert desk.ask(prompt=(5,))[0][0] == 0, "fewer run there"


def test_where_none_has_room_it_goes_where_the_least_is_lacking() -> None:
    desk = Two()
    desk.load(0, room=1)
    desk.load(1, room=2)
    assert desk.ask()[0][0] == 1


def test_sequences_of_one_request_share_the_blocks_of_their_prompt() -> None:
    desk = Two()
    desk.load(1, room=7)
    assert [seat for seat, _ in desk.ask(n=3)] == [1, 1, 1]
    desk.load(0, room=3)
    assert desk.ask()[0][0] == 0, "3 + 1 + 1 blocks are taken, it needs 3"


def two_that_ran_at_0(desk: Two) -> list[Submit]:
    """Two sequences of one request, with tokens; both need 3 blocks, of which they share 2, and 3 in the end."""
    desk.load(0, room=100)
    found = [submit for _, submit in desk.ask(n=2)]
    for seq, submit in enumerate(found, 1):
        desk.produces(SEATS[0], submit, 0, 10, seq=seq)
    desk.seq[0] = 2
    return found


def test_two_of_one_request_are_asked_back_for_one_rank_that_has_room_for_their_prompt_once() -> (
    None
):
    desk = Two()
    pair = two_that_ran_at_0(desk)
    desk.load(1, room=4)
    desk.load(0, *pair)
    assert desk.asked_back() == [(0, tuple(map(name, pair)))]


def test_two_of_one_request_go_to_one_rank_and_share_the_blocks_of_their_prompt_there() -> None:
    """With their tokens, which differ: at the rank that fell they had these blocks once, too."""
    desk = Two()
    two_that_ran_at_0(desk)
    desk.load(1, room=7)
    desk.core.on_topology(
        Topology(4, (Seat(0, 2, 1, "lost"), Seat(1, 1, 1, "member")), b"", "f1"), desk.now
    )
    desk.turn()
    assert [seat for seat, _ in desk.placed()] == [1, 1]
    assert desk.core._placement.seats.by_number[1].promised_blocks.now == 3 + 1


def test_of_a_lost_rank_those_that_can_start_elsewhere_go_before_those_that_cannot() -> None:
    """Where the large one waited first, nobody behind it would start."""
    desk = Two()
    desk.load(0, room=100)
    for prompt in (PROMPT, (5,), PROMPT[:200]):
        ((seat, _),) = desk.ask(prompt=prompt)
        assert seat == 0
    desk.load(1, room=2)
    desk.core.on_topology(
        Topology(4, (Seat(0, 2, 1, "lost"), Seat(1, 1, 1, "member")), b"", "f1"), desk.now
    )
    desk.turn()
    assert [len(submit.prompt) // 4 for _, submit in desk.placed()] == [1, 300, 200]


def test_a_rank_may_be_filled_where_all_have_room_to_their_ends() -> None:
    desk = Two()
    (first,) = stuck_at_0(desk)
    desk.load(1, spare=2)
    desk.load(0, first)
    assert not desk.asked_back(), "in the end it needs 3 blocks"
    desk.load(1, spare=3)
    assert desk.asked_back() == [(0, (name(first),))]


def test_an_arrival_does_not_wait_where_only_others_could_start() -> None:
    """A pool above the watermark takes those that are ahead of arrivals, if all have room to their ends."""
    desk = Two()
    (first,) = stuck_at_0(desk)
    desk.load(1, room=9)
    desk.load(0, first, spare=50)
    assert desk.asked_back() == [(0, (name(first),))]


def test_the_room_of_one_that_comes_back_is_not_promised_to_the_next() -> None:
    """Its end and the load report with those that still wait come together."""
    desk = Two()
    first, second = stuck_at_0(desk, 2)
    desk.load(1, room=3)
    desk.load(0, first, second)
    assert desk.asked_back() == [(0, (name(first),))]
    desk.asleep = True
    desk.gives_back(0, first)
    desk.load(0, second)
    desk.asleep = False
    desk.turn()
    assert [seat for seat, _ in desk.placed()] == [1]
    assert not desk.asked_back()


def test_who_is_bound_to_a_rank_waits_there() -> None:
    desk = Two()
    desk.load(0, room=90)
    rid = desk.ask()[0][1].request_id
    desk.produces(SEATS[0], Submit(0, rid, 0, 7 << 20, b"", Sampling()), 0, 1, finish="stop")
    desk.decodes()
    desk.asks(Replay(9, rid, 0))
    ((seat, submit),) = desk.placed()
    assert seat == 0
    desk.load(1, room=90)
    desk.load(0, submit)
    assert not desk.asked_back()


@pytest.mark.parametrize("placed", [False, True])
def test_the_next_gateway_needs_to_know_nothing_of_it(placed: bool) -> None:
    """It died between asking back and hearing of it, or after it gave the sequence to another rank."""
    desk = Two()
    (first,) = stuck_at_0(desk)
    entry = next(op.entry for op in desk.ops if isinstance(op, Accept))
    after = Desk(Recovered(entry, {}), seats=0)
    gone = SequenceInfo(*name(first), b"", "abort")
    runs = SequenceInfo(first.request_id, 0, first.attempt + 1, b"", None)
    after.core.on_topology(
        Topology(2, tuple(Seat(i, 1, 1, "member") for i in range(2)), b"", "f1"), 0
    )
    after.scheduler(0, 1, gone)
    after.scheduler(1, 1, *([runs] if placed else []))
    after.passes(100)
    assert len(after.submits()) == (0 if placed else 1)
    assert (SEATS[0], FinalSeen((name(first),))) in after.sent(FinalSeen)


def test_a_word_to_the_last_gateway_moves_it_once() -> None:
    """What that one asked for comes to this one: it is placed anew, nothing is said twice."""
    desk = Two()
    (first,) = stuck_at_0(desk)
    desk.gives_back(0, first)
    desk.gives_back(0, first)
    assert len(desk.placed()) == 1


def test_names_of_requests_are_for_no_client() -> None:
    desk = Two()
    (first,) = stuck_at_0(desk)
    desk.load(0, first)
    desk.told()
    desk.asks(Stats(3))
    (reply,) = desk.told()
    assert isinstance(reply, StatsReply)
    assert [load.stuck for load in reply.seats] == [(), ()]
    assert reply.seats[0].waiting == 1


def test_an_abort_by_its_client_ends_it_though_it_is_on_its_way() -> None:
    desk = Two()
    (first,) = stuck_at_0(desk)
    desk.load(1, room=3)
    desk.load(0, first)
    assert desk.asked_back()
    desk.asks(Abort(4, first.request_id))
    desk.gives_back(0, first)
    assert not desk.placed()
    finals = [reply for reply in desk.told() if isinstance(reply, Final)]
    assert [final.finish_reason for final in finals] == ["abort"]
    (other,) = stuck_at_0(desk)
    desk.load(0, other)
    assert desk.asked_back() == [(0, (name(other),))], "the room is there for others"
