"""The one `main` of all processes: what it says when it cannot begin, what it does when it is ready."""

import gc
import json
import os
import subprocess
import sys
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from phalanx.protocol.board import Board
from phalanx.protocol.config import NodeConfig
from phalanx.protocol.errors import ExitCode
from phalanx.protocol.rundir import LOG_DIR, prepare
from phalanx.protocol.service import Service


def test_what_is_there_when_a_process_is_ready_is_not_collected_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With torch a collection takes a tenth of a second, and streams would wait for it."""
    log, row = cast(Any, SimpleNamespace(info=print)), cast(Any, SimpleNamespace())
    service = Service("eplb", 3, -1, NodeConfig(), log, cast(Any, None), row, cast(Any, None))
    monkeypatch.setattr(service, "beat", lambda: None)
    kept = [[at] for at in range(1000)]
    gc.unfreeze()
    service.ready()
    assert gc.get_freeze_count() > len(kept)
    gc.unfreeze()


@pytest.mark.process
@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('{"ranks": "three"}', "Expected `int`, got `str` - at `$.ranks`"),
        ('{"ranks": 3', "Input data was truncated"),
        (None, "No such file or directory"),
    ],
)
def test_a_broken_configuration_is_told_with_its_place(
    tmp_path: Path, text: str | None, place: str
) -> None:
    run_dir = prepare(tmp_path / "node")
    if text is not None:
        (run_dir / "config.json").write_text(text)
    life_read, life_write = os.pipe()
    options = {"run-dir": run_dir, "name": "eplb", "incarnation": 3, "index": 1}
    options |= {"death-fd": life_write, "life-fd": life_read}
    command = [sys.executable, "-P", "-m", "phalanx.eplb_svc"]
    command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    done = subprocess.run(
        command,
        pass_fds=(life_read, life_write),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    os.close(life_read)
    os.close(life_write)
    assert done.returncode == ExitCode.BAD_INPUT
    assert "Traceback" not in done.stderr
    (said,) = map(json.loads, (run_dir / LOG_DIR / "eplb.log").read_text().splitlines())
    assert said["event"] == "cannot run as configured" and said["incarnation"] == 3
    assert str(run_dir / "config.json") in said["error"] and place in said["error"]


SLOW = """
import time
from phalanx.protocol.errors import NoRoom
from phalanx.protocol.log import LineFile
from phalanx.protocol.service import run

write = LineFile.write

def later(self, line):
    time.sleep(0.3)
    write(self, line)

LineFile.write = later

def serve(service):
    raise {error}

run(serve)
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        ("NoRoom('it needs 7 MiB')", ExitCode.NO_ROOM, "it needs 7 MiB"),
        ("ValueError('that is wrong')", ExitCode.INTERNAL, "that is wrong"),
    ],
)
def test_last_words_are_written_before_the_end(
    tmp_path: Path, error: str, code: ExitCode, told: str
) -> None:
    """On a loaded machine the log's thread is a while behind; health says what stands there."""
    config = NodeConfig(run_dir=str(prepare(tmp_path / uuid.uuid4().hex[:8])))
    config.save()
    life_read, life_write = os.pipe()
    options = {"run-dir": config.run_path, "name": "eplb", "incarnation": 3, "index": 1}
    options |= {"death-fd": life_write, "life-fd": life_read}
    command = [sys.executable, "-P", "-c", SLOW.format(error=error)]
    command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    with Board.create(config.node).arena:
        ended = subprocess.run(command, pass_fds=(life_read, life_write), check=False, timeout=60)
    os.close(life_read)
    os.close(life_write)
    assert ended.returncode == code
    assert told in (config.run_path / LOG_DIR / "eplb.log").read_text()
