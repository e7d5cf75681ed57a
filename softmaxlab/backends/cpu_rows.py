"""Maps on a row of scores that need no more of it than its maximum, and of log2-p its sum: the lattices.

Each takes the valid scores of a row next to each other, writes the weights in their place and returns the row's sum.
What a map means is its operator's (`softmaxlab.operators`). The exponent x = −Δ/ln 2 of a lattice is FP64 there; here
it is a pair of FP32, the product of the FP32 difference with a compensated log2 e, so that a step is the same unless
its input lies within about 2^−46 of the edge. The absolute lattices are FP64 as there. Weights below FP32's normal
range, 2^−126 of the largest, are 0. Sums of a row are FP32 in lanes, in an order that LLVM fixes.
"""

from __future__ import annotations

import math

import numpy as np

from softmaxlab.backends.cpu_scalar import (
    ONE,
    ZERO,
    F,
    I,
    add,
    add64,
    exp,
    exp2_fraction,
    floor,
    fma,
    inlined,
    nearest,
    number,
    power,
    steps,
)

_INV_LN2 = 1 / math.log(2)


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
