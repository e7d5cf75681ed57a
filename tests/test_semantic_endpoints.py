"""Semantics are compared block by block, each against its own softmax, and never otherwise."""

import json

import numpy as np
import pandas as pd
import pytest

from softmaxlab import conditions, paper, statistics
from softmaxlab import semantic_endpoints as endpoints
from softmaxlab.errors import LabError
from softmaxlab.semantic_endpoints import Arm
from softmaxlab.semantics import Semantics

FIXED = {"model": "m", "corpus": "c", "context": 8, "bos": "stream", "dtype": "float32"}
TEXTS = ("softmax()", "h15()", "pot(m=2)", "ilpot_h_a()", "ilpot_h15()")


def losses(backends=("reference", "online(tile=4,tau=0)"), n=7, seed=1):
    """Losses whose blocks are alike in all arms and whose arms differ, baselines included."""
    rng = np.random.default_rng(seed)
    common = rng.normal(3, 1, n)
    frames = [
        pd.DataFrame(FIXED | {"backend": b, "condition": t, "block": range(n), "nll": common + rng.normal(0, 0.01, n)})
        for b in backends
        for t in TEXTS
    ]
    return pd.concat(frames, ignore_index=True)


def values(frame, arm):
    rows = frame[(frame["backend"] == arm.backend) & (frame["condition"] == arm.condition)]
    return rows.sort_values("block")["nll"].to_numpy()


HERE, THERE = Arm("h15()"), Arm("h15()", "online(tile=4,tau=0)")


def test_delta_is_against_the_softmax_of_the_same_backend():
    frame = losses()
    for arm in (HERE, THERE):
        found = endpoints.delta(frame, arm)
        one = frame[frame["backend"] == arm.backend]
        assert (found.mean, found.low, found.high) == pytest.approx(
            (lambda e: (e.mean, e.low, e.high))(statistics.delta_nll(one, "h15()"))
        )
        np.testing.assert_allclose(found.per_block, values(frame, arm) - values(frame, arm.baseline))


def test_contrast_is_one_paired_quantity_of_four_losses():
    frame = losses().sample(frac=1, random_state=3)  # blocks in any order
    found = endpoints.contrast(frame, THERE, HERE)
    want = (values(frame, THERE) - values(frame, THERE.baseline)) - (values(frame, HERE) - values(frame, HERE.baseline))
    np.testing.assert_allclose(found.per_block, want)
    boot = statistics.bootstrap(want)
    assert (found.mean, found.low, found.high) == pytest.approx((boot.mean, boot.low, boot.high))
    assert endpoints.contrast(frame, HERE, THERE).mean == pytest.approx(-found.mean)
    # With each side's noise drawn apart the interval would be that of the blocks' spread, far wider.
    assert found.high - found.low < 0.1 < values(frame, HERE).std()


def test_within_one_backend_the_baseline_cancels():
    frame = losses()
    found = endpoints.contrast(frame, THERE, Arm("pot(m=2)", THERE.backend))
    one = frame[frame["backend"] == THERE.backend]
    np.testing.assert_allclose(found.per_block, statistics.contrast(one, "h15()", "pot(m=2)").per_block)
    without = frame[frame["condition"] != "softmax()"]
    np.testing.assert_allclose(
        endpoints.contrast(without, THERE, Arm("pot(m=2)", THERE.backend)).per_block, found.per_block
    )


def test_shift_leaves_baselines_out():
    frame = losses()
    found = endpoints.shift(frame, THERE.baseline, HERE.baseline)
    np.testing.assert_allclose(found.per_block, values(frame, THERE.baseline) - values(frame, HERE.baseline))


def broken(change):
    frame = losses()
    there = (frame["backend"] == THERE.backend) & (frame["condition"] == "h15()")
    match change:
        case "block":
            return frame[~(there & (frame["block"] == 3))]
        case "baseline block":
            return frame[
                ~((frame["backend"] == THERE.backend) & (frame["condition"] == "softmax()") & (frame["block"] == 5))
            ]
        case "twice":
            return pd.concat([frame, frame[there & (frame["block"] == 2)]])
        case "context":
            return frame.assign(context=np.where(frame["backend"] == THERE.backend, 16, 8))
        case "nan":
            return frame.assign(nll=frame["nll"].mask(there & (frame["block"] == 1)))
        case "arm":
            return frame[~there]
        case "backend":
            return frame[frame["backend"] != THERE.backend]
        case "column":
            return frame.drop(columns="backend")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("block", r"h15\(\) in online\(tile=4,tau=0\) lacks block 3"),
        ("baseline block", r"softmax\(\) in online\(tile=4,tau=0\) lacks block 5"),
        ("twice", "block 2 of h15.* more than once"),
        ("context", "different context cannot be paired"),
        ("nan", "must be finite"),
        ("arm", r"no losses of h15\(\) in online.*the frame has ilpot_h15\(\)"),
        ("backend", r"no losses of h15\(\) in online.*the frame has none"),
        ("column", "columns condition and backend"),
    ],
)
def test_what_cannot_be_paired_is_refused(change, says):
    for ask in (endpoints.contrast, endpoints.shift):
        frame = broken(change)
        plus, minus = THERE, HERE
        if change == "baseline block" and ask is endpoints.shift:
            plus, minus = THERE.baseline, HERE.baseline
        with pytest.raises(LabError, match=says):
            ask(frame, plus, minus)


def test_an_arm_is_not_contrasted_with_itself():
    for ask in (endpoints.contrast, endpoints.shift):
        with pytest.raises(LabError, match="not all zero"):
            ask(losses(), HERE, HERE)


def test_table_b2_names_what_the_paper_has_and_what_is_measured_here():
    printed = paper.table("tableB2_semantic_fidelity")
    names = {r.published for r in endpoints.TABLE_B2 if r.published}
    with_loss = set(printed.loc[printed["metric"] == "dnll", "condition"])
    assert names | {endpoints.KERNEL} == with_loss, "every row of the table, and no other"
    contrasts = paper.table("tableB2_contrasts")
    assert {c.published for c in endpoints.CONTRASTS if c.published} == set(
        contrasts.loc[contrasts["metric"] == "dnll_diff", "contrast"]
    )
    offline = {*conditions.anchor(), *conditions.family()}
    stored = {(t, b) for b, texts in conditions.semantics().items() for t in texts} | {
        (t, "reference") for t in offline
    }
    arms = [r.arm for r in endpoints.TABLE_B2] + [a for c in endpoints.CONTRASTS for a in (c.plus, c.minus)]
    for arm in arms:
        assert tuple(arm) in stored, f"{arm} is in no list of conditions that are measured"
        assert arm.kind == ("measured" if arm.backend == "reference" else "simulated")
    labels = [r.label for r in endpoints.TABLE_B2] + [c.label for c in endpoints.CONTRASTS]
    assert len(set(labels)) == len(labels)


def test_the_papers_rows_stand_beside_walks_that_round_nothing():
    """Its simulator does not round P or the operands (B.2)."""
    for row in endpoints.TABLE_B2:
        if row.published and row.arm.kind == "simulated":
            semantics = Semantics.parse(row.arm.backend)
            assert (semantics.p, semantics.qkv) == ("none", "none")
            threshold = paper.table("tableB2_semantic_fidelity").set_index("condition")["rescale_threshold"]
            assert float(threshold[row.published].iloc[0]) == semantics.tau


def test_what_is_counted_is_a_known_semantics():
    for text in endpoints.COUNTED:
        assert str(Semantics.parse(text)) == text
    assert set(endpoints.COUNTED) <= set(conditions.semantics())


def test_simulator_cost_is_read_or_refused(tmp_path):
    results = tmp_path / "results"
    assert endpoints.simulator_cost(str(results)) is None
    path = results / "bench" / "simulator_cost.json"
    path.parent.mkdir(parents=True)
    record = {
        "model": "m",
        "context": 8,
        "device": "d",
        "evaluations": [{"operator": "h15()", "backend": "reference", "softmax_evaluations": 2.0, "ms_per_block": 3.0}],
    }
    path.write_text(json.dumps(record))
    assert endpoints.simulator_cost(str(results)) == record
    for bad in ("{", "[]", json.dumps(record | {"evaluations": []}), json.dumps({"evaluations": [{}]})):
        path.write_text(bad)
        with pytest.raises(LabError, match="does not hold the timings"):
            endpoints.simulator_cost(str(results))


def test_the_committed_costs_keep_to_the_limit():
    record = endpoints.simulator_cost("results")
    assert record is not None
    (cost,) = [
        e["softmax_evaluations"]
        for e in record["evaluations"]
        if (e["operator"], e["backend"]) == ("h15()", "online(tile=128,tau=8)")
    ]
    assert 0 < cost <= 4  # below 1 for the fused program on a GPU, beside plain PyTorch
