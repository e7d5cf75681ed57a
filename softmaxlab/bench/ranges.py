"""Numbers that a person gives a bench, held to their ranges before anything is started.

NaN is neither too small nor too large: each check therefore says what must hold, not what must not.
"""

from __future__ import annotations

import math
from typing import Any

from softmaxlab.errors import LabError

#: Rounds, calls and the like: far beyond what a GPU is lent for.
MOST = 100_000
#: Seconds of a loop, and its margins: a day.
DAY = 86_400.0


def finite(value: Any) -> bool:
    """Whether it is a number that is neither NaN nor infinite, nor too large for one of 64 bits."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def said(value: Any) -> str:
    """A value as a sentence shows it."""
    return f"{value:g}" if isinstance(value, float) else repr(value)


def count(what: str, value: Any, least: int = 1, most: int = MOST) -> None:
    """Raise LabError unless a value is a whole number of a range."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise LabError(f"{what} is {said(value)}, but must be a whole number from {least} to {most}")


def amount(what: str, value: Any, most: float, *, zero: bool = False) -> None:
    """Raise LabError unless a value is a number above 0, or at least 0 if `zero`, and at most `most`."""
    if not finite(value) or value < 0 or value > most or (value == 0 and not zero):
        raise LabError(f"{what} is {said(value)}, but must be {'at least' if zero else 'above'} 0 and at most {most:g}")
