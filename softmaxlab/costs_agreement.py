"""Whether the kernels that were timed compute what is meant: the fused backend on a GPU, key by key, as recorded.

`tests/benchmarks/fused_gpu.py` calls both backends with values that are one-hot, so that the output is the weight of
a key, on ordinary scores and on scores that are exact in FP32. A weight counts as another one where it differs by more
than rounding does: 10^−3 of it in float32, 2·10^−2 in 16-bit dtypes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from softmaxlab import operators, report
from softmaxlab.costs_suite import read
from softmaxlab.status import table

RECORD = "fused_gpu"
#: What the record calls its checks, and in words.
CHECKS = {"agreement": "operators on whole rows", "simulator": "operators in a simulated kernel"}


def agreement(root: Path) -> str:
    """A table by dtype of the largest share of other weights, and what no GPU has run yet."""
    record = read(root, RECORD) or {}
    rows = [row | {"check": check} for check in CHECKS for row in record.get(check, []) if "cells" in row]
    failed = [row["operator"] for check in CHECKS for row in record.get(check, []) if "failed" in row]
    if not rows:
        return "No GPU's weights were compared with the reference's."
    frame = pd.DataFrame(rows)
    lines = []
    for (check, dtype), part in frame.groupby(["check", "dtype"], sort=False):
        worst = part.loc[part["cells"].idxmax()]
        exact = part.loc[part["cells_exact"].idxmax()]
        shares = (_worst(worst, "cells"), _worst(exact, "cells_exact"))
        lines.append((CHECKS[check], dtype, part["operator"].nunique(), len(part), *shares))
    head = ("what", "dtype", "operators", "cases", "share of other weights, at most", "the same at exact scores")
    said = [table(head, lines), f"**Measured** on {record['device']}."]
    if failed:
        said.append(f"Failed: {', '.join(f'`{text}`' for text in failed)}.")
    return "\n\n".join([said[0], " ".join(said[1:])])


def losses(root: Path) -> str:
    """A table by part of the suite of how far its fused losses are from the stored ones."""
    record = read(root, "suite") or {}
    rows = [
        {"part": part["part"], "stored": part["stored"], "condition": text} | found
        for part in record.get("parts", [])
        for text, found in part["differences"].items()
    ]
    if not rows:
        return "The losses of the whole suite were not compared on a GPU."
    frame = pd.DataFrame(rows)
    frame["size"] = frame["mean"].abs()
    lines = []
    for part, found in frame.groupby("part", sort=False):
        worst = found.loc[found["size"].idxmax()]
        whose = f"`{worst['condition']}`"
        if found["stored"].nunique() > 1:
            whose += f" through `{worst['stored']}`"
        size = report.number(found["size"].median())
        lines.append((part, len(found), int(found["blocks"].min()), size, f"{report.number(worst['size'])} ({whose})"))
    head = ("conditions", "number", "blocks", "difference of the mean loss, median size (nats)", "largest size (nats)")
    return f"{table(head, lines)}\n\n**Measured** on {record['device']}, {record['dtype']}."


def absent(root: Path) -> list[str]:
    """Kernels that no GPU has run, a sentence each."""
    record = read(root, RECORD) or {}
    seen = {operators.parse(row["operator"]).name for row in record.get("agreement", [])}
    known = [text.partition("(")[0] for text, _ in operators.catalogue()]
    said = []
    if missing := [name for name in known if name not in seen]:
        said.append(f"On a GPU, the fused kernels of {_listed(missing)}: they were run in Triton's interpreter.")
    if not record.get("simulator"):
        said.append("On a GPU, the fused simulator: it was run in Triton's interpreter, and its times are PyTorch's.")
    return said


def _worst(row: pd.Series, column: str) -> str:
    """The largest share and whose it is."""
    return f"{report.number(row[column])} (`{row['operator']}`)" if row[column] else report.number(0.0)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
