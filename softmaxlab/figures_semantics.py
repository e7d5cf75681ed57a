"""The figures of the kernel's semantics: data in, Matplotlib figure out.

Colours, markers and axes as in every figure of the book (`drawing`). A third look joins the two: **our simulated
values are hollow and blue**, between measured (filled, blue) and published (hollow, vermilion).
"""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from softmaxlab.drawing import (
    CYCLE,
    INK,
    KEY,
    OURS,
    PAPER,
    difference_axis,
    end_labels,
    plain_ticks,
    points,
)

MARKERS = "osD^v"
#: The same as characters, hollow and filled, for the names at the ends of lines.
GLYPHS = dict(zip(MARKERS, ("○●", "□■", "◇◆", "△▲", "▽▼"), strict=True))
KINDS = {
    "measured": {"colour": OURS, "filled": True},
    "simulated": {"colour": OURS, "filled": False},
    "published": {"colour": PAPER, "filled": False},
}


def _draw(ax: Axes, at, frame: pd.DataFrame, kind: str, **look) -> None:
    """`points` with the look of a kind; every interval is a thin line."""
    known = KINDS[kind]
    points(ax, at, frame, known["colour"], filled=known["filled"], width=1.6, **look)


def row_in_tiles(keys: pd.DataFrame, tiles: pd.DataFrame, *, envelope: tuple[float, float]) -> Figure:
    """One row as a kernel walks it: scores with running maximum and anchor; what that does to the weights' error.

    Args:
        keys: columns key, score (octaves), whole (error on the whole row) and error (in the kernel), both
            log2 of the weight over the exact one, octaves.
        tiles: columns start, stop (keys), visit (1 first), running and anchor (octaves), one row a tile.
        envelope: lowest and highest error that the operator can have, octaves.
    """
    fig, (top, bottom) = plt.subplots(2, 1, sharex=True, figsize=(8.0, 5.4), height_ratios=[1.25, 1])
    top.plot(keys["key"], keys["score"], ".", color="0.55", markersize=5, label="score")
    for column, style, label in (("running", "-", "running maximum"), ("anchor", "--", "anchor")):
        colour = INK if column == "running" else OURS
        for number, row in enumerate(tiles.itertuples()):
            span = [row.start - 0.5, row.stop - 0.5]
            height = [getattr(row, column)] * 2
            top.plot(span, height, style, color=colour, linewidth=2.0, label=None if number else label)
    best = keys["score"].idxmax()
    top.plot(keys["key"][best], keys["score"][best], "o", color=CYCLE[1], markersize=7, label="row maximum")
    top.set_ylim(bottom=keys["score"].min() - 0.15 * np.ptp(keys["score"]))
    for column, face, label in (("whole", None, "whole row"), ("error", "none", "kernel")):
        bottom.plot(keys["key"], keys[column], "o", color=OURS, markersize=5, markerfacecolor=face, label=label)
        largest = {"color": CYCLE[1], "markersize": 8, "markeredgewidth": 2, "label": f"its row maximum, {label}"}
        bottom.plot(keys["key"][best], keys[column][best], "o", markerfacecolor=face, **largest)
    for end in envelope:
        bottom.axhline(end, color=INK, linestyle=":", linewidth=1.0)
    for ax in (top, bottom):
        for edge in sorted({*tiles["start"], *tiles["stop"]}):
            ax.axvline(edge - 0.5, color="0.8", linewidth=0.8, zorder=0)
        ax.grid(False, axis="x")
        ax.axhline(0.0, color="0.8", linewidth=0.8, zorder=0)
    for row in tiles.itertuples():
        place = ((row.start + row.stop - 1) / 2, 0.03)
        look = {"ha": "center", "color": INK, "fontsize": 9}
        top.annotate(f"visit {row.visit}", place, xycoords=("data", "axes fraction"), **look)
    top.set_ylabel("score (octaves)")
    bottom.set(xlabel="key", ylabel="log₂ of weight\nover exact (octaves)")
    top.legend(**KEY, ncols=4)
    bottom.legend(**KEY, ncols=4)
    plt.close(fig)
    return fig


def fidelity(rows: pd.DataFrame, published: pd.DataFrame, *, model: str, reference: str) -> Figure:
    """Loss increase by semantics and control, ours beside the paper's (paper: Table B2, Figure 4B).

    Args:
        rows: columns label, kind (measured or simulated), value, low, high (ΔNLL, nats).
        published: columns label, value, low, high; a label that `rows` lacks is listed first.
        model, reference: readable names of the two models.
    """
    names = list(dict.fromkeys([*published["label"][~published["label"].isin(rows["label"])], *rows["label"]]))
    fig, ax = plt.subplots(figsize=(8.0, 0.9 + 0.42 * len(names)))
    heights = {name: len(names) - 1 - i for i, name in enumerate(names)}
    for kind, part in rows.groupby("kind", sort=False):
        label = f"{model}: {kind}"
        _draw(ax, None, part, kind, y=part["label"].map(heights) + 0.12, label=label, marker="o")
    at = published["label"].map(heights) - 0.12
    _draw(ax, None, published, "published", y=at, label=f"{reference}: published", marker="D")
    ax.set_yticks(range(len(names)), names[::-1])
    ax.set_ylim(-0.6, len(names) - 0.4)
    ax.axvline(0.0, color=INK, linestyle=":", linewidth=1.2)
    ax.grid(False, axis="y")
    ax.set_xlabel("ΔNLL against softmax of the same semantics (nats), 95 % intervals")
    ax.legend(**KEY, ncols=3)
    plt.close(fig)
    return fig


def lagging_share(shares: pd.DataFrame, published: float, *, ylabel: str, model: str) -> Figure:
    """Rows whose final anchor is below their maximum, layer by layer (no counterpart in the paper).

    Args:
        shares: columns series, layer, value (percent).
        published: the paper's share of synthetic rows, percent.
        ylabel: the quantity and its unit.
        model: readable name of our model.
    """
    fig, ax = plt.subplots(figsize=(7.0, 4.0))
    ends = []
    for number, (series, rows) in enumerate(shares.groupby("series", sort=False)):
        rows = rows.sort_values("layer")
        label = None if number else f"{model}: simulated"
        _draw(ax, rows["layer"], rows, "simulated", label=label, marker=MARKERS[number], line="-")
        glyph = GLYPHS[MARKERS[number]][0]
        ends.append((f"{glyph} {series}", float(rows["layer"].iloc[-1]), float(rows["value"].iloc[-1])))
    ax.axhline(published, color=PAPER, linestyle="--", linewidth=1.4, label="published: synthetic rows, τ = 8")
    ax.set_ylim(-3, 103)
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.set(xlabel="layer", ylabel=ylabel)
    ax.grid(False, axis="x")
    end_labels(ax, ends)
    ax.legend(**KEY, ncols=2)
    plt.close(fig)
    return fig


def by_place(
    ours: pd.DataFrame, published: pd.DataFrame, places: Sequence[str], *, xlabel: str, model: str, reference: str = ""
) -> Figure:
    """Loss increase of several series over named places: the threshold sweep, the family over k.

    Args:
        ours: columns series, place, kind, value, low, high (ΔNLL, nats).
        published: columns place, value, low, high; may be empty.
        places: the places in the order of the axis.
        xlabel: what they are.
        model, reference: readable names of the two models.
    """
    fig, ax = plt.subplots(figsize=(8.0, 4.6))
    order = {place: i for i, place in enumerate(places)}
    series = list(dict.fromkeys(ours["series"]))
    beside = np.arange(len(series) + bool(len(published)))  # next to each other, around their place
    beside = 0.12 * (beside - beside.mean())
    ends, labelled = [], set()
    for name, aside, marker in zip(series, beside, MARKERS, strict=False):
        rows = ours[ours["series"] == name].sort_values("place", key=lambda place: place.map(order))
        x = rows["place"].map(order).to_numpy(dtype=float) + aside
        ax.plot(x, rows["value"], color=OURS, linewidth=1.0, alpha=0.6, zorder=1)
        for kind in dict.fromkeys(rows["kind"]):
            part = (rows["kind"] == kind).to_numpy()
            label = None if kind in labelled else f"{model}: {kind}"
            labelled.add(kind)
            _draw(ax, x[part], rows[part], kind, label=label, marker=marker)
        glyph = GLYPHS[marker][rows["kind"].iloc[-1] == "measured"]
        ends.append((f"{glyph} {name}", x[-1], float(rows["value"].iloc[-1])))
    if len(published):
        x = published["place"].map(order).to_numpy(dtype=float) + beside[-1]
        _draw(ax, x, published, "published", label=f"{reference}: published", marker="X")
    ax.set_xticks(range(len(places)), places)
    ax.grid(False, axis="x")
    ax.set(xlabel=xlabel, ylabel="ΔNLL against softmax of the\nsame semantics (nats)")
    _mostly_linear(ax, ours, published)
    end_labels(ax, ends)
    ax.set_xlim(-0.5, len(places) - 0.5)
    ax.legend(**KEY, ncols=3)
    plt.close(fig)
    return fig


def _mostly_linear(ax: Axes, *frames: pd.DataFrame) -> None:
    """A logarithmic y axis if all is positive; else linear as far as twice the typical value, decades beyond.

    Intervals that cross zero would be most of a symmetric-logarithmic axis whose linear part is as short as usual.
    """
    values = np.concatenate([f[c].to_numpy(dtype=float) for f in frames for c in ("value", "low", "high")])
    if (values > 0).all() or not values.any():
        difference_axis(ax, "y", *frames)
        plain_ticks(ax, "y")
        return
    edge = float(f"{2 * np.median(np.abs(values[values != 0])):.0e}")
    ax.set_yscale("symlog", linthresh=edge, linscale=2.0)
    scale = ax.yaxis.get_transform()
    low, high = scale.transform(np.array([values.min(), values.max()]))
    pad = 0.06 * (high - low) or edge
    ends = scale.inverted().transform(np.array([low - pad, high + pad]))
    beyond = [edge * 10.0**i * m for i in range(7) for m in (1, 2, 5)]
    ticks = np.array([*np.linspace(0, edge, 5), *beyond])
    ax.set_yticks([t for t in np.unique(np.concatenate([-ticks, ticks])) if ends[0] <= t <= ends[1]])
    ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v + 0.0:g}"))  # not −0
    ax.yaxis.set_minor_locator(NullLocator())
    ax.set_ylim(*ends)
    ax.axhline(0.0, color=INK, linewidth=0.8)


def operand_conversion(
    baseline: pd.DataFrame, operator: pd.DataFrame, published: float, *, model: str, reference: str
) -> Figure:
    """What FP8 operands do to softmax, and what a lattice adds to that (no counterpart in the paper).

    Args:
        baseline: columns label, value, low, high: NLL of softmax minus that without the conversion, nats.
        operator: columns label, value, low, high: ΔNLL of the lattice against softmax in the same semantics, nats.
        published: the error that the paper reports for its direct FP8 run, nats.
        model, reference: readable names of the two models.
    """
    names = list(dict.fromkeys([*operator["label"], *baseline["label"]]))
    heights = {name: len(names) - 1 - i for i, name in enumerate(names)}
    fig, (left, right) = plt.subplots(1, 2, sharey=True, figsize=(9.0, 1.5 + 0.45 * len(names)))
    for ax, frame in ((left, baseline), (right, operator)):
        _draw(ax, None, frame, "simulated", y=frame["label"].map(heights), label=f"{model}: simulated", marker="o")
        ax.grid(False, axis="y")
    left.axvline(published, color=PAPER, linestyle="--", linewidth=1.4, label=f"{reference}: published, direct run")
    difference_axis(left, "x", baseline, pd.DataFrame({"value": [published]}))
    plain_ticks(left, "x")
    left.set_yticks(range(len(names)), names[::-1])
    left.set_ylim(-0.6, len(names) - 0.4)
    right.axvline(0.0, color=INK, linestyle=":", linewidth=1.2)
    right.xaxis.get_major_locator().set_params(nbins=5)
    left.set_xlabel("NLL of softmax, change by\nthe conversion (nats)")
    right.set_xlabel("ΔNLL of H15, same semantics (nats)")
    handles, labels = left.get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside upper left", frameon=False, ncols=2)
    plt.close(fig)
    return fig
