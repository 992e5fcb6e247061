"""HTTP lives as every process does, though its loop is another."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from phalanx.protocol import service as services
from phalanx.protocol.config import NodeConfig
from phalanx.protocol.limits import COMMAND_RETRY_MS
from phalanx.protocol.service import Service
from phalanx.services.http import web
from phalanx.services.http.web import Web

MS = 1_000_000


class Row:
    """Of a process that the supervisor has not heard yet."""

    ready_heard = 0

    def beat(self, now_ns: int) -> None:
        pass

    def advance(self) -> None:
        pass


def test_a_ready_that_got_lost_is_said_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns, said = 1_000 * MS, list[bytes]()
    monkeypatch.setattr(services.time, "monotonic_ns", lambda: now_ns)
    monkeypatch.setattr(services, "send", lambda socket, frame: said.append(frame))
    monkeypatch.setattr(web, "receive", lambda socket, limit: [])
    log = cast(Any, SimpleNamespace(info=lambda event: None))
    board, row = cast(Any, SimpleNamespace(topology=lambda: None)), cast(Any, Row())
    service = Service("http", 1, -1, NodeConfig(), log, board, row, cast(Any, None))
    served = object.__new__(Web)
    served._service = service
    service.ready()
    for _ in range(3):
        now_ns += COMMAND_RETRY_MS * MS
        served._turn()
    assert len(said) == 4 and len(set(said)) == 1
    row.ready_heard = 1
    for _ in range(3):
        now_ns += COMMAND_RETRY_MS * MS
        served._turn()
    assert len(said) == 4
