"""Tokens and text for HTTP: what completions spell, `/tokenize` and `/detokenize`."""

import asyncio
from array import array
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from phalanx.protocol.messages import Encode, Span
from phalanx.services.http import recipe
from phalanx.services.http.completions import Words
from phalanx.services.http.errors import bad
from phalanx.services.tokenizer.core import TokenizerCore, load_limits, load_tokenizer

_SPELLINGS_MAX = 1 << 18


class Tokens:
    """The model's tokenizer, as the node's own tokenizers use it."""

    def __init__(self, model_dir: Path | None) -> None:
        self.tokenizer = load_tokenizer(model_dir)
        self._core = TokenizerCore(self.tokenizer, load_limits(model_dir))

        @lru_cache(_SPELLINGS_MAX)
        def spell(token: int) -> str:
            return self.tokenizer.decode([token], skip_special_tokens=False)

        self.words = Words(spell, self._text, lambda text: self._encode(Encode(0, text)).tolist())

    def _text(self, ids: Sequence[int]) -> str:
        try:
            return self.tokenizer.decode(list(ids), skip_special_tokens=False)
        except OverflowError as error:
            raise bad("a token id is negative or too large") from error

    async def encode_spans(self, spans: Any) -> "array[int]":
        """In a thread: a long prompt must not stop every stream."""
        return await asyncio.to_thread(self._encode, Encode(0, spans=tuple(spans)))

    def _encode(self, request: Encode) -> "array[int]":
        ids = array("i")
        for part in self._core.encode(request):
            ids.extend(part)
        return ids

    async def tokenize(self, body: dict[str, Any], model: recipe.Model) -> dict[str, Any]:
        """Of `prompt` or of `messages`. Raises PhalanxError."""
        if isinstance(prompt := body.get("prompt"), str):
            ids = await asyncio.to_thread(self._encode, Encode(0, prompt))
        elif body.get("messages"):
            asked = recipe.ask(recipe.CHAT, body, model)
            ids = await self.encode_spans(cast(tuple[Span, ...], asked.specs[0].prompt))
        else:
            raise bad("send prompt or messages", "prompt")
        return {"tokens": ids.tolist(), "count": len(ids), "max_model_len": model.max_positions}

    async def detokenize(self, body: dict[str, Any]) -> dict[str, Any]:
        tokens = body.get("tokens")
        if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
            raise bad("tokens must be a list of token ids", "tokens")
        return {"prompt": await asyncio.to_thread(self._text, tokens)}
