"""Named places in the code where a process can be made to fail: `phalanx inject failpoint NAME`.

A name is PROCESS.PHASE.MOMENT, PROCESS being the kind of process that passes it. Tests compare this
list with the calls in the code.
"""

from phalanx.protocol import faults

NAMES = {
    # The group changes: a worker fell, or one joins.
    "supervisor.stop.after_odd": "the odd epoch is written, no worker has answered",
    "supervisor.go.before_publish": "all have acknowledged STOP, the topology is not out",
    "supervisor.go.after_publish": "the topology of the next epoch is out",
    "supervisor.go.before_even": "all have acknowledged GO",
    "supervisor.go.after_even": "the even epoch is written",
    "supervisor.rebalance.before_propose": "a plan is accepted, no worker knows of it",
    "supervisor.rebalance.after_propose": "the proposed placement is out",
    "supervisor.rebalance.before_withdraw": "all run it, or it is given up; it is still out, the old one published",
    "supervisor.spawn.before": "a process is about to be started",
    "worker.load.before": "a new worker begins to load",
    "worker.load.after": "it has loaded, and has not said so",
    "worker.stop.before_ack": "STOP is seen",
    "worker.stop.after_ack": "STOP is acknowledged",
    "worker.prepare.before": "the next topology is seen, the old buffers are gone",
    "worker.prepare.after_load": "the missing experts are loaded, the receive region is not there",
    "worker.go.before_ack": "everything is prepared",
    "worker.go.after_ack": "GO is acknowledged",
    "worker.connect.before": "the even epoch is seen, no peer is mapped",
    "worker.connect.after": "every peer is mapped",
    # Experts move while the group runs.
    "worker.rebalance.before_copy": "an expert of a proposed placement is about to be copied",
    "worker.rebalance.after_copy": "it is in its slot",
    "worker.rebalance.before_flip": "every rank is ready, the next step is still to be routed anew",
    "worker.rebalance.after_flip": "rows go by the new placement from here on",
    "worker.link.before_hello": "a scheduler's link is taken up, its hello is not sent",
    # A step.
    "worker.step.before_enter": "a plan is read, the step is not posted",
    "worker.step.after_enter": "every rank has posted the step",
    "worker.exchange.before_send": "before rows go to a peer",
    "worker.exchange.before_reply": "a peer's rows are computed, not sent back",
    "worker.step.after_sampler": "tokens are chosen, nothing is committed",
    "worker.step.after_commit": "the step is committed, its result is not sent",
    "worker.step.after_result": "the result is sent",
    "scheduler.submit.before": "a sequence came, nothing is done about it",
    "scheduler.plan.before_send": "a plan is made, not sent",
    "scheduler.plan.after_send": "a plan is under way",
    "scheduler.commit.before": "a result is there, not committed",
    "scheduler.tokens.before_send": "a result is committed, nobody was told",
    "scheduler.tokens.after_send": "its tokens are on their way",
    # A request's beginning and end.
    "gateway.accept.before_write": "a request is checked, the journal does not have it",
    "gateway.journal.before_commit": "in the journal's thread: written, not committed",
    "gateway.journal.after_sync": "in the journal's thread: on disk, the gateway does not know it",
    "gateway.accept.after_sync": "the request is on disk, nobody was told",
    "gateway.accept.before_send": "the client is about to be told",
    "gateway.submit.before_send": "a sequence is about to go to a scheduler",
    "gateway.resume.before_send": "a sequence with outputs is about to move to another rank",
    "gateway.resume.after_send": "it was sent",
    "gateway.tokens.before_write": "tokens have come that its successor would not find in the token log",
    "gateway.tokens.after_write": "it would find them; nothing that follows from them was sent",
    "gateway.final.before_write": "a sequence has ended, the journal does not have it",
    "gateway.final.before_send": "a final is about to go to its client",
    "gateway.final.after_send": "it was sent",
    "tokenizer.encode.before_answer": "a text is encoded, the ids are not sent",
    "tokenizer.decode.before_answer": "tokens are decoded, the text is not sent",
    # The KV store and the planner.
    "kvstore.create.before": "a segment is about to be made",
    "kvstore.write.before": "records are about to be written",
    "kvstore.write.before_sync": "records are written, not synced",
    "kvstore.write.after": "records are on disk, nobody was told",
    "kvstore.seal.before": "a segment is about to be sealed",
    "kvstore.put.before_answer": "a put is done, its sender does not know",
    "eplb.counts.before": "expert counts came, nothing is done about them",
    "eplb.plan.during": "a plan is being made",
    "eplb.plan.before_send": "a plan is made, the supervisor has not been asked",
    "eplb.plan.after_send": "the supervisor has been asked for it",
}


def failpoint(name: str) -> None:
    """Die here, stop, sleep or raise InjectedFault, if told to; otherwise nothing."""
    if faults.active is not None:
        faults.active.failpoint(name)


def kind_of(name: str) -> str:
    """The kind of process that passes this failpoint."""
    return name.partition(".")[0]
