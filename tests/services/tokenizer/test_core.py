"""What a tokenizer answers: limits and refusals, turns between long and short prompts, whose tokenizer is used."""

import re
import shutil
from array import array
from pathlib import Path

import pytest

from phalanx.protocol.errors import Code, ConfigError, Refused
from phalanx.protocol.limits import PROMPT_CHARS_MAX
from phalanx.protocol.messages import (
    ChatMessage,
    Decode,
    DecodedItem,
    DecodeItem,
    Encode,
    Encoded,
    EncodeFailed,
    Span,
)
from phalanx.services.tokenizer import core as core_module
from phalanx.services.tokenizer.core import (
    DEFAULT_TOKENIZER,
    EncodeQueue,
    ModelLimits,
    TokenizerCore,
    load_limits,
    load_tokenizer,
)

GOLDEN = Path(__file__).parents[2] / "golden" / "tiny-a"
TOKENIZER = load_tokenizer(None)
UNLIMITED = ModelLimits()


def make_core(limits: ModelLimits = UNLIMITED) -> TokenizerCore:
    return TokenizerCore(TOKENIZER, limits)


def answer(request: Encode, limits: ModelLimits = UNLIMITED) -> Encoded | EncodeFailed:
    queue = EncodeQueue(make_core(limits))
    queue.add(request)
    while True:
        if (answer := queue.work()) is not None:
            return answer


def failure(request: Encode, limits: ModelLimits = UNLIMITED) -> tuple[Code, str]:
    failed = answer(request, limits)
    assert isinstance(failed, EncodeFailed)
    assert failed.call == request.call
    return failed.code, failed.message


def test_text_becomes_its_ids_as_int32() -> None:
    text = "Once upon a time <think> in 中国.\n" * 3000
    assert answer(Encode(7, prompt=text)) == Encoded(
        7, array("i", TOKENIZER.encode(text).ids).tobytes()
    )


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    queue = EncodeQueue(make_core())
    queue.add(Encode(1, prompt="many words " * 200_000))
    queue.work()
    queue.add(Encode(2, prompt="few words"))
    turns = 1
    while (first := queue.work()) is None:
        turns += 1
    assert isinstance(first, Encoded)
    assert first.call == 2
    assert turns <= 4
    assert len(queue) == 1


def test_a_repeated_call_is_the_same_call() -> None:
    queue = EncodeQueue(make_core())
    for _ in range(3):
        queue.add(Encode(1, prompt="x"))
    assert len(queue) == 1
    queue.forget()
    assert len(queue) == 0


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (Encode(1), "exactly one"),
        (Encode(1, prompt="a", messages=()), "exactly one"),
        (Encode(1, prompt=""), "empty"),
        (Encode(1, prompt="a\ud800b"), r"U\+D800 at character 1"),
        (Encode(1, messages=(ChatMessage("user", "\udfff"),)), r"messages\[0\].content .* U\+DFFF"),
        (Encode(1, messages=(ChatMessage("\udfff", ""),)), r"messages\[0\].role"),
        (Encode(1, messages=()), "messages: Empty"),
        (Encode(1, prompt="a", spans=(Span("a"),)), "exactly one"),
        (Encode(1, spans=(Span("a"), Span("\udfff"))), r"spans\[1\] .* U\+DFFF"),
        (Encode(1, spans=(Span("no such token", True),)), "has no no such token"),
        (Encode(1, spans=()), "empty"),
    ],
)
def test_bad_requests_are_refused_with_the_reason(request_: Encode, why: str) -> None:
    code, message = failure(request_)
    assert code is Code.BAD_REQUEST
    assert re.search(why, message)


def test_a_prompt_longer_than_the_limit_is_refused() -> None:
    half = ChatMessage("user", "x" * (PROMPT_CHARS_MAX // 2 + 1))
    for request in (
        Encode(1, prompt="x" * (PROMPT_CHARS_MAX + 1)),
        Encode(1, messages=(half, half)),
    ):
        code, message = failure(request)
        assert code is Code.TOO_LARGE
        assert str(PROMPT_CHARS_MAX) in message


def test_text_that_cannot_be_cut_has_a_limit_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_module, "UNCUT_CHARS_MAX", 50_000)
    code, message = failure(Encode(1, prompt="1" * 50_001))
    assert code is Code.TOO_LARGE
    assert "50001" in message
    assert isinstance(answer(Encode(1, prompt="one word " * 20_000)), Encoded)


def test_a_prompt_the_model_cannot_hold_is_refused_before_it_is_encoded_whole() -> None:
    code, message = failure(Encode(1, prompt="word " * 1_000_000), ModelLimits(0, 100))
    assert code is Code.BAD_REQUEST
    found = int(message.split("at least ")[1].split()[0])
    assert 100 < found < 20_000


def test_ids_outside_the_models_vocabulary_are_refused() -> None:
    code, message = failure(Encode(1, prompt="the"), ModelLimits(vocab_size=259))
    assert code is Code.BAD_REQUEST
    assert "tokenizer.json" in message


def test_a_tokenizer_without_the_templates_tokens_takes_no_chat() -> None:
    core = TokenizerCore(load_tokenizer(GOLDEN), ModelLimits())
    with pytest.raises(Refused, match="<｜begin▁of▁sentence｜>"):
        list(core.encode(Encode(1, messages=(ChatMessage("user", "hi"),))))


def test_a_failure_of_the_library_ends_that_call_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicError(BaseException):
        pass

    def panic(self: object, piece: str) -> None:
        raise PanicError("index out of range")

    monkeypatch.setattr(core_module.TextEncoder, "encode", panic)
    code, message = failure(Encode(1, prompt="x"))
    assert code is Code.INTERNAL
    assert "index out of range" in message


def test_decode_answers_for_every_stream_apart() -> None:
    ids = tuple(TOKENIZER.encode("naïve 😀").ids)
    first = make_core().decode(
        Decode(3, (DecodeItem(1, ids[:-1], b""), DecodeItem(2, (5,), b"", flush=True)))
    )
    one, two = first.items
    assert (first.call, one.stream, two) == (3, 1, DecodedItem(2, ("#",), "", b""))
    second = make_core().decode(Decode(4, (DecodeItem(1, ids[-1:], one.carry, flush=True),)))
    assert "".join(one.pieces) + second.items[0].pieces[0] == "naïve 😀"
    assert second.items[0].tail == ""


def test_the_checkpoints_tokenizer_wins(tmp_path: Path) -> None:
    assert load_tokenizer(GOLDEN).get_vocab_size() == 512
    assert load_tokenizer(tmp_path).get_vocab_size() == 4096
    shutil.copy(DEFAULT_TOKENIZER, tmp_path / "tokenizer.json")
    assert load_tokenizer(tmp_path).get_vocab_size() == 4096
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_limits_come_from_the_checkpoints_config(tmp_path: Path) -> None:
    assert load_limits(GOLDEN) == ModelLimits(vocab_size=512, max_tokens=256)
    assert load_limits(None) == load_limits(tmp_path) == ModelLimits()
    (tmp_path / "config.json").write_text('{"vocab_size": 7, "max_position_embeddings": 9}')
    assert load_limits(tmp_path) == ModelLimits(7, 9)
    (tmp_path / "config.json").write_text('{"vocab_size": 7}')
    with pytest.raises(ConfigError, match="max_position_embeddings"):
        load_limits(tmp_path)


def test_in_spans_only_what_is_marked_is_special() -> None:
    special = "<｜Assistant｜>"
    token = TOKENIZER.token_to_id(special)
    found = answer(Encode(1, spans=(Span("Hi "), Span(special, True), Span(special))))
    assert isinstance(found, Encoded)
    ids = list(array("i", found.token_ids))
    assert ids.count(token) == 1 and len(ids) > 3
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == f"Hi {special}{special}"
