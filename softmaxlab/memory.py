"""How many blocks fit into one forward pass: an estimate to begin with, halved whenever a device says no."""

from __future__ import annotations

import gc
from typing import Any

import torch
from transformers import PreTrainedModel

from softmaxlab import models
from softmaxlab.attention import text_config

#: Tokens of one pass on a GPU. More are not faster, and fewer processes would find work of their own.
BATCH_TOKENS = 16_384

#: Of the free memory: the allocator's blocks do not fit together without gaps.
_USABLE = 0.8
#: Bytes that a pass holds however large it is: score chunks of the reference backend, a chunk of float32 logits.
CONSTANT = 3 * 2**30


def bytes_per_token(config: Any, itemsize: int, *, kept_layers: int = 0) -> int:
    """Memory that one token of a forward pass takes beyond the weights, an estimate from above.

    Args:
        config: the model's language configuration.
        itemsize: bytes of a weight.
        kept_layers: outputs of layers that are kept for other conditions.
    """
    wide = max(getattr(config, "intermediate_size", 0) or 0, 4 * config.hidden_size)
    # One layer is alive at a time: gate, up and their product; residual, q, k, v and output, partly in float32.
    layer = 3 * wide * itemsize + 8 * config.hidden_size * 4
    return config.vocab_size * itemsize + layer + kept_layers * config.hidden_size * itemsize


def batch_size(model: PreTrainedModel, context: int) -> int:
    """Blocks a forward pass: one on a CPU; on a GPU `BATCH_TOKENS` of tokens, or less where memory is short.

    A power of two, so that equal cards choose equally although a few megabytes more or less are free.
    """
    cards = [d for d in models.devices(model) if d.type == "cuda"]
    if not cards:
        return 1 if models.input_device(model).type == "cpu" else max(1, BATCH_TOKENS // context)
    config = text_config(model)
    free = min(torch.cuda.mem_get_info(card)[0] for card in cards)
    each = bytes_per_token(config, model.dtype.itemsize, kept_layers=config.num_hidden_layers) * context
    fits = max(0, int((free * _USABLE - CONSTANT) / each))
    return max(1, min(BATCH_TOKENS // context, 1 << max(0, fits.bit_length() - 1)))


def exhausted(error: Exception) -> bool:
    """Whether something failed for want of memory; the refusal of the CPU's allocator is any RuntimeError."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return any(said in str(error) for said in ("DefaultCPUAllocator", "can't allocate memory"))


def release() -> None:
    """Give back what a failed pass held. Call it outside the `except` block, whose traceback keeps tensors alive."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
