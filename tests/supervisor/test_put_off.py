"""Who is put off since its workers fall while they join, and who is not."""

from supervisor.test_core import MS, Story, falls_joining, kept_out, without_rank_2

from phalanx.protocol.board import ProcessPhase
from phalanx.protocol.errors import ExitCode
from phalanx.protocol.limits import BUSY_SILENCE_MS, GO_ACK_MS, NEWCOMER_STARTS, RESTARTS_MAX
from phalanx.protocol.messages import Error, Restart
from phalanx.supervisor.events import ChangeAsked, Observed, Reaped, Reply
from phalanx.supervisor.group import GroupPhase
from phalanx.supervisor.process import Stage


def seconds_down(story: Story, died_ns: int) -> float:
    while story.core.workers[2].stage is Stage.WAITING:
        story.wait(100)
    return (story.now_ns - died_ns) / 1e9


def put_off(story: Story) -> Story:
    """Rank 2 has fallen as often as it takes for the next one to wait for more than a minute."""
    for _ in range(2):
        falls_joining(story, GO_ACK_MS - 100)
    return story


def test_a_node_whose_first_group_is_never_whole_is_given_up() -> None:
    """`phalanx up` waits for what comes of it. With ever longer pauses the deaths were too few within a minute."""
    story = Story()
    story.ready(*story.core.processes).wait(200).dies("worker-2").acks(stop=3, seats=(0, 1))
    story.acks(go=4, seats=(0, 1))
    worker = story.core.workers[2]
    while not story.core.failed:
        assert worker.incarnation <= RESTARTS_MAX + 1
        while worker.stage is Stage.WAITING:
            story.wait(100)
        story.ready("worker-2").acks(stop=story.epoch, seats=(0, 1))
        story.acks(go=story.epoch + 1, seats=(0, 1)).wait(200).dies("worker-2")
        story.acks(stop=story.epoch, seats=(0, 1)).acks(go=story.epoch + 1, seats=(0, 1))
    assert story.core.code == ExitCode.GAVE_UP


def test_one_that_falls_before_it_joins_is_started_again_as_anyone() -> None:
    """Nobody stood for it: it was put off once more, by as much as for all before it together."""
    story = put_off(without_rank_2())
    died_ns = story.now_ns
    story.dies("worker-2")
    assert seconds_down(story, died_ns) <= 0.1


def test_who_falls_after_another_one_is_not_to_blame() -> None:
    story = without_rank_2()
    for _ in range(3):
        story.ready("worker-2").acks(stop=story.epoch, seats=(0, 1))
        story.acks(go=story.epoch + 1, seats=(0,)).wait(GO_ACK_MS - 100)
        assert story.core.group.phase is GroupPhase.GOING
        died_ns = story.now_ns
        story.dies("worker-1").dies("worker-2").acks(stop=story.epoch, seats=(0,))
        story.ready("worker-1").acks(go=story.epoch + 1, seats=(0,))
        story.acks(stop=story.epoch, seats=(0,)).acks(go=story.epoch + 1, seats=(0, 1))
        assert seconds_down(story, died_ns) <= 1
        assert story.core.group.phase is GroupPhase.RUNNING


def test_one_that_the_others_could_not_do_without_is_not_put_off_when_they_are_back() -> None:
    """Nor silently: what said why it was down did not say so."""
    story = without_rank_2()
    for _ in range(3):
        falls_joining(story, 200)
    worker = story.core.workers[2]
    story.ready("worker-2").acks(stop=story.epoch, seats=(0, 1))
    story.acks(go=story.epoch + 1, seats=(0, 1)).wait(2000)
    died_ns = story.now_ns
    story.dies("worker-2", reaped=False).dies("worker-0").dies("worker-1")
    story.feed(Reaped("worker-2", worker.incarnation, -9))
    assert worker.stage is Stage.WAITING and worker.due_ns > story.now_ns
    story.ready("worker-0").acks(go=story.epoch + 1, seats=(0,))
    assert story.core.group.phase is GroupPhase.RUNNING
    assert seconds_down(story, died_ns) * 1e9 <= worker.due_ns - died_ns + 100 * MS


def in_a_circle(story: Story) -> list[int]:
    """All wait for each other, until one of them counts as lost. Returns whom the group is without."""
    epoch = story.epoch
    while story.epoch == epoch:
        for seat in range(3):
            name, awaits = f"worker-{seat}", 0b111 & ~(1 << seat)
            incarnation = story.core.workers[seat].incarnation
            beat = Observed(name, incarnation, story.now_ns, 5, ProcessPhase.WAITING, awaits)
            story.feed(beat)
        story.now_ns += 100 * MS
        story.actions += story.core.tick(story.now_ns)
    return [seat for seat in range(3) if seat not in story.core.group.members]


def test_one_that_joined_and_cannot_be_reached_is_put_off_and_no_other_one_falls_for_it() -> None:
    """All stand from its first step on, each waiting for the others: the first of them fell, again and again."""
    story = without_rank_2()
    pauses: list[float] = []
    for _ in range(3):
        story.ready("worker-2").acks(stop=story.epoch, seats=(0, 1)).acks(go=story.epoch + 1)
        assert story.core.group.phase is GroupPhase.RUNNING
        assert in_a_circle(story) == [2]
        died_ns = story.now_ns
        story.feed(Reaped("worker-2", story.core.workers[2].incarnation, -9)).wait(100)
        story.acks(stop=story.epoch, seats=(0, 1)).acks(go=story.epoch + 1, seats=(0, 1))
        pauses.append(seconds_down(story, died_ns))
    stood_s = BUSY_SILENCE_MS / 1000
    assert [round(pause / stood_s) for pause in pauses] == [0, 4, 12], pauses


def test_streams_that_fit_only_there_wait_for_less_than_a_minute() -> None:
    """They ended with an error from a pause of five seconds on, though the rank came back."""
    story = without_rank_2()
    for _ in range(5):
        falls_joining(story, 200)
    for pause, out in ((38.4, []), (89.6, [2])):
        story.ready("worker-2").acks(stop=story.epoch, seats=(0, 1))
        story.acks(go=story.epoch + 1, seats=(0, 1)).wait(200).dies("worker-2")
        story.acks(stop=story.epoch, seats=(0, 1)).acks(go=story.epoch + 1, seats=(0, 1))
        died_ns = story.now_ns
        assert f"put off by {pause} s" in story.core.workers[2].detail and kept_out(story) == out
        assert seconds_down(story, died_ns) == pause


def test_a_restart_that_is_asked_for_begins_anew() -> None:
    """It ends with what is wrong, not by its deadline."""
    story = put_off(without_rank_2())
    story.ready("worker-2").dies("worker-2").acks(stop=story.epoch, seats=(0, 1))
    story.acks(go=story.epoch + 1, seats=(0, 1))
    assert story.core.workers[2].stage is Stage.WAITING
    story.feed(ChangeAsked(b"me", Restart(7, ("worker-2",), 600.0))).wait(100)
    pauses = [falls_joining(story, 200) for _ in range(NEWCOMER_STARTS)]
    assert max(pauses) < 3, pauses
    (reply,) = story.take(Reply)
    assert isinstance(reply.message, Error) and "died 3 times" in reply.message.message
