"""Corpora: the joining rule, hashes, refusals; blocks under each BOS rule, with a tokenizer built here."""

import contextlib
import hashlib
import logging
import os
import sys
import types
from pydoc_data.topics import topics

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from softmaxlab import corpus
from softmaxlab.errors import LabError

WORDS = [f"w{i}" for i in range(50)]
BOS = 50


def tokenizer(adds_bos=False, bos="<s>"):
    """One token a word, by its number; optionally one that puts a BOS in front, as Llama's does."""
    vocabulary = {word: i for i, word in enumerate([*WORDS, "<s>", "<unk>"])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    if adds_bos:
        core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token=bos, unk_token="<unk>", model_max_length=8)


def words(n, start=0):
    numbers = [(start + i) % 50 for i in range(n)]
    text = " ".join(f"w{i}" for i in numbers)
    return corpus.Text("words", text, f"text:sha256:{hashlib.sha256(text.encode()).hexdigest()}"), numbers


@contextlib.contextmanager
def hub(monkeypatch, rows=None, error=None, answers=True):
    """Stands in for `datasets`: what it was asked for, and whether it was offline then."""
    asked = []

    def load_dataset(*arguments, **options):
        asked.append((arguments, options, module.config.HF_HUB_OFFLINE))
        if error:
            raise error
        return {"text": rows}

    module = types.SimpleNamespace(load_dataset=load_dataset, config=types.SimpleNamespace(HF_HUB_OFFLINE=False))
    monkeypatch.delenv(corpus.WIKITEXT_VARIABLE, raising=False)
    monkeypatch.setitem(sys.modules, "datasets", module)
    monkeypatch.setattr(corpus, "_hub_answers", lambda: answers)
    yield asked
    assert module.config.HF_HUB_OFFLINE is False


# Texts

RAW = " \n = Title = \n \n Words\u2028 here \x85 \u00e9\r and \n\t\n end \n"
ROWS = ["", " = Title = \n", "", " Words\u2028 here \x85 \u00e9\r and \n", "", " end \n"]


def test_wikitext_rows_are_lines_and_join_by_blank_lines():
    assert corpus.wikitext_rows(RAW) == ROWS
    assert corpus.wikitext_rows(RAW.rstrip("\n")) == ROWS
    assert corpus.wikitext_rows("") == [""]
    assert corpus.join_wikitext(["a\n", "", "b\n"]) == "a\n\n\n\n\nb\n"


@pytest.fixture
def pinned(monkeypatch):
    """The joined RAW as if it were the test split."""
    digest = hashlib.sha256("\n\n".join(ROWS).encode()).hexdigest()
    monkeypatch.setattr(corpus, "WIKITEXT_SHA256", digest)
    return f"text:sha256:{digest}"


def test_wikitext_from_a_path_or_the_environment(tmp_path, monkeypatch, pinned):
    path = tmp_path / "wiki.test.raw"
    path.write_bytes(RAW.encode())
    text = corpus.load_text(f"wikitext103:{path}")
    assert (text.name, text.id, text.text) == ("wikitext103", pinned, "\n\n".join(ROWS))
    assert corpus.corpus_id(f"wikitext103:{path}") == pinned
    monkeypatch.setenv(corpus.WIKITEXT_VARIABLE, str(path))
    assert corpus.load_text("wikitext103") == text


def test_wikitext_from_the_hub_fetches_the_test_split_only(monkeypatch, pinned):
    with hub(monkeypatch, rows=ROWS) as asked:
        text = corpus.load_text("wikitext103")
    assert text.id == pinned
    ((arguments, options, offline),) = asked
    assert arguments == ("Salesforce/wikitext", "wikitext-103-raw-v1")
    assert options["split"] == "test" and list(options["data_files"]) == ["test"]
    assert offline is False


def test_a_text_that_is_not_the_test_split_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "wiki.valid.raw"
    path.write_text(RAW, encoding="utf-8")
    words = f"not the WikiText-103-raw test split.*should be {corpus.WIKITEXT_SHA256}"
    with pytest.raises(LabError, match=f"{path.name} is {words}"):
        corpus.load_text(f"wikitext103:{path}")
    with hub(monkeypatch, rows=ROWS), pytest.raises(LabError, match=f"on the hub is {words}"):
        corpus.load_text("wikitext103")


def test_an_unreachable_hub_is_one_sentence_and_tried_in_the_cache_only(monkeypatch):
    message = r"ConnectionError.*SOFTMAXLAB_WIKITEXT.*wikitext103:PATH.*pydoc"
    with (
        hub(monkeypatch, error=ConnectionError("no\nroute"), answers=False) as asked,
        pytest.raises(LabError, match=message) as caught,
    ):
        corpus.load_text("wikitext103")
    assert "\n" not in str(caught.value)
    assert [offline for *_, offline in asked] == [True]


def test_datasets_is_needed_for_the_hub_only(monkeypatch):
    monkeypatch.delenv(corpus.WIKITEXT_VARIABLE, raising=False)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(LabError, match="package datasets is not installed"):
        corpus.load_text("wikitext103")
    assert corpus.corpus_id("wikitext103") == f"text:sha256:{corpus.WIKITEXT_SHA256}"


@pytest.mark.skipif(corpus.WIKITEXT_VARIABLE not in os.environ, reason="needs a local wiki.test.raw")
def test_the_real_test_split():
    text = corpus.load_text("wikitext103")
    assert len(text.text) == 1_294_336 and text.id == corpus.corpus_id("wikitext103")


def test_pydoc_is_the_topics_by_name():
    text = corpus.load_text("pydoc")
    assert text.name == "pydoc" and text.id == corpus.corpus_id("pydoc")
    names = sorted(topics)
    assert text.text.startswith(topics[names[0]] + "\n\n" + topics[names[1]])
    assert len(text.text) == sum(map(len, topics.values())) + 2 * (len(topics) - 1)


def test_any_file_is_read_as_it_is(tmp_path):
    path = tmp_path / "my.text.txt"
    path.write_bytes("a\r\nb\u00e9\n".encode())
    text = corpus.load_text(str(path))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert (text.name, text.text, text.id) == ("my.text", "a\r\nb\u00e9\n", f"text:sha256:{digest}")
    assert corpus.corpus_id(str(path)) == text.id


def test_names():
    assert corpus.corpus_name("wikitext103") == corpus.corpus_name("wikitext103:/some/where.raw") == "wikitext103"
    assert corpus.corpus_name("/some/book.txt") == "book"
    # A file must not pass for a corpus that has this name.
    assert corpus.corpus_name("pydoc.txt") == "pydoc.txt"


def test_texts_that_cannot_be_used(tmp_path):
    for name, content in (("empty", b""), ("blank", b" \n\n"), ("latin", b"caf\xe9")):
        (tmp_path / name).write_bytes(content)
    for name, words in (("empty", "is empty"), ("blank", "is empty"), ("latin", r"not UTF-8 \(byte 3\)")):
        with pytest.raises(LabError, match=words):
            corpus.load_text(str(tmp_path / name))
    for unknown in ("wikitext-103", str(tmp_path), "wikitext103:nowhere.raw"):
        with pytest.raises(LabError, match="no such file; give wikitext103, pydoc or the path"):
            corpus.load_text(unknown)
    with pytest.raises(LabError, match="corpus is empty"):
        corpus.load_text("")


def test_paths_that_the_system_refuses_are_one_sentence(tmp_path, monkeypatch):
    long = str(tmp_path / ("a" * 300))
    words = r"cannot be read \(File name too long\); give wikitext103, pydoc or the path of a text that can"
    for name in (long, f"wikitext103:{long}"):
        for look in (corpus.load_text, corpus.corpus_id):
            with pytest.raises(LabError, match=words):
                look(name)
    with pytest.raises(LabError, match=r"the text ~nobody-here/text.txt cannot be read"):
        corpus.load_text("~nobody-here/text.txt")
    path = tmp_path / "text.txt"
    path.write_text("some words", encoding="utf-8")

    def refuse(self, **_):
        raise PermissionError(13, "Permission denied", str(self))

    # Permissions do not stop root: `stat` for a folder that may not be searched, `read_bytes` for the file itself.
    for method in ("stat", "read_bytes"):
        with monkeypatch.context() as patched:
            patched.setattr(type(path), method, refuse)
            with pytest.raises(LabError, match=rf"the text {path} cannot be read \(Permission denied\)"):
                corpus.load_text(str(path))


# Blocks


@pytest.mark.parametrize("adds_bos", [False, True])
def test_stream_is_what_the_tokenizer_emits_for_one_text(adds_bos):
    text, numbers = words(23)
    expected = ([BOS] if adds_bos else []) + numbers
    got = corpus.blocks(text, tokenizer(adds_bos), 5)
    assert got.tokens.dtype == np.int64 and got.tokens.shape == (4, 5)
    assert got.tokens.ravel().tolist() == expected[:20]
    assert got.n_tokens == len(expected) and got.bos == "stream"
    assert (got.tokens == BOS).sum() == adds_bos


@pytest.mark.parametrize("adds_bos", [False, True])
def test_block_rule_keeps_the_predicted_tokens(adds_bos):
    text, _ = words(23)
    stream = corpus.blocks(text, tokenizer(adds_bos), 5)
    got = corpus.blocks(text, tokenizer(adds_bos), 5, bos="block")
    assert (got.tokens[:, 0] == BOS).all()
    assert np.array_equal(got.tokens[:, 1:], stream.tokens[:, 1:])


def test_none_rule_leaves_special_tokens_out():
    text, numbers = words(23)
    got = corpus.blocks(text, tokenizer(adds_bos=True), 5, bos="none")
    assert got.tokens.ravel().tolist() == numbers[:20] and got.n_tokens == 23


def test_limit_counts_the_bos_and_cuts_before_the_blocks():
    text, numbers = words(40)
    got = corpus.blocks(text, tokenizer(adds_bos=True), 5, limit=14)
    assert got.n_tokens == 14 and got.tokens.ravel().tolist() == [BOS, *numbers[:9]]
    assert corpus.blocks(text, tokenizer(), 20, limit=40).tokens.shape == (2, 20)


@pytest.mark.parametrize("context, n, predictions", [(2048, 97, 198_559), (8192, 24, 196_584), (16384, 12, 196_596)])
def test_block_counts_of_the_paper(context, n, predictions):
    text, _ = words(200_100)
    got = corpus.blocks(text, tokenizer(), context)
    assert got.tokens.shape == (n, context) and n * (context - 1) == predictions
    assert got.n_tokens == 200_000


def test_fingerprint_follows_text_tokenizer_context_and_rule():
    text, _ = words(40)
    seen = {
        corpus.blocks(text, tokenizer(), 5).fingerprint,
        corpus.blocks(text, tokenizer(), 10).fingerprint,
        corpus.blocks(text, tokenizer(), 5, bos="none").fingerprint,
        corpus.blocks(text, tokenizer(adds_bos=True), 5).fingerprint,
        corpus.blocks(words(40, start=1)[0], tokenizer(), 5).fingerprint,
    }
    assert len(seen) == 5
    assert corpus.blocks(text, tokenizer(), 5).fingerprint in seen


def test_no_warning_about_a_long_text_here_and_only_here(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    text, _ = words(40)
    ours, theirs = tokenizer(), tokenizer()
    corpus.blocks(text, ours, 5)
    assert "longer than the specified maximum" not in caplog.text
    theirs(text.text)
    assert "longer than the specified maximum" in caplog.text


@pytest.mark.parametrize(
    "options, message",
    [
        ({"context": 41}, "the text words has 40 tokens, less than one block of context 41"),
        ({"context": 1}, "context must be an integer of at least 2 tokens, and is 1"),
        ({"context": 5.0}, "and is 5.0"),
        ({"context": True}, "and is True"),
        ({"context": 5, "bos": "each"}, "unknown BOS rule 'each'; use one of stream, block, none"),
        ({"context": 5, "limit": 4}, "a limit of 4 tokens is less than one block of context 5"),
    ],
)
def test_blocks_refuses(options, message):
    with pytest.raises(LabError, match=message):
        corpus.blocks(words(40)[0], tokenizer(), **options)


def test_block_rule_needs_a_bos_token():
    with pytest.raises(LabError, match="needs a tokenizer with a BOS token"):
        corpus.blocks(words(40)[0], tokenizer(bos=None), 5, bos="block")
