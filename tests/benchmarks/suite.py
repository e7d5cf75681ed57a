"""The whole default-context suite of the embedded model on one device, timed: what `results/losses` holds of it.

    python tests/benchmarks/suite.py --device cuda --blocks 32 97 --out results/bench/suite.json

The suite is `softmaxlab.costs_suite.suite_of`: what is stored of the book's model at the default context. Each part
goes through `evaluate`, as a user's commands do, into an empty folder that is then removed. Given several numbers of
blocks, all parts are measured up to the first, then up to the next. The report is written after each part: a run that
is cut short leaves what it has. Losses are compared with the stored ones, so it is a check of the fused programs end to
end too. Nothing is asserted here: a time is a measurement.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from softmaxlab import conditions, costs_suite, evaluate, floor, models
from softmaxlab.bench.operators import timed
from softmaxlab.files import write_text
from softmaxlab.losskey import LOSSES
from softmaxlab.store import Store

ROOT = Path(__file__).parents[2]


def groups(limit: int) -> Iterator[tuple[str, str, list[str]]]:
    """What one call of `evaluate` measures: part, backend as stored, conditions."""
    for part, pairs in costs_suite.suite_of(ROOT)[0].items():
        for backend in dict.fromkeys(b for b, _ in pairs):
            yield part, backend, conditions.canonical([c for b, c in pairs if b == backend])[: limit or None]


def differences(frame: pd.DataFrame, backend: str) -> dict[str, dict[str, float]]:
    """By condition: how far losses are from those stored under `backend`, in the mean and at most of a block."""
    one = frame.iloc[0]
    names = {n: one[n] for n in ("model", "corpus", "context", "dtype", "bos")}
    stored = Store(ROOT / "results").frame(**names, backend=backend)
    both = frame.merge(stored, on=["condition", "block"], suffixes=("", "_stored"))
    both["difference"] = both.nll - both.nll_stored
    return {
        text: {"mean": group.difference.mean(), "largest": group.difference.abs().max(), "blocks": len(group)}
        for text, group in both.groupby("condition")
    }


def rates(results: Path, backend: str) -> dict[str, float]:
    """Seconds of a block by condition, without loading and compiling."""
    found = {}
    for key, frame, _ in Store(results).tables("cost"):
        if key["backend"] == backend:
            found |= dict(zip(frame.condition, frame.seconds_per_block, strict=True))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--backend", default="fused", help="in the place of the reference, for whole rows")
    parser.add_argument("--blocks", type=int, nargs="+", default=[0], help="0: all")
    parser.add_argument("--context", type=int, default=costs_suite.CONTEXT)
    parser.add_argument("--corpus", default=costs_suite.CORPUS)
    parser.add_argument("--limit", type=int, default=0, help="conditions of a part at most, for a rehearsal; 0: all")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = models.pick_device(args.device)
    setting = {"context": args.context, "corpus": args.corpus, "device": device, "dtype": costs_suite.DTYPE}
    report = {
        "kind": "measured",
        "model": models.EMBEDDED,
        "context": args.context,
        "dtype": costs_suite.DTYPE,
        "backend": args.backend,
        **evaluate.environment(device),
        "parts": [],
    }
    parts = list(groups(args.limit))
    for name, backend, texts in parts:
        report["parts"].append({"part": name, "stored": backend, "conditions": len(texts), "blocks": [], "seconds": []})
    with tempfile.TemporaryDirectory() as results:
        for blocks in args.blocks:
            for row, (name, stored, texts) in zip(report["parts"], parts, strict=True):
                backend = args.backend if stored == floor.REFERENCE else stored
                found = {}

                def run(texts=texts, backend=backend, blocks=blocks, found=found) -> None:
                    found.update(evaluate.rows(
                        texts, backend=backend, blocks=blocks, results=results, progress=False, **setting
                    ))  # fmt: skip

                row["seconds"].append(round(timed(run, device), 2))
                frame = found[LOSSES]
                row["blocks"].append(int(frame.groupby("condition").block.nunique().min()))
                row["seconds_per_block"] = rates(Path(results), backend)
                row["differences"] = differences(frame, stored)
                most = max((abs(d["mean"]) for d in row["differences"].values()), default=float("nan"))
                print(f"{time.strftime('%X')} {name}, {stored}: {len(texts)} conditions, {row['blocks'][-1]} blocks, "
                      f"{row['seconds'][-1]:.1f} s, off by {most:.1e} at most", flush=True)  # fmt: skip
                if args.out:
                    write_text(args.out, json.dumps(report, indent=1) + "\n")
    total = sum(sum(row["seconds"]) for row in report["parts"])
    print(f"{sum(row['conditions'] for row in report['parts'])} conditions in {total / 60:.2f} min")


if __name__ == "__main__":
    main()
