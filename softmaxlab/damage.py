"""Files that are there and cannot be used: named in a warning, counted as absent, kept when they are written over."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pandas as pd

from softmaxlab import parquet

Found = TypeVar("Found")


def tried(load: Callable[[], Found]) -> tuple[Found | None, parquet.BadFile | None]:
    """What a file holds, None where it is absent or bad; and what is bad about it."""
    try:
        return load(), None
    except FileNotFoundError:
        return None, None
    except parquet.BadFile as error:
        return None, error


def read(path: Path, load: Callable[[], Found]) -> Found | None:
    """What a file holds; a bad one is named in a warning and is None, as an absent one is."""
    found, bad = tried(load)
    if bad:
        _warn(path, "is not used and will be computed again", bad)
    return found


def write(path: Path, frame: pd.DataFrame, key: object, provenance: object, bad: parquet.BadFile | None) -> None:
    """As `parquet.write`; what lies there and is bad is kept under another name, and a warning says so."""
    kept = parquet.write(path, frame, key, provenance, keep_old=bad is not None)
    if kept:
        _warn(path, f"was not used and is kept as {kept.name} beside what was computed again", bad)


def _warn(path: Path, what: str, bad: parquet.BadFile) -> None:
    # The reason ends without a full stop, whoever gave it. The warning is of the line that asked the store.
    warnings.warn(f"{path} {what}: {str(bad).rstrip('.')}.", stacklevel=4)
