"""Losses under different kernel semantics, compared block by block: Table B2 and what it leaves out (paper B.2).

Each semantics is a backend with a softmax of its own. What an operator costs there is its ΔNLL against that softmax,
on the same blocks; what the semantics change about it is the difference of two such ΔNLL, again block by block, and
bootstrapped as that one quantity. The baselines stay inside: two averages are never subtracted.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import NamedTuple

import pandas as pd

from softmaxlab import conditions, statistics
from softmaxlab.conditions import BASELINE, BF16_PATH, FP8_PATH, threshold
from softmaxlab.errors import LabError
from softmaxlab.evaluate import find_results
from softmaxlab.floor import REFERENCE
from softmaxlab.semantics import OPERANDS
from softmaxlab.statistics import Estimate


class Arm(NamedTuple):
    """One side of a contrast: a condition and the backend that computes it."""

    condition: str
    backend: str = REFERENCE

    def __str__(self) -> str:
        return self.condition if self.backend == REFERENCE else f"{self.condition} in {self.backend}"

    @property
    def kind(self) -> str:
        """`measured` on whole rows, `simulated` in a kernel's semantics."""
        return "measured" if self.backend == REFERENCE else "simulated"

    @property
    def baseline(self) -> Arm:
        """Softmax on the same backend."""
        return Arm(BASELINE, self.backend)


def delta(losses: pd.DataFrame, arm: Arm) -> Estimate:
    """ΔNLL of an arm against the softmax of its own backend, nats.

    Args:
        losses: tidy losses (`evaluate.losses`) of one model, corpus, context, BOS rule and dtype; any backends.
        arm: which.

    Raises:
        LabError: the frame mixes models or the like, an arm is absent, its blocks are not those of the others, a
            block is there twice, or a loss is not finite.
    """
    return _combination(losses, {arm: 1, arm.baseline: -1})


def contrast(losses: pd.DataFrame, plus: Arm, minus: Arm) -> Estimate:
    """ΔNLL(plus) − ΔNLL(minus), each against the softmax of its own backend, paired by block, nats.

    Args and raises as `delta`; all four losses are needed on the same blocks.
    """
    weights = Counter({plus: 1})
    weights.update({minus.baseline: 1})
    weights.subtract({plus.baseline: 1})
    weights.subtract({minus: 1})
    return _combination(losses, {arm: n for arm, n in weights.items() if n} or {plus: 0})


def shift(losses: pd.DataFrame, plus: Arm, minus: Arm) -> Estimate:
    """NLL(plus) − NLL(minus) without any baseline, paired by block, nats. Args and raises as `delta`."""
    return _combination(losses, {plus: 1, minus: -1} if plus != minus else {plus: 0})


def _combination(losses: pd.DataFrame, weights: dict[Arm, int]) -> Estimate:
    # An arm becomes a condition of one frame, so that pairing and its refusals are those of any other contrast.
    if "backend" not in losses or "condition" not in losses:
        raise LabError("a loss frame needs the columns condition and backend to compare semantics.")
    parts = []
    for arm in weights:
        rows = losses[(losses["backend"] == arm.backend) & (losses["condition"] == arm.condition)]
        if rows.empty:
            known = ", ".join(sorted(losses.loc[losses["backend"] == arm.backend, "condition"].unique())) or "none"
            raise LabError(f"no losses of {arm}; of the backend {arm.backend} the frame has {known}.")
        parts.append(rows.assign(condition=str(arm), backend="several"))
    frame = pd.concat(parts, ignore_index=True)
    return statistics.combination(frame, {str(arm): float(n) for arm, n in weights.items()})


class Row(NamedTuple):
    """A row of Table B2: our arm, and the paper's name of it ("" where the paper has none)."""

    label: str
    arm: Arm
    published: str = ""


class Contrast(NamedTuple):
    """A paired difference, plus minus minus, and the paper's name of it ("" where the paper has none)."""

    label: str
    plus: Arm
    minus: Arm
    published: str = ""


#: The paper's row of the kernel itself, for which a simulator has no arm.
KERNEL = "kernel_A1_minus_A0"

_H15, _POT, _ILPOT = "h15()", "pot(m=2)", "ilpot_h_a()"
_TAU_8, _TAU_0 = Arm(_H15, threshold(8)), Arm(_H15, threshold(0))
_BF16, _FP8, _OFFLINE = Arm(_H15, BF16_PATH), Arm(_H15, FP8_PATH), Arm(_H15)

#: The paper's simulator walks and rescales but rounds nothing, so its rows stand beside ours without rounding of P.
TABLE_B2 = (
    Row("H15, τ = 8", _TAU_8, "h15_bf16_semantic"),
    Row("H15, τ = 8, P in BF16", _BF16),
    Row("H15, τ = 0", _TAU_0, "h15_fp8_semantic"),
    Row("H15, τ = 0, P in E4M3", _FP8),
    Row("H15, whole rows", _OFFLINE, "h15_offline_wholerow"),
    Row("{1, 1.5}·2ᵏ, absolute anchor", Arm("ilpot_h15()"), "h15_absolute_lattice"),
    Row("PoT, m = 2, whole rows", Arm(_POT), "pot_m2"),
    Row("ILPoT-H-A, absolute, exact maximum", Arm(_ILPOT), "ilpot_h_a"),
)

CONTRASTS = (
    Contrast("H15, τ = 0 − PoT, m = 2", _TAU_0, Arm(_POT), "h15_fp8_semantic-pot_m2"),
    Contrast("H15, τ = 0 − ILPoT-H-A", _TAU_0, Arm(_ILPOT), "h15_fp8_semantic-ilpot_h_a"),
    Contrast("H15, τ = 0 − whole rows", _TAU_0, _OFFLINE, "h15_fp8_semantic-h15_offline_wholerow"),
    Contrast("H15, τ = 8 − τ = 0", _TAU_8, _TAU_0, "h15_bf16_semantic-h15_fp8_semantic"),
    Contrast("H15, τ = 8 − whole rows", _TAU_8, _OFFLINE),
    Contrast("H15, P in E4M3 (τ = 0) − PoT, m = 2", _FP8, Arm(_POT)),
    Contrast("H15, P in E4M3 (τ = 0) − ILPoT-H-A", _FP8, Arm(_ILPOT)),
    Contrast("H15, P in E4M3 (τ = 0) − whole rows", _FP8, _OFFLINE),
    Contrast("H15, P in BF16 (τ = 8) − P in E4M3 (τ = 0)", _BF16, _FP8),
)

#: Semantics that differ from whole rows by a conversion of Q, K and V, as backends.
CONVERTED = {qkv: f"online(tile=128,tau=0,qkv={qkv})" for qkv in OPERANDS if qkv != "none"}
WARP_VOTE = "online(tile=128,tau=8,decision=warp)"

#: Semantics whose lagging rows and saturated values are counted.
COUNTED = (*map(threshold, conditions.TAUS), WARP_VOTE, BF16_PATH, FP8_PATH, *CONVERTED.values())


def simulator_cost(results: str = "results") -> dict | None:
    """What the simulator's evaluations took, measured once and kept with the results; None where there is no file.

    Returns:
        model, context, blocks, dtype, device and versions, and evaluations: a list of operator, backend,
        softmax_evaluations (time over that of exact softmax on whole rows) and ms_per_block.

    Raises:
        LabError: a file that cannot be read as that.
    """
    path = find_results(results) / "bench" / "simulator_cost.json"
    if not path.is_file():
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        rows = [(e["operator"], e["backend"], float(e["softmax_evaluations"])) for e in record["evaluations"]]
        complete = bool(rows) and {"model", "context", "device"} <= record.keys()
    except (OSError, ValueError, KeyError, TypeError):
        complete = False
    if not complete:
        raise LabError(f"{path} does not hold the timings of the simulator: measure them again or remove the file.")
    return record
