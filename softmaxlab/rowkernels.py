"""The per-row functions of `divergence` as Triton kernels: a row is read once and stays in registers.

Eager code remains the specification; `set_codes` here gives equal codes, `row_statistics` sums that differ in the
order of their additions. Finding the high-mass sets by sorting, or by sums that read the rows from memory dozens of
times, costs more than everything else on a GPU; here each set's smallest score is bisected, bit by bit, on the row
that a program holds.

The kernels are made on first use, because Triton is there only with a CUDA build of PyTorch. They also run in
Triton's interpreter on a CPU, which is how the tests compare them with the specification.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from types import SimpleNamespace

import torch
from torch import Tensor

from softmaxlab import divergence
from softmaxlab.divergence import LEAKAGE_Q, PHASE_Q, SUMS, Rows

#: Keys of the longest row that fits the registers of a program; longer rows go to the specification.
MAX_KEYS = 32_768

#: Bits that a bisection over all FP32 scores needs, and one to settle the last.
_STEPS = 33


@lru_cache(maxsize=1)
def _kernels() -> SimpleNamespace:
    import triton
    import triton.language as tl

    @triton.jit
    def codes(s_ptr, p_ptr, q_ptr, code_ptr, n, N_SETS: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        at = tl.arange(0, BLOCK)
        inside = at < n
        s = tl.load(s_ptr + row * n + at, mask=inside, other=float("-inf"))
        p = tl.load(p_ptr + row * n + at, mask=inside, other=0.0)
        # FP32 numbers in the order of signed integers: negative ones have their magnitude bits flipped.
        bits = s.to(tl.int32, bitcast=True)
        order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
        code = tl.zeros([BLOCK], dtype=tl.int32)
        for i in tl.static_range(N_SETS):
            q = tl.load(q_ptr + i)
            # The mass above `low` reaches q, that above `high` does not: `high` ends at the set's smallest score.
            low = tl.min(order) - 1
            high = tl.max(order)
            for _ in range(STEPS):
                middle = low + (high - low) // 2
                reached = tl.sum(tl.where(order > middle, p, 0.0)) >= q
                low = tl.where(reached, middle, low)
                high = tl.where(reached, high, middle)
            tied = order == high
            before = tl.sum(tl.where(order > high, p, 0.0))
            rank = tl.cumsum(tied.to(tl.int32)) - 1  # equal scores enter in key order
            in_set = (order > high) | (tied & (before + rank.to(tl.float64) * p < q))
            code += (in_set & (p > 0)).to(tl.int32)
        tl.store(code_ptr + row * n + at, code.to(tl.uint8), mask=inside)

    @triton.jit
    def statistics(
        s_ptr, p_ptr, w_ptr, code_ptr, top_ptr, log_z_ptr, keys_ptr, phase_ptr, offset_ptr,
        sum_ptr, extreme_ptr, moved_ptr, n, n_rows,
        N_SETS: tl.constexpr, PHASE_SET: tl.constexpr, NORMALISED: tl.constexpr, SMALLEST: tl.constexpr,
        BLOCK: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        at = tl.arange(0, BLOCK)
        inside = at < n
        p = tl.load(p_ptr + row * n + at, mask=inside, other=0.0)
        w32 = tl.load(w_ptr + row * n + at, mask=inside, other=0.0)
        top, log_z = tl.load(top_ptr + row), tl.load(log_z_ptr + row)
        minus_delta = tl.load(s_ptr + row * n + at, mask=inside, other=float("-inf")).to(tl.float64) - top
        w = w32.to(tl.float64)
        positive = w > 0
        log_w = tl.log(tl.where(positive, w, 1.0))
        if NORMALISED:
            total = tl.sum(w)
            total = tl.where(total == 0, 1.0, total)
            pq, log_q = w / total, log_w - tl.log(total)
        else:
            pq, log_q = w, log_w
        log_m = tl.log(tl.where(p + pq > 0, (p + pq) * 0.5, 1.0))
        of_p = tl.where(p > 0, p * (minus_delta - log_z - log_m), 0.0)
        of_q = tl.where(pq > 0, pq * (log_q - log_m), 0.0)
        moved = pq - p
        tl.store(moved_ptr + row * n + at, moved.to(tl.float32), mask=inside)
        out = sum_ptr + row
        tl.store(out, 0.5 * tl.sum(of_p + of_q))
        tl.store(out + n_rows, 0.5 * tl.sum(tl.abs(moved)))
        code = tl.load(code_ptr + row * n + at, mask=inside, other=0)
        several = (tl.load(keys_ptr + row) > 1).to(tl.float64)
        leak = several * 0.0
        for i in tl.static_range(N_SETS):
            left = tl.sum(tl.where(code >= N_SETS - i, -moved, 0.0))
            tl.store(out + (2 + i) * n_rows, left)
            if i == PHASE_SET:
                leak = left * several
        # ε of an entry whose weight is subnormal in FP32 is the rounding of FP32: it counts in the means and not
        # in the extremes.
        error = tl.where(positive, log_w - minus_delta - tl.load(offset_ptr + row), 0.0)
        phase = tl.load(phase_ptr + row) * several
        rest = out + (2 + N_SETS) * n_rows
        tl.store(rest, tl.sum(error * error))
        tl.store(rest + n_rows, tl.sum(p * error * error))
        tl.store(rest + 2 * n_rows, tl.sum(positive.to(tl.int32)).to(tl.float64))
        tl.store(rest + 3 * n_rows, leak)
        tl.store(rest + 4 * n_rows, leak * leak)
        tl.store(rest + 5 * n_rows, phase)
        tl.store(rest + 6 * n_rows, phase * phase)
        tl.store(rest + 7 * n_rows, phase * leak)
        normal = w32 >= SMALLEST
        tl.store(extreme_ptr + row, tl.max(tl.where(normal, error, float("-inf"))))
        tl.store(extreme_ptr + n_rows + row, tl.max(tl.where(normal, -error, float("-inf"))))

    return SimpleNamespace(codes=codes, statistics=statistics, next_power_of_2=triton.next_power_of_2)


def fit(scores: Tensor) -> bool:
    """Whether rows of this length can be held by a program."""
    return scores.shape[-1] <= MAX_KEYS


def set_codes(scores: Tensor, rows: Rows, qs: Sequence[float] = LEAKAGE_Q) -> Tensor:
    """`divergence.set_codes(rows.p, qs)` of FP32 scores (rows, n), n ≤ MAX_KEYS; uint8."""
    n_rows, n = scores.shape
    codes = torch.empty(n_rows, n, dtype=torch.uint8, device=scores.device)
    targets = torch.tensor(qs, dtype=torch.float64, device=scores.device)
    block, warps = _shape(n)
    _kernels().codes[(n_rows,)](
        scores, rows.p, targets, codes, n, N_SETS=len(qs), STEPS=_STEPS, BLOCK=block, num_warps=warps
    )
    return codes


def row_statistics(
    scores: Tensor,
    rows: Rows,
    weights: Tensor,
    codes: Tensor,
    phase: Tensor,
    offset: Tensor,
    normalised: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """`divergence.row_statistics` of contiguous (rows, n) tensors, n ≤ MAX_KEYS; same arguments and results."""
    n_rows, n = scores.shape
    sums = torch.empty(len(SUMS), n_rows, dtype=torch.float64, device=scores.device)
    extremes = torch.empty(2, n_rows, dtype=torch.float64, device=scores.device)
    moved = torch.empty(n_rows, n, dtype=torch.float32, device=scores.device)
    block, warps = _shape(n)
    _kernels().statistics[(n_rows,)](
        scores, rows.p, weights.contiguous(), codes, rows.top, rows.log_z, rows.keys, phase, offset,
        sums, extremes, moved, n, n_rows,
        N_SETS=len(LEAKAGE_Q), PHASE_SET=LEAKAGE_Q.index(PHASE_Q), NORMALISED=normalised,
        SMALLEST=divergence.SMALLEST_NORMAL, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return sums, extremes, moved


def _shape(n: int) -> tuple[int, int]:
    """Elements of a program and its warps: about 16 elements a thread, as many as FP64 leaves registers for."""
    block = max(64, _kernels().next_power_of_2(n))
    return block, min(32, max(1, block // 512))
