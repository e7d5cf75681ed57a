"""Names of models, what identifies them, and the sentences for what cannot be loaded."""

import errno
import json
import os
import re

import pytest
import torch
from conftest import make_tiny_model
from safetensors.torch import load_file, save_file

from softmaxlab import checkpoint, gguf, models
from softmaxlab.errors import LabError


def test_a_folder_is_identified_by_what_decides_its_numbers(tmp_path):
    one, two = make_tiny_model(tmp_path / "a"), make_tiny_model(tmp_path / "b")
    other = make_tiny_model(tmp_path / "c", seed=1)
    identities = [models.resolve(str(p)).identity() for p in (one, two, other)]
    assert identities[0] == identities[1] != identities[2]
    (two / "notes.md").write_text("not part of the model")
    assert models.resolve(str(two)).identity() == identities[0]
    config = json.loads((two / "config.json").read_text())
    (two / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    assert models.resolve(str(two)).identity() != identities[0]


def test_loading_gives_a_frozen_model_in_the_asked_dtype(tiny_model):
    loaded = models.load_model(str(tiny_model), dtype="bfloat16", device="cpu")
    assert not loaded.model.training
    assert all(not p.requires_grad and p.dtype == torch.bfloat16 for p in loaded.model.parameters())
    assert models.n_layers(str(tiny_model)) == 3
    assert loaded.max_context == 256


def test_short_names_and_revisions():
    spec = models.resolve("qwen2.5-1.5b")
    assert (spec.kind, spec.source, spec.name) == ("hub", "Qwen/Qwen2.5-1.5B", "qwen2.5-1.5b")
    commit = "0123456789abcdef0123456789abcdef01234567"
    assert models.resolve(f"org/name@{commit}").identity() == f"hub:org/name@{commit}"
    assert len(models.PAPER_MODELS) == 10
    assert models.n_layers("smollm2-135m") == 30
    assert models.resolve("smollm2-135m").identity() == f"gguf:sha256:{gguf.EMBEDDED_SHA256}"


@pytest.mark.parametrize(
    "model",
    ["smollm3", "", "a/b/c", "/no/such/folder", "../x", "é/ü", "org/a--b", "-org/a", "org/a.git", "org/" + "a" * 97],
)
def test_unknown_models_are_refused_with_the_known_names(model):
    with pytest.raises(LabError, match=r"unknown model .*smollm2-135m.*qwen2\.5-1\.5b"):
        models.resolve(model)


def test_a_folder_without_a_configuration_is_refused(tmp_path):
    with pytest.raises(LabError, match=r"no config\.json"):
        models.resolve(str(tmp_path))


def test_unknown_dtype_and_device_are_refused(tiny_model):
    with pytest.raises(LabError, match=r"float16.*float32, bfloat16"):
        models.load_model(str(tiny_model), dtype="float16")
    with pytest.raises(LabError, match="'tpu'"):
        models.load_model(str(tiny_model), device="tpu")
    if not torch.cuda.is_available():
        with pytest.raises(LabError, match="'cuda' is not available"):
            models.load_model(str(tiny_model), device="cuda")


# What a folder may have suffered


def refused(folder, says):
    """The one sentence for a folder."""
    with pytest.raises(LabError, match=says) as caught:
        models.load_model(str(folder), device="cpu")
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)
    return str(caught.value)


def edit_tensors(folder, edit):
    """Change the dictionary of a folder's tensors."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_folder_that_lacks_tensors_is_refused_with_their_names(tmp_path, capfd):
    one, many = make_tiny_model(tmp_path / "one"), make_tiny_model(tmp_path / "many")
    edit_tensors(one, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    refused(one, r"lacks 1 of the model's tensors \(model\.layers\.1\.mlp\.up_proj\.weight\): save or download")
    edit_tensors(many, lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers.2" in name])
    refused(many, r"lacks 9 of the model's tensors \(model\.layers\.2\.input_layernorm\.weight, [^,]+, [^,]+, …\)")
    assert "REPORT" not in "".join(capfd.readouterr()), "one sentence says it"


def test_a_head_that_is_the_embedding_does_not_lack(tmp_path):
    tied, untied = make_tiny_model(tmp_path / "tied", tie_word_embeddings=True), make_tiny_model(tmp_path / "untied")
    assert "lm_head.weight" not in load_file(tied / "model.safetensors")
    net = models.load_model(str(tied), device="cpu").model
    assert net.lm_head.weight is net.get_input_embeddings().weight
    edit_tensors(tied, lambda tensors: tensors.pop("model.embed_tokens.weight"))
    refused(tied, r"lacks 2 .*lm_head\.weight, model\.embed_tokens\.weight")
    edit_tensors(untied, lambda tensors: tensors.pop("lm_head.weight"))
    refused(untied, r"lacks 1 .*lm_head\.weight")


def test_a_tensor_of_another_shape_is_named(tmp_path):
    folder, name = make_tiny_model(tmp_path / "model"), "model.layers.1.mlp.up_proj.weight"
    edit_tensors(folder, lambda tensors: tensors.update({name: tensors[name][:7].clone()}))
    refused(folder, rf"{re.escape(name)} is of shape \[7, 32\] where the configuration asks for \[48, 32\]: save")
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | {"head_dim": 4}))
    refused(folder, r"self_attn\.k_proj\.weight is of shape .* asks for \[8, 32\], and so 12 more: save")


def test_weights_that_cannot_be_converted_are_one_sentence(tmp_path):
    from transformers import MixtralConfig, MixtralForCausalLM

    folder = make_tiny_model(tmp_path / "model")  # for its tokenizer
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = MixtralConfig(vocab_size=300, num_hidden_layers=1, num_local_experts=2, **sizes)
    MixtralForCausalLM(config).save_pretrained(folder)
    models.load_model(str(folder), device="cpu")
    (name, *_) = [n for n in load_file(folder / "model.safetensors") if "experts.1.w1" in n]
    edit_tensors(folder, lambda tensors: tensors.update({name: tensors[name][:7].clone()}))
    refused(folder, r"conversion of the weights\.?$")


@pytest.mark.parametrize("content", [b"", b"garbage" * 100, None], ids=["empty", "garbage", "cut"])
def test_weights_that_are_no_safetensors_are_one_sentence(tmp_path, content):
    folder = make_tiny_model(tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:3000] if content is None else content)
    refused(folder, r"cannot be loaded from .*: SafetensorError: .*header")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_attention_heads": 0}, "ZeroDivisionError: integer"),
        ({"num_attention_heads": "four"}, r"'num_attention_heads': TypeError: .*expected int, got str.*'four'"),
        ({"num_attention_heads": 3}, r"hidden size \(32\) is not a multiple of the number of attention heads \(3\)"),
        ({"num_attention_heads": -1}, "negative dimension"),
        (None, "not a valid JSON file"),
    ],
)
def test_a_configuration_of_no_model_is_one_sentence(tmp_path, change, says):
    path = make_tiny_model(tmp_path / "model") / "config.json"
    path.write_text("{" if change is None else json.dumps(json.loads(path.read_text()) | change))
    refused(path.parent, says)
    if change != {"num_attention_heads": -1}:  # that is seen only when the model is built
        with pytest.raises(LabError, match=says):
            models.n_layers(str(path.parent))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_tokenizer_is_one_sentence(tmp_path, name):
    folder = make_tiny_model(tmp_path / "model")
    (folder / name).write_text("[]")
    refused(folder, "cannot be loaded")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError("torch"), torch.OutOfMemoryError("CUDA")])
def test_a_lack_of_memory_is_not_the_fault_of_the_files(tiny_model, monkeypatch, error):
    def refuse(*_args, **_kwargs):
        raise error

    monkeypatch.setattr(checkpoint.AutoModelForCausalLM, "from_pretrained", refuse)
    with pytest.raises(type(error)) as caught:
        models.load_model(str(tiny_model), device="cpu")
    assert caught.value is error


def test_pickled_weights_are_never_read(tmp_path, monkeypatch):
    folder = make_tiny_model(tmp_path / "model")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    models.load_model(str(folder), device="cpu")  # beside safetensors they do no harm
    monkeypatch.setattr(torch, "load", lambda *_a, **_k: pytest.fail("a pickle was read"))
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    refused(folder, r"no file named model\.safetensors")
    (folder / "other.safetensors").unlink()
    with pytest.raises(LabError, match=r"no safetensors weights.*\.bin.*save_pretrained"):
        models.resolve(str(folder))  # at once: the identity would not tell one .bin from another


def test_pickled_weights_of_a_hub_model_are_never_read(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(torch, "load", lambda *_a, **_k: pytest.fail("a pickle was read"))
    commit = "a" * 40
    folder = make_tiny_model(tmp_path / "models--org--name" / "snapshots" / commit)
    (tmp_path / "models--org--name" / "refs").mkdir()
    (tmp_path / "models--org--name" / "refs" / "main").write_text(commit)
    assert models.load_model("org/name", device="cpu").spec.identity() == f"hub:org/name@{commit}"
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(LabError, match=r"'org--name'.*no safetensors weights.*\.bin.*save_pretrained"):
        models.load_model("org/name", device="cpu")
    assert os.environ["DISABLE_SAFETENSORS_CONVERSION"] == "1", "else a converted copy of another commit is loaded"


# What the system refuses


def deny(*_args, **_kwargs):
    """Permissions bind no test that runs as root."""
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "the place")


@pytest.mark.parametrize("name", ["a" * 300, "a" * 300 + ".gguf", "~no-such-user/model"])
def test_a_name_that_can_be_no_path_is_one_sentence(name):
    with pytest.raises(LabError, match=r"(cannot be looked up \(.*\)|unknown model|no such GGUF file)") as caught:
        models.resolve(name)
    assert "\n" not in str(caught.value)
    assert name in str(caught.value)


@pytest.mark.parametrize("method", ["is_dir", "is_file", "iterdir"])
def test_a_folder_that_must_not_be_searched_is_one_sentence(tiny_model, monkeypatch, method):
    monkeypatch.setattr(models.Path, method, deny)
    with pytest.raises(LabError, match=r"cannot be looked up \(Permission denied\): give a hub id") as caught:
        models.resolve(str(tiny_model))
    assert str(tiny_model) in str(caught.value)


def test_weights_that_must_not_be_read_are_one_sentence(tiny_model, tmp_path, monkeypatch):
    folder = make_tiny_model(tmp_path / "unread")
    monkeypatch.setattr(models.Path, "open", deny)
    with pytest.raises(LabError, match="model 'unread' cannot be read: Permission denied: the place"):
        models.resolve(str(folder)).identity()
    monkeypatch.setattr(checkpoint.AutoModelForCausalLM, "from_pretrained", deny)
    refused(folder, "cannot be loaded from .*: Permission denied: the place")


def test_a_folder_within_the_folder_is_no_part_of_the_identity(tmp_path):
    folder = make_tiny_model(tmp_path / "model")
    before = models.resolve(str(folder)).identity()
    (folder / "runs.json").mkdir()
    assert models.resolve(str(folder)).identity() == before


def test_code_that_comes_with_a_model_never_runs(tiny_model, tmp_path):
    folder = make_tiny_model(tmp_path / "remote")
    config = json.loads((folder / "config.json").read_text())
    marker = tmp_path / "ran"
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w')\n")
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    config["model_type"] = "never_heard_of"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(LabError):
        models.load_model(str(folder), device="cpu")
    assert not marker.exists()


def test_an_unreachable_hub_is_one_sentence(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import huggingface_hub

    def refuse(*_args, **_kwargs):
        raise ConnectionError("offline")

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_a, **_k: None)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", refuse)
    with pytest.raises(LabError, match="hf download org/name"):
        models.resolve("org/name").identity()


def test_a_cached_hub_model_is_identified_by_its_commit(monkeypatch, tmp_path):
    import huggingface_hub

    commit = "f" * 40
    cached = tmp_path / "snapshots" / commit / "config.json"
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_a, **_k: str(cached))
    assert models.resolve("org/name").identity() == f"hub:org/name@{commit}"


def test_a_hub_cache_that_must_not_be_read_is_one_sentence(monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", deny)
    with pytest.raises(LabError, match=r"'org/name' is not in the local hub cache .*PermissionError"):
        models.resolve("org/name").identity()
