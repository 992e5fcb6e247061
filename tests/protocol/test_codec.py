"""Whatever bytes arrive, the codec answers with a checked message or DecodeError, and nothing else."""

from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.protocol import messages as m
from phalanx.protocol.arena import Handle
from phalanx.protocol.codec import Decoder, call_of, encode
from phalanx.protocol.errors import Code, DecodeError

UNIONS = {
    "client": m.ClientMessage,
    "client reply": m.ClientReply,
    "bus": m.BusToGateway,
    "from gateway": m.BusFromGateway,
    "kv": m.KVRequest,
    "kv reply": m.KVReply,
    "eplb": m.EplbRequest,
    "to supervisor": m.ToSupervisor,
    "from supervisor": m.FromSupervisor,
}
SAMPLES: list[m.Message] = [
    m.Generate(1, prompt="hi", sampling=m.Sampling(logit_bias={5: -1.5}, stop=("x",))),
    m.Accepted(1, "ab" * 16, 2**53 - 1, 3, 2),
    m.Error(1, Code.OVERLOADED, "try later", 500),
    m.Delta("ab" * 16, 0, 5, (1, 2), "hé", (m.TokenLogprobs(-0.5, (1,), (-0.5,)),)),
    m.PromptLogprobs("ab" * 16, 0, 0, (None, m.PromptLogprob(-0.5, 3, (1,), (-0.25,)))),
    m.Final("ab" * 16, 0, 7, "length", m.Usage(3, 7)),
    m.Submit(9, "ab" * 16, 1, 2, b"\1\0\0\0", m.Sampling(seed=4, max_tokens=5)),
    m.Submit(9, "ab" * 16, 1, 2, b"\1\0\0\0", m.Sampling(), b"\2\0\0\0", -1, True),
    m.Tokens(0, 1, 2, (m.TokensItem("ab" * 16, 0, 1, 0, (5,), "stop"),)),
    m.Put(1, b"key", "block", Handle("ph-x-kv-1", 0, 64)),
    m.ExpertCounts(0, 2, 10, 1, 2, bytes(16)),
    m.HealthUpdate(False, 3, ("worker-1 died",)),
]


def members(union: object) -> set[type]:
    return set(get_args(union))


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: type(s).__name__)
def test_round_trip(sample: m.Message) -> None:
    unions = [union for union in UNIONS.values() if type(sample) in members(union)]
    assert unions, "no socket carries this message"
    for union in unions:
        assert Decoder[m.Message](union).decode(encode(sample)) == sample


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: type(s).__name__)
def test_every_truncation_is_refused(sample: m.Message) -> None:
    union = next(union for union in UNIONS.values() if type(sample) in members(union))
    frame, decoder = encode(sample), Decoder[m.Message](union)
    for length in range(len(frame)):
        with pytest.raises(DecodeError):
            decoder.decode(frame[:length])


def test_every_message_is_on_a_socket() -> None:
    carried = set[type]().union(*(members(union) for union in UNIONS.values())) | {m.PlanReply}
    declared = {
        value
        for value in vars(m).values()
        if isinstance(value, type) and issubclass(value, m.Message) and value is not m.Message
    }
    assert declared <= carried


@given(st.binary(max_size=300))
def test_garbage_is_refused(frame: bytes) -> None:
    for union in UNIONS.values():
        with pytest.raises(DecodeError):
            Decoder[m.Message](union).decode(frame)
    assert call_of(frame) >= 0


@given(
    st.dictionaries(
        st.sampled_from(["type", "call", "prompt", "prompt_token_ids", "sampling", "n", "v"]),
        st.one_of(
            st.sampled_from(["Generate", "Abort"]),
            st.integers(-5, 2**63),
            st.text(max_size=5),
            st.lists(st.integers(-5, 5)),
            st.floats(),
            st.none(),
            st.just({"temperature": "hot"}),
        ),
    )
)
def test_wrong_fields_are_refused_or_right(loose: dict[str, object]) -> None:
    """A map that decodes at all has the declared types."""
    try:
        message = Decoder[m.Message](m.ClientMessage).decode(msgspec.msgpack.encode(loose))
    except DecodeError:
        return
    assert isinstance(message, get_args(m.ClientMessage))
    assert isinstance(message.call, int)


def test_deep_nesting_is_refused() -> None:
    frame = b"\x91" * 100_000 + b"\xc0"
    with pytest.raises(DecodeError):
        Decoder[m.Message](m.ClientMessage).decode(frame)
    assert call_of(frame) == 0


def test_size_is_bounded() -> None:
    decoder = Decoder[m.Message](m.ClientMessage, max_bytes=1000)
    with pytest.raises(DecodeError, match="limit is 1000"):
        decoder.decode(encode(m.Generate(1, prompt="x" * 1000)))


@pytest.mark.parametrize("kind", sorted(members(m.ClientMessage), key=lambda kind: kind.__name__))
def test_a_call_that_no_client_may_choose_is_refused(kind: type) -> None:
    decoder = Decoder[m.Message](m.ClientMessage)
    ends = {"request_id": "ab", "offsets": [0], "prompt": "x"}
    for call in (0, 2**63 - 1):
        frame = msgspec.msgpack.encode({"type": kind.__name__, "call": call} | ends)
        assert decoder.decode(frame).call == call  # type: ignore[attr-defined]
    for call in (-1, 2**63):
        frame = msgspec.msgpack.encode({"type": kind.__name__, "call": call} | ends)
        with pytest.raises(DecodeError, match="call"):
            decoder.decode(frame)
        assert call_of(frame) == 0
