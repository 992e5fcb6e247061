"""Structs of tensors, moved between the host and a GPU."""

from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def moved(value: T, device: torch.device) -> T:
    """A dataclass with all of its tensors on `device`, those in dataclasses and dicts within it too."""
    if not (is_dataclass(value) and not isinstance(value, type)):
        raise TypeError(f"{type(value).__name__} is no dataclass")
    return replace(value, **{f.name: _moved(getattr(value, f.name), device) for f in fields(value)})


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _moved(part, device) for key, part in value.items()}
    return moved(value, device) if is_dataclass(value) else value
