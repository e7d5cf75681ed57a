"""Scalar float64 twins of the lattices and of the online-softmax kernel, written from the definitions.

Operators take the valid scores of one row as a list of floats and return their weights. `at` gives the weight at
one base-two exponent for the operators that are anchored at the row maximum.
"""

import math

import numpy as np

LN2 = math.log(2)


def half_up(y):
    return math.floor(y + 0.5)


# Anchored at the row maximum: the weight at one exponent


def softmax_at(x):
    return 2.0**x


def temperature_at(x, *, alpha):
    return 2.0 ** (alpha * x)


def pot_at(x, *, m):
    return 2.0 ** (-half_up(-m * x) / m)


def rowmax_pot_at(x, *, K_max, tail="clamp"):
    d = half_up(-x)
    return 0.0 if tail == "drop" and d > K_max else 2.0 ** -min(d, K_max)


def line(q, clamp):
    """S(q); with the clamp at −127 FP32's last binade leads linearly to 0."""
    if clamp == "zero" and q < -126:
        return (q + 127) * 2.0**-126
    return (1 + q - math.floor(q)) * 2.0 ** math.floor(q)


def clamped(x, clamp):
    return {"paper": max(x, -126.0), "zero": max(x, -127.0), "none": x}[clamp]


def s_at(x, *, clamp="paper"):
    return line(clamped(x, clamp), clamp)


def sq_at(x, *, k, clamp="paper"):
    return line(round(2**k * clamped(x, clamp)) / 2**k, clamp)  # Python's round is to even


def h15_at(x, *, clamp="paper"):
    n = round(2 * clamped(x, clamp))
    if clamp == "zero" and n < -252:
        return (n / 2 + 127) * 2.0**-126
    return (1 + (n % 2) / 2) * 2.0 ** (n // 2)


def fa4_poly_at(x, *, degree):
    coefficients = {
        1: [1, 0.9224970937],
        2: [1, 0.6657850742, 0.3301070333],
        3: [1, 0.6951461434, 0.2275643945, 0.0771190891],
    }
    if x <= -127:
        return 0.0
    f = x - math.floor(x)
    return 2.0 ** math.floor(x) * sum(c * f**i for i, c in enumerate(coefficients[degree]))


ANCHORED = {name.removesuffix("_at"): function for name, function in list(globals().items()) if name.endswith("_at")}


def anchored(row, name, fields):
    # Scores and their differences are FP32; at k = 13 a lattice tells that from FP64.
    differences = (float(np.float32(s) - np.float32(max(row))) for s in row)
    return [ANCHORED[name](d / LN2, **fields) for d in differences]


# Anchored elsewhere: the weights of a row


def minus_log2_p(row):
    log_z = math.log(math.fsum(math.exp(s - max(row)) for s in row))
    return [(max(row) - s + log_z) / LN2 for s in row]


def _probability_lattice(row, steps, bits, tail):
    out = []
    for y in minus_log2_p(row):
        q = half_up(steps * y)
        dropped = tail == "drop" and q > 2**bits - 1
        out.append(0.0 if dropped else 2.0 ** (-min(max(q, 0), 2**bits - 1) / steps))
    return out


def log2p(row, *, bits=8, renormalise="yes", tail="clamp"):
    return _probability_lattice(row, 1, bits, tail)


def log_sqrt2p(row, *, bits=8, renormalise="yes", tail="clamp"):
    return _probability_lattice(row, 2, bits, tail)


def ilpot(row):
    return [2.0 ** (half_up(s / LN2) - max(row) / LN2) for s in row]


def ilpot_h_a(row):
    return [1.0 if s == max(row) else 2.0 ** (half_up(2 * s / LN2) / 2 - max(row) / LN2) for s in row]


def ilpot_h15(row):
    top = round(2 * max(row) / LN2) // 2
    weights = []
    for s in row:
        n = round(2 * s / LN2)
        weights.append((1.5 if n % 2 else 1.0) * 2.0 ** (n // 2 - top))
    return weights


# The kernel


def kernel(rows, values, at, *, tile, tau, warp=1, stored=lambda w: w, offset=0):
    """Rows of one head, walked literally: tiles from the last to the first, a running anchor, exact rescales.

    Args:
        rows: lists of scores in nats, −inf at masked keys, all of one length.
        values: one number a key.
        at: weight at a base-two exponent.
        tile, tau: keys of a tile; octaves.
        warp: rows that rescale together.
        stored: rounding of a weight for the numerator.
        offset: weights are scaled by 2^offset.

    Returns:
        Outputs, final anchors and rescales of each row.
    """
    n = len(rows[0])
    anchor, top = [-math.inf] * len(rows), [-math.inf] * len(rows)
    numerator, denominator, rescales = [0.0] * len(rows), [0.0] * len(rows), [0] * len(rows)
    for t in reversed(range(-(-n // tile))):
        keys = range(t * tile, min((t + 1) * tile, n))
        for first in range(0, len(rows), warp):
            together = range(first, min(first + warp, len(rows)))
            for i in together:
                top[i] = max(top[i], *(rows[i][j] for j in keys))
            # −inf to −inf, a row without a key so far, is not a rise.
            must = any(top[i] > anchor[i] and (top[i] - anchor[i]) / LN2 > tau for i in together)
            for i in together:
                if (must or tau == 0) and top[i] > anchor[i]:
                    factor = math.exp(anchor[i] - top[i])
                    rescales[i] += anchor[i] > -math.inf
                    numerator[i], denominator[i], anchor[i] = numerator[i] * factor, denominator[i] * factor, top[i]
                for j in keys:
                    if rows[i][j] > -math.inf:
                        w = at((rows[i][j] - anchor[i]) / LN2) * 2.0**offset
                        numerator[i] += stored(w) * values[j]
                        denominator[i] += w
    outputs = [a / b if b else 0.0 for a, b in zip(numerator, denominator, strict=True)]
    return outputs, anchor, rescales
