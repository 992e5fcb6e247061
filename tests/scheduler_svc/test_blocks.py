"""The block pool: never two owners, block 0 never out, everything comes back. Against a plain model."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from phalanx.scheduler_svc.blocks import BlockPool, blocks_for


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (128, 1), (129, 2), (256, 2)])
def test_blocks_for(tokens: int, blocks: int) -> None:
    assert blocks_for(tokens) == blocks


def test_lowest_blocks_go_first_and_the_null_block_never() -> None:
    pool = BlockPool(4)
    assert pool.total == pool.free == 3
    assert pool.allocate(3) == [1, 2, 3]
    assert (pool.free, pool.used) == (0, 3)


def test_freeing_twice_is_a_bug() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.release([block])
    with pytest.raises(AssertionError, match="free already"):
        pool.release([block])


def test_check_sees_a_forgotten_holder() -> None:
    pool = BlockPool(5)
    blocks = pool.allocate(2)
    pool.check([blocks])
    with pytest.raises(AssertionError):
        pool.check([])
    with pytest.raises(AssertionError):
        pool.check([blocks, blocks[:1]])


class Pool(RuleBasedStateMachine):
    """Any order of taking, sharing and giving back."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(9)
        self.holders: list[list[int]] = []

    @rule(count=st.integers(0, 8))
    def take(self, count: int) -> None:
        if count <= self.pool.free:
            taken = self.pool.allocate(count)
            assert len(taken) == count
            assert not {block for held in self.holders for block in held} & set(taken)
            self.holders.append(taken)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.holders))
        self.pool.retain(held)
        self.holders.append(list(held))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        place = data.draw(st.integers(0, len(self.holders) - 1))
        self.pool.release(self.holders.pop(place))

    @invariant()
    def adds_up(self) -> None:
        self.pool.check(self.holders)
        assert self.pool.free + self.pool.used == self.pool.total
        assert self.pool.used == len({block for held in self.holders for block in held})


TestPool = Pool.TestCase
