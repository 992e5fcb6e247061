"""The scheduler process of one rank."""

from phalanx.protocol.service import run
from phalanx.scheduler_svc.main import serve

run(serve)
