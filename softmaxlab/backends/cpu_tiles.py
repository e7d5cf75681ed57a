"""A score tile becomes weights in place, row by row, and its product with the values attention."""

from __future__ import annotations

import numpy as np

from softmaxlab.backends.cpu_rows import (
    absolute,
    absolute_line,
    exponential,
    line,
    line_steps,
    polynomial,
    powers,
    probability,
)
from softmaxlab.backends.cpu_scalar import ONE, ZERO, F, I, compiled, inlined, tanh
from softmaxlab.backends.cpu_statistics import extremes, grid, kth_largest, mean_support, support

# Which map; `cpu_plan` says what it puts into `a` (FP32), `b` (FP64), `table` (FP32) and `kept` (INT64).
EXP, POWERS, LINE, LINE_STEPS, POLYNOMIAL, MEAN, TOP, GRID, ABSOLUTE, ABSOLUTE_LINE, PROBABILITY = range(11)
_NAN = F(np.nan)


@inlined
def row(s, kind, a, b, table, kept, index, levels):
    """The weights of one row of valid scores, in place, and their sum; NaN where a score is NaN or +inf."""
    top, low, bad = extremes(s)
    if bad:
        return _NAN
    total = ZERO
    if kind == EXP:
        total = exponential(s, top, a[0])
    elif kind == POWERS:
        total = powers(s, top, a[0], a[1], a[2], a[3], a[4], a[5], a[6])
    elif kind == LINE_STEPS:
        total = line_steps(s, top, a[0], a[1], I(a[2]), a[3], a[4])
    elif kind == LINE:
        total = line(s, top, a[0], a[1], a[2])
    elif kind == POLYNOMIAL:
        total = polynomial(s, top, a[0], a[1], a[2], a[3], a[4])
    elif kind == MEAN:
        total = mean_support(s, top, a[0] > ZERO)
    elif kind == TOP:
        total = support(s, top, kth_largest(s, kept[s.size], low, top), a[0] > ZERO)
    elif kind == GRID:
        total = grid(s, top, low, I(a[0]), I(a[1]), a[2] > ZERO, a[3] > ZERO, a[4], a[5], a[6], table, index, levels)
    elif kind == ABSOLUTE:
        total = absolute(s, top, b[0], b[1] > 0)
    elif kind == ABSOLUTE_LINE:
        total = absolute_line(s, top)
    elif kind == PROBABILITY:
        total = probability(s, top, b[0], b[1], b[2] > 0)
    return total


@compiled
def tile(
    scores, key, query, queries, first, last, mask, scaling, softcap, normalised, kind, a, b, table, kept, room, sums
):
    """Scores to weights in place, and the row sums.

    Args:
        scores: FP32, (heads · queries, keys), products of queries and keys.
        key, query: of all, the tile's first.
        queries: of the tile.
        first, last: INT64, (all queries,): of each query, its first valid key and the one after its last.
        mask: bool, (all queries, all keys) where some query has a masked key between them, else (0, 0).
        scaling, softcap: FP32; softcap 0 for none.
        normalised: whether the weights are divided by their sum; the row sums are 1 otherwise.
        kind, a, b, table, kept: the map (`cpu_plan.plan`).
        room: FP32, twice the tile's keys and the table long; overwritten.
        sums: FP32, (heads · queries,); written: never 0, NaN where a valid score is NaN or +inf.
    """
    keys = scores.shape[1]
    packed, index, levels = room[:keys], room[keys : 2 * keys], room[2 * keys :]
    for r in range(scores.shape[0]):
        q = query + r % queries
        low = min(max(first[q] - key, 0), keys)  # a query without keys has the range 0..0
        high = min(max(last[q] - key, low), keys)
        scores[r, :low] = ZERO
        scores[r, high:] = ZERO
        s = scores[r, low:high]
        if softcap > ZERO:
            for i in range(s.size):
                s[i] = softcap * tanh(s[i] * scaling / softcap)
        else:
            for i in range(s.size):
                s[i] = s[i] * scaling
        n = s.size
        if mask.shape[0] > 0:
            valid = mask[q, key + low : key + high]
            n = 0
            for i in range(s.size):
                n += valid[i]
        if n < s.size:  # the map sees the valid scores next to each other
            j = 0
            for i in range(s.size):
                if valid[i]:
                    packed[j] = s[i]
                    j += 1
            total = row(packed[:n], kind, a, b, table, kept, index, levels)
            j = 0
            for i in range(s.size):
                s[i] = ZERO
                if valid[i]:
                    s[i] = packed[j]
                    j += 1
        else:
            total = row(s, kind, a, b, table, kept, index, levels)
        if not normalised:
            total = ONE + (total - total)
        sums[r] = ONE if total == ZERO else total


@compiled
def finish(product, sums, out, query, head, queries):
    """Products with the values, divided by the row sums, to their places.

    Args:
        product, sums: FP32, (heads · queries, dim) and (heads · queries,).
        out: FP32, (all queries, all heads, dim); written from query and head on.
    """
    for r in range(product.shape[0]):
        source, target = product[r], out[query + r % queries, head + r // queries]
        for i in range(source.size):
            target[i] = source[i] / sums[r]


@compiled
def ranges(mask, first, last):
    """First valid key of each row and the one after the last (0, 0 for a row without); whether any row has a hole."""
    holes = False
    n = mask.shape[1]
    for r in range(mask.shape[0]):
        low, high = 0, n
        while low < n and not mask[r, low]:
            low += 1
        while high > low and not mask[r, high - 1]:
            high -= 1
        if low == n:
            low = high = 0
        first[r], last[r] = low, high
        count = 0
        for i in range(low, high):
            count += mask[r, i]
        holes |= count < high - low
    return holes
