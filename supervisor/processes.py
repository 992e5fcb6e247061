"""Which processes a node consists of: name, module, seat, environment. Names and rows are fixed for the node's life."""

from dataclasses import dataclass
from typing import Literal

from phalanx.protocol.config import NodeConfig

Kind = Literal["worker", "scheduler", "gateway", "tokenizer", "kvstore", "eplb", "http"]

# Libraries start a thread pool as large as the machine in every process unless told otherwise.
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")


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

    def environment(self) -> dict[str, str]:
        """Variables on top of the supervisor's own."""
        return {
            "PYTHONSAFEPATH": "1",  # the checkout must not shadow installed packages
            "PYTHONFAULTHANDLER": "1",  # a segmentation fault leaves a trace in NAME.out
            **dict.fromkeys(_THREADS, str(self.threads)),
        }


def process_table(config: NodeConfig) -> tuple[ProcessSpec, ...]:
    """Every process of the node in starting order: workers first, since they take longest."""
    rows: list[tuple[str, Kind, str, int]] = []
    for seat in range(config.ranks):
        rows.append((f"worker-{seat}", "worker", "phalanx.worker_svc", seat))
    rows.append(("gateway", "gateway", "phalanx.services.gateway", -1))
    for seat in range(config.ranks):
        rows.append((f"scheduler-{seat}", "scheduler", "phalanx.scheduler_svc", seat))
    for number in range(config.tokenizers):
        rows.append((f"tokenizer-{number}", "tokenizer", "phalanx.services.tokenizer", -1))
    if config.kvstore.enabled:
        rows.append(("kvstore", "kvstore", "phalanx.kvstore_svc", -1))
    rows.append(("eplb", "eplb", "phalanx.eplb_svc", -1))
    if config.http.enabled:
        rows.append(("http", "http", "phalanx.services.http", -1))
    return tuple(
        ProcessSpec(
            name=name,
            kind=kind,
            module=module,
            index=index,
            seat=seat,
            threads=config.worker.threads if kind == "worker" else 1,
            essential=kind not in ("kvstore", "eplb", "http"),
        )
        for index, (name, kind, module, seat) in enumerate(rows)
    )
