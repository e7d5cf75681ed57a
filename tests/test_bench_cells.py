"""Cells, kernels by name, and the arithmetic of tables: against numbers worked out by hand."""

import math
import statistics

import pytest

from softmaxlab.bench import cells, energy, kernels, read, turns
from softmaxlab.bench.cells import Cell
from softmaxlab.errors import LabError


@pytest.mark.parametrize("name", list(cells.SETS))
def test_every_cell_of_a_set_survives_its_text_form(name):
    found = cells.parse_all([name])
    assert found == [Cell.parse(str(c)) for c in found] and len(found) == len(set(found)) > 1


def test_parts_may_come_in_any_order_and_lengths_in_thousands():
    assert Cell.parse("h32/kv8/16K/fp16/none/b2/d64") == Cell("fp16", False, 16384, 32, 8, 64, 2)
    assert str(Cell.parse("fp8")) == "e4m3/causal/8192/h16/d128"
    assert Cell.parse("h32/kv8").kernel == ("bf16", True, 128, 4)


def test_work_of_a_cell():
    # 4·heads·dim operations a pair; half of 4² pairs and the diagonal's other half under a causal mask.
    assert Cell(causal=False, seq=16, heads=2, head_dim=64).flops == 4 * 2 * 64 * 256
    assert Cell(seq=16, heads=2, head_dim=64).flops == 4 * 2 * 64 * 136
    # Q, K, V and output in 2 bytes with 4, 2, 2 and 4 heads, and 4 bytes of log-sum-exp a row.
    assert Cell(seq=16, heads=4, kv_heads=2, head_dim=64).bytes == 16 * (64 * 12 * 2 + 4 * 4)


def test_the_papers_cells_are_those_of_its_tables():
    from softmaxlab import paper

    held = cells.parse_all(["paper"])
    main = paper.table("tableB5a_main", numbers=True)
    for row in main[main.kernel == "A0"].itertuples():
        dtype = {"fp8": "e4m3"}.get(row.dtype, row.dtype)
        assert Cell(dtype, seq=int(row.seq)) in held
    assert Cell("e4m3", heads=32, kv_heads=8) in held and Cell("bf16", seq=16384, head_dim=64) in held


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("bf32", "'bf32' cannot be read"),
        ("bf16/8192/4096", "gives its seq twice"),
        ("bf16/d80", "head dimension is 80"),
        ("bf16/h16/kv5", "must divide heads"),
        ("bf16/8", "length is 8"),
        ("bf16/1M", "cannot be read"),
        ("everything", "known are paper"),
    ],
)
def test_cells_that_are_refused(text, said):
    with pytest.raises(LabError) as caught:
        cells.parse_all([text])
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_stock_and_control_are_always_among_the_kernels():
    assert kernels.parse_all(["s( 3 )", "stock", "references"]) == ["stock", "control", "s(3)", *kernels.REFERENCES]
    with pytest.raises(LabError, match="h16"):
        kernels.parse_all(["h16"])
    assert set(map(kernels.parse, kernels.DEFAULT)) == set(kernels.DEFAULT)


def test_two_kernels_alternate_as_in_the_paper():
    said = ["A0" if k == "stock" else "A1" for _, k in turns.order(["stock", "h15"], 3)]
    assert said == ["A0", "A1", "A1", "A0", "A0", "A1"]


def test_speed_up_of_pooled_medians_and_spread_of_rounds():
    # Medians by hand: pooled 11 and 10; rounds 10/10, 11/10, 12/8 with gains of 0, 10 and 50 percent.
    slow, fast = [[10, 10, 9], [11, 12, 11], [12, 12, 11]], [[10, 10, 10], [10, 9, 10], [8, 8, 12]]
    total, sd = read.pooled(slow, fast)
    assert total == pytest.approx(10.0)
    assert sd == pytest.approx(math.sqrt((20**2 + 10**2 + 30**2) / 3))
    assert sd == pytest.approx(statistics.pstdev([0, 10, 50]))
    with pytest.raises(LabError, match="2 rounds are compared with 1"):
        read.pooled([[1], [1]], [[1]])


def test_energy_of_a_loop_with_its_ramp():
    # 20 samples before, ten of the ramp at 500 W, 90 at 1000 W, ten after: mean 950 W over 100 retained.
    samples = [[0, 100, 100, 1000, 40]] * 20 + [[0, 500, 900, 1200, 50]] * 10 + [[0, 1000, 1010, 1500, 60]] * 90
    samples += [[0, 200, 200, 1000, 50]] * 10
    turn = {"seconds": 10.0, "calls": 5000, "counted_j": 9700.0, "samples": samples}
    found = energy.summary(turn, {"first": 20, "last": 10})
    assert found["power"] == 950 and found["ms"] == 2.0 and found["mj"] == pytest.approx(1900)
    assert found["ramp"] == 10 and found["mj_no_ramp"] == pytest.approx(2000)
    assert found["mj_instant"] == pytest.approx((900 * 10 + 1010 * 90) / 100 * 2)
    assert found["mj_counter"] == pytest.approx(1940) and found["clock"] == 1500


def test_the_papers_energy_follows_from_its_own_loop():
    """742.5 mJ from 982.3 W, 45 s and 59,550 forwards (Table B4f)."""
    from softmaxlab import paper

    table = paper.table("tableB5f_energy", numbers=True).set_index(["kernel", "metric"])["value"]
    a0 = table.loc["A0"]
    power = a0["mean_power"]
    turn = {"seconds": 45.0, "calls": a0["forwards"], "counted_j": 0.0, "samples": [[0, power, power, 1897, 60]] * 100}
    found = energy.summary(turn, {"first": 20, "last": 10})
    assert found["ms"] == pytest.approx(a0["time_per_forward"], rel=1e-3)
    assert found["mj"] == pytest.approx(a0["energy_per_forward"], rel=1e-3)


def test_a_loop_too_short_for_its_samples_is_refused():
    with pytest.raises(LabError, match="leaves 5 samples"):
        energy.Protocol(seconds=0.5)


@pytest.mark.parametrize("name", ["seconds", "lead", "tail", "interval"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 1e300, "45", None, True])
def test_a_protocol_of_energy_takes_only_seconds_that_can_pass(name, value):
    with pytest.raises(LabError, match=f"^energy: {name} is .*, but must be "):
        energy.Protocol(**{name: value})


def test_the_rest_of_a_protocol_of_energy_is_counted():
    for name in ("chunk", "warmup", "first", "last"):
        with pytest.raises(LabError, match=f"energy: {name} is -1, but must be a whole number"):
            energy.Protocol(**{name: -1})
    assert energy.Protocol(seconds=60, warmup=0, first=0, last=0, lead=0, tail=0).seconds == 60


def test_a_change_from_nothing_is_no_number():
    assert math.isnan(read.speedup(1.0, 0.0)) and read.speedup(2.0, 1.0) == 100
