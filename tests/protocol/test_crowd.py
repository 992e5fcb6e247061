"""More connections than a process may have files open: libzmq would abort it."""

import contextlib
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from phalanx.protocol import crowd, link, rundir
from phalanx.protocol.errors import PhalanxError
from phalanx.supervisor import run
from phalanx.supervisor.commands import doctor

FILES = 512
# As a service's turns: each answers, looks whether more may come, and at the files that are gone.
OWNER = f"""
import resource, sys, time
resource.setrlimit(resource.RLIMIT_NOFILE, ({FILES}, {FILES}))
from phalanx.protocol import link
clients, bus = (link.bind_router(f"ipc://{{sys.argv[1]}}/{{name}}", 1 << 20) for name in ("s", "bus.sock"))
while True:
    for path in link.take_no_more():
        print(path, flush=True)
    for socket in (clients, bus):
        for identity, frame in link.receive_from(socket, 9):
            link.send_to(socket, identity, frame)
    link.bind_anew(link.unbound())
    time.sleep(0.001)
"""


@contextmanager
def owner(run_dir: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-P", "-c", OWNER, str(run_dir)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def answered(peer: "zmq.Socket[bytes]") -> bool:
    return link.send(peer, b"here") and peer.poll(10_000) > 0 and link.receive(peer, 1) == [b"here"]


def test_a_crowd_of_connections_ends_nobody(tmp_path: Path) -> None:
    path = tmp_path / "s"
    crowding: list[socket.socket] = []
    with owner(tmp_path) as process, contextlib.ExitStack() as stack:
        before = link.connect_dealer(f"ipc://{path}")
        stack.callback(before.close)
        assert answered(before)
        try:
            for _ in range(FILES):
                one = socket.socket(socket.AF_UNIX)
                crowding.append(one)
                try:
                    one.connect(str(path))
                except FileNotFoundError:
                    break
            assert len(crowding) < FILES and answered(before), "who is connected stays so"
            inside = link.connect_dealer(f"ipc://{tmp_path}/{rundir.BUS_SOCKET}")
            stack.callback(inside.close)
            assert answered(inside), "our own processes still come in"
            late = link.connect_dealer(f"ipc://{path}")
            stack.callback(late.close)
            assert not late.poll(300) and process.poll() is None
        finally:
            for one in crowding:
                one.close()
        assert answered(late) and answered(before), "when they have gone others may come"
        assert process.stdout is not None and process.stdout.readline() == f"{path}\n"


def test_with_few_files_nothing_is_kept_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (FILES - 1, FILES - 1))
    monkeypatch.setattr("os.dup", lambda _: 1 / 0)
    assert not crowd.full()


def test_a_node_may_have_as_many_files_as_the_system_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The 1,024 of a shell are fewer than the clients that may come."""

    def stop() -> None:
        raise PhalanxError("far enough")

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(run, "check_processor", stop)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        told = {check["check"]: check["found"] for check in doctor._system(tmp_path)}
        assert told["open files"] == str(before[1])
        with pytest.raises(PhalanxError, match="far enough"):
            run.run_processes(None, (), lambda: None)  # type: ignore[arg-type,return-value]
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_process_without_a_standard_input_is_not_full() -> None:
    code = "import os; from phalanx.protocol import crowd; os.close(0); print(crowd.full())"
    command = [sys.executable, "-P", "-c", code]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False\n"
