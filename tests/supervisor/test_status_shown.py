"""`phalanx status` for people: why a node is not healthy stands below the table, whole."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from phalanx.protocol.messages import ProcessStatus, StatusReply
from phalanx.supervisor.commands import status as command

REASON = (
    "the journal /a/directory/with/a/long/name/journal.sqlite cannot be written (no space left)"
)


def shown(monkeypatch: pytest.MonkeyPatch, *options: str, **fields: object) -> tuple[int, str]:
    told = "; ".join((*fields.get("reasons", ()), fields.get("note", "")))  # type: ignore[misc]
    processes = (
        ProcessStatus("supervisor", 7, "ready", 0, 0, 1, told),
        ProcessStatus("gateway", 8, "starting", 0, 0, 1, "starting"),
        ProcessStatus("eplb", 0, "starting", 1, -1, 2),
        ProcessStatus("worker-0", 9, "starting", 0, 0, 1, "load weights", 0.5),
    )
    reply = StatusReply(1, not fields.get("reasons"), 2, (), processes, "/run", "tiny", **fields)  # type: ignore[arg-type]
    monkeypatch.setattr(command, "find_run_dir", lambda run_dir: Path("/run"))
    monkeypatch.setattr(command, "ask", lambda *asked: reply)
    result = CliRunner().invoke(command.status, options)
    return result.exit_code, result.output


def test_each_reason_has_a_line_that_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    code, output = shown(monkeypatch, reasons=(REASON, "gateway is starting"), note="remember")
    lines = output.splitlines()
    table = next(n for n, line in enumerate(lines) if line.startswith("└"))
    assert lines[table + 1 :] == [
        f"not healthy: {REASON}",
        "not healthy: gateway is starting",
        "remember",
    ]
    assert lines[0] == "tiny in /run: epoch 2, not healthy"
    assert code == 4 and "journal" not in "".join(lines[:table])


def test_a_state_is_told_once_and_nothing_follows_the_table_of_a_healthy_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code, output = shown(monkeypatch)
    assert code == 0 and output.splitlines()[-1].startswith("└")
    assert "starting: starting" not in output and "starting: load weights" in output


def test_a_program_finds_nobody_with_the_pid_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is about to be forked has none yet, and `kill -9 0` ends the shell that asks for it."""
    _, output = shown(monkeypatch, "--json")
    found = {p["name"]: p["pid"] for p in json.loads(output)["processes"]}
    assert found == {"supervisor": 7, "gateway": 8, "worker-0": 9}
    table = shown(monkeypatch)[1]
    assert any(line.split()[1:4] == ["eplb", "│", "│"] for line in table.splitlines()), table
