"""The functions of `divergence` compiled, so that a chunk of rows is read a few times and not a hundred.

Eager code stays the specification; what is here changes only the speed and, by the compiler's contraction of
products and sums, last digits. One graph serves a whole family of operators (every temperature, every grid of
one kind): their parameters go in as tensors, so that another α or K needs no new compilation. Where there is no
working compiler, a notice is given once and the eager code runs.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from softmaxlab import divergence
from softmaxlab.errors import LabError
from softmaxlab.operators import Grid, MeanThreshold, Operator, PoT, RowmaxPoT, Softmax, Temperature
from softmaxlab.operators.grid import edge_fractions, searched

#: Operators of one pass each hold a few graphs; the compiler's own default is eight for a function.
_GRAPHS = 64


#: Keeps the compiler from writing what is used twice to memory: here computing it again is cheaper than reading it.
_OPTIONS = {"realize_opcount_threshold": 400, "realize_reads_threshold": 64, "realize_acc_reads_threshold": 64}


class Compiled:
    """A function that is compiled when first called, with sizes left open, and runs eagerly if that fails."""

    def __init__(self, function: Callable) -> None:
        self._eager = function
        self._fast: Callable | None = self._first

    def _first(self, *args: Any) -> Any:
        config = torch._dynamo.config
        config.recompile_limit = max(config.recompile_limit, _GRAPHS)
        self._fast = torch.compile(self._eager, dynamic=True, fullgraph=True, options=_OPTIONS)
        return self._fast(*args)

    def __call__(self, *args: Any) -> Any:
        if self._fast is not None:
            try:
                return self._fast(*args)
            except (LabError, torch.OutOfMemoryError):
                raise
            # A compiler fails in many ways (no C++ or Triton, a full disk, its own bugs), with as many types.
            except Exception as error:
                self._fast = None
                first = (str(error).strip() or type(error).__name__).splitlines()[0]
                warnings.warn(
                    f"{self._eager.__name__} runs uncompiled, which is slower and gives the same: {first}",
                    stacklevel=2,
                )
        return self._eager(*args)


@lru_cache(maxsize=256)
def compiled(function: Callable) -> Compiled:
    """The compiled form of a function, one for the process."""
    return Compiled(function)


# Operators

#: Weights of an operator and, where it has a local envelope, how far each row leaves it.
Weigher = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]


def weigher(operator: Operator, *, compile: bool, device: str) -> Weigher:
    """The map from (scores, valid) to (ŵ, excess over the local envelope by row or None).

    Args:
        operator: an operator, or any function with an operator's signature.
        compile: use the compiled family of the operator, if it belongs to one.
        device: where the scores are.
    """
    if compile and (family := _family(operator, device)):
        function, parameters = family
        run = compiled(function)
        return lambda scores, valid: run(scores, valid, *parameters)
    if divergence.has_interval_envelope(operator):

        def audited(scores: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
            w = operator(scores, valid)
            return w, divergence.grid_excess(operator, scores, valid, w)

        return audited
    return lambda scores, valid: (operator(scores, valid), None)


def _family(operator: Operator, device: str) -> tuple[Callable, list[Tensor]] | None:
    """The function that computes all operators of the kind, and this one's parameters."""

    def number(x: float) -> Tensor:
        return torch.tensor(float(x), dtype=torch.float64, device=device)

    match operator:
        case Softmax() | MeanThreshold():
            return _plain(operator), []
        case Temperature():
            return _temperature, [number(operator.alpha)]
        case PoT():
            return _pot, [number(operator.m)]
        case RowmaxPoT():
            return _rowmax_pot(operator.tail), [number(operator.K_max)]
        case Grid() if not searched(operator.K, operator.R):
            uniform = operator.K == 1 or operator.R == 1
            log_rho = -1.0 if uniform else -math.log(operator.R) / (operator.K - 1)
            edges = edge_fractions(operator.K, operator.R).to(device)
            parameters = [edges, number(log_rho), number(math.expm1(operator.K * log_rho))]
            return _grid(operator.recon, operator.map, uniform), parameters
    return None


class _Fields:
    """Stands in for an operator whose fields are tensors."""

    def __init__(self, **fields: Any) -> None:
        for name, value in fields.items():
            setattr(self, name, value)


@lru_cache(maxsize=16)
def _plain(operator: Operator) -> Callable:
    def plain(scores: Tensor, valid: Tensor) -> tuple[Tensor, None]:
        return operator(scores, valid), None

    return plain


def _temperature(scores: Tensor, valid: Tensor, alpha: Tensor) -> tuple[Tensor, None]:
    return Temperature.__call__(_Fields(alpha=alpha), scores, valid), None


def _pot(scores: Tensor, valid: Tensor, m: Tensor) -> tuple[Tensor, None]:
    return PoT.__call__(_Fields(m=m), scores, valid), None


@lru_cache(maxsize=4)
def _rowmax_pot(tail: str) -> Callable:
    def rowmax_pot(scores: Tensor, valid: Tensor, K_max: Tensor) -> tuple[Tensor, None]:
        return RowmaxPoT.__call__(_Fields(K_max=K_max, tail=tail), scores, valid), None

    return rowmax_pot


@lru_cache(maxsize=16)
def _grid(recon: str, map: str, uniform: bool) -> Callable:
    """`Grid.__call__` for edges given as a tensor, with the audit of its envelope from the same intervals."""

    def grid(
        scores: Tensor, valid: Tensor, edges: Tensor, log_rho: Tensor, scale: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        n_intervals, widths = edges.shape[0] - 1, []

        def interval(t: Tensor, *_: Any) -> Tensor:
            index = torch.floor(t * n_intervals) if uniform else torch.floor(torch.log1p(t * scale) / log_rho)
            return index.to(torch.int64).clamp(0, n_intervals - 1)

        def weights_at(t: Tensor, C: Tensor, a: Tensor) -> Tensor:
            widths.append((edges[a + 1] - edges[a]) * C.double())
            edge, below_top = edges.to(t.dtype), (edges - 1).to(t.dtype)

            def value(index: Tensor) -> Tensor:
                return torch.exp(C * below_top[index]) if map == "exp" else edge[index]

            if recon == "upper":
                return value(a + 1)
            if recon == "nearest":
                return value(a + (t - edge[a] >= edge[a + 1] - t))
            if map == "linear":
                return t
            x = ((t - edge[a]) / (edge[a + 1] - edge[a])).clamp(0, 1)
            return torch.lerp(value(a), value(a + 1), x)

        w = Grid.__call__(_Fields(K=None, R=None, _weights_at=weights_at), scores, valid, interval)
        return w, None if map == "linear" else divergence.interval_excess(recon, widths[0], scores, w)

    return grid
