"""FlashAttention-4's software exponential: a power of two times a polynomial in the fraction.

The coefficients are those of `POLY_EX2` in `flash_attn/cute/utils.py` of flash-attn-4 4.0.0b36, where a kernel
uses degree 3 for a share of its elements. Largest relative errors: 3.9e-2, 2.1e-3 and 8.8e-5 for degrees 1 to 3.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from .base import RowmaxAnchored

#: Of 1, f, f², f³; each is an FP32 number, written out in full.
COEFFICIENTS = {
    1: (1.0, 0.922497093677520751953125),
    2: (1.0, 0.6657850742340087890625, 0.330107033252716064453125),
    3: (1.0, 0.695146143436431884765625, 0.227564394474029541015625, 0.077119089663028717041015625),
}
_FLOOR = -127.0  # FA4 clamps here; the exponent field is then 0, and the weight exactly 0


@dataclass(frozen=True)
class FA4Poly(RowmaxAnchored):
    """ŵ = 2^⌊x⌋·P(x − ⌊x⌋), 0 where x ≤ −127. Not continuous: P(1) is not 2 in degree 1.

    The kernel evaluates P in FP32 and replaces only a share of the exponentials; here all are replaced and the
    arithmetic is FP64. On a masked key x = −∞ gives exactly 0, and so does a fully masked row.

    Attributes:
        degree: of the polynomial, 1 to 3.
    """

    degree: int
    name: ClassVar[str] = "fa4_poly"
    summary: ClassVar[str] = "FlashAttention-4's polynomial for 2^x, of degree 1, 2 or 3"

    def __post_init__(self) -> None:
        if self.degree not in COEFFICIENTS:
            self.refuse("degree", "must be 1, 2 or 3")

    def at(self, x: Tensor) -> Tensor:
        c = COEFFICIENTS[self.degree]
        clamped = x.clamp(min=_FLOOR)
        e = clamped.floor()
        f = clamped - e
        value = torch.full_like(f, c[-1])
        for coefficient in c[-2::-1]:
            value.mul_(f).add_(coefficient)
        return value.mul_(e.exp2_()).masked_fill_(x <= _FLOOR, 0.0).float()

    @property
    def envelope(self) -> tuple[float, float]:
        return _log_error_range(self.degree)


@lru_cache
def _log_error_range(degree: int) -> tuple[float, float]:
    """Least and largest log P(f) − f·ln 2 over [0, 1]: at its ends or where P′ = P·ln 2."""
    p = np.polynomial.Polynomial(COEFFICIENTS[degree])
    roots = (p.deriv() - p * math.log(2)).roots()
    inside = [float(r.real) for r in roots if abs(r.imag) < 1e-12 and 0 < r.real < 1]
    errors = [math.log(float(p(f))) - f * math.log(2) for f in (0.0, 1.0, *inside)]
    return min(errors), max(errors)
