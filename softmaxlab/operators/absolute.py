"""Lattices that are anchored elsewhere than at the row maximum: at p = 1, or at score 0.

Paper §5.1, B.1, Tables B.1 and B.2. They differ from the rowmax-anchored lattices of the same spacing by a phase
of the row: the row maximum lies somewhere between two lattice points. A kernel cannot compute those anchored at
p = 1 on line, because p needs the whole row.

Two hooks serve the measurements of a row. `phase` is the displacement of the row maximum on the operator's own
lattice, in [−1/2, 1/2] of its step. `anchor_offset` is, where the weights are not relative to the row maximum,
how much log ŵ of an exact row would exceed −Δ: subtracted, it leaves the log-weight error ε.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from .base import Operator, exponents, row_max
from .lattice import TAILS, round_half_up

if TYPE_CHECKING:
    from softmaxlab.divergence import Rows

LN2 = math.log(2)
RENORMALISE = ("yes", "no")


@dataclass(frozen=True)
class _ProbabilityLattice(Operator):
    """p̂ ∝ 2^(−q/steps), q = round(−steps·log2 p) within 0…2^bits − 1.

    −log2 p is (Δ + log Σ exp(−Δ))/ln 2, never the logarithm of a p that has underflowed. The weights are
    2^(−q/steps) themselves; those below FP32's range are 0. The envelope holds for keys within the range of q.
    """

    bits: int = 8
    renormalise: str = "yes"
    tail: str = "clamp"
    steps: ClassVar[int]

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 8:
            self.refuse("bits", "must be from 1 to 8")
        for field, values in (("renormalise", RENORMALISE), ("tail", TAILS)):
            if getattr(self, field) not in values:
                self.refuse(field, f"must be one of {', '.join(values)}")

    @property
    def normalised(self) -> bool:
        return self.renormalise == "yes"

    def __call__(self, scores: Tensor, valid: Tensor) -> Tensor:
        x = exponents(scores, row_max(scores))
        # log2 Σ 2^x is between 0 and log2 n: the row maximum is one of the keys.
        minus_log2_p = torch.log2(torch.exp2(x).sum(-1, keepdim=True)) - x
        q, largest = round_half_up(self.steps * minus_log2_p), 2**self.bits - 1
        w = torch.exp2(-q.clamp(0, largest) / self.steps).float()
        return w.masked_fill(~valid if self.tail == "clamp" else ~valid | (q > largest), 0.0)

    @property
    def envelope(self) -> tuple[float, float]:
        return -LN2 / (2 * self.steps), LN2 / (2 * self.steps)

    def phase(self, rows: Rows) -> Tensor:
        """φ = y − round(y), y = −steps·log2 p_max, FP64, (…)."""
        return _displacement(self.steps * rows.log_z / LN2)

    def anchor_offset(self, rows: Rows) -> Tensor:
        """−log Z: log p is −Δ − log Z. Nats, FP64, (…)."""
        return -rows.log_z


@dataclass(frozen=True)
class Log2P(_ProbabilityLattice):
    """p̂ ∝ 2^(−q), q = clip(round(−log2 p), 0, 2^bits − 1): the octave lattice of FQ-ViT (paper Table B.1).

    Attributes:
        bits: of q, 1 to 8.
        renormalise: `yes`, or `no` to use 2^(−q) as the probability, as FQ-ViT does.
        tail: what happens beyond the largest q: `clamp` to it, or `drop` to 0, as FQ-ViT's code does. With 8 bits
            both are 0 in FP32; with 4 it matters.
    """

    steps: ClassVar[int] = 1
    name: ClassVar[str] = "log2p"
    summary: ClassVar[str] = "−log2 p rounded to an integer of at most 8 bits (the lattice of FQ-ViT)"


@dataclass(frozen=True)
class LogSqrt2P(_ProbabilityLattice):
    """p̂ ∝ 2^(−q/2), q = clip(round(−2·log2 p), 0, 2^bits − 1): the half-octave lattice of RepQ-ViT (Table B.1).

    Attributes:
        bits, renormalise, tail: as in `Log2P`. With 8 bits the clamp is at 2^(−127.5), with 4 at 2^(−7.5).
    """

    steps: ClassVar[int] = 2
    name: ClassVar[str] = "log_sqrt2p"
    summary: ClassVar[str] = "−2·log2 p rounded to an integer of at most 8 bits (the lattice of RepQ-ViT)"


@dataclass(frozen=True)
class ILPoT(Operator):
    """Absolute octave lattice: ŵ = 2^(round(s/ln 2) − s_max/ln 2) (paper B.1).

    The second term cancels; it keeps the weights near 1. They can exceed 1 by half an octave.
    """

    name: ClassVar[str] = "ilpot"
    summary: ClassVar[str] = "powers of two of the score itself, an octave lattice anchored at score 0"

    def __call__(self, scores: Tensor, valid: Tensor) -> Tensor:
        y, top = _absolute(scores)
        return torch.exp2(round_half_up(y) - top).float()

    @property
    def envelope(self) -> tuple[float, float]:
        return -LN2 / 2, LN2 / 2

    def phase(self, rows: Rows) -> Tensor:
        """φ = y − round(y), y = −s_max/ln 2, FP64, (…)."""
        return _displacement(-rows.top / LN2)


@dataclass(frozen=True)
class ILPoTHA(Operator):
    """Absolute half-octave lattice with an exact maximum: ŵ = 2^(round(2s/ln 2)/2 − s_max/ln 2), 1 at s_max.

    Paper Table B.2, ILPoT-H-A. Keys just below the maximum can weigh more than it, by up to a quarter octave.
    """

    name: ClassVar[str] = "ilpot_h_a"
    summary: ClassVar[str] = "half-octave lattice anchored at score 0, the row's largest weight exact"

    def __call__(self, scores: Tensor, valid: Tensor) -> Tensor:
        y, top = _absolute(scores)
        return torch.exp2(round_half_up(2 * y) / 2 - top).masked_fill(y == top, 1.0).masked_fill(~valid, 0.0).float()

    @property
    def envelope(self) -> tuple[float, float]:
        return -LN2 / 4, LN2 / 4

    def phase(self, rows: Rows) -> Tensor:
        """φ = y − round(y), y = −2·s_max/ln 2, FP64, (…)."""
        return _displacement(-2 * rows.top / LN2)


@dataclass(frozen=True)
class ILPoTH15(Operator):
    """The {1, 1.5}·2^i lattice of Rowmax-H15 anchored at score 0: n = RNE(2s/ln 2) (paper Table B.2, ilpot_h15_v1).

    ŵ = (1 + (n mod 2)/2)·2^(⌊n/2⌋ − ⌊n_max/2⌋), n mod 2 ∈ {0, 1} for negative n too.
    """

    name: ClassVar[str] = "ilpot_h15"
    summary: ClassVar[str] = "weights {1, 1.5}·2^i of the score itself, anchored at score 0"

    def __call__(self, scores: Tensor, valid: Tensor) -> Tensor:
        y, top = _absolute(scores)
        n, highest = torch.round(2 * y), torch.floor(torch.round(2 * top) / 2)
        w = (1 + torch.remainder(n, 2) / 2) * torch.exp2(torch.floor(n / 2) - highest)
        return w.float().masked_fill(~valid, 0.0)

    @property
    def envelope(self) -> tuple[float, float]:
        return -LN2 / 4, math.log(1.5) - LN2 / 4

    def phase(self, rows: Rows) -> Tensor:
        """φ = y − round(y), y = −2·s_max/ln 2, FP64, (…)."""
        return _displacement(-2 * rows.top / LN2)

    def anchor_offset(self, rows: Rows) -> Tensor:
        """s_max − ⌊n_max/2⌋·ln 2: the weights are relative to that power of two. Nats, FP64, (…)."""
        return rows.top - torch.floor(torch.round(2 * rows.top / LN2) / 2) * LN2


def _absolute(scores: Tensor) -> tuple[Tensor, Tensor]:
    """s/ln 2 and s_max/ln 2, FP64 (FP32 on MPS)."""
    zero = torch.zeros((), dtype=scores.dtype, device=scores.device)
    return exponents(scores, zero), exponents(row_max(scores), zero)


def _displacement(y: Tensor) -> Tensor:
    return y - round_half_up(y)
