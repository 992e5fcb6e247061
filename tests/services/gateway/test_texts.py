"""Texts by way of the tokenizers: whose answer counts, and how much is asked at once."""

from array import array

from gateway_desk import Desk, texts

from phalanx.protocol.digests import tokens_digest
from phalanx.protocol.messages import (
    Abort,
    Attach,
    Decode,
    Decoded,
    DecodedItem,
    Final,
    Sampling,
    Submitted,
    Usage,
)
from phalanx.services.gateway.entries import Entry, Produced, Recovered
from phalanx.services.gateway.streams import Stream

REQUEST = "a" * 32


def entry(max_tokens: int) -> Entry:
    sampling = Sampling(seed=1, max_tokens=max_tokens)
    return Entry(REQUEST, array("i", [5]).tobytes(), sampling, 1, True, "", b"", "tiny", "f1")


def test_a_decode_of_an_earlier_telling_says_nothing_about_the_present_one() -> None:
    """Told again, ended, told again: two Decodes of one stream are in flight, both from its first token on."""
    ids = [*range(10, 22)]
    final = Final(REQUEST, 0, 12, "length", Usage(1, 12), digest=tokens_digest(0, ids))
    logged = Produced(REQUEST, 0, 0, array("i", ids[:8]).tobytes())
    desk = Desk(Recovered(entry(12), {0: final}, (logged,), placed={}))
    asked = []
    for turn in range(2):
        desk.asks(Attach(turn, REQUEST, (0,)))
        ((seat, submit),) = desk.submits()
        desk.says(seat, Submitted(submit.call, int(seat[10:11]), 1))
        desk.produces(seat, submit, 8 + turn, ids[8 + turn], seq=1 + turn)
        asked += [(p, m) for p, m in desk.sent(Decode) if isinstance(m, Decode)]
        if turn == 0:
            desk.asks(Abort(9, REQUEST))
            desk.told()
    assert [len(item.token_ids) for _, decode in asked for item in decode.items] == [9, 10]
    desk.told()
    for peer, decode in asked:
        items = (
            DecodedItem(i.stream, tuple(f"[{t}]" for t in i.token_ids), "", b"")
            for i in decode.items
        )
        desk.says(peer, Decoded(decode.call, tuple(items)))
    desk.produces(seat, submit, 10, 20, 21, finish="length", seq=3)
    for _ in range(2):
        desk.decodes()
    told = desk.told()
    assert texts(told) == "".join(f"[{token}]" for token in ids)
    assert isinstance(told[-1], Final) and told[-1].offset == 12


def test_a_tokenizer_that_dies_over_an_earlier_telling_does_not_double_the_present_one() -> None:
    ids = [*range(10, 14)]
    final = Final(REQUEST, 0, 4, "length", Usage(1, 4), digest=tokens_digest(0, ids))
    desk = Desk(
        Recovered(entry(4), {0: final}, (Produced(REQUEST, 0, 0, array("i", ids).tobytes()),))
    )
    desk.asks(Attach(1, REQUEST, (0,)))
    ((first, _),) = desk.sent(Decode)
    desk.asks(Abort(2, REQUEST))
    desk.asks(Attach(3, REQUEST, (0,)))
    ((second, _),) = asked = desk.sent(Decode)
    assert second != first
    desk.core.on_unroutable(first, asked[0][1], desk.now)
    desk.turn()
    assert not desk.sent(Decode)


def test_no_delta_is_without_tokens() -> None:
    """Its reader would stay where it is, and be told the same for ever."""
    one = Stream(entry(9), 0, 1)
    one.extend(0, [7])
    one.show(DecodedItem(1, ("a", "b"), "", b""), flush=False)
    assert one.delta(1, 8) is None
