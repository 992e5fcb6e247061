"""The worker process: one GPU's (or CPU's) share of the model, stepping in lockstep with its peers."""

from phalanx.protocol.failpoints import failpoint
from phalanx.protocol.service import Service
from phalanx.worker_svc.rank import Backend, Rank


def serve(service: Service) -> None:
    """Load, say so, and run until told to stop."""
    failpoint("worker.load.before")
    backend, fingerprint = load_backend(service)
    rank = Rank(service, backend)
    failpoint("worker.load.after")
    service.ready(fingerprint)
    rank.run()
    rank.close()


def load_backend(service: Service) -> tuple[Backend, str]:
    """What computes on the configured device, and its numerics fingerprint."""
    if service.config.device == "null":
        from phalanx.worker_svc.null import NullBackend

        null = NullBackend(service)
        return null, null.fingerprint
    from phalanx.worker_svc.backend import ModelBackend  # torch: a null worker starts without

    model = ModelBackend(service)
    return model, model.fingerprint
