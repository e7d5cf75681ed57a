"""The gates before a bench: a kernel that computes something else is not timed.

FlashAttention-4 goes through `fa4.gates` with the cell's dtype, mask, head dimension and grouping. torch's kernels and
E5M2, for which there are no such gates, are held against the same reference in float64.
A variant that is no exponential (`identity`) has no gate; only its time is of use, as a bound.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from softmaxlab.bench import kernels, machine, turns
from softmaxlab.bench.cells import Cell
from softmaxlab.bench.record import Record
from softmaxlab.errors import LabError
from softmaxlab.fa4 import gates, readings
from softmaxlab.fa4.variants import Variant
from softmaxlab.semantics import Semantics

LENGTH = 512  # of the gates' rows: four tiles
#: Largest relative error of an output without gates, about twice what rounding P and the output makes.
ERRORS = {"bf16": 4e-3, "fp16": 6e-4, "e4m3": 5e-2, "e5m2": 1e-1}
PATIENCE = 300.0  # seconds that one kernel may take


def gated(cell: Cell) -> Cell:
    """The cell on which the kernel of a cell is read: the same machine code on short rows, two key-value heads."""
    return Cell(cell.dtype, cell.causal, LENGTH, 2 * cell.gqa, 2, cell.head_dim)


def check(name: str, cell: Cell, where: machine.Cuda) -> dict[str, Any]:
    """Read one kernel.

    Args:
        name: of the kernel.
        cell: of `gated`.
        where: it runs.

    Returns:
        `passed`: whether every gate is green, None without a gate; `failed`: the red ones by name; `readings`.
    """
    try:
        if kernels.is_bound(name):
            with where.opened(name, cell) as call, torch.no_grad():
                call(*where.inputs(cell)[0])  # it must run, and is compiled for the processes to come
            return {"passed": None, "failed": "", "readings": []}
        if kernels.is_reference(name) or cell.dtype not in gates.DTYPES:
            found = _against_reference(name, cell, where)
        else:
            found = _by_gates(name, cell, where)
    except LabError as error:
        return {"passed": False, "failed": str(error), "readings": []}
    except Exception as error:  # a foreign library's; the other kernels go on
        first = (str(error).strip() or "it said nothing").splitlines()[0]
        return {"passed": False, "failed": f"{type(error).__name__}: {first}", "readings": []}
    red = "; ".join(r["gate"] for r in found if not r["passed"])
    return {"passed": not red, "failed": red, "readings": found}


def _by_gates(name: str, cell: Cell, where: machine.Cuda) -> list[dict[str, Any]]:
    case = gates.Case(
        "cell",
        dtype=cell.dtype,
        head_dim=cell.head_dim,
        heads=cell.heads,
        gqa=cell.gqa,
        queries=cell.seq,
        keys=cell.seq,
        causal=cell.causal,
        onehot=True,
    )
    if where.kind == "rehearsed":
        small = gates.smaller([case], queries=64) if cell.causal else [case]
        frame = gates.run([name], attend=readings.simulated, cases=small, device=where.device)
    else:
        frame = gates.run([name], cases=[case], device=where.device)
    rows = frame[["gate", "value", "low", "high", "passed"]].to_dict("records")
    return [{k: float(v) if k in ("value", "low", "high") else v for k, v in r.items()} for r in rows]


def _against_reference(name: str, cell: Cell, where: machine.Cuda) -> list[dict[str, Any]]:
    variant = Variant() if kernels.is_reference(name) else Variant.parse(name)
    q, k, v = where.inputs(cell)[0]
    with where.opened(name, cell) as call, torch.no_grad():
        out, again = call(q, k, v), call(q, k, v)
    expected = readings.reference(q, k, v, variant, Semantics(tau=0), causal=cell.causal)
    error = ((out.double() - expected.out).norm() / expected.out.norm()).item()
    found = [
        ("relative error of the output", error, ERRORS[cell.dtype]),
        ("not finite", int((~out.isfinite()).sum()), 0),
    ]
    found.append(("reruns differ", int((out != again).sum()), 0))
    return [
        {"gate": g, "value": float(x), "low": 0.0, "high": float(h), "passed": bool(0 <= x <= h)} for g, x, h in found
    ]


def read(
    cells: Iterable[Cell], names: Iterable[str], where: machine.Cuda, results: str, budget: turns.Budget
) -> dict[tuple[str, str], dict[str, Any]]:
    """The verdict of every kernel on every cell's machine code; what the session has read already is taken from there.

    The kernels are read in several processes, for most of the time goes into compiling, and what they compile stays
    on disk for the processes that are timed.

    Returns:
        (kernel, text of the gated cell) → passed, failed.

    Raises:
        turns.Stopped: a kernel takes longer than its time, or than the budget has left.
    """
    wanted = {(n, str(gated(c))): None for c in cells for n in names}
    with Record("checks", where.facts(), where.kind, results) as record:
        entries = {(n, c): record.entry(c, [n], {"length": LENGTH, "source": where.source(n)}, 1) for n, c in wanted}
        # A red one is read again: it may have been the machine's fault.
        missing = [key for key, entry in entries.items() if entry.gates.get(key[0], {}).get("passed") is False]
        missing += [key for key, entry in entries.items() if key[0] not in entry.gates]
        stock = [key for key in missing if key[0] == kernels.STOCK]  # first, for every other reading needs it
        for part in (stock, [key for key in missing if key not in stock]):
            for (name, cell), found in _checked(part, where, budget):
                entry = entries[name, cell]
                entry.turns[:] = [{"round": 0, "kernel": name, "readings": found.pop("readings")}]
                entry.gates[name] = found
                record.save()
    return {key: entry.gates[key[0]] for key, entry in entries.items()}


def _checked(
    part: list[tuple[str, str]], where: machine.Cuda, budget: turns.Budget
) -> Iterator[tuple[tuple[str, str], dict[str, Any]]]:
    if where.kind == "rehearsed":
        for name, cell in part:
            yield (name, cell), check(name, Cell.parse(cell), where)
        return
    if not part:
        return
    processes = max(1, min(len(part), (os.cpu_count() or 1) - 2, 14))
    with multiprocessing.get_context("spawn").Pool(processes, _setup, (turns.environment(),)) as pool:
        results = pool.imap_unordered(_in_process, part)
        for n in range(len(part)):
            try:
                yield results.next(timeout=max(0.0, min(PATIENCE, budget.left())))
            except multiprocessing.TimeoutError:
                raise turns.Stopped(
                    f"{n} of {len(part)} kernels were compiled and read when the time was up; the same command goes on"
                ) from None


def _setup(variables: dict[str, str]) -> None:
    os.environ.update(variables)


def _in_process(key: tuple[str, str]) -> tuple[tuple[str, str], dict[str, Any]]:
    return key, check(key[0], Cell.parse(key[1]), machine.find(rehearse=False))
