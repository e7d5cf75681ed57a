"""What the compiled maps of the CPU backend need to know of an operator."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch

from softmaxlab.backends import cpu_statistics
from softmaxlab.backends import cpu_tiles as kinds
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
    RowmaxPoT,
    S,
    Softmax,
    Temperature,
    TopK,
)
from softmaxlab.operators.grid import edge_fractions, searched
from softmaxlab.operators.polynomial import COEFFICIENTS

LARGEST_GRID = 4096
LARGEST_M = 2.0**14


@dataclass(frozen=True)
class Plan:
    """What the compiled maps need to know of an operator: kind and numbers, as `cpu_tiles.row` takes them."""

    kind: int
    a: np.ndarray = field(default_factory=lambda: np.zeros(1, np.float32))
    b: np.ndarray = field(default_factory=lambda: np.zeros(1))
    table: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    fraction: float = 0.0


@lru_cache(maxsize=256)
def plan(operator: Operator) -> Plan:
    """The map of an operator. Raises NotImplementedError, with one clause, where there is none."""

    def floats(*values: float) -> np.ndarray:
        return np.array(values, np.float32)

    def slope(steps: float) -> tuple[float, float]:
        """Steps of a nat, steps per octave given, in two FP32."""
        high = float(np.float32(steps / math.log(2)))
        return high, steps / math.log(2) - high

    match operator:
        case Softmax():
            return Plan(kinds.EXP, floats(1))
        case Temperature(alpha=alpha):
            return Plan(kinds.EXP, floats(alpha))
        case PoT(m=m) if 1 / LARGEST_M <= m <= LARGEST_M:
            high = float(np.float32(m))
            return Plan(kinds.POWERS, floats(*slope(m), high, m - high, 1 / m, -math.floor(126 * m), 0))
        case RowmaxPoT(K_max=most, tail=tail):
            held = most <= 126 and tail == "clamp"
            return Plan(kinds.POWERS, floats(*slope(1), 1, 0, 1, -min(most, 126), held))
        case S(clamp=clamp):
            return Plan(kinds.LINE, floats(*slope(1), 2.0**-126 if clamp == "paper" else 0))
        case H15(clamp=clamp) | SQ(clamp=clamp):
            k = getattr(operator, "k", 1)
            least = -126 if clamp == "paper" else -127
            return Plan(kinds.LINE_STEPS, floats(*slope(2**k), k, least * 2**k, 127))
        case Packed(k=k):
            b = operator.bias
            return Plan(kinds.LINE_STEPS, floats(*slope(2**k), k, -b * 2**k, b))
        case FA4Poly(degree=degree):
            return Plan(kinds.POLYNOMIAL, floats(*slope(1), *(*COEFFICIENTS[degree], 0, 0)[1:4]))
        case MeanThreshold(weights=weights):
            return Plan(kinds.MEAN, floats(weights == "uniform"))
        case TopK(f=f, weights=weights):
            return Plan(kinds.TOP, floats(weights == "uniform"), fraction=f)
        case Grid(K=K) if K <= LARGEST_GRID:
            return _grid(operator)
        case ILPoT():
            return Plan(kinds.ABSOLUTE, b=np.array([1.0, 0]))
        case ILPoTHA():
            return Plan(kinds.ABSOLUTE, b=np.array([2.0, 1]))
        case ILPoTH15():
            return Plan(kinds.ABSOLUTE_LINE)
        case Log2P() | LogSqrt2P():
            drop = operator.tail == "drop"
            return Plan(kinds.PROBABILITY, b=np.array([operator.steps, 2.0**operator.bits - 1, drop]))
    raise NotImplementedError(f"the CPU backend has no map for {operator}")


def _grid(operator: Grid) -> Plan:
    K, R = operator.K, operator.R
    uniform = K == 1 or R == 1
    if searched(K, R):  # an index is a logarithm here
        raise NotImplementedError(f"the CPU backend has no map for {operator}, whose intervals differ too much")
    log_rho = 0.0 if uniform else -math.log(R) / (K - 1)
    slope, span = (K, 0.0) if uniform else (1 / log_rho, math.expm1(K * log_rho))
    # Where in an interval the upper edge takes over, its own length being 1: for `upper` at once.
    half = 0.5 if uniform else math.log((1 + math.exp(log_rho)) / 2) / log_rho
    middle = half if operator.recon == "nearest" else 0.0
    recon = cpu_statistics.LERP if operator.recon == "lerp" else cpu_statistics.EDGE
    edges = edge_fractions(K, R)
    a = np.array([K, recon, operator.map == "linear", uniform, slope, span, middle], np.float32)
    return Plan(kinds.GRID, a, table=torch.cat([edges, edges - 1]).float().numpy())
