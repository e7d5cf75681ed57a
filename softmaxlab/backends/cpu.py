"""The CPU backend: a tile of scores stays in cache between its two matrix products, and the map on it is compiled.

A task is the heads that share a key head and a run of queries, over all the keys these see. It takes torch's matrix
product, the operator's map row by row (`cpu_tiles`, compiled by Numba) and torch's product again. Tasks are spread over
as many threads as torch has; inside a task everything is single-threaded, so one pool of threads is at work and there
is no second OpenMP. What a task computes does not depend on which thread takes it, so runs reproduce bit by bit,
whatever the number of threads.

The first call compiles the maps, some seconds, and keeps them in the project's cache folder.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass

import numpy as np
import torch
from torch import Tensor

from softmaxlab.operators import Operator
from softmaxlab.operators.support import kept_counts

try:
    from softmaxlab.backends import cpu_tiles
    from softmaxlab.backends.cpu_plan import Plan, plan

    _MISSING = ""
except ImportError as error:  # no wheel of Numba for this system
    _MISSING = f"the CPU backend needs Numba, which cannot be imported ({error})"

#: Scores of a tile: 4 MiB at most. Smaller ones fit a core's own cache better, but the products arrange keys and values
#: anew for each tile, and with 2,048 keys that costs more than the cache saves (measured: 1 MiB takes 1.35 times as
#: long).
ELEMENTS = 2**20
#: Rows of a tile: fewer than the least make the products slow, more than the most waste work on the diagonal.
LEAST, MOST = 64, 384
DTYPES = (torch.float32, torch.bfloat16)
_NONE = np.empty((0, 0), dtype=np.bool_)


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
) -> Tensor:
    """Attention with `operator` in the place of softmax; arguments and result as `reference.attend`.

    Scores, weights, row sums and products are FP32, as there. The exponent of a rowmax-anchored lattice, FP64 there,
    is an FP32 pair here, good to 46 bits; weights below 2^−126 of the largest are 0 (see `cpu_rows`).

    Call `supports` first: what it refuses is not computed correctly here.
    """
    batch, heads, n_queries, _ = query.shape
    kv_heads, n_keys = key.shape[1:3]
    if not query.numel():
        return query.new_zeros(batch, n_queries, heads, value.shape[-1])
    chosen = plan(operator)
    with torch.inference_mode():
        out = torch.empty(batch, n_queries, heads, value.shape[-1])
        visible = _visible(mask, batch, n_queries, n_keys)
        tasks = _tasks(batch, kv_heads, heads // kv_heads, n_queries, n_keys, visible)
        job = _Job(
            query.unflatten(1, (kv_heads, -1)),
            key.float().contiguous().mT,  # heads apart: rows that lie next to each other make the products faster
            value.float().contiguous(),
            out.numpy(),
            visible,
            chosen,
            kept_counts(chosen.fraction, n_keys).numpy() if chosen.fraction else np.zeros(1, np.int64),
            (np.float32(scaling), np.float32(softcap or 0.0), bool(operator.normalised)),
        )
        _spread(job, tasks)
    return out.to(query.dtype)


def supports(
    query: Tensor, key: Tensor, value: Tensor, operator: Operator, *, mask: Tensor | None = None
) -> str | None:
    """None if `attend` computes this, else one clause that says why not."""
    if _MISSING:
        return _MISSING
    if any(t.device.type != "cpu" for t in (query, key, value)):
        return f"the CPU backend computes on the CPU, and the query is on {query.device}"
    if query.dtype not in DTYPES or key.dtype != query.dtype or value.dtype != query.dtype:
        return f"the CPU backend takes float32 or bfloat16, and the query is {query.dtype}"
    if torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value)):
        return "the CPU backend has no gradients"
    if mask is None and query.shape[2] != key.shape[2]:
        return f"without a mask {query.shape[2]} queries over {key.shape[2]} keys are not causal"
    if mask is not None and (mask.dtype != torch.bool or mask.ndim != 4 or mask.shape[1] != 1):
        return f"the CPU backend takes a bool mask (batch, 1, queries, keys), not {mask.dtype} {tuple(mask.shape)}"
    try:
        plan(operator)
    except NotImplementedError as error:
        return str(error)
    return None


# Which keys a query sees, and the tasks


@dataclass(frozen=True)
class _Seen:
    """Of each query of one batch entry: first valid key, the one after the last, and the mask where that is not all."""

    first: np.ndarray
    last: np.ndarray
    mask: np.ndarray


def _visible(mask: Tensor | None, batch: int, n_queries: int, n_keys: int) -> list[_Seen]:
    """One entry for each of the batch; the same one where they share it."""
    if mask is None:
        last = np.arange(1, n_queries + 1)
        return [_Seen(np.zeros_like(last), last, _NONE)] * batch
    seen = []
    for one in mask[:, 0].expand(-1, n_queries, n_keys).contiguous().numpy():
        first, last = np.empty(n_queries, np.int64), np.empty(n_queries, np.int64)
        holes = cpu_tiles.ranges(one, first, last)
        seen.append(_Seen(first, last, one if holes else _NONE))
    return seen * batch if len(seen) == 1 else seen


@dataclass(frozen=True)
class _Task:
    """Queries start..stop−1 of the heads that share a key head, over the keys low..high−1."""

    batch: int
    kv_head: int
    start: int
    stop: int
    low: int
    high: int


def _tasks(batch: int, kv_heads: int, group: int, n_queries: int, n_keys: int, visible: list[_Seen]) -> list[_Task]:
    """The costly ones first, so that the threads end together."""
    length = max(1, max(LEAST, min(MOST, ELEMENTS // n_keys)) // group)
    made = []
    for b in range(batch):
        for start in range(0, n_queries, length):
            part = slice(start, min(start + length, n_queries))
            first, last = visible[b].first[part], visible[b].last[part]
            some = last > first
            low, high = (int(first[some].min()), int(last[some].max())) if some.any() else (0, 0)
            made += [_Task(b, h, part.start, part.stop, low, high) for h in range(kv_heads)]
    return sorted(made, key=lambda t: (t.low - t.high) * (t.stop - t.start))


@dataclass(frozen=True)
class _Job:
    """What the tasks of a call share.

    Attributes:
        query: (batch, kv_heads, group, queries, dim).
        key: FP32, (batch, kv_heads, dim, keys).
        value: FP32, (batch, kv_heads, keys, dim).
        out: FP32, (batch, queries, heads, dim).
        visible: one entry for each of the batch.
        plan, kept, numbers: as `cpu_tiles.tile` takes them.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    out: np.ndarray
    visible: list[_Seen]
    plan: Plan
    kept: np.ndarray
    numbers: tuple[np.float32, np.float32, bool]

    def run(self, tasks: list[_Task], turns: Iterator[int]) -> None:
        """Take tasks until there are none; a thread's share, in buffers of its own."""
        group, dim = self.query.shape[2], self.value.shape[-1]
        most = max((t.stop - t.start) * group * (t.high - t.low) for t in tasks)
        length = max(t.stop - t.start for t in tasks) * group
        keys = max(t.high - t.low for t in tasks)
        scores, product, sums = torch.empty(most), torch.empty(length, dim), np.empty(length, np.float32)
        room = np.empty(2 * keys + len(self.plan.table), np.float32)
        plan = self.plan
        with torch.inference_mode():  # holds for a thread, not for the process
            for index in turns:
                if index >= len(tasks):
                    return
                b, h, start, stop, low, high = astuple(tasks[index])
                n, seen = stop - start, self.visible[b]
                q = self.query[b, h, :, start:stop].reshape(n * group, -1).float()
                tile = scores[: len(q) * (high - low)].view(len(q), high - low)
                torch.mm(q, self.key[b, h].narrow(1, low, high - low), out=tile)
                ranges = seen.first, seen.last, seen.mask
                maps = plan.kind, plan.a, plan.b, plan.table, self.kept
                cpu_tiles.tile(tile.numpy(), low, start, n, *ranges, *self.numbers, *maps, room, sums)
                pv = torch.mm(tile, self.value[b, h].narrow(0, low, high - low), out=product[: len(q)])
                cpu_tiles.finish(pv.numpy(), sums, self.out[b], start, h * group, n)


# Threads

_pools: dict[int, ThreadPoolExecutor] = {}
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pools.clear)  # a child has the pool but none of its threads


def _spread(job: _Job, tasks: list[_Task]) -> None:
    """Run the tasks on as many threads as torch has, each of them single-threaded in torch."""
    turns, threads = itertools.count(), torch.get_num_threads()
    if threads == 1:
        return job.run(tasks, turns)
    if threads not in _pools:
        _pools[threads] = ThreadPoolExecutor(threads, "softmaxlab", initializer=torch.set_num_threads, initargs=(1,))
    try:
        for future in [_pools[threads].submit(job.run, tasks, turns) for _ in range(min(threads, len(tasks)))]:
            future.result()
    finally:
        torch.set_num_threads(threads)  # a thread's own where it is set, and what threads yet to come begin with
