"""/dev/shm as the gateway's token log sees it, and the check that no delivered token is ever made again."""

import random
from collections.abc import Iterator, Sequence
from itertools import chain

from phalanx.protocol.messages import Delta, Final, Submit
from phalanx.services.gateway.core import Core
from phalanx.services.gateway.entries import Recovered
from phalanx.services.gateway.token_log import beginning, frame, notes_in, recall

WRITES_PER_FILE = 40  # before the next one begins, with what is still of use
PARTS_PER_TURN = 2  # of what that begins with


class TokenMemory:
    """What a gateway wrote is there for the next one, whoever was killed with it."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._left: list[bytes] = []  # by earlier gateways, until this one's file has all there is
        self._file: bytes | None = None
        self._next: bytes | None = None
        self._rest: Iterator[bytes] = iter(())
        self._writes = 0
        self._handed: dict[tuple[str, int], int] = {}  # tokens that some client was given
        self._ended: set[tuple[str, int]] = set()
        self.resumed = 0  # sequences that were submitted with all that a client had

    def recovered(self, journal: Sequence[Recovered]) -> list[Recovered]:
        self._left += [file for file in (self._file, self._next) if file is not None]
        self._file = self._next = None
        if not self._left:
            return list(journal)
        return recall(journal, chain.from_iterable(map(notes_in, self._left)))

    def begin(self, core: Core) -> None:
        core.take_notes()
        self._begin(core)

    def write(self, core: Core) -> None:
        """Once a turn, before anything is sent."""
        self._writes += 1
        if notes := core.take_notes():
            self._add(frame(notes))
        if self._next is not None:
            self._go_on()
        elif self._writes > WRITES_PER_FILE:
            self._begin(core)

    def _begin(self, core: Core) -> None:
        self._writes = 0
        self._next, self._rest = b"", beginning(core.all_notes(), frame_bytes=1)
        self._go_on()

    def _go_on(self) -> None:
        assert self._next is not None
        for _ in range(PARTS_PER_TURN):
            part = next(self._rest, None)
            if part is None:
                self._file, self._next = self._next, None
                self._left.clear()
                return
            self._next += part

    def _add(self, part: bytes) -> None:
        if self._file is not None:
            self._file += part
        if self._next is not None:
            self._next += part

    def killed(self, core: Core, now_ns: int) -> None:
        """Sometimes in the middle of writing."""
        if self._rng.random() < 0.5:
            core.turn(now_ns)
            part = frame(core.take_notes())
            torn = part[: self._rng.randrange(len(part))]
            if self._file is not None:
                self._file += torn
            elif self._next is not None:
                self._next += torn

    def lose(self) -> None:
        """The machine lost power, or the node ended in good order."""
        self._left.clear()
        self._file = self._next = None
        self._handed.clear()

    def handed(self, message: Delta | Final) -> None:
        key = message.request_id, message.index
        if isinstance(message, Final):
            self._ended.add(key)
        else:
            end = message.offset + len(message.token_ids)
            self._handed[key] = max(end, self._handed.get(key, 0))

    def check(self, submit: Submit) -> None:
        """A rank that is given a sequence is given all its tokens that were delivered. What has ended may be
        made again for another reader."""
        key = submit.request_id, submit.index
        handed = self._handed.get(key, 0)
        outputs = len(submit.outputs) // 4
        again = 0 if key in self._ended else handed - outputs
        assert again <= 0, f"{key}: {again} of {handed} delivered tokens are made again"
        self.resumed += 0 < handed <= outputs
