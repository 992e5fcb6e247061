"""Structs of tensors, moved between the host and a GPU in one copy."""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, Final, Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
_ALIGNMENT: Final = 16  # of every tensor in the copy: kernels read whole vectors


def moved(value: T, device: torch.device) -> T:
    """A dataclass with all of its tensors on `device`, those in dataclasses and dicts within it too.

    All tensors lie on one device. They travel as one block of bytes: each copy of its own would cost
    some 20 microseconds and wait for everything that the GPU has to do before it.
    """
    if not (is_dataclass(value) and not isinstance(value, type)):
        raise TypeError(f"{type(value).__name__} is no dataclass")
    tensors = {id(tensor): tensor for tensor in _tensors(value)}
    there = dict(zip(tensors, _copied(list(tensors.values()), device), strict=True))
    result: T = _replaced(value, lambda tensor: there[id(tensor)])
    return result


class Refilled(Generic[T]):
    """A dataclass whose tensors lie at fixed addresses on a device, filled anew from others of its kind.

    Attributes:
        value: with its tensors on the device, not one of them twice.
    """

    def __init__(self, value: T, device: torch.device) -> None:
        """Of the kind and shape of `value`, whose tensors lie on the CPU."""
        tensors = list(_tensors(value))
        starts, end = _laid_out(tensors)
        self._here = torch.zeros(end, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._there = torch.zeros(end, dtype=torch.uint8, device=device)
        self._places = _views(self._here, tensors, starts)
        there = iter(_views(self._there, tensors, starts))
        self.value: T = _replaced(value, lambda _: next(there))

    def fill(self, value: T) -> None:
        """Bring over what `value` holds, in one copy; the one before must be done."""
        for tensor, place in zip(_tensors(value), self._places, strict=True):
            place.copy_(tensor)
        self._there.copy_(self._here, non_blocking=True)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))


def _replaced(value: Any, there: Callable[[Tensor], Tensor]) -> Any:
    """With other tensors, asked for in the order of `_tensors`."""
    if isinstance(value, Tensor):
        return there(value)
    if isinstance(value, dict):
        return {key: _replaced(part, there) for key, part in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        parts = {
            field.name: _replaced(getattr(value, field.name), there) for field in fields(value)
        }
        return replace(value, **parts)
    return value


def _copied(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    """The tensors on `device`, views of one block."""
    if not tensors:
        return []
    starts, end = _laid_out(tensors)
    here = tensors[0].device
    to_gpu = device.type == "cuda" and here.type == "cpu"
    block = torch.empty(end, dtype=torch.uint8, device=here, pin_memory=to_gpu)
    for tensor, place in zip(tensors, _views(block, tensors, starts), strict=True):
        place.copy_(tensor)
    # From pinned memory, which is not used again before the copy is done. Back on the host it is waited for.
    return _views(block.to(device, non_blocking=to_gpu), tensors, starts)


def _laid_out(tensors: list[Tensor]) -> tuple[list[int], int]:
    """Where each tensor starts in the block, in bytes, and where it ends."""
    starts, end = [], 0
    for tensor in tensors:
        starts.append(end)
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    return starts, end


def _views(block: Tensor, tensors: list[Tensor], starts: list[int]) -> list[Tensor]:
    typed = {tensor.dtype: block.view(tensor.dtype) for tensor in tensors}
    return [
        typed[tensor.dtype].as_strided(
            tensor.shape, _strides(tensor.shape), start // tensor.element_size()
        )
        for tensor, start in zip(tensors, starts, strict=True)
    ]


def _strides(shape: torch.Size) -> list[int]:
    """Of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return strides[::-1]
