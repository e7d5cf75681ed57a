"""Rescue for the Triton kernels: the set S_q of each row and the factor of the keys outside it, before the fused walk.

As for top-k, rows of scores lie in a scratch buffer and a program holds one row in registers (`triton_select`). The
search runs over the softmax weights e = exp(s − max), for the largest of them at or above which the mass q lies: from
where q would lie if their mass were normal over the scores, by interpolation of the mass over log e and by bisection
in turn. Every step ends at a weight of the row, and is the last when the mass passes q there.

Keys equal at the edge are inside in key order until the mass reaches q, as in the reference. The edge may be the next
key where the mass of the larger ones is q to FP32's rounding of the sums, about 2^−20, which is rare. Two cuts, below
the keys at the edge and above them, are put halfway to the next scores, so that the walk keeps the same keys even
where its sums round differently.

The row is divided by its sum in the end, so that one factor says it all. Inside it is 1, as is the weight of the
maximum; no weight is then above the number of keys, which FP16 holds. Outside it restores the mass of whatever weights
FP32 has there; where all are 0 the other side is all there is.
"""

from collections.abc import Callable
from statistics import NormalDist

import torch
import triton
import triton.language as tl
from torch import Tensor

from softmaxlab.backends.triton_maps import LOG2E, MINUS_INFINITY, weights
from softmaxlab.backends.triton_plans import Plan
from softmaxlab.backends.triton_tiles import INFINITY

#: What the walk is given of each row.
NUMBERS = 5
#: Keys of a row that a warp holds, a score and a weight of each; and a thread's registers, so that many warps fit.
KEYS, REGISTERS = 1024, 128

LEAST = tl.constexpr(2.0**-126)
LARGEST = tl.constexpr(2.0**127)


@triton.jit
def edge_weight(e, total, target, n, rest, guess):
    """The largest of the weights `e` such that those at or above it sum to `target`.

    Args:
        e: softmax weights relative to the largest, 0 where masked, (keys,).
        total: their sum.
        target: below it.
        n: number of keys that are not masked.
        rest: 1 − q. Weights below rest·total/n cannot sum to what is left out.
        guess: a weight to begin with.
    """
    low = tl.maximum(0.5 * rest * total / tl.maximum(n, 1).to(tl.float32), LEAST)
    high = total * 0 + 1
    mass_low = total
    mass_high = tl.sum(tl.where(e >= 1, e, 0.0))
    edge = high
    middle = guess
    searching = mass_high < target
    halve = searching
    while searching:
        middle = tl.where((middle > low) & (middle < high), middle, 0.5 * low + 0.5 * high)
        between = (middle > low) & (middle < high)  # else no number is, and one of the two is the edge
        before = tl.log2(high / low)
        above = e >= middle
        mass = tl.sum(tl.where(above, e, 0.0))
        if mass >= target:
            edge = tl.min(tl.where(above, e, 1.0))
            low = edge
            mass_low = mass
            searching = between & (mass - edge >= target)
        else:
            edge = tl.max(tl.where(above, 0.0, e))
            high = middle
            mass_high = mass
            searching = between & (mass + edge < target)
        # By halves when interpolation has cut off less than half: either alone can be slow.
        after = tl.log2(high / low)
        halve = (after > 0.5 * before) & (halve == 0)
        part = (mass_low - target) / tl.maximum(mass_low - mass_high, LEAST)
        part = tl.where(halve, 0.5, tl.minimum(tl.maximum(part, 0.02), 0.98))
        middle = low * tl.exp2(after * part)
    return edge


@triton.jit
def place_of_last(tied, at, count, BLOCK: tl.constexpr):
    """One past the place of the `count`-th key of those `tied`, which are more."""
    low = count * 0
    high = low + BLOCK
    while high - low > 1:
        middle = (low + high) // 2
        enough = tl.sum((tied & (at < middle)).to(tl.int32)) >= count
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle)
    return high


@triton.jit(do_not_specialize=["first_row", "first_query", "n_rows", "n_queries", "n_keys"])
def select_mass(
    scratch, out, first_row, first_query, n_rows, n_queries, n_keys, width, q, rest, quantile, c0, c1, c2, c3, c4, c5,
    MASKED: tl.constexpr, BLOCK: tl.constexpr, MAP: tl.constexpr, SHIFT: tl.constexpr, BASE: tl.constexpr,
    SCALED: tl.constexpr, DROP: tl.constexpr, DEGREE: tl.constexpr,
):  # fmt: skip
    """Of each row the maximum, the cuts below and above the edge, the place to which keys at the edge are inside, and
    the factor outside. Grid: (rows, batch · heads).

    Args:
        scratch: of `triton_select.write_scores`.
        out: FP32, (5, batch · heads, n_queries).
        first_row: in the scratch, of the grid's first.
        q, rest: mass of the set, and 1 − q.
        quantile: standard deviations above the mean at which a normal distribution has the mass q below it.
        c0…c5, MAP…DEGREE: of the rescued operator's map, anchored at the row maximum (`triton_maps`).
    """
    z = tl.program_id(1).to(tl.int64)
    place = first_row + tl.program_id(0)
    query = first_query + place
    at = tl.arange(0, BLOCK)[None, :]
    limit = n_keys
    if not MASKED:
        limit = query + 1
    s = tl.load(scratch + (z * n_rows + place) * width + at, mask=at < limit, other=float("-inf"))
    valid = s > MINUS_INFINITY
    n = limit
    if MASKED:
        n = tl.sum(valid.to(tl.int32))
    top = tl.max(s)
    top = tl.where(top == MINUS_INFINITY, 0.0, top)
    d = s - top
    e = tl.exp2(d * LOG2E)
    total = tl.sum(e)
    target = q * total
    # Of the scores, each with its softmax weight.
    share = 1 / tl.maximum(total, 1.0)
    weighted = tl.where(e > 0, e * d, 0.0)
    mean = tl.sum(weighted) * share
    variance = tl.sum(tl.where(e > 0, weighted * d, 0.0)) * share - mean * mean
    guess = tl.exp2((mean - quantile * tl.sqrt(tl.maximum(variance, 0.0))) * LOG2E)
    edge = edge_weight(e, total, target, n, rest, guess)

    at_edge = tl.min(tl.where(e >= edge, s, INFINITY))
    below = tl.max(tl.where(s < at_edge, s, MINUS_INFINITY))
    cut = 0.5 * at_edge + 0.5 * below
    cut = tl.where((cut > below) | (below == MINUS_INFINITY), cut, at_edge)
    mass = tl.sum(tl.where(s > at_edge, e, 0.0))
    tied = s == at_edge
    count = tl.sum(tied.to(tl.int32))
    wanted = tl.ceil(tl.minimum((target - mass) / tl.maximum(edge, LEAST), BLOCK))
    wanted = tl.minimum(tl.maximum(wanted.to(tl.int32), 1), count)
    above = cut
    last = wanted * 0 + BLOCK
    if wanted < count:
        last = place_of_last(tied, at, wanted, BLOCK)
        above = tl.min(tl.where(s > at_edge, s, INFINITY))
        middle = 0.5 * at_edge + 0.5 * above
        above = tl.where(middle > at_edge, middle, above)

    m = tl.zeros([1], tl.float32) + top
    w = weights(
        s, m, m, m, m, 0.0, c0, c1, c2, c3, c4, c5, MAP, "max", SHIFT, BASE, SCALED, DROP, DEGREE, False, "",
        False,
    )  # fmt: skip
    inside = (s >= above) | ((s >= cut) & (at < last))
    w_in = tl.sum(tl.where(valid & inside, w, 0.0))
    w_out = tl.sum(tl.where(valid & (inside == 0), w, 0.0))
    e_in = mass + wanted.to(tl.float32) * edge
    e_out = tl.sum(tl.where(inside, 0.0, e))
    factor = tl.minimum(tl.div_rn(e_out * w_in, tl.maximum(e_in * w_out, LEAST)), LARGEST)
    factor = tl.where(w_out >= LEAST, factor, 0.0)  # a GPU has no smaller ones

    at_row = out + z * n_queries + query
    plane = tl.num_programs(1).to(tl.int64) * n_queries
    tl.store(at_row, tl.where(total == total, top, float("nan")))
    tl.store(at_row + plane, cut)
    tl.store(at_row + 2 * plane, above)
    tl.store(at_row + 3 * plane, last.to(tl.float32))
    tl.store(at_row + 4 * plane, factor)


@triton.jit
def rescued(w, s, keys, cut, above, last, factor):
    """Weights of a tile, times `factor` where a key is not in the set: below the cut, or too late among its equals."""
    edge = tl.where(keys[None, :] < last[:, None], cut[:, None], above[:, None])
    return tl.where(s >= edge, w, w * factor[:, None])


def launcher(plan: Plan, n_keys: int, device: torch.device) -> Callable[..., None]:
    """A function that launches `select_mass` for rows of at most BLOCK keys."""
    q = plan.rescued
    numbers = (q, 1 - q, NormalDist().inv_cdf(q), *plan.numbers)
    constants = {"MAP": plan.map} | plan.anchored_constants

    def launch(grid: tuple[int, int], scratch: Tensor, out: Tensor, *place: int, MASKED: bool, BLOCK: int) -> None:
        warps = max(1, BLOCK // KEYS)
        select_mass[grid](
            scratch, out, *place, *numbers, **constants, MASKED=MASKED, BLOCK=BLOCK, num_warps=warps,
            maxnreg=min(REGISTERS, 2048 // warps),  # a program has 65,536
            enable_fp_fusion=False,
        )  # fmt: skip

    return launch
