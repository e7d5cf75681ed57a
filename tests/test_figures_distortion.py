"""The figures of part 2 show exactly the numbers they are given, with nothing cut off."""

import matplotlib

matplotlib.use("Agg")

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.collections import LineCollection
from matplotlib.colors import to_hex
from test_figures import curve, drawn, estimates, inside, intervals

from softmaxlab import figures_distortion as figs
from softmaxlab.drawing import OURS, PAPER

NAMES = {"model": "a model", "reference": "another"}
R = [0.25, 0.5, 1, 2, 4, 8]


def lines_of(ax, colour):
    """(x, y) of every line with markers or a style in one colour, in drawing order, guides left out."""
    return [np.column_stack(line.get_data()) for line in ax.lines if to_hex(line.get_color()) == to_hex(colour)]


def spans(ax, colour):
    """End points of horizontal intervals in one colour, as (y, low, high), sorted by y."""
    found = []
    for lines in ax.collections:
        if isinstance(lines, LineCollection) and to_hex(lines.get_color()[0]) == to_hex(colour):
            found += [(s[0][1], s[0][0], s[1][0]) for s in lines.get_segments()]
    return sorted(found)


def test_allocation_sweep_shows_values_and_intervals_as_given():
    ours = estimates([0.03, 0.02, 0.01, 0.005, 0.002, -0.001], R=R)
    theirs = pd.DataFrame({"R": R, "value": [0.0161, 0.00997, 0.00489, 0.00251, 0.00138, 0.001]})
    (ax,) = drawn(figs.allocation_sweep(ours, theirs, **NAMES)).axes
    np.testing.assert_array_equal(curve(ax, "a model: measured"), ours[["R", "value"]])
    np.testing.assert_array_equal(curve(ax, "another: published"), theirs[["R", "value"]])
    np.testing.assert_allclose(intervals(ax, OURS), ours[["R", "low", "high"]].to_numpy())
    assert intervals(ax, PAPER) == []
    assert ax.get_yscale() == "symlog"  # one value is negative, and it is in view
    assert inside(ax, ours[["low", "high"]].to_numpy().ravel())
    assert [t.get_text() for t in ax.get_xticklabels()] == ["0.25", "0.5", "1", "2", "4", "8"]


def test_allocation_sweep_without_published_values():
    none = pd.DataFrame({"R": [], "value": []}, dtype=float)
    (ax,) = drawn(figs.allocation_sweep(estimates([1.0] * 6, R=R), none, **NAMES)).axes
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["a model: measured, 95 % intervals"]


def test_error_ratios_draws_one_line_a_series_and_names_it_at_its_end():
    values = {"up": [0.9, 0.95, 1, 1.1, 1.3, 1.5], "down": [3, 2, 1, 0.5, 0.3, 0.2]}
    ours = pd.concat([pd.DataFrame({"series": s, "R": R, "value": v}) for s, v in values.items()])
    theirs = pd.DataFrame({"series": ["up", "down", "down"], "R": [4, 8, 4], "value": [1.279, 0.205, 0.283]})
    (ax,) = drawn(figs.error_ratios(ours, theirs, **NAMES)).axes
    for line, v in zip(lines_of(ax, OURS), values.values(), strict=True):
        np.testing.assert_array_equal(line, np.column_stack([R, v]))
    up, down = lines_of(ax, PAPER)
    np.testing.assert_array_equal(up, [[4, 1.279]])
    np.testing.assert_array_equal(down, [[4, 0.283], [8, 0.205]])  # sorted along the axis
    names = {t.get_text(): t.get_position()[1] for t in ax.texts}
    assert names["up"] > names["down"]
    assert sum("published" in t.get_text() for t in ax.get_legend().get_texts()) == 1
    assert inside(ax, [0.2, 3])


def forest_frames():
    theirs = pd.DataFrame(
        {"model": ["a", "b", "c"], "value": [0.01, -0.02, 0.03], "low": [0.0, -0.03, 0.02], "high": [0.02, -0.01, 0.04]}
    )
    return theirs, estimates([0.015], model=["mine"])


def test_forest_lists_the_published_models_and_sets_ours_apart():
    theirs, ours = forest_frames()
    top, bottom = drawn(figs.forest({"": (theirs, ours)}, xlabel="x (nats)")).axes
    assert [t.get_text() for t in top.get_yticklabels()] == ["c", "b", "a"]
    np.testing.assert_array_equal(curve(top, "published"), [[0.01, 2], [-0.02, 1], [0.03, 0]])
    np.testing.assert_array_equal(curve(bottom, "measured"), [[0.015, 0]])
    np.testing.assert_allclose(spans(top, PAPER), [(0, 0.02, 0.04), (1, -0.03, -0.01), (2, 0.0, 0.02)])
    np.testing.assert_allclose(spans(bottom, OURS), [(0, 0.0135, 0.0165)])
    assert spans(top, OURS) == spans(bottom, PAPER) == []
    assert bottom.get_xscale() == "linear" and bottom.get_xlabel() == "x (nats)"
    for ax in (top, bottom):
        assert inside(ax, [-0.03, 0.04], "x")


def test_forest_panels_share_their_rows_and_leave_gaps():
    theirs, ours = forest_frames()
    one = theirs[theirs["model"] == "c"]
    none = ours.iloc[:0]
    fig = drawn(figs.forest({"A": (theirs, ours), "B": (one, none)}, xlabel="x"))
    a, b, mine_a, mine_b = fig.axes
    assert [a.get_title(), b.get_title()] == ["A", "B"]
    np.testing.assert_array_equal(curve(b, "published"), [[0.03, 0]])  # on c's row, not on the first
    assert len(curve(mine_a, "measured")) == 1 and len(curve(mine_b, "measured")) == 0
    (legend,) = fig.legends
    assert [t.get_text() for t in legend.get_texts()] == ["published, 95 % intervals", "measured, 95 % interval"]


def test_forest_takes_an_axis_of_decades_only_where_one_value_dwarfs_the_rest():
    theirs, ours = forest_frames()
    large = pd.concat([theirs, estimates([3.0], model=["large"])])
    _, bottom = drawn(figs.forest({"": (large, ours)}, xlabel="x")).axes
    assert bottom.get_xscale() == "symlog"
    assert inside(bottom, [-0.03, 3.3], "x")


finite = st.floats(-20, 1e4, allow_nan=False).map(lambda x: 0.0 if abs(x) < 1e-12 else x)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(finite, finite, finite).map(sorted), min_size=1, max_size=8))
def test_forest_cuts_nothing_off(triples):
    low, value, high = np.array(triples).T
    theirs = pd.DataFrame({"model": list("abcdefgh"[: len(value)]), "value": value, "low": low, "high": high})
    ours = theirs.head(1).assign(model="mine")
    top, bottom = drawn(figs.forest({"": (theirs, ours)}, xlabel="x")).axes
    assert inside(bottom, np.array(triples), "x") and top.get_xlim() == bottom.get_xlim()
    ticks = [t for t in bottom.get_xticks() if bottom.get_xlim()[0] <= t <= bottom.get_xlim()[1]]
    assert len(ticks) <= 9


def test_response_map_draws_every_drawable_intervention_once():
    points = pd.DataFrame(
        {
            "kind": ["grid", "grid", "octave lattice", "flattening", "sharpening", "sharpening"],
            "jsd": [1e-3, 1e-4, 1e-2, 2e-3, 3e-3, 5e-3],
            "value": [2e-3, 1e-4, 3e-2, 2e-3, -1e-4, 4e-3],
        }
    )
    fig = figs.response_map(points, lambda x: 2 * x, lambda x: 3 * x**1.05, **NAMES)
    (ax,) = drawn(fig).axes
    np.testing.assert_array_equal(curve(ax, "grid"), [[1e-3, 2e-3], [1e-4, 1e-4]])
    np.testing.assert_array_equal(curve(ax, "octave lattice"), [[1e-2, 3e-2]])
    np.testing.assert_array_equal(curve(ax, "sharpening"), [[5e-3, 4e-3]])  # the negative one has no place
    markers = {str(line.get_label()): line.get_marker() for line in ax.lines}
    assert markers["flattening, measured"] == "v" and markers["sharpening, measured"] == "^"
    ours, theirs = curve(ax, "a model: our fit"), curve(ax, "another: published fit")
    np.testing.assert_allclose(ours[:, 1], 2 * ours[:, 0])
    np.testing.assert_allclose(theirs[:, 1], 3 * theirs[:, 0] ** 1.05)
    assert ours[0, 0] == pytest.approx(1e-4) and ours[-1, 0] == pytest.approx(1e-2)
    assert ax.get_xscale() == ax.get_yscale() == "log"


def test_response_map_without_a_positive_point_is_empty_and_does_not_fail():
    points = pd.DataFrame({"kind": ["grid"], "jsd": [1e-3], "value": [-1e-3]})
    (ax,) = drawn(figs.response_map(points, None, None, **NAMES)).axes
    assert not ax.lines


LEVELS = ["J₀", "3 J₀", "10 J₀"]


def test_redistribution_keeps_directions_levels_and_ranges_apart():
    rows = [
        (level, d, s * (0.1 + i)) for d, s in (("flattening", 1), ("sharpening", -1)) for i, level in enumerate(LEVELS)
    ]
    leakage = pd.DataFrame(rows, columns=["level", "direction", "value"])
    theirs = pd.DataFrame(
        {
            "level": ["10 J₀", "J₀"],
            "direction": ["flattening", "sharpening"],
            "low": [0.07, -0.03],
            "high": [0.15, -0.02],
        }
    )
    left, right = drawn(figs.redistribution(leakage, theirs, leakage.assign(value=0.5), model="m")).axes
    np.testing.assert_allclose(curve(left, "m: measured, flattening"), [[0, 0.1], [1, 1.1], [2, 2.1]])
    np.testing.assert_allclose(curve(left, "m: measured, sharpening"), [[0, -0.1], [1, -1.1], [2, -2.1]])
    np.testing.assert_allclose(curve(right, "m: measured, flattening"), [[0, 0.5], [1, 0.5], [2, 0.5]])
    bars = intervals(left, PAPER)
    np.testing.assert_allclose([b[1:] for b in bars], [(-0.03, -0.02), (0.07, 0.15)])
    assert 0 < bars[0][0] < 0.5 and 2 < bars[1][0] < 2.5  # beside the markers of their level
    assert [t.get_text() for t in left.get_xticklabels()] == LEVELS
    assert inside(left, [-2.1, 2.1, 0.15]) and right.get_ylim()[0] == 0


def test_redistribution_with_nothing_matched_still_shows_the_published_ranges():
    empty = pd.DataFrame({"level": [], "direction": [], "value": []})
    theirs = pd.DataFrame({"level": ["J₀"], "direction": ["flattening"], "low": [0.02], "high": [0.04]})
    left, _ = drawn(figs.redistribution(empty, theirs, empty, model="m")).axes
    assert len(intervals(left, PAPER)) == 1


def test_by_layer_has_one_point_a_layer_and_direction():
    ours = pd.DataFrame(
        {"direction": ["flattening"] * 3 + ["sharpening"] * 3, "layer": [0, 1, 2] * 2, "value": [1.0, 2, 3, -1, -2, -3]}
    )
    (ax,) = drawn(figs.by_layer(ours, ylabel="y", model="m")).axes
    np.testing.assert_array_equal(curve(ax, "m: measured, flattening"), [[0, 1], [1, 2], [2, 3]])
    np.testing.assert_array_equal(curve(ax, "m: measured, sharpening"), [[0, -1], [1, -2], [2, -3]])
    assert ax.get_ylabel() == "y"


def test_clamp_sweep_draws_both_tails_and_the_papers():
    K = [12, 20, 48]
    ours = pd.concat(
        [estimates([3.0, 0.5, 0.5], series="clamped", K_max=K), estimates([0.5] * 3, series="dropped", K_max=K)]
    )
    theirs = pd.DataFrame(
        {"series": ["clamped", "clamped", "dropped"], "K_max": [12.0, 48, 12], "value": [3.183, 0.333, 0.336]}
    )
    (ax,) = drawn(figs.clamp_sweep(ours, theirs, **NAMES)).axes
    clamped, dropped = lines_of(ax, OURS)
    np.testing.assert_array_equal(clamped, np.column_stack([K, [3.0, 0.5, 0.5]]))
    np.testing.assert_array_equal(dropped, np.column_stack([K, [0.5] * 3]))
    np.testing.assert_array_equal(lines_of(ax, PAPER)[0], [[12, 3.183], [48, 0.333]])
    assert len(intervals(ax, OURS)) == 6
    assert [t.get_text() for t in ax.get_xticklabels()] == ["12", "20", "48"]
    assert inside(ax, [3.3, 0.333])
    face = {to_hex(line.get_markerfacecolor()) for line in ax.lines if to_hex(line.get_color()) == to_hex(PAPER)}
    assert face == {"#ffffff"}


def test_floor_spread_shows_spread_and_size_of_the_mean():
    differences = pd.DataFrame(
        {
            "condition": ["grid(K=21)", "grid(K=21)", "pot(m=1)"],
            "variant": ["search", "float64", "float64"],
            "mean": [-3e-4, 1e-4, 2e-4],
            "sd": [1e-3, 2e-3, 1.5e-3],
        }
    )
    left, right = drawn(figs.floor_spread(differences)).axes
    assert [t.get_text() for t in left.get_yticklabels()] == ["pot(m=1)", "grid(K=21)"]
    np.testing.assert_allclose(curve(left, "search")[:, 0], [1e-3])
    np.testing.assert_allclose(curve(right, "search")[:, 0], [3e-4])
    sd, mean = curve(left, "float64"), curve(right, "float64")
    np.testing.assert_allclose(sd[:, 0], [2e-3, 1.5e-3])
    np.testing.assert_allclose(mean[:, 0], [1e-4, 2e-4])
    assert np.round(sd[:, 1]).tolist() == [1, 0]  # within their operator's row
    assert inside(left, [1e-3, 2e-3], "x") and inside(right, [1e-4, 3e-4], "x")


def test_floor_spread_of_implementations_that_agree_exactly():
    same = pd.DataFrame({"condition": ["a"], "variant": ["v"], "mean": [0.0], "sd": [0.0]})
    left, right = drawn(figs.floor_spread(same)).axes
    for ax in (left, right):
        np.testing.assert_array_equal(curve(ax, "v")[:, 0], [0.0])
