"""The completions API: text or ids in, text out. What evaluation harnesses and load generators speak."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from phalanx.protocol.messages import Delta, Final, PromptLogprob, TokenLogprobs, Usage
from phalanx.services.client_flow import Prompt, Spec
from phalanx.services.http.errors import HttpError, bad, openai_body
from phalanx.services.http.replies import LOGPROB_MIN, SSE, Asked, Started, check_end
from phalanx.services.http.sampling import refuse_fields, sampling, stops, whole

DEFAULT_MAX_TOKENS = 16
PROMPTS_MAX = 1024


@dataclass(frozen=True)
class Words:
    """The tokenizer as this API needs it."""

    spell: Callable[[int], str]  # one token
    text: Callable[[Sequence[int]], str]  # a prompt that was given as ids
    encode: Callable[[str], list[int]]  # raises PhalanxError


def ask(body: dict[str, Any], model_name: str, words: Words) -> Asked:
    """Raises HttpError."""
    refuse_fields(body, ("suffix", "response_format", "guided_json", "guided_regex"))
    n = whole(body, "n", 1)
    if whole(body, "best_of", n) != n:
        raise bad("best_of other than n is not supported", "best_of")
    prompts, scored = _prompts(body.get("prompt")), list[list[int]]()
    stream, echo = bool(body.get("stream")), bool(body.get("echo"))
    logprobs = body.get("logprobs")
    if isinstance(logprobs, bool):  # as chat has it
        logprobs = whole(body, "top_logprobs", 0) if logprobs else None
    if echo and logprobs is not None:
        scored = [words.encode(p) if isinstance(p, str) else list(p) for p in prompts]
    fields = {
        "max_tokens": whole(body, "max_tokens", DEFAULT_MAX_TOKENS),
        "temperature": body.get("temperature"),
        "top_p": body.get("top_p"),
        "seed": body.get("seed"),
        "logprobs": logprobs,
        "prompt_logprobs": logprobs if echo else None,
        "stop": stops(body.get("stop")),
    }
    chosen = sampling(body, fields)
    options = body.get("stream_options")
    include_usage = isinstance(options, dict) and bool(options.get("include_usage"))
    # What is scored is sent as ids, so that every log-probability has its token.
    specs = [Spec(prompt, chosen, n, stream) for prompt in scored or prompts]
    echoes = [words.text(p) if not isinstance(p, str) else p for p in prompts] if echo else []
    return Asked(
        specs,
        stream,
        lambda: CompletionsReply(
            model_name, n, echoes, scored, include_usage, words, logprobs is not None
        ),
    )


def _prompts(value: object) -> list[Any]:
    """A text, a list of texts, ids, or a list of lists of ids. Raises HttpError."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(isinstance(part, str) for part in value):
            found: list[Prompt] = list(value)
        elif all(_is_id(part) for part in value):
            found = [tuple(value)]
        elif all(isinstance(part, list) and part and all(map(_is_id, part)) for part in value):
            found = [tuple(part) for part in value]
        else:
            raise bad("prompt must be text, token ids, or a list of either", "prompt")
        if len(found) > PROMPTS_MAX:
            raise bad(f"{len(found)} prompts in one request, at most {PROMPTS_MAX}", "prompt")
        return found
    raise bad("prompt is missing: send text, token ids, or a list of either", "prompt")


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass
class _Choice:
    text: str = ""
    finish_reason: str | None = None
    logprobs: dict[str, list[Any]] | None = None
    offset: int = 0  # characters of the text that are spelled by tokens so far


class CompletionsReply:
    """Choice `prompt * n + index` is sequence `index` of a prompt."""

    def __init__(
        self,
        model_name: str,
        n: int,
        echoes: list[str],
        scored: list[list[int]],
        include_usage: bool,
        words: Words,
        logprobs: bool,
    ) -> None:
        self._model_name, self._n, self._echoes, self._scored = model_name, n, echoes, scored
        self._include_usage, self._words, self._logprobs = include_usage, words, logprobs
        self._created = int(time.time())
        self._id = ""
        self._choices: list[_Choice] = []
        self._usages: dict[tuple[int, int], Usage] = {}

    def begin(self, started: Sequence[Started]) -> list[SSE]:
        self._id = f"cmpl-{started[0].request_id}"
        self._choices = [_Choice() for _ in range(len(started) * self._n)]
        found: list[SSE] = []
        for number, choice in enumerate(self._choices):
            if self._echoes and not self._scored:
                choice.text = self._echoes[number // self._n]
                choice.offset = len(choice.text)
                found.append(self._chunk(number, choice.text, None))
        return found

    def scored(self, prompt: int, entries: Sequence[PromptLogprob | None]) -> list[SSE]:
        """The prompt's own tokens open each of its choices."""
        found: list[SSE] = []
        for number in range(prompt * self._n, (prompt + 1) * self._n):
            choice = self._choices[number]
            choice.text = self._echoes[prompt]
            logprobs = self._spelled(choice, self._scored[prompt], entries)
            found.append(self._chunk(number, choice.text, None, logprobs))
        return found

    def take(self, prompt: int, event: Delta | Final) -> list[SSE]:
        number = prompt * self._n + event.index
        choice = self._choices[number]
        choice.text += event.text
        if isinstance(event, Delta):
            entries = event.logprobs
            logprobs = self._spelled(choice, event.token_ids, entries) if self._logprobs else None
            return [self._chunk(number, event.text, None, logprobs)]
        check_end(event)
        choice.finish_reason = event.finish_reason
        self._usages[prompt, event.index] = event.usage
        return [self._chunk(number, event.text, event.finish_reason)]

    def _spelled(
        self,
        choice: _Choice,
        token_ids: Sequence[int],
        entries: Sequence[TokenLogprobs | PromptLogprob | None],
    ) -> dict[str, list[Any]]:
        """Log-probabilities of tokens that follow those of the choice, which they join."""
        found: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for token, entry in zip(token_ids, entries, strict=True):
            word = self._words.spell(token)
            logprob = None if entry is None else max(entry.logprob, LOGPROB_MIN)
            found["tokens"].append(word)
            found["token_logprobs"].append(logprob)
            found["top_logprobs"].append(None if entry is None else self._tops(entry))
            found["text_offset"].append(choice.offset)
            choice.offset += len(word)
        if choice.logprobs is None:
            choice.logprobs = {name: [] for name in found}
        for name, values in found.items():
            choice.logprobs[name] += values
        return found

    def _tops(self, entry: TokenLogprobs | PromptLogprob) -> dict[str, float]:
        pairs = zip(entry.top_ids, entry.top_logprobs, strict=True)
        return {self._words.spell(token): max(value, LOGPROB_MIN) for token, value in pairs}

    def _chunk(
        self,
        number: int,
        text: str,
        finish_reason: str | None,
        logprobs: dict[str, list[Any]] | None = None,
    ) -> SSE:
        choice = {
            "index": number,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        return SSE(msgspec.json.encode(self._head() | {"choices": [choice]}))

    def _head(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model_name,
        }

    def _usage(self) -> dict[str, Any]:
        prompts = {prompt: usage for (prompt, _), usage in self._usages.items()}
        prompt_tokens = sum(usage.prompt_tokens for usage in prompts.values())
        completion_tokens = sum(usage.completion_tokens for usage in self._usages.values())
        cached = sum(usage.cached_tokens for usage in prompts.values())
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def end(self) -> list[SSE]:
        usage = self._head() | {"choices": [], "usage": self._usage()}
        found = [SSE(msgspec.json.encode(usage))] if self._include_usage else []
        return [*found, SSE(b"[DONE]")]

    def fail(self, error: HttpError) -> list[SSE]:
        return [SSE(msgspec.json.encode(openai_body(error))), SSE(b"[DONE]")]

    def document(self) -> dict[str, Any]:
        choices = [
            {
                "index": number,
                "text": choice.text,
                "logprobs": choice.logprobs,
                "finish_reason": choice.finish_reason,
            }
            for number, choice in enumerate(self._choices)
        ]
        return self._head() | {"choices": choices, "usage": self._usage()}
