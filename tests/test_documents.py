"""Local documents of zero-shot tasks: what cannot be asked is one sentence that names the file and the line."""

import json
from pathlib import Path

import pytest

pytest.importorskip("lm_eval")

from test_zero_shot import BUILT_IN, make_documents

from softmaxlab import documents, harness, harness_tasks, models, zero_shot
from softmaxlab.errors import LabError
from softmaxlab.zero_shot import Setting

GOOD = {
    "piqa": {"query": "Question: the loss\n", "choices": ["the cost", "attention"], "gold": 0},
    "hellaswag": {"query": "Attention: the loss", "choices": ["is cut off", "costs"], "gold": 1},
    "lambada_openai": {"context": "the exponential in", "continuation": "attention"},
    "winogrande": {"context_options": ["loss and cost", "cost and loss"], "continuation": "is rounded", "gold": 1},
}
CAFE = json.dumps(GOOD["piqa"] | {"query": "café"}, ensure_ascii=False)


def text(name, **changes):
    return json.dumps(GOOD[name] | changes)


BAD = {
    "not UTF-8": ("piqa", CAFE.encode("latin-1"), "it is not UTF-8; convert the file first"),
    "UTF-16": ("piqa", CAFE.encode("utf-16"), "it is not UTF-8"),
    "cut off": ("piqa", text("piqa")[:20], "it should be a JSON object with query, choices, gold"),
    "blank": ("piqa", " ", "it should be a JSON object"),
    "list": ("piqa", "[]", "it should be a JSON object"),
    "nested": ("piqa", "[" * 100_000, "it should be a JSON object"),
    "missing": ("piqa", '{"query": "a", "gold": 0}', "its choices should be a list of texts, and is missing"),
    "gold is a bool": ("piqa", text("piqa", gold=True), "its gold should be an integer, and is true"),
    "gold is too large": ("piqa", text("piqa", gold=2), "its gold should be 0 to 1, and is 2"),
    "gold is negative": ("winogrande", text("winogrande", gold=-1), "its gold should be 0 to 1, and is -1"),
    "query is null": ("hellaswag", text("hellaswag", query=None), "its query should be a text, and is null"),
    "query is blank": (
        "hellaswag",
        text("hellaswag", query=" \n"),
        r"its query should have more than spaces, and is ' \n'",
    ),
    "choices are a text": (
        "piqa",
        text("piqa", choices="ab" * 99),
        'its choices should be a list of texts, and is "abab',
    ),
    "no choice": ("piqa", text("piqa", choices=[]), "its choices should be at least 2 to choose from, and are 0"),
    "one choice": ("piqa", text("piqa", choices=["a"]), "its choices should be at least 2 to choose from, and are 1"),
    "empty choices": ("piqa", text("piqa", choices=["", ""]), "its choices[0] should have more than spaces, and is ''"),
    "numbers": ("piqa", text("piqa", choices=[1, 2]), "its choices[0] should be a text, and is 1"),
    "a number": ("piqa", text("piqa", choices=["a", 2]), "its choices[1] should be a text, and is 2"),
    "surrogate": (
        "piqa",
        text("piqa", choices=["a", "b\ud800"]),
        r"its choices[1] should be Unicode, and has '\ud800'",
    ),
    "no context": ("lambada_openai", text("lambada_openai", context=""), "its context should have more than spaces"),
    "no word": ("lambada_openai", text("lambada_openai", continuation=" "), "its continuation should have more"),
    "no option": (
        "winogrande",
        text("winogrande", context_options=["", "a"]),
        "its context_options[0] should have more",
    ),
}


def write(folder, name, line):
    """A file whose second line is the one in question."""
    path = folder / f"{name}.jsonl"
    path.write_bytes(text(name).encode() + b"\n" + (line if isinstance(line, bytes) else line.encode()) + b"\n")
    return path


def ask(folder, name, model):
    options = {"tasks": [name], "data": str(folder), "device": "cpu", "results": "", "progress": False}
    return zero_shot.evaluate(["softmax()"], Setting(model=str(model)), **options)


@pytest.mark.parametrize("case", BAD)
def test_a_line_that_is_no_document_is_named(case, tmp_path, run, tiny_model):
    name, line, says = BAD[case]
    path = write(tmp_path, name, line)
    arguments = ["--tasks", name, "--data", tmp_path, "--model", tiny_model, "--device", "cpu", "--results", ""]
    code, out, err = run("zero-shot", "softmax()", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"line 2 of {path} is no document of {name}: {says}" in err
    assert len(err) < 400 + len(str(path))


@pytest.mark.parametrize("name", GOOD)
def test_a_good_line_is_read_as_it_is(name, tmp_path):
    write(tmp_path, name, text(name, more="left out"))
    assert documents.read_documents(name, tmp_path) == [GOOD[name]] * 2


def test_letters_beyond_ascii_and_line_ends_of_windows_are_read(tmp_path):
    (tmp_path / "piqa.jsonl").write_bytes(f"{CAFE}\r\n".encode() * 2)
    assert [found["query"] for found in documents.read_documents("piqa", tmp_path)] == ["café"] * 2


def test_a_file_that_cannot_be_had_is_named(tmp_path, monkeypatch, tiny_model):
    monkeypatch.setenv("SOFTMAXLAB_ZERO_SHOT", str(tmp_path))
    with pytest.raises(LabError, match=r"the documents of piqa are not at .*: give a folder that holds piqa\.jsonl"):
        ask("", "piqa", tiny_model)
    path = tmp_path / "piqa.jsonl"
    path.write_bytes(b"")
    with pytest.raises(LabError, match="holds no document"):
        ask("", "piqa", tiny_model)

    def refuse(self, *_, **__):
        raise PermissionError(13, "Permission denied", str(self))

    for method in ("stat", "open"):
        with monkeypatch.context() as patched:
            patched.setattr(type(path), method, refuse)
            with pytest.raises(LabError, match=r"documents of piqa in .* cannot be read \(Permission denied\): give"):
                documents.read_documents("piqa", tmp_path)
    for folder in ("a" * 300, "~nobody-here"):
        with pytest.raises(LabError, match="cannot be read"):
            documents.read_documents("piqa", Path(folder))


# What only the tokens tell


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("piqa", {"choices": ["a", "the loss " * 5000]}),
        ("lambada_openai", {"continuation": "x" * 3000}),
        ("winogrande", {"continuation": "the loss " * 5000}),
    ],
)
def test_a_continuation_that_no_context_holds_is_named(name, changes, tmp_path, tiny_model):
    path = write(tmp_path, name, text(name, **changes))
    says = rf"line 2 of {path} cannot be answered by .*: a continuation of \d+ tokens does not fit into the 256 of"
    with pytest.raises(LabError, match=says):
        ask(tmp_path, name, tiny_model)


def test_a_continuation_that_just_fits_is_answered(tmp_path, tiny_model):
    work = models.load_model(str(tiny_model), device="cpu")
    for n, fits in ((255, True), (256, True), (257, False)):
        lm = harness.FrozenLM(work.model, work.tokenizer, batch=8, padding="right")
        pair = ([1, 2, 3], [5] * n)
        assert (lm.fault(pair) == "") is fits
        if fits:
            assert lm.score([pair])[0][0] < 0
    assert lm.fault(([], [5])) and lm.fault(([1], []))


def test_a_context_that_is_too_long_loses_its_beginning(tmp_path, tiny_model):
    write(tmp_path, "piqa", text("piqa", query="the loss " * 2000))
    assert len(ask(tmp_path, "piqa", tiny_model)) == 2


def test_a_document_of_the_hub_is_named_by_its_number(tmp_path):
    with harness_tasks.quiet():
        task = harness_tasks.LocalTask(harness_tasks.definition("piqa"), [BUILT_IN["piqa"][2]])
        loaded = harness_tasks.LoadedTask("piqa", task, 0)
    assert loaded.where(3) == "document 3 of piqa"
    local = harness_tasks.load_task("piqa", data=str(make_documents(tmp_path)))
    assert local.where(3) == f"line 4 of {tmp_path / 'piqa.jsonl'}"
