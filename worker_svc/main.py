"""The worker process: one GPU's (or CPU's) share of the model, stepping in lockstep with its peers."""

import contextlib
import importlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from phalanx.protocol.config import NodeConfig
from phalanx.protocol.failpoints import failpoint
from phalanx.protocol.service import Serve, Service
from phalanx.worker_svc.gpu_room import room_for
from phalanx.worker_svc.rank import Backend, Rank

if TYPE_CHECKING:
    from phalanx.worker_svc.ahead import Ahead  # torch: a null worker starts without

_LOADING_NICE = 5  # levels down: a third of the CPU time that a peer's step gets beside it
T = TypeVar("T")


def serve(service: Service, ahead: "Ahead | None" = None) -> None:
    """Load, say so, and run until told to stop."""
    failpoint("worker.load.before")
    backend, fingerprint, expert_slots = _load(service, ahead)
    rank = Rank(service, backend)
    failpoint("worker.load.after")
    service.ready(fingerprint, expert_slots)
    rank.run()
    rank.close()


def prepare(config: NodeConfig) -> Serve:
    """What takes seconds of a start, for many workers at once: torch above all. It gives way to the ranks that
    serve."""
    if config.device == "null":
        importlib.import_module("phalanx.worker_svc.null")
        return serve
    return partial(serve, ahead=_giving_way(lambda: _ahead(config)))


def _ahead(config: NodeConfig) -> "Ahead":
    importlib.import_module("phalanx.worker_svc.backend")
    from phalanx.worker_svc.ahead import make_ahead
    from phalanx.worker_svc.fingerprint import engine_version

    engine_version()
    return make_ahead(config)


def _load(service: Service, ahead: "Ahead | None") -> tuple[Backend, str, int]:
    """`load_backend`; where peers step on the same CPUs meanwhile, it gives way to them."""
    if service.config.device != "cpu" or service.board.epoch % 2 == 1:
        return load_backend(service, ahead)
    loaded = _giving_way(lambda: load_backend(service, ahead))
    from phalanx.worker_svc.model.threads import set_up_thread  # it is loaded by now

    set_up_thread(service.config.worker.threads)
    return loaded


def _giving_way(work: Callable[[], T]) -> T:
    """Do it in a thread with a lower priority. That is a thread's own on Linux, and only the privileged may raise
    it again: so it is not the main thread that lowers it."""
    with ThreadPoolExecutor(1, initializer=_give_way) as pool:
        return pool.submit(work).result()


def _give_way() -> None:
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        here = os.getpriority(os.PRIO_PROCESS, 0)  # of this thread
        os.setpriority(os.PRIO_PROCESS, 0, min(here + _LOADING_NICE, 19))


def load_backend(service: Service, ahead: "Ahead | None" = None) -> tuple[Backend, str, int]:
    """What computes on the configured device, its numerics fingerprint, and the expert slots of a layer that
    it has room for; 0: any number."""
    if service.config.device == "null":
        from phalanx.worker_svc.null import NullBackend

        null = NullBackend(service)
        return null, null.fingerprint, service.config.worker.expert_slots
    from phalanx.worker_svc.backend import ModelBackend

    with room_for("while it started"):
        model = ModelBackend(service, ahead)
    return model, model.fingerprint, model.expert_slots
