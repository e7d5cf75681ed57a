"""The kernel's losses become the chapter's table: the right arms, the right blocks, the right card's simulator."""

import numpy as np
import pandas as pd
import pytest

from softmaxlab import conditions, statistics
from softmaxlab import kernel_fidelity as fidelity
from softmaxlab.conditions import BF16_PATH, HOPPER_PATH, Condition
from softmaxlab.errors import LabError
from softmaxlab.losskey import LossKey
from softmaxlab.store import Store

N = 12
FIXED = {"model_id": "m", "corpus": "wikitext103", "corpus_id": "c", "context": 2048, "bos": "stream"}
KERNEL = "fa4(arch=sm_90)"
COST = {"softmax()": 0.0, "h15()": 2e-3, "sq(k=3)": 1e-4}


def put(results, backend, costs, *, model="small", dtype="bfloat16", blocks=N, shift=0.0, seed=0):
    """Losses whose blocks differ by nats, and whose conditions differ by their cost and a little noise."""
    common = np.random.default_rng(5).normal(3, 1, N)[:blocks]
    rng = np.random.default_rng(seed)
    for text, cost in costs.items():
        key = LossKey(
            model=model,
            dtype=dtype,
            backend=backend,
            condition=text,
            condition_json=Condition.parse(text).json(),
            **FIXED,
        )
        nll = common + shift + cost + rng.normal(0, 2e-4, blocks)
        rows = pd.DataFrame({"block": range(blocks), "nll": nll, "predictions": 2047})
        Store(results).append_losses(key, rows, {"device": "test", "date": "2026-01-01"})


@pytest.fixture
def results(tmp_path):
    put(tmp_path, KERNEL, COST, seed=1)
    put(tmp_path, HOPPER_PATH, COST | {"h15()": 2.05e-3, "sq(k=3)": 5e-3}, seed=2)
    put(tmp_path, "reference", {"softmax()": 0.0}, shift=-1e-3, seed=3)
    put(tmp_path, "reference", {"softmax()": 0.0}, shift=1e-3, dtype="float32", seed=4)
    return str(tmp_path)


def test_nothing_is_stored_of_a_kernel(tmp_path):
    assert fidelity.stored(str(tmp_path)) == []
    put(tmp_path, HOPPER_PATH, COST)
    assert fidelity.stored(str(tmp_path)) == [], "a simulator is no kernel"
    put(tmp_path, KERNEL, {"softmax()": 0.0})
    assert fidelity.stored(str(tmp_path)) == [], "the stock kernel alone is no contrast"


def test_the_table_has_the_measured_contrast_and_the_simulated_one(results):
    (run,) = fidelity.stored(results)
    assert (run.model, run.backend, run.conditions) == ("small", KERNEL, ["h15()", "sq(k=3)"])
    frame = Store(results).frame(backend=KERNEL)
    rows = fidelity.table(run).set_index("condition")
    for text in ("h15()", "sq(k=3)"):
        want = statistics.delta_nll(frame, text)
        row = rows.loc[text]
        assert (row.dnll, row.low, row.high) == pytest.approx((want.mean, want.low, want.high))
        assert row.lower == (want.per_block < 0).sum() and row.n_blocks == N
        assert row.ppl == pytest.approx(100 * np.expm1(want.mean))
        sim = statistics.delta_nll(Store(results).frame(backend=HOPPER_PATH), text)
        assert row["sim"] == pytest.approx(sim.mean)
        assert row.apart == pytest.approx(want.mean - sim.mean)
        assert row.apart_low <= row.apart <= row.apart_high
    assert bool(rows.loc["h15()", "inside"]) and rows.loc["h15()", "miss"] == 0
    far = rows.loc["sq(k=3)"]
    assert not far.inside and far.miss == pytest.approx(far["sim"] - far.high) and far.miss > 4e-3


@pytest.mark.parametrize(("value", "outside"), [(1.0, 0.0), (2.0, 0.0), (2.5, 0.5), (0.25, -0.75)])
def test_a_miss_is_signed_and_zero_inside(value, outside):
    measured = statistics.Estimate(1.5, 1.0, 2.0, 3, np.zeros(3))
    assert fidelity.miss(value, measured) == outside


def test_the_wiring_check_is_not_part_of_a_contrast(results):
    (run,) = fidelity.stored(results)
    found = run.wiring()
    assert list(found) == ["whole rows, same dtype", "simulator, same dtype", "whole rows, float32"]
    assert found["whole rows, same dtype"].mean == pytest.approx(1e-3, abs=3e-4)
    assert found["whole rows, float32"].mean == pytest.approx(-1e-3, abs=3e-4)
    stock = Store(results).frame(backend=KERNEL, condition="softmax()")
    whole = Store(results).frame(backend="reference", dtype="bfloat16")
    assert found["whole rows, same dtype"].per_block[0] == pytest.approx(stock.nll.iloc[0] - whole.nll.iloc[0])


def test_a_simulator_that_was_killed_halfway_is_not_compared(results):
    put(results, KERNEL, {"sq(k=2)": 1e-4}, seed=6)
    put(results, HOPPER_PATH, {"sq(k=2)": 1e-4}, blocks=N - 4, seed=7)
    (run,) = fidelity.stored(results)
    rows = fidelity.table(run).set_index("condition")
    assert rows["sim_blocks"].to_dict() == {"h15()": N, "sq(k=2)": N - 4, "sq(k=3)": N}
    assert rows["sim"].isna().to_dict() == {"h15()": False, "sq(k=2)": True, "sq(k=3)": False}


def test_a_condition_that_was_killed_halfway_is_named_and_not_shown(results):
    put(results, KERNEL, {"sq(k=7)": 1e-4}, blocks=N - 3)
    (run,) = fidelity.stored(results)
    assert run.conditions == ["h15()", "sq(k=3)"] and run.incomplete == {"sq(k=7)": N - 3}
    assert "sq(k=7)" not in set(fidelity.table(run)["condition"])


def test_any_backend_of_whole_rows_serves_the_wiring_check(results):
    put(results, "fused", {"softmax()": 0.0}, shift=2e-3, seed=8)
    found = fidelity.stored(results)[0].wiring()
    assert found["whole rows, fused backend, same dtype"].mean == pytest.approx(-2e-3, abs=3e-4)


def test_tiles_are_set_beside_whole_rows_where_those_are_complete(results):
    (run,) = fidelity.stored(results)
    assert run.beside_whole_rows() == [], "softmax alone is no cost"
    put(results, "fused", {"softmax()": 0.0, "h15()": 3e-3}, shift=0.5, seed=7)
    put(results, "fused", {"sq(k=3)": 3e-3}, blocks=N - 1, shift=0.5, seed=8)
    (run,) = fidelity.stored(results)
    ((condition, backend, whole, kernel, simulator),) = run.beside_whole_rows()
    assert (condition, backend) == ("h15()", "fused")
    assert whole.mean == pytest.approx(3e-3, abs=2e-4)
    assert kernel.mean == pytest.approx(run.measured("h15()").mean - whole.mean, abs=1e-12)
    assert simulator.mean == pytest.approx(run.simulated("h15()").mean - whole.mean, abs=1e-12)


def test_each_model_has_its_run_and_its_own_blocks(results):
    put(results, KERNEL, COST | {"h15()": 1e-4}, model="large", blocks=N - 2, seed=9)
    assert [(r.model, r.measured("h15()").n_blocks) for r in fidelity.stored(results)] == [
        ("large", N - 2),
        ("small", N),
    ]


def test_what_is_missing_is_left_open(tmp_path):
    put(tmp_path, KERNEL, COST | {"packed(k=4)": 1e-4})
    put(tmp_path, HOPPER_PATH, COST, blocks=N - 1)
    (run,) = fidelity.stored(str(tmp_path))
    assert run.conditions == ["h15()", "sq(k=3)", "packed(k=4)"]
    rows = fidelity.table(run)
    assert rows["sim"].isna().all() and rows["inside"].isna().all() and rows["apart"].isna().all()
    assert run.wiring() == {}
    put(tmp_path, "fa4(arch=simulated)", COST)
    assert [r.backend for r in fidelity.stored(str(tmp_path))] == [KERNEL]
    assert [r.backend for r in fidelity.stored(str(tmp_path), rehearsed=True)] == ["fa4(arch=simulated)"]


def test_a_kernel_is_compared_with_its_own_cards_semantics():
    assert fidelity.twin("fa4(arch=sm_90)") == HOPPER_PATH == fidelity.twin("fa4(variant=g(3),arch=sm_90)")
    assert fidelity.twin("fa4(arch=sm_100)") == BF16_PATH == fidelity.twin("fa4(arch=sm_103)")
    assert fidelity.kind("fa4(arch=sm_90)") == fidelity.kind("reference") == "measured"
    assert fidelity.kind("fa4(arch=simulated)") == fidelity.kind(HOPPER_PATH) == "simulated"
    with pytest.raises(LabError, match="is no kernel"):
        fidelity.twin("reference")


def test_every_condition_of_the_table_but_s_has_a_kernel():
    from softmaxlab.backends.fa4 import Kernel

    backend = Kernel.parse(KERNEL)
    for text in conditions.canonical([*fidelity.CONDITIONS, *fidelity.PACKED]):
        operator = Condition.parse(text).operator
        if text == "s()":
            with pytest.raises(LabError, match="no variant of the kernel computes"):
                backend.chosen(operator)
        else:
            assert backend.chosen(operator).kind in ("s", "poly", "packed")


def test_the_floor_is_the_largest_mean_difference_or_nothing(tmp_path):
    texts = conditions.canonical(["softmax()", *conditions.reproducibility()])
    where = {"corpus": "wikitext103", "context": 2048}
    for backend in ("reference", "reference-search", "reference-chunked"):
        put(tmp_path, backend, dict.fromkeys(texts, 0.0), dtype="float32", seed=1)
    assert fidelity.reproducibility("small", str(tmp_path), **where) is None, "an implementation is missing"
    moved = dict.fromkeys(texts, 0.0) | {texts[-1]: 3e-3}
    put(tmp_path, "reference-float64", moved, dtype="float32", seed=1)
    assert fidelity.reproducibility("small", str(tmp_path), **where) == pytest.approx(3e-3)
