"""Imports point one way, pure files stay pure, and control processes never load torch."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ALLOWED = {  # folder -> folders of ours that it may import, besides itself
    "protocol": set[str](),
    "kernels": set[str](),
    "services": {"protocol"},
    "scheduler_svc": {"protocol"},
    "worker_svc": {"protocol", "kernels"},
    "kvstore_svc": {"protocol"},
    "eplb_svc": {"protocol"},
    "supervisor": {"protocol", "services"},  # the command line is a client of the gateway
    "testing": {"protocol", "services", "supervisor"},
}
# Files whose decisions must run in a simulator: no sockets, clock, chance or threads.
PURE = {
    "core.py",
    "prefill.py",
    "decode.py",
    "blocks.py",
    "stops.py",
    "validate.py",
    "placement.py",
    "admission.py",
    "attempts.py",
    "client_abandoned.py",
    "client_core.py",
    "client_flow.py",
    "delivery.py",
    "entries.py",
    "health.py",
    "history.py",
    "intake.py",
    "overseer.py",
    "replays.py",
    "scrub.py",
    "scrubs.py",
    "kept.py",
    "ledger.py",
    "listing.py",
    "lives.py",
    "logs.py",
    "moves.py",
    "peers.py",
    "recovery.py",
    "requests.py",
    "reruns.py",
    "seats.py",
    "streams.py",
    "suspects.py",
    "texts.py",
    "waiting.py",
    "introductions.py",
}
IMPURE = {
    "asyncio",
    "random",
    "secrets",
    "socket",
    "subprocess",
    "threading",
    "time",
    "torch",
    "zmq",
}
CONTROL = [
    "phalanx.services.gateway.main",
    "phalanx.services.tokenizer.main",
    "phalanx.scheduler_svc.main",
    "phalanx.kvstore_svc.main",
    "phalanx.eplb_svc.main",
    "phalanx.supervisor.run",
    "phalanx.supervisor.cli",
]


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield node.module or ""


@pytest.mark.parametrize("folder", ALLOWED)
def test_imports_point_down(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        ours = {name.split(".")[1] for name in imports(path) if name.startswith("phalanx.")}
        assert ours <= ALLOWED[folder] | {folder}, path


@pytest.mark.parametrize("folder", ALLOWED)
def test_pure_files_stay_pure(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        if path.name in PURE:
            assert not {name.split(".")[0] for name in imports(path)} & IMPURE, path


@pytest.mark.parametrize("module", CONTROL)
def test_control_processes_do_not_load_torch(module: str) -> None:
    probe = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    child = subprocess.run([sys.executable, "-P", "-c", probe], check=False, timeout=60)
    assert child.returncode == 0
