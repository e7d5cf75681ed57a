"""The figures of the kernel's semantics show exactly the numbers they are given, each in the look of its kind."""

import matplotlib

matplotlib.use("Agg")

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_hex
from test_figures import curve, drawn, estimates, inside, intervals
from test_figures_distortion import lines_of, spans

from softmaxlab import figures_semantics as figs
from softmaxlab.drawing import OURS, PAPER

NAMES = {"model": "a model", "reference": "another"}
NONE = pd.DataFrame({"place": [], "value": [], "low": [], "high": []})


def faces(ax, colour):
    """Marker face by position of every marker of one colour."""
    return {
        tuple(np.round(point, 6)): to_hex(line.get_markerfacecolor())
        for line in ax.lines
        if line.get_marker() not in ("None", None, "") and to_hex(line.get_color()) == to_hex(colour)
        for point in np.column_stack(line.get_data())
    }


def test_row_in_tiles_draws_keys_tiles_and_both_errors():
    keys = pd.DataFrame(
        {"key": range(6), "score": [9.0, 1, 0, 2, 3, 1], "whole": [0, 0.1, 0.2, 0.3, -0.1, -0.2], "error": [0.3] * 6}
    )
    tiles = pd.DataFrame(
        {"start": [0, 3], "stop": [3, 6], "visit": [2, 1], "running": [9.0, 3.0], "anchor": [3.0, 3.0]}
    )
    top, bottom = drawn(figs.row_in_tiles(keys, tiles, envelope=(-0.25, 0.335))).axes
    np.testing.assert_array_equal(curve(top, "score"), keys[["key", "score"]])
    np.testing.assert_array_equal(curve(top, "row maximum"), [[0, 9]])
    np.testing.assert_array_equal(curve(top, "running maximum"), [[-0.5, 9], [2.5, 9]])
    np.testing.assert_array_equal(curve(top, "anchor"), [[-0.5, 3], [2.5, 3]])
    assert [t.get_text() for t in top.texts] == ["visit 2", "visit 1"]
    np.testing.assert_array_equal(curve(bottom, "whole row"), keys[["key", "whole"]])
    np.testing.assert_array_equal(curve(bottom, "kernel"), keys[["key", "error"]])
    np.testing.assert_array_equal(curve(bottom, "its row maximum, whole row"), [[0, 0]])
    np.testing.assert_array_equal(curve(bottom, "its row maximum, kernel"), [[0, 0.3]])
    assert inside(bottom, [-0.25, 0.335]) and inside(top, [0, 9])


def test_fidelity_keeps_kinds_apart_and_lists_the_kernel_first():
    rows = estimates([0.002, 0.0015, 0.004], label=["a", "b", "c"], kind=["simulated", "measured", "measured"])
    theirs = estimates([0.0012, 0.001], label=["kernel", "b"])
    (ax,) = drawn(figs.fidelity(rows, theirs, **NAMES)).axes
    assert [t.get_text() for t in ax.get_yticklabels()] == ["c", "b", "a", "kernel"]
    np.testing.assert_allclose(curve(ax, "a model: simulated"), [[0.002, 2.12]])
    np.testing.assert_allclose(curve(ax, "a model: measured"), [[0.0015, 1.12], [0.004, 0.12]])
    np.testing.assert_allclose(curve(ax, "another: published"), [[0.0012, 2.88], [0.001, 0.88]])
    assert set(faces(ax, OURS).values()) == {"#ffffff", to_hex(OURS)} and set(faces(ax, PAPER).values()) == {"#ffffff"}
    np.testing.assert_allclose([s[1:] for s in spans(ax, PAPER)], [(0.0009, 0.0011), (0.00108, 0.00132)])
    assert len(spans(ax, OURS)) == 3
    assert inside(ax, [0.0, 0.0044], "x")


def test_lagging_share_has_a_line_a_threshold_and_the_published_share():
    shares = pd.concat(
        [
            pd.DataFrame({"series": s, "layer": [0, 1], "value": v})
            for s, v in (("τ = 4", [0.0, 50]), ("τ = 8", [1, 100]))
        ]
    )
    (ax,) = drawn(figs.lagging_share(shares, 39.5, ylabel="rows (%)", model="a model")).axes
    four, eight = lines_of(ax, OURS)
    np.testing.assert_array_equal(four, [[0, 0], [1, 50]])
    np.testing.assert_array_equal(eight, [[0, 1], [1, 100]])
    assert set(lines_of(ax, PAPER)[0][:, 1]) == {39.5}
    assert [t.get_text() for t in ax.texts] == ["□ τ = 8", "○ τ = 4"][::-1] and inside(ax, [0, 100])


def swept(values):
    kinds = ["measured", "simulated", "simulated"]
    return pd.concat(
        [estimates(v, series=s, place=["whole row", "τ = 0", "τ = 8"], kind=kinds) for s, v in values.items()]
    )


def test_by_place_draws_every_value_once_in_the_look_of_its_kind():
    values = {"h15()": [0.0018, 0.0017, 0.0025], "s()": [0.0007, 0.001, 0.0009]}
    ours = swept(values)
    fig = figs.by_place(ours, NONE, ["whole row", "τ = 0", "τ = 8"], xlabel="anchor", model="a model")
    (ax,) = drawn(fig).axes
    found = sorted((round(x), y, face) for (x, y), face in faces(ax, OURS).items())
    want = [(i, round(v[i], 6), to_hex(OURS) if i == 0 else "#ffffff") for i in range(3) for v in values.values()]
    assert found == sorted(want)
    assert len(intervals(ax, OURS)) == 6 and intervals(ax, PAPER) == []
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["a model: measured", "a model: simulated"]
    assert {t.get_text() for t in ax.texts} == {"○ h15()", "□ s()"}
    assert ax.get_yscale() == "log" and inside(ax, ours[["low", "high"]].to_numpy().ravel())


def test_by_place_with_an_interval_over_zero_cuts_nothing_off():
    ours = swept({"h15()": [0.0018, 0.0017, 0.02]})
    theirs = pd.DataFrame({"place": ["τ = 0"], "value": [-2e-5], "low": [-3e-4], "high": [2.7e-4]})
    fig = figs.by_place(ours, theirs, ["whole row", "τ = 0", "τ = 8"], xlabel="anchor", **NAMES)
    (ax,) = drawn(fig).axes
    ((x, y),) = curve(ax, "another: published")
    assert y == -2e-5 and round(x) == 1
    np.testing.assert_allclose([i[1:] for i in intervals(ax, PAPER)], [(-3e-4, 2.7e-4)])
    assert ax.get_yscale() == "symlog"
    assert inside(ax, [-3e-4, *ours[["low", "high"]].to_numpy().ravel()])
    labels = [t.get_text() for t in ax.get_yticklabels()]
    assert "0" in labels and "-0" not in labels and len(labels) == len(set(labels))


@pytest.mark.parametrize("value", [0.0, -1e-9, 3.0])
def test_by_place_takes_any_value(value):
    ours = pd.DataFrame(
        {"series": ["a"], "place": ["p"], "kind": ["simulated"], "value": [value], "low": [value], "high": [value]}
    )
    (ax,) = drawn(figs.by_place(ours, NONE, ["p", "q"], xlabel="x", model="m")).axes
    assert inside(ax, [value])


def test_operand_conversion_shares_rows_between_its_panels():
    baseline = estimates([0.015, 0.016], label=["cast", "tensor"])
    operator = estimates([0.002, 0.0021, 0.0022], label=["none", "cast", "tensor"])
    left, right = drawn(figs.operand_conversion(baseline, operator, 0.49, **NAMES)).axes
    assert [t.get_text() for t in left.get_yticklabels()] == ["tensor", "cast", "none"]
    np.testing.assert_array_equal(curve(left, "a model: simulated"), [[0.015, 1], [0.016, 0]])
    np.testing.assert_array_equal(curve(right, "a model: simulated"), [[0.002, 2], [0.0021, 1], [0.0022, 0]])
    assert set(lines_of(left, PAPER)[0][:, 0]) == {0.49}
    assert inside(left, [0.0135, 0.49], "x") and left.get_xscale() == "log"
    assert inside(right, [0.0, 0.00242], "x") and right.get_xscale() == "linear"
    assert len(spans(left, OURS)) == 2 and len(spans(right, OURS)) == 3
