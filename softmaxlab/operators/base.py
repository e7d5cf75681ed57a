"""What every operator shares: its text form, its canonical JSON, and the rule that turns weights into attention.

An operator maps a score row to non-negative weights. The same weights feed the numerator (the product
with the values) and the denominator (the row sum), so any positive factor common to a row cancels.
"""

from __future__ import annotations

import json
import math
import re
import typing
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from softmaxlab.errors import LabError

_REGISTRY: dict[str, type[Operator]] = {}


@dataclass(frozen=True)
class Operator:
    """A stand-in for softmax on a score row.

    Subclasses are frozen dataclasses whose fields are the operator's whole definition. Their `name` is the
    word of the text form (`grid(K=32,R=4)`), their `summary` one line for a list of operators.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    #: False where the weights are probabilities as they stand, and are not divided by their row sum.
    normalised: ClassVar[bool] = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" in cls.__dict__:  # a kind of operators has none
            _REGISTRY[cls.name] = cls

    @property
    def envelope(self) -> tuple[float, float] | None:
        """Bounds on the log-weight error ε = log ŵ − log w of a single key, in nats, where there are such."""
        return None

    def __call__(self, scores: Tensor, valid: Tensor) -> Tensor:
        """Unnormalised weights of each row.

        Args:
            scores: FP32 scores in nats, shape (..., n); the entries of masked keys are −inf.
            valid: bool, (..., n), True for the unmasked keys; the leading dimensions broadcast.

        Returns:
            FP32 weights of the shape of `scores`, ≥ 0, exactly 0 on masked keys and relative to the row
            maximum, so that they do not overflow. A row without a valid key is all zeros.
        """
        raise NotImplementedError

    def __str__(self) -> str:
        """Text form: the name and every field that differs from its default."""
        values = [(f.name, getattr(self, f.name), f.default) for f in fields(self)]
        return f"{self.name}({','.join(f'{k}={_text(v)}' for k, v, default in values if v != default)})"

    def as_dict(self) -> dict[str, Any]:
        """Every field, defaults included, under the operator's name."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values = {k: v.as_dict() if isinstance(v, Operator) else v for k, v in values.items()}
        return {"operator": self.name, **values}

    def json(self) -> str:
        """Canonical JSON: all fields, sorted keys, floats in shortest exact form. This is what is hashed."""
        return json.dumps(self.as_dict(), sort_keys=True, separators=(",", ":"), allow_nan=False)

    def refuse(self, field: str, requirement: str) -> typing.NoReturn:
        """Raise the one sentence that says which field of this operator is wrong."""
        raise LabError(f"{self.name}: {field} is {getattr(self, field)!r}, but {requirement}")


@dataclass(frozen=True)
class RowmaxAnchored(Operator):
    """An operator whose weight of a key depends on nothing but its distance from the row maximum.

    Only such an operator can stand in an online-softmax kernel, which sees a row tile by tile and measures
    distances from a running anchor.
    """

    def at(self, x: Tensor) -> Tensor:
        """The weight at base-two exponents x relative to the anchor (paper B.1).

        Args:
            x: FP64 (FP32 on MPS); ≤ 0 when the anchor is the row maximum, positive where an anchor lags.
                At −∞, a masked key, this is what the kernel would compute; `__call__` gives 0 there.

        Returns:
            FP32, of the shape of `x`.
        """
        raise NotImplementedError

    #: Octaves by which an anchor may lag: exponents above it have no weight.
    headroom: ClassVar[float] = math.inf
    #: Largest relative error of `row_sum`, FP32's own aside.
    row_sum_bound: ClassVar[float] = 0.0

    def row_sum(self, weights: Tensor) -> Tensor:
        """Sum of the weights of a kernel's tile, in the order and the roundings of its kernel: FP32 unless it says so.

        Args:
            weights: FP32, (..., keys of the tile).

        Returns:
            FP32, (...).
        """
        return weights.sum(-1)

    def __call__(self, scores: Tensor, valid: Tensor) -> Tensor:
        return self.at(exponents(scores, row_max(scores))).masked_fill(~valid, 0.0)


def exponents(scores: Tensor, anchor: Tensor) -> Tensor:
    """x = (s − anchor)/ln 2, FP64 from the FP32 difference (FP32 on MPS, which has no FP64)."""
    difference = scores - anchor
    return (difference if scores.device.type == "mps" else difference.double()) / math.log(2)


def _text(value: Any) -> str:
    # repr() of a float is its shortest exact form: no two values share a name.
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return str(value)


def _split(arguments: str) -> list[str]:
    """Split at the commas that are not inside parentheses."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(arguments):
        depth += (c == "(") - (c == ")")
        if c == "," and depth == 0:
            parts.append(arguments[start:i])
            start = i + 1
    return [p.strip() for p in [*parts, arguments[start:]] if p.strip()]


MOST_NESTED = 20


def parse(text: str) -> Operator:
    """The operator that a text form names, e.g. `parse("topk(f=0.25)")`.

    Raises:
        LabError: unknown operator or field, a value of the wrong type or outside its range, or bad syntax.
    """
    match = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*(?:\((.*)\))?\s*", text, re.DOTALL)
    if not match:
        raise LabError(f"operator {text!r} is not of the form name(field=value,…)")
    if text.count("(") > MOST_NESTED:
        raise LabError(f"operator {text[:60]!r}… has more than {MOST_NESTED} operators inside each other")
    name, arguments = match[1], match[2] or ""
    if name not in _REGISTRY:
        raise LabError(f"unknown operator {name!r}: known are {', '.join(sorted(_REGISTRY))}")
    cls = _REGISTRY[name]
    hints = typing.get_type_hints(cls)
    types = {f.name: hints[f.name] for f in fields(cls)}
    values: dict[str, Any] = {}
    for part in _split(arguments):
        key, eq, value = (p.strip() for p in part.partition("="))
        if not eq:
            raise LabError(f"operator {text!r}: {part!r} is not of the form field=value")
        if key not in types:
            known = f"its fields are {', '.join(types)}" if types else "it has none"
            raise LabError(f"operator {name!r} has no field {key!r}: {known}")
        if key in values:
            raise LabError(f"operator {text!r} gives {key!r} twice")
        values[key] = _value(name, key, value, types[key])
    missing = [f.name for f in fields(cls) if f.default is MISSING and f.name not in values]
    if missing:
        raise LabError(f"operator {name!r} needs a value for {', '.join(missing)}")
    return cls(**values)


def _value(name: str, key: str, text: str, kind: type) -> Any:
    if kind is Operator:
        return parse(text)
    try:
        value = kind(text)
    except ValueError:
        noun = {int: "a whole number", float: "a number"}[kind]
        raise LabError(f"{name}: {key} is {text!r}, but must be {noun}") from None
    if isinstance(value, float) and not math.isfinite(value):
        raise LabError(f"{name}: {key} is {text!r}, but must be finite")
    return value


def catalogue() -> list[tuple[str, str]]:
    """Every operator: its text form with all fields, and one line on what it does."""
    rows = []
    for name, cls in _REGISTRY.items():
        shown = ",".join(f.name if f.default is MISSING else f"{f.name}={_text(f.default)}" for f in fields(cls))
        rows.append((f"{name}({shown})", cls.summary))
    return rows


def row_max(scores: Tensor) -> Tensor:
    """The row maximum, shape (..., 1); 0 for a row without a valid key, so that differences stay defined."""
    m = scores.amax(-1, keepdim=True)
    return m.masked_fill(m == -torch.inf, 0.0)


def normaliser(weights: Tensor, scores: Tensor, operator: Any = None) -> Tensor:
    """The row sum Σŵ, shape (..., 1), made safe at both ends; 1 if the operator is not `normalised`.

    A row without a valid key gets 1, so that its output is 0. A row whose scores hold NaN or +inf gets NaN
    whatever the operator made of them: thresholds compare NaN as false and would otherwise hide it.
    """
    m = row_max(scores)
    total = weights.sum(-1, keepdim=True) if getattr(operator, "normalised", True) else torch.ones_like(m)
    return total.masked_fill(total == 0, 1.0) + (m - m)


def probabilities(operator: Operator, scores: Tensor, valid: Tensor) -> Tensor:
    """p̂ = ŵ/Σŵ of each row (paper §3.1, A.1).

    Args:
        operator: the operator.
        scores: scores in nats, any float dtype, shape (..., n); what stands at masked keys does not matter.
        valid: bool, broadcastable to `scores`.

    Returns:
        FP32 probabilities, shape of `scores`; zeros where the row has no valid key.
    """
    valid = valid.expand(*valid.shape[:-1], scores.shape[-1])  # operators count the keys of a row
    scores = scores.float().masked_fill(~valid, -torch.inf)
    w = operator(scores, valid)
    return w / normaliser(w, scores, operator)
