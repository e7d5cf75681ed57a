"""The numbers that the paper published, as data (arXiv 2609.33586).

Each table is a CSV file of this package, transcribed as printed: the strings keep their trailing zeros, so
the digits say how far a number was rounded. The book takes every number of the paper from here and none
is typed by hand. The columns are described in data/paper/README.md.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from importlib import resources

import pandas as pd

from softmaxlab.errors import LabError

# Digits that are names: as floats, version 2.10 would become 2.1.
_LABELS = {"id", "torch", "cuda", "driver"}

_FOLDER = resources.files("softmaxlab") / "data" / "paper"


@dataclass(frozen=True)
class Published:
    """One printed number.

    Attributes:
        value: the number; low, high: ends of its 95% interval, None where none is printed.
        unit: of all three, "" where it has none.
        source: where in the paper it stands.
        text: the printed digits, with the interval in brackets where there is one; `str()` has true minus signs.
    """

    value: float
    low: float | None
    high: float | None
    unit: str
    source: str
    text: str

    def __str__(self) -> str:
        return re.sub(r"(?<![\w.])-(?=[\d.])", "−", self.text)


def tables() -> list[str]:
    """The names of all tables, sorted."""
    return sorted(entry.name[:-4] for entry in _FOLDER.iterdir() if entry.name.endswith(".csv"))


def table(name: str, *, numbers: bool = False) -> pd.DataFrame:
    """A table as printed: strings, "" where a cell is empty.

    Args:
        name: one of `tables()`.
        numbers: turn the columns that hold nothing but numbers into float64, NaN where a cell is empty.

    Raises:
        LabError: an unknown name.
    """
    if name not in tables():
        raise LabError(f"unknown table {name!r} of the paper; there are {', '.join(tables())}.")
    frame = _read(name).copy()
    if numbers:
        for column in frame.columns.difference(_LABELS):
            values = frame[column].map(_number)
            if (values.notna() == (frame[column] != "")).all() and values.notna().any():
                frame[column] = values.astype("float64")
    return frame


def value(table_name: str, /, **filters: object) -> Published:
    """The one published number that the filters select.

    Args:
        table_name: one of `tables()`, in long form (one number a row).
        **filters: column=value. A text must equal the printed cell, a number its value (K=21, R=0.25), None
            selects empty cells.

    Raises:
        LabError: an unknown table or column; a wide table; none or several rows that match; a cell that is
            empty or holds a text.
    """
    frame = table(table_name)
    if "value" not in frame:
        raise LabError(f"{table_name} is a wide table without a value column; read it with table().")
    for column, wanted in filters.items():
        if column not in frame:
            raise LabError(f"{table_name} has no column {column!r}; it has {', '.join(frame.columns)}.")
        frame = frame[frame[column].map(lambda cell, wanted=wanted: _matches(cell, wanted))]
    said = ", ".join(f"{column}={wanted!r}" for column, wanted in filters.items()) or "no filter"
    if len(frame) != 1:
        raise LabError(f"{len(frame)} rows of {table_name} match {said}; exactly one must.")
    row = frame.iloc[0]
    number = _number(row["value"])
    if number is None:
        what = f"is the text {row['value']!r}" if row["value"] else "is not printed in the paper"
        raise LabError(f"the value of {table_name} with {said} {what}.")
    low, high = (_number(row.get(end, "")) for end in ("ci_low", "ci_high"))
    interval = "" if low is None else f" [{row['ci_low']}, {row['ci_high']}]"
    return Published(number, low, high, row["unit"], row["source"], row["value"] + interval)


@functools.cache
def _read(name: str) -> pd.DataFrame:
    with (_FOLDER / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return pd.read_csv(file, dtype=str, keep_default_na=False)


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def _matches(cell: str, wanted: object) -> bool:
    if wanted is None:
        return cell == ""
    if isinstance(wanted, str):
        return cell == wanted
    return _number(cell) == wanted
