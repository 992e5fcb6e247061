"""What a reply is told, and when: the scores of its prompt come before all else, whichever sequence is first."""

from phalanx.protocol.messages import Delta, Final, PromptLogprob, TokenLogprobs, Usage
from phalanx.services.http.completions import CompletionsReply, Words
from phalanx.services.http.replies import Started
from phalanx.services.http.running import Telling

WORDS = Words(lambda token: f"<{token}>", lambda ids: "", lambda text: [])
SCORE = TokenLogprobs(-1.0, (), ())
Event = Delta | Final


def final(index: int) -> Final:
    return Final("r", index, 1, "length", Usage(2, 1, 0))


def told(batches: list[list[Event]]) -> list[dict[str, object]]:
    """The choices of a reply to two sequences of a scored prompt, whose scores come with sequence 0."""
    reply = CompletionsReply("m", 2, ["<8><9>"], [[8, 9]], False, WORDS, True)
    reply.begin([Started("r", 2)])
    come = False
    telling = Telling(reply, lambda _: (None, PromptLogprob(-2.0, 1, (), ())) if come else None)
    for batch in batches:
        come |= any(event.index == 0 for event in batch)
        telling.take(0, batch)
    return list(reply.document()["choices"])


def test_an_echo_with_log_probabilities_waits_for_those_of_the_prompt() -> None:
    """Where another sequence than the first was faster, the echo of all of them was missing."""
    ones: list[list[Event]] = [
        [Delta("r", index, 0, (5 + index,), f"<{5 + index}>", (SCORE,))] for index in range(2)
    ]
    choices = told([*ones, [final(0)], [final(1)]])
    assert [choice["text"] for choice in choices] == ["<8><9><5>", "<8><9><6>"]
    assert choices[1]["logprobs"] == {
        "tokens": ["<8>", "<9>", "<6>"],
        "token_logprobs": [None, -2.0, -1.0],
        "top_logprobs": [None, {}, {}],
        "text_offset": [0, 3, 6],
    }
    assert told([ones[1], [final(1)], ones[0], [final(0)]]) == choices
    assert told([ones[1], ones[0], [final(1), final(0)]]) == choices
