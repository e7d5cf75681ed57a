"""How any model is loaded, be it to convert or to run: whole or not at all, and what fails is one sentence."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers import logging as transformers_logging

from softmaxlab.errors import LabError

# Else transformers lets a hub service convert a model without safetensors and loads that copy, which is of another
# commit than the one that keys the results.
os.environ["DISABLE_SAFETENSORS_CONVERSION"] = "1"

SAVE_SAFETENSORS = "and pickled ones (.bin) are not read: save it with save_pretrained, which writes safetensors"


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
