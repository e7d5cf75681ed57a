"""The online-softmax kernel's semantics as one Triton kernel: what `softmaxlab.online` defines, without its scores.

A program holds a block of queries of one head and visits the tiles of keys from the last to the first. A tile of the
kernel is a tile of the semantics, because no key of it is weighed before the anchor has seen all of them. The anchor
moves where the running maximum exceeds it by more than τ octaves; the comparison is that of `online.running_anchors`,
because the bound is the largest FP32 difference that passes it there. Weights are those of `triton_maps` with the
anchor in the place of the row maximum. A score of −∞ counts as masked.

Against the PyTorch program, sums are added in another order, and rescales are multiplied up one after the other.
P in BF16 or E4M3 is exact in one BF16 part and P in FP16 in two; an FP32 P is three, unless the weights are BF16
numbers. Nothing is counted here.
"""

from __future__ import annotations

import dataclasses
import math
from contextlib import nullcontext
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from softmaxlab.backends import triton as forward
from softmaxlab.backends.triton_plans import plan
from softmaxlab.errors import LabError
from softmaxlab.operators import Operator, Packed, RowmaxAnchored
from softmaxlab.operators.packed import FORMATS, LANES
from softmaxlab.semantics import Semantics, converted

#: Keys of a tile that registers can hold.
TILES = (16, 32, 64, 128)
#: Beyond, a weight may need an exponent that the bits of a code do not hold: a step is at most 64 octaves.
MAX_TAU = 64.0
#: Launches by parts of an operand and the padded head dimension. A whole tile's scores wait in registers for the
#: anchor; products take `n` keys at a time, so that what is split and loaded for them fits in beside. On sm_90 it
#: mostly does; FP32 beyond dimension 64, dimension 256 and some masked cases spill a few registers.
SHAPES = {
    (1, 64): forward.Tile(64, 64, 4, 2),
    (1, 128): forward.Tile(128, 64, 8, 2),
    (1, 256): forward.Tile(64, 32, 4, 1),
    (2, 64): forward.Tile(128, 32, 8, 1),
    (2, 128): forward.Tile(128, 32, 8, 1),
    (2, 256): forward.Tile(64, 32, 4, 1),
    (3, 64): forward.Tile(128, 32, 8, 1),
    (3, 128): forward.Tile(128, 32, 8, 1),
    (3, 256): forward.Tile(64, 32, 4, 1),
}
P_PARTS = {"none": 3, "bf16": 1, "fp16": 2, "e4m3": 1}


def supports(
    query: Tensor, key: Tensor, value: Tensor, operator: Operator, semantics: Semantics, *, mask: Tensor | None = None
) -> str | None:
    """None where `attend` can compute these, else one clause that says why not. Arguments as there."""
    if not isinstance(operator, RowmaxAnchored):
        return f"{operator} is not anchored at the row maximum"
    if reason := forward.supports(query, key, value, operator, mask=mask):
        return reason
    if semantics.tile not in TILES:
        return f"its tiles have {', '.join(map(str, TILES))} keys, not {semantics.tile}"
    if semantics.tau > MAX_TAU:
        return f"its anchors lag by at most {MAX_TAU:g} octaves, and tau is {semantics.tau:g}"
    return None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    operator: RowmaxAnchored,
    semantics: Semantics,
    *,
    scaling: float,
    softcap: float | None = None,
    mask: Tensor | None = None,
    layer: int = 0,
    tile: forward.Tile | None = None,
) -> Tensor:
    """Attention with `operator` inside the kernel that `semantics` describes; the rest as `reference.attend`.

    Args:
        tile: shape of the launch, whose `n` divides the semantics' tile and whose `m` is a multiple of 32; None
            takes that of `SHAPES`.

    Raises:
        LabError: `supports` gives a reason.
    """
    if reason := supports(query, key, value, operator, semantics, mask=mask):
        raise LabError(f"the fused simulator cannot compute this: {reason}")
    dtype = query.dtype
    if semantics.qkv != "none":
        query, key, value = (converted(x, semantics.qkv)[0] for x in (query, key, value))
        if semantics.qkv == "e4m3":  # unscaled, its numbers are BF16 numbers
            query, key, value = (x.bfloat16() for x in (query, key, value))
    found = plan(operator)
    parts, exact = forward.PARTS[query.dtype], found.exact_p and semantics.p == "none"
    p_parts = 1 if exact else P_PARTS[semantics.p]
    dim = max(query.shape[-1], value.shape[-1])
    tile = tile or shape(semantics.tile, parts, p_parts, dim)
    if isinstance(operator, Packed):  # what its row sum pairs is there at once
        tile = tile._replace(n=min(semantics.tile, max(tile.n, LANES << operator.sum_levels)))
    # Triton launches on the current device, which need not be that of the tensors.
    with torch.cuda.device(query.device) if query.is_cuda else nullcontext():
        # The values stay as they are: of a P that is exact in its parts there are none in FP16.
        call = forward.Call(
            query, key, value, dataclasses.replace(found, exact_p=True), scaling, softcap, mask, tile, "split"
        )
        return _launch(call, operator, semantics, p_parts, dtype)


def shape(keys: int, parts: int, p_parts: int, dim: int) -> forward.Tile:
    """The launch for tiles of `keys`, whose `n` keys at once divide them."""
    block = max(64, 1 << (dim - 1).bit_length())
    tile = SHAPES[parts, block]
    if p_parts == 3 and (parts, block) == (1, 128):  # three parts of P, where one leaves room for twice the keys
        tile = forward.Tile(64, 32, 4, 2)
    return tile._replace(n=min(tile.n, keys))


@lru_cache(maxsize=64)
def bound(tau: float) -> float:
    """The largest FP32 difference d of an anchor that stays: d/ln 2, in FP64, is not above τ."""
    d = np.float32(tau * math.log(2))
    while float(d) / math.log(2) > tau:
        d = np.nextafter(d, np.float32(-np.inf))
    while float(above := np.nextafter(d, np.float32(np.inf))) / math.log(2) <= tau:
        d = above
    return float(d)


def _launch(
    call: forward.Call, operator: RowmaxAnchored, semantics: Semantics, p_parts: int, dtype: torch.dtype
) -> Tensor:
    from triton import language as tl

    from softmaxlab.backends.triton_walk import simulate

    out = call.query.new_empty(call.batch, call.n_queries, call.heads, call.value_dim, dtype=dtype)
    levels, kind, sum_up = 0, tl.float32, 1.0
    if isinstance(operator, Packed):
        levels, kind = operator.sum_levels, getattr(tl, str(FORMATS[operator.p][2]).removeprefix("torch."))
        sum_up = 2.0**operator.offset if operator.p == "fp16" else 1.0
    columns = min(call.block_dims[1], call.tile.columns)
    simulate[(call.batch * call.heads, -(-call.n_queries // call.tile.m), -(-call.value_dim // columns))](
        call.query, call.key, call.value, out, call.mask, call.extents, call.k_part, call.v_part,
        *call.query.stride()[:3], *call.key.stride()[:3], *call.value.stride()[:3], out.stride(0), out.stride(1),
        *call.mask_strides, call.heads, call.heads // call.kv_heads, call.n_queries, call.n_keys, call.scaling,
        call.softcap or 0.0, bound(semantics.tau), 2.0**semantics.max_offset, sum_up,
        *call.plan.numbers,
        MAP=call.plan.map, P=semantics.p, P_PARTS=p_parts, M=call.tile.m, N=call.tile.n,
        SUBS=semantics.tile // call.tile.n, DV=call.value_dim, BLOCK_DV=columns,
        VOTE=semantics.decision == "warp" and semantics.tau > 0, LEVELS=levels, KIND=kind,
        OFFSET=semantics.max_offset != 0, **call.plan.anchored_constants, **call.common(),
        num_warps=call.tile.warps, num_stages=call.tile.stages,
    )  # fmt: skip
    return out
