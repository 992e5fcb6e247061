"""Finished requests, kept for clients that come back, within bounds. Pure."""

from collections.abc import Iterator

from phalanx.services.gateway.requests import Request

MS = 1_000_000
KEEP_NS = 60_000 * MS  # a request stays for this long after its last delivery
KEPT_MAX = 16_384  # requests; beyond, the oldest are forgotten
KEPT_TOKENS_MAX = 4 << 20  # tokens in memory; beyond, the oldest are produced again if anyone asks


class Kept:
    def __init__(self, undelivered_ns: int, logged: bool = False) -> None:
        """`logged`: tokens cannot be produced again; beyond the bound, whole requests go."""
        self._undelivered_ns, self._logged = undelivered_ns, logged
        self._requests: dict[str, Request] = {}  # oldest first
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._requests)

    def keep(self, request: Request, now_ns: int) -> None:
        """It has ended, again if it was produced once more."""
        if request.finished_ns is None:
            request.finished_ns = now_ns
            self._requests[request.request_id] = request
        self._count(request)
        if self._num_tokens > KEPT_TOKENS_MAX and not self._logged:
            self._empty_oldest()

    def forget(self, request: Request) -> None:
        if self._requests.pop(request.request_id, None) is not None:
            self._num_tokens -= request.kept_tokens

    def old(self, now_ns: int) -> Iterator[Request]:
        """Those whose time is over, and the oldest beyond the bound; none that is being read."""
        surplus = len(self._requests) - KEPT_MAX
        too_many = self._num_tokens - KEPT_TOKENS_MAX if self._logged else 0
        for request in list(self._requests.values()):
            assert request.finished_ns is not None
            if request.being_read:
                continue  # a reader that takes nothing is given up (`delivery.py`)
            if request.delivered_ns is not None:
                over = now_ns - request.delivered_ns >= KEEP_NS
            else:
                over = now_ns - request.finished_ns >= self._undelivered_ns
            if over or surplus > 0 or (too_many > 0 and request.finished):
                surplus -= 1
                too_many -= request.kept_tokens
                yield request

    def _count(self, request: Request) -> None:
        self._num_tokens -= request.kept_tokens
        request.kept_tokens = request.num_tokens
        self._num_tokens += request.kept_tokens

    def _empty_oldest(self) -> None:
        """Let go of the tokens of requests that nobody is reading now."""
        for request in self._requests.values():
            if request.kept_tokens and request.unread:
                for stream in request.streams:
                    stream.clear()
                self._count(request)
                if self._num_tokens <= KEPT_TOKENS_MAX // 2:
                    return
