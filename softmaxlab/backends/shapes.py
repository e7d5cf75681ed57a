"""What every backend asks of a call's tensors, in one sentence where it is not so."""

from torch import Tensor

from softmaxlab.errors import LabError


def check(query: Tensor, key: Tensor, value: Tensor, *, softcap: float | None, mask: Tensor | None) -> None:
    """Refuse what has no meaning, before a backend computes something else from it.

    Args:
        query, key, value, softcap, mask: as of `reference.attend`.

    Raises:
        LabError: shapes that do not go together, or a soft-cap that is not above 0.
    """
    if any(t.ndim != 4 for t in (query, key, value)):
        dims = ", ".join(str(t.ndim) for t in (query, key, value))
        raise LabError(
            f"query, key and value have {dims} dimensions, and must have 4: batch, heads, queries or keys, dimension"
        )
    batch, heads, n_queries, dim = query.shape
    kv_heads, n_keys = key.shape[1:3]
    if key.shape[0] != batch or key.shape[3] != dim or value.shape[:3] != key.shape[:3]:
        raise LabError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)} do not go together: "
            "key needs the query's batch and dimension, value the key's batch, heads and keys"
        )
    if not kv_heads or heads % kv_heads:
        raise LabError(f"{heads} query heads cannot share {kv_heads} key heads: the first must be a multiple")
    if softcap is not None and not softcap > 0:
        raise LabError(f"softcap is {softcap}, but must be above 0, or None for none")
    if mask is not None and (
        mask.ndim != 4 or mask.shape[0] not in (1, batch) or tuple(mask.shape[1:]) != (1, n_queries, n_keys)
    ):
        raise LabError(
            f"the mask has shape {tuple(mask.shape)}, and must have (1 or {batch}, 1, {n_queries}, {n_keys}): batch, "
            "1, queries, keys"
        )
