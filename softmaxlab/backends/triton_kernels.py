"""Fused attention with an operator's map in the place of the exponential, as one Triton kernel.

A program holds a block of queries of one head and walks over the keys; no score leaves the chip. Three routes:

- `online`: one walk with a running maximum, for maps whose rescale is exact (softmax, temperature);
- two walks: the first finds what the map needs of the row (`STATS`: `max`, `minmax`, `mean`, `mass`), the second
  computes the scores again and sums weights and P·V. A lattice depends on the fraction of its exponent, so it needs
  the row's true maximum before the first weight;
- `given`: the second walk alone, with the statistics from memory (top-k, see `triton_select`; RESCUE, which goes with
  it, has four numbers of the row beside the maximum, see `triton_rescue`).
"""

import triton
import triton.language as tl

from softmaxlab.backends.triton_maps import LOG2E, MINUS_INFINITY, capped, row_offset, weights
from softmaxlab.backends.triton_rescue import rescued
from softmaxlab.backends.triton_tiles import INFINITY, parts_of, product, queries, scores, start_of, unit, visible

#: A weight of 1 as FP16 holds it, below its largest number and far above its smallest.
FP16_UNITS = tl.constexpr(32768.0)


@triton.jit
def first_walk(
    x, y, z, q0, q1, q2, k, k_part, k_stride, mask_base, mask_stride, rows, columns, low, high, n_rows, n_keys,
    scale, softcap,
    STATS: tl.constexpr, MODE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PARTS: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, FOLD: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The row statistics over the keys from `low` to `high`.

    `max`, `minmax`: x and y hold the largest and the smallest score of each place of a tile, reduced once at the end,
    and taken before scaling and soft-capping, which keep the order. `mean`: x, y, z are the running maximum, the sum
    of distances from it and the number of keys. `mass`: the running maximum and Σ exp(−Δ).
    """
    PLAIN: tl.constexpr = STATS == "max" or STATS == "minmax"
    for start in tl.range(low, high, N):
        s = scores(
            q0, q1, q2, k, k_part, k_stride, start, columns, n_keys, scale, softcap,
            M, N, PARTS, D, BLOCK_D, MODE != 0, FOLD or PLAIN, SOFTCAP and not PLAIN, PRECISION,
        )  # fmt: skip
        if MODE != 0:
            valid = visible(mask_base, mask_stride, rows, start + tl.arange(0, N), n_rows, n_keys, MODE)
            if STATS == "minmax":
                y = tl.minimum(y, tl.where(valid, s, INFINITY))
            s = tl.where(valid, s, MINUS_INFINITY)
        elif STATS == "minmax":
            y = tl.minimum(y, s)
        if PLAIN:
            x = tl.maximum(x, s, propagate_nan=tl.PropagateNan.ALL)
        else:
            new = tl.maximum(x, tl.max(s, 1))
            anchor = tl.where(new == MINUS_INFINITY, 0.0, new)
            if STATS == "mean":
                delta = anchor[:, None] - s
                if MODE != 0:
                    delta = tl.where(valid, delta, 0.0)
                    added = tl.sum(valid.to(tl.float32), 1)
                else:
                    added = N
                grown = tl.where(z > 0, z * (anchor - x), 0.0)  # without a key before, x is −∞
                y += grown + tl.sum(delta, 1)
                z += added
            else:
                y = y * tl.exp2((x - anchor) * LOG2E) + tl.sum(tl.exp2((s - anchor[:, None]) * LOG2E), 1)
            x = new
    return x, y, z


@triton.jit
def second_walk(
    acc, total, top, q0, q1, q2, k, k_part, k_stride, v, v_part, v_stride, mask_base, mask_stride, rows, columns,
    v_columns, low, high, n_rows, n_keys, scale, softcap, m, row, offset, octaves, above, last, factor,
    n_intervals, c0, c1, c2, c3, c4, c5,
    ONLINE: tl.constexpr, RESCUE: tl.constexpr, MODE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    PARTS: tl.constexpr, P_PARTS: tl.constexpr, P_DTYPE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, FOLD: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    MAP: tl.constexpr, ANCHOR: tl.constexpr, SHIFT: tl.constexpr, BASE: tl.constexpr, SCALED: tl.constexpr,
    DROP: tl.constexpr, DEGREE: tl.constexpr, UNIFORM: tl.constexpr, RECON: tl.constexpr, LINEAR: tl.constexpr,
):  # fmt: skip
    """acc + P·V and total + Σŵ over the keys from `low` to `high`; `top` is the anchor in octaves where ONLINE."""
    for start in tl.range(low, high, N):
        s = scores(
            q0, q1, q2, k, k_part, k_stride, start, columns, n_keys, scale, softcap,
            M, N, PARTS, D, BLOCK_D, MODE != 0, FOLD, SOFTCAP, PRECISION,
        )  # fmt: skip
        if MODE != 0:
            valid = visible(mask_base, mask_stride, rows, start + tl.arange(0, N), n_rows, n_keys, MODE)
            s = tl.where(valid, s, MINUS_INFINITY)
        if ONLINE:
            new = tl.maximum(top, tl.max(s, 1) * c0)
            anchor = tl.where(new == MINUS_INFINITY, 0.0, new)
            w = tl.exp2(tl.fma(s, c0, -anchor[:, None]))
            rescale = tl.exp2(top - anchor)
            total *= rescale
            acc *= rescale[:, None]
            top = new
        else:
            w = weights(
                s, m, row, offset, octaves, n_intervals, c0, c1, c2, c3, c4, c5,
                MAP, ANCHOR, SHIFT, BASE, SCALED, DROP, DEGREE, UNIFORM, RECON, LINEAR,
            )  # fmt: skip
            if RESCUE:
                w = rescued(w, s, start + tl.arange(0, N), row, above, last, factor)
            if MODE != 0:
                w = tl.where(valid, w, 0.0)
        total += tl.sum(w, 1)
        if P_DTYPE == tl.float16:  # noqa: SIM300  (a constant of the kernel's)
            w *= FP16_UNITS
        p0, p1, p2 = parts_of(w, P_PARTS, P_DTYPE, True)
        acc = product(
            p0, p1, p2, v, v_part, start + tl.arange(0, N), v_stride, n_keys, v_columns, acc,
            P_PARTS, PARTS, DV, BLOCK_DV, MODE != 0, PRECISION, False,
        )  # fmt: skip
    return acc, total, top


@triton.jit(do_not_specialize=["n_heads", "group", "n_queries", "n_keys"])
def forward(
    q, k, v, out, mask, extents, given, largest, k_part, v_part,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, o_batch, o_row, mask_batch, mask_row,
    n_heads, group, n_queries, n_keys, n_intervals, scale, softcap, c0, c1, c2, c3, c4, c5,
    STATS: tl.constexpr, MASKED: tl.constexpr, NORMALISED: tl.constexpr, EVEN: tl.constexpr, RESCUE: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, PARTS: tl.constexpr, DTYPE: tl.constexpr, P_PARTS: tl.constexpr,
    P_DTYPE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    FOLD: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    MAP: tl.constexpr, ANCHOR: tl.constexpr, SHIFT: tl.constexpr, BASE: tl.constexpr, SCALED: tl.constexpr,
    DROP: tl.constexpr, DEGREE: tl.constexpr, UNIFORM: tl.constexpr, RECON: tl.constexpr, LINEAR: tl.constexpr,
):  # fmt: skip
    """Attention of a block of M queries of one head, some columns of it.

    Grid: (batch · heads, blocks of queries, blocks of columns).
    """
    z, block, batch, q, k, v, out, mask, rows, columns, v_columns = start_of(
        q, k, v, out, mask, q_batch, q_head, k_batch, k_head, v_batch, v_head, o_batch, mask_batch, n_heads, group,
        M, BLOCK_D, DV, BLOCK_DV,
    )  # fmt: skip
    q0, q1, q2 = queries(q, rows, q_row, n_queries, columns, scale, PARTS, DTYPE, D, BLOCK_D, FOLD)
    if MASKED:  # every visited tile reads the mask
        at = extents + (tl.where(mask_batch == 0, 0, batch) * tl.num_programs(1) + block) * 2
        low = tl.load(at) // N * N
        full = low
        high = tl.load(at + 1)
    else:  # keys up to `full` are seen by all rows
        low = 0
        full = block * M // N * N
        high = tl.minimum(block * M + M, n_keys)
    EDGE: tl.constexpr = 2 if MASKED else 1

    m = tl.zeros([M], tl.float32)
    row = m
    offset = m
    octaves = m
    above = m
    last = m
    factor = m
    if STATS == "given":
        at = given + z * n_queries + rows
        plane = tl.num_programs(0).to(tl.int64) * n_queries
        m = tl.load(at, mask=rows < n_queries, other=0.0)
        row = tl.load(at + plane, mask=rows < n_queries, other=0.0)
        if RESCUE:
            above = tl.load(at + 2 * plane, mask=rows < n_queries, other=0.0)
            last = tl.load(at + 3 * plane, mask=rows < n_queries, other=0.0)
            factor = tl.load(at + 4 * plane, mask=rows < n_queries, other=0.0)
    elif STATS != "online":
        if STATS == "max" or STATS == "minmax":
            x = tl.full([M, N], float("-inf"), tl.float32)
            y = m
            if STATS == "minmax":
                y = tl.full([M, N], float("inf"), tl.float32)
        else:
            x = tl.full([M], float("-inf"), tl.float32)
            y = m
        count = m
        if not MASKED:
            x, y, count = first_walk(
                x, y, count, q0, q1, q2, k, k_part, k_row, mask, mask_row, rows, columns, low, full, n_queries,
                n_keys, scale, softcap, STATS, 0, M, N, PARTS, D, BLOCK_D, FOLD, SOFTCAP, PRECISION,
            )  # fmt: skip
        x, y, count = first_walk(
            x, y, count, q0, q1, q2, k, k_part, k_row, mask, mask_row, rows, columns, full, high, n_queries, n_keys,
            scale, softcap, STATS, EDGE, M, N, PARTS, D, BLOCK_D, FOLD, SOFTCAP, PRECISION,
        )  # fmt: skip
        if STATS == "max" or STATS == "minmax":
            bad = tl.max((x != x).to(tl.int32), 1) > 0
            m = tl.max(x, 1)
            if not FOLD:
                m *= scale
            if SOFTCAP:
                m = capped(m, softcap)
            if STATS == "minmax":
                offset = tl.min(y, 1)
                if not FOLD:
                    offset *= scale
                if SOFTCAP:
                    offset = capped(offset, softcap)
                row = m - offset
        else:
            m = x
            bad = y != y
            if STATS == "mean":
                row = y / tl.maximum(count, 1.0)
                row = tl.where(row > 0, row, INFINITY)  # none is above the mean: all are kept
        m = tl.where(m == MINUS_INFINITY, 0.0, m)
        if STATS != "minmax":
            offset, octaves = row_offset(m, y if STATS == "mass" else m, c0, c2, c4, c5, MAP, ANCHOR, EVEN)
        m = tl.where(bad, float("nan"), m)  # lattices clamp, and would hide it

    acc = tl.zeros([M, BLOCK_DV], tl.float32)
    total = tl.zeros([M], tl.float32)
    top = tl.full([M], float("-inf"), tl.float32)
    if not MASKED:
        acc, total, top = second_walk(
            acc, total, top, q0, q1, q2, k, k_part, k_row, v, v_part, v_row, mask, mask_row, rows, columns,
            v_columns, low, full, n_queries, n_keys, scale, softcap, m, row, offset, octaves, above, last, factor,
            n_intervals, c0, c1, c2, c3, c4, c5, STATS == "online", RESCUE, 0, M, N, PARTS, P_PARTS, P_DTYPE, D,
            BLOCK_D, DV, BLOCK_DV, FOLD, SOFTCAP, PRECISION, MAP, ANCHOR, SHIFT, BASE, SCALED, DROP, DEGREE, UNIFORM,
            RECON, LINEAR,
        )  # fmt: skip
    acc, total, top = second_walk(
        acc, total, top, q0, q1, q2, k, k_part, k_row, v, v_part, v_row, mask, mask_row, rows, columns,
        v_columns, full, high, n_queries, n_keys, scale, softcap, m, row, offset, octaves, above, last, factor,
        n_intervals, c0, c1, c2, c3, c4, c5, STATS == "online", RESCUE, EDGE, M, N, PARTS, P_PARTS, P_DTYPE, D, BLOCK_D,
        DV, BLOCK_DV, FOLD, SOFTCAP, PRECISION, MAP, ANCHOR, SHIFT, BASE, SCALED, DROP, DEGREE, UNIFORM, RECON, LINEAR,
    )  # fmt: skip
    if NORMALISED:
        # As `operators.normaliser`: rows without a key give 0, NaN or +∞ in the scores gives NaN.
        acc = acc / (tl.where(total == 0, 1.0, total) + (m - m))[:, None]
    else:
        acc += (m - m)[:, None]
    if P_DTYPE == tl.float16:  # noqa: SIM300  (a constant of the kernel's)
        acc *= unit(tl.load(largest).to(tl.float32)) * (1 / FP16_UNITS)
    at = out + rows[:, None].to(tl.int64) * o_row + v_columns[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=(rows[:, None] < n_queries) & (v_columns[None, :] < DV))
