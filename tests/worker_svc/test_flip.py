"""Experts move between the steps of three real ranks: every logit has the same bits as on one rank alone.

Ranks are threads here, over a real board, votes, doorbells and flags. Each step has rows of a prompt and of
outputs, so those in which the placement changes have, too. Some experts have two copies before, others after;
the second move takes slots that the first has left.
"""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from forward_world import DEVICE

import phalanx.worker_svc.rebalance as rebalance_module
from phalanx.protocol.board import Board, Vote
from phalanx.protocol.placement import EMPTY, Placement, copies, initial_placement, widened
from phalanx.protocol.topology import Proposal
from phalanx.worker_svc.backend import ModelBackend
from phalanx.worker_svc.exchange import Exchange, Region, Shape
from phalanx.worker_svc.experts import GroupExperts
from phalanx.worker_svc.group import Group
from phalanx.worker_svc.model.batch import SequenceRows, StepBatch
from phalanx.worker_svc.model.caches import CacheLayout, CachePools
from phalanx.worker_svc.model.checkpoint import Weights, load_checkpoint
from phalanx.worker_svc.model.config import ModelConfig
from phalanx.worker_svc.model.model import Model
from phalanx.worker_svc.model.moe import Experts, LocalExperts
from phalanx.worker_svc.rebalance import Rebalance

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "tiny-a"
CONFIG = ModelConfig.load(GOLDEN)
EPOCH, SEATS, STEPS, CHUNK = 2, [0, 1, 2], 12, 3
PIECES = CONFIG.num_hidden_layers + 2  # turns of a rank before a step: it gets ready in two such
EXPERTS = CONFIG.n_routed_experts


def placements() -> list[Placement]:
    """Each puts an expert into an empty slot of every seat, in every layer, and then leaves another slot."""
    slots = -(-EXPERTS // len(SEATS)) + 1
    first = initial_placement(CONFIG.num_hidden_layers, EXPERTS, SEATS, slots)
    found = [widened(first, slots + 1)]
    for version in (1, 2):
        layers = []
        for layer, seats in enumerate(found[-1].physical_to_logical):
            held = [list(row) for row in seats]
            for seat, row in enumerate(held):
                come = [e for e in range(EXPERTS) if e not in row]
                row[row.index(EMPTY)] = come[(layer + seat) % len(come)]
            for row, old in zip(held, seats, strict=True):
                spare = [
                    s for s, e in enumerate(old) if e != EMPTY and sum(e in r for r in held) > 1
                ]
                row[spare[layer % len(spare)]] = EMPTY
            layers.append(tuple(map(tuple, held)))
        found.append(
            msgspec.structs.replace(found[-1], version=version, physical_to_logical=tuple(layers))
        )
    return found


PLACEMENTS = placements()


def steps(seat: int) -> list[list[SequenceRows]]:
    """Three sequences put out tokens while the prompt of a fourth is computed, a few rows a step."""
    rng = np.random.default_rng(seat)
    long = rng.integers(3, CONFIG.vocab_size, CHUNK * STEPS).tolist()
    made = []
    for step in range(STEPS):
        rows = [(3, CHUNK * step, long[CHUNK * step :][:CHUNK])]
        for slot in range(3):
            length = 3 + 7 * slot
            tokens = rng.integers(3, CONFIG.vocab_size, length if step == 0 else 1).tolist()
            rows.append((slot, 0 if step == 0 else length + step - 1, tokens))
        made.append(
            [
                SequenceRows(slot, at, ids, [1 + slot], range(len(ids)), copy_key=7 * slot)
                for slot, at, ids in rows
            ]
        )
    return made


class Runner:
    """A model with caches of its own, which takes the steps of a seat one by one."""

    def __init__(self, weights: Weights, experts: Experts, seat: int) -> None:
        pools = CachePools(CacheLayout(CONFIG), 16, 4, device=DEVICE)
        self._model = Model(weights, pools, experts)
        self._steps = iter(steps(seat))

    def step(self) -> torch.Tensor:
        rows = next(self._steps)
        pending = self._model.forward(StepBatch.of(rows))
        pending.commit([len(sequence.token_ids) for sequence in rows])
        return pending.logits


def lonely(seat: int) -> Runner:
    weights = load_checkpoint(GOLDEN, device=DEVICE)
    return Runner(weights, LocalExperts(weights), seat)


class RankOf:
    """A rank's worker as far as experts go: its backend's part, votes and steps."""

    def __init__(self, board: Board, seat: int, barrier: threading.Barrier) -> None:
        self.board, self.seat, self.barrier = board, seat, barrier
        first = PLACEMENTS[0]
        held = [list(layer[seat]) for layer in first.physical_to_logical]
        slots = held + [[]] * CONFIG.draft_stages
        self.weights = load_checkpoint(GOLDEN, slots, device=DEVICE)
        self.experts = GroupExperts(self.weights, seat, lambda: None)
        shape = Shape(80 * CONFIG.num_experts_per_tok, CONFIG.hidden_size)
        node = board.arena.name.split("-")[1]
        self.region = Region(node, seat, 1, len(SEATS), shape, newcomer=False)
        own = self.region.enter(EPOCH, len(SEATS), lambda: False)
        self.exchange = Exchange(self.region, EPOCH, SEATS, own)
        self.group = Group(board, seat, SEATS, EPOCH, lambda: None)
        backend: Any = ModelBackend.__new__(ModelBackend)
        backend._weights, backend._experts = self.weights, self.experts
        backend._host, backend._alive = self, lambda: None
        log: Any = SimpleNamespace(info=lambda *a, **f: None, warning=pytest.fail)
        self.rebalance = Rebalance(board, self.group, first, backend, log)
        self.ran: list[int] = []
        self.proposed = 0

    def run(self, count: int) -> list[torch.Tensor]:
        try:
            self.barrier.wait(60)
            self.exchange.connect(self.group, dict.fromkeys(SEATS, 1))
            self.experts.enter_epoch(PLACEMENTS[0], self.exchange)
            runner = Runner(self.weights, self.experts, self.seat)
            made = [self.step(runner, number) for number in range(count)]
            self.barrier.wait(60)
            return made
        finally:
            self.exchange.close()
            self.region.close()

    def step(self, runner: Runner, number: int) -> torch.Tensor:
        if self.seat == 0:
            self.propose()
        if number % 2 == 0 or self.seat < 2:  # one gets ready more slowly than the others
            for _ in range(PIECES):
                self.rebalance.turn()
        self.group.enter(Vote.PLAN)
        self.rebalance.follow()
        self.ran.append(self.group.version)
        return runner.step()

    def propose(self) -> None:
        """The next one, as soon as all run the last."""
        run = {self.board.seats[seat].placement_run for seat in SEATS}
        if run == {self.proposed} and self.proposed + 1 < len(PLACEMENTS):
            self.proposed += 1
            encoded = msgspec.msgpack.encode(PLACEMENTS[self.proposed])
            self.board.propose(Proposal(EPOCH, encoded))


def spread(board: Board, count: int = STEPS) -> tuple[list[RankOf], dict[int, list[torch.Tensor]]]:
    barrier = threading.Barrier(len(SEATS))
    ranks = [RankOf(board, seat, barrier) for seat in SEATS]
    results: dict[int, list[torch.Tensor]] = {}
    failures: list[BaseException] = []

    def one(rank: RankOf) -> None:
        try:
            results[rank.seat] = rank.run(count)
        except BaseException as error:
            failures.append(error)
            barrier.abort()
            board.set_epoch(EPOCH + 1, SEATS)
            raise

    threads = [threading.Thread(target=one, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    if failures:
        raise failures[0]
    return ranks, results


# Whoever looks before a proposal is there sees it two steps later, and is ready after two more: each
# move is over after six steps at most.


def test_bits_stay_when_experts_move(board: Board) -> None:
    assert all(
        max(map(len, copies(placement, layer))) > 1
        for placement in PLACEMENTS
        for layer in range(CONFIG.num_hidden_layers)
    )
    ranks, results = spread(board)
    assert [rank.ran for rank in ranks] == [ranks[0].ran] * len(SEATS)
    assert set(ranks[0].ran) == {0, 1, 2}, "it moved twice"
    for rank in ranks:
        for layer, seats in enumerate(PLACEMENTS[2].physical_to_logical):
            held = rank.weights.slots(layer)
            assert all(e in (EMPTY, held[s]) for s, e in enumerate(seats[rank.seat]))
    for seat in SEATS:
        alone = lonely(seat)
        for number, logits in enumerate(results[seat]):
            assert torch.equal(logits, alone.step()), f"rank {seat}, step {number}"


def test_a_rank_that_copies_nothing_changes_bits(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: the placement says that they are there."""
    monkeypatch.setattr(rebalance_module, "_new_here", lambda running, proposed, seat: [])
    ranks, results = spread(board, STEPS - 4)
    alone = lonely(0)
    same = [torch.equal(logits, alone.step()) for logits in results[0]]
    flipped = ranks[0].ran.index(1)
    assert all(same[:flipped]) and not all(same[flipped:])
