"""The worker process: one GPU's (or CPU's) share of the model, stepping in lockstep with its peers."""

import contextlib
import importlib
import os
from concurrent.futures import ThreadPoolExecutor

from phalanx.protocol.config import NodeConfig
from phalanx.protocol.failpoints import failpoint
from phalanx.protocol.service import Service
from phalanx.worker_svc.gpu_room import room_for
from phalanx.worker_svc.rank import Backend, Rank

_LOADING_NICE = 5  # levels down: a third of the CPU time that a peer's step gets beside it


def serve(service: Service) -> None:
    """Load, say so, and run until told to stop."""
    failpoint("worker.load.before")
    backend, fingerprint, expert_slots = _load(service)
    rank = Rank(service, backend)
    failpoint("worker.load.after")
    service.ready(fingerprint, expert_slots)
    rank.run()
    rank.close()


def _load(service: Service) -> tuple[Backend, str, int]:
    """`load_backend`; where peers step on the same CPUs meanwhile, in a thread that gives way to them.

    Priority is a thread's own on Linux, and only the privileged may raise it again: so it is not the main
    thread that lowers it.
    """
    if service.config.device != "cpu" or service.board.epoch % 2 == 1:
        return load_backend(service)
    with ThreadPoolExecutor(1, initializer=_give_way) as pool:
        loaded = pool.submit(load_backend, service).result()
    from phalanx.worker_svc.backend import set_up_thread  # it is loaded by now

    set_up_thread(service.config.worker.threads)
    return loaded


def import_backend(config: NodeConfig) -> None:
    """What takes seconds of a start (torch), while this process waits for its turn. It gives way to the ranks
    that serve, in a thread for the same reason as above."""
    module = "null" if config.device == "null" else "backend"
    with ThreadPoolExecutor(1, initializer=_give_way) as pool:
        pool.submit(importlib.import_module, f"phalanx.worker_svc.{module}").result()


def _give_way() -> None:
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        here = os.getpriority(os.PRIO_PROCESS, 0)  # of this thread
        os.setpriority(os.PRIO_PROCESS, 0, min(here + _LOADING_NICE, 19))


def load_backend(service: Service) -> tuple[Backend, str, int]:
    """What computes on the configured device, its numerics fingerprint, and the expert slots of a layer that
    it has room for; 0: any number."""
    if service.config.device == "null":
        from phalanx.worker_svc.null import NullBackend

        null = NullBackend(service)
        return null, null.fingerprint, service.config.worker.expert_slots
    from phalanx.worker_svc.backend import ModelBackend  # torch: a null worker starts without

    with room_for("while it started"):
        model = ModelBackend(service)
    return model, model.fingerprint, model.expert_slots
