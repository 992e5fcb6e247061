"""The one `main` of all processes: what it says when it cannot begin."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.protocol.errors import ExitCode
from phalanx.protocol.rundir import LOG_DIR, prepare

pytestmark = pytest.mark.process


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
