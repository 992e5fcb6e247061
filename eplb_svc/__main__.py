"""Start the planner: `python -m phalanx.eplb_svc --run-dir DIR --name eplb ...`."""

from phalanx.eplb_svc.main import serve
from phalanx.protocol.service import run

if __name__ == "__main__":
    run(serve)
