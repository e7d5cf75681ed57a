"""Inputs on which the packed kernel is read on Hopper: every case that is offered; and a simulated kernel for them.

The simulated one has FlashAttention-4's arguments and Hopper's tiles, scores in units as the kernel has them, and codes
by `softmaxlab.packed_bits`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from softmaxlab import packed_bits
from softmaxlab.fa4 import readings
from softmaxlab.fa4.variants import Variant

LN2 = math.log(2)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LARGEST = 2.0**22  # octaves of a row maximum; beyond it rounding could take a code out of its range (packed_element.py)


@dataclass(frozen=True)
class Case:
    """One input on Hopper.

    Attributes:
        name: of the case.
        dtype: bf16 or fp16.
        dims: dimension of a head of Q and K, and of V.
        heads, gqa: query heads, and of these to a key-value head.
        lengths: queries and keys of each sequence; several are one call with variable lengths.
        causal, window, softcap, sink: mask, keys before and after the query's own, soft-cap, sinks of the heads.
        size: factor of the scores.
    """

    name: str
    dtype: str = "bf16"
    dims: tuple[int, int] = (128, 128)
    heads: int = 4
    gqa: int = 1
    lengths: tuple[tuple[int, int], ...] = ((512, 512),)
    causal: bool = True
    window: tuple[int, int] | None = None
    softcap: float = 0.0
    sink: bool = False
    size: float = 1.0

    @property
    def tile(self) -> int:
        """Keys of a tile, from FlashAttention-4's table for Hopper (`select_sm90_tile`)."""
        d, local = self.dims[0], self.window is not None
        if d in (64, 128):
            return 128
        if d == 96:
            return 128 if self.causal or local else 144
        if d == 192:
            return 96 if local else 128 if self.dims[1] <= 128 else 112
        return 64 if local else 80


def _cases() -> tuple[Case, ...]:
    found = [
        Case(f"{d}, {t}, {'causal' if c else 'no mask'}", t, d, causal=c)
        for d in ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
        for t in DTYPES
        for c in (True, False)
    ]
    found += [Case(f"scores times {size:g}, {t}", t, size=size) for size in (16.0, 300.0) for t in DTYPES]
    for t in DTYPES:
        found += [
            Case(f"grouped by 4, {t}", t, heads=8, gqa=4),
            Case(f"grouped by 8, dim 64, {t}", t, (64, 64), heads=8, gqa=8, causal=False),
            Case(f"more queries than keys, {t}", t, lengths=((320, 128),)),
            Case(f"more keys than queries, {t}", t, lengths=((77, 500),)),
            Case(f"variable lengths, {t}", t, lengths=((77, 77), (300, 300), (1, 1), (128, 128), (131, 131))),
            Case(f"variable lengths, dim 64, no mask, {t}", t, (64, 64), lengths=((33, 400), (200, 90)), causal=False),
            Case(f"window 100, {t}", t, window=(100, 0)),
            Case(f"window 60 and 40, {t}", t, causal=False, window=(60, 40)),
            Case(f"soft-cap 15, {t}", t, softcap=15.0),
            Case(f"sinks, {t}", t, sink=True),
            Case(f"sinks and masked rows, {t}", t, sink=True, lengths=((320, 128),)),
            Case(f"sinks, grouped, dim 64, {t}", t, (64, 64), heads=8, gqa=4, sink=True),
        ]
    return tuple(found)


CASES = _cases()


def inputs_of(case: Case, device: str) -> tuple[list[tuple[Tensor, Tensor, Tensor]], dict[str, Any]]:
    """Q, K and V of each sequence, and FlashAttention-4's arguments."""
    generator = torch.Generator().manual_seed(0)

    def tensor(length: int, heads: int, dim: int) -> Tensor:
        return torch.randn(1, length, heads, dim, generator=generator)

    sequences = []
    for queries, keys in case.lengths:
        q = tensor(queries, case.heads, case.dims[0])
        spread = torch.logspace(-1, 3, queries, base=2)[torch.randperm(queries, generator=generator)]
        k, v = (tensor(keys, case.heads // case.gqa, d) for d in case.dims)
        # A large factor of standard normal scores, not of scores that are spread already.
        q = q * (spread[:, None, None] if case.size == 1 else case.size)
        sequences.append(tuple(t.to(device, DTYPES[case.dtype]) for t in (q, k, v)))
    arguments: dict[str, Any] = {"causal": case.causal, "softcap": case.softcap}
    if case.window:
        arguments |= {"causal": False, "window_size": case.window}
    if case.sink:
        arguments["learnable_sink"] = torch.linspace(-3, 5, case.heads).to(device, torch.bfloat16)
    return sequences, arguments


def masked_scores(
    q: Tensor, k: Tensor, causal: bool, window: tuple[int, int] | None, softcap: float, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """As `readings.scores`, with a window and a scale."""
    s, valid = readings.scores(q, k, causal=False)
    if scale is not None:
        s = s * (scale * math.sqrt(q.shape[-1]))
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    own = torch.arange(s.shape[-2], device=s.device)[:, None] + s.shape[-1] - s.shape[-2]
    after = torch.arange(s.shape[-1], device=s.device) - own
    before, ahead = window or (None, 0 if causal else None)
    valid = torch.ones_like(after, dtype=torch.bool)
    valid &= after <= ahead if ahead is not None else valid
    valid &= after >= -before if before is not None else valid
    return s.masked_fill(~valid, -torch.inf), valid


def simulated(q: Tensor, k: Tensor, v: Tensor, *, variant: Variant, **arguments: Any) -> tuple[Tensor, Tensor]:
    """A stand-in on any machine with the kernel's arguments: tiles of Hopper, FP32, codes by `packed_bits`."""
    ends, _ = arguments.pop("cu_seqlens", None), arguments.pop("longest", None)
    if ends is not None:
        cuts = [list(zip(e[:-1].tolist(), e[1:].tolist(), strict=True)) for e in ends]
        parts = [
            simulated(q[None, a:b], k[None, c:d], v[None, c:d], variant=variant, **arguments)
            for (a, b), (c, d) in zip(*cuts, strict=True)
        ]
        return torch.cat([o[0] for o, _ in parts]), torch.cat([x[0] for _, x in parts], -1)
    causal, window, softcap = (
        arguments.get(n) or d for n, d in (("causal", False), ("window_size", None), ("softcap", 0))
    )
    scale = torch.tensor(arguments.get("softmax_scale") or 1 / math.sqrt(q.shape[-1]), dtype=torch.float32)
    # In units of score, as the kernel has them: the FMA of the exponent takes the scale; a soft-cap comes after it.
    s, _ = masked_scores(q, k, causal, window, softcap, None if softcap else 1.0)
    octaves = torch.tensor(1 / LN2, dtype=torch.float32) * (1 if softcap else scale)
    tile = Case("", dims=(q.shape[-1], v.shape[-1]), causal=causal, window=window).tile
    s = torch.nn.functional.pad(s, (0, -s.shape[-1] % tile), value=-torch.inf).float()
    values = torch.nn.functional.pad(v.float(), (0, 0, 0, 0, 0, s.shape[-1] - v.shape[1]))
    values = values.repeat_interleave(q.shape[2] // v.shape[2], 2).permute(0, 2, 1, 3)
    top = torch.full_like(s[..., 0], -torch.inf)
    total, out = torch.zeros_like(top), torch.zeros(*s.shape[:-1], v.shape[-1])
    for start in range(s.shape[-1] - tile, -1, -tile):
        part = s[..., start : start + tile]
        new = torch.fmax(top, part.masked_fill(part.isnan(), -torch.inf).amax(-1))
        anchor = new.masked_fill(new == -torch.inf, 0.0)
        w, summed = _weigh(part, anchor[..., None], octaves, variant, q.dtype)
        factor = torch.exp2((top - anchor) * octaves)
        total = total * factor + summed
        out = out * factor[..., None] + w @ values[..., start : start + tile, :]
        top = new
    sane = ((top * octaves).abs() <= LARGEST) | (top == -torch.inf) | torch.tensor(not variant.packed)
    total = total * torch.where(sane, 1.0, torch.nan)
    top = torch.where(top == -torch.inf, top, top * octaves * LN2)
    sink = arguments.get("learnable_sink")
    if sink is not None:
        raised = torch.where(top == -torch.inf, sink.float()[None, :, None], top)
        total, top = total + torch.exp(sink.float()[None, :, None] - raised), raised
    empty = total == 0
    lse = torch.where(empty, -torch.inf, top + total.log())
    return (out / total.masked_fill(empty, 1.0)[..., None]).permute(0, 2, 1, 3).to(q.dtype), lse


def _weigh(
    part: Tensor, anchor: Tensor, octaves: Tensor, variant: Variant, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Weights of a tile as P holds them, and their row sums."""
    if not variant.packed:
        w = torch.exp2((part - anchor) * octaves)
        return w.to(dtype).float(), w.sum(-1)
    operator = variant.operator(readings.P[dtype])
    n = packed_bits.codes(part, operator, octaves.item(), anchor)
    return packed_bits.stored(n, operator) * 2.0**-operator.offset, packed_bits.row_sum(n, operator)
