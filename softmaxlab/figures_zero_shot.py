"""The figure of the zero-shot tasks: data in, Matplotlib figure out.

Colours and markers as in every figure of the book (`drawing`): ours filled and blue, published hollow and vermilion.
"""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from softmaxlab.drawing import INK, OURS, PAPER, points


def changes(ours: pd.DataFrame, published: pd.DataFrame, tasks: Sequence[str], *, model: str, reference: str) -> Figure:
    """Change of each task's score against softmax, one panel a condition (paper: Table C2, which has no figure).

    Args:
        ours: columns condition, task, value, low, high; in percentage points.
        published: columns condition, task, value; may be empty.
        tasks: names of the rows, top to bottom.
        model, reference: readable names of the two models.
    """
    panels = list(dict.fromkeys([*ours["condition"], *published["condition"]]))
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    size = (9.0, 0.9 + rows * (0.75 + 0.24 * len(tasks)))
    fig, axes = plt.subplots(rows, columns, figsize=size, sharex=True, sharey=True, squeeze=False)
    place = {task: -i for i, task in enumerate(tasks)}
    for ax, panel in zip(axes.flat, panels, strict=False):
        ax.axvline(0.0, color=INK, linewidth=0.8)
        for frame, colour, shift, label, filled in (
            (ours, OURS, 0.14, f"{model}: measured, 95 % intervals", True),
            (published, PAPER, -0.14, f"{reference}: published, no intervals", False),
        ):
            part = frame[frame["condition"] == panel]
            at = np.array([place[task] for task in part["task"]], dtype=float) + shift
            points(ax, None, part, colour, y=at, label=label, filled=filled)
        ax.set_title(panel, loc="left", fontsize=9.5)
        ax.set_yticks(list(place.values()), list(place))
        ax.grid(False, axis="y")
    for ax in axes.flat[len(panels) :]:
        ax.axis("off")
    for ax in axes.flat[max(0, len(panels) - columns) : len(panels)]:  # the lowest of each column
        ax.tick_params(labelbottom=True)
        ax.set_xlabel("change (points)")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside upper left", ncols=1, frameon=False)
    plt.close(fig)
    return fig
