"""The exact map."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import RowmaxAnchored, row_max


@dataclass(frozen=True)
class Softmax(RowmaxAnchored):
    """ŵ = exp(−Δ): softmax itself, the baseline of every contrast (paper A.1)."""

    name: ClassVar[str] = "softmax"
    summary: ClassVar[str] = "the exact map exp(−Δ)"

    def __call__(self, scores: Tensor, valid: Tensor) -> Tensor:
        # exp(−inf) is exactly 0, so masked keys need no second mask.
        return torch.exp(scores - row_max(scores))

    def at(self, x: Tensor) -> Tensor:
        return torch.exp2(x).float()

    @property
    def envelope(self) -> tuple[float, float]:
        return 0.0, 0.0
