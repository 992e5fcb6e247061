"""Streams of an earlier gateway: taken over from whoever runs them, or made again. Pure.

A scheduler that lives tells what it runs (`ListSequences`), and those streams are adopted. The token log
says who was given each of them: nobody waits for a scheduler that is gone, or one that lost the worker
it had then. Without a log everybody waits until all have told, or for `RECOVER_NS`. What no scheduler runs
is made anew: the same tokens, by construction; but not with other numerics than it had.
"""

from collections.abc import Iterator, Mapping

import msgspec

from phalanx.protocol.errors import Code
from phalanx.protocol.messages import Final
from phalanx.services.gateway.entries import Placed, Recovered
from phalanx.services.gateway.requests import Request
from phalanx.services.gateway.seats import Seats
from phalanx.services.gateway.streams import End, Stream
from phalanx.services.gateway.texts import Texts

MS = 1_000_000
RECOVER_NS = 3_000 * MS


class Recovery:
    def __init__(self, seats: Seats, texts: Texts, model: str, now_ns: int) -> None:
        self._seats, self._texts, self._model = seats, texts, model
        self._until_ns = now_ns + RECOVER_NS
        self._streams: dict[int, Stream] = {}
        self._news = True  # something came that may tell of some

    def __bool__(self) -> bool:
        return bool(self._streams)

    def __contains__(self, stream: Stream) -> bool:
        return stream.number in self._streams

    def add(self, stream: Stream) -> None:
        self._streams[stream.number] = stream
        self._news = True

    def discard(self, stream: Stream) -> None:
        self._streams.pop(stream.number, None)

    def heard(self) -> None:
        """A scheduler has told what it runs, or the topology has changed."""
        self._news = True

    def free(self, fingerprint: str, now_ns: int) -> Iterator[tuple[Stream, End | None]]:
        """Those that no scheduler runs: each to be placed, or to end as this node cannot go on with it."""
        over = now_ns >= self._until_ns or self._seats.all_told()
        if not self or not (self._news or over):
            return
        self._news = False
        for stream in list(self._streams.values()):
            if not over and (stream.placed is None or self._seats.may_have(stream.placed)):
                continue
            told, model = stream.entry.fingerprint, stream.entry.model
            if told and not fingerprint:
                continue  # nothing runs yet that could tell whether the tokens would be the same
            self.discard(stream)
            if told in ("", fingerprint) and model == self._model:
                yield stream, None
            else:
                text = (
                    f"accepted by the model {model!r} with numerics {told!r}, the node now runs"
                    f" {self._model!r} with {fingerprint!r}: the rest of the stream would not fit its"
                    " beginning; send the request again"
                )
                yield stream, End("error", Code.INTERNAL, text)

    # --- what has ended ---

    def revive(self, request: Request) -> None:
        """Produce again what a reader still wants of sequences that ended in an earlier life."""
        for stream in request.streams:
            final = stream.final
            if final is None or not request.missed(stream):
                continue
            if stream.logged is not None:
                self._tell_from_log(request, stream, final)
                continue
            stream.recorded, stream.final = final, None
            stream.unshow()
            stream.sampling = msgspec.structs.replace(stream.sampling, max_tokens=final.offset)
            if stream.scored and len(stream.tokens) >= final.offset > 0:
                self._texts.decode(stream)  # the token log had all of it
            else:
                # Nobody runs it, but the numerics may be others than it had.
                stream.placed = _nowhere(stream)
                self.add(stream)

    def _tell_from_log(self, request: Request, stream: Stream, final: Final) -> None:
        """Nothing is made again here: the text of the tokens in the log is."""
        if len(stream.tokens) < final.offset:
            missing = f"{len(stream.tokens)} of its {final.offset} tokens"
        elif len(stream.shown) >= final.offset:
            wanted = stream.entry.prompt_tokens - 1
            missing = f"{stream.num_scores} of the {wanted} log-probabilities of its prompt"
        else:
            stream.recorded, stream.final = final, None
            self._texts.decode(stream)
            return
        text = f"the log has {missing}: they cannot be told again"
        view = request.view
        assert view is not None
        end = End("error", Code.INTERNAL, text)
        view.ends[stream.index] = stream.final_of(end, view.cursors[stream.index])


def recall(request: Request, one: Recovered, logged: bool) -> None:
    """Give the streams of a request what the last gateway left of it.

    Args:
        logged: its tokens are in the journal, as they could not be made again the same.
    """
    for fell in one.falls:
        request.streams[fell.index].fell_before(fell)
    for stream in request.streams:
        stream.final = one.finals.get(stream.index)
        scored = one.scored if stream.index == 0 else ()
        if logged:
            stream.recover(one.produced, scored)
            stream.end_logged = stream.final is not None
        else:
            stream.recall(one.produced, scored)
            if one.placed is not None:
                stream.placed = one.placed.get(stream.index, _nowhere(stream))


def recall_ends(request: Request, finals: Mapping[int, Final], logged: bool) -> None:
    """Of what the last gateway left of it nothing but how its sequences ended."""
    for stream in request.streams:
        stream.final = finals.get(stream.index)
        if logged:
            stream.logged, stream.end_logged = 0, stream.final is not None


def _nowhere(stream: Stream) -> Placed:
    return Placed(stream.request_id, stream.index, -1, 0, 0)
