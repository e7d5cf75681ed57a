"""The front page's answer: signs are read off the numbers, what is not stored is left out, every number is a link."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from test_cross_model import key

from softmaxlab import answer, models, report
from softmaxlab.conditions import BASELINE
from softmaxlab.findings import Stored, target
from softmaxlab.statistics import bootstrap
from softmaxlab.store import Store

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("per_block", "said"),
    [
        ([0.1, 0.2], "raises the loss by x"),
        ([-0.1, -0.2], "changes the loss by x"),
        ([-0.1, 0.2], "changes the loss by x, not resolved from zero,"),
    ],
)
def test_the_verb_follows_the_interval(per_block, said):
    assert answer.change(bootstrap(np.array(per_block)), "the loss", "x") == said


def stored(folder, costs, backend="reference", dtype="float32", model=models.EMBEDDED):
    for text, cost in {BASELINE: 0.0, **costs}.items():
        rows = pd.DataFrame({"block": range(3), "nll": [3.0 + cost, 3.1 + cost, 3.2 + 1.1 * cost], "predictions": 2047})
        fixed = {"model": model, "corpus": "wikitext103", "backend": backend, "dtype": dtype}
        Store(folder).append_losses(key(text, **fixed), rows, {})


def test_nothing_is_said_of_what_is_not_stored(tmp_path):
    (tmp_path / "results").mkdir()
    assert answer.text(Stored(str(tmp_path / "results")), tmp_path) == "Nothing is stored to answer from."
    stored(tmp_path / "results", {"grid(K=32,R=4)": 0.001})  # its even twin is missing
    assert answer.text(Stored(str(tmp_path / "results")), tmp_path) == "Nothing is stored to answer from."


def test_sentences_carry_the_numbers_of_the_store(tmp_path):
    stored(tmp_path / "results", {"grid(K=32,R=4)": -0.001, "grid(K=32)": 0.02, "h15()": 0.003})
    kernel = {"backend": "fa4(arch=sm_90)", "dtype": "bfloat16"}
    stored(tmp_path / "results", {"h15()": 0.004}, **kernel)
    stored(tmp_path / "results", {"h15()": -0.004}, **kernel, model="other")
    said = answer.text(Stored(str(tmp_path / "results")), tmp_path)
    for cost, verb in ((-0.001, "changes perplexity by"), (0.02, "raises it by")):
        per_block = np.array([cost, cost, 1.1 * cost])
        assert f"{verb} {report.interval(bootstrap(per_block), report.percent)} %" in said
    for cost, verb in (
        (0.003, "raises the loss by"),
        (0.004, "raises it by"),
        (-0.004, "`other` the kernel changes it by"),
    ):
        assert f"{verb} {report.interval(bootstrap(np.array([cost, cost, 1.1 * cost])))} nats" in said
    assert "What does a coarser one buy?" not in said  # nothing was timed


def test_of_the_committed_results_every_number_is_a_link_to_its_section(tmp_path):
    (tmp_path / "results").symlink_to(ROOT / "results")
    (tmp_path / "book").mkdir()
    shutil.copytree(ROOT / "notebooks", tmp_path / "notebooks")
    said = answer.write_page(tmp_path).read_text(encoding="utf-8")
    assert [said.count(question) for question in answer.QUESTIONS] == [1, 1]
    plain = re.sub(r"{ref}`[^`]*`", "", said)
    assert re.findall(r"\d+\.\d+", plain.replace("qwen2.5-coder-1.5b", "")) == [
        f"{answer.findings_kernel.GAIN.value:g}"
    ]
    labels = re.findall(r"{ref}`[^`<]* <([\w-]+)>`", said)
    sections = {target(s, tmp_path) for s in answer.SECTIONS}
    assert len(labels) >= 7 and set(labels) == sections == {s.label for s in answer.SECTIONS}
