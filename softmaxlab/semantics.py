"""What a kernel does around its exponential, as a value with a text form: tiles, anchor, roundings.

Paper B.2. `softmaxlab.online` computes attention this way.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from softmaxlab.errors import LabError

WARP = 32  # rows that a warp holds

#: What P can be rounded to, and the largest number of each, beyond which it saturates or overflows.
ROUNDING = {"none": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "e4m3": torch.float8_e4m3fn}
E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max

#: Conversion of Q, K and V: none, as they are, or divided by a scale that puts the largest at E4M3_MAX. The scale is
#: that of a sequence's whole tensor, or of each head of it.
OPERANDS = {"none": None, "e4m3": None, "e4m3_tensor": (1, 2, 3), "e4m3_head": (2, 3)}
DECISIONS = ("row", "warp")


@dataclass(frozen=True)
class Semantics:
    """What a kernel does around its exponential. The text form names a backend: `online(tile=128,tau=8,p=bf16)`.

    Attributes:
        tile: keys of a tile, ≥ 1. With a tile of the whole context there is one anchor, the row maximum.
        tau: octaves by which the running maximum may exceed the anchor, ≥ 0; 0 lets the anchor follow every tile.
        decision: per `row`, or per `warp` of 32 consecutive queries.
        p: what the weights are rounded to before the product with the values: `none`, `bf16`, `fp16`, `e4m3`.
        max_offset: the weights are scaled by 2^max_offset, ≥ 0, to use the range of `p` (8 on the FP8 path).
        qkv: conversion of Q, K and V: `none`, `e4m3` (a plain cast), `e4m3_tensor` or `e4m3_head` (scaled to the
            largest magnitude, of the whole sequence, its later tokens included).

    Raises:
        LabError: a value outside its range, or a range of P that max_offset + τ would exceed.
    """

    tile: int = 128
    tau: float = 8.0
    decision: str = "row"
    p: str = "none"
    max_offset: int = 0
    qkv: str = "none"

    def __post_init__(self) -> None:
        if self.tile < 1:
            raise LabError(f"online: tile is {self.tile}, but a tile needs at least 1 key")
        if not (self.tau >= 0 and math.isfinite(self.tau)):
            raise LabError(f"online: tau is {self.tau}, but must be a finite number of octaves, at least 0")
        if self.max_offset < 0:
            raise LabError(f"online: max_offset is {self.max_offset}, but must be at least 0")
        for field, known in (("decision", DECISIONS), ("p", ROUNDING), ("qkv", OPERANDS)):
            if getattr(self, field) not in known:
                raise LabError(f"online: {field} is {getattr(self, field)!r}, but must be one of {', '.join(known)}")
        # The kernel asserts the same: exact weights reach 2^(max_offset + τ).
        room = math.log2(self.p_max)
        if self.max_offset + self.tau >= room:
            raise LabError(
                f"online: max_offset {self.max_offset} + tau {self.tau:g} must stay below {room:.4g}, "
                f"the logarithm of the largest weight that p={self.p} can hold"
            )

    @property
    def p_max(self) -> float:
        """The largest weight that can be stored."""
        return torch.finfo(ROUNDING[self.p]).max

    @classmethod
    def parse(cls, text: str) -> Semantics:
        """Read a text form. Raises LabError on anything that is not one."""
        match = re.fullmatch(r"\s*online\s*(?:\((.*)\))?\s*", text)
        if not match:
            raise LabError(f"backend {text!r} is not of the form online(tile=128,tau=8,…)")
        kinds = {f.name: type(f.default) for f in fields(cls)}
        values = {}
        for part in filter(None, (p.strip() for p in (match[1] or "").split(","))):
            key, _, value = (p.strip() for p in part.partition("="))
            if key not in kinds or key in values:
                why = "gives it twice" if key in values else f"has the fields {', '.join(kinds)}"
                raise LabError(f"backend {text!r}: {part!r} cannot be read, because online {why}")
            try:
                values[key] = kinds[key](value)
            except ValueError:
                noun = "a whole number" if kinds[key] is int else "a number"
                raise LabError(f"online: {key} is {value!r}, but must be {noun}") from None
        return cls(**values)

    def __str__(self) -> str:
        """Canonical text: tile and tau always, the rest where it is not the default."""
        shown = [("tile", self.tile), ("tau", int(self.tau) if float(self.tau).is_integer() else self.tau)]
        shown += [(f.name, getattr(self, f.name)) for f in fields(self)[2:] if getattr(self, f.name) != f.default]
        return f"online({','.join(f'{k}={v}' for k, v in shown)})"


def converted(x: Tensor, qkv: str) -> tuple[Tensor, Tensor]:
    """An operand after its FP8 conversion and back, FP32, and how many elements it cut off.

    Args:
        x: (batch, heads, length, dim).
        qkv: of `OPERANDS`.
    """
    x = x.float()
    if qkv == "none":
        return x, x.new_zeros((), dtype=torch.int64)
    scale = torch.ones_like(x[:, :1, :1, :1])
    if OPERANDS[qkv]:
        largest = x.abs().amax(OPERANDS[qkv], keepdim=True)
        scale = torch.where(largest > 0, largest / E4M3_MAX, 1.0)
    y = x / scale
    return y.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float() * scale, (y.abs() > E4M3_MAX).sum()
