"""Chat messages to a rendered prompt, in DeepSeek's own prompt encoding for V4.1."""

from collections.abc import Sequence

from phalanx.protocol.errors import Code, Refused
from phalanx.protocol.messages import ChatMessage, Span
from phalanx.services.template import RECIPE_MODEL, split


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
