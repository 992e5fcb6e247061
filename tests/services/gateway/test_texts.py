"""Texts by way of the tokenizers: whose answer counts, and how much is asked at once."""

from array import array
from collections import deque
from collections.abc import Iterator
from itertools import cycle, repeat
from pathlib import Path

import msgspec
import pytest
from gateway_desk import MS, T0, T1, Desk, texts
from hypothesis import given
from hypothesis import strategies as st

from phalanx.protocol.digests import tokens_digest
from phalanx.protocol.errors import Code
from phalanx.protocol.messages import (
    Abort,
    Attach,
    Decode,
    Decoded,
    DecodedItem,
    DecodeItem,
    Encode,
    Final,
    Sampling,
    Submitted,
    Usage,
)
from phalanx.services.gateway.entries import Entry, Produced, Recovered
from phalanx.services.gateway.streams import End, Stream
from phalanx.services.gateway.texts import BATCH_TOKENS, Texts
from phalanx.services.tokenizer.core import TokenizerCore, load_limits, load_tokenizer

REQUEST = "a" * 32
GOLDEN = Path(__file__).parents[2] / "golden" / "tiny-a"


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


# --- how much is asked at once ---


class Pool:
    """Two tokenizers that take their time, in order, and a gateway's `Texts` that asks them."""

    def __init__(self, us_per_token: int) -> None:
        self.us, self.now = us_per_token, 0
        self.sockets: dict[bytes, deque[Decode]] = {T0: deque(), T1: deque()}
        self.texts = Texts(self._take, 0)
        for peer in self.sockets:
            self.texts.hello(peer, peer.decode()[:-2], 1, 0)
        self._done = dict.fromkeys(self.sockets, 0)
        self.largest = self.asked = 0

    def _take(self, peer: bytes, message: Encode | Decode) -> None:
        assert isinstance(message, Decode)
        tokens = sum(len(item.token_ids) for item in message.items)
        self.largest, self.asked = max(self.largest, tokens), self.asked + tokens
        if not self.sockets[peer]:
            self._done[peer] = self.now + tokens * self.us * 1000
        self.sockets[peer].append(message)

    def passes(self, ms: int) -> None:
        self.now += ms * MS
        for peer, waiting in self.sockets.items():
            while waiting and self._done[peer] <= self.now:
                decode = waiting.popleft()
                if waiting:
                    tokens = sum(len(item.token_ids) for item in waiting[0].items)
                    self._done[peer] += tokens * self.us * 1000
                items = (
                    DecodedItem(i.stream, ("x",) * len(i.token_ids), "", b"") for i in decode.items
                )
                for one, item, flush in self.texts.on_decoded(
                    peer, Decoded(decode.call, tuple(items))
                ):
                    one.show(item, flush)
                    self.texts.decode(one)
        self.texts.tick(self.now)
        self.texts.dispatch(self.now)


@pytest.mark.parametrize("us_per_token", [1, 20, 200])
def test_a_new_gateway_gets_the_text_of_all_its_long_streams(us_per_token: int) -> None:
    """Whole streams in one Decode took longer than anyone waited: they were asked again behind themselves, for ever."""
    pool = Pool(us_per_token)
    streams = [Stream(entry(10_000), 0, number) for number in range(1, 65)]
    for one in streams:
        one.extend(0, [7] * 8000)
        pool.texts.decode(one)
    least_s = 64 * 8000 * us_per_token / 2 / 1e6
    while not all(len(one.shown) == 8000 for one in streams):
        pool.passes(10)
        assert pool.now / 1e9 < 2 * least_s + 1
    assert pool.largest == BATCH_TOKENS
    if us_per_token <= 20:
        assert pool.asked == 64 * 8000, "nothing is asked twice"


def test_who_keeps_up_does_not_wait_for_those_that_are_far_behind() -> None:
    """Of 64 long streams all is decoded anew, which takes five seconds; another one goes on meanwhile."""
    pool = Pool(us_per_token=20)
    for number in range(1, 65):
        one = Stream(entry(10_000), 0, number)
        one.extend(0, [7] * 8000)
        pool.texts.decode(one)
    pool.passes(10)
    short = Stream(entry(100), 0, 65)
    waited: list[int] = []
    for token in range(10):
        short.extend(token, [8])
        pool.texts.decode(short)
        begun = pool.now
        while len(short.shown) <= token:
            pool.passes(10)
        waited.append((pool.now - begun) // MS)
    assert max(waited) <= 200 and pool.now < 4_000 * MS, waited
    assert pool.asked > 100_000


TOKENIZERS = {"bytes": load_tokenizer(None), "words": load_tokenizer(GOLDEN)}
CORES = {
    kind: TokenizerCore(tokenizer, load_limits(None)) for kind, tokenizer in TOKENIZERS.items()
}


def told(core: TokenizerCore, one: Stream, pieces: Iterator[int]) -> tuple[list[str], Final]:
    """What is shown of a stream that is decoded in such pieces, and how it ends."""
    while one.final is None:
        assert one.wants_decode
        item = one.decode_item(next(pieces))
        (decoded,) = core.decode(Decode(1, (item,))).items
        one.show(decoded, item.flush)
    return one.shown[: one.final.offset], one.final


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(data=st.data())
def test_however_a_stream_is_cut_its_text_and_its_end_are_the_same(
    kind: str, data: st.DataObject
) -> None:
    tokenizer, core = TOKENIZERS[kind], CORES[kind]
    some = st.sampled_from(["né", "日本", " stop", " STOP now", "\N{GRINNING FACE}", "eé e"])
    some_ids = some.map(lambda text: tokenizer.encode(text).ids) | st.lists(
        st.integers(3, 258), max_size=3
    )
    ids = [token for piece in data.draw(st.lists(some_ids, max_size=8)) for token in piece]
    text = tokenizer.decode(ids)
    starts = st.integers(0, len(text))
    ends = st.tuples(starts, st.integers(1, 4)).map(lambda at: text[at[0] : at[0] + at[1]])
    stop = data.draw(st.lists((ends | some | st.just("\ufffd")).filter(bool), max_size=2))
    min_tokens = data.draw(st.integers(0, 6))
    sampling = Sampling(seed=1, max_tokens=99, stop=tuple(stop), min_tokens=min_tokens)
    end = data.draw(st.sampled_from([End("length"), End("stop"), End("length", Code.KV_PRESSURE)]))
    recorded = data.draw(st.none() | st.integers(0, len(ids)))

    def made() -> Stream:
        one = Stream(msgspec.structs.replace(entry(99), sampling=sampling), 0, 1)
        one.extend(0, ids)
        one.end = end
        if recorded is not None:
            one.recorded = one.final_of(End("length"), recorded)
        return one

    cuts = data.draw(st.lists(st.integers(1, 6), min_size=1))
    assert told(core, made(), cycle(cuts)) == told(core, made(), repeat(10**6))


def test_what_the_last_token_owes_comes_with_the_last_piece() -> None:
    one = Stream(entry(9), 0, 1)
    one.extend(0, [7, 8, 9])
    one.end = End("length")
    assert one.decode_item(2) == DecodeItem(1, (7, 8), b"", flush=False)
    one.show(DecodedItem(1, ("a", "b"), "", b"c"), flush=False)
    assert one.decode_item(2) == DecodeItem(1, (9,), b"c", flush=True)
