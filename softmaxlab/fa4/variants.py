"""Which exponential stands in FlashAttention-4, as a value with a text form. Paper §5.2, B.1; definitions in bits.py.

Nothing of FlashAttention-4 is imported here: a variant can be named, listed and simulated on any machine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from softmaxlab.errors import LabError
from softmaxlab.operators import SQ, FA4Poly, Packed, RowmaxAnchored, Softmax
from softmaxlab.operators.schraudolph import K_MAX

#: Of each kind: its argument names, and one line on what stands in the kernel.
KINDS: dict[str, tuple[tuple[str, ...], str]] = {
    "stock": ((), "the installed kernel, untouched"),
    "control": ((), "the stock exponential through the replacement path"),
    "h15": ((), "Rowmax-H15 in the paper's bit form, clamped at −126 octaves"),
    "s": (("k",), "S(Q_k) in the paper's bit form, clamped at −126 octaves; s(1) is h15"),
    "f": (("k",), "as s(k) with the exponent's bias folded into the constant; k from 1"),
    "g": (("k",), "as f(k), clamped at −127 octaves, where the weight is exactly 0"),
    "fused7": ((), "S(Q_7) with scale, row maximum and constant in one FMA, clamped at weight 0"),
    "poly": (("degree", "share"), "FA4's polynomial of degree 1 to 3 for a share of the elements, or all"),
    "packed": (("k", "levels"), "S(Q_k) as packed codes, P's row sum in pairs; packed is packed(4,3)"),
    "loose": (("k", "levels"), "as packed, its conversions placed by the assembler; the same numbers, for timing"),
    "lazy": (("k", "levels"), "as packed; on Hopper rescales of the accumulator by 1 are skipped: the same numbers"),
    "skip": ((), "the stock exponential with the rescales by 1 skipped, on Hopper: a control for lazy"),
    "identity": ((), "no exponential: the exponent itself stands for the weight; for timing only"),
}

LEAST_SHARE = 1 / 16

#: What arguments that are left out stand for.
DEFAULTS = {kind: {"k": 4, "levels": 3} for kind in ("packed", "loose", "lazy")}

_MASKED = (
    "its clamp gives a masked key a weight above 0, so a row whose keys are all masked returns the mean of the values "
    "where the stock kernel returns 0"
)


@dataclass(frozen=True)
class Variant:
    """One exponential in FlashAttention-4. `Variant.parse("g(3)")`, `str(variant)`.

    Attributes:
        kind: of `KINDS`.
        k: fractional bits of the exponent, 0 to 13, of the kinds s, f and g; 1 to 4 of packed, loose and lazy.
        levels: of packed additions in the row sum, 0 to 5, of the kinds packed, loose and lazy.
        degree: of the polynomial, 1 to 3, of the kind poly.
        share: of the elements that the polynomial computes, 1/16 to 1, of the kind poly; the others take the hardware's
            exponential. They are spread evenly over the pairs that a thread holds of a row: 64 on Blackwell, 16 on
            Hopper, where a smaller share would be none.

    Raises:
        LabError: a kind that is unknown, an argument that it lacks or does not have, a value outside its range.
    """

    kind: str = "stock"
    k: int | None = None
    degree: int | None = None
    share: float | None = None
    levels: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise LabError(f"kernel variant {self.kind!r} is unknown: known are {', '.join(_forms())}")
        for name in ("k", "degree", "share", "levels"):
            needed = name in KINDS[self.kind][0]
            if needed != (getattr(self, name) is not None):
                raise LabError(
                    f"kernel variant {self.kind} {'needs a' if needed else 'has no'} {name}: {_form(self.kind)}"
                )
        if self.packed:
            Packed(self.k, self.levels)  # refuses what is outside its range
        least = 1 if self.kind == "f" else 0
        if self.k is not None and not (_whole(self.k) and least <= self.k <= K_MAX):
            raise LabError(
                f"kernel variant {self.kind}: k is {self.k!r}, but must be a whole number from {least} to {K_MAX}"
            )
        if self.degree is not None and not (_whole(self.degree) and 1 <= self.degree <= 3):
            raise LabError(f"kernel variant poly: degree is {self.degree!r}, but must be 1, 2 or 3")
        if self.share is not None and not (isinstance(self.share, int | float) and LEAST_SHARE <= self.share <= 1):
            raise LabError(f"kernel variant poly: share is {self.share!r}, but must be from {LEAST_SHARE} to 1, or all")

    @classmethod
    def parse(cls, text: str | Variant) -> Variant:
        """Read a text form: stock, h15, s(7), f(1), g(3), fused7, poly(3,0.5), poly(2,all), packed, packed(4,3), …"""
        if isinstance(text, Variant):
            return text
        if not isinstance(text, str):
            raise LabError(f"a kernel variant is named by a text, as 'g(3)', and this is {text!r}")
        match = re.fullmatch(r"\s*(\w+)\s*(?:\(([^()]*)\))?\s*", text)
        if not match or match[1] not in KINDS:
            raise LabError(f"kernel variant {text!r} is unknown: known are {', '.join(_forms())}")
        names = KINDS[match[1]][0]
        parts = [p.strip() for p in match[2].split(",")] if match[2] and match[2].strip() else []
        given = {name: _number(text, name, part) for name, part in zip(names, parts, strict=False)}
        values = DEFAULTS.get(match[1], {}) | given
        if len(parts) > len(names) or set(values) != set(names):
            raise LabError(f"kernel variant {text!r} is not of the form {_form(match[1])}")
        return cls(match[1], **values)

    def __str__(self) -> str:
        """Canonical text form."""
        values = {"k": self.k, "degree": self.degree, "share": "all" if self.share == 1 else self.share}
        values["levels"] = self.levels
        names = KINDS[self.kind][0]
        return f"{self.kind}({','.join(str(values[n]) for n in names)})" if names else self.kind

    @property
    def why_not(self) -> str:
        """Why it is not offered for use; empty where it is."""
        if self.kind == "identity":
            return "it is no exponential: its output means nothing, and only its time is of use"
        return _MASKED if self.kind in ("h15", "s", "f") else ""

    @property
    def offered(self) -> bool:
        """Whether it may be used in place of the stock kernel: finite, and 0 on fully masked rows."""
        return not self.why_not

    @property
    def packed(self) -> bool:
        """Whether it is the packed exponential, of any kind."""
        return self.kind in ("packed", "loose", "lazy")

    @property
    def summary(self) -> str:
        """One line on what stands in the kernel."""
        return KINDS[self.kind][1]

    @property
    def bits(self) -> tuple[str, int, str] | None:
        """Form, k and clamp of `softmaxlab.bits`, for the variants that have a bit form."""
        if self.kind in ("h15", "s"):
            return "paper", 1 if self.kind == "h15" else self.k, "paper"
        if self.kind == "f":
            return "folded", self.k, "paper"
        if self.kind == "g":
            return "folded" if self.k else "paper", self.k, "zero"
        return ("fused", 7, "zero") if self.kind == "fused7" else None

    def operator(self, p: str = "bf16") -> RowmaxAnchored | None:
        """What it computes, as an operator; None for `identity`.

        Args:
            p: what P is stored as, which the packed exponential hangs on: bf16, fp16 or e4m3.

        A mixture (`poly` with a share below 1) is named by its polynomial: every element lies within its envelope.
        """
        if self.bits:
            return SQ(k=self.bits[1], clamp=self.bits[2])
        if self.packed:
            return Packed(self.k, self.levels, p)
        if self.kind == "poly":
            return FA4Poly(self.degree)
        return None if self.kind == "identity" else Softmax()


def variants() -> list[Variant]:
    """The catalogue: every variant that the book's tables show."""
    texts = ["stock", "control", "h15", *(f"s({k})" for k in (0, 2, 3, 7, 13)), *(f"f({k})" for k in (1, 7))]
    texts += [*(f"g({k})" for k in (0, 1, 2, 3, 7)), "fused7"]
    texts += [*(f"poly({d},all)" for d in (1, 2, 3)), "poly(3,0.25)", "poly(3,0.5)", "poly(2,0.5)"]
    texts += [*(f"packed({k},3)" for k in (1, 2, 3, 4)), "lazy(4,3)", "skip", "identity"]
    return [Variant.parse(t) for t in texts]


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _form(kind: str) -> str:
    names = KINDS[kind][0]
    return f"{kind}({','.join(names)})" if names else kind


def _forms() -> list[str]:
    return [_form(kind) for kind in KINDS]


def _number(text: str, name: str, part: str) -> Any:
    if name == "share" and part == "all":
        return 1.0
    try:
        return float(part) if name == "share" else int(part)
    except ValueError:
        noun = "a number or all" if name == "share" else "a whole number"
        raise LabError(f"kernel variant {text!r}: {name} is {part!r}, but must be {noun}") from None
