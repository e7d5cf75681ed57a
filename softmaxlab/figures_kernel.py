"""The figures of what the compiler says: instruction counts and the throughput model, beside published speed-ups.

Colours and markers as in every figure of the book (`drawing`): ours, here counted in compiled code or derived from
it, filled; published hollow and vermilion. An execution pipe keeps its colour through all figures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from softmaxlab.drawing import CYCLE, INK, OURS, PAPER, points

#: Pipe -> colour and readable name, in the order of the bars.
PIPES = {
    "xu": (CYCLE[4], "XU: exp2"),
    "fma": (CYCLE[1], "FMA: FP32 multiply, add"),
    "alu": (CYCLE[2], "ALU: maximum, clamp, shift, conversion"),
    "issue": (CYCLE[7], "rest: memory, waits, addresses"),
}
_CLOCKS = {"xu": "o", "fma": "s", "alu": "D", "issue": "|"}


def instructions(panels: Mapping[str, pd.DataFrame]) -> Figure:
    """Instructions a score by pipe, one stacked bar a kernel (paper: B.5, of the real kernel).

    Args:
        panels: title -> columns label and, for every key of `PIPES`, instructions a score; one row a bar.
    """
    sizes = [len(frame) for frame in panels.values()]
    fig, axes = plt.subplots(
        len(panels), 1, sharex=True, squeeze=False, figsize=(7.5, 0.9 + 0.26 * sum(sizes) + 0.35 * len(sizes)),
        height_ratios=sizes,
    )  # fmt: skip
    for ax, (title, frame) in zip(axes[:, 0], panels.items(), strict=True):
        places = np.arange(len(frame))[::-1]
        left = np.zeros(len(frame))
        for pipe, (colour, name) in PIPES.items():
            width = frame[pipe].to_numpy(dtype=float)
            ax.barh(places, width, left=left, color=colour, edgecolor="white", linewidth=0.6, height=0.78, label=name)
            left = left + width
        for place, total in zip(places, left, strict=True):
            ax.text(total + 0.06, place, f"{total:.2f}", va="center", fontsize=8, color=INK)
        ax.set_yticks(places, frame["label"])
        ax.set_ylim(-0.6, len(frame) - 0.4)
        ax.set_title(title, loc="left")
        ax.grid(False, axis="y")
    axes[-1, 0].set_xlabel("instructions a score, in one turn of the main loop")
    axes[-1, 0].set_xlim(right=1.06 * axes[-1, 0].get_xlim()[1])
    return _keyed(fig, axes[0, 0], ncols=2)


def clocks(panels: Mapping[str, pd.DataFrame]) -> Figure:
    """Clocks that one turn needs of each pipe, and of the tensor cores.

    Args:
        panels: title -> columns label, tensor and every key of `PIPES` (clocks a turn); one row a kernel.
    """
    fig, axes = plt.subplots(
        1, len(panels), sharey=True, sharex=True, squeeze=False, figsize=(4.3 * len(panels) + 0.8, 4.4)
    )
    for ax, (title, frame) in zip(axes[0], panels.items(), strict=True):
        places = np.arange(len(frame))[::-1]
        tensor = frame["tensor"].to_numpy(dtype=float)
        ax.plot(tensor, places, color=INK, linestyle=":", linewidth=1.6, label="tensor cores")
        for pipe, (colour, name) in PIPES.items():
            label = "issue: one instruction a clock" if pipe == "issue" else name
            values = frame[pipe].to_numpy(dtype=float)
            ink = INK if pipe == "issue" else colour
            ax.plot(values, places, _CLOCKS[pipe], color=ink, markersize=8 if pipe == "issue" else 6, label=label)
        ax.set_yticks(places, frame["label"])
        ax.set_xlim(left=0.0)
        ax.set_xlabel("clocks of an SM a turn")
        ax.set_title(title, loc="left")
    return _keyed(fig, axes[0, 0], ncols=3)


def gains(frame: pd.DataFrame) -> Figure:
    """Published speed-ups beside the two limits of the model (paper: Figure 4C).

    Args:
        frame: columns label, published, overlapped, exposed (percent; exposed may be NaN).
    """
    fig, ax = plt.subplots(figsize=(7.5, 1.1 + 0.24 * len(frame)))
    places = np.arange(len(frame))[::-1].astype(float)
    for column, colour, marker, filled, name in (
        ("overlapped", OURS, "^", True, "model: pipes overlap"),
        ("exposed", OURS, "v", True, "model: softmax exposed"),
        ("published", PAPER, "D", False, "published"),
    ):
        shown = frame[[column]].rename(columns={column: "value"})
        points(ax, None, shown, colour, y=places, label=name, filled=filled, marker=marker)
    ax.axvline(0.0, color=INK, linewidth=0.8)
    ax.set_yticks(places, frame["label"])
    ax.set_ylim(-0.7, len(frame) - 0.3)
    ax.set_xlabel("speed-up of Rowmax-H15 over stock (%)")
    ax.grid(False, axis="y")
    return _keyed(fig, ax, ncols=3)


def emulation(frame: pd.DataFrame) -> Figure:
    """FA4's emulation settings against the share they emulate (paper: Figure 4D).

    Args:
        frame: columns setting, share (percent), published, exposed (percent), program; H15 has no share and is drawn
            as two lines.
    """
    fig, ax = plt.subplots(figsize=(7.5, 4.2))
    swept, other = frame[frame["share"].notna()], frame[frame["share"].isna()]
    model = swept.drop_duplicates("program").sort_values("share")
    ours, theirs = (f[[c]].set_axis(["value"], axis=1) for f, c in ((model, "exposed"), (swept, "published")))
    points(ax, model["share"], ours, OURS, label="model: softmax exposed", marker="v", line="-")
    points(ax, swept["share"], theirs, PAPER, label="published", filled=False)
    for row in other.itertuples():
        ax.axhline(row.published, color=PAPER, linestyle="--", linewidth=1.2, label=f"{row.setting}, published")
        ax.axhline(row.exposed, color=OURS, linestyle="-.", linewidth=1.2, label=f"{row.setting}, model")
    highest = swept.groupby("program").agg(share=("share", "first"), high=("published", "max"))
    for program, row in highest.iterrows():
        ax.annotate(program, (row["share"], row["high"]), (0, 8), textcoords="offset points", ha="center", fontsize=9)
    ax.axhline(0.0, color=INK, linewidth=0.8)
    ax.set_xticks(sorted(set(swept["share"])))
    ax.margins(y=0.12)
    ax.set(xlabel="scores that take the polynomial (%)", ylabel="speed-up over the stock setting (%)")
    return _keyed(fig, ax, ncols=2)


def counters(frame: pd.DataFrame, pipes: Sequence[str] = ("xu", "fma", "alu", "issue")) -> Figure:
    """Published profiler counters beside what the instruction counts make of them.

    Args:
        frame: columns gpu, dtype, pipe, utilization, counted (percent).
    """
    groups = list(dict.fromkeys(zip(frame["gpu"], frame["dtype"], strict=True)))
    fig, axes = plt.subplots(1, len(groups), sharey=True, squeeze=False, figsize=(9.0, 3.4))
    for ax, (gpu, dtype) in zip(axes[0], groups, strict=True):
        rows = frame[(frame["gpu"] == gpu) & (frame["dtype"] == dtype)].set_index("pipe").loc[list(pipes)]
        x = np.arange(len(pipes))
        ours, theirs = ({"value": rows[c].to_numpy(dtype=float)} for c in ("counted", "utilization"))
        points(ax, x - 0.12, pd.DataFrame(ours), OURS, label="from instruction counts")
        points(ax, x + 0.12, pd.DataFrame(theirs), PAPER, label="published counter", filled=False)
        ax.set_xticks(x, [p.upper() if p != "issue" else p for p in pipes])
        ax.set_xlim(-0.6, len(pipes) - 0.4)
        ax.set_ylim(0, 100)
        ax.set_title(f"{gpu}, {dtype.upper()}", loc="left")
        ax.grid(False, axis="x")
    axes[0, 0].set_ylabel("utilisation (%)")
    return _keyed(fig, axes[0, 0], ncols=2)


def _keyed(fig: Figure, ax, ncols: int) -> Figure:
    handles, labels = ax.get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside upper left", frameon=False, ncols=ncols, handletextpad=0.4)
    plt.close(fig)
    return fig
