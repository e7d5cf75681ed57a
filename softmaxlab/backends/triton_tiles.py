"""Tiles of operands and their products, for the Triton kernels; and what is prepared for them once a call.

Products of FP32 numbers run on the BF16 tensor cores, each number split into three BF16 parts (24 bits, exactly) and
six of the nine products added, smallest first: what is left out is 2^−25 of a product. FP16 needs two parts. Operands
in BF16 are one part, and exact. Weights are split likewise, into as many parts as their map needs: a lattice of at
most 7 fractional bits is exact in one. For BF16 inputs all other weights are one FP16 number each, and so are the
values: scaled by a power of two to a largest one below 2, they keep all their bits down to 2^−24 of that. Weights go
in units of 2^−15, so that they keep 11 bits down to 2^−29 of the largest: where a sink holds the maximum and has next
to no value, the small ones decide.
"""

import triton
import triton.language as tl

from softmaxlab.backends.triton_maps import capped

INFINITY = tl.constexpr(float("inf"))


@triton.jit
def leading(x):
    """x cut off to the 8 significant bits of BF16."""
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def parts_of(x, PARTS: tl.constexpr, DTYPE: tl.constexpr, FINITE: tl.constexpr):
    """FP32 x as a sum of numbers of DTYPE, largest first. Unless x is known to be FINITE, infinity has no rest."""
    if PARTS == 1:
        a = x.to(DTYPE)
        return a, a, a
    # Cut off, not rounded: this needs no conversion back. Three parts hold all 24 bits either way.
    head = leading(x)
    rest = x - head
    if not FINITE:
        rest = tl.where(tl.abs(x) < INFINITY, rest, 0.0)
    a = head.to(DTYPE)
    if PARTS == 2:
        b = rest.to(DTYPE)
        return a, b, b
    head = leading(rest)
    return a, head.to(DTYPE), (rest - head).to(DTYPE)


@triton.jit
def start_of(
    q, k, v, out, mask, q_batch, q_head, k_batch, k_head, v_batch, v_head, o_batch, mask_batch, n_heads, group,
    M: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Where a program of the grid (batch · heads, blocks of queries, blocks of columns) begins.

    Returns:
        Which head of which sequence, block of queries, sequence; q, k, v, out and mask moved there; indices of the
        block's rows, of the columns of q and k, and of those of v.
    """
    z = tl.program_id(0).to(tl.int64)
    block = tl.num_programs(1) - 1 - tl.program_id(1)  # under a causal mask the longest rows begin first
    batch, head = z // n_heads, z % n_heads
    q += batch * q_batch + head * q_head
    k += batch * k_batch + (head // group) * k_head
    v += batch * v_batch + (head // group) * v_head
    out += batch * o_batch + head * DV
    mask += batch * mask_batch
    rows = block * M + tl.arange(0, M)
    v_columns = tl.program_id(2) * BLOCK_DV + tl.arange(0, BLOCK_DV)
    return z, block, batch, q, k, v, out, mask, rows, tl.arange(0, BLOCK_D), v_columns


@triton.jit
def tile(base, rows, stride, n_rows, columns, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, BOUND: tl.constexpr):
    """A (rows, columns) tile, 0 outside; BOUND says whether rows can be outside."""
    at = base + rows[:, None] * stride + columns[None, :]
    if COLUMNS % BLOCK != 0:
        if BOUND:
            return tl.load(at, mask=(rows[:, None] < n_rows) & (columns[None, :] < COLUMNS), other=0.0)
        return tl.load(at, mask=columns[None, :] < COLUMNS, other=0.0)
    if BOUND:
        return tl.load(at, mask=rows[:, None] < n_rows, other=0.0)
    return tl.load(at)


@triton.jit
def matmul(a, b, acc, PRECISION: tl.constexpr, TRANSPOSE: tl.constexpr):
    if TRANSPOSE:
        b = tl.trans(b)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def product(
    a0, a1, a2, base, part, rows, stride, n_rows, columns, acc,
    A: tl.constexpr, B: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, BOUND: tl.constexpr,
    PRECISION: tl.constexpr, TRANSPOSE: tl.constexpr,
):  # fmt: skip
    """acc + a·b (or a·bᵀ), a in A parts and b in B parts at distance `part` from each other, smallest first."""
    b0 = tile(base, rows, stride, n_rows, columns, COLUMNS, BLOCK, BOUND)
    if B > 1:
        b1 = tile(base + part, rows, stride, n_rows, columns, COLUMNS, BLOCK, BOUND)
    if B > 2:
        # Two steps: twice the distance need not fit in 32 bits.
        b2 = tile(base + part + part, rows, stride, n_rows, columns, COLUMNS, BLOCK, BOUND)
        acc = matmul(a0, b2, acc, PRECISION, TRANSPOSE)
    if A > 1 and B > 1:
        acc = matmul(a1, b1, acc, PRECISION, TRANSPOSE)
    if A > 2:
        acc = matmul(a2, b0, acc, PRECISION, TRANSPOSE)
    if B > 1:
        acc = matmul(a0, b1, acc, PRECISION, TRANSPOSE)
    if A > 1:
        acc = matmul(a1, b0, acc, PRECISION, TRANSPOSE)
    return matmul(a0, b0, acc, PRECISION, TRANSPOSE)


@triton.jit
def queries(
    base, rows, stride, n_rows, columns, scale,
    PARTS: tl.constexpr, DTYPE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """The parts of a block of queries; FOLD multiplies them by `scale`, a power of two."""
    x = tile(base, rows.to(tl.int64), stride, n_rows, columns, D, BLOCK_D, True).to(tl.float32)
    if FOLD:
        x *= scale
    return parts_of(x, PARTS, DTYPE, False)


@triton.jit
def visible(mask_base, mask_stride, rows, columns, n_rows, n_keys, MODE: tl.constexpr):
    """Which keys of a tile are valid: MODE 1 is causal, 2 reads the mask."""
    if MODE == 1:
        return rows[:, None] >= columns[None, :]
    at = mask_base + rows[:, None].to(tl.int64) * mask_stride + columns[None, :]
    return tl.load(at, mask=(rows[:, None] < n_rows) & (columns[None, :] < n_keys), other=0) != 0


@triton.jit
def scores(
    q0, q1, q2, k, k_part, k_stride, start, columns, n_keys, scale, softcap,
    M: tl.constexpr, N: tl.constexpr, PARTS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BOUND: tl.constexpr, FOLD: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """FP32 scores of a block of queries and the keys from `start` on."""
    # Distances within a head are 32 bits (`triton.supports`): with 64, ptxas lets each product finish before the next
    # one begins, and softmax at 16K in BF16 takes 1.75 times as long as sdpa on an H200, not 1.31 times.
    s = product(
        q0, q1, q2, k, k_part, start + tl.arange(0, N), k_stride, n_keys, columns, tl.zeros([M, N], tl.float32),
        PARTS, PARTS, D, BLOCK_D, BOUND, PRECISION, True,
    )  # fmt: skip
    if not FOLD:
        s *= scale
    if SOFTCAP:
        s = capped(s, softcap)
    return s


@triton.jit(do_not_specialize=["n_heads", "n_keys"])
def split(
    k, v, k_out, v_out, k_batch, k_head, k_row, v_batch, v_head, v_row, k_part, v_part, n_heads, n_keys,
    PARTS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """Keys and values as PARTS BF16 tensors (batch, heads, keys, BLOCK_D), 0 beyond D. Grid: (tiles, batch · heads)."""
    z = tl.program_id(1).to(tl.int64)
    batch, head = z // n_heads, z % n_heads
    rows = tl.program_id(0) * N + tl.arange(0, N)
    wide = rows.to(tl.int64)
    inside = rows[:, None] < n_keys
    columns = tl.arange(0, BLOCK_D)
    x = tile(k + batch * k_batch + head * k_head, wide, k_row, n_keys, columns, D, BLOCK_D, True).to(tl.float32)
    a, b, c = parts_of(x, PARTS, tl.bfloat16, False)
    at = k_out + (z * n_keys + rows[:, None]) * BLOCK_D + columns[None, :]
    tl.store(at, a, mask=inside)
    tl.store(at + k_part, b, mask=inside)
    if PARTS > 2:
        tl.store(at + k_part + k_part, c, mask=inside)
    columns = tl.arange(0, BLOCK_DV)
    x = tile(v + batch * v_batch + head * v_head, wide, v_row, n_keys, columns, DV, BLOCK_DV, True).to(tl.float32)
    a, b, c = parts_of(x, PARTS, tl.bfloat16, False)
    at = v_out + (z * n_keys + rows[:, None]) * BLOCK_DV + columns[None, :]
    tl.store(at, a, mask=inside)
    tl.store(at + v_part, b, mask=inside)
    if PARTS > 2:
        tl.store(at + v_part + v_part, c, mask=inside)


@triton.jit
def unit(largest):
    """The power of two that is not above FP32 `largest`; 1 for what is not finite, and never below 2^−100."""
    power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(power < INFINITY, tl.maximum(power, 2.0**-100), 1.0)


@triton.jit(do_not_specialize=["n_heads", "n_keys"])
def halve(
    v, largest, out, v_batch, v_head, v_row, n_heads, n_keys,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Values in units of `unit(largest)`, as FP16 (batch, heads, keys, BLOCK_DV), 0 beyond DV.

    Grid: (tiles, batch · heads).
    """
    z = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * N + tl.arange(0, N)
    columns = tl.arange(0, BLOCK_DV)
    wide = rows.to(tl.int64)
    base = v + z // n_heads * v_batch + z % n_heads * v_head
    x = tile(base, wide, v_row, n_keys, columns, DV, BLOCK_DV, True).to(tl.float32)
    x /= unit(tl.load(largest).to(tl.float32))
    tl.store(out + (z * n_keys + rows[:, None]) * BLOCK_DV + columns[None, :], x.to(tl.float16), rows[:, None] < n_keys)


@triton.jit(do_not_specialize=["n_queries", "n_keys"])
def extents(mask, out, mask_batch, mask_row, n_queries, n_keys, M: tl.constexpr, N: tl.constexpr):
    """First visible key of each block of M queries, and one past the last. Grid: (blocks, masks). out: (…, 2)."""
    batch = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * M + tl.arange(0, M)
    low = n_keys
    high = 0
    for start in tl.range(0, n_keys, N):
        keys = start + tl.arange(0, N)
        seen = tl.max(visible(mask + batch * mask_batch, mask_row, rows, keys, n_queries, n_keys, 2).to(tl.int32), 0)
        low = tl.minimum(low, tl.min(tl.where(seen > 0, keys, n_keys)))
        high = tl.maximum(high, tl.max(tl.where(seen > 0, keys + 1, 0)))
    at = out + (batch * tl.num_programs(0) + tl.program_id(0)) * 2
    tl.store(at, low)
    tl.store(at + 1, high)
