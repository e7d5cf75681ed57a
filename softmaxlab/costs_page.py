"""The page on what the lab costs: operators beside torch's attention, memory, and conditions together.

The text is a template, `book/costs-template.md`; the tables and a figure for each device are made at every build from
`results/bench` and `results/cost`. What is not there the page says.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from softmaxlab import costs_agreement, costs_memory, costs_ratios, costs_suite, costs_together, drawing, figures_costs
from softmaxlab.bench import operator_rows
from softmaxlab.costs_ratios import MODES, Row

NAMES = {"cuda": "GPU", "cpu": "CPU"}


def write_page(root: Path) -> Path | None:
    """Write `book/_generated/costs.md` and its figures; None where the book has no template for it."""
    template = root / "book" / "costs-template.md"
    if not template.is_file():
        return None
    rows = operator_rows.stored(root / "results")
    folder = root / "book" / "_generated"
    folder.mkdir(parents=True, exist_ok=True)
    text = string.Template(template.read_text(encoding="utf-8")).substitute(
        targets=costs_ratios.targets(rows),
        why=costs_ratios.why(rows),
        devices=_devices(rows, folder),
        agreement=costs_agreement.agreement(root),
        losses=costs_agreement.losses(root),
        ways=costs_ratios.ways(rows) if rows else "No benchmark of operators was recorded.",
        growth=costs_memory.verdict(rows) or "Memory was not measured.",
        memory=costs_memory.tables(rows),
        together=costs_together.together(root),
        core=costs_together.core(root),
        suite=costs_suite.suite(root),
        passes=costs_together.passes(root),
        absent="\n".join(f"- {line}" for line in absent(root, rows)),
    )
    page = folder / "costs.md"
    page.write_text(text, encoding="utf-8")
    return page


def absent(root: Path, rows: Sequence[Row]) -> list[str]:
    """What was not measured, a sentence each."""
    said = costs_ratios.absent(rows) + costs_agreement.absent(root)
    if costs_suite.read(root, "two_gpus") is None:
        said.append("Two GPUs against one ({ref}`many-gpus`).")
    said.append("Any GPU but those named here.")
    said.append("Of the operators beside sdpa, more than one model and more than one sequence at a time.")
    return said


_FIGURE = """:::{{figure}} {name}.svg
:name: fig-{name}
:alt: Time over sdpa's against the context on a {machine}, a line for each of five operators, panels by mode and dtype.

Time over sdpa's in the same round against the context, backend fused; the dotted line is sdpa. Points are medians over
the rounds and bars their least and largest, **measured**. Points at one context are drawn side by side.
:::"""


def _devices(rows: Sequence[Row], folder: Path) -> str:
    """For each machine its figure and its tables."""
    parts = []
    for number, found in enumerate(costs_ratios.machines(rows), 1):
        kind, device, threads = found
        name = f"costs-{kind}-{number}"
        title = device if kind == "cuda" else f"{device}, {threads} threads"
        own = [r for r in rows if costs_ratios.machine(r) == found and r["backend"] == "fused"]
        parts.append(f"### {title}")
        if own:
            _draw(own, folder / f"{name}.svg")
            parts.append(_FIGURE.format(name=name, machine=NAMES[kind]))
        parts.append(costs_ratios.ratio_tables(rows, found))
        parts.append(timed(own))
    return "\n\n".join(filter(None, parts)) or "No benchmark of operators was recorded."


def timed(rows: Sequence[Row]) -> str:
    """When rows were timed, and whether the sources that were timed are today's; empty where that is not recorded."""
    dates, sources = ({r[name] for r in rows if r.get(name)} for name in ("date", "source"))
    if not dates or not sources:
        return ""
    days = " and ".join(sorted(dates))
    if sources == {operator_rows.revision()}:
        return f"Timed on {days} with the operators and backends as they are."
    return f"Timed on {days}; the sources of operators or backends have changed since, so today's times may differ."


def _draw(rows: Sequence[Row], path: Path) -> None:
    panels = []
    for mode, title in MODES.items():
        for dtype in ("float32", "bfloat16", "float16"):
            here = [r for r in rows if (r["mode"], r["dtype"]) == (mode, dtype)]
            if any(r["operator"] in figures_costs.CHOSEN for r in here):
                frame = pd.DataFrame(here)[["operator", "context", "ratio", "low", "high"]]
                panels.append((f"{title}, {dtype}", frame.rename(columns={"ratio": "value"})))
    drawing.style()
    if panels:
        figures_costs.ratios(panels).savefig(path, metadata={"Date": None})
