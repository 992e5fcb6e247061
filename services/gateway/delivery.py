"""What goes to clients, at the pace at which each of them takes it. Pure.

A client has replies, in order, and requests with something to read. What it does not take stays
where it is (a stream is read from its cursor, so nothing piles up for it) and is offered again.
A client that takes nothing for too long while something waits for it is given up.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from phalanx.protocol.errors import Refused
from phalanx.protocol.limits import CLIENT_STALL_MS
from phalanx.protocol.messages import ClientReply, Error
from phalanx.services.gateway.requests import Request

MS = 1_000_000
REPLIES_MAX = 65_536  # waiting for one client; a client that asks on without reading is given up
AGAIN_NS_MIN, AGAIN_NS_MAX = 2 * MS, 100 * MS

Send = Callable[[bytes, ClientReply], bool | None]  # None: the client is gone


@dataclass(eq=False)
class Client:
    identity: bytes
    replies: deque[ClientReply] = field(default_factory=deque)
    requests: dict[str, Request] = field(default_factory=dict)  # with something to read, in order
    stalled_ns: int | None = None  # since when it takes nothing
    again_ns: int = 0  # offer again not before
    wait_ns: int = AGAIN_NS_MIN


class Delivery:
    def __init__(self) -> None:
        self._clients: dict[bytes, Client] = {}  # those with something to get
        self.refused = 0  # commands

    def reply(self, identity: bytes, message: ClientReply) -> None:
        self._client(identity).replies.append(message)

    def refuse(self, identity: bytes, call: int, refused: Refused) -> None:
        self.refused += 1
        self.reply(identity, Error(call, refused.code, refused.text, refused.retry_after_ms))

    def offer(self, request: Request) -> None:
        """The request may have something for its reader."""
        if request.view is not None:
            self._client(request.view.client).requests[request.request_id] = request

    @property
    def idle(self) -> bool:
        return not self._clients

    def next_ns(self) -> int | None:
        """When a client that did not take something is offered it again; None: no such client."""
        return min((client.again_ns for client in self._clients.values()), default=None)

    def deliver(self, send: Send, now_ns: int) -> list[Request]:
        """Hand over all that is taken; the requests whose every final is now handed over."""
        complete: list[Request] = []
        for client in list(self._clients.values()):
            if client.again_ns > now_ns:
                continue
            if self._deliver_to(client, send, now_ns, complete):
                del self._clients[client.identity]
        return complete

    def given_up(self, now_ns: int) -> list[tuple[bytes, int]]:
        """Clients that took nothing for too long, each with the time in ms; what waited is dropped."""
        lost = [
            (client.identity, (now_ns - client.stalled_ns) // MS)
            for client in self._clients.values()
            if client.stalled_ns is not None
            and (
                now_ns - client.stalled_ns >= CLIENT_STALL_MS * MS
                or len(client.replies) > REPLIES_MAX
            )
        ]
        for identity, _ in lost:
            del self._clients[identity]
        return lost

    def _client(self, identity: bytes) -> Client:
        client = self._clients.get(identity)
        if client is None:
            client = self._clients[identity] = Client(identity)
        return client

    def _deliver_to(self, client: Client, send: Send, now_ns: int, complete: list[Request]) -> bool:
        """True when nothing is left for it."""
        while client.replies:
            if not (taken := send(client.identity, client.replies[0])):
                return self._stall(client, taken, now_ns)
            client.replies.popleft()
            self._took(client)
        while client.requests:
            request_id, request = next(iter(client.requests.items()))
            view = request.view
            if view is not None and view.client == client.identity:
                while (message := request.next_message()) is not None:
                    if not (taken := send(client.identity, message)):
                        return self._stall(client, taken, now_ns)
                    request.handed_over(message)
                    self._took(client)
                if all(view.finals):
                    complete.append(request)
            del client.requests[request_id]
        return True

    def _took(self, client: Client) -> None:
        client.stalled_ns, client.again_ns, client.wait_ns = None, 0, AGAIN_NS_MIN

    def _stall(self, client: Client, taken: bool | None, now_ns: int) -> bool:
        if taken is None:
            self._give_back(client)
        if client.stalled_ns is None:
            client.stalled_ns = now_ns
        client.again_ns = now_ns + client.wait_ns
        client.wait_ns = min(2 * client.wait_ns, AGAIN_NS_MAX)
        return False

    def _give_back(self, gone: Client) -> None:
        """What it reads, to whoever read that before it and has not got all."""
        for request in gone.requests.values():
            if request.view is not None and request.view.client == gone.identity:
                request.give_back()
                self.offer(request)
