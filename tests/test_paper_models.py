"""The page on the paper's ten models: sizes that agree with the published ones, lengths, commands and estimates."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pandas as pd
import pytest
from test_cross_model import put

from softmaxlab import breadth, conditions, paper, paper_models
from softmaxlab.conditions import BASELINE
from softmaxlab.models import PAPER_MODELS
from softmaxlab.scaling import SHAPES
from softmaxlab.store import Store

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("name", PAPER_MODELS)
def test_shapes_have_the_published_number_of_parameters(name):
    printed = paper.table("table3_cross_model")
    size = float(printed.loc[printed["model"] == paper_models.printed_name(name), "params_b"].iloc[0])
    # Biases and norms are not counted; the paper rounds to ten million.
    assert SHAPES[name].parameters / 1e9 == pytest.approx(size, rel=0.005, abs=0.006)


def test_lengths_are_those_of_the_paper():
    assert paper_models.contexts("qwen2.5-0.5b") == [2048]
    assert paper_models.contexts("llama-3.2-3b") == [2048, 8192]
    assert paper_models.contexts("llama-3.1-70b") == [2048, 8192, 16384]


def test_every_model_is_in_one_command():
    lines = paper_models._commands().splitlines()
    words = [word for line in lines for word in line.split()]
    assert all(words.count(name) == 1 for name in PAPER_MODELS)
    assert [line for line in lines if "device-map" in line and "qwen2.5-72b" in line and "bfloat16" in line]
    assert all("device-map" not in line for line in lines if "gemma-2-2b" in line)


def page(folder):
    (folder / "book").mkdir(exist_ok=True)
    shutil.copy(ROOT / "book" / "paper_models-template.md", folder / "book")
    return paper_models.write_page(folder).read_text(encoding="utf-8")


def test_the_page_without_measurements_says_so(tmp_path):
    assert paper_models.write_page(tmp_path) is None
    text = page(tmp_path)
    assert "nothing to estimate from" in text and "0 of the ten" in text
    assert math.isnan(paper_models.solving_cost(tmp_path))


def test_the_page_estimates_from_what_was_measured(tmp_path):
    key = {"model": "smollm2-135m", "context": 2048, "dtype": "float32", "backend": "reference", "device": "GPU"}
    texts = [*conditions.core(), "temperature(alpha=0.9)", "rescue(of=temperature(alpha=0.9))"]
    frame = pd.DataFrame({"condition": texts, "seconds_per_block": 0.1, "batches": 1})
    Store(tmp_path / "results").put_table("cost", key | {"batch": 8}, frame, {})
    (tmp_path / "results" / "bench").mkdir()
    (tmp_path / "results" / "bench" / "trajectory_cost.json").write_text('{"forwards": {"matching_16": 10}}')
    assert paper_models.solving_cost(tmp_path) == 30
    put(tmp_path / "results", BASELINE, model="gemma-2-2b", corpus="wikitext103")
    text = page(tmp_path)
    assert "Estimated from smollm2-135m in float32 on one GPU" in text
    assert "1 of the ten are in this book's store: `gemma-2-2b`" in text
    (line,) = [
        line
        for line in text.splitlines()
        if line.startswith("| `llama-3.2-3b` |") and "estimated" not in line and "meta" not in line
    ]
    assert line.count("—") == 1, "the paper has no 16K of this model"


def test_estimates_follow_the_plan():
    from softmaxlab.scaling import Basis

    texts = [*conditions.core(), "temperature(alpha=0.9)", "rescue(of=temperature(alpha=0.9))"]
    basis = Basis("m", "float32", "reference", "GPU", SHAPES["smollm2-135m"], dict.fromkeys(texts, 0.02))
    took = paper_models.estimates("qwen2.5-1.5b", basis, 30.0)
    assert list(took) == breadth.plan([2048, 8192, 16384]) and all(s > 0 for s in took.values())
    larger = paper_models.estimates("qwen2.5-72b", basis, 30.0)
    assert sum(larger.values()) > 20 * sum(took.values())
