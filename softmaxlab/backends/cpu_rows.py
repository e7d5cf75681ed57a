"""An operator's map on the rows of a score tile, in place, compiled by Numba: weights and row sums.

What a map means is its operator's (`softmaxlab.operators`). The exponent x = −Δ/ln 2 of a lattice is FP64 there; here
it is a pair of FP32, the product of the FP32 difference with a compensated log2 e, so that a step is the same unless
its input lies within about 2^−46 of the edge. The absolute lattices are FP64 as there. Weights below FP32's normal
range, 2^−126 of the largest, are 0. Sums of a row are FP32 in lanes, in an order that LLVM fixes.
"""

from __future__ import annotations

import math

import numpy as np

from softmaxlab.backends.cpu_scalar import (
    INF,
    MINUS_INF,
    ONE,
    ZERO,
    F,
    I,
    add,
    add64,
    bits,
    compiled,
    exp,
    exp2_fraction,
    floor,
    fma,
    inlined,
    log1p,
    nearest,
    number,
    power,
    steps,
    tanh,
)

# Which map; `cpu.plan` says what it puts into `a` (FP32), `b` (FP64), `table` (FP32) and `kept` (INT64).
EXP, POWERS, LINE, LINE_STEPS, POLYNOMIAL, MEAN, TOP, GRID, ABSOLUTE, ABSOLUTE_TOP, ABSOLUTE_LINE, PROBABILITY = range(
    12
)
EDGE, LERP = range(2)
_TOP_BIT = I(0x7FFFFFFF)
_INF_BITS = I(0x7F800000)
_SIGN = I(31)
_INV_LN2 = 1 / math.log(2)
_NAN = F(np.nan)


@inlined
def order(x):
    """An INT32 that orders FP32 numbers as they are ordered, NaN beyond the infinities."""
    i = bits(x)
    return I(i ^ (I(i >> _SIGN) & _TOP_BIT))


@inlined
def unorder(i):
    """The FP32 of an `order`."""
    return number(I(i ^ (I(i >> _SIGN) & _TOP_BIT)))


@inlined
def extremes(s):
    """Greatest and least of a row, −inf first made 0 as `row_max` does, and whether it holds NaN or +inf."""
    high, low = order(MINUS_INF), order(INF)
    for i in range(s.size):
        k = order(s[i])
        high = max(high, k)
        low = min(low, k)
    top = unorder(high)
    return ZERO if top == MINUS_INF else top, unorder(low), high >= _INF_BITS or low < order(MINUS_INF)


@inlined
def exponential(s, top, alpha):
    total = ZERO
    for i in range(s.size):
        w = exp(alpha * (s[i] - top))
        s[i] = w
        total = add(total, w)
    return total


@inlined
def powers(s, top, high, low, m, m_rest, octave, least, below):
    """2^(n/m), n = round(m·x) held at `least`; further down that weight times `below`. `octave` is 1/m."""
    total = ZERO
    for i in range(s.size):
        n, _ = steps(s[i] - top, high, low)
        c = n if n > least else least
        e = nearest(c * octave)
        w = exp2_fraction(fma(-m_rest, e, fma(-m, e, c)) * octave) * power(e)
        w = w if n >= least else w * below
        s[i] = w
        total = add(total, w)
    return total


@inlined
def line_steps(s, top, high, low, k, least, bias):
    """S(n·2^−k), n = round(2^k·x) held at `least`; from x = 1 − bias down the line goes on to 0 at x = −bias."""
    total = ZERO
    to_bits, unit = power(F(I(23) - k)), power(F(-k))
    knee, scale = (ONE - bias) / unit, power(ONE - bias)
    zero = bias / unit
    for i in range(s.size):
        n, _ = steps(s[i] - top, high, low)
        n = n if n > least else least
        w = number(I(I(n * to_bits) + I(0x3F800000)))  # FP32 holds all 20 bits of n
        w = w if n >= knee else (n + zero) * unit * scale
        s[i] = w
        total = add(total, w)
    return total


@inlined
def octaves(d, high, low):
    """⌊x⌋ ≥ −128 and x − ⌊x⌋."""
    d = d if d > F(-90) else F(-90)  # −129.8 octaves: the weight is 0 whichever
    n, r = steps(d, high, low)
    down = ONE if r < ZERO else ZERO
    return n - down, r + down


@inlined
def line(s, top, high, low, least):
    """S(x) = 2^⌊x⌋·(1 + x − ⌊x⌋), not below the weight `least`."""
    total = ZERO
    for i in range(s.size):
        e, f = octaves(s[i] - top, high, low)
        w = (ONE + f) * power(e if e > F(-127) else F(-127))
        w = w if w > least else least
        s[i] = w
        total = add(total, w)
    return total


@inlined
def polynomial(s, top, high, low, c1, c2, c3):
    total = ZERO
    for i in range(s.size):
        e, f = octaves(s[i] - top, high, low)
        w = fma(fma(fma(c3, f, c2), f, c1), f, ONE) * power(e if e > F(-127) else F(-127))
        s[i] = w
        total = add(total, w)
    return total


@inlined
def support(s, top, threshold, uniform):
    """Weights on the keys with s ≥ threshold."""
    total = ZERO
    if uniform:
        for i in range(s.size):
            w = ONE if s[i] >= threshold else ZERO
            s[i] = w
            total = add(total, w)
        return total
    for i in range(s.size):
        w = exp(s[i] - top) if s[i] >= threshold else ZERO
        s[i] = w
        total = add(total, w)
    return total


@inlined
def mean_support(s, top, uniform):
    """Keys nearer to the maximum than the mean distance; where there is none, all."""
    total = 0.0
    for i in range(s.size):
        total = add64(total, np.float64(top - s[i]))
    mean = F(total / max(s.size, 1))
    everything = not mean > ZERO
    total = ZERO
    for i in range(s.size):
        d = top - s[i]
        w = exp(-d) if not uniform else ONE
        w = w if (d < mean) | everything else ZERO
        s[i] = w
        total = add(total, w)
    return total


@inlined
def kth_largest(s, k, low, high):
    """A threshold with s ≥ it for the k largest and their ties, and for no other key.

    The bracket holds the keys' orders: at least k keys are at or above `a`, fewer than k at or above `b`. Guesses are
    interpolated in value, and halve the bracket where that is slow.
    """
    a, b = order(low), I(order(high) + I(1))
    count_a, count_b = s.size, 0
    turn = 0
    while count_a != k and np.int64(b) - np.int64(a) > 1:
        middle = I((np.int64(a) + np.int64(b)) >> 1)
        if turn % 3 != 2:
            x, y = unorder(a), unorder(b)
            share = (np.float64(count_a) - (k - 0.5)) / np.float64(count_a - count_b)
            guess = order(F(x + (y - x) * share))
            middle = min(max(guess, I(a + I(1))), I(b - I(1)))
        turn += 1
        threshold = unorder(middle)
        count = I(0)
        for i in range(s.size):
            count = I(count + (I(1) if s[i] >= threshold else I(0)))
        if count >= k:
            a, count_a = middle, np.int64(count)
        else:
            b, count_b = middle, np.int64(count)
    return unorder(a)


@inlined
def grid(s, top, low, K, recon, linear, uniform, slope, span, middle, table, index, levels):
    """The levels of the full-range grid; `table` has the edges and the edges − 1, `levels` is room for two such rows.

    A key is at y = log1p(t·span)/log ρ intervals, t·K in uniform grids, and its lower edge at ⌊y⌋. The nearest edge is
    the upper one from y − ⌊y⌋ = `middle` on: on this scale the middle of an interval lies alike in all of them. Indices
    come first, then look-ups, because a loop with both is not vectorised.
    """
    C = top - low
    total = ZERO
    if not C > ZERO:
        s[:] = ONE
        return F(s.size)
    edges, below_top = table[: K + 1], table[K + 1 : 2 * K + 2]
    value, rise = levels[: K + 1], levels[K + 1 : 2 * K + 2]
    for j in range(K + 1):
        value[j] = edges[j] if linear else exp(C * below_top[j])
    for j in range(K):  # of the weight, over an interval
        rise[j] = (value[j + 1] - value[j]) / (edges[j + 1] - edges[j])
    rise[K] = ZERO
    last = F(K - 1 if recon == LERP else K)
    if recon == LERP:
        for i in range(s.size):
            t = (s[i] - low) / C
            s[i] = t
            index[i] = floor(t * slope if uniform else log1p(t * span) * slope)
        if not linear:
            for i in range(s.size):
                n = index[i] if index[i] > ZERO else ZERO
                j = I(n if n < last else last)
                x = s[i] - edges[j]
                w = fma(x if x > ZERO else ZERO, rise[j], value[j])
                s[i] = w if w < value[j + 1] else value[j + 1]
    else:
        if uniform:
            for i in range(s.size):
                y = (s[i] - low) / C * slope
                n = floor(y)
                s[i] = n + (ONE if y - n >= middle else ZERO)
        else:
            for i in range(s.size):
                y = log1p((s[i] - low) / C * span) * slope
                n = floor(y)
                s[i] = n + (ONE if y - n >= middle else ZERO)
        for i in range(s.size):
            n = s[i] if s[i] > ZERO else ZERO
            s[i] = value[I(n if n < last else last)]
    for i in range(s.size):
        total = add(total, s[i])
    return total


@inlined
def exp2_64(x):
    """2^x for −127 ≤ x ≤ 127 from an FP64 exponent, FP32."""
    n = nearest(x)
    return exp2_fraction(F(x - n)) * power(F(n))


@inlined
def absolute(s, top, per_octave, exact_top):
    """2^(round(per_octave·s/ln 2)/per_octave − s_max/ln 2)."""
    total = ZERO
    anchor = np.float64(top) * _INV_LN2
    for i in range(s.size):
        y = np.float64(s[i]) * _INV_LN2
        x = floor(per_octave * y + 0.5) / per_octave - anchor
        w = exp2_64(x if x > -126.0 else -126.0)
        w = w if x >= -126.0 else ZERO
        w = ONE if exact_top & (s[i] == top) else w
        s[i] = w
        total = add(total, w)
    return total


@inlined
def absolute_line(s, top):
    """(1 + (n mod 2)/2)·2^(⌊n/2⌋ − ⌊n_max/2⌋), n = RNE(2s/ln 2)."""
    total = ZERO
    highest = floor(nearest(2 * (np.float64(top) * _INV_LN2)) / 2)
    for i in range(s.size):
        half = nearest(2 * (np.float64(s[i]) * _INV_LN2)) * 0.5
        e = floor(half)
        x = e - highest
        w = F(1 + (half - e)) * power(F(x if x > -127.0 else -127.0))
        s[i] = w
        total = add(total, w)
    return total


@inlined
def probability(s, top, per_octave, largest, drop):
    """2^(−q/per_octave), q = round(−per_octave·log2 p) within 0..largest."""
    total = 0.0
    for i in range(s.size):
        total = add64(total, np.float64(exp(s[i] - top)))
    log_z = math.log2(total) if total > 0 else 0.0
    total = ZERO
    for i in range(s.size):
        q = floor(per_octave * (log_z - np.float64(s[i] - top) * _INV_LN2) + 0.5)
        c = q if q > 0.0 else 0.0
        c = c if c < largest else largest
        x = -c / per_octave
        w = exp2_64(x if x > -126.0 else -126.0)
        w = ZERO if (x < -126.0) | (drop & (q > largest)) else w
        s[i] = w
        total = add(total, w)
    return total


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
        kind, a, b, table, kept: the map (`cpu.plan`).
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
