"""The figures of Rowmax-H15 and its family: its bits, its errors, its losses. Data in, Matplotlib figure out.

Colours as in `figures_lattices`: drawings of a construction are green and orange, measured values filled and blue,
published ones hollow and vermilion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from softmaxlab.drawing import INK, KEY, OURS, PAPER, difference_axis, plain_ticks, points
from softmaxlab.figures_lattices import DRAWN, SECOND

#: Fields of an FP32 word: name, highest bit, number of bits.
FIELDS = (("sign", 31, 1), ("exponent", 30, 8), ("mantissa", 22, 23))
#: Integer bits of n that reach the exponent field and the sign.
WHOLE_BITS = 9


def bit_fields(words: Sequence[tuple[str, int, int, str]], *, fraction: int) -> Figure:
    """FP32 words as rows of 32 cells, with the bits of the rounded exponent n followed through them.

    Args:
        words: what was done, the word (any int of 32 bits), the place of the lowest bit of n in it (−1 where n is
            not in it yet), and what the word is as a number.
        fraction: how many bits of n are fractional (k).
    """
    fig, ax = plt.subplots(figsize=(9.0, 0.72 * len(words) + 1.0))
    for line, (_, word, lowest, _) in enumerate(words):
        y = -line
        for bit in range(32):
            x = 31 - bit
            of_n = bit - lowest if lowest >= 0 else -1
            colour = "white"
            if 0 <= of_n < fraction:
                colour = SECOND
            elif fraction <= of_n < fraction + WHOLE_BITS:
                colour = DRAWN
            ax.add_patch(Rectangle((x, y - 0.3), 1, 0.6, facecolor=colour, alpha=0.55, edgecolor="none"))
            ax.add_patch(Rectangle((x, y - 0.3), 1, 0.6, facecolor="none", edgecolor="0.6", linewidth=0.6))
            ax.text(x + 0.5, y, str(word >> bit & 1), ha="center", va="center", fontsize=8, color="black")
    bottom = -len(words) + 0.7
    for name, high, length in FIELDS:
        left = 31 - high
        ax.text(left + length / 2, 0.42, name, ha="center", va="bottom", fontsize=9, color=INK)
        ax.vlines([left, left + length], bottom, 0.3, color=INK, linewidth=1.6)
    ax.set_yticks([-i for i in range(len(words))], [w[0] for w in words], fontsize=9)
    for line, (*_, value) in enumerate(words):
        ax.text(32.4, -line, value, ha="left", va="center", fontsize=9, color=INK)
    keys = [("fractional bits of n", SECOND), ("its whole bits, as far as they are kept", DRAWN)]
    for label, colour in keys[0 if fraction else 1 :]:
        ax.plot([], [], "s", color=colour, alpha=0.55, markersize=9, label=label)
    ax.legend(loc="upper left", bbox_to_anchor=(0.0, 0.0), frameon=False, ncols=2, handletextpad=0.2)
    ax.set(xlim=(-0.2, 37.5), ylim=(bottom - 0.05, 0.9), xticks=[])
    ax.grid(False)
    for side in ax.spines.values():
        side.set_visible(False)
    ax.tick_params(length=0)
    plt.close(fig)
    return fig


def octave_errors(
    curves: Mapping[str, tuple[np.ndarray, np.ndarray]],
    envelopes: Mapping[str, tuple[float, float]],
    rows: Mapping[str, tuple[np.ndarray, np.ndarray]],
) -> Figure:
    """Error of a weight over one octave, and of a probability over one row, member by member.

    Args:
        curves: title → (x, log2 ŵ − x), arrays of one length.
        envelopes: title → (low, high) of the error, octaves.
        rows: title → (x of the keys, log2 p̂ − log2 p of the keys).
    """
    fig, axes = plt.subplots(2, len(curves), sharey="row", sharex="row", figsize=(9.0, 4.6), squeeze=False)
    for number, title in enumerate(curves):
        low, high = envelopes[title]
        top, bottom = axes[:, number]
        top.axhspan(low, high, color=DRAWN, alpha=0.18, label="envelope")
        x, error = curves[title]
        jumps = np.abs(np.diff(error)) > 0.25 * max(high - low, 1e-9)
        top.plot(x, np.where(np.append(jumps, False), np.nan, error), color=SECOND, linewidth=1.4, label="error")
        bottom.axhspan(low - high, high - low, color=DRAWN, alpha=0.18)
        bottom.plot(*rows[title], ".", color=SECOND, markersize=3)
        top.set_title(title)
        top.set_xlabel("x (octaves)")
        bottom.set_xlabel("x (octaves)")
        for ax in (top, bottom):
            ax.axhline(0.0, color=INK, linewidth=0.8)
    axes[0, 0].set_ylabel("log₂ ŵ − x (octaves)")
    axes[1, 0].set_ylabel("log₂ p̂ − log₂ p (octaves)")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside upper left", frameon=False, ncols=2)
    plt.close(fig)
    return fig


def family_curve(
    ours: pd.DataFrame,
    limit: pd.Series,
    gaps: pd.DataFrame,
    published: pd.DataFrame,
    published_limit: float,
    *,
    model: str,
    reference: str,
) -> Figure:
    """Loss along the family, and its paired distance from the limit S (no figure of the paper).

    Args:
        ours: columns k, value, low, high (ΔNLL in nats).
        limit: value, low, high of S.
        gaps: columns k, value, low, high, floor: S(Q_k) − S, and the floor of that difference (nats).
        published: columns k, value, low, high.
        published_limit: S in the paper (nats).
        model, reference: readable names of the two models.
    """
    ks = list(ours["k"])
    place = {k: i for i, k in enumerate(ks)}  # k = 13 stands next to 7: equal steps, labelled
    fig, (left, right) = plt.subplots(1, 2, figsize=(9.0, 4.0))
    left.axhspan(limit["low"], limit["high"], color=OURS, alpha=0.15, label="S, measured, 95 % interval")
    left.axhline(limit["value"], color=OURS, linewidth=1.0, linestyle=":")
    points(left, ours["k"].map(place), ours, OURS, label=f"{model}: measured, 95 % intervals", line="-")
    drawn = [ours, limit.to_frame().T]
    if len(published):
        label = f"{reference}: published, 95 % intervals"
        points(left, published["k"].map(place) + 0.15, published, PAPER, label=label, filled=False, width=2.0)
        left.axhline(published_limit, color=PAPER, linewidth=1.2, linestyle="--", label=f"S, {reference}: published")
        drawn += [published, pd.DataFrame({"value": [published_limit]})]
    difference_axis(left, "y", *drawn)
    plain_ticks(left, "y")
    left.set_ylabel("ΔNLL against softmax (nats)")
    steps = np.array([place[k] for k in gaps["k"]], dtype=float)
    right.bar(
        steps, 2 * gaps["floor"], 0.8, bottom=-gaps["floor"], color="0.8", label="below the floor, measured", zorder=1
    )
    points(right, steps, gaps, OURS, label="$S(Q_k) - S$, measured, 95 % intervals")
    difference_axis(right, "y", gaps)
    if gaps["floor"].min() > 0:  # below the floor decades mean nothing: linear there
        right.set_yscale("symlog", linthresh=10.0 ** np.floor(np.log10(gaps["floor"].min())))
    right.axhline(0.0, color=INK, linewidth=0.8)
    plain_ticks(right, "y")
    right.set_ylabel("paired difference (nats)")
    for ax in (left, right):
        ax.set_xticks(range(len(ks)), [f"{k}" for k in ks])
        ax.set_xlim(-0.6, len(ks) - 0.4)
        ax.set_xlabel("k, fractional bits of the exponent")
        ax.grid(False, axis="x")
        ax.legend(**KEY)
    plt.close(fig)
    return fig


def loss_against_error(ours: pd.DataFrame, *, model: str) -> Figure:
    """Loss of smooth and stepped exponentials against their probability-weighted error of the log weights.

    Args:
        ours: columns series, label, error (nats), value, low, high (ΔNLL in nats). The first series is a line,
            labelled on its right; the others are points, labelled on their left.
        model: readable name of our model.
    """
    fig, ax = plt.subplots(figsize=(7.5, 4.4))
    ground = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # a label may lie on the line
    for number, ((series, rows), marker) in enumerate(zip(ours.groupby("series", sort=False), "osD^v", strict=False)):
        line = "none" if number else "-"
        points(ax, rows["error"], rows, OURS, label=f"{series}, measured", marker=marker, line=line)
        shift = {"xytext": (-9, -7), "ha": "right"} if number else {"xytext": (9, -3), "ha": "left"}
        for one in rows.itertuples():
            place = (one.error, one.value)
            ax.annotate(one.label, place, textcoords="offset points", fontsize=8, color=INK, bbox=ground, **shift)
    ax.set_xscale("log")
    ax.margins(x=0.1)
    plain_ticks(ax, "x")
    difference_axis(ax, "y", ours)
    plain_ticks(ax, "y")
    ax.set(xlabel="p-weighted RMS error of the log weights (nats)", ylabel=f"ΔNLL of {model} (nats)")
    ax.legend(**KEY, ncols=2)
    plt.close(fig)
    return fig
