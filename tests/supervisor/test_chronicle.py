"""The file of the history: what was written is read again, whatever the one who wrote it died of, and it never grows
beyond its bound. Real processes: a disk that hangs holds no supervisor up, and the history outlives one."""

import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from supervisor.node import TestNode, until

from phalanx.protocol.log import flush_log, older, setup_logging
from phalanx.protocol.messages import HistoryEntry, HistoryQuery, HistoryReply
from phalanx.protocol.rundir import LOG_DIR
from phalanx.supervisor import chronicle
from phalanx.supervisor.ask import NoNode
from phalanx.supervisor.chronicle import ENTRIES_MAX, HISTORY_FILE, Chronicle, read, to_line
from phalanx.supervisor.commands.epochs import epochs
from phalanx.supervisor.events import Record
from phalanx.supervisor.history import CUT_OFF, UNDER_WAY


def entry(id_: int, **fields: Any) -> HistoryEntry:
    made: dict[str, Any] = {"kind": "process", "epoch": 2, "cause": "gateway died", **fields}
    return HistoryEntry(id=id_, **made)


def open_in(run_dir: Path) -> Chronicle:
    (run_dir / LOG_DIR).mkdir(exist_ok=True)
    return Chronicle(run_dir, setup_logging(run_dir, "supervisor", 1, "info"))


def note(kept: Chronicle, *entries: HistoryEntry) -> None:
    for one in entries:
        kept.add(Record(one, time.monotonic_ns()))
    kept.close()


def file_in(run_dir: Path) -> Path:
    return run_dir / LOG_DIR / HISTORY_FILE


def test_the_last_word_about_an_entry_is_read_by_the_next_start(tmp_path: Path) -> None:
    first = open_in(tmp_path)
    assert (first.before, first.run, first.entries) == ("", 1, ())
    note(first, entry(1, outcome=UNDER_WAY), entry(2, cause="x"), entry(1, outcome="ready"))
    assert [(e.id, e.outcome) for e in first.entries] == [(1, "ready"), (2, "")]
    second = open_in(tmp_path)
    assert (second.before, second.run) == ("died", 2)
    assert second.entries == first.entries
    assert abs(first.entries[0].at - time.time()) < 60 and first.entries[0].run == 1
    note(second, entry(1), entry(2, kind="stop", outcome="exit code 0 OK"))
    third = open_in(tmp_path)
    assert (third.before, third.run) == ("stopped", 3)
    assert [(e.run, e.id) for e in third.entries] == [(1, 1), (1, 2), (2, 1), (2, 2)]


def test_what_was_under_way_when_the_supervisor_died_is_cut_off(tmp_path: Path) -> None:
    note(open_in(tmp_path), entry(1, outcome=UNDER_WAY))
    (found,) = open_in(tmp_path).entries
    assert found.outcome == CUT_OFF
    assert read(tmp_path)[0][0].outcome == UNDER_WAY, "the file has what was written"


def test_a_torn_last_line_costs_that_line_and_not_the_next(tmp_path: Path) -> None:
    note(open_in(tmp_path), entry(1), entry(2))
    path = file_in(tmp_path)
    path.write_bytes(path.read_bytes()[:-30])
    assert [e.id for e in read(tmp_path)[0]] == [1] and read(tmp_path)[1] == 0
    kept = open_in(tmp_path)
    note(kept, entry(1))
    assert [(e.run, e.id) for e in read(tmp_path)[0]] == [(1, 1), (2, 1)]
    assert read(tmp_path)[1] == 1, "the torn one"


@pytest.mark.parametrize(
    "line",
    [b'{"v":2,"id":1}', b'{"v":1}', b"\xff\xfe", b"[]", b"null", b'{"event":"log lines lost"}'],
)
def test_a_line_of_another_version_is_left_out_and_counted(tmp_path: Path, line: bytes) -> None:
    (tmp_path / LOG_DIR).mkdir()
    known = f"{to_line(entry(1))}\n".encode()
    file_in(tmp_path).write_bytes(known + line + b"\n" + known.replace(b'"id":1', b'"id":2'))
    entries, unread = read(tmp_path)
    assert [e.id for e in entries] == [1, 2] and unread == 1
    open_in(tmp_path)
    flush_log(10)
    said = (tmp_path / LOG_DIR / "supervisor.log").read_text()
    assert json.loads(said.splitlines()[-1])["event"] == "lines of the history cannot be read"


def test_later_fields_are_no_other_version(tmp_path: Path) -> None:
    (tmp_path / LOG_DIR).mkdir()
    file_in(tmp_path).write_text(
        to_line(entry(1)).replace('{"v":1,', '{"v":1,"colour":"red",') + "\n"
    )
    assert [e.id for e in read(tmp_path)[0]] == [1]


def test_the_file_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chronicle, "BYTES_MAX", 20_000)
    kept = open_in(tmp_path)
    line = len(to_line(entry(1000, run=1, at=1e9))) + 20
    for id_ in range(1, ENTRIES_MAX + 11):
        note(kept, entry(id_))
    path = file_in(tmp_path)
    assert path.stat().st_size < 20_000 + line and older(path).stat().st_size < 20_000 + line
    assert [e.id for e in kept.entries] == list(range(11, ENTRIES_MAX + 11))
    ids = [e.id for e in read(tmp_path)[0]]
    assert ids == list(range(ids[0], ENTRIES_MAX + 11)) and len(ids) >= 20_000 // line


@pytest.fixture
def node() -> Iterator[TestNode]:
    with tempfile.TemporaryDirectory(prefix="ph") as path:
        made = TestNode(Path(path) / f"hist{os.getpid()}", ranks=1)
        yield made
        made.stop()


def history(node: TestNode) -> tuple[HistoryEntry, ...]:
    reply = node.ask(HistoryQuery(5))
    assert isinstance(reply, HistoryReply), node.said()
    return reply.entries


@pytest.mark.process
def test_the_history_outlives_the_supervisor(node: TestNode) -> None:
    node.start()
    node.wait_healthy()
    victim = node.process("scheduler-0").pid
    os.kill(victim, signal.SIGKILL)
    until(lambda: [e for e in history(node) if (e.process, e.outcome) == ("scheduler-0", "ready")])
    before = history(node)
    assert [(e.kind, e.process) for e in before] == [
        ("start", "supervisor"),
        ("group", ""),
        ("process", "scheduler-0"),
    ]
    fell = before[-1]
    assert fell.noticed in ("death mark", "death pipe", "exit") and fell.ended == "ended by SIGKILL"
    assert fell.decided == "restart at once" and {p.name for p in fell.phases} >= {"start", "load"}
    assert fell.resumed_ms == pytest.approx(1000 * sum(p.s for p in fell.phases), abs=1)
    node.supervisor_killed()
    node.start()
    node.wait_healthy()
    after = history(node)
    assert after[:3] == before
    died = after[3]
    assert (died.run, died.cause, died.noticed) == (2, "supervisor died", "next start")
    assert died.detected_ms > 0 and died.resumed_ms > 0 and died.outcome == "ready"
    node.shut_down()
    node.wait_end()
    found, unread = read(node.run_dir)
    assert tuple(found[:4]) == after[:4] and unread == 0
    assert (found[-1].kind, found[-1].outcome) == ("stop", "exit code 0 OK")
    where = ["--run-dir", str(node.run_dir)]
    shown = CliRunner().invoke(epochs, [*where, "--offline", "--json"])
    assert [e["cause"] for e in json.loads(shown.output)] == [e.cause for e in found]
    assert isinstance(CliRunner().invoke(epochs, where).exception, NoNode)
    assert CliRunner().invoke(epochs, [*where, "--offline"]).exit_code == 0


@pytest.mark.soak
@pytest.mark.process
def test_a_history_that_cannot_be_written_holds_nobody_up(node: TestNode) -> None:
    """Whoever opens it is kept by the kernel: nobody reads the pipe."""
    (node.run_dir / LOG_DIR).mkdir(parents=True)
    os.mkfifo(file_in(node.run_dir))
    node.start()
    node.wait_healthy()
    victim = node.process("tokenizer-0").pid
    os.kill(victim, signal.SIGKILL)
    until(lambda: [e for e in history(node) if (e.process, e.outcome) == ("tokenizer-0", "ready")])
    assert node.shut_down().left == ()
    node.wait_end()
