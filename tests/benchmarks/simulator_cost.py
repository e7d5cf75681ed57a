"""What the simulated kernel costs, in exact-softmax evaluations of the reference backend on the same blocks.

    python tests/benchmarks/simulator_cost.py --device cuda

Prints JSON. All variants run in turn in every round, so that a drift of the clock meets each; medians over the
rounds. Nothing is asserted here: a time is a measurement, not a test.
"""

from __future__ import annotations

import json
from statistics import median

from trajectory_cost import common_arguments, loaded, timed

from softmaxlab.conditions import BF16_PATH, FP8_PATH, Condition
from softmaxlab.evaluate import environment
from softmaxlab.forward import evaluate_batch

PAIRS = (
    ("softmax()", "reference"),
    ("h15()", "reference"),
    ("softmax()", "online(tile=128,tau=8)"),
    ("h15()", "online(tile=128,tau=8)"),
    ("h15()", "online(tile=128,tau=0)"),
    ("h15()", BF16_PATH),
    ("h15()", FP8_PATH),
)


def main() -> None:
    args = common_arguments(__doc__).parse_args()
    work = loaded(args)
    device = work.tokens.device.type

    def evaluation(text: str, backend: str) -> None:
        for tokens in work.tokens.split(work.batch):
            evaluate_batch(work.model, Condition.parse(text), tokens, backend=backend)

    rounds = {pair: [] for pair in PAIRS}
    for pair in PAIRS:
        evaluation(*pair)  # what is made once is made here
    for _ in range(args.rounds):
        for pair, times in rounds.items():
            times.append(timed(lambda pair=pair: evaluation(*pair), device))
    seconds = {pair: median(times) for pair, times in rounds.items()}
    report = {
        "kind": "measured",
        "model": args.model,
        "context": args.context,
        "blocks": len(work.tokens),
        "batch": work.batch,
        "dtype": args.dtype,
        **environment(device),
        "evaluations": [
            {
                "operator": text,
                "backend": backend,
                "softmax_evaluations": round(seconds[text, backend] / seconds[PAIRS[0]], 3),
                "ms_per_block": round(1000 * seconds[text, backend] / len(work.tokens), 3),
                "rounds_s": rounds[text, backend],
            }
            for text, backend in PAIRS
        ],
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
