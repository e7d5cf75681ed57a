"""The recorded count of the isolated exponentials (paper B.5), which `kernel/micro/count.py` makes with nvcc."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd

from softmaxlab.errors import LabError
from softmaxlab.evaluate import find_results

FILE = Path("audit") / "micro.json"
#: What the paper counts on the floating-point pipeline: it puts the maximum there.
FLOATING = ("FADD", "FFMA", "FMNMX")


def stored(results: str | Path = "results") -> tuple[pd.DataFrame, dict[str, str]]:
    """The count and its provenance.

    Returns:
        One row an architecture, exponential and kernel (`single`, one element a thread, or `fragment`, 32): arch,
        exponential, kernel, instructions and chain an element, floating (those of the instructions that the paper
        counts on the floating-point pipeline), opcodes, registers a thread. And the versions of the tools.

    Raises:
        LabError: none is recorded, or the file does not hold one.
    """
    beside = Path(__file__).parents[2] / results / FILE
    path = next((p for p in (find_results(str(results)) / FILE, beside) if p.is_file()), None)
    if path is None:
        raise LabError(f"there is no {FILE} in {results}: `python kernel/micro/count.py --out results/{FILE}` makes it")
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        frame = pd.DataFrame(held["rows"])
        frame["floating"] = [sum(n for name, n in o.items() if name in FLOATING) for o in frame["opcodes"]]
        return frame, held["provenance"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LabError(f"{path} holds no count of the isolated exponentials ({error})") from None
