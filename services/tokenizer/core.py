"""What a tokenizer answers. Pure: requests in, answers out; no sockets, clock or threads.

Encoding goes piece by piece and in turns, so a short prompt never waits for a long one to end; a
decode is answered at once.
"""

import json
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer

from phalanx.protocol.errors import Code, ConfigError, Refused
from phalanx.protocol.limits import PROMPT_CHARS_MAX
from phalanx.protocol.messages import (
    Decode,
    Decoded,
    DecodedItem,
    Encode,
    Encoded,
    EncodeFailed,
    Span,
)
from phalanx.services.tokenizer.chat import render
from phalanx.services.tokenizer.detokenize import make_detokenizer
from phalanx.services.tokenizer.encode import TextEncoder, without_added_tokens

DEFAULT_TOKENIZER = Path(__file__).with_name("tokenizer.json")
# Text without a place to cut; it costs some 190 bytes of memory a character.
UNCUT_CHARS_MAX = 4_000_000


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the model can take; 0: unknown, not checked here."""

    vocab_size: int = 0
    max_tokens: int = 0  # positions, prompt and output together


def load_tokenizer(model_dir: Path | None) -> Tokenizer:
    """The checkpoint's own `tokenizer.json`, else the packaged default. Raises ConfigError."""
    path = model_dir / "tokenizer.json" if model_dir is not None else DEFAULT_TOKENIZER
    if not path.is_file():
        path = DEFAULT_TOKENIZER
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for every kind of bad file
        raise ConfigError(f"cannot read the tokenizer {path}: {error}") from error


def load_limits(model_dir: Path | None) -> ModelLimits:
    """From the checkpoint's `config.json`; without one nothing is known. Raises ConfigError."""
    if model_dir is None or not (path := model_dir / "config.json").is_file():
        return ModelLimits()
    try:
        config = json.loads(path.read_text("utf-8"))
        text = config.get("text_config", config)
        return ModelLimits(int(text["vocab_size"]), int(text["max_position_embeddings"]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} does not say vocab_size and max_position_embeddings: {error!r}"
        ) from error


class TokenizerCore:
    """One loaded tokenizer and the encodes it is busy with."""

    def __init__(self, tokenizer: Tokenizer, limits: ModelLimits) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._text = TextEncoder(tokenizer)
        self._detokenizer = make_detokenizer(tokenizer)

    @cached_property
    def _plain(self) -> TextEncoder:
        """For what users write in chats: the spelling of a special token is plain text."""
        return TextEncoder(without_added_tokens(self._tokenizer))

    def decode(self, request: Decode) -> Decoded:
        items = []
        for item in request.items:
            piece = self._detokenizer.step(item.token_ids, item.carry, flush=item.flush)
            items.append(DecodedItem(item.stream, tuple(piece.texts), piece.tail, piece.carry))
        return Decoded(request.call, tuple(items))

    def encode(self, request: Encode) -> Iterator["array[int]"]:
        """Ids of the prompt, a piece at a time. Raises Refused, between pieces too."""
        given = (request.prompt, request.messages, request.spans)
        if sum(prompt is not None for prompt in given) != 1:
            raise Refused(Code.BAD_REQUEST, "give exactly one of prompt, messages and spans")
        total = 0
        for ids in self._ids(request):
            total += len(ids)
            self._check(ids, total)
            yield ids
        if not total:
            raise Refused(Code.BAD_REQUEST, "the prompt is empty: it has no tokens")

    def _ids(self, request: Encode) -> Iterator["array[int]"]:
        if request.prompt is not None:
            check_text(request.prompt, "prompt")
            yield from self._encode_text(self._text, request.prompt)
            return
        if request.spans is not None:
            for number, span in enumerate(request.spans):
                check_text(span.text, f"spans[{number}]")
            check_chars(sum(len(span.text) for span in request.spans), "spans")
            yield from self._encode_spans(request.spans)
            return
        messages = request.messages or ()
        for number, message in enumerate(messages):
            check_text(message.role, f"messages[{number}].role")
            check_text(message.content, f"messages[{number}].content")
        check_chars(sum(len(message.content) for message in messages), "messages")
        yield from self._encode_spans(render(messages))

    def _encode_spans(self, spans: Iterable[Span]) -> Iterator["array[int]"]:
        for span in spans:
            if span.special:
                yield self._special(span)
            else:
                yield from self._encode_text(self._plain, span.text)

    def _encode_text(self, encoder: TextEncoder, text: str) -> Iterator["array[int]"]:
        for piece in encoder.pieces(text):
            if len(piece) > UNCUT_CHARS_MAX:
                raise Refused(
                    Code.TOO_LARGE,
                    f"the prompt has {len(piece)} characters without a space between two words;"
                    f" at most {UNCUT_CHARS_MAX} can be tokenized in one go. Send token ids instead",
                )
            yield encoder.encode(piece)

    def _special(self, span: Span) -> "array[int]":
        token = self._tokenizer.token_to_id(span.text)
        if token is None:
            raise Refused(
                Code.BAD_REQUEST,
                f"this model's tokenizer has no {span.text}, which the chat template needs:"
                " send the prompt as text or token ids",
            )
        return array("i", [token])

    def _check(self, ids: "array[int]", total: int) -> None:
        limits = self._limits
        if limits.max_tokens and total > limits.max_tokens:
            raise Refused(
                Code.BAD_REQUEST,
                f"the prompt has at least {total} tokens, the model takes at most"
                f" {limits.max_tokens} positions (prompt and output together)",
            )
        if limits.vocab_size and ids and max(ids) >= limits.vocab_size:
            raise Refused(
                Code.BAD_REQUEST,
                f"the tokenizer gives id {max(ids)} but the model's vocabulary has"
                f" {limits.vocab_size} entries: the model needs a tokenizer.json of its own; token"
                " ids can be sent instead",
            )


def check_text(text: str, name: str) -> None:
    """Raises Refused for text that is too long or not valid Unicode."""
    check_chars(len(text), name)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise Refused(
            Code.BAD_REQUEST,
            f"{name} is not valid Unicode: a lone surrogate U+{ord(text[error.start]):04X}"
            f" at character {error.start}",
        ) from error


def check_chars(chars: int, name: str) -> None:
    if chars > PROMPT_CHARS_MAX:
        raise Refused(
            Code.TOO_LARGE,
            f"{name}: {chars} characters, at most {PROMPT_CHARS_MAX} are taken",
        )


@dataclass(slots=True)
class _Job:
    call: int
    parts: Iterator["array[int]"]
    ids: "array[int]"


class EncodeQueue:
    """The encodes in progress; each gets a piece of work in turn."""

    def __init__(self, core: TokenizerCore) -> None:
        self._core = core
        self._jobs: deque[_Job] = deque()

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, request: Encode) -> None:
        """A call that is in progress already is the same command repeated, and not done twice."""
        if all(job.call != request.call for job in self._jobs):
            self._jobs.append(_Job(request.call, self._core.encode(request), array("i")))

    def forget(self) -> None:
        """Drops everything: whoever asked is gone, and its successor counts calls anew."""
        self._jobs.clear()

    def work(self) -> Encoded | EncodeFailed | None:
        """Does one piece of the next job; returns the job's answer if that ended it."""
        job = self._jobs.popleft()
        try:
            part = next(job.parts, None)
        except Refused as refused:
            return EncodeFailed(job.call, refused.code, refused.text)
        except BaseException as error:  # noqa: BLE001
            # A panic of the library is no Exception. Let through, it would end this process, and the
            # repeated call the next one: one prompt would bring the node down.
            return EncodeFailed(job.call, Code.INTERNAL, f"the tokenizer failed: {error!r}")
        if part is None:
            return Encoded(job.call, job.ids.tobytes())
        job.ids.extend(part)
        self._jobs.append(job)
        return None
