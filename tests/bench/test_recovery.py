"""The recovery benchmark reads changes of the group right, compares every stream, and kills for real."""

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from lateness import Lateness

from phalanx.bench import recovery, recovery_fault
from phalanx.bench.recovery import run
from phalanx.bench.recovery_cpu import used
from phalanx.bench.recovery_fault import Fault
from phalanx.bench.recovery_figures import Figures, account, compare, compare_drawn
from phalanx.bench.recovery_load import (
    USUAL,
    Load,
    Played,
    Sequence,
    Sizes,
    requests,
    with_seeds,
)
from phalanx.bench.recovery_story import story
from phalanx.bench.recovery_watch import Change, Mark, changes_in, members_of
from phalanx.protocol.config import NodeConfig
from phalanx.protocol.limits import HANG_MS
from phalanx.protocol.messages import (
    ProcessStatus,
    PromptLogprob,
    Sampling,
    StatusReply,
    TokenLogprobs,
)
from phalanx.protocol.queues import STEP
from phalanx.protocol.topology import Seat, Topology
from phalanx.services.client import Spec
from phalanx.supervisor.commands.bench import bench
from phalanx.supervisor.main import TICK_MS
from phalanx.supervisor.watch import LOOK_MS


def test_a_change_is_stop_publish_and_go() -> None:
    marks = [Mark(5, 2, 2), Mark(10, 3, 2), Mark(14, 3, 3), Mark(15, 3, 4), Mark(20, 4, 4)]
    assert changes_in(marks, 7) == [Change(10, 15, 20)]
    assert changes_in(marks[:-1], 7) == [], "it is not complete"
    assert changes_in(marks, 12) == [], "it began before"
    again = [*marks, Mark(30, 5, 4), Mark(33, 5, 6), Mark(34, 6, 6)]
    assert changes_in(again, 7) == [Change(10, 15, 20), Change(30, 33, 34)]
    assert changes_in(again, 20) == [Change(30, 33, 34)]


def test_a_death_during_the_change_makes_it_longer() -> None:
    before = Mark(5, 2, 2)
    marks = [before, Mark(10, 3, 2), Mark(15, 3, 4), Mark(16, 5, 4), Mark(18, 5, 6), Mark(20, 6, 6)]
    assert changes_in(marks, 7) == [Change(10, 18, 20)]


def test_a_change_that_was_slept_through_is_not_taken_for_the_next_one() -> None:
    marks = [Mark(5, 2, 2), Mark(20, 4, 4), Mark(30, 5, 4), Mark(33, 5, 6), Mark(34, 6, 6)]
    assert changes_in(marks, 7) == [Change(20, 20, 20), Change(30, 33, 34)]
    assert changes_in(marks, 25) == [Change(30, 33, 34)]


def test_a_change_tells_when_each_rank_did_its_part() -> None:
    """Seat 1 falls, and comes back with answers to none of this."""
    marks = [
        Mark(5, 2, 2, ((1, 2, 2), (1, 2, 2), (1, 2, 2))),
        Mark(10, 3, 2, ((1, 2, 2), (1, 2, 2), (1, 2, 2))),
        Mark(11, 3, 2, ((1, 2, 2), (1, 2, 2), (3, 2, 2))),
        Mark(12, 3, 2, ((3, 2, 2), (1, 2, 2), (3, 2, 2))),
        Mark(14, 3, 4, ((3, 4, 2), (0, 0, 2), (3, 2, 2))),
        Mark(15, 3, 4, ((3, 4, 2), (0, 0, 2), (3, 4, 2))),
        Mark(16, 4, 4, ((3, 4, 2), (0, 0, 2), (3, 4, 2))),
        Mark(17, 4, 4, ((3, 4, 4), (0, 0, 2), (3, 4, 2))),
        Mark(19, 4, 4, ((3, 4, 4), (0, 0, 2), (3, 4, 4))),
    ]
    (change,) = changes_in(marks, 7)
    assert change == Change(10, 14, 16, {0: 12, 2: 11}, {0: 14, 2: 15}, {0: 17, 2: 19})


def test_the_story_of_a_pause() -> None:
    """A step is abandoned, one of rank 2 carries the prompt of who moved: the longest gap is told by its parts."""
    ms = 1_000_000
    change = Change(104 * ms, 110 * ms, 120 * ms, {0: 105 * ms}, {0: 111 * ms}, {0: 121 * ms})
    steps = {
        0: np.array(
            [
                (90 * ms, 30_000, 29_000, 4, 0),
                (106 * ms, 16_000, 0, 4, 0),
                (160 * ms, 40_000, 38_000, 4, 0),
                (195 * ms, 35_000, 33_000, 4, 0),
            ],
            STEP,
        ),
        2: np.array([(161 * ms, 40_000, 39_000, 132, 128)], STEP),
    }
    names = {("here", 0): 0, ("moved", 0): 1}
    fault = Fault("worker", 100 * ms, {("moved", 0)}, [change], 400 * ms, 101 * ms, 0.5, names,
                  {**names, ("moved", 0): 2}, steps)  # fmt: skip
    times = [at * ms for at in (30, 60, 91, 165, 200)]
    told = story(fault, Sequence(0, 0, "here", 0, [7] * 5, times, "length"), 300 * ms)
    assert (told["gap_ms"], told["normal_ms"], told["before"], told["after"]) == (43, 31, -9, 65)
    assert (told["rank"], told["rank_after"], told["delivery_ms"]) == (0, 0, 5)
    assert told["changes"] == [
        {
            "stop": 4,
            "stopped": {0: 5},
            "published": 10,
            "ready": {0: 11},
            "go": 20,
            "entered": {0: 21},
        }
    ]
    assert [
        (s["rank"], s["began"], s["done"], s["worker_ms"], s["prompt_rows"]) for s in told["steps"]
    ] == [
        (0, -10, 6, 0, 0),
        (0, 20, 60, 38, 0),
        (2, 21, 61, 39, 128),
        (0, 60, 95, 33, 0),
    ]
    told = story(
        fault, Sequence(1, 0, "moved", 0, [7] * 3, [80 * ms, 95 * ms, 250 * ms], "length"), 300 * ms
    )
    assert (told["rank"], told["rank_after"], told["delivery_ms"]) == (1, 2, 89)


def test_cpu_time_is_of_the_looks_around_a_pause() -> None:
    ms = 1_000_000
    seen = [
        (10 * ms, {"a 1": (5 * ms, 0), "b 2": (7 * ms, 7 * ms)}),
        (20 * ms, {"a 1": (6 * ms, 0), "b 2": (7 * ms, 8 * ms)}),
        (30 * ms, {"a 1": (9 * ms, 2 * ms), "b 2": (7 * ms, 8 * ms), "c 3": (4 * ms, 0)}),
        (40 * ms, {"a 1": (99 * ms, 0)}),
    ]
    assert used(seen, 21 * ms, 29 * ms) == {"a 1": [3, 2], "c 3": [4, 0]}
    assert used(seen, 5 * ms, 15 * ms) == {"a 1": [1, 0], "b 2": [0, 1]}
    assert used([], 5 * ms, 15 * ms) == {}


def test_a_group_is_whole_when_it_runs_not_when_it_is_told_of() -> None:
    seats = (Seat(0, 1, 1, "member"), Seat(1, 2, 1, "member"), Seat(2, 1, 1, "lost"))
    assert members_of(Topology(6, seats), 6) == 2
    assert members_of(Topology(6, seats), 5) == 0
    assert members_of(None, 1) == 0


def test_half_of_the_prompts_are_long_and_every_kind_occurs() -> None:
    specs = requests(random.Random(1), 12)
    assert sum(len(spec.prompt) == USUAL.long_prompt for spec in specs) == 6
    assert any(spec.n == 2 for spec in specs) and any(spec.sampling.stop for spec in specs)
    assert any(spec.sampling.frequency_penalty for spec in specs)
    assert any(spec.sampling.seed is None for spec in specs)
    assert [at for at, spec in enumerate(specs) if spec.sampling.logprobs] == [0, 5, 10]
    assert [at for at, spec in enumerate(specs) if spec.sampling.prompt_logprobs] == [0, 7]
    known = {(at, 0): Sequence(at, 0, tokens=[at, 7]) for at in range(12)}
    again = requests(random.Random(1), 12, known)
    assert [spec.prompt for spec in again] == [spec.prompt for spec in specs]
    assert again[6].sampling.predicted_token_ids == (6, 7)


def test_a_changed_token_and_a_lost_stream_are_counted() -> None:
    """The control: with other tokens, as of a rank that is one ulp off, the figures say so."""
    load = Load([Spec([5], Sampling(seed=1)), Spec([5], Sampling(seed=2))])
    wanted = {(at, 0): Sequence(at, 0, tokens=[7, 8, 9], finish="length") for at in range(2)}
    changed = Sequence(0, 0, tokens=[7, 8, 4], finish="length")
    lost = Sequence(1, 0, tokens=[7])
    figures = Figures()
    compare(Played([changed, lost, wanted[1, 0]], 1.0), wanted, load, figures)
    assert (figures.changed, figures.lost, figures.compared) == (1, 1, 3)


def test_a_changed_log_probability_is_counted() -> None:
    def sequence(logprob: float, rank: int = 1) -> Sequence:
        scores = [TokenLogprobs(logprob)], (None, PromptLogprob(-1.0, rank))
        return Sequence(
            0, 0, tokens=[7], finish="stop", logprobs=scores[0], prompt_logprobs=scores[1]
        )

    load, figures = Load([Spec([5], Sampling(seed=1))]), Figures()
    played = Played([sequence(-0.5), sequence(-0.5000001), sequence(-0.5, 2)], 1.0)
    compare(played, {(0, 0): sequence(-0.5)}, load, figures)
    assert (figures.changed, figures.scores_changed, figures.compared) == (0, 2, 3)
    compare_drawn([sequence(-0.25)], [sequence(-0.5)], figures)
    assert (figures.changed, figures.scores_changed) == (0, 3)


def test_a_changed_text_is_seen_and_so_is_a_stream_whose_seed_the_node_drew() -> None:
    specs = [Spec([5], Sampling(seed=1)), Spec([6], Sampling(max_tokens=9))]
    load, figures = Load(specs), Figures()

    def sequence(position: int, text: str, seed: int = 0) -> Sequence:
        return Sequence(position, 0, tokens=[7], finish="stop", text=text, seed=seed)

    wanted = {(at, 0): sequence(at, "a") for at in range(2)}
    other = sequence(0, "b")
    drawn = [sequence(1, "c", 77), sequence(1, "d", 78)]
    assert compare(Played([other, *drawn], 1.0), wanted, load, figures) == drawn
    assert (figures.changed, figures.compared) == (1, 3)
    again = with_seeds(specs, drawn)
    assert [(spec.prompt, spec.sampling.seed, spec.sampling.max_tokens) for spec in again] == [
        ([6], 77, 9),
        ([6], 78, 9),
    ]
    compare_drawn(drawn, [sequence(1, "e"), sequence(0, "c")], figures)
    assert figures.changed == 2


def test_a_late_final_is_a_gap_and_a_first_token_is_waited_for_too() -> None:
    ms = 1_000_000
    fault = Fault("worker", 100 * ms, set(), [], 400 * ms, 130 * ms, 0.5)
    late = Sequence(0, 0, "a", 0, [7] * 4, [80 * ms, 90 * ms, 100 * ms, 110 * ms], "stop")
    late.ended_ns = 190 * ms
    silent = Sequence(1, 0, "b", 50 * ms, [7], [350 * ms], "stop")
    figures = Figures()
    account(fault, [late, silent], figures)
    assert figures.gaps["worker"].survivors == [70]
    assert figures.gaps["worker"].unspoken == [250]


MS = 1_000_000


def ran(*times_ms: int, request_id: str = "a", sent_ms: int = 0) -> Sequence:
    """A sequence whose final came with its last token."""
    times = [at * MS for at in times_ms]
    done = Sequence(0, 0, request_id, sent_ms * MS, [7] * len(times), times, "length")
    done.ended_ns = times[-1]
    return done


def a_fault_that_lasts(*changes: Change) -> Fault:
    """A worker falls at 100 ms, the others go on at 110 ms, and it joins again after 5 s."""
    first = Change(101 * MS, 105 * MS, 110 * MS)
    last = Change(5000 * MS, 5003 * MS, 5010 * MS)
    changed = [first, *changes, last]
    return Fault("worker", 100 * MS, {("moved", 0)}, changed, 5010 * MS, 101 * MS, 0.5)


@pytest.mark.parametrize(
    ("times_ms", "gap_ms"),
    [
        ((90, 95, 4000), 3900),
        ((95, 4000), 3905),
        ((10, 20, 30, 40, 50, 60, 70, 80, 90, 500), 400),
    ],
)
def test_the_longest_gap_of_a_short_stream_is_not_its_step(
    times_ms: tuple[int, ...], gap_ms: float
) -> None:
    figures = Figures()
    account(a_fault_that_lasts(), [ran(*times_ms)], figures)
    assert figures.gaps["worker"].survivors == [gap_ms]


def test_a_final_that_comes_alone_after_the_pause_is_waited_for() -> None:
    alone, figures = ran(10, 20, 30, 108), Figures()
    alone.ended_ns = 4108 * MS
    account(a_fault_that_lasts(), [alone], figures)
    assert figures.gaps["worker"].survivors == [3990]


def test_what_spoke_first_after_the_fault_stands_still_too() -> None:
    """Its wait for the first token is told apart, whether it was sent before the fault or after it."""
    figures = Figures()
    begun = ran(300, 310, 320, 3320, 3330, sent_ms=150)
    unspoken = ran(1120, 1130, 1140, 1240, 1250, request_id="moved", sent_ms=50)
    after = ran(5100, 5110, 9000, sent_ms=150)
    account(a_fault_that_lasts(), [begun, unspoken, after], figures)
    gaps = figures.gaps["worker"]
    assert (gaps.survivors, gaps.moved, gaps.later) == ([], [], [2990, 90])
    assert (gaps.begun, gaps.unspoken) == ([150, 4950], [1020])
    assert figures.rejoin == {"survivors": [3880], "moved": []}
    assert figures.worst[0]["later"]["gap_ms"] == 2990


def test_the_last_change_is_the_rejoin() -> None:
    """Another death makes the group stop once more before the rejoin."""
    again, figures = Change(300 * MS, 301 * MS, 320 * MS), Figures()
    often = [at * 10 for at in range(32)]
    account(a_fault_that_lasts(again), [ran(*often, 400, 1900, 6000)], figures)
    assert figures.gaps["worker"].survivors == [4090]
    assert (figures.phases["rejoin_stop"], figures.phases["rejoin_go"]) == ([3], [7])


def test_a_change_that_the_watch_slept_through_has_no_phases() -> None:
    slept, figures = Change(900 * MS, 900 * MS, 900 * MS), Figures()
    fault = Fault("worker", 100 * MS, set(), [slept], 900 * MS, 101 * MS, 0.5)
    account(fault, [ran(80, 90, 950, 960)], figures)
    assert (figures.phases, figures.pauses, figures.unseen) == ({"until_rejoined": [800]}, {}, 1)
    assert figures.gaps["worker"].survivors == [850]
    figures = Figures()
    account(a_fault_that_lasts(), [], figures)
    assert figures.unseen == 0 and figures.phases["stop"] == [4]


def test_the_newcomers_first_steps_are_part_of_the_rejoin() -> None:
    """It has joined at 310 ms; the step that it is in for the first time is slow for all."""
    ms = 1_000_000
    changes = [Change(104 * ms, 110 * ms, 120 * ms), Change(302 * ms, 305 * ms, 310 * ms)]
    fault = Fault("worker", 100 * ms, {("b", 0)}, changes, 310 * ms, 101 * ms, 0.5)
    often = [at * ms for at in range(10, 310, 30)]
    here = Sequence(0, 0, "a", 0, [7] * 12, [*often, 330 * ms, 480 * ms], "stop")
    moved = Sequence(0, 0, "b", 0, [7] * 12, [*often[:3], 900 * ms], "stop")
    figures = Figures()
    account(fault, [here, moved], figures)
    assert figures.gaps["worker"].survivors == [20]
    assert figures.rejoin == {"survivors": [120], "moved": [800]}
    (worst,) = figures.worst
    assert (worst["rejoin"]["before"], worst["rejoin"]["gap_ms"]) == (230, 120)


def test_gaps_are_of_the_victims_kind_and_of_who_ran_on_its_rank() -> None:
    ms = 1_000_000

    def sequence(request_id: str, *times_ms: int, sent_ms: int = 0) -> Sequence:
        times = [at * ms for at in times_ms]
        return Sequence(0, 0, request_id, sent_ms * ms, tokens=[7], times=times, finish="length")

    fault = Fault("scheduler", 100 * ms, {("moved", 0)}, [], 400 * ms, 130 * ms, 0.5)
    figures = Figures()
    sequences = [
        sequence("moved", 80, 90, 350, 360, 370),
        sequence("other", 80, 90, 120, 130, 140),
        sequence("over", 70, 80, 90),
        sequence("begun", 430, sent_ms=200),
        sequence("later", 430, sent_ms=420),
    ]
    account(fault, sequences, figures)
    gaps = figures.gaps["scheduler"]
    assert (gaps.moved, gaps.survivors, gaps.begun, gaps.whole) == ([250], [20], [230], [300])
    assert gaps.died == [30]
    assert figures.phases == {} and figures.pauses == {}, "the group did not change"


def test_a_victim_that_is_never_alive_ends_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not in the node that is started for it, nor would it be in the next one."""
    started: list[int] = []

    @contextlib.contextmanager
    def node(*arguments: object, **named: object) -> Iterator[tuple[NodeConfig, None]]:
        started.append(1)
        assert len(started) < 3, "nodes without end"
        yield NodeConfig(run_dir="/tmp/none"), None

    async def play(run_dir: Path, load: Load) -> Played:
        done = [Sequence(at, 0, tokens=[7], finish="length") for at in range(len(load.specs))]
        return Played(done, 1.0)

    process = ProcessStatus("worker-0", 1, "ready", 0, 0, 1)
    reply = StatusReply(1, True, 2, (), (process,), "", "", 1.0, (), (), "")
    monkeypatch.setattr(recovery, "private_node", node)
    monkeypatch.setattr(recovery, "play", play)
    for module in (recovery, recovery_fault):
        monkeypatch.setattr(module, "status", lambda run_dir: reply)
    figures = run(kills=2, streams=1, victims=("eplb",))
    assert figures["failed"] == (
        "RuntimeError: no eplb is alive in a node that is ready, so none can fall; there are: worker-0"
    )
    assert len(started) == 1 and figures["kills"] == 0


@pytest.mark.process
@pytest.mark.soak
def test_a_killed_and_a_stopped_service_change_no_token() -> None:
    for how in ("kill", "stop"):
        figures = run(kills=2, ranks=2, streams=4, victims=("gateway", "tokenizer"), how=how)
        assert (figures["tokens_changed"], figures["streams_lost"]) == (0, 0)
        assert [row["faults"] for row in figures["rows"]] == [1, 1], figures["failed"]
        least_ms = HANG_MS / 2 if how == "stop" else 0
        assert all(row["died_ms_p50"] >= least_ms for row in figures["rows"])


@pytest.mark.process
@pytest.mark.soak
def test_a_rank_that_is_one_ulp_off_changes_tokens_and_the_comparison_sees_it() -> None:
    figures = run(kills=1, ranks=2, streams=4, noise=True)
    assert figures["tokens_changed"] > 0, figures["failed"]
    assert (figures["noise"], figures["control"]) == ("worker-0", "the comparison can see it")


@pytest.mark.parametrize(
    ("options", "changed", "scores", "code"),
    [([], 0, 0, 0), ([], 2, 0, 4), ([], 0, 1, 4), (["--noise"], 2, 1, 0), (["--noise"], 0, 1, 4)],
)
def test_with_noise_it_fails_when_nothing_changed(
    options: list[str], changed: int, scores: int, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = {
        "failed": "",
        "tokens_changed": changed,
        "logprobs_changed": scores,
        "streams_lost": 0,
    }
    monkeypatch.setattr(recovery, "run", lambda *arguments: dict(figures))
    assert CliRunner().invoke(bench, ["recovery", *options, "--json"]).exit_code == code


@pytest.mark.process
@pytest.mark.soak
def test_one_kill_changes_no_token_and_loses_no_stream() -> None:
    with Lateness() as lateness:
        figures = run(kills=1, ranks=2, streams=3, sizes=Sizes(200, 40))
    assert (figures["tokens_changed"], figures["streams_lost"]) == (0, 0)
    assert figures["logprobs_changed"] == 0
    assert figures["streams_compared"] >= 6
    assert set(figures["phases_ms"]) >= {"detect", "stop", "go", "rejoin_stop", "rejoin_go"}
    # While workers compute the supervisor looks at each of them every few ms; two ranks share two CPUs here.
    assert 0 < figures["detect_ms_p50"] < lateness.bound_ms(LOOK_MS)
    # The longest that any stream stands still, against the longest of a run without faults: what comes on top
    # is STOP and GO, and to compute again what the lost rank knew, which is a prompt step.
    assert figures["survivors_gap_ms_max"] is None or figures[
        "survivors_gap_ms_max"
    ] < 10 * figures["fault_free_gap_ms_max"] + lateness.bound_ms(TICK_MS)
    assert figures["kills"] == 1
