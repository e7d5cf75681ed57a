"""Octave lattices anchored at the row maximum: weights are powers of two of a rounded distance Δ.

Paper §4.4, A.6. round(y) is ⌊y + 1/2⌋. Scores are FP32, the lattice is computed in FP64 and the weights are
rounded to FP32, so that the only rounding that counts is the lattice's own.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import RowmaxAnchored, exponents, row_max

TAILS = ("clamp", "drop")


#: Most steps an octave: finer than FP32's own spacing below 1.
MOST_STEPS = 2**30
#: Octaves below the maximum: FP64 has no smaller number.
MOST_OCTAVES = 1074


def round_half_up(y: Tensor) -> Tensor:
    """⌊y + 1/2⌋, the rounding of every lattice here."""
    return torch.floor(y + 0.5)


@dataclass(frozen=True)
class PoT(RowmaxAnchored):
    """ŵ = 2^(−round(mΔ/ln 2)/m): m steps an octave, |ε| ≤ ln 2/(2m) (paper A.6).

    Attributes:
        m: steps an octave, > 0; 0.5 is a step of two octaves.
    """

    m: float
    name: ClassVar[str] = "pot"
    summary: ClassVar[str] = "powers of two, m steps an octave, anchored at the row maximum"

    def __post_init__(self) -> None:
        if not 0 < self.m <= MOST_STEPS:
            self.refuse("m", f"must be above 0 and at most {MOST_STEPS:,}")

    def at(self, x: Tensor) -> Tensor:
        return torch.exp2(-round_half_up(-self.m * x) / self.m).float()

    def __call__(self, scores: Tensor, valid: Tensor) -> Tensor:
        # Masked keys, x = −∞, come out as exactly 0. `self` may be a stand-in that has only the fields.
        return PoT.at(self, exponents(scores, row_max(scores)))

    @property
    def envelope(self) -> tuple[float, float]:
        half = math.log(2) / (2 * self.m)
        return -half, half


@dataclass(frozen=True)
class RowmaxPoT(RowmaxAnchored):
    """ŵ = 2^(−d), d = min(K_max, ⌊Δ/ln 2 + 1/2⌋) (paper §4.4).

    Attributes:
        K_max: the largest exponent, ≥ 1.
        tail: what happens beyond it: `clamp` to 2^(−K_max), or `drop` to 0.
    """

    K_max: int
    tail: str = "clamp"
    name: ClassVar[str] = "rowmax_pot"
    summary: ClassVar[str] = "powers of two down to 2^(−K_max), the tail clamped there or dropped"

    def __post_init__(self) -> None:
        if not 1 <= self.K_max <= MOST_OCTAVES:
            self.refuse("K_max", f"must be from 1 to {MOST_OCTAVES:,}; no number lies further below the maximum")
        if self.tail not in TAILS:
            self.refuse("tail", f"must be one of {', '.join(TAILS)}")

    def at(self, x: Tensor) -> Tensor:
        d = round_half_up(-x)
        if self.tail == "drop":
            return torch.exp2(-d).masked_fill(d > self.K_max, 0.0).float()
        return torch.exp2(-d.clamp(max=self.K_max)).float()

    def __call__(self, scores: Tensor, valid: Tensor) -> Tensor:
        return RowmaxPoT.at(self, exponents(scores, row_max(scores))).masked_fill(~valid, 0.0)

    @property
    def envelope(self) -> tuple[float, float] | None:
        # A clamped tail can be any number of octaves too heavy.
        return (-math.log(2) / 2, math.log(2) / 2) if self.tail == "drop" else None
