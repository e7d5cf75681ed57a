"""The figures of anchors and of the family show exactly the numbers they are given, with nothing cut off."""

import matplotlib

matplotlib.use("Agg")

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle
from test_figures import curve, drawn, estimates, inside, intervals

from softmaxlab import bits, figures_family, figures_lattices, lattice_endpoints
from softmaxlab.drawing import OURS, PAPER
from softmaxlab.figures_lattices import DRAWN, SECOND

NAMES = {"model": "a model", "reference": "another"}
PLACES = {
    "anchor": [one.anchor for one in lattice_endpoints.LATTICES],
    "spacing": [one.spacing for one in lattice_endpoints.LATTICES],
}


def test_an_anchored_row_draws_every_key_where_it_is_and_where_it_goes():
    lattices = {"a": ([-3, -2, -1, 0], [-3, -1, 0]), "b": ([-2.7, -1.7, -0.7, 0.3], [-2.7, -1.7, 0.3])}
    moved = pd.DataFrame({"series": ["x", "x", "y"], "phase": [0.1, -0.2, 0.3], "leakage": [0.0, 0.4, -0.1]})
    left, right = drawn(figures_lattices.anchored_row([-2.6, -1.4, 0.0], lattices, moved)).axes
    np.testing.assert_allclose(curve(left, "exact weight")[:, 0], [-2.6, -1.4, 0.0])
    np.testing.assert_allclose(curve(left, "weight on the lattice")[:, 0], [-3, -1, 0])
    assert [t.get_text() for t in left.get_yticklabels()] == ["a", "b"]
    assert left.get_yticks()[0] > left.get_yticks()[1], "the first lattice is on top"
    np.testing.assert_array_equal(curve(right, "x"), [[0.1, 0.0], [-0.2, 0.4]])
    np.testing.assert_array_equal(curve(right, "y"), [[0.3, -0.1]])


def test_four_lattices_stand_in_two_panels_on_one_axis():
    ours = estimates([0.0144, 0.0061, 0.0042, 0.0014], **PLACES)
    theirs = estimates([0.0066, 0.003, 0.0021, -0.0009], **PLACES)
    left, right = drawn(figures_lattices.anchor_and_spacing(ours, theirs, **NAMES)).axes
    for ax, frame, colour in ((left, ours, OURS), (right, theirs, PAPER)):
        for spacing, rows in frame.groupby("spacing"):
            np.testing.assert_array_equal(curve(ax, spacing), np.column_stack([[0, 1], rows["value"]]))
        assert len(intervals(ax, colour)) == 4
        assert ax.get_yscale() == "linear" and inside(ax, frame[["low", "high"]])
    assert left.get_ylim() == right.get_ylim()
    assert intervals(left, PAPER) == intervals(right, OURS) == []
    assert [ax.get_title(loc="left") for ax in (left, right)] == ["a model: measured", "another: published"]


def test_correlations_are_drawn_head_by_head_and_pooled():
    heads = pd.DataFrame({"operator": ["a", "a", "a", "b", "b"], "r": [-0.5, np.nan, -0.9, 0.02, 0.3]})
    pooled = pd.DataFrame({"operator": ["a", "b"], "value": [-0.7, 0.1]})
    theirs = pd.DataFrame({"operator": ["b"], "value": [-0.005]})
    (ax,) = drawn(figures_lattices.phase_by_head(heads, pooled, theirs, reference="another")).axes
    assert [t.get_text() for t in ax.get_yticklabels()] == ["a", "b"]
    np.testing.assert_array_equal(curve(ax, "measured, one head")[:, 0], [-0.9, -0.5])
    np.testing.assert_array_equal(curve(ax, "measured, all rows")[:, 0], [-0.7, 0.1])
    published = curve(ax, "another: published")
    assert published[0, 0] == -0.005 and published[0, 1] == curve(ax, "measured, all rows")[1, 1], "on b's line"
    assert inside(ax, [-0.9, 0.3, -1], "x")


def test_correlations_without_any_published():
    heads = pd.DataFrame({"operator": ["a"], "r": [np.nan]})
    pooled = pd.DataFrame({"operator": ["a"], "value": [np.nan]})
    (ax,) = drawn(figures_lattices.phase_by_head(heads, pooled, pooled.iloc[:0], reference="another")).axes
    assert not any("published" in t.get_text() for t in ax.get_legend().get_texts())


@pytest.mark.parametrize("k", [0, 1, 3])
def test_the_bits_are_those_of_the_words_and_the_exponent_is_marked_in_them(k):
    r = torch.tensor([-2.75 * 2**k]) + bits.MAGIC
    weight = bits.paper_form(torch.tensor([-2.75]), k)
    given = [("r", r.view(torch.int32).item(), 0, ""), ("w", weight.view(torch.int32).item(), 23 - k, "its value")]
    (ax,) = drawn(figures_family.bit_fields(given, fraction=k)).axes
    for line, (_, word, *_) in enumerate(given):
        digits = [t for t in ax.texts if t.get_position()[1] == -line and t.get_text() in "01" and t.get_text()]
        digits = "".join(t.get_text() for t in sorted(digits, key=lambda t: t.get_position()[0]))
        assert digits == f"{word % 2**32:032b}"
    cells = [p for p in ax.patches if isinstance(p, Rectangle)]
    marked = {c: sorted(p.get_x() for p in cells if to_hex(p.get_facecolor()) == to_hex(c)) for c in (SECOND, DRAWN)}
    # n is at the right end of r; in the weight its k fractional bits are the first of the mantissa, cells 9 and on.
    assert marked[SECOND] == [*range(9, 9 + k), *range(32 - k, 32)]
    assert marked[DRAWN] == [*range(9), *range(32 - k - 9, 32 - k)]
    assert "its value" in [t.get_text() for t in ax.texts]


def test_octave_errors_keep_inside_what_they_are_given():
    x = np.linspace(-1, 0, 101)
    saw = np.where(x < -0.5, -x - 1, -x)
    fig = figures_family.octave_errors(
        {"a": (x, saw), "b": (x, 0 * x)},
        {"a": (-0.5, 0.5), "b": (0.0, 0.1)},
        {"a": (x, saw / 2), "b": (x, 0 * x)},
    )
    top_a, top_b, bottom_a, _ = drawn(fig).axes
    line = curve(top_a, "error")
    seen = np.isfinite(line[:, 1])
    np.testing.assert_array_equal(line[seen, 1], saw[seen])
    assert (~seen).sum() == 1, "the jump is no line"
    assert inside(top_a, [-0.5, 0.5]) and inside(bottom_a, [-1, 1]), "a probability may be off by the whole width"
    assert top_a.get_ylim() == top_b.get_ylim()
    np.testing.assert_array_equal(bottom_a.lines[0].get_ydata(), saw / 2)


def family():
    ks = [0, 1, 2, 7, 13]
    ours = estimates([6e-3, 2e-3, 1e-3, 7.2e-4, 7.1e-4], k=ks)
    gaps = estimates([5e-3, 1e-3, 4e-4, -2e-6, 3e-8], k=ks).assign(floor=[2e-4, 1e-4, 4e-5, 4e-5, 4e-5])
    theirs = pd.DataFrame({"k": [1, 2], "value": [1e-3, 3e-4], "low": [7e-4, -1e-5], "high": [2e-3, 6e-4]})
    return ours, estimates([7e-4]).iloc[0], gaps, theirs


def test_the_family_is_drawn_with_its_limit_its_floor_and_the_papers_members():
    ours, limit, gaps, theirs = family()
    left, right = drawn(figures_family.family_curve(ours, limit, gaps, theirs, -2e-5, **NAMES)).axes
    np.testing.assert_array_equal(curve(left, "a model: measured"), np.column_stack([range(5), ours["value"]]))
    np.testing.assert_allclose(curve(left, "another: published"), [[1.15, 1e-3], [2.15, 3e-4]])
    assert [t.get_text() for t in left.get_xticklabels()] == ["0", "1", "2", "7", "13"]
    assert inside(left, [*theirs["low"], *ours["high"], -2e-5]) and left.get_yscale() == "symlog"
    np.testing.assert_array_equal(curve(right, "$S(Q_k)"), np.column_stack([range(5), gaps["value"]]))
    bars = [(p.get_y(), p.get_y() + p.get_height()) for p in right.patches]
    np.testing.assert_allclose(bars, np.column_stack([-gaps["floor"], gaps["floor"]]))
    assert inside(right, gaps[["low", "high"]])


def test_the_family_without_a_published_member_or_a_floor():
    ours, limit, gaps, theirs = family()
    fig = figures_family.family_curve(ours, limit, gaps.assign(floor=0.0), theirs.iloc[:0], float("nan"), **NAMES)
    left, right = drawn(fig).axes
    assert intervals(left, PAPER) == [] and left.get_yscale() == "log"
    assert inside(right, gaps[["low", "high"]])


def test_loss_against_error_labels_points_and_cuts_nothing_off():
    ours = estimates([6e-3, 2e-3, 7e-4, -1e-5], series=["f", "f", "S", "p"], label=["k = 0", "", "", "p!"])
    ours["error"] = [0.16, 0.08, 0.03, 0.02]
    (ax,) = drawn(figures_family.loss_against_error(ours, model="a model")).axes
    np.testing.assert_array_equal(curve(ax, "f, measured"), [[0.16, 6e-3], [0.08, 2e-3]])
    assert {t.get_text() for t in ax.texts} - {""} == {"k = 0", "p!"}
    assert inside(ax, ours[["low", "high"]]) and inside(ax, ours["error"], "x")
    assert ax.get_ylabel() == "ΔNLL of a model (nats)"
