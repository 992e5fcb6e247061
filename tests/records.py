"""A plugin of pytest: `--record FILE` gets a line of JSON for each test that was collected (where that is all that is
done), when one begins, and when it ends: whatever ends the run, nothing that was found is lost. `--until TIME` leaves
what would begin later."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

NO_TIME = "no time left"


class Record:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._seconds: dict[str, float] = {}
        self._worst: dict[str, tuple[str, str]] = {}

    def _keep(self, test: str, **more: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"test": test, **more}) + "\n")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.config.option.collectonly:
            for item in session.items:
                self._keep(item.nodeid, outcome="due", timed=bool(item.get_closest_marker("timed")))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._keep(nodeid, outcome="began")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test, said = report.nodeid, str(report.longrepr or "")
        if report.skipped and isinstance(report.longrepr, tuple):
            said = report.longrepr[2]
        self._seconds[test] = self._seconds.get(test, 0.0) + report.duration
        if report.failed:
            said = "\n".join([said, *(f"--- {name}\n{text}" for name, text in report.sections)])
            self._worst[test] = ("failed", said)
        elif report.skipped:
            self._worst.setdefault(test, ("left" if NO_TIME in said else "skipped", said))
        if report.when == "teardown" or report.when not in ("setup", "call"):  # its process died
            outcome, said = self._worst.pop(test, ("passed", ""))
            seconds = round(self._seconds.pop(test), 1)
            self._keep(test, outcome=outcome, seconds=seconds, said=said)
        elif report.failed:
            self._keep(test, outcome="failed", seconds=round(self._seconds[test], 1), said=said)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("records")
    group.addoption("--record", help="a file that gets a line of JSON as each test ends")
    group.addoption("--until", type=float, help="tests that would begin after this time are left")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--record")
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Record(Path(path)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    until = item.config.getoption("--until")
    if until is not None and time.time() > until:
        pytest.skip(NO_TIME)
