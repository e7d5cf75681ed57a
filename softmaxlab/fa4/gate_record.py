"""Readings of the gates as a file: what a run on a GPU leaves for the book, and a rehearsal where there is none.

A record says its kind: `measured` on a GPU, or `simulated` by `readings.simulated`. A rehearsal never takes the place
of measured readings.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from softmaxlab import files
from softmaxlab.errors import LabError
from softmaxlab.evaluate import find_results
from softmaxlab.fa4 import bounds, doctor, gates, readings
from softmaxlab.fa4.variants import Variant, variants

FILE = Path("kernel") / "gates.json"


@dataclass(frozen=True)
class Record:
    """One run of the gates.

    Attributes:
        kind: `measured` or `simulated`.
        frame: readings, as `gates.run` gives them.
        distributions: histograms of each variant and one-hot case, as `gates.run` gives them.
        environment: versions and GPU, as `doctor.environment`.
        seconds: that the run took.
    """

    kind: str
    frame: pd.DataFrame
    distributions: list[dict[str, Any]]
    environment: dict[str, str]
    seconds: float

    def distribution(self, variant: str, case: str) -> dict[str, Any]:
        """Of one variant and case. Raises LabError where it was not read."""
        for found in self.distributions:
            if (found["variant"], found["case"]) == (str(Variant.parse(variant)), case):
                return found
        raise LabError(f"the gates' record has no distribution of {variant} in the case {case!r}")


def chosen(names: Iterable[str] | None = None) -> list[Variant]:
    """The variants by name; all of the catalogue that are exponentials if None."""
    return [v for v in variants() if v.kind != "identity"] if names is None else [Variant.parse(n) for n in names]


def measure(names: Iterable[str] | None = None, processes: int | None = None) -> Record:
    """Send variants through the gates on this machine's GPU. Arguments as `chosen` and `gates.run`."""
    if processes is None:
        processes = max(1, min(12, (os.cpu_count() or 1) - 2))
    return _run("measured", chosen(names), processes=processes)


def rehearse(names: Iterable[str] | None = None, cases: Iterable[gates.Case] | None = None) -> Record:
    """The same with the simulated kernel, on any machine; with fewer queries unless `cases` are given."""
    cases = gates.smaller() if cases is None else cases
    return _run("simulated", chosen(names), attend=readings.simulated, device="cpu", cases=cases)


def write(record: Record, path: Path) -> None:
    """Keep a record as JSON, whole or not at all.

    Raises:
        LabError: the file cannot be written; or it holds measured readings and these are simulated.
    """
    if path.exists() and record.kind != "measured" and read(path).kind == "measured":
        raise LabError(f"{path} holds measured readings and these are {record.kind}: write them to another file")
    rows = [{n: _finite(v) for n, v in row.items()} for row in record.frame.to_dict("records")]
    head = {"kind": record.kind, "seconds": record.seconds, "environment": record.environment}
    head["tolerances"] = {d: dict(zip(bounds.TOLERANCE_NAMES, t, strict=True)) for d, t in bounds.TOLERANCES.items()}
    parts = [json.dumps(part, allow_nan=False) for part in (*rows, *record.distributions)]
    split = len(rows)
    text = (
        f'{json.dumps(head)[:-1]},\n"readings": [\n' + ",\n".join(parts[:split]) + '\n],\n"distributions": [\n'
        f"{','.join(f'{chr(10)}{p}' for p in parts[split:]).lstrip()}\n]}}\n"
    )
    try:
        files.write_text(path, text)
    except OSError as error:
        raise LabError(f"{path} cannot be written ({error.strerror or error})") from None


def read(path: Path) -> Record:
    """A record that `write` kept. Raises LabError where there is none in it."""
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        frame = pd.DataFrame(held["readings"])
        for name, absent in (("value", math.nan), ("low", -math.inf), ("high", math.inf)):
            frame[name] = frame[name].astype(float).fillna(absent)
        return Record(held["kind"], frame, held["distributions"], held["environment"], held["seconds"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LabError(f"{path} holds no readings of the gates ({error}): `softmaxlab gates` makes them") from None


def stored(results: str | Path = "results") -> Record | None:
    """The record in a results folder, or beside the package where a relative one has none; None if there is none."""
    beside = Path(__file__).parents[2] / results / FILE
    path = next((p for p in (find_results(str(results)) / FILE, beside) if p.is_file()), None)
    return path and read(path)


def main(
    *variants: str,
    rehearse: bool = False,
    processes: int | None = None,
    out: Path | None = None,
    results: str = "results",
) -> None:
    """Send the patched FlashAttention-4 through the gates on this GPU, and keep the readings for the book.

    Fails if a gate of a variant that is offered for use is red; the readings are kept all the same. Named variants
    take the place of their earlier readings, and those of the others stay.

    Parameters
    ----------
    variants
        Which, e.g. h15 "g(3)"; all that are exponentials by default.
    rehearse
        A simulated kernel in place of the GPU's, with fewer queries; kept only where --out is given.
    processes
        Processes that share the variants, for most of the time goes into compiling.
    out
        The file to write, in place of kernel/gates.json in the results folder.
    results
        The results folder.
    """
    record = globals()["rehearse"](variants or None) if rehearse else measure(variants or None, processes)
    path = out or (None if rehearse else find_results(results) / FILE)
    table = gates.verdict(record.frame)
    if path is not None:
        write(_joined(read(path), record) if variants and path.exists() else record, path)
    print(table.to_string(index=False))
    print(f"{record.kind}{f', kept in {path}' if path else ', not kept'}")
    red = table[table.offered & (table.passed < table.gates)]
    if len(red):
        raise LabError(f"gates are red of {len(red)} variants that are offered for use: {', '.join(red.variant)}")


def _run(kind: str, names: list[Variant], **options: Any) -> Record:
    started = time.perf_counter()
    frame = gates.run(names, **options)
    seconds = round(time.perf_counter() - started, 1)
    return Record(kind, frame, frame.attrs["distributions"], doctor.environment(), seconds)


def _joined(old: Record, new: Record) -> Record:
    """The old record with the new one's variants in their places.

    Raises:
        LabError: they are not of one kind, GPU and set of versions.
    """
    if (old.kind, old.environment) != (new.kind, new.environment):
        raise LabError(
            f"the stored readings are {old.kind} on {_where(old)} and these are {new.kind} on {_where(new)}: "
            "send all variants through the gates, or write to another file"
        )
    renewed = set(new.frame.variant)
    frames = {v: part for frame in (old.frame, new.frame) for v, part in frame.groupby("variant", sort=False)}
    kept = [d for d in old.distributions if d["variant"] not in renewed]
    frame = pd.concat(frames.values(), ignore_index=True)
    return Record(new.kind, frame, kept + new.distributions, new.environment, round(old.seconds + new.seconds, 1))


def _where(record: Record) -> str:
    return f"{record.environment.get('GPU', 'a CPU')} with flash-attn-4 {record.environment.get('flash-attn-4')}"


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
