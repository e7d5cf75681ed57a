"""The figure of what operators cost beside torch's attention: data in, Matplotlib figure out."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from softmaxlab.drawing import FAMILY, INK, OURS, fixed_ticks, keyed, points

#: Operators that stand for their families, with their markers.
CHOSEN = {"softmax()": "o", "h15()": "s", "grid(K=21,R=4)": "D", "mean_threshold()": "^", "topk(f=0.1)": "v"}


def ratios(panels: Sequence[tuple[str, pd.DataFrame]]) -> Figure:
    """Time over sdpa's against the context, a panel for each way of timing.

    Args:
        panels: title; columns operator, context (tokens), value, low, high (median, least and largest ratio).
    """
    columns = min(2, len(panels))
    height = -(-len(panels) // columns)
    size = (1.5 + 3.6 * columns, 0.9 + 2.6 * height)
    fig, axes = plt.subplots(height, columns, sharey=True, squeeze=False, figsize=size)
    for ax, (title, frame) in zip(axes.flat, panels, strict=False):
        for place, (operator, marker) in enumerate(CHOSEN.items()):
            rows = frame[frame["operator"] == operator].sort_values("context")
            if rows.empty:
                continue
            colour = FAMILY.get(operator.partition("(")[0], OURS)
            aside = rows["context"] * 2.0 ** (0.07 * (place - 2))  # or equal ratios would hide one another
            points(ax, aside, rows, colour, label=operator, marker=marker, line="-", width=1.4)
        ax.axhline(1.0, color=INK, linewidth=0.8, linestyle=":")
        ax.set_xscale("log", base=2)
        fixed_ticks(ax, frame["context"])
        ax.xaxis.set_major_formatter(lambda v, _: f"{v / 1024:g}K")
        ax.set_xlim(frame["context"].min() / 1.4, frame["context"].max() * 1.4)
        ax.set_title(title, loc="left")
        ax.grid(False, axis="x")
    for ax in axes.flat[len(panels) :]:
        ax.set_visible(False)
    drawn = pd.concat([frame[frame["operator"].isin(list(CHOSEN))] for _, frame in panels])
    if drawn["high"].max() > 4 * drawn["low"].min():  # one axis for all panels
        axes[0, 0].set_yscale("log")
        axes[0, 0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes[0, 0].yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
        axes[0, 0].yaxis.set_minor_locator(NullLocator())
    for ax in axes[:, 0]:
        ax.set_ylabel("time / sdpa's time")
    for ax in axes[-1]:
        ax.set_xlabel("context (tokens)")
    return keyed(fig, axes.flat[: len(panels)], ncols=3)
