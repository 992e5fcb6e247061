from phalanx.protocol.service import run
from phalanx.services.http.main import serve

if __name__ == "__main__":
    run(serve)
