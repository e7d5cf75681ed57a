"""The online-softmax kernel's semantics as one Triton kernel: what `softmaxlab.online` defines, without its scores.

A program holds a block of queries of one head and visits the tiles of keys from the last to the first. A tile of the
kernel is a tile of the semantics, because no key of it is weighed before the anchor has seen all of them. The anchor
moves where the running maximum exceeds it by more than τ octaves; the comparison is that of `online.running_anchors`,
because the bound is the largest FP32 difference that passes it there. Weights are those of `triton_maps` with the
anchor in the place of the row maximum.

Against the PyTorch program, sums are added in another order, and rescales are multiplied up one after the other.
P in BF16 or E4M3 is exact in one BF16 part and P in FP16 in two; an FP32 P is three, unless the weights are BF16
numbers. Nothing is counted here.
"""

from __future__ import annotations

import dataclasses
import math
from contextlib import nullcontext

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from softmaxlab.backends import triton as forward
from softmaxlab.backends.triton_maps import LOG2E, MINUS_INFINITY, weights
from softmaxlab.backends.triton_plans import plan
from softmaxlab.backends.triton_tiles import parts_of, product, queries, scores, visible
from softmaxlab.operators import Operator, Packed, RowmaxAnchored
from softmaxlab.operators.packed import FORMATS
from softmaxlab.operators.packed import LANES as _LANES
from softmaxlab.semantics import WARP as _WARP
from softmaxlab.semantics import Semantics, converted

LANES, WARP = tl.constexpr(_LANES), tl.constexpr(_WARP)
#: Keys of a tile that registers can hold.
TILES = (16, 32, 64, 128)
#: Beyond, a weight may need an exponent that the bits of a code do not hold: a step is at most 64 octaves.
MAX_TAU = 64.0
P_PARTS = {"none": 3, "bf16": 1, "fp16": 2, "e4m3": 1}


@triton.jit
def larger(a, b):
    """The larger of two numbers; NaN if one is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def vote(moves, M: tl.constexpr):
    """Whether any row of a warp moves, for each of its rows."""
    some = tl.max(tl.reshape(moves.to(tl.int32), (M // WARP, WARP)), 1)
    return tl.reshape(tl.broadcast_to(some[:, None], (M // WARP, WARP)), (M,)) > 0


@triton.jit
def row_sum(w, up, M: tl.constexpr, N: tl.constexpr, LEVELS: tl.constexpr, KIND: tl.constexpr):
    """Σw, neighbouring groups of lanes added in pairs LEVELS times, each in KIND and in units of 1/up (`Packed`)."""
    if LEVELS == 0:
        return tl.sum(w, 1)
    x = tl.reshape(w * up, (M, N // LANES, LANES))
    for level in tl.static_range(LEVELS):
        if N // LANES >> level > 1:
            pairs = tl.reshape(x, (M, N // LANES >> (level + 1), 2, LANES))
            even, odd = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
            x = (even + odd).to(KIND).to(tl.float32)
    return tl.sum(tl.sum(x, 2), 1) / up


@triton.jit
def stored(w, P: tl.constexpr):
    """Weights as P holds them, in FP32: E4M3 saturates, rounds to nearest even, and is 2^−9 apart below 2^−6."""
    if P == "e4m3":
        w = tl.minimum(w, 448.0)
        # 1.5·2^20 of the binade: adding it leaves three fractional bits.
        binade = (tl.maximum(w, 0.015625).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        shift = binade * 1572864.0
        return (w + shift) - shift
    if P == "fp16":
        return w.to(tl.float16).to(tl.float32)
    return w


@triton.jit
def seen(
    q0, q1, q2, k, k_part, k_stride, mask_base, mask_stride, rows, columns, start, n_rows, n_keys, scale, softcap,
    MODE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PARTS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    FOLD: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores of the keys from `start` on, −∞ where masked; MODE is that of `visible`, 0 where all are seen."""
    s = scores(
        q0, q1, q2, k, k_part, k_stride, start, columns, n_keys, scale, softcap,
        M, N, PARTS, D, BLOCK_D, MODE != 0, FOLD, SOFTCAP, PRECISION,
    )  # fmt: skip
    if MODE != 0:
        valid = visible(mask_base, mask_stride, rows, start + tl.arange(0, N), n_rows, n_keys, MODE)
        s = tl.where(valid, s, MINUS_INFINITY)
    return s


@triton.jit
def weigh(
    acc, total, s, m, v, v_part, v_stride, mask_base, mask_stride, rows, v_columns, start, n_rows, n_keys, up, sum_up,
    c0, c1, c2, c3, c4, c5,
    MODE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PARTS: tl.constexpr, DTYPE: tl.constexpr, P: tl.constexpr,
    P_PARTS: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr, LEVELS: tl.constexpr,
    KIND: tl.constexpr, OFFSET: tl.constexpr, MAP: tl.constexpr, SHIFT: tl.constexpr, BASE: tl.constexpr,
    SCALED: tl.constexpr, DROP: tl.constexpr, DEGREE: tl.constexpr,
):  # fmt: skip
    """acc + P·V and total + Σw of the scores `s` of the keys from `start` on, with the anchors `m`."""
    w = weights(
        s, m, m, m, m, 0.0, c0, c1, c2, c3, c4, c5,
        MAP, "max", SHIFT, BASE, SCALED, DROP, DEGREE, False, "", False,
    )  # fmt: skip
    if MODE != 0:
        valid = visible(mask_base, mask_stride, rows, start + tl.arange(0, N), n_rows, n_keys, MODE)
        w = tl.where(valid, w, 0.0)
    total += row_sum(w, sum_up, M, N, LEVELS, KIND)
    if OFFSET:
        w *= up
    p0, p1, p2 = parts_of(stored(w, P), P_PARTS, DTYPE, P != "fp16")
    acc = product(
        p0, p1, p2, v, v_part, start + tl.arange(0, N), v_stride, n_keys, v_columns, acc,
        P_PARTS, PARTS, DV, BLOCK_DV, MODE != 0, PRECISION, False,
    )  # fmt: skip
    return acc, total


@triton.jit
def walk(
    acc, total, anchor, top, q0, q1, q2, k, k_part, k_stride, v, v_part, v_stride, mask_base, mask_stride, rows, columns,
    v_columns, last, count, n_rows, n_keys, scale, softcap, limit, up, sum_up, c0, c1, c2, c3, c4, c5,
    MODE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, SUBS: tl.constexpr, PARTS: tl.constexpr,
    DTYPE: tl.constexpr, P: tl.constexpr, P_PARTS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, FOLD: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    VOTE: tl.constexpr, LEVELS: tl.constexpr, KIND: tl.constexpr, OFFSET: tl.constexpr, MAP: tl.constexpr,
    SHIFT: tl.constexpr, BASE: tl.constexpr, SCALED: tl.constexpr, DROP: tl.constexpr, DEGREE: tl.constexpr,
):  # fmt: skip
    """Visit `count` tiles of SUBS·N keys, from tile `last` on downwards.

    `anchor` and the running maximum `top` are in nats and −∞ before the first key.
    """
    for i in tl.range(0, count):
        start = (last - i) * SUBS * N
        held = ()
        for j in tl.static_range(SUBS):
            s = seen(
                q0, q1, q2, k, k_part, k_stride, mask_base, mask_stride, rows, columns, start + j * N, n_rows, n_keys,
                scale, softcap, MODE, M, N, PARTS, D, BLOCK_D, FOLD, SOFTCAP, PRECISION,
            )  # fmt: skip
            top = larger(top, tl.reduce(s, 1, larger))
            held = held + (s,)
        moves = top - anchor > limit  # NaN, of −∞ − (−∞), moves nothing
        if VOTE:
            moves = vote(moves & (rows < n_rows), M)
        new = tl.where(moves, top, anchor)
        m = tl.where(new == MINUS_INFINITY, 0.0, new)
        rescale = tl.exp2((anchor - m) * LOG2E)  # 1 where the anchor stays
        anchor = new
        total *= rescale
        acc *= rescale[:, None]
        for j in tl.static_range(SUBS):
            acc, total = weigh(
                acc, total, held[j], m, v, v_part, v_stride, mask_base, mask_stride, rows, v_columns, start + j * N,
                n_rows, n_keys, up, sum_up, c0, c1, c2, c3, c4, c5, MODE, M, N, PARTS, DTYPE, P, P_PARTS, DV, BLOCK_DV,
                PRECISION, LEVELS, KIND, OFFSET, MAP, SHIFT, BASE, SCALED, DROP, DEGREE,
            )  # fmt: skip
    return acc, total, anchor, top


@triton.jit(do_not_specialize=["n_heads", "group", "n_queries", "n_keys"])
def simulate(
    q, k, v, out, mask, extents, k_part, v_part,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, o_batch, o_row, mask_batch, mask_row,
    n_heads, group, n_queries, n_keys, scale, softcap, limit, up, sum_up, c0, c1, c2, c3, c4, c5,
    MASKED: tl.constexpr, M: tl.constexpr, N: tl.constexpr, SUBS: tl.constexpr, PARTS: tl.constexpr, DTYPE: tl.constexpr,
    P: tl.constexpr, P_PARTS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    FOLD: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, VOTE: tl.constexpr, LEVELS: tl.constexpr,
    KIND: tl.constexpr, OFFSET: tl.constexpr, MAP: tl.constexpr, SHIFT: tl.constexpr, BASE: tl.constexpr,
    SCALED: tl.constexpr, DROP: tl.constexpr, DEGREE: tl.constexpr,
):  # fmt: skip
    """A block of M queries of one head, some columns. Grid: (batch · heads, blocks of queries, blocks of columns)."""
    z = tl.program_id(0).to(tl.int64)
    block = tl.num_programs(1) - 1 - tl.program_id(1)  # under a causal mask the longest rows begin first
    batch, head = z // n_heads, z % n_heads
    q += batch * q_batch + head * q_head
    k += batch * k_batch + (head // group) * k_head
    v += batch * v_batch + (head // group) * v_head
    out += batch * o_batch + head * DV
    mask += batch * mask_batch
    rows = block * M + tl.arange(0, M)
    columns = tl.arange(0, BLOCK_D)
    v_columns = tl.program_id(2) * BLOCK_DV + tl.arange(0, BLOCK_DV)
    q0, q1, q2 = queries(q, rows, q_row, n_queries, columns, scale, PARTS, DTYPE, D, BLOCK_D, FOLD)
    if MASKED:  # every visited tile reads the mask
        at = extents + (tl.where(mask_batch == 0, 0, batch) * tl.num_programs(1) + block) * 2
        full = tl.load(at) // (SUBS * N)
        high = tl.cdiv(tl.load(at + 1), SUBS * N)
    else:  # tiles below `full` are seen by all rows
        full = block * M // (SUBS * N)
        high = tl.cdiv(tl.minimum(block * M + M, n_keys), SUBS * N)
    acc = tl.zeros([M, BLOCK_DV], tl.float32)
    total = tl.zeros([M], tl.float32)
    anchor = tl.full([M], float("-inf"), tl.float32)
    top = anchor
    acc, total, anchor, top = walk(
        acc, total, anchor, top, q0, q1, q2, k, k_part, k_row, v, v_part, v_row, mask, mask_row, rows, columns,
        v_columns, high - 1, high - full, n_queries, n_keys, scale, softcap, limit, up, sum_up, c0, c1, c2, c3, c4, c5,
        2 if MASKED else 1, M, N, SUBS, PARTS, DTYPE, P, P_PARTS, D, BLOCK_D, DV, BLOCK_DV, FOLD, SOFTCAP, PRECISION, VOTE,
        LEVELS, KIND, OFFSET, MAP, SHIFT, BASE, SCALED, DROP, DEGREE,
    )  # fmt: skip
    if not MASKED:
        acc, total, anchor, top = walk(
            acc, total, anchor, top, q0, q1, q2, k, k_part, k_row, v, v_part, v_row, mask, mask_row, rows, columns,
            v_columns, full - 1, full, n_queries, n_keys, scale, softcap, limit, up, sum_up, c0, c1, c2, c3, c4, c5,
            0, M, N, SUBS, PARTS, DTYPE, P, P_PARTS, D, BLOCK_D, DV, BLOCK_DV, FOLD, SOFTCAP, PRECISION, VOTE,
            LEVELS, KIND, OFFSET, MAP, SHIFT, BASE, SCALED, DROP, DEGREE,
        )  # fmt: skip
    # As `online.Simulator`: rows without a key give 0, NaN or +∞ in the scores gives NaN.
    top = tl.where(top == MINUS_INFINITY, 0.0, top)
    total = tl.where(total == 0, 1.0, total * up) + (top - top)
    at = out + rows[:, None].to(tl.int64) * o_row + v_columns[None, :]
    inside = (rows[:, None] < n_queries) & (v_columns[None, :] < DV)
    tl.store(at, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)


def supports(
    query: Tensor, key: Tensor, value: Tensor, operator: Operator, semantics: Semantics, *, mask: Tensor | None = None
) -> str | None:
    """None where `attend` can compute these, else one clause that says why not. Arguments as there."""
    if not isinstance(operator, RowmaxAnchored):
        return f"{operator} is not anchored at the row maximum"
    if reason := forward.supports(query, key, value, operator, mask=mask):
        return reason
    if semantics.tile not in TILES:
        return f"its tiles have {', '.join(map(str, TILES))} keys, and not {semantics.tile}"
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
        tile: shape of the launch, whose `n` is the semantics' tile and whose `m` a multiple of 32; None chooses.

    Raises:
        LabError: `triton.supports` gives a reason.
    """
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
    # Triton launches on the current device, which need not be that of the tensors.
    with torch.cuda.device(query.device) if query.is_cuda else nullcontext():
        # The values stay as they are: of a P that is exact in its parts there are none in FP16.
        call = forward.Call(
            query, key, value, dataclasses.replace(found, exact_p=True), scaling, softcap, mask, tile, "split"
        )
        return _launch(call, operator, semantics, p_parts, dtype)


def shape(keys: int, parts: int, p_parts: int, dim: int) -> forward.Tile:
    """A launch that fits the registers and the shared memory of sm_90."""
    return forward.Tile(64, keys // 2 if keys > 64 else keys, 4, 1)


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
    out = call.query.new_empty(call.batch, call.n_queries, call.heads, call.value_dim, dtype=dtype)
    flags = {"SHIFT": 0, "BASE": 0, "SCALED": False, "DROP": False, "DEGREE": 0} | call.plan.flags
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
        *(*call.plan.scalars, *[0.0] * 6)[:6],
        MAP=call.plan.map, P=semantics.p, P_PARTS=p_parts, M=call.tile.m, N=call.tile.n, SUBS=semantics.tile // call.tile.n, DV=call.value_dim, BLOCK_DV=columns,
        VOTE=semantics.decision == "warp" and semantics.tau > 0, LEVELS=levels, KIND=kind,
        OFFSET=semantics.max_offset != 0, **flags, **call.common(),
        num_warps=call.tile.warps, num_stages=call.tile.stages,
    )  # fmt: skip
    return out
