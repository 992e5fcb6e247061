"""A gateway's core on a table: events go in, and what it tells whom is there to compare."""

from collections.abc import Mapping

from phalanx.protocol.errors import Code
from phalanx.protocol.messages import (
    Accepted,
    BusFromGateway,
    BusToGateway,
    ClientMessage,
    ClientReply,
    Decode,
    Decoded,
    DecodedItem,
    Delta,
    Final,
    FinishReason,
    Generate,
    Hello,
    Sampling,
    SeatLoad,
    SequenceInfo,
    SequenceList,
    Submit,
    Tokens,
    TokensItem,
)
from phalanx.protocol.topology import Seat, Topology
from phalanx.services.gateway.admission import Settings
from phalanx.services.gateway.core import Core
from phalanx.services.gateway.entries import Op, Recovered
from phalanx.services.model_limits import ModelLimits

MS = 1_000_000
CLIENT = b"client"
T0, T1 = b"tokenizer-0#1", b"tokenizer-1#1"
MODEL = ModelLimits("tiny", 64, 1000, 1)


class Desk:
    """A core on a table: takes events, shows what came out since."""

    def __init__(
        self,
        *recovered: Recovered,
        seats: int = 2,
        capacity: int = 8,
        scrub_every_s: float = 0.0,
        logged: bool = False,
        poison: Mapping[str, str] | None = None,
    ) -> None:
        self.now = 0
        draws = iter(range(1, 10**6))
        settings = Settings(
            MODEL,
            7,
            1,
            100,
            50,
            600,
            capacity,
            lambda bits: next(draws),
            scrub_every_s=scrub_every_s,
            poison=poison or {},
            logged=logged,
        )
        self.core = Core(settings, recovered, 0)
        self.bus: list[tuple[bytes, BusFromGateway]] = []
        self.ops: list[Op] = []
        self.said: list[ClientReply] = []
        self.takes = True  # whether the client takes what it is sent
        self.topology = Topology(2, tuple(Seat(i, 1, 1, "member") for i in range(seats)), b"", "f1")
        self.core.on_topology(self.topology, 0)
        for name in (T0, T1)[: 2 if seats else 0]:
            self.says(name, Hello(name.decode()[:-2], "tokenizer", 1))
        for seat in range(seats):
            self.scheduler(seat)
        self.first_ops = self.ops  # of its start
        self.clear()

    def clear(self) -> None:
        self.bus, self.ops, self.said = [], [], []

    def scheduler(
        self, seat: int, incarnation: int = 1, *sequences: SequenceInfo, blocks: int = 4
    ) -> bytes:
        peer = b"scheduler-%d#%d" % (seat, incarnation)
        self.says(peer, Hello(f"scheduler-{seat}", "scheduler", incarnation, seat))
        call = next(m.call for p, m in reversed(self.bus) if p == peer and hasattr(m, "call"))
        self.says(peer, SequenceList(call, seat, incarnation, sequences))
        self.says(
            peer, SeatLoad(seat, incarnation, True, total_blocks=blocks, worker_incarnation=1)
        )
        return peer

    def turn(self, commit: bool = True) -> None:
        self.core.turn(self.now)
        while True:
            self.bus += self.core.take_bus()
            number, ops = self.core.take_ops()
            self.ops += ops
            if not (ops and commit):
                break
            self.core.on_journal(number, "", self.now)
            self.core.turn(self.now)
        self.core.deliver(self._send, self.now)

    def _send(self, client: bytes, message: ClientReply) -> bool:
        if self.takes:
            self.said.append(message)
        return self.takes

    def asks(self, message: ClientMessage, client: bytes = CLIENT, commit: bool = True) -> None:
        self.core.on_client(client, message, self.now)
        self.turn(commit)

    def says(self, peer: bytes, message: BusToGateway) -> None:
        self.core.on_bus(peer, message, self.now)
        self.turn()

    def passes(self, ms: int) -> None:
        for _ in range(0, ms, 100):
            self.now += 100 * MS
            self.turn()

    def sent(self, kind: type) -> list[tuple[bytes, BusFromGateway]]:
        """What went over the bus, taken off the table."""
        found = [(peer, message) for peer, message in self.bus if isinstance(message, kind)]
        self.bus = [pair for pair in self.bus if not isinstance(pair[1], kind)]
        return found

    def told(self) -> list[ClientReply]:
        told, self.said = self.said, []
        return told

    # --- shortcuts ---

    def start(self, sampling: Sampling | None = None, n: int = 1, **fields: object) -> str:
        """A request of one token, running; its id."""
        sampling = sampling or Sampling(max_tokens=9)
        self.asks(Generate(1, prompt_token_ids=(5,), sampling=sampling, n=n, **fields))  # type: ignore[arg-type]
        accepted = self.told()[0]
        assert isinstance(accepted, Accepted)
        return accepted.request_id

    def submits(self) -> list[tuple[bytes, Submit]]:
        return [(p, m) for p, m in self.sent(Submit) if isinstance(m, Submit)]

    def produces(
        self,
        peer: bytes,
        submit: Submit,
        offset: int,
        *ids: int,
        finish: FinishReason | None = None,
        seq: int = 1,
        code: Code | None = None,
        error: str = "",
    ) -> None:
        item = TokensItem(
            submit.request_id, submit.index, submit.attempt, offset, ids, finish, code, error
        )
        name, _, incarnation = peer.partition(b"#")
        seat = int(name.rpartition(b"-")[2])
        self.says(peer, Tokens(seat, int(incarnation), seq, (item,)))

    def decodes(self, carry: bytes = b"") -> None:
        """Answer all open Decodes; each token's text is its number in brackets."""
        for peer, message in self.sent(Decode):
            assert isinstance(message, Decode)
            items = tuple(
                DecodedItem(i.stream, tuple(f"[{t}]" for t in i.token_ids), "", carry)
                for i in message.items
            )
            self.says(peer, Decoded(message.call, items))


def texts(told: list[ClientReply]) -> str:
    return "".join(m.text for m in told if isinstance(m, Delta | Final))
