"""Top-k for the Triton kernels: what is kept of each row is settled before the fused walk, by one number a row.

Rows of scores go to a scratch buffer of fixed size, a chunk of queries at a time, so that memory does not grow with
the square of the context. A program then holds one row in registers and searches between its smallest and its largest
score for a value with exactly k scores at or above it: from where it would be of normal scores, by linear
interpolation of the counts and by bisection in turn. Where ties make that impossible it ends at the k-th score
itself. The cut is put halfway to the next score below, so that the walk, which computes the scores again, keeps the
same keys even where its sums round differently; keys equal to the k-th score are all kept.
"""

from collections.abc import Callable
from statistics import NormalDist

import torch
import triton
import triton.language as tl
from torch import Tensor

from softmaxlab.backends.triton_maps import MINUS_INFINITY
from softmaxlab.backends.triton_plans import Plan
from softmaxlab.backends.triton_tiles import queries, scores, visible
from softmaxlab.operators.support import kept_counts

#: What the walk is given of each row.
NUMBERS = 2
#: Keys of a row that a warp holds.
KEYS = 2048

#: Steps of a search before ties are looked for.
PATIENCE = tl.constexpr(16)


@triton.jit(do_not_specialize=["n_heads", "group", "first_query", "n_rows", "n_queries", "n_keys"])
def write_scores(
    q, k, mask, scratch, k_part, q_batch, q_head, q_row, k_batch, k_head, k_row, mask_batch, mask_row,
    n_heads, group, first_query, n_rows, n_queries, n_keys, width, scale, softcap,
    MASKED: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PARTS: tl.constexpr, DTYPE: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, FOLD: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores of the queries from `first_query` on into scratch (batch · heads, n_rows, width), −∞ where masked.

    Grid: (tiles of keys, blocks of queries, batch · heads). Tiles above the diagonal of a causal mask are left out.
    """
    z = tl.program_id(2).to(tl.int64)
    batch, head = z // n_heads, z % n_heads
    place = tl.program_id(1) * M + tl.arange(0, M)
    rows = first_query + place
    start = tl.program_id(0) * N
    if MASKED or start < first_query + (tl.program_id(1) + 1) * M:
        columns, keys = tl.arange(0, BLOCK_D), start + tl.arange(0, N)
        q += batch * q_batch + head * q_head
        q0, q1, q2 = queries(q, rows, q_row, n_queries, columns, scale, PARTS, DTYPE, D, BLOCK_D, FOLD)
        s = scores(
            q0, q1, q2, k + batch * k_batch + (head // group) * k_head, k_part, k_row, start, columns, n_keys, scale,
            softcap, M, N, PARTS, D, BLOCK_D, True, FOLD, SOFTCAP, PRECISION,
        )  # fmt: skip
        MODE: tl.constexpr = 2 if MASKED else 1
        valid = visible(mask + batch * mask_batch, mask_row, rows, keys, n_queries, n_keys, MODE)
        at = scratch + (z * n_rows + place[:, None]) * width + keys[None, :]
        inside = (place[:, None] < n_rows) & (keys[None, :] < width)
        tl.store(at, tl.where(valid, s, MINUS_INFINITY), mask=inside)


@triton.jit(do_not_specialize=["first_row", "first_query", "n_rows", "n_queries", "n_keys"])
def select(
    scratch, kept, out, first_row, first_query, n_rows, n_queries, n_keys, width, quantile,
    MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Row maximum and cut of each row. Grid: (rows, batch · heads).

    Args:
        scratch: of `write_scores`.
        kept: INT32, how many of n keys are kept, n = 0..n_keys.
        out: FP32, (2, batch · heads, n_queries).
        first_row: in the scratch, of the grid's first.
        quantile: standard deviations above the mean where the k-th of normal scores would lie: the search begins there.
    """
    z = tl.program_id(1).to(tl.int64)
    place = first_row + tl.program_id(0)
    query = first_query + place
    at = tl.arange(0, BLOCK)
    limit = n_keys
    if not MASKED:
        limit = query + 1
    s = tl.load(scratch + (z * n_rows + place) * width + at, mask=at < limit, other=float("-inf"))
    valid = s > MINUS_INFINITY
    n = limit
    if MASKED:
        n = tl.sum(valid.to(tl.int32), 0)
    k = tl.load(kept + n)
    total = tl.sum(tl.where(s == MINUS_INFINITY, 0.0, s), 0)
    bad = total != total
    top = tl.max(s, 0)
    high = top
    low = tl.min(tl.where(valid, s, top), 0)
    count_low = n
    count_high = tl.sum((s >= high).to(tl.int32), 0)
    # At `low` or above are k scores or more, at `high` fewer, unless ties at the maximum are enough.
    if count_high >= k:
        low = high
    mean = total / tl.maximum(n, 1).to(tl.float32)
    away = tl.where(valid, s - mean, 0.0)
    middle = mean + quantile * tl.sqrt(tl.sum(away * away, 0) / tl.maximum(n, 1).to(tl.float32))
    searching = low < high
    halve = searching
    step = 0
    while searching:
        middle = tl.where((middle > low) & (middle < high), middle, 0.5 * low + 0.5 * high)
        count = tl.sum((s >= middle).to(tl.int32), 0)
        between = (middle > low) & (middle < high)  # else no number is, and the k-th score is `low`
        enough = between & (count >= k)
        width_before = high - low
        low = tl.where(enough, middle, low)
        count_low = tl.where(enough, count, count_low)
        high = tl.where(enough, high, middle)
        count_high = tl.where(enough, count_high, count)
        searching = between & (count != k)
        step += 1
        if step > PATIENCE:  # ties, which no cut parts
            low = tl.min(tl.where(s >= low, s, top), 0)
            searching = searching & (tl.sum((s > low).to(tl.int32), 0) >= k)
        # By the counts, and by halves when that has cut off less than half: either alone can be slow.
        halve = (high - low > 0.5 * width_before) & (step > 1) & (halve == 0)
        part = (count_low - k).to(tl.float32) / tl.maximum(count_low - count_high, 1).to(tl.float32)
        middle = tl.where(halve, 0.5 * low + 0.5 * high, low + (high - low) * tl.minimum(tl.maximum(part, 0.02), 0.98))
    kth = tl.min(tl.where(s >= low, s, top), 0)
    below = tl.max(tl.where(s < low, s, MINUS_INFINITY), 0)
    cut = 0.5 * kth + 0.5 * below
    cut = tl.where((cut > below) | (below == MINUS_INFINITY), cut, kth)
    at_row = out + z * n_queries + query
    top = tl.where(top == MINUS_INFINITY, 0.0, top)
    tl.store(at_row, tl.where(bad, float("nan"), top))
    tl.store(at_row + tl.num_programs(1).to(tl.int64) * n_queries, cut)


def launcher(plan: Plan, n_keys: int, device: torch.device) -> Callable[..., None]:
    """A function that launches `select` for rows of at most BLOCK keys."""
    kept = kept_counts(plan.kept, n_keys).to(device, torch.int32)
    quantile = NormalDist().inv_cdf(min(max(1 - plan.kept, 1e-6), 1 - 1e-6))

    def launch(grid: tuple[int, int], scratch: Tensor, out: Tensor, *place: int, MASKED: bool, BLOCK: int) -> None:
        warps = max(1, BLOCK // KEYS)
        select[grid](scratch, kept, out, *place, quantile, MASKED=MASKED, BLOCK=BLOCK, num_warps=warps)

    return launch
