"""One function per figure: data in, Matplotlib figure out.

Nothing is read from disk and nothing is computed here beyond axis positions. Two visual rules hold in
every figure of the book: **our measured values are filled and blue, published ones hollow and
vermilion**; a thin line is a two-sided 95 % interval. Differences of losses span decades and may be
negative, so their axes are logarithmic where all values and interval ends are positive and symmetric-
logarithmic otherwise: an interval is never cut off at zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

_CYCLE = sns.color_palette("colorblind").as_hex()
OURS, PAPER, INK = _CYCLE[0], _CYCLE[3], "#404040"
#: Families of operators keep their colour through the book (by the name before the parenthesis).
FAMILY = {"softmax": INK, "topk": _CYCLE[1], "mean_threshold": _CYCLE[2], "grid": _CYCLE[4]}


def style() -> None:
    """Set Matplotlib for the book: white ground, SVG with text as paths, sizes for page and phone."""
    rc = {
        "figure.facecolor": "white",
        "savefig.facecolor": "white",
        "savefig.transparent": False,
        "figure.figsize": (7.0, 4.0),
        "figure.constrained_layout.use": True,
        "figure.dpi": 100,
        "font.size": 10,
        "axes.titlesize": 11,
        "axes.labelsize": 10,
        "legend.fontsize": 9,
        "xtick.labelsize": 9,
        "ytick.labelsize": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "svg.fonttype": "path",
        "svg.hashsalt": "softmaxlab",
    }
    sns.set_theme(context="notebook", style="whitegrid", palette="colorblind", rc=rc)
    try:
        from IPython import get_ipython
        from matplotlib_inline.backend_inline import set_matplotlib_formats
    except ImportError:  # the book's extra is not installed: figures still work as plain Matplotlib
        return
    if get_ipython() is not None:
        set_matplotlib_formats("svg")


def support_sweep(ours: pd.DataFrame, published: pd.DataFrame, *, model: str, reference: str) -> Figure:
    """Perplexity increase against the kept fraction of each row (paper: Figure 1A).

    Args:
        ours: columns kept, value, low, high; all in percent.
        published: columns kept, value; in percent; may be empty.
        model, reference: readable names of the two models.
    """
    fig, ax = plt.subplots(figsize=(7.0, 4.0))
    _points(ax, ours["kept"], ours, OURS, label=f"{model}: measured, 95 % intervals", line="-")
    _points(ax, published["kept"], published, PAPER, label=f"{reference}: published", filled=False, line="--")
    ax.set_xscale("log")
    _fixed_ticks(ax, pd.concat([ours["kept"], published["kept"]]))
    _difference_axis(ax, "y", ours, published)
    ax.set(xlabel="kept fraction of valid keys, target (%)", ylabel="perplexity increase (%)")
    return _finish(fig, ax)


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
        _points(ax, [0], first, PAPER, label=f"{reference}: published, layer 0", filled=False)
        drawn.append(first)
    _points(ax, ours["layer"], ours, OURS, label=f"{model}: measured, pointwise 95 % intervals")
    _difference_axis(ax, "y", *drawn)
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.set(xlabel="target layer ℓ", ylabel="$D_W(\\ell)$, uniform − softmax (nats)")
    ax.grid(False, axis="x")
    return _finish(fig, ax)


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
    _points(top, None, published, PAPER, y=places, label="published, no intervals", filled=False)
    names = [f"{row.model} ({row.params_b:g} B)" for row in published.itertuples()]
    top.set_yticks(places, names)
    mine = np.arange(len(ours))[::-1]
    _points(bottom, None, ours, OURS, y=mine, label="measured, 95 % interval", marker="o")
    bottom.set_yticks(mine, ours["model"])
    bottom.set_ylim(-0.7, len(ours) - 0.3)
    line = pd.DataFrame({"value": [] if limit is None else [limit]}, dtype=float)
    _difference_axis(bottom, "x", published, ours, line)
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
    top.legend(handles[0][0] + handles[1][0], handles[0][1] + handles[1][1], **_KEY, ncols=2)
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
        _points(ax, mine["K"], mine, OURS, label=label, marker=marker, line="-")
        label = f"{reference}: published" if first else None
        _points(ax, theirs["K"], theirs, PAPER, label=label, marker=marker, filled=False, line="--")
        only_range = theirs[theirs["value"].isna()]
        if len(only_range):
            band = (only_range["K"], only_range["low"], only_range["high"])
            ax.fill_between(*band, facecolor=PAPER, edgecolor=PAPER, alpha=0.6, linestyle="--", linewidth=1.5)
        ends.append((series, float(mine["K"].iloc[-1]), float(mine["value"].iloc[-1])))
    ax.set_xscale("log", base=2)
    _fixed_ticks(ax, pd.concat([ours["K"], published["K"]]))
    _difference_axis(ax, "y", ours, published)
    ax.set(xlabel="number of intervals K", ylabel="ΔNLL against softmax (nats)")
    _end_labels(ax, ends)
    return _finish(fig, ax)


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
    left.legend(**_KEY, ncols=2)
    right.axhspan(estimate.low, estimate.high, color=OURS, alpha=0.25, label="95 % interval")
    right.axhline(estimate.mean, color=OURS, linewidth=1.5, label="mean")
    right.axhline(0.0, color=INK, linewidth=0.8, linestyle=":")
    right.plot(losses.index, np.asarray(differences), "o", color=OURS, markersize=4, label="difference")
    right.set(xlabel="block", ylabel="difference of NLL (nats per token)")
    right.legend(**_KEY, ncols=3)
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


_KEY = {
    "loc": "lower left",
    "bbox_to_anchor": (0.0, 1.0),
    "frameon": False,
    "handletextpad": 0.4,
    "borderpad": 0,
}


def _points(ax: Axes, x, frame, colour, *, y=None, label, filled=True, line="none", marker=None) -> None:
    """Values with their intervals; exactly the numbers given. `y` set: values lie along x instead."""
    marker = marker or ("o" if filled else "D")
    values = frame["value"].to_numpy(dtype=float) if "value" in frame else np.full(len(frame), np.nan)
    place = np.asarray(x if y is None else y, dtype=float)
    if {"low", "high"} <= set(frame.columns):
        low, high = frame["low"].to_numpy(dtype=float), frame["high"].to_numpy(dtype=float)
        seen = np.isfinite(low) & np.isfinite(high)
        bars = ax.vlines if y is None else ax.hlines
        bars(place[seen], low[seen], high[seen], color=colour, linewidth=2.0 if filled else 4.0, zorder=2)
    xs, ys = (place, values) if y is None else (values, place)
    face = colour if filled else "white"
    look = {"marker": marker, "markersize": 5.5, "markerfacecolor": face, "markeredgecolor": colour}
    ax.plot(xs, ys, linestyle=line, color=colour, linewidth=1.2, label=label, zorder=3, **look)


def _difference_axis(ax: Axes, which: str, *frames: pd.DataFrame) -> None:
    """Logarithmic where everything drawn is positive, else symmetric-logarithmic around zero."""
    parts = [f[c].to_numpy(dtype=float) for f in frames for c in ("value", "low", "high") if c in f]
    values = np.concatenate([p[np.isfinite(p)] for p in parts]) if parts else np.array([])
    setter = ax.set_yscale if which == "y" else ax.set_xscale
    if values.size and (values > 0).all():
        setter("log")
    else:
        sizes = np.abs(values[values != 0])
        # Linear below the smallest size shown, but over at most five decades in all. A whole power of ten,
        # or the tick labels around zero run into each other.
        threshold = max(sizes.min(), sizes.max() * 1e-5) if sizes.size else 1.0
        setter("symlog", linthresh=10.0 ** np.ceil(np.log10(threshold)))
        (ax.axhline if which == "y" else ax.axvline)(0.0, color=INK, linewidth=0.8)
    if values.size:  # Matplotlib's own margins on these scales can end at the outermost point
        axis = ax.yaxis if which == "y" else ax.xaxis
        scale = axis.get_transform()
        low, high = scale.transform(np.array([values.min(), values.max()]))
        pad = 0.06 * (high - low) or 0.5
        limits = scale.inverted().transform(np.array([low - pad, high + pad]))
        (ax.set_ylim if which == "y" else ax.set_xlim)(*limits)


def _fixed_ticks(ax: Axes, values: pd.Series) -> None:
    """Label the x axis with the values that were used, not with powers of the base."""
    ax.xaxis.set_major_locator(FixedLocator(sorted(set(values.astype(float)))))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    ax.xaxis.set_minor_formatter(NullFormatter())


def _end_labels(ax: Axes, ends: list[tuple[str, float, float]], gap: float = 0.07) -> None:
    """Write each line's name to the right of its last point, moved apart where two would touch."""
    ax.margins(x=0.08)
    ax.autoscale_view()
    to_axes = ax.transAxes.inverted()
    placed = -np.inf
    heights = [(float(to_axes.transform(ax.transData.transform((x, y)))[1]), s) for s, x, y in ends]
    for height, series in sorted(heights):
        placed = max(height, placed + gap)
        ax.text(1.02, placed, series, transform=ax.transAxes, color=INK, fontsize=9, va="center")


def _finish(fig: Figure, ax: Axes) -> Figure:
    """Key above the axes; close so that a notebook shows the figure once."""
    ax.legend(**_KEY)
    plt.close(fig)
    return fig
