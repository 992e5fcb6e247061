"""Shared memory relies on x86-64's order of stores: other processors are refused, in words."""

import platform
from pathlib import Path
from typing import NoReturn

import pytest

from phalanx.protocol.config import NodeConfig
from phalanx.protocol.errors import ConfigError
from phalanx.protocol.futex import Word
from phalanx.supervisor.commands.doctor import _system
from phalanx.supervisor.run import run_processes


@pytest.fixture
def arm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")


@pytest.mark.usefixtures("arm")
def test_no_node_starts_on_another_processor(tmp_path: Path) -> None:
    config = NodeConfig(run_dir=str(tmp_path / "run"))

    def placements() -> NoReturn:
        raise AssertionError("it got further")

    with pytest.raises(ConfigError, match="aarch64 processor, and Phalanx runs on x86_64 alone"):
        run_processes(config, [], placements)
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("arm")
def test_nothing_else_uses_such_words_there() -> None:
    with pytest.raises(ConfigError, match="x86_64 alone"):
        Word(memoryview(bytearray(4)), 0)


@pytest.mark.usefixtures("arm")
def test_the_doctor_names_another_processor(tmp_path: Path) -> None:
    (found,) = (check for check in _system(tmp_path) if check["check"] == "processor")
    assert not found["ok"] and found["found"] == "aarch64"
    assert "x86_64 only" in str(found["advice"])


def test_here_it_is_the_right_one(tmp_path: Path) -> None:
    Word(memoryview(bytearray(4)), 0)
    assert all(check["ok"] for check in _system(tmp_path) if check["check"] == "processor")
