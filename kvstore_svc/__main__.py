from phalanx.kvstore_svc.main import serve
from phalanx.protocol.service import run

run(serve)
