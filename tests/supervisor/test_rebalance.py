"""A plan of the planner on its way into the running group, as stories: copied, flipped, withdrawn, overtaken."""

import msgspec
import pytest
from supervisor.test_core import Story, running

from phalanx.protocol.errors import Code
from phalanx.protocol.limits import COPY_MS, COPY_MS_MAX, FLIP_IDLE_MS, FLIP_STEPS
from phalanx.protocol.messages import Error, Rebalance, Rebalanced, Scale
from phalanx.protocol.placement import EMPTY, Placement, copies, moves
from phalanx.supervisor.events import (
    AcksSeen,
    ChangeAsked,
    PlacementsSeen,
    PlacementWords,
    Propose,
    Publish,
    RebalanceAsked,
    Reply,
    SetEpoch,
    ShutdownAsked,
)
from phalanx.supervisor.placements import objection
from phalanx.supervisor.status import status


def current(story: Story) -> Placement:
    placement = story.core.placements.current
    assert placement is not None
    return placement


def plan(story: Story) -> Placement:
    """Seat 0 gives its first expert to seat 1, which lacks it, if others have it, else a copy of it."""
    before = current(story)
    layers = []
    for layer in before.physical_to_logical:
        rows = [[*row, EMPTY] for row in layer]
        give = next(e for e in rows[0] if e not in rows[1])
        rows[1][-1] = give
        rows[0][rows[0].index(give)] = EMPTY
        layers.append(tuple(map(tuple, rows)))
    return msgspec.structs.replace(
        before,
        version=before.version + 1,
        slots_per_rank=before.slots_per_rank + 1,
        physical_to_logical=tuple(layers),
    )


def request(story: Story, placement: Placement | None = None, call: int = 1) -> Rebalance:
    encoded = msgspec.msgpack.encode(placement or plan(story))
    return Rebalance(call, story.epoch, encoded, 1.5, 1.1, 3.0)


def ask(story: Story, wanted: Rebalance, slots: int = 0) -> Story:
    told = tuple((seat, slots) for seat in range(story.ranks))
    return story.feed(RebalanceAsked(b"eplb#1", wanted, told))


def words(
    story: Story, ready: int, run: int, *seats: int, copied: int = 0, steps: int = 0
) -> Story:
    """These seats write so, the others stay as they were; then everybody is looked at."""
    written = vars(story).setdefault("written", {})
    for seat in seats or tuple(story.core.group.members):
        written[seat] = (ready, run, copied, steps)
    found = [
        PlacementWords(seat, incarnation, *written.get(seat, (0, 0, 0, 0)))
        for seat, incarnation in story.core.group.members.items()
    ]
    return story.feed(PlacementsSeen(tuple(found)))


def proposed(story: Story) -> int:
    """The version that is out for the group of this epoch."""
    (propose,) = story.take(Propose)
    assert propose.proposal is not None and propose.proposal.epoch == story.epoch
    assert propose.seats == tuple(story.core.group.members)
    return msgspec.msgpack.decode(propose.proposal.placement, type=Placement).version


def answer(story: Story) -> Rebalanced | Error:
    (reply,) = story.take(Reply)
    assert reply.peer == b"eplb#1"
    assert isinstance(reply.message, Rebalanced | Error)
    return reply.message


def under_way() -> tuple[Story, int, int]:
    """(story, the version that runs, the one that is out)."""
    story = running()
    old = current(story).version
    return story, old, proposed(ask(story, request(story)))


def test_it_is_copied_and_flipped_without_a_new_epoch() -> None:
    story, old, new = under_way()
    wanted = plan(story)
    words(story, old, old).wait(200)
    words(story, new, old, 0, 1, copied=1).wait(100)
    assert "copying" in story.core.rebalances.told
    words(story, new, old, copied=2).wait(300)
    assert "waiting for a step" in story.core.rebalances.told
    words(story, new, new, 0, copied=2, steps=1)
    assert story.take(Reply) == [], "one rank runs it, as far as we have looked"
    words(story, new, new, copied=2, steps=1)
    actions = story.actions
    published = [a.topology for a in actions if isinstance(a, Publish)]
    assert [a for a in actions if isinstance(a, Propose)] == [Propose(None)]
    assert not any(isinstance(a, SetEpoch) for a in actions)
    assert answer(story) == Rebalanced(1, new, 2)
    assert [t.epoch for t in published] == [2]
    in_force = msgspec.msgpack.decode(published[0].placement, type=Placement)
    assert in_force == current(story) == msgspec.structs.replace(wanted, version=new)
    found = status(story.core, story.config, 1, 1, story.now_ns)
    (record,) = found.rebalances
    assert (record.outcome, record.version, record.moved) == ("applied", new, 2)
    assert (record.before, record.after, record.plan_ms) == (1.5, 1.1, 3.0)
    assert (record.copy_ms, record.flip_ms) == (300.0, 300.0)
    assert (found.rebalanced.applied, found.rebalanced.moved, found.rebalance) == (1, 2, "")


def test_the_same_question_again_is_the_same_plan_and_its_answer() -> None:
    story = running()
    wanted = request(story)
    new = proposed(ask(story, wanted))
    assert ask(story, wanted).take(Propose) == []
    words(story, new, new)
    said = answer(story)
    assert answer(ask(story, wanted)) == said
    assert story.core.rebalances.totals.applied == 1


def test_one_at_a_time_and_the_next_one_starts_from_the_last() -> None:
    story, old, new = under_way()
    refused = answer(ask(story, request(story, call=2)))
    assert isinstance(refused, Error) and "another plan" in refused.message
    words(story, new, new).actions.clear()
    stale = msgspec.structs.replace(plan(story), version=old + 1)
    refused = answer(ask(story, request(story, stale, call=3)))
    assert isinstance(refused, Error) and f"the group runs {new}" in refused.message
    assert proposed(ask(story, request(story, call=4))) == new + 1


def test_what_cannot_be_applied_is_refused_with_numbers() -> None:
    story = running()
    right, running_now = plan(story), current(story)

    def objects(placement: Placement, slots: int = 9) -> str:
        return objection(running_now, placement, dict.fromkeys(range(3), slots))

    def changed(seat: int, slot: int, expert: int) -> Placement:
        rows = [list(row) for row in right.physical_to_logical[0]]
        rows[seat][slot] = expert
        layers = (tuple(map(tuple, rows)), *right.physical_to_logical[1:])
        return msgspec.structs.replace(right, physical_to_logical=layers)

    assert objects(right) == ""
    assert "slot 3 is to be used, and there are 3" in objects(right, slots=3)
    held = running_now.physical_to_logical[0]
    lacks = next(e for e in range(6) if e not in held[2])
    assert f"slot 0 is in use for expert {held[2][0]}" in objects(changed(2, 0, lacks))
    assert f"expert {held[2][1]} leaves its slot" in objects(
        msgspec.structs.replace(
            changed(2, 3, held[2][1]),
            physical_to_logical=(
                tuple(
                    row if seat != 2 else (row[0], EMPTY, row[2], held[2][1])
                    for seat, row in enumerate(right.physical_to_logical[0])
                ),
                right.physical_to_logical[1],
            ),
        )
    )
    assert "twice" in objects(changed(2, 3, held[2][0]))
    assert "not every one of 6 experts" in objects(changed(2, 3, 17))
    single = next(e for e in range(6) if len(copies(right, 0)[e]) == 1)
    ((seat, slot),) = copies(right, 0)[single]
    assert "not every one of 6 experts" in objects(changed(seat, slot, EMPTY))
    assert "has not 3 slots" in objects(msgspec.structs.replace(right, slots_per_rank=3))
    assert "other seats" in objects(msgspec.structs.replace(right, seats=(0, 1, 3)))
    refused = answer(ask(story, request(story), slots=3))
    assert isinstance(refused, Error) and refused.code == Code.BAD_REQUEST
    broken = Rebalance(9, 2, b"nonsense", 1.0, 1.0, 0.0)
    refused = answer(ask(story, broken))
    assert isinstance(refused, Error) and refused.code == Code.BAD_REQUEST
    late = msgspec.structs.replace(request(story), epoch=4)
    refused = answer(ask(story, late))
    assert isinstance(refused, Error) and "epoch 4, the group is in epoch 2" in refused.message


def withdrawn(story: Story, version: int) -> str:
    """It is taken from the board and everyone lets go of it: what was said."""
    (out,) = story.take(Propose)
    assert out == Propose(None, (0, 1, 2))
    before = current(story)
    words(story, version, version)
    said = answer(story)
    assert isinstance(said, Error) and current(story) == before
    assert story.core.rebalances.totals.withdrawn == 1 and not story.core.rebalances.told
    return said.message


def test_a_rank_that_gets_on_with_its_copies_is_waited_for_others_not() -> None:
    story, old, new = under_way()
    words(story, new, old, 0, 1)
    for copied in range(1, 4):
        words(story, old, old, 2, copied=copied).wait(COPY_MS - 1000)
        assert story.take(Propose) == []
    story.wait(2000)
    assert "worker-2 did not get its copies within 30 s" in withdrawn(story, old)


def test_but_not_for_ever() -> None:
    story, old, _ = under_way()
    words(story, old, old, 1, 2)
    for copied in range(COPY_MS_MAX // 10_000):
        words(story, old, old, 0, copied=copied).wait(10_000)
    assert story.take(Propose) == []
    story.wait(200)
    assert "had not all copies after 600 s" in withdrawn(story, old)


def test_an_idle_group_flips_when_it_works_again_or_not_at_all() -> None:
    story, old, new = under_way()
    words(story, new, old, steps=9).wait(FLIP_IDLE_MS - 1000)
    assert story.take(Propose) == []
    story.wait(2000)
    assert "no step was taken for 60 s" in withdrawn(story, old)


def test_ranks_that_are_ready_and_step_on_without_it_are_not_trusted() -> None:
    story, old, new = under_way()
    words(story, new, old, steps=9)
    words(story, new, old, steps=9 + FLIP_STEPS - 1)
    assert story.take(Propose) == []
    words(story, new, old, steps=9 + FLIP_STEPS)
    assert f"took {FLIP_STEPS} steps without it" in withdrawn(story, old)


def test_a_withdrawal_meets_the_flip() -> None:
    """The round was under way: all have flipped, one after the other, and so it is applied."""
    story, old, new = under_way()
    words(story, new, old).wait(FLIP_IDLE_MS + 1000)
    story.actions.clear()
    words(story, new, new, 0)
    words(story, old, old, 1, 2)
    assert story.take(Reply) == [] and story.core.rebalances.told
    words(story, new, new)
    assert answer(story) == Rebalanced(1, new, 2)
    assert current(story).version == new


@pytest.mark.parametrize("phase", ["copy", "ready", "flipped at one", "flipped at the lost"])
def test_a_death_ends_it_at_once_and_what_a_survivor_runs_is_in_force(phase: str) -> None:
    story, old, new = under_way()
    before = current(story)
    wanted = msgspec.structs.replace(plan(story), version=new)
    words(story, old if phase == "copy" else new, old)
    story.take(Propose)
    story.dies("worker-2")
    assert story.epoch == 3, "recovery does not wait"
    runs = {
        "copy": (old, old),
        "ready": (old, old),
        "flipped at one": (old, new),
        "flipped at the lost": (old, old),
    }
    for seat, run in enumerate(runs[phase]):
        incarnation = story.core.workers[seat].incarnation
        story.feed(AcksSeen(seat, incarnation, 3, 0, run))
    published = [a.topology for a in story.actions if isinstance(a, Publish)][-1]
    assert published.epoch == 4
    said = answer(story)
    go = msgspec.msgpack.decode(published.placement, type=Placement)
    assert go.version > new and go.seats == (0, 1)
    flipped = phase == "flipped at one"
    assert isinstance(said, Rebalanced if flipped else Error)
    kept = wanted if flipped else before
    missing = [
        (layer, expert)
        for layer in range(2)
        for expert in range(6)
        if all(seat == 2 for seat, _ in copies(kept, layer)[expert])
    ]
    loads = [(layer, e) for seat in moves(kept, go).values() for layer, _, e in seat]
    assert sorted(loads) == missing, "survivors load what only the lost one had, and no more"
    record = story.core.rebalances.records[-1]
    assert record.outcome == ("applied" if flipped else "withdrawn")
    assert "the group changed" in record.why
    story.acks(go=4, seats=(0, 1))
    assert story.epoch == 4 and proposed_again(story) == go.version + 1


def proposed_again(story: Story) -> int:
    story.actions.clear()
    before = current(story)
    layers = before.physical_to_logical
    wide = tuple(tuple((*row, EMPTY) for row in layer) for layer in layers)
    slots = before.slots_per_rank + 1
    same = Placement(before.version + 1, before.num_experts, slots, before.seats, wide)
    return proposed(ask(story, request(story, same, call=7)))


def test_an_operators_scale_goes_before() -> None:
    story, old, new = under_way()
    words(story, new, old)
    story.feed(ChangeAsked(b"me", Scale(7, 2, 60.0)))
    assert story.core.changes.told and story.epoch == 3
    story.acks(stop=3)
    replies = {r.peer: r.message for r in story.actions if isinstance(r, Reply)}
    assert isinstance(replies[b"eplb#1"], Error)
    story.actions.clear()
    refused = answer(ask(story, request(story, call=2)))
    assert isinstance(refused, Error)
    assert "scale from 3 to 2 ranks" in refused.message


def test_a_node_that_stops_withdraws_it() -> None:
    story, old, new = under_way()
    words(story, new, old)
    story.feed(ShutdownAsked(1000)).wait(100)
    assert "the node is stopping" in withdrawn(story, old)
    refused = answer(ask(story, request(story, call=2)))
    assert isinstance(refused, Error) and refused.code == Code.SHUTDOWN


def test_what_was_written_before_a_withdrawal_says_nothing_of_it() -> None:
    """A rank that had not been ready is, meanwhile, and perhaps all run it."""
    story, old, new = under_way()
    words(story, new, old, 0, 1)
    words(story, old, old, 2).wait(COPY_MS + 1000)
    assert story.take(Propose) == [Propose(None, (0, 1, 2))]
    assert story.wait(1000).take(Reply) == []
    words(story, new, new)
    assert answer(story) == Rebalanced(1, new, 2)


def test_words_of_another_incarnation_do_not_count() -> None:
    story, old, new = under_way()
    story.feed(PlacementsSeen(tuple(PlacementWords(seat, 17, new, new, 0, 0) for seat in range(3))))
    assert story.take(Reply) == [] and current(story).version == old
