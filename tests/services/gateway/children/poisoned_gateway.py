"""The gateway's process with a planted bug: it crashes over every request whose prompt begins with POISON."""

import os

from phalanx.protocol.service import run
from phalanx.services.gateway.main import serve
from phalanx.services.gateway.streams import Stream

POISON = 61


def plant(name: str) -> None:
    method = getattr(Stream, name)

    def falls(self: Stream, *arguments: object) -> object:
        if self.entry.prompt[:4] == POISON.to_bytes(4, "little"):
            raise ZeroDivisionError("planted")
        return method(self, *arguments)

    setattr(Stream, name, falls)


if __name__ == "__main__":
    plant(os.environ["PLANTED"])
    run(serve)
