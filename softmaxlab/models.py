"""A frozen causal language model from a short name, a hub id, a folder or a GGUF file.

Resolving a name is cheap and needs no weights: it yields the identity that keys results. Loading is separate.
Code that comes with a model is never run.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.utils import HFValidationError, validate_repo_id
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel
from transformers import logging as transformers_logging

from softmaxlab import checkpoint, gguf
from softmaxlab.errors import LabError, refusal

EMBEDDED = "smollm2-135m"
EMBEDDED_LAYERS = 30  # of the file whose hash is pinned in softmaxlab.gguf; checked on loading
EMBEDDED_POSITIONS = 8192  # of the same file

# The ten models of the paper (A.2) by the names used here.
PAPER_MODELS = {
    "qwen2.5-0.5b": "Qwen/Qwen2.5-0.5B",
    "qwen2.5-1.5b": "Qwen/Qwen2.5-1.5B",
    "qwen2.5-3b": "Qwen/Qwen2.5-3B",
    "qwen2.5-72b": "Qwen/Qwen2.5-72B",
    "llama-3.2-1b": "meta-llama/Llama-3.2-1B",
    "llama-3.2-3b": "meta-llama/Llama-3.2-3B",
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B",
    "llama-3.1-70b": "meta-llama/Llama-3.1-70B",
    "gemma-2-2b": "google/gemma-2-2b",
    "mistral-7b-v0.3": "mistralai/Mistral-7B-v0.3",
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
DEVICES = ("auto", "cpu", "cuda", "mps")


@dataclass(frozen=True)
class Spec:
    """A model by name.

    Attributes:
        name: what people call it; also a folder name of results.
        kind: `embedded`, `gguf`, `directory` or `hub`.
        source: path or hub id.
        revision: the hub revision asked for, else empty.
    """

    name: str
    kind: str
    source: str
    revision: str = ""

    def identity(self) -> str:
        """What fixes the weights: a file hash, a folder hash, or hub id and commit. Reads no weights but to hash.

        Raises:
            LabError: files cannot be read; the hub's commit can be learned neither from the local cache nor from
                the hub.
        """
        if self.kind == "embedded":
            return f"gguf:sha256:{gguf.EMBEDDED_SHA256}"
        if self.kind == "hub":
            return f"hub:{self.source}@{_hub_commit(self.source, self.revision)}"
        with checkpoint.one_sentence(f"model {self.name!r} cannot be read"):
            if self.kind == "gguf":
                return f"gguf:sha256:{_file_hash(self.source, Path(self.source).stat().st_mtime_ns)}"
            return f"dir:sha256:{_folder_hash(Path(self.source))}"

    def folder(self) -> tuple[str, dict[str, str]]:
        """Where transformers finds it: a path or hub id, and the arguments that go with it."""
        if self.kind == "embedded":
            return str(gguf.converted(gguf.embedded_file(), gguf.EMBEDDED_SHA256)), {}
        if self.kind == "gguf":
            return str(gguf.converted(Path(self.source), self.identity().rpartition(":")[2])), {}
        return self.source, {"revision": self.revision} if self.revision else {}


def resolve(model: str) -> Spec:
    """The model that a name means.

    Args:
        model: `smollm2-135m`; a short name of the paper's models; a folder; a .gguf file; a hub id, with
            `@revision` if wanted.

    Raises:
        LabError: it is none of these, or a folder without configuration or safetensors.
    """
    if model == EMBEDDED:
        return Spec(EMBEDDED, "embedded", gguf.EMBEDDED_FILE)
    known = ", ".join([EMBEDDED, *PAPER_MODELS])
    choices = f"give a hub id (org/name), a folder, a .gguf file, or one of {known}"
    try:
        if local := _local(model):
            return local
    except (OSError, RuntimeError) as error:  # too long, not to be searched; ~name of no user
        raise LabError(f"model {model!r} cannot be looked up ({refusal(error).rstrip('.')}): {choices}") from error
    name, _, revision = model.partition("@")
    if name in PAPER_MODELS:
        return Spec(name, "hub", PAPER_MODELS[name], revision)
    if _is_hub_id(name):
        return Spec(name.replace("/", "--"), "hub", name, revision)
    raise LabError(f"unknown model {model!r}: {choices}")


def _local(model: str) -> Spec | None:
    """The model if it is a path of this machine; OSError or RuntimeError where the system cannot tell."""
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise LabError(f"model {model!r}: there is no such GGUF file")
        return Spec(path.stem, "gguf", str(path.resolve()))
    if not model.strip() or not path.is_dir():
        return None
    if not (path / "config.json").is_file():
        raise LabError(f"model {model!r}: the folder holds no config.json")
    # Here and not only on loading: the identity is of safetensors, so losses of other weights would be found by it.
    if not any(p.suffix == ".safetensors" for p in path.iterdir()):
        raise LabError(f"model {model!r}: the folder holds no safetensors weights, {checkpoint.SAVE_SAFETENSORS}")
    return Spec(path.resolve().name, "directory", str(path.resolve()))


def _is_hub_id(name: str) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return name.isascii() and "/" in name


@lru_cache(maxsize=32)
def _file_hash(path: str, mtime_ns: int) -> str:
    return gguf.sha256(Path(path))


def _folder_hash(folder: Path) -> str:
    """Hash over the files that decide the numbers: configuration, weights and tokenizer."""
    kinds = {".json", ".safetensors", ".model", ".txt", ".jinja"}
    files = sorted(p for p in folder.iterdir() if p.suffix in kinds and not p.is_dir())
    lines = [f"{p.name}:{_file_hash(str(p), p.stat().st_mtime_ns)}" for p in files]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _hub_commit(repo: str, revision: str) -> str:
    if re.fullmatch(r"[0-9a-f]{40}", revision):
        return revision
    from huggingface_hub import HfApi, try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(repo, "config.json", revision=revision or None)
        if isinstance(cached, str):
            return Path(cached).parent.name
        return HfApi().model_info(repo, revision=revision or None, timeout=10).sha
    except Exception as error:
        raise LabError(
            f"model {repo!r} is not in the local hub cache and the hub cannot be asked ({type(error).__name__}): "
            f"download it first, e.g. `hf download {repo}`, and for gated models log in with `hf auth login`"
        ) from error


def config(model: str | Spec) -> Any:
    """The language configuration of a model; no weights are read."""
    spec = resolve(model) if isinstance(model, str) else model
    where, arguments = spec.folder()
    return _read(AutoConfig.from_pretrained, spec, where, arguments, trust_remote_code=False).get_text_config()


def n_layers(model: str) -> int:
    """Number of decoder layers. For the embedded model this needs no file."""
    spec = resolve(model)
    return EMBEDDED_LAYERS if spec.kind == "embedded" else config(spec).num_hidden_layers


def check_device(device: str) -> None:
    """Raise LabError unless it is the name of a device."""
    if device not in DEVICES:
        raise LabError(f"unknown device {device!r}: use one of {', '.join(DEVICES)}")


def check_dtype(dtype: str) -> None:
    """Raise LabError unless it is a dtype that models are run in."""
    if dtype not in DTYPES:
        raise LabError(f"unknown dtype {dtype!r}: use one of {', '.join(DTYPES)}")


def pick_device(device: str) -> str:
    """`auto` becomes cuda, mps or cpu, whichever is there first.

    Raises:
        LabError: an unknown device, or one that is not there.
    """
    check_device(device)
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if device == "auto":
        return next(d for d in ("cuda", "mps", "cpu") if there[d])
    if not there[device]:
        raise LabError(f"device {device!r} is not available here: use auto or cpu")
    return device


@dataclass
class Loaded:
    """A frozen model with its tokenizer."""

    spec: Spec
    model: PreTrainedModel
    tokenizer: Any
    dtype: str
    device: str

    @property
    def max_context(self) -> int | None:
        """Positions the model was made for, if its configuration says so."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)


def load_model(
    model: str, *, dtype: str = "float32", device: str = "auto", device_map: str | dict[str, str | int] = ""
) -> Loaded:
    """Load a model for frozen inference.

    Args:
        model: see `resolve`.
        dtype: `float32` or `bfloat16`.
        device: `auto`, `cpu`, `cuda` or `mps`.
        device_map: "" puts the model on `device`. "auto" spreads its layers over all visible GPUs, then main
            memory, then the disk, and so does any other value that `from_pretrained` takes.

    Raises:
        LabError: unknown model, dtype or device; files that cannot be read, are damaged, or lack a tensor.
        MemoryError, torch.OutOfMemoryError: the model does not fit.
    """
    check_dtype(dtype)
    device = pick_device(device)
    spec = resolve(model)
    where, arguments = spec.folder()
    tokenizer = load_tokenizer(spec)
    spread = {"device_map": device_map} if device_map else {}
    net = _read(checkpoint.load_whole, spec, where, arguments, dtype=DTYPES[dtype], **spread)
    if spec.kind == "embedded" and net.config.num_hidden_layers != EMBEDDED_LAYERS:
        raise LabError(f"{spec.name} has {net.config.num_hidden_layers} layers, expected {EMBEDDED_LAYERS}")
    net = net if device_map else net.to(device)
    return Loaded(spec, net.eval().requires_grad_(False), tokenizer, dtype, device)


def devices(net: PreTrainedModel) -> list[torch.device]:
    """The devices that a model's layers compute on, in no order."""
    found = {module._hf_hook.execution_device for module in net.modules() if hasattr(module, "_hf_hook")} - {None}
    found |= {parameter.device for parameter in net.parameters()} - {torch.device("meta")}
    # accelerate names a GPU by its number.
    named = {torch.device("cuda", d) if isinstance(d, int) else torch.device(d) for d in found}
    return sorted(named, key=str)


def input_device(net: PreTrainedModel) -> torch.device:
    """Where a model takes its tokens: where the embedding computes, also if its weights wait elsewhere."""
    embedding = net.get_input_embeddings()
    if embedding.weight.device.type != "meta":
        return embedding.weight.device
    own = embedding._hf_hook.execution_device
    return torch.device("cuda", own) if isinstance(own, int) else torch.device(own)


def load_tokenizer(model: str | Spec) -> Any:
    """The tokenizer of a model."""
    spec = resolve(model) if isinstance(model, str) else model
    where, arguments = spec.folder()
    return _read(AutoTokenizer.from_pretrained, spec, where, arguments, trust_remote_code=False)


def _read(load: Callable[..., Any], spec: Spec, where: str, arguments: dict[str, str], **more: Any) -> Any:
    """What `load` makes of a model's files; LabError in one sentence when they do not allow it."""
    transformers_logging.disable_progress_bar()
    again = " (remove that folder to have it converted again)" if spec.kind in {"embedded", "gguf"} else ""
    with checkpoint.one_sentence(f"model {spec.name!r} cannot be loaded from {where}{again}"), checkpoint.quiet():
        return load(where, **arguments, **more)


if __name__ == "__main__":
    # `python -m softmaxlab.models NAME` fetches and converts a model, for the set-up.
    try:
        print(resolve(sys.argv[1] if len(sys.argv) > 1 else EMBEDDED).folder()[0])
    except LabError as error:
        print(f"softmaxlab: {error}", file=sys.stderr)
        sys.exit(2)
