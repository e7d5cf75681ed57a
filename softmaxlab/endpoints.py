"""The contrasts of part 2 as conditions and weights; `statistics` makes estimates of them.

Each is a linear combination of losses on the same blocks, so that its interval is that of one paired quantity and
never a difference of two averages.
"""

from __future__ import annotations

import pandas as pd

from softmaxlab import conditions, operators
from softmaxlab.errors import LabError
from softmaxlab.trajectory import WINDOW_TOKENS, Trajectory

#: Directions of `matching`, in the order of D_T: flattening minus sharpening.
_DIRECTIONS = ("flatten", "sharpen")
#: The paper's own limit on the relative error of a match (A.7).
MATCH_TOLERANCE = 0.01

Pair = tuple[str, str]


def interaction(coarse: int = 16, fine: int = 32) -> dict[str, float]:
    """I_R = D_R(coarse) − D_R(fine): condition → weight (paper §3.2, eq. 3)."""
    (coarse_1, coarse_4), (fine_1, fine_4) = map(conditions.allocation_contrast, (coarse, fine))
    return {coarse_1: 1.0, coarse_4: -1.0, fine_1: -1.0, fine_4: 1.0}


def matched_pairs(solutions: pd.DataFrame) -> dict[tuple[str, float], Pair]:
    """The two sides of each D_T: (metric, level) → (flattening, sharpening) condition (paper §3.2, eq. 4).

    Args:
        solutions: from `matching.solve`.

    Returns:
        Only targets that both directions hit to within the paper's 1 %; the others have no contrast.
    """
    good = solutions[(solutions["condition"] != "") & (solutions["error"] <= MATCH_TOLERANCE)]
    found = {}
    for key, rows in good.groupby(["metric", "level"], sort=False):
        texts = dict(zip(rows["direction"], rows["condition"], strict=True))
        if set(texts) == set(_DIRECTIONS):
            found[key] = tuple(texts[d] for d in _DIRECTIONS)
    return found


def restored(pair: Pair, q: float = 0.9) -> Pair:
    """The two sides of D_rescue: the same distortions with the softmax mass of S_q restored (paper A.8)."""
    flat, sharp = (conditions.rescued(text, q) for text in pair)
    return flat, sharp


def gap(pair: Pair, q: float = 0.9) -> dict[str, float]:
    """G_gap = D_T − D_rescue: condition → weight (paper A.8, Table D3)."""
    flat, sharp = pair
    restored_flat, restored_sharp = restored(pair, q)
    return {flat: 1.0, sharp: -1.0, restored_flat: -1.0, restored_sharp: 1.0}


def kind(text: str) -> str:
    """Which of the four kinds of the response map an intervention is (paper §4.3).

    Raises:
        LabError: a condition of another kind.
    """
    match conditions.Condition.parse(text).operator:
        case operators.Grid():
            return "grid"
        case operators.PoT():
            return "octave lattice"
        case operators.Temperature(alpha=alpha) if alpha != 1:
            return "flattening" if alpha < 1 else "sharpening"
    raise LabError(f"{text} is no grid, power-of-two lattice or temperature, the kinds of the response map")


def windows(context: int, blocks: int) -> int:
    """How many blocks the divergences of a run of `blocks` blocks are measured on; 0 leaves it to the protocol.

    The paper takes max(1, ⌊32768/L⌋) (C.1). A run that was made small has no use for more windows than blocks.
    """
    return min(blocks, max(1, WINDOW_TOKENS // context)) if blocks else 0


def n_windows(path: Trajectory, context: int) -> int:
    """How many blocks of `context` tokens a measurement saw."""
    return int(path.shared["rows"].iloc[0]) // context
