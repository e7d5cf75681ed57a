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
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from softmaxlab import files
from softmaxlab.errors import LabError
from softmaxlab.evaluate import find_results

FORMAT = 1
FOLDER = "kernel"
PROGRAMS = ("latency", "duration", "energy", "counters", "timeline", "checks")


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
        return len(self.turns) < rounds * len([k for k in self.kernels if k not in self.refused])

    def done(self, round_: int, kernel: str) -> bool:
        """Whether a turn is there."""
        return any(t["round"] == round_ and t["kernel"] == kernel for t in self.turns)


class Record:
    """The file of a program on a GPU. Opened for one session; entries of others stay in it.

    Args:
        program: of `PROGRAMS`.
        facts: of the machine and its software (`Machine.facts`).
        kind: measured or rehearsed.
        results: folder, as everywhere.

    Raises:
        LabError: the file does not hold a record, or cannot be written.
    """

    def __init__(self, program: str, facts: Mapping[str, str], kind: str, results: str | Path = "results") -> None:
        self.path = folder(results) / f"{program}-{_slug(facts.get('GPU', 'unknown'))}.json"
        self._lock = FileLock(self.path.with_name(f".{self.path.name}.lock"), timeout=5)
        self.program, self.kind = program, kind
        self.session = _digest(dict(facts))
        self.entries = load(self.path) if self.path.is_file() else []
        self.sessions = _read(self.path)["sessions"] if self.path.is_file() else {}
        self.sessions.setdefault(self.session, dict(facts) | {"date": datetime.date.today().isoformat()})

    def __enter__(self) -> Record:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
        except Timeout:
            raise LabError(f"another bench writes {self.path}: wait for it or stop it") from None
        except OSError as error:
            raise LabError(f"{self.path} cannot be written: {error}") from None
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        with contextlib.suppress(OSError):
            os.unlink(self._lock.lock_file)

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


def load(path: Path) -> list[Entry]:
    """The entries of a file.

    Raises:
        LabError: it holds no record of this format.
    """
    try:
        return [Entry(**e) for e in _read(path)["entries"]]
    except TypeError as error:
        raise LabError(f"{path} holds no record of a bench ({error}): move it away to measure again") from None


def _read(path: Path) -> dict[str, Any]:
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        if held["format"] != FORMAT or held["program"] not in PROGRAMS:
            raise ValueError(f"format {held['format']}, program {held['program']}")
        return {"entries": held["entries"], "sessions": held["sessions"], "kind": held["kind"]}
    except (ValueError, KeyError, TypeError) as error:
        raise LabError(f"{path} holds no record of a bench ({error}): move it away to measure again") from None


def stored(program: str, results: str | Path = "results") -> list[tuple[Entry, dict[str, str], str]]:
    """Every entry of a program, with its session's facts and its kind.

    Raises:
        LabError: an unknown program, or nothing is stored of it.
    """
    if program not in PROGRAMS:
        raise LabError(f"unknown bench {program!r}: known are {', '.join(PROGRAMS)}")
    found = []
    for path in sorted(folder(results).glob(f"{program}-*.json")):
        held = _read(path)
        found += [(entry, held["sessions"][entry.session], held["kind"]) for entry in load(path)]
    if not found:
        raise LabError(f"nothing of `bench {program}` is stored in {folder(results)}: run it on a GPU first")
    return found


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
