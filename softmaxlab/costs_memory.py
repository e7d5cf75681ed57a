"""Peak memory of the operators against the context: ours, sdpa's and the reference backend's."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from softmaxlab import report
from softmaxlab.costs_ratios import MODES, Row, kilo, machine
from softmaxlab.status import code, table

#: By how much memory may grow faster than the context and still be called linear: buffers are whole tiles.
SLACK = 1.1


def tables(rows: Sequence[Row]) -> str:
    """The peaks in MiB for each device, mode, dtype and context."""
    read = [r for r in rows if r["peak_mib"] is not None]
    if not read:
        return "No peak memory was recorded."
    lines = []
    for place in dict.fromkeys((machine(r), r["mode"], r["dtype"], r["context"]) for r in read):
        here = [r for r in read if (machine(r), r["mode"], r["dtype"], r["context"]) == place]
        fused = [r for r in here if r["backend"] == "fused"]
        chosen = [r for r in fused if r["operator"].startswith("topk(")]
        rest = [r for r in fused if r not in chosen]
        theirs = [r["sdpa_peak_mib"] for r in here if r["sdpa_peak_mib"] is not None]
        reference = [r["peak_mib"] for r in here if r["backend"] == "reference"]
        (_, device, _), mode, dtype, context = place
        cells = (theirs, [r["peak_mib"] for r in rest], [r["peak_mib"] for r in chosen], reference)
        lines.append((device, MODES[mode], dtype, kilo(context), *map(_span, cells)))
    head = ("device", "timed", "dtype", "context", "sdpa", "fused, all but top-k", "fused, top-k", "reference")
    return table(head, lines)


def _span(values: Sequence[float]) -> str:
    if not values:
        return report.MISSING
    low, high = report.number(min(values)), report.number(max(values))
    return low if low == high else f"{low}–{high}"


def growth(rows: Sequence[Row]) -> dict[tuple, float]:
    """How much faster than the context the memory of the fused backend grew, at most, between two neighbours.

    Returns:
        (machine, mode, dtype, operator) → factor; 1 is linear. What was read at one context alone is left out.
    """
    peaks: dict[tuple, dict[int, float]] = {}
    for r in rows:
        if r["backend"] == "fused" and r["peak_mib"]:
            key = machine(r), r["mode"], r["dtype"], r["operator"]
            peaks.setdefault(key, {})[r["context"]] = r["peak_mib"]
    found = {}
    for key, at in peaks.items():
        steps = [(at[b] / at[a]) / (b / a) for a, b in pairwise(sorted(at))]
        if steps:
            found[key] = max(steps)
    return found


def verdict(rows: Sequence[Row]) -> str:
    """Whether the memory of every operator grows at most linearly, for each device."""
    found, said = growth(rows), []
    for one in dict.fromkeys(machine(r) for r in rows):
        own = {key[1:]: factor for key, factor in found.items() if key[0] == one}
        if not own:
            said.append(f"{one[1]}: not measured at two contexts.")
            continue
        above = {key: factor for key, factor in own.items() if factor > SLACK}
        if above:
            (mode, dtype, operator), factor = max(above.items(), key=lambda item: item[1])
            worst = f"{code(operator)} ({MODES[mode]}, {dtype}), {factor:.2f} times as fast as the context"
            said.append(f"{one[1]}: **missed** by {len(above)} of {len(own)} series, most by {worst}.")
        else:
            text = f"met by all {len(own)} series of operator, dtype and mode"
            said.append(f"{one[1]}: {text}; none grows more than {max(own.values()):.2f} times as fast as the context.")
    return "\n".join(f"- {line}" for line in said)
