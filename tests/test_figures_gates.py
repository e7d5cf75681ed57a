"""The figures of the patch and its gates: exactly the data that they are given is drawn."""

import matplotlib.pyplot as plt
import pytest

from softmaxlab import figures_gates
from softmaxlab.drawing import OURS, PAPER


def histogram(low, high, counts):
    return {"low": low, "high": high, "counts": counts}


SINGLE = {"residual": histogram(-0.01, 0.01, [1, 40, 2])}
SEVERAL = {
    "ratio": histogram(-0.4, 0.3, [3, 100, 5]),
    "unnormalised": histogram(-0.3, 0.32, [2, 90, 1]),
    "shift": histogram(-0.1, 0.02, [4, 4]),
    "bounds": {"ratio": [-0.585, 0.585], "unnormalised": [-0.25, 0.335]},
}
PUBLISHED = {"ratio": (-0.3982, 0.2923), "unnormalised": (-0.3324, 0.3120), "shift": (-0.1140, 0.0)}


def test_element_wise_draws_histograms_bounds_and_published_ranges():
    fig = figures_gates.element_wise(SINGLE, SEVERAL, PUBLISHED, kind="simulated")
    left, right = fig.axes
    (bars,) = left.patches
    values, edges, _ = bars.get_data()
    assert list(values) == [1, 40, 2] and edges[0] == -0.01 and edges[-1] == 0.01
    drawn = [list(p.get_data().values) for p in right.patches if hasattr(p, "get_data")]
    assert drawn == [[3, 100, 5], [2, 90, 1]]
    spans = [(p.get_x(), p.get_x() + p.get_width()) for p in right.patches if hasattr(p, "get_x")]
    assert spans == [pytest.approx((-0.585, 0.585)), pytest.approx((-0.25, 0.335))]
    lines = [tuple(line.get_xdata()) for line in right.lines if len(line.get_xdata())]
    assert lines == list(PUBLISHED.values())
    assert all(line.get_color() == PAPER and line.get_markerfacecolor() == "white" for line in right.lines)
    assert [tuple(s[:, 0]) for s in right.collections[0].get_segments()] == [(-0.1, 0.02)]
    labels = [text.get_text() for text in fig.legends[0].get_texts()]
    assert any("simulated" in label for label in labels) and any("published" in label for label in labels)
    assert not plt.get_fignums()


def test_sites_fill_what_is_replaced_and_nothing_else():
    boxes = [("S", "kept"), ("exponent", "replaced"), ("weight", "replaced"), ("rescale", "exact")]
    fig = figures_gates.sites([("Hopper", boxes, [("method", 1, 2)]), ("Blackwell", boxes[:2], [])])
    first, second = fig.axes
    faces = [patch.get_facecolor() for patch in first.patches]
    assert len(faces) == 4 and len(second.patches) == 2
    filled = plt.matplotlib.colors.to_rgba(OURS)
    assert [face == filled for face in faces] == [False, True, True, False]
    texts = [text.get_text() for text in first.texts if text.get_text()]
    assert texts == ["S", "exponent", "weight", "rescale", "method"]
    assert first.patches[3].get_y() < first.patches[0].get_y()
    assert first.get_title("left") == "Hopper" and not plt.get_fignums()
