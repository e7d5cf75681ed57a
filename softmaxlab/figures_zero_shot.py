"""The figure of the zero-shot tasks: data in, Matplotlib figure out.

Colours and markers as in every figure of the book (`drawing`): ours filled and blue, published hollow and vermilion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from softmaxlab.drawing import INK, OURS, PAPER, points

#: One for each of our models, as far as they go.
MARKERS = ("o", "s", "^", "D", "v")


def changes(
    ours: Mapping[str, pd.DataFrame], published: pd.DataFrame, tasks: Sequence[str], *, reference: str
) -> Figure:
    """Change of each task's score against softmax, one panel a condition (paper: Table C2, which has no figure).

    Args:
        ours: readable name of a model -> columns condition, task, value, low, high; in percentage points.
        published: columns condition, task, value; may be empty.
        tasks: names of the rows, top to bottom.
        reference: readable name of the paper's model.
    """
    frames = [*ours.values(), published]
    panels = list(dict.fromkeys(condition for frame in frames for condition in frame["condition"]))
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    size = (9.0, 0.8 + 0.2 * len(frames) + rows * (0.75 + (0.14 + 0.07 * len(frames)) * len(tasks)))
    fig, axes = plt.subplots(rows, columns, figsize=size, sharex=True, sharey=True, squeeze=False)
    place = {task: -i for i, task in enumerate(tasks)}
    looks = [(frame, f"{model}: measured, 95 % intervals", True) for model, frame in ours.items()]
    looks.append((published, f"{reference}: published, no intervals", False))
    shifts = np.linspace(0.28, -0.28, len(looks)) if len(looks) > 2 else np.array([0.14, -0.14])
    handles = {}
    for ax, panel in zip(axes.flat, panels, strict=False):
        ax.axvline(0.0, color=INK, linewidth=0.8)
        for i, ((frame, label, filled), shift) in enumerate(zip(looks, shifts[-len(looks) :], strict=True)):
            part = frame[frame["condition"] == panel]
            if part.empty:
                continue
            at = np.array([place[task] for task in part["task"]], dtype=float) + shift
            look = {"marker": MARKERS[i % len(MARKERS)]} if filled else {}
            points(ax, None, part, OURS if filled else PAPER, y=at, label=label, filled=filled, **look)
        ax.set_title(panel, loc="left", fontsize=9.5)
        ax.set_yticks(list(place.values()), list(place))
        ax.grid(False, axis="y")
        handles |= {name: h for h, name in zip(*ax.get_legend_handles_labels(), strict=True)}
    for ax in axes.flat[len(panels) :]:
        ax.axis("off")
    for ax in axes.flat[max(0, len(panels) - columns) : len(panels)]:  # the lowest of each column
        ax.tick_params(labelbottom=True)
        ax.set_xlabel("change (points)")
    ordered = {label: handles[label] for _, label, _ in looks if label in handles}
    fig.legend(ordered.values(), ordered.keys(), loc="outside upper left", ncols=1, frameon=False)
    plt.close(fig)
    return fig
