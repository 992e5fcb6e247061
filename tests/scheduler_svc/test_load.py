"""What a scheduler says of its room and of those that wait for some, and how it gives sequences back."""

from phalanx.protocol.messages import HandBack, SeatLoad, Submit
from phalanx.scheduler_svc.load import PERIOD_NS, REPEAT_NS, STUCK_MAX
from sim.scheduler_checks import check
from sim.scheduler_story import MS, Story, request_id


def load(story: Story) -> SeatLoad:
    """As it will be said next."""
    story.later(REPEAT_NS // MS)
    return story.of(SeatLoad)[-1]


def names(*numbers: int, attempt: int = 0) -> tuple[tuple[str, int, int], ...]:
    return tuple((request_id(number), 0, attempt) for number in numbers)


def full(**options: object) -> Story:
    """A pool of 10 blocks, of which two sequences that run hold 4 each; another one waits."""
    story = Story(num_blocks=11, **options)  # type: ignore[arg-type]
    story.submit(0, 500, max_tokens=100)
    story.submit(1, 500, max_tokens=100)
    story.submit(2, 300, max_tokens=100)
    story.step(2)
    return story


def test_room_is_what_the_watermark_leaves() -> None:
    story = Story(num_blocks=11, num_slots=3)
    said = load(story)
    assert (said.room_blocks, said.room_sequences, said.stuck) == (9, 3, ())
    story.submit(0, 300, max_tokens=100)
    story.step(2)
    said = load(story)
    assert (said.room_blocks, said.room_sequences) == (6, 2)
    story.submit(1, 20)
    story.submit(2, 20)
    story.step(2)
    said = load(story)
    assert (said.room_blocks, said.room_sequences) == (0, 0), "no slot is left"


def test_spare_is_what_nobody_here_will_ever_need() -> None:
    story = Story(num_blocks=21, num_slots=3, max_num_batched_tokens=64)
    assert load(story).spare_blocks == 20
    story.submit(0, 120, max_tokens=10)  # 2 blocks in the end
    story.submit(1, 120, max_tokens=9)  # 1 block
    said = load(story)
    assert (said.running, said.waiting, said.spare_blocks) == (1, 1, 20 - 2 - 1)
    story.step(3)
    assert story.core.rank.num_running == 2 and load(story).spare_blocks == 20 - 2 - 1
    story.submit(2, 300, max_tokens=200)
    story.submit(3, 300, max_tokens=200)
    assert load(story).spare_blocks == 0, "no slot is left"


def test_a_watermark_of_one_leaves_a_block_for_each_that_runs() -> None:
    story = Story(num_blocks=11, prefill_watermark=1.0)
    story.submit(0, 300, max_tokens=100)
    story.submit(1, 20, max_tokens=100)
    story.step(2)
    assert load(story).room_blocks == 10 - 4 - 2


def test_those_that_wait_have_their_room_before_others() -> None:
    story = Story(num_blocks=21, max_num_batched_tokens=64)
    story.submit(0, 500, max_tokens=2)
    story.submit(1, 500, max_tokens=2)
    said = load(story)
    assert said.waiting == 1 and not said.stuck, "it waits for rows, not for room"
    assert said.room_blocks == 18 - 4 - 4


def test_who_waits_for_room_is_named() -> None:
    story = full()
    story.submit(3, 20)
    said = load(story)
    assert said.stuck == names(2, 3) and said.room_blocks == 0
    story.run()
    assert load(story).stuck == ()


def test_a_report_has_room_for_so_many_names() -> None:
    story = Story(num_blocks=6, max_waiting=100, prefill_watermark=0.5)
    story.submit(0, 500, max_tokens=50)
    for number in range(1, STUCK_MAX + 9):
        story.submit(number, 10)
    said = load(story)
    assert said.stuck == names(*range(1, STUCK_MAX + 1)) and said.waiting == STUCK_MAX + 8
    assert (said.room_blocks, said.room_sequences) == (0, 0)


def test_while_somebody_waits_it_is_said_again_and_again() -> None:
    story = full()
    story.later(PERIOD_NS // MS)
    said = len(story.of(SeatLoad))
    for count in range(1, 4):
        story.later(PERIOD_NS // MS)
        assert len(story.of(SeatLoad)) == said + count
    story.run()
    story.later(REPEAT_NS // MS)
    said = len(story.of(SeatLoad))
    story.later(REPEAT_NS // MS - 1)
    assert len(story.of(SeatLoad)) == said


def test_what_waits_is_given_back_and_what_runs_goes_on() -> None:
    story = full()
    free = story.free
    story.event(HandBack(names(0, 1, 2)))
    assert [story.ends(number) for number in range(3)] == [[], [], ["abort"]]
    assert story.free == free and load(story).waiting == 0
    story.event(HandBack(names(2)))  # it came twice
    story.run()
    assert set(story.ends(2)) == {"abort"}, "said again until it is acknowledged"
    for number in (0, 1):
        assert story.outputs(number) == story.expected(number, 100)
        assert story.ends(number) == ["length"]


def test_an_attempt_that_is_over_or_unknown_is_not_given_back() -> None:
    story = full()
    story.event(HandBack((*names(2, attempt=1), *names(7))))
    assert load(story).waiting == 1
    story.run()
    assert story.ends(2) == ["length"]


def test_a_preempted_one_is_given_back_with_all_its_tokens() -> None:
    story = Story(num_blocks=4, max_num_seqs=3)
    for number in range(3):
        story.submit(number, 125, max_tokens=30 + number)
    while not story.columns.preemptions.sum():
        story.step()
    waiting = story.core.rank.waiting
    number = int(waiting[0].request_id, 16)
    count = waiting[0].num_outputs
    said = load(story)
    assert said.stuck[0] == names(number)[0]
    story.event(HandBack(names(number)))
    check(story.core)
    assert story.ends(number) == ["abort"]
    assert story.outputs(number) == story.expected(number, 40)[:count]
    # Here again, with what it had: as after any move.
    story.submit(number, 125, max_tokens=30 + number, attempt=1, outputs=story.outputs(number))
    story.run()
    assert story.outputs(number) == story.expected(number, 30 + number)


def test_who_waits_for_a_prompt_that_is_under_way_is_not_named() -> None:
    """The sequences of one request share its blocks: what is lacking is not room."""
    story = Story(num_blocks=8, max_num_batched_tokens=64, prefill_watermark=0.5)
    story.submit(0, 500, max_tokens=4)
    leader = story.core.rank.prefilling[0]
    story.event(
        Submit(5, leader.request_id, 1, 0, leader.prompt, leader.sampling),
    )
    story.step()
    said = load(story)
    assert said.waiting == 1 and said.stuck == ()
    story.submit(3, 20)
    assert load(story).stuck == names(3)
