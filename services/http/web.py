"""The web server around a client of the gateway, in one asyncio loop that also lives the life of a process.

It holds nothing that matters: requests are the gateway's, and streams go on over the gateway's restarts.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import uvicorn

from phalanx.protocol.codec import Decoder
from phalanx.protocol.config import HttpConfig
from phalanx.protocol.errors import DecodeError
from phalanx.protocol.limits import BEAT_PERIOD_MS
from phalanx.protocol.link import receive
from phalanx.protocol.messages import Drain, FromSupervisor
from phalanx.protocol.rundir import CLIENT_SOCKET
from phalanx.protocol.service import Service
from phalanx.services.client_async import AsyncClient
from phalanx.services.http.address import listen, url
from phalanx.services.http.app import Server
from phalanx.services.http.counts import Counts
from phalanx.services.http.gate import Gate
from phalanx.services.http.keys import Keys, read_keys
from phalanx.services.http.quotas import Door, Quota
from phalanx.services.http.recipe import model_of
from phalanx.services.http.tokens import Tokens
from phalanx.services.model_limits import read_model

_BEAT_S = BEAT_PERIOD_MS / 1000
_POLL_S = 0.02
# For replies under way at the end of the node: the gateway has finished its streams by then.
_GRACE_S = 1
_LOCAL = ("127.0.0.1", "::1", "localhost")


class _Uvicorn(uvicorn.Server):
    """Without its signal handlers: the process has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Web:
    """The process's one object. Raises ConfigError from its constructor and from `run`."""

    def __init__(self, service: Service) -> None:
        self._service, self._config = service, service.config.http
        self._decoder = Decoder[FromSupervisor](FromSupervisor)
        model_dir = Path(service.config.model_dir)
        limits = read_model(model_dir, service.config.model)
        self._tokens = Tokens(model_dir)
        self._model = model_of(limits, self._tokens.tokenizer)
        default = Quota(self._config.key_running, self._config.key_waiting)
        path = self._config.keys_file
        self._keys = read_keys(Path(path), default) if path else Keys({}, {})
        self._drains_until_s = 0.0  # replies under way are finished until then, time.monotonic()
        self._gate = Gate(_door(self._config, default, self._keys))

    async def run(self) -> None:
        """Serve until told to stop."""
        service = self._service
        listener = listen(self._config, service.run_dir, service.log)
        await self._gateway()
        async with AsyncClient(service.run_dir) as client:
            server = Server(
                self._config,
                client,
                self._gate,
                self._keys,
                self._model,
                self._tokens,
                service.log,
                service.run_dir,
                Counts(self._gate.door),
            )
            web = _Uvicorn(_settings(server))
            serving = asyncio.create_task(web.serve(sockets=[listener]))
            while not web.started and not serving.done():
                await asyncio.sleep(_POLL_S)
            service.ready()
            service.log.info("listening", address=url(*listener.getsockname()[:2]))
            if not self._keys.names and self._config.host not in _LOCAL:
                service.log.warning("anyone who reaches it may ask", host=self._config.host)
            while not service.stopping and not serving.done():
                self._turn()
                await asyncio.sleep(_BEAT_S / 2)
            server.stopping = True
            while self._drains() and not serving.done():
                self._turn()
                await asyncio.sleep(_POLL_S)
            web.should_exit = True
            while not serving.done():
                self._turn()
                await asyncio.sleep(_POLL_S)
            serving.result()

    async def _gateway(self) -> None:
        """Wait until there is a gateway to speak to; the supervisor judges how long that may take."""
        while not (self._service.run_dir / CLIENT_SOCKET).exists():
            self._service.progress("waiting for the gateway")
            await asyncio.sleep(_POLL_S)

    def _drains(self) -> bool:
        """Whether replies are under way, and have time. New requests are refused meanwhile."""
        door = self._gate.door
        return bool(door.running or door.waiting) and time.monotonic() < self._drains_until_s

    def _turn(self) -> None:
        """A sign of life; and how many of the ranks there are."""
        service = self._service
        service.row.advance()
        service.beat()
        for frame in receive(service.supervisor, 64):
            with contextlib.suppress(DecodeError):
                message = self._decoder.decode(frame)
                if isinstance(message, Drain):  # the rest is not for us
                    self._drains_until_s = time.monotonic() + message.timeout_ms / 1000
                    service.stopping = True
        topology = service.board.topology()
        if topology is not None and topology.seats:
            self._gate.set_capacity(max(1, len(topology.members())) / len(topology.seats))


def _door(config: HttpConfig, default: Quota, keys: Keys) -> Door:
    door = Door(config.running_max, config.waiting_max, default)
    for name, quota in keys.quotas.items():
        door.set_quota(name, quota)
    return door


def _settings(server: Server) -> uvicorn.Config:
    return uvicorn.Config(
        server.app(),
        http="httptools",
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=_GRACE_S,
    )
