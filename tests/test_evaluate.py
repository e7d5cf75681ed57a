"""Evaluation: the losses are the model's, nothing is computed twice, a killed run goes on where it was."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import make_tiny_model

from softmaxlab import evaluate, forward, models
from softmaxlab.conditions import Condition, same_support
from softmaxlab.errors import LabError
from softmaxlab.forward import SharedPrefix, block_losses, evaluate_batch
from softmaxlab.store import COLUMNS, Store

GRID = "grid(K=4,R=4)"


@pytest.fixture
def setting(tiny_model, text_file, tmp_path):
    return {
        "model": str(tiny_model),
        "corpus": str(text_file),
        "context": 64,
        "blocks": 4,
        "device": "cpu",
        "results": str(tmp_path / "results"),
        "progress": False,
    }


@pytest.fixture
def counted(monkeypatch):
    """How many blocks were really computed."""
    calls = []

    def counting(model, condition, tokens, **kwargs):
        calls.append((str(condition), len(tokens)))
        return evaluate_batch(model, condition, tokens, **kwargs)

    monkeypatch.setattr(evaluate, "evaluate_batch", counting)
    return calls


def test_losses_are_the_mean_negative_log_likelihood():
    torch.manual_seed(0)
    logits, tokens = torch.randn(3, 50, 17), torch.randint(0, 17, (3, 50))
    got = block_losses(logits, tokens)
    for b in range(3):
        logp = torch.log_softmax(logits[b].double(), -1)
        want = -np.mean([logp[t, tokens[b, t + 1]].item() for t in range(49)])
        assert got[b].item() == pytest.approx(want, abs=1e-6)


def test_exact_map_equals_sdpa_per_block(setting):
    frame = evaluate.losses(["softmax()"], **setting)
    loaded = models.load_model(setting["model"], device="cpu")
    stream = evaluate.corpora.blocks(
        evaluate.corpora.load_text(setting["corpus"]), loaded.tokenizer, 64, limit=200_000, bos="stream"
    )
    with torch.inference_mode():
        for block, nll in zip(frame.block, frame.nll, strict=True):
            ids = torch.as_tensor(stream.tokens[block : block + 1])
            assert nll == pytest.approx(block_losses(loaded.model(ids).logits, ids).item(), abs=1e-6)


@pytest.mark.model
def test_exact_map_equals_sdpa_on_the_embedded_model():
    loaded = models.load_model("smollm2-135m", device="cpu")
    ids = loaded.tokenizer("The exponential in attention. " * 60, return_tensors="pt").input_ids[:, :256]
    with torch.inference_mode():
        own = block_losses(loaded.model(ids, use_cache=False).logits, ids)
    assert evaluate_batch(loaded.model, Condition.parse("softmax()"), ids).item() == pytest.approx(own.item(), abs=1e-6)


def test_the_frame_is_tidy_and_what_is_stored_is_not_computed_again(setting, counted, monkeypatch):
    texts = ["softmax()", GRID, "mean_threshold()@1", "mean_threshold(weights=uniform)@2"]
    first = evaluate.losses(texts, **setting)
    assert list(first.columns) == list(COLUMNS)
    assert len(first) == 16
    assert sum(n for _, n in counted) == 16
    monkeypatch.setattr(models, "load_model", lambda *_a, **_k: pytest.fail("the model was loaded"))
    again = evaluate.losses(texts, **setting)
    pd.testing.assert_frame_equal(first, again)
    with pytest.raises(LabError, match="unknown device 'tpu'"):
        evaluate.losses(texts, **setting | {"device": "tpu"})
    fewer = evaluate.losses([GRID], **setting | {"blocks": 2})
    assert fewer.nll.tolist() == first[first.condition == GRID].nll.tolist()[:2]


def test_more_blocks_compute_only_the_new_ones(setting, counted):
    evaluate.losses([GRID], **setting | {"blocks": 2})
    counted.clear()
    frame = evaluate.losses(["softmax()", GRID], **setting)
    assert sorted(counted) == sorted([("softmax()", 1)] * 4 + [(GRID, 1)] * 2)
    assert frame.block.tolist() == [0, 1, 2, 3] * 2


def test_zero_blocks_means_all_and_is_remembered(setting, counted):
    everything = evaluate.losses(["softmax()"], **setting | {"blocks": 0})
    assert len(everything) > 4
    counted.clear()
    assert len(evaluate.losses(["softmax()"], **setting | {"blocks": 0})) == len(everything)
    assert not counted


def test_no_results_folder_means_nothing_is_written(setting, tmp_path):
    frame = evaluate.losses(["softmax()", GRID], **setting | {"results": ""})
    assert len(frame) == 8
    assert not (tmp_path / "results").exists()


def test_layers_below_a_change_are_shared_and_change_no_number(setting):
    pairs = same_support(3)
    texts = [t for pair in pairs for t in pair]
    shared = evaluate.losses(texts, **setting).set_index(["condition", "block"]).nll
    loaded = models.load_model(setting["model"], device="cpu")
    stream = evaluate.corpora.blocks(
        evaluate.corpora.load_text(setting["corpus"]), loaded.tokenizer, 64, limit=200_000, bos="stream"
    )
    for text in texts:
        alone = evaluate_batch(loaded.model, Condition.parse(text), torch.as_tensor(stream.tokens[:1]))
        assert shared[text, 0] == alone.item()


def test_a_prefix_runs_only_the_layers_above(tiny_model):
    model = models.load_model(str(tiny_model), device="cpu").model
    ids = torch.arange(20)[None]
    prefix = SharedPrefix(model, ids, "reference")
    ran = []
    layers = forward.decoder_layers(model)
    hooks = [m.mlp.register_forward_hook(lambda *_a, i=i: ran.append(i)) for i, m in enumerate(layers)]
    evaluate_batch(model, Condition.parse("grid(K=2)@2"), ids, prefix=prefix)
    assert ran == [2]
    ran.clear()
    evaluate_batch(model, Condition.parse("grid(K=2)@2"), ids)
    assert ran == [0, 1, 2], "the model is whole again"
    for hook in hooks:
        hook.remove()


def test_batches_give_the_blocks_of_single_runs(setting):
    single = evaluate.losses(["softmax()"], **setting | {"results": ""})
    batched = evaluate.losses(["softmax()"], **setting | {"results": "", "batch": 3})
    np.testing.assert_allclose(batched.nll, single.nll, atol=1e-6)


def test_what_a_block_costs_is_recorded(setting, tmp_path):
    evaluate.losses(["softmax()", GRID], **setting)
    ((key, frame, made),) = Store(tmp_path / "results").tables("cost")
    assert key["context"] == 64
    assert set(frame.condition) == {"softmax()", GRID}
    assert (frame.seconds_per_block > 0).all()
    assert made["torch"] == torch.__version__


def test_nan_logits_name_the_layer_and_the_condition_and_store_nothing(setting, tmp_path):
    folder = make_tiny_model(tmp_path / "nan")
    loaded = models.load_model(str(folder), device="cpu").model
    loaded.model.layers[1].self_attn.q_proj.weight.data.fill_(float("nan"))
    loaded.save_pretrained(folder)
    with pytest.raises(LabError, match=r"topk\(f=0\.5\).*not finite.*layer 1"):
        evaluate.losses(["topk(f=0.5)"], **setting | {"model": str(folder)})
    assert Store(tmp_path / "results").frame().empty


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"context": 512}, "at most 256 positions"),
        ({"context": 1}, "context is 1"),
        ({"blocks": -1}, "blocks is -1"),
        ({"blocks": 10_000}, "complete blocks of 64"),
        ({"backend": "magic"}, "unknown backend 'magic'"),
        ({"device": "tpu"}, "unknown device 'tpu'"),
        ({"dtype": "int8"}, "unknown dtype 'int8'"),
        ({"model": "nope"}, "unknown model"),
        ({"corpus": "no-such.txt"}, "no-such.txt"),
        ({"bos": "always"}, "always"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(setting, tmp_path, change, says):
    with pytest.raises(LabError, match=says) as caught:
        evaluate.losses(["softmax()"], **setting | change)
    assert "\n" not in str(caught.value)
    assert Store(tmp_path / "results").frame().empty


def test_no_condition_and_an_unwritable_folder_are_refused_before_anything_is_loaded(setting, tmp_path, monkeypatch):
    monkeypatch.setattr(models, "load_model", lambda *_a, **_k: pytest.fail("the model was loaded"))
    with pytest.raises(LabError, match="no condition"):
        evaluate.losses([], **setting)
    (tmp_path / "file").write_text("")
    with pytest.raises(LabError, match="file"):
        evaluate.losses(["softmax()"], **setting | {"results": str(tmp_path / "file" / "below")})


def test_results_are_found_from_a_folder_below_the_project(tmp_path, monkeypatch):
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "_toc.yml").write_text("")
    monkeypatch.chdir(tmp_path / "notebooks")
    assert evaluate.find_results("results") == tmp_path / "results"
    assert evaluate.find_results(str(tmp_path / "x")) == tmp_path / "x"


def test_a_run_that_is_killed_goes_on_at_the_block_where_it_was(setting, tmp_path, counted):
    """kill -9 in the middle of the blocks; the next run keeps what is there and computes the rest."""
    code = (
        "import sys, time, json\n"
        "from softmaxlab import evaluate\n"
        "real = evaluate.evaluate_batch\n"
        "def slow(*a, **k):\n"
        "    time.sleep(0.3)\n"
        "    return real(*a, **k)\n"
        "evaluate.evaluate_batch = slow\n"
        f"evaluate.losses(['softmax()', {GRID!r}], **json.loads(sys.argv[1]))\n"
    )
    import json

    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", code, json.dumps(setting)], env=environment)
    store, deadline = Store(tmp_path / "results"), time.time() + 120
    while time.time() < deadline and process.poll() is None:
        done = len(store.frame()) if (tmp_path / "results").exists() else 0
        if done >= 2:
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = store.frame()
    assert 2 <= len(kept) < 8
    frame = evaluate.losses(["softmax()", GRID], **setting)
    assert sum(n for _, n in counted) == 8 - len(kept)
    both = kept.merge(frame, on=["condition", "block"])
    assert len(both) == len(kept)
    assert both.nll_x.tolist() == both.nll_y.tolist()
