"""What the chapter on the packed exponential claims and holds against the records: its targets, and loss beside speed.

A gain is held against a target by its interval (`bench.targets`). A loss comes from one source a model, the best that
is stored: the patched kernel in BF16, else the same lattice in the kernel's semantics or on whole rows. S(Q_k) is what
the packed kernel computes, so its loss stands for the packed one where that was not measured; the row sum in pairs is
then not in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch

from softmaxlab import packed_bits, statistics
from softmaxlab.bench import targets
from softmaxlab.bench.record import Entry
from softmaxlab.conditions import BASELINE, HOPPER_PATH
from softmaxlab.errors import LabError
from softmaxlab.fa4.variants import Variant
from softmaxlab.operators import Packed
from softmaxlab.operators.packed import K
from softmaxlab.statistics import Estimate
from softmaxlab.store import Store

KERNEL = "packed(4,3)"
BASES = ("stock", "control")


@dataclass(frozen=True)
class Target:
    """A gain that the packed kernel should reach: percent over stock, and over the control."""

    label: str
    cell: str
    stock: float
    control: float


#: Set before anything was measured with the programs of this project.
TARGETS = (
    Target("causal, 16K, head dimension 128", "bf16/causal/16384/h16/d128", 12.0, 9.0),
    Target("causal, 8K, head dimension 64", "bf16/causal/8192/h16/d64", 15.0, 15.0),
    Target("no mask, 8K, head dimension 128", "bf16/none/8192/h16/d128", 9.0, 9.0),
)


def held(
    entries: Iterable[Entry], kernel: str = KERNEL, *, windows: str = targets.STEADY
) -> list[tuple[Target, targets.Gain, targets.Gain, str]]:
    """Each target with the gain over stock and over the control, and the verdict of both; windows as `targets.of`."""
    entries = list(entries)
    found = []
    for target in TARGETS:
        stock, control = (targets.of(entries, target.cell, kernel, base, windows=windows) for base in BASES)
        verdict = targets.both([stock.against(target.stock), control.against(target.control)])
        found.append((target, stock, control, verdict))
    return found


@dataclass(frozen=True)
class Energy:
    """Change of the energy of a forward pass against stock, percent, by three ways to take it.

    Attributes:
        cell: text form.
        changes: of each round: mean power, without the ramp, by the energy counter.
        floor: the control's own largest change, by any of them: what two equal kernels differ by.
        faster: percent by which the sustained loop was faster than stock's; mean over the rounds.
    """

    cell: str
    changes: tuple[tuple[float, float, float], ...]
    floor: float
    faster: float

    @property
    def verdict(self) -> str:
        """`met` if every change lies below minus the floor, `missed` if none is below 0, else `unresolved`."""
        every = [c for changes in self.changes for c in changes]
        return "met" if max(every) < -self.floor else "missed" if min(every) >= 0 else "unresolved"


def energy(frame: pd.DataFrame, kernel: str = KERNEL) -> list[Energy]:
    """Of `bench.read.energies`, one a cell and session that has the kernel and the control."""
    columns = ["vs_stock", "vs_stock_no_ramp", "vs_stock_counter"]
    found = []
    for (cell, _), rows in frame.groupby(["cell", "session"], sort=False):
        ours, control, stock = (rows[rows["kernel"] == k].set_index("round") for k in (kernel, "control", "stock"))
        ours = ours[ours["vs_stock"].notna()]
        if len(ours):
            faster = (100 * (stock["ms"] / ours["ms"] - 1)).dropna().mean()
            changes = tuple(tuple(map(float, row)) for row in ours[columns].to_numpy())
            found.append(Energy(cell, changes, float(control[columns].abs().max().max()), float(faster)))
    return found


# Losses


def conditions_of(kernel: str) -> list[str]:
    """Conditions whose loss is the kernel's, the best first: its own, then the same lattice."""
    variant = Variant.parse(kernel)
    operator = variant.operator()
    if not isinstance(operator, Packed):
        k = variant.bits[1] if variant.bits else None
        return [str(operator)] + ([f"sq(k={k})"] if k is not None else []) + (["h15()"] if k == 1 else [])
    rest = ["h15(clamp=zero)", "h15()"] if operator.k == 1 else []
    return [str(operator), f"sq(k={operator.k},clamp=zero)", f"sq(k={operator.k})", *rest]


def _rank(dtype: str, backend: str) -> int | None:
    if backend.startswith("fa4(") and "simulated" not in backend:
        return 0 if dtype == "bfloat16" else None
    order = [("bfloat16", HOPPER_PATH), ("float32", HOPPER_PATH), ("float32", "reference")]
    return 1 + order.index((dtype, backend)) if (dtype, backend) in order else None


@dataclass(frozen=True)
class Losses:
    """The losses of one model from one source.

    Attributes:
        model, backend, dtype, corpus, context: names.
        frame: tidy losses.
    """

    model: str
    backend: str
    dtype: str
    corpus: str
    context: int
    frame: pd.DataFrame

    @property
    def kind(self) -> str:
        """measured by the kernel or on whole rows, simulated in the kernel's semantics."""
        return "simulated" if self.backend.startswith("online") else "measured"

    @property
    def protocol(self) -> tuple[str, int]:
        """Corpus and context."""
        return self.corpus, self.context

    def condition(self, kernel: str) -> str:
        """The best stored condition of a kernel; "" if there is none."""
        known = set(self.frame["condition"])
        return next((c for c in conditions_of(kernel) if c in known), "")

    def delta(self, kernel: str) -> Estimate | None:
        """ΔNLL against the softmax of the same source, nats."""
        text = self.condition(kernel)
        return statistics.contrast(self.frame, text, BASELINE) if text else None

    def apart(self, plus: str, minus: str) -> Estimate:
        """ΔNLL of one kernel minus that of another, paired by block, nats. Raises LabError where one is not stored."""
        return statistics.contrast(self.frame, self.condition(plus), self.condition(minus))

    def beyond_half(self, kernel: str = KERNEL, of: str = "h15") -> Estimate:
        """ΔNLL of a kernel minus half of another's, paired by block, nats: at most 0 where it loses half as much."""
        plus, minus = self.condition(kernel), self.condition(of)
        return statistics.combination(self.frame, {plus: 1.0, minus: -0.5, BASELINE: -0.5})


def verdict_of(beyond: Estimate) -> str:
    """Whether a loss is at most its limit, from the interval of loss minus limit: `met`, `missed` or `unresolved`."""
    return "met" if beyond.high <= 0 else "missed" if beyond.low > 0 else "unresolved"


def losses(results: str) -> list[Losses]:
    """Of each model, corpus and context in the store: the best source with softmax, h15 and the kernel's lattice.

    Conditions that a killed run left with fewer blocks than softmax are left out.
    """
    frame = Store(results).frame(dtype=["float32", "bfloat16"])
    found: dict[tuple[Any, ...], tuple[int, Losses]] = {}
    for (model, corpus, context, bos, dtype, backend), rows in frame.groupby(
        ["model", "corpus", "context", "bos", "dtype", "backend"], sort=True
    ):
        rank = _rank(dtype, backend)
        blocks = rows.groupby("condition")["block"].nunique()
        rows = rows[rows["condition"].map(blocks) == blocks.get(BASELINE)]
        one = Losses(model, backend, dtype, corpus, int(context), rows)
        complete = BASELINE in set(rows["condition"]) and one.condition("h15") and one.condition(KERNEL)
        key = (model, corpus, context, bos)
        if rank is not None and complete and (key not in found or rank < found[key][0]):
            found[key] = rank, one
    return [one for _, one in found.values()]


# The lattices, and one pair bit by bit


def lattices() -> pd.DataFrame:
    """Of each k: k, last code of x ≤ 0, and the weight's error over exponents spread evenly in an octave.

    Columns deviation, least and largest are in octaves: log2 of the weight, minus the exponent.
    """
    x = torch.linspace(-8, -7, 64 * 1024 + 1, dtype=torch.float64)[:-1]
    rows = []
    for k in K:
        error = torch.log2(Packed(k).at(x.clone()).double()) - x
        rows.append((k, 2**k * 127, error.std().item(), error.min().item(), error.max().item()))
    return pd.DataFrame(rows, columns=["k", "last code", "deviation", "least", "largest"])


@dataclass(frozen=True)
class Pair:
    """Two scores of a row on their way to P, as `packed_bits` computes them; the first in the low half of a word.

    Attributes:
        k: fractional bits.
        scores: in the kernel's units. exponents: octaves below the row's maximum.
        scaled: what the FMA gives, in units of 2^−24.
        codes: after the conversion. word, shifted: both in 32 bits, before and after the shift.
        weights: as P holds them.
    """

    k: int
    scores: tuple[float, float]
    exponents: tuple[float, float]
    scaled: tuple[float, float]
    codes: tuple[int, int]
    word: int
    shifted: int
    weights: tuple[float, float]


def pair(scores: tuple[float, float], row_max: float, scale: float, k: int = 4) -> Pair:
    """Follow two scores through the bit form. Args: scale: octaves of a unit of score; row_max: at least the scores.

    Raises:
        LabError: a score above the row's maximum.
    """
    if max(scores) > row_max:
        raise LabError(f"a score is {max(scores):g}, but the row's maximum is {row_max:g}")
    operator, s = Packed(k), torch.tensor(scores)
    n = packed_bits.codes(s, operator, scale, row_max)
    x = [(v - row_max) * scale for v in s.double().tolist()]
    low, high = n.tolist()
    (shifted,) = packed_bits.words(n, operator).tolist()
    w = packed_bits.stored(n, operator).tolist()
    scaled = tuple(2**k * (v + operator.bias) for v in x)
    return Pair(k, tuple(s.tolist()), tuple(x), scaled, (low, high), low | high << 16, shifted & 0xFFFFFFFF, tuple(w))
