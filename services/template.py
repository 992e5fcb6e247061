"""The prompt encoding of DeepSeek V4.1, by `deepseek-recipe`: what it is asked as, and its result in spans.

Only the template's tokens are special. What a user writes stays text, even when it spells
`<｜Assistant｜>`: otherwise anyone could end their own turn and speak for the model.
"""

from collections.abc import Sequence

from phalanx.protocol.messages import Span

# The recipe picks the prompt encoding by name and knows only its own; ours is of this family.
RECIPE_MODEL = "DeepSeek-V4.1-Flash"


def split(prompt: str, special_ranges: Sequence[tuple[int, int]]) -> list[Span]:
    """Cuts a prompt at its special tokens; the ranges are ascending and disjoint, in characters."""
    spans: list[Span] = []
    at = 0
    for start, end in special_ranges:
        if start > at:
            spans.append(Span(prompt[at:start], special=False))
        spans.append(Span(prompt[start:end], special=True))
        at = end
    if at < len(prompt):
        spans.append(Span(prompt[at:], special=False))
    return spans
