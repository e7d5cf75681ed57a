"""The paper's numbers beside ours: looked up, compared by sign only, and printed without losing digits."""

import io
import math
import re

import numpy as np
import pandas as pd
import pytest

from softmaxlab import paper, report
from softmaxlab.errors import LabError
from softmaxlab.paper import Published
from softmaxlab.statistics import Estimate, bootstrap


def estimate(mean, low, high):
    return Estimate(mean, low, high, 3, np.full(3, mean))


def printed(value, low=None, high=None):
    return Published(value, low, high, "nat", "somewhere", str(value))


@pytest.mark.parametrize(
    "value, text",
    [
        (0.00351, "0.00351"),
        (0.0042, "0.00420"),
        (-0.000204, "−0.000204"),
        (5268.4, "5,270"),
        (99.96, "100"),
        (0.9996, "1.00"),
        (1.0, "1.00"),
        (0.0, "0"),
        (math.nan, "—"),
        (math.inf, "—"),
        (3.21e-9, "3.21e−09"),
        (0.0000102, "0.0000102"),
    ],
)
def test_number_keeps_three_significant_digits(value, text):
    assert report.number(value) == text


def test_interval_transforms_all_three_ends():
    assert report.interval(estimate(0.01, -0.02, 0.05), report.percent) == "1.01 [−1.98, 5.13]"
    assert report.interval(printed(0.25)) == "0.250"


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B", "Qwen--Qwen2.5-0.5B", "qwen2.5-0.5b@main"])
def test_the_chapters_model_is_found_in_the_paper_under_all_its_names(name):
    assert report.published_model(name, "table3_cross_model") == "Qwen2.5-0.5B"
    assert report.published_model(name, "d1_support_sweep") == report.REFERENCE  # swept for that one only


@pytest.mark.parametrize("name", ["smollm2-135m", "Qwen/Qwen2.5-Coder-0.5B", "Qwen/Qwen2.5-0.5B-Instruct"])
def test_another_model_is_never_taken_for_one_of_the_papers(name):
    assert report.published_model(name, "table3_cross_model") == report.REFERENCE


def test_published_is_none_only_where_the_paper_prints_nothing():
    there = {"model": report.REFERENCE, "rule": "topk", "weights": "softmax", "metric": "ppl_change"}
    half = report.published("d1_support_sweep", **there, target_kept_pct="50")
    assert half == paper.value("d1_support_sweep", **there, target_kept_pct="50")
    assert report.published("d1_support_sweep", **there, target_kept_pct="51") is None
    with pytest.raises(LabError, match="8 rows"):
        report.published("d1_support_sweep", **there)
    with pytest.raises(LabError, match="no column 'colour'"):
        report.published("d1_support_sweep", colour="red")


def test_published_rows_are_numbers():
    rows = report.published_rows("table3_cross_model", metric="D_R21")
    assert len(rows) == 10 and rows[["value", "low", "high"]].notna().all(axis=None)
    assert (rows["low"] < rows["value"]).all() and (rows["value"] < rows["high"]).all()
    rows = report.published_rows("d1_support_sweep", metric="ppl_change", rule="topk")
    assert len(rows) == 8 and rows["low"].isna().all()


def test_published_grids_convert_and_keep_the_range():
    grids = report.published_grids(report.REFERENCE, "linear", "upper", "nearest").set_index(["series", "K"])
    assert len(grids) == 9 and set(grids.index.get_level_values("K")) == {16, 32, 64}
    one = paper.value("d1_geometry", recon="nearest", K=32, metric="ppl_change").value
    assert report.percent(grids.loc[("nearest", 32), "value"]) == pytest.approx(one, rel=1e-12)
    assert grids.loc[("upper", 16), "value"] == paper.value("d1_geometry", recon="upper_edge", K=16, stat="point").value
    assert grids.loc["linear", "value"].isna().all()
    assert (grids.loc["linear", "low"] < grids.loc["linear", "high"]).all()


@pytest.mark.parametrize(
    "ours, theirs, neutral, word",
    [
        (estimate(1, 0.5, 2), printed(3.0), 0, "same sign"),
        (estimate(-1, -2, -0.5), printed(3.0), 0, "opposite sign"),
        (estimate(-1, -2, -0.5), printed(-3.0, -4, -2), 0, "same sign"),
        (estimate(1, -0.5, 2), printed(3.0), 0, "ours unresolved"),
        (estimate(1, 0.0, 2), printed(3.0), 0, "ours unresolved"),
        (estimate(1, -0.5, 2), printed(3.0, 1, 7), 0, "ours unresolved"),
        (estimate(1, -0.5, 2), printed(3.0, -1, 7), 0, "both unresolved"),
        (estimate(1, 0.5, 2), printed(3.0, -1, 7), 0, "paper unresolved"),
        (estimate(1, 0.5, 2), None, 0, "—"),
        (estimate(1, 0.5, 2), printed(0.9), 1, "opposite sign"),
        (estimate(1, 0.5, 2), printed(4155.0), 1, "same sign"),
    ],
)
def test_agreement_compares_resolved_signs_only(ours, theirs, neutral, word):
    assert report.agreement(ours, theirs, neutral) == word


def test_tally_counts_every_estimate_once():
    up, down, open_ = estimate(1, 0.5, 2), estimate(-1, -2, -0.5), estimate(0, -1, 1)
    assert report.tally([up, up]) == "all 2 resolved above zero"
    assert report.tally([up, down, open_, up]) == ("2 resolved above zero, 1 unresolved, 1 resolved below zero (of 4)")


def test_beside_shows_both_kinds_and_the_papers_own_digits():
    theirs = paper.value("d1_support_sweep", rule="topk", target_kept_pct="0.65", metric="ppl_change")
    rows = [("a", bootstrap(np.array([0.1, 0.2, 0.3])), theirs), ("b", estimate(0.1, 0.05, 0.2), None)]
    styler = report.beside(rows, what="x", ours="mine", theirs="paper's", caption="C", transform=report.percent)
    html = styler.to_html()
    (shown,) = pd.read_html(io.StringIO(html), index_col=0, converters=dict.fromkeys(range(1, 4), str))
    assert list(shown.columns) == ["mine, measured", "paper's, published", "signs"]
    assert shown.iloc[0, 1] == "144.670"  # the trailing zero is part of what was printed
    assert shown.iloc[1, 1] == "—"
    assert shown.iloc[0, 0].startswith("22.1 [")
    assert "<caption>C</caption>" in html
    assert len(re.findall(r"<tr>", html)) == 3  # one heading row, two rows


def test_two_tables_of_a_page_do_not_share_an_id():
    a, b = (report.table(pd.DataFrame({"x": [1.0]}), caption) for caption in ("A", "B"))
    ids = [re.findall(r'<table id="([^"]+)"', t.to_html())[0] for t in (a, b)]
    assert ids[0] != ids[1] and ids[0] == re.findall(r'<table id="([^"]+)"', a.to_html())[0]


def run(model, corpus, context, n):
    return pd.DataFrame({"corpus": corpus, "context": context, "dtype": "float32", "block": range(n)})


def test_setting_names_every_difference_and_only_those():
    same = report.setting("qwen2.5-1.5b", run("q", "wikitext103", 2048, 97), "Qwen2.5-1.5B")
    assert "are the paper's" in same and "differ in" not in same
    other = report.setting("smollm2-135m", run("s", "pydoc", 512, 2), "Qwen2.5-1.5B")
    assert "The two runs differ in model, text, block length and number of blocks, so" in other
    one = report.setting("smollm2-135m", run("s", "wikitext103", 2048, 97), "Qwen2.5-1.5B")
    assert "differ in model, so" in one


def test_verdict_puts_each_row_into_one_group():
    rows = [
        ("a", estimate(1, 0.5, 2), printed(3.0)),
        ("b", estimate(-1, -2, -0.5), printed(3.0)),
        ("c", estimate(1, -1, 2), printed(3.0)),
        ("d", estimate(1, 0.5, 2), None),
    ]
    text = report.verdict(rows)
    assert "paper's sign, 1: a." in text and "opposite sign, 1: b." in text
    assert "without an interval, 1: c." in text and "compare, 1: d." in text


FLOORS = pd.Series({"grid": 0.002, "smooth": 0.0001, "any": 0.01})


def test_floor_of_a_contrast_adds_up_its_conditions():
    assert report.floor_of(["grid(K=21)", "softmax()"], FLOORS) == pytest.approx(0.002)
    assert report.floor_of(("grid(K=21)", "grid(K=21,R=4)"), FLOORS) == pytest.approx(0.004)
    weights = {"grid(K=8)": 0.5, "temperature(alpha=0.9)": -0.5, "pot(m=4)": 1.0, "softmax()": -1.0}
    assert report.floor_of(weights, FLOORS) == pytest.approx(0.001 + 0.00005 + 0.01)


def test_against_floor_says_which_side_in_the_tables_unit():
    assert report.against_floor(0.0019, 0.002) == "below 0.00200"
    assert report.against_floor(-0.0019, 0.002) == "below 0.00200"
    assert report.against_floor(-0.0021, 0.002) == "above 0.00200"
    assert report.against_floor(0.01, 0.02, report.percent) == "below 2.02"


def test_floor_note_names_what_is_below():
    rows = [("a", estimate(0.001, 0, 1), None), ("b", estimate(-0.5, -1, 0), None)]
    assert report.floor_note(rows, [0.01, 0.01]) == "Below the floor, 1 of 2: a."
    assert report.floor_note(rows, [0.0001, 0.01]) == "Below the floor: none of 2."


def test_beside_marks_effects_below_the_floor():
    rows = [("a", estimate(0.001, 0, 1), None), ("b", estimate(0.5, 0.1, 1), None)]
    styler = report.beside(rows, what="x", ours="m", theirs="p", caption="C", floors=[0.01, 0.01])
    (shown,) = pd.read_html(io.StringIO(styler.to_html()), index_col=0)
    assert shown["floor"].tolist() == ["below 0.0100", "above 0.0100"]


def test_a_table_without_rows_keeps_its_heading():
    for styler in (
        report.beside([], what="x", ours="m", theirs="p", caption="C", floors=[]),
        report.values([], what="x", ours="m", theirs="p", caption="C"),
    ):
        html = styler.to_html()
        assert "m, measured" in html and "p, published" in html and html.count("<tr>") == 1


def test_values_show_a_dash_for_what_is_not_there_and_text_as_it_is():
    share = paper.value("d2_attention_mass", relation="ge", p_threshold=0.1, metric="entry_share")
    rows = [("a", 0.00123, share), ("b", None, "from 1 to 2"), ("c", "37", None)]
    html = report.values(rows, what="x", ours="m", theirs="p", caption="C").to_html()
    (shown,) = pd.read_html(io.StringIO(html), index_col=0, converters={1: str, 2: str})
    assert shown.to_numpy().tolist() == [["0.00123", "0.151"], ["—", "from 1 to 2"], ["37", "—"]]


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("-4.9 [-5.7, -4.0]", "−4.9 [−5.7, −4.0]"),
        ("2026-11-30, sm-90, x-3", "2026-11-30, sm-90, x-3"),
        ("8.22e-06", "8.22e-06"),
        ("top-1 is -0.991", "top-1 is −0.991"),
    ],
)
def test_a_true_minus_stands_before_numbers_alone(given, shown):
    assert report.minus(given) == shown
    assert shown in report.table(pd.DataFrame({"x": [given]}), "A").to_html()
