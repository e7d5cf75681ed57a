"""The figures of the kernel's patch and its gates: data in, Matplotlib figure out.

Colours and markers as in every figure of the book (`drawing`): ours filled and blue, published hollow and vermilion.
Bounds that a reading must keep are green bands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from softmaxlab.drawing import CYCLE, INK, OURS, PAPER

BOUND = CYCLE[2]
#: Of a box in the loop: face, edge, ink, and what the key says of it.
KINDS = {
    "replaced": (OURS, OURS, "white", "replaced"),
    "exact": ("white", BOUND, INK, "an exponential that stays exact"),
    "kept": ("white", "#b0b0b0", INK, "untouched"),
}


def sites(loops: Sequence[tuple[str, Sequence[tuple[str, str]], Sequence[tuple[str, int, int]]]]) -> Figure:
    """Where in a kernel's loop the exponential stands: one row of boxes a kernel, left to right (no counterpart).

    Args:
        loops: title; boxes as (text, kind of `KINDS`), of which the `exact` ones stand below the others; and names of
            methods over boxes, as (name, first box, last box), counted among those of the upper line.
    """
    fig, axes = plt.subplots(len(loops), 1, squeeze=False, figsize=(9.0, 2.0 * len(loops) + 0.4))
    for ax, (title, boxes, methods) in zip(axes[:, 0], loops, strict=True):
        upper = [box for box in boxes if box[1] != "exact"]
        lower = [box for box in boxes if box[1] == "exact"]
        for i, (text, kind) in enumerate(upper):
            _box(ax, i, 0.0, text, kind)
            if i:
                ax.annotate("", (i - 0.43, 0.0), (i - 0.57, 0.0), arrowprops={"arrowstyle": "->", "color": INK})
        for i, (text, kind) in enumerate(lower):
            _box(ax, 2.1 + 3.6 * i, -0.95, text, kind, width=3.2, height=0.52)
        for name, first, last in methods:
            ax.plot([first - 0.42, last + 0.42], [0.56, 0.56], color=INK, linewidth=1.0)
            ax.text(
                (first + last) / 2, 0.63, name, ha="center", va="bottom", fontsize=7.5, family="monospace", color=INK
            )
        ax.set(xlim=(-0.55, max(len(boxes) - len(lower) for _, boxes, _ in loops) - 0.45), ylim=(-1.3, 1.05))
        ax.set_title(title, loc="left")
        ax.axis("off")
    for face, edge, _, name in KINDS.values():
        axes[0, 0].scatter([], [], marker="s", s=70, facecolor=face, edgecolor=edge, linewidth=1.5, label=name)
    return _keyed(fig, axes[0, 0], ncols=3)


def _box(ax: Axes, x: float, y: float, text: str, kind: str, *, width: float = 0.84, height: float = 0.86) -> None:
    face, edge, ink, _ = KINDS[kind]
    corner = (x - width / 2, y - height / 2)
    look = {"boxstyle": "round,pad=0,rounding_size=0.06", "facecolor": face, "edgecolor": edge, "linewidth": 1.5}
    ax.add_patch(FancyBboxPatch(corner, width, height, **look))
    ax.text(x, y, text, ha="center", va="center", fontsize=8.5, color=ink, linespacing=1.25)


def element_wise(
    single: Mapping, several: Mapping, published: Mapping[str, tuple[float, float]], *, kind: str
) -> Figure:
    """Probabilities read off a kernel, element by element, against their bounds (paper: Figure S1).

    Args:
        single, several: of the gate of one tile and that of several, as `gates.run` gives their distributions:
            histograms `residual`, `ratio`, `unnormalised` and `shift`, each with low, high and counts, and `bounds`.
        published: the paper's least and largest of `ratio`, `unnormalised` and `shift`, in octaves.
        kind: of our readings: measured or simulated.
    """
    fig, (left, right) = plt.subplots(1, 2, figsize=(9.0, 4.2), width_ratios=(1, 1.7))
    _bars(left, single["residual"], color=OURS, label=kind)
    left.set(xlabel="residual of a probability", ylabel="elements in a bin", yscale="log")
    left.set_title("A  one tile", loc="left")
    left.locator_params(axis="x", nbins=4)
    left.ticklabel_format(axis="x", style="sci", scilimits=(-2, 2))

    low, high = several["bounds"]["ratio"]
    right.axvspan(low, high, color="#000000", alpha=0.07, linewidth=0, label="bound of the ratio")
    low, high = several["bounds"]["unnormalised"]
    right.axvspan(low, high, color=BOUND, alpha=0.22, linewidth=0, label="envelope of the operator")
    _bars(right, several["ratio"], color=OURS, label=f"normalised ratio, {kind}")
    _bars(right, several["unnormalised"], color=INK, filled=False, label=f"unnormalised error, {kind}")
    right.set_yscale("log")
    bottom, top = right.get_ylim()
    right.set_ylim(bottom, top * 60)
    places = {"ratio": 20, "unnormalised": 8, "shift": 3}
    names = {"ratio": "ratio", "unnormalised": "error", "shift": "shift"}
    shift = several["shift"]
    right.hlines(
        top * 1.7, shift["low"], shift["high"], color=OURS, linewidth=3, label=f"shift at the row maximum, {kind}"
    )
    for name, (least, largest) in published.items():
        y = top * places[name]
        right.plot([least, largest], [y, y], "-D", color=PAPER, markerfacecolor="white", markersize=5, linewidth=1.0)
        right.annotate(
            names[name], (largest, y), (7, 0), textcoords="offset points", va="center", fontsize=8, color=INK
        )
    right.plot([], [], "-D", color=PAPER, markerfacecolor="white", label="range, published (FP8)")
    right.set_xlabel("octaves")
    right.set_title("B  several tiles", loc="left")
    return _keyed(fig, right, ncols=2)


def _bars(ax: Axes, histogram: Mapping, *, color: str, label: str, filled: bool = True) -> None:
    edges = np.linspace(histogram["low"], histogram["high"], len(histogram["counts"]) + 1)
    look = {"fill": True, "color": color, "alpha": 0.75} if filled else {"color": color, "linewidth": 1.3}
    ax.stairs(histogram["counts"], edges, label=label, baseline=0.5, **look)


def _keyed(fig: Figure, ax: Axes, ncols: int) -> Figure:
    handles, labels = ax.get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside upper left", frameon=False, ncols=ncols, handletextpad=0.4)
    plt.close(fig)
    return fig
