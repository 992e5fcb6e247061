"""How one sequence comes to its end."""

from array import array
from types import SimpleNamespace
from typing import cast

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from phalanx.protocol.errors import Code
from phalanx.protocol.messages import DecodedItem, Sampling
from phalanx.scheduler_svc.state import Sequence
from phalanx.scheduler_svc.stops import finished_already
from phalanx.services.gateway.entries import Entry
from phalanx.services.gateway.streams import End, Stream

EOS = 1


def stream(sampling: Sampling, *tokens: int) -> Stream:
    prompt = array("i", [5]).tobytes()
    made = Stream(Entry("r" * 32, prompt, sampling, 1, True, "k", b"", "tiny", "f1"), 0, 1)
    made.extend(0, tokens)
    return made


@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    min_tokens=st.integers(0, 4),
    room=st.integers(0, 2),
    stop_token_ids=st.sets(st.integers(0, 3)).map(tuple),
    ignore_eos=st.booleans(),
)
def test_an_end_that_tokens_tell_is_what_the_scheduler_says(
    tokens: list[int],
    min_tokens: int,
    room: int,
    stop_token_ids: tuple[int, ...],
    ignore_eos: bool,
) -> None:
    """A restarted gateway may conclude it from the last token alone; the scheduler's word may have come before."""
    sampling = Sampling(
        seed=1,
        max_tokens=len(tokens) + room,
        min_tokens=min_tokens,
        stop_token_ids=stop_token_ids,
        ignore_eos=ignore_eos,
    )
    there = SimpleNamespace(
        outputs=lambda: np.array(tokens, np.int32),
        sampling=sampling,
        max_outputs=sampling.max_tokens,
    )
    end = stream(sampling, *tokens).implied_end(EOS)
    assert (end and end.reason) == finished_already(cast(Sequence, there), EOS)


def test_a_stop_string_in_what_an_early_end_still_owed_does_not_hide_it() -> None:
    """Left alone, the token after it would have completed that text."""
    sampling = Sampling(seed=1, max_tokens=9, stop=("I6",))
    for code, told in ((None, "stop"), (Code.KV_PRESSURE, "length")):
        ended = stream(sampling, 7)
        ended.end = End("length", code, "the pool is full" if code else "")
        ended.show(DecodedItem(1, ("",), "I60", b""), flush=True)
        assert ended.final is not None
        assert (ended.final.finish_reason, ended.final.code) == (told, code)
        assert (ended.final.offset, ended.final.text) == (1, "")
