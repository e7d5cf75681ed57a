"""torch's own attention as the bench calls it: in the faster of two ways.

Queries share keys and values, and torch takes that in two ways: `grouped`, with `enable_gqa`, or `repeated`, with the
keys and values copied for every query head in the call. Which is faster depends on the kernels that torch has for a
device and dtype: those for FP32 on CUDA take no groups, and torch then falls back to matrices of scores. transformers
asks for `enable_gqa` wherever there is no mask, so a model's own forward pass may be the slow way too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import repeat_kv

GROUPED, REPEATED = WAYS = ("grouped", "repeated")


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    way: str,
    *,
    scaling: float | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Exact attention; causal where there is no mask.

    Args:
        query: (batch, heads, queries, dim).
        key, value: (batch, kv_heads, keys, dim), unrepeated.
        way: one of `WAYS`.
        scaling: factor on q·k; dim^−½ if None.
        mask: bool, True where a key may be seen.

    Returns:
        (batch, heads, queries, dim).
    """
    if way == REPEATED:
        key, value = (repeat_kv(x, query.shape[1] // key.shape[1]) for x in (key, value))
    options = {"attn_mask": mask, "is_causal": mask is None, "scale": scaling, "enable_gqa": way == GROUPED}
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, **options)


def attend_repeated(
    query: Tensor, key: Tensor, value: Tensor, operator: Any, *, scaling: float, mask: Tensor | None = None, **_: Any
) -> Tensor:
    """A backend of softmax alone, for a model's forward pass: (batch, queries, heads, dim)."""
    return attention(query, key, value, REPEATED, scaling=scaling, mask=mask).transpose(1, 2).contiguous()


def trial(call: Callable[[str], Callable[[], Any]], timed: Callable[[Callable[[], Any]], float]) -> dict[str, Any]:
    """Seconds of each way, the least of two calls after a first; None where memory does not hold it.

    Args:
        call: gives the function of a way.
        timed: seconds of a function.

    Raises:
        torch.OutOfMemoryError: no way fits.
    """
    found: dict[str, Any] = {}
    for way in WAYS:
        try:
            timed(call(way))
            found[way] = min(timed(call(way)) for _ in range(2))
        except torch.OutOfMemoryError as error:
            found[way], failed = None, error.with_traceback(None)  # whose frames would hold what did not fit
    if not any(found.values()):
        raise failed
    return found


def faster(found: dict[str, Any]) -> str:
    """The way that a trial took the least time in."""
    return min((way for way in WAYS if found[way] is not None), key=lambda way: found[way])
