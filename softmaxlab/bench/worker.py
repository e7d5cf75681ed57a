"""The process of one kernel: it reads a request a line, does it, and answers with a line. `turns.Processes` starts it.

With `--cell` it makes some calls of several kernels instead and ends, which is what a profiler wants around it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from softmaxlab.bench import machine as machines
from softmaxlab.bench.cells import Cell
from softmaxlab.errors import LabError


class Worker:
    """Does what a request names. Args: kernel: its name; machine: where it runs."""

    def __init__(self, kernel: str, machine: machines.Cuda) -> None:
        self.kernel, self.machine = kernel, machine

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request: its result, or {"error": a sentence}."""
        try:
            cell = Cell.parse(request["cell"])
            with self.machine.opened(self.kernel, cell) as call, torch.no_grad():
                q, k, v = self.machine.inputs(cell)[0]
                return getattr(self, f"do_{request['do']}")(cell, lambda: call(q, k, v), request)
        except LabError as error:
            return {"error": str(error)}
        except torch.OutOfMemoryError:
            return {"error": f"cell {request['cell']} does not fit into the GPU's memory with {self.kernel}"}
        except Exception as error:  # a foreign library's, which must not end the other kernels' turns
            return {"error": f"{self.kernel} failed on {request['cell']}: {type(error).__name__}: {_line(error)}"}
        finally:
            gc.collect()
            self.machine.release()

    def do_latency(self, cell: Cell, call: Callable, request: dict[str, Any]) -> dict[str, Any]:
        """A turn of `latency`: warm-up calls, then windows with clock, temperature and power after each."""
        self._repeat(call, request["warmup"])
        self.machine.synchronize()
        windows = []
        for _ in range(request["windows"]):
            ms = self.machine.window(self.kernel, cell, lambda: self._repeat(call, request["calls"]), request["calls"])
            windows.append([ms, *self.machine.read()])
        return {"windows": windows}

    def do_trace(self, cell: Cell, call: Callable, request: dict[str, Any]) -> dict[str, Any]:
        """A turn of `timeline`: all calls traced, the warm-up too, as in the paper's third session."""
        from softmaxlab.bench import timeline

        self._repeat(call, 3)  # what is compiled once is not a call's time
        self.machine.synchronize()
        return timeline.traced(self.kernel, cell, self.machine, call, request["warmup"], request["calls"])

    def do_energy(self, cell: Cell, call: Callable, request: dict[str, Any]) -> dict[str, Any]:
        """A turn of `energy`: it says when it is warm, waits for the word, and loops in chunks with a wait each."""
        self._repeat(call, request["warmup"])
        self.machine.synchronize()
        say({"warm": True})
        sys.stdin.readline()
        done, before, start = 0, self.machine.monitor.energy(), time.monotonic()
        while time.monotonic() - start < request["seconds"]:
            self._repeat(call, request["chunk"])
            self.machine.synchronize()
            done += request["chunk"]
        stop = time.monotonic()
        counted = self.machine.monitor.energy() - before
        return {"start": start, "stop": stop, "calls": done, "counted_j": counted}

    @staticmethod
    def _repeat(call: Callable, n: int) -> None:
        for _ in range(n):
            call()


def say(answer: dict[str, Any]) -> None:
    """One line to the process that asked."""
    _out.write(json.dumps(answer) + "\n")
    _out.flush()


def _line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else "it said nothing"


_out = sys.stdout


def profiled(names: list[str], cell: Cell, machine: machines.Cuda, skip: int, launches: int) -> None:
    """Calls for a profiler around this process: of each kernel some before, and some that it shall count.

    Says of each kernel that it was called, or why not.
    """
    for name in names:
        try:
            with machine.opened(name, cell) as call, torch.no_grad():
                q, k, v = machine.inputs(cell)[0]
                for _ in range(skip):
                    call(q, k, v)
                machine.synchronize()
                with machine.profiled():
                    for _ in range(launches):
                        call(q, k, v)
                    machine.synchronize()
            say({"kernel": name})
        except Exception as error:  # a foreign library's, too; the other kernels go on
            say({"kernel": name, "error": f"{name} failed on {cell}: {_line(error)}"})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kernels", nargs="+")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--cell", help="make calls for a profiler, and end")
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument("--launches", type=int, default=1)
    arguments = parser.parse_args()
    global _out
    # Libraries print to standard output; the answers go out beside them.
    _out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        machine = machines.find(arguments.rehearse)
        if arguments.cell:
            cell = Cell.parse(arguments.cell)
            profiled(arguments.kernels, cell, machine, arguments.skip, arguments.launches)
            return
        worker = Worker(arguments.kernels[0], machine)
    except LabError as error:
        say({"error": str(error)})
        sys.exit(2)
    for line in sys.stdin:
        say(worker.answer(json.loads(line)))


if __name__ == "__main__":
    main()
