"""/dev/shm as the gateway's token log sees it, and the check that no delivered token is ever made again."""

import random
from collections.abc import Sequence

from phalanx.protocol.messages import Delta, Final, Submit
from phalanx.services.gateway.core import Core
from phalanx.services.gateway.entries import Recovered
from phalanx.services.gateway.token_log import beginning, frame, notes_in, recall

WRITES_PER_FILE = 40  # before the next one begins, with what is still of use


class TokenMemory:
    """What a gateway wrote is there for the next one, whoever was killed with it."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._file: bytes | None = None
        self._writes = 0
        self._handed: dict[tuple[str, int], int] = {}  # tokens that some client was given
        self._ended: set[tuple[str, int]] = set()
        self.resumed = 0  # sequences that were submitted with all that a client had

    def recovered(self, journal: Sequence[Recovered]) -> list[Recovered]:
        return list(journal) if self._file is None else recall(journal, notes_in(self._file))

    def begin(self, core: Core) -> None:
        self._writes = 0
        core.take_notes()
        self._file = b"".join(beginning(core.all_notes()))

    def write(self, core: Core) -> None:
        """Once a turn, before anything is sent."""
        self._writes += 1
        if self._file is None or self._writes > WRITES_PER_FILE:
            self.begin(core)
        elif notes := core.take_notes():
            self._file += frame(notes)

    def killed(self, core: Core, now_ns: int) -> None:
        """Sometimes in the middle of writing."""
        if self._file is not None and self._rng.random() < 0.5:
            core.turn(now_ns)
            part = frame(core.take_notes())
            self._file += part[: self._rng.randrange(len(part))]

    def lose(self) -> None:
        """The machine lost power, or the node ended in good order."""
        self._file = None
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
