"""The answer to StatusQuery, made from the core's state. Pure."""

from phalanx.protocol.config import NodeConfig
from phalanx.protocol.messages import ProcessStatus, RankStatus, StatusReply
from phalanx.supervisor.core import SupervisorCore
from phalanx.supervisor.ending import NodeStage
from phalanx.supervisor.process import Process, Stage

_MS = 1_000_000


def status(
    core: SupervisorCore,
    config: NodeConfig,
    supervisor_pid: int,
    call: int,
    now_ns: int,
    note: str = "",
) -> StatusReply:
    """`note`: what people should know of a node that is healthy all the same."""
    reasons = core.reasons()
    told = "; ".join((*reasons, note) if note else reasons)
    own_state = "ready" if core.stage is NodeStage.RUNNING else core.stage.name.lower()
    own = ProcessStatus("supervisor", supervisor_pid, own_state, 0, 0, 1, told)
    return StatusReply(
        call=call,
        healthy=not reasons,
        epoch=core.group.epoch,
        ranks=tuple(
            RankStatus(s.seat, s.state, s.incarnation)
            for s in core.group.seats
            if s.seat in core.workers
        ),
        processes=(own, *(_process(p, now_ns) for p in core.processes.values() if p.exists)),
        run_dir=config.run_dir,
        model=config.model,
        ready_s=core.ready_s,
        phases=tuple(core.phases),
        epochs=tuple(core.group.records),
        failed=core.failed,
        change=core.changes.told,
        rebalance=core.rebalances.told,
        rebalances=tuple(core.rebalances.records),
        rebalanced=core.rebalances.totals,
        inexact=config.inexact,
        scrubbed=core.scrubs.of_ranks(core.worker_incarnations()),
        scrubbed_experts=core.scrubs.of_experts(core.worker_incarnations()),
        reasons=tuple(reasons),
        note=note,
    )


def _process(process: Process, now_ns: int) -> ProcessStatus:
    beat_ms = (now_ns - process.beat_ns) // _MS if process.beat_ns else -1
    starting = process.stage is Stage.STARTING
    return ProcessStatus(
        name=process.spec.name,
        pid=process.pid,
        state=_state(process),
        restarts=max(0, process.incarnation - 1 - process.asked_starts),
        last_beat_ms=max(beat_ms, 0) if process.beat_ns else -1,
        incarnation=process.incarnation,
        detail=process.detail,
        fraction=process.fraction if starting else -1.0,
        still_ms=(now_ns - process.progress_ns) // 1_000_000 if starting else -1,
    )


def _state(process: Process) -> str:
    if process.exists and (process.leaving or process.kill_ns):
        return "stopping"
    return {Stage.STARTING: "starting", Stage.READY: "ready"}.get(process.stage, "dying")
