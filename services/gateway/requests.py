"""Accepted requests and who reads them: what each reader gets next, from where it is. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from phalanx.protocol.messages import Delta, Final, PromptLogprobs
from phalanx.services.early_ends import told_at
from phalanx.services.gateway.entries import Entry
from phalanx.services.gateway.streams import End, Stream

DELTA_TOKENS_MAX = 8192  # of a stream that is caught up with; keeps single messages small
TOKEN_BYTES = 40  # about what a token of a stream takes in memory
LOGPROB_BYTES, ALTERNATIVE_BYTES = 90, 76  # and its log-probability, with each likely token told


@dataclass(slots=True)
class View:
    """Who reads a request, and how far each stream was handed over."""

    client: bytes
    cursors: list[int]
    finals: list[bool]
    proofs: dict[int, bytes]  # digests of what the reader has, by index, that are not yet compared
    # By index: the end for this reader alone, of a stream that does not continue what it has.
    ends: dict[int, Final] = field(default_factory=dict)
    prompt_cursor: int = 0  # prompt tokens whose log-probabilities were handed over
    # Who read it until this one came, and has not got all.
    before: "View | None" = None


class Request:
    """An accepted request."""

    def __init__(self, entry: Entry, first_number: int) -> None:
        self.entry = entry
        self.streams = [Stream(entry, i, first_number + i) for i in range(entry.n)]
        self.view: View | None = None
        self.held = False  # an abort is not durable yet: nothing more is told before it is
        self.finished_ns: int | None = None
        self.delivered_ns: int | None = None  # the last time that a reader got all of it
        self.kept_tokens = 0  # how it counts among the finished requests kept in memory

    @property
    def request_id(self) -> str:
        return self.entry.request_id

    @property
    def finished(self) -> bool:
        return all(stream.final is not None for stream in self.streams)

    @property
    def ended(self) -> bool:
        """Finished once, even if it is just made again for a reader."""
        return all(stream.final is not None or stream.recorded for stream in self.streams)

    @property
    def num_tokens(self) -> int:
        """Tokens in memory, without the prompt; log-probabilities, of both, by what they take."""
        each = LOGPROB_BYTES + ALTERNATIVE_BYTES * (self.entry.sampling.logprobs or 0)
        nbytes = sum(len(one.scores) + each * len(one.logprobs) for one in self.streams)
        return sum(len(one.tokens) for one in self.streams) + nbytes // TOKEN_BYTES

    @property
    def unread(self) -> bool:
        """Nobody is in the middle of reading it, nor was."""
        return self.finished and not self.being_read

    @property
    def being_read(self) -> bool:
        return self.view is not None and not all(self.view.finals)

    def attach(
        self,
        client: bytes,
        offsets: Sequence[int],
        digests: Sequence[bytes] = (),
        prompt_offset: int = 0,
    ) -> None:
        """Hand the streams to `client`, each from its offset on, once its digest is found right."""
        n = self.entry.n
        cursors = [*offsets, *([0] * (n - len(offsets)))]
        for stream, cursor in zip(self.streams, cursors, strict=True):
            stream.sent = max(stream.sent, cursor)
        proofs = {index: digest for index, digest in enumerate(digests) if digest}
        before = self.view
        if before is not None and before.client == client:
            before = before.before
        elif before is not None:
            before.before = None
            before = None if all(before.finals) else before
        self.view = View(client, cursors, [False] * n, proofs, {}, prompt_offset, before)

    def give_back(self) -> None:
        """The reader is gone: a late word of it, which came after that of its heir, had taken this from the heir."""
        if self.view is not None and self.view.before is not None:
            self.view = self.view.before

    def strangers(self) -> list[Stream]:
        """Compare what the reader has, where that has become possible; the streams that are not its."""
        view = self.view
        found: list[Stream] = []
        if view is None or not view.proofs:
            return found
        for index, proof in list(view.proofs.items()):
            stream = self.streams[index]
            same = stream.continues(view.cursors[index], proof)
            if same is not None:
                del view.proofs[index]
                found += [] if same else [stream]
        return found

    def missed(self, stream: Stream) -> bool:
        """Its reader wants something of this ended stream that is not in memory (any more)."""
        assert self.view is not None
        if stream.final is None or not stream.hollow:
            return False
        wants_prompt = not stream.scored and self.view.prompt_cursor < self.entry.prompt_tokens
        return wants_prompt or self.view.cursors[stream.index] < stream.final.offset

    def end_what_is_missed(self, end: End) -> None:
        """For this reader; it is not made again."""
        view = self.view
        assert view is not None
        for stream in filter(self.missed, self.streams):
            view.ends[stream.index] = stream.final_of(end, view.cursors[stream.index])
            view.proofs.pop(stream.index, None)

    def next_message(self) -> PromptLogprobs | Delta | Final | None:
        """What the reader gets next; call `handed_over` with it once it is under way."""
        view = self.view
        if view is None or self.held:
            return None
        for stream, cursor, told in zip(self.streams, view.cursors, view.finals, strict=True):
            final = view.ends.get(stream.index, stream.final)
            compared = stream.index not in view.proofs
            if told or not compared or (final is None and not self.entry.stream):
                continue
            if (scores := stream.prompt_message(view.prompt_cursor)) is not None:
                return scores
            own = stream.index not in view.ends
            if own and not self.entry.stream and not stream.end_told:
                continue
            most = DELTA_TOKENS_MAX if self.entry.stream else len(stream.shown)
            if final is None or (cursor < final.offset):
                if (delta := stream.delta(cursor, most)) is not None:
                    return delta
            elif stream.end_told or not own:
                return told_at(final, cursor)
        return None

    def handed_over(self, message: PromptLogprobs | Delta | Final) -> None:
        view, stream = self.view, self.streams[message.index]
        assert view is not None
        if isinstance(message, Final):
            view.finals[message.index] = True
        elif isinstance(message, PromptLogprobs):
            view.prompt_cursor = message.offset + len(message.entries)
        else:
            end = message.offset + len(message.token_ids)
            view.cursors[message.index] = end
            stream.sent = max(stream.sent, end)
