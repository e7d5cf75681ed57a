"""Estimates for large models: the sizes are the published ones, and nothing unmeasured is called measured."""

import json
import math
import shutil
from pathlib import Path

import pandas as pd
import pytest

from softmaxlab import lookup, memory, models, paper, scaling
from softmaxlab.scaling import SHAPES, Basis, Shape
from softmaxlab.store import Store

ROOT = Path(__file__).resolve().parent.parent
SMALL = Shape(2, 8, 16, 2, 1, 10, 4)


@pytest.mark.parametrize(("name", "printed"), scaling.LARGE.items())
def test_the_shapes_of_the_large_models_have_the_published_number_of_parameters(name, printed):
    published = paper.table("table3_cross_model").set_index("model").loc[printed, "params_b"].iloc[0]
    assert SHAPES[name].parameters / 1e9 == pytest.approx(float(published), abs=0.01)


def test_parameters_and_operations_are_those_of_a_loaded_model(tiny_model):
    model = models.load_model(str(tiny_model), device="cpu").model
    shape = scaling.shape_of(model)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    assert shape.parameters == sum(p.numel() for p in matrices)
    embedding = model.get_input_embeddings().weight.numel()
    assert shape.per_token == shape.parameters - embedding
    width = sum(p.shape[0] for name, p in model.named_parameters() if "q_proj" in name)
    # Two multiply-adds, scores and values, for each of the pairs that a causal mask leaves: half of context².
    assert scaling.flops_per_block(shape, 64) == 2 * 64 * shape.per_token + 2 * 2 * width * 64**2 / 2
    model.config.num_local_experts = 8
    assert scaling.shape_of(model) is None


def test_an_estimate_scales_matrices_by_operations_and_operators_by_scores():
    basis = Basis("small", "float32", "reference", "GPU", SMALL, {"softmax()": 0.5, "grid(K=32,R=4)": 0.7})
    assert scaling.seconds(SMALL, "grid(K=32,R=4)", basis, blocks=10) == pytest.approx(7.0)
    deep = Shape(4, 8, 16, 2, 1, 10, 4)
    ratio = scaling.flops_per_block(deep, 2048) / scaling.flops_per_block(SMALL, 2048)
    assert scaling.seconds(deep, "softmax()", basis, blocks=1) == pytest.approx(0.5 * ratio)
    assert scaling.seconds(deep, "grid(K=32,R=4)", basis, blocks=1) == pytest.approx(0.5 * ratio + 0.2 * 2)
    assert math.isnan(scaling.seconds(deep, "h15()", basis))


def test_cards_hold_the_weights_and_a_pass():
    for name in scaling.LARGE:
        weights, one_pass = scaling.gigabytes(SHAPES[name])
        assert weights == pytest.approx(2 * SHAPES[name].parameters / 2**30)
        assert one_pass > memory.CONSTANT / 2**30
        for card in scaling.CARDS.values():
            n = scaling.cards(SHAPES[name], card)
            assert n * card > weights + n * one_pass
            assert (n - 1) * (card - one_pass - weights / 80) < weights


def test_estimates_start_from_the_largest_model_on_a_gpu(tmp_path):
    store = Store(tmp_path)

    def cost(model, device, conditions, **made):
        key = {"model": model, "context": 2048, "dtype": "float32", "backend": "reference", "device": device}
        frame = pd.DataFrame({"condition": conditions, "seconds_per_block": 0.1, "batches": 1})
        store.put_table("cost", key | {"batch": 8}, frame, made)

    assert scaling.bases(store) == []
    cost("smollm2-135m", "GPU", ["softmax()", "h15()", "h15()@3"])
    cost("unknown", "GPU", ["softmax()"])
    cost("smollm2-135m", "x86_64 CPU", ["softmax()"])
    cost("larger", "GPU", ["softmax()"], shape=SHAPES["qwen2.5-72b"].__dict__)
    cost("no-baseline", "GPU", ["h15()"], shape=SMALL.__dict__)
    found = scaling.bases(store)
    assert [basis.model for basis in found] == ["larger", "smollm2-135m"]
    assert set(found[1].seconds) == {"softmax()", "h15()"}


def test_the_page_says_what_is_missing_and_then_what_was_measured(tmp_path):
    assert scaling.write_page(tmp_path) is None
    (tmp_path / "book").mkdir()
    shutil.copy(ROOT / "book" / "many_gpus-template.md", tmp_path / "book")
    text = scaling.write_page(tmp_path).read_text()
    assert "Two GPUs were not measured yet" in text and "nothing to estimate from" in text
    for printed in scaling.LARGE.values():
        assert f"| {printed} |" in text
    run = {"processes": 1, "seconds": 8.0, "with_start_and_load_s": 20.0, "passes_of_each": [65]}
    report = {
        "runs": [run, run | {"processes": 2, "seconds": 4.1, "passes_of_each": [33, 32]}],
        "largest_loss_difference": {"softmax()": 0.0},
        "processes": 2,
        "speed_up": 1.951,
        "device": "GPU",
        "model": "m",
        "blocks": 97,
        "context": 2048,
        "dtype": "float32",
        "backend": "reference",
        "conditions": ["softmax()"],
    }
    (tmp_path / "results" / "bench").mkdir(parents=True)
    (tmp_path / "results" / "bench" / "two_gpus.json").write_text(json.dumps(report))
    key = {"model": "smollm2-135m", "context": 2048, "dtype": "float32", "backend": "reference", "device": "GPU"}
    frame = pd.DataFrame({"condition": ["softmax()"], "seconds_per_block": 0.1, "batches": 1})
    Store(tmp_path / "results").put_table("cost", key | {"batch": 8}, frame, {})
    text = scaling.write_page(tmp_path).read_text()
    assert "1.95 times as fast" in text and "to the last digit" in text and "[33, 32]" in text
    assert "Estimated from smollm2-135m" in text and "not measured there: `grid(K=32,R=4)`" in text


@pytest.mark.parametrize(
    ("model", "relative", "dim"),
    [
        ("qwen2.5-coder-1.5b-instruct-q4_k", "Qwen2.5-1.5B", 128),
        ("Qwen/Qwen2.5-1.5B@main", "Qwen2.5-1.5B", 128),
        ("llama-3.1-8b-instruct", "Llama-3.1-8B", 128),
        ("qwen2.5-coder-0.5b-instruct-q4_k", None, 64),
        ("smollm2-135m", None, 64),
        ("some-model-1.5b", None, None),
    ],
)
def test_a_model_is_known_by_family_and_size(model, relative, dim):
    assert lookup.relative(model, ["Qwen2.5-72B", "Qwen2.5-1.5B", "Llama-3.1-8B"]) == relative
    assert scaling.head_dim(model) == dim
