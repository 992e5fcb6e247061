"""Experts spread over 1 to 4 ranks, any placement and copies: every logit has the same bits as on one rank.

Ranks are threads here, over real arenas, doorbells and flags; whole processes are tested in tests/e2e.
"""

import random
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from phalanx.protocol.board import Board
from phalanx.protocol.errors import EpochChanged
from phalanx.protocol.placement import (
    Placement,
    after_join,
    after_loss,
    initial_placement,
    slots_per_rank,
)
from phalanx.worker_svc.exchange import Exchange, Region, Shape
from phalanx.worker_svc.experts import GroupExperts
from phalanx.worker_svc.group import Group
from phalanx.worker_svc.model.batch import SequenceRows, StepBatch
from phalanx.worker_svc.model.caches import CacheLayout, CachePools
from phalanx.worker_svc.model.checkpoint import Weights, load_checkpoint
from phalanx.worker_svc.model.config import ModelConfig
from phalanx.worker_svc.model.model import Model
from phalanx.worker_svc.model.moe import Experts, LocalExperts
from phalanx.worker_svc.model.tensors import num_experts
from phalanx.worker_svc.sampled_rows import SampledRows

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "tiny-a"
CONFIG = ModelConfig.load(GOLDEN)
EPOCH = 2


def weights_of(placement: Placement, seat: int) -> Weights:
    index = placement.seats.index(seat)
    held = [[max(e, 0) for e in layer[index]] for layer in placement.physical_to_logical]
    layers = range(CONFIG.num_hidden_layers, CONFIG.num_hidden_layers + CONFIG.draft_stages)
    drafts = [list(range(num_experts(CONFIG, layer))) for layer in layers]
    return load_checkpoint(GOLDEN, held + drafts)


def prompts(seat: int) -> list[list[int]]:
    rng = np.random.default_rng(seat)
    return [
        rng.integers(3, CONFIG.vocab_size, n).tolist() for n in (5 + 9 * seat, 1, 33)[: seat + 1]
    ]


def run(weights: Weights, experts: Experts, seat: int) -> torch.Tensor:
    """Logits of all rows of this seat's prompts, in one batch and then one decode row each."""
    pools = CachePools(CacheLayout(CONFIG), 16, 4)
    model = Model(weights, pools, experts)
    tokens = prompts(seat)

    def batch(start: list[int], rows: list[list[int]]) -> StepBatch:
        return StepBatch.of(
            [
                SequenceRows(i, at, ids, [1 + 2 * i, 2 + 2 * i], range(len(ids)), copy_key=7 * i)
                for i, (at, ids) in enumerate(zip(start, rows, strict=True))
            ]
        )

    first = model.forward(batch([0] * len(tokens), tokens))
    first.commit([len(ids) for ids in tokens])
    second = model.forward(batch([len(ids) for ids in tokens], [[7]] * len(tokens)))
    return torch.cat((first.logits, second.logits))


def in_threads(seats: list[int], work: Callable[[int], torch.Tensor]) -> dict[int, torch.Tensor]:
    results: dict[int, torch.Tensor] = {}
    failures: list[BaseException] = []

    def one(seat: int) -> None:
        try:
            results[seat] = work(seat)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=one, args=(seat,)) for seat in seats]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures, failures
    return results


def spread(
    board: Board,
    placement: Placement,
    idle: int | None = None,
    begun: int = 0,
    watch: Callable[[int, Weights], SampledRows | None] = lambda seat, weights: None,
) -> dict[int, torch.Tensor]:
    """Run every seat of the placement at once; `idle` takes placeholder steps. The epoch has `begun` so
    many exchanges before. `watch` may take rows of a seat."""
    node = board.arena.name.split("-")[1]
    seats = list(placement.seats)
    shape = Shape(80 * CONFIG.num_experts_per_tok, CONFIG.hidden_size)
    barrier = threading.Barrier(len(seats))

    def work(seat: int) -> torch.Tensor:
        weights = weights_of(placement, seat)
        experts = GroupExperts(weights, seat, lambda: None, watch(seat, weights))
        region = Region(node, seat, 1, len(seats), shape, newcomer=False)
        own = region.enter(EPOCH, len(seats), lambda: False) if len(seats) > 1 else None
        exchange = Exchange(region, EPOCH, seats, own)
        exchange._number = begun
        try:
            barrier.wait(60)
            exchange.connect(
                Group(board, seat, seats, EPOCH, lambda: None), dict.fromkeys(seats, 1)
            )
            experts.enter_epoch(placement, exchange)
            if seat != idle:
                return run(weights, experts, seat)
            experts.serve()
            experts.serve()
            return torch.empty(0)
        finally:
            barrier.wait(60)
            exchange.close()
            region.close()

    return in_threads(seats, work)


def alone(seat: int) -> torch.Tensor:
    weights = load_checkpoint(GOLDEN)
    return run(weights, LocalExperts(weights), seat)


def placement(ranks: int) -> Placement:
    experts = CONFIG.n_routed_experts
    slots = slots_per_rank(experts, ranks)
    return initial_placement(CONFIG.num_hidden_layers, experts, range(ranks), slots)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_any_number_of_ranks_computes_the_same_bits(board: Board, ranks: int) -> None:
    for seat, logits in spread(board, placement(ranks)).items():
        assert torch.equal(logits, alone(seat)), f"seat {seat} of {ranks}"


def test_an_epoch_outlives_the_numbers_of_its_exchanges(board: Board) -> None:
    """They have 32 bits. All ranks would fall at once, weeks after the last change of the group."""
    for seat, logits in spread(board, placement(2), begun=2**32 - 3).items():
        assert torch.equal(logits, alone(seat)), f"seat {seat}"


def test_after_a_loss_and_a_join(board: Board) -> None:
    """Seats 0, 1, 2; seat 1 falls: a hole stays a hole. Then it comes back in the same seat."""
    holed = after_loss(placement(3), 1)
    assert holed.seats == (0, 2)
    for layout in (holed, after_join(holed, 1)):
        for seat, logits in spread(board, layout).items():
            assert torch.equal(logits, alone(seat)), f"seat {seat} of {layout.seats}"


def test_a_step_is_finished_though_a_rank_joins_meanwhile(board: Board) -> None:
    """Nobody fell: the odd word ends no step, and what comes out is the same."""
    board.set_epoch(EPOCH + 1, [], ends_steps=False)
    for seat, logits in spread(board, placement(3)).items():
        assert torch.equal(logits, alone(seat)), f"seat {seat}"


def test_an_idle_rank_serves_its_experts(board: Board) -> None:
    logits = spread(board, placement(3), idle=2)
    assert torch.equal(logits[0], alone(0)) and torch.equal(logits[1], alone(1))


def test_a_moved_epoch_ends_every_wait(board: Board) -> None:
    """A peer that never comes: the epoch word releases the rank that waits for it."""
    node = board.arena.name.split("-")[1]
    layout = placement(2)
    weights = weights_of(layout, 0)
    experts = GroupExperts(weights, 0, lambda: None)
    shape = Shape(80 * CONFIG.num_experts_per_tok, CONFIG.hidden_size)
    regions = [Region(node, seat, 1, 2, shape, newcomer=False) for seat in (0, 1)]
    exchange, with_peer = (
        Exchange(region, EPOCH, [0, 1], region.enter(EPOCH, 2, lambda: False)) for region in regions
    )
    exchange.connect(Group(board, 0, [0, 1], EPOCH, lambda: None), {0: 1, 1: 1})
    experts.enter_epoch(layout, exchange)
    ended = threading.Event()

    def wait() -> None:
        with pytest.raises(EpochChanged):
            run(weights, experts, 0)
        ended.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert not ended.wait(0.2)
    board.set_epoch(EPOCH + 1, [0])
    assert ended.wait(5)
    thread.join()
    exchange.close()
    with_peer.close()
    for region in regions:
        region.close()


def test_a_rank_that_computes_other_rows_is_seen_by_those_who_hold_the_expert(board: Board) -> None:
    wrong, judged = 1, list[tuple[int, int, bool]]()
    for number in range(4):
        taken: dict[int, SampledRows] = {}

        def watch(
            seat: int, weights: Weights, taken: dict[int, SampledRows] = taken, number: int = number
        ) -> SampledRows:
            if seat == wrong:
                for layer in range(CONFIG.num_hidden_layers):
                    weights.expert_stack(layer)[2].neg_()
            taken[seat] = SampledRows(weights, random.Random(seat + 3 * number))
            taken[seat].want()
            return taken[seat]

        spread(board, placement(3), watch=watch, begun=1000 * number)
        for seat, rows in taken.items():
            assert not rows.wanted, "one row of one step"
            if (found := rows.compute_again()) is not None:
                judged.append((seat, found[0].seat, found[1]))
                assert rows.compute_again() is None
    assert {same for seat, by, same in judged if wrong not in (seat, by)} == {True}
    assert {same for seat, by, same in judged if by == wrong} == {False}
    assert {same for seat, by, same in judged if seat == wrong} == {False}
