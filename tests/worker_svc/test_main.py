"""A worker that starts while its peers step gives way to them on their CPUs, until it steps itself."""

import os
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

import phalanx.worker_svc.main as main_module
from phalanx.protocol.config import NodeConfig
from phalanx.protocol.errors import ConfigError
from phalanx.protocol.service import Service


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, 0)


def service(device: str, epoch: int) -> Service:
    fake = SimpleNamespace(config=NodeConfig(device=device), board=SimpleNamespace(epoch=epoch))  # type: ignore[arg-type]
    return cast(Service, fake)


def loads_with(monkeypatch: pytest.MonkeyPatch, found: Any) -> None:
    monkeypatch.setattr(main_module, "load_backend", found)


@pytest.mark.parametrize(
    ("device", "epoch", "levels"), [("cpu", 4, 5), ("cpu", 3, 0), ("cuda", 4, 0)]
)
def test_only_loading_beside_peers_gives_way(
    monkeypatch: pytest.MonkeyPatch, device: str, epoch: int, levels: int
) -> None:
    before = niceness()
    loads_with(monkeypatch, lambda service, ahead: (niceness(), threading.current_thread().name))
    nice, thread = cast(tuple[int, str], main_module._load(service(device, epoch), None))
    assert nice == min(before + levels, 19)
    assert (thread == threading.main_thread().name) == (levels == 0)
    assert niceness() == before, "it steps like its peers"


def test_a_load_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(service: Service, ahead: None) -> None:
        raise ConfigError("no such weights")

    loads_with(monkeypatch, fail)
    with pytest.raises(ConfigError, match="no such weights"):
        main_module._load(service("cpu", 4), None)
