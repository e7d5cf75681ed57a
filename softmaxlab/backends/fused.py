"""The fused backend: scores never leave fast memory between their two matrix products.

One name for all devices: CUDA takes `triton`, the CPU `cpu`. What those do not compute goes to the reference, with one
notice for each reason, so that a fused result means what the reference means.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from types import ModuleType

from torch import Tensor

from softmaxlab.operators import Operator

from . import reference
from .shapes import check

MODULES = {"cuda": "triton", "cpu": "cpu"}
#: Notices that this process has had.
told: set[str] = set()


class FallbackNotice(UserWarning):
    """A call was computed in PyTorch operations instead of a fused kernel."""


def attend(query: Tensor, key: Tensor, value: Tensor, operator: Operator, *, mask: Tensor | None = None, **arguments):
    """Attention with `operator` in the place of softmax; arguments, result and errors as `reference.attend`."""
    check(query, key, value, softcap=arguments.get("softcap"), mask=mask)
    module = _module(query.device.type)
    if isinstance(module, ModuleType):
        why = module.supports(query, key, value, operator, mask=mask)
        if why is None:
            found = launched(lambda: module.attend(query, key, value, operator, mask=mask, **arguments))
            if isinstance(found, Tensor):
                return found
            why = found
    else:
        why = module
    notice(f"the reference backend computes instead of the fused one: {why}")
    return reference.attend(query, key, value, operator, mask=mask, **arguments)


def launched(call: Callable[[], Tensor]) -> Tensor | str:
    """The result of a call of a kernel, or one clause where a device has less than the kernel takes of it.

    Launch shapes are chosen for large GPUs. What a small one refuses, it refuses before anything has run.
    """
    try:
        return call()
    except Exception as error:
        if type(error).__name__ != "OutOfResources":  # Triton's, which need not be installed
            raise
        return f"this GPU has less than its kernel takes ({error})"


def notice(text: str) -> None:
    """Give a notice, unless this process has had it."""
    if text not in told:
        told.add(text)
        warnings.warn(text, FallbackNotice, stacklevel=3)


def _module(device: str) -> ModuleType | str:
    """The device's implementation, or one clause that says why there is none."""
    if device not in MODULES:
        return f"there is no fused backend for {device}"
    try:
        return importlib.import_module(f"softmaxlab.backends.{MODULES[device]}")
    except ImportError as error:
        return f"the fused backend for {device} cannot be imported ({error})"
