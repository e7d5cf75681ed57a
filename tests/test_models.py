"""Names of models, what identifies them, and the sentences for what cannot be loaded."""

import json

import pytest
import torch
from conftest import make_tiny_model

from softmaxlab import gguf, models
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


@pytest.mark.parametrize("model", ["smollm3", "", "a/b/c", "/no/such/folder", "../x"])
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


def test_a_folder_with_damaged_weights_is_one_sentence(tiny_model, tmp_path):
    broken = make_tiny_model(tmp_path / "broken")
    (broken / "config.json").write_text("{")
    with pytest.raises(LabError, match="cannot be loaded"):
        models.load_model(str(broken), device="cpu")


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
