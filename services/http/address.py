"""Where the HTTP server listens: chosen at its start, kept in the run directory for its restarts and for people."""

import socket
from pathlib import Path
from typing import Any

import msgspec

from phalanx.protocol.config import HttpConfig
from phalanx.protocol.errors import ConfigError
from phalanx.protocol.limits import CLIENT_STALL_MS
from phalanx.protocol.log import Logger
from phalanx.protocol.rundir import HTTP_FILE, write_whole

_BACKLOG = 2048


def listen(config: HttpConfig, run_dir: Path, log: Logger) -> socket.socket:
    """The listening socket; its address is written to the run directory, if it has room. Raises ConfigError.

    With port 0 the system chooses once in the life of a run directory's node: a restart takes the same.
    """
    port, kept = config.port, run_dir / HTTP_FILE
    wanted = [port]
    if port == 0 and (before := read_address(run_dir)) is not None:
        wanted = [before[1], 0]
    failure: OSError | None = None
    for choice in wanted:
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        found = socket.socket(family, socket.SOCK_STREAM)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Of each connection: of one whose reader has gone away or takes nothing the kernel lets go then.
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 2 * CLIENT_STALL_MS)
        try:
            found.bind((config.host, choice))
            found.listen(_BACKLOG)
        except OSError as error:
            found.close()
            failure = error
            continue
        found.setblocking(False)
        address = {"host": config.host, "port": found.getsockname()[1]}
        try:
            write_whole(kept, msgspec.json.encode(address))
        except OSError as error:
            log.warning("address not written", **address, error=str(error))
        return found
    raise ConfigError(
        f"cannot listen on {config.host}, port {port}: {failure}; choose another with --http"
    )


def read_address(run_dir: Path) -> tuple[str, int] | None:
    """(host, port) of the node's HTTP server, as written last; None when there was none."""
    try:
        found = msgspec.json.decode((run_dir / HTTP_FILE).read_bytes(), type=dict[str, Any])
        return str(found["host"]), int(found["port"])
    except (OSError, msgspec.DecodeError, KeyError, ValueError):
        return None


def url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
