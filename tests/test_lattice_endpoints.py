"""The contrasts of anchor, spacing and family are those of the paper's tables, and the audits see what is outside."""

import math

import numpy as np
import pandas as pd
import pytest

from softmaxlab import conditions, lattice_endpoints, operators, paper, statistics, trajectory
from softmaxlab.errors import LabError
from softmaxlab.statistics import Estimate
from softmaxlab.trajectory import Trajectory

FIXED = {"model": "m", "corpus": "c", "context": 8, "bos": "stream", "dtype": "float32", "backend": "reference"}


def losses(texts, n=6):
    rng = np.random.default_rng(1)
    frames = [pd.DataFrame(FIXED | {"condition": t, "block": range(n), "nll": rng.normal(3, 1, n)}) for t in texts]
    return pd.concat(frames, ignore_index=True)


def test_the_contrasts_are_those_of_the_papers_table():
    printed = paper.table("tableB1_anchor_resolution")
    found = lattice_endpoints.anchor_contrasts()
    assert [code for *_, code in found.values()] == list(printed[printed["group"] == "paired_diff"]["condition"])
    assert found["anchor, half octave spacing"][:2] == ("log_sqrt2p()", "pot(m=2)")
    assert found["spacing, absolute anchor"][:2] == ("log2p()", "log_sqrt2p()")
    of = {one.condition: one.code for one in lattice_endpoints.LATTICES}
    for before, after, code in found.values():
        assert code == f"{of[before]}-{of[after]}"
    assert set(of) <= set(conditions.anchor())


def test_every_code_is_in_the_papers_tables_and_every_condition_is_measured():
    for one in lattice_endpoints.LATTICES:
        paper.value("tableB1_anchor_resolution", condition=one.code, metric="dnll")
    for numerator, denominator, code in lattice_endpoints.RATIOS:
        paper.value("tableB1_anchor_resolution", condition=code, metric="dnll_ratio")
        assert {numerator, denominator} <= set(conditions.anchor())
    for text, code in lattice_endpoints.ABLATION.values():
        paper.value("exp_map_ablation", operator=code, metric="dnll")
        assert text in conditions.family()


def test_the_interaction_is_the_difference_of_the_two_anchor_contrasts():
    frame = losses(conditions.anchor())
    whole = statistics.combination(frame, lattice_endpoints.anchor_by_spacing())
    pairs = lattice_endpoints.anchor_contrasts()
    parts = [statistics.contrast(frame, *pairs[f"anchor, {s} spacing"][:2]) for s in lattice_endpoints.SPACINGS]
    np.testing.assert_allclose(whole.per_block, parts[0].per_block - parts[1].per_block)


def test_members_are_the_measured_ones_in_order_with_h15_as_the_first():
    found = lattice_endpoints.members()
    assert list(found) == [0, 1, 2, 3, 4, 5, 6, 7, 13]
    assert found[1] == "h15()" and found[13] == "sq(k=13)"
    assert set(found.values()) <= set(conditions.family())


def estimate(mean):
    return Estimate(mean, mean - 1e-6, mean + 1e-6, 3, np.full(3, mean))


@pytest.mark.parametrize(
    "means, first",
    [([5, 4, 3, 0.5, 0.1], 3), ([0.5, 0.1, 0.2, 0.3, 0.4], 0), ([5, 0.5, 3, 0.5, -0.1], 3), ([0, 0, 0, 0, -2], None)],
)
def test_within_the_floor_means_from_there_on(means, first):
    estimates = {k: estimate(m) for k, m in enumerate(means)}
    assert lattice_endpoints.first_within(estimates, dict.fromkeys(range(5), 1.0)) == first


@pytest.fixture(scope="module")
def path(tiny_model, text_file):
    texts = [*conditions.anchor()[1:], "h15()", "s()", "fa4_poly(degree=1)", "topk(f=0.5)"]
    setting = {"model": str(tiny_model), "corpus": str(text_file), "context": 32, "windows": 2, "device": "cpu"}
    return trajectory.measure(texts, results="", progress=False, **setting)


def test_a_measured_model_is_inside_every_envelope(path):
    texts = ["log2p()", "log_sqrt2p()", "pot(m=1)", "pot(m=2)", "ilpot()", "h15()", "s()", "fa4_poly(degree=1)"]
    found = lattice_endpoints.audit(path, texts, lattice_endpoints.deep_heads(path))
    assert list(found["operator"]) == texts
    assert (found["excess"] < 5e-5).all()
    assert (found["excess"] > -0.05).all(), "the envelopes are nearly reached, so that the audit can fail"
    assert (found["heads"] == 12).all()
    ends = found.set_index("operator")
    assert ends.loc["h15()", ["low", "high"]].tolist() == pytest.approx([-math.log(2) / 4, math.log(1.5 / 2**0.25)])


def test_four_bits_leave_the_envelope_of_their_range(path):
    (excess,) = lattice_endpoints.audit(path, ["log_sqrt2p(bits=4)"])["excess"]
    assert excess > 0.1


def test_a_weight_outside_is_seen_on_either_side_and_the_clamp_excused_only_above(path):
    for column, seen in (("error_above", False), ("error_below", True)):
        sums = path.sums.copy()
        here = (sums["operator"] == "h15()") & (sums["layer"] == 1) & (sums["head"] == 2)
        sums.loc[here, column] = 3.0
        broken = Trajectory(sums, path.shared)
        (row,) = lattice_endpoints.audit(broken, ["h15()"]).itertuples()
        assert row.excess > 2
        (row,) = lattice_endpoints.audit(broken, ["h15()"], deep=[(1, 2)]).itertuples()
        assert (row.excess > 2) is seen and row.heads == 11
    assert (
        operators.parse("pot(m=1)").envelope and lattice_endpoints.audit(path, ["pot(m=1)"], [(1, 2)])["heads"][0] == 12
    )


def test_an_audit_of_what_has_no_envelope_is_refused(path):
    with pytest.raises(LabError, match="no envelope"):
        lattice_endpoints.audit(path, ["topk(f=0.5)"])
    with pytest.raises(LabError, match="not in this measurement"):
        lattice_endpoints.audit(path, ["pot(m=4)"])


def test_keys_below_the_clamp_are_counted_by_head(path):
    assert lattice_endpoints.deep_heads(path) == {}
    sums = path.sums.copy()
    here = (sums["operator"] == "fa4_poly(degree=1)") & (sums["layer"] == 2) & (sums["head"] == 3)
    sums.loc[here, "nonzero"] -= 5
    assert lattice_endpoints.deep_heads(Trajectory(sums, path.shared)) == {(2, 3): 5}
    with pytest.raises(LabError, match="does not hold it"):
        lattice_endpoints.deep_heads(Trajectory(sums[sums["operator"] == "h15()"], path.shared))


def test_spread_of_the_leakage_is_at_least_its_mean_and_larger_where_the_anchor_is_absolute(path):
    spread = lattice_endpoints.leakage_spread(path)
    leak = path.sums.groupby("operator", sort=False)["leak"].sum() / path.shared["phase_rows"].sum()
    assert (spread >= leak.abs()).all()
    assert spread["log2p()"] > spread["pot(m=1)"]
