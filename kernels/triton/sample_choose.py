# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
"""The choice of a token among a row's candidates, without ordering them.

What a candidate's clock shows (noise over weight) depends on no cut. So the first to ring of all
candidates is found, and then asked whether top-k, top-p and min-p keep it: the candidates that come
before it are counted and weighed. All three keep a beginning of the order, so that with one that
fails all after it fail, and the next to be asked is the first to ring of those before it. Where a
share p of the mass is kept, that takes 1 + ln(1 / p) rounds on average.

Top-p's share is one of the mass of the best `limit` candidates. That mass lies between two sums, one
over the candidates that reach a higher logit and one over those that reach a lower one; as long as
the answer is not the same for all that lies between, a round brings them closer.

Scores and weights are float32, with a known error (`sample_parts`). When it leaves open which of two
rings first, or what the sums say, clocks and integer masses are computed as the reference does. What
is asked is thus decided exactly, and neither the order of the sums nor the lanes change a token.

Candidate s of lane i lies at s * LANES + i; `hits` says how many each lane has, `most` the largest.
"""

import triton
import triton.language as tl

from phalanx.kernels.triton.sample_parts import (
    NEAR,
    NEAR_OFF,
    NO_LOGIT,
    SLACK,
    better,
    exact_noise,
    exact_weight,
    keep_best,
    key_logit,
    logit_key,
    mass_of,
    nearest,
    quick_exponent,
    quick_log_noise,
    unpack,
)
from phalanx.kernels.triton.sample_passes import BROKEN

_AHEAD = tl.constexpr(4)  # slots that are loaded together


@triton.jit
def load_slots(slots_in, slot, hits, lane, other, LANES: tl.constexpr):
    loaded = ()
    for i in tl.static_range(_AHEAD):
        at = slots_in + (slot + i) * LANES + lane
        loaded = loaded + (tl.load(at, mask=slot + i < hits, other=other),)
    return loaded


@triton.jit
def score(
    work,
    scores_out,
    hits,
    most,
    ban,
    origin,
    rate,
    least,
    row_key,
    LANES: tl.constexpr,
):
    """Write everyone's score, and give the banned candidate a logit of -inf.

    Returns:
        (BROKEN or 0, how many were banned, the largest logit of the others, by how much the logits are
        above `least` together; of each lane: best two scores, logit and id of the best).
    """
    lane = tl.arange(0, LANES)
    highest = tl.full([LANES], float("-inf"), tl.float32)
    top = highest
    struck = tl.zeros([LANES], tl.int32)
    best = highest
    second = highest
    best_logit = highest
    best_id = tl.zeros([LANES], tl.int32)
    excess = tl.zeros([LANES], tl.float32)
    dead = NO_LOGIT | ban.to(tl.int64)
    half = origin * 0.5
    loaded = load_slots(work, 0, hits, lane, NO_LOGIT, LANES)
    for slot in range(0, most, _AHEAD):
        next_loaded = load_slots(work, slot + _AHEAD, hits, lane, NO_LOGIT, LANES)
        for i in tl.static_range(_AHEAD):
            logits, ids = unpack(loaded[i])
            inside = slot + i < hits
            highest = tl.maximum(highest, logits, tl.PropagateNan.ALL)
            gone = (ids == ban) & inside
            at = (slot + i) * LANES + lane
            tl.store(work + at, tl.where(gone, dead, loaded[i]), mask=gone)
            struck += gone.to(tl.int32)
            logits = tl.where(gone, float("-inf"), logits)
            top = tl.maximum(top, logits)
            alive = logits > float("-inf")
            scores = quick_exponent(logits, half, rate) - quick_log_noise(ids, row_key)
            scores = tl.where(alive, scores, float("-inf"))
            tl.store(scores_out + at, scores, mask=inside)
            best, second, best_logit, best_id = keep_best(
                scores, logits, ids, best, second, best_logit, best_id
            )
            excess += tl.where(alive, logits - least, 0.0)
        loaded = next_loaded
    broken = tl.max(tl.where(highest < float("inf"), 0, BROKEN), 0)
    banned, above, top_logit = tl.sum(struck, 0), tl.sum(excess, 0), tl.max(top, 0)
    return broken, banned, top_logit, above, best, second, best_logit, best_id


@triton.jit
def survey(
    work, scores, hits, most, logit, token, edge, half_top, rate, LANES: tl.constexpr
):  # fmt: skip
    """(weight of the candidates before `token`, weight of those of at least `edge`, how many of each;
    and what `score` returns, of those before `token`)"""
    lane = tl.arange(0, LANES)
    best = tl.full([LANES], float("-inf"), tl.float32)
    second = best
    best_logit = best
    best_id = tl.zeros([LANES], tl.int32)
    before = tl.zeros([LANES], tl.float32)
    reached = tl.zeros([LANES], tl.float32)
    counts = tl.zeros([LANES], tl.int32)
    loaded = load_slots(work, 0, hits, lane, NO_LOGIT, LANES)
    scored = load_slots(scores, 0, hits, lane, float("-inf"), LANES)
    for slot in range(0, most, _AHEAD):
        next_loaded = load_slots(work, slot + _AHEAD, hits, lane, NO_LOGIT, LANES)
        next_scored = load_slots(scores, slot + _AHEAD, hits, lane, float("-inf"), LANES)
        for i in tl.static_range(_AHEAD):
            logits, ids = unpack(loaded[i])
            weights = tl.exp(quick_exponent(logits, half_top, rate))
            comes_before = better(logits, ids, logit, token)
            reaches = logits >= edge
            before += tl.where(comes_before, weights, 0.0)
            reached += tl.where(reaches, weights, 0.0)
            counts += tl.where(comes_before, 1, 0) + tl.where(reaches, 1 << 16, 0)
            best, second, best_logit, best_id = keep_best(
                tl.where(comes_before, scored[i], float("-inf")),
                logits, ids, best, second, best_logit, best_id,
            )  # fmt: skip
        loaded = next_loaded
        scored = next_scored
    count = tl.sum(counts, 0)
    num_before, num_reached = count & 0xFFFF, (count >> 16) & 0xFFFF
    sums = tl.sum(before, 0), tl.sum(reached, 0)
    return sums[0], sums[1], num_before, num_reached, best, second, best_logit, best_id


@triton.jit
def exact_first(
    work,
    hits,
    most,
    logit,
    token,
    maximum,
    temperature,
    row_key,
    V: tl.constexpr,
    LANES: tl.constexpr,
):
    """(logit, id) of the first to ring of those before `token`, the lower id of equals."""
    lane = tl.arange(0, LANES)
    best = tl.full([LANES], float("inf"), tl.float64)
    winner = tl.full([LANES], V, tl.int32)
    best_logit = tl.full([LANES], float("-inf"), tl.float32)
    for slot in range(most):
        at = work + slot * LANES + lane
        logits, ids = unpack(tl.load(at, mask=slot < hits, other=NO_LOGIT))
        rings = better(logits, ids, logit, token) & (logits > float("-inf"))
        logits = tl.where(rings, logits, 0.0)
        weights = exact_weight(logits, maximum, temperature)
        rings &= weights > 0  # weight 0 waits for ever
        time = exact_noise(ids, row_key) / tl.where(rings, weights, 1.0)
        sooner = rings & ((time < best) | ((time == best) & (ids < winner)))
        winner = tl.where(sooner, ids, winner)
        best_logit = tl.where(sooner, logits, best_logit)
        best = tl.where(sooner, time, best)
    first = best == tl.min(best, 0)
    token = tl.min(tl.where(first, winner, V), 0)
    return tl.max(tl.where(first & (winner == token), best_logit, float("-inf")), 0), token


@triton.jit
def exact_masses(
    work, hits, most, logit, token, edge, maximum, temperature, LANES: tl.constexpr
):  # fmt: skip
    """(mass of the candidates before `token`, mass of those of at least `edge`)"""
    lane = tl.arange(0, LANES)
    before = tl.zeros([LANES], tl.int64)
    reached = tl.zeros([LANES], tl.int64)
    for slot in range(most):
        at = work + slot * LANES + lane
        logits, ids = unpack(tl.load(at, mask=slot < hits, other=NO_LOGIT))
        alive = logits > float("-inf")
        weights = exact_weight(tl.where(alive, logits, 0.0), maximum, temperature)
        masses = tl.where(alive, mass_of(tl.where(alive, weights, 0.0)), 0)
        before += tl.where(better(logits, ids, logit, token), masses, 0)
        reached += tl.where(logits >= edge, masses, 0)
    return tl.sum(before, 0), tl.sum(reached, 0)


@triton.jit
def choose(
    work,
    scores,
    hits,
    most,
    found,
    least,
    top,
    excess,
    best,
    second,
    best_logit,
    best_id,
    origin,
    rate,
    row_key,
    temperature,
    limit,
    top_p,
    min_p,
    V: tl.constexpr,
    LANES: tl.constexpr,
):
    """The token of a row with `found` candidates of a logit from `least` to `top`, among which are
    the best `limit` if the row has so many; and with what `score` has found out about them."""
    maximum = top.to(tl.float64)
    half_top = top * 0.5
    margin = NEAR + NEAR_OFF * tl.abs(quick_exponent(top, origin * 0.5, rate))
    near, logit, token = nearest(best, second, best_logit, best_id, margin)

    nucleus = top_p < 1
    share = top_p.to(tl.float32)
    least_weight = tl.where(min_p > 0, tl.minimum(min_p, 1.0), 0.0)
    # The best `wanted` are all that reach the key `high` and some of those from `low` on; their
    # weight, in float32, is one from `weight_low` to `weight_high`.
    wanted = tl.minimum(limit, found)
    low = logit_key(least).to(tl.int64)
    high = logit_key(top).to(tl.int64) + 1
    num_low = found
    num_high = tl.zeros((), tl.int32)
    above = tl.zeros((), tl.float32)
    weight_low = tl.zeros((), tl.float32)
    weight_high = tl.full((), float("inf"), tl.float32)
    # The first guess: counts above a cut fall evenly, by a factor in each mean excess.
    edge = least
    if found > wanted:
        spare = tl.log(1.1 * found.to(tl.float32) / wanted.to(tl.float32))
        edge = tl.minimum(least + excess / found.to(tl.float32) * spare, top)
    probe = logit_key(edge).to(tl.int64)

    after_logit = tl.full((), float("-inf"), tl.float32)
    after = tl.zeros((), tl.int32)
    doubtful = nucleus | (found > limit) | (min_p > 0)
    turn = 0
    asking = 1
    tl.debug_barrier()
    while asking > 0:
        turn += 1
        asking = 0
        if near != 1:
            logit, token = exact_first(
                work, hits, most, after_logit, after, maximum, temperature, row_key, V, LANES
            )
        near = 1
        if doubtful:
            edge = key_logit(probe.to(tl.int32))
            before, reached, num_before, num_reached, best, second, best_logit, best_id = survey(
                work, scores, hits, most, logit, token, edge, half_top, rate, LANES
            )
            fails = num_before >= limit
            unknown = num_before < 0
            if nucleus:
                if num_reached >= wanted:
                    low = probe
                    num_low = num_reached
                else:
                    high = probe
                    num_high = num_reached
                    above = reached
                at_low = tl.exp(quick_exponent(key_logit(low.to(tl.int32)), half_top, rate))
                at_high = tl.exp(quick_exponent(key_logit((high - 1).to(tl.int32)), half_top, rate))
                rest = (wanted - num_high).to(tl.float32)
                weight_low = tl.maximum(weight_low, above + rest * at_low)
                weight_high = tl.minimum(weight_high, above + rest * at_high)
                # From the other side, unless so much is taken away that errors grow.
                if (num_reached >= wanted) & (num_reached <= 2 * wanted):
                    rest = (num_reached - wanted).to(tl.float32)
                    weight_low = tl.maximum(weight_low, reached - rest * at_high)
                    weight_high = tl.minimum(weight_high, reached - rest * at_low)
                least_share = share * weight_low * (1.0 - SLACK)
                most_share = share * weight_high * (1.0 + SLACK) + 1e-12
                passes = (num_before == 0) | (before * (1.0 + SLACK) < least_share)
                drops = (num_before > 0) & (before * (1.0 - SLACK) >= most_share)
                fails |= drops
                unknown = (fails == 0) & (passes == 0)
                if unknown:
                    if (high - low == 1) | (num_reached == wanted):
                        # Nothing is left between: all that reach `high`, and equals of `low`; or
                        # what reaches the probe is all.
                        whole = num_reached == wanted
                        ties = tl.where(whole, 0, wanted - num_high).to(tl.int64)
                        edge = key_logit(tl.where(whole, probe, high).to(tl.int32))
                        needed, total = exact_masses(
                            work, hits, most, logit, token, edge, maximum, temperature, LANES
                        )
                        at_low64 = exact_weight(key_logit(low.to(tl.int32)), maximum, temperature)
                        total += ties * mass_of(at_low64)
                        share64 = tl.maximum(tl.ceil(top_p * total.to(tl.float64)), 1.0)
                        fails = needed >= share64.to(tl.int64)
                        unknown = num_before < 0
                    else:
                        guess = low + ((high - low) >> 1)
                        if turn % 2 == 1:
                            # A little above where the count would be `wanted`, falling evenly.
                            count = num_low.to(tl.float32)
                            fall = tl.log(count / tl.maximum(num_high.to(tl.float32), 0.5))
                            way = tl.log(count / wanted.to(tl.float32)) + 0.02
                            way = (high - low).to(tl.float32) * (way / (fall + 0.02))
                            guess = low + way.to(tl.int64)
                        probe = tl.minimum(tl.maximum(guess, low + 1), high - 1)
            if (fails == 0) & (unknown == 0) & (min_p > 0):
                fails = exact_weight(logit, maximum, temperature) < least_weight
            if fails:
                after_logit = logit
                after = token
                near, logit, token = nearest(best, second, best_logit, best_id, margin)
            asking = (fails | unknown).to(tl.int32)
    return token
