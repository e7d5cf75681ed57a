"""What a stored loss is: the key that determines it, the rows that hold it, the columns it is read as.

Two different conditions can never share a key, and a float is never rounded into a name: the digest is
taken over canonical JSON of everything that determines the number, and the readable names ride along.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

import numpy as np
import pandas as pd

from softmaxlab.errors import LabError
from softmaxlab.parquet import BadFile, digest

#: Part of every key. Raise it when the meaning of a stored number changes: old files are then not used.
PROTOCOL = 1

#: Columns that name what a loss is of, in a tidy frame.
NAMES = ("model", "corpus", "context", "bos", "dtype", "backend", "condition")

#: Columns of the tidy loss frame, one row a block; `nll` is the block's mean loss in nats.
COLUMNS = (*NAMES, "block", "nll", "predictions")

ROW_TYPES = {"block": np.int64, "nll": np.float64, "predictions": np.int64}
TYPES = {name: "int64" if name == "context" else "str" for name in NAMES} | ROW_TYPES


@dataclass(frozen=True)
class LossKey:
    """What a stored loss is the loss of.

    Attributes:
        model, corpus, condition: readable names, beside the key.
        model_id, corpus_id: what fixes the weights and tokenizer, and the text (hashes, revisions).
        context: tokens in a block.
        bos: the BOS rule.
        dtype: of the model.
        backend: what computed the operator.
        condition_json: canonical JSON of the operator and its layers.

    Raises:
        LabError: a value of the wrong type.
    """

    model: str
    model_id: str
    corpus: str
    corpus_id: str
    context: int
    bos: str
    dtype: str
    backend: str
    condition: str
    condition_json: str

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            kind = int if name == "context" else str
            if type(value) is not kind:
                raise LabError(f"{name} of a loss key must be {kind.__name__}, and is {value!r}.")

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the canonical JSON of what determines the number; readable names are left out."""
        names = ("model", "corpus", "condition")
        return digest({k: v for k, v in self.entry().items() if k not in names})

    def entry(self) -> dict:
        """The key as it is written into a file: all fields and the protocol."""
        return asdict(self) | {"protocol": PROTOCOL}

    @classmethod
    def from_entry(cls, entry: object) -> LossKey:
        """The key that a file holds; `BadFile` when it is not one of this protocol."""
        names = {f.name for f in fields(cls)}
        if not isinstance(entry, dict) or set(entry) != names | {"protocol"}:
            raise BadFile("it holds no loss key")
        if entry["protocol"] != PROTOCOL:
            raise BadFile(f"it is of protocol {entry['protocol']}, and this version writes {PROTOCOL}")
        return cls(**{name: entry[name] for name in names})


def checked_rows(rows: pd.DataFrame, condition: str) -> pd.DataFrame:
    """Rows with the store's columns and types; LabError when a value cannot be the loss of a block."""
    if set(rows.columns) != set(ROW_TYPES):
        given = ", ".join(map(str, rows.columns))
        raise LabError(f"losses have the columns {', '.join(ROW_TYPES)}, and these have {given or 'none'}.")
    nll = rows["nll"].to_numpy(np.float64)
    if not np.isfinite(nll).all():
        at = np.flatnonzero(~np.isfinite(nll))[0]
        raise LabError(f"the loss of {condition} in block {rows['block'].iloc[at]} is {nll[at]}.")
    for name, least in (("block", 0), ("predictions", 1)):
        values = rows[name].to_numpy()
        if values.dtype.kind not in "iu" or (values < least).any():
            raise LabError(f"{name} must be integers of at least {least}, and are {values[:8].tolist()}.")
    # Built anew, without the index that came along: this runs once for every file that is read.
    return pd.DataFrame({name: rows[name].to_numpy(kind) for name, kind in ROW_TYPES.items()})


def merged_rows(old: pd.DataFrame, new: pd.DataFrame, where: str) -> pd.DataFrame:
    """Both sets of rows, sorted by block; LabError when a block would have two different values."""
    merged = pd.concat([old, new]).drop_duplicates().sort_values("block", kind="stable", ignore_index=True)
    twice = merged.loc[merged["block"].duplicated(keep=False)]
    if len(twice):
        (first, of), (second, now_of) = twice[["nll", "predictions"]].head(2).itertuples(index=False)
        raise LabError(
            f"block {twice['block'].iloc[0]} of {where} is there with the loss {first} over {of} predictions "
            f"and was now given as {second} over {now_of}; remove the file to measure it again."
        )
    return merged


def empty(types: Mapping) -> pd.DataFrame:
    """A frame without rows and with these column types."""
    return pd.DataFrame({name: pd.Series(dtype=kind) for name, kind in types.items()})
