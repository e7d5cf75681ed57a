"""The page on what the lab costs: verdicts follow the numbers, and what is not recorded is said."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest

from softmaxlab import conditions, costs_agreement, costs_memory, costs_page, costs_ratios, costs_suite, costs_together
from softmaxlab.bench import operator_rows
from softmaxlab.conditions import BASELINE
from softmaxlab.losskey import LossKey
from softmaxlab.store import Store

ROOT = Path(__file__).resolve().parent.parent
H200_16K = ("cuda", "attention", "bfloat16", 16384)
H200_2K = ("cuda", "model", "float32", 2048)
MIB = 2**20


def row(operator, ratio, setting=H200_16K, *, sdpa="grouped", peak=64, backend="fused", **changes):
    """A made-up row: sdpa takes 4 ms in each of three rounds, the operator `ratio` times that, ± 10 %."""
    kind, mode, dtype, context = setting
    shape = (32, 8, 128) if mode == "attention" else (0, 0, 0)
    made = dict(zip(("heads", "kv_heads", "dim"), shape, strict=True))
    made |= {"case": f"{mode}/{dtype}/{context}", "mode": mode, "dtype": dtype, "context": context}
    made |= {"backend": backend, "operator": operator, "seconds": [0.004 * ratio * s for s in (1, 0.9, 1.1)]}
    made |= {"sdpa_seconds": [0.004] * 3, "peak_bytes": peak * MIB, "sdpa_peak_bytes": 70 * MIB, "notices": []}
    if sdpa:
        made |= {"sdpa": sdpa, "sdpa_trial": {"grouped": 0.004, "repeated": 0.006}}
    return made | {"kind": kind, "device": "GPU A", "threads": 4} | changes


def record(folder, *rows, kind="cuda"):
    path = folder / "results" / "bench" / f"operators-{kind}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    operator_rows.save(path, list(rows))
    return operator_rows.stored(folder / "results")


def page(folder):
    (folder / "book").mkdir(exist_ok=True)
    shutil.copy(ROOT / "book" / "costs-template.md", folder / "book")
    return costs_page.write_page(folder).read_text(encoding="utf-8")


def cost(folder, backend, times, device="GPU A"):
    key = {"model": "smollm2-135m", "context": 2048, "dtype": "float32", "backend": backend, "device": device}
    frame = pd.DataFrame({"condition": list(times), "seconds_per_block": list(times.values()), "batches": 1})
    Store(folder / "results").put_table("cost", key | {"batch": 8}, frame, {})


def losses(folder, backend, *texts, blocks=10):
    for text in texts:
        key = LossKey("smollm2-135m", "id", "wikitext103", "c", 2048, "stream", "float32", backend, text, f'"{text}"')
        rows = pd.DataFrame({"block": range(blocks), "nll": 1.5, "predictions": 2047})
        Store(folder / "results").append_losses(key, rows, {})


def test_a_book_without_the_template_has_no_such_page(tmp_path):
    assert costs_page.write_page(tmp_path) is None


def test_what_is_not_recorded_is_said(tmp_path):
    text = page(tmp_path)
    assert "No benchmark of operators was recorded." in text and "No target was measured." in text
    assert text.count(": not measured |") == 15
    assert "No peak memory was recorded." in text and "Memory was not measured." in text
    assert "shares prefixes" not in text and "share prefixes was not measured" in text
    assert "The time of a condition was not measured on a GPU." in text and "Nothing to estimate from" in text
    assert "What these passes cost was not measured." in text
    assert "- Two GPUs against one" in text and "- Operators on a GPU." in text and "- Operators on the CPU." in text
    assert "$" not in text.replace("$D_W$", ""), "every place of the template is filled"


def test_verdicts_follow_the_numbers(tmp_path):
    rows = record(tmp_path, row("softmax()", 1.49), row("h15()", 1.2), row("pot(m=1)", 1.7), row("grid(K=21)", 2.5))
    text = page(tmp_path)
    assert "≤ 1.5: met 1.49 (1.34–1.64) `softmax()`" in text and "≤ 2.5: met" in text
    assert "≤ 1.6: **missed** by 1 of 2, at most 1.70 (1.53–1.87) `pot(m=1)`" in text
    assert "≤ 5: not measured" in text
    why = costs_ratios.why(rows)
    assert "`pot(m=1)` 1.70" in why and "walked twice" in why and "`h15()`" not in why and "scratch" not in why
    # 2 · 16384² · 32 · 128 operations in 4 ms.
    assert "about 550 TFLOP/s" in why
    rows = record(tmp_path, row("softmax()", 1.51), row("pot(m=1)", 1.5), row("topk(f=0.1)", 6.0))
    why = costs_ratios.why(rows)
    assert "`softmax()` 1.51" in why and "FP16" in why and "`pot(m=1)`" not in why and "scratch" in why
    assert "No target that was measured is missed." in costs_ratios.why(record(tmp_path, row("softmax()", 1.0)))


def test_agreement_on_a_gpu_and_what_no_gpu_has_run(tmp_path):
    assert costs_agreement.agreement(tmp_path).startswith("No GPU's weights")
    assert len(costs_agreement.absent(tmp_path)) == 2
    path = tmp_path / "results" / "bench" / "fused_gpu.json"
    path.parent.mkdir(parents=True)
    found = {"dtype": "float32", "cells": 2e-5, "cells_exact": 0.0}
    rows = [{"operator": "softmax()", **found}, {"operator": "h15()", **found, "cells": 3e-5}]
    rows.append({"operator": "s()", "dtype": "float32", "failed": "no such thing"})
    path.write_text(json.dumps({"device": "GPU A", "agreement": rows}))
    text = costs_agreement.agreement(tmp_path)
    assert "| operators on whole rows | float32 | 2 | 2 | 0.0000300 (`h15()`) | 0 |" in text and "GPU A" in text
    assert "Failed: `s()`." in text
    kernels, simulator = costs_agreement.absent(tmp_path)
    assert "`rescue`" in kernels and "`softmax`" not in kernels and "simulator" in simulator
    path.write_text(json.dumps({"device": "GPU A", "agreement": rows, "simulator": rows[:1]}))
    assert "operators in a simulated kernel" in costs_agreement.agreement(tmp_path)
    assert len(costs_agreement.absent(tmp_path)) == 1


def test_two_decimals_do_not_hide_a_miss(tmp_path):
    (one,) = record(tmp_path, row("softmax()", 1.502))
    assert costs_ratios.ratio(one).startswith("1.502 (") and costs_ratios.missed(one)
    (one,) = record(tmp_path, row("softmax()", 1.498))
    assert costs_ratios.ratio(one).startswith("1.50 (") and not costs_ratios.missed(one)


def test_the_forward_pass_has_the_targets_at_2k_and_attention_those_at_16k(tmp_path):
    others = [
        ("cuda", "attention", "float32", 2048),
        ("cuda", "model", "bfloat16", 16384),
        ("cuda", *H200_16K[1:3], 8192),
    ]
    rows = record(tmp_path, *(row("softmax()", 9.0, setting) for setting in others))
    assert all(r["target"] is None for r in rows) and costs_ratios.targets(rows).count("not measured") == 15
    (cpu,) = record(tmp_path, row("topk(f=0.1)", 4.1, ("cpu", *H200_2K[1:])), kind="cpu")[-1:]
    assert cpu["target"] == 4 and "two CPU cores" in costs_ratios.why([cpu])
    assert "Why was not established." in costs_ratios.why([cpu])
    assert "six products" in costs_ratios.why(record(tmp_path, row("softmax()", 0.91, H200_2K)))


def test_a_ratio_to_the_slow_way_is_not_simply_met(tmp_path):
    rows = record(tmp_path, row("softmax()", 0.5, H200_2K, sdpa=""))
    assert "met against sdpa with `enable_gqa` alone 0.50" in costs_ratios.targets(rows)
    assert "flatters ours**: float32 on CUDA, forward pass at 2K." in costs_ratios.ways(rows)
    rows = record(tmp_path, row("softmax()", 0.5, H200_2K))
    assert "≤ 0.9: met 0.50" in costs_ratios.targets(rows)
    assert "| grouped | 1.50 times as long |" in costs_ratios.ways(rows) and "flatters" not in costs_ratios.ways(rows)
    full = row("softmax()", 0.5, H200_2K, sdpa="repeated") | {"sdpa_trial": {"grouped": None, "repeated": 0.004}}
    assert "| repeated | memory does not hold it |" in costs_ratios.ways(record(tmp_path, full))


def test_memory_is_held_to_linear_growth(tmp_path):
    at = lambda context, peak, operator="softmax()": row(operator, 1.0, (*H200_16K[:3], context), peak=peak)  # noqa: E731
    rows = record(tmp_path, at(2048, 16), at(8192, 64), at(2048, 200, "topk(f=0.1)"), at(8192, 210, "topk(f=0.1)"))
    assert "GPU A: met by all 2 series" in costs_memory.verdict(rows)
    reference = row("softmax()", 2.0, (*H200_16K[:3], 2048), peak=900, backend="reference")
    shown = costs_memory.tables(record(tmp_path, at(2048, 16), at(2048, 200, "topk(f=0.1)"), reference))
    assert "| attention alone | bfloat16 | 2K | 70.0 | 16.0 | 200 | 900 |" in shown
    rows = record(tmp_path, at(2048, 16), at(8192, 256), at(2048, 20, "h15()"), at(8192, 80, "h15()"))
    assert "**missed** by 1 of 2 series, most by `softmax()`" in costs_memory.verdict(rows)
    assert "4.00 times as fast" in costs_memory.verdict(rows)
    assert "not measured at two contexts" in costs_memory.verdict(record(tmp_path, at(2048, 16)))


def test_a_machine_has_its_tables_and_its_figure(tmp_path):
    contexts = [(*H200_16K[:3], n) for n in (2048, 16384)]
    record(tmp_path, *(row(o, 1.3, s) for o in ("softmax()", "topk(f=0.1)") for s in contexts), row("s()", 2.0))
    record(tmp_path, row("softmax()", 1.0, ("cpu", *H200_2K[1:]), device="CPU B", notices=["told"]), kind="cpu")
    text = page(tmp_path)
    for name, title in (("costs-cuda-1", "### GPU A"), ("costs-cpu-2", "### CPU B, 4 threads")):
        assert f":::{{figure}} {name}.svg" in text and title in text
        assert (tmp_path / "book" / "_generated" / f"{name}.svg").read_text().startswith("<?xml")
    assert "| `softmax()` | 1.30 (1.17–1.43) | 1.30 (1.17–1.43) | ≤ 1.5 met |" in text
    assert "| `s()` | — | 2.00 (1.80–2.20) | ≤ 1.6 missed |" in text, "a context that one operator lacks is a dash"
    assert "`softmax()`: told" in text
    assert "- On a GPU: attention alone, bfloat16, at 8K, 32K." in text and "- On the CPU: attention alone" in text


def test_what_is_measured_together(tmp_path):
    report = {"device": "GPU A", "backend": "fused", "dtype": "float32", "model": "smollm2-135m", "context": 2048}
    report |= {"conditions": 61, "blocks": 8, "share_of_layers": 0.525, "share_of_time": 0.534}
    report |= {"seconds": {"together": [5.45], "each_alone": [10.2]}}
    path = tmp_path / "results" / "bench" / "same_support_cost.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(report))
    text = costs_together.together(tmp_path)
    assert "**53.4 %**" in text and "50 %: missed. Layers alone do not meet it" in text
    path.write_text(json.dumps(report | {"share_of_time": 0.49}))
    assert costs_together.together(tmp_path).endswith("50 %: met.")
    bench = {"device": "GPU A", "forwards": {"forward": 1.0, "operators_16": 7.25}, "forward_ms_per_block": 100}
    (path.parent / "trajectory_cost.json").write_text(json.dumps(bench))
    through = {"operator": "h15()", "backend": "online(tile=128,tau=8)", "softmax_evaluations": 2.2}
    (path.parent / "simulator_cost.json").write_text(json.dumps({"device": "GPU B", "evaluations": [through]}))
    text = costs_together.passes(tmp_path)
    assert "| trajectory, 16 operators in one pass | 7.2 | ≤ 6 **missed** |" in text
    assert "| `h15()` through `online(tile=128,tau=8)` | 2.2 | ≤ 4 met |" in text and "GPU A, GPU B" in text


def test_rates_come_from_the_nearest_measurement(tmp_path):
    cost(tmp_path, "fused", {BASELINE: 0.02, "grid(K=21)": 0.03, "grid(K=32)": 0.05})
    cost(tmp_path, "reference", {BASELINE: 0.04, "topk(f=0.1)": 0.08, "log2p()": 0.07, "mean_threshold()@3": 0.01})
    cost(tmp_path, "fused", {BASELINE: 9.0, "h15()": 9.0, "pot(m=1)": 9.0, "s()": 9.0}, device="x86_64 CPU")
    record(tmp_path, row(BASELINE, 0.5, H200_2K), row("topk(f=0.1)", 1.5, H200_2K))
    rates = costs_suite.Rates(tmp_path)
    assert rates.device == "GPU A"
    assert rates.of("grid(K=21)", "fused") == (0.03, "measured")
    assert rates.of("grid(K=8)", "fused") == (pytest.approx(0.04), "family")
    assert rates.of("topk(f=0.5)", "fused") == (pytest.approx(0.06), "bench")
    assert rates.of("log2p(bits=4)", "fused") == (0.07, "reference")
    assert rates.of("h15()", "fused")[1] == rates.of("mean_threshold()@4", "fused")[1] == "none"


def test_the_suite_is_estimated_from_what_the_store_holds(tmp_path):
    cost(tmp_path, "reference", {BASELINE: 1.0, "h15()": 3.0, "mean_threshold()@1": 0.5})
    cost(tmp_path, "fused", {BASELINE: 0.5, "h15()": 0.5})
    cost(tmp_path, "online(tile=128,tau=8)", {"h15()": 4.0})
    losses(tmp_path, "reference", BASELINE, "h15()", "mean_threshold()@1")
    losses(tmp_path, "online(tile=128,tau=8)", "h15()")
    losses(tmp_path, "reference-float64", "h15()")
    losses(tmp_path, "fused", BASELINE)
    found, blocks = costs_suite.parts(tmp_path, costs_suite.Rates(tmp_path))
    assert blocks == 10 and [p.conditions for p in found] == [2, 1, 1, 1], "fused again is not another condition"
    assert [p.seconds["reference"] for p in found] == [40.0, 5.0, 40.0, 30.0]
    text = costs_suite.suite(tmp_path)
    assert "| conditions of single layers | 1 | 0.083 | — |" in text and "| met | unknown |" in text
    assert "1 have none" in text and "of the sections" in text

    report = {"device": "GPU A", "backend": "fused", "dtype": "float32", "model": "smollm2-135m", "context": 2048}
    report |= {"conditions": 3, "blocks": 2, "seconds": {"together": [1.4]}}
    (tmp_path / "results" / "bench").mkdir(exist_ok=True)
    (tmp_path / "results" / "bench" / "same_support_cost.json").write_text(json.dumps(report))
    found, _ = costs_suite.parts(tmp_path, costs_suite.Rates(tmp_path))
    # Two blocks of softmax and two conditions take 1.4 s, softmax alone half a second a block.
    assert found[1].seconds["fused"] == pytest.approx(10 * (1.4 / 2 - 0.5) / 2)
    assert "| met | met |" in costs_suite.suite(tmp_path)
    cost(tmp_path, "online(tile=128,tau=8)", {"h15()": 40.0})
    text = costs_suite.suite(tmp_path)
    assert text.count("**missed**") == 2 and "no fused kernel makes faster" in text


def test_it_says_whether_the_sources_that_were_timed_are_today_s(tmp_path):
    assert costs_page.timed(record(tmp_path, row("h15()", 1.2))) == ""
    made = {"date": "2026-01-02", "source": operator_rows.revision()}
    assert "as they are" in costs_page.timed(record(tmp_path, row("h15()", 1.2, **made)))
    other = row("s()", 1.2, date="2026-01-03", source="0" * 12)
    text = costs_page.timed(record(tmp_path, row("h15()", 1.2, **made), other))
    assert "2026-01-02 and 2026-01-03" in text and "have changed since" in text


def suite_run(folder, *parts, device="GPU A"):
    """A record of the suite: (part, backend as stored, conditions, blocks, seconds, differences)."""
    names = ("part", "stored", "conditions", "blocks", "seconds", "differences")
    made = {"device": device, "backend": "fused", "dtype": "float32", "context": 2048}
    made["parts"] = [dict(zip(names, part, strict=True)) for part in parts]
    (folder / "results" / "bench").mkdir(parents=True, exist_ok=True)
    (folder / "results" / "bench" / "suite.json").write_text(json.dumps(made))


def test_a_run_of_the_suite_replaces_the_sum_where_all_of_a_part_was_run(tmp_path):
    cost(tmp_path, "reference", {BASELINE: 1.0, "h15()": 3.0})
    cost(tmp_path, "online(tile=128,tau=8)", {"h15()": 40.0})
    cost(tmp_path, "online(tile=128,tau=0)", {"h15()": 40.0})
    losses(tmp_path, "reference", BASELINE, "h15()")
    losses(tmp_path, "online(tile=128,tau=8)", "h15()")
    losses(tmp_path, "online(tile=128,tau=0)", "h15()")
    simulated = "in a simulated kernel"
    one = (simulated, "online(tile=128,tau=8)", 1, [2, 5], [1.0, 1.5], {})
    other = (simulated, "online(tile=128,tau=0)", 1, [5], [5.0], {})

    def seconds():
        found, _ = costs_suite.parts(tmp_path, costs_suite.Rates(tmp_path))
        return [p.seconds["fused"] for p in found]

    suite_run(tmp_path, one, other)
    assert seconds() == [40.0, 10 / 5 * 2.5 + 10 / 5 * 5], "the passes of a part add up; its last blocks count"
    suite_run(tmp_path, one, (*other[:3], [], [], {}))
    assert seconds() == [40.0, 800.0], "a part that was not run whole keeps its sum"
    suite_run(tmp_path, one, other, device="GPU B")
    assert seconds() == [40.0, 800.0], "of another GPU"
    suite_run(tmp_path, one, (*other[:4], [500.0], {}))
    text = costs_suite.suite(tmp_path)
    assert "**missed**" in text and "2 were measured with their part of the suite" in text
    assert "2 conditions on 5 of 10 blocks in 2 calls, **measured**, 8.4 min" in text


def test_fused_losses_are_set_beside_the_stored_ones(tmp_path):
    assert "were not compared" in costs_agreement.losses(tmp_path)

    def found(**means):
        return {f"{name}()": {"mean": mean, "largest": 1.0, "blocks": 8} for name, mean in means.items()}

    whole = ("on whole rows", "reference", 3, [8], [1.0], found(h15=-2e-4, s=1e-5, ilpot=3e-5))
    simulated = [("in a simulated kernel", f"online({b})", 1, [], [], found(h15=x)) for b, x in (("a", 1e-4), ("b", 0))]
    suite_run(tmp_path, whole, *simulated)
    text = costs_agreement.losses(tmp_path)
    assert "| on whole rows | 3 | 8 | 0.0000300 | 0.000200 (`h15()`) |" in text
    assert "| in a simulated kernel | 2 | 8 | 0.0000500 | 0.000100 (`h15()` through `online(a)`) |" in text


def test_core_conditions_stand_beside_each_other(tmp_path):
    cost(tmp_path, "reference", dict.fromkeys(conditions.core(), 0.06))
    cost(tmp_path, "fused", {BASELINE: 0.02})
    text = costs_together.core(tmp_path)
    assert "| `softmax()` | 60.0 | 20.0 | 3.00 |" in text and "| `h15()` | 60.0 | — | — |" in text
