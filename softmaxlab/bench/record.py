"""What a bench has measured, on disk: raw windows as JSON, one file a program and GPU, rewritten whole after each turn.

An entry is one cell with the kernels that took turns in it, in one session: the same GPU, driver, versions and
sources. Only inside an entry are kernels compared (paper B.3). What determines an entry is its key, so a run that is
started again finds its turns and goes on, and a run elsewhere or with other kernels begins an entry of its own.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from softmaxlab import files
from softmaxlab.bench import shapes
from softmaxlab.bench.cells import Cell
from softmaxlab.errors import LabError
from softmaxlab.evaluate import find_results

FORMAT = 1
FOLDER = "kernel"
PATIENCE = 5.0  # seconds for which another bench's lock is waited for
PROGRAMS = tuple(shapes.TURNS)


@dataclass
class Entry:
    """One cell in one session.

    Attributes:
        key: hash of program, session, cell, protocol and kernels.
        cell: text form.
        kernels: names, in the order of the first round.
        protocol: numbers of the program's protocol.
        session: key of the session in the file.
        turns: what came of each turn: round, kernel, and what the program keeps.
        gates: of each kernel: passed (None if it has no gate), failed (text).
        refused: of a kernel that was not measured: the sentence that says why.
        total: turns of the whole protocol.
    """

    key: str
    cell: str
    kernels: list[str]
    protocol: dict[str, Any]
    session: str
    turns: list[dict[str, Any]]
    gates: dict[str, dict[str, Any]]
    refused: dict[str, str]
    total: int

    @property
    def partial(self) -> bool:
        """Whether turns are missing of kernels that were not refused."""
        rounds = self.total // len(self.kernels)
        return self.taken < rounds * len([k for k in self.kernels if k not in self.refused])

    @property
    def taken(self) -> int:
        """Turns that are there of kernels that were not refused."""
        return sum(t["kernel"] not in self.refused for t in self.turns)

    def done(self, round_: int, kernel: str) -> bool:
        """Whether a turn is there."""
        return any(t["round"] == round_ and t["kernel"] == kernel for t in self.turns)


class Held(NamedTuple):
    """What a file holds: of which program, measured or rehearsed, key of a session → its facts, and the entries."""

    program: str
    kind: str
    sessions: dict[str, dict[str, str]]
    entries: list[Entry]


class Record:
    """The file of a program on a GPU. Opened for one session; entries of others stay in it.

    Args:
        program: of `PROGRAMS`.
        facts: of the machine and its software (`Machine.facts`).
        kind: measured or rehearsed.
        results: folder, as everywhere.

    Raises:
        LabError: on opening, when the file does not hold a record of the program, another bench has it open, or it
            cannot be written.
    """

    def __init__(self, program: str, facts: Mapping[str, str], kind: str, results: str | Path = "results") -> None:
        self.path = folder(results) / f"{program}-{_slug(facts.get('GPU', 'unknown'))}.json"
        self.program, self.kind = program, kind
        self.session = _digest(dict(facts))
        self.entries: list[Entry] = []
        self.sessions: dict[str, dict[str, str]] = {}
        self._facts = dict(facts) | {"date": datetime.date.today().isoformat()}
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Record:
        with contextlib.ExitStack() as opening:
            opening.enter_context(locked(self.path))
            # Only now: until it let go, another bench may have added turns, which a save of ours would drop.
            held = read(self.path) if self.path.exists() else Held(self.program, self.kind, {}, [])
            if held.program != self.program:
                raise shapes.no_record(self.path, f"program {held.program}")
            self.entries, self.sessions = held.entries, held.sessions
            self.sessions.setdefault(self.session, self._facts)
            self._open = opening.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def entry(self, cell: object, kernels: Iterable[str], protocol: Mapping[str, Any], total: int) -> Entry:
        """The entry of a cell: the one that is there, or a new one."""
        kernels = list(kernels)
        what = [self.program, self.kind, self.session, str(cell), dict(protocol), sorted(kernels)]
        key = _digest(what)
        found = next((e for e in self.entries if e.key == key), None)
        if found is None:
            found = Entry(key, str(cell), kernels, dict(protocol), self.session, [], {}, {}, total)
            self.entries.append(found)
        return found

    def save(self) -> None:
        """Write everything, whole or not at all.

        Raises:
            LabError: the folder cannot be written; the old file is as it was.
        """
        head = {"format": FORMAT, "program": self.program, "kind": self.kind, "sessions": self.sessions}
        kept = [e for e in self.entries if e.turns or e.refused or e.gates]
        lines = ",\n".join(json.dumps(vars(e), allow_nan=True) for e in kept)
        write(self.path, json.dumps(head)[:-1] + f',\n"entries": [\n{lines}\n]}}\n')


def folder(results: str | Path = "results") -> Path:
    """Where the records lie."""
    return find_results(str(results)) / FOLDER


def read(path: Path) -> Held:
    """What a file holds.

    Raises:
        LabError: it holds no record of this format.
    """
    held = shapes.load(path, FORMAT, shapes.FILE)
    if held["program"] not in PROGRAMS:
        raise shapes.no_record(path, f"program {held['program']}")
    try:
        entries = [Entry(**e) for e in held["entries"]]
    except TypeError as error:
        raise shapes.no_record(path, error) from None
    unknown = next((e.session for e in entries if e.session not in held["sessions"]), None)
    if unknown is not None:
        raise shapes.no_record(path, f"there is no session {unknown}")
    return Held(held["program"], held["kind"], held["sessions"], entries)


def load(path: Path) -> list[Entry]:
    """The entries of a file. Raises LabError as `read`."""
    return read(path).entries


def found(program: str, results: str | Path = "results") -> list[tuple[Entry, dict[str, str], str]]:
    """Every entry of a program, with its session's facts and its kind; none where nothing is stored.

    Raises:
        LabError: an unknown program; a file that holds something else, or what its tables cannot show.
    """
    if program not in PROGRAMS:
        raise LabError(f"unknown bench {program!r}: known are {', '.join(PROGRAMS)}")
    turn, protocol = shapes.TURNS[program]
    there = []
    for path in sorted(folder(results).glob(f"{program}-*.json")):
        held = read(path)
        try:
            if held.program != program:
                raise ValueError(f"program {held.program}")
            for i, entry in enumerate(held.entries):
                shapes.check(entry.turns, [turn], f"entries[{i}].turns")
                shapes.check(entry.protocol, protocol, f"entries[{i}].protocol")
                Cell.parse(entry.cell)
        except (ValueError, LabError) as error:
            raise shapes.no_record(path, error) from None
        there += [(entry, held.sessions[entry.session], held.kind) for entry in held.entries]
    return there


def stored(program: str, results: str | Path = "results") -> list[tuple[Entry, dict[str, str], str]]:
    """As `found`, but raises LabError where nothing is stored."""
    there = found(program, results)
    if not there:
        raise LabError(f"nothing of `bench {program}` is stored in {folder(results)}: run it on a GPU first")
    return there


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """While open, no other bench writes a file. Its folder is made.

    The system frees the lock when its holder dies. The empty file beside it stays: if it were removed, one bench
    could hold the lock of the removed file, for which it waited, and another one that of a new file.

    Raises:
        LabError: another bench does not let go, or the folder cannot be written.
    """
    lock = FileLock(path.with_name(f".{path.name}.lock"), timeout=PATIENCE)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise LabError(f"another bench writes {path}: wait for it or stop it") from None
    except OSError as error:
        raise LabError(f"{path} cannot be written: {error}") from None
    try:
        yield
    finally:
        lock.release()


def write(path: Path, text: str) -> None:
    """Write a file whole or not at all. Raises LabError where that is not possible."""
    try:
        files.write_text(path, text)
    except OSError as error:
        raise LabError(f"{path} cannot be written: {error}") from None


def _digest(what: object) -> str:
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-") or "unknown"
