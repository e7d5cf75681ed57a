"""The figures of a kernel's time and energy, and of its loss in models: data in, Matplotlib figure out.

Colours and markers as in every figure of the book (`drawing`): measured filled and blue, simulated hollow and blue,
published hollow and vermilion. What was measured and what was published never share an axis of cells: they have a panel
each. The control, whose program is the stock kernel's, is grey: what it shows is noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from softmaxlab.drawing import CYCLE, INK, OURS, PAPER, keyed, points

CONTROL = "#8c8c8c"
#: Measured kernels that are not the paper's: colour and marker.
OTHERS = ((CYCLE[2], "s"), (CYCLE[4], "^"), (CYCLE[1], "v"), (CYCLE[5], "P"))
#: Pipes as in `figures_kernel.PIPES`, for counters.
COUNTERS = {"xu": CYCLE[4], "alu": CYCLE[2], "fma": CYCLE[1], "issue": INK, "tensor": "#b0b0b0"}


def models(panels: Sequence[tuple[str, pd.DataFrame, str]]) -> Figure:
    """ΔNLL of patched kernels in models (paper: Figure 4B).

    Args:
        panels: title; columns label, value, low, high (nats) and, where a simulated estimate stands beside, sim,
            sim_low, sim_high (NaN for none); and the kind: measured, simulated or published.
    """
    sizes = [len(frame) for _, frame, _ in panels]
    fig, axes = plt.subplots(
        len(panels), 1, sharex=True, squeeze=False, figsize=(7.5, 1.0 + 0.3 * sum(sizes) + 0.4 * len(panels)),
        height_ratios=sizes,
    )  # fmt: skip
    for ax, (title, frame, kind) in zip(axes[:, 0], panels, strict=True):
        places = np.arange(len(frame))[::-1].astype(float)
        beside = "sim" in frame and frame["sim"].notna().any()
        colour, filled = (PAPER, False) if kind == "published" else (OURS, kind == "measured")
        width = 1.5 if kind == "published" else None
        marker = "^" if kind == "simulated" else None
        up = places + (0.16 if beside else 0.0)
        points(ax, None, frame, colour, y=up, label=f"kernel, {kind}", filled=filled, width=width, marker=marker)
        if beside:
            names = {"sim": "value", "sim_low": "low", "sim_high": "high"}
            sim = frame[list(names)].rename(columns=names)
            points(ax, None, sim, OURS, y=places - 0.16, label="simulator", filled=False, marker="o", width=1.2)
        ax.axvline(0.0, color=INK, linewidth=0.8)
        ax.set_yticks(places, frame["label"])
        ax.set_ylim(-0.6, len(frame) - 0.4)
        ax.set_title(title, loc="left")
        ax.grid(False, axis="y")
    axes[-1, 0].set_xlabel("ΔNLL against the stock kernel (nats a token)")
    return keyed(fig, axes[:, 0], ncols=3)


def gains(ours: pd.DataFrame, theirs: pd.DataFrame, kernels: Mapping[str, str], gpu: str) -> Figure:
    """Speed-ups over the stock kernel by cell, measured and published in a panel each (paper: Figure 4C).

    Args:
        ours: columns label (of the cell), kernel, stock, stock_low, stock_high, floor_low, floor_high (percent).
        theirs: columns label, value (percent).
        kernels: of `ours`, kernel → name in the key; the first is drawn in the book's blue.
        gpu: of `ours`.
    """
    labels = list(dict.fromkeys(ours["label"]))
    fig, (left, right) = plt.subplots(1, 2, figsize=(9.5, 1.4 + 0.27 * max(len(labels), len(theirs))))
    places = pd.Series(np.arange(len(labels))[::-1].astype(float), index=labels)
    floors = ours.drop_duplicates("label")
    left.hlines(
        places[floors["label"]], floors["floor_low"], floors["floor_high"], color=CONTROL, linewidth=7, alpha=0.45,
        label="control: the stock program again, measured",
    )  # fmt: skip
    looks = [(OURS, "o"), *OTHERS]
    for (kernel, name), (colour, marker) in zip(kernels.items(), looks, strict=False):
        rows = ours[ours["kernel"] == kernel]
        shown = rows[["stock", "stock_low", "stock_high"]].set_axis(["value", "low", "high"], axis=1)
        points(left, None, shown, colour, y=places[rows["label"]], label=f"{name}, measured", marker=marker, width=1.4)
    left.set_title(f"{gpu}, BF16", loc="left")
    left.set_yticks(places, labels)
    other = np.arange(len(theirs))[::-1].astype(float)
    points(right, None, theirs[["value"]], PAPER, y=other, label="Rowmax-H15, published", filled=False)
    right.set_yticks(other, theirs["label"])
    right.set_title("B200", loc="left")
    for ax, n in ((left, len(labels)), (right, len(theirs))):
        ax.axvline(0.0, color=INK, linewidth=0.8)
        ax.set_ylim(-0.7, n - 0.3)
        ax.set_xlabel("speed-up over stock (%)")
        ax.grid(False, axis="y")
    return keyed(fig, (left, right), ncols=2)


def lengths(panels: Sequence[tuple[str, pd.DataFrame, bool]]) -> Figure:
    """Speed-up against the sequence length (paper: Figure S2).

    Args:
        panels: title; columns seq, series, value and, where measured, low, high, floor_low, floor_high (percent); and
            whether it is measured. The first series of a measured panel is the book's blue.
    """
    fig, axes = plt.subplots(1, len(panels), sharey=True, squeeze=False, figsize=(3.1 * len(panels) + 0.6, 3.9))
    for ax, (title, frame, measured) in zip(axes[0], panels, strict=True):
        looks = [(OURS, "o"), *OTHERS] if measured else [(PAPER, "D"), (PAPER, "o"), (PAPER, "^")]
        if measured:
            band = frame.drop_duplicates("seq").sort_values("seq")
            ax.fill_between(
                band["seq"], band["floor_low"], band["floor_high"], color=CONTROL, alpha=0.35, linewidth=0,
                label="control, measured",
            )  # fmt: skip
        for (series, rows), (colour, marker) in zip(frame.groupby("series", sort=False), looks, strict=False):
            rows = rows.sort_values("seq")
            name = f"{series}, {'measured' if measured else 'published'}"
            points(ax, rows["seq"], rows, colour, label=name, filled=measured, marker=marker, line="-", width=1.4)
        ax.axhline(0.0, color=INK, linewidth=0.8)
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_locator(FixedLocator(sorted(set(frame["seq"]))))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v / 1024:g}K"))
        ax.xaxis.set_minor_locator(NullLocator())
        ax.set_xlabel("tokens")
        ax.set_title(title, loc="left")
    axes[0, 0].set_ylabel("speed-up over stock (%)")
    return keyed(fig, axes[0], ncols=3)


def spread(frame: pd.DataFrame, limit: float) -> Figure:
    """How far two runs of one program differ from round to round, against board power (no counterpart).

    Args:
        frame: columns label, power (W), spread (percent, of the control's speed-up), window_ms.
        limit: the card's power limit in W; NaN for not known.
    """
    fig, ax = plt.subplots(figsize=(7.0, 3.9))
    looks = zip(sorted(set(frame["window_ms"].round())), ("o", "s", "^", "v"), strict=False)
    for length, marker in looks:
        rows = frame[frame["window_ms"].round() == length]
        name = f"a cell, windows of {length:g} ms, measured"
        points(ax, rows["power"], rows[["spread"]].set_axis(["value"], axis=1), OURS, label=name, marker=marker)
    for row in frame.nsmallest(3, "power").itertuples():
        ax.annotate(row.label, (row.power, row.spread), (7, 0), textcoords="offset points", va="center", fontsize=8)
    if np.isfinite(limit):
        ax.axvline(limit, color=INK, linestyle=":", linewidth=1.6, label="power limit of the card")
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.set(xlabel="board power after a window, median (W)", ylabel="spread of stock / control (points)")
    return keyed(fig, [ax], ncols=2)


def power(traces: Mapping[str, pd.DataFrame], limit: float) -> Figure:
    """Board power and SM clock through the sustained loop of each kernel (no counterpart).

    Args:
        traces: kernel → columns seconds (from the loop's start), power (W), clock (MHz).
        limit: as `spread`.
    """
    fig, (top, bottom) = plt.subplots(2, 1, sharex=True, figsize=(7.5, 4.6))
    looks = [INK, CONTROL, OURS, *(colour for colour, _ in OTHERS)]
    for (kernel, trace), colour in zip(traces.items(), looks, strict=False):
        top.plot(trace["seconds"], trace["power"], color=colour, linewidth=1.0, label=f"{kernel}, measured")
        smooth = trace["clock"].rolling(20, center=True, min_periods=5).median()
        bottom.plot(trace["seconds"], smooth, color=colour, linewidth=1.2)
    if np.isfinite(limit):
        top.axhline(limit, color=INK, linestyle=":", linewidth=1.4, label="power limit of the card")
    top.set_ylabel("board power (W)")
    bottom.set(xlabel="seconds from the start of the loop", ylabel="SM clock (MHz), 2 s median")
    return keyed(fig, [top], ncols=3)


def counters(panels: Mapping[str, pd.DataFrame]) -> Figure:
    """Utilisation of each pipe by kernel, from a profiler's counters (the paper was refused them).

    Args:
        panels: title → columns kernel and, for each key of `COUNTERS`, percent of the pipe's peak.
    """
    fig, axes = plt.subplots(1, len(panels), sharey=True, squeeze=False, figsize=(4.4 * len(panels) + 0.8, 4.2))
    markers = {"xu": "o", "alu": "D", "fma": "s", "issue": "|", "tensor": "P"}
    names = {"issue": "issue slots", "tensor": "tensor cores"}
    for ax, (title, frame) in zip(axes[0], panels.items(), strict=True):
        places = np.arange(len(frame))[::-1]
        for pipe, colour in COUNTERS.items():
            size = 10 if pipe == "issue" else 6.5
            ax.plot(
                frame[pipe], places, markers[pipe], color=colour, markersize=size, markeredgewidth=2,
                label=names.get(pipe, pipe.upper()),
            )  # fmt: skip
        ax.set_yticks(places, frame["kernel"])
        ax.set_xlim(-2, 100)
        ax.set_xlabel("of the pipe's peak (%)")
        ax.set_title(title, loc="left")
    return keyed(fig, axes[0][:1], ncols=5)
