"""Chat completions, messages and responses, converted both ways by `deepseek-recipe`.

The recipe reads a body, renders its prompt and says how the output is to be parsed; its stream processor
turns tokens into that API's events: thinking, text, tool calls, log-probabilities, usage. What it does not know
is added here: `n`, cached tokens, and that the token which ends a turn is no text.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import deepseek_recipe as recipe
import msgspec
from tokenizers import Tokenizer

from phalanx.protocol.limits import SEED_MAX
from phalanx.protocol.messages import Delta, Final, PromptLogprob, TokenLogprobs, Usage
from phalanx.services.client_flow import Spec
from phalanx.services.http.errors import HttpError, anthropic_body, bad, openai_body
from phalanx.services.http.replies import LOGPROB_MIN, SSE, Asked, Started, check_end
from phalanx.services.http.sampling import refuse_fields, sampling, whole
from phalanx.services.model_limits import ModelLimits
from phalanx.services.template import RECIPE_MODEL, split

_FINISH = {
    "stop": recipe.InferenceFinishReason.Stop,
    "length": recipe.InferenceFinishReason.Length,
}
_OPTIONS = recipe.ConversionOptions()
_ENCODING = recipe.DeepseekV41Encoding()
# A constraint of the kinds below would bind every token. Tool calls are parsed, not forced.
_CONSTRAINTS = ("json", "regex")
_BROKEN = 8  # tokens; those of one character are four at most


Pair = tuple[float, list[tuple[int, float]]]  # log-probability, and those of the likeliest tokens


@dataclass(frozen=True)
class Api:
    """One of the APIs that the recipe speaks."""

    request: Any
    response: Any
    prefix: str  # of the ids of its replies
    many: bool = False  # takes `n`


CHAT = Api(
    recipe.ChatCompletionRequest,
    recipe.ChatCompletionResponse,
    "chatcmpl-",
    many=True,
)
MESSAGES = Api(recipe.MessagesRequest, recipe.MessagesResponse, "msg_")
RESPONSES = Api(recipe.ResponsesRequest, recipe.ResponsesResponse, "resp_")


@dataclass(frozen=True)
class Model:
    """What is served, for all replies."""

    name: str
    eos_token_id: int
    max_positions: int
    speller: Any  # recipe.Tokenizer
    decode: Callable[[list[int]], str]  # the same tokenizer, special tokens included


def model_of(limits: ModelLimits, tokenizer: Tokenizer) -> Model:
    return Model(
        limits.name,
        limits.eos_token_id,
        limits.max_positions,
        recipe.Tokenizer.from_str(tokenizer.to_str()),
        partial(tokenizer.decode, skip_special_tokens=False),
    )


def ask(api: Api, body: dict[str, Any], model: Model) -> Asked:
    """Raises HttpError for what the recipe refuses or this server cannot do."""
    n = whole(body, "n", 1) if api.many else 1
    refuse_fields(body, ("best_of", "background", "previous_response_id", "conversation"))
    options = body.get("stream_options")
    include_usage = isinstance(options, dict) and bool(options.get("include_usage"))
    try:
        request = api.request(body | {"model": RECIPE_MODEL} | ({"n": 1} if api.many else {}))
        more = (request.echo(), request.namespace_tool_map(_OPTIONS)) if api is RESPONSES else ()
        converted = request.convert(_OPTIONS)
    except recipe.ConversionError as error:
        raise bad(_reason(error)) from error
    except (ValueError, TypeError) as error:
        raise bad(str(error)) from error
    wanted = converted.inference_options
    if wanted.output_constraint is not None and wanted.output_constraint.kind in _CONSTRAINTS:
        raise HttpError(
            400,
            "unsupported",
            f"output bound to a {wanted.output_constraint.kind} grammar is not supported yet; ask for"
            " it in the prompt",
            param="response_format",
        )
    if wanted.seed is not None and wanted.seed > SEED_MAX:
        raise bad(f"seed is {wanted.seed}, allowed are 0 to {SEED_MAX}", "seed")
    rendered = _ENCODING.render_conversation(converted.conversation)
    if rendered.image_sources:
        raise HttpError(400, "unsupported", "images are not supported yet; send text")
    given = wanted.max_tokens is not None
    fields = {
        "max_tokens": wanted.max_tokens if given else _default_max_tokens(converted, model),
        "clamp_max_tokens": None if given and api is not MESSAGES else True,
        "temperature": wanted.temperature,
        "top_p": wanted.top_p,
        "seed": body.get("seed") if wanted.seed is None else wanted.seed,
        "logprobs": (wanted.top_logprobs or 0) if wanted.logprobs else None,
        "stop": tuple(converted.parsing_options.stop_sequences),
    }
    stream = converted.stream
    spec = Spec(
        tuple(split(rendered.prompt, rendered.special_ranges)), sampling(body, fields), n, stream
    )
    return Asked(
        [spec],
        stream,
        lambda: RecipeReply(api, converted, model, n, stream, include_usage, more),
    )


def _default_max_tokens(converted: Any, model: Model) -> int:
    """The recipe's own default, which depends on the thinking effort; lowered to what fits when run."""
    tokens: int = converted.resolve_max_tokens(1, max(2, model.max_positions))
    return tokens


def _reason(error: Any) -> str:
    """The recipe's message without the envelope of one API."""
    try:
        text = msgspec.json.decode(error.body)["error"]["message"]
        return text if isinstance(text, str) else str(error)
    except (msgspec.DecodeError, KeyError, TypeError):
        return str(error)


class RecipeReply:
    """One reply: a stream processor for each of its `n` sequences."""

    def __init__(
        self,
        api: Api,
        converted: Any,
        model: Model,
        n: int,
        stream: bool,
        include_usage: bool,
        more: tuple[Any, ...],
    ) -> None:
        self._api, self._converted, self._model, self._n = api, converted, model, n
        self._stream, self._include_usage, self._more = stream, include_usage, more
        self._has_stops = bool(converted.parsing_options.stop_sequences)
        self._created = int(time.time())
        self._id = ""
        self._processors: list[Any] = []
        self._responses: list[Any] = []
        # Sequences whose last token is an end token, which may be the end, with its log-probability.
        self._held: dict[int, Pair | None] = {}
        self._usages: dict[int, Usage] = {}

    def begin(self, started: Sequence[Started]) -> list[SSE]:
        api, (first,) = self._api, started
        self._id = api.prefix + first.request_id
        ready = recipe.InferenceChunk.ready(
            prompt_usage=recipe.PromptUsage(prompt_tokens=first.prompt_tokens)
        )
        found: list[SSE] = []
        for index in range(self._n):
            generator = api.request.chunk_generator(self._converted, self._id, self._model.name)
            if self._more:
                echo, tools = self._more
                generator = generator.with_namespace_tool_map(tools).with_echo(echo)
            options = self._converted.parsing_options
            processor = recipe.StreamProcessor(generator, options, self._model.speller)
            self._processors.append(processor)
            self._responses.append(
                api.response(self._id, self._model.name, self._created, first.prompt_tokens, 0)
            )
            found += self._said(index, processor.push(ready))
        return found

    def scored(self, prompt: int, entries: Sequence[PromptLogprob | None]) -> list[SSE]:
        return []  # these APIs have no place for them

    def take(self, prompt: int, event: Delta | Final) -> list[SSE]:
        index, processor = event.index, self._processors[event.index]
        if isinstance(event, Delta):
            return self._said(index, self._push(index, event))
        check_end(event)
        self._usages[index] = event.usage
        if processor.finished:  # it saw the stop string, and has said the end
            return []
        chunks = []
        if index in self._held:
            pair = self._held.pop(index)
            if event.finish_reason == "stop":  # the end token is counted, and is no text
                chunks += processor.push(recipe.InferenceChunk.text("", 1))
            else:
                chunks += self._tokens(index, [self._model.eos_token_id], [pair] if pair else [])
        chunks += processor.push(recipe.InferenceChunk.finish(_FINISH[event.finish_reason]))
        chunks += processor.finish()
        return self._said(index, chunks)

    def _push(self, index: int, delta: Delta) -> list[Any]:
        eos = self._model.eos_token_id
        ids, pairs = list(delta.token_ids), [_pair(entry) for entry in delta.logprobs]
        if ids and index in self._held:
            before = self._held.pop(index)
            ids.insert(0, eos)
            pairs = [before, *pairs] if before else pairs
        if ids and ids[-1] == eos:
            ids.pop()
            self._held[index] = pairs.pop() if pairs else None
        return self._tokens(index, ids, pairs)

    def _tokens(self, index: int, ids: list[int], pairs: list[Pair]) -> list[Any]:
        # The processor keeps what it is pushed until its text ends with a whole character, and drops that at the end:
        # only tokens of the last, broken character may be there then, however they came.
        # Of a piece in which text gives way to a tool call, log-probabilities stay or go together, and of one in which
        # a stop string ends all tokens count: so tokens come alone where there may be either.
        end = 0 if pairs or self._has_stops else self._whole(ids)
        parts = [(0, end)] * (end > 0) + [(at, at + 1) for at in range(end, len(ids))]
        processor = self._processors[index]
        chunks: list[Any] = []
        for at, to in parts:
            if processor.finished:  # it has seen a stop string
                break
            chunk = recipe.InferenceChunk.tokens(ids[at:to], pairs[at:to] or None)
            chunks += processor.push(chunk)
        return chunks

    def _whole(self, ids: list[int]) -> int:
        """How many of these tokens come before the end of the last whole character."""
        for end in range(len(ids), 0, -1):
            if not self._model.decode(ids[max(0, end - _BROKEN) : end]).endswith("\ufffd"):
                return end
        return 0

    def _said(self, index: int, chunks: Sequence[Any]) -> list[SSE]:
        if not self._stream:
            for chunk in chunks:
                self._responses[index].accumulate(chunk)
            return []
        response = self._api.response
        events = [(chunk.to_json(), response.sse_event_name(chunk) or "") for chunk in chunks]
        if self._api is not CHAT:
            return [SSE(text.encode(), name) for text, name in events]
        return [SSE(self._chat_chunk(index, text)) for text, _ in events]

    def _chat_chunk(self, index: int, text: str) -> bytes:
        """Chunks say which of the `n` choices they are of; usage comes once, at the end."""
        if self._n == 1 and '"usage":{' not in text:
            return text.encode()
        chunk = msgspec.json.decode(text)
        for choice in chunk["choices"]:
            choice["index"] = index
        if "usage" in chunk:
            chunk["usage"] = None
        return msgspec.json.encode(chunk)

    def _chat_usage(self, one: dict[str, Any]) -> dict[str, Any]:
        """Of all sequences together; the details are those of the one at hand."""
        prompt = max(usage.prompt_tokens for usage in self._usages.values())
        cached = max(usage.cached_tokens for usage in self._usages.values())
        completion = sum(usage.completion_tokens for usage in self._usages.values())
        return one | {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
            "prompt_cache_hit_tokens": cached,
            "prompt_cache_miss_tokens": prompt - cached,
        }

    def end(self) -> list[SSE]:
        found: list[SSE] = []
        if self._api is CHAT and self._include_usage:
            chunk = {
                "id": self._id,
                "object": "chat.completion.chunk",
                "created": self._created,
                "model": self._model.name,
                "choices": [],
                "usage": self._chat_usage({}),
            }
            found.append(SSE(msgspec.json.encode(chunk)))
        if (done := self._api.response.sse_done_data()) is not None:
            found.append(SSE(done.encode()))
        return found

    def fail(self, error: HttpError) -> list[SSE]:
        for processor in self._processors:
            processor.close()
        if self._api is MESSAGES:
            return [SSE(msgspec.json.encode(anthropic_body(error)), "error")]
        body = openai_body(error)
        if self._api is RESPONSES:
            event = {"type": "error", "sequence_number": 0} | body["error"]
            return [SSE(msgspec.json.encode(event), "error")]
        return [SSE(msgspec.json.encode(body)), SSE(b"[DONE]")]

    def document(self) -> dict[str, Any]:
        documents = [msgspec.json.decode(response.to_json()) for response in self._responses]
        first: dict[str, Any] = documents[0]
        if self._api is not CHAT:
            return first
        for index, document in enumerate(documents):
            document["choices"][0]["index"] = index
        first["choices"] = [document["choices"][0] for document in documents]
        first["usage"] = self._chat_usage(first["usage"])
        return first


def _pair(entry: TokenLogprobs) -> Pair:
    tops = zip(entry.top_ids, entry.top_logprobs, strict=True)
    return max(entry.logprob, LOGPROB_MIN), [(i, max(p, LOGPROB_MIN)) for i, p in tops]
