"""The online-softmax kernel's semantics in PyTorch: a row is seen tile by tile, from a running anchor.

Paper §5.1, B.2. Keys come in tiles, from the last one of a row down to the first. Exponents are measured from an
anchor, which follows the running maximum only when that has grown by more than τ octaves; numerator and denominator
are then rescaled by exp(old − new), exactly, not by the operator. Until then the largest exponents are positive, up
to τ. An exact exponential gives softmax whatever the anchors do; a lattice does not, because it moves with them, and
neither does a temperature, because the rescale is not its own.

As in FlashAttention-4 (flash-attn-4 4.0.0b36, `flash_attn/cute/softmax.py` and `flash_fwd_sm100.py`): the row sum
adds the FP32 weights before they are rounded for the product with the values; the FP8 path scales the weights by
2^8 (there in the exponent, before the operator; here after it, which puts a clamp 8 octaves higher); a tile without
a key leaves the anchor alone; a row without a key gives 0. There one thread holds one row and decides for it; the
vote of a warp of 32 rows only says whether the multiplication, by 1 where a row stays, is executed. The decision
per warp that is offered here lets the whole warp follow when one of its rows must.

Nothing is walked one tile after the other but the anchors. Weights of all tiles are computed at once and scaled to
the final anchor before one product with the values: the same sums, another order of FP32 additions.

On CUDA a simulator that does not count is one fused kernel, which does walk (`softmaxlab.backends.triton_online`):
same meaning and same name, other roundings of FP32 sums. `SOFTMAXLAB_SIMULATOR=torch` in the environment keeps it to
the program below.

Not simulated: the hardware's approximate exp2 and reciprocal, tensor-core accumulation, packing of grouped heads
into one tile of rows (rows here are consecutive queries of one head).
"""

from __future__ import annotations

import os
from typing import NamedTuple

import pandas as pd
import torch
from torch import Tensor
from torch.nn.functional import pad

from softmaxlab.backends import fused, reference, shapes, triton_online
from softmaxlab.errors import LabError
from softmaxlab.operators import Operator, RowmaxAnchored, exponents
from softmaxlab.semantics import E4M3_MAX, ROUNDING, WARP, Semantics, converted

#: Scores at once. Their exponents are FP64, so chunks are smaller than the reference's.
ELEMENTS = {"cpu": 2**19, "other": 2**25}

#: What is counted in each layer: rows with a key; those whose final anchor is below their maximum; changes of an
#: anchor; valid weights and those beyond what P can hold; elements of Q, K, V and those that FP8 cut off.
COUNTS = ("rows", "lagging", "rescales", "weights", "p_saturated", "operands", "operands_saturated")


#: The environment's word on who simulates on CUDA: `fused`, where it can, or `torch`.
SWITCH = "SOFTMAXLAB_SIMULATOR"


class Walk(NamedTuple):
    """Rows as the kernel weighs them; … are batch and heads, then queries.

    Attributes:
        weights: FP32, (…, tiles, width), relative to the anchor of their tile and not rounded; 0 at masked keys.
        anchors: nats, (…, tiles), the anchor when the tile was weighed; −∞ as long as there was no key.
        scale: exp(anchor − final anchor), FP32, (…, tiles): the product of the rescales after the tile.
        top: the row maximum, nats, (…).
    """

    weights: Tensor
    anchors: Tensor
    scale: Tensor
    top: Tensor


def check(operator: Operator, semantics: Semantics) -> None:
    """Raise LabError if the operator is not anchored at the row maximum, or has no weights up to τ above it."""
    if not isinstance(operator, RowmaxAnchored):
        raise LabError(
            f"the kernel's semantics need an operator that is anchored at the row maximum, and {operator} is not: "
            f"the reference backend computes it"
        )
    if semantics.tau > operator.headroom:
        raise LabError(
            f"{operator} has no weights above its anchor, but τ = {semantics.tau:g} octaves reach there: use tau=0"
        )


def walk(scores: Tensor, valid: Tensor, operator: RowmaxAnchored, semantics: Semantics) -> Walk:
    """Weigh score rows tile by tile.

    Args:
        scores: FP32, nats, (…, queries, keys), −∞ at masked keys. The keys are a whole number of tiles, or fewer
            than one.
        valid: bool, broadcastable to `scores`.
        operator: anchored at the row maximum.
        semantics: how.

    Raises:
        LabError: as `check`.
    """
    check(operator, semantics)
    width = min(semantics.tile, scores.shape[-1])
    tiles = scores.unflatten(-1, (-1, width))
    anchors, top = running_anchors(tiles.amax(-1), semantics)
    w = operator.at(exponents(tiles, _finite(anchors)[..., None]))
    w.masked_fill_(~valid.unflatten(-1, (-1, width)), 0.0)
    scale = torch.exp2(exponents(_finite(anchors), _finite(anchors[..., :1]))).float()
    scale.masked_fill_(anchors == -torch.inf, 1.0)  # nothing to scale: its weights are 0, and must not meet an infinity
    return Walk(w, anchors, scale, top)


def running_anchors(tops: Tensor, semantics: Semantics) -> tuple[Tensor, Tensor]:
    """The anchor at each tile and the row maximum, from the maxima of the tiles (definition: B.2).

    Args:
        tops: FP32, nats, (…, queries, tiles) in the order of keys; −∞ where a row has no key in a tile.

    Returns:
        Anchors, (…, queries, tiles) in the order of keys: the final one is that of tile 0. The row maximum, (…,
        queries).
    """
    running = tops.flip(-1).cummax(-1).values  # in the order of the visits
    if semantics.tau == 0:
        return running.flip(-1), running[..., -1]
    steps = [running[..., 0]]
    for new in running.unbind(-1)[1:]:
        # From −∞, before the first key, to −∞ is NaN, which moves nothing.
        moves = exponents(new, steps[-1]) > semantics.tau
        steps.append(torch.where(_vote(moves) if semantics.decision == "warp" else moves, new, steps[-1]))
    return torch.stack(steps[::-1], -1), running[..., -1]


def _vote(moves: Tensor) -> Tensor:
    """Whether any row of a warp moves, for each of its rows."""
    n = moves.shape[-1]
    return pad(moves, (0, -n % WARP)).unflatten(-1, (-1, WARP)).any(-1).repeat_interleave(WARP, -1)[..., :n]


def _finite(anchors: Tensor) -> Tensor:
    """Without a key there is nothing to measure from, and 0 serves."""
    return anchors.masked_fill(anchors == -torch.inf, 0.0)


class Simulator:
    """Attention by a kernel's semantics; has the signature of `reference.attend` and counts by layer.

    Args:
        semantics: which.
        counting: False where the counts are not wanted, which lets the fused kernel simulate.
    """

    def __init__(self, semantics: Semantics, *, counting: bool = True) -> None:
        self.semantics = semantics
        self.counting = counting
        self._counts: dict[int, Tensor] = {}

    def __call__(
        self,
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
    ) -> Tensor:
        """Attention with `operator` inside the kernel; arguments, result and errors as `reference.attend`."""
        shapes.check(query, key, value, softcap=softcap, mask=mask)
        check(operator, self.semantics)
        if not self.counting and _has_kernel(query, key, value, operator, self.semantics, mask):
            options = {"scaling": scaling, "softcap": softcap, "mask": mask}
            found = fused.launched(lambda: triton_online.attend(query, key, value, operator, self.semantics, **options))
            if isinstance(found, Tensor):
                return found
            _tell(found)
        batch, heads, n_queries, _ = query.shape
        kv_heads, n_keys = key.shape[1:3]
        dtype, width = query.dtype, min(self.semantics.tile, n_keys)
        operands = [converted(x, self.semantics.qkv) for x in (query, key, value)]
        self._count(layer, operands=sum(x.numel() for x, _ in operands), operands_saturated=sum(n for _, n in operands))
        query, key, value = (x for x, _ in operands)
        # Keys up to a whole number of tiles: the ones added are never valid.
        key, value = (pad(x, (0, 0, 0, -n_keys % width))[:, :, None] for x in (key, value))
        if mask is not None:
            mask = pad(mask, (0, -n_keys % width))[:, :, None]
        out = query.new_empty(batch, n_queries, heads, value.shape[-1], dtype=dtype)
        chunk = chunk or self._length(batch * heads * key.shape[3], query)
        if self.semantics.decision == "warp":
            chunk = -(-chunk // WARP) * WARP
        for start in range(0, n_queries, chunk):
            stop = min(start + chunk, n_queries)
            # Under a plain causal mask the tiles above the diagonal of the chunk's last query are not visited.
            keys = key.shape[3] if mask is not None else -(-stop // width) * width
            if mask is None:
                valid = pad(reference.causal(start, stop, query.device), (0, keys - stop))
            else:
                valid = mask[..., start:stop, :]
            q = query[:, :, start:stop].unflatten(1, (kv_heads, -1))
            s = reference.scores(q, key[..., :keys, :], scaling=scaling, softcap=softcap)
            rows = walk(s.masked_fill_(~valid, -torch.inf), valid, operator, self.semantics)
            pv = self._combine(layer, rows, value[..., :keys, :], operator)
            self._count(layer, weights=valid.sum() * (s.numel() // valid.numel()))
            out[:, start:stop] = pv.flatten(1, 2).transpose(1, 2).to(dtype)
        return out

    def _combine(self, layer: int, rows: Walk, v: Tensor, operator: RowmaxAnchored) -> Tensor:
        """Σ P·V over Σ w from a walk; P is rounded, w is not, unless the operator says how it is summed."""
        w = rows.weights
        total = (operator.row_sum(w) * rows.scale).sum(-1) * 2.0**self.semantics.max_offset
        if self.semantics.max_offset:
            w = w.mul_(2.0**self.semantics.max_offset)
        if self.semantics.p != "none":
            self._count(layer, p_saturated=(w > self.semantics.p_max).sum())
            # E4M3 saturates; the 16-bit formats overflow to infinity.
            kept = w.clamp_(max=E4M3_MAX) if self.semantics.p == "e4m3" else w
            w = kept.to(ROUNDING[self.semantics.p]).float()
        moved = rows.anchors[..., :-1] != rows.anchors[..., 1:]
        self._count(
            layer,
            rows=(rows.top > -torch.inf).sum(),
            lagging=(rows.anchors[..., 0] < rows.top).sum(),
            rescales=(moved & (rows.anchors[..., 1:] > -torch.inf)).sum(),
        )
        top = _finite(rows.top)
        # As `operators.normaliser`: rows without a key give 0, NaN or +∞ in the scores gives NaN.
        total = total.masked_fill(total == 0, 1.0) + (top - top)
        return (w.mul_(rows.scale[..., None]).flatten(-2) @ v) / total[..., None]

    def frame(self) -> pd.DataFrame:
        """What was counted since the start, one row a layer: layer, and the columns `COUNTS`.

        Raises:
            LabError: it does not count.
        """
        if not self.counting:
            raise LabError(f"this simulator of {self.semantics} was made with counting=False, so it has no counts")
        table = {layer: counts.tolist() for layer, counts in sorted(self._counts.items())}
        return pd.DataFrame.from_dict(table, orient="index", columns=COUNTS).rename_axis("layer").reset_index()

    def _count(self, layer: int, **counts: Tensor | int) -> None:
        if not self.counting:
            return
        # On the device: asking for the numbers would make it wait.
        device = next((n.device for n in counts.values() if isinstance(n, Tensor)), "cpu")
        kept = self._counts.setdefault(layer, torch.zeros(len(COUNTS), dtype=torch.int64, device=device))
        for name, n in counts.items():
            kept[COUNTS.index(name)] += n

    def _length(self, scores_a_query: int, query: Tensor) -> int:
        budget = ELEMENTS["cpu" if query.device.type == "cpu" else "other"]
        return max(1, min(query.shape[2], budget // scores_a_query))


def program(device: str) -> str:
    """Which of the two simulates on a type of device: `fused`, where the kernel takes a call, or `torch`.

    Raises:
        LabError: an unknown word in the environment.
    """
    wanted = os.environ.get(SWITCH) or "fused"
    if wanted not in ("fused", "torch"):
        raise LabError(f"{SWITCH} is {wanted!r} in the environment, but must be fused or torch")
    return wanted if device == "cuda" else "torch"


def _has_kernel(
    query: Tensor, key: Tensor, value: Tensor, operator: Operator, semantics: Semantics, mask: Tensor | None
) -> bool:
    """Whether the fused kernel simulates; a notice where it could not on a device that has it."""
    if program(query.device.type) == "torch":
        return False
    why = triton_online.supports(query, key, value, operator, semantics, mask=mask)
    if why is None:
        return True
    _tell(why)
    return False


def _tell(why: str) -> None:
    fused.notice(f"the simulator runs in PyTorch operations and not as a fused kernel: {why}")
