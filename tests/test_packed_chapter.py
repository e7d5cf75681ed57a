"""What the chapter on the packed exponential claims: targets held by intervals, losses of the best source, one pair."""

import ast
import json
import math
import re
import shlex
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from softmaxlab import figures_packed, packed_endpoints
from softmaxlab.bench import targets
from softmaxlab.bench.record import Entry
from softmaxlab.errors import LabError
from softmaxlab.fa4 import packed_record
from softmaxlab.operators import Packed
from softmaxlab.statistics import Estimate


def entry(gain: float, *, window: float = 200.0, rounds: int = 15, refused=None, noise: float = 0.002) -> Entry:
    """A record in which packed is faster than stock and control by `gain` percent, give or take noise."""
    rng = np.random.default_rng(0)
    turns = [
        {"round": r, "kernel": k, "windows": [[ms * math.exp(noise * rng.standard_normal()), 1500, 60, 690]]}
        for r in range(rounds)
        for k, ms in (("stock", 1.0), ("control", 1.0), ("packed(4,3)", 1 / (1 + gain / 100)))
        if k not in (refused or {})
    ]
    kernels = ["stock", "control", "packed(4,3)"]
    cell = packed_endpoints.TARGETS[0].cell
    return Entry("k", cell, kernels, {"window_ms": window}, "s", turns, {}, refused or {}, len(turns))


@pytest.mark.parametrize(("gain", "verdict"), [(14.0, "met"), (12.0, "unresolved"), (8.0, "missed")])
def test_a_target_is_held_by_its_interval(gain, verdict):
    target, stock, control, found = packed_endpoints.held([entry(gain)])[0]
    assert stock.low < stock.value < stock.high and stock.value == pytest.approx(gain, abs=0.3)
    assert control.value == pytest.approx(gain, abs=0.3) and stock.rounds == 15
    assert found == verdict == stock.against(target.stock)


def test_bursts_and_the_steady_state_are_kept_apart():
    found = [entry(14.0, window=20.0), entry(8.0)]
    steady, burst = (
        targets.of(found, found[0].cell, "packed(4,3)", windows=w) for w in (targets.STEADY, targets.BURST)
    )
    assert (steady.window_ms, burst.window_ms) == (200.0, 20.0) and steady.value < 9 < 13 < burst.value
    assert targets.both(["met", "unresolved", "missed"]) == "missed" and targets.both(["met", "met"]) == "met"


def test_what_was_not_measured_says_why():
    gain = targets.of([entry(9.0, refused={"packed(4,3)": "its gate is red"})], entry(9.0).cell, "packed(4,3)")
    assert gain.against(5.0) == "not measured" and gain.why == "its gate is red" and math.isnan(gain.value)
    few = targets.of([entry(9.0, rounds=3)], entry(9.0).cell, "packed(4,3)")
    assert few.against(5.0) == "not measured" and "rounds" in few.why


def frame(backend: str, dtype: str, values: dict[str, float]) -> list[dict]:
    named = {"model": "m", "corpus": "c", "context": 64, "bos": "stream", "dtype": dtype, "backend": backend}
    return [
        named | {"condition": c, "block": b, "nll": 3 + v + 0.01 * b, "predictions": 63}
        for c, v in values.items()
        for b in range(8)
    ]


class Stored:
    """A store that holds these rows, whatever is asked of it."""

    def __init__(self, rows):
        self.rows = rows

    def frame(self, **_):
        return pd.DataFrame(self.rows)


def test_losses_come_from_the_best_source_that_is_complete(monkeypatch):
    values = {"softmax()": 0.0, "h15()": 0.002, "packed(k=4)": 0.0011}
    rows = frame("fa4(arch=sm_90)", "bfloat16", values) + frame("reference", "float32", dict.fromkeys(values, 0.0))
    rows += frame("fa4(arch=simulated)", "bfloat16", dict.fromkeys(values, 9.0))

    monkeypatch.setattr(packed_endpoints, "Store", lambda _: Stored(rows))
    (found,) = packed_endpoints.losses("somewhere")
    assert (found.backend, found.kind) == ("fa4(arch=sm_90)", "measured")
    assert found.delta("packed(4,3)").mean == pytest.approx(0.0011)
    assert found.beyond_half().mean == pytest.approx(0.0001)
    assert found.delta("poly(2,all)") is None


def test_models_stand_apart_and_a_killed_run_is_left_out(monkeypatch):
    values = {"softmax()": 0.0, "h15()": 0.002, "packed(k=4)": 0.0004, "sq(k=13)": 0.0003}
    rows = frame("fa4(arch=sm_90)", "bfloat16", values)
    rows += [row | {"model": "n"} for row in frame("fa4(arch=sm_90)", "bfloat16", values | {"h15()": 0.0001})]
    rows = [r for r in rows if not (r["model"] == "m" and r["condition"] == "sq(k=13)" and r["block"] > 4)]

    monkeypatch.setattr(packed_endpoints, "Store", lambda _: Stored(rows))
    found = {one.model: one for one in packed_endpoints.losses("somewhere")}
    verdicts = {m: packed_endpoints.verdict_of(one.beyond_half()) for m, one in found.items()}
    assert verdicts == {"m": "met", "n": "missed"}
    assert found["m"].delta("s(13)") is None and found["n"].delta("s(13)").mean == pytest.approx(0.0003)
    assert found["n"].apart("packed(4,3)", "s(13)").mean == pytest.approx(0.0001)
    assert {one.protocol for one in found.values()} == {("c", 64)}


@pytest.mark.parametrize(("low", "high", "said"), [(-2, -1, "met"), (-1, 1, "unresolved"), (1, 2, "missed")])
def test_a_loss_is_held_against_its_limit_by_the_interval(low, high, said):
    beyond = Estimate((low + high) / 2, low, high, 3, np.zeros(3))
    assert packed_endpoints.verdict_of(beyond) == said


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_a_pair_is_followed_bit_by_bit(k):
    pair = packed_endpoints.pair((11.3, 9.6), 12.0, 1.0, k=k)
    operator = Packed(k)
    for i, x in enumerate(pair.exponents):
        code = round(2**k * (x + 127))
        assert pair.codes[i] == code == pair.word >> 16 * i & 0xFFFF
        assert pair.shifted >> 16 * i & 0xFFFF == code << 7 - k
        whole = math.floor(code / 2**k - 127)
        assert pair.weights[i] == 2.0**whole * (1 + code / 2**k - 127 - whole)
        assert pair.weights[i] == operator.at(torch.tensor(x, dtype=torch.float64)).item()
    with pytest.raises(LabError, match=r"a score is 12.5, but the row's maximum is 12"):
        packed_endpoints.pair((12.5, 1.0), 12.0, 1.0)


def test_the_gates_file_is_read_by_group(tmp_path):
    reading = {"variant": "packed(4,3)", "gate": "reruns differ", "value": 0.0, "low": 0.0, "high": None}
    rows = [reading | {"case": c, "passed": p} for c, p in (("exact scores, bf16", True), ("sinks, bf16", False))]
    path = tmp_path / "kernel" / "packed-gates.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"kind": "measured", "environment": {"GPU": "H"}, "readings": rows}))
    table = packed_record.stored(tmp_path).verdict().set_index("group")
    assert table.loc["codes one by one, and their ties", "passed"] == 1
    assert table.loc["sinks", "failed"] == "sinks, bf16: reruns differ"
    path.write_text("{}")
    with pytest.raises(LabError, match="holds no readings of the packed kernel's gates"):
        packed_record.read(path)


def test_energy_is_held_against_the_control():
    def rows(change):
        return [
            {"cell": "c", "session": "s", "kernel": k, "round": 0, "ms": ms, "vs_stock": v, "vs_stock_no_ramp": v,
             "vs_stock_counter": v}
            for k, ms, v in (("stock", 1.0, 0.0), ("control", 1.0, 0.4), ("packed(4,3)", 0.95, change))
        ]  # fmt: skip

    for change, verdict in ((-6.0, "met"), (-0.3, "unresolved"), (1.0, "missed")):
        (found,) = packed_endpoints.energy(pd.DataFrame(rows(change)))
        assert found.verdict == verdict and found.floor == 0.4 and found.faster == pytest.approx(100 / 0.95 - 100)


def test_figures_draw_what_they_are_given():
    fig = figures_packed.bits(packed_endpoints.pair((11.3, 9.6), 12.0, 1.0))
    assert {"F2FP.RELU", "FFMA", "IMAD.SHL"} <= {t.get_text() for t in fig.axes[0].texts}
    rows = [{"kernel": "stock", "kind": "stock"}, {"kernel": "packed(4,3)", "kind": "packed"}]
    points = pd.DataFrame(rows).assign(
        gain=[0.0, 9.0], gain_low=-1.0, gain_high=10.0, loss=1e-3, loss_low=0, loss_high=2e-3
    )
    fig = figures_packed.trade({"A": points})
    assert [t.get_text() for t in fig.legends[0].get_texts()] == ["packed", "stock and control"]
    assert {t.get_text(): t.get_ha() for t in fig.axes[0].texts} == {"stock": "left", "packed(4,3)": "left"}
    close = figures_packed.trade({"A": points.assign(gain=[8.5, 9.0])}).axes[0].texts
    assert {t.get_text(): t.get_ha() for t in close} == {"stock": "right", "packed(4,3)": "left"}
    counters = pd.DataFrame({"kernel": ["stock", "lazy(4,3)"]} | {name: [10.0, 90.0] for name in figures_packed.PIPES})
    assert len(figures_packed.pipes({"A": counters}).axes[0].lines) == 2
    bits = figures_packed.bits(packed_endpoints.pair((11.3, 9.6), 12.0, 1.0)).axes[0].texts
    pair = packed_endpoints.pair((11.3, 9.6), 12.0, 1.0)
    digits = [t.get_text() for t in bits if t.get_text() in ("0", "1") and t.get_fontsize() == 8]
    assert "".join(digits) == f"{pair.word:032b}{pair.shifted:032b}"


def test_the_lattices_errors_are_those_of_random_exponents():
    table = packed_endpoints.lattices().set_index("k")
    x = torch.from_numpy(np.random.default_rng(0).uniform(-60, 0, 400_000))
    for k in (1, 2, 3, 4):
        error = torch.log2(Packed(k).at(x.clone()).double()) - x
        assert table.loc[k, "deviation"] == pytest.approx(error.std().item(), rel=0.01)
        assert table.loc[k, "last code"] == 2**k * 127 <= 2047
        low, high = (end / math.log(2) for end in Packed(k).envelope)
        assert low <= table.loc[k, "least"] < 0 < table.loc[k, "largest"] <= high
    assert table.loc[4, "deviation"] < table.loc[1, "deviation"] / 4


ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("page", ["notebooks/14_packed.py", "README.md"])
def test_the_command_that_reproduces_the_headline_is_one_that_the_program_knows(page, tmp_path, monkeypatch):
    """With every word of it but fewer rounds, rehearsed."""
    from softmaxlab.bench import cells, latency
    from softmaxlab.cli import app

    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.search(r"softmaxlab (bench latency --graphs[^`]*?--cells (?:[^`]|\n)*?sdpa-cudnn)", text)[1]
    words = shlex.split(re.sub(r"\\\\?\n[# ]*", " ", found))
    asked = {}
    monkeypatch.setattr(latency, "duration", lambda cells, kernels, **more: asked.update(c=cells, k=kernels, m=more))
    monkeypatch.setattr("softmaxlab.cli_bench._end", lambda *_: None)
    app([*words, "--rehearse", "--results", str(tmp_path)], result_action="return_value")
    assert asked["m"]["window_ms"] >= targets.STEADY_MS and asked["m"]["sweeps"] >= 12
    assert {*asked["k"]} >= {"h15", "fused7", packed_endpoints.KERNEL}
    assert {t.cell for t in packed_endpoints.TARGETS} <= {str(c) for c in cells.parse_all(asked["c"])}


def test_every_step_of_the_code_page_is_in_the_code():
    page = (ROOT / "book" / "packed_code.md").read_text(encoding="utf-8")
    blocks = re.findall(r"{literalinclude} \.\./(\S+)\n(?::.*\n)*?:pyobject: (\S+)", page)
    assert len(blocks) >= 6
    for path, name in blocks:
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        for part in name.split("."):
            (tree,) = (n for n in tree.body if getattr(n, "name", "") == part)
    named = set(re.findall(r"^\((code-packed[\w-]*)\)=", page, re.M))
    used = set(re.findall(r"<(code-packed[\w-]*)>", (ROOT / "notebooks" / "14_packed.py").read_text(encoding="utf-8")))
    assert used <= named and len(used) >= 8
