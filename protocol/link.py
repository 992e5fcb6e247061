"""Sockets: ZeroMQ with every default that matters set on purpose.

The stable side binds a ROUTER in the run directory, the other side connects a DEALER. Nothing is
dropped in silence: a full socket makes `send` return False and the caller decides.

A peer whose identity has a `#` in it seals its frames: the last four bytes are the CRC-32 of the others
(little endian), both ways. A frame whose seal is broken is as good as lost, and lost ones are sent again:
flipped bits change no token. Our own programs all do this; a client need not.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TypeVar
from zlib import crc32

import zmq

from phalanx.protocol import crowd, faults
from phalanx.protocol.limits import SOCKET_HWM
from phalanx.protocol.rundir import BUS_SOCKET

SEAL_BYTES = 4
F = TypeVar("F")
damaged = 0  # frames that came to this process with a broken seal

_lock = threading.Lock()
_made: "zmq.Context[zmq.Socket[bytes]] | None" = None
_IPC = "ipc://"
_bound: "list[tuple[zmq.Socket[bytes], str]]" = []  # what this process binds at a path
_crowded = False  # see `take_no_more`


def _context() -> "zmq.Context[zmq.Socket[bytes]]":
    """Of this process: there is none before its first socket, so that it may fork until then."""
    global _made
    with _lock:
        _made = _made or zmq.Context()
        return _made


class Peer(zmq.Socket[bytes]):
    """A socket to other processes. `sealed` is of a DEALER; a ROUTER looks at each peer's identity."""

    sealed = False


def bind_router(endpoint: str, max_message_bytes: int) -> "zmq.Socket[bytes]":
    """A ROUTER that refuses larger messages by dropping their sender's connection (libzmq's rule),
    tells when a peer is gone or full, and takes over the identity of a peer that reconnects."""
    socket = _context().socket(zmq.ROUTER, socket_class=Peer)
    _common(socket)
    socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes + SEAL_BYTES)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    socket.bind(endpoint)
    if endpoint.startswith(_IPC):
        _bound.append((socket, endpoint))
    return socket


def binds() -> bool:
    """Whether this process binds a socket at a path."""
    return bool(_bound)


def take_no_more() -> list[Path]:
    """To be called each turn. When descriptors run out, the files of this process's sockets go, so that nobody else
    connects; not of the one for our own processes. Who is connected stays so.

    Returns:
        Those that were removed now, to be told.
    """
    global _crowded
    if _crowded or not _bound or not crowd.full():
        return []
    _crowded = True
    paths = [Path(endpoint.removeprefix(_IPC)) for _, endpoint in _bound]
    gone = [path for path in paths if path.name != BUS_SOCKET]
    for path in gone:
        with contextlib.suppress(OSError):
            path.unlink()
    return gone


def unbound() -> list[str]:
    """Endpoints of those sockets of this process whose file is gone and that may be bound again: somebody deleted
    it, or `take_no_more` did and there is room again. May be asked in another thread: the disk may hang."""
    global _crowded
    if _crowded and not crowd.eased():
        return []
    _crowded = False
    endpoints = [endpoint for socket, endpoint in list(_bound) if not socket.closed]
    return [endpoint for endpoint in endpoints if not os.path.exists(endpoint.removeprefix(_IPC))]


def bind_anew(endpoints: Collection[str]) -> list[tuple[Path, str]]:
    """Bind those again, so that new peers find them. Who is connected stays so.

    Returns:
        (path, empty, or why it could not be bound) of each.
    """
    gone: list[tuple[Path, str]] = []
    _bound[:] = [entry for entry in _bound if not entry[0].closed]
    for socket, endpoint in _bound:
        if endpoint not in endpoints:
            continue
        path = Path(endpoint.removeprefix(_IPC))
        try:
            socket.bind(endpoint)
            gone.append((path, ""))
        except zmq.ZMQError as error:  # the directory is gone, too
            gone.append((path, str(error)))
    return gone


def connect_dealer(
    endpoint: str, identity: str = "", *, only_connected: bool = False
) -> "zmq.Socket[bytes]":
    """A DEALER that reconnects by itself. Messages wait for a peer that is away, unless
    `only_connected`: then `send` fails, and what had not left yet goes with the lost connection."""
    socket = _context().socket(zmq.DEALER, socket_class=Peer)
    _common(socket)
    socket.setsockopt(zmq.IMMEDIATE, int(only_connected))
    socket.sealed = "#" in identity
    if identity:
        socket.setsockopt(zmq.IDENTITY, identity.encode())
    socket.setsockopt(zmq.RECONNECT_IVL, 20)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
    socket.connect(endpoint)
    return socket


def watch_disconnects(socket: "zmq.Socket[bytes]") -> "zmq.Socket[bytes]":
    """A socket that has a message whenever a peer of `socket` is gone; take them with `receive`."""
    return socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)


def thread_pair(name: str) -> "tuple[zmq.Socket[bytes], zmq.Socket[bytes]]":
    """Two connected sockets within this process: a thread sends on one to wake a loop that polls the
    other. Each end belongs to one thread; `name` is unique within the process."""
    here, there = _context().socket(zmq.PAIR), _context().socket(zmq.PAIR)
    for socket in (here, there):
        _common(socket)
    here.bind(f"inproc://{name}")
    there.connect(f"inproc://{name}")
    return here, there


def close_all(sockets: "list[zmq.Socket[bytes]]", linger_ms: int) -> None:
    """The last thing a process does with its sockets, all of them: waits until what was sent has left,
    at most `linger_ms`. Without this, the process may end before its last messages do."""
    for socket in sockets:
        socket.close(linger=linger_ms)
    _context().term()


def _common(socket: "zmq.Socket[bytes]") -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, SOCKET_HWM)
    socket.setsockopt(zmq.RCVHWM, SOCKET_HWM)


def seals(identity: bytes) -> bool:
    """Whether this peer seals its frames. Identities that libzmq draws begin with a zero byte."""
    return b"#" in identity and identity[0] != 0


def seal(frame: bytes) -> bytes:
    return frame + crc32(frame).to_bytes(SEAL_BYTES, "little")


def unseal(frame: bytes) -> bytes | None:
    """The frame without its seal; None, and counted, when the seal is broken."""
    global damaged
    if crc32(memoryview(frame)[:-SEAL_BYTES]).to_bytes(SEAL_BYTES, "little") == frame[-SEAL_BYTES:]:
        return frame[:-SEAL_BYTES]
    damaged += 1
    return None


def send_to(socket: "zmq.Socket[bytes]", identity: bytes, frame: bytes) -> bool | None:
    """ROUTER: send to one peer without waiting. False when its queue is full, None when it is gone."""
    sealed = seals(identity)
    if sealed:
        frame = seal(frame)
    if faults.active is not None:
        return faults.active.leave(frame, sealed, lambda copy: _send_to(socket, identity, copy))
    return _send_to(socket, identity, frame)


def _send_to(socket: "zmq.Socket[bytes]", identity: bytes, frame: bytes) -> bool | None:
    try:
        socket.send_multipart([identity, frame], flags=zmq.NOBLOCK)
    except zmq.Again:
        return False
    except zmq.ZMQError as error:
        if error.errno == zmq.EHOSTUNREACH:
            return None
        raise
    return True


def send(socket: "zmq.Socket[bytes]", frame: bytes) -> bool:
    """DEALER: send without waiting. False when the peer is gone and the queue is full."""
    if not isinstance(socket, Peer):  # within this process: nothing gets lost there
        return _send(socket, frame)
    if socket.sealed:
        frame = seal(frame)
    if faults.active is not None:
        return faults.active.leave(frame, socket.sealed, lambda copy: _send(socket, copy))
    return _send(socket, frame)


def _send(socket: "zmq.Socket[bytes]", frame: bytes) -> bool:
    try:
        socket.send(frame, flags=zmq.NOBLOCK)
    except zmq.Again:
        return False
    return True


def receive_from(socket: "zmq.Socket[bytes]", limit: int) -> list[tuple[bytes, bytes]]:
    """ROUTER: up to `limit` (identity, frame) pairs that are there now. Multi-frame garbage is cut to
    its last frame, which will fail to decode and be answered so; one with a broken seal is dropped."""
    received: list[tuple[bytes, bytes]] = []
    while len(received) < limit:
        try:
            parts = socket.recv_multipart(flags=zmq.NOBLOCK)
        except zmq.Again:
            break
        received.append((parts[0], parts[-1] if len(parts) > 1 else b""))
    if faults.active is not None:
        received = _arrived(faults.active, socket, received, seals)
    opened: list[tuple[bytes, bytes]] = []
    for identity, frame in received:
        body = unseal(frame) if seals(identity) else frame
        if body is not None:
            opened.append((identity, body))
    return opened


def receive(socket: "zmq.Socket[bytes]", limit: int) -> list[bytes]:
    """DEALER: up to `limit` frames that are there now; those with a broken seal are dropped."""
    received: list[bytes] = []
    while len(received) < limit:
        try:
            received.append(socket.recv_multipart(flags=zmq.NOBLOCK)[-1])
        except zmq.Again:
            break
    if not isinstance(socket, Peer):
        return received
    if faults.active is not None:
        pairs = [(b"", frame) for frame in received]
        sealed = socket.sealed
        received = [f for _, f in _arrived(faults.active, socket, pairs, lambda _: sealed)]
    if not socket.sealed:
        return received
    return [body for frame in received if (body := unseal(frame)) is not None]


def for_a_while(
    take: Callable[[], list[F]],
    most: int,
    for_ns: int,
    clock: Callable[[], int] = time.monotonic_ns,
) -> Iterator[F]:
    """What `take` gives, so often and so long: what is left waits in its socket, and no step, no stream and no sign of
    life for what is done with many long messages."""
    until_ns = clock() + for_ns
    for _ in range(most):
        if not (taken := take()):
            return
        yield from taken
        if clock() >= until_ns:
            return


def _arrived(
    active: faults.Faults,
    socket: "zmq.Socket[bytes]",
    received: list[tuple[bytes, bytes]],
    sealed: Callable[[bytes], bool],
) -> list[tuple[bytes, bytes]]:
    """What becomes of frames that came, with those that were held back until now."""
    arrived = active.due(socket)
    for identity, frame in received:
        for copy in active.arrive(socket, identity, frame, sealed(identity)):
            arrived.append((identity, copy))
    return arrived
