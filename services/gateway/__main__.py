"""`python -m phalanx.services.gateway`: the gateway process."""

from phalanx.protocol.service import run
from phalanx.services.gateway.main import serve

if __name__ == "__main__":
    run(serve)
