"""The steps of a model's breadth: what they hold, in which order, that they store it, and what they would take."""

from __future__ import annotations

import math

import pytest

from softmaxlab import breadth, conditions, cross_model, models, scaling
from softmaxlab.breadth import Step
from softmaxlab.conditions import BASELINE
from softmaxlab.errors import LabError
from softmaxlab.scaling import SHAPES, Basis

SMALL = {"corpus": "pydoc", "blocks": 2, "device": "cpu", "progress": False}


def test_the_plan_has_the_core_first_and_every_length_once():
    steps = breadth.plan()
    assert [(s.section, s.context) for s in steps] == [
        ("core", 2048),
        ("core", 2048),
        ("long", 8192),
        ("long", 16384),
    ]
    assert [s.levels for s in steps] == [(), (1.0, 10.0), (1.0,), (1.0,)] and [s.rescue for s in steps] == [0, 1, 0, 0]
    assert len(breadth.plan([512])) == 2
    with pytest.raises(LabError, match="no context length"):
        breadth.plan([])


def test_the_long_section_is_what_the_paper_compares_over_lengths():
    assert conditions.named("long") == [BASELINE, "grid(K=21)", "grid(K=21,R=4)", "pot(m=1)"]


def test_a_step_is_measured_stored_and_then_read(tiny_model, tmp_path, monkeypatch):
    setting = SMALL | {"model": str(tiny_model), "results": str(tmp_path)}
    for step in breadth.plan([64, 128]):
        losses = breadth.measure(step, vocabulary=step.section == "core" and not step.levels, **setting)
        assert set(losses["context"]) == {step.context} and set(losses["block"]) == {0, 1}
    (cell,) = cross_model.read(str(tmp_path), context=64, corpus="pydoc")
    assert set(conditions.core()) <= cell.conditions
    assert cell.mean_output("h15()", "top1") is not None
    for metric in cross_model.CONTRASTS:
        # The tiny model may be unable to reach 10 J0 in one direction; then there is no such contrast.
        assert cell.contrast(metric) is not None or cell.pair(10.0) is None
    assert cell.pair(1.0) is not None
    (longer,) = cross_model.read(str(tmp_path), context=128, corpus="pydoc")
    assert longer.contrast("D_T(J0)") is not None and longer.contrast("I_R") is None
    assert longer.pair(1.0) != cell.pair(1.0), "each length has temperatures of its own"
    assert cross_model.positions(str(tmp_path), cell.model) == 256

    # Everything is there: no model is loaded again.
    monkeypatch.setattr(models, "load_model", lambda *_, **__: pytest.fail("a model was loaded"))
    for step in breadth.plan([64, 128]):
        breadth.measure(step, **setting)


def test_a_spread_model_is_matched_to_the_same_temperatures(tiny_model):
    step, setting = Step("long", 64, (1.0,)), SMALL | {"model": str(tiny_model), "results": ""}
    one, spread = (breadth.measure(step, **setting, device_map=where) for where in ("", {"": "cpu"}))
    assert one["condition"].unique().tolist() == spread["condition"].unique().tolist()
    assert one["condition"].str.startswith("temperature").sum() == 4


def test_lengths_beyond_the_model_are_told_apart(tiny_model):
    assert breadth.reachable(str(tiny_model), (64, 256, 512)) == ([64, 256], [512])
    steps = breadth.long_steps(str(tiny_model), (64, 256, 512))
    assert [(step.section, step.context, step.levels) for step in steps] == [
        ("long", 64, (1.0,)),
        ("long", 256, (1.0,)),
    ]


def test_the_command_rehearses_and_keeps_nothing(run, tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = run("breadth", tiny_model, "--rehearse", "--no-vocabulary")
    assert code == 0 and "rehearsal complete" in out and list(tmp_path.iterdir()) == []
    assert out.count("2 blocks") == 3 and "with and without rescue" in out
    code, _, err = run("breadth", tiny_model, "--rehearse", "--results", tmp_path)
    assert code == 2 and "leave --results" in err


def test_the_command_stores_and_says_what_it_leaves_out(run, tiny_model, text_file, tmp_path):
    results = tmp_path / "results"
    arguments = ["--corpus", text_file, "--blocks", "2", "--device", "cpu", "--results", results, "--no-vocabulary"]
    code, out, err = run("breadth", tiny_model, "--contexts", "64", "--contexts", "4096", *arguments)
    assert code == 0, err
    assert "made for fewer than 4096 tokens, left out" in out and "long at" not in out
    (cell,) = cross_model.read(str(results), context=64, corpus=str(text_file))
    assert cell.blocks == 2 and cell.contrast("D_R(21)") is not None


def basis(**seconds):
    return Basis("m", "float32", "reference", "GPU", SHAPES["smollm2-135m"], seconds)


def test_an_estimate_adds_conditions_temperatures_and_solving():
    core = dict.fromkeys(conditions.core(), 0.02)
    known = basis(**core, **{"temperature(alpha=0.9)": 0.03, "rescue(of=temperature(alpha=0.9))": 0.05})
    shape = SHAPES["smollm2-135m"]
    first, second, longer, _ = breadth.plan()
    assert breadth.seconds(first, shape, known) == pytest.approx(97 * 0.02 * len(core))
    assert breadth.seconds(second, shape, known, matching_cost=10) == pytest.approx(
        97 * 4 * (0.03 + 0.05) + 16 * 0.02 * 10
    )
    took = breadth.seconds(longer, shape, known, matching_cost=0)
    one = {"context": 8192, "blocks": 24}
    assert took == pytest.approx(
        4 * scaling.seconds(shape, BASELINE, known, **one)
        + 2 * scaling.seconds(shape, "temperature(alpha=0.9)", known, **one)
    )
    assert math.isnan(breadth.seconds(second, shape, basis(**core), matching_cost=0))
    assert math.isnan(breadth.seconds(first, shape, basis(**{BASELINE: 0.02})))


def test_scores_grow_with_the_square_of_the_length():
    shape = SHAPES["smollm2-135m"]
    known = basis(**{BASELINE: 0.0, "h15()": 0.01})
    assert scaling.seconds(shape, "h15()", known, context=8192, blocks=1) == pytest.approx(0.16)


def test_a_step_says_what_it_is():
    assert str(Step("long", 8192, (1.0,))) == "long at 8,192 tokens, temperatures at 1 J0"
    assert str(Step("core", 2048, (1.0, 10.0), rescue=True)).endswith("1 and 10 J0, with and without rescue")
