"""What conditions cost together: measured rates of single ones, of D_W, and an estimate of the whole suite.

The suite is every condition that the store holds of the book's model at the default context for the chapters on
language models: on whole rows, of single layers, in simulated kernels, and of the floor's variants. Its time is
**estimated** from fewer blocks: of a part that `tests/benchmarks/suite.py` ran, the measured time of that; of others a
block's measured time of each condition, added up. What has no rate makes the sum unknown.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

from softmaxlab import conditions, floor, models, paper_models, report, trajectory
from softmaxlab.bench import operator_rows
from softmaxlab.conditions import BASELINE
from softmaxlab.status import table
from softmaxlab.store import Store

CONTEXT, DTYPE, CORPUS = 2048, "float32", "wikitext103"
BACKENDS = (floor.REFERENCE, "fused")
#: Minutes that the suite was to take at most on one H200.
SUITE_TARGET = 6.0
#: Where a rate comes from, in words.
RULES = {
    "measured": "were measured themselves",
    "family": "have the median of their operator with other parameters",
    "bench": "have their operator's time over softmax's in the benchmark of operators",
    "reference": "have the time of the plain reference",
    "together": "were measured in one run of them all",
    "suite": "were measured with their part of the suite in one run, loading the model included",
}

Rate = tuple[float, str]


@dataclass
class Part:
    """Conditions of one kind: how many, seconds by backend, and by which rules the rates were had."""

    name: str
    conditions: int
    seconds: dict[str, float]
    rules: dict[str, Counter] = field(default_factory=dict)


class Rates:
    """Seconds of a block of each condition on one GPU.

    Args:
        root: folder of the book.

    Attributes:
        device: the GPU with the most conditions; empty where there is none.
        seconds: backend → condition → seconds a block, measured.
    """

    def __init__(self, root: Path) -> None:
        tables = [
            (key["device"], key["backend"], dict(zip(frame.condition, frame.seconds_per_block, strict=True)))
            for key, frame, _ in Store(root / "results").tables("cost")
            if (key["model"], key["context"], key["dtype"]) == (models.EMBEDDED, CONTEXT, DTYPE)
            and not key["device"].endswith("CPU")
        ]
        count = Counter()
        for device, _, times in tables:
            count[device] += len(times)
        self.device = count.most_common(1)[0][0] if count else ""
        self.seconds: dict[str, dict[str, float]] = {}
        # Batches of several sizes: the table with more conditions decides where two know one.
        for _, backend, times in sorted((t for t in tables if t[0] == self.device), key=lambda t: len(t[2])):
            self.seconds.setdefault(backend, {}).update(times)
        rows = operator_rows.stored(root / "results", ["cuda"])
        self._bench = {
            (r["backend"], r["operator"]): r["ms"]
            for r in rows
            if (r["device"], r["mode"], r["dtype"], r["context"]) == (self.device, "model", DTYPE, CONTEXT)
        }

    def of(self, condition: str, backend: str) -> Rate:
        """Seconds a block, and the rule that gave them; NaN and `none` where no rule does."""
        there, family = self.seconds.get(backend, {}), condition.partition("(")[0]
        if condition in there:
            return there[condition], "measured"
        alike = [t for c, t in there.items() if c.partition("(")[0] == family and "@" not in c and "@" not in condition]
        if alike:
            return median(alike), "family"
        mine = [ms for (b, o), ms in self._bench.items() if b == backend and o.partition("(")[0] == family]
        exact = self._bench.get((backend, BASELINE))
        if mine and exact and BASELINE in there and "@" not in condition:
            return there[BASELINE] * median(mine) / exact, "bench"
        if backend != floor.REFERENCE and "@" not in condition:
            seconds, rule = self.of(condition, floor.REFERENCE)
            return seconds, rule if rule == "none" else "reference"
        return math.nan, "none"


def read(root: Path, name: str) -> dict | None:
    """A report of `results/bench`; None where there is none."""
    path = root / "results" / "bench" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def parts(root: Path, rates: Rates) -> tuple[list[Part], int]:
    """The parts of the suite with their times, and the blocks of each condition; empty and 0 where none is stored."""
    kinds, blocks = suite_of(root)
    together = partial(_together, read(root, "same_support_cost"), rates)
    made = [_part(name, found, rates, blocks, together) for name, found in kinds.items()]
    for part in made:
        _run(part, blocks, read(root, "suite"), rates)
    return made, blocks


def suite_of(root: Path) -> tuple[dict[str, list[tuple[str, str]]], int]:
    """Part of the suite → its (backend, condition) as stored, and the blocks of each; empty and 0 where none is."""
    stored = Store(root / "results").provenance(model=models.EMBEDDED, corpus=CORPUS, context=CONTEXT, dtype=DTYPE)
    if stored.empty:
        return {}, 0
    pairs = list(zip(stored["backend"], stored["condition"], strict=True))
    exact = [(b, c) for b, c in pairs if b == floor.REFERENCE]
    kinds = {
        "on whole rows": [(b, c) for b, c in exact if "@" not in c],
        "of single layers": [(b, c) for b, c in exact if "@" in c],
        "in a simulated kernel": [(b, c) for b, c in pairs if b.startswith("online(")],
        "of the floor's variants": [(b, c) for b, c in pairs if b in floor.VARIANTS],
    }
    return {name: found for name, found in kinds.items() if found}, int(stored["blocks"].max())


def _part(name: str, found: list[tuple[str, str]], rates: Rates, blocks: int, together: Callable[..., Rate]) -> Part:
    part = Part(name, len(found), {}, {})
    for backend in BACKENDS:
        # A simulated kernel and a variant are backends themselves, whatever computes the rest.
        got = [rates.of(c, backend if b == floor.REFERENCE else b) for b, c in found]
        if any(rule == "none" for _, rule in got) and all("@" in c for _, c in found):
            got = [together(backend, len(found))] * len(found)
        part.seconds[backend] = blocks * sum(seconds for seconds, _ in got)
        part.rules[backend] = Counter(rule for _, rule in got)
    return part


def _run(part: Part, blocks: int, record: dict | None, rates: Rates) -> None:
    """Put the time of one run of the suite in the place of a part's, where all conditions of the part were run."""
    if not record or (record["device"], record["dtype"], record["context"]) != (rates.device, DTYPE, CONTEXT):
        return
    rows = [row for row in record["parts"] if row["part"] == part.name and row["blocks"]]
    if sum(row["conditions"] for row in rows) == part.conditions:
        part.seconds[record["backend"]] = sum(blocks / row["blocks"][-1] * sum(row["seconds"]) for row in rows)
        part.rules[record["backend"]] = Counter({"suite": part.conditions})


def _together(record: dict | None, rates: Rates, backend: str, n: int) -> Rate:
    """Seconds a block of one of n single-layer conditions, from the run that had all of D_W together."""
    exact = rates.seconds.get(backend, {}).get(BASELINE)
    fits = record and (record["backend"], record["device"], record["dtype"]) == (backend, rates.device, DTYPE)
    if not fits or exact is None or (record["model"], record["context"]) != (models.EMBEDDED, CONTEXT):
        return math.nan, "none"
    per_block = median(record["seconds"]["together"]) / record["blocks"]
    return (per_block - exact) / (record["conditions"] - 1), "together"


def suite(root: Path) -> str:
    """The table of the estimate, its verdict, and which rates it rests on."""
    rates = Rates(root)
    found, blocks = parts(root, rates)
    if not found or not rates.device:
        return "Nothing to estimate from: no conditions or no rates of a GPU are stored."
    total = {b: sum(p.seconds[b] for p in found) for b in BACKENDS}
    lines = [(f"conditions {p.name}", p.conditions, *(minutes(p.seconds[b]) for b in BACKENDS)) for p in found]
    lines.append(("all", sum(p.conditions for p in found), *(minutes(total[b]) for b in BACKENDS)))
    lines.append((f"target: at most {SUITE_TARGET:g} min", "", *(_verdict(total[b]) for b in BACKENDS)))
    head = ("part", "conditions", *(f"{b} backend (min, estimated)" for b in BACKENDS))
    said = [table(head, lines), f"**Estimated** for {blocks} blocks a condition on one {rates.device}, {DTYPE}."]
    for b in BACKENDS:
        rules = sum((p.rules[b] for p in found), Counter())
        words = [f"{n} {RULES[rule]}" for rule, n in rules.most_common() if rule in RULES]
        words += [f"{rules['none']} have none"] if rules["none"] else []
        said.append(f"Of the times with the {b} backend {', '.join(words)}.")
    if total["fused"] > 60 * SUITE_TARGET:
        said.append(
            "A pass of the model outside attention is FP32 products, which no fused kernel makes faster; the floor's "
            "variants are programs of their own; and what the fused backend cannot do it hands to the reference."
        )
        if run := read(root, "suite"):
            done = [row for row in run["parts"] if row["blocks"]]
            n, times = max(row["blocks"][-1] for row in done), [sum(row["seconds"]) for row in done]
            # Loading takes no longer than the shortest call.
            least = total["fused"] - (blocks / n - 1) * len(times) * min(times)
            said.append(
                f"The run: {sum(row['conditions'] for row in done)} conditions on {n} of {blocks} blocks in "
                f"{len(times)} calls, **measured**, {minutes(sum(times))} min with compiled kernels. Each call loads "
                "the model, and here that is scaled with the blocks; loading once a call, which takes no longer than "
                f"the shortest call, leaves {minutes(least)} min at least. The reference's simulated kernels are timed "
                "as their PyTorch program."
            )
    listed = conditions.canonical([c for section in _SECTIONS for c in conditions.named(section)])
    stored = set(Store(root / "results").provenance(model=models.EMBEDDED, corpus=CORPUS, context=CONTEXT)["condition"])
    lacking = [c for c in listed if c not in stored]
    if lacking:
        said.append(f"Not stored, and not in the sum: {len(lacking)} of the {len(listed)} conditions of the sections.")
    return "\n\n".join([said[0], " ".join(said[1:]), _paths(root)])


_SECTIONS = (
    *("support", "geometry", "allocation", "reconstruction", "power-of-two", "response-map", "reproducibility"),
    *("anchor", "family"),
)


def minutes(seconds: float) -> str:
    """A time in minutes; a dash where it is not known."""
    return report.number(seconds / 60, 2)


def _verdict(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "unknown"
    return "met" if seconds <= 60 * SUITE_TARGET else f"**missed**, {seconds / 60 / SUITE_TARGET:.1f} times as long"


def _paths(root: Path) -> str:
    """What the divergences on the path take beside the losses."""
    record = read(root, "trajectory_cost")
    if not record or "operators_16" not in record.get("forwards", {}):
        return "What the divergences of the attention rows take beside the losses was not measured."
    tables = Store(root / "results").tables(trajectory.KIND)
    keys = [k for k, _, _ in tables if (k["model"], k["context"]) == (models.EMBEDDED, CONTEXT) and "operator" in k]
    windows = max((k["windows"] for k in keys), default=0)
    forward = record["forward_ms_per_block"] / 1000
    passes = math.ceil(len(keys) / 16) * record["forwards"]["operators_16"]
    path, solving = (windows * forward * n for n in (passes, paper_models.solving_cost(root)))
    return (
        f"Not in the sum: the divergences of {len(keys)} operators on {windows} blocks, {minutes(path)} min, and "
        f"solving for the matched temperatures, {minutes(solving)} min, both **estimated** from measured passes; "
        "what is compiled at a first call; and, where single conditions are added up, loading the model and the text."
    )
