"""The end of the node: the drain, SIGTERM, SIGKILL. Pure.

While the node drains everything works and is supervised as before, the gateway too: one that dies has a successor,
which goes on with its streams and tells their ends. Whatever dies or hangs, each stage has its limit.

Of a node that fails the gateway ends no stream: it hands over, as to a successor, and that is the next node's.
"""

import signal
from enum import Enum, auto
from typing import TYPE_CHECKING

from phalanx.protocol.errors import ExitCode
from phalanx.protocol.limits import (
    COMMAND_RETRY_MS,
    DRAIN_GRACE_MS,
    KILL_GRACE_MS,
    TERM_GRACE_MS,
)
from phalanx.protocol.messages import Drain, HandOver
from phalanx.supervisor.events import Action, Finished, Kill, Send, Sweep, Tell
from phalanx.supervisor.lives import describe_end
from phalanx.supervisor.process import Process, Stage

if TYPE_CHECKING:
    from phalanx.supervisor.core import SupervisorCore

_MS = 1_000_000


class NodeStage(Enum):
    RUNNING = auto()
    DRAINING = auto()  # the gateway finishes what runs; everything else works and is supervised
    TERMINATING = auto()  # SIGTERM was sent to all
    KILLING = auto()  # SIGKILL was sent to all
    FINISHED = auto()


class Ending:
    """Where the node stands, and what follows. Calls into the core, which calls the rest."""

    def __init__(self, core: "SupervisorCore") -> None:
        self._core = core
        self.stage = NodeStage.RUNNING
        self._left: dict[str, None] = {}  # in this order, each once
        self._hands_over = False  # to the next node's gateway: this node has failed
        self._drain_ends_ns = 0  # then the gateway ends what still runs
        self._stage_ends_ns = 0
        self._say_again_ns = 0

    @property
    def supervising(self) -> bool:
        return self.stage in (NodeStage.RUNNING, NodeStage.DRAINING)

    # ------------------------------------------------------------ what is asked for

    def shut_down(self, drain_ms: int, now_ns: int) -> list[Action]:
        until_ns = now_ns + drain_ms * _MS
        self._hands_over |= bool(self._core.failed)
        if self.stage is NodeStage.DRAINING and until_ns < self._drain_ends_ns:
            self._drain_until(until_ns)  # asked again: the shorter time counts
            return self._say(now_ns)
        if self.stage is not NodeStage.RUNNING:
            return []
        self.stage = NodeStage.DRAINING
        self._drain_until(until_ns)
        self._core.history.stopping(self._core.failed, drain_ms, now_ns)
        self._say_again_ns = now_ns + COMMAND_RETRY_MS * _MS
        actions = self._core.changes.drop(now_ns)
        actions += [Tell("draining", text=f"for up to {drain_ms} ms")]
        for process in self._gateways():
            if process.stage is Stage.READY:
                actions += self.gateway_is_ready(process, now_ns)
            elif self._core.failed or not process.served:
                actions += self._end_unserved(process)
        return actions + self.step(now_ns)

    def kill_all(self, now_ns: int) -> list[Action]:
        if self.stage in (NodeStage.KILLING, NodeStage.FINISHED):
            return []
        self.stage, self._stage_ends_ns = NodeStage.KILLING, now_ns + KILL_GRACE_MS * _MS
        self._core.history.stopping(self._core.failed, 0, now_ns)
        self._core.history.stop_goes_on("kill", now_ns)
        actions = self._core.changes.drop(now_ns)
        for process in self._core.processes.values():
            process.leaving = True
            if process.exists:
                actions += self._kill_leftover(process)
            else:
                process.stage = Stage.DOWN
        return actions + self.step(now_ns)

    # ------------------------------------------------------------ what happens

    def gateway_is_ready(self, process: Process, now_ns: int) -> list[Action]:
        """It is to drain: the one that serves when the node is told to stop, and each successor."""
        if self.stage is not NodeStage.DRAINING:
            return []
        process.drains = True
        name, incarnation = process.spec.name, process.incarnation
        return [self._drain(process, now_ns), Kill(name, incarnation, signal.SIGTERM)]

    def has_drained(self, process: Process, code: int) -> bool:
        """Whether it ended because everybody had got what was due to him."""
        return process.drains and code == ExitCode.OK

    def step(self, now_ns: int) -> list[Action]:
        """Go to the next stage when this one is complete or out of time."""
        late = now_ns >= self._stage_ends_ns
        if self.stage is NodeStage.DRAINING:
            if late or all(p.stage is Stage.DOWN for p in self._gateways()):
                return self._terminate(now_ns)
            return self._say(now_ns) if now_ns >= self._say_again_ns else []
        gone = not any(p.exists for p in self._core.processes.values())
        if self.stage is NodeStage.TERMINATING and late and not gone:
            return self.kill_all(now_ns)
        if self.stage in (NodeStage.TERMINATING, NodeStage.KILLING) and (gone or late):
            return self._finish(now_ns)
        return []

    # ------------------------------------------------------------ inside

    def _gateways(self) -> list[Process]:
        return [p for p in self._core.processes.values() if p.spec.kind == "gateway"]

    def _drain_until(self, until_ns: int) -> None:
        self._drain_ends_ns = until_ns
        self._stage_ends_ns = until_ns + DRAIN_GRACE_MS * _MS

    def _drain(self, process: Process, now_ns: int) -> Send:
        left_ms = max(0, self._drain_ends_ns - now_ns) // _MS
        message = HandOver(left_ms) if self._hands_over else Drain(left_ms)
        return Send(process.spec.name, process.incarnation, message)

    def _say(self, now_ns: int) -> list[Action]:
        """How long there is still: a word may have been lost, and it may be less by now."""
        self._say_again_ns = now_ns + COMMAND_RETRY_MS * _MS
        return [self._drain(p, now_ns) for p in self._gateways() if p.drains and p.alive]

    def _end_unserved(self, process: Process) -> list[Action]:
        """A gateway from which nobody reads, or with which the node has failed."""
        process.leaving = True
        if not process.exists:
            process.stage = Stage.DOWN
            return []
        return [Kill(process.spec.name, process.incarnation, signal.SIGTERM)]

    def _terminate(self, now_ns: int) -> list[Action]:
        self.stage, self._stage_ends_ns = NodeStage.TERMINATING, now_ns + TERM_GRACE_MS * _MS
        self._core.history.stop_goes_on("stop", now_ns)
        actions: list[Action] = [Tell("stopping")]
        for process in self._core.processes.values():
            process.leaving = True
            if not process.exists:
                process.stage = Stage.DOWN
            elif process.spec.kind == "gateway":  # it had its time
                actions += self._kill_leftover(process)
            else:
                actions.append(Kill(process.spec.name, process.incarnation, signal.SIGTERM))
        return actions

    def _kill_leftover(self, process: Process) -> list[Action]:
        self._left[f"{process.spec.name} (killed)"] = None
        return [Kill(process.spec.name, process.incarnation, signal.SIGKILL)]

    def _finish(self, now_ns: int) -> list[Action]:
        self.stage = NodeStage.FINISHED
        stuck = [p.spec.name for p in self._core.processes.values() if p.exists]
        left = (*self._left, *(f"{name} (does not die)" for name in stuck))
        how = "; ".join((describe_end(self._core.code, ""), *left))
        self._core.history.stopped(how, now_ns)
        told = self._core.history.take()  # nothing follows the last action
        return [Sweep(), *told, Finished(self._core.code, self._core.failed, left)]
