"""Gains with an interval each, and the rule by which a gain counts.

The paper's statistic is a ratio of pooled medians and the spread of a few rounds (`read`). Here a round, which holds
every kernel within moments, is the unit: its ratio of medians is taken inside the round, as a logarithm, and rounds
are resampled (`statistics.bootstrap`). A clock that drifts then moves both sides of a ratio.

The rule, `verdict`: a kernel is faster or slower if its intervals against stock **and** against the control lie on
that side of zero, and both gains are larger than the control's own against stock. Otherwise it is unresolved.
"""

from __future__ import annotations

import math
import statistics as st
from dataclasses import asdict
from typing import Any

import numpy as np
import pandas as pd

from softmaxlab import statistics
from softmaxlab.bench import kernels, read
from softmaxlab.bench.cells import Cell
from softmaxlab.bench.record import Entry, stored
from softmaxlab.errors import LabError
from softmaxlab.statistics import Estimate

#: Below this many rounds no interval is given: resampling three rounds says nothing.
LEAST_ROUNDS = 6
FASTER, SLOWER, UNRESOLVED = "faster", "slower", "unresolved"
NAN = float("nan")


def percent(log_ratio: float) -> float:
    """Speed-up in percent, 100·(t₀/t₁ − 1), of ln(t₀/t₁)."""
    return 100 * math.expm1(log_ratio)


def log_ratios(entry: Entry, base: str, kernel: str) -> np.ndarray:
    """ln of the base's median window over the kernel's, one a round that has both, in the rounds' order."""
    medians = {(t["kernel"], t["round"]): st.median(w[0] for w in t["windows"]) for t in entry.turns if t["windows"]}
    rounds = sorted({r for k, r in medians if k == base} & {r for k, r in medians if k == kernel})
    return np.array([math.log(medians[base, r] / medians[kernel, r]) for r in rounds])


def estimate(entry: Entry, base: str, kernel: str) -> Estimate | None:
    """Mean of `log_ratios` with its bootstrap interval; None with fewer than `LEAST_ROUNDS` rounds."""
    found = log_ratios(entry, base, kernel)
    return statistics.bootstrap(found) if len(found) >= LEAST_ROUNDS else None


def verdict(against_stock: Estimate | None, against_control: Estimate | None, floor: Estimate | None) -> str:
    """`FASTER`, `SLOWER` or `UNRESOLVED`, by the rule of this module.

    Args:
        against_stock, against_control: the kernel's, as `estimate`.
        floor: the control's against stock.
    """
    if against_stock is None or against_control is None or floor is None:
        return UNRESOLVED
    both = (against_stock, against_control)
    if min(abs(e.mean) for e in both) <= abs(floor.mean):
        return UNRESOLVED
    for state, said in (("positive", FASTER), ("negative", SLOWER)):
        if all(e.resolved == state for e in both):
            return said
    return UNRESOLVED


def table(results: str = "results", program: str = "duration", *, rehearsed: bool = False) -> pd.DataFrame:
    """Gains of a timing program: one row a GPU, cell and kernel.

    Where a kernel was timed in a cell by several protocols, the one with the longest windows is taken, and of several
    of those the one with the most rounds: at a card's power limit short windows differ by the clock they meet.

    Args:
        program: latency or duration.

    Returns:
        Columns gpu, cell and its fields, kernel, gate; ms (median of the windows) and tflops; stock, control, floor
        (speed-up in percent against stock, against the control, and the control's against stock), each with _low and
        _high (NaN with fewer than `LEAST_ROUNDS` rounds); pooled (the paper's statistic against stock); spread
        (percent: sd over rounds of the control's speed-up against stock); verdict; clock (MHz) and power (W), medians;
        window_ms, rounds. A kernel that was not timed has no row.

    Raises:
        LabError: nothing is stored; a program that is none of the two.
    """
    if program not in ("latency", "duration"):
        raise LabError(f"gains are made of latency or duration, not of {program}")
    wanted = "rehearsed" if rehearsed else "measured"
    rows = [row for e, f, kind in stored(program, results) if kind == wanted for row in _rows(e, f)]
    if not rows:
        raise LabError(f"nothing {wanted} of `bench {program}` is stored in {results}")
    frame = pd.DataFrame(rows).sort_values(["window_ms", "rounds"], kind="stable")
    kept = frame.drop_duplicates(["gpu", "cell", "kernel"], keep="last")
    return kept.sort_index(ignore_index=True)


def _rows(entry: Entry, facts: dict[str, str]) -> list[dict[str, Any]]:
    cell = Cell.parse(entry.cell)
    floor = estimate(entry, kernels.STOCK, kernels.CONTROL)
    own = log_ratios(entry, kernels.STOCK, kernels.CONTROL)
    rows = []
    for kernel in entry.kernels:
        windows = [w for t in entry.turns if t["kernel"] == kernel for w in t["windows"]]
        stock, control = (log_ratios(entry, base, kernel) for base in (kernels.STOCK, kernels.CONTROL))
        if not windows or not len(stock) or not len(control):
            continue
        ms, clock, _, power = (st.median(w[i] for w in windows) for i in range(4))
        against = {base: estimate(entry, base, kernel) for base in (kernels.STOCK, kernels.CONTROL)}
        passed = entry.gates.get(kernel, {}).get("passed")
        rows.append(
            {"gpu": facts.get("GPU", ""), "cell": entry.cell, **asdict(cell), "kernel": kernel}
            | {"gate": "none" if passed is None else "green" if passed else "red"}
            | {"ms": ms, "tflops": cell.flops / ms / 1e9}
            | _interval("stock", stock, against[kernels.STOCK])
            | _interval("control", control, against[kernels.CONTROL])
            | _interval("floor", own, floor)
            | {"pooled": _pooled(entry, kernel), "spread": 100 * float(np.expm1(own).std())}
            | {"verdict": verdict(against[kernels.STOCK], against[kernels.CONTROL], floor)}
            | {"clock": clock, "power": power}
            | {"window_ms": entry.protocol.get("window_ms", ms * entry.protocol.get("calls", NAN))}
            | {"rounds": len(stock)}
        )
    return rows


def _interval(name: str, values: np.ndarray, found: Estimate | None) -> dict[str, float]:
    middle = percent(float(values.mean())) if len(values) else NAN
    low, high = (NAN, NAN) if found is None else (percent(found.low), percent(found.high))
    return {name: middle, f"{name}_low": low, f"{name}_high": high}


def _pooled(entry: Entry, kernel: str) -> float:
    windows = {
        k: [[w[0] for w in t["windows"]] for t in entry.turns if t["kernel"] == k] for k in (kernels.STOCK, kernel)
    }
    return read.speedup(*(st.median(ms for turn in windows[k] for ms in turn) for k in (kernels.STOCK, kernel)))
