"""The pool of KV blocks: who may write where. Pure.

Block 0 is null (it pads block tables) and never handed out. A block has a count of holders: the
sequence that writes it and, for a while, the copy into the KV store that still reads it.
"""

from collections.abc import Iterable, Sequence

from phalanx.protocol.limits import BLOCK_SIZE


def blocks_for(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


class BlockPool:
    """`num_blocks` counts block 0; `total` and `free` do not."""

    def __init__(self, num_blocks: int) -> None:
        self.total = max(0, num_blocks - 1)
        self._refs = [0] * max(1, num_blocks)
        self._free = list(range(self.total, 0, -1))  # the lowest id goes first

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.total - len(self._free)

    def refs(self, block: int) -> int:
        return self._refs[block]

    def allocate(self, count: int) -> list[int]:
        """`count` free blocks, each held once. The caller has looked at `free`."""
        assert 0 <= count <= len(self._free)
        if count == 1:  # what a running sequence grows by
            block = self._free.pop()
            self._refs[block] = 1
            return [block]
        if count == 0:
            return []
        taken = self._free[: -count - 1 : -1]
        del self._free[-count:]
        for block in taken:
            self._refs[block] = 1
        return taken

    def retain(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            assert self._refs[block] > 0, "only a held block can get another holder"
            self._refs[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One holder less for each; the last of them is the first to be handed out again."""
        refs, free = self._refs, self._free
        for block in blocks:
            left = refs[block] - 1
            assert left >= 0, f"block {block} is free already"
            refs[block] = left
            if not left:
                free.append(block)

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """Raises AssertionError unless `holders` account for every count and the rest is free."""
        counts = [0] * len(self._refs)
        for blocks in holders:
            for block in blocks:
                counts[block] += 1
        assert counts == self._refs, "a block's count differs from its holders"
        assert counts[0] == 0, "the null block is held"
        free = set(self._free)
        assert len(free) == len(self._free), "a block is in the free list twice"
        assert free == {block for block in range(1, self.total + 1) if counts[block] == 0}
