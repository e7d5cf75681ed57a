"""Which calls the packed exponential computes, and which fall back to the stock kernel.

A case is offered when the gates cover it (`packed_gates`). What is not offered runs as installed, with a notice,
so that no call gives a wrong number: codes have a range, and P's format, the anchor and the scale must respect it.
Nothing of FlashAttention-4 is imported here.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from softmaxlab.fa4.variants import Variant

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "e4m3"}
#: Head dimensions of Q and K, and of V, that the gates cover.
HEAD_DIMS = {
    "sm_90": ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)),
    "sm_100": ((64, 64), (96, 96), (128, 128)),
}
#: Arguments of FlashAttention-4's forward function that must be left out.
UNTESTED = {
    "qv": "the MLA kernels are untested",
    "page_table": "paged keys are untested",
    "score_mod": "a score_mod is untested, but for softcap",
    "mask_mod": "a mask_mod is untested",
    "block_sparse_tensors": "block sparsity is untested",
    "gather_kv_indices": "gathered keys are untested",
    "aux_tensors": "tensors of such a function are untested",
    "q_descale": "a descale is untested",
    "k_descale": "a descale is untested",
    "v_descale": "a descale is untested",
    "seqlen_k_per_split": "split keys are untested",
}
_noticed: set[str] = set()


def refusal(variant: Variant, arch: int, arguments: Mapping[str, Any], *, running: bool = True) -> str:
    """Why a call falls back; empty if it does not.

    Args:
        variant: of kind packed.
        arch: 90, 100 or 103, as FlashAttention-4 names it.
        arguments: of FlashAttention-4's forward function, by name.
        running: whether a GPU will run it, or it is only compiled.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    for name, why in UNTESTED.items():
        if name in given:
            return f"{name} is given, and {why}"
    q, v = given["q"], given["v"]
    dtype = DTYPES.get(q.dtype)
    if dtype is None:
        return f"P would be {q.dtype}, and its codes are for bfloat16, float16 and, on Blackwell, float8_e4m3fn"
    # A descending lattice needs exponents of at most 0: a negative scale makes the row maximum its minimum.
    scale = given.get("softmax_scale", 1.0)
    if not isinstance(scale, (int, float)) or not (scale >= 0 and math.isfinite(scale)):
        return f"softmax_scale is {scale}, and must be a number from 0"
    if given.get("num_splits", 1) != 1:
        return f"num_splits is {given['num_splits']}, and split keys are untested"
    family = "sm_90" if arch // 10 == 9 else "sm_100"
    dims = (q.shape[-1], v.shape[-1])
    if dims not in HEAD_DIMS[family]:
        known = ", ".join(f"{a}" if a == b else f"({a}, {b})" for a, b in HEAD_DIMS[family])
        return f"the head dimension is {dims[0] if dims[0] == dims[1] else dims}, and those tested are {known}"
    return _blackwell(variant, dtype, running) if family == "sm_100" else ""


def _blackwell(variant: Variant, dtype: str, running: bool) -> str:
    if dtype == "fp16":
        return "on Blackwell the anchor lags by up to 8 octaves, which leaves FP16's codes too few below it"
    if dtype == "bf16" and variant.k > 3:
        return f"on Blackwell the anchor lags by up to 8 octaves, and k = {variant.k} has no codes above it: k up to 3"
    if dtype == "e4m3" and variant.k != 3:
        return f"a code of float8_e4m3fn has three fractional bits, and k is {variant.k}: k = 3"
    return "its kernel for Blackwell was compiled and audited, but never run" if running else ""


def notice(variant: Variant, why: str) -> None:
    """Say once in a process that a call falls back."""
    text = f"{variant} falls back to the stock exponential: {why}"
    if text not in _noticed:
        _noticed.add(text)
        warnings.warn(text, RuntimeWarning, stacklevel=2)
