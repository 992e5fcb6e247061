"""Chat messages to prompt text, by `deepseek-recipe`: DeepSeek's own prompt encoding for V4.1.

Only the template's tokens are special. What a user writes stays text, even when it spells
`<｜Assistant｜>`: otherwise anyone could end their own turn and speak for the model.
"""

from collections.abc import Sequence

from phalanx.protocol.errors import Code, Refused
from phalanx.protocol.messages import ChatMessage, Span

# The recipe picks the prompt encoding by name and knows only its own; ours is of this family.
RECIPE_MODEL = "DeepSeek-V4.1-Flash"


def render(messages: Sequence[ChatMessage]) -> list[Span]:
    """The prompt that asks for the next turn, in thinking mode as is the recipe's default.

    Raises Refused: `bad_request` for messages the recipe does not take, `internal` when it is absent.
    """
    try:  # imported at the first chat: a node that only sees ids and text need not load it
        from deepseek_recipe import (
            ChatCompletionRequest,
            ConversionError,
            ConversionOptions,
            DeepseekV41Encoding,
        )
    except ImportError as error:
        raise Refused(
            Code.INTERNAL,
            f"chat messages need the package deepseek-recipe, which cannot be imported ({error}):"
            " pip install 'deepseek-recipe>=0.2,<0.3', or send text or token ids",
        ) from error
    body = {
        "model": RECIPE_MODEL,
        "messages": [{"role": message.role, "content": message.content} for message in messages],
    }
    try:
        conversation = ChatCompletionRequest(body).convert(ConversionOptions()).conversation
    except (ConversionError, ValueError) as error:
        raise Refused(Code.BAD_REQUEST, f"messages: {error}") from error
    rendered = DeepseekV41Encoding().render_conversation(conversation)
    return split(rendered.prompt, rendered.special_ranges)


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
