"""The figures of allocation, distortion and reconstruction: data in, Matplotlib figure out.

Colours, markers and axes as in every figure of the book (`drawing`). Where a frame has several series, the
marker tells them apart and the colour stays what it says elsewhere: ours filled blue, the paper's hollow vermilion.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from softmaxlab.drawing import (
    INK,
    KEY,
    OURS,
    PAPER,
    difference_axis,
    end_labels,
    finish,
    fixed_ticks,
    plain_ticks,
    points,
    thin_ticks,
)

MARKERS = "osD^vPX"
DIRECTIONS = {"flattening": "v", "sharpening": "^"}


def allocation_sweep(ours: pd.DataFrame, published: pd.DataFrame, *, model: str, reference: str) -> Figure:
    """Loss increase against the ratio R at a fixed number of intervals (paper: Figure 2A).

    Args:
        ours: columns R, value, low, high (ΔNLL in nats).
        published: columns R, value; may be empty.
        model, reference: readable names of the two models.
    """
    fig, ax = plt.subplots(figsize=(7.0, 4.0))
    points(ax, ours["R"], ours, OURS, label=f"{model}: measured, 95 % intervals", line="-")
    if len(published):
        points(ax, published["R"], published, PAPER, label=f"{reference}: published", filled=False, line="--")
    ax.axvline(1.0, color=INK, linestyle=":", linewidth=1.2)
    ax.set_xscale("log", base=2)
    fixed_ticks(ax, pd.concat([ours["R"], published["R"]]))
    difference_axis(ax, "y", ours, published)
    ax.set(xlabel="R, width of the lowest interval over the highest", ylabel="ΔNLL against softmax (nats)")
    return finish(fig, ax)


def error_ratios(ours: pd.DataFrame, published: pd.DataFrame, *, model: str, reference: str) -> Figure:
    """Three measures of error, each relative to its value at R = 1 (paper: Figure 2B).

    Args:
        ours, published: columns series, R, value (a ratio; 1 at R = 1); of the published series only some R are
            printed.
        model, reference: readable names of the two models.
    """
    fig, ax = plt.subplots(figsize=(7.0, 4.2))
    _series(ax, ours, published, "R", model=f"{model}: measured", reference=f"{reference}: published")
    ax.axhline(1.0, color=INK, linestyle=":", linewidth=1.2)
    ax.set_xscale("log", base=2)
    fixed_ticks(ax, pd.concat([ours["R"], published["R"]]))
    difference_axis(ax, "y", ours, published)
    ax.set(xlabel="R, width of the lowest interval over the highest", ylabel="ratio to R = 1")
    plain_ticks(ax, "y")
    _name_lines(ax, ours, "R")
    return finish(fig, ax)


def forest(panels: Mapping[str, tuple[pd.DataFrame, pd.DataFrame]], *, xlabel: str) -> Figure:
    """A contrast in the paper's models and, set apart below, in ours (paper: Figures 2C, 3B, S6C).

    Args:
        panels: title -> (published, ours), each with columns model, value, low, high (nats). A model that a panel
            has no value for leaves its line empty there.
        xlabel: what the contrast is.
    """
    names = [list(dict.fromkeys(pd.concat([p[i]["model"] for p in panels.values()]))) for i in (0, 1)]
    fig, axes = plt.subplots(
        2,
        len(panels),
        sharex="col",
        sharey="row",
        squeeze=False,
        figsize=(7.0 if len(panels) == 1 else 9.0, 4.8),
        height_ratios=[max(1, len(names[0])), 1.2 * max(1, len(names[1]))],
    )
    looks = (
        {"colour": PAPER, "label": "published, 95 % intervals", "filled": False, "width": 2.0},
        {"colour": OURS, "label": "measured, 95 % interval"},
    )
    for column, (title, frames) in enumerate(panels.items()):
        for row, (frame, look) in enumerate(zip(frames, looks, strict=True)):
            ax = axes[row, column]
            places = len(names[row]) - 1 - frame["model"].map(names[row].index).to_numpy(dtype=float)
            points(ax, None, frame, look["colour"], y=places, **{k: v for k, v in look.items() if k != "colour"})
            ax.set_yticks(range(len(names[row])), names[row][::-1])
            ax.set_ylim(-0.7, len(names[row]) - 0.3)
            ax.grid(False, axis="y")
        if _spans_decades(*frames):
            difference_axis(axes[1, column], "x", *frames)
            thin_ticks(axes[1, column], "x")
        else:
            axes[1, column].xaxis.get_major_locator().set_params(nbins=5 if len(panels) < 3 else 4)
        for ax in axes[:, column]:
            ax.axvline(0.0, color=INK, linestyle=":", linewidth=1.2)
        axes[0, column].set_title(title, loc="left" if len(panels) == 1 else "center")
        axes[1, column].set_xlabel(xlabel)
    handles = [ax.get_legend_handles_labels() for ax in axes[:, 0]]
    fig.legend(
        handles[0][0] + handles[1][0],
        handles[0][1] + handles[1][1],
        loc="outside upper left",
        frameon=False,
        ncols=2,
    )
    plt.close(fig)
    return fig


def response_map(
    points_of: pd.DataFrame,
    fit: Callable[[np.ndarray], np.ndarray] | None,
    published_fit: Callable[[np.ndarray], np.ndarray] | None,
    *,
    model: str,
    reference: str,
) -> Figure:
    """Loss increase against divergence over many interventions, with a fit of each (paper: Figure 3A).

    Args:
        points_of: columns kind, jsd, value (nats), one row an intervention; rows that are not positive in both
            cannot be drawn on logarithmic axes and are left out, as they are of the fit.
        fit: divergence -> ΔNLL of our fit, or None.
        published_fit: the same of the paper's fit; its points are not printed.
        model, reference: readable names of the two models.
    """
    fig, ax = plt.subplots(figsize=(7.0, 4.6))
    shown = points_of[(points_of["jsd"] > 0) & (points_of["value"] > 0)]
    for number, (kind, rows) in enumerate(shown.groupby("kind", sort=False)):
        marker = DIRECTIONS.get(kind, MARKERS[number])
        ax.plot(rows["jsd"], rows["value"], marker, color=OURS, markersize=5.5, alpha=0.8, label=f"{kind}, measured")
    if len(shown):
        span = np.geomspace(shown["jsd"].min(), shown["jsd"].max(), 50)
        for line, colour, style, label in (
            (fit, OURS, "-", f"{model}: our fit"),
            (published_fit, PAPER, "--", f"{reference}: published fit"),
        ):
            if line is not None:
                ax.plot(span, line(span), style, color=colour, linewidth=1.4, label=label)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set(xlabel="mean row-wise JSD (nats)", ylabel="ΔNLL against softmax (nats)")
    if ax.lines:
        ax.legend(**KEY, ncols=3)
    plt.close(fig)
    return fig


def redistribution(leakage: pd.DataFrame, published: pd.DataFrame, change: pd.DataFrame, *, model: str) -> Figure:
    """Where matched distortions put the mass, and what the local output makes of it (paper: Figures S5, S6A, S6B).

    Args:
        leakage: columns level, direction (`flattening` or `sharpening`), value; mass that left S_0.9.
        published: columns level, direction, low, high; ranges over the paper's models.
        change: columns level, direction, value; relative RMS change of pV.
        model: readable name of our model.
    """
    levels = list(dict.fromkeys([*leakage["level"], *published["level"]]))
    fig, (left, right) = plt.subplots(1, 2, figsize=(9.0, 4.0))
    for direction, marker in DIRECTIONS.items():
        for ax, frame in ((left, leakage), (right, change)):
            mine = frame[frame["direction"] == direction]
            label = f"{model}: measured, {direction}"
            points(ax, mine["level"].map(levels.index), mine, OURS, label=label, marker=marker, line="-")
        theirs = published[published["direction"] == direction]
        at = theirs["level"].map(levels.index).to_numpy(dtype=float) + 0.15
        label = "published range, ten models" if direction == "flattening" else None
        left.vlines(at, theirs["low"], theirs["high"], color=PAPER, linewidth=4.0, alpha=0.6, label=label)
    left.axhline(0.0, color=INK, linewidth=0.8)
    right.set_ylim(bottom=0.0)
    for ax in (left, right):
        ax.set_xticks(range(len(levels)), levels)
        ax.set_xlim(-0.4, len(levels) - 0.6)
        ax.set_xlabel("matched level of mean JSD")
        ax.grid(False, axis="x")
    left.set_ylabel("leakage $L_{0.9}$ (mass)")
    right.set_ylabel("relative RMS change of $pV$")
    handles, labels = left.get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside upper left", frameon=False, ncols=3)
    plt.close(fig)
    return fig


def by_layer(ours: pd.DataFrame, *, ylabel: str, model: str) -> Figure:
    """One quantity of the matched directions, layer by layer.

    Args:
        ours: columns direction, layer, value.
        ylabel: the quantity and its unit.
        model: readable name of our model.
    """
    fig, ax = plt.subplots(figsize=(7.0, 3.6))
    for direction, rows in ours.groupby("direction", sort=False):
        label, marker = f"{model}: measured, {direction}", DIRECTIONS[direction]
        points(ax, rows["layer"], rows, OURS, label=label, marker=marker, line="-")
    ax.axhline(0.0, color=INK, linewidth=0.8)
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.set(xlabel="layer", ylabel=ylabel)
    ax.grid(False, axis="x")
    return finish(fig, ax)


def clamp_sweep(ours: pd.DataFrame, published: pd.DataFrame, *, model: str, reference: str) -> Figure:
    """Perplexity increase of Rowmax-PoT against its largest exponent, tail clamped or dropped (paper: D.5).

    Args:
        ours: columns series, K_max, value, low, high (percent).
        published: columns series, K_max, value (percent); may be empty.
        model, reference: readable names of the two models.
    """
    fig, ax = plt.subplots(figsize=(7.0, 4.2))
    measured, printed = f"{model}: measured, 95 % intervals", f"{reference}: published"
    _series(ax, ours, published, "K_max", model=measured, reference=printed)
    ax.set_xscale("log", base=2)
    fixed_ticks(ax, pd.concat([ours["K_max"], published["K_max"]]))
    difference_axis(ax, "y", ours, published)
    ax.set(xlabel="largest exponent $K_{max}$", ylabel="perplexity increase (%)")
    plain_ticks(ax, "y")
    _name_lines(ax, ours, "K_max")
    return finish(fig, ax)


def floor_spread(differences: pd.DataFrame) -> Figure:
    """How far equivalent implementations differ: spread over blocks, and mean (no counterpart in the paper).

    Args:
        differences: columns condition, variant, mean, sd (nats), as of `floor.differences`.
    """
    names = list(dict.fromkeys(differences["condition"]))
    fig, (left, right) = plt.subplots(1, 2, sharey=True, figsize=(9.0, 3.8))
    variants = list(dict.fromkeys(differences["variant"]))
    for number, (variant, marker) in enumerate(zip(variants, MARKERS, strict=False)):
        rows = differences[differences["variant"] == variant]
        places = len(names) - 1 - rows["condition"].map(names.index).to_numpy(dtype=float)
        places = places + 0.15 * (number - (len(variants) - 1) / 2)
        for ax, size in ((left, rows["sd"]), (right, rows["mean"].abs())):
            frame = pd.DataFrame({"value": size.to_numpy(dtype=float)})
            points(ax, None, frame, OURS, y=places, label=f"{variant}, measured", marker=marker)
    difference_axis(left, "x", differences[["sd"]].rename(columns={"sd": "value"}))
    difference_axis(right, "x", differences[["mean"]].abs().rename(columns={"mean": "value"}))
    left.set_yticks(range(len(names)), names[::-1])
    left.set_ylim(-0.6, len(names) - 0.4)
    left.set_xlabel("standard deviation over blocks (nats)")
    right.set_xlabel("absolute mean difference (nats)")
    for ax in (left, right):
        plain_ticks(ax, "x")
        ax.grid(False, axis="y")
    handles, labels = left.get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside upper left", frameon=False, ncols=3)
    plt.close(fig)
    return fig


def _series(ax: Axes, ours: pd.DataFrame, published: pd.DataFrame, x: str, *, model: str, reference: str) -> None:
    """One line a series, ours and the paper's, told apart by marker; only the first of each enters the key."""
    for number, series in enumerate(pd.unique(ours["series"])):
        look = {"marker": MARKERS[number]}
        mine = ours[ours["series"] == series].sort_values(x)
        theirs = published[published["series"] == series].sort_values(x)
        points(ax, mine[x], mine, OURS, label=None if number else model, line="-", **look)
        if len(theirs):
            points(ax, theirs[x], theirs, PAPER, label=reference, filled=False, line="--", **look)
            reference = None


def _name_lines(ax: Axes, ours: pd.DataFrame, x: str) -> None:
    last = ours.sort_values(x).groupby("series", sort=False).tail(1)
    end_labels(ax, list(zip(last["series"], last[x].astype(float), last["value"].astype(float), strict=True)))


def _spans_decades(*frames: pd.DataFrame, ratio: float = 30.0) -> bool:
    """Whether the largest value would press the others together on a linear axis."""
    values = np.abs(np.concatenate([f["value"].to_numpy(dtype=float) for f in frames]))
    values = values[np.isfinite(values)]
    return bool(values.size and values.max() > ratio * np.median(values))
