"""Embedded stores beside which `bench kvstore` puts its figures, when they are installed."""

import importlib
import importlib.util
import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

BATCH = 32
Sample = Callable[[int], tuple[bytes, memoryview]]  # number to key and payload


class Peer(Protocol):
    def put(self, records: list[tuple[bytes, memoryview]]) -> None:
        """Store and sync."""

    def get(self, key: bytes) -> bytes | None: ...
    def close(self) -> None: ...


class Lmdb:
    def __init__(self, directory: Path, nbytes: int) -> None:
        lmdb = importlib.import_module("lmdb")
        self._env = lmdb.open(str(directory), map_size=nbytes, readahead=False)

    def put(self, records: list[tuple[bytes, memoryview]]) -> None:
        with self._env.begin(write=True) as transaction:
            for key, payload in records:
                transaction.put(key, payload)

    def get(self, key: bytes) -> bytes | None:
        with self._env.begin() as transaction:
            found: bytes | None = transaction.get(key)
        return found

    def close(self) -> None:
        self._env.close()


class RocksDb:
    """With large values in blob files and direct reads: its best settings for this use."""

    def __init__(self, directory: Path, nbytes: int) -> None:
        self._library: Any = importlib.import_module("rocksdict")
        options = self._library.Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_compression_type(self._library.DBCompressionType.none())
        options.set_enable_blob_files(True)
        options.set_min_blob_size(4096)
        options.set_use_direct_reads(True)
        options.set_use_direct_io_for_flush_and_compaction(True)
        self._db = self._library.Rdict(str(directory), options)
        self._synced = self._library.WriteOptions()
        self._synced.sync = True

    def put(self, records: list[tuple[bytes, memoryview]]) -> None:
        batch = self._library.WriteBatch(raw_mode=True)
        for key, payload in records:
            batch.put(key, bytes(payload))
        self._db.write(batch, self._synced)

    def get(self, key: bytes) -> bytes | None:
        found: bytes | None = self._db.get(key)
        return found

    def close(self) -> None:
        self._db.close()


PEERS: dict[str, tuple[str, Callable[[Path, int], Peer]]] = {
    "rocksdb": ("rocksdict", RocksDb),
    "lmdb": ("lmdb", Lmdb),
}


def run_peers(records: int, scratch: Path, sample: Sample) -> dict[str, dict[str, float]]:
    """`put_gbps` and `get_gbps` of each peer that is installed."""
    figures = {}
    for name, (module, open_peer) in PEERS.items():
        if importlib.util.find_spec(module) is not None:
            directory = scratch / name
            directory.mkdir()
            figures[name] = _measure(open_peer, records, directory, sample)
            shutil.rmtree(directory)
    return figures


def _measure(
    open_peer: Callable[[Path, int], Peer], records: int, directory: Path, sample: Sample
) -> dict[str, float]:
    nbytes = records * len(sample(0)[1])
    peer = open_peer(directory, 4 * nbytes + (1 << 30))
    start = time.perf_counter()
    for first in range(0, records, BATCH):
        peer.put([sample(i) for i in range(first, min(first + BATCH, records))])
    put_s = time.perf_counter() - start
    peer.close()
    _evict(directory)
    peer = open_peer(directory, 4 * nbytes + (1 << 30))
    order = random.Random(2).sample(range(records), records)
    start = time.perf_counter()
    for number in order:
        key, payload = sample(number)
        found = peer.get(key)
        if found is None or found[:64] != payload[:64]:
            raise RuntimeError(f"{open_peer} lost record {number}")
    get_s = time.perf_counter() - start
    peer.close()
    return {"put_gbps": round(nbytes / put_s / 1e9, 3), "get_gbps": round(nbytes / get_s / 1e9, 3)}


def _evict(directory: Path) -> None:
    """Drop the files from the page cache, so that buffered readers are cold too."""
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
