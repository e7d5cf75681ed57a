"""What a trajectory pass and a matching pass cost, in exact-softmax forward passes of the reference backend.

    python tests/benchmarks/trajectory_cost.py --device cuda

Prints JSON. The forward pass, the pass with 16 operators and the pass with 16 temperatures run in turn on the same
blocks, so that a drift of the clock meets all of them; medians over the rounds. The first call of each, which
compiles, is timed apart. Nothing is asserted here: a time is a measurement, not a test.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from statistics import median

import torch

from softmaxlab import models
from softmaxlab.conditions import Condition
from softmaxlab.evaluate import Work, environment
from softmaxlab.forward import evaluate_batch
from softmaxlab.operators import Softmax, Temperature
from softmaxlab.recorder import Recorder
from softmaxlab.trajectory import Setting, parse_operators, run

OPERATORS = (
    "pot(m=0.5)",
    "pot(m=1)",
    "pot(m=2)",
    "pot(m=4)",
    "rowmax_pot(K_max=12)",
    "rowmax_pot(K_max=20)",
    "grid(K=21)",
    "grid(K=21,R=0.25)",
    "grid(K=21,R=4)",
    "grid(K=32,R=4)",
    "grid(K=21,R=4,recon=upper)",
    "grid(K=21,R=4,recon=lerp)",
    "temperature(alpha=0.7)",
    "temperature(alpha=0.9)",
    "temperature(alpha=1.1)",
    "temperature(alpha=1.4)",
)


def timed(function, device: str) -> float:
    """Seconds of one call, the device's queue included."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def common_arguments(description: str) -> argparse.ArgumentParser:
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


def main() -> None:
    parser = common_arguments(__doc__)
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--profile", default="", help="write a table of the operators' pass by kernel to this file")
    args = parser.parse_args()

    work = loaded(args)
    device = work.tokens.device.type
    compiled = device == "cuda" and not args.eager
    temperatures = {f"x{i}": Temperature(math.exp((i - 7.5) / 8)) for i in range(16)}

    def forward() -> None:
        for tokens in work.tokens.split(work.batch):
            evaluate_batch(work.model, Condition(Softmax()), tokens)

    def trajectory(operators: dict, only_divergence: bool = False) -> None:
        recorder = Recorder(operators, device=device, compiled=compiled, only_divergence=only_divergence)
        run(work, recorder, progress=False)

    passes = {
        "forward": forward,
        "no_operators": lambda: trajectory({}),
        "operators_16": lambda: trajectory(parse_operators(OPERATORS)),
        "matching_16": lambda: trajectory(temperatures, only_divergence=True),
    }
    # One operator of each kind alone says where the time goes; the pass without any is taken off.
    kinds = ("pot(m=1)", "rowmax_pot(K_max=12)", "grid(K=21)", "grid(K=21,R=4)", "temperature(alpha=0.9)")
    passes |= {t: lambda t=t: trajectory(parse_operators([t])) for t in kinds}
    with warnings.catch_warnings(record=True) as notices:
        warnings.simplefilter("always")
        first = {name: timed(f, device) for name, f in passes.items()}
        rounds = {name: [] for name in passes}
        for _ in range(args.rounds):
            for name, f in passes.items():
                rounds[name].append(timed(f, device))
    seconds = {name: median(times) for name, times in rounds.items()}
    report = {
        "kind": "measured",
        "model": args.model,
        "context": args.context,
        "blocks": len(work.tokens),
        "batch": work.batch,
        "dtype": args.dtype,
        "compiled": compiled,
        **environment(device),
        "forward_ms_per_block": 1000 * seconds["forward"] / len(work.tokens),
        "forwards": {n: round(s / seconds["forward"], 3) for n, s in seconds.items()},
        "forwards_per_operator": {
            t: round((seconds[t] - seconds["no_operators"]) / seconds["forward"], 3) for t in kinds
        },
        "first_call_s": {n: round(s, 2) for n, s in first.items()},
        "rounds_s": rounds,
        "notices": sorted({str(n.message) for n in notices}),
    }
    if device == "cuda":
        report["peak_memory_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    print(json.dumps(report, indent=1))
    if args.profile:
        activities = [torch.profiler.ProfilerActivity.CPU]
        activities += [torch.profiler.ProfilerActivity.CUDA] if device == "cuda" else []
        with torch.profiler.profile(activities=activities) as profile:
            passes["operators_16"]()
        with open(args.profile, "w", encoding="utf-8") as file:
            sort = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
            file.write(profile.key_averages().table(sort_by=sort, row_limit=60, max_name_column_width=80))


if __name__ == "__main__":
    main()
