"""Who of the services is who: they introduce themselves, and are told who the gateway is. Pure."""

import re
from collections.abc import Callable

from phalanx.protocol.messages import Hello, Welcome
from phalanx.services.gateway.placement import Placement
from phalanx.services.gateway.texts import Texts


class Peers:
    def __init__(
        self,
        texts: Texts,
        placement: Placement,
        send: Callable[[bytes, Welcome], None],
        incarnation: int,
    ) -> None:
        self._texts, self._placement = texts, placement
        self._send, self._welcome = send, Welcome(incarnation)
        self._newest: dict[str, int] = {}  # incarnation of each service

    def hello(self, peer: bytes, hello: Hello, now_ns: int) -> None:
        self.welcome(peer)
        if hello.incarnation < self._newest.get(hello.name, 0):
            return  # a late word of a dead one
        self._newest[hello.name] = hello.incarnation
        if hello.kind == "tokenizer":
            self._texts.hello(peer, hello.name, hello.incarnation, now_ns)
        else:
            self._placement.hello(peer, hello.seat, hello.incarnation, now_ns)

    def known(self, peer: bytes, now_ns: int) -> bool:
        """Whether its Hello came. If not, its name is as good: a Hello may be lost."""
        if self._texts.knows(peer) or self._placement.seats.of(peer) is not None:
            return True
        hello = introduction(peer)
        if hello is not None:
            self.hello(peer, hello, now_ns)
        return False

    def welcome(self, peer: bytes) -> None:
        """A stranger learns from this that there is a new gateway, and introduces itself."""
        self._send(peer, self._welcome)

    def welcome_unheard(self) -> None:
        """Whoever knew another gateway introduces itself; else an idle one would not for a second."""
        for seat in self._placement.seats.unheard():
            self.welcome(b"scheduler-%d#%d" % (seat.number, seat.incarnation))

    def welcome_busy(self) -> None:
        """Harmless to the living; that it cannot be sent tells that a tokenizer is gone."""
        for peer in self._texts.busy_peers():
            self.welcome(peer)


def introduction(peer: bytes) -> Hello | None:
    """What the bus identity NAME-NUMBER#INCARNATION of a service says of it."""
    match = re.fullmatch(rb"(tokenizer|scheduler)-(\d{1,9})#(\d{1,9})", peer)
    if match is None:
        return None
    kind, number, incarnation = match[1].decode(), int(match[2]), int(match[3])
    if kind == "scheduler":
        return Hello(f"scheduler-{number}", "scheduler", incarnation, number)
    return Hello(f"tokenizer-{number}", "tokenizer", incarnation)
