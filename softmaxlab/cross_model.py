"""One model at one context, read from the store by name: the contrasts of the paper's tables over models and contexts.

A cell needs neither the model's files nor its tokenizer, so a page can list every model that anybody measured. What
a cell lacks, because it was not measured or a run was killed halfway, is None and never a part of a number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import pandas as pd

from softmaxlab import conditions, endpoints, matching, models, statistics
from softmaxlab import corpus as corpora
from softmaxlab.conditions import BASELINE
from softmaxlab.evaluate import find_results
from softmaxlab.losskey import VOCABULARY
from softmaxlab.statistics import Estimate
from softmaxlab.store import Store

#: Backends that compute whole rows, the preferred one first; the kernel's semantics belong to other pages.
BACKENDS = ("reference", "fused")
DTYPES = ("float32", "bfloat16")

Weights = Mapping[str, float]


@dataclass(frozen=True)
class Cell:
    """What is stored of one model at one context.

    Attributes:
        model: short name; context: tokens of a block; dtype, backend: of the losses.
        losses: tidy losses of the conditions that have every block of the baseline.
        solutions: matched temperatures (`matching.solve`), one row a target; empty where none is stored.
        output: tidy vocabulary output on the same blocks; empty where none is stored.
    """

    model: str
    context: int
    dtype: str
    backend: str
    losses: pd.DataFrame = field(repr=False)
    solutions: pd.DataFrame = field(repr=False)
    output: pd.DataFrame = field(repr=False)

    @property
    def conditions(self) -> set[str]:
        """Conditions with a loss on every block."""
        return set(self.losses["condition"])

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return self.losses["block"].nunique()

    @property
    def predictions(self) -> int:
        """Number of predicted tokens."""
        return int(self.losses.loc[self.losses["condition"] == BASELINE, "predictions"].sum())

    @property
    def setting(self) -> str:
        """dtype, and the backend where it is not the reference."""
        return self.dtype if self.backend == BACKENDS[0] else f"{self.dtype}, {self.backend}"

    def combination(self, weights: Weights | None) -> Estimate | None:
        """A paired contrast in nats; None if a condition or a second block is not stored."""
        if not weights or not set(weights) <= self.conditions or self.blocks < 2:
            return None
        return statistics.combination(self.losses, weights)

    def delta(self, condition: str) -> Estimate | None:
        """ΔNLL of a condition in nats, or None."""
        return self.combination({condition: 1.0, BASELINE: -1.0})

    def contrast(self, metric: str) -> Estimate | None:
        """One of `CONTRASTS` in nats, or None."""
        return self.combination(CONTRASTS[metric](self))

    def pair(self, level: float) -> tuple[str, str] | None:
        """The flattening and sharpening condition matched at `level` times J0, or None."""
        if self.solutions.empty:
            return None
        return endpoints.matched_pairs(self.solutions).get(("jsd", level))

    def mean_output(self, condition: str, metric: str) -> Estimate | None:
        """Mean over blocks of a vocabulary metric (`vocabulary.METRICS`), or None."""
        rows = self.output[self.output["condition"] == condition]
        if len(rows) != self.blocks or len(rows) < 2:
            return None
        return statistics.bootstrap(rows.sort_values("block")[metric].to_numpy())

    def removed(self, coarse: str, fine: str) -> float | None:
        """Share of the loss increase of `coarse` that `fine` removes, in percent; None unless that is resolved."""
        a, b = self.delta(coarse), self.delta(fine)
        return None if a is None or b is None or a.low <= 0 else 100 * (1 - b.mean / a.mean)


def _allocation(K: int, _: Cell) -> Weights:
    plain, fine = conditions.allocation_contrast(K)
    return {plain: 1.0, fine: -1.0}


def _interaction(_: Cell) -> Weights:
    return endpoints.interaction()


def _matched(level: float, rescue: bool, cell: Cell) -> Weights | None:
    pair = cell.pair(level)
    if pair is None:
        return None
    flat, sharp = endpoints.restored(pair) if rescue else pair
    return {flat: 1.0, sharp: -1.0}


def _gap(level: float, cell: Cell) -> Weights | None:
    pair = cell.pair(level)
    return None if pair is None else endpoints.gap(pair)


#: Contrasts by name: Tables D1 to D3 of the paper, as conditions and weights of a cell.
CONTRASTS: dict[str, Callable[[Cell], Weights | None]] = {
    **{f"D_R({K})": partial(_allocation, K) for K in (21, 16, 32)},
    "I_R": _interaction,
    "D_T(J0)": partial(_matched, 1.0, False),
    "D_T(10J0)": partial(_matched, 10.0, False),
    "D_rescue(10J0)": partial(_matched, 10.0, True),
    "G_gap(10J0)": partial(_gap, 10.0),
}


def read(
    results: str, *, context: int = 2048, corpus: str = "wikitext103", bos: str = "stream", blocks: int = 0
) -> list[Cell]:
    """The cells of every model in the store at one context, by name; of one model the fullest setting.

    Args:
        results: folder of the store.
        context, corpus, bos: which losses.
        blocks: only the first so many; 0 takes all.

    Returns:
        One cell a model that has softmax on at least one block. Where a model was run in several dtypes or
        backends, the one with the most conditions of the core set counts, float32 on the reference if they are as
        many.

    Raises:
        LabError: two files that the names alone cannot tell apart, e.g. two revisions of a model under one name.
    """
    root, corpus = find_results(results), corpora.corpus_name(corpus)
    fixed = {"corpus": corpus, "context": context, "bos": bos, "dtype": DTYPES, "backend": BACKENDS}
    # Single layers are another chapter's, and many.
    losses = Store(root).frame(**fixed)
    losses = losses[~losses["condition"].str.contains("@", regex=False)]
    output = Store(root, VOCABULARY).frame(**fixed)
    if blocks:
        losses, output = losses[losses["block"] < blocks], output[output["block"] < blocks]
    solutions = _solutions(Store(root), corpus=corpus, context=context, bos=bos)
    found: dict[str, list[Cell]] = {}
    for (model, dtype, backend), rows in losses.groupby(["model", "dtype", "backend"], sort=True):
        whole = _whole(rows)
        if whole.empty:
            continue
        same = (output["model"] == model) & (output["dtype"] == dtype) & (output["backend"] == backend)
        solved = solutions.get((model, dtype), pd.DataFrame())
        found.setdefault(model, []).append(Cell(model, context, dtype, backend, whole, solved, output[same]))
    core = set(conditions.core())

    def worth(cell: Cell) -> tuple:
        return len(core & cell.conditions), -DTYPES.index(cell.dtype), -BACKENDS.index(cell.backend)

    return [max(cells, key=worth) for _, cells in sorted(found.items())]


def of(cells: Sequence[Cell], model: str) -> Cell | None:
    """The cell of a model by its name, or None."""
    return next((cell for cell in cells if cell.model == model), None)


def positions(results: str, model: str) -> int | None:
    """The longest context that a stored model was made for, as its runs recorded it; None where none did."""
    if model == models.EMBEDDED:
        return models.EMBEDDED_POSITIONS
    made = Store(find_results(results)).provenance(model=model)
    said = made["max_positions"].dropna() if "max_positions" in made else []
    return int(str(said.iloc[0]).partition(";")[0]) if len(said) else None


def _whole(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of the conditions that have exactly the baseline's blocks."""
    blocks = rows.groupby("condition")["block"].agg(frozenset)
    if BASELINE not in blocks:
        return rows.iloc[:0]
    return rows[rows["condition"].map(blocks) == blocks[BASELINE]].reset_index(drop=True)


def _solutions(store: Store, **fixed: object) -> dict[tuple[str, str], pd.DataFrame]:
    """(model, dtype) → its matched temperatures; of several window counts the largest."""
    best: dict[tuple, tuple[int, pd.DataFrame]] = {}
    for key, frame, _ in store.tables(matching.KIND):
        if any(key.get(name) != value for name, value in fixed.items()) or key["protocol"] != matching.PROTOCOL:
            continue
        target = (key["model"], key["dtype"], key["metric"], key["level"], key["direction"])
        # A tighter tolerance is the better solution of the same windows.
        rank = (key["windows"], -key["tolerance"])
        if target not in best or rank > best[target][0]:
            best[target] = (rank, frame.assign(windows=key["windows"]))
    grouped: dict[tuple[str, str], list[pd.DataFrame]] = {}
    for (model, dtype, *_), (_, frame) in sorted(best.items()):
        grouped.setdefault((model, dtype), []).append(frame)
    return {name: pd.concat(frames, ignore_index=True) for name, frames in grouped.items()}
