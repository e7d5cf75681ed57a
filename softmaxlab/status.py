"""The book's status page: how long each chapter ran, on what, and where every stored result came from.

A reader who doubts a number looks here first. The text around the tables is a template,
`book/status-template.md`; the page is written to `book/_generated/status.md` at every build.
"""

from __future__ import annotations

import importlib.metadata
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
        elsewhere=elsewhere(root),
    )
    page = root / "book" / "_generated" / "status.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(text, encoding="utf-8")
    return page


def elsewhere(root: Path) -> str:
    """A link to the page on costs, where the book has one."""
    if not (root / "book" / "costs-template.md").is_file():
        return ""
    return "What an operator costs beside torch's attention, what passes cost, and their targets: {ref}`lab-costs`."


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
    said = "Simulated kernels, `online(…)`, are timed as their PyTorch program; as one fused kernel they take less."
    return "\n\n".join([said, *parts]) if parts else "No cost was recorded."


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
