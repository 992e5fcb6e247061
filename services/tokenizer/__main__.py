from phalanx.protocol.service import run
from phalanx.services.tokenizer.main import serve

run(serve)
