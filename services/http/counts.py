"""What the HTTP process counts of itself, for Prometheus."""

import time
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from phalanx.protocol.messages import Delta, Final
from phalanx.services.http.quotas import Door

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Counts:
    """One for the process."""

    def __init__(self, door: Door) -> None:
        self.registry = CollectorRegistry()
        requests = Counter(
            "phalanx_http_requests",
            "Requests that ended, by path and status; 499: the client left.",
            ["path", "status"],
            registry=self.registry,
        )
        first = Histogram(
            "phalanx_http_first_token_seconds",
            "From the request to its first token.",
            ["path"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        whole = Histogram(
            "phalanx_http_request_seconds",
            "From the request to its end.",
            ["path"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        tokens = Counter(
            "phalanx_http_tokens", "Tokens sent to clients.", ["path"], registry=self.registry
        )
        self._metrics = (requests, first, whole, tokens)
        for name, text, read in (
            ("running", "Requests let in that have not ended.", lambda: door.running),
            ("waiting", "Requests that wait to be let in.", lambda: door.waiting),
        ):
            gauge = Gauge(f"phalanx_http_{name}", text, registry=self.registry)
            gauge.set_function(read)

    def request(self, path: str) -> "Counted":
        return Counted(path, *self._metrics)


class Counted:
    """One request; `end` is called once, when it is over."""

    def __init__(
        self, path: str, requests: Counter, first: Histogram, whole: Histogram, tokens: Counter
    ) -> None:
        self.status = 200
        self._path = path
        self._requests, self._first = requests, first.labels(path)
        self._whole, self._tokens = whole.labels(path), tokens.labels(path)
        self._started = time.monotonic()
        self._begun = False

    def saw(self, events: Sequence[Delta | Final]) -> None:
        count = sum(len(event.token_ids) for event in events if isinstance(event, Delta))
        if not count:
            return
        self._tokens.inc(count)
        if not self._begun:
            self._begun = True
            self._first.observe(time.monotonic() - self._started)

    def end(self) -> None:
        self._requests.labels(self._path, str(self.status)).inc()
        self._whole.observe(time.monotonic() - self._started)
