"""`phalanx bench kvstore`: durable puts and cold gets of the real store process against the raw disk.

Records are those of the full model (114,048 bytes). Raw disk and store take turns in rounds of one run,
because disks and neighbours drift; figures are medians of the rounds. What is compared:

* raw write: 4 MiB pieces with direct I/O into a new, preallocated file, two in flight, synced at the end;
  `raw_write_synced_gbps`: the same with a sync after each piece, which is what durability costs.
* put: durable puts (answered after the sync), 64 in flight; `put_p99_ms` is of puts one at a time.
* raw read and get: random records, cold, 16 in flight; `get_p99_ms` is of gets one at a time;
  `get_prompt_gbps`: the 32 records of one prompt (4,096 tokens) asked for together.
* peers: LMDB and RocksDB when installed (`pip install lmdb rocksdict`), in this process, a sync after
  every 32 records, cold random reads.
"""

import hashlib
import mmap
import os
import platform
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from phalanx.bench.kvstore_peers import run_peers
from phalanx.bench.kvstore_process import Caller, StoreProcess
from phalanx.kvstore_svc.layout import record_bytes
from phalanx.protocol.messages import Get, GetDone, PutDone

RECORD = 114_048
PIECE = 4 << 20
ROUNDS = 3
PUTS_IN_FLIGHT, READS_IN_FLIGHT = 64, 16
PROMPT_RECORDS = 32
LATENCY_CALLS = 400


class Source:
    """Incompressible payloads, cheap to make and different for every key."""

    def __init__(self) -> None:
        self._pool = random.Random(1).randbytes(8 << 20)

    def key(self, number: int) -> bytes:
        return hashlib.blake2b(b"%d" % number, digest_size=32).digest()

    def payload(self, number: int) -> memoryview:
        start = number * 7919 % (len(self._pool) - RECORD)
        return memoryview(self._pool)[start : start + RECORD]


_SOURCE = Source()


def run(gib: float, directory: Path) -> dict[str, Any]:
    """Measure with `gib` GiB of records in all, in a scratch directory below `directory`.

    Returns the fields of docs/cli.md, the finer figures and the conditions. Needs twice the space.
    """
    records = max(PUTS_IN_FLIGHT * ROUNDS, int(gib * 2**30) // RECORD)
    directory.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="ph-kv-", dir=directory))
    try:
        figures = _raw_against_store(records, scratch)
        figures["peers"] = run_peers(min(records, 20_000), scratch, _sample)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return figures | {
        "gib": round(records * RECORD / 2**30, 3),
        "record_bytes": RECORD,
        "host": platform.node(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load_1m": round(os.getloadavg()[0], 2),
    }


def _raw_against_store(records: int, scratch: Path) -> dict[str, Any]:
    rows: dict[str, list[float]] = {}
    store_bytes = 2 * records * record_bytes(RECORD) + (1 << 30)
    with (
        # Sockets need a short path, whatever the directory to measure is called.
        tempfile.TemporaryDirectory(prefix="ph-kv-") as home,
        StoreProcess(Path(home), max_bytes=store_bytes, directory=str(scratch / "kv")) as store,
    ):
        store.start()
        source, raw, per_round = _SOURCE, RawDisk(scratch / "raw"), records // ROUNDS

        def add(name: str, value: float) -> None:
            rows.setdefault(name, []).append(value)

        for number in range(ROUNDS):
            nbytes = per_round * record_bytes(RECORD)
            add("raw_write_gbps", raw.write(nbytes, sync_each=False))
            add("raw_write_synced_gbps", raw.write(nbytes, sync_each=True))
            with Caller(store, nbytes=RECORD, regions=PUTS_IN_FLIGHT, incarnation=number) as caller:
                client = Client(caller, source)
                add("put_gbps", client.puts(number * per_round, per_round, PUTS_IN_FLIGHT)[0])
        first = ROUNDS * per_round
        with Caller(store, nbytes=RECORD, regions=1, incarnation=100) as caller:
            _, latencies = Client(caller, source).puts(first, LATENCY_CALLS, 1)
            add("put_p99_ms", _p99_ms(latencies))
        store.stop()
        store.start()  # with empty memory frames: gets are cold
        order = random.Random(2).sample(range(first), first)
        with Caller(store, nbytes=RECORD, regions=READS_IN_FLIGHT, incarnation=101) as caller:
            client = Client(caller, source)
            calls = min(LATENCY_CALLS, first // 4)
            lone, rest = order[:calls], order[calls:]
            add("raw_read_1_gbps", raw.read(len(lone), 1))
            rate, latencies = client.gets(lone, 1)
            add("get_1_gbps", rate)
            add("get_p99_ms", _p99_ms(latencies))
            for number in range(ROUNDS):
                numbers = rest[number::ROUNDS]
                add("raw_read_gbps", raw.read(len(numbers), READS_IN_FLIGHT))
                add("get_gbps", client.gets(numbers, READS_IN_FLIGHT)[0])
        store.stop()
        store.start()
        with Caller(store, nbytes=RECORD, regions=PROMPT_RECORDS, incarnation=102) as caller:
            client = Client(caller, source)
            prompts = range(0, first - PROMPT_RECORDS, PROMPT_RECORDS)
            for start in random.Random(3).sample(prompts, min(64, len(prompts))):
                prompt = range(start, start + PROMPT_RECORDS)
                add("get_prompt_gbps", client.gets(prompt, PROMPT_RECORDS)[0])
        raw.close()
    return {name: round(statistics.median(values), 3) for name, values in rows.items()}


class RawDisk:
    """The disk without a store: direct I/O on one preallocated file."""

    def __init__(self, path: Path) -> None:
        self._path, self._descriptor, self._nbytes = path, -1, 0
        self._pool = ThreadPoolExecutor(READS_IN_FLIGHT)
        self._source = random.Random(3).randbytes(PIECE)

    def write(self, nbytes: int, *, sync_each: bool) -> float:
        """GB/s of writing a new file of `nbytes` (whole pieces)."""
        self._reopen(nbytes)
        buffer = mmap.mmap(-1, PIECE)
        buffer[:] = self._source
        offsets = range(0, self._nbytes, PIECE)

        def lane(number: int) -> None:
            for offset in offsets[number::2]:
                os.pwrite(self._descriptor, buffer, offset)
                if sync_each:
                    os.fdatasync(self._descriptor)

        start = time.perf_counter()
        list(self._pool.map(lane, range(2)))
        os.fdatasync(self._descriptor)
        return self._nbytes / (time.perf_counter() - start) / 1e9

    def read(self, number: int, in_flight: int) -> float:
        """GB/s of reading `number` random records' worth of payload from the file written last."""
        size = record_bytes(RECORD)
        places = random.Random(4).choices(range(self._nbytes // size), k=number)

        def lane(first: int) -> None:
            buffer = mmap.mmap(-1, size)
            for place in places[first::in_flight]:
                os.preadv(self._descriptor, [buffer], place * size)

        start = time.perf_counter()
        list(self._pool.map(lane, range(in_flight)))
        return number * RECORD / (time.perf_counter() - start) / 1e9

    def close(self) -> None:
        self._pool.shutdown()
        os.close(self._descriptor)
        self._path.unlink()

    def _reopen(self, nbytes: int) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._path.unlink()
        self._nbytes = -(-nbytes // PIECE) * PIECE
        flags = os.O_CREAT | os.O_RDWR | os.O_DIRECT
        try:
            self._descriptor = os.open(self._path, flags)
        except OSError:  # a file system without direct I/O: both sides are then buffered
            self._descriptor = os.open(self._path, flags & ~os.O_DIRECT)
        os.posix_fallocate(self._descriptor, 0, self._nbytes)


class Client:
    """Keeps a number of calls in flight and measures from sending each to its answer."""

    def __init__(self, caller: Caller, source: Source) -> None:
        self._caller, self._source = caller, source

    def puts(self, first: int, number: int, in_flight: int) -> tuple[float, list[float]]:
        """GB/s and the latencies in seconds of durable puts."""

        def send(record: int, region: int) -> int:
            payload = self._source.payload(record)
            message = self._caller.put_message(
                self._source.key(record), payload, region=region, ack="disk"
            )
            self._caller.send(message)
            return message.call

        def check(record: int, region: int, done: Any) -> None:
            if not (isinstance(done, PutDone) and done.durable):
                raise RuntimeError(f"put {record} was not stored: {done}")

        return self._pipeline(range(first, first + number), in_flight, send, check)

    def gets(self, records: Sequence[int], in_flight: int) -> tuple[float, list[float]]:
        """GB/s and the latencies in seconds of gets; every 64th is compared byte for byte."""

        def send(record: int, region: int) -> int:
            message = Get(
                self._caller.next_call(), self._source.key(record), self._caller.region(region)
            )
            self._caller.send(message)
            return message.call

        def check(record: int, region: int, done: Any) -> None:
            if not (isinstance(done, GetDone) and done.found):
                raise RuntimeError(f"record {record} was not found: {done}")
            if record % 64 == 0:
                view = self._caller.arena.view(self._caller.region(region))
                if view != self._source.payload(record):
                    raise RuntimeError(f"record {record} came back changed")

        return self._pipeline(records, in_flight, send, check)

    def _pipeline(
        self,
        records: Sequence[int],
        in_flight: int,
        send: Callable[[int, int], int],
        check: Callable[[int, int, Any], None],
    ) -> tuple[float, list[float]]:
        waiting: dict[int, tuple[int, int, float]] = {}
        free, todo = list(range(in_flight)), iter(records)
        latencies: list[float] = []
        start = time.perf_counter()
        while len(latencies) < len(records):
            while free and (record := next(todo, None)) is not None:
                region, now = free.pop(), time.perf_counter()
                waiting[send(record, region)] = (record, region, now)
            done = self._caller.receive()
            record, region, sent = waiting.pop(done.call)
            latencies.append(time.perf_counter() - sent)
            check(record, region, done)
            free.append(region)
        return len(records) * RECORD / (time.perf_counter() - start) / 1e9, latencies


def _sample(number: int) -> tuple[bytes, memoryview]:
    return _SOURCE.key(number), _SOURCE.payload(number)


def _p99_ms(seconds: list[float]) -> float:
    return sorted(seconds)[int(len(seconds) * 0.99)] * 1e3
