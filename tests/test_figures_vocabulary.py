"""The figure of vocabulary output shows exactly the numbers it is given; every operator of the book has a kind."""

import matplotlib

matplotlib.use("Agg")

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_hex
from test_figures import drawn, inside

from softmaxlab import conditions, figures_vocabulary
from softmaxlab.drawing import OURS, PAPER
from softmaxlab.figures_vocabulary import OTHER, by_model, kind, output_against_loss

PUBLISHED = pd.DataFrame({"value": [0.004, 0.006], "changed": [4.0, 5.0]})


def test_every_operator_of_the_sections_has_a_kind():
    texts = [text for section in conditions.SECTIONS for text in conditions.named(section) if text != "softmax()"]
    assert OTHER not in set(map(kind, texts))
    assert kind("rescue(of=pot(m=1))") == "temperature, mass restored"
    assert kind("unheard_of(a=1)") == OTHER


def table(**rows):
    columns = ["value", "low", "high", "jsd", "changed"]
    return pd.DataFrame.from_dict({k.replace("_", "(") + ")": v for k, v in rows.items()}, "index", columns=columns)


def markers(ax, colour):
    lines = [line for line in ax.lines if line.get_marker() not in ("None", "") and line.get_color() == colour]
    return sorted(tuple(point) for line in lines for point in np.column_stack(line.get_data()))


def test_both_panels_show_every_point_that_has_a_place():
    ours = table(
        grid_1=[0.01, 0.005, 0.02, 0.001, 3.0],
        pot_1=[-0.002, -0.004, 0.001, 0.0004, 1.0],
        h15_=[0.0, -0.001, 0.001, 1e-9, 0.0],
        other_=[0.3, 0.2, 0.4, 0.05, 20.0],
    )
    left, right = drawn(output_against_loss(ours, PUBLISHED, model="m")).axes
    assert markers(left, OURS) == [(1e-9, 0.0), (0.0004, -0.002), (0.001, 0.01), (0.05, 0.3)]
    assert markers(right, OURS) == [(1.0, -0.002), (3.0, 0.01), (20.0, 0.3)], "none changed: no place on the axis"
    assert markers(right, PAPER) == [(4.0, 0.004), (5.0, 0.006)] and markers(left, PAPER) == []
    assert {to_hex(line.get_markerfacecolor()) for line in right.lines if line.get_color() == PAPER} == {"#ffffff"}
    assert inside(left, [-0.004, 0.4]) and left.get_xscale() == right.get_xscale() == "log"
    assert left.get_yscale() == "symlog"
    spans = [tuple(path.vertices[:, 1]) for c in left.collections for path in c.get_paths()]
    assert sorted(spans) == sorted(zip(ours.low, ours.high, strict=True))
    (legend,) = left.figure.legends
    said = {text.get_text() for text in legend.get_texts()}
    assert said >= {"grid, measured", "other, measured", "ten models under Rowmax-PoT, published"}


@pytest.mark.parametrize("rows", [{}, {"h15_": [0.0, 0.0, 0.0, 0.0, 0.0]}])
def test_nothing_to_draw_is_drawn_empty(rows):
    left, right = drawn(output_against_loss(table(**rows), PUBLISHED[:0], model="m")).axes
    assert markers(left, OURS) == markers(right, OURS) == []


def test_kinds_are_told_apart_by_their_markers():
    signs = [marker for marker, _ in figures_vocabulary.KINDS.values()]
    assert len(set(signs)) == len(signs)


def test_every_model_has_a_panel_with_its_points_on_shared_axes():
    one = table(grid_1=[0.01, 0.005, 0.02, 0.001, 3.0], h15_=[0.002, 0.001, 0.003, 0.0001, 1.0])
    two = table(mean_threshold_=[-0.005, -0.006, -0.004, 0.0008, 2.0])
    left, right = drawn(by_model({"m (float32, fused)": one, "n (bfloat16, fused, 6 of 9 blocks)": two})).axes
    assert markers(left, OURS) == [(0.0001, 0.002), (0.001, 0.01)] and markers(right, OURS) == [(0.0008, -0.005)]
    assert [ax.get_title() for ax in (left, right)] == ["m\nfloat32, fused", "n\nbfloat16, fused, 6 of 9 blocks"]
    assert left.get_xlim() == right.get_xlim() and left.get_ylim() == right.get_ylim()
    assert inside(left, [-0.006, 0.02])


def test_four_models_take_two_rows():
    one = table(grid_1=[0.01, 0.005, 0.02, 0.001, 3.0])
    axes = drawn(by_model({f"{name} (float32, fused)": one for name in "abcd"})).axes
    assert [bool(ax.get_title()) for ax in axes] == [True] * 4 + [False] * 2
