"""Questions to a running node's supervisor, and whether there is a node at all."""

import time
from collections.abc import Callable
from pathlib import Path
from secrets import token_hex
from typing import TypeVar

import zmq

from phalanx.protocol.codec import Decoder, encode
from phalanx.protocol.config import default_run_dir
from phalanx.protocol.errors import Code, ConfigError, ExitCode, PhalanxError
from phalanx.protocol.limits import COMMAND_RETRY_MS, HANG_MS, SPIN_MS, STARVED_MS_MAX
from phalanx.protocol.link import connect_dealer, receive, send
from phalanx.protocol.messages import (
    Error,
    FromSupervisor,
    HistoryQuery,
    Inject,
    Restart,
    Scale,
    Shutdown,
    StatusQuery,
)
from phalanx.protocol.patience import Patience
from phalanx.protocol.proc import Looks
from phalanx.protocol.rundir import SUPERVISOR_SOCKET, endpoint, is_running
from phalanx.supervisor.lock import read_pid

R = TypeVar("R")
Inspect = Callable[[int], tuple[str, int, int] | None]


class NoNode(PhalanxError):
    exit_code = ExitCode.NO_NODE

    def __init__(self, run_dir: Path) -> None:
        super().__init__(f"no node is running in {run_dir}; start one with: phalanx up")


class NodeGone(NoNode):
    """There was one, and it ended before it answered."""

    def __init__(self, run_dir: Path) -> None:
        PhalanxError.__init__(
            self,
            f"the node in {run_dir} ended before it answered; if that was no clean stop, `phalanx up` there goes on"
            " with its requests",
        )


class NoAnswer(PhalanxError):
    """The time is up: no answer came, or what was asked for was not done by then."""

    exit_code = ExitCode.TIME_LIMIT


_ERRORS = {Code.BAD_REQUEST: ConfigError, Code.TIME_LIMIT: NoAnswer}


def asker() -> str:
    """The identity of a command that asks one question; its `#` seals what is said (`link.py`)."""
    return f"ask#{token_hex(8)}"


def find_run_dir(run_dir: Path | None) -> Path:
    """The run directory of a command, made absolute."""
    return (run_dir or default_run_dir()).absolute()


def ask(
    run_dir: Path,
    question: StatusQuery | HistoryQuery | Shutdown | Inject | Scale | Restart,
    answer: type[R],
    timeout_s: float,
    late_s: float = 0.0,
) -> R:
    """Send one question and return its answer.

    Args:
        late_s: What a supervisor may take beyond `timeout_s` for what was asked, if it gives signs of life. It is
            asked for one as often as for the answer.

    Raises NoNode at once when no supervisor lives there, NodeGone when it ends meanwhile, NoAnswer when the
    time is up, ConfigError when the question is wrong, PhalanxError when it is refused for another reason.
    """
    if not is_running(run_dir):
        raise NoNode(run_dir)
    decoder = Decoder[FromSupervisor](FromSupervisor)
    socket = connect_dealer(endpoint(run_dir, SUPERVISOR_SOCKET), asker())
    try:
        begun = now = time.monotonic()
        deadline, repeat_at = now + timeout_s + late_s, now
        presence = Presence(Looks(read_pid(run_dir)).inspect, time.monotonic_ns())
        while (now := time.monotonic()) < deadline:
            if late_s and presence.lost(time.monotonic_ns()) and now >= begun + timeout_s:
                break
            if (
                now >= repeat_at
            ):  # what got lost is said again; the supervisor takes it for the same
                send(socket, encode(question))
                if late_s:
                    send(socket, encode(StatusQuery(question.call + 1)))
                repeat_at = now + COMMAND_RETRY_MS / 1000
            if not socket.poll(int(min(deadline - now, 0.25) * 1000) + 1, zmq.POLLIN):
                if not is_running(run_dir):
                    raise NodeGone(run_dir)
                continue
            for message in map(decoder.decode, receive(socket, 1)):
                presence.heard = True
                if isinstance(message, answer) and getattr(message, "call", None) == question.call:
                    return message
                if isinstance(message, Error):
                    raise _ERRORS.get(message.code, PhalanxError)(message.message)
        waited_s = round(time.monotonic() - begun, 1)
        raise NoAnswer(
            f"the supervisor in {run_dir} did not answer within {waited_s:g} s: {why_silent(run_dir)}"
        )
    finally:
        socket.close()


class Presence:
    """Whether a supervisor that has not done yet what it was asked for will do it at all."""

    def __init__(self, inspect: Inspect, now_ns: int) -> None:
        """`inspect`: see `Looks.inspect`."""
        self.heard = (
            False  # something, since it was asked: one that ends may say nothing for a while
        )
        self._inspect, self._silence = inspect, Patience(now_ns)

    def lost(self, now_ns: int) -> bool:
        """It is stopped by a signal, or has never said anything although it could."""
        if (found := self._inspect(now_ns)) is None:
            return False
        self._silence.inspected(*found, now_ns)
        limit_ms = SPIN_MS if found[0] == "R" else HANG_MS
        hangs = self._silence.exhausted(now_ns, limit_ms, STARVED_MS_MAX)
        return found[0] == "T" or (hangs and not self.heard)


def why_silent(run_dir: Path) -> str:
    """What keeps a supervisor that lives from answering, and what to do."""
    path, pid = run_dir / SUPERVISOR_SOCKET, read_pid(run_dir)
    found = Looks(pid).inspect(time.monotonic_ns())
    gone = "" if path.exists() else f"its socket {path} is gone"
    if found is not None and found[0] == "T":
        return (
            f"{gone}{', and ' * bool(gone)}a signal has stopped it; `kill -CONT {pid}` lets it go on, `kill -9 {pid}` ends the node, and"
            " `phalanx up` goes on with its requests"
        )
    if gone:
        return gone
    if found is None:
        return "nobody knows its pid"
    return (
        f"pid {pid} is in state {found[0]}; if that lasts, `kill -9 {pid}` ends the node, and `phalanx up` goes"
        " on with its requests"
    )
