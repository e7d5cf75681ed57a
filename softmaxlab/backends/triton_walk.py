"""The walk of an online-softmax kernel as a Triton kernel: tiles of keys, a running anchor, a rounded P.

`softmaxlab.online` has the definition, and `triton_online` launches.
"""

import triton
import triton.language as tl

from softmaxlab.backends.triton_maps import LOG2E, MINUS_INFINITY, weights
from softmaxlab.backends.triton_tiles import parts_of, product, queries, scores, start_of, visible
from softmaxlab.operators import packed
from softmaxlab.semantics import WARP as _WARP

LANES, WARP = tl.constexpr(packed.LANES), tl.constexpr(_WARP)


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
    acc, total, s, m, v, v_part, v_stride, v_columns, start, n_keys, up, sum_up, c0, c1, c2, c3, c4, c5,
    MODE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PARTS: tl.constexpr, DTYPE: tl.constexpr, P: tl.constexpr,
    P_PARTS: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr, LEVELS: tl.constexpr,
    KIND: tl.constexpr, OFFSET: tl.constexpr, MAP: tl.constexpr, SHIFT: tl.constexpr, BASE: tl.constexpr,
    SCALED: tl.constexpr, DROP: tl.constexpr, DEGREE: tl.constexpr,
):  # fmt: skip
    """acc + P·V and total + Σw of the scores `s` of the keys from `start` on, measured from the anchors `m`."""
    w = weights(
        s, m, m, m, m, 0.0, c0, c1, c2, c3, c4, c5,
        MAP, "max", SHIFT, BASE, SCALED, DROP, DEGREE, False, "", False,
    )  # fmt: skip
    if MODE != 0:
        w = tl.where(s > MINUS_INFINITY, w, 0.0)
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
    acc, total, anchor, top, q0, q1, q2, k, k_part, k_stride, v, v_part, v_stride, mask_base, mask_stride, rows,
    columns, v_columns, last, count, n_rows, n_keys, scale, softcap, limit, up, sum_up, c0, c1, c2, c3, c4, c5,
    MODE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, SUBS: tl.constexpr, PARTS: tl.constexpr,
    DTYPE: tl.constexpr, P: tl.constexpr, P_PARTS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, FOLD: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    VOTE: tl.constexpr, LEVELS: tl.constexpr, KIND: tl.constexpr, OFFSET: tl.constexpr, MAP: tl.constexpr,
    SHIFT: tl.constexpr, BASE: tl.constexpr, SCALED: tl.constexpr, DROP: tl.constexpr, DEGREE: tl.constexpr,
):  # fmt: skip
    """Visit `count` tiles of SUBS·N keys, from tile `last` on downwards.

    All scores of a tile are held until its anchor is known; products take N keys at a time. `anchor` and the running
    maximum `top` are in nats and −∞ before the first key.
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
            held = held + (s,)  # noqa: RUF005  (Triton knows no starred tuples)
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
                acc, total, held[j], m, v, v_part, v_stride, v_columns, start + j * N, n_keys, up, sum_up,
                c0, c1, c2, c3, c4, c5, MODE, M, N, PARTS, DTYPE, P, P_PARTS, DV, BLOCK_DV, PRECISION, LEVELS, KIND,
                OFFSET, MAP, SHIFT, BASE, SCALED, DROP, DEGREE,
            )  # fmt: skip
    return acc, total, anchor, top


@triton.jit(do_not_specialize=["n_heads", "group", "n_queries", "n_keys"])
def simulate(
    q, k, v, out, mask, extents, k_part, v_part,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, o_batch, o_row, mask_batch, mask_row,
    n_heads, group, n_queries, n_keys, scale, softcap, limit, up, sum_up, c0, c1, c2, c3, c4, c5,
    MASKED: tl.constexpr, M: tl.constexpr, N: tl.constexpr, SUBS: tl.constexpr, PARTS: tl.constexpr,
    DTYPE: tl.constexpr, P: tl.constexpr, P_PARTS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, FOLD: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    VOTE: tl.constexpr, LEVELS: tl.constexpr, KIND: tl.constexpr, OFFSET: tl.constexpr, MAP: tl.constexpr,
    SHIFT: tl.constexpr, BASE: tl.constexpr, SCALED: tl.constexpr, DROP: tl.constexpr, DEGREE: tl.constexpr,
):  # fmt: skip
    """A block of M queries of one head, some columns. Grid: (batch · heads, blocks of queries, blocks of columns)."""
    _, block, batch, q, k, v, out, mask, rows, columns, v_columns = start_of(
        q, k, v, out, mask, q_batch, q_head, k_batch, k_head, v_batch, v_head, o_batch, mask_batch, n_heads, group,
        M, BLOCK_D, DV, BLOCK_DV,
    )  # fmt: skip
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
        2 if MASKED else 1, M, N, SUBS, PARTS, DTYPE, P, P_PARTS, D, BLOCK_D, DV, BLOCK_DV, FOLD, SOFTCAP, PRECISION,
        VOTE, LEVELS, KIND, OFFSET, MAP, SHIFT, BASE, SCALED, DROP, DEGREE,
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
