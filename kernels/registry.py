"""Which implementation of each operation runs on which device, and why: one table for the engine and
for `phalanx doctor`.

An operation is called like its reference, and runs where its first argument lies. On the CPU that is
always the reference; on a GPU it is the first implementation of the operation's list that suits the
device and is not turned off. Nothing is chosen by a tensor's size: a choice that depends on the
number of rows would change a row's bits with its batch.
"""

import hashlib
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Final, Generic, Literal, ParamSpec, TypeVar

import torch

Params = ParamSpec("Params")
Result = TypeVar("Result")

HOPPER: Final = (9, 0)  # compute capability
Preference = Literal["auto", "reference"]

_preference: Preference = "auto"
_interpreted = False


@dataclass(frozen=True)
class Choice:
    """What an operation runs on a GPU, for people."""

    operation: str
    implementation: str
    why: str
    passed_over: tuple[str, ...]  # "name: reason" of those before it in the list


@dataclass(frozen=True)
class Vendor:
    """A library of kernels that could do an operation, and why it does not here."""

    name: str
    module: str
    unfit: Callable[[tuple[int, int]], str]  # of a compute capability

    def reason(self, capability: tuple[int, int]) -> str:
        if importlib.util.find_spec(self.module) is None:
            return "not installed"
        return self.unfit(capability)


def _deep_gemm(capability: tuple[int, int]) -> str:
    if capability < (10, 0):
        return "its Hopper kernels take one scale per 128 values, the checkpoint has one per 32"
    return "not checked against the reference on this GPU"


def _flash_mla(capability: tuple[int, int]) -> str:
    if capability < (10, 0):
        return "its kernels for 528-byte and 288-byte records are for SM100 alone"
    return "not checked against the reference on this GPU"


def _deep_ep(capability: tuple[int, int]) -> str:
    return "it is for exchanges between nodes; within one, ranks share memory"


DEEP_EP: Final = Vendor("deep_ep", "deep_ep", _deep_ep)
DEEP_GEMM: Final = Vendor("deep_gemm", "deep_gemm", _deep_gemm)
FLASH_MLA: Final = Vendor("flash_mla", "flash_mla", _flash_mla)

OPERATIONS: Final[dict[str, "Operation[..., object]"]] = {}


class Operation(Generic[Params, Result]):
    """One operation: callable, with what may run it.

    Args:
        name: as `phalanx doctor` shows it.
        reference: torch, on any device.
        kernel: "module:function" of ours for GPUs, below `phalanx.kernels.triton`; None if the
            reference is good enough there.
        vendors: libraries that could run it.
        place: of the argument that lies where the operation shall run.
    """

    def __init__(
        self,
        name: str,
        reference: Callable[Params, Result],
        kernel: str | None = None,
        vendors: tuple[Vendor, ...] = (),
        place: int = 0,
    ) -> None:
        self.name, self.reference, self.kernel, self.vendors = name, reference, kernel, vendors
        self.place = place
        self._on_gpu: Callable[Params, Result] | None = None
        OPERATIONS[name] = self  # type: ignore[assignment]

    def __call__(self, *args: Params.args, **kwargs: Params.kwargs) -> Result:
        if on_gpu(args[self.place]):
            return (self._on_gpu or self._choose())(*args, **kwargs)
        return self.reference(*args, **kwargs)

    def has_kernel(self) -> bool:
        """Whether a GPU at hand runs a kernel, not the reference."""
        if self.kernel is None or _preference == "reference":
            return False
        return _interpreted or not _why_no_kernels(_capability())

    def _choose(self) -> Callable[Params, Result]:
        chosen = self.reference
        if self.kernel is not None and self.has_kernel():
            module, function = self.kernel.split(":")
            chosen = getattr(importlib.import_module(f"phalanx.kernels.triton.{module}"), function)
        self._on_gpu = chosen  # at last: another thread may call meanwhile
        return chosen

    def choice(self, capability: tuple[int, int]) -> Choice:
        """What runs on a GPU of this compute capability."""
        passed = tuple(f"{v.name}: {v.reason(capability)}" for v in self.vendors)
        if self.kernel is None:
            return Choice(self.name, "reference", "torch suffices", passed)
        why_not = _why_no_kernels(capability)
        if why_not:
            return Choice(self.name, "reference", why_not, (*passed, f"triton: {why_not}"))
        return Choice(self.name, "triton", "ours, for this GPU", passed)

    def forget(self) -> None:
        self._on_gpu = None


def on_gpu(x: object) -> bool:
    """Whether what is computed from this (a tensor, or what holds some) is computed by kernels."""
    return _interpreted or bool(x.is_cuda)  # type: ignore[attr-defined]


def interpret(on: bool) -> None:
    """Go a GPU's way on the CPU: for tests. Kernels then run in Triton's interpreter (TRITON_INTERPRET=1
    must be set), or with `prefer("reference")` the references do."""
    global _interpreted
    _interpreted = on
    for operation in OPERATIONS.values():
        operation.forget()


def interpreted() -> bool:
    return _interpreted


def prefer(preference: Preference) -> None:
    """`reference`: run the references on the GPU too, to compare with; `auto` is the default."""
    global _preference
    _preference = preference
    for operation in OPERATIONS.values():
        operation.forget()


def choices(capability: tuple[int, int]) -> Iterator[Choice]:
    """Of every operation, for a GPU of this compute capability."""
    for operation in OPERATIONS.values():
        yield operation.choice(capability)


def label() -> str:
    """What runs on the GPU at hand, with versions: two GPUs of one label compute the same bits."""
    capability = _capability()
    triton = version("triton") if importlib.util.find_spec("triton") else "none"
    table = Path(__file__).with_name("triton") / "configs.json"
    chosen = [f"{c.operation}={c.implementation}" for c in choices(capability)]
    facts = (
        torch.cuda.get_device_name(),
        f"{capability[0]}.{capability[1]}",
        f"cuda {torch.version.cuda}",
        f"triton {triton}",
        hashlib.sha256(table.read_bytes()).hexdigest()[:16],
        *chosen,
    )
    return "; ".join(facts)


@cache
def _capability() -> tuple[int, int]:
    return torch.cuda.get_device_capability()


def _why_no_kernels(capability: tuple[int, int]) -> str:
    if _preference == "reference":
        return "turned off (worker.kernels is `reference`)"
    if capability < HOPPER:
        return (
            f"compute capability {capability[0]}.{capability[1]}; the kernels are for 9.0 and later"
        )
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install 'phalanx-serve[cuda]'"
    return ""
