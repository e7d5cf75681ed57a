"""Temperature: the row flattened (α < 1) or sharpened (α > 1), the perturbation of the matched contrasts."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import RowmaxAnchored, row_max

LARGEST = 1e30


@dataclass(frozen=True)
class Temperature(RowmaxAnchored):
    """p̂ ∝ exp(α·s) (paper §3.2, A.7).

    Attributes:
        alpha: inverse temperature, > 0; 1 is softmax.
    """

    alpha: float
    name: ClassVar[str] = "temperature"
    summary: ClassVar[str] = "exp(−αΔ): flatter than softmax below 1, sharper above"

    def __post_init__(self) -> None:
        if not 1 / LARGEST <= self.alpha <= LARGEST:
            self.refuse("alpha", f"must be from {1 / LARGEST:g} to {LARGEST:g}: FP32 holds no more")

    def __call__(self, scores: Tensor, valid: Tensor) -> Tensor:
        return torch.exp(self.alpha * (scores - row_max(scores)))

    def at(self, x: Tensor) -> Tensor:
        return torch.exp2(self.alpha * x).float()
