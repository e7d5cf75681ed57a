"""A gain has an interval over rounds, and counts by the rule alone: against stock and control, above the floor."""

import math
from pathlib import Path

import numpy as np
import pytest

from softmaxlab import statistics
from softmaxlab.bench import gains, record
from softmaxlab.errors import LabError

RESULTS = Path(__file__).resolve().parent.parent / "results"
FACTS = {"GPU": "test card", "driver": "1"}


def between(low, high):
    return statistics.Estimate((low + high) / 2, low, high, 9, np.zeros(9))


@pytest.mark.parametrize(
    ("stock", "control", "floor", "said"),
    [
        ((0.02, 0.04), (0.03, 0.05), (-0.02, 0.01), "faster"),
        ((-0.04, -0.02), (-0.05, -0.03), (-0.01, 0.02), "slower"),
        ((0.02, 0.04), (-0.01, 0.05), (-0.02, 0.01), "unresolved"),  # not against the control
        ((-0.01, 0.04), (0.03, 0.05), (-0.02, 0.01), "unresolved"),  # not against stock
        ((0.02, 0.04), (-0.05, -0.03), (0.05, 0.07), "unresolved"),  # opposite sides
        ((0.02, 0.04), (0.01, 0.02), (0.01, 0.05), "unresolved"),  # no larger than the control's own
    ],
)
def test_the_rule(stock, control, floor, said):
    assert gains.verdict(between(*stock), between(*control), between(*floor)) == said


def test_the_rule_without_an_interval():
    one = between(0.02, 0.04)
    assert gains.verdict(None, one, one) == gains.verdict(one, None, one) == gains.verdict(one, one, None)
    assert gains.verdict(None, one, one) == "unresolved"


def write(folder, times, *, window_ms=20.0, rounds=8, cell="bf16/causal/2048/h16/d64", noise=0.0, kind="measured"):
    """A record of durations: kernel → ms, with a drift that all kernels of a round share."""
    rng = np.random.default_rng(0)
    protocol = {"sweeps": rounds, "window_ms": window_ms}
    with record.Record("duration", FACTS, kind, folder) as held:
        entry = held.entry(cell, list(times), protocol, rounds * len(times))
        for r in range(rounds):
            drift = 1 + 0.2 * rng.random()
            for kernel, ms in times.items():
                window = [ms * drift * math.exp(noise * rng.normal()), 1900, 50, 600.0]
                entry.turns.append({"round": r, "kernel": kernel, "windows": [window], "calls": 5})
        held.save()


def test_a_shared_drift_cancels_and_the_gain_is_the_ratio(tmp_path):
    write(tmp_path, {"stock": 1.0, "control": 1.0, "h15": 1.1, "packed(4,3)": 0.9})
    frame = gains.table(str(tmp_path)).set_index("kernel")
    assert frame.loc["h15", "stock"] == pytest.approx(100 * (1 / 1.1 - 1))
    assert frame.loc["h15", "stock_low"] == pytest.approx(frame.loc["h15", "stock_high"])
    assert frame.loc["packed(4,3)", "control"] == pytest.approx(100 * (1 / 0.9 - 1))
    assert frame.verdict.to_dict() == {
        "stock": "unresolved",
        "control": "unresolved",
        "h15": "slower",
        "packed(4,3)": "faster",
    }
    assert frame.loc["h15", "spread"] == pytest.approx(0, abs=1e-9)


def test_noise_larger_than_the_gain_is_unresolved(tmp_path):
    write(tmp_path, {"stock": 1.0, "control": 1.0, "h15": 1.005}, noise=0.05)
    frame = gains.table(str(tmp_path)).set_index("kernel")
    assert frame.loc["h15", "verdict"] == "unresolved" and frame.loc["h15", "spread"] > 2


def test_few_rounds_give_no_interval_and_no_verdict(tmp_path):
    write(tmp_path, {"stock": 1.0, "control": 1.0, "h15": 2.0}, rounds=gains.LEAST_ROUNDS - 1)
    row = gains.table(str(tmp_path)).set_index("kernel").loc["h15"]
    assert row.stock == pytest.approx(-50) and np.isnan(row.stock_low) and row.verdict == "unresolved"


def test_a_kernel_without_its_control_has_no_gain(tmp_path):
    write(tmp_path, {"stock": 1.0, "h15": 2.0})
    with pytest.raises(LabError, match="nothing measured"):
        gains.table(str(tmp_path))


def test_the_longest_windows_are_taken_kernel_by_kernel(tmp_path):
    write(tmp_path, {"stock": 1.0, "control": 1.0, "h15": 1.2, "fused7": 1.3})
    write(tmp_path, {"stock": 1.0, "control": 1.0, "h15": 1.1}, window_ms=200.0)
    frame = gains.table(str(tmp_path)).set_index("kernel")
    assert frame.loc["h15", ["stock", "window_ms"]].tolist() == pytest.approx([100 * (1 / 1.1 - 1), 200])
    assert frame.loc["fused7", ["stock", "window_ms"]].tolist() == pytest.approx([100 * (1 / 1.3 - 1), 20])
    assert len(frame) == 4


def test_another_program_or_nothing_measured_is_refused(tmp_path):
    write(tmp_path, {"stock": 1.0, "control": 1.0, "h15": 1.1}, kind="rehearsed")
    with pytest.raises(LabError, match="nothing measured"):
        gains.table(str(tmp_path))
    assert len(gains.table(str(tmp_path), rehearsed=True)) == 3
    with pytest.raises(LabError, match="not of energy"):
        gains.table(str(tmp_path), "energy")


def test_the_stored_run_keeps_to_the_rule():
    if not list((RESULTS / "kernel").glob("duration-*.json")):
        pytest.skip("no durations are stored")
    frame = gains.table(str(RESULTS))
    assert not frame.duplicated(["gpu", "cell", "kernel"]).any()
    faster = frame[frame.verdict == "faster"]
    assert (faster[["stock_low", "control_low"]] > 0).all(axis=None)
    assert (faster[["stock", "control"]].min(axis=1) > faster.floor.abs()).all()
    assert (frame[frame.kernel.isin(["stock", "control"])].verdict == "unresolved").all()
