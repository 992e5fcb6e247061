"""The node's state for Prometheus: gathered when it is asked for, from shared memory and from each service.

A service that does not answer in time has no figures in that scrape: it never hangs, and none of its figures is
older than itself.
"""

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import zmq
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from phalanx.protocol.codec import Decoder, encode
from phalanx.protocol.config import node_name
from phalanx.protocol.link import connect_dealer, receive, send
from phalanx.protocol.messages import (
    ClientReply,
    EplbReply,
    FromSupervisor,
    KVReply,
    KVStats,
    KVStatsReply,
    Message,
    PlanReply,
    PlanShow,
    Stats,
    StatsReply,
    StatusQuery,
    StatusReply,
)
from phalanx.protocol.queues import read_queues, step_times
from phalanx.protocol.rundir import (
    CLIENT_SOCKET,
    EPLB_SOCKET,
    KVSTORE_SOCKET,
    SUPERVISOR_SOCKET,
    endpoint,
)

CONTENT_TYPE = CONTENT_TYPE_LATEST
ANSWER_S = 0.5  # of each service; they are asked one after the other
_REPEAT_S = 0.2
_STEPS = 1024  # the newest, for quantiles
_QUANTILES = (50, 90, 99)
R = TypeVar("R")


def exposition(run_dir: Path, *more: CollectorRegistry) -> bytes:
    """Everything as text, with the metrics of `more` registries at the end."""
    registry = CollectorRegistry()
    registry.register(_Node(run_dir))
    return generate_latest(registry) + b"".join(map(generate_latest, more))


class _Node:
    """A collector for one scrape."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def describe(self) -> Iterable[Metric]:
        return ()  # nothing is known before it is gathered

    def collect(self) -> Iterator[Metric]:
        yield from self._supervisor()
        yield from self._ranks()
        yield from self._gateway()
        yield from self._kvstore()
        yield from self._planner()

    def _supervisor(self) -> Iterator[Metric]:
        status = self._ask(SUPERVISOR_SOCKET, StatusQuery(1), FromSupervisor, StatusReply)
        yield _gauge(
            "phalanx_healthy",
            "1 when every seat and service is ready.",
            status is not None and status.healthy,
        )
        if status is None:
            return
        yield _gauge("phalanx_epoch", "The epoch word; odd while the group changes.", status.epoch)
        losses = [record for record in status.epochs if "joined" not in record.cause]
        yield _counter("phalanx_rank_losses", "Ranks lost since the start.", len(losses))
        ended = CounterMetricFamily(
            "phalanx_rebalances", "Plans given to the running group.", labels=["outcome"]
        )
        ended.add_metric(["applied"], status.rebalanced.applied)
        ended.add_metric(["withdrawn"], status.rebalanced.withdrawn)
        yield ended
        what = "Experts copied for plans that were applied."
        yield _counter("phalanx_experts_moved", what, status.rebalanced.moved)
        up = GaugeMetricFamily("phalanx_up", "1 while the process is ready.", labels=["process"])
        beat = GaugeMetricFamily(
            "phalanx_last_beat_seconds", "Since the last sign of life.", labels=["process"]
        )
        restarts = CounterMetricFamily(
            "phalanx_restarts", "Restarts of the process.", labels=["process"]
        )
        for process in status.processes:
            up.add_metric([process.name], float(process.state == "ready"))
            restarts.add_metric([process.name], process.restarts)
            if process.last_beat_ms >= 0:
                beat.add_metric([process.name], process.last_beat_ms / 1000)
        member = GaugeMetricFamily(
            "phalanx_rank_member", "1 while the rank is in the group.", labels=["rank"]
        )
        for rank in status.ranks:
            member.add_metric([str(rank.slot)], float(rank.state == "member"))
        yield from (up, beat, restarts, member)

    def _ranks(self) -> Iterator[Metric]:
        node = node_name(self._run_dir)
        fields = ("waiting", "running", "free_blocks", "total_blocks", "free_slots", "total_slots")
        gauges = {
            name: GaugeMetricFamily(
                f"phalanx_scheduler_{name}", f"{name} of the rank's scheduler.", labels=["rank"]
            )
            for name in fields
        }
        steps = CounterMetricFamily("phalanx_scheduler_steps", "Steps done.", labels=["rank"])
        stale = CounterMetricFamily(
            "phalanx_scheduler_stale_results",
            "Results of plans that were not under way, dropped.",
            labels=["rank"],
        )
        took = GaugeMetricFamily(
            "phalanx_scheduler_step_seconds",
            f"Quantiles of the newest {_STEPS} steps.",
            labels=["rank", "quantile"],
        )
        oldest = GaugeMetricFamily(
            "phalanx_scheduler_oldest_waiting_seconds",
            "Age of the oldest sequence that waits.",
            labels=["rank"],
        )
        found = read_queues(node)
        for rank in found["ranks"]:
            seat = str(rank["slot"])
            for name, gauge in gauges.items():
                gauge.add_metric([seat], rank[name])
            steps.add_metric([seat], rank["steps"])
            stale.add_metric([seat], rank["stale_results"])
            _, times = step_times(node, rank["slot"])
            if len(times):
                newest = times[-_STEPS:]
                for quantile in _QUANTILES:
                    value = float(np.percentile(newest, quantile)) / 1e6
                    took.add_metric([seat, f"{quantile / 100:g}"], value)
            ages = [
                request["age_ms"]
                for request in found["requests"]
                if request["slot"] == rank["slot"] and request["state"] == "waiting"
            ]
            oldest.add_metric([seat], max(ages, default=0) / 1000)
        yield from (*gauges.values(), steps, stale, took, oldest)

    def _gateway(self) -> Iterator[Metric]:
        stats = self._ask(CLIENT_SOCKET, Stats(1), ClientReply, StatsReply)
        if stats is None:
            return
        yield _counter("phalanx_requests_accepted", "Requests accepted.", stats.accepted)
        yield _counter("phalanx_requests_refused", "Calls refused.", stats.refused)
        yield _gauge("phalanx_requests_open", "Requests under way.", stats.open_requests)
        yield _counter(
            "phalanx_sequences_accepted",
            "Sequences accepted or taken over: the sum of the finished and the open ones.",
            stats.sequences,
        )
        yield _gauge(
            "phalanx_sequences_open", "Sequences that have not ended.", stats.open_sequences
        )
        finished = CounterMetricFamily(
            "phalanx_sequences_finished", "Sequences ended, by finish reason.", labels=["reason"]
        )
        for reason in ("stop", "length", "abort", "error"):
            finished.add_metric([reason], stats.finished.get(reason, 0))
        yield finished
        yield _counter(
            "phalanx_stale_answers",
            "Answers of services to calls that are over or were an earlier gateway's, dropped.",
            stats.stale_answers,
        )

    def _kvstore(self) -> Iterator[Metric]:
        stats = self._ask(KVSTORE_SOCKET, KVStats(1), KVReply, KVStatsReply)
        if stats is None:
            return
        yield _gauge("phalanx_kvstore_records", "Records held.", stats.records)
        yield _gauge("phalanx_kvstore_bytes", "Bytes held.", stats.bytes)
        yield _gauge("phalanx_kvstore_caching", "0 while the disk has no room.", stats.caching)
        for name in ("hits", "misses", "corrupt", "evicted", "puts"):
            yield _counter(f"phalanx_kvstore_{name}", f"{name}.", getattr(stats, name))

    def _planner(self) -> Iterator[Metric]:
        plan = self._ask(EPLB_SOCKET, PlanShow(1), EplbReply, PlanReply)
        if plan is None:
            return
        yield _counter("phalanx_eplb_applied", "Plans applied.", plan.applied)
        why = "Plans not worth their cost, or that could not be applied."
        yield _counter("phalanx_eplb_refused", why, plan.refused)
        if plan.plan_age_s is not None:
            yield _gauge("phalanx_eplb_plan_age_seconds", "Of the last plan.", plan.plan_age_s)
        balance = GaugeMetricFamily(
            "phalanx_eplb_balance",
            "Busiest rank over the mean as planned, by layer.",
            labels=["layer"],
        )
        for layer in plan.layers:
            balance.add_metric([str(layer.layer)], layer.moe_lb)
        yield balance

    def _ask(self, name: str, question: Message, replies: Any, reply: type[R]) -> R | None:
        """The answer; None when the service is not there or does not answer in time."""
        if not (self._run_dir / name).exists():
            return None
        decoder = Decoder[Any](replies)
        socket = connect_dealer(endpoint(self._run_dir, name))
        try:
            end = time.monotonic() + ANSWER_S
            while (left := end - time.monotonic()) > 0:
                send(socket, encode(question))
                if not socket.poll(int(min(left, _REPEAT_S) * 1000) + 1, zmq.POLLIN):
                    continue
                for frame in receive(socket, 16):
                    message = decoder.decode(frame)
                    if isinstance(message, reply):
                        return message
            return None
        except (msgspec.MsgspecError, zmq.ZMQError):
            return None
        finally:
            socket.close(linger=0)


def _gauge(name: str, text: str, value: float | None) -> Metric:
    return GaugeMetricFamily(name, text, value=float(value or 0))


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)
