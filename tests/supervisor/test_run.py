"""A node that is cut off while it is being made."""

from pathlib import Path

import pytest

from phalanx.protocol.arena import names
from phalanx.protocol.config import NodeConfig
from phalanx.protocol.errors import ExitCode
from phalanx.protocol.rundir import is_running
from phalanx.supervisor import main
from phalanx.supervisor.lock import FAILED_FILE, write_failure
from phalanx.supervisor.placements import GroupPlacements
from phalanx.supervisor.processes import process_table
from phalanx.supervisor.run import run_processes


def test_an_interrupt_before_it_obeys_signals_leaves_no_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = NodeConfig(run_dir=str(tmp_path), ranks=1, tokenizers=1)
    write_failure(tmp_path, ExitCode.GAVE_UP, "what ended the node before it")
    made: list[str] = []

    class Spawner(main.Spawner):
        def __init__(self, run_dir: Path, children_lock_fd: int) -> None:
            made.extend(names(config.node))
            raise KeyboardInterrupt

    monkeypatch.setattr(main, "Spawner", Spawner)
    with pytest.raises(KeyboardInterrupt):
        run_processes(config, process_table(config), lambda: GroupPlacements(2, 8, 1))
    assert made and names(config.node) == []
    assert not is_running(config.run_path) and not (tmp_path / FAILED_FILE).exists()
