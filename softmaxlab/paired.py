"""Zero-shot scores and how a condition changes them, paired document by document.

The paper compares scores descriptively; harness standard errors describe one score and not a difference. Every
document was answered under both conditions, so the difference can be tested within documents: McNemar's exact test
on the documents that only one of the two gets right, and the paired bootstrap of `statistics`, with the document as
the unit. Tasks are not pooled, and nothing is adjusted for their number.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import stats

from softmaxlab.conditions import BASELINE
from softmaxlab.errors import LabError
from softmaxlab.statistics import Estimate, bootstrap
from softmaxlab.zero_shot import METRICS, NAMES


@dataclass(frozen=True)
class Change:
    """A condition against a baseline on one task.

    Attributes:
        score, baseline: share of documents answered right, in percent.
        change: score − baseline in percentage points, with its paired bootstrap interval over documents.
        gained, lost: documents that only the condition, only the baseline answers right.
        p: two-sided p-value of McNemar's exact test: given that one of the two is right alone, each is so with
            probability 1/2. 1 where there is no such document.
        flipped: documents whose prediction differs, right or wrong.
    """

    score: float
    baseline: float
    change: Estimate
    gained: int
    lost: int
    p: float
    flipped: int

    @property
    def n(self) -> int:
        """How many documents."""
        return self.change.n_blocks


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
        score=100 * right.mean(),
        baseline=100 * before.mean(),
        change=bootstrap(100 * (right - before)),
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


def table(frame: pd.DataFrame, baseline: str = BASELINE) -> pd.DataFrame:
    """Every task and condition of a frame against the baseline, one row each.

    Returns:
        Columns task, condition, documents, score, baseline (percent), change, low, high (percentage points), gained,
        lost, p, flipped; the baseline itself is left out, and so are tasks that lack it.
    """
    rows = []
    there = frame[["task", "condition"]].drop_duplicates().itertuples(index=False)
    against = set(frame.loc[frame.condition == baseline, "task"])
    for task, condition in there:
        if condition == baseline or task not in against:
            continue
        found = change(frame, task, condition, baseline)
        estimate = found.change
        rows.append(
            {
                "task": task,
                "condition": condition,
                "documents": found.n,
                "score": found.score,
                "baseline": found.baseline,
                "change": estimate.mean,
                "low": estimate.low,
                "high": estimate.high,
                "gained": found.gained,
                "lost": found.lost,
                "p": found.p,
                "flipped": found.flipped,
            }
        )
    return pd.DataFrame(rows)


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
