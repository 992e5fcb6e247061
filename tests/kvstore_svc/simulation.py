"""One store in virtual time against a simulated disk: random callers, faults and crashes from one seed.

What it holds the store to, after every event and every crash:
* a get returns the bytes of its own key, all of them, or a miss; never anything else;
* every call is answered once;
* a record answered as durable is there after a crash unless it was evicted, expired or hit by a bit flip;
* files stay within the cap, no segment is deleted under a read, no frame is lost.
"""

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from kvstore_svc.simulated_disk import Faults, SimulatedDisk

from phalanx.kvstore_svc.config import StoreConfig
from phalanx.kvstore_svc.core import Core
from phalanx.kvstore_svc.events import (
    Action,
    Call,
    CopiedIn,
    CopiedOut,
    CopyIn,
    CopyOut,
    Delete,
    Event,
    Get,
    GetReply,
    Put,
    PutReply,
    Read,
    SpaceMeasured,
)
from phalanx.kvstore_svc.layout import HEADER_BYTES, PAGE, Kind, payload_checksum
from phalanx.kvstore_svc.recovery import recover

SECOND_NS = 1_000_000_000
BLOCK, STATE = 3 * PAGE - HEADER_BYTES, 7 * PAGE  # payload bytes, at most
CONFIG = StoreConfig(
    max_bytes=24 * 16 * PAGE,
    block_bytes_max=BLOCK,
    state_bytes_max=STATE,
    ram_bytes=1,  # eight frames of each kind: callers have to wait for them
    segment_bytes=16 * PAGE,
    ttl_classes_s=(20, 200, 2000),
    write_bytes_max=5 * PAGE,
    sync_after_ns=SECOND_NS,
    retry_after_ns=2 * SECOND_NS,
    queue_max=12,
)


def payload(key: bytes, kind: Kind) -> bytes:
    """The only right bytes of a key."""
    longest = BLOCK if kind is Kind.BLOCK else STATE
    number = 1 + int.from_bytes(key[:4], "little") % longest
    return hashlib.shake_128(key).digest(number)


def key_of(number: int) -> tuple[bytes, Kind]:
    kind = Kind.STATE if number % 5 == 0 else Kind.BLOCK
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=32).digest(), kind


@dataclass
class Asked:
    key: bytes
    kind: Kind
    region: bytearray  # a get's
    durable: bool = False
    stale: bool = False  # the handle goes stale before the copy


class Violation(AssertionError):
    """The store broke a promise; the message starts with the seed."""


class Simulation:
    def __init__(
        self,
        seed: int,
        faults: Faults | None = None,
        config: StoreConfig = CONFIG,
        capacity: int = 1 << 30,
        core: Callable[..., Core] = Core,
        keys: int = 150,
    ) -> None:
        self.seed, self.config, self.make_core, self.keys = seed, config, core, keys
        self.rng = random.Random(seed)
        self.disk = SimulatedDisk(self.rng, faults or Faults(), capacity)
        self.now_ns = 1_000 * SECOND_NS
        self.asked: dict[Call, Asked] = {}
        self.durable: set[bytes] = set()  # answered so, since they were last known to be lost
        self.replies: list[PutReply | GetReply] = []
        self.reading: dict[int, int] = {}  # read to segment
        self.calls = 0
        self.start()

    # ---------------------------------------------------------------- life of a store

    def start(self) -> None:
        recovery = recover(self.disk)
        self.core = self.make_core(self.config, self.disk.store_id, recovery.found, self.now_ns)
        self.feed([SpaceMeasured(self.disk.free_bytes())])

    def crash_and_restart(self) -> None:
        """Every record that was answered as durable and has no excuse must be there."""
        due = {
            key
            for key in self.durable
            if (entry := self.core.index.get(key)) is not None
            and entry.durable
            and entry.expires_ns > self.now_ns + 60 * SECOND_NS
            and entry.segment is not None
            and entry.segment.id not in self.disk.flipped
        }
        self.disk.crash()
        self.asked.clear()
        self.reading.clear()
        self.durable = due
        faults, self.disk.faults = self.disk.faults, Faults()
        self.start()
        for number in range(self.keys):
            key, _ = key_of(number)
            if key in due:
                reply = self.call_and_wait(self.get(number))
                if not (isinstance(reply, GetReply) and reply.found):
                    self.fail(f"durable record {key.hex()[:8]} is gone after a crash: {reply}")
        self.disk.faults = faults

    def run(self, steps: int) -> "Simulation":
        for _ in range(steps):
            roll = self.rng.random()
            if roll < 0.45:
                burst = range(self.rng.choice((1, 1, 1, 6, 30)))
                self.feed([self.random_call() for _ in burst])
            elif roll < 0.9 and self.disk.waiting:
                self.feed([self.finish_one()])
            elif roll < 0.98:
                self.now_ns += self.rng.randrange(2 * SECOND_NS)
                self.feed([SpaceMeasured(self.disk.free_bytes())])
                self.perform(self.core.tick(self.now_ns))
            elif roll < 0.99:
                self.crash_and_restart()
        self.settle()
        return self

    def settle(self) -> None:
        """Let all work end: then every call has its answer and nothing is pinned."""
        for _ in range(100_000):
            if not self.disk.waiting:
                self.now_ns += 3 * SECOND_NS
                self.perform(self.core.tick(self.now_ns))
                self.feed([])
            if not self.disk.waiting:
                break
            self.feed([self.finish_one()])
        if self.asked:
            self.fail(f"calls without an answer: {self.asked}")
        for kind, pool in self.core.index.pools.items():
            if pool.idle != pool.number:
                self.fail(f"{pool.number - pool.idle} frames of {kind.name} leaked")

    # ---------------------------------------------------------------- callers

    def call(self) -> Call:
        self.calls += 1
        return (b"caller", self.calls)

    def put(self, number: int, *, durable: bool, stale: bool = False, ttl_s: int = 0) -> Put:
        key, kind = key_of(number)
        call = self.call()
        self.asked[call] = Asked(key, kind, bytearray(), durable, stale)
        return Put(call, key, kind, len(payload(key, kind)), durable, ttl_s, "arena")

    def get(self, number: int, *, stale: bool = False) -> Get:
        key, kind = key_of(number)
        call = self.call()
        self.asked[call] = Asked(key, kind, bytearray(len(payload(key, kind))), stale=stale)
        return Get(call, key, len(payload(key, kind)), "arena")

    def random_call(self) -> Event:
        rng, number = self.rng, self.rng.randrange(self.keys)
        stale = rng.random() < 0.05
        if rng.random() < 0.5:
            return self.get(number, stale=stale)
        ttl_s = rng.choice((0, 0, 0, 10, 1000))
        return self.put(number, durable=rng.random() < 0.5, stale=stale, ttl_s=ttl_s)

    def call_and_wait(self, event: Put | Get) -> PutReply | GetReply:
        self.feed([event])
        for _ in range(10_000):
            for reply in self.replies:
                if reply.call == event.call:
                    return reply
            self.feed([self.finish_one()] if self.disk.waiting else [])
        self.fail(f"no answer to {event}")

    # ---------------------------------------------------------------- the shell

    def finish_one(self) -> Event:
        event = self.disk.finish_one()
        self.reading.pop(getattr(event, "read", -1), None)
        return event

    def feed(self, events: list[Event]) -> None:
        queue = list(events)
        while True:
            actions: list[Action] = []
            for event in queue:
                actions += self.core.handle(event, self.now_ns)
            actions += self.core.flush(self.now_ns)
            if not actions:
                break
            queue = self.perform(actions)
        self.check()

    def perform(self, actions: list[Action]) -> list[Event]:
        events: list[Event] = []
        for action in actions:
            match action:
                case CopyIn(call, frame, length):
                    events.append(self.copy_in(call, frame, length))
                case CopyOut(call, frame, length):
                    events.append(self.copy_out(call, frame, length))
                case PutReply() | GetReply():
                    self.answer(action)
                case Read(read, _, place, _):
                    self.reading[read] = place.segment
                    self.disk.start(action)
                case Delete(segment):
                    if segment in self.reading.values():
                        self.fail(f"segment {segment} is deleted under a read")
                    self.disk.start(action)
                case _:
                    self.disk.start(action)  # type: ignore[arg-type]
        return events

    def copy_in(self, call: Call, frame: int, length: int) -> CopiedIn:
        asked = self.asked[call]
        data = payload(asked.key, asked.kind)
        if asked.stale:  # the owner reused the region in the middle of the copy
            data = self.rng.randbytes(len(data))
        assert length == len(data)
        self.disk.frame(frame)[HEADER_BYTES : HEADER_BYTES + length] = data
        return CopiedIn(call, payload_checksum(data), "stale handle" if asked.stale else "")

    def copy_out(self, call: Call, frame: int, length: int) -> CopiedOut:
        asked = self.asked[call]
        if asked.stale:
            return CopiedOut(call, "stale handle")
        asked.region[:length] = self.disk.frame(frame)[HEADER_BYTES : HEADER_BYTES + length]
        return CopiedOut(call)

    def answer(self, reply: PutReply | GetReply) -> None:
        asked = self.asked.pop(reply.call, None)
        if asked is None:
            self.fail(f"a call is answered twice: {reply}")
        self.replies.append(reply)
        if isinstance(reply, PutReply):
            if reply.stored and asked.durable and not reply.durable:
                self.fail(f"asked for durable, answered without: {reply}")
            if reply.durable:
                self.durable.add(asked.key)
        elif reply.found:
            right = payload(asked.key, asked.kind)
            if reply.nbytes != len(right) or bytes(asked.region) != right:
                self.fail(f"wrong bytes for {asked.key.hex()[:8]}")

    # ---------------------------------------------------------------- invariants

    def check(self) -> None:
        core, table = self.core, self.core.writer.table
        if table.file_bytes > self.config.max_bytes:
            self.fail(f"{table.file_bytes} bytes of files, the cap is {self.config.max_bytes}")
        if core.index.payload_bytes != sum(entry.length for entry in core.index):
            self.fail("the byte counter drifted")
        for entry in core.index:
            if entry.frame is not None and entry.frame.key != entry.key:
                self.fail("a frame of another key")
            if entry.segment is not None and entry.segment not in table:
                self.fail("a record in a segment that is gone")

    def fail(self, text: str) -> NoReturn:
        raise Violation(f"seed {self.seed}: {text}")
