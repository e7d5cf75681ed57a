"""The bit forms of the family S(Q_k(x)): an addition, a shift and an addition of integers in place of 2^x.

Paper B.1, B.2. In [2^23, 2^24) the spacing of FP32 is 1. Adding 12582912 = 2^23 + 2^22 to t = 2^k·x therefore
rounds t to an integer n, ties to even, and leaves n in the low bits; a left shift by 23 − k moves its k fractional
bits to the top of the mantissa and the rest into the exponent; the bits of 1.0 supply the exponent's bias.
What the shift pushes out at the top must be the constant's own bits, so that k ≤ 13.

Three forms, all with FP32 additions and 32-bit integers that wrap around, as a GPU has them:

- `paper`: the pattern of the paper, with t = max(2^k·x, −126·2^k).
- `folded`: the bias is part of the constant, 12582912 + 127·2^k, so that the bits are just r << (23 − k). One
  instruction fewer, and equal for k ≥ 1; for k = 0 the 127 would turn ties to even into ties to odd.
- `fused`, for k = 7: the scale, the subtraction of the row maximum and the addition of the constant are one FMA.
  The constant then holds the row maximum, rounded to an integer of t: 2^−8 octaves at most at k = 7, the same for
  the whole row. It cancels but for where the lattice lies; at small k it would not.

`max` is CUDA's, which returns the number when the other operand is NaN.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Literal

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from softmaxlab.errors import LabError
from softmaxlab.operators import SQ
from softmaxlab.operators.schraudolph import K_MAX

MAGIC = 12582912.0  # 2^23 + 2^22, bits 0x4B400000
ONE = 0x3F800000  # the bits of 1.0
FUSED_K = 7

#: Where a kernel clamps the exponent, in octaves.
CLAMPS = {"paper": -126, "zero": -127, "none": None}
Clamp = Literal["paper", "zero", "none"]

FORMS = ("paper", "folded", "fused")


def paper_form(x: Tensor, k: int, clamp: Clamp = "paper") -> Tensor:
    """S(Q_k(x)) by the paper's integer operations (B.1, B.2).

    Args:
        x: FP32 base-two exponents, any shape.
        k: fractional bits, 0 to 13.
        clamp: `paper` at −126, `zero` at −127, or `none`.

    Returns:
        FP32, of the shape of `x`.

    Raises:
        LabError: x is not FP32, k or clamp is none of these.
    """
    r = _clamped(x, k, clamp) + MAGIC
    return ((_bits(r) << (23 - k)) + ONE).view(torch.float32)


def folded_form(x: Tensor, k: int, clamp: Clamp = "paper") -> Tensor:
    """As `paper_form` with the bias folded into the constant; k from 1."""
    if k == 0:
        raise LabError("the folded form needs k of at least 1, and k is 0: its odd constant would round ties to odd")
    r = _clamped(x, k, clamp) + (MAGIC + 127 * 2**k)
    return (_bits(r) << (23 - k)).view(torch.float32)


def fused_form(scores: Tensor, scale: float, row_max: Tensor | float, clamp: Clamp = "paper") -> Tensor:
    """S(Q_7) of scale·(scores − row_max) in one FMA, a max and a shift.

    Args:
        scores: FP32, before any scaling.
        scale: octaves of a unit of score (a kernel's softmax scale · log2 e).
        row_max: of the scores, FP32, broadcastable.
        clamp: as in `paper_form`; here the max comes after the FMA.

    Returns:
        FP32. The lattice is shifted by `fused_shift` octaves, one number for a row.
    """
    _check(scores, FUSED_K, clamp)
    factor, constant = _fused_constants(scale, row_max)
    r = fma(scores, factor, constant)
    if CLAMPS[clamp] is not None:
        r = torch.fmax(r, torch.tensor(MAGIC + (127 + CLAMPS[clamp]) * 2**FUSED_K))
    return (_bits(r) << (23 - FUSED_K)).view(torch.float32)


def fused_shift(scale: float, row_max: Tensor | float) -> Tensor:
    """By how many octaves `fused_form` evaluates S(Q_7) beside scale·(scores − row_max), FP64; at most 2^−8."""
    factor, constant = _fused_constants(scale, row_max)
    exact = -factor.double() * torch.as_tensor(row_max, dtype=torch.float32).double()
    return (constant.double() - (MAGIC + 127 * 2**FUSED_K) - exact) / 2**FUSED_K


def _fused_constants(scale: float, row_max: Tensor | float) -> tuple[Tensor, Tensor]:
    factor = torch.tensor(scale * 2**FUSED_K, dtype=torch.float32)
    top = torch.as_tensor(row_max, dtype=torch.float32)
    return factor, fma(-top, factor, torch.tensor(MAGIC + 127 * 2**FUSED_K))


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a·b + c of FP32 tensors with one rounding, to nearest, ties to even, as a GPU's FMA.

    The product of two FP32 numbers is exact in FP64. Their sum with c is rounded to odd there: a result that was
    inexact gets an odd last bit, so that the second rounding, to FP32, cannot mistake it for a tie. FP64's 53 bits
    are more than the 50 that this needs.
    """
    p, c = a.double() * b.double(), c.double()
    s = p + c
    back = s - p
    error = (p - (s - back)) + (c - back)  # what the sum lost, exactly
    even = (s.view(torch.int64) & 1) == 0
    odd = torch.nextafter(s, torch.where(error > 0, torch.inf, -torch.inf).to(s))
    return torch.where(even & (error != 0) & error.isfinite(), odd, s).float()


def _check(x: Tensor, k: int, clamp: str) -> None:
    if x.dtype != torch.float32:
        raise LabError(f"the bit forms take float32 exponents, and these are {x.dtype}")
    if clamp not in CLAMPS:
        raise LabError(f"clamp is {clamp!r}, but must be one of {', '.join(CLAMPS)}")
    if not 0 <= k <= K_MAX:
        raise LabError(f"k is {k}, but must be from 0 to {K_MAX}")


def _clamped(x: Tensor, k: int, clamp: str) -> Tensor:
    """t = max(2^k·x, least): the product is exact."""
    _check(x, k, clamp)
    t = x * 2.0**k
    return t if CLAMPS[clamp] is None else torch.fmax(t, torch.tensor(CLAMPS[clamp] * 2.0**k))


def _bits(r: Tensor) -> Tensor:
    # A GPU's additions give one NaN, 0x7FFFFFFF; a CPU's keep the bits of the NaN that came in.
    return r.view(torch.int32).masked_fill(r.isnan(), 0x7FFFFFFF)


# Comparison with the arithmetic form


def paper_inputs() -> Tensor:
    """The paper's 2,295,040 exponents in [−126, 0], FP32 (B.2).

    2,000,000 uniform draws (NumPy's default generator, seed 0), the integers 0 … −126, and every multiple of 7·2^−14.
    """
    draws = np.random.default_rng(0).uniform(-126, 0, 2_000_000).astype(np.float32)
    multiples = -7 * np.arange(126 * 2**14 // 7 + 1) / 2**14
    return torch.from_numpy(np.concatenate([draws, -np.arange(127.0), multiples]).astype(np.float32))


def tie_inputs(k: int) -> Tensor:
    """Every exponent of [−126, 8] that lies half way between two of Q_k, FP32."""
    return (torch.arange(-126 * 2**k, 8 * 2**k, dtype=torch.float32) + 0.5) / 2**k


def positive_inputs() -> Tensor:
    """Exponents in [0, 8], where an anchor that lags by the kernel's threshold sends them, FP32."""
    draws = np.random.default_rng(1).uniform(0, 8, 100_000)
    multiples = 7 * np.arange(8 * 2**14 // 7 + 1) / 2**14
    return torch.from_numpy(np.concatenate([draws, np.arange(9.0), multiples]).astype(np.float32))


def clamped_inputs() -> Tensor:
    """Exponents in [−160, −125], across both clamps, FP32."""
    return torch.from_numpy(np.random.default_rng(2).uniform(-160, -125, 100_000).astype(np.float32))


INPUTS: dict[str, Callable[[int], Tensor]] = {
    "paper": lambda k: paper_inputs(),
    "ties": tie_inputs,
    "positive": lambda k: positive_inputs(),
    "clamped": lambda k: clamped_inputs(),
}


def by_form(form: str, x: Tensor, k: int, clamp: Clamp = "paper") -> Tensor:
    """One of `FORMS` on exponents; the fused form with scale 1 and row maximum 0, so that nothing is shifted."""
    if form == "fused":
        return fused_form(x, 1.0, 0.0, clamp)
    return {"paper": paper_form, "folded": folded_form}[form](x, k, clamp)


def comparison(
    ks: Iterable[int] = range(K_MAX + 1), inputs: Iterable[str] = ("paper",), clamps: Iterable[Clamp] = ("paper",)
) -> pd.DataFrame:
    """How many inputs give the same 32 bits by each form as by the arithmetic form, `operators.SQ`.

    Args:
        ks: which members of the family.
        inputs: of `INPUTS`: `paper`, `ties`, `positive`, `clamped`.
        clamps: `paper` and `zero`; without a clamp the forms differ below −126 by design (`special_cases`).

    Returns:
        One row a member, form, input set and clamp: k, form, inputs, clamp, compared, equal, different.
    """
    rows = []
    for name, k, clamp in itertools.product(inputs, ks, clamps):
        x = INPUTS[name](k)
        arithmetic = SQ(k=k, clamp=clamp).at(x.double()).view(torch.int32)
        for form in FORMS:
            if (form == "folded" and k == 0) or (form == "fused" and k != FUSED_K):
                continue
            equal = int((by_form(form, x, k, clamp).view(torch.int32) == arithmetic).sum())
            rows.append((k, form, name, clamp, len(x), equal, len(x) - equal))
    return pd.DataFrame(rows, columns=["k", "form", "inputs", "clamp", "compared", "equal", "different"])


# What happens outside the range


def special_cases(k: int = 1) -> pd.DataFrame:
    """What the bit forms and the arithmetic form give at ties, at the clamps, above 0, at NaN and ±∞.

    With a clamp NaN becomes the least weight, so a kernel hides it; +∞ becomes 1 or 0. Without one the exponent
    wraps around below −127. The arithmetic form keeps NaN, and turns +∞ into it.

    Returns:
        One row a case and clamp: case, x, clamp, and the weight by the forms `paper`, `folded` (NaN for k = 0,
        which has none) and `arithmetic`.
    """
    step = 2.0**-k
    cases = [
        ("tie, to the even neighbour above", -step / 2),
        ("tie, to the even neighbour below", -3 * step / 2),
        ("minus zero", -0.0),
        ("one step above the anchor", step),
        ("tie above the anchor", 3 * step / 2),
        ("the kernel's largest lag", 8.0),
        ("at the paper's clamp", -126.0),
        ("between the clamps", -126.5),
        ("at the zero clamp", -127.0),
        ("below both clamps", -128.0),
        ("far below", -1000.0),
        ("masked key", -torch.inf),
        ("plus infinity", torch.inf),
        ("NaN", torch.nan),
    ]
    rows = []
    for (case, value), clamp in itertools.product(cases, CLAMPS):
        x = torch.tensor([value], dtype=torch.float32)
        folded = folded_form(x, k, clamp).item() if k else np.nan
        arithmetic = SQ(k=k, clamp=clamp).at(x.double()).item()
        rows.append((case, value, clamp, paper_form(x, k, clamp).item(), folded, arithmetic))
    return pd.DataFrame(rows, columns=["case", "x", "clamp", "paper", "folded", "arithmetic"])


def masked_rows(k: int = 1) -> pd.DataFrame:
    """What a kernel makes of a row whose keys are all masked, by clamp and form (x = −∞ everywhere).

    Returns:
        One row a clamp and form: clamp, form, weight (of each key) and output: `0`, or `mean of the values` where
        the row sum is not 0 and equal weights are left.
    """
    rows = []
    for clamp, form in itertools.product(CLAMPS, ("paper", "folded") if k else ("paper",)):
        weight = by_form(form, torch.tensor([-torch.inf]), k, clamp).item()
        rows.append((clamp, form, weight, "mean of the values" if weight else "0"))
    return pd.DataFrame(rows, columns=["clamp", "form", "weight", "output"])
