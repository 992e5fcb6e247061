"""The text of a reply is that of its tokens, in whatever pieces they come: what a fault does to the pieces, say."""

import random
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from services.http.test_bodies import TOKENS

from phalanx.protocol.messages import Delta, Final, TokenLogprobs, Usage
from phalanx.services.http import recipe
from phalanx.services.http.replies import Started
from phalanx.services.model_limits import ModelLimits

MODEL = recipe.model_of(ModelLimits("m", 1, 8192, 2048), TOKENS.tokenizer)
ASKED = {"messages": [{"role": "user", "content": "x"}], "input": "x", "max_tokens": 99}
TEXTS = ("Grüße, 世界! 👩\u200d🚀 ты", "no more than ASCII", "世", "👩\u200d🚀" * 3)


def ids_of(text: str) -> list[int]:
    ids: list[int] = TOKENS.tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def broken() -> list[list[int]]:
    """Texts that a limit ends in the middle of a character, and what is no text at all."""
    rng = random.Random(5)
    cut = [ids_of(text)[:-drop] for text in TEXTS for drop in (0, 1, 2) if ids_of(text)[:-drop]]
    return [*cut, *([rng.randrange(10, 2000) for _ in range(9)] for _ in range(20))]


def answer(api: recipe.Api, ids: list[int], cuts: list[int], stream: bool) -> tuple[str, int]:
    """The text, and how many log-probabilities came with it."""
    body = ASKED | {"stream": stream}
    if api is recipe.RESPONSES:
        body |= {"reasoning": {"effort": "none"}}
    else:
        body |= {"thinking": {"type": "disabled"}}
    if api is recipe.CHAT:
        body |= {"logprobs": True, "top_logprobs": 0}
    reply = recipe.ask(api, body, MODEL).reply()
    events = reply.begin([Started("r", 3)])
    for start, end in pairwise([0, *cuts, len(ids)]):
        scores = tuple(TokenLogprobs(-1.0, (), ()) for _ in ids[start:end])
        scores = scores if api is recipe.CHAT else ()
        events += reply.take(0, Delta("r", 0, start, tuple(ids[start:end]), "", scores))
    events += reply.take(0, Final("r", 0, len(ids), "length", Usage(3, len(ids), 0)))
    if not stream:
        return texts(api, reply.document())
    found = [texts(api, msgspec.json.decode(event.data)) for event in events]
    return "".join(text for text, _ in found), sum(scores for _, scores in found)


def texts(api: recipe.Api, said: dict[str, Any]) -> tuple[str, int]:
    if api is recipe.CHAT:
        (choice,) = said["choices"]
        part = choice.get("message") or choice["delta"]
        return part.get("content") or "", len((choice.get("logprobs") or {}).get("content") or ())
    if api is recipe.MESSAGES:
        part = said.get("delta") or next(iter(said.get("content", ())), {})
        return part.get("text") or "", 0
    if said.get("object") == "response":
        return "".join(c["text"] for o in said["output"] for c in o.get("content", ())), 0
    return said["delta"] if said["type"] == "response.output_text.delta" else "", 0


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("api", [recipe.CHAT, recipe.MESSAGES, recipe.RESPONSES])
def test_text_does_not_depend_on_the_pieces_in_which_tokens_come(
    api: recipe.Api, stream: bool
) -> None:
    """The whole last piece was missing where it ended in the middle of a character."""
    rng = random.Random(7)
    for ids in broken():
        alone = answer(api, ids, list(range(1, len(ids))), stream)
        assert alone[0] == MODEL.decode(ids).rstrip("\ufffd")
        for _ in range(6):
            cuts = sorted(rng.sample(range(1, len(ids)), rng.randrange(len(ids))))
            assert answer(api, ids, cuts, stream) == alone, (ids, cuts)
        assert answer(api, ids, [], stream) == alone, ids


def test_what_comes_after_a_stop_string_in_the_same_piece_is_no_text() -> None:
    ids = ids_of("one two 👩\u200d🚀")[:-1]
    body = ASKED | {"stop": ["two"], "thinking": {"type": "disabled"}}
    reply = recipe.ask(recipe.CHAT, body, MODEL).reply()
    reply.begin([Started("r", 3)])
    reply.take(0, Delta("r", 0, 0, tuple(ids), ""))
    reply.take(0, Final("r", 0, len(ids), "stop", Usage(3, len(ids), 0)))
    assert texts(recipe.CHAT, reply.document())[0] == "one "


TOOL = {"name": "weather", "parameters": {"type": "object"}}
CALL = (
    'Let me see.<｜DSML｜tool_calls>\n<｜DSML｜invoke name="weather">\n'
    '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
)


def whole(api: recipe.Api, ids: list[int], body: dict[str, Any], cuts: list[int]) -> dict[str, Any]:
    """The document, with a log-probability of each token if asked for."""
    asked = recipe.ask(api, ASKED | body, MODEL)
    reply = asked.reply()
    reply.begin([Started("r", 3)])
    scores = [TokenLogprobs(-float(at), (), ()) for at in range(len(ids))]
    for start, end in pairwise([0, *cuts, len(ids)]):
        told = scores[start:end] if asked.specs[0].sampling.logprobs is not None else ()
        reply.take(0, Delta("r", 0, start, tuple(ids[start:end]), "", tuple(told)))
    reply.take(0, Final("r", 0, len(ids), "length", Usage(3, len(ids), 0)))
    return reply.document() | {"created": 0, "created_at": 0}


def test_log_probabilities_do_not_depend_on_the_pieces() -> None:
    """With the last token of the text came those of the markup of a tool call, if they came together."""
    ids = ids_of(CALL)
    plain = {"thinking": {"type": "disabled"}, "logprobs": True}
    body = plain | {"tools": [{"type": "function", "function": TOOL}]}
    alone = whole(recipe.CHAT, ids, body, list(range(1, len(ids))))["choices"][0]
    del alone["message"]["tool_calls"][0]["id"]
    assert len(alone["logprobs"]["content"]) == len(ids_of(CALL.partition("<")[0]))
    for cut in range(1, len(ids)):
        (choice,) = whole(recipe.CHAT, ids, body, [cut])["choices"]
        del choice["message"]["tool_calls"][0]["id"]
        assert choice == alone, cut


def test_usage_does_not_depend_on_the_pieces_after_a_stop_string() -> None:
    """One that the gateway lets pass, as its text is that of a special token."""
    ids = [*ids_of("one"), MODEL.eos_token_id, *ids_of("two three")]
    stop = MODEL.decode([MODEL.eos_token_id])
    body = {"thinking": {"type": "disabled"}, "stop_sequences": [stop]}
    alone = whole(recipe.MESSAGES, ids, body, list(range(1, len(ids))))
    assert alone["stop_sequence"] == stop
    assert whole(recipe.MESSAGES, ids, body, []) == alone
