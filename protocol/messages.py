"""Every message that crosses a process boundary, in the order a request meets them.

Frozen, plain, small; bulk data stays in shared memory and a `Handle` names it. On the wire each is
a MessagePack map whose `type` field names the struct (`docs/protocol.md`). Three kinds, three rules:

* Commands carry a `call` id and are repeated until answered; an answer carries the same `call`. A
  receiver treats a repeated command as the same command.
* Token messages are fenced by the producer's (seat, incarnation) and the request's `attempt`, and
  ordered by (request_id, index, offset): a gap asks for a resend, a duplicate is dropped.
* Step traffic (`steps.py`) goes through rings and is fenced by the epoch.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec

from phalanx.protocol.arena import Handle
from phalanx.protocol.errors import Code

PROTOCOL_VERSION = 1

FinishReason = Literal["stop", "length", "abort", "error"]
Call = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]  # as a client may choose it


class Message(msgspec.Struct, frozen=True, tag_field="type", tag=True, omit_defaults=True):
    """Base of all messages; subclasses are tagged with their class name."""


# ---------------------------------------------------------------- sampling


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """How one request's tokens are chosen and when it ends. Limits: `services/gateway/validate.py`."""

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # in (0, 1]
    top_k: int = 0  # 0: off
    min_p: float = 0.0  # in [0, 1)
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None  # drawn by the gateway when absent, returned on acceptance
    max_tokens: int | None = None
    clamp_max_tokens: bool = False  # max_tokens is lowered to what fits, in place of a refusal
    min_tokens: int = 0  # no end token, stop id or stop string counts before this many outputs
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    first_n_token_no_eos: int = 0  # the end token is banned for this many first outputs
    logit_bias: dict[int, float] = {}
    blocked_token_ids: tuple[int, ...] = ()  # never chosen
    logprobs: int | None = None  # None: none; k: of the chosen token and of the k likeliest
    raw_logprobs: bool = False  # those of the model's own logits, before anything above
    # None: none; k: of the prompt's tokens and of the k likeliest.
    prompt_logprobs: int | None = None
    predicted_token_ids: tuple[int, ...] = ()  # the outputs the client expects: drafts, by index
    forced_token_ids: tuple[int, ...] = ()  # the first outputs are these, whatever would be sampled


# ---------------------------------------------------------------- client <-> gateway


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    role: str
    content: str


class Span(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A stretch of a rendered prompt: plain text, or the spelling of exactly one special token."""

    text: str
    special: bool = False


class Generate(Message, frozen=True):
    """Start a request. Exactly one of `prompt`, `prompt_token_ids`, `messages`, `spans`."""

    call: Call
    prompt: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    messages: tuple[ChatMessage, ...] | None = None
    spans: tuple[Span, ...] | None = None
    sampling: Sampling = Sampling()
    n: int = 1  # sequences with seeds derived from (seed, index); a Final each
    stream: bool = True  # False: one Delta with everything, just before each Final
    model: str = ""
    key: str = ""  # idempotency: the same key within the journal's memory is the same request
    v: int = PROTOCOL_VERSION


class Accepted(Message, frozen=True):
    """The request is journalled: from here on it ends with exactly one Final for each index."""

    call: int
    request_id: str  # 32 hex digits, chosen by the gateway
    seed: int
    prompt_tokens: int
    n: int
    prompt_logprobs: bool = False  # those of the prompt come, and all of them before any token


class Error(Message, frozen=True):
    """The call was refused; nothing else happened."""

    call: int
    code: Code
    message: str
    retry_after_ms: int = 0


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class PromptLogprob(msgspec.Struct, frozen=True, array_like=True):
    """What the model thinks of one prompt token, by its own logits: unprocessed, at temperature 1."""

    logprob: float
    rank: int  # of this token among all, from 1
    top_ids: tuple[int, ...] = ()  # likeliest first; among equals the lower id
    top_logprobs: tuple[float, ...] = ()


class PromptLogprobs(Message, frozen=True):
    """Of prompt tokens `offset .. offset + len(entries)`; None for the first one, which follows nothing.

    They belong to the request: sent with index 0 alone, in order, before its first Delta.
    """

    request_id: str
    index: int
    offset: int
    entries: tuple[PromptLogprob | None, ...]


class Delta(Message, frozen=True):
    """Tokens `offset .. offset + len(token_ids)` of sequence `index`, with the text they release."""

    request_id: str
    index: int
    offset: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


class Final(Message, frozen=True):
    """The last message of sequence `index`; `offset` equals the number of its tokens."""

    request_id: str
    index: int
    offset: int
    finish_reason: FinishReason
    usage: Usage
    text: str = ""  # what the end of the stream releases (a held-back tail)
    code: Code | None = None  # with "error" and "abort": why
    error: str = ""
    digest: bytes = b""  # of its tokens (`digests.py`); empty when they were not all at hand


class Abort(Message, frozen=True):
    """End every sequence of the request with reason `abort`. Answer: Done or Error."""

    call: Call
    request_id: str


class Attach(Message, frozen=True):
    """Take over the request's streams, each from its token offset (absent: 0), and its prompt
    log-probabilities from that prompt token on. Answer: Accepted.

    Repeat it whenever nothing was heard for a while: it is harmless. A stream whose beginning has
    another digest than the client's is not continued: it ends with the code `stream_changed`.
    """

    call: Call
    request_id: str
    offsets: tuple[int, ...] = ()
    digests: tuple[bytes, ...] = ()  # of the tokens before each offset; empty: not compared
    prompt_offset: int = 0


class Replay(Message, frozen=True):
    """Run a request that has ended again and compare. Answer, when that is done: Replayed or Error."""

    call: Call
    request_id: str  # or the beginning of it, if only one begins so
    seat: int = -1  # the rank that shall run it; -1: any


class Difference(msgspec.Struct, frozen=True):
    """Where a second run of a sequence departs from what was delivered."""

    at: int  # index of the output, or of the prompt's token; the number of outputs for a digest
    what: Literal["token", "logprobs", "prompt_logprobs", "length", "digest", "error"]
    delivered: str
    replayed: str


class ReplayedSequence(msgspec.Struct, frozen=True):
    index: int
    tokens: int  # of the outputs delivered: so many were made again, and compared
    compared: Literal["tokens", "digest"]  # digest: the tokens themselves are no longer kept
    logprobs: int  # outputs whose log-probabilities were compared as well
    seat: int  # that ran it, at last
    difference: Difference | None = None
    # Why this run ended before all was made again (scheduler.preempt: stop); empty: it did not.
    ended_early: str = ""
    prompt_logprobs: int = 0  # tokens of the prompt whose log-probabilities were compared as well


class Replayed(Message, frozen=True):
    call: int
    request_id: str
    equal: bool
    sequences: tuple[ReplayedSequence, ...]
    fingerprint: str  # of the numerics now
    fingerprint_then: str  # and of those that the request was accepted under


class Stats(Message, frozen=True):
    call: Call


class StatsReply(Message, frozen=True):
    call: int
    gateway_incarnation: int
    open_requests: int
    accepted: int
    refused: int
    finished: dict[str, int]  # sequences by finish reason
    seats: tuple["SeatLoad", ...]
    # Sequences accepted here or taken over unfinished: those that finished, and those that are open.
    sequences: int = 0
    open_sequences: int = 0
    # Answers of services to what no longer matters, dropped: an earlier gateway asked, or another one answered first.
    stale_answers: int = 0


class Health(Message, frozen=True):
    call: Call
    quiet: tuple[str, ...] = ()  # requests of which the client has heard nothing for a while


class HealthReply(Message, frozen=True):
    call: int
    healthy: bool
    gateway_life: int  # another one is another gateway, also of the next node
    epoch: int
    model: str
    reasons: tuple[str, ...] = ()  # why not, naming the process
    ended: tuple[str, ...] = ()  # those quiet ones of which nothing more will come: all was sent


class Done(Message, frozen=True):
    """A command was carried out."""

    call: int


ClientMessage = Generate | Abort | Attach | Replay | Stats | Health
ClientReply = (
    Accepted | Error | PromptLogprobs | Delta | Final | Replayed | StatsReply | HealthReply | Done
)

# ---------------------------------------------------------------- gateway <-> its services (the bus)


class Hello(Message, frozen=True):
    """A service introduces itself on the bus; repeated until Welcome, and when the gateway changed."""

    name: str
    kind: Literal["tokenizer", "scheduler"]
    incarnation: int
    seat: int = -1


class Welcome(Message, frozen=True):
    gateway_incarnation: int


class Ping(Message, frozen=True):
    """A service asks whether the gateway is still the one it knows; answer: Welcome."""

    name: str


class Encode(Message, frozen=True):
    """Text, chat messages or spans to ids. Stateless: any tokenizer may answer, and answer again."""

    call: int
    prompt: str | None = None
    messages: tuple[ChatMessage, ...] | None = None
    spans: tuple[Span, ...] | None = None


class Encoded(Message, frozen=True):
    call: int
    token_ids: bytes  # int32, little endian


class EncodeFailed(Message, frozen=True):
    call: int
    code: Code
    message: str


class DecodeItem(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one stream. `carry` is what the last answer said (empty at the start)."""

    stream: int  # chosen by the gateway, echoed
    token_ids: tuple[int, ...]
    carry: bytes
    flush: bool = False  # the stream ends here: release what is held back


class Decode(Message, frozen=True):
    call: int
    items: tuple[DecodeItem, ...]


class DecodedItem(msgspec.Struct, frozen=True, array_like=True):
    """`pieces[i]` is the text that token i releases: the same however the stream is cut into calls."""

    stream: int
    pieces: tuple[str, ...]
    tail: str  # only with flush
    carry: bytes


class Decoded(Message, frozen=True):
    call: int
    items: tuple[DecodedItem, ...]


class Submit(Message, frozen=True):
    """One sequence for a scheduler. `outputs` are its tokens that were produced elsewhere.

    Repeated until Submitted or Refusal; the same (request_id, index, attempt) is the same sequence.
    `attempt` only tells attempts apart: that a sequence is not new is what `resumed` says.
    """

    call: int
    request_id: str
    index: int
    attempt: int  # grows each time the gateway places the sequence anew
    prompt: bytes  # int32 ids
    sampling: Sampling  # seed derived for this index, max_tokens filled in
    outputs: bytes = b""  # int32 ids
    priority: int = 0  # larger goes first, after those that are resumed
    # Accepted before, by another scheduler or for an earlier gateway: it goes ahead of arrivals, and
    # no full queue refuses it.
    resumed: bool = False
    copies_as: str = ""  # the request whose id chooses among copies of experts; empty: its own
    afresh: bool = (
        False  # all of it is computed: what the KV store has may be what is to be checked
    )
    # Records of its prompt's log-probabilities that the gateway has. Once it has all, `sampling` asks for none.
    num_scores: int = 0


class Submitted(Message, frozen=True):
    call: int
    seat: int
    incarnation: int


class Refusal(Message, frozen=True):
    """A scheduler does not take the sequence; the gateway places it elsewhere or ends it."""

    call: int
    code: Code
    message: str


class AbortSequence(Message, frozen=True):
    """Repeated until Done. The scheduler answers Done also for a sequence it does not know."""

    call: int
    request_id: str
    index: int
    attempt: int
    reason: FinishReason = "abort"  # "stop": the gateway found a stop string


class TokensItem(msgspec.Struct, frozen=True, array_like=True):
    request_id: str
    index: int
    attempt: int
    offset: int  # of the first token among the outputs
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    code: Code | None = None
    error: str = ""
    cached_tokens: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    handle: int = 0  # names the sequence in TokenRows from now on; 0: none is given
    # Records of `prompt_logprobs.py`, without a gap from the first on before any token is sent.
    prompt_offset: int = 0  # how many came before these
    prompt_logprobs: bytes = b""


class TokenRows(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of running sequences whose handle some TokensItem told: one array a field, so that a
    step is a handful of bytes objects whatever the batch. A handle is never used twice within one
    incarnation of a scheduler; who does not know it drops the row and asks for a Resend in its time."""

    handles: bytes = b""  # int64 [rows]
    offsets: bytes = b""  # int32 [rows], of the first token among the outputs
    counts: bytes = b""  # uint8 [rows]
    token_ids: bytes = b""  # int32 [sum(counts)]

    def each(self) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        """(handle, offset, token ids) of every row."""
        tokens, at = memoryview(self.token_ids).cast("i").tolist(), 0
        offsets = memoryview(self.offsets).cast("i")
        for handle, offset, count in zip(
            memoryview(self.handles).cast("q"), offsets, self.counts, strict=True
        ):
            yield handle, offset, tuple(tokens[at : at + count])
            at += count


class Tokens(Message, frozen=True):
    """New tokens of a step: first `rows`, then `items`, for first tokens, ends, logprobs and resends.

    `seq` counts these messages within one incarnation.
    """

    seat: int
    incarnation: int
    seq: int
    items: tuple[TokensItem, ...] = ()
    rows: TokenRows = TokenRows()


class Resend(Message, frozen=True):
    """The gateway misses tokens from `offset` on; the scheduler sends them again in a Tokens."""

    request_id: str
    index: int
    attempt: int
    offset: int
    prompt_offset: int = 0  # records of prompt log-probabilities that it has; the others come, too


class FinalSeen(Message, frozen=True):
    """The gateway has the finals of these (request_id, index, attempt): the scheduler may forget them."""

    sequences: tuple[tuple[str, int, int], ...]


class HandBack(Message, frozen=True):
    """There is room for these (request_id, index, attempt) at another rank. Those that still wait here, holding
    nothing, end with `abort`, which the gateway takes for "place it anew"; what runs goes on.

    Never acknowledged: a sequence that goes on waiting is asked for again.
    """

    sequences: tuple[tuple[str, int, int], ...]


class ListSequences(Message, frozen=True):
    """A new gateway asks what this scheduler runs (finished but unacknowledged ones too). Asked with another call, all
    of it is told again. It asks now and then later on, in case a word was lost: then the names will do."""

    call: int
    outputs: bool = True


class SequenceInfo(msgspec.Struct, frozen=True, array_like=True):
    request_id: str
    index: int
    attempt: int
    outputs: bytes  # int32 ids; empty: not asked for
    finish_reason: FinishReason | None
    first_score: int = (
        0  # records of its prompt's log-probabilities before this one were told elsewhere
    )


class SequenceList(Message, frozen=True):
    """A piece of the answer: `limits.LIST_...` bound it. Nothing follows from any before all are there."""

    call: int
    seat: int
    incarnation: int
    items: tuple[SequenceInfo, ...]
    number: int = 0  # of this piece
    last: bool = True


class SeatLoad(Message, frozen=True):
    """What a scheduler says of itself, on change and while it runs."""

    seat: int
    incarnation: int
    accepting: bool  # its worker is a member of the group and answers
    waiting: int = 0
    running: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    free_slots: int = 0
    total_slots: int = 0
    worker_incarnation: int = 0  # the worker it serves; 0: does not say
    # What could start at once beside all that is here, with the pool no fuller than new sequences find it.
    room_blocks: int = 0
    room_sequences: int = 0
    # The same with the pool as full as it may be, for sequences that say how many blocks they need in the end:
    # blocks that nobody here will ever need, however far all of them go on.
    spare_blocks: int = 0
    # The first of those that wait because there is no room: (request_id, index, attempt).
    stuck: tuple[tuple[str, int, int], ...] = ()


BusToGateway = (
    Hello
    | Ping
    | Encoded
    | EncodeFailed
    | Decoded
    | Submitted
    | Refusal
    | Done
    | Tokens
    | SequenceList
    | SeatLoad
)
BusFromGateway = (
    Welcome
    | Encode
    | Decode
    | Submit
    | AbortSequence
    | Resend
    | FinalSeen
    | HandBack
    | ListSequences
)

# ---------------------------------------------------------------- scheduler / worker <-> kvstore


class Put(Message, frozen=True):
    """Store one record, copied from the handle. Answer: PutDone. The handle is free after that.

    The sender waits until `deadline_ns` and then reuses the memory: a copy that is not finished by
    then is thrown away (stored: false).
    """

    call: int
    key: bytes
    kind: Literal["block", "state"]
    handle: Handle
    ack: Literal["memory", "disk"] = "memory"
    ttl_s: int = 0  # 0: the default class
    deadline_ns: int = 0  # CLOCK_MONOTONIC, looked at after the copy; 0: none
    begun_ns: int = 0  # CLOCK_MONOTONIC: when what was computed was begun; 0: unknown


class PutDone(Message, frozen=True):
    call: int
    stored: bool
    durable: bool  # true only after the data were synced
    reason: str = ""  # why not stored (disk full, stale handle, too large)


class Get(Message, frozen=True):
    """Fill the caller's region with the record's bytes. Answer: GetDone."""

    call: int
    key: bytes
    handle: Handle


class GetDone(Message, frozen=True):
    call: int
    found: bool
    nbytes: int = 0
    reason: str = ""


class Contains(Message, frozen=True):
    """How much of this chain of block keys is stored. Answer: ContainsReply."""

    call: int
    keys: tuple[bytes, ...]


class ContainsReply(Message, frozen=True):
    call: int
    prefix: int  # so many of the keys, from the first on, are stored without a gap
    state: int = 0  # the most of these blocks that end where a window state is stored; 0: none do


class KVStats(Message, frozen=True):
    call: int


class KVClear(Message, frozen=True):
    """Forget every record, on the disk too, and take none from now on whose computation has begun by now: what is to
    be forgotten may be part of it."""

    call: int


class KVCleared(Message, frozen=True):
    call: int
    records: int  # that were there


class KVStatsReply(Message, frozen=True):
    call: int
    records: int
    bytes: int
    hits: int
    misses: int
    corrupt: int
    evicted: int
    caching: bool  # False: disk full or below the floor, puts are declined
    puts: int = 0


KVRequest = Put | Get | Contains | KVStats | KVClear
KVReply = PutDone | GetDone | ContainsReply | KVStatsReply | KVCleared | Error

# ---------------------------------------------------------------- worker -> eplb -> supervisor


class ExpertCounts(Message, frozen=True):
    """Rows per logical expert that this seat's tokens chose, summed over `steps` steps."""

    seat: int
    epoch: int
    steps: int
    layers: int
    experts: int
    counts: bytes  # int64 [layers, experts]


class LayerBalance(msgspec.Struct, frozen=True):
    layer: int
    moe_lb: float  # busiest rank over the mean, predicted for the plan
    bound: float
    copies: int  # physical experts in use
    now: float = 1.0  # the same over the same window with the placement that ran then


class PlanShow(Message, frozen=True):
    call: int


class PlanReply(Message, frozen=True):
    call: int
    layers: tuple[LayerBalance, ...]
    plan_age_s: float | None  # None: no plan yet
    applied: int
    refused: int
    placement: bytes = b""  # msgpack of Placement; empty: no plan yet
    refusal: str = ""  # why the last one that was refused was


class Rebalance(Message, frozen=True):
    """Of the planner: have the running group use this placement. Answer: Rebalanced once every rank runs
    it, or Error. The placement's version is that of the one it starts from, plus one."""

    call: int
    epoch: int  # whose members it is for
    placement: bytes  # msgpack of Placement
    before: float  # busiest rank over the mean, over all layers, with the placement that runs
    after: float  # the same, as predicted
    plan_ms: float  # how long it took to make the plan


class Rebalanced(Message, frozen=True):
    call: int
    version: int  # that the placement got
    moved: int  # experts that were copied


EplbRequest = ExpertCounts | PlanShow
EplbReply = PlanReply | Error

# ---------------------------------------------------------------- supervisor


class Ready(Message, frozen=True):
    """A process is ready to serve. Workers add what the supervisor must know to form a group."""

    name: str
    incarnation: int
    fingerprint: str = ""
    expert_slots: int = 0  # of a layer, that it has room for at most; 0: any number
    note: str = ""  # what people should know of its start


class Progress(Message, frozen=True):
    """Where a start stands, for the live display and `phases` of `up`."""

    name: str
    incarnation: int
    phase: str
    fraction: float = -1.0  # -1: unknown


class Finding(msgspec.Struct, frozen=True):
    """Ranks that computed other bits for the same step than others did."""

    seats: tuple[int, ...]
    incarnations: tuple[int, ...]  # of their workers: one that was started again is another
    against: tuple[
        int, ...
    ]  # ranks that agreed with each other; empty: nobody can tell who is wrong
    request_id: str  # whose steps they were
    at: int  # the first output that differs


class Scrubbed(msgspec.Struct, frozen=True):
    """What the gateway's scrubber has found so far."""

    checked: int = 0  # comparisons
    differed: int = 0
    findings: tuple[Finding, ...] = ()  # of workers that still run


class ScrubReport(Message, frozen=True):
    """For the supervisor, which tells it in `status`; sent on every change."""

    scrubbed: Scrubbed


class ExpertFinding(msgspec.Struct, frozen=True):
    """A routed expert that is wrong somewhere.

    `seats` is one rank: its slot holds other bits than the checkpoint; or two: the first computed a row
    again that the second had computed with the same expert, and got other bits.
    """

    seats: tuple[int, ...]
    incarnations: tuple[int, ...]  # of their workers: one that was started again is another
    layer: int
    expert: int


class ExpertsScrubbed(msgspec.Struct, frozen=True):
    """What the scrubbers of routed experts have found so far."""

    slots: int = 0  # compared with the checkpoint
    rows: int = 0  # computed again
    findings: tuple[ExpertFinding, ...] = ()  # of workers that still run


class ExpertReport(Message, frozen=True):
    """From a worker, for `status`: all that its scrubber knows. Sent again with every news, and every
    HEALTH_REPEAT_MS as long as it has findings."""

    seat: int
    incarnation: int
    scrubbed: ExpertsScrubbed


class Trouble(Message, frozen=True):
    """A process runs but cannot do all that it should: the node's health says so. Repeated every
    HEALTH_REPEAT_MS as long as that is so; empty: it is over."""

    name: str
    incarnation: int
    text: str  # what, where and what to do, for people


class StatusQuery(Message, frozen=True):
    call: int


class HistoryQuery(Message, frozen=True):
    call: int


class HistoryReply(Message, frozen=True):
    call: int
    entries: tuple["HistoryEntry", ...]  # as they began


class ProcessStatus(msgspec.Struct, frozen=True):
    name: str
    pid: int
    state: str
    restarts: int
    last_beat_ms: int
    incarnation: int = 0
    detail: str = ""
    fraction: float = -1.0  # of what `detail` names, while it starts; -1: unknown
    still_ms: int = -1  # since its start last got on; -1: it does not start


class RankStatus(msgspec.Struct, frozen=True):
    slot: int
    state: str
    incarnation: int


class PhaseTime(msgspec.Struct, frozen=True):
    name: str
    process: str
    s: float


class EpochRecord(msgspec.Struct, frozen=True):
    """One change of membership, for `phalanx epochs`."""

    epoch: int
    cause: str
    detected_ms: float  # from the death (its last beat or the death pipe) to the decision
    resumed_ms: float  # from the decision to the even epoch word
    moved_requests: int
    survivors: tuple[int, ...]
    # Parts of resumed_ms: until every member had stopped and the new group was decided; until all were ready.
    stop_ms: float = 0.0
    go_ms: float = 0.0


HistoryKind = Literal["start", "stop", "process", "standby", "group", "change"]


class HistoryEntry(EpochRecord, frozen=True, kw_only=True):
    """One thing that happened to the node, for `phalanx epochs`; of `group` it is a change of membership.

    `epoch` is the one that ran when it began (of `group`: the one that began), `survivors` are the ranks of the
    group then, and `resumed_ms` counts until all was well again; -1: not yet.
    """

    survivors: tuple[int, ...] = ()
    moved_requests: int = 0
    detected_ms: float = 0.0
    resumed_ms: float = -1.0
    kind: HistoryKind
    id: int  # counted within `run`
    run: int = 0  # starts of the supervisor in this run directory, counted
    at: float = 0.0  # when it was noticed; seconds since 1970
    process: str = ""  # of which it tells; empty: of the group, or the node
    incarnation: int = 0
    noticed: str = ""  # by what
    ended: str = ""  # exit code or signal, and last words
    deaths: int = 0  # of its incarnations, until one served
    decided: str = ""
    phases: tuple[PhaseTime, ...] = ()
    outcome: str = ""


class RebalanceRecord(msgspec.Struct, frozen=True):
    """A plan that the planner asked for, for `phalanx eplb history`. -1.0: it did not get so far."""

    version: int  # of its placement
    epoch: int
    outcome: str  # `applied`, or `withdrawn`: the placement before it goes on
    why: str  # it was withdrawn, or ended early; for people
    moved: int  # experts to be copied, over all layers and ranks
    before: float  # predicted balance, see `Rebalance`
    after: float
    plan_ms: float
    copy_ms: float = -1.0  # until every rank had its copies
    flip_ms: float = -1.0  # from then until every rank ran it


class RebalanceTotals(msgspec.Struct, frozen=True):
    """Since the node started."""

    applied: int = 0
    withdrawn: int = 0
    moved: int = 0  # experts copied for those that were applied


class StatusReply(Message, frozen=True):
    call: int
    healthy: bool
    epoch: int
    ranks: tuple[RankStatus, ...]
    processes: tuple[ProcessStatus, ...]
    run_dir: str
    model: str
    ready_s: float = -1.0  # -1: not ready yet
    phases: tuple[PhaseTime, ...] = ()
    epochs: tuple[EpochRecord, ...] = ()
    failed: str = ""  # why the node is going down
    inexact: tuple[str, ...] = ()  # settings outside the promise of equal tokens
    scrubbed: Scrubbed = Scrubbed()
    scrubbed_experts: ExpertsScrubbed = ExpertsScrubbed()
    change: str = ""  # what was asked for and is under way: a scale or a restart
    rebalance: str = ""  # the plan that is being applied, and how far that is
    rebalances: tuple[RebalanceRecord, ...] = ()
    rebalanced: RebalanceTotals = RebalanceTotals()
    reasons: tuple[str, ...] = ()  # what keeps the node from being healthy
    note: str = ""  # what people should know of one that is healthy all the same


class Shutdown(Message, frozen=True):
    """Drain for up to `timeout_s`, then stop. Answer: ShutdownDone when everything is gone."""

    call: int
    timeout_s: float


class ShutdownDone(Message, frozen=True):
    call: int
    left: tuple[str, ...]  # what had to be killed or swept


class Inject(Message, frozen=True):
    """Break something on purpose (`supervisor/inject.py` has the kinds). Answer: Injected or Error."""

    call: int
    kind: str
    target: str  # a process name, a prefix of names, random:PREFIX for one of them, or `all`
    # How long it lasts (0: for ever); of `slow`, `delay` and a sleep: how much at a time.
    ms: int = 0
    rate: float = 1.0  # of the messages (or turns, or writes)
    count: int = 0  # so often, then no more; 0: without end
    only: str = ""  # messages of this type; this disk; with `failpoint` its name
    action: str = ""  # of a failpoint
    nth: int = 1  # a failpoint acts from the n-th time on that it is passed


class Injected(Message, frozen=True):
    call: int
    injected: tuple[str, ...]  # the processes that were hit, or what was asked for with `list`
    armed: tuple[str, ...] = ()  # with `list`: what is wrong with them on purpose, for people


class Scale(Message, frozen=True):
    """Have so many ranks. Answer: Scaled when the group has them and the rest is gone, or Error, and
    the node has as many as before."""

    call: int
    ranks: int
    timeout_s: float


class Scaled(Message, frozen=True):
    call: int
    before: int
    ranks: int
    seats: tuple[int, ...]  # those of the ranks there are now
    s: float


class Restart(Message, frozen=True):
    """Replace processes one after the other, each when the node is whole again. Answer: Restarted, or
    Error that says which were not replaced."""

    call: int
    names: tuple[str, ...]  # process names, prefixes of names, or `all`
    timeout_s: float  # for all of them together


class Restarted(Message, frozen=True):
    call: int
    restarted: tuple["PhaseTime", ...]  # in order: process, and from its end to a whole node


class TopologyChanged(Message, frozen=True):
    """A nudge: look at the board's topology now."""

    epoch: int


class HealthUpdate(Message, frozen=True):
    """What the supervisor knows, for the gateway's health answer; sent on every change."""

    healthy: bool
    epoch: int
    reasons: tuple[str, ...]


class Drain(Message, frozen=True):
    """To the gateway, just before SIGTERM, and to HTTP when it is restarted: accept nothing more, finish what
    runs within this time, end the rest with code `shutdown`, then exit."""

    timeout_ms: int


class HandOver(Message, frozen=True):
    """To the gateway: end soon, and leave what runs to the next one. Nothing is refused or ended."""

    timeout_ms: int  # for what is being written to the journal


ToSupervisor = (
    Ready
    | Progress
    | ScrubReport
    | ExpertReport
    | Trouble
    | StatusQuery
    | HistoryQuery
    | Shutdown
    | Inject
    | Scale
    | Restart
    | Rebalance
)
FromSupervisor = (
    TopologyChanged
    | HealthUpdate
    | Drain
    | HandOver
    | StatusReply
    | HistoryReply
    | ShutdownDone
    | Injected
    | Scaled
    | Restarted
    | Rebalanced
    | Error
)
