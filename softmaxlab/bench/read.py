"""Tables of what a bench has stored: medians, speed-ups against stock and against the control, and their spread.

A speed-up is 100·(t₀/t₁ − 1) from the medians of pooled windows; its spread is the population standard deviation of
the speed-ups of the rounds (paper B.3), which is no confidence interval. A row without its control has no gain:
what the replacement path alone does to the same exponential is the least that a gain must be held against.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import numpy as np
import pandas as pd

from softmaxlab.bench import energy, kernels
from softmaxlab.bench.cells import Cell
from softmaxlab.bench.record import Entry, stored
from softmaxlab.errors import LabError

NAN = float("nan")


def speedup(t0: float, t1: float) -> float:
    """In percent, of the second time over the first; NaN where the second is 0, as a rehearsal's may be rounded to."""
    return 100 * (t0 / t1 - 1) if t1 else NAN


def pooled(rounds0: Iterable[Iterable[float]], rounds1: Iterable[Iterable[float]]) -> tuple[float, float]:
    """Speed-up from pooled medians, and the population sd of the rounds' own speed-ups.

    Args:
        rounds0, rounds1: windows of each round, of the slower and the faster kernel by name; as many rounds.
    """
    rounds0, rounds1 = [list(r) for r in rounds0], [list(r) for r in rounds1]
    if len(rounds0) != len(rounds1) or not rounds0:
        raise LabError(f"speed-up: {len(rounds0)} rounds are compared with {len(rounds1)}, but there must be as many")
    each = [speedup(statistics.median(a), statistics.median(b)) for a, b in zip(rounds0, rounds1, strict=True)]
    total = speedup(*(statistics.median(itertools.chain(*rounds)) for rounds in (rounds0, rounds1)))
    return total, statistics.pstdev(each)


def latency(results: str = "results", program: str = "latency", rehearsed: bool = False) -> pd.DataFrame:
    """Call latency (`latency`) or kernel duration (`duration`): one row a session, cell and kernel.

    Returns:
        Columns gpu, session, cell and its fields, kernel, gate (green, red, none), ms (median of the pooled windows),
        low, high (ms, extremes), tflops, rounds, windows, vs_stock, sd_stock, vs_control, sd_control (percent; NaN
        where that kernel or the control is missing), floor (percent: the control's own against stock), clock (MHz),
        power (W), temperature (°C) (medians), partial, why (why a kernel was not measured).

    Raises:
        LabError: nothing is stored.
    """
    rows = []
    for entry, facts, kind in _of(program, results, rehearsed):
        times = _rounds(entry)
        cell = Cell.parse(entry.cell)
        has_control = kernels.CONTROL in times and kernels.STOCK in times
        floor = _gain(times, kernels.STOCK, kernels.CONTROL)[0] if has_control else NAN
        for kernel in entry.kernels:
            windows = [w for t in entry.turns if t["kernel"] == kernel for w in t["windows"]]
            ms = [w[0] for w in windows]
            against = {base: _gain(times, base, kernel) if has_control else (NAN, NAN) for base in _BASES}
            if not windows:
                rows.append(_head(entry, facts, kind, cell, kernel) | {"why": entry.refused.get(kernel, "")})
                continue
            middle = [statistics.median(w[i] for w in windows) for i in range(4)]
            rows.append(
                _head(entry, facts, kind, cell, kernel)
                | {"ms": middle[0], "low": min(ms), "high": max(ms)}
                | {"tflops": cell.flops / middle[0] / 1e9, "rounds": len(times.get(kernel, {})), "windows": len(ms)}
                | {f"{what}_{base}": against[base][i] for base in _BASES for i, what in enumerate(("vs", "sd"))}
                | {"floor": floor, "clock": middle[1], "temperature": middle[2], "power": middle[3]}
                | {"partial": entry.partial, "why": entry.refused.get(kernel, "")}
            )
    return pd.DataFrame(rows)


_BASES = (kernels.STOCK, kernels.CONTROL)


def _of(program: str, results: str, rehearsed: bool) -> list[tuple[Entry, dict[str, str], str]]:
    wanted = "rehearsed" if rehearsed else "measured"
    found = [(e, f, k) for e, f, k in stored(program, results) if k == wanted]
    if not found:
        raise LabError(f"nothing {wanted} of `bench {program}` is stored in {results}")
    return found


def _head(entry: Entry, facts: dict[str, str], kind: str, cell: Cell, kernel: str) -> dict[str, Any]:
    passed = entry.gates.get(kernel, {}).get("passed")
    gate = "none" if passed is None else "green" if passed else "red"
    head = {"gpu": facts.get("GPU", ""), "kind": kind, "session": entry.session, "cell": entry.cell}
    return head | asdict(cell) | {"kernel": kernel, "gate": gate}


def _rounds(entry: Entry) -> dict[str, dict[int, list[float]]]:
    """Kernel → round → ms of its windows."""
    found: dict[str, dict[int, list[float]]] = {}
    for turn in entry.turns:
        found.setdefault(turn["kernel"], {})[turn["round"]] = [w[0] for w in turn["windows"]]
    return found


def _gain(times: dict[str, dict[int, list[float]]], base: str, kernel: str) -> tuple[float, float]:
    """Over the rounds that both have; NaN where there is none."""
    common = sorted(set(times.get(base, {})) & set(times.get(kernel, {})))
    if not common:
        return NAN, NAN
    return pooled([times[base][r] for r in common], [times[kernel][r] for r in common])


def energies(results: str = "results", rehearsed: bool = False) -> pd.DataFrame:
    """Energy: one row a session, cell, kernel and round, with the columns of `energy.summary`.

    Further columns: vs_stock and vs_control, change of mj in percent against the same round's; vs_stock_no_ramp and
    vs_stock_counter, the same without the ramp and by the energy counter. All NaN where the control is missing.
    """
    rows = []
    for entry, facts, kind in _of("energy", results, rehearsed):
        cell = Cell.parse(entry.cell)
        found = {(t["kernel"], t["round"]): energy.summary(t, entry.protocol) for t in entry.turns}
        for (kernel, round_), one in found.items():
            bases = {b: found.get((b, round_)) for b in _BASES}
            whole = all(bases.values())

            def change(column: str, base: str, one: dict = one, bases: dict = bases, whole: bool = whole) -> float:
                below = bases[base][column] if whole else 0.0  # a counter or a power may stand at 0
                return 100 * (one[column] / below - 1) if below else NAN

            rows.append(
                _head(entry, facts, kind, cell, kernel)
                | {"round": round_, **one}
                | {f"vs_{b}": change("mj", b) for b in _BASES}
                | {f"vs_stock_{c}": change(f"mj_{c}", kernels.STOCK) for c in ("no_ramp", "counter")}
            )
    return pd.DataFrame(rows)


def counts(results: str = "results", rehearsed: bool = False) -> pd.DataFrame:
    """Counters: one row a session, cell and kernel; the counters of `counters.WANTED` as medians over the launches.

    Further columns: `per score`, warp instructions a score and 32 lanes, masked scores of diagonal tiles not counted.
    """
    rows = []
    for entry, facts, kind in _of("counters", results, rehearsed):
        cell = Cell.parse(entry.cell)
        for turn in entry.turns:
            values = {name: float(np.median(v)) for name, v in turn["counters"].items()}
            scores = cell.flops / 4 / cell.head_dim / 32
            values["per score"] = values.get("instructions", NAN) / scores
            rows.append(_head(entry, facts, kind, cell, turn["kernel"]) | values)
    return pd.DataFrame(rows)


def timelines(results: str = "results", rehearsed: bool = False) -> pd.DataFrame:
    """Timeline: one row a session, cell, kernel and round, as Table B4.

    Columns: kernel_us (median over all traced calls), kernel_us_timed (over the timed ones), call_us, launch_us
    (median), outside (percent of the timed interval outside the kernel), kernel_vs_stock, call_vs_stock and
    kernel_vs_control (percent; NaN without the control).
    """
    rows = []
    for entry, facts, kind in _of("timeline", results, rehearsed):
        cell = Cell.parse(entry.cell)
        found = {}
        for t in entry.turns:
            warmup = entry.protocol["warmup"]
            timed = t["kernel_us"][warmup:]
            if not timed:
                raise LabError(f"timeline: {len(t['kernel_us'])} traced calls leave none after {warmup} of warm-up")
            launches = t["launch_us"]
            found[t["kernel"], t["round"]] = {
                "kernel_us": statistics.median(t["kernel_us"]),
                "kernel_us_timed": statistics.median(timed),
                "call_us": t["call_us"],
                "launch_us": statistics.median(launches) if launches else NAN,
                "outside": 100 * (1 - statistics.median(timed) / t["call_us"]),
            }
        for (kernel, round_), one in found.items():
            stock, control = (found.get((b, round_)) for b in _BASES)
            whole = bool(stock and control)
            gains = {
                "kernel_vs_stock": speedup(stock["kernel_us"], one["kernel_us"]) if whole else NAN,
                "kernel_vs_control": speedup(control["kernel_us"], one["kernel_us"]) if whole else NAN,
                "call_vs_stock": speedup(stock["call_us"], one["call_us"]) if whole else NAN,
            }
            rows.append(_head(entry, facts, kind, cell, kernel) | {"round": round_, **one, **gains})
    return pd.DataFrame(rows)


#: Of each program: its table, and the columns that a terminal shows.
SHOWN = ("ms", "vs_stock", "sd_stock", "vs_control", "sd_control", "floor", "clock", "power")
TABLES = {
    "latency": (lambda r, d: latency(r, "latency", d), SHOWN),
    "duration": (lambda r, d: latency(r, "duration", d), SHOWN),
    "energy": (energies, ("ms", "power", "mj", "mj_no_ramp", "mj_counter", "vs_stock", "vs_control", "clock")),
    "counters": (counts, ("xu %", "alu %", "fma %", "tensor %", "issue %", "instructions", "per score", "registers")),
    "timeline": (timelines, ("kernel_us", "call_us", "launch_us", "kernel_vs_stock", "kernel_vs_control", "outside")),
}


def text(program: str, results: str = "results", rehearsed: bool = False) -> str:
    """A program's table for the terminal, and what was not measured. Raises LabError where nothing is stored."""
    if program not in TABLES:
        raise LabError(f"unknown bench {program!r}: known are {', '.join(TABLES)}")
    make, shown = TABLES[program]
    frame = make(results, rehearsed)
    said = "made up, in a rehearsal" if rehearsed else "measured"
    lines = []
    if not frame.empty:
        lines.append(f"{program} on {', '.join(sorted(set(frame.gpu)))} ({said}); gains and changes in percent")
        several = ["gpu", "session"] if frame.session.nunique() > 1 else []
        columns = [*several, "cell", "kernel", "gate", *(c for c in shown if c in frame)]
        lines.append(frame[columns].to_string(index=False, float_format=lambda x: f"{x:.4g}", na_rep="—"))
    for entry, _, _ in _of(program, results, rehearsed):
        lines += [f"not measured: {entry.cell}, {kernel}: {why}" for kernel, why in entry.refused.items()]
        lines += [f"partial: {entry.cell}, {len(entry.turns)} of {entry.total} turns"] if entry.partial else []
    return "\n".join(lines)
