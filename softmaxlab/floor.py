"""The reproducibility floor: how far the same condition differs between implementations of the same definition.

A lattice or a grid turns a rounding difference in a score into a step of a weight, and the layers above
amplify it. So two correct implementations disagree, block by block and a little in the mean. The bootstrap over
blocks holds the spread of such flips; whether implementations differ in the mean it cannot say. A mean loss smaller
than the largest such difference that was seen may be one of rounding. The paper has no such control.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import pandas as pd

from softmaxlab import conditions, operators, statistics
from softmaxlab.errors import LabError

REFERENCE = "reference"
VARIANTS = {
    "reference-search": "a grid's interval by searching the edges",
    "reference-chunked": "96 queries at a time",
    "reference-float64": "scores, weights and products in float64",
}


#: Temperatures whose differences are like that of the measured one, 0.9; far from 1 rounding grows with a row's range.
NEAR_ONE = (0.75, 1.5)


def family(condition: str) -> str:
    """`smooth` for operators without steps, `octave`, `half octave` or `fine lattice` by spacing, `grid`.

    No condition of `conditions.reproducibility` measures the others: `far temperature`, `other lattice`, `rescue`,
    `support`.
    """
    operator = conditions.Condition.parse(condition).operator
    match operator:
        case operators.Temperature(alpha=alpha):
            return "smooth" if NEAR_ONE[0] <= alpha <= NEAR_ONE[1] else "far temperature"
        case operators.Grid(recon="lerp") | operators.Softmax():
            return "smooth"
        case operators.S() | operators.FA4Poly():
            return "smooth"
        case operators.Grid():
            return "grid"
        case operators.RowmaxPoT() | operators.PoT(m=1.0) | operators.SQ(k=0) | operators.Log2P() | operators.ILPoT():
            return "octave"
        case operators.PoT(m=2.0) | operators.H15() | operators.SQ(k=1) | operators.LogSqrt2P():
            return "half octave"
        case operators.ILPoTHA() | operators.ILPoTH15():
            return "half octave"
        case operators.SQ(k=k) if k >= 3:
            return "fine lattice"
        case operators.PoT(m=m) if m >= 8:
            return "fine lattice"
        case operators.PoT() | operators.SQ():
            return "other lattice"
        case operators.Rescue():  # the rescued set has an edge, and that is a step
            return "rescue"
        case _:
            return "support"


def differences(losses: Callable[..., pd.DataFrame], texts: Iterable[str] | None = None) -> pd.DataFrame:
    """How each variant's ΔNLL differs from the reference's on the same blocks.

    Args:
        losses: `evaluate.losses` with model, corpus and so on bound; called with `backend=`.
        texts: conditions; default `conditions.reproducibility()`.

    Returns:
        One row a condition and variant: condition, family, variant, mean, sd (over blocks, n − 1),
        max (largest absolute difference of a block), n_blocks, resolved (whether the mean is,
        `statistics.Estimate`); nats.
    """
    texts = conditions.canonical([conditions.BASELINE, *(texts or conditions.reproducibility())])
    reference = _delta(losses(texts, backend=REFERENCE))
    rows = []
    for variant in VARIANTS:
        # A search over edges differs from the closed form for grids alone.
        wanted = [t for t in texts if variant != "reference-search" or family(t) == "grid"]
        other = _delta(losses(conditions.canonical([conditions.BASELINE, *wanted]), backend=variant))
        rows.append(_apart(reference, other, wanted).assign(variant=variant))
    return pd.concat(rows, ignore_index=True)


def between(reference: pd.DataFrame, other: pd.DataFrame) -> pd.DataFrame:
    """How the ΔNLL of one run differs from that of another on the same blocks, condition by condition.

    Args:
        reference, other: tidy losses, each with softmax's, one row a condition and block.

    Returns:
        One row a condition of both, as of `differences`; and same, whether all losses are equal bit for bit.
    """
    texts = [text for text in reference["condition"].unique() if text in set(other["condition"])]
    losses = [frame.pivot(index="condition", columns="block", values="nll").loc[texts] for frame in (reference, other)]
    found = _apart(_delta(reference), _delta(other), texts)
    return found.assign(same=found["condition"].map((losses[0] == losses[1]).all(axis=1)).astype(bool))


def _apart(reference: pd.DataFrame, other: pd.DataFrame, texts: Iterable[str]) -> pd.DataFrame:
    rows = []
    for text in texts:
        if text == conditions.BASELINE:
            continue
        d = (other[text] - reference[text]).dropna()
        if len(d) < 2:
            raise LabError(f"{text} has {len(d)} common blocks, but a spread needs at least 2")
        row = {"condition": text, "family": family(text), "mean": d.mean()}
        row |= {"sd": d.std(ddof=1), "max": d.abs().max(), "n_blocks": len(d)}
        rows.append(row | {"resolved": statistics.bootstrap(d.to_numpy()).resolved})
    return pd.DataFrame(rows, columns=["condition", "family", "mean", "sd", "max", "n_blocks", "resolved"])


def _delta(frame: pd.DataFrame) -> pd.DataFrame:
    wide = frame.pivot(index="block", columns="condition", values="nll")
    return wide.sub(wide[conditions.BASELINE], axis=0)


def floors(differences: pd.DataFrame) -> pd.Series:
    """The floor of each family: the largest absolute mean difference seen, in nats, indexed by family.

    A family that was not measured takes the largest floor of all.
    """
    found = differences.assign(size=differences["mean"].abs()).groupby("family")["size"].max()
    return found.reindex([*found.index, "any"], fill_value=float(found.max()))


def of(condition: str, floors: pd.Series) -> float:
    """The floor that applies to a condition, in nats."""
    return float(floors.get(family(condition), floors["any"]))


def below(value: float, floor: float) -> bool:
    """Whether an effect cannot be told from the disagreement of equivalent implementations."""
    return bool(np.abs(value) < floor)
