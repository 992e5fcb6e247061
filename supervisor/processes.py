"""Which processes a node consists of: name, module, seat, environment. Names and rows are fixed for the node's life."""

from dataclasses import dataclass
from typing import Literal

from phalanx.protocol.config import NodeConfig, WorkerConfig
from phalanx.protocol.limits import MAX_SEATS

Kind = Literal["worker", "scheduler", "gateway", "tokenizer", "kvstore", "eplb", "http"]

# Libraries start a thread pool as large as the machine in every process unless told otherwise.
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process of the node, whatever its incarnation."""

    name: str
    kind: Kind
    module: str  # started with `python -P -m MODULE`
    index: int  # its row of the heartbeat table
    seat: int = -1
    threads: int = 1
    # The node serves without it (it only gets slower): its deaths never end the node.
    essential: bool = True
    # Streams wait for it when it dies, so a process is started before that forks it then (`spawn.py`): the
    # name of that one. Processes that share a module share it; empty: there is none.
    standby: str = ""
    # One call of its loop may take seconds of CPU time: nobody waits for it.
    long_calls: bool = False

    def environment(self) -> dict[str, str]:
        """Variables on top of the supervisor's own."""
        return {
            "PYTHONSAFEPATH": "1",  # the checkout must not shadow installed packages
            "PYTHONFAULTHANDLER": "1",  # a segmentation fault leaves a trace in NAME.out
            **dict.fromkeys(_THREADS, str(self.threads)),
            "OPENBLAS_NUM_THREADS": "1",  # numpy's pool begins with its import, and could not be forked
        }


def process_table(config: NodeConfig) -> tuple[ProcessSpec, ...]:
    """Every process of the node in starting order: workers first, since they take longest.

    A seat's two processes have rows of the heartbeat table of their own, also while the node has fewer
    seats: it may get more while it runs.
    """
    services: list[tuple[str, Kind, str]] = [("gateway", "gateway", "phalanx.services.gateway")]
    for number in range(config.tokenizers):
        services.append((f"tokenizer-{number}", "tokenizer", "phalanx.services.tokenizer"))
    if config.kvstore.enabled:
        services.append(("kvstore", "kvstore", "phalanx.kvstore_svc"))
    services.append(("eplb", "eplb", "phalanx.eplb_svc"))
    if config.http.enabled:
        services.append(("http", "http", "phalanx.services.http"))
    gateway, *others = (
        ProcessSpec(
            *(name, kind, module, row),
            essential=kind not in ("kvstore", "eplb", "http"),
            standby=f"{name}-next"
            if name == "gateway" or (kind, config.tokenizers) == ("tokenizer", 1)
            else "",
            long_calls=kind == "eplb",
        )
        for row, (name, kind, module) in enumerate(services, 2 * MAX_SEATS)
    )
    seats = [seat_specs(seat, config.worker) for seat in range(config.ranks)]
    workers, schedulers = zip(*seats, strict=True)
    return (*workers, gateway, *schedulers, *others)


def seat_specs(seat: int, config: WorkerConfig) -> tuple[ProcessSpec, ProcessSpec]:
    """The worker and the scheduler of a seat."""
    worker = ProcessSpec(
        *(f"worker-{seat}", "worker", "phalanx.worker_svc", seat, seat, config.threads),
        standby="worker-next" if config.standby else "",
    )
    name, row = f"scheduler-{seat}", MAX_SEATS + seat
    return worker, ProcessSpec(name, "scheduler", "phalanx.scheduler_svc", row, seat=seat)
