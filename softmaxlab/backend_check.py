"""Whether the fused backend and the reference give a model the same losses, end to end, from what is stored of both.

The yardstick is what implementations of the reference differ by among themselves (`floor`): a lattice or a grid turns
a last digit of a score into a step of a weight, so no two programs agree to rounding there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from softmaxlab import floor, report
from softmaxlab.cross_model import Cell
from softmaxlab.evaluate import find_results
from softmaxlab.store import Store

FUSED = "fused"
#: Families of operators without a lattice or a grid (`floor.family`).
CONTINUOUS = ("smooth", "far temperature", "support")


@dataclass(frozen=True)
class Check:
    """One model in one dtype on both backends.

    Attributes:
        model, dtype, blocks: of both.
        found: `floor.between` the two, without the conditions that are equal bit for bit.
        handed: how many those are: the fused backend handed them to the reference, so they check nothing.
        own: the same comparison of the reference with its variants; empty where none is stored.
    """

    model: str
    dtype: str
    blocks: int
    found: pd.DataFrame
    handed: int
    own: pd.DataFrame

    @property
    def said(self) -> str:
        """What was found, in sentences."""
        even = self.found["family"].isin(CONTINUOUS)
        stepped = self.found[~even]
        unresolved = (stepped["resolved"] == "unresolved").sum()
        text = (
            f"**{self.model}** in {self.dtype}, {self.blocks} blocks. The {even.sum()} operators without a lattice or "
            f"grid agree to {_size(self.found[even], 'mean')} nats in the mean and {_size(self.found[even], 'max')} in "
            f"a block. Of the {len(stepped)} with one, {unresolved} have a mean difference that is not resolved from "
            f"zero; the largest mean is {_size(stepped, 'mean')} nats, the largest block {_size(stepped, 'max')}."
        )
        if len(self.own):
            # Of the families that both comparisons have, so that like stands beside like.
            like = self.own[self.own["family"].isin(stepped["family"])]
            text += (
                f" The reference and its own variants, measured on fewer conditions of the same families, are up to "
                f"{_size(like, 'mean')} in the mean and {_size(like, 'max')} in a block apart"
            )
            far = stepped["mean"].abs().max() > like["mean"].abs().max() if len(like) and len(stepped) else False
            text += ", less than what the fused kernels are from the reference." if far else "."
        if self.handed:
            text += (
                f" {self.handed} conditions are equal bit for bit: the reference computed both, so they check nothing "
                f"and are left out."
            )
        return text


def checks(cells: Sequence[Cell], results: str, *, corpus: str, bos: str) -> list[Check]:
    """A check of each model and dtype that is stored on both backends over the same blocks.

    Args:
        cells: every stored cell at one context (`cross_model.every`).
        results, corpus, bos: where they are from, for the reference's variants.
    """
    found = []
    for slow in cells:
        for fast in cells:
            if (slow.backend, fast.backend) != (floor.REFERENCE, FUSED):
                continue
            if (slow.model, slow.dtype) != (fast.model, fast.dtype) or slow.blocks != fast.blocks or slow.blocks < 2:
                continue
            apart = floor.between(slow.losses, fast.losses)
            found.append(
                Check(
                    slow.model,
                    slow.dtype,
                    slow.blocks,
                    apart[~apart["same"]],
                    int(apart["same"].sum()),
                    _variants(slow, results, corpus=corpus, bos=bos),
                )
            )
    return found


def table(found: Sequence[Check]):
    """One row a model, dtype and family of operators: the largest differences, beside those of the variants."""
    rows = {}
    for check in found:
        for family, part in check.found.groupby("family"):
            own = check.own[check.own["family"] == family] if len(check.own) else check.own
            rows[f"{check.model}, {check.dtype}: {family}"] = {
                "conditions, and of the variants": f"{len(part)}, {own['condition'].nunique() if len(own) else 0}",
                "fused, mean": _size(part, "mean"),
                "fused, a block": _size(part, "max"),
                "variants of the reference, mean": _size(own, "mean"),
                "variants of the reference, a block": _size(own, "max"),
            }
    return report.table(
        pd.DataFrame.from_dict(rows, orient="index").rename_axis("model and family"),
        "Largest absolute difference of ΔNLL from the reference's on the same blocks, in nats, in the mean and in a "
        "single block: the fused backend, and variants of the reference. Measured.",
    )


def _variants(cell: Cell, results: str, *, corpus: str, bos: str) -> pd.DataFrame:
    frame = Store(find_results(results)).frame(
        model=cell.model, corpus=corpus, context=cell.context, bos=bos, dtype=cell.dtype, backend=list(floor.VARIANTS)
    )
    frame = frame[frame["block"].isin(cell.losses["block"])]
    parts = [
        floor.between(cell.losses, part).assign(variant=name)
        for name, part in frame.groupby("backend")
        if part["block"].nunique() > 1
    ]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def _size(rows: pd.DataFrame, column: str) -> str:
    return report.number(rows[column].abs().max(), 2) if len(rows) else report.MISSING
