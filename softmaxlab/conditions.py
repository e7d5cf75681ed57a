"""Conditions: an operator and the layers it goes into, and the named sets of them by section of the paper."""

from __future__ import annotations

import json
from dataclasses import dataclass

from softmaxlab import operators
from softmaxlab.errors import LabError
from softmaxlab.operators import Operator

BASELINE = "softmax()"
DIGITS = 4  # of a layer's number
TOPK_FRACTIONS = (0.5, 0.25, 0.15, 0.1, 0.065, 0.026, 0.01, 0.0065)


@dataclass(frozen=True)
class Condition:
    """What is evaluated: `operator` in `layers` (all if None), exact softmax in every other layer.

    Text form: the operator's, followed by `@` and the layers where not all are meant:
    `grid(K=32,R=4)`, `mean_threshold()@3`, `softmax()@0-5,7`.
    """

    operator: Operator
    layers: tuple[int, ...] | None = None

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Read a text form. Raises LabError on anything that is not one."""
        operator, at, layers = text.rpartition("@")
        if not at:
            return cls(operators.parse(text))
        return cls(operators.parse(operator), _parse_layers(text, layers))

    def __str__(self) -> str:
        return str(self.operator) if self.layers is None else f"{self.operator}@{_layers_text(self.layers)}"

    def json(self) -> str:
        """Canonical JSON of everything that determines the condition; hashed into the keys of results."""
        layers = None if self.layers is None else list(self.layers)
        return json.dumps(
            {"operator": self.operator.as_dict(), "layers": layers}, sort_keys=True, separators=(",", ":")
        )

    @property
    def first_layer(self) -> int:
        """The lowest layer that differs from the baseline; everything below is shared with it."""
        return 0 if self.layers is None else self.layers[0]

    def at(self, layer: int) -> Operator:
        """The operator of one layer."""
        return self.operator if self.layers is None or layer in self.layers else operators.Softmax()


def _parse_layers(text: str, layers: str) -> tuple[int, ...]:
    found: set[int] = set()
    for part in layers.split(","):
        ends = part.strip().split("-", 1)
        if any(len(end) > DIGITS for end in ends if end.isdecimal()):
            raise LabError(f"condition {text[:60]!r} names a layer of more than {DIGITS} digits, and no model has one")
        if not all(end.isdecimal() for end in ends) or int(ends[-1]) < int(ends[0]):
            raise LabError(f"condition {text!r}: {part!r} is not a layer number or a range such as 0-5")
        found.update(range(int(ends[0]), int(ends[-1]) + 1))
    return tuple(sorted(found))


def _layers_text(layers: tuple[int, ...]) -> str:
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def canonical(texts: list[str]) -> list[str]:
    """The texts in canonical form, in order, without repetition."""
    return list(dict.fromkeys(str(Condition.parse(t)) for t in texts))


def support() -> list[str]:
    """Support sweep (paper §4.1, D.1): top-k at eight fractions, mean threshold, and their uniform controls."""
    topk = [f"topk(f={f})" for f in TOPK_FRACTIONS]
    uniform = ["topk(f=0.5,weights=uniform)", "mean_threshold(weights=uniform)"]
    return [BASELINE, *topk, "mean_threshold()", *uniform]


def geometry() -> list[str]:
    """Weight map and interval count (paper §4.1, D.1, Figure S4), and the nearest grids at R = 4 (Figure 1C)."""
    upper = [f"grid(K={k},recon=upper{m})" for m in ("", ",map=linear") for k in (16, 32, 64)]
    return [BASELINE, *upper, *(f"grid(K={k},R=4)" for k in (16, 32, 64))]


def same_support(n_layers: int) -> list[tuple[str, str]]:
    """The (uniform, softmax) pairs of D_W, one for each layer (paper A.3, Figure 1B)."""
    return [(f"mean_threshold(weights=uniform)@{i}", f"mean_threshold()@{i}") for i in range(n_layers)]


def allocation() -> list[str]:
    """The R sweep at K = 21 and the two other interval counts of I_R (paper §4.2, D.2)."""
    sweep = [_grid(21, R) for R in (0.25, 0.5, 1, 2, 4, 8)]
    return [BASELINE, *sweep, *(_grid(K, R) for K in (16, 32) for R in (1, 4))]


def allocation_contrast(K: int) -> tuple[str, str]:
    """The two sides of D_R(K): R = 1 and R = 4, nearest reconstruction (paper §3.2)."""
    return _grid(K, 1), _grid(K, 4)


def reconstruction() -> list[str]:
    """Three reconstructions of one grid (paper §4.4, D.5)."""
    return [BASELINE, *(_grid(21, 4, recon) for recon in ("upper", "nearest", "lerp"))]


POT_STEPS = (0.5, 1, 2, 4)
CLAMPS = (12, 14, 16, 20, 24, 32, 48)


def power_of_two() -> list[str]:
    """Octave lattices at the row maximum: steps an octave, clamp sweep, and dropping the tail (paper A.6, D.5)."""
    pot = [_pot(m) for m in POT_STEPS]
    clamp = [str(operators.RowmaxPoT(K_max=k)) for k in CLAMPS]
    return [BASELINE, *pot, *clamp, *(str(operators.RowmaxPoT(K_max=k, tail="drop")) for k in CLAMPS)]


def temperature(alpha: float) -> str:
    """The condition of one inverse temperature, with every digit of it."""
    return str(operators.Temperature(alpha=alpha))


def rescued(text: str, q: float = 0.9) -> str:
    """A condition with the softmax mass of S_q restored (paper A.8)."""
    return str(operators.Rescue(of=operators.parse(text), q=q))


def response_map() -> list[str]:
    """The 56 interventions of the distortion-response map (paper §4.3, Figure 3A).

    The paper names the four kinds and their number but not the list; this list is ours: 31 grids over K, R and
    reconstruction, 7 octave lattices over m, 9 flattenings and 9 sharpenings. Its order is that of measuring, so
    that a map which is not complete yet is a beginning of it.
    """
    first = [_grid(21, R) for R in (0.25, 0.5, 1, 2, 4, 8)] + [_grid(K, R) for K in (16, 32) for R in (1, 4)]
    first += [_grid(K, R, "upper") for K in (16, 21, 32) for R in (1, 4)] + [_grid(64, 1, "upper")]
    first += [_pot(m) for m in (0.5, 1, 2, 4)]
    flat = [temperature(a) for a in (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.93, 0.95)]
    sharp = [temperature(a) for a in (1.05, 1.07, 1.1, 1.15, 1.2, 1.25, 1.3, 1.4, 1.5)]
    nearest = [_grid(K, R) for K in (8, 12) for R in (1, 4)] + [_grid(K, R) for K in (16, 32) for R in (0.5, 2)]
    edge = [_grid(64, 4), _grid(64, 4, "upper"), *(_grid(K, R, "lerp") for K in (8, 16) for R in (1, 4))]
    return [*first, *flat, *sharp, *nearest, *edge, *(_pot(m) for m in (0.75, 1.5, 3))]


def reproducibility() -> list[str]:
    """One condition of each family, for the floor between equivalent implementations."""
    lattices = ["pot(m=1)", "pot(m=2)", "h15()", "sq(k=3)", "s()"]
    return [BASELINE, _grid(21, 1), _grid(21, 4), *lattices, temperature(0.9)]


def anchor() -> list[str]:
    """Octave and half-octave lattices by where they are anchored (paper §5.1, Table B.1), and at 4 bits or with
    weights that are not renormalised."""
    variants = [str(op(**o)) for o in ({"bits": 4}, {"renormalise": "no"}) for op in _PROBABILITY_LATTICES]
    return [BASELINE, *(str(op()) for op in _PROBABILITY_LATTICES), _pot(1), _pot(2), "ilpot()", *variants]


FAMILY = (0, 2, 3, 4, 5, 6, 7, 13)  # k of S(Q_k), besides 1, which is Rowmax-H15


def family() -> list[str]:
    """Rowmax-H15, the family S(Q_k) up to its limit S, the half-octave references and FlashAttention-4's
    polynomials, on whole rows (paper B.1, B.2)."""
    lattices = ["h15()", *(str(operators.SQ(k=k)) for k in FAMILY), "s()"]
    references = [_pot(2), "ilpot_h_a()", "ilpot_h15()"]
    return [BASELINE, *lattices, *references, *(str(operators.FA4Poly(degree=d)) for d in (1, 2, 3))]


def core() -> list[str]:
    """A few conditions of each family, for models and contexts where the whole sections cost too much."""
    grids = [_grid(K, R) for K in (32, 21, 16) for R in (4, 1)]
    lattices = [str(operators.RowmaxPoT(K_max=20)), _pot(1), _pot(2), "h15()", "s()"]
    family = [str(operators.SQ(k=k)) for k in (2, 3, 7)]
    return [BASELINE, *grids, *lattices, *family, "mean_threshold()"]


def long() -> list[str]:
    """What is compared within each context length; the matched temperatures depend on the model and come on top
    (paper C.1)."""
    return [BASELINE, *allocation_contrast(21), _pot(1)]


BF16_PATH = "online(tile=128,tau=8,p=bf16)"
FP8_PATH = "online(tile=128,tau=0,p=e4m3,max_offset=8)"
HOPPER_PATH = "online(tile=128,tau=0,p=bf16)"
TAUS = (0, 0.75, 4, 8)


def semantics() -> dict[str, list[str]]:
    """Backend → conditions of the kernel's semantics (paper B.2), in measuring order.

    The two paths of the paper with the whole family, the anchor's threshold alone, the path of a Hopper card, the
    vote of a warp, and the conversion of Q, K and V to FP8 alone and together with everything else.
    """
    curve = [BASELINE, "h15()", *(str(operators.SQ(k=k)) for k in FAMILY), "s()"]
    lattices = [BASELINE, "h15()", _pot(1), _pot(2), str(operators.SQ(k=3)), "s()"]
    hopper = [BASELINE, "h15()", *(str(operators.SQ(k=k)) for k in (2, 3, 7)), "fa4_poly(degree=1)"]
    pair = [BASELINE, "h15()"]
    return {
        BF16_PATH: curve,
        FP8_PATH: curve,
        **{threshold(tau): lattices for tau in TAUS},
        HOPPER_PATH: hopper,
        **{f"online(tile=128,tau=0,qkv={qkv})": pair for qkv in ("e4m3", "e4m3_tensor", "e4m3_head")},
        "online(tile=128,tau=0,p=e4m3,max_offset=8,qkv=e4m3_tensor)": pair,
        "online(tile=128,tau=8,decision=warp)": pair,
    }


def zero_shot() -> list[str]:
    """The conditions of the zero-shot tasks (paper C.1), and Rowmax-H15 beside them."""
    published = ["mean_threshold()", _grid(32, 4), _grid(64, 4), str(operators.RowmaxPoT(K_max=20))]
    return [BASELINE, *published, "h15()"]


def threshold(tau: float) -> str:
    """The backend that differs from whole rows by the anchor's threshold alone."""
    return f"online(tile=128,tau={tau})"


_PROBABILITY_LATTICES = (operators.Log2P, operators.LogSqrt2P)


def _pot(m: float) -> str:
    return str(operators.PoT(m=float(m)))


def _grid(K: int, R: float, recon: str = "nearest") -> str:
    return str(operators.Grid(K=K, R=float(R), recon=recon))


SECTIONS = {
    "support": support,
    "geometry": geometry,
    "allocation": allocation,
    "reconstruction": reconstruction,
    "power-of-two": power_of_two,
    "response-map": response_map,
    "reproducibility": reproducibility,
    "anchor": anchor,
    "family": family,
    "core": core,
    "long": long,
    "zero-shot": zero_shot,
}


def named(section: str) -> list[str]:
    """The conditions of a section. Raises LabError on an unknown name."""
    if section not in SECTIONS:
        raise LabError(f"unknown section {section!r}: known are {', '.join(SECTIONS)}")
    return SECTIONS[section]()
