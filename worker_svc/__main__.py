"""Start a worker: `python -m phalanx.worker_svc --run-dir DIR --name worker-0 ...`."""

from phalanx.protocol.service import run
from phalanx.worker_svc.main import prepare, serve

if __name__ == "__main__":
    run(serve, prepare)
