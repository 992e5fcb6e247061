"""`phalanx doctor`: is this machine fit to run a node, and what would run on what."""

import json
import os
import platform
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import click
from rich.table import Table

from phalanx.protocol.arena import SHM
from phalanx.protocol.errors import ExitCode
from phalanx.protocol.futex import PROCESSOR
from phalanx.protocol.rundir import is_running, prepare
from phalanx.supervisor.ask import find_run_dir
from phalanx.supervisor.commands.common import (
    console,
    finish,
    json_option,
    print_json,
    run_dir_option,
)

_SHM_WANTED = 256 << 20
_FILES_WANTED = 1024


@click.command()
@run_dir_option
@json_option
def doctor(run_dir: Path | None, as_json: bool) -> None:
    """Check Python, memory, shared memory, limits, torch and kernels (exit 4 when something is wrong)."""
    path = prepare(find_run_dir(run_dir))
    checks = [*_system(path), *_scheduler(), *_numerics()]
    ok = all(check["ok"] for check in checks)
    if as_json:
        print_json({"ok": ok, "checks": checks})
    else:
        table = Table()
        for column in ("check", "found", "ok"):
            table.add_column(column)
        for check in checks:
            mark = "[green]yes[/]" if check["ok"] else f"[red]no[/]: {check['advice']}"
            table.add_row(str(check["check"]), str(check["found"]), mark)
        console.print(table)
    if not ok:
        finish(ExitCode.UNHEALTHY)


def _check(name: str, found: object, ok: bool = True, advice: str = "") -> dict[str, object]:
    return {"check": name, "found": str(found), "ok": ok, "advice": "" if ok else advice}


def _system(run_dir: Path) -> list[dict[str, object]]:
    shm = shutil.disk_usage(SHM).free
    disk = shutil.disk_usage(run_dir).free
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # a node takes what it may have
    return [
        _check(
            "python", platform.python_version(), sys.version_info >= (3, 11), "use 3.11 or newer"
        ),
        _check(
            "system",
            f"{platform.system()} {platform.release()}",
            sys.platform == "linux",
            "Linux only",
        ),
        _check(
            "processor",
            platform.machine(),
            platform.machine() == PROCESSOR,
            f"{PROCESSOR} only: others may show one process another's stores out of order",
        ),
        _check("cores", os.cpu_count()),
        _check(
            "free in /dev/shm",
            f"{shm >> 20} MiB",
            shm >= _SHM_WANTED,
            f"a node wants {_SHM_WANTED >> 20} MiB: raise the container's --shm-size",
        ),
        _check(
            "free disk for the run directory", f"{disk >> 20} MiB", disk > 1 << 30, "under 1 GiB"
        ),
        _check("open files", files, files >= _FILES_WANTED, f"raise ulimit -Hn to {_FILES_WANTED}"),
        _check(
            "run directory", f"{run_dir}, {'a node runs' if is_running(run_dir) else 'no node'}"
        ),
    ]


def _asked(module: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", module]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _scheduler() -> list[dict[str, object]]:
    """Slower passes are no fault: the decisions are the same."""
    answer = _asked("phalanx.scheduler_svc.compiled")
    return [
        _check("scheduler passes", (answer.stdout or answer.stderr).strip(), not answer.returncode)
    ]


def _numerics() -> list[dict[str, object]]:
    probe = _asked("phalanx.worker_svc.probe")
    if probe.returncode:
        return [_check("torch", probe.stderr.strip()[-300:], False, "install the package again")]
    return [
        _check(name, found, not str(found).startswith("no:"), "exact streams are not possible here")
        for name, found in json.loads(probe.stdout).items()
    ]
