"""How every process of the node lives: one start, one heartbeat, one way to stop, one way to die.

It stands in `protocol` because all services share it and none may import another. A process's
`__main__.py` is `run(serve)`; `serve(service)` builds its sockets and core and calls `service.loop`.
"""

import ctypes
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import click
import msgspec
import zmq

from phalanx.protocol import arena, faults, link
from phalanx.protocol.background import Background
from phalanx.protocol.board import Board, ProcessPhase, ProcessRow
from phalanx.protocol.codec import Decoder, encode
from phalanx.protocol.config import NodeConfig, load_config
from phalanx.protocol.errors import ConfigError, DecodeError, ExitCode, NoRoom
from phalanx.protocol.limits import BEAT_PERIOD_MS, COMMAND_RETRY_MS
from phalanx.protocol.link import connect_dealer, receive, send
from phalanx.protocol.log import LOG_END_S, Logger, flush_log, follow_epoch, setup_logging
from phalanx.protocol.messages import FromSupervisor, Progress, Ready
from phalanx.protocol.rundir import SUPERVISOR_SOCKET, endpoint
from phalanx.protocol.standby import await_turn

Socket = zmq.Socket[bytes]
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_FILES_NS = 200_000_000  # between two looks whether our sockets' files are there
_LAST_WORDS_S = 0.5  # that one which crashed waits for its log: health says what stands there
_MESSAGES_PER_TURN = 256  # so that a flood on one socket starves neither heartbeat nor stop


@dataclass
class Service:
    """What a process knows of itself. Made by `run`."""

    name: str
    incarnation: int
    seat: int  # -1: not of one rank
    config: NodeConfig
    log: Logger
    board: Board
    row: ProcessRow
    supervisor: Socket
    stopping: bool = False
    _unheard: bytes = b""  # our Ready, until the supervisor has it
    _say_again_ns: int = 0
    _damaged: int = 0  # frames with a broken seal that were told of
    _files_ns: int = 0  # when to look at our sockets' files
    _looks: Background[list[str]] = field(default_factory=lambda: Background("files"))

    @property
    def run_dir(self) -> Path:
        return self.config.run_path

    def beat(self) -> None:
        now_ns = time.monotonic_ns()
        self.row.beat(now_ns)
        if self._unheard:
            self._say_ready(now_ns)
        for path in link.take_no_more():
            self.log.error("too many are connected: no more are taken", path=str(path))
        if now_ns >= self._files_ns:
            self._files_ns = now_ns + _FILES_NS
            for gone in self._looks.ask(link.unbound) if link.binds() else ():
                for path, error in link.bind_anew(gone):
                    error = error or "bound anew"
                    self.log.warning("socket was deleted", path=str(path), error=error)
            for name, error in arena.restore_names():
                self.log.warning(
                    "shared memory lost its name", name=name, error=error or "restored"
                )
        if link.damaged != self._damaged:
            self.log.warning("damaged messages dropped", count=link.damaged - self._damaged)
            self._damaged = link.damaged
        if faults.active is not None:
            faults.active.flush()

    def _say_ready(self, now_ns: int) -> None:
        """A Ready that got lost would leave the node waiting for a process that is there."""
        if self.row.ready_heard == self.incarnation:
            self._unheard = b""
        elif now_ns >= self._say_again_ns:
            self._say_again_ns = now_ns + COMMAND_RETRY_MS * 1_000_000
            send(self.supervisor, self._unheard)

    def progress(self, phase: str, fraction: float = -1.0) -> None:
        """Say where the start stands; counts as a sign of life."""
        self.row.phase = ProcessPhase.LOADING
        self.row.advance()
        self.beat()
        send(self.supervisor, encode(Progress(self.name, self.incarnation, phase, fraction)))

    def ready(self, fingerprint: str = "", expert_slots: int = 0, note: str = "") -> None:
        """Say that we serve from now on. A worker tells the fields of `Ready`. `note`: for the history, for people.

        What is there now stays as long as the process: the garbage collector need not look at it again and again,
        which takes a tenth of a second with torch, in the middle of a step.
        """
        gc.freeze()
        self.row.phase = ProcessPhase.READY
        self._unheard = encode(Ready(self.name, self.incarnation, fingerprint, expert_slots, note))
        self.beat()
        self.log.info("ready")

    def loop(
        self,
        handlers: Mapping[Socket, Callable[[], None]],
        tick: Callable[[int], float | None],
        *,
        on_supervisor: Callable[[FromSupervisor], None] | None = None,
        drained: Callable[[int], bool] = lambda now_ns: True,
    ) -> None:
        """Serve until told to stop and drained.

        Args:
            handlers: called when their socket has messages; each takes a bounded batch.
            tick: called each turn with the monotonic time; returns the longest wait in ms until
                the next turn, or None for the heartbeat period.
            drained: asked each turn after SIGTERM whether the process may end now.
        """
        poller = zmq.Poller()
        for socket in (*handlers, self.supervisor):
            poller.register(socket, zmq.POLLIN)
        decoder = Decoder[FromSupervisor](FromSupervisor)
        wait_ms = 0.0

        def serve(socket: Socket) -> None:
            if socket is self.supervisor:
                for message in _decoded(decoder, socket, self.log):
                    if on_supervisor is not None:
                        on_supervisor(message)
            else:
                handlers[socket]()
                self.row.advance()

        while not (self.stopping and drained(time.monotonic_ns())):
            for socket, _ in poller.poll(int(wait_ms)):
                serve(socket)
            if faults.active is not None:
                faults.active.slow()
                for socket in faults.active.flush():
                    serve(socket)
            wanted = tick(time.monotonic_ns())
            wait_ms = BEAT_PERIOD_MS if wanted is None else min(wanted, BEAT_PERIOD_MS)
            if faults.active is not None:
                wait_ms = faults.active.wait_ms(wait_ms)
            self.beat()

    def close(self) -> None:
        self.supervisor.close()
        follow_epoch(None)
        self.board.close()


def _decoded(decoder: Decoder[FromSupervisor], socket: Socket, log: Logger) -> list[FromSupervisor]:
    messages: list[FromSupervisor] = []
    for frame in receive(socket, _MESSAGES_PER_TURN):
        try:
            messages.append(decoder.decode(frame))
        except DecodeError as error:
            log.error("bad message from the supervisor", error=str(error))
    return messages


Serve = Callable[[Service], None]


def run(serve: Serve, prepare: Callable[[NodeConfig], Serve] | None = None) -> None:
    """The whole `main` of a process: arguments, death pipes, log, configuration, `serve`, exit code.

    `prepare`: what a process that is started ahead does beside the imports of its module, before it waits for
    turns to be taken. It gives what its forks run in place of `serve`.
    """

    @click.command()
    @click.option("--run-dir", type=click.Path(path_type=Path), required=True)
    @click.option("--name", required=True, help="As `phalanx status` shows it, e.g. scheduler-0.")
    @click.option("--incarnation", type=int, required=True, help="Grows at each restart.")
    @click.option("--index", type=int, required=True, help="Row of the heartbeat table.")
    @click.option("--seat", type=int, default=-1)
    @click.option("--death-fd", type=int, required=True, help="Write end: closes when we die.")
    @click.option(
        "--life-fd", type=int, required=True, help="Read end: closes when the parent dies."
    )
    @click.option("--standby", is_flag=True, help="Fork the processes that are asked for.")
    def command(
        run_dir: Path,
        name: str,
        incarnation: int,
        index: int,
        seat: int,
        death_fd: int,
        life_fd: int,
        standby: bool,
    ) -> None:
        # First of all, before CUDA or a helper process could inherit the pipe and keep it open.
        os.set_inheritable(death_fd, False)
        os.set_inheritable(life_fd, False)
        set_process_name(name)
        main = serve
        if standby:
            if prepare is not None:
                main = prepare(load_config(run_dir))
            turn, death_fd = await_turn(run_dir, death_fd)
            name, incarnation, index, seat = msgspec.structs.astuple(turn)
            set_process_name(name)
        die_with_parent(life_fd)
        try:
            config = load_config(run_dir)
        except ConfigError as error:
            _end_misconfigured(setup_logging(run_dir, name, incarnation, "info"), error)
        log = setup_logging(run_dir, name, incarnation, config.log_level)
        board = Board.attach(config.node)
        board.processes[index].mark.hold()
        follow_epoch(lambda: board.epoch)
        if seat >= 0:
            log = log.bind(rank=seat)
        if config.fault_injection:
            faults.enable(config.node, index)
        supervisor = connect_dealer(endpoint(run_dir, SUPERVISOR_SOCKET), f"{name}#{incarnation}")
        service = Service(
            name, incarnation, seat, config, log, board, board.processes[index], supervisor
        )
        service.row.phase = ProcessPhase.STARTING
        service.beat()
        _obey_signals(service)
        try:
            main(service)
        except ConfigError as error:
            _end_misconfigured(log, error)
        except NoRoom as error:
            log.error("no room", error=str(error))
            flush_log(_LAST_WORDS_S)
            os._exit(ExitCode.NO_ROOM)
        except Exception:  # the top of the process: say why, let the supervisor restart us
            log.exception("crashed")
            flush_log(_LAST_WORDS_S)
            sys.stderr.flush()
            os._exit(ExitCode.INTERNAL)  # no cleanup: shared state may be what is broken
        service.close()
        log.info("stopped")
        flush_log(LOG_END_S)
        os._exit(ExitCode.OK)  # everything is closed; unloading libraries would only cost time

    command()


def _end_misconfigured(log: Logger, error: ConfigError) -> NoReturn:
    log.error("cannot run as configured", error=str(error))
    sys.exit(ExitCode.BAD_INPUT)


def _obey_signals(service: Service) -> None:
    def stop(number: int, frame: object) -> None:
        service.stopping = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the supervisor, which tells us


def die_with_parent(life_fd: int) -> None:
    """End this process at once when the other end of the pipe closes: the parent is dead.

    The kernel's parent-death signal comes on top: it also fires while the interpreter is stuck.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    def watch() -> None:
        while os.read(life_fd, 1):
            pass
        os._exit(ExitCode.PARENT_DIED)

    threading.Thread(target=watch, name="life-pipe", daemon=True).start()


def set_process_name(name: str) -> None:
    """What `ps` and `top` show (15 bytes)."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)
