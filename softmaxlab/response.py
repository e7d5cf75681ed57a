"""The distortion-response map: how the loss grows with the divergence of the attention rows (paper §4.3, D.3)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import stats

from softmaxlab.errors import LabError


@dataclass(frozen=True)
class Fit:
    """log ΔNLL = intercept + slope · log divergence, ordinary least squares.

    Attributes:
        slope, intercept: of the natural logarithms.
        r2: squared correlation of the logarithms.
        n: interventions in the fit.
        excluded: interventions left out because ΔNLL or divergence is not positive.
    """

    slope: float
    intercept: float
    r2: float
    n: int
    excluded: tuple[str, ...]

    def __call__(self, divergence: np.ndarray) -> np.ndarray:
        """ΔNLL that the fit predicts, nats."""
        return np.exp(self.intercept) * np.asarray(divergence) ** self.slope


def fit(points: pd.DataFrame, *, x: str = "jsd", y: str = "dnll") -> Fit:
    """Fit the response over interventions.

    Args:
        points: one row an intervention, with columns condition, `x` and `y`.

    Raises:
        LabError: fewer than three interventions have both values positive.
    """
    good = (points[x] > 0) & (points[y] > 0)
    excluded = tuple(points.condition[~good])
    if good.sum() < 3:
        raise LabError(f"{good.sum()} of {len(points)} interventions have positive {x} and {y}, but a fit needs 3")
    line = stats.linregress(np.log(points[x][good]), np.log(points[y][good]))
    return Fit(line.slope, line.intercept, line.rvalue**2, int(good.sum()), excluded)
