"""Temperatures whose mean divergence from softmax hits a target: flattening below α = 1, sharpening above (paper A.7).

The targets are multiples of what octave rounding, pot(m=1), causes on the same windows. Along each direction JSD
and TV grow with |log α| up to the limits of the uniform row and of the one-hot row, so each target has one α or
none. One pass measures many α; every α informs every target, JSD and TV alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import pandas as pd
from scipy.interpolate import PchipInterpolator
from torch import Tensor

from softmaxlab import models
from softmaxlab.errors import LabError
from softmaxlab.evaluate import find_results
from softmaxlab.operators import PoT, Rescue, Temperature
from softmaxlab.recorder import Recorder
from softmaxlab.store import Store
from softmaxlab.trajectory import Setting, run

KIND = "matching"
REFERENCE = PoT(m=1.0)
METRICS = ("jsd", "tv")
DIRECTIONS = {"flatten": -1, "sharpen": 1}  # sign of log α
LEVELS = (1.0, 3.0, 10.0)

#: |log α| of the first pass. Divergence grows like its square (JSD) or itself (TV), so that equal ratios serve
#: all levels alike.
FIRST = tuple(0.02 * 2.0**i for i in range(8))
MAX_PASSES = 12
_REACH = 40.0  # largest |log α| tried: beyond, FP32 weights are those of the limit

#: Measures operators, by any name, in one pass: {name: {"jsd": …, "tv": …}}.
Measured = Callable[[dict], dict]

#: Part of every key. Raise it when the meaning of a stored solution changes.
PROTOCOL = 1


@dataclass(frozen=True)
class Target:
    """A divergence to hit.

    Attributes:
        metric: `jsd` (mean row-wise, nats) or `tv`.
        level: in units of the reference's own divergence, > 0.
        direction: `flatten` (α < 1) or `sharpen` (α > 1).
    """

    metric: str
    level: float
    direction: str

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            raise LabError(f"the matching metric is {self.metric!r}, but must be one of {', '.join(METRICS)}")
        if self.direction not in DIRECTIONS:
            raise LabError(f"the direction is {self.direction!r}, but must be one of {', '.join(DIRECTIONS)}")
        if not (self.level > 0 and math.isfinite(self.level)):
            raise LabError(f"the level of a divergence target is {self.level!r}, but must be a finite number above 0")

    def __str__(self) -> str:
        return f"{self.direction}ing to {self.level:g} times the {self.metric.upper()} of {REFERENCE}"


def standard_targets() -> list[Target]:
    """The twelve of the paper: J0, 3·J0, 10·J0 in both directions, by JSD and by TV (Tables D2, D3)."""
    return [Target(m, level, d) for m in METRICS for level in LEVELS for d in DIRECTIONS]


def solve(
    targets: Iterable[Target] | None = None,
    *,
    model: str = models.EMBEDDED,
    corpus: str = "wikitext103",
    context: int = 2048,
    windows: int = 0,
    dtype: str = "float32",
    device: str = "auto",
    device_map: str | dict[str, str | int] = "",
    results: str = "results",
    bos: str = "stream",
    tolerance: float = 1e-3,
    compiled: bool | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """Solve for α on the exact-softmax trajectory; solutions that are stored are read.

    Args:
        targets: what to hit; None means the paper's twelve. Open ones are solved together.
        model, corpus, context, windows, dtype, device, results, bos, compiled, progress: as `trajectory.measure`.
        device_map: as `models.load_model`, for a model that one device does not hold.
        tolerance: relative error wanted; the paper allows 1%.

    Returns:
        One row a target: metric, level, direction; reference and target (divergences); alpha, achieved, error
        (|achieved/target − 1|), passes (of the run that solved it), limit (the largest that can be reached, at
        α → 0 or ∞), status (`solved`, `out of reach` or `not converged`), condition (a text for
        `evaluate.losses`, empty if out of reach).

    Raises:
        LabError: bad input of any kind.
    """
    targets = list(dict.fromkeys(standard_targets() if targets is None else targets))
    if not targets:
        raise LabError("no divergence target was given: name at least one, or leave targets out")
    if not 0 < tolerance < 1:
        raise LabError(f"tolerance is {tolerance!r}, but must be in (0, 1), e.g. 0.001")
    setting = Setting(model, corpus, context, windows, dtype, bos)
    fixed = {**setting.key(), "reference": REFERENCE.json(), "tolerance": tolerance, "protocol": PROTOCOL}
    keys = {t: {**fixed, **asdict(t)} for t in targets}
    store = Store(find_results(results)) if results else None
    found = {t: store.get_table(KIND, k) for t, k in keys.items()} if store else dict.fromkeys(targets)
    missing = [t for t, table in found.items() if table is None]
    if missing:
        if store:
            store.check_writable()
        work = setting.load(device, device_map)
        on = work.tokens.device.type
        fast = on == "cuda" if compiled is None else compiled

        def measured(operators: dict) -> dict[str, dict[str, float]]:
            recorder = Recorder(operators, device=on, only_divergence=True, compiled=fast)
            run(work, recorder, progress=progress)
            return recorder.mean_divergence()

        solved = solve_with(measured, missing, tolerance)
        for i, t in enumerate(missing):
            found[t] = solved.iloc[[i]].reset_index(drop=True)
            if store:
                store.put_table(KIND, keys[t], found[t], work.provenance)
    return pd.concat([found[t] for t in targets], ignore_index=True)


def condition(solutions: pd.DataFrame, target: Target, rescue: float = 0.0) -> str:
    """The condition text of a solved target.

    Args:
        solutions: from `solve`.
        target: which.
        rescue: mass q in (0, 1) to rescue around the temperature (paper A.8); 0 for the temperature alone.

    Raises:
        LabError: a target that was not asked for, is out of reach, or has more than the paper's 1% error.
    """
    rows = solutions[(solutions[list(asdict(target))] == pd.Series(asdict(target))).all(axis=1)]
    if rows.empty:
        raise LabError(f"{target} is not among the solved targets")
    row = rows.iloc[0]
    if row.status == "out of reach":
        raise LabError(
            f"{target} is out of reach: the target is {row.target:.6g} and the largest value is {row.limit:.6g}"
        )
    if not row.error <= 0.01:
        raise LabError(f"{target} was matched to {100 * row.error:.2g}%, but at most 1% is allowed")
    operator = Temperature(float(row.alpha))
    return str(Rescue(operator, rescue) if rescue else operator)


def solve_with(measured: Measured, targets: Sequence[Target], tolerance: float) -> pd.DataFrame:
    """Solve targets with a function that measures operators, by name, in one pass.

    Args:
        measured: the measurement.
        targets: all are solved together.
        tolerance: relative error wanted.

    Returns:
        As `solve`.
    """
    logs = [sign * x for d, sign in DIRECTIONS.items() if any(t.direction == d for t in targets) for x in FIRST]
    limits = {"flatten": _uniform, "sharpen": _one_hot}
    first = measured({"reference": REFERENCE, **limits, **{x: Temperature(math.exp(x)) for x in logs}})
    reference, points = first["reference"], {x: first[x] for x in logs}
    if not all(reference[m] > 0 for m in METRICS):
        raise LabError(f"{REFERENCE} causes no divergence on these windows, so there is nothing to match")
    passes = 1
    while passes < MAX_PASSES:
        open_ = [t for t in targets if _status(t, points, first, tolerance) == "open"]
        new = {_propose(t, points, reference) for t in open_} - set(points)
        if not new:
            break
        points |= measured({x: Temperature(math.exp(x)) for x in sorted(new)})
        passes += 1
    rows = []
    for t in targets:
        status = _status(t, points, first, tolerance)
        target, limit = t.level * reference[t.metric], first[t.direction][t.metric]
        alpha = achieved = error = math.nan
        if status != "out of reach":
            x = _best(t, points, target)
            alpha, achieved = math.exp(x), points[x][t.metric]
            error = abs(achieved / target - 1)
        rows.append(
            asdict(t)
            | {"reference": reference[t.metric], "target": target, "alpha": alpha, "achieved": achieved}
            | {"error": error, "passes": passes, "limit": limit}
            | {"status": "not converged" if status == "open" else status}
            | {"condition": "" if math.isnan(alpha) else str(Temperature(alpha))}
        )
    return pd.DataFrame(rows)


def _uniform(scores: Tensor, valid: Tensor) -> Tensor:
    """The limit α → 0: every valid key alike."""
    return valid.expand_as(scores).float()


def _one_hot(scores: Tensor, valid: Tensor) -> Tensor:
    """The limit α → ∞: all mass on the largest score, shared by those that tie."""
    return ((scores == scores.amax(-1, keepdim=True)) & valid).float()


def _status(target: Target, points: dict, first: dict, tolerance: float) -> str:
    goal, limit = target.level * first["reference"][target.metric], first[target.direction][target.metric]
    if not goal < limit:
        return "out of reach"
    error = abs(points[_best(target, points, goal)][target.metric] / goal - 1)
    return "solved" if error <= tolerance else "open"


def _side(target: Target, points: dict) -> list[float]:
    """log α of the target's direction, from softmax outwards."""
    sign = DIRECTIONS[target.direction]
    return sorted((x for x in points if x * sign > 0), key=abs)


def _best(target: Target, points: dict, goal: float) -> float:
    return min(_side(target, points), key=lambda x: abs(points[x][target.metric] - goal))


def _propose(target: Target, points: dict, reference: dict) -> float:
    """The next log α to measure for a target: inside its bracket if there is one, else further out or in.

    log J against log|log α| is close to a straight line near softmax, so that monotone interpolation there
    needs few points.
    """
    sign, goal = DIRECTIONS[target.direction], target.level * reference[target.metric]
    side = _side(target, points)
    x = np.log(np.abs(side))
    values = np.array([points[p][target.metric] for p in side])
    above = np.flatnonzero(values >= goal)
    if not len(above):
        return sign * min(2 * abs(side[-1]), _REACH)
    if above[0] == 0:
        # Below the first point the line through the origin of its own slope is exact enough to bracket.
        slope = 2.0 if target.metric == "jsd" else 1.0
        return side[0] * (goal / values[0]) ** (1 / slope)
    # Near a limit rounding can order two points wrongly or make them equal. Those that are out of order as seen
    # from the bracket are left out of the interpolation.
    low, high = above[0] - 1, above[0]
    inner = [i for i in range(low) if values[i] < values[i + 1 : high].min()]
    outer = [i for i in range(high + 1, len(side)) if values[i] > values[high:i].max()]
    kept = [*inner, low, high, *outer]
    guess = float(PchipInterpolator(np.log(values[kept]), x[kept])(math.log(goal)))
    inside = x[low] < guess < x[high]
    return sign * math.exp(guess if inside else (x[low] + x[high]) / 2)
