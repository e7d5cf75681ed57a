"""The figures show exactly the numbers they are given, with nothing cut off."""

from types import SimpleNamespace

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.collections import LineCollection
from matplotlib.colors import to_hex

from softmaxlab import figures

NAMES = {"model": "a model", "reference": "another"}
KEPT = [50, 25, 15, 10, 6.5, 2.6, 1, 0.65]


def estimates(values, spread=0.1, **columns):
    values = np.asarray(values, dtype=float)
    half = spread * np.abs(values)
    return pd.DataFrame({**columns, "value": values, "low": values - half, "high": values + half})


def intervals(ax, colour):
    """End points of every interval drawn in one colour, as (place, low, high) sorted by place."""
    found = []
    for lines in ax.collections:
        if isinstance(lines, LineCollection) and to_hex(lines.get_color()[0]) == colour:
            found += [(s[0][0], s[0][1], s[1][1]) for s in lines.get_segments()]
    return sorted(found)


def curve(ax, label):
    (line,) = [line for line in ax.lines if str(line.get_label()).startswith(label)]
    return np.column_stack(line.get_data())


def drawn(fig):
    """Render it, and check that doing so needs nothing from pyplot's list of open figures."""
    assert fig.number not in plt.get_fignums()
    fig.canvas.draw()
    return fig


def inside(ax, values, which="y"):
    low, high = ax.get_ylim() if which == "y" else ax.get_xlim()
    values = np.asarray(values, dtype=float)
    return bool(((values > low) & (values < high)).all())


def test_support_sweep_shows_values_and_intervals_as_given():
    ours = estimates([0.2, 1.1, 4, 9, 20, 44, 120, 180], kept=KEPT)
    theirs = pd.DataFrame({"kept": KEPT, "value": [0.131, 0.828, 3.1, 7.8, 15, 38, 90, 145]})
    (ax,) = drawn(figures.support_sweep(ours, theirs, **NAMES)).axes
    np.testing.assert_array_equal(curve(ax, "a model"), ours[["kept", "value"]])
    np.testing.assert_array_equal(curve(ax, "another"), theirs[["kept", "value"]])
    want = sorted(map(tuple, ours[["kept", "low", "high"]].to_numpy()))
    np.testing.assert_allclose(intervals(ax, figures.OURS), want)
    assert intervals(ax, figures.PAPER) == []  # the paper printed none
    assert ax.get_yscale() == "log"
    assert [t.get_text() for t in ax.get_xticklabels()] == [f"{k:g}" for k in sorted(KEPT)]
    labels = [t.get_text() for t in ax.get_legend().get_texts()]
    assert any("measured" in s for s in labels) and any("published" in s for s in labels)
    assert "%" in ax.get_xlabel() and "%" in ax.get_ylabel()


def test_measured_is_filled_and_published_hollow():
    ours = estimates([1.0, 2.0], kept=[10, 1])
    (ax,) = drawn(figures.support_sweep(ours, ours[["kept", "value"]], **NAMES)).axes
    face = {str(line.get_label()): to_hex(line.get_markerfacecolor()) for line in ax.lines}
    assert face["a model: measured, 95 % intervals"] == figures.OURS != figures.PAPER
    assert face["another: published"] == "#ffffff"


finite = st.floats(-20, 1e4, allow_nan=False).map(lambda x: 0.0 if abs(x) < 1e-12 else x)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(finite, finite, finite).map(sorted), min_size=2, max_size=8))
def test_no_value_and_no_interval_is_cut_off(triples):
    low, value, high = np.array(triples).T
    ours = pd.DataFrame({"kept": KEPT[: len(triples)], "value": value, "low": low, "high": high})
    none = pd.DataFrame({"kept": [], "value": []}, dtype=float)
    (ax,) = drawn(figures.support_sweep(ours, none, **NAMES)).axes
    assert inside(ax, np.array(triples))
    assert ax.get_yscale() == ("log" if (low > 0).all() else "symlog")
    shown = np.array(intervals(ax, figures.OURS))
    np.testing.assert_allclose(shown, sorted(zip(ours["kept"], low, high, strict=True)))
    pixels = ax.transData.transform(np.column_stack([ours["kept"], value]))
    assert np.isfinite(pixels).all()


def test_same_support_has_one_point_a_layer_and_the_published_range():
    ours = estimates([6.0, 0.05, -0.01, 0.2], layer=range(4))
    fig = figures.same_support(ours, **NAMES, published_range=(0.018, 0.2), published_first=8.17)
    (ax,) = drawn(fig).axes
    np.testing.assert_array_equal(curve(ax, "a model"), ours[["layer", "value"]])
    np.testing.assert_array_equal(curve(ax, "another: published, layer 0"), [[0, 8.17]])
    (band,) = ax.patches
    assert (band.get_y(), band.get_y() + band.get_height()) == pytest.approx((0.018, 0.2))
    assert len(intervals(ax, figures.OURS)) == 4
    assert ax.get_yscale() == "symlog" and inside(ax, [8.17, *ours["low"], *ours["high"]])
    assert "nats" in ax.get_ylabel()


def test_same_support_without_published_values():
    (ax,) = drawn(figures.same_support(estimates([0.1, 0.2], layer=[0, 1]), model="tiny")).axes
    assert not ax.patches and len(ax.get_legend().get_texts()) == 1


def test_across_models_keeps_ours_in_its_own_panel():
    ten = pd.DataFrame({"model": list("cab"), "params_b": [3.0, 1.0, 2.0], "value": [0.3, 0.1, 0.2]})
    ours = estimates([0.5], model=["mine"])
    top, bottom = drawn(figures.across_models(ten, ours)).axes
    assert [t.get_text() for t in top.get_yticklabels()] == ["a (1 B)", "b (2 B)", "c (3 B)"]
    np.testing.assert_array_equal(curve(top, "published"), [[0.1, 2], [0.2, 1], [0.3, 0]])
    assert [t.get_text() for t in bottom.get_yticklabels()] == ["mine"]
    np.testing.assert_array_equal(curve(bottom, "measured"), [[0.5, 0]])
    (line,) = [c for c in bottom.collections if isinstance(c, LineCollection)]
    np.testing.assert_allclose(line.get_segments()[0][:, 0], [0.45, 0.55])
    assert not [c for c in top.collections if isinstance(c, LineCollection)]
    for ax in (top, bottom):
        assert inside(ax, [0.1, 0.3, 0.45, 0.55], "x")


def test_across_models_with_the_reference_line_in_view():
    ten = pd.DataFrame({"model": ["a"], "params_b": [1.0], "value": [0.05]})
    top, _ = drawn(figures.across_models(ten, estimates([0.06], model=["mine"]), limit=1.0)).axes
    assert inside(top, [1.0], "x")
    assert "1 %" in [t.get_text() for t in top.texts]


def test_interval_sweep_names_every_series_beside_its_line():
    K = [16, 32, 64]
    ours = pd.concat(
        [
            estimates([8.4, 8.4, 8.3], series=["linear"] * 3, K=K),
            estimates([0.06, 0.009, 0.0016], series=["upper"] * 3, K=K),
            estimates([0.003, 0.0009, -0.0001], series=["nearest"] * 3, K=K),
        ]
    )
    theirs = pd.DataFrame(
        {
            "series": ["upper"] * 3 + ["linear"] * 3,
            "K": K * 2,
            "value": [0.05, 0.01, 0.002] + [np.nan] * 3,
            "low": [np.nan] * 3 + [8.32] * 3,
            "high": [np.nan] * 3 + [8.37] * 3,
        }
    )
    (ax,) = drawn(figures.interval_sweep(ours, theirs, **NAMES)).axes
    measured = [line for line in ax.lines if line.get_color() == figures.OURS]
    for line, (_, rows) in zip(measured, ours.groupby("series", sort=False), strict=True):
        np.testing.assert_array_equal(np.column_stack(line.get_data()), rows[["K", "value"]])
    assert len(intervals(ax, figures.OURS)) == 9
    names = {t.get_text(): t.get_position()[1] for t in ax.texts}
    assert set(names) == {"linear", "upper", "nearest"}
    assert names["linear"] > names["upper"] > names["nearest"]
    assert inside(ax, ours[["low", "high"]].to_numpy().ravel())
    assert [t.get_text() for t in ax.get_xticklabels()] == ["16", "32", "64"]


def test_interval_sweep_labels_do_not_touch_when_lines_coincide():
    K = [16, 32]
    ours = pd.concat([estimates([0.0, 0.0], series=[s] * 2, K=K) for s in "abc"])
    none = pd.DataFrame({"series": [], "K": [], "value": []})
    (ax,) = drawn(figures.interval_sweep(ours, none, **NAMES)).axes
    heights = sorted(t.get_position()[1] for t in ax.texts)
    assert np.diff(heights).min() >= 0.06


def test_paired_blocks_shows_losses_differences_and_interval():
    losses = pd.DataFrame({"softmax()": [3.0, 3.2, 2.9], "grid(K=8)": [3.1, 3.25, 2.95]})
    d = (losses["grid(K=8)"] - losses["softmax()"]).to_numpy()
    estimate = SimpleNamespace(mean=d.mean(), low=0.05, high=0.1)
    left, right = drawn(figures.paired_blocks(losses, d, estimate, names=tuple(losses.columns))).axes
    for name in losses:
        np.testing.assert_array_equal(curve(left, name)[:, 1], losses[name])
    np.testing.assert_array_equal(curve(right, "difference")[:, 1], d)
    (band,) = right.patches
    assert (band.get_y(), band.get_y() + band.get_height()) == pytest.approx((0.05, 0.1))


def test_row_weights_draws_each_operator_against_the_exact_exponential():
    distance = np.array([2.0, 0.0, 5.0])
    weights = {"softmax()": np.exp(-distance), "topk(f=0.5)": np.array([0.1, 1.0, 0.0])}
    fig = drawn(figures.row_weights(distance, weights))
    assert [ax.get_title().replace("\n", "") for ax in fig.axes] == list(weights)
    exact, points = fig.axes[1].lines
    np.testing.assert_allclose(exact.get_ydata(), np.exp(-np.array([0.0, 2.0, 5.0])))
    np.testing.assert_allclose(points.get_ydata()[:2], [1.0, 0.1])
    assert 0 < points.get_ydata()[2] < np.exp(-5.0)  # weight zero, drawn below everything else


def test_style_is_white_and_opaque(tmp_path):
    with matplotlib.rc_context():
        figures.style()
        fig = figures.same_support(estimates([0.1, 0.2], layer=[0, 1]), model="m")
        assert to_hex(fig.get_facecolor()) == "#ffffff" and not matplotlib.rcParams["savefig.transparent"]
        fig.savefig(tmp_path / "a.svg")
        assert "<text" not in (tmp_path / "a.svg").read_text()  # as paths: no font is needed to show it
