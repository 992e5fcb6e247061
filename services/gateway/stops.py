"""Finds stop strings in a stream of token texts. Pure: the answer depends on the stream, never on its cuts.

Reading the text of a stream character by character, the stop string that completes first wins; of
two that complete with the same character, the longer. The stream then ends with the token that holds
that character: tokens, usage and logprobs go up to it, and the shown text is cut before the stop
string (or behind it with `include_stop`). Until then, text that may turn out to be the beginning of a
stop string is held back, and nothing else is.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shown:
    """What one call releases."""

    text: str  # may be shown now, follows everything released before
    num_tokens: int  # tokens of this call that belong to the stream; fewer than given after a stop
    stop: str | None  # the stop string that ended the stream


class StopScanner:
    """Scans one stream. Feed every token's text in order, once; `finish` when the stream ends by itself.

    Args:
        stops: Stop strings, none empty.
        include_stop: Whether the shown text keeps the stop string.
        min_tokens: A stop string that completes within fewer tokens than this is ordinary text.
    """

    def __init__(
        self, stops: Sequence[str], *, include_stop: bool = False, min_tokens: int = 0
    ) -> None:
        if not all(stops):
            raise ValueError(
                "a stop string is empty: it would end every stream at once; leave it out"
            )
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        # The longest end of the text so far that may still become a stop string.
        self._lookback = ""
        self.num_tokens = 0  # tokens of the stream so far
        self.stop: str | None = None

    def feed(self, texts: Sequence[str]) -> Shown:
        """Takes the texts of the next tokens, one a token ("" for a token that shows nothing yet)."""
        if not self._stops:
            self.num_tokens += len(texts)
            return Shown("".join(texts), len(texts), None)
        before, released = self.num_tokens, []
        for text in texts:
            if self.stop is not None:
                break
            self.num_tokens += 1
            if text:
                released.append(self._advance(text))
        return Shown("".join(released), self.num_tokens - before, self.stop)

    def finish(self, tail: str = "") -> Shown:
        """Ends the stream: `tail` is text the last token still owed. Nothing is held back any more."""
        if self.stop is not None:
            return Shown("", 0, self.stop)
        released = self._advance(tail) if tail else ""
        if self.stop is None and not self._include_stop:
            released += self._lookback
        self._lookback = ""
        return Shown(released, 0, self.stop)

    def _advance(self, text: str) -> str:
        """Adds text of the current token; returns what may be shown."""
        seen = len(self._lookback)
        recent = self._lookback + text
        match = self._first_match(recent, seen) if self.num_tokens >= self._min_tokens else None
        if match is not None:
            end, start = match
            self.stop, self._lookback = recent[start:end], ""
            # With include_stop the lookback has been shown already.
            return recent[seen:end] if self._include_stop else recent[:start]
        keep = self._first_beginning(recent)
        self._lookback = recent[keep:]
        return text if self._include_stop else recent[:keep]

    def _first_match(self, recent: str, seen: int) -> tuple[int, int] | None:
        """(end, start) of the stop string that completes first after `recent[:seen]`."""
        found: list[tuple[int, int]] = []
        for stop in self._stops:
            # One that ends within `seen` was judged when it came: min_tokens made it ordinary text.
            start = recent.find(stop, max(0, seen - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start))
        return min(found, default=None)

    def _first_beginning(self, recent: str) -> int:
        """Where the longest end of `recent` starts that is a proper beginning of a stop string."""
        first = len(recent)
        for stop in self._stops:
            start = recent.find(stop[0], max(0, len(recent) - len(stop) + 1), first)
            while start >= 0:
                if stop.startswith(recent[start:]):
                    first = start
                    break
                start = recent.find(stop[0], start + 1, first)
        return first
