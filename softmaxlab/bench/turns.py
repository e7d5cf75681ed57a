"""The kernels take turns: in which order, each in a process of its own, until all turns are there or time is up.

Two kernels alternate A0A1, A1A0, A0A1 (paper B.3). More of them go forwards and backwards in the same way.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import softmaxlab
from softmaxlab.bench import ranges
from softmaxlab.bench.kernels import CONTROL, STOCK
from softmaxlab.bench.record import Entry, Record
from softmaxlab.errors import LabError

Ask = Callable[[str, dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Outcome:
    """How far a program came.

    Attributes:
        path: of the record.
        done, total: turns.
        why: why it stopped before the end; empty if it did not.
        refused: what was asked, if all of it was refused everywhere; else empty.
    """

    path: Path
    done: int
    total: int
    why: str = ""
    refused: tuple[str, ...] = ()

    @property
    def partial(self) -> bool:
        """Whether turns are missing."""
        return bool(self.why)

    def __str__(self) -> str:
        if self.why:
            return (
                f"partial, {self.why}: {self.done} of {self.total} turns are in {self.path}; the same command goes on"
            )
        if self.refused:
            return (
                f"nothing of what was asked could be measured: every cell refuses {', '.join(self.refused)}, for the "
                f"reasons above; {self.done} turns of other kernels are in {self.path}"
            )
        return f"all {self.total} turns are in {self.path}"


def order(kernels: list[str], rounds: int) -> Iterator[tuple[int, str]]:
    """(round, kernel): forwards, backwards, forwards."""
    for r in range(rounds):
        yield from ((r, k) for k in (kernels if r % 2 == 0 else kernels[::-1]))


class Budget:
    """Seconds that a program may take, from now. Args: limit: seconds, 0 for no limit."""

    def __init__(self, limit: float = 0) -> None:
        if not ranges.finite(limit) or limit < 0:
            raise LabError(f"limit is {ranges.said(limit)} seconds, but must be finite and at least 0; 0 means none")
        self._end = time.monotonic() + limit if limit else None

    def left(self) -> float:
        """Seconds left."""
        return float("inf") if self._end is None else self._end - time.monotonic()


def take(record: Record, entries: Iterable[Entry], rounds: int, one: Callable, budget: Budget) -> Outcome:
    """Take every turn that is missing, and keep each as it comes.

    Args:
        record: open.
        entries: with their gates read; a kernel that is refused takes no turn.
        rounds: of each entry.
        one: `one(entry, kernel)` gives what is kept of a turn. A LabError of it refuses the kernel in this entry,
            TimeIsUp ends the run.
        budget: a turn is not begun when what is left is less than the longest turn of its entry so far.
    """
    entries = list(entries)
    why = ""
    with interruptible():
        try:
            for entry in entries:
                longest = 0.0
                for round_, kernel in order(entry.kernels, rounds):
                    if kernel in entry.refused or entry.done(round_, kernel):
                        continue
                    if budget.left() < 1.1 * longest or budget.left() <= 0:
                        raise TimeIsUp
                    started = time.monotonic()
                    try:
                        kept = one(entry, kernel)
                        entry.turns.append({"round": round_, "kernel": kernel} | kept)
                    except LabError as error:
                        entry.refused[kernel] = str(error)
                    longest = max(longest, time.monotonic() - started)
                    record.save()
        except TimeIsUp:
            why = "the time limit is reached"
        except KeyboardInterrupt:
            why = "it was interrupted"
    return outcome(record, entries, rounds, why)


def outcome(record: Record, entries: Iterable[Entry], rounds: int, why: str = "") -> Outcome:
    """How far a program came with its entries. Args: rounds: of each entry; why: as `Outcome`."""
    entries = list(entries)
    running = [k for e in entries for k in e.kernels if k not in e.refused]
    every = dict.fromkeys(k for e in entries for k in e.kernels)
    # Stock and control are there to be compared with, and asked for only where nothing else is.
    asked = [k for k in every if k not in (STOCK, CONTROL)] or list(every)
    refused = () if set(asked) & set(running) else tuple(asked)
    return Outcome(record.path, sum(e.taken for e in entries), rounds * len(running), why, refused)


class Stopped(LabError):
    """A bench ended before its first turn, by its limit or by a signal; what is finished is kept."""

    exit_code = 3


class TimeIsUp(Exception):
    """A turn would not end in time; only `take` sees it."""


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM, which `timeout` and schedulers send, ends a program as Ctrl-C does."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not the main thread, which alone gets signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Processes:
    """One process a kernel, started when it is first asked and kept for its next turn.

    Args:
        rehearse: without a GPU.
        timeout: seconds that an answer may take.
    """

    def __init__(self, rehearse: bool, timeout: float = 600) -> None:
        self._rehearse, self._timeout = rehearse, timeout
        self._running: dict[str, subprocess.Popen] = {}
        self._logs: dict[str, Any] = {}

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running.values():
            process.kill()
        for process in self._running.values():
            process.wait()
            process.stdin.close()
            process.stdout.close()
        for log in self._logs.values():
            log.close()

    def start(self, kernels: Iterable[str]) -> None:
        """Start them together: what they import takes seconds."""
        for kernel in kernels:
            if kernel not in self._running:
                self._logs[kernel] = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
                self._running[kernel] = subprocess.Popen(
                    command([kernel], self._rehearse),
                    env=environment(),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._logs[kernel],
                    start_new_session=True,  # Ctrl-C is for the program, which ends its processes
                )

    def ask(self, kernel: str, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request to a kernel's process and wait for the answer.

        Raises:
            LabError: the process refuses, dies, or does not answer in time; in the last two cases it is started
                anew when it is asked again.
        """
        self.start([kernel])
        process = self._running[kernel]
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            ready, _, _ = select.select([process.stdout], [], [], self._timeout)
            line = process.stdout.readline() if ready else b""
        except BrokenPipeError:
            line = b""
        if not line:
            process.kill()
            process.wait()
            self._running.pop(kernel)
            log = self._logs.pop(kernel)
            log.seek(0)
            last = (log.read().strip() or "it said nothing").splitlines()[-1]
            log.close()
            raise LabError(f"the process of {kernel} ended or did not answer within {self._timeout:g} s: {last}")
        answer = json.loads(line)
        if "error" in answer:
            raise LabError(answer["error"])
        return answer


def command(names: Iterable[str], rehearse: bool) -> list[str]:
    """What starts a process for kernels."""
    return [sys.executable, "-m", "softmaxlab.bench.worker", *names, *(["--rehearse"] if rehearse else [])]


def environment() -> dict[str, str]:
    """Of the processes: this package, and compiled kernels kept on disk, each variant's in a folder of its own."""
    from softmaxlab.fa4 import source

    here = str(Path(softmaxlab.__file__).parents[1])  # wherever this package was imported from
    path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    kept = {"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1"}
    kept["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"] = str(source.cache_dir() / "jit")
    return kept | dict(os.environ) | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
