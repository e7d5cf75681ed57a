"""What the benchmarks of a model share: their arguments, the model, rounds in which all take their turn, the report.

Nothing is asserted in a benchmark: a time is a measurement, not a test.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Hashable, Mapping
from statistics import median

from softmaxlab import models
from softmaxlab.bench.operators import timed
from softmaxlab.evaluate import Work, environment
from softmaxlab.trajectory import Setting

Key = Hashable
Times = dict[Key, list[float]]


def arguments(description: str) -> argparse.ArgumentParser:
    """What every benchmark of a model takes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=models.EMBEDDED)
    parser.add_argument("--corpus", default="pydoc")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    return parser


def loaded(args: argparse.Namespace) -> Work:
    """The model and the blocks that the arguments name."""
    return Setting(args.model, args.corpus, args.context, args.blocks, args.dtype, "stream").load(args.device)


def seconds(ways: Mapping[Key, Callable[[], object]], rounds: int, device: str) -> tuple[Times, dict[Key, float]]:
    """Seconds of each way by round, and their medians. A drift of the clock meets all ways alike."""
    found: Times = {way: [] for way in ways}
    for _ in range(rounds):
        for way, function in ways.items():
            found[way].append(timed(function, device))
    return found, {way: median(times) for way, times in found.items()}


def described(args: argparse.Namespace, work: Work) -> dict[str, object]:
    """The head of a report: what was measured, where."""
    return {
        "kind": "measured",
        "model": args.model,
        "context": args.context,
        "blocks": len(work.tokens),
        "batch": work.batch,
        "dtype": args.dtype,
        **environment(work.tokens.device.type),
    }
