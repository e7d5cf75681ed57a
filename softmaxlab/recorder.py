"""A backend that computes exact softmax attention and, on the way, what many operators would do to its rows.

The model goes on with softmax, so every operator sees the same scores. Nothing of the size of an attention map
outlives its chunk of queries: rows are reduced to sums by layer, head and operator, in FP64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from softmaxlab import divergence, fused, rowkernels
from softmaxlab.backends.reference import causal
from softmaxlab.backends.reference import scores as scores_of
from softmaxlab.divergence import MASS_THRESHOLDS, SUMS, Rows
from softmaxlab.operators import Operator

#: Scores at once. About 30 bytes each are alive in the compiled path, several times that in eager FP64, which on a
#: CPU should stay in cache.
ELEMENTS = {"cpu": 2**17, "other": 2**25}

#: Sums of a layer that no operator has a part in, in order: rows with a key, valid entries, rows with several
#: keys, entries and mass by threshold, Σ|pV|².
SHARED = (
    "rows",
    "entries",
    "phase_rows",
    *(f"entries_{t}" for t in MASS_THRESHOLDS),
    *(f"mass_{t}" for t in MASS_THRESHOLDS),
    "output_squared",
)

#: Of each operator, besides the sums of `divergence.SUMS`: Σ|(p̂ − p)V|².
CHANGE = "change_squared"

#: Extremes of each operator: the largest ε and −ε, and the largest excess over the envelope of a grid.
EXTREMES = ("error_above", "error_below", "excess")


@dataclass
class Totals:
    """What has been added up in one layer.

    Attributes:
        shared: FP64, (len(SHARED), heads).
        sums: FP64, (operators, names, heads); the names are those of `Recorder.names`.
        extremes: FP64, (operators, len(EXTREMES), heads).
    """

    shared: Tensor
    sums: Tensor
    extremes: Tensor


class Recorder:
    """Attention with softmax that records operators; has the signature of `reference.attend`.

    Args:
        operators: what to record, by text form or any other name; functions with an operator's signature do too.
        device: where the model runs.
        only_divergence: JSD and TV alone, which cost a fraction of the rest.
        compiled: run the row functions through the compiler.
        chunk: queries at a time; 0 chooses by `ELEMENTS`.
    """

    def __init__(
        self,
        operators: Mapping[str, Operator | Callable[[Tensor, Tensor], Tensor]],
        *,
        device: str,
        only_divergence: bool = False,
        compiled: bool = False,
        chunk: int = 0,
    ) -> None:
        self.operators = dict(operators)
        self.only_divergence = only_divergence
        self.names = ("jsd", "tv") if only_divergence else (*SUMS, CHANGE)
        self.layers: dict[int, Totals] = {}
        self._compiled, self._chunk = compiled, chunk
        self._weighers = [fused.weigher(op, compile=compiled, device=device) for op in self.operators.values()]

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
    ) -> Tensor:
        """Softmax attention of the arguments, as `reference.attend`; `operator` is not looked at."""
        batch, heads, n_queries, _ = query.shape
        kv_heads, n_keys = key.shape[1:3]
        if layer not in self.layers:
            self.layers[layer] = self._empty(heads, query.device)
        totals = self.layers[layer]
        out = query.new_empty(batch, n_queries, heads, value.shape[-1])
        chunk = self._chunk or self._length(batch * heads * n_keys, n_queries, query.device)
        # From the last chunk to the first: a compiler tunes its code to the first sizes it sees, and the longest
        # rows are the ones that count.
        for start in reversed(range(0, n_queries, chunk)):
            stop = min(start + chunk, n_queries)
            keys = n_keys if mask is not None else stop
            valid = causal(start, stop, query.device)[None, None] if mask is None else mask[:, :, start:stop]
            k, v = key[:, :, None, :keys].float(), value[:, :, :keys].float()
            q = query[:, :, start:stop].float().unflatten(1, (kv_heads, -1))
            s = scores_of(q, k, scaling=scaling, softcap=softcap).flatten(1, 2).masked_fill_(~valid, -torch.inf)
            pv = self._record(totals, s, valid, v)
            out[:, start:stop] = pv.transpose(1, 2).to(out.dtype)
        return out

    def _record(self, totals: Totals, s: Tensor, valid: Tensor, v: Tensor) -> Tensor:
        """Add one chunk's rows, scores (batch, heads, queries, keys), to the totals; returns pV."""
        shape = s.shape[:3]
        flat = s.flatten(0, 2)
        rows: Rows = self._run(divergence.exact_rows)(flat)
        pv = _product(rows.weights, v, shape) / torch.exp(rows.log_z).float().view(*shape, 1)
        counts = [rows.keys > 0, rows.keys, rows.keys > 1]
        shared = [torch.stack(counts).double(), self._run(divergence.row_mass)(rows)]
        totals.shared[:-1] += _by_head(torch.cat(shared), shape)
        totals.shared[-1] += _squares(pv)
        if not self.only_divergence:
            kernels = self._compiled and flat.is_cuda and rowkernels.fit(flat)
            statistics = rowkernels.row_statistics if kernels else self._run(divergence.row_statistics)
            codes = rowkernels.set_codes(flat, rows) if kernels else divergence.set_codes(rows.p)
        for i, (of, weigh) in enumerate(zip(self.operators.values(), self._weighers, strict=True)):
            w, excess = weigh(s, valid)
            w, normalised = w.flatten(0, 2), getattr(of, "normalised", True)
            if self.only_divergence:
                totals.sums[i] += _by_head(self._run(divergence.row_divergence)(flat, rows, w, normalised), shape)
                continue
            # An operator that is anchored elsewhere brings its own phase and offset, functions of the rows.
            phase = getattr(of, "phase", divergence.absolute_octave_phase)(rows)
            offset = getattr(of, "anchor_offset", _no_offset)(rows)
            sums, errors, moved = statistics(flat, rows, w, codes, phase, offset, normalised)
            totals.sums[i, :-1] += _by_head(sums, shape)
            totals.sums[i, -1] += _squares(_product(moved, v, shape))
            _keep_largest(totals.extremes[i, :2], errors, shape)
            if excess is not None:
                _keep_largest(totals.extremes[i, 2:], excess, shape)
        return pv

    def finite(self) -> bool:
        """Whether every sum is; scores that are not finite show here."""
        return all(t.shared.isfinite().all() and t.sums.isfinite().all() for t in self.layers.values())

    def mean_divergence(self) -> dict[str, dict[str, float]]:
        """Mean row-wise JSD and TV of each operator over the rows of all heads, layers and windows."""
        # Layers may lie on several devices.
        rows = sum(t.shared[0].sum().cpu() for t in self.layers.values())
        means = sum(t.sums[:, :2].sum(-1).cpu() for t in self.layers.values()) / rows
        return {name: {"jsd": m[0], "tv": m[1]} for name, m in zip(self.operators, means.tolist(), strict=True)}

    def _run(self, function: Callable) -> Callable:
        return fused.compiled(function) if self._compiled else function

    def _empty(self, heads: int, device: torch.device) -> Totals:
        def full(*shape: int, value: float = 0.0) -> Tensor:
            return torch.full((*shape, heads), value, dtype=torch.float64, device=device)

        n = len(self.operators)
        return Totals(full(len(SHARED)), full(n, len(self.names)), full(n, len(EXTREMES), value=-math.inf))

    def _length(self, scores_a_query: int, n_queries: int, device: torch.device) -> int:
        budget = ELEMENTS["cpu" if device.type == "cpu" else "other"]
        return max(1, min(n_queries, budget // scores_a_query))


def _no_offset(rows: Rows) -> Tensor:
    return torch.zeros_like(rows.top)


def _product(weights: Tensor, v: Tensor, shape: torch.Size) -> Tensor:
    """Weights (rows, keys) times values (batch, kv_heads, keys, dim): (batch, heads, queries, dim), FP32."""
    batch, heads, queries = shape
    grouped = weights.view(batch, v.shape[1], -1, weights.shape[-1])
    return (grouped @ v).view(batch, heads, queries, -1)


def _by_head(sums: Tensor, shape: torch.Size) -> Tensor:
    """Row sums (names, rows) added up by head: (names, heads)."""
    return sums.view(-1, *shape).sum((1, 3))


def _squares(x: Tensor) -> Tensor:
    """Σ x² by head of (batch, heads, queries, dim), FP64."""
    return torch.linalg.vector_norm(x, dim=(0, 2, 3), dtype=torch.float64) ** 2


def _keep_largest(kept: Tensor, new: Tensor, shape: torch.Size) -> None:
    """Raise the kept values (names, heads) to the largest of the rows, (names, rows)."""
    torch.maximum(kept, new.view(-1, *shape).amax((1, 3)), out=kept)
