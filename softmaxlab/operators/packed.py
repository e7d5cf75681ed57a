"""The packed exponential: weights whose bits are an integer code, and whose row sum is taken in pairs.

Not in the paper. It is the paper's family S(Q_k(x)) (`schraudolph`) with a number format that makes it cheap: with

    n = max(0, RNE(2^k·(x + b))),

b the bias of the exponent in the format of P, the weight's bits are n shifted to that format's lowest exponent bit.
A value n·2^−24 is a number of FP16 whose bits are the integer n, for n up to 2047. So one conversion to FP16 clamps
at zero, rounds to nearest even and packs two codes, and one shift makes two weights of them (`softmaxlab.packed_bits`
has the operations). x = −∞ becomes exactly 0; between −b and 1 − b the weights fall linearly to 0.

`p` is the format of P, and sets b and the range:

- `bf16`: b = 127. For k = 4 the code of x = 0 is 2032, and 2047 the last: x ≤ 0 is needed, with less than an octave
  to spare. For k ≤ 3 the range ends at x = 128, far above where an anchor that lags sends an exponent.
- `fp16`: weights are scaled up by o = 15 − sum_levels octaves, so that 2^sum_levels of them stay finite; b = 15 + o.
  What is 30 − sum_levels octaves below the anchor weighs 0. x ≤ 0 is needed.
- `e4m3`: k = 3 and the code is the byte; weights are scaled up by 8 octaves as FlashAttention-4 does, so b = 15, and
  the row sum's pairs are FP16, in which the code, shifted, is the weight itself. x ≤ 0 is needed.

The row sum adds weights as they are stored: the eight keys that start at a multiple of eight are one group of lanes;
`sum_levels` times neighbouring groups are added in pairs, in the 16-bit format; what is left is added in FP32.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import RowmaxAnchored
from .schraudolph import SQ

K = (1, 2, 3, 4)
LEVELS = (0, 1, 2, 3, 4, 5)
LANES = 8  # keys that lie in different lanes: four words of two
CODE_MAX = 2047  # the largest integer up to which FP16's numbers below 2^−13 hold every one
#: Of each format of P: bias of its exponent, its fractional bits, and the format in which row sums are paired.
FORMATS = {"bf16": (127, 7, torch.bfloat16), "fp16": (15, 10, torch.float16), "e4m3": (7, 3, torch.float16)}


@dataclass(frozen=True)
class Packed(RowmaxAnchored):
    """ŵ = S(Q_k(x)) with codes n = max(0, RNE(2^k·(x + b))); envelope of SQ(k) above 1 − b octaves.

    Attributes:
        k: fractional bits of the exponent, 1 to 4; 1 is Rowmax-H15's lattice. 3 for e4m3.
        sum_levels: of packed additions in the row sum before FP32, 0 to 5.
        p: what P is stored as: bf16, fp16 or e4m3 (see the module).
    """

    k: int
    sum_levels: int = 3
    p: str = "bf16"
    name: ClassVar[str] = "packed"
    summary: ClassVar[str] = "S on an exponent rounded to 2^−k octaves, as packed codes; row sum in pairs"

    def __post_init__(self) -> None:
        if self.k not in K:
            self.refuse("k", f"must be one of {', '.join(map(str, K))}")
        if self.sum_levels not in LEVELS:
            self.refuse("sum_levels", f"must be from 0 to {LEVELS[-1]}")
        if self.p not in FORMATS:
            self.refuse("p", f"must be one of {', '.join(FORMATS)}")
        if self.p == "e4m3" and self.k != 3:
            self.refuse("k", "must be 3 where p is e4m3, whose numbers have three fractional bits")

    @property
    def offset(self) -> int:
        """Octaves that stored weights are scaled up by."""
        return {"bf16": 0, "fp16": 15 - self.sum_levels, "e4m3": 8}[self.p]

    @property
    def bias(self) -> int:
        """b: octaves below the anchor at which a weight is 0."""
        return FORMATS[self.p][0] + self.offset

    @property
    def shift(self) -> int:
        """From a code to the bits of the weight as it is stored."""
        return FORMATS[self.p][1] - self.k

    @property
    def headroom(self) -> float:
        """Octaves by which an exponent may exceed 0: what a kernel's anchor may lag."""
        return 0.0 if self.p != "bf16" or self.k == 4 else 127.0

    def at(self, x: Tensor) -> Tensor:
        """As `RowmaxAnchored.at`.

        Raises:
            LabError: an exponent is so far above 0 that its code does not fit.
        """
        n = (x * 2**self.k).round()  # half to even; the bias is even in these units
        if (n > (self.headroom + 0.5) * 2**self.k).any():
            self.refuse("k", f"p={self.p} leaves no codes for an exponent of {x.nan_to_num().max().item():.3g} octaves")
        q = n.clamp_(min=-self.bias * 2**self.k).mul_(2.0**-self.k)
        e = q.floor().clamp_(min=1 - self.bias)  # in the format's last binade the line goes on to 0
        return q.sub_(e).add_(1).mul_(e.exp2_()).float()

    def row_sum(self, weights: Tensor) -> Tensor:
        """As `RowmaxAnchored.row_sum`: in pairs for `sum_levels` levels, each rounded to nearest even, then in FP32."""
        kind = FORMATS[self.p][2]
        up = 2.0**self.offset if self.p == "fp16" else 1.0
        lanes = torch.nn.functional.pad(weights * up, (0, -weights.shape[-1] % LANES)).unflatten(-1, (-1, LANES))
        for _ in range(self.sum_levels):
            even = lanes.shape[-2] // 2 * 2
            # The FP32 sum of two numbers of this format has bits enough that rounding twice is rounding once.
            paired = (lanes[..., 0:even:2, :] + lanes[..., 1:even:2, :]).to(kind).float()
            lanes = torch.cat([paired, lanes[..., even:, :]], -2)
        return lanes.sum((-2, -1)) / up

    @property
    def row_sum_bound(self) -> float:
        """Largest relative error of `row_sum`, FP32's own aside.

        All weights are ≥ 0, so relative errors of parts bound that of their sum. A sum rounded to nearest is off by at
        most u/(1 + u) of itself, u half the spacing above 1 (sums below the normal range are exact), once a level.
        """
        u = torch.finfo(FORMATS[self.p][2]).eps / 2
        return math.expm1(self.sum_levels * math.log1p(u / (1 + u)))

    @property
    def envelope(self) -> tuple[float, float]:
        return SQ(k=self.k).envelope
