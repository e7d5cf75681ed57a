"""Rowmax-H15 and its family: Schraudolph's piecewise-linear power of two, on an exponent rounded to 2^−k octaves.

Paper §5.2, B.1. S(x) = 2^⌊x⌋·(1 + x − ⌊x⌋) interpolates linearly between powers of two; Q_k(x) = RNE(2^k x)/2^k
rounds the exponent, ties to even. The family is S(Q_k(x)); k = 1 is Rowmax-H15 and k → ∞ is S. This is the
arithmetic form; `softmaxlab.bits` has the integer operations that a kernel uses for it.

A kernel clamps the exponent, because its bit form wraps around below −127. Three clamps are offered:

- `paper`, at −126: the smallest weight is 2^−126. A kernel that computes it on masked keys too, x = −∞, gives a
  fully masked row equal weights, so its output is the mean of the values and not 0.
- `zero`, at −127: the bit form's exponent field is then 0, so the weights fall linearly from 2^−126 to exactly 0
  as q goes from −126 to −127. A fully masked row sums to 0 and gives 0.
- `none`: the ideal operator, with FP32's own gradual underflow. In the bit form without a clamp a masked key
  weighs 1, so that a fully masked row gives the mean of the values, and partly masked rows are wrong.

In an operator a masked key weighs 0 by definition, and a fully masked row gives 0, whatever the clamp.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from .base import RowmaxAnchored

K_MAX = 13  # with 14 fractional bits the magic constant's own bits reach the sign (softmaxlab.bits)

#: Least exponent of each clamp. `none` too needs one, or −∞ − (−∞) is NaN; below 2^−150 FP32 has only 0.
CLAMPS = {"paper": -126.0, "zero": -127.0, "none": -160.0}


def schraudolph(x: Tensor, clamp: str, k: int | None = None) -> Tensor:
    """S(Q_k(x)), or S(x) where k is None, after the clamp; FP64 as far as that matters, returned in FP32."""
    if k is None:
        q = x.clamp(min=CLAMPS[clamp])
    else:
        n = (x * 2**k).round_()  # half to even
        # At most 20 bits: FP32 holds n, and all that follows in its normal range is exact.
        n = n if clamp == "none" else n.float()
        q = n.clamp_(min=CLAMPS[clamp] * 2**k).mul_(2.0**-k)
    e = q.floor()
    if clamp == "zero":
        e.clamp_(min=-126)  # FP32's last binade, in which the line goes on to 0
    return q.sub_(e).add_(1).mul_(e.exp2_()).float()


def interpolation_peak(k: int | None) -> float:
    """Largest octave error of S on its lattice: max of log2(1 + f) − f over f = i/2^k, or over [0, 1]."""
    best = 1 / math.log(2) - 1  # where the slope of log2(1 + f) is 1; the curve is concave
    steps = [best] if k is None else [math.floor(best * 2**k) / 2**k, math.ceil(best * 2**k) / 2**k]
    return max(math.log2(1 + f) - f for f in steps)


def _octaves(low: float, high: float) -> tuple[float, float]:
    return low * math.log(2), high * math.log(2)


@dataclass(frozen=True)
class S(RowmaxAnchored):
    """ŵ = S(x), Schraudolph's construction without shift and without rounding of its input (paper B.1).

    Attributes:
        clamp: `paper`, `zero` or `none` (see the module). The envelope holds above it.
    """

    clamp: str = "paper"
    name: ClassVar[str] = "s"
    summary: ClassVar[str] = "2^⌊x⌋(1 + x − ⌊x⌋): powers of two joined by straight lines"

    def __post_init__(self) -> None:
        _check_clamp(self)

    def at(self, x: Tensor) -> Tensor:
        return schraudolph(x, self.clamp)

    @property
    def envelope(self) -> tuple[float, float]:
        return _octaves(0.0, interpolation_peak(None))


@dataclass(frozen=True)
class SQ(RowmaxAnchored):
    """ŵ = S(Q_k(x)): 2^k weights an octave, spaced evenly inside it (paper B.1).

    −2^−(k+1) ≤ ε₂ ≤ 2^−(k+1) + max(log2(1 + f) − f) over f = i/2^k: input rounding plus interpolation.

    Attributes:
        k: fractional bits of the exponent, 0 to 13; 0 is octave rounding with ties to even, 1 is Rowmax-H15.
        clamp: `paper`, `zero` or `none` (see the module). The envelope holds above it.
    """

    k: int
    clamp: str = "paper"
    name: ClassVar[str] = "sq"
    summary: ClassVar[str] = "S on an exponent rounded to 2^−k octaves; k = 1 is Rowmax-H15"

    def __post_init__(self) -> None:
        if not 0 <= self.k <= K_MAX:
            self.refuse("k", f"must be from 0 to {K_MAX}")
        _check_clamp(self)

    def at(self, x: Tensor) -> Tensor:
        return schraudolph(x, self.clamp, self.k)

    @property
    def envelope(self) -> tuple[float, float]:
        half = 2.0 ** -(self.k + 1)
        return _octaves(-half, half + interpolation_peak(self.k))


@dataclass(frozen=True)
class H15(RowmaxAnchored):
    """Rowmax-H15: n = RNE(2x), ŵ = (1 + (n mod 2)/2)·2^⌊n/2⌋ (paper §5.2). The weights are {1, 1.5}·2^i.

    −1/4 ≤ ε₂ ≤ log2(1.5) − 1/4 octaves.

    Attributes:
        clamp: `paper` (2x ≥ −252), `zero` or `none` (see the module). The envelope holds above it.
    """

    clamp: str = "paper"
    name: ClassVar[str] = "h15"
    summary: ClassVar[str] = "Rowmax-H15: weights {1, 1.5}·2^i of the exponent rounded to half octaves"

    def __post_init__(self) -> None:
        _check_clamp(self)

    def at(self, x: Tensor) -> Tensor:
        return schraudolph(x, self.clamp, 1)

    @property
    def envelope(self) -> tuple[float, float]:
        return SQ(k=1).envelope


def _check_clamp(operator: S | SQ | H15) -> None:
    if operator.clamp not in CLAMPS:
        operator.refuse("clamp", f"must be one of {', '.join(CLAMPS)}")
