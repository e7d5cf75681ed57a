"""What the gates read off a kernel, each reading with the bounds it must keep. Paper B.2.

Bounds follow from the operator's envelope, from the roundings of P and of the output, and from the interval that the
reference leaves open for each weight. A NaN keeps no bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from softmaxlab.fa4.readings import Reference
from softmaxlab.fa4.variants import Variant
from softmaxlab.operators import RowmaxAnchored

#: Of each dtype: the unit roundoff of P; the largest relative error of an output, about twice the stock kernel's own
#: against float64; what a probability may be off by absolutely (the spacing of P's subnormals, once or twice); and the
#: least probability whose ratio is read. FP8's P is scaled up by 2^8.
TOLERANCE_NAMES = ("unit roundoff", "output error", "absolute", "least probability of a ratio")
TOLERANCES = {
    "bf16": (2.0**-8, 4e-3, 2.0**-100, 2.0**-100),
    "fp16": (2.0**-11, 6e-4, 2.0**-23, 2.0**-12),
    "e4m3": (2.0**-4, 2.5e-2, 2.0**-17, 2.0**-14),
}

#: A value, and the least and the largest that pass.
Reading = tuple[float, float, float]


def of_output(dtype: str, out: Tensor, lse: Tensor, expected: Reference) -> dict[str, Reading]:
    """Readings of output and log-sum-exp."""
    _, tolerance, _, _ = TOLERANCES[dtype]
    out, seen = out.double(), expected.valid.any(-1)
    size = expected.out[:, seen].norm()
    error, tolerance = (out - expected.out)[:, seen].norm() / size, tolerance + expected.open[:, seen].norm() / size
    # Of the interval that the lattice's jumps leave open, how far outside a row's log-sum-exp lies.
    below, above = expected.lse_low - lse, lse - expected.lse_high
    outside = torch.maximum(below, above)[..., seen].max()
    readings = {
        "not finite": (int((~out.isfinite()).sum()), 0, 0),
        "relative error of the output": (error.item(), 0.0, tolerance.item()),
        "log-sum-exp outside its bounds, nats": (outside.item(), -math.inf, 1e-3),
    }
    if not seen.all():
        readings["largest output of masked rows"] = (out[:, ~seen].abs().max().item(), 0.0, 0.0)
        readings["masked rows whose log-sum-exp is not −∞"] = (int((lse[..., ~seen] != -math.inf).sum()), 0, 0)
    return readings


def of_probabilities(
    dtype: str, p: Tensor, stock: Tensor, expected: Reference, variant: Variant, lags: bool
) -> tuple[dict[str, Reading], dict[str, Any]]:
    """Readings of the probabilities, and their histograms.

    Args:
        p, stock: P̂ of the variant and of the stock kernel, FP64 on the CPU, (heads, queries, keys).
        lags: whether the anchor may lie below the row maximum.
    """
    unit, _, spacing, floor = TOLERANCES[dtype]
    weights, low, high = (w[0].cpu() for w in (expected.weights, expected.low, expected.high))
    valid = expected.valid.cpu().expand_as(p)
    ideal = weights / weights.sum(-1, keepdim=True)
    # Two roundings, of P and of the output; and those of the row sum, where it has some.
    operator = variant.operator(dtype if dtype != "e4m3" or variant.k == 3 else "bf16")  # FP8 else falls back
    summed = operator.row_sum_bound
    least = low / high.sum(-1, keepdim=True) * (1 - 2.5 * unit - summed) - spacing
    most = high / low.sum(-1, keepdim=True) * (1 + 2.5 * unit + summed) + spacing
    residual, l1 = (p - ideal)[valid], (p - ideal).abs().sum(-1)
    widest = torch.maximum(most - ideal, ideal - least).masked_fill(~valid, 0.0).sum(-1)

    open_ = ((high - low).sum(-1) / weights.sum(-1)).mean().item()

    used = valid & (p > floor) & (stock > floor)
    ratio = torch.where(used, torch.log2(p / stock), math.nan)
    # Rounding makes several entries of the stock kernel candidates for the row maximum.
    candidates = torch.where(stock >= stock.amax(-1, keepdim=True) * (1 - 4 * unit), p, -1.0)
    shift = ratio.gather(-1, candidates.argmax(-1, keepdim=True))
    unnormalised = ratio - shift
    a, b = (e / math.log(2) for e in operator.envelope)
    slack = (unit + summed / 4) / math.log(2)
    fused = 2.0**-7 if variant.kind == "fused7" else 0.0
    # Where the anchor lags, the row maximum is itself off by what the operator is off there; else by what it is off
    # next to the anchor.
    a_near, b_near = (a, b) if lags else _near_anchor(operator, unit)
    a_top, b_top = a - b_near, b - a_near
    ties = (p >= p.amax(-1, keepdim=True)).sum(-1).double()
    readings = {
        "weights outside their bounds": (int((~((p >= least) & (p <= most)))[valid].sum()), 0, 0),
        "masked weights above 0": (int((~(p[~valid] <= spacing)).sum()), 0, 0),
        "L1 of a row, mean": (l1.mean().item(), 0.0, 2 * unit + summed + open_),
        "L1 of a row, largest": (l1.max().item(), 0.0, widest.max().item()),
        "normalised ratio, least, octaves": (_extreme(ratio, torch.amin), a - b - fused - 4 * slack, math.inf),
        "normalised ratio, largest, octaves": (_extreme(ratio, torch.amax), -math.inf, b - a + fused + 4 * slack),
        "unnormalised error, least, octaves": (_extreme(unnormalised, torch.amin), a_top - fused - 8 * slack, math.inf),
        "unnormalised error, largest, octaves": (
            _extreme(unnormalised, torch.amax),
            -math.inf,
            b_top + fused + 8 * slack,
        ),
        "row sum, least": (p.sum(-1).min().item(), 1 - 2 * unit - summed, math.inf),
        "row sum, largest": (p.sum(-1).max().item(), -math.inf, 1 + 2 * unit + summed),
    }
    if not lags:
        missed = candidates.amax(-1) < p.amax(-1) * (1 - 2 * unit) * 2 ** (a_near - b_near)
        readings["rows whose maximum is not attained"] = (int(missed.sum()), 0, 0)
    return readings, {
        "elements": int(valid.sum()),
        "rows": int(valid.any(-1).sum()),
        "residual": _histogram(residual),
        "ratio": _histogram(ratio[used]),
        "unnormalised": _histogram(unnormalised[used]),
        "shift": _histogram(shift[shift.isfinite()]),
        "tied at the maximum": {"median": ties.median().item(), "largest": ties.max().item()},
        "bounds": {"ratio": [a - b, b - a], "unnormalised": [a, b]},
    }


def _near_anchor(operator: RowmaxAnchored, unit: float) -> tuple[float, float]:
    """Least and largest error of the operator, in octaves, where rounding may put what is read as the row maximum.

    The kernel's own x of the maximum is an FP32 rounding beside 0, and P's rounding hides some keys below it. A
    polynomial of degree 1 jumps there: just below 0 it weighs P(1)/2, 4% less than at 0.
    """
    x = -torch.cat([torch.zeros(1), torch.logspace(-7, math.log10(6 * unit / math.log(2)), 200)]).double()
    error = torch.log2(operator.at(x).double()) - x
    return error.min().item(), error.max().item()


def _extreme(values: Tensor, of: Callable[[Tensor], Tensor]) -> float:
    """Of what was read (NaN elsewhere); NaN, which no bound holds, where nothing was."""
    read = values[~values.isnan()]
    return of(read).item() if len(read) else math.nan


def _histogram(values: Tensor, bins: int = 80) -> dict[str, Any]:
    """Counts of equal bins from `low` to `high`."""
    counts, edges = np.histogram(values[values.isfinite()].numpy(), bins)
    return {"low": float(edges[0]), "high": float(edges[-1]), "counts": counts.tolist()}
