"""The eplb process: receives expert counts, plans placements, has them applied, answers `phalanx eplb show`."""

import msgspec

from phalanx.eplb_svc.core import EplbCore
from phalanx.protocol.codec import Decoder, call_of, encode
from phalanx.protocol.errors import Code, DecodeError
from phalanx.protocol.failpoints import failpoint
from phalanx.protocol.limits import BUS_MESSAGE_BYTES_MAX
from phalanx.protocol.link import bind_router, receive_from, send, send_to
from phalanx.protocol.messages import (
    EplbRequest,
    Error,
    ExpertCounts,
    FromSupervisor,
    PlanReply,
    PlanShow,
    Rebalanced,
)
from phalanx.protocol.rundir import EPLB_SOCKET, endpoint
from phalanx.protocol.service import Service

_MESSAGES_PER_TURN = 64


def serve(service: Service) -> None:
    """Bind, say so, and plan until told to stop."""
    socket = bind_router(endpoint(service.run_dir, EPLB_SOCKET), BUS_MESSAGE_BYTES_MAX)
    decoder = Decoder[EplbRequest](EplbRequest)
    core = EplbCore(service.config.eplb)
    seen_version = 0
    now = 0

    def on_messages() -> None:
        for identity, frame in receive_from(socket, _MESSAGES_PER_TURN):
            try:
                message = decoder.decode(frame)
            except DecodeError as error:
                refusal = Error(call_of(frame), Code.BAD_REQUEST, str(error))
                send_to(socket, identity, encode(refusal))
                continue
            if isinstance(message, ExpertCounts):
                failpoint("eplb.counts.before")
                if problem := core.on_counts(message):
                    service.log.warning("counts dropped", seat=message.seat, reason=problem)
            else:
                send_to(socket, identity, encode(_answer(core, message, now)))

    def on_supervisor(message: FromSupervisor) -> None:
        if isinstance(message, Rebalanced | Error):
            core.on_answer(message, now)
            said = message.message if isinstance(message, Error) else "applied"
            service.log.info("plan answered", answer=said)

    def tick(now_ns: int) -> float | None:
        nonlocal seen_version, now
        now = now_ns
        board = service.board
        if board.topology_version != seen_version:
            seen_version = board.topology_version
            if (topology := board.topology()) is not None:
                core.on_topology(topology)
        if core.busy:
            failpoint("eplb.plan.during")
        if core.tick(now_ns, {seat: board.seats[seat].placement_slots for seat in core.members}):
            worst = max(core.balances, key=lambda balance: balance.moe_lb)
            service.log.info("planned", worst_layer=worst.layer, moe_lb=round(worst.moe_lb, 3))
        if (asked := core.take_ask(now_ns)) is not None:
            failpoint("eplb.plan.before_send")
            send(service.supervisor, encode(asked))
            failpoint("eplb.plan.after_send")
        return 0.0 if core.busy else None

    service.ready()
    service.loop({socket: on_messages}, tick, on_supervisor=on_supervisor)
    socket.close()


def _answer(core: EplbCore, question: PlanShow, now_ns: int) -> PlanReply:
    placement = b"" if core.placement is None else msgspec.msgpack.encode(core.placement)
    return PlanReply(
        call=question.call,
        layers=core.balances,
        plan_age_s=core.plan_age_s(now_ns),
        applied=core.applied,
        refused=core.refused,
        placement=placement,
        refusal=core.refusal,
    )
