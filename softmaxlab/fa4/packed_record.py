"""The packed kernel's own gates as a file: what a run on a GPU left (`kernel/bench/packed_gates.py`), or a rehearsal.

As `gate_record` for the gates of every variant.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from softmaxlab.errors import LabError
from softmaxlab.evaluate import find_results
from softmaxlab.fa4 import packed_cases, packed_gates

FILE = Path("kernel") / "packed-gates.json"


@dataclass(frozen=True)
class Record:
    """One run of the gates.

    Attributes:
        kind: measured or simulated.
        frame: readings, as `packed_gates.run` gives them.
        environment: versions and GPU, as `doctor.environment`; empty for a rehearsal.
    """

    kind: str
    frame: pd.DataFrame
    environment: dict[str, str]

    def verdict(self) -> pd.DataFrame:
        """One row a variant and group of cases: variant, group, cases, gates, passed, failed (names, or empty)."""
        rows = []
        for (variant, group), part in self.frame.assign(group=self.frame["case"].map(group_of)).groupby(
            ["variant", "group"], sort=False
        ):
            red = part[~part["passed"]]
            rows.append(
                {"variant": variant, "group": group, "cases": part["case"].nunique(), "gates": len(part)}
                | {"passed": int(part["passed"].sum())}
                | {"failed": "; ".join(dict.fromkeys(f"{r.case}: {r.gate}" for r in red.itertuples()))}
            )
        return pd.DataFrame(rows)


def group_of(case: str) -> str:
    """What a case is for, from its name."""
    starts = {
        "exact scores": "codes one by one, and their ties",
        "NaN and infinities": "NaN, ±∞, scores too large",
        "scores times": "scores times 16 and 300",
        "grouped": "grouped heads",
        "variable lengths": "variable lengths",
        "window": "sliding windows",
        "soft-cap": "soft-cap",
        "sinks": "sinks",
        "more": "more queries than keys, and fewer",
    }
    return next((group for start, group in starts.items() if case.startswith(start)), "head dimensions and masks")


def read(path: Path) -> Record:
    """A file of `kernel/bench/packed_gates.py`. Raises LabError where there is none in it."""
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        frame = pd.DataFrame(held["readings"])
        for name, absent in (("value", math.nan), ("low", -math.inf), ("high", math.inf)):
            frame[name] = frame[name].astype(float).fillna(absent)
        frame["passed"] = frame["passed"].astype(bool)
        return Record(held["kind"], frame[["variant", "case", "gate", "value", "low", "high", "passed"]],
                      held["environment"])  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LabError(
            f"{path} holds no readings of the packed kernel's gates ({error}): kernel/bench/packed_gates.py makes them"
        ) from None


def stored(results: str | Path = "results") -> Record | None:
    """The measured record of a results folder, or beside the package; None if there is none."""
    beside = Path(__file__).parents[2] / results / FILE
    path = next((p for p in (find_results(str(results)) / FILE, beside) if p.is_file()), None)
    found = path and read(path)
    return found if found and found.kind == "measured" else None


def rehearse(variant: str = "packed(4,3)", every: int = 8) -> Record:
    """Every 13th code and every so-manyth case, by the simulated kernel."""
    cases = packed_cases.CASES[::every]
    frame = packed_gates.run([variant], attend=packed_cases.simulated, cases=cases, device="cpu", exhaustive=False)
    return Record("simulated", frame, {})
