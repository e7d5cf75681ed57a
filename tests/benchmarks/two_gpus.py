"""The same evaluation by one process and by two, each on a GPU of its own: time, and every block's loss.

    python tests/benchmarks/two_gpus.py --out results/bench/two_gpus.json

Prints JSON, and writes it to --out. Each run has an empty results folder. The clock runs from the moment when every
process has its model loaded and warm until the last one has all the losses, waiting for the others included; what
starting and loading cost is beside it. A loss that depends on how many processes there are is an error: exit code 1.
With --device cpu it rehearses on any machine, one thread a process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import in_turn

from softmaxlab import evaluate, models, ranks, runner
from softmaxlab.conditions import BASELINE, canonical
from softmaxlab.files import write_text
from softmaxlab.forward import evaluate_batch
from softmaxlab.store import Store

CONDITIONS = (BASELINE, "grid(K=32,R=4)", "rowmax_pot(K_max=20)", "h15()", "temperature(alpha=0.9)")


def arguments() -> argparse.ArgumentParser:
    parser = in_turn.arguments(__doc__)
    parser.set_defaults(corpus="wikitext103", blocks=0, rounds=1)
    parser.add_argument("--backend", default="reference")
    parser.add_argument("--batch", type=int, default=0)
    parser.add_argument("--conditions", nargs="+", default=list(CONDITIONS))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", default="")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)  # results folder of one of the processes
    return parser


def setting(args: argparse.Namespace) -> dict:
    names = ("model", "corpus", "context", "blocks", "dtype", "device", "backend", "batch")
    return {name: getattr(args, name) for name in names}


def worker(args: argparse.Namespace) -> None:
    """One process: wait until all are warm, then evaluate, and write down when that began and ended."""
    folder = Path(args.worker)
    own = {"process_start": time.time()}
    complete = runner.Run.complete

    def timed(self, progress: bool):
        index = list(range(min(self.work.batch, len(self.work.tokens))))
        for text in self.wanted:
            evaluate_batch(self.work.model, self.parsed[text], self.work.tokens[index], backend=args.backend)
        (folder / f"warm-{ranks.rank()}").touch()
        while len(list(folder.glob("warm-*"))) < ranks.world():
            time.sleep(0.01)
        own["start"] = time.time()
        found = complete(self, progress)
        own["end"] = time.time()
        own["passes"] = sum(len(seconds) for seconds in self.seconds.values())
        own["device"], own["batch"] = self.work.provenance["device"], self.size
        return found

    runner.Run.complete = timed
    evaluate.losses(args.conditions, **setting(args), results=str(folder / "results"), progress=False)
    write_text(folder / f"rank-{ranks.rank()}.json", json.dumps(own))


def measure(args: argparse.Namespace, processes: int, folder: Path) -> dict:
    """A run of so many processes: its times and the store it left."""
    program = [str(Path(__file__).resolve()), *sys.argv[1:], "--worker", str(folder)]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    started = time.time()
    subprocess.run([sys.executable, *(torchrun if processes > 1 else []), *program], env=environment, check=True)
    every = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("rank-*.json"))]
    return {
        "processes": processes,
        "seconds": round(max(one["end"] for one in every) - min(one["start"] for one in every), 3),
        "with_start_and_load_s": round(time.time() - started, 3),
        "passes_of_each": [one["passes"] for one in every],
        "made": {name: every[0][name] for name in ("device", "batch")},
    }


def main() -> int:
    args = arguments().parse_args()
    if args.worker:
        worker(args)
        return 0
    device = models.pick_device(args.device)
    runs, frames = [], []
    with tempfile.TemporaryDirectory() as temporary:
        for number, processes in enumerate([1, args.processes] * args.rounds):
            folder = Path(temporary) / str(number)
            folder.mkdir()
            runs.append(measure(args, processes, folder))
            frames.append(Store(folder / "results").frame().set_index(["condition", "block"]).nll.sort_index())
    texts = canonical(args.conditions)
    same_rows = all(frame.index.equals(frames[0].index) for frame in frames)
    apart = {t: max(float((frame[t] - frames[0][t]).abs().max()) for frame in frames) for t in texts}
    one, many = (min(run["seconds"] for run in runs if run["processes"] == n) for n in (1, args.processes))
    made = runs[0]["made"]
    report = {
        "kind": "measured",
        **{name: value for name, value in setting(args).items() if name != "device"},
        **evaluate.environment(device),
        **made,
        "blocks": int(frames[0].index.get_level_values("block").nunique()),
        "conditions": texts,
        "processes": args.processes,
        "speed_up": round(one / many, 3),
        "same_blocks": same_rows,
        "largest_loss_difference": apart,
        "runs": [{name: value for name, value in run.items() if name != "made"} for run in runs],
    }
    print(json.dumps(report, indent=1))
    if args.out:
        write_text(Path(args.out), json.dumps(report, indent=1) + "\n")
    return 0 if same_rows and not apart.get(BASELINE) else 1


if __name__ == "__main__":
    sys.exit(main())
