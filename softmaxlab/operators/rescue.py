"""Mass-partition rescue: another operator's weights, with the softmax mass of the high-mass set restored.

Paper A.8. S_q is the smallest set of keys whose softmax mass reaches q. Inside S and outside it the
operator's own proportions stay; only the mass of the two sides is put back to what softmax gives them.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import Operator, normaliser
from .softmax import Softmax


def high_mass_set(p: Tensor, q: float) -> Tensor:
    """S_q of each row: bool of the shape of `p`; largest first, ties in key order, until the mass reaches q.

    Args:
        p: probabilities, (..., n), FP64 where the device has it.
        q: mass to reach, in (0, 1).
    """
    ordered, order = p.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    # A key is in the set if the larger ones alone do not reach q. Keys without mass never are.
    return torch.zeros_like(p, dtype=torch.bool).scatter_(-1, order, (before < q) & (ordered > 0))


@dataclass(frozen=True)
class Rescue(Operator):
    """p̃ = p̂·P_in/P̂_in inside S_q and p̂·P_out/P̂_out outside (paper A.8).

    P_in and P_out are those of the exact softmax of the scores of the run in progress. Where the operator
    leaves one side without mass, the other side is all there is and the row is renormalised.

    Attributes:
        of: the operator that is rescued.
        q: mass that defines the set, in (0, 1).
    """

    of: Operator
    q: float = 0.9
    name: ClassVar[str] = "rescue"
    summary: ClassVar[str] = "another operator with the softmax mass of the set S_q and of the rest restored"

    def __post_init__(self) -> None:
        if not 0 < self.q < 1:
            self.refuse("q", "must be in (0, 1), else the set S_q is everything or nothing")

    def __call__(self, scores: Tensor, valid: Tensor) -> Tensor:
        exact, approximate = (op(scores, valid) for op in (Softmax(), self.of))
        if scores.device.type != "mps":
            exact, approximate = exact.double(), approximate.double()
        p = exact / normaliser(exact, scores)
        p_hat = approximate / normaliser(approximate, scores)
        inside = high_mass_set(p, self.q)
        mass_in, hat_in = ((x * inside).sum(-1, keepdim=True) for x in (p, p_hat))
        mass_out, hat_out = ((x * ~inside).sum(-1, keepdim=True) for x in (p, p_hat))
        scale_in = torch.where(hat_in > 0, mass_in / hat_in, 0.0)
        scale_out = torch.where(hat_out > 0, mass_out / hat_out, 0.0)
        return (p_hat * torch.where(inside, scale_in, scale_out)).float()
