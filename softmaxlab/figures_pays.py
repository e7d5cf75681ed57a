"""The figures of when a coarser exponential pays: who waits for whom, and the limits beside gains.

Colours and markers as in every figure of the book (`drawing`): measured filled and blue, published hollow and
vermilion. What a limit of the model says is a grey mark of its own shape, in every panel the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from softmaxlab.drawing import CYCLE, INK, OURS, PAPER, points

#: The limits of `pays.LIMITS`: marker and name in the key. Grey: neither measured nor published.
LIMITS = {"overlapped": ("^", "pipes overlap"), "exposed": ("v", "softmax exposed"), "issue": ("s", "issue slots")}
GREY = "#8c8c8c"


def account(frame: pd.DataFrame, variant: str = "Rowmax-H15") -> Figure:
    """Clocks of a turn over those of the tensor cores, of the stock kernel and of a variant (paper: B.5).

    Args:
        frame: columns label, xu, issue, busiest, busiest_issue (`pays.account`); a row from above.
        variant: name of the second kernel.
    """
    fig, ax = plt.subplots(figsize=(7.5, 1.2 + 0.42 * len(frame)))
    places = np.arange(len(frame))[::-1].astype(float)
    up, down = places + 0.17, places - 0.17
    ax.hlines(up, frame["issue"], frame["xu"], color=CYCLE[4], linewidth=1.2, alpha=0.5)
    ax.hlines(down, frame["busiest_issue"], frame["busiest"], color=CYCLE[2], linewidth=1.2, alpha=0.5)
    for column, y, marker, colour, name in (
        ("xu", up, "o", CYCLE[4], "stock: exp2 (XU)"),
        ("busiest", down, "D", CYCLE[2], f"{variant}: its busiest pipe (ALU)"),
        ("issue", up, "|", INK, "instructions, stock above, variant below"),
        ("busiest_issue", down, "|", INK, None),
    ):
        ax.plot(frame[column], y, marker, color=colour, markersize=9 if marker == "|" else 6, mew=1.6, label=name)
    ax.axvline(1.0, color=INK, linestyle=":", linewidth=1.6, label="tensor cores")
    ax.set_yticks(places, frame["label"])
    ax.set_ylim(-0.6, len(frame) - 0.4)
    ax.set_xlim(left=0.0)
    ax.set_xlabel("clocks of a turn, over those of the tensor cores")
    ax.grid(False, axis="y")
    return _keyed(fig, [ax], ncols=2)


def limits(panels: Sequence[tuple[str, pd.DataFrame, Sequence[tuple[str, pd.DataFrame]], str]]) -> Figure:
    """Gains beside the limits of the model, a panel a card and head dimension (paper: Figure 4C).

    Args:
        panels: title; columns label and those of `LIMITS` (percent, NaN for none), a row from above; series of gains,
            as a name and a frame of columns value and, where there are any, low and high (percent), in the rows'
            order; their kind, measured or published.
    """
    sizes = [len(frame) for _, frame, _, _ in panels]
    fig, axes = plt.subplots(
        len(panels), 1, sharex=True, squeeze=False, figsize=(7.5, 1.3 + 0.3 * sum(sizes) + 0.4 * len(panels)),
        height_ratios=sizes,
    )  # fmt: skip
    names = dict.fromkeys(name for _, _, series, kind in panels if kind == "measured" for name, _ in series)
    markers = dict(zip(names, ("o", ">", "P", "<"), strict=False))
    for ax, (title, frame, series, kind) in zip(axes[:, 0], panels, strict=True):
        places = np.arange(len(frame))[::-1].astype(float)
        for name, (marker, said) in LIMITS.items():
            ax.plot(
                frame[name], places - 0.2, marker, color=GREY, markersize=6, markerfacecolor="white", mew=1.4,
                label=f"model: {said}",
            )  # fmt: skip
        colour, filled = (PAPER, False) if kind == "published" else (OURS, True)
        for name, values in series:
            look = {"filled": filled, "marker": markers.get(name, "D"), "width": 1.5 if filled else None}
            points(ax, None, values, colour, y=places + 0.14, label=f"{name}, {kind}", **look)
        ax.axvline(0.0, color=INK, linewidth=0.8)
        ax.set_yticks(places, frame["label"])
        ax.set_ylim(-0.7, len(frame) - 0.3)
        ax.set_title(title, loc="left")
        ax.grid(False, axis="y")
    axes[-1, 0].set_xlabel("speed-up over stock (%)")
    return _keyed(fig, axes[:, 0], ncols=2)


def prices(panels: Sequence[tuple[str, pd.DataFrame]]) -> Figure:
    """Speed-up against the instructions that a kernel adds or leaves out (no counterpart).

    Args:
        panels: title; columns kernel, added (instructions a score more than stock), value and, where there are any,
            low, high (percent), issue (percent, what the issue limit says).
    """
    fig, axes = plt.subplots(1, len(panels), sharey=True, squeeze=False, figsize=(4.2 * len(panels) + 0.8, 4.2))
    for ax, (title, frame) in zip(axes[0], panels, strict=True):
        frame = frame.sort_values("added")
        line = pd.concat([frame[["added", "issue"]], pd.DataFrame({"added": [0.0], "issue": [0.0]})])
        line = line.sort_values("added")
        ax.plot(line["added"], line["issue"], "-", color=GREY, linewidth=1.2, label="model: issue slots")
        points(ax, frame["added"], frame, OURS, label="measured", width=1.5)
        for at, row in enumerate(frame.itertuples()):
            right = at % 2 == 0 or row.added > 0
            ax.annotate(
                row.kernel, (row.added, row.value), (7 if right else -7, -7 if row.added > 0 else 0),
                textcoords="offset points", va="center", ha="left" if right else "right", fontsize=8, color=INK,
            )  # fmt: skip
        ax.axhline(0.0, color=INK, linewidth=0.8)
        ax.axvline(0.0, color=INK, linewidth=0.8, linestyle=":")
        ax.margins(x=0.28, y=0.08)
        ax.set_xlabel("instructions a score, more than stock")
        ax.set_title(title, loc="left")
    axes[0, 0].set_ylabel("speed-up over stock (%)")
    return _keyed(fig, axes[0], ncols=2)


def _keyed(fig: Figure, axes: Sequence[Axes], ncols: int) -> Figure:
    """One key above all panels, each name once."""
    found = {label: h for ax in axes for h, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    fig.legend(found.values(), found.keys(), loc="outside upper left", frameon=False, ncols=ncols, handletextpad=0.4)
    plt.close(fig)
    return fig
