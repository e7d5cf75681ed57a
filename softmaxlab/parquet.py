"""Parquet files that are whole or absent, with a JSON key and provenance in their schema metadata.

The layer under `store`: it knows files, not what they mean. Writing goes to a temporary file in the same
folder (a rename is atomic only within a file system), is flushed to the disk, and is renamed over the
target; page checksums are written and verified, so that a damaged file is noticed.

A file that the system does not let us open says nothing about what it holds: that stops. Only content that was read
and makes no sense is damage (`BadFile`), and a damaged file is kept under another name when it is written over.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path

import filelock
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from softmaxlab.errors import LabError, refusal

KEY = b"softmaxlab.key"
PROVENANCE = b"softmaxlab.provenance"

#: Seconds to wait for another writer. A write takes milliseconds; longer means that something hangs.
LOCK_TIMEOUT = 60.0


class BadFile(Exception):
    """A file whose content was read and cannot be used; the message says why."""


class StoredTable:
    """An open file: `key` and `provenance` are read, the rows only when `frame` is called."""

    def __init__(self, file: pq.ParquetFile) -> None:
        metadata = file.schema_arrow.metadata or {}
        if KEY not in metadata or PROVENANCE not in metadata:
            raise BadFile("it was not written by softmaxlab (no key in its metadata)")
        self._file = file
        self.key, self.provenance = json.loads(metadata[KEY]), json.loads(metadata[PROVENANCE])

    def check_columns(self, types: Mapping[str, type]) -> None:
        """Raise BadFile unless the columns are these, in any order; reads no rows."""
        there = sorted((field.name, str(field.type)) for field in self._file.schema_arrow)
        wanted = sorted((name, str(pa.from_numpy_dtype(of))) for name, of in types.items())
        if there != wanted:
            listed, right = (", ".join(map(" ".join, columns)) for columns in (there, wanted))
            raise BadFile(f"its columns are {listed or 'none'} and should be {right}")

    def frame(self) -> pd.DataFrame:
        """The rows; BadFile when the notes on pandas types beside them, which no checksum covers, are damaged."""
        try:
            # One thread: the files are small, and starting others costs more than the reading.
            return self._file.read(use_threads=False).to_pandas(use_threads=False)
        except (KeyError, TypeError) as error:
            raise BadFile(f"its columns cannot be read ({error!r})") from None


@contextlib.contextmanager
def opened(path: Path) -> Iterator[StoredTable]:
    """Open a file for reading.

    Raises:
        FileNotFoundError: there is no such file.
        LabError: the system does not let us read it.
        BadFile: it is truncated, damaged, no Parquet file, or carries no key; a LabError from within the block, which
            is then about the content, becomes one too.
    """
    # All of it first (the files are small): Arrow raises OSError for damage too, and neither may pass for the other.
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(path) from None
    except OSError as error:
        raise unreadable(path, error) from None
    try:
        with pq.ParquetFile(pa.BufferReader(content), page_checksum_verification=True) as file:
            yield StoredTable(file)
    except LabError as error:
        raise BadFile(str(error).rstrip(".")) from None
    except MemoryError:  # Arrow's is one of its own exceptions too, and says nothing about the file
        raise LabError(f"{path} cannot be read, because memory does not hold it; free some.") from None
    except (pa.ArrowException, OSError, ValueError) as error:
        # Arrow speaks in several lines; the first says what is wrong.
        reason = (str(error) or repr(error)).splitlines()[0]
        raise BadFile(f"it cannot be read ({reason})") from None


def children(folder: Path) -> list[Path]:
    """What a folder holds, sorted; nothing where there is no such folder.

    `Path.glob` would pass over a folder that may not be read, as if it were empty.

    Raises:
        LabError: the system does not let us read it.
    """
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise unreadable(folder, error) from None


def read(path: Path) -> tuple[object, pd.DataFrame, object]:
    """Read (key, frame, provenance); raises as `opened`."""
    with opened(path) as file:
        return file.key, file.frame(), file.provenance


@contextlib.contextmanager
def locked(root: Path) -> Iterator[None]:
    """Hold the one writer's lock of a results folder, creating the folder if need be.

    The operating system frees the lock when its holder dies, so a killed run leaves none behind; the
    empty file `.lock` may stay. Readers need no lock, because a rename is all that they can see.

    Raises:
        LabError: the folder cannot be made or written to, or another writer does not let go.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(root / ".lock", timeout=LOCK_TIMEOUT)
        lock.acquire(poll_interval=0.01)
    except filelock.Timeout:
        raise LabError(
            f"another process has held the results folder {root} for {LOCK_TIMEOUT:.0f} seconds; "
            f"wait for it or stop it."
        ) from None
    except OSError as error:
        raise _unwritable(root, error) from None
    try:
        yield
    finally:
        lock.release()


def write(path: Path, frame: pd.DataFrame, key: object, provenance: object, *, keep_old: bool = False) -> Path | None:
    """Write a table with its key and provenance in one atomic step; call it inside `locked`.

    Args:
        keep_old: the file that lies there is bad: it is renamed before the new one takes its place. Readers look at
            names that end in .parquet, so they pass over it.

    Returns:
        Where the old file was kept.

    Raises:
        LabError: the table has values that Parquet cannot hold, or the folder cannot be written to. The
            old file is as it was then, or kept under its other name, and no temporary file stays.
    """
    try:
        table = pa.Table.from_pandas(frame, preserve_index=False)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise LabError(f"the table for {path} cannot be stored as Parquet ({error}).") from None
    entries = {KEY: canonical(key), PROVENANCE: canonical(provenance)}
    table = table.replace_schema_metadata({**(table.schema.metadata or {}), **entries})
    # One fixed name a target: the lock allows one writer, and what a killed one left is overwritten.
    temporary = path.with_name(f".{path.name}.tmp")
    kept = _name_to_keep(path) if keep_old else None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "wb") as file:
                pq.write_table(table, file, compression="zstd", write_page_checksum=True)
                file.flush()
                os.fsync(file.fileno())
            # As late as can be: whatever failed until here has changed nothing.
            if kept:
                os.replace(path, kept)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)
    except OSError as error:
        raise _unwritable(path.parent, error) from None
    return kept


def slug(text: str) -> str:
    """A readable, safe part of a file name: "grid(K=32,R=4)" gives "grid-K=32-R=4".

    Not unique: names that must differ carry a digest as well. A text without a usable character gives
    "unnamed"; leading and trailing dots and dashes go, so that no name is hidden or leaves its folder.
    """
    safe = re.sub(r"[^A-Za-z0-9._=+@-]+", "-", text)
    return re.sub(r"-{2,}", "-", safe)[:80].strip("-.") or "unnamed"


def canonical(value: object) -> str:
    """Canonical JSON: sorted keys, no spaces, no NaN, all of it UTF-8; LabError when the value has no such form."""
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        text.encode()  # half a surrogate pair, say from a file name that is not UTF-8, is text to Python alone
    except (TypeError, ValueError) as error:
        raise LabError(f"{value!r} cannot be stored as JSON ({error}).") from None
    return text


def digest(value: object) -> str:
    """SHA-256 (hex) of the canonical JSON of a value."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def _sync_folder(folder: Path) -> None:
    """Flush the rename itself, where it can be: only POSIX opens folders, and not every mount syncs them."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _name_to_keep(path: Path) -> Path:
    """The first of <name>.bad, <name>.bad2, … that is free: what was kept before stays too."""
    names = (path.with_name(f"{path.name}.bad{'' if n == 1 else n}") for n in count(1))
    return next(name for name in names if not os.path.lexists(name))


def unreadable(path: Path, error: OSError) -> LabError:
    """The sentence on a file or folder that is there, or may be, and that the system does not let us read."""
    return LabError(
        f"{path} cannot be read ({refusal(error)}), so it is left as it is; make it readable or move it away."
    )


def _unwritable(folder: Path, error: OSError) -> LabError:
    return LabError(f"the results folder {folder} cannot be written to ({refusal(error)}); give a folder that can.")
