"""Log-probabilities of one sequence's prompt as the steps tell them. Pure."""

import numpy as np

from phalanx.protocol.messages import Sampling
from phalanx.protocol.prompt_logprobs import record_bytes


class Scores:
    """Records of prompt tokens 1, 2, ... as far as computed; they outlive a preemption.

    Args:
        first: number of the first one that is told here; those before it the gateway has.
    """

    def __init__(self, sampling: Sampling, num_prompt: int, first: int = 0) -> None:
        wanted = sampling.prompt_logprobs
        self.wanted = wanted is not None
        self.record_bytes = record_bytes(wanted or 0)
        self._total = num_prompt - 1 if self.wanted else 0
        self.first = min(first, self._total)
        self.records = bytearray()

    @property
    def count(self) -> int:
        """Those that are known, here or to the gateway."""
        return self.first + len(self.records) // self.record_bytes

    @property
    def complete(self) -> bool:
        """Nothing is missing; at once where none are wanted."""
        return not self.wanted or self.count == self._total

    def add(self, first: int, records: bytes) -> bool:
        """Enter records from number `first` on; those known already are dropped.

        Returns:
            False: the model's numbers are broken, and none of them was entered.
        """
        words = np.frombuffer(records, np.float32).reshape(-1, self.record_bytes // 4)
        if np.isnan(words[:, 0]).any():
            return False
        assert first <= self.count, "records were left out"
        self.records += records[(self.count - first) * self.record_bytes :]
        return True

    def of(self, first: int, end: int) -> bytes:
        begin, end = ((at - self.first) * self.record_bytes for at in (first, end))
        return bytes(self.records[begin:end])


NO_SCORES = Scores(Sampling(), 1)  # of every sequence that wants none: nothing is ever added
