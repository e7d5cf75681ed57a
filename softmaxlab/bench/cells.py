"""A cell: one shape of attention, as a value with a text form. The grids of cells that have a name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from softmaxlab.errors import LabError

#: Bytes of an element of Q, K and V; the output of the FP8 types is BF16.
DTYPES = {"bf16": 2, "fp16": 2, "e4m3": 1, "e5m2": 1}
FP8 = ("e4m3", "e5m2")
HEAD_DIMS = (64, 96, 128)
LENGTHS = (16, 131072)


@dataclass(frozen=True)
class Cell:
    """One shape. Text form: `bf16/causal/8192/h16/d128`, with `/kv4` and `/b2` where they are not the default.

    Attributes:
        dtype: of Q, K and V: bf16, fp16, and on Blackwell e4m3 or e5m2.
        causal: the mask; otherwise none.
        seq: queries and keys.
        heads, kv_heads: query heads, and key-value heads, which divide them; 0 means as many as query heads.
        head_dim: 64, 96 or 128.
        batch: sequences.

    Raises:
        LabError: a value outside its range.
    """

    dtype: str = "bf16"
    causal: bool = True
    seq: int = 8192
    heads: int = 16
    kv_heads: int = 0
    head_dim: int = 128
    batch: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", "e4m3" if self.dtype == "fp8" else self.dtype)
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        if self.dtype not in DTYPES:
            raise LabError(f"cell: dtype is {self.dtype!r}, but must be one of {', '.join(DTYPES)}")
        if self.head_dim not in HEAD_DIMS:
            raise LabError(f"cell: head dimension is {self.head_dim}, but must be one of {_said(HEAD_DIMS)}")
        if not LENGTHS[0] <= self.seq <= LENGTHS[1]:
            raise LabError(f"cell: length is {self.seq}, but must be from {LENGTHS[0]} to {LENGTHS[1]}")
        if min(self.heads, self.kv_heads, self.batch) < 1 or self.heads % self.kv_heads:
            raise LabError(
                f"cell: heads {self.heads}, key-value heads {self.kv_heads}, batch {self.batch}, but all must be at "
                "least 1 and key-value heads must divide heads"
            )

    @classmethod
    def parse(cls, text: str | Cell) -> Cell:
        """Read a text form; parts in any order, missing ones as the defaults: `bf16/8192/none`, `fp16/causal/h8`."""
        if isinstance(text, Cell):
            return text
        values: dict[str, object] = {}
        for part in text.strip().split("/"):
            name, value = _part(text, part)
            if name in values:
                raise LabError(f"cell {text!r} gives its {name} twice")
            values[name] = value
        return cls(**values)

    def __str__(self) -> str:
        """Canonical text form."""
        parts = [self.dtype, "causal" if self.causal else "none", str(self.seq), f"h{self.heads}", f"d{self.head_dim}"]
        parts += [f"kv{self.kv_heads}"] if self.kv_heads != self.heads else []
        return "/".join(parts + ([f"b{self.batch}"] if self.batch > 1 else []))

    @property
    def gqa(self) -> int:
        """Query heads of a key-value head."""
        return self.heads // self.kv_heads

    @property
    def kernel(self) -> tuple[str, bool, int, int]:
        """What a compiled kernel depends on: dtype, mask, head dimension, grouping."""
        return self.dtype, self.causal, self.head_dim, self.gqa

    @property
    def flops(self) -> float:
        """Floating-point operations of the two products, a causal mask counted as half."""
        pairs = self.seq * (self.seq + 1) / 2 if self.causal else self.seq**2
        return 4.0 * self.batch * self.heads * self.head_dim * pairs

    @property
    def bytes(self) -> int:
        """Bytes of Q, K, V, the output and its log-sum-exp: one set of inputs with its result."""
        tokens = self.batch * self.seq
        operands = tokens * self.head_dim * (self.heads + 2 * self.kv_heads) * DTYPES[self.dtype]
        return operands + tokens * self.heads * (2 * self.head_dim + 4)


def _part(text: str, part: str) -> tuple[str, object]:
    part = part.strip()
    if part in DTYPES or part == "fp8":
        return "dtype", part
    if part in ("causal", "none"):
        return "causal", part == "causal"
    match = re.fullmatch(r"(kv|h|d|b|)(\d+)([kK]?)", part)
    if not match or (match[3] and match[1]):
        raise LabError(f"cell {text!r}: {part!r} cannot be read; a cell looks like bf16/causal/8192/h16/d128/kv4/b2")
    names = {"": "seq", "h": "heads", "kv": "kv_heads", "d": "head_dim", "b": "batch"}
    return names[match[1]], int(match[2]) * (1024 if match[3] else 1)


def _said(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


def paper() -> list[Cell]:
    """The shapes of Table B5 in the paper's order: FP8 needs a Blackwell GPU."""
    main = [Cell("e4m3", seq=s) for s in (4096, 8192, 16384)] + [Cell("bf16", seq=s) for s in (4096, 8192, 16384)]
    main += [Cell("fp16", seq=s) for s in (8192, 16384)]
    sweep = [Cell("e4m3", seq=s) for s in (1024, 2048, 32768)]
    unmasked = [Cell(d, causal=False, seq=8192) for d in ("e4m3", "bf16", "fp16")]
    unmasked += [Cell(d, causal=False, seq=s) for d in ("e4m3", "bf16") for s in (4096, 16384)]
    shapes = [Cell("e4m3", heads=h) for h in (4, 8, 32)] + [Cell("e4m3", batch=4), Cell("e4m3", heads=32, kv_heads=8)]
    narrow = [Cell(d, seq=s, head_dim=64) for d in ("e4m3", "bf16") for s in (4096, 8192, 16384)]
    return main + sweep + unmasked + shapes + narrow


def hopper() -> list[Cell]:
    """What an H200 is measured on: both 16-bit types, both masks, 2K to 32K, two head dimensions, grouped heads."""
    lengths = (2048, 4096, 8192, 16384, 32768)
    main = [Cell(seq=s, causal=c, head_dim=d) for d in (128, 64) for c in (True, False) for s in lengths]
    half = [Cell("fp16", c, s, head_dim=d) for d in (128, 64) for c in (True, False) for s in (8192, 16384)]
    grouped = [Cell(seq=s, heads=32, kv_heads=8, head_dim=d) for d in (128, 64) for s in (8192, 16384)]
    return main + half + grouped + [Cell(seq=1024), Cell(heads=4), Cell(heads=32), Cell(batch=4)]


def calls() -> list[Cell]:
    """The few cells on which an H200's call latency is taken by the paper's protocol."""
    return [Cell(seq=s) for s in (4096, 8192, 16384)] + [Cell(causal=False), Cell(head_dim=64), Cell("fp16")]


def steady() -> list[Cell]:
    """Cells that hold a card at its power limit: for long windows, in which its clock has settled."""
    main = [Cell(seq=16384), Cell(head_dim=64), Cell(causal=False), Cell(seq=16384, head_dim=64), Cell()]
    return [*main, Cell(causal=False, head_dim=64), Cell(seq=16384, heads=32, kv_heads=8), Cell("fp16")]


def quick() -> list[Cell]:
    """Two cells, to see that a program runs."""
    return [Cell(seq=8192), Cell(seq=8192, causal=False)]


SETS = {"paper": paper, "hopper": hopper, "calls": calls, "steady": steady, "quick": quick}


def parse_all(texts: Iterable[str | Cell]) -> list[Cell]:
    """Cells from names of sets and text forms, in order, without repetition.

    Raises:
        LabError: one that is neither, or none at all.
    """
    found: list[Cell] = []
    for text in texts:
        if isinstance(text, str) and re.fullmatch(r"[A-Za-z]+", text) and text not in (*DTYPES, "causal", "none"):
            if text not in SETS:
                raise LabError(
                    f"unknown set of cells {text!r}: known are {_said(SETS)}; or give cells as bf16/causal/8192"
                )
            found += SETS[text]()
        else:
            found.append(Cell.parse(text))
    if not found:
        raise LabError(f"no cell was given: name a set ({_said(SETS)}) or cells as bf16/causal/8192/h16/d128")
    return list(dict.fromkeys(found))
