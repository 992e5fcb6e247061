"""Faults on purpose: what a request means for which process. No clock, no signal, no shared memory.

Signals are sent at once. Everything else is written into the row of a process (`SetFaults`), which then
does it to itself: `protocol/faults.py`.
"""

import random
import re
import signal
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import get_args

from phalanx.protocol import messages
from phalanx.protocol.errors import Code, ConfigError
from phalanx.protocol.failpoints import NAMES, kind_of
from phalanx.protocol.fault_table import Action, Fault, FaultKind, MessageKind
from phalanx.protocol.limits import FAULTS_MAX
from phalanx.protocol.messages import Error, Inject, Injected, Message
from phalanx.protocol.placement import Placement, copies
from phalanx.supervisor.events import Kill

# `gpu-loss` is what the node sees of a lost GPU.
SIGNALS = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "cont": signal.SIGCONT,
    "gpu-loss": signal.SIGKILL,
}
ACTIONS: tuple[Action, ...] = get_args(Action)
MESSAGES: tuple[MessageKind, ...] = get_args(MessageKind)
MESSAGE_TYPES = frozenset(
    name
    for name, kind in vars(messages).items()
    if isinstance(kind, type) and issubclass(kind, Message)
)
WRITTEN: dict[str, FaultKind] = {
    **{kind: kind for kind in MESSAGES},
    "slow": "slow",
    "diskfull": "diskfull",
    "ulp": "ulp",
    "bitflip": "bitflip",
    "failpoint": "failpoint",
}
# `list` only tells which processes a target names, or the names of failpoints.
KINDS = ("list", *SIGNALS, *WRITTEN, "clear")
DISKS = {"gateway": "journal", "kvstore": "kvstore"}  # by kind of process
MS_MAX = 600_000
COUNT_MAX = 1_000_000
RANDOM = "random:"
ALL = "all"
SUPERVISOR = "supervisor"
FAILPOINTS = "failpoints"
ANSWERS_MAX = 64  # remembered, for questions that are repeated
_MS = 1_000_000
_AMOUNT = ("slow", "delay")  # whose `ms` is an amount, not a duration


@dataclass(frozen=True, slots=True)
class SetFaults:
    """Write these faults into the process's row; the counters of the slots in `fresh` begin anew."""

    name: str
    faults: tuple[Fault, ...]
    fresh: tuple[int, ...] = ()


class Injector:
    """Answers `Inject` for a node that was started with `fault_injection`, and refuses it otherwise.

    Args:
        processes: names of all processes of the node, live or not; looked at each time.
        came_up: (process, slot) -> how often that fault of it was passed, or hit something.
        placement: which experts the ranks have; None: not yet.
    """

    def __init__(
        self,
        enabled: bool,
        rng: random.Random,
        processes: Collection[str] = (),
        came_up: Callable[[str, int], int] = lambda name, slot: 0,
        placement: Callable[[], Placement | None] = lambda: None,
    ) -> None:
        self._enabled, self._rng = enabled, rng
        self._processes, self._came_up, self._placement = processes, came_up, placement
        self._stopped: list[tuple[int, Kill]] = []  # when each goes on, and how
        self._halted: dict[str, int] = {}  # name -> incarnation of those that were sent SIGSTOP
        self._faults: dict[str, tuple[Fault, ...]] = {}
        self._answers: dict[tuple[bytes, int], Injected | Error] = {}

    def answer(
        self, peer: bytes, request: Inject, living: Mapping[str, int], now_ns: int
    ) -> tuple[Injected | Error, list[Kill | SetFaults]]:
        """`handle`, but a request that is repeated by the same peer does nothing a second time."""
        key = (peer, request.call)
        if key in self._answers:
            return self._answers[key], []
        reply, actions = self.handle(request, living, now_ns)
        self._answers[key] = reply
        if len(self._answers) > ANSWERS_MAX:
            del self._answers[next(iter(self._answers))]
        return reply, actions

    def handle(
        self, request: Inject, living: Mapping[str, int], now_ns: int
    ) -> tuple[Injected | Error, list[Kill | SetFaults]]:
        """The answer, the signals to send and the rows to write.

        Args:
            living: name -> incarnation of the processes that exist now.
        """
        if not self._enabled:
            text = "fault injection is off on this node: start it with phalanx up --inject"
            return Error(request.call, Code.NOT_READY, text), []
        try:
            _check(request)
            if request.kind == "list" and request.target == FAILPOINTS:
                return Injected(request.call, tuple(NAMES)), []
            chosen, actions = self._actions(request, living, now_ns)
        except ConfigError as error:
            return Error(request.call, Code.BAD_REQUEST, str(error)), []
        armed = self._armed(chosen, living, now_ns) if request.kind == "list" else ()
        return Injected(request.call, chosen, armed), actions

    def _actions(
        self, request: Inject, living: Mapping[str, int], now_ns: int
    ) -> tuple[tuple[str, ...], list[Kill | SetFaults]]:
        kind = request.kind
        if kind in WRITTEN or kind == "clear":
            names = sorted({*self._processes, *living, SUPERVISOR})
            chosen = targets(kind, request.target, _fit(request, names), self._rng)
            if kind == "clear":
                return chosen, [*map(self._clear, chosen), *self._go_on(chosen, living)]
            self._check_escape(request, chosen)
            placement = self._placement()
            if kind == "bitflip" and request.only and placement is not None:
                chosen = _that_have(request.only, placement, chosen)
            return chosen, [self._add(name, request, now_ns) for name in chosen]
        there = {*living}
        if kind == "list":  # a fault may wait for a process that is yet to start
            there |= {name for name in self._faults if self._lasting(name, now_ns)}
        chosen = targets(kind, request.target, sorted(there), self._rng)
        number = SIGNALS.get(kind)
        kills = [] if number is None else [Kill(name, living[name], number) for name in chosen]
        for kill in kills:
            if number == signal.SIGSTOP:
                self._halted[kill.name] = kill.incarnation
            else:
                self._halted.pop(kill.name, None)
            if number == signal.SIGSTOP and request.ms:
                due_ns = now_ns + request.ms * _MS
                self._stopped.append((due_ns, replace(kill, signal=signal.SIGCONT)))
        return chosen, [*kills]

    def _go_on(self, chosen: tuple[str, ...], living: Mapping[str, int]) -> list[Kill]:
        """SIGCONT to all of them: it does nothing to one that runs, and a failpoint may have stopped one."""
        self._stopped = [entry for entry in self._stopped if entry[1].name not in chosen]
        for name in chosen:
            self._halted.pop(name, None)
        return [Kill(name, living[name], signal.SIGCONT) for name in chosen if name in living]

    def _armed(
        self, chosen: tuple[str, ...], living: Mapping[str, int], now_ns: int
    ) -> tuple[str, ...]:
        """What is wrong with these processes on purpose, one thing a line."""
        told: list[str] = []
        for name in chosen:
            if name in self._halted and self._halted[name] == living.get(name):
                told.append(f"{name}: stop")
            for fault in self._lasting(name, now_ns):
                told.append(f"{name}: {_describe(fault, self._came_up(name, fault.slot))}")
        return tuple(told)

    def _lasting(self, name: str, now_ns: int) -> list[Fault]:
        """The faults of a process that are not over: neither their time, nor as often as they were to act."""
        return [
            fault
            for fault in self._faults.get(name, ())
            if not 0 < fault.until_ns <= now_ns
            and not (fault.count and _left(fault, self._came_up(name, fault.slot)) <= 0)
        ]

    def _check_escape(self, request: Inject, chosen: tuple[str, ...]) -> None:
        """A supervisor that hears nothing any more could not be told to stop that, either."""
        endless = request.rate >= 1 and not request.count and not request.ms
        deaf = request.kind in ("drop", "corrupt") and not request.only and endless
        if SUPERVISOR in chosen and deaf:
            raise ConfigError(
                f"{request.kind} of every message of the supervisor could not be cleared any more:"
                " give --rate, --count, --ms or --only"
            )

    def _add(self, name: str, request: Inject, now_ns: int) -> SetFaults:
        kind = WRITTEN[request.kind]
        known = self._lasting(name, now_ns)
        slot = next(n for n in range(FAULTS_MAX + 1) if n not in {f.slot for f in known})
        if slot == FAULTS_MAX:
            raise ConfigError(
                f"{name} has {FAULTS_MAX} faults already: phalanx inject clear {name}"
            )
        lasts_ms = 0 if kind in (*_AMOUNT, "failpoint") else request.ms
        action = next((a for a in ACTIONS if a == request.action), ACTIONS[0])
        until_ns = now_ns + lasts_ms * _MS if lasts_ms else 0
        fault = Fault(
            slot,
            kind,
            request.only,
            request.rate,
            request.count or (1 if kind == "bitflip" else 0),
            request.ms,
            until_ns,
            action,
            request.nth,
        )
        self._faults[name] = (*known, fault)
        return SetFaults(name, self._faults[name], (slot,))

    def _clear(self, name: str) -> SetFaults:
        self._faults.pop(name, None)
        return SetFaults(name, ())

    def due(self, now_ns: int) -> list[Kill]:
        """The processes whose time of being stopped is over."""
        due = [kill for at_ns, kill in self._stopped if at_ns <= now_ns]
        for kill in due:
            self._halted.pop(kill.name, None)
        self._stopped = [entry for entry in self._stopped if entry[0] > now_ns]
        return due

    def wait_ms(self, now_ns: int, most: int) -> int:
        """How long to sleep at most so that `due` is asked in time."""
        left = [max(0, at_ns - now_ns) // _MS + 1 for at_ns, _ in self._stopped]
        return min([most, *left])


def _left(fault: Fault, came_up: int) -> int:
    """How often one with a `count` acts yet."""
    return fault.count - max(0, came_up - (fault.nth - 1))


def _describe(fault: Fault, came_up: int) -> str:
    parts = [fault.kind, fault.name]
    if fault.kind == "failpoint":
        late = f"from the {fault.nth}. time on (passed {came_up} times)"
        parts += [fault.action, late if fault.nth > 1 else ""]
    parts += [
        f"rate {fault.rate:g}" if fault.rate < 1 else "",
        f"{_left(fault, came_up)} of {fault.count} times left" if fault.count else "",
        f"{fault.ms} ms" if fault.ms else "",
    ]
    return " ".join(part for part in parts if part)


def _check(request: Inject) -> None:
    """Raises ConfigError, naming the number and what is allowed."""
    kind = request.kind
    if kind not in KINDS:
        raise ConfigError(f"unknown fault {kind!r}; there are: {', '.join(KINDS)}")
    if not 0 <= request.ms <= MS_MAX:
        raise ConfigError(f"--ms is {request.ms}, allowed: 0 to {MS_MAX}")
    if not 0 < request.rate <= 1:
        raise ConfigError(f"--rate is {request.rate}, allowed: above 0, at most 1")
    if not 0 <= request.count <= COUNT_MAX or not 1 <= request.nth <= COUNT_MAX:
        raise ConfigError(
            f"--count is {request.count} and --nth {request.nth}, allowed: 0 and 1 to {COUNT_MAX}"
        )
    timed = kind in ("stop", *WRITTEN) and (kind != "failpoint" or request.action == "sleep")
    if request.ms and not timed:
        raise ConfigError(f"--ms is of no use with {request.action or kind}, which has no duration")
    if not request.ms and (kind in _AMOUNT or request.action == "sleep"):
        text = f"{request.action or kind} needs --ms: how long at a time, 1 to {MS_MAX}"
        raise ConfigError(text)
    if (request.rate, request.count) != (1.0, 0) and kind not in WRITTEN:
        raise ConfigError(f"{kind} happens at once and to all: it has neither --rate nor --count")
    if kind == "failpoint":
        _check_failpoint(request)
    elif request.action or request.nth != 1:
        raise ConfigError(f"only a failpoint has --action and --nth, {kind} has not")
    if kind == "bitflip" and request.only and not re.fullmatch(r"\d+\.\d+", request.only):
        raise ConfigError(f"--only is {request.only!r}, allowed: LAYER.EXPERT, as 3.17")
    if kind in MESSAGES and request.only and request.only not in MESSAGE_TYPES:
        near = get_close_matches(request.only, MESSAGE_TYPES, 3)
        hint = f"; is it {' or '.join(near)}?" if near else ""
        text = f"there is no message {request.only!r}: protocol/messages.py has their names{hint}"
        raise ConfigError(text)
    if request.only and kind not in (*MESSAGES, "failpoint", "bitflip"):
        raise ConfigError(f"{kind} is not about messages: it has no --only")


def _check_failpoint(request: Inject) -> None:
    if request.only not in NAMES:
        raise ConfigError(
            f"there is no failpoint {request.only!r}; phalanx inject list failpoints shows them"
        )
    if request.action not in ACTIONS:
        raise ConfigError(f"--action is {request.action!r}, allowed: {', '.join(ACTIONS)}")
    if request.rate != 1:
        raise ConfigError(
            "a failpoint has no --rate: it counts how often it is passed (--nth, --count)"
        )


def _fit(request: Inject, names: list[str]) -> list[str]:
    """The processes that a fault of this kind can happen to."""
    match request.kind:
        case "failpoint":
            kind = kind_of(request.only)
            return [name for name in names if _kind(name) == kind]
        case "diskfull":
            return [name for name in names if _kind(name) in DISKS]
        case "ulp" | "bitflip":
            return [name for name in names if _kind(name) == "worker"]
        case _:
            return names


def _that_have(only: str, placement: Placement, chosen: tuple[str, ...]) -> tuple[str, ...]:
    """Those workers that have the expert LAYER.EXPERT. Raises ConfigError when none has."""
    layer, expert = map(int, only.split("."))
    layers, experts = len(placement.physical_to_logical), placement.num_experts
    if layer >= layers or expert >= experts:
        raise ConfigError(
            f"--only is {only!r}: the model has layers 0 to {layers - 1} with experts 0 to {experts - 1}"
        )
    seats = {seat for seat, _ in copies(placement, layer)[expert]}
    holders = [f"worker-{seat}" for seat in sorted(seats)]
    if not (found := tuple(name for name in chosen if name in holders)):
        raise ConfigError(
            f"expert {expert} of layer {layer} is not at {', '.join(chosen)}, it is at"
            f" {', '.join(holders)}"
        )
    return found


def _kind(name: str) -> str:
    return name.partition("-")[0]


def targets(kind: str, target: str, names: list[str], rng: random.Random) -> tuple[str, ...]:
    """The processes that `target` names: one name, a prefix of names, random:PREFIX for one of them, or
    `all` (which spares the supervisor).

    Raises ConfigError when that is none, listing what there is.
    """
    if kind == "gpu-loss":  # only a worker holds a GPU
        names = [name for name in names if name.startswith("worker-")]
    if target == ALL:
        return tuple(n for n in names if kind in ("clear", "list") or n != SUPERVISOR)
    wanted = target.removeprefix(RANDOM)
    # The whole name first: worker-1 is not worker-10.
    found = [name for name in names if name == wanted]
    found = found or [name for name in names if wanted and name.startswith(wanted)]
    if not found:
        if wanted == SUPERVISOR and kind in SIGNALS:
            raise ConfigError(
                f"{kind} is not for the supervisor, which would send it to itself: use the kill of your"
                " shell, with its pid from phalanx status"
            )
        fit = "" if kind == "list" else f" that {kind} can happen to"
        text = f"no process{fit} is called {wanted!r} or begins so"
        raise ConfigError(f"{text}; there are: {', '.join(names)}")
    return (rng.choice(found),) if target.startswith(RANDOM) else tuple(found)
