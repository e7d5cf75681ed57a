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

from softmaxlab import evaluate, forward, memory, models, runner
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

    monkeypatch.setattr(forward, "evaluate_batch", counting)  # the exact pass that others share
    monkeypatch.setattr(runner, "evaluate_batch", counting)
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


def layer_executions(monkeypatch, conditions, setting) -> int:
    """How many decoder layers run over how many blocks while these conditions are evaluated."""
    ran = []
    load = models.load_model

    def watched(*args, **kwargs):
        loaded = load(*args, **kwargs)
        for layer in forward.decoder_layers(loaded.model):
            layer.mlp.register_forward_hook(lambda _m, args, _out: ran.append(len(args[0])))
        return loaded

    with monkeypatch.context() as patched:
        patched.setattr(models, "load_model", watched)
        evaluate.losses(conditions, **setting)
    return sum(ran)


def test_same_support_over_all_layers_costs_half_and_a_layer_each(setting, tmp_path, monkeypatch):
    """D_W: each condition runs its changed layer and those above, and one exact pass serves them all.

    Over L layers that is (L + 1)/2L of running every condition whole, and the exact pass: the least there is, as
    the layers above a change differ between any two conditions.
    """
    layers = 30
    folder = str(make_tiny_model(tmp_path / "deep", num_hidden_layers=layers))
    setting = setting | {"model": folder, "blocks": 3, "batch": 2, "results": ""}
    texts = [text for pair in same_support(layers) for text in pair]
    together = layer_executions(monkeypatch, ["softmax()", *texts], setting)
    assert together == 3 * (layers + 2 * sum(layers - i for i in range(layers)))
    alone = sum(layer_executions(monkeypatch, [text], setting) for text in ("softmax()", *texts[::15]))
    assert alone == 3 * layers * (1 + len(texts[::15])), "one condition alone runs no exact pass beside its own"
    assert together / (3 * layers * (1 + len(texts))) == pytest.approx((layers + 2) / (2 * layers + 1), abs=1e-12)


def test_the_exact_pass_is_made_once_and_its_losses_are_kept(setting, counted, tmp_path):
    texts = ["mean_threshold()@2", "grid(K=2)@2"]
    evaluate.losses(texts, **setting)
    assert counted.count(("softmax()", 1)) == 4
    stored = evaluate.losses(["softmax()"], **setting)
    assert len(counted) == 12, "the baseline is there"
    alone = evaluate.losses(["softmax()"], **setting | {"results": ""})
    assert stored.nll.tolist() == alone.nll.tolist()


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("tried"), RuntimeError("Default: can't allocate memory")])
def test_a_batch_that_memory_does_not_hold_is_halved_and_the_run_goes_on(setting, tmp_path, monkeypatch, error):
    sizes = []

    def small(model, condition, tokens, **kwargs):
        sizes.append(len(tokens))
        if len(tokens) > 2:
            raise error
        return evaluate_batch(model, condition, tokens, **kwargs)

    monkeypatch.setattr(forward, "evaluate_batch", small)
    monkeypatch.setattr(runner, "evaluate_batch", small)
    frame = evaluate.losses(["softmax()", GRID, "grid(K=2)@1"], **setting | {"blocks": 8, "batch": 8})
    assert sizes[:3] == [8, 4, 2] and set(sizes[3:]) == {2}, "once learnt, it is not tried again"
    assert frame.groupby("condition").block.apply(list).tolist() == [list(range(8))] * 3
    made = Store(tmp_path / "results").provenance()
    assert set(made.batch) == {"2"}
    single = evaluate.losses(["softmax()"], **setting | {"blocks": 8, "batch": 2, "results": ""})
    assert frame[frame.condition == "softmax()"].nll.tolist() == single.nll.tolist()


def test_a_block_that_memory_does_not_hold_is_one_sentence(setting, monkeypatch):
    def full(*_args, **_kwargs):
        raise torch.OutOfMemoryError("tried to allocate\nmore than there is")

    monkeypatch.setattr(runner, "evaluate_batch", full)
    with pytest.raises(LabError, match=r"one block of 64 tokens does not fit .*\(tried to allocate\)") as caught:
        evaluate.losses([GRID], **setting | {"batch": 4})
    assert "\n" not in str(caught.value)


def test_one_text_is_one_condition(setting):
    assert evaluate.losses("softmax()", **setting).condition.unique().tolist() == ["softmax()"]


def test_a_tokenizer_of_another_model_is_named(setting, monkeypatch):
    load = models.load_model

    def shrunk(*arguments, **options):
        loaded = load(*arguments, **options)
        loaded.model.resize_token_embeddings(3)
        return loaded

    monkeypatch.setattr(models, "load_model", shrunk)
    with pytest.raises(LabError, match=r"gives token \d+, but its embedding holds 3"):
        evaluate.losses(["softmax()"], **setting)


def test_another_failure_of_a_pass_is_not_taken_for_one_of_memory(setting, monkeypatch):
    def broken(*_args, **_kwargs):
        raise RuntimeError("something else")

    monkeypatch.setattr(runner, "evaluate_batch", broken)
    with pytest.raises(RuntimeError, match="something else"):
        evaluate.losses([GRID], **setting | {"batch": 4})


def test_a_block_has_the_same_neighbours_whatever_is_stored(setting, monkeypatch):
    """Of batches 0–2 and 3–5 block 3 is there: the second batch runs whole and only its other blocks are kept."""
    whole = evaluate.losses(["softmax()"], **setting | {"blocks": 6, "batch": 3, "results": ""})
    evaluate.losses(["softmax()"], **setting | {"blocks": 4, "batch": 4})
    after = evaluate.losses(["softmax()"], **setting | {"blocks": 6, "batch": 3})
    assert after.nll.tolist()[4:] == whole.nll.tolist()[4:]


@pytest.mark.parametrize(
    ("free", "context", "blocks"),
    [(139, 2048, 8), (139, 16384, 1), (8, 2048, 4), (4, 2048, 1), (0.5, 2048, 1)],
)
def test_batches_are_sized_to_the_memory_of_the_card(tiny_model, monkeypatch, free, context, blocks):
    """The sizes of SmolLM2-135M, on cards that have so many GiB free."""
    loaded = models.load_model(str(tiny_model), device="cpu").model
    sizes = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    for name, value in sizes.items():
        setattr(loaded.config, name, value)
    assert memory.batch_size(loaded, context) == 1, "a CPU takes one block at a time"
    monkeypatch.setattr(models, "devices", lambda _net: [torch.device("cuda", 0), torch.device("cuda", 1)])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda card: (int((free + 9 * card.index) * 2**30), 0))
    assert memory.batch_size(loaded, context) == blocks


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
    assert made["shape"]["num_hidden_layers"] == 3, "for estimates of larger models"


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
        "from softmaxlab import evaluate, runner\n"
        "real = runner.evaluate_batch\n"
        "def slow(*a, **k):\n"
        "    time.sleep(0.3)\n"
        "    return real(*a, **k)\n"
        "runner.evaluate_batch = slow\n"
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
