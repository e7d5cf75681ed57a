"""Paired block bootstrap: mean differences with their intervals, and when they are resolved.

The unit is the aligned block. Everything here starts from per-block losses on the same blocks, takes
the difference inside each block, and resamples blocks; the indices are the same for every condition of
a model and context because they depend only on the seed and the number of blocks. There is no function
that subtracts two averages: two independently resampled means would throw the pairing away, and with
it most of the precision.

Source: arXiv 2609.33586, section 3 and appendix A.9 (5,000 replicates, seed 0, two-sided 95%
percentile intervals, no pooling over models or contexts, no correction for multiplicity).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal

import numpy as np
import pandas as pd
from scipy import stats

from softmaxlab.errors import LabError

REPLICATES = 5_000
SEED = 0
LEVEL = 0.95

#: What must be one and the same in a frame before its conditions may be compared.
FIXED = ("model", "corpus", "context", "bos", "dtype", "backend")

_NAMED_BLOCKS = 10  # how many block numbers a message lists before it only counts


@dataclass(frozen=True)
class Estimate:
    """A mean over blocks with its percentile bootstrap interval.

    Attributes:
        mean: mean of `per_block`, in the unit of the input (nats for losses).
        low, high: ends of the two-sided interval, same unit.
        n_blocks: number of blocks.
        per_block: float64 (n_blocks,), read-only, what was resampled.
        level: coverage of the interval.
    """

    mean: float
    low: float
    high: float
    n_blocks: int
    per_block: np.ndarray = field(repr=False, compare=False)
    level: float = LEVEL

    @property
    def resolved(self) -> str:
        """ "positive" or "negative" when the interval excludes zero, else "unresolved"."""
        if self.low > 0:
            return "positive"
        if self.high < 0:
            return "negative"
        return "unresolved"

    @property
    def ppl_change(self) -> tuple[float, float, float]:
        """Perplexity change in percent, 100·(exp(x) − 1), of mean, low and high.

        Meaningful for a difference of losses. The map is monotone, so the ends of the interval map to
        the ends of the interval.
        """
        return tuple(100 * math.expm1(x) for x in (self.mean, self.low, self.high))

    def __str__(self) -> str:
        return f"{_three_digits(self.mean)} [{_three_digits(self.low)}, {_three_digits(self.high)}]"


def bootstrap(per_block: np.ndarray) -> Estimate:
    """Mean of per-block values with its percentile bootstrap interval (A.9).

    Args:
        per_block: (n,) finite numbers, one a block, n ≥ 2.

    Returns:
        The estimate; equal values give an interval of zero width.

    Raises:
        LabError: fewer than two blocks, more than one dimension, or a value that is not finite.
    """
    values = np.array(per_block, dtype=np.float64)  # a copy, so that the estimate cannot change later
    if values.ndim != 1:
        raise LabError(f"per-block values have shape {values.shape}; one number a block, shape (n,), is needed.")
    if values.size < 2:
        raise LabError(f"an interval needs at least 2 blocks, and there are {values.size}.")
    bad = np.flatnonzero(~np.isfinite(values))
    if bad.size:
        raise LabError(
            f"per-block values must be finite: {values[bad[0]]} at position {bad[0]} "
            f"({bad.size} of {values.size} are not finite)."
        )
    result = stats.bootstrap(
        (values,),
        np.mean,
        n_resamples=REPLICATES,
        confidence_level=LEVEL,
        method="percentile",
        vectorized=True,
        rng=np.random.default_rng(SEED),
    )
    # The percentiles are taken here: SciPy passes (1 − level)/2 through floating point, and its quantile
    # routine changed between versions, both of which move the last bit of the interval.
    tail = 50 * (1 - LEVEL)
    low, high = np.percentile(result.bootstrap_distribution, [round(tail, 9), round(100 - tail, 9)])
    values.flags.writeable = False
    return Estimate(float(values.mean()), float(low), float(high), values.size, values)


def contrast(frame: pd.DataFrame, plus: str, minus: str) -> Estimate:
    """Paired difference NLL(plus) − NLL(minus), in nats, over the blocks of one model and context.

    Args:
        frame: tidy losses (`Store.frame`) of one model, corpus, context, BOS rule, dtype and backend.
        plus, minus: condition texts, as in the frame's `condition` column.

    Raises:
        LabError: the frame mixes models or the like, a condition is absent, an arm lacks blocks that the
            other has, a block is there twice, or a loss is not finite.
    """
    nll = _paired(frame, [plus, minus])
    return bootstrap(nll[plus] - nll[minus])


def combination(frame: pd.DataFrame, weights: Mapping[str, float]) -> Estimate:
    """Paired linear contrast Σ weight·NLL(condition), for weights that sum to zero.

    For example I_R = D_R(16) − D_R(32) is {K16R1: 1, K16R4: −1, K32R1: −1, K32R4: 1}.

    Args:
        frame: tidy losses, as for `contrast`.
        weights: condition text → weight.

    Raises:
        LabError: weights that are empty, all zero, not finite or do not sum to zero; else as `contrast`.
    """
    values = np.array(list(weights.values()), dtype=np.float64)
    if not np.isfinite(values).all() or not values.any():
        raise LabError(f"weights must be finite and not all zero, and they are {dict(weights)}.")
    total = math.fsum(values)
    # Weights such as 1/3 sum to zero only up to rounding.
    if abs(total) > 1e-12 * np.abs(values).sum():
        raise LabError(f"weights of a contrast must sum to 0, and {dict(weights)} sum to {total:g}.")
    nll = _paired(frame, list(weights))
    return bootstrap(sum(weight * nll[condition] for condition, weight in weights.items()))


def delta_nll(frame: pd.DataFrame, condition: str, baseline: str = "softmax()") -> Estimate:
    """ΔNLL, the paired loss change of a condition against its baseline, in nats. Raises as `contrast`."""
    return contrast(frame, condition, baseline)


def mean_over(frame: pd.DataFrame, pairs: Sequence[tuple[str, str]]) -> Estimate:
    """Average of several paired differences, taken inside each block before blocks are resampled.

    The aggregate of D_W: the pairs are (uniform, softmax-weighted) at each layer. Averaging inside the
    block keeps layers of one block together; they are not independent.

    Args:
        frame: tidy losses, as for `contrast`.
        pairs: (plus, minus) condition texts, at least one pair.

    Raises:
        LabError: no pairs; else as `contrast`, with every condition on the same blocks.
    """
    if not pairs:
        raise LabError("the mean over pairs of conditions needs at least one pair, and there are none.")
    nll = _paired(frame, [condition for pair in pairs for condition in pair])
    return bootstrap(np.mean([nll[plus] - nll[minus] for plus, minus in pairs], axis=0))


def summary(frame: pd.DataFrame, conditions: Iterable[str], baseline: str = "softmax()") -> pd.DataFrame:
    """One row per condition: its mean loss and its paired change against the baseline.

    Args:
        frame: tidy losses, as for `contrast`.
        conditions: condition texts, in the order of the rows.
        baseline: the condition that changes are taken against.

    Returns:
        Columns condition, nll, dnll, low, high (nats), ppl_change, ppl_low, ppl_high (percent),
        resolved, n_blocks.

    Raises:
        LabError: as `contrast`.
    """
    rows = []
    for condition in conditions:
        nll = _paired(frame, [condition, baseline])[condition]
        change = delta_nll(frame, condition, baseline)
        mean, low, high = change.ppl_change
        rows.append(
            {
                "condition": condition,
                "nll": float(nll.mean()),
                "dnll": change.mean,
                "low": change.low,
                "high": change.high,
                "ppl_change": mean,
                "ppl_low": low,
                "ppl_high": high,
                "resolved": change.resolved,
                "n_blocks": change.n_blocks,
            }
        )
    return pd.DataFrame(rows)


def _paired(frame: pd.DataFrame, conditions: Sequence[str]) -> dict[str, np.ndarray]:
    """Loss per block (n,) of each condition, on the same blocks in the same order; refuses anything else."""
    missing = [c for c in (*FIXED, "condition", "block", "nll") if c not in frame.columns]
    if missing:
        raise LabError(f"the loss frame lacks the columns {', '.join(missing)}.")
    for column in FIXED:
        values = frame[column].unique()
        if len(values) > 1:
            shown = ", ".join(sorted(map(str, values)))
            raise LabError(f"losses of different {column} cannot be paired: {shown}; filter the frame to one.")
    present = set(frame["condition"])
    wanted = list(dict.fromkeys(conditions))
    for condition in wanted:
        if condition not in present:
            known = ", ".join(sorted(present)[:8]) + (", …" if len(present) > 8 else "")
            raise LabError(f"no losses for the condition {condition!r}; the frame has {known or 'none'}.")
    rows = frame[frame["condition"].isin(wanted)]
    twice = rows[rows.duplicated(["condition", "block"])]
    if len(twice):
        first = twice.iloc[0]
        raise LabError(f"block {first['block']} of {first['condition']} is in the frame more than once.")
    table = rows.pivot(index="block", columns="condition", values="nll")
    if table.isna().to_numpy().any():
        # An absent row and a loss of NaN look alike in the table; only the first is a missing block.
        everything = set(table.index)
        for condition in wanted:
            lacking = sorted(everything - set(rows.loc[rows["condition"] == condition, "block"]))
            if lacking:
                raise LabError(f"{condition} lacks {_blocks(lacking)}, which another condition has.")
    return {condition: table[condition].to_numpy(np.float64) for condition in wanted}


def _blocks(numbers: Sequence[int]) -> str:
    """Block numbers for a message, the first few by name."""
    named = ", ".join(str(n) for n in numbers[:_NAMED_BLOCKS])
    more = f" and {len(numbers) - _NAMED_BLOCKS} more" if len(numbers) > _NAMED_BLOCKS else ""
    return f"block{'s' if len(numbers) > 1 else ''} {named}{more}"


def _three_digits(x: float) -> str:
    """Three significant digits without an exponent, trailing zeros kept, as the paper prints."""
    if x == 0 or not math.isfinite(x) or abs(x) >= 999.5:
        return f"{x:.0f}"
    return f"{Decimal(f'{x:.2e}'):f}"
