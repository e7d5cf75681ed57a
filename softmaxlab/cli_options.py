"""Options that several commands take, each described once."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter


def _text(description: str) -> object:
    return Annotated[str, Parameter(help=description)]


def _number(description: str) -> object:
    return Annotated[int, Parameter(help=description)]


Model = _text("A short name, a hub id (org/name@revision), a folder or a .gguf file.")
Corpus = _text("wikitext103, pydoc (offline), or a text file.")
Context = _number("Tokens of a block.")
Blocks = _number("How many blocks; 0: all of the first 200,000 tokens.")
Dtype = _text("float32 or bfloat16.")
Device = _text("auto, cpu, cuda or mps.")
DeviceMap = _text('"auto" spreads one model over all visible GPUs, for models that one does not hold.')
Bos = _text("stream, block or none.")
Backend = _text("What computes attention, e.g. reference or fused.")
Batch = _number("Blocks a forward pass; 0 chooses by device and memory.")
Sections = Annotated[
    list[str] | None,
    Parameter(help="A named set of conditions, e.g. support or response-map; may be given several times."),
]
