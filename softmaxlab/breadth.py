"""Everything that the pages over models and contexts need of one model, measured in steps, the most worth first.

A step is a named section of conditions at one context length, and the temperatures matched there. Each context is an
experiment of its own: its baseline, its J0 and its temperatures are measured there (paper C.1). Steps store what they
measure block by block, so a run that was stopped goes on where it was when it is started again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import filelock
import pandas as pd

from softmaxlab import conditions, endpoints, evaluate, matching, models, scaling
from softmaxlab.conditions import BASELINE
from softmaxlab.errors import LabError
from softmaxlab.losskey import LOSSES, VOCABULARY
from softmaxlab.matching import Target
from softmaxlab.trajectory import WINDOW_TOKENS

CONTEXTS = (2048, 8192, 16384)

#: What a rehearsal measures: every step, in miniature, on the CPU, of a text that needs no download.
REHEARSAL = {"contexts": (64, 128), "blocks": 2, "corpus": "pydoc", "device": "cpu"}


@dataclass(frozen=True)
class Step:
    """One run.

    Attributes:
        section: named conditions (`conditions.SECTIONS`).
        context: tokens of a block.
        levels: of the matched temperatures, in units of J0; none if empty.
        rescue: the temperatures also with the softmax mass of S_0.9 restored.
    """

    section: str
    context: int
    levels: tuple[float, ...] = ()
    rescue: bool = False

    def __str__(self) -> str:
        more = f", temperatures at {' and '.join(f'{x:g}' for x in self.levels)} J0" if self.levels else ""
        return f"{self.section} at {self.context:,} tokens{more}{', with and without rescue' if self.rescue else ''}"

    @property
    def targets(self) -> list[Target]:
        """What `matching.solve` is asked for, in both directions."""
        return [Target("jsd", level, direction) for level in self.levels for direction in matching.DIRECTIONS]

    def conditions(self, solutions: pd.DataFrame | None) -> list[str]:
        """Condition texts, softmax first; temperatures that missed their target by more than 1 % have none."""
        pairs = endpoints.matched_pairs(solutions) if solutions is not None else {}
        matched = [text for level in self.levels for text in pairs.get(("jsd", level), ())]
        rescued = [conditions.rescued(text) for text in matched] if self.rescue else []
        return conditions.canonical([BASELINE, *conditions.named(self.section), *matched, *rescued])


def plan(contexts: Sequence[int] = CONTEXTS) -> list[Step]:
    """The steps in the order of their worth: Table 3 and D1, then D2 and D3, then longer contexts.

    Args:
        contexts: the core set is measured at the first; at the others what the paper compares there.
    """
    if not contexts:
        raise LabError("no context length was given: name at least one, e.g. 2048")
    first, *longer = contexts
    core = [Step("core", first), Step("core", first, (1.0, 10.0), rescue=True)]
    return [*core, *(Step("long", context, (1.0,)) for context in longer)]


def reachable(model: str, contexts: Iterable[int]) -> tuple[list[int], list[int]]:
    """Context lengths that the model was made for, and those beyond; a model that says nothing has no limit."""
    limit = getattr(models.config(model), "max_position_embeddings", None) or math.inf
    contexts = list(contexts)
    return [c for c in contexts if c <= limit], [c for c in contexts if c > limit]


def measure(
    step: Step,
    *,
    model: str = models.EMBEDDED,
    blocks: int = 0,
    results: str = "results",
    backend: str = "reference",
    batch: int = 0,
    vocabulary: bool = False,
    **setting,
) -> pd.DataFrame:
    """Measure a step, or read what of it is stored.

    Args:
        step: which.
        model, blocks, results, backend, batch: as `evaluate.rows`.
        vocabulary: measure the output distribution in the same passes.
        setting: corpus, dtype, device, device_map, bos, progress, as there.

    Returns:
        The tidy losses.

    Raises:
        LabError: as `evaluate.rows` and `matching.solve`.
    """
    run = {"model": model, "context": step.context, "results": results, **setting}
    texts = step.conditions(_solved(step, blocks, run) if step.levels else None)
    kinds = (LOSSES, VOCABULARY) if vocabulary else (LOSSES,)
    return evaluate.rows(texts, kinds, blocks=blocks, backend=backend, batch=batch, **run)[LOSSES]


def measure_all(steps: Iterable[Step], **setting) -> None:
    """`measure` steps one after the other, in one setting."""
    for step in steps:
        measure(step, **setting)


def long_steps(model: str, contexts: Iterable[int]) -> list[Step]:
    """What the page over lengths compares within each length that the model was made for (paper C.1)."""
    return [Step("long", context, (1.0,)) for context in reachable(model, contexts)[0]]


def _solved(step: Step, blocks: int, run: dict) -> pd.DataFrame:
    def solve() -> pd.DataFrame:
        return matching.solve(step.targets, windows=endpoints.windows(step.context, blocks), **run)

    if not run["results"]:
        return solve()
    # Of several processes one solves and the others then read: temperatures that differ in their last digit would
    # be different conditions, and nothing would be shared.
    root = evaluate.find_results(run["results"])
    root.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(root / ".matching.lock"):
        return solve()


def seconds(step: Step, shape: scaling.Shape, basis: scaling.Basis, *, matching_cost: float = math.nan) -> float:
    """Estimated time of a step on one card, in seconds, without vocabulary output.

    A temperature costs what the basis took of temperatures on average, and a rescued one likewise.

    Args:
        step: which; a step that follows another at the same context pays for its temperatures alone.
        shape, basis: see `scaling.seconds`.
        matching_cost: exact evaluations of the divergence windows that solving takes (`solving_cost`).

    Returns:
        NaN where the basis lacks a condition.
    """
    blocks = evaluate.STREAM_TOKENS // step.context
    one = {"context": step.context, "blocks": blocks}
    if step.rescue:
        texts: list[str] = []
    else:
        texts = conditions.canonical([BASELINE, *conditions.named(step.section)])
    total = sum(scaling.seconds(shape, text, basis, **one) for text in texts)
    for kind in ("temperature(", *(("rescue(",) if step.rescue else ())):
        known = [scaling.seconds(shape, text, basis, **one) for text in basis.seconds if text.startswith(kind)]
        if step.levels:
            total += 2 * len(step.levels) * (sum(known) / len(known) if known else math.nan)
    if step.levels:
        windows = max(1, WINDOW_TOKENS // step.context)
        exact = scaling.seconds(shape, BASELINE, basis, context=step.context, blocks=windows)
        total += matching_cost * exact
    return total
