"""Commands that wait for a supervisor: for one that works as long as it may take, for one that is stopped not."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from phalanx.protocol.codec import Decoder, encode
from phalanx.protocol.limits import HANG_MS, SPIN_MS
from phalanx.protocol.link import bind_router, receive_from, send_to
from phalanx.protocol.messages import (
    Restart,
    Restarted,
    Shutdown,
    ShutdownDone,
    StatusQuery,
    StatusReply,
    ToSupervisor,
)
from phalanx.protocol.rundir import LOCK_FILE, PID_FILE, SUPERVISOR_SOCKET, endpoint
from phalanx.supervisor.ask import NoAnswer, Presence, ask

MS = 1_000_000
TIMEOUT_S = 0.5
LATE_S = 60.0
HOLDER = """
import fcntl, sys, time
lock = open(sys.argv[1], "w")
fcntl.flock(lock, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """Where somebody holds the lock of a supervisor, and answers nothing."""
    with tempfile.TemporaryDirectory(prefix="ph") as folder:
        path = Path(folder)
        command = [sys.executable, "-P", "-c", HOLDER, str(path / LOCK_FILE)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
            assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
            (path / PID_FILE).write_text(f"{holder.pid}\n")
            yield path
            holder.kill()


def pid_in(run_dir: Path) -> int:
    return int((run_dir / PID_FILE).read_text())


@pytest.mark.process
@pytest.mark.parametrize("question", [Shutdown(1, 0.5), Restart(1, ("eplb",), 0.5)])
def test_one_that_a_signal_has_stopped_is_waited_for_no_longer_than_was_said(
    run_dir: Path, question: Shutdown | Restart
) -> None:
    answer = ShutdownDone if isinstance(question, Shutdown) else Restarted
    socket = bind_router(endpoint(run_dir, SUPERVISOR_SOCKET), 1 << 20)
    pid, begun = pid_in(run_dir), time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(NoAnswer, match=f"signal has stopped it; `kill -CONT {pid}`.*kill -9 {pid}"):
        ask(run_dir, question, answer, TIMEOUT_S, LATE_S)
    assert TIMEOUT_S <= time.monotonic() - begun < 20  # and not a minute
    socket.close()


@pytest.mark.process
def test_one_that_gives_signs_of_life_may_take_longer(run_dir: Path) -> None:
    socket = bind_router(endpoint(run_dir, SUPERVISOR_SOCKET), 1 << 20)
    decoder, ends = Decoder[ToSupervisor](ToSupervisor, 1 << 20), time.monotonic() + 3.0

    def drain() -> None:
        peer, call = b"", 0
        while (now := time.monotonic()) < ends:
            socket.poll(int((ends - now) * 1000) + 1, zmq.POLLIN)
            for peer, frame in receive_from(socket, 16):
                message = decoder.decode(frame)
                if isinstance(message, StatusQuery):
                    status = StatusReply(message.call, False, 1, (), (), "", "")
                    send_to(socket, peer, encode(status))
                else:
                    call = message.call
        send_to(socket, peer, encode(ShutdownDone(call, ())))
        time.sleep(0.2)
        socket.close()

    thread = threading.Thread(target=drain)
    thread.start()
    assert ask(run_dir, Shutdown(1, 0.5), ShutdownDone, TIMEOUT_S, LATE_S).left == ()
    thread.join()


def lost_ms(state: str, starved: bool = False, heard: bool = False) -> float | None:
    """When one that is always in this state counts as lost; None: not within 20 s."""
    presence = Presence(lambda now_ns: (state, now_ns * starved, 0), 0)
    presence.heard = heard
    return next((ms for ms in range(0, 20_000, 250) if presence.lost(ms * MS)), None)


def test_one_that_has_never_said_anything_is_lost_when_it_counts_as_hung() -> None:
    silent_ms = lost_ms("S")
    assert silent_ms is not None and HANG_MS < silent_ms <= HANG_MS + 250
    assert lost_ms("T") == 0
    assert lost_ms("R") == SPIN_MS + 250
    assert lost_ms("R", starved=True) is None
    assert lost_ms("S", heard=True) is None, "it ends, perhaps"
