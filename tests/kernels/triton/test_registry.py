"""Every operation names a kernel that exists and can be called as its reference is."""

import importlib
import inspect

import pytest

from phalanx.kernels import ops, registry
from phalanx.kernels.registry import OPERATIONS, Operation

assert ops is not None  # fills the table
KERNELS = [operation for operation in OPERATIONS.values() if operation.kernel]


@pytest.mark.parametrize("operation", KERNELS, ids=lambda operation: operation.name)
def test_a_kernel_takes_what_its_reference_takes(operation: Operation[..., object]) -> None:
    assert operation.kernel is not None
    module, function = operation.kernel.split(":")
    kernel = getattr(importlib.import_module(f"phalanx.kernels.triton.{module}"), function)
    have = inspect.signature(kernel).parameters
    wanted = inspect.signature(operation.reference).parameters
    positional = [p for p in wanted.values() if p.kind is not p.KEYWORD_ONLY]
    placed = [p for p in have.values() if p.kind is not p.KEYWORD_ONLY]
    assert len(placed) >= len(positional)
    assert all(p.default is not p.empty for p in placed[len(positional) :])
    named = {p.name for p in wanted.values() if p.kind is p.KEYWORD_ONLY}
    assert named <= have.keys()


def test_choices_say_why() -> None:
    hopper = {choice.operation: choice for choice in registry.choices((9, 0))}
    assert hopper["FP4 experts"].implementation == "triton"
    assert any("deep_gemm" in reason for reason in hopper["FP4 experts"].passed_over)
    older = {choice.operation: choice for choice in registry.choices((8, 0))}
    assert {choice.implementation for choice in older.values()} == {"reference"}
    assert "compute capability 8.0" in older["sampler"].why


def test_references_can_be_asked_for() -> None:
    registry.prefer("reference")
    try:
        assert {choice.implementation for choice in registry.choices((9, 0))} == {"reference"}
    finally:
        registry.prefer("auto")
