"""The bit form of the packed exponential: one FMA a score, one conversion and one shift a pair.

What it computes is `operators.Packed`; how its kernel does, here in tensor arithmetic. With c octaves of a unit of
score, m the row maximum and b the operator's bias:

    t = fma(s, c·2^(k−24), (b − c·m)·2^(k−24))     FP32; the bracket is one FMA of the row
    n = cvt.rn.relu.f16x2(t, t')                    two codes: an FP16 number below 2^−13 has its integer as bits
    w = n << shift                                  two weights of BF16 or FP16; none for E4M3, whose byte is n

`relu` clamps at zero, and −∞ gives code 0 and weight exactly 0. Rounding to nearest even is the conversion's own, in
steps of 2^−24 for codes up to 2047; from 2048 on FP16's steps double, so that a code there is wrong, and from 65520 on
the conversion gives +∞. The operator's range keeps out of both. A NaN becomes 0x7FFF, and the shift leaves a NaN in
its half (bits that it pushes into the other half make no difference to a row that holds a NaN).

t is rounded twice, once to FP32 and once to a code: a score within 2^−14 codes of a tie may go to either side. And the
bracket is rounded, by at most 2^−24 of c·m: with |c·m| up to 2^22 octaves a code stays within 2^k/4 of its place.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from softmaxlab.bits import fma
from softmaxlab.errors import LabError
from softmaxlab.operators import Packed
from softmaxlab.operators.packed import FORMATS, LANES, LEVELS, K

NAN = 0x7FFF  # of cvt.f16x2: the canonical one
UNIT = -24  # an FP16 subnormal's unit is 2^−24


def codes(scores: Tensor, operator: Packed, scale: float = 1.0, row_max: Tensor | float = 0.0) -> Tensor:
    """Codes of scores.

    Args:
        scores: FP32, (..., n), before any scaling; −∞ at masked keys.
        operator: which packed exponential.
        scale: octaves of a unit of score (a kernel's softmax scale · log2 e), FP32.
        row_max: of the scores, FP32, broadcastable; finite.

    Returns:
        INT32, of the shape of `scores`, 0 to 0x7FFF.

    Raises:
        LabError: the scores are not FP32.
    """
    if scores.dtype != torch.float32:
        raise LabError(f"the packed form takes float32 scores, and these are {scores.dtype}")
    unit = 2.0 ** (operator.k + UNIT)
    factor = torch.tensor(scale, dtype=torch.float32) * unit
    bias = fma(-torch.as_tensor(row_max, dtype=torch.float32), factor, torch.tensor(operator.bias * unit))
    return convert(fma(scores, factor, bias))


def convert(t: Tensor) -> Tensor:
    """The bits of `cvt.rn.relu.f16.f32`: FP32 to INT32, 0 to 0x7FFF."""
    return (t.clamp(min=0) + 0.0).half().view(torch.int16).int().masked_fill(t.isnan(), NAN)


def words(codes: Tensor, operator: Packed) -> Tensor:
    """Pairs of codes as 32-bit words, shifted: INT32, (..., n/2); the first of a pair in the low half."""
    packed = codes[..., ::2] | (codes[..., 1::2] << 16)
    return packed << operator.shift


def stored(codes: Tensor, operator: Packed) -> Tensor:
    """What P holds: FP32, of the shape of `codes`, scaled up by the operator's offset.

    Args:
        codes: of `codes`; an even number of keys, but for e4m3.
        operator: which packed exponential.
    """
    if operator.p == "e4m3":
        return (codes & 0xFF).to(torch.uint8).view(torch.float8_e4m3fn).float()
    return _halves(words(codes, operator), operator).float()


def weights(scores: Tensor, operator: Packed, scale: float = 1.0, row_max: Tensor | float = 0.0) -> Tensor:
    """Weights of scores relative to the anchor, FP32; arguments as `codes`."""
    even = torch.nn.functional.pad(scores, (0, scores.shape[-1] % 2), value=-torch.inf)
    return (stored(codes(even, operator, scale, row_max), operator) * 2.0**-operator.offset)[..., : scores.shape[-1]]


def row_sum(codes: Tensor, operator: Packed) -> Tensor:
    """Row sum of a tile from its codes, relative to the anchor, FP32, (...): packed additions on the words.

    Args:
        codes: (..., keys), a multiple of eight.
        operator: which packed exponential.
    """
    shift = 10 - operator.k if operator.p == "e4m3" else operator.shift  # a byte in FP16's place weighs 2^−8 of it
    packed = (codes[..., ::2] | (codes[..., 1::2] << 16)) << shift
    level = list(packed.unflatten(-1, (-1, LANES // 2)).unbind(-2))
    for _ in range(operator.sum_levels):
        rest = level[len(level) // 2 * 2 :]
        level = [_add(a, b, operator) for a, b in zip(level[::2], level[1::2], strict=False)] + rest
    total = sum(_halves(word, operator).float().sum(-1) for word in level)
    return total * (1.0 if operator.p == "e4m3" else 2.0**-operator.offset)


def _add(a: Tensor, b: Tensor, operator: Packed) -> Tensor:
    """add.rn.bf16x2 or add.rn.f16x2."""
    both = _halves(a, operator) + _halves(b, operator)
    return both.contiguous().view(torch.int32)


def _halves(word: Tensor, operator: Packed) -> Tensor:
    """Both halves of words, low ones first, as numbers: (..., 2·words)."""
    return word.contiguous().view(FORMATS[operator.p][2])


# Comparison with the arithmetic form


def exact_inputs(operator: Packed) -> Tensor:
    """Exponents whose code FP32 holds exactly: every 64th of a code over the whole range, ties among them, FP32."""
    last = int(min(operator.headroom, 0.5) * 2**operator.k)
    steps = torch.arange(-(operator.bias + 8) * 2**operator.k * 64, last * 64 + 1, dtype=torch.float64)
    return (steps / (64 * 2**operator.k)).float()


def near_ties(operator: Packed) -> Tensor:
    """The FP32 numbers on both sides of every tie, FP32."""
    first = -operator.bias * 2**operator.k
    ties = (torch.arange(first, 0, dtype=torch.float32) + 0.5) / 2**operator.k
    return torch.cat([torch.nextafter(ties, torch.tensor(side)) for side in (-torch.inf, torch.inf)])


def draws(operator: Packed) -> Tensor:
    """2,000,000 uniform exponents over the range and a little below it (NumPy's default generator, seed 0), FP32."""
    return torch.from_numpy(np.random.default_rng(0).uniform(-operator.bias - 4, 0, 2_000_000).astype(np.float32))


INPUTS = {"exact": exact_inputs, "near ties": near_ties, "draws": draws}


def operators(ks: Iterable[int] = K, levels: int = 3) -> list[Packed]:
    """Every packed exponential with these fractional bits, in every format of P."""
    return [Packed(k, levels, p) for p in FORMATS for k in ks if p != "e4m3" or k == 3]


def comparison(chosen: Iterable[Packed] | None = None) -> pd.DataFrame:
    """How many inputs give the same weight by the bit form as by the arithmetic form.

    Returns:
        One row an operator and input set: operator, inputs, compared, equal, different, and `unexplained`: those that
        differ although FP32 held their code exactly, which must be none.
    """
    rows = []
    for operator in operators() if chosen is None else chosen:
        for name, make in INPUTS.items():
            x = make(operator)
            got = weights(x, operator)
            unit = 2.0 ** (operator.k + UNIT)
            held = fma(x, torch.tensor(unit), torch.tensor(operator.bias * unit)).double() / unit - operator.bias
            equal, explained = got == operator.at(x.double()), got == operator.at(held)
            rows.append((str(operator), name, len(x), int(equal.sum()), int((~equal).sum()), int((~explained).sum())))
    return pd.DataFrame(rows, columns=["operator", "inputs", "compared", "equal", "different", "unexplained"])


def special_cases(operator: Packed) -> pd.DataFrame:
    """Code and weight at ties, at the ends of the range, beyond them, at ±∞ and NaN: case, x, code, weight."""
    step, b, k = 2.0**-operator.k, operator.bias, operator.k
    cases = [
        ("the anchor", 0.0),
        ("tie, to the even code above", -step / 2),
        ("tie, to the even code below", -3 * step / 2),
        ("least normal weight", 1.0 - b),
        ("last code", step - b),
        ("tie to zero", step / 2 - b),
        ("no weight", float(-b)),
        ("far below", -1e6),
        ("masked key", -torch.inf),
        ("one code above the anchor", step),
        ("a lag of 8 octaves", 8.0),
        ("last code whose neighbours FP16 holds", 2047 / 2**k - b),
        ("beyond it FP16 rounds to even codes", 2049 / 2**k - b),
        ("FP16 overflows", 65520 * 2.0**24 / 2**k - b),
        ("plus infinity", torch.inf),
        ("NaN", torch.nan),
    ]
    x = torch.tensor([value for _, value in cases], dtype=torch.float32)
    pairs = torch.stack([x, torch.full_like(x, -torch.inf)], -1)  # a neighbour that weighs nothing
    found = codes(pairs, operator)[..., 0].tolist()
    w = weights(pairs, operator)[..., 0].tolist()
    rows = [(case, value, n, weight) for (case, value), n, weight in zip(cases, found, w, strict=True)]
    return pd.DataFrame(rows, columns=["case", "x", "code", "weight"])


def row_sums(k: int = 4, p: str = "bf16", *, rows: int = 2000, keys: int = 128, seed: int = 0) -> pd.DataFrame:
    """Relative error of the packed row sum of a tile: measured on random rows, and its proved bound.

    Args:
        k, p: as `Packed`.
        rows: random rows, normal scores of 0.25 to 8 nats' standard deviation; a third of them under a mask.
        keys: of a tile.
        seed: of the rows.

    Returns:
        One row for each number of levels: levels, bias (mean), deviation (standard), largest (magnitude), bound.
    """
    generator = torch.Generator().manual_seed(seed)
    spread = torch.logspace(-2, 3, rows, base=2)[:, None]
    scores = torch.randn(rows, keys, generator=generator) * spread
    masked = torch.arange(keys) > torch.randint(1, keys, (rows, 1), generator=generator)
    scores = scores.masked_fill(masked & (torch.arange(rows)[:, None] % 3 == 0), -torch.inf)
    found = []
    for levels in LEVELS:
        operator = Packed(k, levels, p)
        n = codes(scores, operator, 1 / np.log(2), scores.amax(-1, keepdim=True))
        exact = (stored(n, operator).double() * 2.0**-operator.offset).sum(-1)
        error = row_sum(n, operator).double() / exact - 1
        found.append((levels, error.mean().item(), error.std().item(), error.abs().max().item()))
    frame = pd.DataFrame(found, columns=["levels", "bias", "deviation", "largest"])
    return frame.assign(bound=[Packed(k, levels, p).row_sum_bound for levels in LEVELS])
