"""The specification: plain FP32 PyTorch, a chunk of queries at a time, short enough to check line by line.

Scores, weights, row sums and the product with the values are FP32 whatever the model's dtype. Memory is
bounded by the chunk: at most `ELEMENTS` scores exist at once.
"""

import torch
from torch import Tensor

from softmaxlab.operators import Operator, normaliser

from .shapes import check

# Scores of one chunk. On a CPU small chunks stay in cache; on a GPU large ones fill it.
ELEMENTS = {"cpu": 2**21, "other": 2**25}


def chunk_length(query: Tensor, n_keys: int) -> int:
    """Queries a chunk, so that batch · heads · chunk · keys stays within `ELEMENTS`."""
    batch, heads, n_queries, _ = query.shape
    budget = ELEMENTS["cpu" if query.device.type == "cpu" else "other"]
    return max(1, min(n_queries, budget // max(1, batch * heads * n_keys)))


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    operator: Operator,
    *,
    scaling: float,
    softcap: float | None = None,
    mask: Tensor | None = None,
    layer: int = 0,
    chunk: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Attention with `operator` in the place of softmax.

    Args:
        query: (batch, heads, queries, dim).
        key, value: (batch, kv_heads, keys, dim), unrepeated; heads is a multiple of kv_heads.
        operator: the map from score rows to weights.
        scaling: factor on q·k.
        softcap: s ← softcap·tanh(s/softcap) after the scaling, if given.
        mask: bool, (batch or 1, 1, queries, keys), True where a key may be seen. None means causal, with
            as many queries as keys.
        layer: index of the layer; the same for all here, of use to backends that keep records.
        chunk: queries at a time; 0 chooses by `chunk_length`.
        dtype: of scores, weights, row sums and products. float32 is the definition; float64 measures what it costs.

    Returns:
        (batch, queries, heads, dim) in the dtype of `query`; zeros where a query sees no key.

    Raises:
        LabError: as `shapes.check`.
    """
    check(query, key, value, softcap=softcap, mask=mask)
    batch, heads, n_queries, _ = query.shape
    kv_heads, n_keys = key.shape[1:3]
    chunk = chunk or chunk_length(query, n_keys)
    out = query.new_empty(batch, n_queries, heads, value.shape[-1])
    for start in range(0, n_queries, chunk):
        stop = min(start + chunk, n_queries)
        # Under a plain causal mask the keys after the chunk's last query have weight 0: leave them out.
        keys = n_keys if mask is not None else stop
        valid = causal(start, stop, query.device) if mask is None else mask[:, :, None, start:stop]
        k, v = key[:, :, None, :keys].to(dtype), value[:, :, None, :keys].to(dtype)
        q = query[:, :, start:stop].to(dtype).unflatten(1, (kv_heads, -1))
        s = scores(q, k, scaling=scaling, softcap=softcap).masked_fill_(~valid, -torch.inf)
        w = operator(s, valid).to(dtype)
        pv = (w @ v) / normaliser(w, s, operator)
        out[:, start:stop] = pv.flatten(1, 2).transpose(1, 2).to(out.dtype)
    return out


def scores(query: Tensor, key: Tensor, *, scaling: float, softcap: float | None) -> Tensor:
    """Scores in nats after the model's own scaling and soft-capping, before the mask (definition of a row)."""
    s = (query @ key.mT) * scaling
    return s if softcap is None else softcap * torch.tanh(s / softcap)


def causal(start: int, stop: int, device: torch.device) -> Tensor:
    """Causal mask of the queries start..stop−1 over the keys 0..stop−1, bool, (queries, keys)."""
    rows = torch.arange(start, stop, device=device)
    return torch.arange(stop, device=device) <= rows[:, None]
