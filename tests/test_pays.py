"""When it pays: turns on Hopper, the limits on kernels made by hand, the stored measurement, and the figures."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_hex
from test_figures import drawn

from softmaxlab import figures_pays, pays
from softmaxlab.bench import gains, read
from softmaxlab.bench.cells import Cell
from softmaxlab.drawing import OURS, PAPER
from softmaxlab.errors import LabError
from softmaxlab.fa4 import audit, rates, throughput

RESULTS = Path(__file__).resolve().parent.parent / "results"
KEY = {"arch": "sm_90a", "dtype": "bf16", "causal": True, "head_dim": 128}


def kernel(opcodes, **changes):
    return KEY | {"elements": 64, "opcodes": opcodes, "per_element": sum(opcodes.values()) / 64} | changes


STOCK = kernel({"MUFU.EX2": 64, "FFMA": 64, "FADD": 64, "FMNMX": 64, "F2FP.BF16.F32.PACK_AB": 32})
LONGER = kernel({"FADD": 128, "FFMA": 64, "FMNMX": 128, "LEA": 64, "F2FP.BF16.F32.PACK_AB": 32})


@pytest.fixture(scope="module")
def frame():
    return audit.stored(RESULTS)[0]


@pytest.mark.parametrize(
    ("cell", "sms", "expected"),
    [
        (Cell(seq=1024, heads=1, head_dim=128, causal=False), 8, 2 * 8),  # eight tiles of eight, one an SM
        (Cell(seq=1024, heads=1, head_dim=128, causal=True), 1, 2 * 36),  # 1 + … + 8
        (Cell(seq=1024, heads=1, head_dim=128, causal=True), 4, 2 * 9),  # 8 + 1, 7 + 2, 6 + 3, 5 + 4
        (Cell(seq=1024, heads=1, head_dim=64, causal=False), 6, 3 * 8),  # six tiles of 192 rows, the last one not full
        (Cell(seq=1024, heads=1, head_dim=64, causal=True), 1, 3 * (2 + 3 + 5 + 6 + 8 + 8)),
        (Cell(seq=1024, heads=2, head_dim=128, causal=False, batch=2), 31, 2 * 16),  # one tile of 32 comes second
    ],
)
def test_turns_of_the_busiest_sm(cell, sms, expected):
    assert pays.turns(cell, sms) == expected


def test_a_period_is_the_clocks_over_the_turns():
    cell = Cell(seq=8192, heads=16, head_dim=128, causal=False)
    assert pays.period(1.0, 1000.0, cell) == pytest.approx(1e6 / pays.turns(cell))


def test_a_head_dimension_without_a_tile_is_refused():
    with pytest.raises(LabError, match="64 and 128, not 96"):
        pays.warpgroups(96)


def test_limits_of_a_longer_kernel():
    found = pays.limits(STOCK, LONGER, 1000.0, groups=2)
    assert list(found) == list(pays.LIMITS)
    assert found["overlapped"] == throughput.overlapped_gain(STOCK, LONGER) == 0  # the tensor cores bind both
    assert found["exposed"] == pytest.approx(throughput.exposed_gain(STOCK, LONGER, 1000.0))
    more = sum(LONGER["opcodes"].values()) - sum(STOCK["opcodes"].values())
    assert more > 0 and found["issue"] == pytest.approx(100 * (2000 / (2000 + more) - 1))
    three = pays.limits(STOCK, LONGER, 1000.0, groups=3)
    assert three["issue"] == pytest.approx(100 * (3000 / (3000 + more) - 1))


def test_signs_are_counted_and_no_change_is_wrong():
    table = pd.DataFrame({"gain": [5.0, -4.0, 3.0, np.nan], "a": [1.0, 2.0, 0.1, 9.0], "b": [np.nan, -4.0, 6.0, 1.0]})
    found = pays.right_signs(table, "gain", ("a", "b")).set_index("limit")
    assert found.loc["a", ["right", "of"]].tolist() == [1, 3] and found.loc["a", "error"] == pytest.approx(4.0)
    assert found.loc["b", ["right", "of"]].tolist() == [2, 2] and found.loc["b", "error"] == pytest.approx(1.5)


def test_the_account_of_the_recorded_audit(frame):
    table = pays.account(frame)
    assert table["label"].iloc[0] == "H200, BF16, 128" and table["label"].is_unique
    assert list(dict.fromkeys(table["gpu"])) == ["H200", "B200", "B300"]
    row = table.iloc[0]
    stages = throughput.stages(audit.pick(frame, variant="stock", **KEY))
    assert row["xu"] == stages["xu"] / stages["tensor"] and row["issue"] == stages["issue"] / stages["tensor"]


def test_published_cells_keep_their_limits(frame):
    table, other = pays.published(frame), throughput.compare(frame)
    pd.testing.assert_frame_equal(table[other.columns.tolist()], other)
    assert table["issue"].notna().equals(table["exposed"].notna())


def rows(frame, **changes):
    """Gains of one cell, as `gains.table` gives them."""
    row = {"gpu": "g", "cell": "bf16/causal/8192/h16/d128", "clock": 1500.0, "window_ms": 200.0, "ms": 0.5}
    table = [row | {"kernel": k, "stock": s} for k, s in (("stock", 0.0), ("control", 0.1), ("h15", -5.0))]
    table += [row | {"kernel": "sdpa-cudnn", "stock": -9.0}, row | {"kernel": "s(7)", "stock": -5.0} | changes]
    return pays.measured(frame, pd.DataFrame(table))


def test_measured_rows_are_of_audited_kernels_and_clocks_of_one_run(frame):
    table = rows(frame, clock=1650.0).set_index("kernel")
    assert set(table.index) == {"h15", "s(7)"}
    assert table.loc["h15", "cycles"] == pytest.approx(-5.0)
    assert table.loc["s(7)", "cycles"] == pytest.approx(100 * (0.95 * 1500 / 1650 - 1))
    assert table.loc["h15", "period"] == pytest.approx(pays.period(0.5, 1500.0, Cell.parse(table["cell"].iloc[0])))
    apart = rows(frame, window_ms=20.0).set_index("kernel")
    assert np.isnan(apart.loc["s(7)", "cycles"]) and not apart.loc["s(7)", "together"]


def test_compiled_clocks_are_the_utilisation_that_was_counted(frame):
    """Two sources that share nothing: instructions read in the machine code, and a profiler's counters on the card."""
    table = pays.counted(frame, read.counts(str(RESULTS)))
    for pipe, most in (("xu", 0.5), ("tensor", 1.0), ("alu", 3.5), ("fma", 3.5), ("issue", 3.5)):
        assert (table[f"{pipe} model"] - table[pipe]).abs().max() < most
    price = table.set_index("kernel")["price"]
    assert price.loc[["stock", "control"]].isna().all()
    row, base = (table[table["kernel"] == k].iloc[0] for k in ("h15", "stock"))
    more = (row["instructions"] - base["instructions"]) / (4 * rates.sm("sm_90").sms)
    assert row["price"] == pytest.approx((row["cycles"] - base["cycles"]) / more)


def test_the_stored_gains_have_limits(frame):
    table = pays.measured(frame, gains.table(str(RESULTS)))
    assert table[list(pays.LIMITS)].notna().all(axis=None) and (table["period"] > 0).all()
    assert "stock" not in set(table["kernel"])


def test_the_figures_show_what_they_are_given(frame):
    account = pays.account(frame)
    (ax,) = drawn(figures_pays.account(account)).axes
    (dots,) = (line for line in ax.lines if line.get_label() == "stock: exp2 (XU)")
    assert dots.get_xdata() == pytest.approx(account["xu"].tolist())
    table = pd.DataFrame(
        {"label": ["a", "b"], "overlapped": [0.0, 1.0], "exposed": [5.0, np.nan], "issue": [-1.0, -2.0]}
    )
    ours = pd.DataFrame({"value": [2.0, -3.0], "low": [1.0, -4.0], "high": [3.0, -2.0]})
    panels = [("B", table, [("call", ours[["value"]])], "published"), ("H", table, [("time", ours)], "measured")]
    top, low = drawn(figures_pays.limits(panels)).axes
    for ax, label, colour in ((top, "call, published", PAPER), (low, "time, measured", OURS)):
        (line,) = (o for o in ax.lines if o.get_label() == label)
        assert list(line.get_xdata()) == [2.0, -3.0] and to_hex(line.get_markeredgecolor()) == colour
        (line,) = (o for o in ax.lines if o.get_label() == "model: softmax exposed")
        assert line.get_xdata()[0] == 5.0 and np.isnan(line.get_xdata()[1])


def test_prices_name_every_kernel():
    frame = pd.DataFrame({"kernel": ["x", "y"], "added": [-1.0, 2.0], "value": [3.0, -8.0], "issue": [2.0, -4.0]})
    (ax,) = drawn(figures_pays.prices([("one", frame)])).axes
    assert [t.get_text() for t in ax.texts] == ["x", "y"]
    (line,) = (o for o in ax.lines if o.get_label() == "model: issue slots")
    assert list(zip(*line.get_data(), strict=True)) == [(-1.0, 2.0), (0.0, 0.0), (2.0, -4.0)]
