"""The book's status page: how long each chapter ran, on what, and where every stored result came from.

A reader who doubts a number looks here first. The text around the tables is a template,
`book/status-template.md`; the page is written to `book/_generated/status.md` at every build.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import string
import subprocess
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from softmaxlab.losskey import LOSSES, VOCABULARY, Kind

PACKAGES = ("torch", "transformers", "numpy", "scipy", "pandas", "matplotlib", "jupyter-book", "papermill")
#: What files have in common that one run wrote: the first table has a row for each such set of values.
RUN = ("model", "corpus", "context", "backend", "device", "date", "dtype", "torch", "transformers", "bos")


def write_page(root: Path, executed: Sequence[Path]) -> Path:
    """Write the status page.

    Args:
        root: folder of the book.
        executed: the executed notebooks, in the order of the chapters.

    Returns:
        The page's path.
    """
    template = string.Template((root / "book" / "status-template.md").read_text(encoding="utf-8"))
    text = template.substitute(
        chapters=table(("Chapter", "Executed (UTC)", "Time (s)", "Parameters"), map(chapter_row, executed)),
        machine=table(("Item", "Value"), machine_rows(root)),
        results=results_table(root),
        output=results_table(root, VOCABULARY),
        cost=cost_table(root),
        bench=bench_table(root),
        operators=operators_table(root),
    )
    page = root / "book" / "_generated" / "status.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(text, encoding="utf-8")
    return page


def chapter_row(path: Path) -> tuple[str, str, str, str]:
    """Link, time of day, duration and parameters of one executed notebook."""
    import nbformat

    metadata = nbformat.read(path, as_version=4).metadata
    timing = metadata.get("papermill", {})
    started = str(timing.get("start_time", ""))[:16].replace("T", " ")
    parameters = metadata.get("softmaxlab", {}).get("parameters", {})
    given = ", ".join(code(f"{name} = {value!r}") for name, value in parameters.items())
    return f"[](../executed/{path.name})", started, f"{timing.get('duration') or 0:.1f}", given or "defaults"


def machine_rows(root: Path) -> list[tuple[str, str]]:
    """What the book was built on."""
    import psutil
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    rows = [
        ("Built (UTC)", datetime.now(UTC).strftime("%Y-%m-%d %H:%M")),
        ("Source", git_state(root)),
        ("System", f"{platform.system()} {platform.machine()}"),
        ("Processor", processor()),
        ("Logical CPUs", str(os.cpu_count())),
        ("Memory", f"{psutil.virtual_memory().total / 2**30:.1f} GiB"),
        ("GPU", ", ".join(gpus) or "none"),
        ("Python", platform.python_version()),
    ]
    return rows + [(name, importlib.metadata.version(name)) for name in PACKAGES]


def processor() -> str:
    """The processor's name; `platform.processor()` says nothing of use on Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def git_state(root: Path) -> str:
    """The commit, and whether files differ from it; or that there is none."""

    def git(*arguments: str) -> str:
        outcome = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=30, check=True
        )
        return outcome.stdout.strip()

    try:
        commit = git("rev-parse", "--verify", "HEAD")
        return f"commit {commit[:12]}" + (" with changes" if git("status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return "no git commit"


def results_table(root: Path, kind: Kind = LOSSES) -> str:
    """The runs that wrote the result files, and folded below them the files, from the store's provenance."""
    from softmaxlab.store import Store

    frame = Store(root / "results", kind).provenance()
    if frame.empty:
        return f"No stored {'results' if kind is LOSSES else kind.folder}."
    names = [name for name in RUN if name in frame.columns]
    frame = frame.fillna(dict.fromkeys(names, ""))
    runs = []
    for values, files in frame.groupby(names, sort=False):
        low, high = files["blocks"].min(), files["blocks"].max()
        counts = (len(files), f"{low}" if low == high else f"{low} to {high}")
        runs.append((*values[:4], *counts, *values[4:]))
    rows = [(code(row.condition), row.blocks, code(row.path)) for row in frame.itertuples()]
    files = table(("condition", "blocks", "file under results/"), rows)
    folded = f":::{{dropdown}} All {len(rows)} files\n{files}\n:::"
    head = (*names[:4], "conditions", "blocks", *names[4:])
    return f"{table(head, runs)}\n\n{folded}"


def cost_table(root: Path) -> str:
    """What a block of each all-layer condition cost, a folded table for each model, setting and device."""
    from softmaxlab.conditions import BASELINE
    from softmaxlab.store import Store

    parts = []
    for key, frame, _ in Store(root / "results").tables("cost"):
        ms = frame[~frame.condition.str.contains("@")].set_index("condition")["seconds_per_block"] * 1000
        base = ms.get(BASELINE)
        rows = [(code(c), f"{t:.1f}", f"{t / base:.2f}" if base else "—") for c, t in ms.sort_values().items()]
        title = f"{key['model']}, {key['context']} tokens, {key['dtype']}, batch {key['batch']}: {key['device']}"
        found = table(("condition", "ms a block", "times softmax"), rows)
        parts.append(f":::{{dropdown}} {title}, backend {key['backend']}\n{found}\n:::")
    return "\n\n".join(parts) or "No cost was recorded."


#: Passes that `tests/benchmarks/trajectory_cost.py` times, in words, and what they were to cost at most.
_PASSES = {
    "no_operators": ("trajectory, the rows of softmax alone", ""),
    "operators_16": ("trajectory, 16 operators in one pass", "6"),
    "matching_16": ("divergences of 16 temperatures in one pass", ""),
}


def bench_table(root: Path) -> str:
    """What passes and the simulated kernel cost in exact-softmax evaluations, from `results/bench`."""
    rows, devices = [], set()
    for path in sorted((root / "results" / "bench").glob("*.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        if path.name.startswith("operators-"):  # `operators_table` has them
            continue
        devices.add(report["device"])
        for name, (title, target) in _PASSES.items():
            if name in report.get("forwards", {}):
                rows.append((title, f"{report['forwards'][name]:.1f}", target))
        for one in report.get("evaluations", []):
            target = "4" if (one["operator"], one["backend"]) == ("h15()", "online(tile=128,tau=8)") else ""
            title = f"{code(one['operator'])} through {code(one['backend'])}"
            rows.append((title, f"{one['softmax_evaluations']:.1f}", target))
    if not rows:
        return "No benchmark was recorded."
    head = ("pass or evaluation", "exact-softmax evaluations", "target, at most")
    return f"{table(head, rows)}\n\nDevice: {', '.join(sorted(devices))}."


def operators_table(root: Path) -> str:
    """What operators cost beside sdpa: those with a target first, then a folded table for each case."""
    from softmaxlab.bench import operator_rows

    rows = operator_rows.stored(root / "results")
    if not rows:
        return "No benchmark of operators was recorded."
    held = []
    for r in (r for r in rows if r["target"] is not None):
        setting = r["device"], r["mode"], f"{r['context']}, {r['dtype']}"
        held.append((*setting, code(r["operator"]), ratio(r), operator_rows.verdict(r)))
    head = ("device", "timed", "context, dtype", "operator", "times sdpa (spread)", "target")
    parts = [table(head, held)] if held else []
    cases: dict[tuple[str, ...], list[dict]] = {}
    for r in rows:
        cases.setdefault((r["device"], f"{r['threads']} threads", r["case"]), []).append(r)
    for case, found in cases.items():
        lines = []
        for r in sorted(found, key=lambda r: (r["backend"], r["ratio"])):
            peak = "—" if r["peak_mib"] is None else f"{r['peak_mib']:.1f} ({r['sdpa_peak_mib']:.1f})"
            notice = " ".join(r["notices"])
            lines.append((r["backend"], code(r["operator"]), f"{r['ms']:.2f}", ratio(r), r["rounds"], peak, notice))
        head = ("backend", "operator", "ms", "times sdpa (spread)", "rounds", "peak MiB (sdpa's)", "notice")
        parts.append(f":::{{dropdown}} {', '.join(case)}\n{table(head, lines)}\n:::")
    return "\n\n".join(parts)


def ratio(row: dict) -> str:
    """Median of the rounds, with the least and the largest."""
    return f"{row['ratio']:.2f} ({row['low']:.2f}–{row['high']:.2f})"


def code(text: object) -> str:
    """Text shown as it is, without Markdown and typographic quotes."""
    return f"`{text}`"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; cells are shown as they are, on one line."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell(text) for text in line) + " |" for line in lines)


def cell(text: object) -> str:
    """Text that can stand in a Markdown table: no line break, no bare bar."""
    return " ".join(str(text).split()).replace("|", "\\|")
