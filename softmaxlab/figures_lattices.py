"""The figures of anchor and resolution: data in, Matplotlib figure out.

Colours, markers and axes as in every figure of the book (`drawing`): our measured values filled and blue, published
ones hollow and vermilion. Drawings of a construction, which are not measurements, are green and orange. Those of
the family S(Q_k) are in `figures_family`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from softmaxlab.drawing import CYCLE, INK, OURS, PAPER, points

#: Of drawings: what is exact or comes from the row itself, and what a lattice makes of it.
DRAWN, SECOND = CYCLE[2], CYCLE[1]


def anchored_row(
    keys: Sequence[float], lattices: Mapping[str, tuple[Sequence[float], Sequence[float]]], moved: pd.DataFrame
) -> Figure:
    """One row on lattices that differ in their anchor, and the leakage of many rows by their phase on one of them.

    Args:
        keys: log2 of the keys' weights relative to the row maximum, so that the largest is 0.
        lattices: title → (log2 of the lattice's weights, log2 of the weight that each key gets).
        moved: columns series (two), phase (in steps of the lattice), leakage (mass); one row a score row.
    """
    fig, (left, right) = plt.subplots(1, 2, figsize=(9.0, 3.8), width_ratios=[3, 2])
    places = np.arange(len(lattices))[::-1]
    for at, (levels, rounded) in zip(places, lattices.values(), strict=True):
        left.vlines(levels, at - 0.24, at + 0.24, color="0.75", linewidth=1.2, zorder=1)
        first = at == places[0]
        for key, to in zip(keys, rounded, strict=True):
            left.annotate(
                "",
                (to, at - 0.18),
                (key, at + 0.18),
                arrowprops={"arrowstyle": "->", "color": INK, "linewidth": 0.9, "shrinkA": 4, "shrinkB": 4},
            )
        look = {"linestyle": "none", "markersize": 6, "zorder": 3}
        label = "exact weight" if first else None
        left.plot(keys, np.full(len(keys), at + 0.18), "o", color=DRAWN, label=label, **look)
        label = "weight on the lattice" if first else None
        left.plot(rounded, np.full(len(keys), at - 0.18), "s", color=SECOND, label=label, **look)
    left.set_yticks(places, list(lattices))
    left.set_ylim(-0.5, len(lattices) - 0.5)
    left.grid(False)
    left.set_xlabel("log₂ of the weight, from the row maximum (octaves)")
    left.legend(loc="lower left", bbox_to_anchor=(0, 1), frameon=False, ncols=2, handletextpad=0.2, borderpad=0)
    for (series, rows), colour, marker in zip(moved.groupby("series", sort=False), (SECOND, DRAWN), "so", strict=True):
        right.plot(rows["phase"], rows["leakage"], marker, color=colour, markersize=3, alpha=0.7, label=series)
    right.axhline(0.0, color=INK, linewidth=0.8)
    right.set(xlabel="phase φ of the row (steps)", ylabel="leakage of the row (mass)")
    right.legend(loc="lower left", bbox_to_anchor=(0, 1), frameon=False, ncols=2, borderpad=0)
    plt.close(fig)
    return fig


def anchor_and_spacing(ours: pd.DataFrame, published: pd.DataFrame, *, model: str, reference: str) -> Figure:
    """Loss of four lattices by anchor and spacing, ours left and the paper's right (paper: Figure 4A).

    Args:
        ours, published: columns anchor, spacing, value, low, high (ΔNLL in nats). Lines that are parallel on this
            linear axis would mean that the two effects add up.
        model, reference: readable names of the two models.
    """
    fig, axes = plt.subplots(1, 2, sharey=True, figsize=(9.0, 3.9))
    anchors, spacings = (list(dict.fromkeys(ours[c])) for c in ("anchor", "spacing"))
    panels = (
        (axes[0], ours, {"colour": OURS, "filled": True}, f"{model}: measured"),
        (axes[1], published, {"colour": PAPER, "filled": False, "width": 2.0}, f"{reference}: published"),
    )
    for ax, frame, look, title in panels:
        for spacing, marker, line in zip(spacings, "os", ("-", "--"), strict=True):
            rows = frame[frame["spacing"] == spacing]
            x = rows["anchor"].map(anchors.index)
            points(ax, x, rows, label=f"{spacing}, 95 % intervals", marker=marker, line=line, **look)
        ax.axhline(0.0, color=INK, linewidth=0.8)
        ax.set_xticks(range(len(anchors)), [f"{a} anchor" for a in anchors])
        ax.set_xlim(-0.35, len(anchors) - 0.65)
        ax.grid(False, axis="x")
        ax.set_title(title, loc="left", pad=34)
        ax.legend(loc="lower left", bbox_to_anchor=(0, 1), frameon=False, borderpad=0)
    axes[0].set_ylabel("ΔNLL against softmax (nats)")
    plt.close(fig)
    return fig


def phase_by_head(heads: pd.DataFrame, pooled: pd.DataFrame, published: pd.DataFrame, *, reference: str) -> Figure:
    """Correlation of leakage and row phase, head by head (paper: Table B1 has the pooled values).

    Args:
        heads: columns operator, r; one row an operator and head.
        pooled, published: columns operator, value, over all rows; the published may lack operators.
        reference: readable name of the paper's model.
    """
    names = list(pooled["operator"])
    fig, ax = plt.subplots(figsize=(7.5, 0.55 * len(names) + 1.6))
    place = {name: len(names) - 1 - i for i, name in enumerate(names)}
    for number, name in enumerate(names):
        r = heads.loc[heads["operator"] == name, "r"].to_numpy(dtype=float)
        r = np.sort(r[np.isfinite(r)])
        # Spread at right angles to the axis so that heads with one r can be told apart; no meaning.
        at = place[name] + 0.12 + 0.24 * (np.arange(len(r)) * 0.618034 % 1)
        label = "measured, one head" if number == 0 else None
        ax.plot(r, at, "o", color=OURS, markersize=2.5, alpha=0.5, linestyle="none", label=label)
    for frame, colour, filled, label in (
        (pooled, OURS, True, "measured, all rows"),
        (published, PAPER, False, f"{reference}: published, all rows"),
    ):
        if len(frame):
            y = frame["operator"].map(place).to_numpy(dtype=float) - 0.15
            points(ax, None, frame, colour, y=y, filled=filled, label=label)
    ax.axvline(0.0, color=INK, linewidth=0.8)
    ax.set_yticks(list(place.values()), names)
    ax.set_ylim(-0.6, len(names) - 0.4)
    ax.set_xlim(-1.04, max(0.12, 1.1 * heads["r"].fillna(0.0).max()))
    ax.grid(False, axis="y")
    ax.set_xlabel("Pearson's r of leakage $L_{0.9}$ and phase φ over rows")
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1), frameon=False, ncols=3, handletextpad=0.2, borderpad=0)
    plt.close(fig)
    return fig
