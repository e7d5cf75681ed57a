"""What D_W over all layers costs when its conditions share what they can, in runs of each condition alone.

    python tests/benchmarks/same_support_cost.py --device cuda

Prints JSON. The two conditions of every layer and the baseline, once together and once one by one, in turn in
every round; medians over the rounds. Layers are counted in tests/test_evaluate.py; this is the time, which also
holds the embedding and the head, that nothing shares.
"""

from __future__ import annotations

import json

import in_turn

from softmaxlab.conditions import BASELINE, Condition, same_support
from softmaxlab.forward import decoder_layers
from softmaxlab.losskey import LOSSES, LossKey
from softmaxlab.runner import Run


def main() -> None:
    parser = in_turn.arguments(__doc__)
    parser.add_argument("--backend", default="reference")
    args = parser.parse_args()
    work = in_turn.loaded(args)
    layers = len(decoder_layers(work.model))
    texts = [BASELINE, *(text for pair in same_support(layers) for text in pair)]
    parsed = {text: Condition.parse(text) for text in texts}

    def evaluation(wanted: list[str]) -> None:
        names = {"model": args.model, "corpus": args.corpus, "context": args.context, "dtype": args.dtype}
        fixed = names | {"model_id": "", "corpus_id": "", "bos": "stream", "backend": args.backend}
        keys = {t: LossKey(**fixed, condition=t, condition_json=parsed[t].json()) for t in texts}
        Run(work, keys, parsed, wanted, {LOSSES: None}).complete(False)

    def each_alone() -> None:
        for text in texts:
            evaluation([text])

    evaluation([BASELINE, texts[1]])  # what is made once is made here
    ways = {"together": lambda: evaluation(texts), "each_alone": each_alone}
    rounds, seconds = in_turn.seconds(ways, args.rounds, work.tokens.device.type)
    report = {
        **in_turn.described(args, work),
        "backend": args.backend,
        "conditions": len(texts),
        "share_of_time": round(seconds["together"] / seconds["each_alone"], 3),
        "share_of_layers": round((layers + 2) / (2 * layers + 1), 3),
        "seconds": rounds,
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
