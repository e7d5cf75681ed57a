"""The figures of the compiler's chapter show exactly the numbers they are given."""

import matplotlib

matplotlib.use("Agg")

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_hex
from test_figures import drawn

from softmaxlab import figures_kernel as figs
from softmaxlab.drawing import OURS, PAPER

PIPES = list(figs.PIPES)


def kernels(n, seed=0, **columns):
    rng = np.random.default_rng(seed)
    return pd.DataFrame({"label": [f"k{i}" for i in range(n)]} | {p: rng.uniform(0.1, 3, n) for p in PIPES} | columns)


def dots(ax, label):
    """(x, y) of the one series whose label in the key is this."""
    (line,) = (o for o in ax.lines if o.get_label() == label)
    return np.column_stack(line.get_data()).astype(float)


def test_bars_stack_in_order_and_end_with_their_total():
    frames = {"one": kernels(3), "two": kernels(2, 1)}
    fig = drawn(figs.instructions(frames))
    for ax, frame in zip(fig.axes, frames.values(), strict=True):
        for pipe, bars in zip(PIPES, ax.containers, strict=True):
            assert [b.get_width() for b in bars] == pytest.approx(frame[pipe].tolist())
            assert {to_hex(b.get_facecolor()) for b in bars} == {to_hex(figs.PIPES[pipe][0])}
        assert [t.get_text() for t in ax.texts] == [f"{v:.2f}" for v in frame[PIPES].sum(axis=1)]
        assert [t.get_text() for t in ax.get_yticklabels()] == frame["label"].tolist()


def test_clocks_show_every_pipe_and_the_tensor_cores():
    frame = kernels(4, tensor=[1024.0] * 4)
    (ax,) = drawn(figs.clocks({"one": frame})).axes
    np.testing.assert_array_equal(dots(ax, "tensor cores")[:, 0], frame["tensor"])
    for pipe in PIPES[:3]:
        np.testing.assert_array_equal(dots(ax, figs.PIPES[pipe][1]), np.column_stack([frame[pipe], [3, 2, 1, 0]]))


def test_gains_leave_out_what_is_not_known():
    frame = pd.DataFrame({"label": ["a", "b"], "published": [12.4, 25.8], "overlapped": [-3.0, 0.0]})
    (ax,) = drawn(figs.gains(frame.assign(exposed=[14.0, float("nan")]))).axes
    np.testing.assert_array_equal(dots(ax, "published"), [[12.4, 1], [25.8, 0]])
    np.testing.assert_array_equal(dots(ax, "model: softmax exposed"), [[14.0, 1], [np.nan, 0]])


def test_emulation_marks_each_program_once_and_every_published_point():
    frame = pd.DataFrame(
        {
            "setting": ["s1", "s2", "s3", "Rowmax-H15"],
            "share": [0.0, 50.0, 50.0, float("nan")],
            "program": ["A", "B", "B", "C"],
            "published": [1.4, 0.2, -1.2, 12.3],
            "exposed": [1.8, -1.8, -1.8, 14.4],
        }
    )
    (ax,) = drawn(figs.emulation(frame)).axes
    np.testing.assert_array_equal(dots(ax, "published"), [[0, 1.4], [50, 0.2], [50, -1.2]])
    np.testing.assert_array_equal(dots(ax, "model: softmax exposed"), [[0, 1.8], [50, -1.8]])
    assert [t.get_text() for t in ax.texts] == ["A", "B"]
    for kind, value, colour in (("published", 12.3, PAPER), ("model", 14.4, OURS)):
        (line,) = (o for o in ax.lines if o.get_label() == f"Rowmax-H15, {kind}")
        assert set(line.get_ydata()) == {value} and to_hex(line.get_color()) == to_hex(colour)


def test_counters_one_panel_a_gpu_and_type():
    cells = [("B200", "bf16"), ("B300", "fp8")]
    rows = [(g, d, p, 10.0 * i, 9.0 * i) for g, d in cells for i, p in enumerate(PIPES)]
    frame = pd.DataFrame(rows, columns=["gpu", "dtype", "pipe", "utilization", "counted"])
    fig = drawn(figs.counters(frame))
    assert [ax.get_title(loc="left") for ax in fig.axes] == ["B200, BF16", "B300, FP8"]
    for ax in fig.axes:
        np.testing.assert_array_equal(dots(ax, "published counter")[:, 1], [0, 10, 20, 30])
        np.testing.assert_array_equal(dots(ax, "from instruction counts")[:, 1], [0, 9, 18, 27])
