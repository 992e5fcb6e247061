"""Every limit on input holds: a bad request gets one clear error with its number, and no id escapes."""

import math
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.protocol.codec import Decoder, encode
from phalanx.protocol.errors import Code, ConfigError, DecodeError, Refused
from phalanx.protocol.introductions import PLAN_NEW_BYTES_MAX, introduction_bytes
from phalanx.protocol.limits import (
    LOGIT_BIAS_MAX,
    N_MAX,
    PROMPT_CHARS_MAX,
    SEED_MAX,
    STOP_IDS_MAX,
    STOP_STRING_CHARS_MAX,
    STOP_STRINGS_MAX,
    TOP_LOGPROBS_MAX,
)
from phalanx.protocol.messages import ChatMessage, ClientMessage, Generate, Sampling, Span
from phalanx.services.gateway.validate import check, check_sampling, resolve, sampling_for
from phalanx.services.model_limits import ModelLimits, read_model

MODEL = ModelLimits("tiny", vocab_size=512, max_positions=256, eos_token_id=1)


def refused(message: Generate) -> Refused:
    with pytest.raises(Refused) as caught:
        check(message, MODEL)
    return caught.value


def run(
    sampling: Sampling, prompt: list[int], pool: int | None = None, model: ModelLimits = MODEL
) -> Sampling:
    check_sampling(sampling, model)
    return resolve(sampling, prompt, model, pool_tokens=pool, default_max_tokens=100, seed=42)


def generate(**fields: Any) -> Generate:
    return Generate(1, **({"prompt": "hi"} | fields))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": None}, "none"),
        ({"prompt_token_ids": (1,)}, "prompt and prompt_token_ids"),
        ({"messages": (ChatMessage("user", "x"),)}, "prompt and messages"),
        ({"prompt": ""}, "empty"),
        ({"prompt": None, "prompt_token_ids": ()}, "empty"),
        ({"prompt": None, "messages": ()}, "empty"),
        ({"spans": (Span("x"),)}, "prompt and spans"),
        ({"prompt": None, "spans": (Span(""),)}, "empty"),
        ({"prompt": None, "spans": (Span("a"), Span("\udfff"))}, r"spans\[1\]"),
        ({"prompt": None, "messages": (ChatMessage("", "x"),)}, "role"),
        ({"prompt": None, "prompt_token_ids": (3, 512)}, "512 at 1.*0 to 511"),
        ({"prompt": None, "prompt_token_ids": (-1,)}, "-1 at 0"),
        ({"prompt": "a\ud800"}, "surrogate at character 1"),
        ({"prompt": None, "messages": (ChatMessage("user", "\udfff"),)}, "surrogate"),
        ({"n": 0}, f"1 to {N_MAX}"),
        ({"n": N_MAX + 1}, f"{N_MAX + 1}"),
        ({"key": "k" * 200}, "200"),
        ({"v": 2}, "version 2"),
    ],
)
def test_what_a_request_must_be(fields: dict[str, Any], words: str) -> None:
    error = refused(generate(**fields))
    assert error.code is Code.BAD_REQUEST
    with pytest.raises(Refused, match=words):
        raise error


def test_an_unknown_model_is_named() -> None:
    check(generate(model="tiny"), MODEL)
    error = refused(generate(model="gpt-5"))
    assert error.code is Code.UNKNOWN_MODEL
    assert "gpt-5" in error.text and "tiny" in error.text


def test_a_text_of_any_size_is_judged_at_once() -> None:
    assert refused(generate(prompt="x" * (PROMPT_CHARS_MAX + 1))).code is Code.TOO_LARGE
    chat = (ChatMessage("user", "x" * PROMPT_CHARS_MAX), ChatMessage("user", "y"))
    assert refused(generate(prompt=None, messages=chat)).code is Code.TOO_LARGE


BAD_SAMPLING: list[dict[str, Any]] = [
    {"temperature": -0.1},
    {"prompt_logprobs": -1},
    {"prompt_logprobs": 21},
    {"temperature": 1e9},
    {"top_p": 0.0},
    {"top_p": 1.1},
    {"top_k": -2},
    {"top_k": 2**31},
    {"min_p": -0.1},
    {"min_p": 1.0},
    {"repetition_penalty": 0.0},
    {"repetition_penalty": -1.0},
    {"presence_penalty": 2.1},
    {"frequency_penalty": -2.1},
    {"seed": -1},
    {"seed": SEED_MAX + 1},
    {"max_tokens": 0},
    {"max_tokens": -1},
    {"min_tokens": -1},
    {"min_tokens": 10**18},
    {"first_n_token_no_eos": -1},
    {"stop": ("",)},
    {"stop": ("ok", "\ud83d")},
    {"stop": ("x" * (STOP_STRING_CHARS_MAX + 1),)},
    {"stop": ("x",) * (STOP_STRINGS_MAX + 1)},
    {"stop_token_ids": (1,) * (STOP_IDS_MAX + 1)},
    {"logit_bias": dict.fromkeys(range(LOGIT_BIAS_MAX + 1), 0.0)},
    {"logit_bias": {3: 1e9}},
    {"blocked_token_ids": (1,) * 1025},
    {"predicted_token_ids": (1,) * (MODEL.max_positions + 1)},
    {"forced_token_ids": (1,) * (MODEL.max_positions + 1)},
    {"logprobs": -1},
    {"logprobs": TOP_LOGPROBS_MAX + 1},
]
REALS = [
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
]


@pytest.mark.parametrize("fields", BAD_SAMPLING, ids=str)
def test_ranges_of_sampling(fields: dict[str, Any]) -> None:
    ((name, value),) = fields.items()
    with pytest.raises(Refused) as caught:
        check_sampling(Sampling(**fields), MODEL)
    assert caught.value.code is Code.BAD_REQUEST
    assert name in caught.value.text
    if isinstance(value, int | float):
        assert f"{value:g}" in caught.value.text or str(value) in caught.value.text


def test_prompt_logprobs_need_every_row() -> None:
    compact = replace(MODEL, skips_prompt_rows=True)
    check_sampling(Sampling(logprobs=1), compact)
    check_sampling(Sampling(prompt_logprobs=1), MODEL)
    with pytest.raises(Refused) as caught:
        check_sampling(Sampling(prompt_logprobs=0), compact)
    assert caught.value.code is Code.BAD_REQUEST and "yoco_truncation" in caught.value.text


def test_no_outputs_only_where_the_prompt_is_scored() -> None:
    scoring = Sampling(max_tokens=0, prompt_logprobs=0)
    check_sampling(scoring, MODEL)
    with pytest.raises(Refused, match="max_tokens is 0"):
        check_sampling(Sampling(max_tokens=0), MODEL)
    longest = range(MODEL.max_positions)
    resolved = sampling_for(scoring, len(longest), MODEL, None, 9, 1)
    assert resolved.max_tokens == 0
    with pytest.raises(Refused, match="at least 1 for the output"):
        sampling_for(scoring, len(longest) + 1, MODEL, None, 9, 1)
    with pytest.raises(Refused, match="n is 3 and max_tokens is 0"):
        check(Generate(1, prompt_token_ids=(5,), sampling=scoring, n=3), MODEL)


@pytest.mark.parametrize("name", [*REALS, "logit_bias"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_are_finite(name: str, value: float) -> None:
    fields: dict[str, Any] = {name: {7: value} if name == "logit_bias" else value}
    with pytest.raises(Refused, match=name):
        check_sampling(Sampling(**fields), MODEL)


IDS = st.integers(-(2**63), 2**64 - 1) | st.integers(-3, 600)


@given(
    IDS,
    st.sampled_from(
        ["prompt", "stop_token_ids", "logit_bias", "blocked", "predicted", "forced", "encoded"]
    ),
)
def test_no_id_field_escapes_the_vocabulary(token: int, where: str) -> None:
    inside = 0 <= token < MODEL.vocab_size
    message = generate()
    if where == "prompt":
        message = generate(prompt=None, prompt_token_ids=(5, token))
    elif where == "stop_token_ids":
        message = generate(sampling=Sampling(stop_token_ids=(token, 5)))
    elif where == "predicted":
        message = generate(sampling=Sampling(predicted_token_ids=(5, token)))
    elif where == "blocked":
        message = generate(sampling=Sampling(blocked_token_ids=(token,)))
    elif where == "forced":
        message = generate(sampling=Sampling(forced_token_ids=(token,)))
    elif where == "logit_bias":
        message = generate(sampling=Sampling(logit_bias={5: 0.0, token: -1.0}))
    try:
        check(message, MODEL)
        run(message.sampling, [5, token] if where == "encoded" else [5])
        assert inside
    except Refused as error:
        assert not inside and str(token) in error.text


def test_every_id_field_of_a_request_is_known_to_the_test_above() -> None:
    """A new field of ids must be checked and named there."""
    of_ids = [name for name in Sampling.__struct_fields__ if name.endswith(("_ids", "_bias"))]
    assert of_ids == [
        "stop_token_ids",
        "logit_bias",
        "blocked_token_ids",
        "predicted_token_ids",
        "forced_token_ids",
    ]
    of_ids = [name for name in Generate.__struct_fields__ if name.endswith("_ids")]
    assert of_ids == ["prompt_token_ids"]


LENGTHS = st.integers(1, 300) | st.sampled_from([2**31 - 1, 2**31, 2**32, 2**63 - 1, 10**18])


@given(LENGTHS, st.integers(1, 300), st.none() | st.integers(1, 300))
def test_prompt_and_output_fit_model_and_pool(most: int, prompt: int, pool: int | None) -> None:
    limit = min(MODEL.max_positions, pool or MODEL.max_positions)
    try:
        got = run(Sampling(max_tokens=most), [5] * prompt, pool)
        assert prompt + most <= limit and got.max_tokens == most
    except Refused as error:
        assert prompt + most > limit
        assert str(prompt) in error.text and str(limit) in error.text


@given(st.integers(1, 255), st.integers(0, 256), st.none() | st.integers(1, 300))
def test_the_default_length_fits_by_itself(prompt: int, least: int, pool: int | None) -> None:
    room = min(MODEL.max_positions, pool or MODEL.max_positions) - prompt
    try:
        got = run(Sampling(min_tokens=least), [5] * prompt, pool)
        assert got.max_tokens == min(max(100, least), room) and got.min_tokens <= got.max_tokens
    except Refused:
        assert room < 1 or least > room


def test_settings_that_no_plan_has_room_for_are_refused() -> None:
    """Its scheduler refused it, after the gateway had accepted it. Of no sequence is more let through than fits."""
    model = replace(MODEL, max_positions=1 << 20)

    def size(outputs: int, seed: int) -> int:
        forced = Sampling(max_tokens=outputs, forced_token_ids=(40,) * outputs, seed=seed)
        made = sampling_for(forced, 10, model, None, 100, 0)
        return 4 * (10 + outputs) + introduction_bytes(made)

    most = 419_000 + (PLAN_NEW_BYTES_MAX - size(419_000, SEED_MAX)) // 5  # 4 bytes and one each
    assert size(most, SEED_MAX) <= PLAN_NEW_BYTES_MAX < size(most + 1, SEED_MAX)
    assert size(most + 1, 1) <= PLAN_NEW_BYTES_MAX, "by its first sequence alone it would fit"
    for outputs in (most, most + 1, 1 << 19):
        asked = Sampling(max_tokens=outputs, forced_token_ids=(40,) * outputs, seed=1)
        if outputs == most:
            run(asked, [5] * 10, model=model)
            continue
        with pytest.raises(Refused, match=f"{outputs} outputs.*lower max_tokens") as refused:
            run(asked, [5] * 10, model=model)
        assert refused.value.code is Code.BAD_REQUEST


def test_an_empty_prompt_is_refused_after_tokenizing_too() -> None:
    with pytest.raises(Refused, match="no tokens"):
        run(Sampling(), [])


def test_what_is_filled_in() -> None:
    got = run(Sampling(temperature=1e-9, top_k=-1), [5])
    assert (got.temperature, got.top_k, got.seed, got.max_tokens) == (0.0, 0, 42, 100)
    assert run(Sampling(top_k=512, seed=0), [5]).seed == 0
    assert run(Sampling(top_k=10_000), [5]).top_k == 0
    assert run(Sampling(predicted_token_ids=(5,) * 9, max_tokens=3), [5]).predicted_token_ids == (
        5,
        5,
        5,
    )
    assert run(Sampling(top_k=7, temperature=1e-4), [5]).temperature == 1e-4


def test_defaults_are_allowed() -> None:
    check(generate(), MODEL)
    check(generate(prompt=None, messages=(ChatMessage("user", ""),)), MODEL)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
FIELDS = [*Sampling.__struct_fields__]


@given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4), JSON)
def test_whatever_comes_is_decoded_and_checked_or_refused(
    sampling: dict[str, Any], prompt: Any
) -> None:
    """Any tree in place of a request: an error of ours, never another exception; what passes is safe."""
    tree = {"type": "Generate", "call": 1, "prompt": prompt, "sampling": sampling}
    decoder = Decoder[ClientMessage](ClientMessage)
    try:
        message = decoder.decode(msgspec.msgpack.encode(tree))
        assert isinstance(message, Generate)
        check(message, MODEL)
        got = run(message.sampling, [5])
    except (DecodeError, Refused):
        return
    assert got.max_tokens is not None and 1 + got.max_tokens <= MODEL.max_positions
    assert all(0 <= token < 512 for token in (*got.stop_token_ids, *got.logit_bias))
    assert all(math.isfinite(getattr(got, name)) for name in REALS)
    assert decoder.decode(encode(Generate(1, prompt="x", sampling=got)))


def test_the_models_numbers_come_from_its_config(tmp_path: Any) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(ConfigError, match="cannot read"):
        read_model(tmp_path, "x")
    path.write_text("[1]")
    with pytest.raises(ConfigError, match="JSON object"):
        read_model(tmp_path, "x")
    path.write_text('{"eos_token_id": 1, "text_config": {"vocab_size": "many"}}')
    with pytest.raises(ConfigError, match="vocab_size is 'many'"):
        read_model(tmp_path, "x")
    path.write_text(
        '{"eos_token_id": 1, "text_config": {"vocab_size": 9, "max_position_embeddings": 5}}'
    )
    assert read_model(tmp_path, "x") == ModelLimits("x", 9, 5, 1)
