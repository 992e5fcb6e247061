"""`phalanx up --detach` never reports success for a node that ended before it was ready."""

import sys
from pathlib import Path

import pytest

from phalanx.protocol.config import NodeConfig
from phalanx.protocol.errors import ExitCode, PhalanxError
from phalanx.protocol.rundir import prepare
from phalanx.supervisor.commands import node


@pytest.mark.parametrize(
    ("ended", "code"),
    [
        (ExitCode.OK, ExitCode.UNHEALTHY),
        (ExitCode.BAD_INPUT, ExitCode.BAD_INPUT),
        (99, ExitCode.INTERNAL),
    ],
)
def test_a_supervisor_that_ends_while_the_node_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: int, code: ExitCode
) -> None:
    run_dir = prepare(tmp_path / "node")
    ends = [sys.executable, "-c", f"raise SystemExit({int(ended)})"]
    monkeypatch.setattr(node, "_SUPERVISOR", ends)
    with pytest.raises(PhalanxError) as raised:
        node.start_detached(NodeConfig(run_dir=str(run_dir)))
    assert raised.value.exit_code == code  # type: ignore[attr-defined]
    assert ("it was stopped before it was ready" in str(raised.value)) == (ended == 0)
