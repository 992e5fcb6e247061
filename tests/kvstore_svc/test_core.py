"""The core's rules, told as short stories: given events, exactly these actions."""

import msgspec
import pytest
from kvstore_svc.simulation import CONFIG, SECOND_NS, Simulation, key_of, payload

from phalanx.kvstore_svc.config import StoreConfig
from phalanx.kvstore_svc.core import Core
from phalanx.kvstore_svc.events import (
    Action,
    CopiedIn,
    CopiedOut,
    CopyIn,
    CopyOut,
    Create,
    Created,
    Event,
    Get,
    GetReply,
    HolderGone,
    Put,
    PutReply,
    Sync,
    Synced,
    Write,
    Written,
)
from phalanx.kvstore_svc.layout import PAGE, Kind
from phalanx.protocol.errors import ConfigError

KEY, OTHER = bytes(32), bytes(31) + b"\1"
NOW = 10**18


class Story:
    """A core and its actions so far; `feed` returns those of one event and of the flush behind it."""

    def __init__(self, config: StoreConfig = CONFIG) -> None:
        self.core = Core(config, bytes(16), [], NOW)
        self.now_ns = NOW

    def feed(self, *events: Event) -> list[Action]:
        actions: list[Action] = []
        for event in events:
            actions += self.core.handle(event, self.now_ns)
        return actions + self.core.flush(self.now_ns)

    def put(self, number: int, key: bytes = KEY, **options: object) -> list[Action]:
        """Put and copy in; what follows from that."""
        call = (b"a", number)
        fields = {"kind": Kind.BLOCK, "length": 100, "holder": "arena"} | options
        (copy,) = self.feed(Put(call=call, key=key, **fields))  # type: ignore[arg-type]
        assert isinstance(copy, CopyIn)
        return self.feed(CopiedIn(call, bytes(16)))

    def opened(self) -> "Story":
        """With a segment that takes records."""
        create = self.put(999, OTHER)[-1]
        assert isinstance(create, Create)
        (write,) = self.feed(Created(create.head.segment, 1 << 40))
        assert isinstance(write, Write)
        self.feed(Written(write.write))
        return self


def test_memory_is_answered_after_the_copy_and_readable_at_once() -> None:
    story = Story()
    reply, create = story.put(1)
    assert reply == PutReply((b"a", 1), stored=True) and isinstance(create, Create)
    (out,) = story.feed(Get((b"b", 1), KEY, 100))
    assert isinstance(out, CopyOut) and out.length == 100
    assert story.feed(CopiedOut((b"b", 1))) == [GetReply((b"b", 1), found=True, nbytes=100)]


def test_disk_is_answered_after_the_sync_and_not_before() -> None:
    story = Story().opened()
    (write,) = story.put(1, durable=True)
    assert isinstance(write, Write) and write.sync
    assert story.feed(Written(write.write)) == [PutReply((b"a", 1), stored=True, durable=True)]


def test_puts_of_one_turn_share_a_write() -> None:
    story = Story().opened()
    keys = [bytes([n]) * 32 for n in range(1, 5)]
    for n, key in enumerate(keys):
        story.core.handle(Put((b"a", n), key, Kind.BLOCK, 100, n == 2), NOW)
        story.core.handle(CopiedIn((b"a", n), bytes(16)), NOW)
    (write,) = (a for a in story.core.flush(NOW) if isinstance(a, Write))
    assert [header.key for _, header in write.records] == keys and write.sync
    offsets = [header.place.offset for _, header in write.records]
    assert offsets == [offsets[0] + n * PAGE for n in range(4)]


def test_nothing_is_visible_before_its_copy_is_verified() -> None:
    story = Story()
    story.feed(Put((b"a", 1), KEY, Kind.BLOCK, 100))
    assert story.feed(Get((b"b", 1), KEY, 100)) == [GetReply((b"b", 1), found=False)]
    (reply,) = story.feed(CopiedIn((b"a", 1), b"", "stale handle"))
    assert reply == PutReply((b"a", 1), stored=False, reason="stale handle")
    assert story.feed(Get((b"b", 2), KEY, 100)) == [GetReply((b"b", 2), found=False)]
    assert story.core.prefix([KEY], NOW) == (0, 0)


def test_the_second_put_of_a_key_waits_for_the_first_and_tries_itself_if_that_fails() -> None:
    story = Story()
    story.feed(Put((b"a", 1), KEY, Kind.BLOCK, 100))
    assert story.feed(Put((b"a", 2), KEY, Kind.BLOCK, 100)) == []
    reply, copy = story.feed(CopiedIn((b"a", 1), b"", "stale handle"))
    assert isinstance(reply, PutReply) and not reply.stored
    assert isinstance(copy, CopyIn) and copy.call == (b"a", 2)
    reply, *_ = story.feed(CopiedIn((b"a", 2), bytes(16)))
    assert reply == PutReply((b"a", 2), stored=True)


def test_a_stored_key_is_not_written_again_but_made_durable_on_demand() -> None:
    story = Story().opened()
    (reply,) = story.feed(Put((b"a", 1), OTHER, Kind.BLOCK, 100))
    assert reply == PutReply((b"a", 1), stored=True, durable=False)
    (sync,) = story.feed(Put((b"a", 2), OTHER, Kind.BLOCK, 100, durable=True))
    assert isinstance(sync, Sync)
    (reply,) = story.feed(Synced(sync.segment))
    assert reply == PutReply((b"a", 2), stored=True, durable=True)
    (reply,) = story.feed(Put((b"a", 3), OTHER, Kind.BLOCK, 100))
    assert reply == PutReply((b"a", 3), stored=True, durable=True)


def test_records_answered_from_memory_are_synced_within_a_second() -> None:
    story = Story().opened()
    assert story.core.tick(NOW + CONFIG.sync_after_ns - 1) == []
    (sync,) = story.core.tick(NOW + CONFIG.sync_after_ns)
    assert isinstance(sync, Sync)


@pytest.mark.parametrize("error", ["disk full: No space left", "disk failed: Input/output error"])
def test_a_failed_write_is_a_miss_and_caching_pauses(error: str) -> None:
    story = Story().opened()
    (write,) = story.put(1, durable=True)
    assert isinstance(write, Write)
    (reply,) = story.feed(Written(write.write, error))
    assert reply == PutReply((b"a", 1), stored=False, reason=error)
    assert story.feed(Get((b"b", 1), KEY, 100)) == [GetReply((b"b", 1), found=False)]
    (declined,) = story.feed(Put((b"a", 2), KEY, Kind.BLOCK, 100))
    assert declined == PutReply((b"a", 2), stored=False, reason=error)
    story.now_ns += CONFIG.retry_after_ns
    assert isinstance(story.put(3)[0], PutReply)
    assert story.core.stats(story.now_ns).off == ""


def test_a_full_disk_at_a_new_segment_declines_what_waited_for_it() -> None:
    story = Story()
    (create,) = story.put(1, durable=True)
    assert isinstance(create, Create)
    (reply,) = story.feed(Created(create.head.segment, 0, "disk full"))
    assert reply == PutReply((b"a", 1), stored=False, reason="disk full")
    stats = story.core.stats(NOW)
    assert (stats.records, stats.file_bytes, stats.off) == (0, 0, "disk full")


def test_a_dropped_memory_answer_is_counted() -> None:
    story = Story()
    _, create = story.put(1)
    assert isinstance(create, Create)
    story.feed(Created(create.head.segment, 0, "disk full"))
    assert story.core.stats(NOW).dropped == 1


def test_a_repeated_call_in_flight_is_the_same_call() -> None:
    story = Story()
    put = Put((b"a", 1), KEY, Kind.BLOCK, 100, durable=True)
    assert len(story.feed(put)) == 1
    assert story.feed(put) == []
    assert len(story.feed(put, CopiedIn((b"a", 1), bytes(16)))) == 1


@pytest.mark.parametrize(
    "put, words",
    [
        (Put((b"a", 1), b"short", Kind.BLOCK, 100), "32 bytes"),
        (Put((b"a", 1), KEY, Kind.BLOCK, 0), "allowed: 1 to"),
        (Put((b"a", 1), KEY, Kind.BLOCK, CONFIG.block_bytes_max + 1), "allowed: 1 to"),
        (Put((b"a", 1), KEY, Kind.STATE, CONFIG.state_bytes_max + 1), "a state of"),
    ],
)
def test_a_bad_put_is_declined_in_words(put: Put, words: str) -> None:
    (reply,) = Story().feed(put)
    assert isinstance(reply, PutReply) and not reply.stored and words in reply.reason


def test_a_region_too_small_is_a_miss_with_both_numbers() -> None:
    story = Story()
    story.put(1)
    (reply,) = story.feed(Get((b"b", 1), KEY, 99))
    assert isinstance(reply, GetReply) and not reply.found
    assert "100 bytes" in reply.reason and "99" in reply.reason


def test_calls_beyond_the_queue_are_declined_and_the_rest_answered() -> None:
    """Eight frames, all waiting for a disk that does nothing; twelve more may wait."""
    story = Story()
    replies: list[PutReply] = []
    for number in range(40):
        call = (b"a", number)
        for action in story.feed(Put(call, number.to_bytes(32, "big"), Kind.BLOCK, 100)):
            if isinstance(action, CopyIn):
                replies += [
                    a for a in story.feed(CopiedIn(call, bytes(16))) if isinstance(a, PutReply)
                ]
            elif isinstance(action, PutReply):
                replies.append(action)
    assert sum(reply.stored for reply in replies) == 6  # two frames stay for reads
    declined = [reply for reply in replies if not reply.stored]
    assert len(declined) == 40 - 6 - CONFIG.queue_max
    assert "busy" in declined[0].reason
    ended = [a for a in story.feed(HolderGone("")) if isinstance(a, PutReply)]
    assert len(ended) == CONFIG.queue_max and "owner is gone" in ended[0].reason


def test_waiting_calls_end_with_their_holder_and_no_others() -> None:
    story = Story()
    for number in range(6):
        story.put(number, number.to_bytes(32, "big"))
    for number, holder in ((10, "one"), (11, "two"), (12, "one")):
        key = number.to_bytes(32, "big")
        assert story.feed(Put((b"a", number), key, Kind.BLOCK, 100, holder=holder)) == []
    ended = [a for a in story.feed(HolderGone("one")) if isinstance(a, PutReply)]
    assert [reply.call for reply in ended] == [(b"a", 10), (b"a", 12)]


def test_lifetimes_end() -> None:
    simulation = Simulation(1)
    for number, ttl_s in ((1, 10), (2, 100), (3, 10**6)):
        assert simulation.call_and_wait(simulation.put(number, durable=True, ttl_s=ttl_s))
    found = []
    for now_s in (19, 21, 199, 201, 1999, 2001):
        simulation.now_ns = 1000 * SECOND_NS + now_s * SECOND_NS
        found.append(
            [n for n in (1, 2, 3) if simulation.core.prefix([key_of(n)[0]], simulation.now_ns)[0]]
        )
    assert found == [[1, 2, 3], [2, 3], [2, 3], [3], [3], []]
    simulation.perform(simulation.core.tick(simulation.now_ns))
    simulation.settle()
    assert simulation.core.stats(simulation.now_ns).file_bytes == 0
    assert simulation.core.stats(simulation.now_ns).evicted == 3


def test_the_least_recently_used_segment_goes_first() -> None:
    config = msgspec.structs.replace(CONFIG, max_bytes=5 * CONFIG.segment_size)
    simulation = Simulation(1, config=config)
    blocks = [n for n in range(1, 200) if n % 5]
    kept = blocks[0]
    for number in blocks:
        simulation.now_ns += SECOND_NS
        simulation.call_and_wait(simulation.put(number, durable=True, ttl_s=10**6))
        simulation.core.prefix([key_of(kept)[0]], simulation.now_ns)
    present = [n for n in blocks if simulation.core.prefix([key_of(n)[0]], simulation.now_ns)[0]]
    assert kept in present and blocks[20] not in present and blocks[-1] in present


def test_a_restart_finds_what_was_there_and_numbers_on() -> None:
    simulation = Simulation(3)
    for number in range(1, 30):
        simulation.call_and_wait(simulation.put(number, durable=True))
    simulation.crash_and_restart()
    older = list(simulation.core.index)
    assert len(older) == 29
    simulation.call_and_wait(simulation.put(50, durable=True))
    entry = simulation.core.index.get(key_of(50)[0])
    assert entry is not None and entry.sequence > max(one.sequence for one in older)
    assert entry.segment not in {one.segment for one in older}  # a segment found is never added to
    reply = simulation.call_and_wait(simulation.get(50))
    assert isinstance(reply, GetReply) and reply.nbytes == len(payload(*key_of(50)))


def test_contradicting_bounds_are_named() -> None:
    with pytest.raises(ConfigError, match="three segments"):
        Core(msgspec.structs.replace(CONFIG, max_bytes=CONFIG.segment_size), bytes(16), [], NOW)
    with pytest.raises(ConfigError, match="cannot hold a record"):
        Core(msgspec.structs.replace(CONFIG, segment_bytes=2 * PAGE), bytes(16), [], NOW)


def test_the_smallest_configured_cap_works_with_the_full_models_records() -> None:
    config = StoreConfig(16 << 20)
    config.check()
    assert config.max_bytes >= 3 * config.segment_size
    StoreConfig(1 << 40).check()
