"""The gates, rehearsed with a simulated kernel: right kernels pass, and each kind of wrong one is caught by name."""

import importlib.util
import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch

from softmaxlab import fa4
from softmaxlab.errors import LabError
from softmaxlab.fa4 import Variant, bounds, gate_record, gates, readings
from softmaxlab.semantics import Semantics

SCRIPT = Path(__file__).parents[1] / "kernel" / "bench" / "gates.py"
CASES = gates.smaller(queries=48)


def rehearse(variant, attend=readings.simulated, cases=CASES, **options):
    return gates.run([variant], attend=attend, cases=cases, device="cpu", **options)


def red(frame):
    return {(r.case, r.gate) for r in frame[~frame.passed].itertuples()}


@pytest.mark.parametrize("variant", ["stock", "g(0)", "g(1)", "g(7)", "fused7", "poly(1,all)", "poly(3,0.5)"])
def test_what_is_offered_is_green(variant):
    frame = rehearse(variant)
    assert red(frame) == set() and frame.offered.all()
    assert set(frame.case) == {c.name for c in gates.CASES}
    assert (
        frame[["low", "high"]].notna().all(axis=None)
        and not (frame.low.eq(-float("inf")) & frame.high.eq(float("inf"))).any()
    )


@pytest.mark.parametrize("variant", ["h15", "s(3)", "f(1)"])
def test_the_papers_clamp_fails_on_masked_rows_and_nowhere_else(variant):
    frame = rehearse(variant)
    assert red(frame) == {("masked rows", "largest output of masked rows")}
    assert not frame.offered.any() and gates.verdict(frame).failed[0] == "masked rows: largest output of masked rows"


def wrong(change):
    """A kernel that is off for every variant but stock, from which the readings of A0 come."""

    def attend(q, k, v, *, variant, causal, softcap):
        if Variant.parse(variant).kind == "stock":
            return readings.simulated(q, k, v, variant=variant, causal=causal, softcap=softcap)
        return change(q, k, v, variant=variant, causal=causal, softcap=softcap)

    return attend


def _other_lattice(q, k, v, **a):
    return readings.simulated(q, k, v, **a | {"variant": "g(2)"})


def _exact(q, k, v, **a):
    return readings.simulated(q, k, v, **a | {"variant": "stock"})


def _no_softcap(q, k, v, **a):
    return readings.simulated(q, k, v, **a | {"softcap": 0.0})


def _wrong_head(q, k, v, **a):
    return readings.simulated(q, k.flip(2), v.flip(2), **a)


def _nan(q, k, v, **a):
    out, lse = readings.simulated(q, k, v, **a)
    out[0, -1, 0, 0] = torch.nan
    return out, lse


def _nan_everywhere(q, k, v, **a):
    out, lse = readings.simulated(q, k, v, **a)
    return out * torch.nan, lse


def _crash(q, k, v, **a):
    raise RuntimeError("CUDA error: an illegal memory access\nand more")


def _lse_off(q, k, v, **a):
    out, lse = readings.simulated(q, k, v, **a)
    return out, lse + 0.01


def _one_key_lost(q, k, v, **a):
    v = v.clone()
    v[:, 3] = 0
    return readings.simulated(q, k, v, **a)


def _whole_row(q, k, v, **a):
    """One anchor for the whole row: a lattice that does not walk the tiles."""
    s, _ = readings.scores(q, k, causal=a["causal"], softcap=a["softcap"])
    whole = Semantics(tile=s.shape[-1], tau=0)
    found = readings.reference(q, k, v, Variant.parse(a["variant"]), whole, causal=a["causal"], softcap=a["softcap"])
    return found.out.to(q.dtype), found.lse.float()


WRONG = {
    _other_lattice: ("several tiles", "weights outside their bounds"),
    _exact: ("single tile", "weights outside their bounds"),
    _no_softcap: ("soft-cap", "weights outside their bounds"),
    _wrong_head: ("grouped heads, dim 64", "weights outside their bounds"),
    _nan: ("other lengths", "not finite"),
    _nan_everywhere: ("single tile", "weights outside their bounds"),
    _lse_off: ("soft-cap", "log-sum-exp outside its bounds, nats"),
    _one_key_lost: ("several tiles", "weights outside their bounds"),
    _whole_row: ("several tiles", "weights outside their bounds"),
}


def test_masked_rows_need_a_log_sum_exp_of_minus_infinity():
    def attend(q, k, v, **a):
        out, lse = readings.simulated(q, k, v, **a)
        return out, lse.masked_fill(lse == -torch.inf, torch.nan)

    case = next(c for c in CASES if c.name == "masked rows")
    assert ("masked rows", "masked rows whose log-sum-exp is not −∞") in red(rehearse("g(1)", attend, [case]))


def test_a_kernel_that_does_not_run_is_red_and_loses_nothing():
    frame = rehearse("g(1)", wrong(_crash), CASES[:2])
    assert red(frame) == {
        (c.name, "did not run: RuntimeError: CUDA error: an illegal memory access") for c in CASES[:2]
    }
    with pytest.raises(LabError, match="the stock kernel did not run: RuntimeError: CUDA error"):
        rehearse("g(1)", _crash, CASES[:1])


@pytest.mark.parametrize(("change", "caught"), WRONG.items(), ids=lambda x: getattr(x, "__name__", ""))
def test_wrong_kernels_are_caught(change, caught):
    case = next(c for c in CASES if c.name == caught[0])
    assert caught in red(rehearse("g(1)", wrong(change), [case]))


def test_a_kernel_that_does_not_repeat_itself_is_caught():
    calls = []

    def attend(q, k, v, **a):
        out, lse = readings.simulated(q, k, v, **a)
        calls.append(0)
        return (out * (1 + 2**-7 * (len(calls) % 2))).to(out.dtype), lse

    assert ("soft-cap", "reruns differ") in red(rehearse("g(1)", attend, [c for c in CASES if c.softcap]))


def test_reference_is_softmax_for_the_stock_kernel():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 300, 2, 64, generator=generator, dtype=torch.float64) for _ in "qkv")
    found = readings.reference(q, k, v, Variant(), Semantics(tau=0), causal=True)
    expected = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
    assert torch.allclose(found.out.transpose(1, 2), expected, atol=2e-6)
    s, _ = readings.scores(q, k, causal=True)
    assert torch.allclose(found.lse, s.logsumexp(-1), atol=2e-6)


def test_intervals_are_points_away_from_the_jumps():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 256, 1, 64, generator=generator) for _ in "qkv")
    found = readings.reference(q, k, v, Variant.parse("g(1)"), Semantics(tau=0), causal=False)
    open_ = (found.low < found.high).double().mean()
    assert (found.low <= found.weights).all() and (found.weights <= found.high).all() and 0 < open_ < 1e-3


def test_distributions_are_those_of_the_figure():
    frame = rehearse("h15", cases=CASES[:1])
    (seen,) = frame.attrs["distributions"]
    assert (
        sum(seen["residual"]["counts"]) == seen["elements"] == 2 * 48 * 128 - 2 * sum(127 - i for i in range(80, 128))
    )
    assert seen["bounds"]["unnormalised"] == pytest.approx([-0.25, 0.334963], abs=1e-6) and seen["rows"] == 96


def test_what_is_refused(monkeypatch):
    with pytest.raises(LabError, match="identity is no exponential"):
        rehearse("identity")
    for options in ({"cases": []}, {"processes": -1}):
        with pytest.raises(LabError, match="nothing can run"):
            rehearse("g(1)", **options)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(LabError, match="there is no GPU here"):
        gates.run(["h15"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    with pytest.raises(LabError, match="FP8, single tile; FP8, several tiles: FlashAttention-4 takes FP8 on Blackwell"):
        gates.run(["h15"], cases=gates.CASES)


def test_the_script_writes_readings_and_says_red(tmp_path, monkeypatch, capsys):
    def run(*variants):
        monkeypatch.setattr(sys, "argv", ["gates.py", "--out", str(out), "--rehearse", "--variants", *variants])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        return ended.value.code

    out = tmp_path / "new" / "gates.json"
    assert run("stock", "h15", "g(1)") == 0  # h15 is red, but is not offered
    found = json.loads(out.read_text())
    assert found["kind"] == "simulated" and {r["variant"] for r in found["readings"]} == {"stock", "h15", "g(1)"}
    assert next(r for r in found["readings"] if not r["passed"])["case"] == "masked rows"
    before = out.read_bytes()
    assert run("h16") == 2 and out.read_bytes() == before and "h16" in capsys.readouterr().err
    monkeypatch.setattr(bounds, "TOLERANCES", {d: (2.0**-30, 0.0, *t[2:]) for d, t in bounds.TOLERANCES.items()})
    assert run("g(1)") == 1  # offered, and red


def test_a_record_comes_back_as_it_was(tmp_path):
    found = gate_record.rehearse(["h15", "g(1)"], CASES[:3])
    gate_record.write(found, tmp_path / "kernel" / "gates.json")
    back = gate_record.stored(tmp_path)
    pd.testing.assert_frame_equal(back.frame, found.frame, check_dtype=False)
    assert (back.kind, back.seconds, back.environment) == ("simulated", found.seconds, found.environment)
    assert back.distribution("h15", "several tiles") == found.distribution("h15", "several tiles")
    with pytest.raises(LabError, match="no distribution of g\\(2\\) in the case 'several tiles'"):
        back.distribution("g(2)", "several tiles")


def test_a_rehearsal_does_not_replace_what_was_measured(tmp_path):
    path = tmp_path / "kernel" / "gates.json"
    found = gate_record.rehearse(["g(1)"], CASES[2:3])
    gate_record.write(replace(found, kind="measured"), path)
    before = path.read_bytes()
    with pytest.raises(LabError, match="holds measured readings and these are simulated"):
        gate_record.write(found, path)
    assert path.read_bytes() == before and not list(path.parent.glob("*.tmp"))
    path.write_text('{"kind": "measured"}')
    with pytest.raises(LabError, match="holds no readings of the gates"):
        gate_record.stored(tmp_path)


def test_the_command_keeps_readings_and_says_red(tmp_path, monkeypatch, capsys):
    out = tmp_path / "gates.json"
    gate_record.main("h15", "g(1)", rehearse=True, out=out)  # h15 is red, but is not offered
    assert f"simulated, kept in {out}" in capsys.readouterr().out
    monkeypatch.setattr(bounds, "TOLERANCES", {d: (2.0**-30, 0.0, *t[2:]) for d, t in bounds.TOLERANCES.items()})
    with pytest.raises(LabError, match=r"gates are red of 1 variants that are offered for use: g\(1\)"):
        gate_record.main("g(1)", rehearse=True)
    assert "simulated, not kept" in capsys.readouterr().out


@pytest.mark.parametrize("variant", ["stock", "h15", "poly(1,all)", "packed(4,3)"])
@pytest.mark.parametrize("beside", [2e-6, -2e-6])
def test_an_exponent_one_rounding_beside_is_no_fault(variant, beside, monkeypatch):
    """A kernel's own x of the row maximum is not exactly 0, where P of degree 1 jumps by 4%."""
    weigh = readings.weigh
    monkeypatch.setattr(readings, "weigh", lambda tile, anchor, *a: weigh(tile, anchor + beside, *a))
    cases = [gates.Case("dim 64", head_dim=64, onehot=True), *CASES[:2]]
    assert red(rehearse(variant, cases=cases)) == set()


def test_named_variants_take_the_place_of_their_readings(tmp_path, monkeypatch):
    out = tmp_path / "gates.json"
    gate_record.main("h15", "g(1)", rehearse=True, out=out)
    before = gate_record.read(out)
    gate_record.main("g(1)", "stock", rehearse=True, out=out)
    after = gate_record.read(out)
    assert list(after.frame.variant.unique()) == ["h15", "g(1)", "stock"]
    assert after.frame[after.frame.variant != "stock"].reset_index(drop=True).equals(before.frame)
    assert after.distribution("g(1)", "several tiles") == before.distribution("g(1)", "several tiles")
    monkeypatch.setattr(gate_record.doctor, "environment", lambda: {"GPU": "another"})
    with pytest.raises(LabError, match=r"simulated on another with .*: send all variants through the gates"):
        gate_record.main("g(1)", rehearse=True, out=out)
    assert list(gate_record.read(out).frame.variant.unique()) == ["h15", "g(1)", "stock"]


@pytest.mark.gpu
@pytest.mark.skipif(
    importlib.util.find_spec("flash_attn") is None
    or not torch.cuda.is_available()
    or torch.cuda.get_device_capability()[0] not in fa4.patch.SUPPORTED,
    reason="needs a Hopper or Blackwell GPU",
)
def test_every_offered_variant_is_green_on_this_gpu():
    chosen = [v for v in fa4.variants() if v.offered]
    table = gates.verdict(gates.run(chosen, processes=8))
    assert (table.passed == table.gates).all(), table.to_string()
