"""What every bench does before its first turn: find the machine, refuse what cannot run, read the gates, open the
record."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from softmaxlab.bench import gate, kernels, machine, record, turns
from softmaxlab.bench.cells import Cell
from softmaxlab.bench.cells import parse_all as parse_cells


@dataclass(frozen=True)
class Session:
    """An opened bench.

    Attributes:
        machine, record, budget: where it runs, where it is kept, how long it may take.
        entries: one a cell, with gates read and red kernels refused.
        rehearse: without a GPU.
    """

    machine: machine.Cuda
    record: record.Record
    entries: list[record.Entry]
    budget: turns.Budget
    rehearse: bool


@contextlib.contextmanager
def opened(
    program: str,
    cells: Iterable[str | Cell],
    names: Iterable[str],
    protocol: Mapping[str, Any],
    *,
    rounds: int,
    results: str,
    rehearse: bool,
    limit: float,
) -> Iterator[Session]:
    """Open a bench. Arguments as the programs'.

    Raises:
        turns.Stopped: the time is up, or a signal came, before the first turn.
        LabError: no GPU, an unsupported one, FlashAttention-4 missing, a cell or kernel that cannot run there; a file
            of the program that holds something else.
    """
    cells, names = parse_cells(cells), kernels.parse_all(names)
    budget = turns.Budget(limit)
    where = machine.find(rehearse)
    if not rehearse:
        from softmaxlab.fa4 import source

        source.checked()
    where.check(cells)
    results = results or rehearsal_folder()
    record.found(program, results)  # what the table at the end could not show is refused before kernels are compiled
    with turns.interruptible():
        try:
            verdicts = gate.read(cells, names, where, results, budget)
        except KeyboardInterrupt:
            raise turns.Stopped("interrupted while kernels were compiled and read; the same command goes on") from None
        with record.Record(program, where.facts(), where.kind, results) as kept:
            sources = {"sources": {n: where.source(n) for n in names}}
            entries = [kept.entry(c, names, dict(protocol) | sources, rounds * len(names)) for c in cells]
            for entry, cell in zip(entries, cells, strict=True):
                for name in names:
                    verdict = verdicts[name, str(gate.gated(cell))]
                    entry.gates[name] = verdict
                    entry.refused.pop(name, None)
                    if verdict["passed"] is False:
                        entry.refused[name] = f"its gate is red: {verdict['failed']}"
            kept.save()
            yield Session(where, kept, entries, budget, rehearse)


def rehearsal_folder() -> str:
    """Where rehearsals write unless told otherwise: never among what was measured."""
    from softmaxlab.fa4 import source

    return str(source.cache_dir() / "rehearsal")


def keep_compiled() -> None:
    """Let this process use the kernels that are kept on disk; before FlashAttention-4 is imported."""
    for name, value in turns.environment().items():
        if name.startswith("FLASH_ATTENTION_"):
            os.environ.setdefault(name, value)
