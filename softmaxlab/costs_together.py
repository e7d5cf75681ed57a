"""What single conditions, those of D_W together, and the passes that read rows cost: tables from what was measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from softmaxlab import conditions, models, report
from softmaxlab.costs_suite import BACKENDS, CONTEXT, DTYPE, Rates, read
from softmaxlab.status import code, table

#: The share of the time of single runs that D_W was to take at most.
SHARE_TARGET = 0.5


def core(root: Path) -> str:
    """Milliseconds of a block of the core conditions, fused beside reference."""
    rates = Rates(root)
    there = [rates.seconds.get(b, {}) for b in BACKENDS]
    texts = [c for c in conditions.core() if any(c in times for times in there)]
    if not texts:
        return "The time of a condition was not measured on a GPU."
    lines = []
    for c in texts:
        slow, fast = (times.get(c, math.nan) for times in there)
        lines.append((code(c), *(report.number(1000 * t) for t in (slow, fast)), report.number(slow / fast)))
    head = ("condition", *(f"{b} (ms a block)" for b in BACKENDS), "reference / fused")
    return (
        f"{table(head, lines)}\n\n**Measured** on one {rates.device}: {models.EMBEDDED}, {CONTEXT:,} tokens, {DTYPE}."
    )


def together(root: Path) -> str:
    """What D_W costs when its conditions share their prefixes."""
    record = read(root, "same_support_cost")
    if record is None:
        return "What D_W costs when its conditions share prefixes was not measured."
    share, layers = record["share_of_time"], record["share_of_layers"]
    took = {name: median(times) for name, times in record["seconds"].items()}
    text = (
        f"**Measured** on {record['device']}, backend {record['backend']}, {record['dtype']}: {record['conditions']} "
        f"conditions on {record['blocks']} blocks of {record['context']:,} tokens take "
        f"{report.number(took['together'])} s together and {report.number(took['each_alone'])} s one by one, a share "
        f"of **{100 * share:.1f} %**; of the layers they run {100 * layers:.1f} %. The target was "
        f"{100 * SHARE_TARGET:.0f} %: "
    )
    if share <= SHARE_TARGET:
        return f"{text}met."
    why = "The embedding and the head, which nothing shares, come on top of the layers."
    if layers > SHARE_TARGET:
        why = (
            "Layers alone do not meet it: a change in layer ℓ needs all from ℓ on, on the average half of them and "
            f"half a layer, and one exact pass is needed besides. {why}"
        )
    return f"{text}missed. {why}"


def passes(root: Path) -> str:
    """What passes that read rows, and the simulated kernel, cost in exact-softmax evaluations."""
    lines, devices = [], set()
    record = read(root, "trajectory_cost") or {}
    for name, (title, target) in _PASSES.items():
        if name in record.get("forwards", {}):
            devices.add(record["device"])
            lines.append((title, *_held(record["forwards"][name], target)))
    record = read(root, "simulator_cost") or {}
    for one in record.get("evaluations", []):
        devices.add(record["device"])
        target = 4 if (one["operator"], one["backend"]) == ("h15()", "online(tile=128,tau=8)") else None
        lines.append(
            (f"{code(one['operator'])} through {code(one['backend'])}", *_held(one["softmax_evaluations"], target))
        )
    if not lines:
        return "What these passes cost was not measured."
    head = ("pass or evaluation", "exact-softmax evaluations", "target")
    return f"{table(head, lines)}\n\nDevice: {', '.join(sorted(devices))}."


#: Passes that `tests/benchmarks/trajectory_cost.py` times, in words, and what they were to cost at most.
_PASSES = {
    "no_operators": ("trajectory, the rows of softmax alone", None),
    "operators_16": ("trajectory, 16 operators in one pass", 6),
    "matching_16": ("divergences of 16 temperatures in one pass", None),
}


def _held(value: float, target: float | None) -> Sequence[str]:
    if target is None:
        return f"{value:.1f}", ""
    return f"{value:.1f}", f"≤ {target:g} {'met' if value <= target else '**missed**'}"
