"""What happens when a GPU's memory runs out: numbers for people, and work that is done once more."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

from phalanx.protocol.errors import NoRoom
from phalanx.worker_svc.model.memory import shown_bytes

R = TypeVar("R")
# Of torch's own allocator, of CUDA (a context, a kernel's module) and of its libraries.
_SIGNS: Final = ("out of memory", "ALLOC_FAILED")


class Undone(NoRoom):
    """Some work found no memory, and left nothing that doing it again would not make good."""


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


@contextmanager
def room_for(what: str, raised: type[NoRoom] = NoRoom) -> Iterator[None]:
    """Raises NoRoom, or that kind of it, with the numbers, where the GPU has no memory left."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise raised(no_room(what)) from error


def no_room(what: str) -> str:
    """For people."""
    return (
        f"the GPU ran out of memory {what}: {_holders()}. End other processes on it, or lower"
        " worker.kv_bytes, worker.num_blocks or scheduler.max_num_batched_tokens"
    )


def done(run: Callable[[], R], tell: Callable[[str], None], may_repeat: bool = True) -> R:
    """What `run` returns. Where it raises Undone it is done once more when torch has given back what it
    keeps for later: pieces that nobody could use are whole then.

    Args:
        tell: told why there is a second time.
        may_repeat: False where others take part, and have done their share of it.
    """
    try:
        return run()
    except Undone as error:
        if not may_repeat:
            raise
        tell(str(error))
    # Only here nothing refers to the first try's tensors any more.
    import torch

    torch.cuda.empty_cache()
    return run()


def _holders() -> str:
    import torch

    try:
        free, total = torch.cuda.mem_get_info()
        held = torch.cuda.memory_reserved()
    except (RuntimeError, AssertionError):  # there was no room for what CUDA itself needs
        return "other processes hold nearly all of it"
    others = shown_bytes(max(0, total - free - held))
    return (
        f"of {shown_bytes(total)} this process holds {shown_bytes(held)}, the driver and other"
        f" processes {others}, {shown_bytes(free)} are free"
    )
