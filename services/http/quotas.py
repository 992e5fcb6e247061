"""Whose request runs, whose waits and whose is sent away. Pure.

Requests of one key share its quota, and all keys share the server. What is free goes to the key with the
fewest running requests, so that one heavy client never starves the others; within a key the oldest goes first.

When capacity falls (ranks are lost) running requests go on; of the waiting ones, as many as no longer fit are
sent away, each time the newest of the key that has most of them waiting.
"""

from collections import deque
from dataclasses import dataclass, field

from phalanx.services.http.errors import HttpError

_RATE_WINDOW_NS = 30_000_000_000
_RETRY_S_MAX = 60


@dataclass(frozen=True)
class Quota:
    """What one key may have at a time."""

    running: int
    waiting: int


@dataclass(eq=False)
class Ticket:
    """One request at the door."""

    key: str
    running: bool = False


@dataclass
class _Holder:
    quota: Quota
    running: int = 0
    waiting: deque[Ticket] = field(default_factory=deque)


class Door:
    """Tickets of all keys. `enter`, `leave` and `set_capacity` say what changes for whom."""

    def __init__(self, running_max: int, waiting_max: int, default: Quota) -> None:
        self._running_max, self._waiting_max = running_max, waiting_max
        self._default = default
        self._quotas: dict[str, Quota] = {}
        self._holders: dict[str, _Holder] = {}
        self._capacity = 1.0
        self._ended_ns: deque[int] = deque()
        self.running = 0
        self.waiting = 0

    def set_quota(self, key: str, quota: Quota) -> None:
        self._quotas[key] = quota

    def enter(self, key: str, now_ns: int) -> Ticket:
        """A ticket that runs at once or waits. Raises HttpError 429 when neither is possible."""
        holder = self._holders.setdefault(key, _Holder(self._quotas.get(key, self._default)))
        ticket = Ticket(key)
        if self.running < self._running_limit and holder.running < holder.quota.running:
            self._run(holder, ticket)
            return ticket
        if len(holder.waiting) >= holder.quota.waiting:
            self._forget(holder, key)
            raise self._refusal(
                f"this key has {holder.running} requests running and {len(holder.waiting)} waiting,"
                f" its quota is {holder.quota.running} and {holder.quota.waiting}",
                len(holder.waiting),
                now_ns,
            )
        if self.waiting >= self._waiting_limit:
            self._forget(holder, key)
            raise self._refusal(
                f"the server has {self.running} requests running and {self.waiting} waiting,"
                f" its limits are {self._running_limit} and {self._waiting_limit}",
                self.waiting,
                now_ns,
            )
        holder.waiting.append(ticket)
        self.waiting += 1
        return ticket

    def leave(self, ticket: Ticket, now_ns: int) -> list[Ticket]:
        """The request ended or its client went away; the tickets that run from now on."""
        holder = self._holders[ticket.key]
        if ticket.running:
            holder.running -= 1
            self.running -= 1
            self._ended_ns.append(now_ns)
        else:
            holder.waiting.remove(ticket)
            self.waiting -= 1
        self._forget(holder, ticket.key)
        return self._admit()

    def set_capacity(self, part: float, now_ns: int) -> tuple[list[Ticket], list[Ticket]]:
        """The part of its ranks that the node has now: (tickets that run from now on, tickets sent away)."""
        self._capacity = part
        started, shed = self._admit(), list[Ticket]()
        while self.waiting > self._waiting_limit:
            key, holder = max(self._holders.items(), key=lambda item: len(item[1].waiting))
            shed.append(holder.waiting.pop())
            self.waiting -= 1
            self._forget(holder, key)
        return started, shed

    def shed_error(self, now_ns: int) -> HttpError:
        """What a ticket that was sent away hears."""
        error = self._refusal("ranks were lost and the server has less room", self.waiting, now_ns)
        return HttpError(503, "overloaded", error.text, retry_after_s=error.retry_after_s)

    @property
    def _running_limit(self) -> int:
        return max(1, int(self._running_max * self._capacity))

    @property
    def _waiting_limit(self) -> int:
        return int(self._waiting_max * self._capacity)

    def _admit(self) -> list[Ticket]:
        started: list[Ticket] = []
        while self.running < self._running_limit:
            open_to = [
                holder
                for holder in self._holders.values()
                if holder.waiting and holder.running < holder.quota.running
            ]
            if not open_to:
                break
            holder = min(open_to, key=lambda holder: holder.running)
            ticket = holder.waiting.popleft()
            self.waiting -= 1
            self._run(holder, ticket)
            started.append(ticket)
        return started

    def _run(self, holder: _Holder, ticket: Ticket) -> None:
        ticket.running = True
        holder.running += 1
        self.running += 1

    def _forget(self, holder: _Holder, key: str) -> None:
        if not holder.running and not holder.waiting:
            del self._holders[key]

    def _refusal(self, text: str, ahead: int, now_ns: int) -> HttpError:
        """With the time that those ahead need at the rate of the last half minute."""
        while self._ended_ns and self._ended_ns[0] < now_ns - _RATE_WINDOW_NS:
            self._ended_ns.popleft()
        rate = len(self._ended_ns) / (_RATE_WINDOW_NS / 1e9)
        wait_s = (ahead + 1) / rate if rate else 1.0
        retry_after_s = max(1, min(_RETRY_S_MAX, round(wait_s)))
        text = f"{text}; try again in {retry_after_s} s"
        return HttpError(429, "overloaded", text, retry_after_s=retry_after_s)
