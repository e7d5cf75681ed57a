"""Zero-shot scores and how a condition changes them, paired document by document.

The paper compares scores descriptively; harness standard errors describe one score and not a difference. Every
document was answered under both conditions, so the difference can be tested within documents: McNemar's exact test
on the documents that only one of the two gets right, and the paired bootstrap of `statistics`, with the document as
the unit. Tasks are not pooled, and nothing is adjusted for their number.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import pandas as pd
from scipy import stats

from softmaxlab.conditions import BASELINE
from softmaxlab.errors import LabError
from softmaxlab.statistics import Estimate, bootstrap
from softmaxlab.zero_shot_records import METRICS, NAMES


@dataclass(frozen=True)
class Change:
    """A condition against a baseline on one task.

    Attributes:
        score, baseline: share of documents answered right, in percent.
        differences: score − baseline of each document in percentage points, −100, 0 or 100.
        gained, lost: documents that only the condition, only the baseline answers right.
        p: two-sided p-value of McNemar's exact test: given that one of the two is right alone, each is so with
            probability 1/2. 1 where there is no such document.
        flipped: documents whose prediction differs, right or wrong.
    """

    score: float
    baseline: float
    differences: np.ndarray = field(repr=False)
    gained: int
    lost: int
    p: float
    flipped: int

    @property
    def n(self) -> int:
        """How many documents."""
        return len(self.differences)

    @property
    def points(self) -> float:
        """score − baseline, in percentage points."""
        return float(self.differences.mean())

    @cached_property
    def change(self) -> Estimate:
        """`points` with its paired bootstrap interval over documents."""
        return bootstrap(self.differences)


def change(frame: pd.DataFrame, task: str, condition: str, baseline: str = BASELINE) -> Change:
    """Compare two conditions on the documents of a task, in the task's metric of the paper (`METRICS`).

    Args:
        frame: tidy records of one setting (`zero_shot.evaluate` or `stored`).
        task: a task of the frame.
        condition, baseline: condition texts of the frame.

    Raises:
        LabError: a task or condition that the frame lacks; two settings in one frame; documents that differ.
    """
    ours, theirs = (_records(frame, task, text) for text in (condition, baseline))
    _same_documents(task, ours, theirs)
    metric = METRICS[task]
    right, before = ours[metric].to_numpy(np.float64), theirs[metric].to_numpy(np.float64)
    answer = "prediction_norm" if metric == "acc_norm" else "prediction"
    gained, lost = int(((right == 1) & (before == 0)).sum()), int(((right == 0) & (before == 1)).sum())
    p = float(stats.binomtest(gained, gained + lost, 0.5).pvalue) if gained + lost else 1.0
    return Change(
        score=float(100 * right.mean()),
        baseline=float(100 * before.mean()),
        differences=100 * (right - before),
        gained=gained,
        lost=lost,
        p=p,
        flipped=int((ours[answer].to_numpy() != theirs[answer].to_numpy()).sum()),
    )


def loglikelihood_change(
    frame: pd.DataFrame, condition: str, baseline: str = BASELINE, *, task: str = "lambada_openai"
) -> Estimate:
    """Mean loss of log-likelihood of the right answer, baseline − condition, in nats a document, paired.

    For LAMBADA this is the change of log-perplexity: `Estimate.ppl_change` is the column of the paper's Table C2.
    Raises as `change`.
    """
    ours, theirs = (_records(frame, task, text) for text in (condition, baseline))
    _same_documents(task, ours, theirs)
    return bootstrap(_of_gold(theirs) - _of_gold(ours))


def score(frame: pd.DataFrame, task: str, condition: str) -> float:
    """Share of documents answered right, in percent, in the task's metric of the paper."""
    return 100 * float(_records(frame, task, condition)[METRICS[task]].mean())


def perplexity(frame: pd.DataFrame, condition: str, *, task: str = "lambada_openai") -> float:
    """exp of minus the mean log-likelihood of the target, as the harness has it for LAMBADA."""
    return float(np.exp(-_of_gold(_records(frame, task, condition)).mean()))


def _records(frame: pd.DataFrame, task: str, condition: str) -> pd.DataFrame:
    for column in NAMES:
        if column not in ("task", "condition") and frame[column].nunique() > 1:
            shown = ", ".join(sorted(map(str, frame[column].unique())))
            raise LabError(f"records of different {column} cannot be paired: {shown}; take one of them")
    rows = frame[(frame.task == task) & (frame.condition == condition)]
    if rows.empty:
        raise LabError(f"there are no records of {task} under {condition}")
    if rows.document.duplicated().any():
        number = rows.document[rows.document.duplicated()].iloc[0]
        raise LabError(f"document {number} of {task} under {condition} is there more than once")
    return rows.sort_values("document")


def _same_documents(task: str, ours: pd.DataFrame, theirs: pd.DataFrame) -> None:
    same = len(ours) == len(theirs) and (ours.document.to_numpy() == theirs.document.to_numpy()).all()
    if not same or (ours.gold.to_numpy() != theirs.gold.to_numpy()).any():
        raise LabError(f"the two conditions did not answer the same documents of {task}: {len(ours)} and {len(theirs)}")


def _of_gold(rows: pd.DataFrame) -> np.ndarray:
    return np.array([lls[gold] for lls, gold in zip(rows.loglikelihoods, rows.gold, strict=True)], dtype=np.float64)
