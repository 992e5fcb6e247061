"""A frontend needs no code of ours: a client written from docs/protocol.md alone does everything."""

from pathlib import Path

import pytest

from e2e.plain_client import PlainClient

pytestmark = pytest.mark.process


def test_generate_attach_abort_and_errors(run_dir: Path) -> None:
    with PlainClient(run_dir) as client, PlainClient(run_dir) as other:
        check(client, other)


def check(client: PlainClient, other: PlainClient) -> None:
    client.send(type="Health", call=1)
    health = client.receive()
    assert (health["type"], health["call"], health["healthy"]) == ("HealthReply", 1, True)

    sampling = {"seed": 7, "max_tokens": 12, "temperature": 0.8, "ignore_eos": True}
    client.send(type="Generate", call=2, key="k1", prompt="Hello there", sampling=sampling)
    accepted = client.receive()
    assert (accepted["type"], accepted["call"], accepted["seed"]) == ("Accepted", 2, 7)
    tokens, text, final = client.stream(accepted["request_id"])
    assert len(tokens) == 12 and final["finish_reason"] == "length" and text
    assert final["usage"]["completion_tokens"] == 12

    # Another client takes over in the middle of the stream.
    other.send(type="Attach", call=1, request_id=accepted["request_id"], offsets=[5])
    assert other.receive()["type"] == "Accepted"
    delta = other.receive()
    assert (delta["offset"], delta["token_ids"]) == (5, tokens[5:])
    assert other.receive()["type"] == "Final"

    client.send(type="Generate", call=3, prompt="Hello", sampling={"max_tokens": 2000})
    request_id = client.receive()["request_id"]
    client.send(type="Abort", call=4, request_id=request_id)
    seen = []
    while not {"Done", "Final"} <= {message["type"] for message in seen}:
        seen.append(client.receive())
    final = next(message for message in seen if message["type"] == "Final")
    assert final["finish_reason"] == "abort"

    client.send(type="Generate", call=5, prompt="Hello", sampling={"max_tokens": -1})
    error = client.receive()
    assert (error["type"], error["call"], error["code"]) == ("Error", 5, "bad_request")
    client.socket.send(b"\xc1 not msgpack")
    assert client.receive()["type"] == "Error"
    client.send(type="Health", call=6)
    assert client.receive()["healthy"]
