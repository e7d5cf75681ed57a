"""A gain held against a target: met, missed or unresolved, by its interval.

Of several protocols in a cell the long windows are a card's steady state, in which its clock has settled at the power
limit, and the short ones bursts between other kernels. The two are different questions, so both can be asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from softmaxlab.bench import gains, kernels, record
from softmaxlab.bench.cells import Cell
from softmaxlab.bench.record import Entry

BURST, STEADY = "burst", "steady"
#: Milliseconds of a window from which on it shows the steady state.
STEADY_MS = 100.0


@dataclass(frozen=True)
class Gain:
    """How much faster a kernel is than another in a cell, percent.

    Attributes:
        cell, kernel, base: text forms.
        value, low, high: mean over rounds and its 95 % interval (`gains.estimate`); NaN where not measured.
        rounds, window_ms: that have both kernels, and about how long each window took.
        why: why it was not measured; empty if it was.
    """

    cell: str
    kernel: str
    base: str
    value: float = float("nan")
    low: float = float("nan")
    high: float = float("nan")
    rounds: int = 0
    window_ms: float = float("nan")
    why: str = ""

    def against(self, least: float) -> str:
        """`met` if the whole interval reaches the least gain, `missed` if none of it does, else `unresolved`.

        `not measured` without a value.
        """
        if not self.rounds:
            return "not measured"
        return "met" if self.low >= least else "missed" if self.high < least else "unresolved"


def both(verdicts: Iterable[str]) -> str:
    """Of a target with several parts: the worst of them."""
    found = list(verdicts)
    return next((v for v in ("missed", "not measured", "unresolved") if v in found), "met")


def entries(results: str = "results") -> list[Entry]:
    """The measured entries of `bench latency --graphs`.

    Raises:
        LabError: nothing is stored.
    """
    return [entry for entry, _, kind in record.stored("duration", results) if kind == "measured"]


def of(found: Iterable[Entry], cell: str, kernel: str, base: str = kernels.STOCK, *, windows: str = STEADY) -> Gain:
    """The gain in a cell, of the entry with the most rounds that has both kernels.

    Args:
        found: as `entries`.
        cell, kernel, base: text forms; `base` is the one that is compared with.
        windows: `STEADY` or `BURST`.
    """
    cell, kernel, base = str(Cell.parse(cell)), kernels.parse(kernel), kernels.parse(base)
    here = [e for e in found if e.cell == cell and (_window(e) >= STEADY_MS) == (windows == STEADY)]
    best = max(here, key=lambda e: len(gains.log_ratios(e, base, kernel)), default=None)
    estimate = None if best is None else gains.estimate(best, base, kernel)
    if estimate is None:
        refused = next((e.refused[kernel] for e in here if kernel in e.refused), "")
        return Gain(cell, kernel, base, why=refused or "it was not measured in enough rounds")
    value, low, high = (gains.percent(x) for x in (estimate.mean, estimate.low, estimate.high))
    return Gain(cell, kernel, base, value, low, high, len(estimate.per_block), _window(best))


def _window(entry: Entry) -> float:
    return float(entry.protocol.get("window_ms", 0.0))
