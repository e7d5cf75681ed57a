"""What a trajectory pass and a matching pass cost, in exact-softmax forward passes of the reference backend.

    python tests/benchmarks/trajectory_cost.py --device cuda

Prints JSON. The forward pass, the pass with 16 operators and the pass with 16 temperatures run in turn on the same
blocks, so that a drift of the clock meets all of them; medians over the rounds. The first call of each, which
compiles, is timed apart.
"""

from __future__ import annotations

import json
import math
import warnings

import in_turn
import torch

from softmaxlab.bench.operators import timed
from softmaxlab.conditions import Condition
from softmaxlab.forward import evaluate_batch
from softmaxlab.operators import Softmax, Temperature
from softmaxlab.recorder import Recorder
from softmaxlab.trajectory import parse_operators, run

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


def main() -> None:
    parser = in_turn.arguments(__doc__)
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--profile", default="", help="write a table of the operators' pass by kernel to this file")
    args = parser.parse_args()

    work = in_turn.loaded(args)
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
        rounds, seconds = in_turn.seconds(passes, args.rounds, device)
    report = {
        **in_turn.described(args, work),
        "compiled": compiled,
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
