"""What crossing a process border costs: a ZeroMQ round trip, and 16 MiB by handle against by copy."""

import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import msgspec

from phalanx.protocol.arena import Arena, Handle, arena_name
from phalanx.protocol.link import bind_router, connect_dealer

_ROUND_TRIPS = 3000
_BULK_BYTES = 16 << 20
_BULK_TRIES = 20
_MESSAGE_BYTES = 2048


def run() -> dict[str, Any]:
    """Fields of `phalanx bench ipc`; medians over the tries, in microseconds."""
    with tempfile.TemporaryDirectory(prefix="phipc") as folder:
        address = f"ipc://{folder}/s"
        router = bind_router(address, 64 << 20)
        child = subprocess.Popen([sys.executable, "-P", "-m", "phalanx.bench.ipc", folder])
        try:
            peer, _ = router.recv_multipart()
            small = bytes(_MESSAGE_BYTES)
            trips = sorted(_times(_ROUND_TRIPS, lambda: _trip(router, peer, small)))
            bulk = bytes(_BULK_BYTES)
            copies = sorted(_times(_BULK_TRIES, lambda: _trip(router, peer, bulk)))
            node = f"bench{uuid.uuid4().hex[:8]}"
            with Arena.create(arena_name(node, "bulk", 1), _BULK_BYTES) as arena:
                handles = sorted(_times(_BULK_TRIES, lambda: _by_handle(router, peer, arena, bulk)))
            router.send_multipart([peer, b""])
        finally:
            child.wait(10)
            router.close()
    return {
        "zmq_rtt_us_p50": _percentile(trips, 0.5),
        "zmq_rtt_us_p99": _percentile(trips, 0.99),
        "handle_16mb_us": _percentile(handles, 0.5),
        "zmq_copy_16mb_us": _percentile(copies, 0.5),
    }


def _times(count: int, work: Any) -> list[float]:
    taken = []
    for _ in range(count):
        started = time.perf_counter()
        work()
        taken.append((time.perf_counter() - started) * 1e6)
    return taken


def _percentile(ordered: list[float], share: float) -> float:
    return round(ordered[min(len(ordered) - 1, int(len(ordered) * share))], 1)


def _trip(router: Any, peer: bytes, message: bytes) -> None:
    router.send_multipart([peer, message])
    router.recv_multipart()


def _by_handle(router: Any, peer: bytes, arena: Arena, data: bytes) -> None:
    """The writer's copy into the arena is part of the price; the reader copies out."""
    arena.data[:] = data
    handle = arena.handle(0, len(data))
    router.send_multipart([peer, b"H" + msgspec.msgpack.encode(handle)])
    router.recv_multipart()


def _echo(folder: Path) -> None:
    """The other process: answers every message; takes bulk data by copy or by handle."""
    socket = connect_dealer(f"ipc://{folder}/s")
    socket.send(b"")
    arenas: dict[str, Arena] = {}
    while message := socket.recv():
        if message[:1] == b"H":
            handle = msgspec.msgpack.decode(message[1:], type=Handle)
            if handle.arena not in arenas:
                arenas[handle.arena] = Arena.attach(handle.arena)
            taken = arenas[handle.arena].copy_out(handle)
            socket.send(len(taken).to_bytes(8, "little"))
        else:
            socket.send(message if len(message) <= _MESSAGE_BYTES else message[:8])
    socket.close()


if __name__ == "__main__":
    _echo(Path(sys.argv[1]))
