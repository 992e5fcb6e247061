"""A client of the message API, written from docs/protocol.md with pyzmq and msgpack and nothing of ours."""

from pathlib import Path
from typing import Any, Self

import msgpack
import zmq


class PlainClient:
    def __init__(self, run_dir: Path) -> None:
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(f"ipc://{run_dir}/gateway.sock")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.socket.close()

    def send(self, **fields: Any) -> None:
        self.socket.send(msgpack.packb(fields))

    def receive(self, timeout_s: float = 30.0) -> dict[str, Any]:
        assert self.socket.poll(int(timeout_s * 1000)), "the node did not answer"
        answer = msgpack.unpackb(self.socket.recv())
        assert isinstance(answer, dict)
        return answer

    def stream(self, request_id: str) -> tuple[list[int], str, dict[str, Any]]:
        """Tokens, text and the final message of a request with one sequence."""
        tokens: list[int] = []
        text = ""
        while True:
            message = self.receive()
            assert message["request_id"] == request_id
            text += message.get("text", "")
            assert message["offset"] == len(tokens)
            if message["type"] == "Final":
                return tokens, text, message
            tokens += message["token_ids"]
