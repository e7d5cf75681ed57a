"""Results on disk: one Parquet file per condition, written atomically, keyed by what determines the number.

A file is either whole or absent: it is written beside its place, flushed to the disk and renamed. So a
killed run loses at most the block it was computing, and the next run finds the others. What a file
holds is said by the key inside it, not by its name; a file that is damaged, or whose key does not belong
at its path, is reported and treated as absent, so that it is computed again and never silently used; it is
renamed to <name>.bad before a new one takes its place. A file that the system does not let us read may be
good, so that stops. The key holds everything that determines a loss; what only describes it (device,
versions, time) is kept beside it as provenance.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path

import numpy as np
import pandas as pd

from softmaxlab import damage, parquet, segments
from softmaxlab.errors import LabError, refusal
from softmaxlab.losskey import COLUMNS as COLUMNS
from softmaxlab.losskey import KINDS, LOSSES, NAMES, PROTOCOL, Kind, LossKey, checked_rows, empty, merged_rows

_FILTERS = (*NAMES, "model_id", "corpus_id", "digest")
_FOREIGN = "its key belongs to another file name"


class Store:
    """A results folder.

    Args:
        root: the folder; it is created by the first write.
        kind: of which rows a block this store is: losses, or another kind that is kept in the same way.

    Raises:
        LabError: `root` exists and is not a folder, or cannot be looked at. All that reads raises it too, for
            a file or folder inside that cannot be read.
    """

    def __init__(self, root: str | Path, kind: Kind = LOSSES) -> None:
        self.root, self.kind = Path(root), kind
        try:
            is_file = self.root.exists() and not self.root.is_dir()
        except OSError as error:  # a name that is too long, or a folder above that may not be searched
            raise LabError(
                f"the results folder {self.root} cannot be looked at ({refusal(error)}); give one that can."
            ) from None
        if is_file:
            raise LabError(f"the results folder {self.root} is a file; give a folder.")

    def check_writable(self) -> None:
        """Create the folder and lock it once, so that a run fails before it computes and not after.

        Raises:
            LabError: the folder cannot be made or written to.
        """
        with parquet.locked(self.root):
            pass

    # Rows a block

    def losses(self, key: LossKey) -> pd.DataFrame:
        """What is stored for a key: columns block, nll (or the kind's), predictions, sorted by block; empty if absent.

        A truncated, foreign or mismatching file is named in a warning and counts as absent.
        """
        path = self._path(key)
        found = damage.read(path, lambda: self._load(path, lambda stored: stored.digest == key.digest))
        return empty(self.kind.row_types) if found is None else found[1]

    def append_losses(self, key: LossKey, rows: pd.DataFrame, provenance: dict, *, keep_stored: bool = False) -> Path:
        """Add blocks to a condition's file, atomically; two writers lose nothing.

        Args:
            key: what the losses are of.
            rows: columns block (int ≥ 0), nll (finite, nats), predictions (int ≥ 1).
            provenance: JSON-serialisable description of how these rows were made. Blocks that were written
                with the same description share one segment of the file's provenance list.
            keep_stored: a block that another writer stored meanwhile stays as it is and is no error.

        Returns:
            The file's path.

        Raises:
            LabError: columns or values that are not the above; a block that is stored already with another
                value (equal ones are ignored); a stored file that cannot be read; a folder that cannot be
                written to. Nothing is changed then.
        """
        path = self._path(key)
        where = f"{key.condition} in {path}"
        rows = merged_rows(empty(self.kind.row_types), checked_rows(rows, key.condition, self.kind), where, self.kind)
        provenance = json.loads(parquet.canonical(provenance))
        with parquet.locked(self.root):
            found, bad = damage.tried(lambda: self._load(path, lambda stored: stored.digest == key.digest))
            old, made = (empty(self.kind.row_types), []) if found is None else found[1:]
            rows = rows[~rows["block"].isin(old["block"])] if keep_stored else rows
            merged = merged_rows(old, rows, where, self.kind)
            new = sorted({*rows["block"].tolist()} - {*old["block"].tolist()})
            if new:
                made = segments.extended(made, new, provenance)
                damage.write(path, merged, key.entry(self.kind), made, bad)
        return path

    def frame(self, **filters: object) -> pd.DataFrame:
        """Tidy rows (`COLUMNS`, or the kind's) of all good files that the filters let through.

        Args:
            **filters: a value or a list of values for model, corpus, context, bos, dtype, backend,
                condition, or for model_id, corpus_id, digest; None lets everything through.

        Returns:
            One row a block; an empty frame if nothing matches.

        Raises:
            LabError: an unknown filter name; two files that the names alone cannot tell apart (say, two
                revisions of a model under one name).
        """
        found = list(self._good_files(filters))
        if not found:
            return empty(self.kind.types)
        seen: dict[tuple, tuple[Path, LossKey]] = {}
        for path, key, _, _ in found:
            other, its = seen.setdefault(tuple(getattr(key, name) for name in NAMES), (path, key))
            if its is not key:
                ids = [f.name for f in fields(LossKey) if getattr(its, f.name) != getattr(key, f.name)]
                raise LabError(
                    f"{other} and {path} have the same names and differ in {' and '.join(ids)}; "
                    f"filter by that or remove one."
                )
        counts = [len(rows) for _, _, rows, _ in found]
        data = {name: np.repeat([getattr(key, name) for _, key, _, _ in found], counts) for name in NAMES}
        for name in self.kind.row_types:
            data[name] = np.concatenate([rows[name].to_numpy() for _, _, rows, _ in found])
        return pd.DataFrame(data).astype(self.kind.types)

    def provenance(self, **filters: object) -> pd.DataFrame:
        """Where each file came from: one row a file.

        Args:
            **filters: as for `frame`.

        Returns:
            The names and ids of the key, digest, blocks (how many), every provenance entry (nested ones with
            dots; values that differ between segments joined by "; "), and path, relative to the root.
        """
        known = [name for name in _FILTERS if name != "digest"]
        table = []
        for path, key, rows, made in self._good_files(filters):
            row = {name: getattr(key, name) for name in _FILTERS} | {"blocks": len(rows)}
            for name, values in segments.flattened(made).items():
                row.setdefault(name, "; ".join(dict.fromkeys(map(str, values))))
            table.append(row | {"path": path.relative_to(self.root).as_posix()})
        frame = pd.DataFrame(table, columns=None if table else [*known, "digest", "blocks", "path"])
        return frame[[name for name in frame.columns if name != "path"] + ["path"]]

    # Other tables

    def put_table(self, kind: str, key: Mapping, frame: pd.DataFrame, provenance: dict) -> Path:
        """Store a table under <kind>/, atomically; a table with the same key is replaced.

        Args:
            kind: folder name of letters, digits and dashes; not one of a kind of rows a block.
            key: JSON-serialisable, what determines the table.
            frame: the table; its index is not kept.
            provenance: JSON-serialisable.

        Raises:
            LabError: a kind that is no folder name; a key, table or provenance that cannot be stored; a
                folder that cannot be written to.
        """
        return self._put(kind, key, lambda _: frame, provenance)

    def update_table(self, kind: str, key: Mapping, frame: pd.DataFrame, provenance: dict, *, by: str) -> Path:
        """As `put_table`, but rows of a stored table whose `by` is not in `frame` stay: two writers lose nothing."""

        def merged(old: pd.DataFrame | None) -> pd.DataFrame:
            return frame if old is None else pd.concat([old[~old[by].isin(frame[by])], frame], ignore_index=True)

        return self._put(kind, key, merged, provenance)

    def _put(
        self, kind: str, key: Mapping, make: Callable[[pd.DataFrame | None], pd.DataFrame], provenance: dict
    ) -> Path:
        path = self._table_path(kind, key)
        provenance = json.loads(parquet.canonical(provenance))
        with parquet.locked(self.root):
            found, bad = damage.tried(lambda: self._load_table(kind, path))
            frame = make(None if found is None else found[1])
            damage.write(path, frame, json.loads(parquet.canonical(dict(key))), provenance, bad)
        return path

    def get_table(self, kind: str, key: Mapping) -> pd.DataFrame | None:
        """The table stored under kind and key, or None; a bad file is named in a warning and is None."""
        path = self._table_path(kind, key)
        found = damage.read(path, lambda: self._load_table(kind, path))
        return None if found is None else found[1]

    def tables(self, kind: str) -> list[tuple[dict, pd.DataFrame, dict]]:
        """All good tables of a kind as (key, frame, provenance), sorted by file name."""
        folder = self._table_path(kind, {}).parent
        paths = filter(_is_stored, parquet.children(folder))
        found = (damage.read(path, lambda path=path: self._load_table(kind, path)) for path in paths)
        return [entry for entry in found if entry is not None]

    def _table_path(self, kind: str, key: Mapping) -> Path:
        taken = [k.folder for k in KINDS]
        if kind in taken or kind != parquet.slug(kind):
            raise LabError(
                f"{kind!r} cannot name a kind of table; use letters, digits, dashes, and neither of {', '.join(taken)}."
            )
        # Through JSON and back, because that is how a reader of the file gets the key.
        key = json.loads(parquet.canonical(dict(key)))
        digest = parquet.digest({"kind": kind, "key": key, "protocol": PROTOCOL})
        readable = parquet.slug("-".join(str(value) for value in key.values()))
        return self.root / kind / f"{readable}-{digest[:12]}.parquet"

    def _load_table(self, kind: str, path: Path) -> tuple[dict, pd.DataFrame, dict]:
        """As `parquet.read`, of a table that belongs at its path; raises as that does."""
        with parquet.opened(path) as file:
            if not isinstance(file.key, dict) or self._table_path(kind, file.key) != path:
                raise parquet.BadFile(_FOREIGN)
            if not isinstance(file.provenance, dict):
                raise parquet.BadFile("its provenance is no mapping")
            return file.key, file.frame(), file.provenance

    # Files of losses

    def _path(self, key: LossKey) -> Path:
        folder = self.root / self.kind.folder / parquet.slug(key.model) / parquet.slug(key.corpus) / str(key.context)
        return folder / f"{parquet.slug(key.condition)}-{key.digest_of(self.kind)[:12]}.parquet"

    def _load(self, path: Path, accept: Callable[[LossKey], bool]) -> tuple[LossKey, pd.DataFrame, list] | None:
        """One file of losses, or None where its key is not accepted; raises as `parquet.opened`."""
        with parquet.opened(path) as file:
            key = LossKey.from_entry(file.key, self.kind)
            # The path is a function of the key: this catches files that were copied, renamed or edited.
            if self._path(key) != path:
                raise parquet.BadFile(_FOREIGN)
            if not accept(key):
                return None
            file.check_columns(self.kind.row_types)
            rows = checked_rows(file.frame(), key.condition, self.kind)
            if (np.diff(rows["block"]) <= 0).any():
                raise parquet.BadFile("its blocks repeat or are out of order")
            segments.check(file.provenance)
            return key, rows, file.provenance

    def _good_files(self, filters: Mapping) -> Iterator[tuple[Path, LossKey, pd.DataFrame, list]]:
        wanted = {}
        for name, value in filters.items():
            if name not in _FILTERS:
                raise LabError(f"unknown filter {name!r}; results can be filtered by {', '.join(_FILTERS)}.")
            if value is not None:
                listed = isinstance(value, Iterable) and not isinstance(value, str)
                wanted[name] = {str(v) for v in value} if listed else {str(value)}

        def accept(key: LossKey) -> bool:
            return all(str(getattr(key, name)) in values for name, values in wanted.items())

        # Folders are named after the key, so most files need not be opened at all.
        levels = [wanted.get(name) for name in ("model", "corpus", "context")]
        for path in _walk(self.root / self.kind.folder, levels):
            found = damage.read(path, lambda path=path: self._load(path, accept))
            if found is not None:
                yield path, *found


def _walk(folder: Path, levels: list[set[str] | None]) -> Iterator[Path]:
    """Parquet files below <folder>/<level>/…, only through the level names that are wanted."""
    if not levels:
        yield from filter(_is_stored, parquet.children(folder))
        return
    slugs = None if levels[0] is None else {parquet.slug(name) for name in levels[0]}
    for child in parquet.children(folder):
        if slugs is None or child.name in slugs:
            yield from _walk(child, levels[1:])


def _is_stored(path: Path) -> bool:
    """Whether a name is that of a whole file: neither a temporary one nor a bad one that was kept."""
    return path.name.endswith(".parquet")
