"""The full-range grid: K intervals over the whole range of a row's scores, finer or coarser near the maximum.

Paper §3.2, A.4, A.5. Edges e_a = C·(1 − ρ^a)/(1 − ρ^K), ρ = R^(−1/(K−1)), over u = s − s_min ∈ [0, C]. R is the
width of the lowest interval over the width of the highest: R > 1 is finer near the row maximum.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from .base import Operator, row_max

RECONSTRUCTIONS = ("nearest", "upper", "lerp")
#: Widest span, R^(K/(K−1)) or its inverse, at which FP32 tells the intervals apart by a logarithm.
LARGEST_SPAN = 2.0**20
MOST_INTERVALS = 2**20
#: Beyond this exponent exp overflows in FP64, with room to spare.
_LARGEST_EXPONENT = 600.0
MAPS = ("exp", "linear")


@lru_cache(maxsize=256)
def edge_fractions(K: int, R: float) -> Tensor:
    """e_a/C for a = 0..K, float64, shape (K+1,), from 0 to 1."""
    if K == 1 or R == 1:
        return torch.arange(K + 1, dtype=torch.float64) / K
    log_rho = -math.log(R) / (K - 1)
    if K * log_rho > _LARGEST_EXPONENT:  # the same fraction, numerator and denominator times e^(−K·log ρ)
        fractions = [math.exp((a - K) * log_rho) * math.expm1(-a * log_rho) for a in range(K + 1)]
        return torch.tensor(fractions, dtype=torch.float64) / math.expm1(-K * log_rho)
    fractions = torch.tensor([math.expm1(a * log_rho) for a in range(K + 1)], dtype=torch.float64)
    return fractions / math.expm1(K * log_rho)


def searched(K: int, R: float) -> bool:
    """Whether the widths of the intervals span more than `LARGEST_SPAN`."""
    return K > 1 and abs(math.log(R)) * K / (K - 1) > math.log(LARGEST_SPAN)


def interval_closed_form(t: Tensor, K: int, R: float) -> Tensor:
    """Index of the interval that holds t = u/C ∈ [0, 1], from the logarithm of its position.

    Where the widths span more than `LARGEST_SPAN` FP32 cannot: near t = 1 the logarithm would be of 0, or its argument
    overflow. Such grids are searched.

    Returns:
        int64 of the shape of `t`, in 0..K−1; t = 1 belongs to the last interval.
    """
    if K == 1 or R == 1:
        index = torch.floor(t * K)
    else:
        log_rho = -math.log(R) / (K - 1)
        if searched(K, R):
            return interval_search(t, K, R)
        index = torch.floor(torch.log1p(t * math.expm1(K * log_rho)) / log_rho)
    # Clamped as integers, so that NaN too gives an index that exists; the row sum reports the NaN.
    return index.to(torch.int64).clamp(0, K - 1)


def interval_search(t: Tensor, K: int, R: float) -> Tensor:
    """The same index by searching the edges: a second, slower route that the closed form is held to."""
    inner = edge_fractions(K, R)[1:-1].to(t)
    return torch.bucketize(t, inner, right=True)


@dataclass(frozen=True)
class Grid(Operator):
    """ŵ = exp(level − C) with the level of the score's interval.

    Attributes:
        K: number of intervals, from 1 to `MOST_INTERVALS`.
        R: width of the lowest interval over the highest, > 0; 1 is uniform.
        recon: the level inside an interval: `nearest` edge (a tie goes up), `upper` edge, or `lerp`, which
            interpolates the weight between the edges.
        map: `exp`, or `linear`, the control that uses ŵ = level/C (paper D.1).

    A row with one key, or with equal scores (C = 0), has all weights 1.
    """

    K: int
    R: float = 1.0
    recon: str = "nearest"
    map: str = "exp"
    name: ClassVar[str] = "grid"
    summary: ClassVar[str] = "K intervals over the row's full range, R times wider at the bottom than at the top"

    def __post_init__(self) -> None:
        if not 1 <= self.K <= MOST_INTERVALS:
            self.refuse("K", f"must be from 1 to {MOST_INTERVALS:,}")
        if not (self.R > 0 and math.isfinite(self.R)):
            self.refuse("R", "must be a finite number above 0")
        if self.recon not in RECONSTRUCTIONS:
            self.refuse("recon", f"must be one of {', '.join(RECONSTRUCTIONS)}")
        if self.map not in MAPS:
            self.refuse("map", f"must be one of {', '.join(MAPS)}")

    def __call__(self, scores: Tensor, valid: Tensor, interval=interval_closed_form) -> Tensor:
        low = scores.masked_fill(~valid, torch.inf).amin(-1, keepdim=True)
        C = row_max(scores) - low
        # C is 0 on a row of equal scores and −inf on a row without a key: every level is then the top one.
        flat = C <= 0
        t = ((scores - low) / C.masked_fill(flat, 1.0)).clamp(0, 1)
        t = t.masked_fill(flat, 1.0)
        w = self._weights_at(t, C.masked_fill(flat, 0.0), interval(t, self.K, self.R))
        return w.masked_fill(~valid, 0.0)

    def _weights_at(self, t: Tensor, C: Tensor, a: Tensor) -> Tensor:
        """Weights from the relative position t, the range C and the interval index a."""
        exact = edge_fractions(self.K, self.R).to(t.device)
        edge = exact.to(t.dtype)
        below_top = (exact - 1).to(t.dtype)  # level − C in units of C, rounded once, exact near the maximum
        value = (lambda index: torch.exp(C * below_top[index])) if self.map == "exp" else edge.__getitem__
        if self.recon == "upper":
            return value(a + 1)
        if self.recon == "nearest":
            middle = ((exact[1:] + exact[:-1]) / 2).to(t.dtype)  # of each interval; at it, the upper edge is nearest
            return value(a + (t >= middle[a]))
        if self.map == "linear":
            return t
        width = edge[a + 1] - edge[a]
        x = ((t - edge[a]) / width).clamp(0, 1).masked_fill(width == 0, 1.0)  # two edges that round to one number
        return torch.lerp(value(a), value(a + 1), x)
