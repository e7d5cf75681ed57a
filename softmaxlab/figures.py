"""One function per figure: data in, Matplotlib figure out.

Nothing is read from disk and nothing is computed here beyond axis positions. The rules that all figures keep
to (colours, markers, axes) are in `drawing`; the figures of the second part in `figures_distortion`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from softmaxlab.drawing import (
    FAMILY,
    INK,
    KEY,
    OURS,
    difference_axis,
    end_labels,
    finish,
    fixed_ticks,
    plain_ticks,
    points,
)
from softmaxlab.drawing import PAPER as PAPER
from softmaxlab.drawing import style as style


def support_sweep(ours: pd.DataFrame, published: pd.DataFrame, *, model: str, reference: str) -> Figure:
    """Perplexity increase against the kept fraction of each row (paper: Figure 1A).

    Args:
        ours: columns kept, value, low, high; all in percent.
        published: columns kept, value; in percent; may be empty.
        model, reference: readable names of the two models.
    """
    fig, ax = plt.subplots(figsize=(7.0, 4.0))
    points(ax, ours["kept"], ours, OURS, label=f"{model}: measured, 95 % intervals", line="-")
    points(ax, published["kept"], published, PAPER, label=f"{reference}: published", filled=False, line="--")
    ax.set_xscale("log")
    fixed_ticks(ax, pd.concat([ours["kept"], published["kept"]]))
    difference_axis(ax, "y", ours, published)
    ax.set(xlabel="kept fraction of valid keys, target (%)", ylabel="perplexity increase (%)")
    return finish(fig, ax)


def same_support(
    ours: pd.DataFrame,
    *,
    model: str,
    reference: str = "",
    published_range: tuple[float, float] | None = None,
    published_first: float | None = None,
) -> Figure:
    """Uniform minus softmax weights on one support, layer by layer (paper: Figure 1B).

    Args:
        ours: columns layer, value, low, high (nats), one row a layer.
        published_range: smallest and largest published value over all layers but the first.
        published_first: the published value of layer 0.
    """
    fig, ax = plt.subplots(figsize=(7.0, 4.0))
    drawn = [ours]
    if published_range is not None:
        low, high = published_range
        label = f"{reference}: published range, layers after the first"
        ax.axhspan(low, high, facecolor=PAPER, alpha=0.15, edgecolor=PAPER, linestyle="--", label=label)
        drawn.append(pd.DataFrame({"value": [low, high]}))
    if published_first is not None:
        first = pd.DataFrame({"value": [published_first]})
        points(ax, [0], first, PAPER, label=f"{reference}: published, layer 0", filled=False)
        drawn.append(first)
    points(ax, ours["layer"], ours, OURS, label=f"{model}: measured, pointwise 95 % intervals")
    difference_axis(ax, "y", *drawn)
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.set(xlabel="target layer ℓ", ylabel="$D_W(\\ell)$, uniform − softmax (nats)")
    ax.grid(False, axis="x")
    return finish(fig, ax)


def across_models(published: pd.DataFrame, ours: pd.DataFrame, *, limit: float | None = 1.0) -> Figure:
    """One condition over the paper's models, and ours set apart from them (paper: Figure 1C).

    Args:
        published: columns model, params_b (billions), value (perplexity increase, %).
        ours: columns model, value, low, high; normally one row.
        limit: a reference line, in percent.
    """
    published = published.sort_values("params_b")
    fig, (top, bottom) = plt.subplots(
        2,
        1,
        sharex=True,
        figsize=(7.0, 4.6),
        height_ratios=[len(published), 1.2 * max(1, len(ours))],
    )
    places = np.arange(len(published))[::-1]
    points(top, None, published, PAPER, y=places, label="published, no intervals", filled=False)
    names = [f"{row.model} ({row.params_b:g} B)" for row in published.itertuples()]
    top.set_yticks(places, names)
    mine = np.arange(len(ours))[::-1]
    points(bottom, None, ours, OURS, y=mine, label="measured, 95 % interval", marker="o")
    bottom.set_yticks(mine, ours["model"])
    bottom.set_ylim(-0.7, len(ours) - 0.3)
    line = pd.DataFrame({"value": [] if limit is None else [limit]}, dtype=float)
    difference_axis(bottom, "x", published, ours, line)
    plain_ticks(bottom, "x")
    for ax in (top, bottom):
        ax.grid(False, axis="y")
        if limit is not None:
            ax.axvline(limit, color=INK, linestyle=":", linewidth=1.2)
    if limit is not None:
        note = {
            "xytext": (-4, 2),
            "textcoords": "offset points",
            "ha": "right",
            "va": "bottom",
            "fontsize": 9,
        }
        top.annotate(f"{limit:g} %", (limit, 0), xycoords=("data", "axes fraction"), color=INK, **note)
    bottom.set_xlabel("perplexity increase (%)")
    handles = [ax.get_legend_handles_labels() for ax in (top, bottom)]
    top.legend(handles[0][0] + handles[1][0], handles[0][1] + handles[1][1], **KEY, ncols=2)
    plt.close(fig)
    return fig


def interval_sweep(ours: pd.DataFrame, published: pd.DataFrame, *, model: str, reference: str) -> Figure:
    """Loss against the number of grid intervals, one line per weight map (paper: Figure S4).

    Args:
        ours: columns series, K, value, low, high (ΔNLL in nats).
        published: columns series, K, value, and optionally low, high; a row without a value but with low
            and high is a published range, drawn as a bar.
        model, reference: readable names of the two models.
    """
    fig, ax = plt.subplots(figsize=(7.0, 4.4))
    markers = dict(zip(pd.unique(ours["series"]), "osD^v", strict=False))
    ends = []
    for number, (series, marker) in enumerate(markers.items()):
        mine = ours[ours["series"] == series].sort_values("K")
        theirs = published[published["series"] == series].sort_values("K")
        first = number == 0
        label = f"{model}: measured, 95 % intervals" if first else None
        points(ax, mine["K"], mine, OURS, label=label, marker=marker, line="-")
        label = f"{reference}: published" if first else None
        points(ax, theirs["K"], theirs, PAPER, label=label, marker=marker, filled=False, line="--")
        only_range = theirs[theirs["value"].isna()]
        if len(only_range):
            band = (only_range["K"], only_range["low"], only_range["high"])
            ax.fill_between(*band, facecolor=PAPER, edgecolor=PAPER, alpha=0.6, linestyle="--", linewidth=1.5)
        ends.append((series, float(mine["K"].iloc[-1]), float(mine["value"].iloc[-1])))
    ax.set_xscale("log", base=2)
    fixed_ticks(ax, pd.concat([ours["K"], published["K"]]))
    difference_axis(ax, "y", ours, published)
    ax.set(xlabel="number of intervals K", ylabel="ΔNLL against softmax (nats)")
    end_labels(ax, ends)
    return finish(fig, ax)


def paired_blocks(losses: pd.DataFrame, differences: Sequence[float], estimate, *, names: tuple[str, str]):
    """Why blocks are paired: their losses scatter far more than their differences.

    Args:
        losses: index block, two columns of NLL (nats), in the order of `names`.
        differences: second column minus first, one a block (nats).
        estimate: the mean difference with its interval (`statistics.Estimate`).
        names: text forms of the two operators.
    """
    fig, (left, right) = plt.subplots(1, 2, figsize=(9.0, 3.6))
    for column, name, marker in zip(losses.columns, names, "os", strict=True):
        colour = FAMILY.get(name.split("(")[0], OURS)
        left.plot(losses.index, losses[column], marker, color=colour, markersize=4, label=name, alpha=0.8)
    left.set(xlabel="block", ylabel="NLL (nats per token)")
    left.legend(**KEY, ncols=2)
    right.axhspan(estimate.low, estimate.high, color=OURS, alpha=0.25, label="95 % interval")
    right.axhline(estimate.mean, color=OURS, linewidth=1.5, label="mean")
    right.axhline(0.0, color=INK, linewidth=0.8, linestyle=":")
    right.plot(losses.index, np.asarray(differences), "o", color=OURS, markersize=4, label="difference")
    right.set(xlabel="block", ylabel="difference of NLL (nats per token)")
    right.legend(**KEY, ncols=3)
    for ax in (left, right):
        ax.xaxis.get_major_locator().set_params(integer=True)
    plt.close(fig)
    return fig


def row_weights(distance: Sequence[float], weights: Mapping[str, Sequence[float]]) -> Figure:
    """What operators make of one score row: weight against the distance from the row's maximum.

    Args:
        distance: Δ of each key (nats), in any order, shape (n,).
        weights: text form of the operator -> weights relative to the row maximum, shape (n,); zeros
            (keys outside the support) are drawn at the bottom of the axis.
    """
    distance = np.asarray(distance, dtype=float)
    order = np.argsort(distance)
    fig, axes = plt.subplots(1, len(weights), sharex=True, sharey=True, figsize=(9.0, 3.0), squeeze=False)
    positive = [np.asarray(w, float)[np.asarray(w, float) > 0] for w in weights.values()]
    floor = min((float(w.min()) for w in [*positive, np.exp(-distance)] if w.size), default=1.0) / 10
    for ax, (name, values) in zip(axes[0], weights.items(), strict=True):
        values = np.maximum(np.asarray(values, dtype=float), floor)
        ax.plot(distance[order], np.exp(-distance[order]), color="0.6", linewidth=1.2, linestyle="--")
        ax.plot(distance[order], values[order], ".", color=FAMILY.get(name.split("(")[0], OURS), markersize=4)
        ax.set_title(name if len(name) < 20 else name.replace("(", "\n(", 1), fontsize=9)
        ax.set_xlabel("Δ (nats)")
    axes[0, 0].set_yscale("log")
    axes[0, 0].set_ylabel("weight ŵ")
    plt.close(fig)
    return fig
