"""`phalanx epochs` for people: a paragraph an entry, in a terminal of 80 columns, too."""

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from phalanx.protocol.messages import HistoryEntry, PhaseTime
from phalanx.supervisor.chronicle import HISTORY_FILE, history_file, to_line
from phalanx.supervisor.commands.epochs import epochs, paragraph


def entry(**fields: Any) -> HistoryEntry:
    made: dict[str, Any] = {
        "cause": "worker-0 died",
        "decided": "restart at once",
        "outcome": "joined",
        "phases": (PhaseTime("load weights", "worker-0", 0.25), PhaseTime("join", "", 0.0581)),
        **fields,
    }
    return HistoryEntry(id=1, run=1, kind="process", epoch=2, process="worker-0", **made)


def lines(one: HistoryEntry) -> dict[str, str]:
    return {name: text for _, name, text in paragraph(one)}


def test_a_paragraph_has_what_fell_how_that_was_noticed_what_was_decided_and_how_long_it_took() -> (
    None
):
    fields = {"ended": "ended by SIGKILL", "noticed": "death mark", "detected_ms": 0.1}
    assert lines(entry(**fields, resumed_ms=1689.1)) == {
        "epoch 2": "worker-0 died (ended by SIGKILL)",
        "noticed": "death mark, 0.1 ms",
        "decided": "restart at once",
        "outcome": "joined after 1.69 s: load weights 250.0 ms, join 58.1 ms",
    }
    assert lines(entry(decided="", phases=())) == {"epoch 2": "worker-0 died", "outcome": "joined"}


def test_one_request_moves_and_two_move() -> None:
    for count, told in ((0, ""), (1, "; 1 request moves"), (2, "; 2 requests move")):
        assert lines(entry(moved_requests=count))["decided"] == f"restart at once{told}"


def test_the_time_has_milliseconds_and_never_a_thousand_of_them() -> None:
    assert paragraph(entry(at=1_800_000_000.9996))[0][0].endswith(".999")
    assert paragraph(entry(at=1_800_000_000.0125))[0][0].endswith(".012")


def test_no_time_and_no_name_is_cut_in_eighty_columns(tmp_path: Path) -> None:
    history_file(tmp_path).parent.mkdir()
    long = entry(at=1_800_000_000.125, decided="forked from worker-next; " * 8)
    history_file(tmp_path).write_text(f"{to_line(long)}\n")
    shown = CliRunner().invoke(epochs, ["--offline", "--run-dir", str(tmp_path)]).output
    assert "…" not in shown and shown.count("worker-next") == 8 and ".125 " in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_a_directory_in_which_no_node_has_run_is_told_so(tmp_path: Path) -> None:
    shown = CliRunner().invoke(epochs, ["--offline", "--json", "--run-dir", str(tmp_path)])
    assert (shown.exit_code, json.loads(shown.stdout)) == (0, [])
    assert HISTORY_FILE in shown.stderr and str(tmp_path) in shown.stderr
