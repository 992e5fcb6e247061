"""Whatever the disk does, the store never returns wrong bytes and keeps what it called durable:
random schedules in virtual time, and proof that the simulation finds bugs planted in the store."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace

import msgspec
import pytest
from kvstore_svc.simulated_disk import Faults
from kvstore_svc.simulation import CONFIG, Simulation, Violation

from kvstore_svc import simulated_disk
from phalanx.kvstore_svc import recovery
from phalanx.kvstore_svc.core import Core
from phalanx.kvstore_svc.events import CopiedIn, Delete, PutReply, Synced, Written
from phalanx.kvstore_svc.layout import IndexEntry, SegmentHead
from phalanx.kvstore_svc.segments import Entry, Segment
from phalanx.kvstore_svc.writer import Writer

SEEDS = int(os.environ.get("PHALANX_SIM_SEEDS", "24"))
CLEAN = Faults()
BAD = Faults(write_fails=0.02, sync_fails=0.02, read_fails=0.02, flip=0.02)
SMALL = msgspec.structs.replace(CONFIG, max_bytes=3 * CONFIG.segment_size)


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("faults", [CLEAN, BAD], ids=["crashes", "bad disk"])
def test_promises_hold(seed: int, faults: Faults) -> None:
    Simulation(seed, replace(faults)).run(300)


@pytest.mark.parametrize("seed", range(SEEDS // 2))
@pytest.mark.parametrize("sparse", [False, True])
def test_a_full_disk_stops_caching_never_serving(seed: int, sparse: bool) -> None:
    Simulation(seed, Faults(sparse=sparse), capacity=5 * CONFIG.segment_size).run(300)


@pytest.mark.parametrize("seed", range(SEEDS // 2))
def test_a_small_cap_evicts_and_goes_on(seed: int) -> None:
    simulation = Simulation(seed, config=SMALL).run(300)
    reply = simulation.call_and_wait(simulation.put(1, durable=True))
    assert isinstance(reply, PutReply) and reply.stored and reply.durable


def test_a_seed_replays_exactly() -> None:
    runs = [Simulation(7, replace(BAD)).run(200) for _ in range(2)]
    assert runs[0].replies == runs[1].replies and runs[0].replies


# ---------------------------------------------------------------- planted bugs

Plant = Callable[[pytest.MonkeyPatch], None]


def durable_without_a_sync(patch: pytest.MonkeyPatch) -> None:
    def settle_at_once(self: Writer, segment: Segment) -> None:
        self._settle(segment.unsynced)
        segment.unsynced.clear()

    patch.setattr(Writer, "_request_sync", settle_at_once)
    start = simulated_disk.SimulatedDisk.start
    patch.setattr(
        simulated_disk.SimulatedDisk,
        "start",
        lambda self, action: start(
            self,
            msgspec.structs.replace(action, sync=False) if hasattr(action, "sync") else action,
        ),
    )


def stale_copies_are_kept(patch: pytest.MonkeyPatch) -> None:
    original = Core._on_copied_in
    patch.setattr(
        Core,
        "_on_copied_in",
        lambda self, event, now: original(self, CopiedIn(event.call, event.checksum), now),
    )


def reads_are_not_verified(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(simulated_disk, "check_record", lambda data, **expected: "")


def frames_are_reused_before_the_write(patch: pytest.MonkeyPatch) -> None:
    def stage(self: Writer, entry: Entry, now_ns: int) -> None:
        original(self, entry, now_ns)
        if entry.frame is not None:
            self._index.pools[entry.kind].unpin(entry.frame)
            patch.setattr(Writer, "_unstage", lambda self, entry: None)

    original = Writer.stage
    patch.setattr(Writer, "stage", stage)


def segments_go_while_they_are_read(patch: pytest.MonkeyPatch) -> None:
    def evict(self: Writer, segment: Segment) -> None:
        reads, segment.reads = segment.reads, 0
        original(self, segment)
        segment.reads = reads

    original = Writer._evict
    patch.setattr(Writer, "_evict", evict)


def evicted_records_stay_in_the_index(patch: pytest.MonkeyPatch) -> None:
    def evict(self: Writer, segment: Segment) -> None:
        self._detach(segment)
        self.table.doom(segment)
        if segment.reads == 0:
            self._out.append(Delete(segment.id))

    patch.setattr(Writer, "_evict", evict)


def failed_syncs_are_ignored(patch: pytest.MonkeyPatch) -> None:
    for name, event in (("synced", Synced), ("written", Written)):
        original = getattr(Writer, name)
        patch.setattr(
            Writer,
            name,
            lambda self, got, now, original=original, event=event: original(
                self, event(*(getattr(got, f) for f in got.__struct_fields__[:1])), now
            ),
        )


def a_failed_sync_is_tried_again(patch: pytest.MonkeyPatch) -> None:
    """The second sync succeeds: the kernel has reported the lost pages once and forgotten them."""

    def sync_over(self: Writer, segment: Segment, error: str, now_ns: int) -> None:
        if error:
            segment.sync_in_flight = False
            segment.unsynced, segment.syncing = segment.syncing + segment.unsynced, []
            segment.sync_again = True
        else:
            original(self, segment, error, now_ns)

    original = Writer._sync_over
    patch.setattr(Writer, "_sync_over", sync_over)


def the_scan_ends_at_the_first_torn_record(patch: pytest.MonkeyPatch) -> None:
    def scan(data: bytes, head: SegmentHead) -> Iterator[IndexEntry]:
        end = 4096
        for entry in original(data, head):
            if entry.offset != end:
                return
            yield entry
            end = recovery.end_of([entry])

    original = recovery.scan
    patch.setattr(recovery, "scan", scan)


def a_stale_index_counts_as_valid(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recovery, "_indexed", lambda files, head, nbytes: [])


def queued_calls_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Core, "_wait", lambda self, call: None)


def frames_leak_when_a_copy_fails(patch: pytest.MonkeyPatch) -> None:
    def copied_in(self: Core, event: CopiedIn, now_ns: int) -> None:
        if not event.reason:
            return original(self, event, now_ns)
        fill = self._filling.pop(event.call)
        del self._fills[fill.put.key]
        self._decline(fill.put, event.reason)
        return None

    original = Core._on_copied_in
    patch.setattr(Core, "_on_copied_in", copied_in)


PLANTS = [
    (durable_without_a_sync, CLEAN),
    (stale_copies_are_kept, CLEAN),
    (reads_are_not_verified, BAD),
    (frames_are_reused_before_the_write, CLEAN),
    (segments_go_while_they_are_read, CLEAN),
    (evicted_records_stay_in_the_index, CLEAN),
    (failed_syncs_are_ignored, BAD),
    (a_failed_sync_is_tried_again, Faults(sync_fails=0.2)),
    (the_scan_ends_at_the_first_torn_record, CLEAN),
    (a_stale_index_counts_as_valid, CLEAN),
    (queued_calls_are_forgotten, CLEAN),
    (frames_leak_when_a_copy_fails, CLEAN),
]


@pytest.mark.parametrize("plant, faults", PLANTS, ids=[plant.__name__ for plant, _ in PLANTS])
def test_planted_bugs_are_found(
    plant: Plant, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises((Violation, AssertionError, KeyError)):
        for seed in range(100):
            Simulation(seed, replace(faults), config=SMALL if seed % 2 else CONFIG).run(300)
