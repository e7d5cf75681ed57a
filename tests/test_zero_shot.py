"""Zero-shot tasks: the harness's own numbers without an operator, no leak from a batch, nothing served wrongly."""

import json
import re
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import TEXT, make_tiny_model

pytest.importorskip("lm_eval")

import softmaxlab
from softmaxlab import attention, conditions, harness, harness_tasks, models, paired, zero_shot, zero_shot_records
from softmaxlab.attention import inject
from softmaxlab.backends import reference
from softmaxlab.conditions import Condition
from softmaxlab.errors import LabError
from softmaxlab.padding_gate import check, mixed
from softmaxlab.zero_shot import Setting

WORDS = TEXT.lower().split()[:18]
N = 9


def prose(rng, low, high):
    return " ".join(rng.choice(WORDS, rng.integers(low, high)))


def make_documents(folder):
    """Nine documents of each task, of mixed lengths."""
    rng = np.random.default_rng(0)

    def choices(query, n):
        return {"query": query, "choices": [prose(rng, 1, 9) for _ in range(n)], "gold": int(rng.integers(n))}

    kinds = {
        "lambada_openai": lambda: {"context": prose(rng, 3, 30), "continuation": str(rng.choice(WORDS))},
        "hellaswag": lambda: choices(f"Attention: {prose(rng, 3, 30)}", 4),
        "arc_easy": lambda: choices(f"Question: {prose(rng, 3, 20)}?", 4),
        "arc_challenge": lambda: choices(f"Question: {prose(rng, 3, 20)}?", 3),
        "piqa": lambda: choices(f"Question: {prose(rng, 3, 20)}\n", 2),
        "winogrande": lambda: {
            "context_options": [f"{prose(rng, 2, 9)} {name}" for name in ("loss", "cost")],
            "continuation": prose(rng, 2, 9),
            "gold": int(rng.integers(2)),
        },
    }
    for name, kind in kinds.items():
        lines = [json.dumps(kind()) for _ in range(N)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_documents(tmp_path_factory.mktemp("documents"))


@pytest.fixture(scope="module")
def loaded(tiny_model):
    return models.load_model(str(tiny_model), device="cpu")


@pytest.fixture
def run_lab(tiny_model, folder, tmp_path):
    """`zero_shot.evaluate` on the tiny model and documents."""

    def call(texts, setting=None, **changes):
        setting = setting or Setting(model=str(tiny_model), limit=5)
        options = {"data": str(folder), "device": "cpu", "results": str(tmp_path / "results"), "progress": False}
        return zero_shot.evaluate(texts, setting, **options | changes)

    return call


def records(frame):
    """A frame that can be compared: lists in the place of arrays."""
    return frame.assign(loglikelihoods=[[float(x) for x in lls] for lls in frame.loglikelihoods])


# The harness's own numbers


@pytest.fixture(scope="module")
def theirs(folder, loaded):
    """The harness's own evaluation of the same model, with no hook in it."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    assert loaded.model.config._attn_implementation == "sdpa"
    with harness_tasks.quiet():
        lm = HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=8)
        tasks = {
            t: harness_tasks.LocalTask(harness_tasks.definition(t), harness_tasks.read_documents(t, folder))
            for t in zero_shot.TASKS
        }
        return lm_eval.evaluate(lm, {"tasks": tasks}, bootstrap_iters=0, log_samples=True)


@pytest.mark.parametrize("padding", harness.PADDING)
def test_without_an_operator_every_document_is_as_the_harness_has_it(padding, tiny_model, theirs, run_lab):
    ours = run_lab(["softmax()"], Setting(model=str(tiny_model), padding=padding), results="")
    for task in zero_shot.TASKS:
        mine = ours[ours.task == task]
        samples = sorted(theirs["samples"][task], key=lambda sample: sample["doc_id"])
        assert mine.document.tolist() == [sample["doc_id"] for sample in samples] == list(range(N))
        for row, sample in zip(mine.itertuples(), samples, strict=True):
            lls, greedy = zip(*sample["filtered_resps"], strict=True)
            assert np.allclose(row.loglikelihoods, lls, atol=2e-4)
            wanted = int(np.argmax(lls)) if len(lls) > 1 else -1 + greedy[0]
            assert row.prediction == wanted
            assert row.acc == sample["acc"]
            assert row.acc_norm == sample.get("acc_norm", row.acc_norm)
        assert mine.acc.mean() == pytest.approx(theirs["results"][task]["acc,none"], abs=1e-12)
    perplexity = theirs["results"]["lambada_openai"]["perplexity,none"]
    assert paired.perplexity(ours, "softmax()") == pytest.approx(perplexity, rel=1e-4)


@pytest.mark.model
def test_the_embedded_model_answers_as_the_harness_has_it(folder, run_lab):
    """As above on a real model, in every prediction and every metric."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    names = ["lambada_openai", "arc_easy", "winogrande"]
    ours = run_lab(["softmax()"], Setting(limit=4), tasks=names, results="")
    work = models.load_model("smollm2-135m", device="cpu")
    with harness_tasks.quiet():
        lm = HFLM(pretrained=work.model, tokenizer=work.tokenizer, batch_size=8)
        tasks = {name: harness_tasks.load_task(name, data=str(folder), limit=4).task for name in names}
        theirs = lm_eval.evaluate(lm, {"tasks": tasks}, limit=4, bootstrap_iters=0, log_samples=True)
    for name in names:
        samples = sorted(theirs["samples"][name], key=lambda sample: sample["doc_id"])
        for row, sample in zip(ours[ours.task == name].itertuples(), samples, strict=True):
            lls = [ll for ll, _ in sample["filtered_resps"]]
            assert np.allclose(row.loglikelihoods, lls, atol=2e-4)
            assert row.acc == sample["acc"]
            assert len(lls) == 1 or row.prediction == np.argmax(lls)


BUILT_IN = {
    "lambada_openai": (
        "lambada/lambada_openai.yaml",
        {"text": "He opened the door and saw Ann"},
        {"context": "He opened the door and saw", "continuation": "Ann"},
    ),
    "arc_easy": (
        "arc/arc_easy.yaml",
        {"question": "Why?", "choices": {"text": ["one", "two"], "label": ["A", "B"]}, "answerKey": "B"},
        {"query": "Question: Why?", "choices": ["one", "two"], "gold": 1},
    ),
    "arc_challenge": (
        "arc/arc_easy.yaml",  # which arc_challenge.yaml includes
        {"question": "Why?", "choices": {"text": ["one", "two"], "label": ["1", "2"]}, "answerKey": "1"},
        {"query": "Question: Why?", "choices": ["one", "two"], "gold": 0},
    ),
    "piqa": (
        "piqa/piqa.yaml",
        {"goal": "How?", "sol1": "so", "sol2": "or so", "label": 1},
        {"query": "Question: How?\n", "choices": ["so", "or so"], "gold": 1},
    ),
    "winogrande": (
        "winogrande/default.yaml",
        {"sentence": "Ann met Eve but _ left early.", "option1": "Ann", "option2": "Eve", "answer": "2"},
        {"context_options": ["Ann met Eve but Ann", "Ann met Eve but Eve"], "continuation": "left early.", "gold": 1},
    ),
    "hellaswag": (
        "hellaswag/hellaswag.yaml",
        {
            "activity_label": "Baking",
            "ctx_a": "A man stands.",
            "ctx_b": "he",
            "endings": ["sits [x] down.", "[title] runs."],
            "label": "1",
        },
        # The second keeps its space: the harness strips before it takes brackets away.
        {"query": "Baking: A man stands. He", "choices": ["sits down.", " runs."], "gold": 1},
    ),
}


@pytest.mark.parametrize("name", zero_shot.TASKS)
def test_requests_are_those_of_the_harnesss_own_task(name):
    """Its definition over its own columns, ours over the local ones: the same strings, the same gold."""
    import lm_eval.tasks
    from lm_eval.tasks._yaml_loader import load_yaml

    file, theirs, ours = BUILT_IN[name]
    config = load_yaml(Path(lm_eval.tasks.__file__).parent / file)
    config = {key: value for key, value in config.items() if key not in ("tag", "training_split", "validation_split")}
    with harness_tasks.quiet():
        built_in = harness_tasks.LocalTask(config | {"test_split": "test"}, [theirs])
        a = harness_tasks.LoadedTask(name, built_in, 0)
        b = harness_tasks.LoadedTask(name, harness_tasks.LocalTask(harness_tasks.definition(name), [ours]), 0)
    assert [r.args for r in a.documents[0].requests] == [r.args for r in b.documents[0].requests]
    assert a.documents[0].gold == b.documents[0].gold
    assert a.fingerprint == b.fingerprint


def test_texts_tokenised_together_are_those_that_the_harness_tokenises_one_by_one(folder, loaded):
    lm, alone = (harness.FrozenLM(loaded.model, loaded.tokenizer, batch=8, padding="right") for _ in range(2))
    tasks = [harness_tasks.load_task(name, data=str(folder)) for name in zero_shot.TASKS]
    requests = [r for task in tasks for d in task.documents for r in d.requests]
    assert lm.tokens(requests) == [alone._encode_pair(*request.args) for request in requests]
    assert lm._encoded and not alone._encoded
    begun = [("<s>the exponential ", "in attention"), ("the loss  ", " costs")]
    spaced = [type(requests[0])("loglikelihood", {}, pair, 0) for pair in begun]
    assert lm.tokens(spaced) == [alone._encode_pair(*pair) for pair in begun]


def test_the_fingerprint_is_of_what_is_asked(folder, tmp_path):
    task = harness_tasks.load_task("piqa", data=str(folder))
    assert harness_tasks.load_task("piqa", data=str(folder)).fingerprint == task.fingerprint
    lines = (folder / "piqa.jsonl").read_text(encoding="utf-8").splitlines()
    last = json.loads(lines[-1])
    for change in ({"gold": 1 - last["gold"]}, {"choices": [*last["choices"][:1], "other"]}):
        (tmp_path / "piqa.jsonl").write_text("\n".join([*lines[:-1], json.dumps(last | change)]), encoding="utf-8")
        assert harness_tasks.load_task("piqa", data=str(tmp_path)).fingerprint != task.fingerprint
    short = harness_tasks.load_task("piqa", data=str(folder), limit=4)
    assert len(short.documents) == 4
    assert short.fingerprint != task.fingerprint


# No leak from a batch


@pytest.mark.parametrize("padding", harness.PADDING)
@pytest.mark.parametrize("text", [*conditions.zero_shot(), "topk(f=0.25)", "pot(m=1)"])
def test_in_float64_a_batch_is_the_same_as_alone(text, padding, folder, tiny_model):
    """Where no rounding is left to be amplified, a request does not know what it was batched with."""
    work = models.load_model(str(tiny_model), device="cpu")
    lm = harness.FrozenLM(work.model.double(), work.tokenizer, batch=8, padding=padding)
    task = harness_tasks.load_task("hellaswag", data=str(folder))
    pairs = mixed(lm.tokens([r for d in task.documents for r in d.requests]))
    assert len({len(context) + len(continuation) for context, continuation in pairs}) >= 6
    with inject(work.model, Condition.parse(text), backend="reference-float64"):
        together = lm.score(pairs)
        for pair, (value, greedy) in zip(pairs, together, strict=True):
            assert lm.score([pair])[0] == (pytest.approx(value, abs=1e-5), greedy)
        assert [value for value, _ in lm.score(pairs, fill=7)] == [value for value, _ in together]


def blind(*args, mask=None, **options):
    """A backend that the mask does not reach."""
    return reference.attend(*args, mask=None, **options)


def social(query, *args, **options):
    """A backend in which a row depends on how many it is batched with."""
    return reference.attend(query * (1 + 0.05 * len(query)), *args, **options)


@pytest.mark.parametrize(
    ("backend", "padding", "says"),
    [
        ("reference", "right", None),
        ("reference", "left", None),
        (blind, "right", None),  # causal rows cannot see what follows them
        (blind, "left", "depend on the padding token"),
        (social, "right", "rows depend on what they are batched with"),
    ],
)
@pytest.mark.parametrize("text", ["softmax()", "mean_threshold()"])
def test_the_gate_finds_a_mask_that_does_not_arrive(text, backend, padding, says, folder, loaded):
    lm = harness.FrozenLM(loaded.model, loaded.tokenizer, batch=8, padding=padding)
    task = harness_tasks.load_task("hellaswag", data=str(folder))
    pairs = lm.tokens([r for d in task.documents for r in d.requests])
    expected = nullcontext() if says is None else pytest.raises(LabError, match=says)
    with inject(loaded.model, Condition.parse(text), backend=backend), expected:
        gate = check(lm, pairs, condition=text, dtype="float32")
        assert gate.shortest < gate.longest
        assert gate.padding == 0


def test_a_run_stops_at_the_gate(run_lab, tiny_model, monkeypatch):
    """A mask function that drops the mask, as a hook without one would have it."""
    monkeypatch.setattr(attention, "mask_function", lambda *args, **kwargs: None)
    with pytest.raises(LabError, match="with left padding, log-likelihoods depend on the padding token"):
        run_lab(["mean_threshold()"], Setting(model=str(tiny_model), padding="left"))


# Kept and read back


@pytest.fixture
def asked(monkeypatch):
    """How many requests the model answered, beside the gate's."""
    counts = []
    before = harness.FrozenLM._loglikelihood_tokens

    def counting(self, requests, *args, **options):
        counts.append(len(requests))
        return before(self, requests, *args, **options)

    monkeypatch.setattr(harness.FrozenLM, "_loglikelihood_tokens", counting)
    return counts


def test_what_is_stored_is_read_and_no_model_is_loaded(run_lab, asked, monkeypatch, tiny_model, tmp_path):
    texts = ["softmax()", "grid(K=4)"]
    first = run_lab(texts)
    assert len(asked) == 12
    assert first.groupby(["condition", "task"]).size().tolist() == [5] * 12
    monkeypatch.setattr(models, "load_model", lambda *_, **__: pytest.fail("a model was loaded"))
    again = run_lab(texts)
    pd.testing.assert_frame_equal(records(first), records(again))
    read = zero_shot.stored(Setting(model=str(tiny_model), limit=5).names(), results=str(tmp_path / "results"))
    assert read.columns.tolist() == list(zero_shot_records.COLUMNS)
    pd.testing.assert_frame_equal(
        records(read).sort_values(["condition", "task", "document"], ignore_index=True),
        records(first).sort_values(["condition", "task", "document"], ignore_index=True),
    )


def test_no_other_model_operator_or_setting_is_served(run_lab, asked, tiny_model, tmp_path):
    """The same names and the same requests, and each time the model is asked."""
    options = {"tasks": ["hellaswag"]}
    base = Setting(model=str(tiny_model), limit=5)
    softmax = run_lab(["softmax()"], base, **options)
    grid = run_lab(["grid(K=4)"], base, **options)
    assert len(asked) == 2
    ours, theirs = records(softmax).loglikelihoods, records(grid).loglikelihoods
    assert all(a != b for a, b in zip(ours, theirs, strict=True))
    other = tmp_path / "other" / tiny_model.name  # the same name, other weights
    make_tiny_model(other, seed=1)
    changed = [
        Setting(**vars(base) | {"model": str(other)}),
        Setting(**vars(base) | {"backend": "reference-float64"}),
        Setting(**vars(base) | {"batch": 4}),
        Setting(**vars(base) | {"padding": "left"}),
        Setting(**vars(base) | {"limit": 4}),
    ]
    for number, setting in enumerate(changed, start=3):
        run_lab(["softmax()"], setting, **options)
        assert len(asked) == number
    run_lab(["softmax()@1"], base, **options)  # the same numbers, another condition
    assert len(asked) == 8
    run_lab(["softmax()", "grid(K=4)"], base, **options)
    assert len(asked) == 8
    with pytest.raises(LabError, match="differ in model_id"):
        zero_shot.stored(base.names(), results=str(tmp_path / "results"))


def test_a_killed_run_goes_on_at_the_task_that_is_missing(run_lab, asked, monkeypatch, tmp_path):
    class Stop(Exception):
        pass

    before = zero_shot._Run.records

    def failing(self, text, name):
        if name == "arc_easy":
            raise Stop
        return before(self, text, name)

    monkeypatch.setattr(zero_shot._Run, "records", failing)
    with pytest.raises(Stop):
        run_lab(["softmax()"])
    assert len(list((tmp_path / "results" / "zero_shot").glob("*.parquet"))) == 2
    monkeypatch.setattr(zero_shot._Run, "records", before)
    assert len(run_lab(["softmax()"])) == 30
    assert len(asked) == 6
    assert not list((tmp_path / "results").rglob("*.tmp"))


def test_a_result_says_how_it_was_made(run_lab, tmp_path):
    from softmaxlab.store import Store

    run_lab(["grid(K=4)"], tasks=["piqa"])
    ((key, _, made),) = Store(tmp_path / "results").tables("zero_shot")
    assert {"model_id", "condition_json", "requests", "lm_eval", "batch", "padding", "dtype", "backend"} <= set(key)
    assert made["gate"]["padding"] == 0
    assert made["gate_softmax"]["largest"] < 1e-4
    assert made["begins_with_bos"] == 0
    assert {"device", "torch", "transformers", "date"} <= set(made)
    (row,) = zero_shot.made({"condition": "grid(K=4)"}, results=str(tmp_path / "results")).itertuples()
    assert (row.task, row.source, row.documents, row.gate_padding) == ("piqa", "local files", 5, 0)
    (row,) = zero_shot.settings(str(tmp_path / "results")).itertuples()
    assert (row.dtype, row.batch, row.limit, row.padding) == ("float32", 8, 5, "right")


def test_stored_results_are_read_without_the_harness(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.api.task", None)
    for name in ("harness", "harness_tasks"):
        monkeypatch.delitem(sys.modules, f"softmaxlab.{name}")
        monkeypatch.delattr(softmaxlab, name)
    assert zero_shot.stored({}, results=str(tmp_path)).empty
    assert zero_shot.made({}, results=str(tmp_path)).empty
    assert zero_shot.settings(str(tmp_path)).empty
    with pytest.raises(LabError, match=r"need lm-evaluation-harness .*pip install 'softmaxlab\[zero-shot\]'"):
        zero_shot.evaluate(["softmax()"], results="")


# In pairs


def answers(condition, right, task="winogrande", **more):
    rows = {"model": "m", "dtype": "float32", "backend": "reference", "padding": "right", "batch": 8, "limit": 0}
    rows |= {"condition": condition, "task": task, "document": range(len(right)), "gold": 0, "acc_norm": np.nan}
    frame = pd.DataFrame(rows | {"acc": np.array(right, float), "prediction": 1 - np.array(right, int)} | more)
    lls = [[-1.0, -2.0] if r else [-2.0, -1.0] for r in right]
    return frame.assign(prediction_norm=0, loglikelihoods=lls)


def test_mcnemar_counts_the_documents_that_one_of_the_two_gets_right():
    frame = pd.concat([answers("softmax()", [1] * 9 + [0] * 3), answers("h15()", [1] * 3 + [0] * 6 + [1] + [0] * 2)])
    found = paired.change(frame, "winogrande", "h15()")
    assert (found.gained, found.lost, found.n, found.flipped) == (1, 6, 12, 7)
    # Two-sided, by hand: 2·(C(7,0) + C(7,1)) / 2^7.
    assert found.p == pytest.approx(2 * (1 + 7) / 128)
    assert found.score == pytest.approx(100 * 4 / 12)
    assert found.change.mean == pytest.approx(100 * (1 - 6) / 12)
    assert found.change.low < found.change.mean < found.change.high
    same = paired.change(frame, "winogrande", "softmax()")
    assert (same.p, same.gained, same.lost, same.change.mean) == (1, 0, 0, 0)


def test_perplexity_is_of_the_right_answer_and_its_change_is_paired():
    frame = pd.concat(
        [answers("softmax()", [1, 1, 1, 0], "lambada_openai"), answers("s()", [1, 0, 1, 0], "lambada_openai")]
    )
    assert paired.perplexity(frame, "softmax()") == pytest.approx(np.exp(5 / 4))
    change = paired.loglikelihood_change(frame, "s()")
    assert change.mean == pytest.approx(1 / 4)
    assert change.n_blocks == 4


@pytest.mark.parametrize(
    ("frames", "says"),
    [
        ([answers("softmax()", [1, 1, 0])], "no records of winogrande under h15"),
        ([answers("softmax()", [1, 1, 0]), answers("h15()", [1, 1])], "did not answer the same documents"),
        ([answers("softmax()", [1, 0]), answers("h15()", [1, 1], gold=1)], "did not answer the same documents"),
        ([answers("softmax()", [1, 0]), answers("h15()", [1, 1], batch=64)], "records of different batch"),
        ([answers("softmax()", [1, 0]), *[answers("h15()", [1, 1])] * 2], "more than once"),
    ],
)
def test_what_cannot_be_paired_is_refused(frames, says):
    with pytest.raises(LabError, match=says):
        paired.change(pd.concat(frames), "winogrande", "h15()")


# The command, and bad input


def test_the_command_answers_stores_and_compares(run, tiny_model, folder, tmp_path):
    arguments = ["--model", tiny_model, "--data", folder, "--limit", 5, "--device", "cpu", "--results", tmp_path / "r"]
    code, out, err = run("zero-shot", "softmax()", "grid(K=4)", "--tasks", "piqa,winogrande", *arguments)
    assert code == 0, err
    assert out.splitlines()[0] == "PIQA, acc_norm, 5 documents"
    assert out.count("McNemar p =") == 2
    assert len(list((tmp_path / "r" / "zero_shot").glob("*.parquet"))) == 4


def test_one_document_has_a_score_and_no_interval(run, tiny_model, folder):
    arguments = ["--model", tiny_model, "--data", folder, "--limit", 1, "--device", "cpu", "--results", ""]
    code, out, err = run("zero-shot", "softmax()", "grid(K=4)", "--tasks", "piqa,lambada_openai", *arguments)
    assert code == 0, err
    lines = out.splitlines()
    assert len(lines) == 6 and lines[3] == "LAMBADA, acc, 1 documents"
    for line in (lines[2], lines[5]):
        assert re.fullmatch(
            r"  grid\(K=4\): (10)?0\.00 %, (0|−?100) points, gained [01], lost [01], McNemar p = 1", line
        )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nonsense()"], "unknown operator 'nonsense'"),
        (["softmax()", "--tasks", "boolq"], "unknown task 'boolq': known are lambada_openai"),
        (["softmax()", "--data", "/nowhere"], "there is no folder /nowhere"),
        (["softmax()", "--data", "a" * 300], "cannot be looked at (File name too long)"),
        (["softmax()", "--data", "~nobody-here"], "the folder ~nobody-here cannot be looked at"),
        (["softmax()", "--batch", "0"], "batch is 0"),
        (["softmax()", "--limit", "-1"], "limit is -1"),
        (["softmax()", "--padding", "both"], "unknown padding side 'both'"),
        (["softmax()", "--dtype", "int4"], "unknown dtype 'int4'"),
        (["softmax()", "--backend", "magic"], "unknown backend 'magic'"),
        (["softmax()", "--model", "nope"], "unknown model 'nope'"),
        (["softmax()", "--device", "tpu"], "unknown device 'tpu'"),
    ],
)
def test_bad_input_is_one_sentence(run, folder, arguments, says):
    if "--data" not in arguments:
        arguments = [*arguments, "--data", str(folder)]
    code, out, err = run("zero-shot", *arguments)
    assert (code, out) == (2, "")
    assert says in err
    assert err.count("\n") == 1


def test_without_a_folder_the_harnesss_own_task_is_loaded_from_the_hub(monkeypatch, tiny_model):
    """The hub is asked for what the harness's definition names, and one sentence says when it cannot be reached."""
    import datasets

    asked = []

    def hub(path, name=None, **_):
        asked.append(path)
        if len(asked) > 1:
            raise ConnectionError("no route")
        rows = datasets.Dataset.from_list([BUILT_IN["piqa"][1]] * 3)
        return datasets.DatasetDict({"train": rows, "validation": rows})

    monkeypatch.delenv("SOFTMAXLAB_ZERO_SHOT", raising=False)
    monkeypatch.setattr(datasets, "load_dataset", hub)
    options = {"tasks": ["piqa"], "results": "", "device": "cpu", "progress": False}
    frame = zero_shot.evaluate(["softmax()"], Setting(model=str(tiny_model)), **options)
    assert frame.gold.tolist() == [1, 1, 1]
    with pytest.raises(LabError, match=r"piqa are not in the local hub cache.*\(ConnectionError\).*piqa\.jsonl"):
        zero_shot.evaluate(["softmax()"], Setting(model=str(tiny_model)), **options)
    assert asked == ["baber/piqa"] * 2


@pytest.mark.parametrize("name", zero_shot.TASKS)
def test_the_harness_has_each_task_where_it_is_looked_for(name):
    assert name in harness_tasks.manager(name).all_tasks


def test_a_wrong_layer_is_refused(run_lab):
    with pytest.raises(LabError, match="names layer 9"):
        run_lab(["grid(K=4)@9"])
