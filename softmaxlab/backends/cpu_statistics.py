"""Maps on a row of scores that need its statistics: least score, mean, k-th largest. As in `cpu_rows`."""

from __future__ import annotations

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
    exp,
    floor,
    fma,
    inlined,
    log1p,
    number,
)

EDGE, LERP = range(2)  # what a grid takes of an interval
_TOP_BIT = I(0x7FFFFFFF)
_INF_BITS = I(0x7F800000)
_SIGN = I(31)


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
