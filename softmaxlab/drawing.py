"""How every figure of the book is drawn: its style, its colours, its points, axes and keys.

Two visual rules hold everywhere: **our measured values are filled and blue, simulated ones hollow and blue,
published ones hollow and vermilion**; a thin line is a two-sided 95 % interval. Differences of losses span
decades and may be negative, so their axes are logarithmic where all values and interval ends are positive
and symmetric-logarithmic otherwise: an interval is never cut off at zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

CYCLE = sns.color_palette("colorblind").as_hex()
OURS, PAPER, INK = CYCLE[0], CYCLE[3], "#404040"
#: Families of operators keep their colour through the book (by the name before the parenthesis).
FAMILY = {"softmax": INK, "topk": CYCLE[1], "mean_threshold": CYCLE[2], "grid": CYCLE[4]}


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


KEY = {
    "loc": "lower left",
    "bbox_to_anchor": (0.0, 1.0),
    "frameon": False,
    "handletextpad": 0.4,
    "borderpad": 0,
}


def points(ax: Axes, x, frame, colour, *, y=None, label, filled=True, line="none", marker=None, width=None) -> None:
    """Values with their intervals; exactly the numbers given. `y` set: values lie along x instead.

    Published ranges are drawn wider than intervals; `width` overrides that where the paper prints intervals.
    """
    width = width or (2.0 if filled else 4.0)
    marker = marker or ("o" if filled else "D")
    values = frame["value"].to_numpy(dtype=float) if "value" in frame else np.full(len(frame), np.nan)
    place = np.asarray(x if y is None else y, dtype=float)
    if {"low", "high"} <= set(frame.columns):
        low, high = frame["low"].to_numpy(dtype=float), frame["high"].to_numpy(dtype=float)
        seen = np.isfinite(low) & np.isfinite(high)
        bars = ax.vlines if y is None else ax.hlines
        bars(place[seen], low[seen], high[seen], color=colour, linewidth=width, zorder=2)
    xs, ys = (place, values) if y is None else (values, place)
    face = colour if filled else "white"
    look = {"marker": marker, "markersize": 5.5, "markerfacecolor": face, "markeredgecolor": colour}
    ax.plot(xs, ys, linestyle=line, color=colour, linewidth=1.2, label=label, zorder=3, **look)


def difference_axis(ax: Axes, which: str, *frames: pd.DataFrame) -> None:
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


def fixed_ticks(ax: Axes, values: pd.Series) -> None:
    """Label the x axis with the values that were used, not with powers of the base."""
    ax.xaxis.set_major_locator(FixedLocator(sorted(set(values.astype(float)))))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    ax.xaxis.set_minor_formatter(NullFormatter())


def plain_ticks(ax: Axes, which: str) -> None:
    """Ticks of a logarithmic axis as plain numbers, as many as the number of decades needs."""
    axis = ax.xaxis if which == "x" else ax.yaxis
    if axis.get_scale() != "log":
        thin_ticks(ax, which)
        return
    low, high = axis.get_view_interval()
    decades = np.log10(high / low)
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 1.2 else (1, 3) if decades < 2.2 else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    axis.set_minor_locator(NullLocator())


def thin_ticks(ax: Axes, which: str, most: int = 5) -> None:
    """Keep at most so many labelled decades; on a narrow panel all of them run into each other."""
    axis = ax.xaxis if which == "x" else ax.yaxis
    low, high = axis.get_view_interval()
    ticks = [t for t in axis.get_majorticklocs() if low <= t <= high]
    if len(ticks) > most:
        sides = [[t for t in ticks if t > 0][::-1], [t for t in ticks if t < 0]]
        step = -(-len(ticks) // most)
        kept = [t for side in sides for t in side[::step]]
        axis.set_ticks(sorted([*kept, *(t for t in ticks if t == 0)]))


def end_labels(ax: Axes, ends: list[tuple[str, float, float]], gap: float = 0.07) -> None:
    """Write each line's name to the right of its last point, moved apart where two would touch."""
    ax.margins(x=0.08)
    ax.autoscale_view()
    to_axes = ax.transAxes.inverted()
    placed = -np.inf
    heights = [(float(to_axes.transform(ax.transData.transform((x, y)))[1]), s) for s, x, y in ends]
    for height, series in sorted(heights):
        placed = max(height, placed + gap)
        ax.text(1.02, placed, series, transform=ax.transAxes, color=INK, fontsize=9, va="center")


def finish(fig: Figure, ax: Axes) -> Figure:
    """Key above the axes; close so that a notebook shows the figure once."""
    if ax.get_legend_handles_labels()[0]:
        ax.legend(**KEY)
    plt.close(fig)
    return fig


def keyed(fig: Figure, axes: Sequence[Axes], ncols: int) -> Figure:
    """One key above all panels, each name once."""
    found = {label: h for ax in axes for h, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    fig.legend(found.values(), found.keys(), loc="outside upper left", frameon=False, ncols=ncols, handletextpad=0.4)
    plt.close(fig)
    return fig
