"""One model at one context, read from the store by name: the contrasts of the paper's tables over models and contexts.

A cell needs neither the model's files nor its tokenizer, so a page can list every model that anybody measured. What
a cell lacks, because it was not measured or a run was killed halfway, is None and never a part of a number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import pandas as pd

from softmaxlab import conditions, endpoints, gguf, matching, models, statistics
from softmaxlab import corpus as corpora
from softmaxlab.conditions import BASELINE
from softmaxlab.evaluate import find_results
from softmaxlab.losskey import VOCABULARY
from softmaxlab.statistics import Estimate
from softmaxlab.store import Store

#: Backends that compute whole rows, the specification first; the kernel's semantics belong to other pages.
BACKENDS = ("reference", "fused")
DTYPES = ("float32", "bfloat16")
SETTING = ("model", "dtype", "backend")

Weights = Mapping[str, float]


@dataclass(frozen=True)
class Cell:
    """What is stored of one model at one context.

    Attributes:
        model: short name; context: tokens of a block; dtype, backend: of the losses.
        model_id: what fixes the weights, e.g. the hash of a file (`losskey.LossKey`).
        available: complete blocks that the text has, as the run recorded it; None where it did not.
        losses: tidy losses of the conditions that have every block of the baseline.
        solutions: matched temperatures (`matching.solve`), one row a target; empty where none is stored.
        output: tidy vocabulary output of the same conditions and blocks; empty where none is stored.
    """

    model: str
    context: int
    dtype: str
    backend: str
    model_id: str
    available: int | None
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
        """dtype and backend."""
        return f"{self.dtype}, {self.backend}"

    @property
    def label(self) -> str:
        """Model, dtype and backend, and the blocks if some are missing, for the row of a table."""
        part = self.available and self.blocks < self.available
        return f"{self.model} ({self.setting}{f', {self.size} blocks' if part else ''})"

    @property
    def size(self) -> str:
        """Number of blocks, and of how many if not of all."""
        return (
            f"{self.blocks} of {self.available}"
            if self.available and self.blocks < self.available
            else f"{self.blocks}"
        )

    @property
    def weights(self) -> str:
        """Where the weights come from, in words."""
        kind, _, fingerprint = self.model_id.partition(":sha256:")
        if kind != "gguf":
            return f"weights `{self.model_id}`"
        file = gguf.EMBEDDED_FILE if self.model == models.EMBEDDED else f"{self.model}.gguf"
        return f"quantised weights of the file `{file}` (SHA-256 {fingerprint[:12]}…), expanded to {self.dtype}"

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


def every(
    results: str,
    *,
    context: int = 2048,
    corpus: str = "wikitext103",
    bos: str = "stream",
    blocks: int = 0,
    only: str = "",
    backends: Sequence[str] = BACKENDS,
) -> list[Cell]:
    """Every cell in the store at one context, by model, dtype and backend.

    Args:
        results: folder of the store.
        context, corpus, bos: which losses.
        blocks: only the first so many; 0 takes all.
        only: names of models with commas between; empty takes all.
        backends: of `BACKENDS`.

    Returns:
        A cell for each setting that has softmax on at least one block.

    Raises:
        LabError: two files that the names alone cannot tell apart, e.g. two revisions of a model under one name.
    """
    root, corpus = find_results(results), corpora.corpus_name(corpus)
    fixed = {"model": chosen(only) or None, "corpus": corpus, "context": context, "bos": bos}
    fixed |= {"dtype": DTYPES, "backend": backends}
    # Single layers are another chapter's, and many.
    losses = Store(root).frame(**fixed)
    losses = losses[~losses["condition"].str.contains("@", regex=False)]
    output = Store(root, VOCABULARY).frame(**fixed)
    if blocks:
        losses, output = losses[losses["block"] < blocks], output[output["block"] < blocks]
    solutions = _solutions(Store(root), corpus=corpus, context=context, bos=bos)
    made = Store(root).provenance(condition=BASELINE, **fixed)
    found = []
    for setting, rows in losses.groupby(list(SETTING), sort=True):
        whole = _whole(rows)
        if whole.empty:
            continue
        names = dict(zip(SETTING, setting, strict=True))
        same = _matching(output, names)
        same = same[same["condition"].isin(whole["condition"]) & same["block"].isin(whole["block"])]
        run = _matching(made, names).iloc[0]
        said = run.get("blocks_available")
        found.append(
            Cell(
                **names,
                context=context,
                model_id=run["model_id"],
                available=int(str(said).partition(";")[0]) if pd.notna(said) else None,
                losses=whole,
                solutions=solutions.get((names["model"], names["dtype"]), pd.DataFrame()),
                output=same,
            )
        )
    return found


def read(results: str, **filters) -> list[Cell]:
    """One cell a model, by name: of its settings the fullest.

    Args:
        results, filters: as `every`.

    Returns:
        Where a model was run in several dtypes or backends, the one with the most conditions of the core set; if
        they are as many, one that has vocabulary output, then float32, then the reference.
    """
    core = set(conditions.core())

    def worth(cell: Cell) -> tuple:
        fullness = len(core & cell.conditions), not cell.output.empty
        return *fullness, -DTYPES.index(cell.dtype), -BACKENDS.index(cell.backend)

    cells = every(results, **filters)
    groups = {model: [cell for cell in cells if cell.model == model] for model in dict.fromkeys(c.model for c in cells)}
    return [max(group, key=worth) for group in groups.values()]


def chosen(only: str) -> list[str]:
    """Names from a text with commas between."""
    return [text.strip() for text in only.split(",") if text.strip()]


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


def _matching(frame: pd.DataFrame, names: Mapping[str, str]) -> pd.DataFrame:
    for name, value in names.items():
        frame = frame[frame[name] == value]
    return frame


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
