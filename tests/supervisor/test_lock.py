"""What a node that ended by itself leaves: why it did, until the next start."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from phalanx.protocol.errors import ExitCode
from phalanx.protocol.rundir import PID_FILE, prepare
from phalanx.supervisor.ask import NodeGone
from phalanx.supervisor.commands import node
from phalanx.supervisor.lock import FAILED_FILE, clean, write_failure


@pytest.mark.parametrize("died", [False, True])
def test_who_stops_a_node_that_has_just_failed_leaves_its_story(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, died: bool
) -> None:
    """`phalanx down` finds it alive, and it is gone before it answers."""
    run_dir = prepare(tmp_path / "node")

    def ends(path: Path, *_: object) -> None:
        write_failure(path, ExitCode.GAVE_UP, "kvstore died 9 times")
        if died:  # and said so before it was killed
            (path / PID_FILE).write_text("1\n")
        raise NodeGone(path)

    monkeypatch.setattr(node, "ask", ends)
    assert node.stop_node(run_dir, 0.0) == (("supervisor (died)",) if died else ())
    assert json.loads((run_dir / FAILED_FILE).read_text())["reason"] == "kvstore died 9 times"


def test_a_start_removes_what_a_killed_command_wanted_to_start(tmp_path: Path) -> None:
    """`phalanx up` that was killed before the supervisor had read it; not that of one which waits beside us."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    left = [f"config.{ended.pid}.json", f"config.{ended.pid}.json.tmp"]
    kept = ["config.json", f"config.{os.getpid()}.json", "config.mine.json"]
    for name in left + kept:
        (tmp_path / name).write_text("{}")
    clean(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)
