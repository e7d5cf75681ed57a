"""How the Triton kernels compute each operator: which statistics of the row, which map, with which constants.

Constants are made in FP64 from the operator's own definition and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from softmaxlab.operators import (
    H15,
    SQ,
    FA4Poly,
    Grid,
    ILPoT,
    ILPoTH15,
    ILPoTHA,
    Log2P,
    LogSqrt2P,
    MeanThreshold,
    Operator,
    Packed,
    PoT,
    Rescue,
    RowmaxPoT,
    S,
    Softmax,
    Temperature,
    TopK,
)
from softmaxlab.operators.grid import searched
from softmaxlab.operators.polynomial import COEFFICIENTS
from softmaxlab.operators.schraudolph import CLAMPS

LOG2E = 1 / math.log(2)
#: Least exponent of a weight that is not 0: an exponent field of 0, one octave further, gives 0.
_ZERO = -127
#: Beyond these the logarithm of a grid's position, in FP32, does not tell its intervals apart.
_MAX_K, _MIN_LOG2_R = 4096, 1.0
_NEUTRAL = {"SHIFT": 0, "BASE": 0, "SCALED": False, "DROP": False, "DEGREE": 0, "UNIFORM": False, "EVEN": False,
            "RECON": "", "LINEAR": False, "RESCUE": False}  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """What a launch needs to know of an operator.

    Attributes:
        stats, map, anchor: of the kernel (see `triton_kernels`, `triton_maps`).
        scalars: c0…c5 of the map, FP32 numbers.
        flags: the map's other compile-time constants.
        exact_p: whether every weight is a BF16 number.
        normalised: whether the row is divided by its sum.
        n_intervals: of a grid.
        kept: of top-k, the kept fraction.
        rescued: mass of the set of a rescue, whose map is that of the rescued operator.
    """

    stats: str
    map: str
    scalars: tuple[float, ...]
    anchor: str = "max"
    flags: dict[str, Any] = field(default_factory=dict)
    exact_p: bool = False
    normalised: bool = True
    n_intervals: int = 0
    kept: float | None = None
    rescued: float | None = None

    @property
    def numbers(self) -> tuple[float, ...]:
        """All six of c0…c5."""
        return (*self.scalars, *[0.0] * 6)[:6]

    @property
    def constants(self) -> dict[str, Any]:
        """All compile-time constants of the maps."""
        return _NEUTRAL | self.flags

    @property
    def anchored_constants(self) -> dict[str, Any]:
        """Those of the maps that measure from the row maximum alone."""
        return {name: self.constants[name] for name in ("SHIFT", "BASE", "SCALED", "DROP", "DEGREE")}


def _two_terms(c: float) -> tuple[float, float]:
    """c rounded to FP32, and the rest rounded to FP32."""
    high = float(np.float32(c))
    return high, float(np.float32(c - high))


def _bits(k: int, low: float, *, stats: str = "max", anchor: str = "max", bias: int = 127, **changes: Any) -> Plan:
    """S(2^−k·n) from the bits of n = RNE(2^k·x), n ≥ `low`; k < 0 gives powers of 2^(2^−k)."""
    drop = changes.pop("drop", 0.0)
    flags = {"SHIFT": 23 - k, "BASE": bias << 23, **changes.pop("flags", {})}
    scalars = (_two_terms(2.0**k * LOG2E)[0], low, 2.0 ** (127 - bias), drop)
    return Plan(stats, "bits", scalars, anchor, flags, exact_p=k <= 7, **changes)


def _schraudolph(k: int, clamp: str) -> Plan:
    return _bits(k, max(CLAMPS[clamp], _ZERO) * 2**k)


def _pot(operator: PoT) -> Plan:
    log2_m = math.log2(operator.m)
    if log2_m.is_integer() and -6 <= log2_m <= 0:
        k = int(log2_m)
        return _bits(k, math.ceil(_ZERO * 2.0**k))  # one step below, the exponent's bits would run into the sign
    # The smallest weight that is left is 2^−150, which FP32 rounds to 0.
    c0 = _two_terms(operator.m * LOG2E)[0]
    return Plan("max", "exp2", (c0, -math.ceil(150 * operator.m), 1 / operator.m))


def _rowmax_pot(operator: RowmaxPoT) -> Plan:
    low = max(-operator.K_max, _ZERO)
    if operator.tail == "clamp":
        return _bits(0, low)
    return _bits(0, _ZERO, drop=low, flags={"DROP": True})


def _packed(operator: Packed) -> Plan:
    bias = operator.bias
    return _bits(operator.k, -bias * 2**operator.k, bias=bias, flags={"SCALED": bias != 127})


def _probability(operator: Log2P | LogSqrt2P) -> Plan:
    steps, largest = operator.steps, 2**operator.bits - 1
    drop = operator.tail == "drop"
    flags, normalised = {"DROP": drop}, operator.normalised
    c0 = _two_terms(steps * LOG2E)[0]
    low = max(-largest - (1 if drop else 0), -150 * steps)
    if steps == 1:
        low = max(low, _ZERO)
        flags |= {"SHIFT": 23, "BASE": 127 << 23}
        scalars = (c0, low, 1.0, max(-largest, _ZERO), 1.0)
        return Plan("mass", "bits", scalars, "mass", flags, exact_p=True, normalised=normalised)
    scalars = (c0, low, 1 / steps, max(-largest, low), float(steps))
    return Plan("mass", "exp2", scalars, "mass", flags, normalised=normalised)


def _half_octaves_exact_maximum(_: ILPoTHA) -> Plan:
    c0, rest = _two_terms(2 * LOG2E)
    return Plan("max", "exp2", (c0, -300.0, 0.5, 0.0, 0.0, rest), "absolute")


def _fraction(name: str, low: float, coefficients: tuple[float, ...] = (), **flags: Any) -> Plan:
    return Plan("max", name, (*_two_terms(LOG2E), low, *coefficients), flags=flags)


def _support(operator: MeanThreshold | TopK) -> Plan:
    uniform, scalars = operator.weights == "uniform", (_two_terms(LOG2E)[0],)
    flags = {"UNIFORM": uniform}
    if isinstance(operator, TopK):
        return Plan("given", "topk", scalars, flags=flags, exact_p=uniform, kept=operator.f)
    return Plan("mean", "mean", scalars, flags=flags, exact_p=uniform)


def _grid(operator: Grid) -> Plan | str:
    K, R = operator.K, operator.R
    uniform = K == 1 or R == 1
    if K > _MAX_K:
        return f"a grid of {K} intervals is beyond its {_MAX_K}"
    scalars = (0.0, 0.0, 0.5, 1 / K)
    if not uniform:
        if abs(math.log2(R)) < _MIN_LOG2_R:
            return f"the widths of {operator} differ by less than a factor of {2**_MIN_LOG2_R:g}, too little for FP32"
        if searched(K, R):
            return f"the widths of {operator} differ too much for FP32"
        log_rho = -math.log(R) / (K - 1)
        span = math.expm1(K * log_rho)
        nearest = 1 - math.log1p(math.expm1(log_rho) / 2) / log_rho
        scalars = (span, math.log(2) / log_rho, nearest, -log_rho * LOG2E, -(1 + span) / span)
    flags = {"RECON": operator.recon, "LINEAR": operator.map == "linear", "UNIFORM": uniform}
    return Plan("minmax", "grid", scalars, flags=flags, n_intervals=K)


def _rescue(operator: Rescue) -> Plan | str:
    inner = plan(operator.of)
    if isinstance(inner, str):
        return inner
    if inner.anchor != "max" or inner.stats not in ("online", "max"):
        return (
            f"it rescues operators of the distance from the row maximum alone, and {operator.of} needs more of the row"
        )
    return replace(inner, stats="given", flags=inner.flags | {"RESCUE": True}, exact_p=False, rescued=operator.q)


_PLANS: dict[type[Operator], Callable[[Any], Plan | str]] = {
    Softmax: lambda op: Plan("online", "exp", (_two_terms(LOG2E)[0],)),
    Temperature: lambda op: Plan("online", "exp", (_two_terms(op.alpha * LOG2E)[0],)),
    H15: lambda op: _schraudolph(1, op.clamp),
    SQ: lambda op: _schraudolph(op.k, op.clamp),
    S: lambda op: _fraction("s", max(CLAMPS[op.clamp], _ZERO)),
    FA4Poly: lambda op: _fraction("poly", _ZERO, COEFFICIENTS[op.degree][1:], DEGREE=op.degree),
    PoT: _pot,
    RowmaxPoT: _rowmax_pot,
    Packed: _packed,
    ILPoT: lambda op: _bits(0, _ZERO, anchor="absolute"),
    ILPoTH15: lambda op: _bits(1, 2 * _ZERO, anchor="absolute", flags={"EVEN": True}),
    ILPoTHA: _half_octaves_exact_maximum,
    Log2P: _probability,
    LogSqrt2P: _probability,
    Grid: _grid,
    MeanThreshold: _support,
    TopK: _support,
    Rescue: _rescue,
}


@lru_cache(maxsize=256)
def plan(operator: Operator) -> Plan | str:
    """How an operator is computed, or one clause that says why it is not."""
    # By the type itself: what a subclass changes is not known here.
    if type(operator) not in _PLANS:
        return f"it has no map for {operator}"
    return _PLANS[type(operator)](operator)
