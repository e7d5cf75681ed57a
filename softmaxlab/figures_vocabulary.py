"""The figures of vocabulary output: data in, Matplotlib figure out; the look is that of every figure (`drawing`)."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from softmaxlab.drawing import INK, KEY, OURS, PAPER, difference_axis, plain_ticks, points, thin_ticks

#: What kind of approximation an operator is, by the name before its parenthesis, and its marker.
KINDS = {
    "support": ("o", ("topk", "mean_threshold")),
    "grid": ("s", ("grid",)),
    "lattice at the row maximum": ("D", ("pot", "rowmax_pot", "h15", "sq", "s", "fa4_poly")),
    "lattice anchored elsewhere": ("X", ("log2p", "log_sqrt2p", "ilpot", "ilpot_h_a", "ilpot_h15")),
    "temperature": ("v", ("temperature",)),
    "temperature, mass restored": ("^", ("rescue",)),
}
OTHER = "other"


def kind(text: str) -> str:
    """The kind of a condition's operator; "other" for one that this figure does not know."""
    name = text.partition("(")[0]
    return next((kind for kind, (_, names) in KINDS.items() if name in names), OTHER)


def output_against_loss(table: pd.DataFrame, published: pd.DataFrame, *, model: str) -> Figure:
    """Divergence of the output distribution, and how often its most probable token changes, beside the loss increase.

    Args:
        table: indexed by condition; columns value, low, high (ΔNLL in nats), jsd (nats), changed (percent of the
            predictions whose most probable token is another one). What is 0 has no place on these axes and is left out.
        published: columns value (ΔNLL in nats), changed (percent); the paper's models under one condition.
        model: readable name of our model.
    """
    fig, (left, right) = plt.subplots(1, 2, sharey=True, figsize=(9.0, 4.6))
    kinds = table.index.map(kind)
    for name in [*KINDS, OTHER]:
        marker = KINDS.get(name, ("P", ()))[0]
        for ax, column in ((left, "jsd"), (right, "changed")):
            mine = table[(kinds == name) & (table[column] > 0).to_numpy()]
            if len(mine):
                points(ax, mine[column], mine, OURS, label=f"{name}, measured", marker=marker, width=1.2)
    theirs = published[published["changed"] > 0]
    points(right, theirs["changed"], theirs, PAPER, label="ten models under Rowmax-PoT, published", filled=False)
    drawn = table[(table["jsd"] > 0) | (table["changed"] > 0)]
    difference_axis(left, "y", drawn, theirs)
    for ax, column in ((left, "jsd"), (right, "changed")):
        if len(positive := np.concatenate([table[column], theirs.get(column, pd.Series(dtype=float))])):
            ax.set_xscale("log" if (positive > 0).any() else "linear")
        plain_ticks(ax, "x")
    left.set(xlabel="JSD of the output distributions (nats)", ylabel="ΔNLL against softmax (nats)", title=model)
    right.set(xlabel="predictions with another most probable token (%)")
    handles = {label: h for ax in (right, left) for h, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    fig.legend(handles.values(), handles.keys(), **KEY | {"loc": "outside upper left", "bbox_to_anchor": None}, ncols=3)
    plt.close(fig)
    return fig


def by_model(tables: Mapping[str, pd.DataFrame]) -> Figure:
    """Loss increase against divergence of the output distribution, one panel a model, on shared axes.

    Args:
        tables: name of a model -> a table as of `output_against_loss`; `changed` is not used.
    """
    columns = min(3, len(tables))
    rows = -(-len(tables) // columns)
    size = (4.5 if columns == 1 else 9.0, 0.8 + 2.8 * rows)
    fig, axes = plt.subplots(rows, columns, sharex=True, sharey=True, squeeze=False, figsize=size)
    for ax, (who, table) in zip(axes.flat, tables.items(), strict=False):
        kinds = table.index.map(kind)
        for name in [*KINDS, OTHER]:
            mine = table[(kinds == name) & (table["jsd"] > 0).to_numpy()]
            if len(mine):
                points(ax, mine["jsd"], mine, OURS, label=name, marker=KINDS.get(name, ("P", ()))[0], width=1.2)
        if ax is not axes[0, 0]:  # which `difference_axis` gives its line
            ax.axhline(0.0, color=INK, linewidth=0.8)
        ax.set_title("\n".join(who.split(" (", 1)).rstrip(")"), fontsize=9.5)
    drawn = pd.concat(tables.values())
    difference_axis(axes[0, 0], "y", drawn)
    thin_ticks(axes[0, 0], "y")
    if (drawn["jsd"] > 0).any():
        axes[0, 0].set_xscale("log")
        plain_ticks(axes[0, 0], "x")
    for ax in axes.flat[len(tables) :]:
        ax.axis("off")
    for ax in axes[-1]:
        ax.set_xlabel("output JSD (nats)")
    for ax in axes[:, 0]:
        ax.set_ylabel("ΔNLL against softmax (nats)")
    handles = {label: h for ax in axes.flat for h, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    fig.legend(handles.values(), handles.keys(), **KEY | {"loc": "outside upper left", "bbox_to_anchor": None}, ncols=3)
    plt.close(fig)
    return fig
