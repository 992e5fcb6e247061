"""What travels in one block arrives as it was: types, shapes, what is empty, what is strided, what is shared."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from phalanx.worker_svc.model import moving

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@dataclass(frozen=True)
class Inner:
    flags: Tensor
    name: str


@dataclass(frozen=True)
class Outer:
    count: int
    ids: Tensor
    same: Tensor
    table: dict[int, Tensor]
    inner: Inner
    missing: Inner | None = None


@pytest.mark.parametrize("device", DEVICES)
def test_a_struct_there_and_back(device: str) -> None:
    ids = torch.arange(7)
    table = {
        0: torch.arange(12, dtype=torch.int32).view(3, 4).t(),
        1: torch.empty((0, 5)),
        2: torch.tensor(2.5, dtype=torch.float64),
        3: torch.rand(3).bfloat16(),
    }
    here = Outer(3, ids, ids, table, Inner(torch.tensor([True, False, True]), "a"))
    there = moving.moved(here, torch.device(device))
    assert there.same is there.ids and there.inner.name == "a" and there.missing is None
    for part in (there.ids, there.inner.flags, *there.table.values()):
        assert part.device.type == device and part.is_contiguous() and part.data_ptr() % 16 == 0
    back = moving.moved(there, torch.device("cpu"))
    for got, wanted in (
        (back.ids, ids),
        (back.inner.flags, here.inner.flags),
        *((back.table[key], table[key]) for key in table),
    ):
        assert got.dtype == wanted.dtype and got.shape == wanted.shape and torch.equal(got, wanted)


def test_only_a_struct_is_moved() -> None:
    with pytest.raises(TypeError, match="list is no dataclass"):
        moving.moved([torch.zeros(1)], torch.device("cpu"))


@pytest.mark.parametrize("device", DEVICES)
def test_a_struct_that_is_filled_anew_stays_where_it_is(device: str) -> None:
    def outer(seed: int) -> Outer:
        ids = torch.arange(seed, seed + 7)
        flags = torch.arange(5) % 2 == seed % 2
        return Outer(1, ids, ids, {3: torch.full((2, 3), float(seed))}, Inner(flags, "a"))

    refilled = moving.Refilled(outer(0), torch.device(device))
    there = refilled.value
    assert (
        there.ids.data_ptr() != there.same.data_ptr()
    )  # shared once, but perhaps not the next time
    for seed in (4, 9):
        given = outer(seed)
        refilled.fill(given)
        for got, expected in (
            (there.ids, given.ids),
            (there.same, given.same),
            (there.table[3], given.table[3]),
            (there.inner.flags, given.inner.flags),
        ):
            assert got.device.type == device and torch.equal(got.cpu(), expected)
