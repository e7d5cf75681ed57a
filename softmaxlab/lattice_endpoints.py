"""The contrasts and audits of anchor, resolution and the family S(Q_k); `statistics` makes estimates of them.

Contrasts are weights of conditions, so that the interval of each is that of one paired quantity. What the paper
calls each of them is here too, as the code of its tables. Audits are made from the sums of a `trajectory`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from softmaxlab import conditions, floor, operators
from softmaxlab.errors import LabError
from softmaxlab.operators import SQ, FA4Poly, S
from softmaxlab.statistics import Estimate
from softmaxlab.trajectory import Trajectory

ANCHORS = ("absolute", "rowmax")
SPACINGS = ("octave", "half octave")


@dataclass(frozen=True)
class Lattice:
    """One of the four lattices of Table B1: its condition, anchor, spacing, and the paper's code for it."""

    condition: str
    anchor: str
    spacing: str
    code: str


LATTICES = (
    Lattice("log2p()", "absolute", "octave", "log2p_8bit"),
    Lattice("pot(m=1)", "rowmax", "octave", "pot_m1"),
    Lattice("log_sqrt2p()", "absolute", "half octave", "logsqrt2p_8bit"),
    Lattice("pot(m=2)", "rowmax", "half octave", "pot_m2"),
)

#: Numerator and denominator of the ratios of mean losses in the notes of Table B1, and the paper's code.
RATIOS = (
    ("log2p()", "pot(m=1)", "log2p_8bit/pot_m1"),
    ("ilpot()", "log2p()", "ilpot_absolute/log2p_8bit"),
    ("log_sqrt2p()", "pot(m=2)", "logsqrt2p_8bit/pot_m2"),
    ("log2p()", "pot(m=2)", "log2p_8bit/pot_m2"),
)


def anchor_contrasts() -> dict[str, tuple[str, str, str]]:
    """The four paired differences of Table B1: label → (condition before, after, the paper's code).

    Before minus after is what the change saves: positive is an improvement.
    """
    cells = {(one.anchor, one.spacing): one for one in LATTICES}
    pairs = {f"anchor, {s} spacing": [(a, s) for a in ANCHORS] for s in SPACINGS}
    pairs |= {f"spacing, {a} anchor": [(a, s) for s in SPACINGS] for a in ANCHORS}
    found = {}
    for label, (before, after) in pairs.items():
        x, y = cells[before], cells[after]
        found[label] = (x.condition, y.condition, f"{x.code}-{y.code}")
    return found


def anchor_by_spacing() -> dict[str, float]:
    """How much more the anchor saves at octave than at half-octave spacing: condition → weight.

    Zero where the two effects add up. The paper prints no interval for it (§5.1 says that they do not).
    """
    octave, half = ([x.condition for x in LATTICES if x.spacing == s] for s in SPACINGS)
    return dict(zip([*octave, *half], (1.0, -1.0, -1.0, 1.0), strict=True))


def members() -> dict[int, str]:
    """The measured members of the family: k → condition, Rowmax-H15 for k = 1."""
    return dict(sorted({1: "h15()", **{k: str(SQ(k=k)) for k in conditions.FAMILY}}.items()))


#: The rows of the exponential-map ablation (paper B.2): label → (condition, the paper's code).
ABLATION = {
    "Rowmax-H15": ("h15()", "h15"),
    "PoT, m = 2": ("pot(m=2)", "pot_m2"),
    "S(x)": (str(S()), "schraudolph_unshifted"),
    "S(Q₂(x))": (str(SQ(k=2)), "S_Q2^-2"),
    "S(Q₃(x))": (str(SQ(k=3)), "S_Q2^-3"),
}


def first_within(estimates: Mapping[int, Estimate], floors: Mapping[int, float]) -> int | None:
    """The least k from which on every difference is below its floor; None if the last is not.

    Args:
        estimates: k → S(Q_k) − S, nats.
        floors: k → floor of that contrast, nats.
    """
    least = None
    for k in sorted(estimates, reverse=True):
        if not floor.below(estimates[k].mean, floors[k]):
            break
        least = k
    return least


def leakage_spread(path: Trajectory) -> pd.Series:
    """Root mean square over rows of the leakage that row phase is correlated with, by operator.

    The mean leakage can be small because rows that lose mass and rows that gain it cancel; this does not cancel.
    Rows with one key are left out.
    """
    sums = path.sums.groupby("operator", sort=False)["leak_squared"].sum()
    return np.sqrt(sums / path.shared["phase_rows"].sum())


def deep_heads(path: Trajectory) -> dict[tuple[int, int], int]:
    """Where keys lie below 2^−127 of their row's maximum: (layer, head) → how many.

    FlashAttention-4's polynomials give exactly 0 there, so a measurement that holds one of them counts the keys that
    the clamp at −126 lifts. Keys between −126 and −127 are not counted; they are lifted by one octave at most.

    Raises:
        LabError: no such polynomial was measured.
    """
    text = str(FA4Poly(degree=1))
    rows = path.sums[path.sums["operator"] == text]
    if rows.empty:
        raise LabError(f"keys below the clamp are counted with {text}, and the measurement does not hold it")
    rows = rows.merge(path.shared[["layer", "head", "entries"]], on=["layer", "head"])
    missing = (rows["entries"] - rows["nonzero"]).astype(int)
    return {(int(i), int(h)): n for i, h, n in zip(rows["layer"], rows["head"], missing, strict=True) if n}


def audit(path: Trajectory, texts: Iterable[str], deep: Iterable[tuple[int, int]] = ()) -> pd.DataFrame:
    """The largest log error of a key on either side, against the operator's envelope.

    Args:
        path: a measurement that holds the operators.
        texts: text forms of operators that have an envelope.
        deep: heads with keys below the clamp (`deep_heads`). A clamp makes their weights too large, which no
            envelope allows for, so the upper side of a clamped operator is looked at in the other heads.

    Returns:
        One row an operator: operator, low, high (the envelope), least, most (of ε), excess (the larger of the two
        excesses; negative is inside), heads (how many the upper side was looked at in); nats.

    Raises:
        LabError: an operator without an envelope, or none measured under that name.
    """
    deep, rows = set(deep), []
    for text in texts:
        operator = operators.parse(text)
        if operator.envelope is None:
            raise LabError(f"{text} has no envelope to audit: its error depends on the row")
        found = path.sums[path.sums["operator"] == text]
        if found.empty:
            raise LabError(f"{text} is not in this measurement")
        low, high = operator.envelope
        clamped = getattr(operator, "clamp", "none") != "none"
        shallow = [not clamped or at not in deep for at in zip(found["layer"], found["head"], strict=True)]
        above = found["error_above"][shallow].max()
        least = -found["error_below"].max()
        rows.append((text, low, high, least, above, max(above - high, low - least), sum(shallow)))
    return pd.DataFrame(rows, columns=["operator", "low", "high", "least", "most", "excess", "heads"])
