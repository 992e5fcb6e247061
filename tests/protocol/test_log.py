"""Logging never fails a process: lines that cannot be written are lost and counted, not raised.

The full disk is a limit of the file's size, set in a process of its own.
"""

import json
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from phalanx.protocol.log import LINES_MAX, LineFile, flush_log, older, setup_logging

_WRITER = """
import resource, signal, sys
from pathlib import Path
from phalanx.protocol.log import flush_log, setup_logging

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the limit fails with EFBIG
log = setup_logging(Path(sys.argv[1]), "gateway", 3, "info")
log.info("before")
flush_log(10)
size = (Path(sys.argv[1]) / "logs" / "gateway.log").stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 40, resource.RLIM_INFINITY))  # tears a line
for _ in range(5):
    log.error("while full")
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
log.info("after")
"""


def test_a_full_disk_loses_lines_and_says_how_many(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    command = [sys.executable, "-P", "-c", _WRITER, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, torn, note, last = (tmp_path / "logs" / "gateway.log").read_text().splitlines()
    assert json.loads(first)["event"] == "before"
    assert len(torn) == 40
    assert json.loads(note) == {
        "event": "log lines lost",
        "lines": 5,
        "why": "File too large",
    }
    assert json.loads(last)["event"] == "after"
    assert json.loads(last)["incarnation"] == 3


def test_a_deleted_file_is_made_anew_with_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "worker-0.log"
    file = LineFile(path)
    file.write("one")
    path.unlink()
    file.write("two")
    assert path.read_text() == "two\n"
    shutil.rmtree(path.parent)
    file.write("three")
    assert path.read_text() == "three\n"


def test_a_line_that_another_one_tore_costs_no_more_than_that(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "worker-0.log"
    path.parent.mkdir()
    path.write_text("whole\nto")
    LineFile(path).write("next")
    assert path.read_text() == "whole\nto\nnext\n"


def test_a_bounded_file_goes_on_as_another_one(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "history"
    file = LineFile(path, bytes_max=20)
    for number in range(8):
        file.write(f"line {number}")  # 7 bytes
    assert path.read_text() == "line 6\nline 7\n"
    assert older(path).read_text() == "line 3\nline 4\nline 5\n"


def test_a_place_where_no_file_can_be(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "worker-0.log"
    path.mkdir(parents=True)
    file = LineFile(path)
    file.write("one")
    file.write("two")
    path.rmdir()
    file.write("three")
    note, line = path.read_text().splitlines()
    assert json.loads(note)["lines"] == 2
    assert json.loads(note)["why"] == "Is a directory"
    assert line == "three"


_ON_A_FIFO = """
import os, sys, time
from pathlib import Path
from phalanx.protocol.log import LINES_MAX, setup_logging

log = setup_logging(Path(sys.argv[1]), "gateway", 3, "info")
began = time.monotonic()
for number in range(LINES_MAX + 100):
    log.info("said", number=number)
for number in range(20):
    log.error("wrong", number=number)
print(time.monotonic() - began, flush=True)
sys.stdin.read()
"""


@contextmanager
def hanging(tmp_path: Path) -> "Iterator[tuple[TextIO, TextIO, subprocess.Popen[str]]]":
    """Logs to a file that takes nothing: a pipe that nobody reads blocks who opens it, as a dead disk does."""
    (tmp_path / "logs").mkdir()
    os.mkfifo(tmp_path / "logs" / "gateway.log")
    command = [sys.executable, "-P", "-c", _ON_A_FIFO, str(tmp_path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as writer:
        try:
            assert writer.stdin is not None and writer.stdout is not None
            yield writer.stdin, writer.stdout, writer
        finally:
            writer.kill()


def test_a_disk_that_hangs_holds_no_process_up(tmp_path: Path) -> None:
    with hanging(tmp_path) as (stdin, stdout, writer):
        assert select.select([stdout], [], [], 60)[0], "it says nothing"
        assert float(stdout.readline()) < 5, "one wait of 0.1 s, not one for each line"
        stdin.close()
        assert writer.wait(20) == 0, "nor does it keep one that ends"


def test_what_a_disk_that_hangs_could_not_take_is_counted(tmp_path: Path) -> None:
    with hanging(tmp_path) as (stdin, stdout, _):
        stdout.readline()
        with (tmp_path / "logs" / "gateway.log").open() as reader:  # it works again
            stdin.close()
            found = [json.loads(line) for line in reader]
    said = [entry["number"] for entry in found if entry["event"] == "said"]
    lost = [entry for entry in found if entry["event"] == "log lines lost"]
    assert said == list(range(len(said))) and len(said) >= LINES_MAX
    assert sum(entry["lines"] for entry in lost) == LINES_MAX + 120 - len(said)
    assert "in time" in lost[0]["why"]


def test_lines_of_a_fork_are_its_own(tmp_path: Path) -> None:
    log = setup_logging(tmp_path, "parent", 1, "info")
    log.info("before")
    child = os.fork()
    if child == 0:
        setup_logging(tmp_path, "child", 1, "info").info("here")
        flush_log(10)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    log.info("after")
    flush_log(10)
    events = {
        name: [json.loads(line)["event"] for line in path.read_text().splitlines()]
        for name in ("parent", "child")
        for path in [tmp_path / "logs" / f"{name}.log"]
    }
    assert events == {"parent": ["before", "after"], "child": ["here"]}


_FOLLOWER = """
import sys
from pathlib import Path
from phalanx.protocol.log import follow_epoch, setup_logging
log = setup_logging(Path(sys.argv[1]), "worker-1", 2, "info").bind(rank=1)
epochs = iter((4, 6, 8))
log.info("before")
follow_epoch(lambda: next(epochs))
log.info("one")
log.info("two")
log.info("of another", epoch=5)
follow_epoch(None)
log.info("after")
"""


def test_each_line_says_the_epoch_that_it_was_written_in(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    subprocess.run([sys.executable, "-P", "-c", _FOLLOWER, str(tmp_path)], check=True)
    lines = (tmp_path / "logs" / "worker-1.log").read_text().splitlines()
    found = [(e["event"], e.get("epoch"), e["rank"]) for e in map(json.loads, lines)]
    assert found == [
        ("before", None, 1),
        ("one", 4, 1),
        ("two", 6, 1),
        ("of another", 5, 1),
        ("after", None, 1),
    ]
