"""Intervals against an independent computation from the index matrix, and refusals of unpaired input."""

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from softmaxlab import statistics
from softmaxlab.errors import LabError

SOFTMAX = "softmax()"
SUMMARY = [
    "condition",
    "nll",
    "dnll",
    "low",
    "high",
    "ppl_change",
    "ppl_low",
    "ppl_high",
    "resolved",
    "n_blocks",
]


def percentile_interval(per_block):
    """The definition, written out: 5,000 rows of shared indices in one call, linear percentiles."""
    n = len(per_block)
    indices = np.random.default_rng(0).integers(0, n, (5000, n))
    return np.percentile(per_block[indices].mean(axis=1), [2.5, 97.5], method="linear")


def losses(n=97, seed=1, **conditions):
    """A tidy frame: a shared block effect plus a shift and a little noise for each condition."""
    rng = np.random.default_rng(seed)
    shared = rng.normal(2.8, 0.3, n)
    parts = []
    for name, shift in conditions.items():
        parts.append(
            pd.DataFrame(
                {
                    "model": "toy",
                    "corpus": "text",
                    "context": 64,
                    "bos": "stream",
                    "dtype": "float32",
                    "backend": "reference",
                    "condition": name.replace("softmax", SOFTMAX),
                    "block": np.arange(n),
                    "nll": shared + shift + rng.normal(0, 0.002, n),
                    "predictions": 63,
                }
            )
        )
    return pd.concat(parts, ignore_index=True)


def column(frame, condition):
    return frame[frame.condition == condition].sort_values("block").nll.to_numpy()


@pytest.mark.parametrize("n", [2, 3, 12, 24, 97])
def test_interval_equals_the_index_matrix_exactly(n):
    values = np.random.default_rng(n).normal(1e-3, 4e-3, n)
    estimate = statistics.bootstrap(values)
    assert (estimate.low, estimate.high) == tuple(percentile_interval(values))
    assert estimate.mean == values.mean()
    assert estimate.n_blocks == n and estimate.level == 0.95


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(-10, 10), min_size=2, max_size=40), st.floats(-3, 3))
def test_interval_follows_sign_and_shift(values, shift):
    values = np.array(values)
    plain, mirrored = statistics.bootstrap(values), statistics.bootstrap(-values)
    assert (mirrored.low, mirrored.high) == pytest.approx((-plain.high, -plain.low), abs=1e-12)
    moved = statistics.bootstrap(values + shift)
    assert (moved.low, moved.high) == pytest.approx((plain.low + shift, plain.high + shift), abs=1e-11)
    assert values.min() - 1e-12 <= plain.low <= plain.high <= values.max() + 1e-12


@pytest.mark.parametrize("value, resolved", [(0.0, "unresolved"), (0.1, "positive"), (-0.1, "negative")])
def test_equal_values_give_a_degenerate_interval(value, resolved):
    estimate = statistics.bootstrap(np.full(7, value))
    assert estimate.low == estimate.high == pytest.approx(value)
    assert estimate.resolved == resolved


def test_an_interval_that_ends_at_zero_is_unresolved():
    assert statistics.Estimate(0.1, 0.0, 0.2, 3, np.zeros(3)).resolved == "unresolved"
    assert statistics.Estimate(-0.1, -0.2, 0.0, 3, np.zeros(3)).resolved == "unresolved"


@pytest.mark.parametrize(
    "values, words",
    [
        ([], "at least 2 blocks"),
        ([1.0], "at least 2 blocks"),
        ([1.0, math.nan, 2.0], "nan at position 1"),
        ([1.0, math.inf], "inf at position 1"),
        ([[1.0, 2.0]], r"shape \(1, 2\)"),
    ],
)
def test_bootstrap_refuses(values, words):
    with pytest.raises(LabError, match=words):
        statistics.bootstrap(np.array(values))


def test_the_estimate_keeps_its_own_blocks():
    values = np.array([0.1, 0.2, 0.3])
    estimate = statistics.bootstrap(values)
    values[:] = 9
    assert estimate.per_block.tolist() == [0.1, 0.2, 0.3]
    with pytest.raises(ValueError, match="read-only"):
        estimate.per_block[0] = 1


@pytest.mark.parametrize(
    "numbers, text",
    [
        ((0.003512, 0.002819, 0.0042), "0.00351 [0.00282, 0.00420]"),
        ((-0.0009996, -0.00234, 0.000045), "-0.00100 [-0.00234, 0.0000450]"),
        ((8.17329, 0.0, 5268.2), "8.17 [0, 5268]"),
    ],
)
def test_text_has_three_digits_and_no_exponent(numbers, text):
    assert str(statistics.Estimate(*numbers, 97, np.zeros(97))) == text


def test_perplexity_change_is_monotone_in_the_ends():
    mean, low, high = statistics.Estimate(math.log(2), 0.0, math.log(3), 5, np.zeros(5)).ppl_change
    assert (mean, low, high) == pytest.approx((100, 0, 200))


def test_contrast_is_paired_whatever_the_order_of_rows():
    frame = losses(softmax=0.0, coarse=0.003)
    difference = column(frame, "coarse") - column(frame, SOFTMAX)
    shuffled = frame.sample(frac=1, random_state=3)
    estimate = statistics.contrast(shuffled, "coarse", SOFTMAX)
    assert np.array_equal(estimate.per_block, difference)
    assert (estimate.low, estimate.high) == tuple(percentile_interval(difference))
    assert estimate.resolved == "positive"
    # The shared block effect is 100 times the noise: an unpaired interval could not resolve this.
    assert estimate.high - estimate.low < 0.002
    assert statistics.delta_nll(frame, "coarse") == estimate
    assert statistics.contrast(frame, SOFTMAX, "coarse").resolved == "negative"


def test_combination_is_the_difference_of_differences():
    frame = losses(a=0.04, b=0.01, c=0.02, d=0.015)
    weights = {"a": 1, "b": -1, "c": -1, "d": 1}
    estimate = statistics.combination(frame, weights)
    a, b, c, d = (column(frame, name) for name in "abcd")
    assert estimate.per_block == pytest.approx((a - b) - (c - d), abs=1e-15)
    assert statistics.combination(frame, {"a": 1, "b": -1 / 3, "c": -1 / 3, "d": -1 / 3}).n_blocks == 97


@pytest.mark.parametrize(
    "weights, words",
    [
        ({"a": 1, "b": -0.5}, "sum to 0.5"),
        ({"a": 1}, "sum to 1"),
        ({}, "not all zero"),
        ({"a": 0}, "not all zero"),
        ({"a": math.nan, "b": 1}, "finite"),
    ],
)
def test_combination_refuses_weights(weights, words):
    with pytest.raises(LabError, match=words):
        statistics.combination(losses(a=0, b=1), weights)


def test_mean_over_averages_layers_inside_blocks():
    frame = losses(n=24, u0=0.5, r0=0.1, u1=0.3, r1=0.2)
    estimate = statistics.mean_over(frame, [("u0", "r0"), ("u1", "r1")])
    by_hand = (column(frame, "u0") - column(frame, "r0") + column(frame, "u1") - column(frame, "r1")) / 2
    assert estimate.per_block == pytest.approx(by_hand, abs=1e-15)
    assert (estimate.low, estimate.high) == pytest.approx(tuple(percentile_interval(by_hand)), abs=1e-15)
    one = statistics.mean_over(frame, [("u0", "r0")])
    assert np.array_equal(one.per_block, statistics.contrast(frame, "u0", "r0").per_block)
    with pytest.raises(LabError, match="at least one pair"):
        statistics.mean_over(frame, [])


def test_summary_rows_are_the_paired_estimates():
    frame = losses(softmax=0.0, fine=0.0, coarse=0.02)
    table = statistics.summary(frame, [SOFTMAX, "coarse", "fine"])
    assert list(table.columns) == SUMMARY
    assert table.condition.tolist() == [SOFTMAX, "coarse", "fine"]
    assert table.loc[0, ["dnll", "low", "high"]].tolist() == [0, 0, 0]
    coarse = statistics.delta_nll(frame, "coarse")
    assert table.loc[1, ["dnll", "low", "high"]].tolist() == [coarse.mean, coarse.low, coarse.high]
    assert table.loc[1, ["ppl_change", "ppl_low", "ppl_high"]].tolist() == list(coarse.ppl_change)
    assert table.loc[1, "nll"] == column(frame, "coarse").mean()
    assert table.resolved.tolist()[:2] == ["unresolved", "positive"]


@pytest.mark.parametrize("name, other", [(c, 128 if c == "context" else "other") for c in statistics.FIXED])
def test_mixed_frames_are_refused(name, other):
    frame = losses(softmax=0.0, coarse=0.02)
    frame.loc[frame.condition == "coarse", name] = other
    with pytest.raises(LabError, match=f"different {name}.*{other}"):
        statistics.contrast(frame, "coarse", SOFTMAX)


def test_a_third_condition_may_lack_blocks():
    """Only the arms that are compared need the same blocks."""
    frame = losses(softmax=0.0, coarse=0.02, third=0.1)
    expected = statistics.contrast(frame, "coarse", SOFTMAX)
    fewer = frame[(frame.condition != "third") | (frame.block < 3)]
    assert statistics.contrast(fewer, "coarse", SOFTMAX) == expected


def test_missing_blocks_are_named():
    frame = losses(softmax=0.0, coarse=0.02)
    holes = frame[(frame.condition != "coarse") | ~frame.block.isin([4, 7])]
    with pytest.raises(LabError, match="coarse lacks blocks 4, 7, which"):
        statistics.contrast(holes, "coarse", SOFTMAX)
    half = frame[(frame.condition != SOFTMAX) | (frame.block < 50)]
    with pytest.raises(LabError, match=r"softmax\(\) lacks blocks 50, .*59 and 37 more"):
        statistics.summary(half, ["coarse"])


def test_repeated_absent_and_broken_rows_are_refused():
    frame = losses(softmax=0.0, coarse=0.02)
    with pytest.raises(LabError, match="block 5 of coarse is in the frame more than once"):
        statistics.contrast(
            pd.concat([frame, frame[(frame.condition == "coarse") & (frame.block == 5)]]), "coarse", SOFTMAX
        )
    with pytest.raises(LabError, match=r"'topk\(f=0.1\)'; the frame has coarse, softmax\(\)"):
        statistics.contrast(frame, "topk(f=0.1)", SOFTMAX)
    with pytest.raises(LabError, match="the frame has none"):
        statistics.contrast(frame[:0], "coarse", SOFTMAX)
    with pytest.raises(LabError, match="lacks the columns bos, nll"):
        statistics.contrast(frame.drop(columns=["bos", "nll"]), "coarse", SOFTMAX)
    frame.loc[(frame.condition == "coarse") & (frame.block == 5), "nll"] = math.nan
    with pytest.raises(LabError, match="nan at position 5"):
        statistics.contrast(frame, "coarse", SOFTMAX)
