"""A process of the node that does nothing but live as the protocol says: the shell's tests start it.

What it does wrong stands in RUN_DIR/behave/NAME: a word, read once at the start.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable

from phalanx.protocol.board import ProcessPhase
from phalanx.protocol.errors import ConfigError, EpochChanged
from phalanx.protocol.limits import BEAT_PERIOD_MS
from phalanx.protocol.messages import FromSupervisor, HandOver
from phalanx.protocol.service import Service, run
from phalanx.worker_svc.group import Group


def serve(service: Service) -> None:
    behave = service.run_dir / "behave" / service.name
    fault = behave.read_text().strip() if behave.exists() else ""
    match fault:
        case "bad input":
            raise ConfigError("the directory /nowhere does not exist")
        case "crash":
            raise RuntimeError("planted crash")
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "slow":
            for _ in range(40):
                time.sleep(0.1)
                service.beat()
        case "outlive":
            # As if the kernel took long to end it: no signal of its parent's death, no pipe.
            if os.fork() == 0:
                time.sleep(60)
                os._exit(0)
        case "ignore TERM":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
    service.progress("load", 0.5)
    if service.name.startswith("worker-"):
        work(service, fault)
    else:
        service.ready()
        service.loop({}, lambda now_ns: None, on_supervisor=lambda m: obey(service, m))


def obey(service: Service, message: FromSupervisor) -> None:
    """What a gateway does for its successor."""
    service.stopping |= isinstance(message, HandOver)


def sleep_in_the_kernel(service: Service) -> None:
    """In state D, as one that waits for a disk: `posix_spawn` waits until its child has opened its files,
    and this one opens a pipe that nobody writes."""
    pipe = service.run_dir / "never"
    os.mkfifo(pipe)
    service.row.phase = ProcessPhase.BUSY
    never = (os.POSIX_SPAWN_OPEN, 0, str(pipe), os.O_RDONLY, 0)
    os.posix_spawn("/bin/true", ["true"], {}, file_actions=[never])


def step(service: Service, epoch: int, peer: int) -> None:
    """A step that comes to an end when the epoch does: the peer never posts it."""
    service.row.phase = ProcessPhase.BUSY
    with contextlib.suppress(EpochChanged):
        Group(service.board, service.seat, [service.seat, peer], epoch, service.beat).enter(0)


def work(service: Service, fault: str) -> None:
    """A worker as the group sees it: acknowledges STOP and GO, sleeps on its bell."""
    row, board = service.board.seats[service.seat], service.board
    row.worker_incarnation = service.incarnation
    service.ready("numbers")
    while not service.stopping:
        bell = row.bell.value
        service.beat()
        if not _answer(service, fault):
            row.bell.wait(bell, BEAT_PERIOD_MS)
        if board.epoch == 2:  # the first group
            if fault == "kernel":
                sleep_in_the_kernel(service)
            elif fault.startswith("step with worker-"):
                step(service, 2, int(fault.removeprefix("step with worker-")))
        if board.epoch % 2 == 0:
            service.row.phase = ProcessPhase.READY
            row.steps_run += 1


def _answer(service: Service, fault: str) -> bool:
    row, board = service.board.seats[service.seat], service.board
    epoch = board.epoch
    if epoch % 2 == 0:
        return False
    if row.stop_ack != epoch:
        if fault == "deaf" and epoch > 1:
            while True:  # beats, so that only the missing acknowledgement tells
                service.beat()
                time.sleep(0.05)
        row.stop_ack = epoch
        board.supervisor_bell.ring()
        return True
    topology = board.topology()
    if topology is None or topology.epoch != epoch + 1 or row.go_ack == epoch + 1:
        return False
    seat = topology.seat(service.seat)
    if seat is None or seat.state != "member" or seat.worker_incarnation != service.incarnation:
        return False
    row.go_ack = epoch + 1
    board.supervisor_bell.ring()
    return True


def main(serve: Callable[[Service], None]) -> None:
    if os.environ.get("NODE_CHILD_SLOW_START"):
        time.sleep(float(os.environ["NODE_CHILD_SLOW_START"]))
    run(serve)


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    main(serve)
