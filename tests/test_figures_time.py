"""The figures of time, energy and fidelity: exactly the data that they are given is drawn, ours and theirs apart."""

import math

import matplotlib.pyplot as plt
import pandas as pd
import pytest

from softmaxlab import figures_time
from softmaxlab.drawing import OURS, PAPER


@pytest.fixture(autouse=True)
def nothing_is_left_open():
    yield
    assert not plt.get_fignums()


def drawn(ax, colour, filled):
    """x of every marker of a colour that is filled or hollow."""
    found = []
    for line in ax.lines:
        hollow = line.get_markerfacecolor() == "white"
        if line.get_color() == colour and line.get_marker() not in ("None", None, "") and hollow != filled:
            found += list(line.get_xdata())
    return found


def keys(fig):
    return [text.get_text() for text in fig.legends[0].get_texts()]


def test_a_loss_is_filled_where_measured_hollow_where_simulated_and_published_apart():
    ours = pd.DataFrame(
        {"label": ["h15()", "s()"], "value": [2e-3, 1e-3], "low": [1e-3, 5e-4], "high": [3e-3, 2e-3]}
        | {"sim": [1.9e-3, math.nan], "sim_low": [1e-3, math.nan], "sim_high": [2.5e-3, math.nan]}
    )
    theirs = pd.DataFrame({"label": ["A"], "value": [5e-3], "low": [4e-3], "high": [6e-3]})
    fig = figures_time.models([("card", ours, "measured"), ("B200", theirs, "published")])
    top, bottom = fig.axes
    assert drawn(top, OURS, filled=True) == [2e-3, 1e-3]
    assert [x for x in drawn(top, OURS, filled=False) if not math.isnan(x)] == [1.9e-3]
    assert drawn(bottom, PAPER, filled=False) == [5e-3] and not drawn(bottom, OURS, filled=True)
    assert keys(fig) == ["kernel, measured", "simulator", "kernel, published"]


def test_gains_show_the_control_and_keep_the_published_cells_in_a_panel_of_their_own():
    ours = pd.DataFrame(
        [
            {"label": "a", "kernel": "h15", "stock": -8.0, "stock_low": -9.0, "stock_high": -7.0},
            {"label": "a", "kernel": "fused7", "stock": -2.0, "stock_low": -3.0, "stock_high": -1.0},
            {"label": "b", "kernel": "h15", "stock": -5.0, "stock_low": math.nan, "stock_high": math.nan},
        ]
    ).assign(floor_low=[-1.0, -1.0, -0.5], floor_high=[0.5, 0.5, 0.25])
    theirs = pd.DataFrame({"label": ["x", "y"], "value": [12.4, 5.4]})
    fig = figures_time.gains(ours, theirs, {"h15": "Rowmax-H15", "fused7": "fused7"}, "card")
    left, right = fig.axes
    assert drawn(left, OURS, filled=True) == [-8.0, -5.0]
    assert drawn(right, PAPER, filled=False) == [12.4, 5.4] and not drawn(left, PAPER, filled=False)
    controls = [tuple(s[:, 0]) for s in left.collections[0].get_segments()]
    assert controls == [(-1.0, 0.5), (-0.5, 0.25)]
    assert [t.get_text() for t in left.get_yticklabels()] == ["a", "b"]


def test_lengths_share_an_axis_of_percent_and_not_a_panel():
    ours = pd.DataFrame({"seq": [4096, 2048], "series": "Rowmax-H15", "value": [-6.0, -5.0]})
    ours = ours.assign(low=ours["value"] - 1, high=ours["value"] + 1, floor_low=-1.0, floor_high=1.0)
    theirs = pd.DataFrame({"seq": [1024.0, 2048.0], "series": "kernel duration", "value": [7.0, 9.6]})
    fig = figures_time.lengths([("card", ours, True), ("B200", theirs, False)])
    left, right = fig.axes
    assert drawn(left, OURS, filled=True) == [2048, 4096], "by length"
    assert drawn(right, PAPER, filled=False) == [1024, 2048] and not drawn(left, PAPER, filled=False)
    assert left.get_ylim() == right.get_ylim()
    assert keys(fig) == ["control, measured", "Rowmax-H15, measured", "kernel duration, published"]


def test_spread_draws_a_cell_a_point_and_the_limit_where_it_is_known():
    frame = pd.DataFrame(
        {
            "label": list("abcd"),
            "power": [450.0, 600, 680, 690],
            "spread": [0.2, 0.3, 6, 2],
            "window_ms": [20, 20, 20, 200],
        }
    )
    (ax,) = figures_time.spread(frame, 700.0).axes
    assert sorted(drawn(ax, OURS, filled=True)) == [450, 600, 680, 690]
    assert any(list(line.get_xdata()) == [700, 700] for line in ax.lines)
    (ax,) = figures_time.spread(frame, math.nan).axes
    assert not any(list(line.get_xdata()) == [700, 700] for line in ax.lines)


def test_power_and_clock_are_lines_of_each_kernel():
    trace = pd.DataFrame({"seconds": [0.0, 1.0, 2.0], "power": [100.0, 690, 690], "clock": [1980, 1600, 1600]})
    fig = figures_time.power({"stock": trace, "h15": trace.assign(power=[90.0, 680, 680])}, 700.0)
    top, bottom = fig.axes
    assert [list(line.get_ydata()) for line in top.lines] == [[100, 690, 690], [90, 680, 680], [700, 700]]
    assert len(bottom.lines) == 2
    assert keys(fig) == ["stock, measured", "h15, measured", "power limit of the card"]


def test_counters_have_a_marker_a_pipe_and_kernel():
    frame = pd.DataFrame({"kernel": ["stock", "h15"], "xu": [40.0, 1], "alu": [18.0, 34], "fma": [16.0, 19]})
    fig = figures_time.counters({"cell": frame.assign(issue=[38.0, 45], tensor=[79.0, 72])})
    (ax,) = fig.axes
    assert [list(line.get_xdata()) for line in ax.lines] == [[40, 1], [18, 34], [16, 19], [38, 45], [79, 72]]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["stock", "h15"]
    assert keys(fig) == ["XU", "ALU", "FMA", "issue slots", "tensor cores"]
