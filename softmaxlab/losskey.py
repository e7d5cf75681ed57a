"""What a stored loss is: the key that determines it, the rows that hold it, the columns it is read as.

Two different conditions can never share a key, and a float is never rounded into a name: the digest is
taken over canonical JSON of everything that determines the number, and the readable names ride along.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields

import numpy as np
import pandas as pd

from softmaxlab.errors import LabError
from softmaxlab.parquet import BadFile, digest

#: Part of every key. Raise it when the meaning of a stored number changes: old files are then not used.
PROTOCOL = 1

#: Columns that name what a loss is of, in a tidy frame.
NAMES = ("model", "corpus", "context", "bos", "dtype", "backend", "condition")

_NAME_TYPES = {name: "int64" if name == "context" else "str" for name in NAMES}


@dataclass(frozen=True, eq=False)  # there is one object of each kind
class Kind:
    """What the rows of a file are: one row a block, in a folder of the store.

    Attributes:
        folder: name of the folder.
        values: the float64 columns between `block` and `predictions`.
        tag: what the keys of these files say besides the loss key.
    """

    folder: str
    values: tuple[str, ...]
    tag: Mapping[str, object] = field(default_factory=dict)

    @property
    def row_types(self) -> dict[str, type]:
        """Columns of a file and their types."""
        return {"block": np.int64, **dict.fromkeys(self.values, np.float64), "predictions": np.int64}

    @property
    def types(self) -> dict[str, object]:
        """Columns of the tidy frame and their types."""
        return _NAME_TYPES | self.row_types


#: A block's mean loss in nats.
LOSSES = Kind("losses", ("nll",))

#: How far the distribution over the vocabulary is from softmax's, means over a block (see `softmaxlab.vocabulary`).
#: Raise the number when the meaning of a stored column changes.
VOCABULARY = Kind("vocabulary", ("kl_forward", "kl_reverse", "jsd", "top1"), {"vocabulary": 1})

KINDS = (LOSSES, VOCABULARY)

#: Columns of the tidy loss frame, one row a block; `nll` is the block's mean loss in nats.
COLUMNS = tuple(LOSSES.types)


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
        return self.digest_of(LOSSES)

    def digest_of(self, kind: Kind) -> str:
        """The digest of rows of another kind under the same setting and condition."""
        names = ("model", "corpus", "condition")
        return digest({k: v for k, v in self.entry(kind).items() if k not in names})

    def entry(self, kind: Kind = LOSSES) -> dict:
        """The key as it is written into a file: all fields, the protocol and what tells the kind."""
        return asdict(self) | {"protocol": PROTOCOL, **kind.tag}

    @classmethod
    def from_entry(cls, entry: object, kind: Kind = LOSSES) -> LossKey:
        """The key that a file holds; `BadFile` when it is not one of this kind and protocol."""
        names = {f.name for f in fields(cls)}
        if not isinstance(entry, dict) or set(entry) != names | {"protocol"} | set(kind.tag):
            raise BadFile(f"it holds no key of {kind.folder}")
        for name, value in kind.tag.items():
            if entry[name] != value:
                raise BadFile(f"its {name} is of protocol {entry[name]}, and this version writes {value}")
        if entry["protocol"] != PROTOCOL:
            raise BadFile(f"it is of protocol {entry['protocol']}, and this version writes {PROTOCOL}")
        return cls(**{name: entry[name] for name in names})


def checked_rows(rows: pd.DataFrame, condition: str, kind: Kind = LOSSES) -> pd.DataFrame:
    """Rows with the kind's columns and types; LabError when a value cannot be that of a block."""
    if set(rows.columns) != set(kind.row_types):
        given = ", ".join(map(str, rows.columns))
        raise LabError(f"{kind.folder} have the columns {', '.join(kind.row_types)}, and these have {given or 'none'}.")
    for name in kind.values:
        values = rows[name].to_numpy(np.float64)
        if not np.isfinite(values).all():
            at = np.flatnonzero(~np.isfinite(values))[0]
            raise LabError(f"the {_said(name)} of {condition} in block {rows['block'].iloc[at]} is {values[at]}.")
    for name, least in (("block", 0), ("predictions", 1)):
        values = rows[name].to_numpy()
        if values.dtype.kind not in "iu" or (values < least).any():
            raise LabError(f"{name} must be integers of at least {least}, and are {values[:8].tolist()}.")
    # Built anew, without the index that came along: this runs once for every file that is read.
    return pd.DataFrame({name: rows[name].to_numpy(of) for name, of in kind.row_types.items()})


def merged_rows(old: pd.DataFrame, new: pd.DataFrame, where: str, kind: Kind = LOSSES) -> pd.DataFrame:
    """Both sets of rows, sorted by block; LabError when a block would have two different values."""
    merged = pd.concat([old, new]).drop_duplicates().sort_values("block", kind="stable", ignore_index=True)
    twice = merged.loc[merged["block"].duplicated(keep=False)]
    if len(twice):
        names = ", ".join(map(_said, kind.values))
        there, given = (
            f"{', '.join(str(row[name]) for name in kind.values)} over {row['predictions']:.0f}"
            for _, row in twice.head(2).iterrows()
        )
        raise LabError(
            f"block {twice['block'].iloc[0]} of {where} is there with the {names} {there} predictions "
            f"and was now given as {given}; remove the file to measure it again."
        )
    return merged


def _said(name: str) -> str:
    return "loss" if name == "nll" else name


def empty(types: Mapping) -> pd.DataFrame:
    """A frame without rows and with these column types."""
    return pd.DataFrame({name: pd.Series(dtype=kind) for name, kind in types.items()})
