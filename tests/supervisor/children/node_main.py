"""A supervisor over trivial children: `python -m node_main RUN_DIR RANKS`."""

import os
import sys
from dataclasses import replace
from pathlib import Path

from phalanx.protocol.config import NodeConfig
from phalanx.protocol.errors import ExitCode
from phalanx.supervisor import lock
from phalanx.supervisor.commands.foreground import run_in_foreground
from phalanx.supervisor.events import Tell
from phalanx.supervisor.lock import NodeBusy
from phalanx.supervisor.main import OnEvent
from phalanx.supervisor.placements import GroupPlacements
from phalanx.supervisor.processes import process_table
from phalanx.supervisor.run import run_processes


def tell(event: Tell) -> None:
    if event.kind == "waiting":
        print(event.kind, event.text, file=sys.stderr, flush=True)


def main() -> None:
    lock.OLD_NODE_MS = int(os.environ.get("NODE_OLD_MS", lock.OLD_NODE_MS))
    run_dir, ranks = Path(sys.argv[1]), int(sys.argv[2])
    faults = bool(os.environ.get("NODE_FAULTS"))
    config = NodeConfig(run_dir=str(run_dir), ranks=ranks, tokenizers=1, fault_injection=faults)
    table = [replace(spec, module="node_child") for spec in process_table(config)]

    def run(config: NodeConfig, on_event: OnEvent) -> ExitCode:
        return run_processes(config, table, lambda: GroupPlacements(2, 8, ranks), on_event)

    try:
        if os.environ.get("NODE_NARRATES"):
            sys.exit(run_in_foreground(config, False, run))
        sys.exit(run(config, tell))
    except NodeBusy as error:
        print(error, file=sys.stderr)
        sys.exit(ExitCode.UNHEALTHY)


if __name__ == "__main__":
    main()
