"""What the simulated kernel costs, in exact-softmax evaluations of the reference backend on the same blocks.

    python tests/benchmarks/simulator_cost.py --device cuda

Prints JSON. All variants run in turn in every round, so that a drift of the clock meets each; medians over the
rounds.
"""

from __future__ import annotations

import json
from functools import partial

import in_turn

from softmaxlab.conditions import BF16_PATH, FP8_PATH, Condition
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
    args = in_turn.arguments(__doc__).parse_args()
    work = in_turn.loaded(args)

    def evaluation(text: str, backend: str) -> None:
        for tokens in work.tokens.split(work.batch):
            evaluate_batch(work.model, Condition.parse(text), tokens, backend=backend)

    for pair in PAIRS:
        evaluation(*pair)  # what is made once is made here
    ways = {pair: partial(evaluation, *pair) for pair in PAIRS}
    rounds, seconds = in_turn.seconds(ways, args.rounds, work.tokens.device.type)
    report = {
        **in_turn.described(args, work),
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
