"""The findings about the kernel, as the front page lists them (see `findings`)."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pandas as pd

from softmaxlab import kernel_fidelity, packed_endpoints, report, semantic_endpoints
from softmaxlab.bench import gains, kernels, read
from softmaxlab.bench.cells import Cell
from softmaxlab.conditions import BASELINE
from softmaxlab.errors import LabError
from softmaxlab.fa4 import audit, gate_record, gates, throughput
from softmaxlab.findings import Finding, Stored, Value, estimated, printed
from softmaxlab.lookup import REFERENCE as MODEL
from softmaxlab.lookup import published, published_rows
from softmaxlab.statistics import Estimate
from softmaxlab.store import Store

#: The shape of which the front page speaks: the longest that was timed at the card's power limit.
CELL = Cell(dtype="bf16", causal=True, seq=16384, heads=16, head_dim=128)
SHAPE = "BF16, causal, 16K"
PACKED = "packed(4,3)"


def _semantic(label: str):
    row = next(r for r in semantic_endpoints.TABLE_B2 if r.label == label)

    def value(stored: Stored) -> Value | None:
        losses = Store(stored.results).frame(
            model=stored.model,
            corpus="wikitext103",
            context=2048,
            bos="stream",
            dtype="float32",
            backend=row.arm.backend,
            condition=[BASELINE, row.arm.condition],
        )
        if set(losses["condition"]) != {BASELINE, row.arm.condition}:
            return None
        ours = semantic_endpoints.delta(losses, row.arm)
        theirs = published("tableB2_semantic_fidelity", model=MODEL, condition=row.published, metric="dnll")
        return estimated(ours, theirs, kind=row.arm.kind)

    return value, published("tableB2_semantic_fidelity", model=MODEL, condition=row.published, metric="dnll")


_BF16, _BF16_PRINTED = _semantic("H15, τ = 8")
_FIVE = published_rows("table2_fidelity", path="bf16_kernel", metric="dnll")["value"]


_RESOLVED = {"positive": "resolved", "negative": "resolved below zero", "unresolved": "not resolved"}


def losses(stored: Stored, condition: str) -> dict[str, Estimate]:
    """Model → what an exponential costs it in the real kernel; of a model's several runs the first."""
    found: dict[str, Estimate] = {}
    for run in kernel_fidelity.stored(stored.results):
        if condition in run.conditions:
            found.setdefault(run.model, run.measured(condition))
    return found


def _kernel(stored: Stored) -> Value | None:
    found = losses(stored, "h15()")
    value = estimated(found.pop(stored.model, None), _FIVE)
    if value is None:
        return None
    others = (f"; {m}: {report.interval(e)} nats, {_RESOLVED[e.resolved]}" for m, e in found.items())
    return dataclasses.replace(value, agreement=value.agreement + "".join(others))


def sources(stored: Stored) -> dict[str, packed_endpoints.Losses]:
    """Model → its losses under packed exponentials in the paper's protocol."""
    return {s.model: s for s in packed_endpoints.losses(stored.results) if s.protocol == ("wikitext103", 2048)}


def _half(stored: Stored) -> Value | None:
    """Whether the packed kernel loses at most half of what Rowmax-H15 does, in each model."""
    others = sources(stored)
    own = others.pop(stored.model, None)
    if own is None:
        return None
    ours = own.beyond_half(PACKED)
    said = "".join(f"; {m}: {packed_endpoints.verdict_of(s.beyond_half(PACKED))}" for m, s in others.items())
    text = f"{report.interval(ours)} nats above half of H15's"
    return Value(text, f"nothing published; target {packed_endpoints.verdict_of(ours)}{said}", own.kind)


def _gates(stored: Stored) -> Value | None:
    # The folder itself: a relative one would fall back to the records beside the package.
    path = Path(stored.results) / gate_record.FILE
    record = gate_record.read(path) if path.is_file() else None
    if record is None or record.kind != "measured":
        return None
    table = gates.verdict(record.frame)
    offered = table[table["offered"]]
    green = int((offered["passed"] == offered["gates"]).sum())
    said = (
        "agrees for what is offered: nothing outside"
        if green == len(offered)
        else f"differs: {len(offered) - green} with a red gate"
    )
    paper_form = table[table["variant"] == "h15"]
    if len(paper_form):
        h15 = paper_form.iloc[0]
        said += (
            f"; H15 in the paper's clamp passes {h15['passed']} of {h15['gates']} and fails on fully masked rows, "
            "which the paper does not report to have tested"
            if h15["failed"]
            else ""
        )
    return Value(f"{green} of {len(offered)} offered variants all green, {offered['gates'].sum():,} readings", said)


def _counts(stored: Stored) -> Value | None:
    try:
        frame, _ = audit.stored(stored.results)
    except LabError:
        return None
    known = throughput.compare(frame)
    known = known[known["exposed"].notna()]
    low, high = known[["overlapped", "exposed"]].min(axis=1), known[["overlapped", "exposed"]].max(axis=1)
    outside = known[(known["published"] < low) | (known["published"] > high)]
    listed = "; ".join(
        f"{r.dtype.upper()}, {r.mask.replace('noncausal', 'no mask')}, {r.published:.1f} % where the limits are "
        f"{report.number(low[r.Index])} and {report.number(high[r.Index])} %"
        for r in outside.itertuples()
    )
    return Value(
        f"{len(known) - len(outside)} of {len(known)} published gains lie between two limits from instruction counts",
        f"differs in {len(outside)} ({listed}): counts alone do not foretell a gain" if listed else "agrees",
        "compiled",
    )


@dataclasses.dataclass(frozen=True)
class Gain:
    """How much faster than stock a kernel is at `CELL`, percent; `low` and `high` are None without intervals."""

    value: float
    low: float | None
    high: float | None
    verdict: str
    gpu: str

    def __str__(self) -> str:
        bounds = "" if self.low is None else f" [{_signed(self.low)}, {_signed(self.high)}]"
        return f"{_signed(self.value)}{bounds} %"


def gain(stored: Stored, kernel: str) -> Gain | None:
    """The gain of a kernel, timed within graphs; None where it is not stored."""
    try:
        table = gains.table(stored.results, "duration")
    except LabError:
        return None
    rows = table[(table["cell"] == str(CELL)) & (table["kernel"] == kernel)]
    if rows.empty:
        return None
    row = rows.iloc[-1]
    ends = (None, None) if pd.isna(row["stock_low"]) else (row["stock_low"], row["stock_high"])
    return Gain(row["stock"], *ends, row["verdict"], row["gpu"])


def _timed(kernel: str, theirs: float | None):
    def value(stored: Stored) -> Value | None:
        ours = gain(stored, kernel)
        if ours is None:
            return None
        if theirs is None:
            than = "" if ours.verdict == gains.UNRESOLVED else " than stock"
            said = f"nothing published; {ours.verdict}{than}"
        elif ours.verdict == gains.UNRESOLVED:
            said = "differs: not resolved here"
        else:
            same = (ours.verdict == gains.FASTER) == (theirs > 0)
            said = "same sign, resolved; another GPU" if same else f"differs: {ours.verdict} on this GPU"
        return Value(f"{ours} ({SHAPE}, {ours.gpu})", said)

    return value


def _energy(stored: Stored) -> Value | None:
    try:
        table = read.energies(stored.results)
    except LabError:
        return None
    rows = table[(table["cell"] == str(CELL)) & (table["kernel"] == "h15")].dropna(subset=["vs_stock"])
    if rows.empty:
        return None
    # One loop a kernel has no interval; what the control's loop differs by is the least that counts.
    control = table[(table["cell"] == str(CELL)) & (table["kernel"] == kernels.CONTROL)]["vs_stock"].abs().max()
    ours = rows["vs_stock"].mean()
    if abs(ours) <= control:
        said = "differs: within what the control moves"
    else:
        said = "same sign; another GPU" if ours < 0 else "differs: more energy on this GPU"
    return Value(f"{_signed(ours)} % ({SHAPE}, {rows['gpu'].iloc[0]}), no interval", said)


def _signed(value: float) -> str:
    return report.number(value) if value < 0 else f"+{report.number(value)}"


GAIN = published("tableB5a_main", dtype="bf16", seq=16384, head_dim=128, kernel="A1_vs_A0", metric="speedup")
#: Its gains in the settings whose stock latency it prints, which is what the counts are held to.
_GAINS = throughput.published().dropna(subset="latency")["value"]
_ENERGY = published("tableB5f_energy", kernel="A1_vs_A0", metric="energy_change")
_OUTSIDE = published("gates", metric="outside_envelope_with_tolerance")
_SHARE = published("gates", metric="below_envelope")
_ELEMENTS = int(published_rows("gates", metric="outside_envelope_with_tolerance")["n_elements"].iloc[0])

FINDINGS = [
    Finding(
        "Seen tile by tile from a lagging anchor, Rowmax-H15 costs little",
        printed(_BF16_PRINTED, "nats", f"{MODEL}, simulated"),
        "08",
        "table-b2",
        _BF16,
    ),
    Finding("So does the patched kernel", printed(_FIVE, "nats", "five models, B200"), "11", "table-2", _kernel),
    Finding(
        "The patched kernel computes the operator that is meant",
        f"{_SHARE} % of {_ELEMENTS:,} weights below the envelope, {_OUTSIDE} beyond E4M3's rounding (H15, B200)",
        "09",
        "gates",
        _gates,
    ),
    Finding(
        "Instruction counts foretell what a patch gains",
        f"none; its gains: {printed(_GAINS, '%', f'{len(_GAINS)} settings, B200')}",
        "10",
        "gains",
        _counts,
    ),
    Finding(
        "Rowmax-H15 makes a forward faster",
        f"+{GAIN} % ({SHAPE}, B200)",
        "12",
        "",
        _timed("h15", GAIN.value),
    ),
    Finding(
        "Rowmax-H15 makes a forward take less energy",
        printed(_ENERGY, "%", "FP8, causal, 16K, B200"),
        "12",
        "",
        _energy,
    ),
    Finding(
        f"Two weights in four instructions, `{PACKED}`, make an attention forward faster",
        report.MISSING,
        "14",
        "",
        _timed(PACKED, None),
    ),
    Finding(
        f"`{PACKED}` loses at most half of what Rowmax-H15 does",
        report.MISSING,
        "14",
        "packed-loss",
        _half,
    ),
]
