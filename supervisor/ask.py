"""Questions to a running node's supervisor, and whether there is a node at all."""

import time
from pathlib import Path
from secrets import token_hex
from typing import TypeVar

import zmq

from phalanx.protocol.codec import Decoder, encode
from phalanx.protocol.config import default_run_dir
from phalanx.protocol.errors import Code, ConfigError, ExitCode, PhalanxError
from phalanx.protocol.limits import COMMAND_RETRY_MS
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
from phalanx.protocol.proc import Looks
from phalanx.protocol.rundir import SUPERVISOR_SOCKET, endpoint, is_running
from phalanx.supervisor.lock import read_pid

R = TypeVar("R")


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
) -> R:
    """Send one question and return its answer.

    Raises NoNode at once when no supervisor lives there, NodeGone when it ends meanwhile, NoAnswer when the
    time is up, ConfigError when the question is wrong, PhalanxError when it is refused for another reason.
    """
    if not is_running(run_dir):
        raise NoNode(run_dir)
    decoder = Decoder[FromSupervisor](FromSupervisor)
    socket = connect_dealer(endpoint(run_dir, SUPERVISOR_SOCKET), asker())
    try:
        now = time.monotonic()
        deadline, repeat_at = now + timeout_s, now
        while (now := time.monotonic()) < deadline:
            if (
                now >= repeat_at
            ):  # what got lost is said again; the supervisor takes it for the same
                send(socket, encode(question))
                repeat_at = now + COMMAND_RETRY_MS / 1000
            if not socket.poll(int(min(deadline - now, 0.25) * 1000) + 1, zmq.POLLIN):
                if not is_running(run_dir):
                    raise NodeGone(run_dir)
                continue
            for message in map(decoder.decode, receive(socket, 1)):
                if isinstance(message, answer) and getattr(message, "call", None) == question.call:
                    return message
                if isinstance(message, Error):
                    raise _ERRORS.get(message.code, PhalanxError)(message.message)
        raise NoAnswer(
            f"the supervisor in {run_dir} did not answer within {timeout_s:g} s: {_why_silent(run_dir)}"
        )
    finally:
        socket.close()


def _why_silent(run_dir: Path) -> str:
    """What keeps a supervisor that lives from answering, and what to do."""
    path, pid = run_dir / SUPERVISOR_SOCKET, read_pid(run_dir)
    if not path.exists():
        return f"its socket {path} is gone"
    found = Looks(pid).inspect(time.monotonic_ns())
    if found is None:
        return "nobody knows its pid"
    if found[0] == "T":
        return f"a signal has stopped it; `kill -CONT {pid}` lets it go on"
    return (
        f"pid {pid} is in state {found[0]}; if that lasts, `kill -9 {pid}` ends the node, and `phalanx up` goes"
        " on with its requests"
    )
