"""Kernel duration apart from call latency, by torch's profiler (CUPTI), as Table B4 has it from Nsight Systems.

Both numbers are of the traced run, and tracing costs the host time: the call latency here is no headline.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from softmaxlab.bench import kernels, ranges, session, turns
from softmaxlab.bench.cells import Cell
from softmaxlab.bench.machine import Cuda
from softmaxlab.bench.record import Entry
from softmaxlab.errors import LabError

REHEARSAL = {"calls": 20, "warmup": 5}
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")


def run(
    cells: Iterable[str | Cell],
    names: Iterable[str] = (kernels.STOCK, kernels.CONTROL, "h15"),
    *,
    rounds: int = 1,
    calls: int = 200,
    warmup: int = 50,
    results: str = "results",
    rehearse: bool = False,
    limit: float = 0,
) -> turns.Outcome:
    """Trace each kernel and cell in the kernel's own process.

    Args:
        rounds: traces of a kernel and cell, whose order alternates; the paper has one.
        calls, warmup: calls that are timed, and before them; all are traced.
        cells, names, results, rehearse, limit: as `latency.run`.

    Raises:
        LabError: as `latency.run`.
    """
    ranges.count("rounds", rounds)
    ranges.count("calls", calls)
    ranges.count("warmup", warmup, 0)
    protocol = {"rounds": rounds, "calls": calls, "warmup": warmup, "lse": True}
    opened = session.opened(
        "timeline", cells, names, protocol, rounds=rounds, results=results, rehearse=rehearse, limit=limit
    )
    with opened as s, turns.Processes(rehearse) as processes:
        processes.start(sorted({k for e in s.entries for k in e.kernels if k not in e.refused and e.partial}))

        def one(entry: Entry, kernel: str) -> dict[str, Any]:
            return processes.ask(kernel, {"do": "trace", "cell": entry.cell} | protocol)

        return turns.take(s.record, s.entries, rounds, one, s.budget)


def traced(kernel: str, cell: Cell, machine: Cuda, call: Callable[[], Any], warmup: int, calls: int) -> dict[str, Any]:
    """Trace calls.

    Returns:
        `kernel_us`: duration of the attention kernel in each traced call, in order, warm-up included; `launch_us`:
        of the launches on the host; `call_us`: host time a timed call; `name` of the kernel; `others`: how many other
        kernels ran.

    Raises:
        LabError: the profiler saw no kernel.
    """
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if machine.kind == "measured" else [])
    with profile(activities=activities) as profiler:
        for _ in range(warmup):
            call()
        machine.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        machine.synchronize()
        took = time.perf_counter() - start
    events = [(str(e.device_type), e.name, e.time_range.start, e.time_range.elapsed_us()) for e in profiler.events()]
    if machine.kind == "rehearsed":
        events += rehearsed(kernel, cell, machine, warmup + calls)
    return read(events, warmup + calls) | {"call_us": 1e6 * took / calls}


def read(events: list[tuple[str, str, float, float]], calls: int) -> dict[str, Any]:
    """Durations from a trace. Args: events: (device type, name, start µs, duration µs), of `calls` calls."""
    device = sorted((e for e in events if e[0].endswith("CUDA") and not e[1].startswith(("Mem", "mem"))), key=_start)
    if not device:
        raise LabError(
            "the profiler saw no kernel on the GPU: CUPTI is missing or refused; its counters may need a permission "
            "(NVreg_RestrictProfilingToAdminUsers=0)"
        )
    spent: dict[str, float] = {}
    for _, name, _, duration in device:
        spent[name] = spent.get(name, 0.0) + duration
    name = max(spent, key=spent.get)
    ours = [duration for _, n, _, duration in device if n == name]
    if len(ours) != calls:
        raise LabError(
            f"the profiler saw {len(ours)} launches of {name[:60]} in {calls} calls, but one a call is expected"
        )
    launches = [d for kind, n, _, d in sorted(events, key=_start) if kind.endswith("CPU") and n in LAUNCHES]
    return {
        "name": name,
        "kernel_us": [round(d, 3) for d in ours],
        "launch_us": [round(d, 3) for d in launches],
        "others": len(device) - len(ours),
    }


def _start(event: tuple[str, str, float, float]) -> float:
    return event[2]


def rehearsed(kernel: str, cell: Cell, machine: Cuda, calls: int) -> list[tuple[str, str, float, float]]:
    """Events as a trace of the GPU has them, with made-up times."""
    found = []
    for i in range(calls):
        us = 1e3 * machine.window(kernel, cell, lambda: None, 1)
        found.append(("DeviceType.CPU", "cuLaunchKernelEx", i * 2 * us, 4.5))
        found.append(("DeviceType.CUDA", "kernel_cutlass_kernel_flash", i * 2 * us + 5, us))
    return found
