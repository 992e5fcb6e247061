"""Sockets: ZeroMQ with every default that matters set on purpose.

The stable side binds a ROUTER in the run directory, the other side connects a DEALER. Nothing is
dropped in silence: a full socket makes `send` return False and the caller decides.
"""

import zmq

from phalanx.protocol.limits import SOCKET_HWM

_context = zmq.Context()


def bind_router(endpoint: str, max_message_bytes: int) -> "zmq.Socket[bytes]":
    """A ROUTER that refuses larger messages by dropping their sender's connection (libzmq's rule),
    tells when a peer is gone or full, and takes over the identity of a peer that reconnects."""
    socket = _context.socket(zmq.ROUTER)
    _common(socket)
    socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    socket.bind(endpoint)
    return socket


def connect_dealer(
    endpoint: str, identity: str = "", *, only_connected: bool = False
) -> "zmq.Socket[bytes]":
    """A DEALER that reconnects by itself. Messages wait for a peer that is away, unless
    `only_connected`: then `send` fails, and what had not left yet goes with the lost connection."""
    socket = _context.socket(zmq.DEALER)
    _common(socket)
    socket.setsockopt(zmq.IMMEDIATE, int(only_connected))
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
    here, there = _context.socket(zmq.PAIR), _context.socket(zmq.PAIR)
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
    _context.term()


def _common(socket: "zmq.Socket[bytes]") -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, SOCKET_HWM)
    socket.setsockopt(zmq.RCVHWM, SOCKET_HWM)


def send_to(socket: "zmq.Socket[bytes]", identity: bytes, frame: bytes) -> bool:
    """ROUTER: send to one peer without waiting. False when the peer is gone or its queue is full."""
    try:
        socket.send_multipart([identity, frame], flags=zmq.NOBLOCK)
    except zmq.Again:
        return False
    except zmq.ZMQError as error:
        if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
            return False
        raise
    return True


def send(socket: "zmq.Socket[bytes]", frame: bytes) -> bool:
    """DEALER: send without waiting. False when the peer is gone and the queue is full."""
    try:
        socket.send(frame, flags=zmq.NOBLOCK)
    except zmq.Again:
        return False
    return True


def receive_from(socket: "zmq.Socket[bytes]", limit: int) -> list[tuple[bytes, bytes]]:
    """ROUTER: up to `limit` (identity, frame) pairs that are there now. Multi-frame garbage is cut to
    its last frame, which will fail to decode and be answered so."""
    received: list[tuple[bytes, bytes]] = []
    while len(received) < limit:
        try:
            parts = socket.recv_multipart(flags=zmq.NOBLOCK)
        except zmq.Again:
            break
        received.append((parts[0], parts[-1] if len(parts) > 1 else b""))
    return received


def receive(socket: "zmq.Socket[bytes]", limit: int) -> list[bytes]:
    """DEALER: up to `limit` frames that are there now."""
    received: list[bytes] = []
    while len(received) < limit:
        try:
            received.append(socket.recv_multipart(flags=zmq.NOBLOCK)[-1])
        except zmq.Again:
            break
    return received
