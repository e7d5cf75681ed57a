"""The figures of the packed exponential: data in, Matplotlib figure out.

Colours and markers as in every figure of the book (`drawing`). In the bits, what becomes the exponent is blue, what
becomes the fraction is orange; the same colours go through all steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Polygon, Rectangle

from softmaxlab.drawing import CYCLE, INK, OURS
from softmaxlab.packed_endpoints import Pair

EXPONENT, FRACTION, PALE = OURS, CYCLE[1], "#f1f1f1"
HALF = 16  # bits of a half of a register
_CODE_BITS = 11  # of a code up to 2047
_MONO = {"family": "monospace"}


def bits(pair: Pair) -> Figure:
    """Two scores on their way to P, bit by bit, top to bottom (no counterpart in the paper). Narrow enough for a phone.

    Args:
        pair: from `packed_endpoints.pair`; the first score is drawn on the right, in the low half.
    """
    fig, ax = plt.subplots(figsize=(4.7, 6.5))
    ax.set(xlim=(-0.4, 32.4), ylim=(-31.0, 1.6))
    ax.axis("off")
    k, shift, places = pair.k, 7 - pair.k, (24, 8)
    fields = {"code": (_CODE_BITS, k, 0), "weight": (_CODE_BITS + shift, k, shift)}

    for i, x in enumerate(places):
        top = [(f"score $s_{i}$ = {pair.scores[i]:.1f}", 9.5, INK)]
        top += [(f"$x_{i}$ = {_minus(pair.exponents[i], 3)} octaves", 8.5, INK)]
        _box(ax, x, 0.0, top)
        _box(ax, x, -6.1, [(f"$t_{i}$ = {pair.scaled[i]:,.2f} · 2$^{{-24}}$", 9.5, INK)], height=1.9)
        _arrow(ax, x, -1.75, -4.9)
        _arrow(ax, x, -7.3, -7.9)
        _arrow(ax, x, -13.9, -19.1)
        _arrow(ax, x, -23.6, -25.4)
        code, w = pair.codes[i], pair.weights[i]
        e, f = (code >> k) - 127, code % 2**k
        last = [(f"$w_{i}$ = 2$^{{{e}}}$ · (1 + {f}/{2**k}) = {w:.4g}", 8.6, INK)]
        last += [(f"exact 2$^{{x}}$: {2 ** pair.exponents[i]:.4f}", 8.5, "#6a6a6a")]
        _box(ax, x, -27.1, last)
        _corridor(ax, x, shift, -13.9, -19.1)
        ax.text(x, -10.75, f"code $n_{i}$ = {code}", ha="center", va="bottom", fontsize=9, color=INK)
    _step(ax, -3.3, "1", "FFMA", "one fused multiply-add a score")
    _step(ax, -8.9, "2", "F2FP.RELU", "one a pair: clamp at 0, round, pack")
    _step(ax, -16.4, "3", "IMAD.SHL", f"one a pair: {shift} to the left")
    _register(ax, -12.4, pair.word, fields["code"])
    _register(ax, -20.6, pair.shifted, fields["weight"])
    for x in places:
        _brace(ax, x, fields["weight"], -22.3)
    _key(ax, -30.2)
    plt.close(fig)
    return fig


def _minus(value: float, digits: int) -> str:
    return f"{value:.{digits}f}".replace("-", "−")


def _box(ax: Axes, x: float, y: float, lines: Sequence[tuple[str, float, str]], height: float = 3.0) -> None:
    look = {"boxstyle": "round,pad=0,rounding_size=0.5", "facecolor": "white", "edgecolor": "#b0b0b0"}
    ax.add_patch(FancyBboxPatch((x - 7.4, y - height / 2), 14.8, height, linewidth=1.0, **look))
    gap = 1.3
    first = y + gap * (len(lines) - 1) / 2
    for i, (text, size, ink) in enumerate(lines):
        ax.text(x, first - gap * i, text, ha="center", va="center", fontsize=size, color=ink)


def _arrow(ax: Axes, x: float, top: float, bottom: float) -> None:
    look = {"arrowstyle": "-|>,head_width=0.22,head_length=0.4", "color": "#9a9a9a", "linewidth": 1.0}
    ax.annotate("", (x, bottom), (x, top), arrowprops=look | {"shrinkA": 0, "shrinkB": 0}, zorder=1)


def _step(ax: Axes, y: float, number: str, opcode: str, said: str) -> None:
    """An instruction across both halves."""
    look = {"boxstyle": "round,pad=0,rounding_size=0.9", "facecolor": "#333333", "edgecolor": "none"}
    ax.add_patch(FancyBboxPatch((0.4, y - 0.95), 31.2, 1.9, zorder=3, **look))
    ax.text(1.6, y, number, ha="center", va="center", fontsize=9, color="white", weight="bold", zorder=4)
    ax.text(3.0, y, opcode, ha="left", va="center", fontsize=8.8, color="white", weight="bold", zorder=4, **_MONO)
    ax.text(31.0, y, said, ha="right", va="center", fontsize=8.3, color="white", zorder=4)


def _colour(bit: int, field: tuple[int, int, int]) -> str:
    """Of a bit of a half, counted from the right: exponent above fraction above zeros."""
    length, k, low = field
    return FRACTION if low <= bit < low + k else EXPONENT if low + k <= bit < length else ""


def _register(ax: Axes, y: float, word: int, field: tuple[int, int, int]) -> None:
    """32 bits as cells, the most significant on the left."""
    for cell in range(2 * HALF):
        bit = 2 * HALF - 1 - cell
        colour = _colour(bit % HALF, field)
        on = word >> bit & 1
        face, alpha = (colour, 1.0 if on else 0.22) if colour else (PALE, 1.0)
        ax.add_patch(Rectangle((cell, y - 1.05), 1, 2.1, facecolor=face, alpha=alpha, linewidth=0, zorder=2))
        ink = "white" if colour and on else INK if colour else "#a8a8a8"
        ax.text(cell + 0.5, y, str(on), ha="center", va="center", fontsize=8, color=ink, zorder=3, **_MONO)
    for edge in range(2 * HALF + 1):
        ax.plot([edge, edge], [y - 1.05, y + 1.05], color="white", linewidth=0.8, zorder=3)
    for x in (0, HALF):
        ax.add_patch(Rectangle((x, y - 1.05), HALF, 2.1, fill=False, edgecolor=INK, linewidth=1.1, zorder=4))


def _corridor(ax: Axes, x: float, shift: int, top: float, bottom: float) -> None:
    """Where the shift takes a code."""
    left, right = x + HALF / 2 - _CODE_BITS, x + HALF / 2
    corners = [(left, top + 0.45), (right, top + 0.45), (right - shift, bottom - 0.45), (left - shift, bottom - 0.45)]
    ax.add_patch(Polygon(corners, closed=True, facecolor=EXPONENT, alpha=0.08, linewidth=0, zorder=0))


def _brace(ax: Axes, x: float, field: tuple[int, int, int], y: float) -> None:
    """The fields of BF16 under a half: sign, exponent of 8 bits, fraction of 7."""
    left = x - HALF / 2
    for start, stop, name, ink in (
        (0, 1, "±", INK),
        (1, 9, "exponent", EXPONENT),
        (9, 16, "fraction", "#a86700"),
    ):
        ax.plot([left + start + 0.15, left + stop - 0.15], [y, y], color=ink, linewidth=1.4)
        ax.text(left + (start + stop) / 2, y - 0.25, name, ha="center", va="top", fontsize=7.8, color=ink)


def _key(ax: Axes, y: float) -> None:
    for x, colour, name in (
        (0.4, EXPONENT, "whole octaves + 127"),
        (14.2, FRACTION, "part of an octave"),
        (26.2, PALE, "zeros"),
    ):
        look = {"facecolor": colour, "edgecolor": "#b0b0b0" if colour == PALE else "none", "linewidth": 0.8}
        ax.add_patch(Rectangle((x, y - 0.5), 1, 1, **look))
        ax.text(x + 1.5, y, name, ha="left", va="center", fontsize=8.3, color=INK)


# Loss beside speed

#: Kind of kernel → colour, marker and name in the key.
KINDS = {
    "packed": (OURS, "o", "packed"),
    "h15": (CYCLE[1], "D", "paper's bit form"),
    "fused7": (CYCLE[2], "s", "fused, k = 7"),
    "poly": (CYCLE[4], "^", "polynomial for every score"),
    "stock": (INK, "X", "stock and control"),
}


_CROWDED = 2.0  # points of gain within which two names would overlap


def trade(panels: Mapping[str, pd.DataFrame], kind: str = "measured") -> Figure:
    """Speed against loss, one panel a shape (no counterpart in the paper).

    Args:
        panels: title → columns kernel, kind (of `KINDS`), gain, gain_low, gain_high (percent over stock), loss,
            loss_low, loss_high (nats a token); one row a kernel.
        kind: of the losses.
    """
    fig, axes = plt.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False, figsize=(9.0, 4.2))
    for ax, (title, frame) in zip(axes[0], panels.items(), strict=True):
        for name, (colour, marker, label) in KINDS.items():
            rows = frame[frame["kind"] == name]
            if not len(rows):
                continue
            x, y = 1e3 * rows["loss"].to_numpy(float), rows["gain"].to_numpy(float)
            bars = {
                axis: np.abs(scale * rows[[f"{what}_low", f"{what}_high"]].to_numpy(float).T - at)
                for axis, what, scale, at in (("xerr", "loss", 1e3, x), ("yerr", "gain", 1.0, y))
            }
            look = {"fmt": marker, "color": colour, "markersize": 6, "elinewidth": 1.3, "label": label}
            ax.errorbar(x, y, **bars, **look)
        for row in frame.itertuples():
            # Beside the interval, on the left where a kernel of about the same gain lies to the right.
            near = frame[(frame["gain"] - row.gain).abs() < _CROWDED]
            left = any((other.loss_high, other.Index) > (row.loss_high, row.Index) for other in near.itertuples())
            at = (1e3 * (row.loss_low if left else row.loss_high), row.gain)
            look = {"textcoords": "offset points", "fontsize": 8, "color": INK, "va": "center"}
            ax.annotate(row.kernel, at, (-7 if left else 7, 0), ha="right" if left else "left", **look)
        ax.axhline(0.0, color=INK, linewidth=0.8, zorder=0)
        ax.axvline(0.0, color=INK, linewidth=0.8, zorder=0)
        ax.set_title(title, loc="left", fontsize=10)
        ax.set_xlabel("ΔNLL (10⁻³ nats a token)")
        ax.margins(x=0.24, y=0.1)
    axes[0, 0].set_ylabel("faster than stock (%)")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside upper left", frameon=False, ncols=3, handletextpad=0.4)
    fig.text(0.995, 0.995, f"time measured; loss {kind}", ha="right", va="top", fontsize=8.5, color=INK)
    plt.close(fig)
    return fig


#: Counter of the record → its name under the axis.
PIPES = {"tensor %": "tensor", "xu %": "XU", "fma %": "FMA", "alu %": "ALU", "issue %": "issue"}


def pipes(panels: Mapping[str, pd.DataFrame]) -> Figure:
    """How busy each pipe is, by hardware counters: one group a pipe, one mark a kernel.

    Args:
        panels: title → columns kernel and every key of `PIPES` (percent), in the order to draw.
    """
    fig, axes = plt.subplots(1, len(panels), sharey=True, squeeze=False, figsize=(9.0, 3.6))
    marks = {"stock": ("X", INK), "h15": ("D", CYCLE[1]), "fused7": ("s", CYCLE[2])}
    for ax, (title, frame) in zip(axes[0], panels.items(), strict=True):
        for i, row in enumerate(frame.to_dict("records")):
            marker, colour = marks.get(row["kernel"], ("o", OURS))
            face = colour if not row["kernel"].startswith("lazy") else "white"
            x = np.arange(len(PIPES)) + 0.13 * (i - (len(frame) - 1) / 2)
            ax.plot(x, [row[c] for c in PIPES], marker, color=colour, markerfacecolor=face, label=row["kernel"])
        ax.set_xticks(range(len(PIPES)), PIPES.values())
        ax.set_ylim(0, 100)
        ax.grid(False, axis="x")
        ax.set_title(title, loc="left", fontsize=10)
    axes[0, 0].set_ylabel("busy (% of the kernel's time)")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside upper left", frameon=False, ncols=len(labels), handletextpad=0.4)
    plt.close(fig)
    return fig
