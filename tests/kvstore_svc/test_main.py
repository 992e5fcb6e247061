"""A real store process keeps its promises over sockets and shared memory: kill -9 at any moment, a full
disk, callers that die, handles that go stale, two stores in one directory."""

import hashlib
import os
import random
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from phalanx.bench.kvstore_process import Caller, StoreProcess
from phalanx.protocol.arena import Handle
from phalanx.protocol.kvkeys import block_keys
from phalanx.protocol.messages import Error, Get, KVClear, PutDone
from phalanx.testing.node import wait_for

BLOCK = 114_048
pytestmark = pytest.mark.process


def key_of(number: int) -> bytes:
    return hashlib.blake2b(b"%d" % number, digest_size=32).digest()


def data_of(number: int, nbytes: int = BLOCK) -> bytes:
    return random.Random(number).randbytes(nbytes)


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.01)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreProcess]:
    with StoreProcess(tmp_path) as process:
        process.start()
        yield process


@pytest.fixture
def caller(store: StoreProcess) -> Iterator[Caller]:
    with Caller(store, nbytes=BLOCK) as one:
        yield one


def test_bytes_come_back_and_durable_means_synced(caller: Caller) -> None:
    done = caller.put(key_of(1), data_of(1))
    assert (done.stored, done.durable) == (True, False)
    done = caller.put(key_of(2), data_of(2), ack="disk")
    assert (done.stored, done.durable) == (True, True)
    for number in (1, 2):
        got, data = caller.get(key_of(number))
        assert got.found and data == data_of(number)
    assert not caller.get(key_of(3))[0].found
    assert caller.contains(key_of(1), key_of(2), key_of(3), key_of(1)) == 2
    stats = caller.stats()
    assert (stats.records, stats.bytes, stats.hits, stats.misses) == (2, 2 * BLOCK, 2, 1)
    assert stats.caching


def test_a_cleared_store_has_nothing_and_goes_on(store: StoreProcess, caller: Caller) -> None:
    """What a rank wrote that computed wrong numbers must not come back, after a crash neither."""
    for number in range(20):
        assert caller.put(key_of(number), data_of(number), ack="disk").durable
    assert caller.ask(KVClear(caller.next_call())).records == 20
    assert caller.contains(key_of(0)) == 0 and not caller.get(key_of(7))[0].found
    assert (caller.stats().records, caller.stats().caching) == (0, True)
    assert caller.put(key_of(1), data_of(30), ack="disk").durable
    store.kill()
    store.start()
    assert caller.stats().records == 1
    assert caller.get(key_of(1))[1] == data_of(30)


def test_what_was_begun_before_a_clear_is_not_taken_after_it(
    store: StoreProcess, caller: Caller
) -> None:
    """It rests on what was to be forgotten, or on a rank that computed wrong numbers; a crash changes nothing."""
    begun_ns = time.monotonic_ns()
    assert caller.put(key_of(1), data_of(1), begun_ns=begun_ns).stored
    caller.ask(KVClear(caller.next_call()))
    for _ in range(2):
        late = caller.put(key_of(2), data_of(2), begun_ns=begun_ns)
        assert not late.stored and "before the store was cleared" in late.reason
        assert not caller.put(key_of(2), data_of(2), begun_ns=0).stored, "nobody knows when"
        store.kill()
        store.start()
    assert caller.put(key_of(3), data_of(3)).stored
    assert caller.contains(key_of(1)) == caller.contains(key_of(2)) == 0


def test_a_window_state_has_a_size_class_of_its_own(store: StoreProcess) -> None:
    state = data_of(9, 3_100_000)
    with Caller(store, nbytes=len(state), incarnation=2) as caller:
        assert caller.put(key_of(1), state, kind="state", ack="disk").durable
        done, data = caller.get(key_of(1))
        assert done.found and data == state
        done = caller.put(key_of(2), state, kind="block")
        assert not done.stored and "allowed" in done.reason


def test_a_stale_handle_stores_and_fills_nothing(caller: Caller) -> None:
    message = caller.put_message(key_of(1), data_of(1))
    caller.arena.bump(0)
    done = caller.ask(message)
    assert not done.stored and "stale handle" in done.reason
    assert not caller.get(key_of(1))[0].found
    caller.put(key_of(2), data_of(2))
    handle = caller.region(1)
    caller.arena.bump(1)
    got = caller.ask(Get(caller.next_call(), key_of(2), handle))
    assert not got.found and "stale handle" in got.reason
    assert bytes(caller.arena.data[handle.offset : handle.offset + 8]) == bytes(8)


def test_a_put_past_its_deadline_is_declined(caller: Caller) -> None:
    """The caller has given the memory to somebody else by then."""
    done = caller.put(key_of(1), data_of(1), deadline_ns=time.monotonic_ns() - 1)
    assert not done.stored and done.reason.startswith("late")
    assert not caller.get(key_of(1))[0].found


@pytest.mark.parametrize(
    "handle",
    [
        Handle("ph-other-node-1", 0, 8),
        Handle("../etc/passwd", 0, 8),
        Handle("", 0, 8),
    ],
)
def test_memory_of_others_is_never_touched(caller: Caller, handle: Handle) -> None:
    message = caller.put_message(key_of(1), b"12345678")
    done = caller.ask(type(message)(message.call, message.key, "block", handle))
    assert not done.stored and "not of this node" in done.reason


def test_garbage_gets_an_error_and_hurts_nobody(caller: Caller) -> None:
    for frame in (b"", b"\xc1", b"\x81\xa4type\xa3Put", os.urandom(50)):
        caller.socket.send(frame)
        assert isinstance(caller.receive(), Error)
    done = caller.put(b"short key", data_of(1))
    assert not done.stored and "32 bytes" in done.reason
    assert caller.put(key_of(1), data_of(1)).stored


def test_a_repeated_command_is_answered_again(caller: Caller) -> None:
    message = caller.put_message(key_of(1), data_of(1), ack="disk")
    first = caller.ask(message)
    assert first == caller.ask(message) and first.durable
    assert caller.stats().records == 1
    handle = caller.region(1)
    got = Get(caller.next_call(), key_of(1), handle)
    asked = caller.ask(got)
    assert asked.found and caller.arena.view(handle) == data_of(1)
    caller.arena.view(handle)[:] = data_of(2)  # it is in other use by now
    assert caller.ask(got) == asked and caller.arena.view(handle) == data_of(2)


def test_tenants_never_share_a_record(caller: Caller) -> None:
    tokens = range(128)
    (mine,) = block_keys(b"numerics", b"tenant-a", tokens)
    for fingerprint, salt in ((b"numerics", b"tenant-b"), (b"other", b"tenant-a"), (b"", b"")):
        (theirs,) = block_keys(fingerprint, salt, tokens)
        caller.put(mine, data_of(1))
        assert not caller.get(theirs)[0].found
    assert caller.get(mine)[1] == data_of(1)


def test_ranks_that_store_one_key_at_once_store_it_once(store: StoreProcess) -> None:
    with (
        Caller(store, nbytes=BLOCK, incarnation=31) as one,
        Caller(store, nbytes=BLOCK, incarnation=32) as two,
    ):
        for number in range(20):
            for rank in (one, two):
                rank.send(rank.put_message(key_of(number), data_of(number), ack="disk"))
            assert all(rank.receive().durable for rank in (one, two))
        assert one.stats().records == 20
        assert two.get(key_of(7))[1] == data_of(7)


def test_kill_9_loses_nothing_that_was_durable(store: StoreProcess) -> None:
    """Puts stream in while the store is killed, time and again; all that was answered is there."""
    durable: dict[int, int] = {}
    rng, number = random.Random(1), 0
    for incarnation in range(10, 14):
        with Caller(store, nbytes=BLOCK, regions=16, incarnation=incarnation) as caller:
            calls: dict[int, int] = {}
            kill_at = time.monotonic() + rng.uniform(0.05, 0.2)
            while time.monotonic() < kill_at:
                if len(calls) < 16:
                    region = number % 16
                    message = caller.put_message(
                        key_of(number), data_of(number), region=region, ack="disk"
                    )
                    calls[message.call] = number
                    caller.send(message)
                    number += 1
                while len(calls) == 16 or caller.socket.poll(0):
                    done = caller.receive()
                    assert isinstance(done, PutDone) and done.durable, done
                    durable[calls.pop(done.call)] = incarnation
            store.kill()
            while caller.socket.poll(50):  # answers that were on their way count too
                done = caller.receive()
                durable[calls.pop(done.call)] = incarnation
        time.sleep(incarnation % 2)  # the case: a store that comes back at once, or later
        store.start()
        with Caller(store, nbytes=BLOCK, incarnation=100 + incarnation) as caller:
            for one, born in durable.items():
                got, data = caller.get(key_of(one))
                assert got.found and data == data_of(one), f"record {one} of {born}"
            assert caller.stats().corrupt == 0
    assert len(durable) > 20


def test_a_clean_stop_seals_and_the_next_start_scans_nothing(store: StoreProcess) -> None:
    with Caller(store, nbytes=BLOCK) as caller:
        for number in range(20):
            assert caller.put(key_of(number), data_of(number)).stored
        assert store.stop() == 0
    store.start()
    wait_for(lambda: len(store.log_events("store open")) == 2, 10, "what it found, in its log")
    last = store.log_events("store open")[-1]
    assert (last["records"], last["scanned"]) == (20, 0)


def test_a_flipped_bit_is_a_miss_never_data(store: StoreProcess) -> None:
    with Caller(store, nbytes=BLOCK) as caller:
        for number in range(4):
            caller.put(key_of(number), data_of(number), ack="disk")
    store.stop()
    (segment,) = (store.run_dir / "kv").glob("seg-*.kv")
    with segment.open("r+b") as file:
        file.seek(4096 + 128 + 50_000)  # inside the first record's payload
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))
    store.start()
    with Caller(store, nbytes=BLOCK) as caller:
        got = [caller.get(key_of(number)) for number in range(4)]
        assert [done.found for done, _ in got] == [False, True, True, True]
        assert "flipped" in got[0][0].reason
        assert got[1][1] == data_of(1)
        assert caller.contains(key_of(0)) == 0  # not said to be there again
        assert caller.stats().corrupt == 1
        assert caller.put(key_of(0), data_of(0), ack="disk").durable
        assert caller.get(key_of(0))[1] == data_of(0)


def test_leases_end_with_their_holder(store: StoreProcess) -> None:
    """The memory of a dead caller returns to the system although the store had it mapped."""

    def mapped() -> bool:
        assert store.child is not None
        return name in Path(f"/proc/{store.child.pid}/maps").read_text()

    with Caller(store, nbytes=BLOCK, incarnation=5) as caller:
        name = caller.arena.name
        caller.put(key_of(1), data_of(1))
        assert mapped()
    until(lambda: not mapped(), "the store lets go of the arena")
    with Caller(store, nbytes=BLOCK, incarnation=6) as caller:
        assert caller.get(key_of(1))[1] == data_of(1)


def test_a_directory_in_use_turns_caching_off_until_it_is_free(
    store: StoreProcess, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with StoreProcess(other, directory=str(store.run_dir / "kv")) as second:
        second.start()
        with Caller(second, nbytes=BLOCK, incarnation=77) as caller:
            assert not caller.put(key_of(1), data_of(1)).stored
            assert not caller.stats().caching
            store.kill()
            until(lambda: caller.stats().caching, "the directory is taken over")
            assert caller.put(key_of(1), data_of(1), ack="disk").durable


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "small"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=20m", "phalanx-test", str(path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def test_a_full_disk_stops_caching_never_serving(tmp_path: Path, small_disk: Path) -> None:
    with StoreProcess(tmp_path, directory=str(small_disk / "kv"), max_bytes=1 << 30) as store:
        store.start()
        with Caller(store, nbytes=BLOCK) as caller:
            assert not caller.put(key_of(0), data_of(0), ack="disk").stored  # segments of 64 MiB
            assert not caller.stats().caching
            assert not caller.get(key_of(0))[0].found
            assert caller.contains(key_of(0)) == 0
        store.stop()
    with StoreProcess(tmp_path, directory=str(small_disk / "kv"), max_bytes=64 << 20) as store:
        store.start()
        with Caller(store, nbytes=BLOCK) as caller:
            done = [caller.put(key_of(n), data_of(n), ack="disk") for n in range(60)]
            assert all(one.durable for one in done)  # one segment fits
            (small_disk / "others").write_bytes(bytes(12 << 20))
            for number in range(60, 160):
                done.append(caller.put(key_of(number), data_of(number), ack="disk"))
            # Each was stored, perhaps in the place of an older one, or declined with the reason.
            assert all(one.durable or "disk full" in one.reason for one in done)
            for number, one in enumerate(done):
                got, data = caller.get(key_of(number))
                assert not got.found or (one.stored and data == data_of(number))
            (small_disk / "others").unlink()
            until(
                lambda: caller.put(key_of(999), data_of(999), ack="disk").stored,
                "caching is on again",
            )


def test_the_floor_gives_space_back_before_others_run_out(tmp_path: Path, small_disk: Path) -> None:
    options = {"max_bytes": 16 << 20, "free_floor_bytes": 4 << 20}
    with StoreProcess(tmp_path, directory=str(small_disk / "kv"), **options) as store:
        store.start()
        with Caller(store, nbytes=BLOCK) as caller:
            for number in range(120):
                caller.put(key_of(number), data_of(number), ack="disk")
            assert caller.stats().records > 60
            for part in range(3):
                (small_disk / f"others-{part}").write_bytes(bytes(3 << 20))
                until(lambda: _free(small_disk) >= 4 << 20, "segments went to keep the floor")
            assert caller.stats().evicted > 0


def _free(directory: Path) -> int:
    stat = os.statvfs(directory)
    return stat.f_bavail * stat.f_frsize
