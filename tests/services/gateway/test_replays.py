"""A request that has ended is run again and compared: as a story, without sockets."""

import msgspec
import pytest
from gateway_desk import MS, Desk

from phalanx.protocol.errors import Code
from phalanx.protocol.messages import (
    AbortSequence,
    Difference,
    Error,
    Final,
    Refusal,
    Replay,
    Replayed,
    Sampling,
    Submit,
    TokenLogprobs,
    Tokens,
    TokensItem,
)
from phalanx.services.client_core import Question
from phalanx.services.gateway.replays import RUNS_MAX
from sim.gateway_world import Faults, World, check_nothing_left, nothing_left, random_spec

SAMPLING = Sampling(max_tokens=9, seed=3, stop_token_ids=(12,))


def ended(desk: Desk, sampling: Sampling = SAMPLING) -> tuple[str, Submit]:
    """A request that gave 10, 11, 12; its id and how it was submitted."""
    rid = desk.start(sampling)
    ((seat, submit),) = desk.submits()
    desk.produces(seat, submit, 0, 10, 11, 12, finish="stop", seq=seat[-3])
    desk.decodes()
    assert isinstance(desk.told()[-1], Final)
    desk.sent(AbortSequence)
    desk.ops.clear()
    return rid, submit


def replayed(desk: Desk) -> Replayed:
    (found,) = desk.told()
    assert isinstance(found, Replayed)
    return found


def refused(desk: Desk) -> Error:
    (error,) = desk.told()
    assert isinstance(error, Error)
    return error


def run_seed(seed: int) -> int:
    """Requests under faults, each run again as soon as it has ended. Returns how many were compared."""
    world = World(seed, Faults())
    client = world.client()
    asked: dict[str, Question] = {}

    def replay_what_ended() -> bool:
        for _, _, flow in world.flows:
            if flow.done and flow.error is None and flow.request_id not in asked:
                rid = flow.request_id
                asked[rid] = client.core.ask(lambda call, rid=rid: Replay(call, rid), world.now)  # type: ignore[misc]
        return False

    for _ in range(8):
        world.generate(client, random_spec(world.rng))
        world.run(world.rng.randint(0, 600) * MS, until=replay_what_ended)
    world.run(1000 * MS, until=replay_what_ended)
    world.calm()
    world.run(40_000 * MS, until=replay_what_ended)
    compared = 0
    assert len(asked) == sum(flow.error is None for _, _, flow in world.flows)
    for question in asked.values():
        # It may be forgotten by then, or have ended with an error; but no token ever differs.
        assert question.reply is not None, "a replay was never answered"
        if isinstance(question.reply, Replayed):
            compared += 1
            assert question.reply.equal, question.reply
    world.run(15_000 * MS, until=lambda: nothing_left(world))
    check_nothing_left(world)
    return compared


def test_replays_under_faults_find_no_difference() -> None:
    assert sum(run_seed(seed) for seed in range(20)) > 100


def test_it_is_submitted_as_it_was_under_an_id_of_its_own() -> None:
    desk = Desk()
    rid, first = ended(desk)
    desk.asks(Replay(5, rid))
    ((seat, again),) = desk.submits()
    assert again.request_id != rid and (again.prompt, again.index) == (first.prompt, 0)
    assert again.sampling == msgspec.structs.replace(first.sampling, max_tokens=3)
    assert (first.afresh, again.afresh) == (False, True)
    assert desk.told() == [] and not desk.core.idle
    desk.asks(Replay(5, rid))  # repeated: no answer came yet
    assert desk.told() == [] and not desk.submits()
    desk.produces(seat, again, 0, 10, 11, 12, finish="stop", seq=50)
    found = replayed(desk)
    assert (found.call, found.request_id, found.equal) == (5, rid, True)
    assert (found.fingerprint, found.fingerprint_then) == ("f1", "f1")
    (one,) = found.sequences
    assert (one.tokens, one.compared, one.difference) == (3, "tokens", None)
    assert desk.core.idle and not desk.ops, "a replay is not journalled"


def test_a_difference_is_told() -> None:
    desk = Desk()
    rid, _ = ended(desk)
    desk.asks(Replay(5, rid[:6]))
    ((seat, again),) = desk.submits()
    desk.produces(seat, again, 0, 10, 63, 12, finish="stop", seq=50)
    found = replayed(desk)
    assert not found.equal and found.request_id == rid
    assert found.sequences[0].difference == Difference(1, "token", "11", "63")


@pytest.mark.parametrize(("last", "equal"), [(11, True), (63, False)])
def test_one_that_is_ended_to_make_room_is_compared_as_far_as_it_came(
    last: int, equal: bool
) -> None:
    """On a node with `scheduler.preempt: stop`, where a stream ends depends on what runs beside it."""
    desk = Desk()
    rid, _ = ended(desk)
    desk.asks(Replay(5, rid))
    ((seat, again),) = desk.submits()
    full = (Code.KV_PRESSURE, "the KV pool of 9 blocks is full")
    desk.produces(seat, again, 0, 10, last, finish="length", seq=50, code=full[0], error=full[1])
    found = replayed(desk)
    (one,) = found.sequences
    assert found.equal is equal and (one.difference is None) is equal
    assert one.tokens == 2 and one.ended_early == f"after 2 of 3 tokens: {full[1]}"


def test_a_digest_alone_is_no_proof_of_a_part() -> None:
    desk = Desk()
    rid, _ = ended(desk)
    desk.passes(61_000)
    desk.core._reruns._history._lighten(rid)
    desk.clear()
    desk.asks(Replay(5, rid))
    ((seat, again),) = desk.submits()
    desk.produces(seat, again, 0, 10, finish="length", seq=50, code=Code.KV_PRESSURE, error="full")
    (one,) = replayed(desk).sequences
    assert one.ended_early and one.difference is not None and one.difference.what == "digest"


def test_logprobs_are_compared_bit_for_bit() -> None:
    for bent in (0.0, 2.0**-50):
        desk = Desk()
        rid = desk.start(Sampling(max_tokens=1, logprobs=0))
        ((seat, submit),) = desk.submits()
        item = TokensItem(rid, 0, submit.attempt, 0, (10,), "length")
        told = msgspec.structs.replace(item, logprobs=(TokenLogprobs(-0.5),))
        desk.says(seat, Tokens(0, 1, 1, (told,)))
        desk.decodes()
        desk.told()
        desk.asks(Replay(5, rid, 0))
        ((seat, again),) = desk.submits()
        told = msgspec.structs.replace(
            item,
            request_id=again.request_id,
            attempt=again.attempt,
            logprobs=(TokenLogprobs(-0.5 + bent),),
        )
        desk.says(seat, Tokens(0, 1, 2, (told,)))
        (one,) = replayed(desk).sequences
        assert one.logprobs == 1 and (one.difference is None) == (bent == 0.0)


def test_it_can_be_long_ago_and_without_its_tokens() -> None:
    desk = Desk()
    rid, _ = ended(desk)
    desk.passes(61_000)
    desk.core._reruns._history._lighten(rid)
    desk.clear()
    for last, equal in ((12, True), (63, False)):
        desk.asks(Replay(5, rid))
        ((seat, again),) = desk.submits()
        desk.produces(seat, again, 0, 10, 11, last, finish="length", seq=50 + last)
        found = replayed(desk)
        assert found.equal is equal and found.sequences[0].compared == "digest"
    desk.passes(3_600_000)
    desk.clear()
    desk.asks(Replay(6, rid))
    error = refused(desk)
    assert error.code is Code.UNKNOWN_REQUEST and "gateway.history" in error.message


def test_what_has_not_ended_or_never_was_is_refused() -> None:
    desk = Desk()
    rid = desk.start()
    desk.asks(Replay(5, rid))
    assert refused(desk).code is Code.NOT_READY
    desk.asks(Replay(6, "nobody"))
    assert refused(desk).code is Code.UNKNOWN_REQUEST
    desk.asks(Replay(7, ""))
    assert refused(desk).code is Code.UNKNOWN_REQUEST


def test_a_rank_can_be_named_and_may_be_lost() -> None:
    desk = Desk()
    rid, _ = ended(desk)
    for seat in (1, 0, 1):
        desk.asks(Replay(5 + seat, rid, seat))
        ((peer, again),) = desk.submits()
        assert peer == b"scheduler-%d#1" % seat
        desk.produces(peer, again, 0, 10, 11, 12, finish="stop", seq=50)
        assert replayed(desk).sequences[0].seat == seat
    desk.asks(Replay(9, rid, 1))
    desk.submits()
    lost = msgspec.structs.replace(desk.topology.seats[1], state="lost")
    topology = msgspec.structs.replace(desk.topology, seats=(desk.topology.seats[0], lost))
    desk.core.on_topology(topology, desk.now)
    desk.turn()
    found = replayed(desk)
    assert found.sequences[0].difference is not None
    assert found.sequences[0].difference.what == "error" and "rank 1" in str(found)
    desk.asks(Replay(10, rid, 1))
    error = refused(desk)
    assert error.code is Code.NOT_READY and "rank 1 is not in the group now; in it are: 0" in str(
        error
    )
    assert not desk.submits() and desk.core.idle


def test_a_rank_that_there_is_not_is_no_difference() -> None:
    """An operator mistypes it: "not equal" would say that the node computes wrong numbers."""
    desk = Desk(seats=3)
    rid, _ = ended(desk)
    desk.asks(Replay(5, rid, 7))
    error = refused(desk)
    assert (error.code, error.message) == (
        Code.BAD_REQUEST,
        "there is no rank 7; there are: 0, 1, 2",
    )
    gone = msgspec.structs.replace(desk.topology.seats[1], state="absent", scheduler_incarnation=0)
    seats = (desk.topology.seats[0], gone, desk.topology.seats[2])
    desk.core.on_topology(msgspec.structs.replace(desk.topology, seats=seats), desk.now)
    desk.asks(Replay(6, rid, 1))
    assert refused(desk).message == "there is no rank 1; there are: 0, 2"
    assert not desk.submits() and desk.core.idle


def test_it_moves_with_its_tokens_when_any_rank_may_run_it() -> None:
    desk = Desk()
    rid, _ = ended(desk)
    desk.asks(Replay(5, rid))
    ((peer, again),) = desk.submits()
    desk.produces(peer, again, 0, 10, seq=50)
    seat = int(peer[-3:-2])
    seats = list(desk.topology.seats)
    seats[seat] = msgspec.structs.replace(seats[seat], state="lost")
    desk.core.on_topology(msgspec.structs.replace(desk.topology, seats=tuple(seats)), desk.now)
    desk.turn()
    ((other, more),) = desk.submits()
    assert other != peer and len(more.outputs) == 4
    desk.produces(other, more, 1, 11, 12, finish="stop", seq=50)
    assert replayed(desk).equal


def test_replays_are_bounded_refused_when_hopeless_and_ended_at_shutdown() -> None:
    desk = Desk(capacity=100)
    rid, _ = ended(desk)
    for call in range(RUNS_MAX):
        desk.asks(Replay(100 + call, rid))
    assert desk.told() == []
    desk.asks(Replay(99, rid))
    assert refused(desk).code is Code.OVERLOADED
    (peer, submit), *_ = desk.submits()
    desk.says(peer, Refusal(submit.call, Code.TOO_LARGE, "no room"))
    assert "no room" in str(replayed(desk))
    desk.core.drain()
    desk.asks(Replay(98, rid))
    assert refused(desk).code is Code.SHUTDOWN
    desk.core.finish_all(desk.now)
    desk.turn()
    told = desk.told()
    assert len(told) == RUNS_MAX - 1 and {type(m) for m in told} == {Error}
    assert desk.core.idle and desk.core._delivery.idle
