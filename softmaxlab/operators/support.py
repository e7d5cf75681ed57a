"""Support operators: which keys keep a weight, and whether the kept ones keep their relative weights.

Top-k by fraction and mean threshold (paper §4.1, A.3), each with softmax weights on the support ("rel" in
the paper) or uniform ones ("unif").
"""

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from .base import Operator, row_max

WEIGHTS = ("softmax", "uniform")


@lru_cache(maxsize=64)
def kept_counts(f: float, n_max: int) -> Tensor:
    """k(n) = max(1, ⌈f·n⌉) for n = 0..n_max, int64, shape (n_max+1,).

    The ceiling is taken in exact arithmetic on the decimal number that was written: 0.15 is 15/100, not the
    nearest binary float. In float32, 39 of the first 2,048 values at f = 0.15 would be off by one.
    """
    exact = Fraction(repr(f))
    p, q = exact.numerator, exact.denominator
    return torch.tensor([max(1, -(-p * n // q)) for n in range(n_max + 1)], dtype=torch.int64)


def pooled_density(f: float, context: int) -> float:
    """Share of kept entries, pooled over the causal rows n = 1..context, under top-k at fraction f without ties.

    Source: paper D.1, which reports 1.05% and 0.70% for nominal fractions of 1% and 0.65%.
    """
    return kept_counts(f, context)[1:].sum().item() / (context * (context + 1) / 2)


def _support_weights(kind: str, scores: Tensor, keep: Tensor) -> Tensor:
    if kind == "uniform":
        return keep.to(scores.dtype)
    return torch.exp(scores - row_max(scores)).masked_fill(~keep, 0.0)


@dataclass(frozen=True)
class TopK(Operator):
    """Keep the max(1, ⌈f·n⌉) largest of a row's n valid scores; keys equal to the last kept one stay too.

    Attributes:
        f: kept fraction, in (0, 1].
        weights: `softmax` keeps the relative weights on the support, `uniform` makes them equal.
    """

    f: float
    weights: str = "softmax"
    name: ClassVar[str] = "topk"
    summary: ClassVar[str] = "the ⌈f·n⌉ largest scores of a row, softmax or uniform weights on them"

    def __post_init__(self) -> None:
        if not 0 < self.f <= 1:
            self.refuse("f", "must be in (0, 1]")
        if self.weights not in WEIGHTS:
            self.refuse("weights", f"must be one of {', '.join(WEIGHTS)}")

    def __call__(self, scores: Tensor, valid: Tensor) -> Tensor:
        n = scores.shape[-1]
        count = valid.sum(-1, keepdim=True)
        k = kept_counts(self.f, n).to(scores.device)[count].expand(*scores.shape[:-1], 1)
        # The last kept score of each row. One selection of the largest k serves all rows of the call.
        largest = scores.topk(int(k.max()), dim=-1).values
        threshold = largest.gather(-1, k - 1)
        keep = (scores >= threshold) & valid
        return _support_weights(self.weights, scores, keep)


@dataclass(frozen=True)
class MeanThreshold(Operator):
    """Keep the scores above the mean valid score; a row where none is above keeps all (paper A.3).

    Attributes:
        weights: as in `TopK`.
    """

    weights: str = "softmax"
    name: ClassVar[str] = "mean_threshold"
    summary: ClassVar[str] = "the scores above the row's mean, softmax or uniform weights on them"

    def __post_init__(self) -> None:
        if self.weights not in WEIGHTS:
            self.refuse("weights", f"must be one of {', '.join(WEIGHTS)}")

    def __call__(self, scores: Tensor, valid: Tensor) -> Tensor:
        # In Δ = s_max − s the condition s > mean(s) reads Δ < mean(Δ); the values are small near the
        # maximum, where FP32 is finest.
        delta = (row_max(scores) - scores).masked_fill(~valid, 0.0)
        count = valid.sum(-1, keepdim=True).clamp(min=1)
        above = (delta < delta.sum(-1, keepdim=True) / count) & valid
        keep = torch.where(above.any(-1, keepdim=True), above, valid)
        return _support_weights(self.weights, scores, keep)
