"""The supervisor process: feeds the core with what happens and carries out what it decides."""

import contextlib
import gc
import os
import random
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType

import msgspec

from phalanx.protocol import arena, faults, link, rundir
from phalanx.protocol.background import Background
from phalanx.protocol.board import Board
from phalanx.protocol.codec import Decoder, call_of, encode
from phalanx.protocol.config import NodeConfig
from phalanx.protocol.errors import (
    Code,
    DecodeError,
    ExitCode,
)
from phalanx.protocol.fault_table import SUPERVISOR_ROW, FaultRow, FaultTable
from phalanx.protocol.limits import MESSAGE_BYTES_MAX
from phalanx.protocol.link import receive_from, send_to
from phalanx.protocol.log import follow_epoch, setup_logging
from phalanx.protocol.messages import (
    Error,
    ExpertReport,
    HistoryQuery,
    HistoryReply,
    Inject,
    Message,
    Progress,
    Ready,
    Rebalance,
    Restart,
    Scale,
    ScrubReport,
    Shutdown,
    ShutdownDone,
    StatusQuery,
    ToSupervisor,
    Trouble,
)
from phalanx.protocol.queues import count_held, count_left
from phalanx.supervisor.chronicle import Chronicle
from phalanx.supervisor.core import SupervisorCore
from phalanx.supervisor.events import (
    Action,
    BecameReady,
    ChangeAsked,
    CountStranded,
    Doubt,
    Event,
    FilesMissing,
    Finished,
    Inspect,
    Inspected,
    Kill,
    KillAsked,
    PipeClosed,
    Progressed,
    Propose,
    Publish,
    Reaped,
    RebalanceAsked,
    Record,
    RenewStandbys,
    Reply,
    Resized,
    ScrubHeard,
    Send,
    SetEpoch,
    ShutdownAsked,
    Spawn,
    Stranded,
    Sweep,
    Tell,
    Troubled,
)
from phalanx.supervisor.files import Files, Tended
from phalanx.supervisor.group import Placements
from phalanx.supervisor.inject import SUPERVISOR, Injector, SetFaults
from phalanx.supervisor.later import Later
from phalanx.supervisor.lock import NodeLock, write_failure
from phalanx.supervisor.processes import ProcessSpec
from phalanx.supervisor.spawn import Child, Spawner, last_words
from phalanx.supervisor.starts import Starts
from phalanx.supervisor.status import status
from phalanx.supervisor.watch import Watch
from phalanx.supervisor.weights import WeightsKeeper
from phalanx.supervisor.words import propose, publish, set_epoch

OnEvent = Callable[[Tell], None]
TICK_MS = 100  # how often the core looks at the clock and at the heartbeats
_MESSAGES_PER_TURN = 256
_FLUSH_S = 0.05
_WARNINGS = frozenset(
    {"lost", "ended", "unhealthy", "stop", "failed", "change failed", "rebalance withdrawn"}
)
_DRAIN_S_MAX = 86_400.0
_TEND_S = 1.0  # for a look at the files that is under way when the node ends


class Node:
    """The shell around the core. One thread; sleeps in poll, or on the bell while the group changes."""

    def __init__(
        self,
        config: NodeConfig,
        table: Sequence[ProcessSpec],
        placements: Placements,
        lock: NodeLock,
        on_event: OnEvent,
        silent_ms: float = 0.0,
    ) -> None:
        """`silent_ms`: since the last sign of life of a supervisor that died here."""
        self._config, self._on_event, self._silent_ms = config, on_event, silent_ms
        self._run_dir = config.run_path
        self._log = setup_logging(self._run_dir, "supervisor", 1, config.log_level)
        self._chronicle = Chronicle(self._run_dir, self._log)
        known = map(arena.kind_of, arena.names(config.node))
        self._goes_on = arena.TOKENS in known  # with what an earlier node left
        self._board = board = Board.create(config.node)
        follow_epoch(lambda: board.epoch)
        self._core = SupervisorCore(table, placements)
        self._lock, self._files = lock, Files(self._run_dir)
        self._files_missing: tuple[str, ...] = ()
        self._tender = Background[Tended]("files")
        self._spawner = Spawner(self._run_dir, lock.children_fd)
        endpoint = rundir.endpoint(self._run_dir, rundir.SUPERVISOR_SOCKET)
        self._watch = Watch(endpoint, self._board, MESSAGE_BYTES_MAX, self._spawner.fileno())
        self._decoder = Decoder[Message](ToSupervisor, MESSAGE_BYTES_MAX)
        self._events: deque[Event] = deque()
        self._signals: list[int] = []
        # Who asked for the shutdown: peer, call. Each is answered once, however often it was said.
        self._waiting_for_end: dict[tuple[bytes, int], None] = {}
        self._finished: Finished | None = None
        self._phases_told: set[tuple[str, str]] = set()
        self._starts = Starts(
            *(self._core, self._spawner, self._watch, board),
            *(self._events, self._keep_config, self._log),
        )
        self._later = Later(self._starts.forks)
        self._interrupts = 0
        self._injector = Injector(
            *(config.fault_injection, random.Random(), self._core.processes, self._came_up),
            lambda: placements.current,
        )
        self._weights: WeightsKeeper | None = None
        self._faults: FaultTable | None = None
        if config.fault_injection:
            self._faults = FaultTable.create(config.node)
            faults.enable(config.node, SUPERVISOR_ROW)

    def keep_weights(self, children_lock_fd: int) -> None:
        """Hold a copy of the checkpoint in shared memory from when the node is ready."""
        self._weights = WeightsKeeper(self._run_dir, self._config.node, children_lock_fd, self._log)

    def run(self) -> ExitCode:
        self._board.set_epoch(self._core.group.epoch, [])
        self._events.append(self._chronicle.began(self._silent_ms))
        self._log.info("starting", processes=list(self._core.processes), config=self._config.model)
        gc.freeze()  # see `Service.ready`
        restore = self._obey_signals()
        self._starts.begin_shared()
        observed_ns = 0
        try:
            while self._finished is None:
                self._listen()
                for path in link.take_no_more():
                    self._log.error("too many are connected: no more are taken", path=str(path))
                self._starts.take_forked()
                now_ns = self._board.supervisor_beat_ns = time.monotonic_ns()
                if now_ns - observed_ns >= TICK_MS * 1_000_000:
                    self._events.extend(self._watch.observe())
                    if self._core.rebalances.now is not None:
                        self._handle_events()  # what these did is on the board when its words are read
                        self._events.append(self._watch.placements(self._core.group.members))
                    observed_ns = now_ns
                    self._look_at_names()
                    self._look_at_files()
                    self._starts.reap_orphans(self._weights.pids if self._weights else ())
                    if self._core.serving and not self._streams_wait:
                        self._starts.look_at_standbys(now_ns)
                    if self._weights is not None and self._weights.look(now_ns):
                        self._starts.renew_standbys(
                            "worker"
                        )  # it makes them ready from what is held
                self._handle_events()
                self._carry_out(self._core.tick(time.monotonic_ns()))
                self._carry_out([*self._injector.due(time.monotonic_ns())])
                if self._later.due(time.monotonic_ns(), self._core.awaits_acks, self._spare_cpus):
                    self._do_what_was_put_off()
                self._handle_events()
            return self._end(self._finished)
        finally:
            restore()

    def _look_at_names(self) -> None:
        """Who starts finds the board by its name. It is looked at like the others' arenas by their owners."""
        for name, error in arena.restore_names():
            self._log.warning("shared memory lost its name", name=name, error=error or "restored")

    def _look_at_files(self) -> None:
        """Somebody may tidy the directory of the sockets. Whoever owns one binds it anew; so do we."""
        if not self._core.serving:
            return
        ready, missing = self._core.ready_names(), self._files_missing
        # Beside the loop, which a disk that hangs must not stop.
        look = partial(self._files.tend, self._lock, self._keep_config, ready, missing)
        for tended in self._tender.ask(look):
            for path, error in link.bind_anew(tended.unbound):
                self._log.warning("socket was deleted", path=str(path), error=error or "bound anew")
            for event, error in tended.told:
                self._log.warning(event, error=error)
            if tended.missing != self._files_missing:
                self._files_missing = tended.missing
                self._events.append(FilesMissing(tended.missing))

    def _keep_config(self) -> str:
        """Who starts reads it: it is the one that the others run with, whatever somebody did to the file. What
        came of it where it was not there as it is; else empty."""
        if self._config.is_saved():
            return ""
        try:
            self._config.save()
        except OSError as error:
            return str(error)
        return "written anew"

    # ------------------------------------------------------------ what happens

    def _listen(self) -> None:
        """Wait for whatever comes first and queue it as events."""
        if self._core.awaits_acks:
            bell = self._board.supervisor_bell.value  # before looking, so that no ring is missed
            acks = self._watch.acks(list(self._core.group.waiting))
            for event in acks:
                self._carry_out(self._core.handle(event, time.monotonic_ns()))
            if not self._poll(0) and self._core.awaits_acks:
                self._watch.wait_bell(bell)
        else:
            wait_ms = self._injector.wait_ms(time.monotonic_ns(), TICK_MS)
            if faults.active is not None:
                faults.active.slow()
                wait_ms = int(faults.active.wait_ms(wait_ms))
            self._poll(wait_ms)
        drain_ms = int(self._config.drain_s * 1000)
        for number in self._signals:
            self._interrupts += number == signal.SIGINT
            at_once = number == signal.SIGINT and self._interrupts > 1
            self._events.append(KillAsked() if at_once else ShutdownAsked(drain_ms))
        self._signals.clear()

    def _poll(self, timeout_ms: int) -> bool:
        deaths, ended, messages = self._watch.wait(timeout_ms)
        self._events.extend(deaths)
        self._handle_events()  # a death stops the group before anything slower is done
        self._events.extend(self._stranded(deaths))
        for child in ended:
            self._reap(child)
        if faults.active is not None:
            messages |= self._watch.socket in faults.active.flush()
        if messages:
            for identity, frame in receive_from(self._watch.socket, _MESSAGES_PER_TURN):
                self._on_frame(identity, frame)
        return bool(deaths or ended or messages)

    def _stranded(self, deaths: list[PipeClosed]) -> list[Event]:
        """How many sequences each fallen rank held, by its scheduler's table in shared memory."""
        node, found = self._config.node, list[Event]()
        for name, incarnation in [(death.name, death.incarnation) for death in deaths]:
            process = self._core.processes.get(name)
            if process is not None and process.spec.kind == "worker":
                found.append(Stranded(count_held(node, [process.spec.seat]), name))
            elif process is not None and process.spec.kind == "scheduler":
                found.append(Stranded(count_left(node, process.spec.seat, incarnation), name))
        return found

    def _reap(self, child: Child) -> None:
        code = self._watch.remove(child)
        words = "" if code == 0 else last_words(self._run_dir, child)
        self._events.append(Reaped(child.spec.name, child.incarnation, code, words))

    def _on_frame(self, identity: bytes, frame: bytes) -> None:
        try:
            message = self._decoder.decode(frame)
        except DecodeError as error:
            answer = Error(call_of(frame), Code.BAD_REQUEST, str(error))
            send_to(self._watch.socket, identity, encode(answer))
            return
        match message:
            case Ready(name, incarnation) if name in self._core.processes:
                process = self._core.processes[name]
                if incarnation == process.incarnation:
                    self._board.processes[process.spec.index].ready_heard = incarnation
                told = message.fingerprint, message.expert_slots, message.note
                self._events.append(BecameReady(name, incarnation, *told))
            case Progress(name, incarnation, phase, fraction) if name in self._core.processes:
                self._events.append(Progressed(name, incarnation, phase, fraction))
            case Trouble(name, incarnation, text):
                self._events.append(Troubled(name, incarnation, text))
            case ScrubReport() | ExpertReport():
                self._events.append(ScrubHeard(message))
            case StatusQuery(call):
                now_ns = time.monotonic_ns()
                missing = self._weights.missing if self._weights is not None else ""
                status_now = status(self._core, self._config, os.getpid(), call, now_ns, missing)
                send_to(self._watch.socket, identity, encode(status_now))
            case HistoryQuery(call):
                reply = HistoryReply(call, self._chronicle.entries)
                send_to(self._watch.socket, identity, encode(reply))
            case Inject():
                self._inject(identity, message)
            case Scale() | Restart():
                self._events.append(ChangeAsked(identity, message))
            case Rebalance():
                slots = self._watch.expert_slots(self._core.group.members)
                self._events.append(RebalanceAsked(identity, message, slots))
            case Shutdown(call, timeout_s) if 0 <= timeout_s <= _DRAIN_S_MAX:
                self._waiting_for_end[identity, call] = None
                self._events.append(ShutdownAsked(int(timeout_s * 1000)))
            case Shutdown(call, timeout_s):
                text = f"timeout_s is {timeout_s}, allowed: 0 to {_DRAIN_S_MAX}"
                answer = Error(call, Code.BAD_REQUEST, text)
                send_to(self._watch.socket, identity, encode(answer))
            case _:
                self._log.error("message about an unknown process", message=repr(message)[:200])

    # ------------------------------------------------------------ what is to be done

    def _handle_events(self) -> None:
        while self._events:
            self._carry_out(self._core.handle(self._events.popleft(), time.monotonic_ns()))

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case SetEpoch():
                    set_epoch(self._board, action)
                    if action.epoch % 2 == 0:
                        self._later.group_runs(time.monotonic_ns())
                case Publish():
                    publish(self._board, action)
                case Propose():
                    propose(self._board, action)
                case Doubt(seat, layer, expert):
                    self._board.seats[seat].doubt(layer, expert)
                case Spawn() | Sweep() if self._streams_wait:
                    self._later.put_off(action, time.monotonic_ns())
                case Kill(name, incarnation, number):
                    if self._later.holds(name, incarnation):  # it is yet to start
                        self._do_what_was_put_off()
                    self._starts.kill(name, incarnation, number)
                case Spawn(name, incarnation):
                    self._starts.spawn(name, incarnation)
                case Inspect(name, incarnation):
                    self._inspect(name, incarnation)
                case Reply(peer, answer):
                    send_to(self._watch.socket, peer, encode(answer))
                case Resized(ranks):
                    self._resize(ranks)
                case RenewStandbys():
                    self._starts.renew_standbys(delay_ms=0)  # somebody waits for them
                case CountStranded(seats):
                    self._events.append(Stranded(count_held(self._config.node, seats)))
                case Send(name, incarnation, message):
                    send_to(self._watch.socket, f"{name}#{incarnation}".encode(), encode(message))
                case Sweep():
                    self._sweep()
                case Tell():
                    self._tell(action)
                case Record():
                    self._chronicle.add(action)
                case Finished():
                    self._finished = action

    @property
    def _streams_wait(self) -> bool:
        return self._later.streams_wait(time.monotonic_ns(), self._core.awaits_acks)

    @property
    def _spare_cpus(self) -> int:
        return len(os.sched_getaffinity(0)) - len(self._core.group.members)

    def _do_what_was_put_off(self) -> None:
        for action in self._later.take():
            match action:
                case Spawn(name, incarnation):
                    self._starts.spawn(name, incarnation)
                case Sweep():
                    self._sweep()

    def _resize(self, ranks: int) -> None:
        """Tell who starts from now on. Without disk they read the old number: their share of the memory
        is another then, nothing else."""
        self._config = msgspec.structs.replace(self._config, ranks=ranks)
        try:
            self._config.save()
        except OSError as error:
            self._log.error("cannot save the configuration", ranks=ranks, error=str(error))

    def _sweep(self) -> None:
        try:
            swept = arena.sweep(self._config.node, keep=arena.TOKENS)
        except OSError as error:  # no descriptor is left to look with
            self._log.error("cannot sweep shared memory", error=str(error))
            return
        if swept:
            self._log.info("swept shared memory", names=swept)

    def _tell(self, event: Tell) -> None:
        """To the log, each phase of a start once; to the live display, everything."""
        phase = (event.process, event.text)
        if event.kind != "progress" or phase not in self._phases_told:
            log = self._log.warning if event.kind in _WARNINGS else self._log.info
            fields = {"about": event.process, "text": event.text}
            log(event.kind, **{name: value for name, value in fields.items() if value})
        if event.kind == "progress":
            self._phases_told.add(phase)
        self._on_event(event)
        if event.kind == "node ready":
            if self._weights is not None:
                self._weights.start()
            self._starts.want_standbys()

    def _inject(self, identity: bytes, request: Inject) -> None:
        living = {name: child.incarnation for name, child in self._watch.children.items()}
        reply, actions = self._injector.answer(identity, request, living, time.monotonic_ns())
        if actions:
            about = list(dict.fromkeys(action.name for action in actions))
            self._log.warning("injected", fault=request.kind, about=about, only=request.only)
        for action in actions:
            if isinstance(action, SetFaults):
                self._set_faults(action)
            else:
                self._carry_out([action])
        send_to(self._watch.socket, identity, encode(reply))

    def _set_faults(self, wanted: SetFaults) -> None:
        self._fault_row(wanted.name).write(wanted.faults, wanted.fresh)

    def _came_up(self, name: str, slot: int) -> int:
        return self._fault_row(name).count(slot)

    def _fault_row(self, name: str) -> FaultRow:
        assert self._faults is not None
        if name == SUPERVISOR:
            return self._faults.row(SUPERVISOR_ROW)
        process = self._core.processes.get(name) or self._core.changes.retired[name]
        return self._faults.row(process.spec.index)

    def _inspect(self, name: str, incarnation: int) -> None:
        child = self._watch.children.get(name)
        with contextlib.suppress(OSError):  # no descriptor is left to look with
            found = child.looks.inspect(time.monotonic_ns()) if child is not None else None
            if found is not None:
                self._events.append(Inspected(name, incarnation, *found))

    # ------------------------------------------------------------ signals and the end

    def _obey_signals(self) -> Callable[[], None]:
        """Note signals for the loop; returns a function that undoes it. Only possible in a main thread."""
        if threading.current_thread() is not threading.main_thread():
            return lambda: None

        def note(number: int, frame: FrameType | None) -> None:
            self._signals.append(number)

        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        before = {number: signal.signal(number, note) for number in numbers}

        def restore() -> None:
            for number, handler in before.items():
                signal.signal(number, handler)

        return restore

    def _end(self, finished: Finished) -> ExitCode:
        """All processes are gone: remove what they left, say so to whoever asked, and how it ended."""
        self._tender.end(_TEND_S)
        self._spawner.close()
        if self._weights is not None:
            self._weights.close()
        follow_epoch(None)
        self._board.close()
        if self._faults is not None:
            faults.active = None
            self._faults.close()
        # What nobody has ended goes on with the next start, from the token log; of a first start there is nothing.
        ended = finished.code == ExitCode.OK and not finished.left
        ended |= self._core.ready_s < 0 and not self._goes_on
        swept = arena.sweep(self._config.node, keep="" if ended else arena.TOKENS)
        left = (*finished.left, *(f"{name} (swept)" for name in swept))
        if finished.code != ExitCode.OK:
            write_failure(self._run_dir, finished.code, finished.reason)
        for identity, call in self._waiting_for_end:
            send_to(self._watch.socket, identity, encode(ShutdownDone(call, left)))
        if self._waiting_for_end:
            time.sleep(_FLUSH_S)  # sockets are closed without lingering; the answer is on its way
        self._watch.close()
        for path in self._run_dir.glob("*.sock"):
            path.unlink(missing_ok=True)
        self._log.info("stopped", code=int(finished.code), reason=finished.reason, left=left)
        self._chronicle.close()
        return finished.code
