"""What `bench operators` has stored: rows, their provenance, their ratios, and the targets they are held to."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import statistics
from collections.abc import Iterable
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from softmaxlab import backends
from softmaxlab.bench import shapes
from softmaxlab.bench.record import write
from softmaxlab.bench.shapes import NUMBER, POSITIVE
from softmaxlab.operators import Operator, parse

FORMAT = 1
DEVICES = ("cpu", "cuda")
#: Shape of a row, as `bench.shapes`: what the tables and the page on costs need of it.
_ROW = {
    **dict.fromkeys(("case", "mode", "dtype", "backend", "operator", "kind", "device"), str),
    **dict.fromkeys(("context", "heads", "kv_heads", "dim", "threads"), int),
    "seconds": [POSITIVE, ...],
    "sdpa_seconds": [POSITIVE, ...],
    **dict.fromkeys(("peak_bytes", "sdpa_peak_bytes"), int | None),
    **dict.fromkeys(("sdpa?", "date?", "source?"), str | None),
    "sdpa_trial?": {str: NUMBER | None},
    "notices": [str],
}


def where(results: str | Path, device: str) -> Path:
    """The file of a device."""
    from softmaxlab.evaluate import find_results

    return find_results(str(results)) / "bench" / f"operators-{device}.json"


def revision() -> str:
    """Of the sources that are timed: a digest over operators and backends."""
    folder = Path(backends.__file__).parents[1]
    source = sorted(p for name in ("backends", "operators") for p in (folder / name).glob("*.py"))
    return hashlib.sha256(b"".join(p.read_bytes() for p in source)).hexdigest()[:12]


def facts(device: str) -> dict[str, Any]:
    """The machine, its software, and which sources were timed."""
    from softmaxlab import evaluate, status

    made = evaluate.environment(device)
    if device == "cpu":
        made["device"] = f"{status.processor()}, {os.cpu_count()} CPUs"
    for package in ("numba", "triton"):
        with contextlib.suppress(PackageNotFoundError):
            made[package] = version(package)
    return made | {
        "kind": device,
        "threads": torch.get_num_threads(),
        "source": revision(),
        "date": date.today().isoformat(),
    }


def place(row: dict[str, Any]) -> tuple[str, str, int]:
    """Case, device and threads: rows that agree in these, in backend and in operator replace one another."""
    return row["case"], row["device"], row["threads"]


def _key(row: dict[str, Any]) -> tuple:
    return *place(row), row["backend"], row["operator"]


def merged(old: Iterable[dict[str, Any]], new: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows, the new ones in the place of old ones of the same key."""
    return list(({_key(r): r for r in old} | {_key(r): r for r in new}).values())


def load(path: Path) -> list[dict[str, Any]]:
    """The rows of a file; none if there is no file.

    Raises:
        LabError: it holds something else.
    """
    if not path.exists():
        return []
    rows = shapes.load(path, FORMAT, {"rows": [_ROW]})["rows"]
    for i, row in enumerate(rows):  # a ratio is of one round
        if len(row["seconds"]) != len(row["sdpa_seconds"]):
            rounds = f"rows[{i}] has {len(row['seconds'])} seconds, but {len(row['sdpa_seconds'])} of sdpa"
            raise shapes.no_record(path, rounds)
    return rows


def save(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write everything, whole or not at all."""
    lines = ",\n".join(json.dumps(row) for row in sorted(rows, key=_key))
    write(path, f'{{"format": {FORMAT}, "kind": "measured", "rows": [\n{lines}\n]}}\n')


def summary(row: dict[str, Any]) -> dict[str, Any]:
    """A row's ratio to sdpa: median, least and largest of the rounds; with what the page and the command show.

    `sdpa` is the way that sdpa was called in, None in rows from before both were tried: those had `enable_gqa`.
    """
    ratios = [a / b for a, b in zip(row["seconds"], row["sdpa_seconds"], strict=True)]
    kept = ("mode", "case", "dtype", "context", "backend", "operator", "kind", "device", "threads", "notices")
    return {name: row[name] for name in kept} | {
        "ratio": statistics.median(ratios),
        "low": min(ratios),
        "high": max(ratios),
        "rounds": len(ratios),
        "ms": 1000 * statistics.median(row["seconds"]),
        "sdpa_ms": 1000 * statistics.median(row["sdpa_seconds"]),
        "sdpa": row.get("sdpa"),
        "sdpa_trial": row.get("sdpa_trial", {}),
        "shape": (row["heads"], row["kv_heads"], row["dim"]),
        "peak_mib": None if row["peak_bytes"] is None else row["peak_bytes"] / 2**20,
        "sdpa_peak_mib": None if row["sdpa_peak_bytes"] is None else row["sdpa_peak_bytes"] / 2**20,
        "target": target(row),
        "date": row.get("date"),
        "source": row.get("source"),
    }


def stored(results: str | Path = "results", devices: Iterable[str] = DEVICES) -> list[dict[str, Any]]:
    """The summaries of what is stored, largest group first by device, mode, dtype and context."""
    rows = [r for device in devices for r in load(where(results, device))]
    return [summary(r) for r in sorted(rows, key=lambda r: (r["device"], r["mode"], r["dtype"], r["context"]))]


def text(rows: Iterable[dict[str, Any]]) -> str:
    """A plain table of summaries."""
    head = f"{'case':<40} {'backend':<10} {'operator':<24} {'ms':>9} {'× sdpa':>7}  {'spread':<13} {'MiB':>8} target"
    lines = [head]
    for r in rows:
        spread, mib = f"{r['low']:.2f}–{r['high']:.2f}", "" if r["peak_mib"] is None else f"{r['peak_mib']:.1f}"
        lines.append(
            f"{r['case']:<40} {r['backend']:<10} {r['operator']:<24} {r['ms']:>9.2f} {r['ratio']:>7.2f}  {spread:<13} "
            f"{mib:>8} {verdict(r)}".rstrip()
        )
        lines += [f"    {notice}" for notice in r["notices"]]
    return "\n".join(lines)


def verdict(row: dict[str, Any]) -> str:
    """The target of a summary and whether it is met; empty where there is none."""
    if row["target"] is None:
        return ""
    return f"≤ {row['target']:g} {'met' if row['ratio'] <= row['target'] else 'missed'}"


#: What a fused backend was to cost at most, in sdpa's time, before it was written: (device, mode, dtype, context).
TARGETS = {
    ("cpu", "model", "float32", 2048): {"softmax": 1.1, "rowmax": 1.4, "grid": 1.8, "mean_threshold": 1.6, "topk": 4.0},
    ("cuda", "model", "float32", 2048): {
        "softmax": 0.9,
        "rowmax": 1.0,
        "grid": 1.2,
        "mean_threshold": 1.2,
        "topk": 1.5,
    },
    ("cuda", "attention", "bfloat16", 16384): {
        "softmax": 1.5,
        "rowmax": 1.6,
        "grid": 2.5,
        "mean_threshold": 2.5,
        "topk": 5.0,
    },
}


def target(row: dict[str, Any]) -> float | None:
    """The target of a row of the fused backend, if it has one. They were set for one H200 and for two CPU cores."""
    setting = row["kind"], row["mode"], row["dtype"], row["context"]
    return TARGETS.get(setting, {}).get(family(parse(row["operator"]))) if row["backend"] == "fused" else None


def family(operator: Operator) -> str:
    """The name under which an operator has its targets: `rowmax` are the lattices at the maximum, and temperature."""
    from softmaxlab.operators import FA4Poly, RowmaxAnchored, Softmax

    if isinstance(operator, RowmaxAnchored) and not isinstance(operator, (Softmax, FA4Poly)):
        return "rowmax"
    return operator.name
