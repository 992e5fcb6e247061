"""One fault: a process of a live node is killed or stopped for ever, and watched until the node is whole."""

import os
import random
import signal
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy.typing as npt

from phalanx.bench.recovery_cpu import CpuWatch, Use
from phalanx.bench.recovery_watch import Change, EpochWatch
from phalanx.protocol.config import NodeConfig
from phalanx.protocol.messages import (
    ProcessStatus,
    Restart,
    Restarted,
    StatusQuery,
    StatusReply,
)
from phalanx.protocol.queues import read_queues, steps_done
from phalanx.supervisor.ask import ask
from phalanx.supervisor.processes import process_table

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
RESTART = "restart"  # the third way: a planned one, by the supervisor
_DEADLINE_S = 120.0
_POLL_S = 0.005
_AFTER_S = 0.5  # streams go on in the whole node
_ANSWER_S = 30.0


@dataclass
class Fault:
    """One fault and what followed, times in ns."""

    victim: str  # its kind
    struck_ns: int
    moved: set[tuple[str, int]]  # (request id, index) of what ran on the victim's rank
    changes: list[Change]  # of the group: a worker's loss, and its rejoin unless both were one
    whole_ns: int  # when the victim's successor was ready and all ranks ran
    died_ns: int  # when the victim was dead: of one that is stopped, when the node had noticed and killed it
    pool_used: float  # the fullest rank's share of KV blocks in use, when it came
    # (request id, index) -> the seat where it ran, when it came and when all was whole again
    before: dict[tuple[str, int], int] = field(default_factory=dict[tuple[str, int], int])
    after: dict[tuple[str, int], int] = field(default_factory=dict[tuple[str, int], int])
    # Seat -> the newest steps of its scheduler (`queues.STEP`)
    steps: dict[int, npt.NDArray[Any]] = field(default_factory=dict[int, Any])
    cpus: list[tuple[int, Use]] = field(default_factory=list[tuple[int, Use]])


def open_to(run_dir: Path, kind: str, spent: Collection[str]) -> list[ProcessStatus]:
    """The live processes of this kind that may die. Workers may do so again and again; another process
    whose last death was within a minute is started again later, which is not what a single fault costs."""
    living = [p for p in status(run_dir).processes if p.name.partition("-")[0] == kind]
    return [p for p in living if kind == "worker" or p.name not in spent]


def strike(
    config: NodeConfig,
    victims: list[ProcessStatus],
    how: str,
    delay_s: float,
    rng: random.Random,
    over: threading.Event,
) -> tuple[str, Fault]:
    """Signal one of `victims` after a while and watch until the node is whole again, or it is `over`.

    Returns (its name, what followed).
    """
    specs = {spec.name: spec for spec in process_table(config)}
    with EpochWatch(config.node, config.ranks) as watch, CpuWatch(victims[0].pid) as cpus:
        over.wait(delay_s)
        cpus.begin()
        victim = rng.choice(victims)
        spec = specs[victim.name]
        queues = read_queues(config.node)
        before = _seats(queues)
        moved = {name for name, seat in before.items() if seat == spec.seat}
        used = max(1 - r["free_blocks"] / max(r["total_blocks"], 1) for r in queues["ranks"])
        struck_ns = time.monotonic_ns()
        asked = _hit(config.run_path, victim, how)
        deadline, died_ns = time.monotonic() + _DEADLINE_S, 0
        while (ready := watch.ready(spec.index)) <= victim.incarnation or (
            watch.members() < config.ranks
        ):
            if not died_ns and watch.gone(spec.index, victim.incarnation):
                died_ns = time.monotonic_ns()
            if time.monotonic() > deadline or over.is_set():
                run_dir = config.run_path
                text = f"{victim.name}: {how}; {_DEADLINE_S:g} s later"
                said = f"incarnation {ready}, {watch.members()} of {config.ranks} ranks run"
                raise RuntimeError(f"{text}: {said}; {_state(run_dir)}")
            time.sleep(_POLL_S)
        whole_ns = time.monotonic_ns()
        after = _seats(read_queues(config.node))
        died_ns = died_ns or whole_ns
        if asked is not None:
            asked.join()
        over.wait(_AFTER_S)
        changes = watch.changes(struck_ns)
        steps = steps_done(config.node)
    whole_ns = changes[-1].even_ns if changes else whole_ns
    figures = (spec.kind, struck_ns, moved, changes, whole_ns, died_ns, used)
    return victim.name, Fault(*figures, before, after, steps, cpus.seen())


def _hit(run_dir: Path, victim: ProcessStatus, how: str) -> threading.Thread | None:
    """Returns who waits for the answer, if there is one to come."""
    if how != RESTART:
        os.kill(victim.pid, SIGNALS[how])
        return None
    request = Restart(1, (victim.name,), _DEADLINE_S)
    asked = threading.Thread(target=ask, args=(run_dir, request, Restarted, _DEADLINE_S))
    asked.start()
    return asked


def _seats(queues: dict[str, list[dict[str, Any]]]) -> dict[tuple[str, int], int]:
    return {(r["request_id"], r["index"]): r["slot"] for r in queues["requests"]}


def status(run_dir: Path) -> StatusReply:
    return ask(run_dir, StatusQuery(1), StatusReply, _ANSWER_S)


def _state(run_dir: Path) -> str:
    """What the node says of itself, for whoever has to find out why it does not go on."""
    said = status(run_dir)
    out = [f"{p.name} is {p.state}" for p in said.processes if p.state != "ready"]
    return "; ".join([*out, *(f"epoch {e.epoch}: {e.cause}" for e in said.epochs[-4:])])
