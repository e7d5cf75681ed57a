"""Scalar twin of the packed exponential, from its definition: the weight's bits are a code, and sums go in pairs."""

import math
from fractions import Fraction

BIAS = {"bf16": 127, "fp16": 15, "e4m3": 7}
MANTISSA = {"bf16": 7, "fp16": 10, "e4m3": 3}


def offset(levels, p):
    return {"bf16": 0, "fp16": 15 - levels, "e4m3": 8}[p]


def code(x, *, k, sum_levels=3, p="bf16"):
    """max(0, RNE(2^k (x + b))); Python's round is to even."""
    return 0 if x == -math.inf else max(0, round(2**k * (Fraction(x) + BIAS[p] + offset(sum_levels, p))))


def number(bits, p):
    """What bits of sign 0 mean in a format of P: Fraction."""
    exponent, fraction = bits >> MANTISSA[p], bits & (1 << MANTISSA[p]) - 1
    part = Fraction(fraction, 1 << MANTISSA[p])
    return (1 + part) * Fraction(2) ** (exponent - BIAS[p]) if exponent else part * Fraction(2) ** (1 - BIAS[p])


def packed_at(x, *, k, sum_levels=3, p="bf16"):
    bits = code(x, k=k, sum_levels=sum_levels, p=p) << MANTISSA[p] - k
    return float(number(bits, p) / 2 ** offset(sum_levels, p))


def rounded(value, digits):
    """A positive Fraction to nearest even with so many significant binary digits, far from the range's ends."""
    if value == 0:
        return value
    exponent = math.floor(math.log2(value)) - digits + 1
    unit = Fraction(2) ** exponent
    return round(value / unit) * unit


def row_sum(weights, *, k, sum_levels=3, p="bf16"):
    """Lanes of eight, neighbours in pairs, each sum to the precision of the 16-bit format; then exactly."""
    digits = 8 if p == "bf16" else 11
    total = Fraction(0)
    for lane in range(8):
        column = [Fraction(w) for w in weights[lane::8]]
        for _ in range(sum_levels):
            pairs = [rounded(a + b, digits) for a, b in zip(column[::2], column[1::2], strict=False)]
            column = pairs + column[len(column) // 2 * 2 :]
        total += sum(column)
    return float(total)
