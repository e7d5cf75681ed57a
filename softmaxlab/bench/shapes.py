"""Whether a file that parses as JSON holds a record: what is in it could have any shape.

A shape is one of:

- a type or a union of types, such as `str` or `int | None`; no bool is an int, and no int has more than 64 bits;
- `POSITIVE`: a finite number above 0;
- `[shape]`, a list of such, and `[shape, ...]`, a list of at least one;
- `(shape, shape)`, a list of just as many;
- `{str: shape}`, an object with any names, and `{"name": shape, "other?": shape}`: one that has these, but for those
  with a question mark, and whatever else besides.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, get_args

from softmaxlab.errors import LabError, refusal

NUMBER = int | float  # NaN too, which stands for what a GPU does not tell
POSITIVE = "a finite number above 0"
#: Of a file of the kernels' programs: what any bench needs of it to go on …
_ENTRY = {
    "key": str,
    "cell": str,
    "kernels": [str, ...],
    "protocol": dict,
    "session": str,
    "turns": [{"round": int, "kernel": str}],
    "gates": {str: {"passed": bool | None, "failed": str}},
    "refused": {str: str},
    "total": int,
}
FILE = {"program": str, "kind": str, "sessions": {str: {str: str}}, "entries": [_ENTRY]}
#: … and of each program what its tables need of a turn, and of the protocol. A window is ms, MHz, °C, W; a sample is
#: s, W, instant W, MHz, °C.
_WINDOWS = {"windows": [(POSITIVE, NUMBER, NUMBER, NUMBER), ...]}
_LOOP = {"seconds": POSITIVE, "calls": POSITIVE, "counted_j": NUMBER, "samples": [(NUMBER,) * 5]}
TURNS: dict[str, tuple[dict, dict]] = {
    "latency": (_WINDOWS, {"calls?": NUMBER}),
    "duration": (_WINDOWS, {"window_ms?": NUMBER}),
    "energy": (_LOOP, {"first": int, "last": int}),
    "counters": ({"counters": {str: [NUMBER]}}, {}),
    "timeline": ({"kernel_us": [NUMBER, ...], "launch_us": [NUMBER], "call_us": POSITIVE}, {"warmup": int}),
    "checks": ({"readings": [dict]}, {}),
}
_NAMES = {str: "text", int: "a whole number", float: "a number", dict: "an object", bool: "true or false"}


def load(path: Path, version: int, shape: dict) -> dict[str, Any]:
    """What a file holds.

    Args:
        path: of the file.
        version: its `format` must be.
        shape: of the whole.

    Raises:
        LabError: it cannot be read, or holds something else. It is left as it is.
    """
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        check(held, {"format": int})
        if held["format"] != version:
            raise ValueError(f"format {held['format']}")
        check(held, shape)
    except OSError as error:  # a folder of that name, or one that may not be read
        raise no_record(path, refusal(error)) from None
    except (ValueError, RecursionError) as error:
        raise no_record(path, error) from None
    return held


def no_record(path: Path, why: object) -> LabError:
    """The sentence about a file that is not what its name says."""
    return LabError(f"{path} holds no record of a bench ({why}): move it away to measure again")


def check(value: Any, shape: Any, at: str = "") -> None:
    """Raise ValueError, which names the first place that differs, unless a value has a shape.

    Args:
        value: as JSON gives it.
        shape: as in this module's docstring.
        at: the name of the value's place.
    """
    if isinstance(shape, dict):
        _must(isinstance(value, dict), value, "an object", at)
        if str in shape:
            inner = dict.fromkeys(value, shape[str])
        else:
            lost = next((name for name in shape if not name.endswith("?") and name not in value), None)
            if lost:
                raise ValueError(f"{at or 'it'} has no {lost}")
            inner = {name.rstrip("?"): one for name, one in shape.items() if name.rstrip("?") in value}
        for name, one in inner.items():
            check(value[name], one, f"{at}.{name}" if at else name)
    elif isinstance(shape, list | tuple):
        _must(isinstance(value, list), value, "a list", at)
        if isinstance(shape, tuple):
            _must(len(value) == len(shape), value, f"a list of {len(shape)}", at)
        elif shape[-1] is ...:
            _must(bool(value), value, "a list of at least one", at)
        for i, one in enumerate(value):
            check(one, shape[i] if isinstance(shape, tuple) else shape[0], f"{at}[{i}]")
    elif shape == POSITIVE:
        _must(_is(value, NUMBER) and 0 < value < math.inf, value, POSITIVE, at)
    else:
        _must(_is(value, shape), value, _name(shape), at)


def _is(value: Any, shape: Any) -> bool:
    if isinstance(value, bool):
        return bool in _types(shape)
    return isinstance(value, shape) and not (isinstance(value, int) and value.bit_length() > 63)


def _types(shape: Any) -> tuple[type, ...]:
    return get_args(shape) or (shape,)


def _name(shape: Any) -> str:
    types = [t for t in _types(shape) if not (t is int and float in _types(shape))]
    return " or ".join(_NAMES.get(t, "null") for t in types)


def _must(fits: bool, value: Any, what: str, at: str) -> None:
    if not fits:
        said = json.dumps(value, ensure_ascii=False)
        raise ValueError(f"{at or 'it'} is {said if len(said) <= 40 else said[:39] + '…'}, but must be {what}")
