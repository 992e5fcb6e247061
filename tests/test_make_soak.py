"""What runs for hours must not lose what it found: whatever fails is told with its seed or its name, also what
never ends, what takes its process with it, and what was running when all was stopped."""

import json
import os
import signal
import subprocess
import sys
from itertools import count, islice
from pathlib import Path

from click.testing import CliRunner

from sim.sweep import Outcome, command, outcomes
from soak import MANY, Found, Soak

TESTS = """
import os, signal, pytest

def test_passes(): pass
def test_fails(): assert 1 == 2, "one and two"
def test_skips(): pytest.skip("no GPU")
@pytest.fixture
def late():
    yield
    raise OSError("left behind")
def test_leaves(late): pass
def test_dies(): os.kill(os.getpid(), signal.SIGKILL)
def test_never_runs(): pass
"""


def bad(seed: int) -> int:
    if seed == 5:
        raise KeyError("slot")
    if seed == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    while seed == 9:
        pass
    if seed == 11:
        raise RuntimeError("first line\nsecond")
    return 2


def test_what_fails_is_told_with_its_seed() -> None:
    found = sorted(outcomes(bad, range(14), 2, cpu_s_max=0.3))
    assert [one.seed for one in found] == list(range(14))
    failures = {one.seed: one.failure for one in found if one.failure}
    assert failures.pop(5).startswith("KeyError: 'slot' (test_make_soak.py:")
    assert failures.pop(7) == "its process died"
    assert failures.pop(9).startswith(
        "TimeoutError: not over after 0 s of CPU time (test_make_soak.py:"
    )
    assert failures.pop(11).startswith("RuntimeError: first line (test_make_soak.py:")
    assert not failures
    assert [*islice(outcomes(bad, count(20), 1), 3)] == [Outcome(seed, 2) for seed in (20, 21, 22)]


def test_the_command_says_how_to_see_a_seed_again(tmp_path: Path) -> None:
    record = tmp_path / "record"
    main = command(bad, "bad ones", "python again.py --seed {seed}", worlds=8, requests=0)
    done = CliRunner().invoke(
        main, ["--seed", "4", "--jobs", "1", "--worlds", "2", f"--record={record}"]
    )
    assert done.exit_code == 1
    assert done.output.splitlines()[-2].startswith("seed 5: KeyError: 'slot'")
    assert done.output.splitlines()[-1] == "    again: python again.py --seed 5"
    rows = [json.loads(line) for line in record.read_text().splitlines()]
    assert [row.get("seed") for row in rows if "failure" in row] == [5]
    assert sum(row["worlds"] for row in rows) == 2 and sum(row["requests"] for row in rows) == 2


def run_tests(folder: Path, *options: str) -> Found:
    record = folder / "record"
    arguments = [
        "-q",
        "-c",
        os.devnull,
        "--rootdir",
        str(folder),
        "--record",
        str(record),
        *options,
    ]
    subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-p", "records", *arguments, str(folder)],
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
        capture_output=True,
        check=False,
    )
    return Found(record)


def test_a_run_that_is_killed_keeps_what_it_found_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "test_it.py"
    path.write_text(TESTS)
    due = run_tests(tmp_path, "--collect-only").due(timed=False)
    assert [name.rpartition("::")[2] for name in due] == [
        "test_passes", "test_fails", "test_skips", "test_leaves", "test_dies", "test_never_runs",
    ]  # fmt: skip
    found = run_tests(tmp_path)
    outcomes = {name.rpartition("_")[2]: row["outcome"] for name, row in found.tests.items()}
    assert outcomes == {
        "passes": "passed", "fails": "failed", "skips": "skipped", "leaves": "failed", "dies": "began",
    }  # fmt: skip
    assert "one and two" in found.tests["test_it.py::test_fails"]["said"]
    assert [name.rpartition("_")[2] for name in found.due(timed=False)] == [
        "fails", "leaves", "dies", "runs",
    ]  # fmt: skip
    assert found.spread(["a", "b"]) == (["a", "b"], [])
    found.timed |= dict.fromkeys((f"test_many.py::{at}" for at in range(MANY)), False)
    assert found.spread(["a", "test_many.py::3"]) == (["a"], ["test_many.py::3"])
    found = run_tests(tmp_path, "--collect-only")
    thirds = [found.due(timed=False, share=(part, 3)) for part in (1, 2, 3)]
    assert sorted(test for third in thirds for test in third) == sorted(
        found.due(timed=False)
    ) and all(thirds)
    assert "tests: 1 passed, 1 skipped, 2 failed, 1 cut off, 1 to go" in [*found.summary()]
    assert found.failed() and found.left(("tests",))
    path.write_text(
        TESTS.replace("1 == 2", "2 == 2").replace("signal.SIGKILL", "0").replace("raise", "return")
    )
    found = run_tests(tmp_path)
    assert not found.failed() and not found.left(("tests",))
    once = [line for line in found.summary() if line.startswith("failed once")]
    assert len(once) == 2


def test_what_would_begin_too_late_is_left(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS.replace("signal.SIGKILL", "0"))
    run_tests(tmp_path, "--collect-only")
    found = run_tests(tmp_path, "--until", "5")
    assert {row["outcome"] for row in found.tests.values()} == {"left"}
    assert len(found.due(timed=False)) == 6 and not found.failed() and found.left(("tests",))


def test_a_record_may_lie_anywhere(tmp_path: Path) -> None:
    """pytest takes the folder of an argument that is a file for the project's, which has no such tests."""
    record = tmp_path / "record"
    record.touch()
    Soak(record, 1, 0.0, (1, 1))._pytest("-q", "-q", "--collect-only", __file__)
    assert len(Found(record).timed) == 5
