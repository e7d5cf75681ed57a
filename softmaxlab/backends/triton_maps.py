"""Weights of one tile of scores, by family of operators, for the Triton kernels.

The reference takes exponents in FP64 from FP32 differences d = s − m. Here everything is FP32, chosen so that a key
falls into the same cell of a lattice unless it lies within one rounding of d from the edge:

- a lattice index is RNE(c·d), found by one FMA into 1.5·2^23: its product is exact and it rounds once, to an integer,
  so that all that is left is the rounding of the constant c, at most 2^−25 of d (half a unit in d's last place). The
  reference's ⌊y + 1/2⌋ differs from RNE at ties alone, and c·d, c a multiple of 1/ln 2, has none but d = 0;
- where the fraction of the exponent is needed (`s`, `poly`) it comes from the product in two FP32 terms;
- a grid's intervals are found from the logarithm of the position, and its edges from a power of two, to 2^−22 of the
  range; where they are equal, the position is the correctly rounded quotient u/C, as in the reference.

Weights below 2^−126 are 0 unless the operator clamps there. The row maximum weighs about 1, so that they are lost in
an FP32 row sum in any case.

Maps (`MAP`), with their scalars c0…c5:

- `exp`: 2^(c0·d)
- `bits`: code n = max(index, c1), weight with exponent field n's upper bits; times c2 if SCALED; 0 below c3 if DROP
- `exp2`: the same index, weight 2^(c2·n)
- `s`, `poly`: 2^⌊x⌋·(1 + f), 2^⌊x⌋·P(f), x = (c0 + c1)·d not below c2; the polynomial's c3…c5
- `mean`, `topk`: kept where d > −cut or s ≥ cut; 2^(c0·d), or 1 if UNIFORM
- `grid`: see `grid_weights`

The index's zero (`ANCHOR`) is the row maximum (`max`), the score 0 (`absolute`) or p = 1 (`mass`).
"""

import triton
import triton.language as tl

MAGIC = tl.constexpr(12582912.0)  # 1.5·2^23: adding it to |y| < 2^22 leaves RNE(y) in the low bits
MINUS_INFINITY = tl.constexpr(float("-inf"))
HUGE = tl.constexpr(4194304.0)  # 2^22
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def nearest_integer(y):
    """RNE(y) as FP32, for any y."""
    return tl.where(tl.abs(y) < HUGE, (y + MAGIC) - MAGIC, y)


@triton.jit
def capped(s, cap):
    """cap·tanh(s/cap). Near 0 an odd polynomial, so that small scores keep their relative accuracy."""
    y = s / cap
    y2 = y * y
    a = tl.abs(y)
    # Minimax on [0, 0.56]; its own error is 2 % of FP32's.
    p = tl.fma(y2, -0.006198703829703542, 0.02102054079569804)
    p = tl.fma(y2, p, -0.05384051563049806)
    p = tl.fma(y2, p, 0.13332480524900228)
    p = tl.fma(y2, p, -0.3333331467672164)
    near = tl.fma(y * y2, p, y)
    far = 1 - 2 / (tl.exp2(a * (2 * LOG2E)) + 1)
    return cap * tl.where(a < 0.55, near, tl.where(y < 0, -far, far))


@triton.jit
def row_offset(m, mass, c0, c2, c4, c5, MAP: tl.constexpr, ANCHOR: tl.constexpr, EVEN: tl.constexpr):
    """What the index of each row is measured from (`absolute`, `mass`), and the octaves that `exp2` adds to a row.

    Args:
        m: row maximum, (rows,).
        mass: Σ exp(−Δ), or anything where ANCHOR is not `mass`.
        c0, c5: steps/ln 2 rounded to FP32 and the rest; c2: octaves a step; c4: steps an octave.
    """
    offset = m * 0
    octaves = m * 0
    if ANCHOR == "absolute":
        offset = nearest_integer(m * c0)
        if EVEN:  # the whole octave below the maximum
            offset = 2 * tl.floor(offset * 0.5)
        if MAP == "exp2":  # the weight of the maximum is exactly 1: the others keep the row's phase
            octaves = tl.fma(m, -c5, tl.fma(m, -c0, offset)) * c2
    elif ANCHOR == "mass":
        offset = c4 * tl.log2(mass)
    return offset, octaves


@triton.jit
def lattice_index(s, m, offset, c0, c1, ANCHOR: tl.constexpr):
    """MAGIC + n, n = RNE(c0·d) and not below c1."""
    if ANCHOR == "max":
        t = tl.fma(s - m[:, None], c0, MAGIC)
    elif ANCHOR == "mass":  # p ≤ 1, so that no index is above 0
        t = tl.minimum(tl.fma(s - m[:, None], c0, -offset[:, None]) + MAGIC, MAGIC)
    else:
        t = (nearest_integer(s * c0) - offset[:, None]) + MAGIC
    return tl.maximum(t, c1 + MAGIC)


@triton.jit
def whole_and_fraction(d, c0, c1, low):
    """⌊x⌋ and x − ⌊x⌋ of x = max((c0 + c1)·d, low), FP32; c0 is the constant rounded to FP32 and c1 the rest."""
    p = d * c0
    e = tl.fma(d, c1, tl.fma(d, c0, -p))
    inside = p > low
    p = tl.where(inside, p, low)
    n = (p + MAGIC) - MAGIC
    f = (p - n) + tl.where(inside, e, 0.0)
    below = f < 0
    return tl.where(below, n - 1, n), tl.where(below, f + 1, f)


@triton.jit
def power_of_two(n):
    """2^n of whole n in FP32, −127 ≤ n ≤ 127; 0 for −127."""
    return (((n + MAGIC).to(tl.int32, bitcast=True) << 23) + 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def grid_value(index, C, K, c3, c4, LINEAR: tl.constexpr, UNIFORM: tl.constexpr):
    """Weight at edge `index`: exp(level − C), or level/C. The level is measured from the top."""
    below_top = (index - K) * c3 if UNIFORM else c4 - c4 * tl.exp2((K - index) * c3)
    if LINEAR:
        return below_top + 1
    return tl.exp2((C * LOG2E)[:, None] * below_top)


@triton.jit
def grid_weights(s, low, C, K, c0, c1, c2, c3, c4, RECON: tl.constexpr, LINEAR: tl.constexpr, UNIFORM: tl.constexpr):
    """Weights on the full-range grid.

    Args:
        s, low, C: scores; row minimum; range.
        K: number of intervals.
        c0, c1: ρ^K − 1 and 1/log2 ρ: t lies log(1 + c0·t)/log ρ intervals above the bottom.
        c2: what rounds that position to the nearest edge: 1 − log((1 + ρ)/2)/log ρ, or 1/2 where UNIFORM.
        c3, c4: −log2 ρ and ρ^K/(1 − ρ^K), or 1/K where UNIFORM.
    """
    flat = C < 1e-30  # every weight is 1: an exponential's because C counts as 0, a linear one's because t is 1
    inverse = tl.div_rn(1.0, tl.where(flat, 1.0, C))[:, None]
    u = s - low[:, None]
    t = u * inverse
    if UNIFORM:
        # One Newton step gives the correctly rounded quotient: a score on an edge stays there.
        t = tl.fma(tl.fma(-t, C[:, None], u), inverse, t)
    if LINEAR:
        t = tl.where(flat[:, None], 1.0, tl.minimum(tl.maximum(t, 0.0), 1.0))
    C = tl.where(flat, 0.0, C)
    y = t * K if UNIFORM else tl.log2(tl.fma(t, c0, 1.0)) * c1
    if RECON == "nearest":
        y += c2
    index = (y + MAGIC) - MAGIC
    index = tl.where(index > y, index - 1, index)
    if RECON == "nearest":
        return grid_value(tl.minimum(index, K), C, K, c3, c4, LINEAR, UNIFORM)
    index = tl.minimum(tl.maximum(index, 0.0), K - 1)
    if RECON == "upper":
        return grid_value(index + 1, C, K, c3, c4, LINEAR, UNIFORM)
    if LINEAR:
        return t
    if UNIFORM:
        x = y - index
    else:
        above = tl.exp2((K - index) * c3)  # 1 − the level's distance from the top, in units of c4
        x = (1 - (t - 1) / c4 - above) / (above * (tl.exp2(-c3) - 1))
    at_low = grid_value(index, C, K, c3, c4, False, UNIFORM)
    at_high = grid_value(index + 1, C, K, c3, c4, False, UNIFORM)
    return tl.fma(tl.minimum(tl.maximum(x, 0.0), 1.0), at_high - at_low, at_low)


@triton.jit
def weights(
    s, m, row, offset, octaves, K, c0, c1, c2, c3, c4, c5,
    MAP: tl.constexpr, ANCHOR: tl.constexpr, SHIFT: tl.constexpr, BASE: tl.constexpr, SCALED: tl.constexpr,
    DROP: tl.constexpr, DEGREE: tl.constexpr, UNIFORM: tl.constexpr, RECON: tl.constexpr, LINEAR: tl.constexpr,
):  # fmt: skip
    """ŵ of a tile of scores.

    Args:
        s: FP32 scores in nats, (rows, keys).
        m: row maximum, finite, (rows,).
        row: the map's other number of each row: range, mean distance or threshold, (rows,).
        offset, octaves: of `row_offset`; for `grid` the row minimum is `offset`.
    """
    if MAP == "bits" or MAP == "exp2":
        t = lattice_index(s, m, offset, c0, c1, ANCHOR)
        if MAP == "bits":
            w = ((t.to(tl.int32, bitcast=True) << SHIFT) + BASE).to(tl.float32, bitcast=True)
            if SCALED:
                w *= c2
        elif ANCHOR == "absolute":
            w = tl.where(s == m[:, None], 1.0, tl.exp2(tl.fma(t - MAGIC, c2, octaves[:, None])))
        else:
            w = tl.exp2((t - MAGIC) * c2)
        if DROP:
            w = tl.where(t < c3 + MAGIC, 0.0, w)
    elif MAP == "s":
        n, f = whole_and_fraction(s - m[:, None], c0, c1, c2)
        w = (f + 1) * power_of_two(n)
    elif MAP == "poly":
        n, f = whole_and_fraction(s - m[:, None], c0, c1, c2)
        if DEGREE == 1:
            p = c3
        elif DEGREE == 2:
            p = tl.fma(f, c4, c3)
        else:
            p = tl.fma(f, tl.fma(f, c5, c4), c3)
        w = tl.fma(f, p, 1.0) * power_of_two(n)
    elif MAP == "grid":
        w = grid_weights(s, offset, row, K, c0, c1, c2, c3, c4, RECON, LINEAR, UNIFORM)
    else:
        d = s - m[:, None]
        if MAP == "mean":
            keep = -d < row[:, None]
        elif MAP == "topk":
            keep = s >= row[:, None]
        if UNIFORM:
            w = keep.to(tl.float32)
        else:
            w = tl.exp2(d * c0)
            if MAP != "exp":
                w = tl.where(keep, w, 0.0)
    return w
