"""Call latency by the paper's protocol (B.3), and the kernels' duration by CUDA graphs.

A call below some hundred microseconds waits for the host more than for the GPU; a graph of calls does not. Call
latency has a process for each kernel and alternates rounds of windows; duration has one process, where every sweep
replays each kernel's graph once, in an order that is drawn anew.
"""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Callable, Iterable

import torch

from softmaxlab.bench import kernels, ranges, session, turns
from softmaxlab.bench.cells import Cell
from softmaxlab.bench.record import Entry
from softmaxlab.errors import LabError

MOST_CALLS = 512  # in a graph
MOST_MS = 60_000.0  # of a window: as many of the longest calls that there are
REHEARSAL = {"calls": 10, "warmup": 5}


def run(
    cells: Iterable[str | Cell],
    names: Iterable[str] = kernels.DEFAULT,
    *,
    rounds: int = 3,
    windows: int = 7,
    calls: int = 100,
    warmup: int = 50,
    results: str = "results",
    rehearse: bool = False,
    limit: float = 0,
) -> turns.Outcome:
    """Measure call latency.

    Args:
        cells: names of sets and text forms.
        names: kernels, as `kernels.parse`; stock and control are always among them.
        rounds: in which the order of the kernels alternates.
        windows, calls: windows a round and kernel, calls a window.
        warmup: calls before the first window of a round.
        results: folder of the record.
        rehearse: without a GPU.
        limit: seconds, 0 for none; nothing that is finished is lost.

    Returns:
        How far it came.

    Raises:
        LabError: as `session.opened`; a number out of its range.
    """
    for name, value in {"rounds": rounds, "windows": windows, "calls": calls}.items():
        ranges.count(name, value)
    ranges.count("warmup", warmup, 0)
    protocol = {"rounds": rounds, "windows": windows, "calls": calls, "warmup": warmup, "lse": True}
    opened = session.opened(
        "latency", cells, names, protocol, rounds=rounds, results=results, rehearse=rehearse, limit=limit
    )
    with opened as s, turns.Processes(rehearse) as processes:
        processes.start(sorted({k for e in s.entries for k in e.kernels if k not in e.refused and e.partial}))

        def one(entry: Entry, kernel: str) -> dict:
            return processes.ask(kernel, {"do": "latency", "cell": entry.cell} | protocol)

        return turns.take(s.record, s.entries, rounds, one, s.budget)


def duration(
    cells: Iterable[str | Cell],
    names: Iterable[str] = kernels.DEFAULT,
    *,
    sweeps: int = 21,
    window_ms: float = 20.0,
    results: str = "results",
    rehearse: bool = False,
    limit: float = 0,
) -> turns.Outcome:
    """Measure the kernels' duration through CUDA graphs with rotating inputs, variants interleaved.

    Args:
        sweeps: replays of each kernel's graph.
        window_ms: about how long a replay shall take; it has as many calls as that needs, and at least one of each set
            of inputs. The sets together exceed the cache.
        cells, names, results, rehearse, limit: as `run`.
    """
    ranges.count("sweeps", sweeps)
    ranges.amount("window_ms", window_ms, MOST_MS)
    protocol = {"sweeps": sweeps, "window_ms": window_ms, "lse": True}
    if not rehearse:
        session.keep_compiled()
    opened = session.opened(
        "duration", cells, names, protocol, rounds=sweeps, results=results, rehearse=rehearse, limit=limit
    )
    with opened as s:
        why = ""
        try:
            for entry in s.entries:
                if entry.partial and not _cell(s, entry, sweeps, window_ms):
                    why = "the time limit is reached"
                    break
        except KeyboardInterrupt:
            why = "it was interrupted"
            s.record.save()
        return turns.outcome(s.record, s.entries, sweeps, why)


def _cell(s: session.Session, entry: Entry, sweeps: int, window_ms: float) -> bool:
    """All sweeps of a cell that are missing; False when the time is up."""
    if s.budget.left() <= 0:
        return False
    cell = Cell.parse(entry.cell)
    with torch.no_grad():
        replays = _graphs(s, entry, cell, window_ms)
    try:
        for sweep in range(sweeps):
            here = {t["kernel"] for t in entry.turns if t["round"] == sweep}
            if replays.keys() <= here:
                continue
            if s.budget.left() <= 0:
                return False
            drawn = sorted(replays)
            random.Random(f"{cell} {sweep}").shuffle(drawn)
            found = []
            for kernel in drawn:
                replay, calls = replays[kernel]
                ms = s.machine.window(kernel, cell, replay, calls)
                window = [ms, *s.machine.read()]
                found.append({"round": sweep, "kernel": kernel, "windows": [window], "calls": calls})
            # A sweep counts when every kernel has had its turn: one from when a kernel was refused is made anew.
            kept = [t for t in entry.turns if t["round"] != sweep or t["kernel"] not in replays]
            entry.turns[:] = kept + found
        return True
    finally:
        s.record.save()
        replays.clear()
        gc.collect()
        s.machine.release()


def _graphs(s: session.Session, entry: Entry, cell: Cell, window_ms: float) -> dict[str, tuple[Callable, int]]:
    """Of each kernel that runs, what replays its graph, warm, and the calls in it: the same number for all."""
    inputs = s.machine.inputs(cell, s.machine.sets(cell))
    found: dict[str, tuple[Callable, int]] = {}
    calls = 0
    for kernel in entry.kernels:
        if kernel in entry.refused:
            continue
        try:
            with s.machine.opened(kernel, cell) as call:

                def work(n: int, call: Callable = call) -> None:
                    for i in range(n):
                        call(*inputs[i % len(inputs)])

                work(1)  # compiles
                s.machine.synchronize()
                took = s.machine.timed(lambda w=work: w(len(inputs))) / len(inputs)
                if not calls:
                    calls = len(inputs) * math.ceil(window_ms / max(took, 1e-3) / len(inputs))
                    calls = max(len(inputs), min(calls, MOST_CALLS))
                replay = s.machine.graph(lambda w=work, n=calls: w(n))
                replay()
                s.machine.synchronize()
                found[kernel] = replay, calls
        except LabError as error:
            entry.refused[kernel] = str(error)
        except torch.OutOfMemoryError:
            entry.refused[kernel] = f"cell {cell} does not fit into the GPU's memory with {kernel}"
        except Exception as error:  # a foreign library's; the other kernels go on
            first = (str(error).strip() or "it said nothing").splitlines()[0]
            entry.refused[kernel] = f"{kernel} failed on {cell}: {type(error).__name__}: {first}"
    return found
