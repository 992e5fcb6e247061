"""Small files of the run directory on a full disk: whole or not at all, and nobody ends over one."""

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import pytest

from phalanx.protocol.config import HttpConfig
from phalanx.protocol.errors import ConfigError
from phalanx.protocol.log import Logger
from phalanx.protocol.rundir import (
    CLIENT_SOCKET,
    HTTP_FILE,
    JOURNAL_FILE,
    LOCK_FILE,
    LOG_DIR,
    PID_FILE,
    PLAN_FILE,
    prepare,
    read_plans,
    write_plan,
)
from phalanx.services.http.address import listen, read_address
from phalanx.supervisor.files import Files
from phalanx.supervisor.lock import FAILED_FILE


@contextmanager
def full_disk() -> Iterator[None]:
    """Files can be made and emptied; nothing can be written to them."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_memory_plan_is_whole_or_the_one_before(tmp_path: Path) -> None:
    write_plan(tmp_path, 0, [("KV blocks", "3")])
    with full_disk(), pytest.raises(OSError, match="File too large"):
        write_plan(tmp_path, 0, [("KV blocks", "4")])
    assert read_plans(tmp_path) == {0: {"KV blocks": "3"}}
    assert [path.name for path in tmp_path.iterdir()] == [PLAN_FILE.format(seat=0)]


@pytest.mark.parametrize("torn", ["", '{"KV blo'])
def test_a_torn_plan_is_left_out(tmp_path: Path, torn: str) -> None:
    write_plan(tmp_path, 1, [("KV blocks", "3")])
    (tmp_path / PLAN_FILE.format(seat=0)).write_text(torn)
    assert read_plans(tmp_path) == {1: {"KV blocks": "3"}}


def test_what_is_brought_back_on_a_full_disk_is_not_emptied(tmp_path: Path) -> None:
    pid = tmp_path / PID_FILE
    pid.write_text("7\n")
    files = Files(tmp_path)
    assert files.bring_back() == []
    pid.unlink()
    with full_disk(), pytest.raises(OSError, match="File too large"):
        files.bring_back()
    assert files.bring_back() == [PID_FILE], "there is room again"
    assert pid.read_text() == "7\n"


class ListLog:
    def __init__(self) -> None:
        self.said: list[str] = []

    def warning(self, event: str, **fields: object) -> None:
        self.said.append(event)


def test_http_serves_without_room_for_its_address(tmp_path: Path) -> None:
    log = ListLog()
    with full_disk(), listen(HttpConfig(enabled=True, port=0), tmp_path, cast(Logger, log)):
        assert read_address(tmp_path) is None and log.said == ["address not written"]
    with listen(HttpConfig(enabled=True, port=0), tmp_path, cast(Logger, log)) as found:
        port = found.getsockname()[1]
    with (
        full_disk(),
        listen(HttpConfig(enabled=True, port=0), tmp_path, cast(Logger, log)) as found,
    ):
        assert found.getsockname()[1] == port, "the address of before is still there"
    assert json.loads((tmp_path / HTTP_FILE).read_text())["port"] == port


@pytest.mark.parametrize(
    "name", [CLIENT_SOCKET, LOCK_FILE, PID_FILE, FAILED_FILE, JOURNAL_FILE, "memory-1.json"]
)
def test_a_directory_in_the_place_of_a_file_is_named(tmp_path: Path, name: str) -> None:
    (prepare(tmp_path) / name).mkdir()
    with pytest.raises(ConfigError, match=f"{tmp_path}/{name} is a directory, .* move it away"):
        prepare(tmp_path)


def test_so_is_a_file_in_the_place_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / LOG_DIR).touch()
    with pytest.raises(ConfigError, match=f"{tmp_path}/{LOG_DIR} is a file, .* move it away"):
        prepare(tmp_path)
