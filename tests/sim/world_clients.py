"""Clients with the real client core: requests at random, aborts, stalls, clients that die and are
succeeded, and the one right stream of each request."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np

from phalanx.protocol.codec import Decoder, encode
from phalanx.protocol.errors import Refused
from phalanx.protocol.kvkeys import block_keys, state_key
from phalanx.protocol.limits import BLOCK_SIZE
from phalanx.protocol.messages import ChatMessage, ClientMessage, ClientReply, Sampling
from phalanx.protocol.seeds import derive_seed
from phalanx.services.client_core import ClientCore
from phalanx.services.client_flow import Flow, Spec
from phalanx.services.gateway.validate import sampling_for
from phalanx.services.model_limits import ModelLimits
from sim.gateway_fakes import Expected, cut_at_its_end, encode_text
from sim.hash_worker import VOCAB, WINDOW, entries, fault_free, fault_free_scores
from sim.world_body import MS
from sim.world_gateway import DEFAULT_MAX_TOKENS, MODEL
from sim.world_wires import Wire

if TYPE_CHECKING:
    from sim.world import World

CLIENT_QUEUE = 30
UNNOTICED = 3  # messages to a dead client that count as taken
READ_NS = MS
DECODER = Decoder[ClientMessage](ClientMessage)


@dataclass(eq=False)
class Ask:
    """One request as its client sees it, whoever reads it in the end."""

    spec: Spec
    prompt: list[int]
    aborted: bool = False
    seed: int | None = None
    model: ModelLimits = MODEL
    streams: dict[int, Expected] = field(default_factory=dict[int, Expected])

    def expected(self, index: int) -> Expected:
        """What the sequence must give, from the definition of the hash."""
        if index not in self.streams:
            sampling, tokens = self._uncut(index)
            self.streams[index] = cut_at_its_end(sampling, tokens.__getitem__)
        return self.streams[index]

    def logged(self, index: int, log: Sequence[int]) -> Expected:
        """The same where only the log tells which tokens it has; not ended yet if they do not say so."""
        sampling, _ = self._uncut(index)
        try:
            return cut_at_its_end(sampling, log.__getitem__)
        except IndexError:
            return Expected(tuple(log), "", "error")

    def _uncut(self, index: int) -> tuple[Sampling, list[int]]:
        """Its sampling and outputs, stop rules aside."""
        assert self.seed is not None
        sampling = sampling_for(
            self.spec.sampling, len(self.prompt), self.model, None, DEFAULT_MAX_TOKENS, self.seed
        )
        assert sampling.max_tokens is not None
        seed, forced = derive_seed(self.seed, index), sampling.forced_token_ids
        return sampling, fault_free(self.prompt, seed, sampling.max_tokens, forced)

    def note_keys(self, keyed: dict[bytes, Any]) -> None:
        """What the store may copy of its sequences, by key."""
        if self.seed is not None:
            for index in range(self.spec.n):
                note_keys(keyed, self.prompt + self._uncut(index)[1])


class SimClient:
    def __init__(self, world: "World", number: int) -> None:
        self.world = world
        self.identity = b"client-%d" % number
        self.core = ClientCore(lambda: f"{world.rng.getrandbits(128):032x}", 3600 * 10**9)
        self.inbox: deque[bytes] = deque()  # at most CLIENT_QUEUE
        self.stalled = self.stalled_once = False
        self.dead = False
        self.lost = 0  # what was sent to it since
        self.is_heir = False  # what the dead one has said may come after what it says itself
        self.lossy = world.rng.random() < 0.3  # its connection is as bad as those of services
        self.up: Wire[ClientMessage] = Wire(
            world.clock, world.rng, world.weather, self._deliver, reliable=not self.lossy
        )
        self._due_ns = 0
        self._poll()

    def _deliver(self, message: ClientMessage) -> None:
        self.world.to_gateway_of_client(self.identity, message)

    def offer(self, message: ClientReply) -> bool | None:
        """False: its queue is full. None: it is gone, which shows only after a while."""
        if self.dead:
            self.lost += 1
            return True if self.lost <= UNNOTICED else None
        if len(self.inbox) >= CLIENT_QUEUE:
            return False
        times = self.world.weather.times() if self.lossy else 1
        self.inbox.extend([encode(message)] * times)
        if times and len(self.inbox) == times:
            self.world.clock.after(READ_NS, self.read)
        return True

    def read(self) -> None:
        if self.stalled or self.dead:
            return
        while self.inbox:
            self.core.on_frame(self.inbox.popleft(), self.world.now_ns)
        self.flush()

    def wake(self) -> None:
        self.stalled = False
        self.read()

    def flush(self) -> None:
        while self.core.outgoing:
            self.up.send(DECODER.decode(self.core.outgoing.popleft()))

    def _poll(self) -> None:
        if not self.dead:
            self.core.poll(self.world.now_ns)
            self.flush()
            self.world.clock.after(50 * MS, self._poll)


def random_ask(rng: Random, shape: Any, number: int) -> Ask:
    ids = _prompt(rng, shape, number)
    prompt: Any = ids
    kind = rng.random()
    if kind < 0.3:
        prompt = "".join(chr(rng.randrange(65, 120)) for _ in ids)
        ids = list(encode_text(prompt, VOCAB))
    elif kind < 0.4:
        prompt = [ChatMessage("user", "hi" * rng.randint(1, 4))]
        ids = list(encode_text(f"user:{prompt[0].content}\n", VOCAB))
    seed = rng.choice((None, rng.getrandbits(53)))
    n = rng.choice((1, 1, 1, 1, 2, 3))
    stops = [chr(ord("A") + rng.randrange(26)) + rng.choice("123456"), "."]
    sampling = Sampling(
        seed=seed,
        max_tokens=rng.choice((40, 60)) if shape.tight else rng.choice((None, 1, 2, 20, 40, 60)),
        min_tokens=rng.choice((0, 0, 0, 1)),
        stop=tuple(rng.sample(stops, rng.choice((0, 0, 0, 1, 2)))),
        stop_token_ids=rng.choice(((), (), (3, 4))),
        ignore_eos=rng.random() < 0.7,
        logprobs=rng.choice((None, None, 0)),
        prompt_logprobs=rng.choice((None,) * 5 + (0, 2)),
        predicted_token_ids=_predicted(rng, ids, seed),
        forced_token_ids=tuple(rng.randrange(VOCAB) for _ in range(rng.choice((0, 0, 0, 0, 3)))),
    )
    return Ask(Spec(prompt, sampling, n=n, stream=rng.random() < 0.85), ids)


def _prompt(rng: Random, shape: Any, number: int) -> list[int]:
    """Mostly short, or around a block border, where things go wrong; a few can never fit."""
    length = rng.choice((1, 3, 9, 40, 120, 127, 128, 129, 133, 255, 257))
    if shape.tight:
        length = rng.randrange(105, 128)
    elif rng.random() < 0.04:
        length = MODEL.max_positions - rng.choice((0, 8))
    first = 5 if number % 2 else number  # half of the prompts share a prefix
    ids = [(first * (at + 3)) % VOCAB for at in range(length)]
    ids[-1] = number % VOCAB
    return ids


def _predicted(rng: Random, prompt: list[int], seed: int | None) -> tuple[int, ...]:
    """What comes, with mistakes; for half of the requests nothing."""
    if seed is None or rng.random() < 0.4:
        return ()
    wrong = rng.choice((0.0, 0.2, 0.6, 1.0))
    truth = fault_free(prompt, derive_seed(seed, 0), rng.choice((3, 40)))
    return tuple((token + (rng.random() < wrong)) % VOCAB for token in truth)


def note_keys(keyed: dict[bytes, Any], prompt: list[int]) -> None:
    """What the store may copy of these tokens, by key."""
    kept = entries(np.array(prompt, np.int64), 0)
    for at, key in enumerate(block_keys(b"hash", b"", prompt)):
        end = (at + 1) * BLOCK_SIZE
        keyed[key] = kept[end - BLOCK_SIZE : end]
        keyed[state_key(key)] = kept[max(0, end - WINDOW) : end]


@dataclass(eq=False)
class Reading:
    """A flow of a client and what it is about."""

    ask: Ask
    client: SimClient
    flow: Flow

    def check(self, world: "World") -> None:
        """It ended as it had to, or in another way that is legal here."""
        error = self.flow.error
        if error is not None:
            assert isinstance(error, Refused), f"{error!r}"
            assert world.may_refuse(self.ask, error), f"refused: {error}"
            return
        self._check_scores()
        for index, one in enumerate(self.flow.sequences):
            final = one.final
            assert final is not None
            right, base = world.right(self.ask, self.flow.request_id, index), one.base
            got = tuple(one.token_ids)
            assert got == right.tokens[base : base + len(got)], f"{self.what(index)}: wrong tokens"
            text = "".join(one.texts) + final.text
            if self.ask.spec.sampling.logprobs is not None:
                logprobs = [logprob.logprob for logprob in one.logprobs]
                assert logprobs == [-float(token) for token in got], f"{self.what(index)}: logprobs"
            if final.finish_reason == right.reason and final.code is None:
                assert base + len(got) == len(right.tokens), f"{self.what(index)}: ends early"
                assert final.offset == len(right.tokens), f"{self.what(index)}: offset of its end"
                assert text == right.text if not base else right.text.endswith(text)
                continue
            assert final.offset == base + len(got), (
                f"{self.what(index)}: {final} at {base + len(got)}"
            )
            assert world.may_end(self.ask, final), (
                f"{self.what(index)}: {final}, not {right.reason}"
            )

    def _check_scores(self) -> None:
        """Of the prompt: all, from one who read from the beginning what ended by itself."""
        num_top, flow = self.ask.spec.sampling.prompt_logprobs, self.flow
        whole = not flow.begun and not self.ask.aborted
        final = flow.sequences[0].final
        if num_top is None or not whole or final is None or final.code is not None:
            return
        got = [entry for entry in flow.prompt_logprobs if entry is not None]
        if final.finish_reason in ("stop", "length"):
            right = fault_free_scores(self.ask.prompt, num_top)
            assert got == right, f"{self.what(0)}: {len(got)} prompt logprobs for {len(right)}"

    def what(self, index: int) -> str:
        return f"{self.flow.request_id}/{index}"
