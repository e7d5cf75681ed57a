"""What a patched kernel should give: a float64 reference that walks the kernel's tiles, with bounds for each weight.

A lattice has jumps. A score that lies at one is rounded to either side by differences of 10^−6 that FP32 sums have,
and one weight in 10^5 then differs by half an octave, rightly. So each weight has an interval: the operator at the
score, a little below and a little above it. Away from the jumps the interval is a point.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from softmaxlab import bits, online, packed_bits
from softmaxlab.fa4.variants import Variant
from softmaxlab.operators import FA4Poly, RowmaxAnchored, Softmax
from softmaxlab.semantics import Semantics

LN2 = math.log(2)
#: Octaves that a kernel's exponent may lie beside ours: from the tensor cores' sums, and for each octave of it.
SLACK, RELATIVE_SLACK = 1e-4, 1e-5
P = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "e4m3"}
TANH = 2.0**-11  # largest relative error of tanh.approx.f32 (PTX ISA), which FA4's soft-cap uses


@dataclass(frozen=True)
class Reference:
    """Rows as the kernel should weigh them; shapes (batch, heads, queries, keys) or without the keys.

    Attributes:
        weights, low, high: relative to the final anchor, FP64, unnormalised; 0 at masked keys.
        valid: bool, where a key may be seen.
        out: (batch, queries, heads, dim), FP64, 0 where a row sees no key.
        open: of the same shape, what the intervals of the weights leave open in the output, added in quadrature.
        lse, lse_low, lse_high: log-sum-exp in nats, −∞ where a row sees no key.
    """

    weights: Tensor
    low: Tensor
    high: Tensor
    valid: Tensor
    out: Tensor
    open: Tensor
    lse: Tensor
    lse_low: Tensor
    lse_high: Tensor


def scores(q: Tensor, k: Tensor, *, causal: bool, softcap: float = 0.0) -> tuple[Tensor, Tensor]:
    """Scores in nats, FP64, −∞ at masked keys, and the mask, aligned at the last query and key as the kernel's.

    Args:
        q, k: (batch, length, heads, dim); heads of k divide those of q.
    """
    k = k.double().repeat_interleave(q.shape[2] // k.shape[2], 2)
    s = torch.einsum("bqhd,bkhd->bhqk", q.double(), k) / math.sqrt(q.shape[-1])
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    n_queries, n_keys = s.shape[-2:]
    valid = torch.ones(n_queries, n_keys, dtype=torch.bool, device=s.device)
    if causal:
        valid = valid.tril(n_keys - n_queries)
    return s.masked_fill(~valid, -torch.inf), valid


def reference(
    q: Tensor, k: Tensor, v: Tensor, variant: Variant, semantics: Semantics, *, causal: bool, softcap: float = 0.0
) -> Reference:
    """The variant's weights, output and log-sum-exp by the kernel's semantics (definition: B.2).

    Args:
        q, k, v: (batch, length, heads, dim), as the kernel gets them.
        variant: not `identity`.
        semantics: tile and τ.
    """
    s, valid = scores(q, k, causal=causal, softcap=softcap)
    return weighed(s, valid, v, variant, semantics, dtype=q.dtype, softcap=softcap)


def weighed(
    s: Tensor,
    valid: Tensor,
    v: Tensor,
    variant: Variant,
    semantics: Semantics,
    *,
    dtype: torch.dtype,
    softcap: float = 0.0,
    slack: float = 0.0,
) -> Reference:
    """As `reference`, from scores (batch, heads, queries, keys) and any mask.

    Args:
        s, valid: as `scores` gives them; the mask broadcasts.
        v, variant, semantics, softcap: as `reference`; the soft-cap is in the scores already.
        dtype: of Q, K and V.
        slack: octaves that an exponent may lie beside, more than for scores of usual size.
    """
    n_keys = s.shape[-1]
    width = min(semantics.tile, -(-n_keys // 8) * 8)
    pad = -n_keys % width
    s32 = torch.nn.functional.pad(s, (0, pad), value=-torch.inf).float()
    mask = torch.nn.functional.pad(valid, (0, pad))
    tiles = Semantics(tile=width, tau=semantics.tau)
    # The fused form rounds the row maximum into its constant: its lattice lies up to 2^−8 octaves beside (bits.py).
    # A soft-cap is off in the key's score and in the anchor's.
    beside = slack + SLACK + (2.0**-8 if variant.kind == "fused7" else 0.0) + 2 * softcap * TANH / LN2
    operators = _operators(*standing(variant, dtype, semantics.tau))
    found = [
        _weights(s32, mask, operator if not shift else _Shifted(operator, shift), tiles)[..., :n_keys]
        for operator in operators
        for shift in (0.0, -beside, beside)
    ]
    walked = online.walk(s32, mask, Softmax(), tiles)
    final = walked.anchors[..., 0].double()  # of the tile that is visited last
    stacked = torch.stack(found)
    sums = [w.sum(-1) for w in (stacked[0], stacked.amin(0), stacked.amax(0))]
    operator = operators[0]
    if operator.row_sum_bound:  # sums that are rounded on their way, as the kernel rounds them
        summed = _total(s32, mask, operator, tiles) / sums[0].masked_fill(sums[0] == 0, 1.0)
        # A row that has a weight at a jump may be summed from other weights, which round otherwise.
        least, most = (torch.where(sums[2] > sums[1], 1 + e * operator.row_sum_bound, summed) for e in (-1, 1))
        sums = [sums[0] * summed, sums[1] * least, sums[2] * most]
    lse, lse_low, lse_high = (torch.where(final == -torch.inf, -torch.inf, final + total.log()) for total in sums)
    values = v.double().repeat_interleave(s.shape[1] // v.shape[2], 2)
    total = sums[0].masked_fill(sums[0] == 0, 1.0).transpose(1, 2)[..., None]
    out = torch.einsum("bhqk,bkhd->bqhd", stacked[0], values) / total
    width = stacked.amax(0) - stacked.amin(0)
    open_ = torch.einsum("bhqk,bkhd->bqhd", width.square(), values.square()).sqrt() / total
    return Reference(
        weights=stacked[0],
        low=stacked.amin(0),
        high=stacked.amax(0),
        valid=valid,
        out=out,
        open=open_,
        lse=lse,
        lse_low=lse_low - softcap * TANH,
        lse_high=lse_high + softcap * TANH,
    )


def standing(variant: Variant, dtype: torch.dtype, tau: float = 0.0) -> tuple[Variant, str]:
    """What computes, the stock kernel where a packed exponential has no codes and falls back; and what P is stored as.

    Args:
        variant: any.
        dtype: of Q, K and V.
        tau: octaves by which the kernel's anchor may lag.
    """
    p = P.get(dtype, "bf16")
    falls = variant.packed and ((p == "e4m3" and variant.k != 3) or tau > variant.operator(p).headroom)
    return (Variant() if falls else variant), p


def _operators(variant: Variant, p: str) -> list[RowmaxAnchored]:
    """What may compute an element: FA4 mixes hardware and polynomial, on Blackwell in the stock kernel too."""
    if variant.packed:
        return [variant.operator(p)]
    if variant.kind == "poly":
        return [variant.operator()] + ([Softmax()] if variant.share < 1 else [])
    return [Softmax(), FA4Poly(3)] if variant.kind in ("stock", "control", "skip") else [variant.operator()]


class _Shifted(Softmax):
    """An operator some octaves beside the exponent, and a little more far from the anchor."""

    def __init__(self, operator: RowmaxAnchored, octaves: float) -> None:
        object.__setattr__(self, "_parts", (operator, octaves))

    def at(self, x: Tensor) -> Tensor:
        operator, octaves = self._parts
        further = math.copysign(RELATIVE_SLACK, octaves) * x.clamp(min=-1e4).abs()
        return operator.at(torch.where(x.isinf(), x, x + octaves + further))


def _weights(s: Tensor, valid: Tensor, operator: RowmaxAnchored, tiles: Semantics) -> Tensor:
    walked = online.walk(s, valid, operator, tiles)
    return (walked.weights.double() * walked.scale.double()[..., None]).flatten(-2)


def _total(s: Tensor, valid: Tensor, operator: RowmaxAnchored, tiles: Semantics) -> Tensor:
    walked = online.walk(s, valid, operator, tiles)
    return (operator.row_sum(walked.weights).double() * walked.scale.double()).sum(-1)


def simulated(
    q: Tensor, k: Tensor, v: Tensor, *, variant: Variant | str, causal: bool = False, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """A stand-in for the patched kernel on any machine: one anchor per tile, FP32, P rounded, masked keys weighed.

    It does what the kernel does to a masked key, whose exponent is −∞: it clamps it. For rehearsing the gates.

    Returns:
        As the kernel: output (batch, queries, heads, dim), in the dtype of q, BF16 for FP8; and log-sum-exp (batch,
        heads, queries).
    """
    variant = Variant.parse(variant)
    s, _ = scores(q, k, causal=causal, softcap=softcap)
    s = torch.nn.functional.pad(s, (0, -s.shape[-1] % 128), value=-torch.inf).float()
    values = torch.nn.functional.pad(v.float(), (0, 0, 0, 0, 0, s.shape[-1] - v.shape[1]))
    values = values.repeat_interleave(q.shape[2] // v.shape[2], 2).permute(0, 2, 1, 3)
    top = torch.full_like(s[..., 0], -torch.inf)
    total, out = torch.zeros_like(top), torch.zeros(*s.shape[:-1], v.shape[-1], device=s.device)
    for start in range(s.shape[-1] - 128, -1, -128):
        tile = s[..., start : start + 128]
        new = torch.maximum(top, tile.amax(-1))
        anchor = new.masked_fill(new == -torch.inf, 0.0)
        w, summed = weigh(tile, anchor[..., None], variant, q.dtype)
        scale = torch.exp(top - anchor)
        total = total * scale + summed
        out = out * scale[..., None] + w @ values[..., start : start + 128, :]
        top = new
    empty = total == 0
    lse = torch.where(empty, -torch.inf, top + total.log())
    out = (out / total.masked_fill(empty, 1.0)[..., None]).permute(0, 2, 1, 3)
    return out.to(torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype), lse


def weigh(tile: Tensor, anchor: Tensor, variant: Variant, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Weights of a tile as P holds them, and their row sums."""
    variant, p = standing(variant, dtype)
    if variant.packed:
        operator = variant.operator(p)
        n = packed_bits.codes(tile, operator, 1 / LN2, anchor)
        return packed_bits.stored(n, operator) * 2.0**-operator.offset, packed_bits.row_sum(n, operator)
    w = _by_bits((tile - anchor) / LN2, variant)
    return _rounded(w, dtype), w.sum(-1)


def _rounded(w: Tensor, dtype: torch.dtype) -> Tensor:
    offset = 2.0**8 if dtype == torch.float8_e4m3fn else 1.0  # FA4's max_offset
    return (w * offset).to(dtype).float() / offset


def _by_bits(x: Tensor, variant: Variant) -> Tensor:
    if variant.bits:
        form, k, clamp = variant.bits
        return bits.by_form(form, x, k, clamp)
    return variant.operator().at(x.double())
