"""Faults on purpose: which signal goes to which process, and when a stopped one may go on. No clock, no kill."""

import random
import signal
from collections.abc import Mapping

from phalanx.protocol.errors import Code, ConfigError
from phalanx.protocol.messages import Error, Inject, Injected
from phalanx.supervisor.events import Kill

# `list` only tells which processes a target names; `gpu-loss` is what the node sees of a lost GPU.
SIGNALS = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "cont": signal.SIGCONT,
    "gpu-loss": signal.SIGKILL,
}
KINDS = ("list", *SIGNALS)
MS_MAX = 600_000
RANDOM = "random:"


class Injector:
    """Answers `Inject` for a node that was started with `fault_injection`, and refuses it otherwise."""

    def __init__(self, enabled: bool, rng: random.Random) -> None:
        self._enabled, self._rng = enabled, rng
        self._stopped: list[tuple[int, Kill]] = []  # when each goes on, and how

    def handle(
        self, request: Inject, living: Mapping[str, int], now_ns: int
    ) -> tuple[Injected | Error, list[Kill]]:
        """The answer, and the signals to send.

        Args:
            living: name -> incarnation of the processes that exist now.
        """
        if not self._enabled:
            text = "fault injection is off on this node: start it with phalanx up --inject"
            return Error(request.call, Code.NOT_READY, text), []
        try:
            _check(request)
            chosen = targets(request.kind, request.target, sorted(living), self._rng)
        except ConfigError as error:
            return Error(request.call, Code.BAD_REQUEST, str(error)), []
        number = SIGNALS.get(request.kind)
        kills = [] if number is None else [Kill(name, living[name], number) for name in chosen]
        if number == signal.SIGSTOP and request.ms:
            due_ns = now_ns + request.ms * 1_000_000
            for kill in kills:
                go_on = Kill(kill.name, kill.incarnation, signal.SIGCONT)
                self._stopped.append((due_ns, go_on))
        return Injected(request.call, chosen), kills

    def due(self, now_ns: int) -> list[Kill]:
        """The processes whose time of being stopped is over."""
        due = [kill for at_ns, kill in self._stopped if at_ns <= now_ns]
        self._stopped = [entry for entry in self._stopped if entry[0] > now_ns]
        return due

    def wait_ms(self, now_ns: int, most: int) -> int:
        """How long to sleep at most so that `due` is asked in time."""
        left = [max(0, at_ns - now_ns) // 1_000_000 + 1 for at_ns, _ in self._stopped]
        return min([most, *left])


def _check(request: Inject) -> None:
    if request.kind not in KINDS:
        raise ConfigError(f"unknown fault {request.kind!r}; there are: {', '.join(KINDS)}")
    if not 0 <= request.ms <= MS_MAX:
        raise ConfigError(f"ms is {request.ms}, allowed: 0 to {MS_MAX}")
    if request.ms and request.kind != "stop":
        raise ConfigError(f"ms is how long `stop` lasts; {request.kind} has no duration")


def targets(kind: str, target: str, names: list[str], rng: random.Random) -> tuple[str, ...]:
    """The processes that `target` names: one name, a prefix of names, or random:PREFIX for one of them.

    Raises ConfigError when that is none, listing what there is.
    """
    if kind == "gpu-loss":  # only a worker holds a GPU
        names = [name for name in names if name.startswith("worker-")]
    wanted = target.removeprefix(RANDOM)
    # The whole name first: worker-1 is not worker-10.
    found = [name for name in names if name == wanted]
    found = found or [name for name in names if wanted and name.startswith(wanted)]
    if not found:
        raise ConfigError(f"no process is called {wanted!r} or begins so; there are: {names}")
    return (rng.choice(found),) if target.startswith(RANDOM) else tuple(found)
