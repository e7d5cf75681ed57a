"""The page on the paper's own ten models: what fills them in, what it would take, and what the chapters then show.

Times and memory are estimated (`scaling`) from what a small model took and are marked so; nothing is measured here.
"""

from __future__ import annotations

import json
import math
import string
from pathlib import Path

from softmaxlab import breadth, cross_model, lookup, matching, paper, report, scaling
from softmaxlab.models import PAPER_MODELS
from softmaxlab.scaling import CARDS, SHAPES, Basis
from softmaxlab.store import Store

#: Passes over the divergence windows that solving for temperatures has taken at most, in what is stored.
_PASSES = 3


def write_page(root: Path) -> Path | None:
    """Write `book/_generated/paper_models.md` from its template, `book/paper_models-template.md`; None without one."""
    template = root / "book" / "paper_models-template.md"
    if not template.is_file():
        return None
    text = string.Template(template.read_text(encoding="utf-8")).substitute(
        stored=_stored(root), models=_models(root), time=_time(root), commands=_commands()
    )
    page = root / "book" / "_generated" / "paper_models.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(text, encoding="utf-8")
    return page


def contexts(name: str) -> list[int]:
    """The lengths at which the paper evaluates a model, by our name of it (C.1)."""
    table = lookup.published_rows("c2_long_context", model=printed_name(name), metric="D_R21")
    return sorted({breadth.CONTEXTS[0], *table["context"].astype(int)})


def printed_name(name: str) -> str:
    """The paper's name of a model."""
    listed = {str(m).lower(): str(m) for m in paper.table("table3_cross_model")["model"]}
    return listed[name]


def solving_cost(root: Path) -> float:
    """Exact evaluations of the divergence windows that solving took, from above; NaN where none was timed."""
    path = root / "results" / "bench" / "trajectory_cost.json"
    if not path.is_file():
        return math.nan
    once = json.loads(path.read_text(encoding="utf-8"))["forwards"].get("matching_16", math.nan)
    passes = [int(frame["passes"].max()) for _, frame, _ in Store(root / "results").tables(matching.KIND)]
    return once * max(passes, default=_PASSES)


def estimates(name: str, basis: Basis, matching_cost: float) -> dict[breadth.Step, float]:
    """Seconds of each step of a model on one group of cards that holds it, estimated; NaN where it cannot be."""
    steps = breadth.plan(contexts(name))
    return {step: breadth.seconds(step, SHAPES[name], basis, matching_cost=matching_cost) for step in steps}


def _stored(root: Path) -> str:
    there = {cell.model for cell in cross_model.read(str(root / "results"))} & set(PAPER_MODELS)
    listed = ", ".join(f"`{name}`" for name in PAPER_MODELS if name in there)
    return f"{len(there)} of the ten are in this book's store{f': {listed}' if there else ''}"


def _models(root: Path) -> str:
    from softmaxlab.status import table

    sizes = paper.table("table3_cross_model").drop_duplicates("model").set_index("model")["params_b"]
    stored = {cell.model: cell for cell in cross_model.read(str(root / "results"))}
    rows = []
    for name, hub in PAPER_MODELS.items():
        weights, one_pass = scaling.gigabytes(SHAPES[name], context=max(contexts(name)))
        lengths = ", ".join(f"{L // 1024}K" for L in contexts(name))
        there = f"{stored[name].size} blocks" if name in stored else "no"
        cards = [scaling.cards(SHAPES[name], room, context=max(contexts(name))) for room in CARDS.values()]
        size = (sizes[printed_name(name)], lengths, f"{weights:.1f}", f"{one_pass:.1f}")
        rows.append((f"`{name}`", f"`{hub}`", *size, *cards, there))
    head = ("name here", "on the hub", "parameters (B), published", "lengths, as the paper", "weights (GiB)")
    head += ("a pass at the longest (GiB)", *(f"cards of {card}" for card in CARDS), "in the store, 2K")
    return table(head, rows)


def _time(root: Path) -> str:
    from softmaxlab.status import code, table

    found = scaling.bases(Store(root / "results"))
    if not found:
        return "The cost of softmax was not measured on a GPU yet, so there is nothing to estimate from."
    basis, solving = found[0], solving_cost(root)
    rows = []
    for name in PAPER_MODELS:
        took = estimates(name, basis, solving)
        at = {L: sum(s for step, s in took.items() if step.context == L) for L in breadth.CONTEXTS}
        there = [report.MISSING if L not in contexts(name) else scaling.hours(at[L]) for L in breadth.CONTEXTS]
        rows.append((f"`{name}`", *there, scaling.hours(sum(took.values()))))
    head = ("model", *(f"{L // 1024}K, estimated" for L in breadth.CONTEXTS), "all, estimated")
    return (
        f"{table(head, rows)}\n\nEstimated from {basis.model} in {basis.dtype} on one {basis.device}, backend "
        f"{code(basis.backend)}, with its {len(basis.seconds)} conditions."
    )


def _commands() -> str:
    """The commands, models that one card holds together, each large one by itself."""
    room = max(CARDS.values())
    single = [name for name, shape in SHAPES.items() if name in PAPER_MODELS and scaling.cards(shape, room) == 1]
    by_lengths: dict[tuple[int, ...], list[str]] = {}
    for name in PAPER_MODELS:
        if name in single:
            by_lengths.setdefault(tuple(contexts(name)), []).append(name)
    lines = [
        f"softmaxlab breadth {' '.join(names)} --contexts {' --contexts '.join(map(str, lengths))}"
        for lengths, names in by_lengths.items()
    ]
    for name in PAPER_MODELS:
        if name not in single:
            lengths = " --contexts ".join(map(str, contexts(name)))
            lines.append(f"softmaxlab breadth {name} --dtype bfloat16 --device-map auto --contexts {lengths}")
    return "\n".join(lines)
