"""The operators beside torch's attention: tables of ratios, the targets with their verdicts, and why one is missed.

Everything comes from the summaries of `bench.operator_rows`. A machine is a kind, a device and a number of threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

from softmaxlab import report
from softmaxlab.bench import operator_rows, sdpa
from softmaxlab.operators import parse
from softmaxlab.status import code, table

Row = dict
MODES = {"model": "forward pass", "attention": "attention alone"}
FAMILIES = {
    "softmax": "softmax",
    "rowmax": "Rowmax lattices, PoT, temperature",
    "grid": "grids",
    "mean_threshold": "mean threshold",
    "topk": "top-k",
}
SETTINGS = {
    ("cpu", "model", "float32", 2048): "two CPU cores, forward pass, 2K, float32",
    ("cuda", "model", "float32", 2048): "H200, forward pass, 2K, float32",
    ("cuda", "attention", "bfloat16", 16384): "H200, attention alone, 16K, bfloat16",
}
#: Why a family is above its target on a GPU in bfloat16; shown where it is.
REASONS = {
    "softmax": "P and V are FP16 here, eight times finer than BF16, which takes a copy of V at each call.",
    "rowmax": "A lattice is defined by the row's true maximum, so the keys are walked twice: once for it, once for the "
    "weights, and q·k is multiplied in both, three matrix products in the place of two.",
    "grid": "The keys are walked for the row's ends first, so q·k is multiplied twice; then every score takes a "
    "logarithm and, where the intervals are not uniform, two exponentials in a row.",
    "mean_threshold": "The keys are walked for the row's mean first, so q·k is multiplied twice.",
    "topk": "The scores are written to a scratch buffer, each row is searched for its threshold in six to twelve "
    "counts, and q·k is multiplied again in the walk that follows.",
}
FLOAT32 = "A product of FP32 numbers is six products of BF16 parts, for FP32's accuracy; the rest was not taken apart."
UNKNOWN = "Why was not established."


def kilo(context: int) -> str:
    """Tokens as the book writes them, 2048 as 2K."""
    return f"{context // 1024}K" if context % 1024 == 0 else f"{context:,}"


def ratio(row: Row) -> str:
    """Median of the rounds with the least and the largest; a third decimal where two would hide the verdict."""
    bound, value = row["target"], row["ratio"]
    hidden = bound is not None and value > bound and round(value, 2) <= bound
    return f"{value:.{3 if hidden else 2}f} ({row['low']:.2f}–{row['high']:.2f})"


def machine(row: Row) -> tuple[str, str, int]:
    """Kind, device and threads."""
    return row["kind"], row["device"], row["threads"]


def machines(rows: Iterable[Row]) -> list[tuple[str, str, int]]:
    """The machines, GPUs first."""
    return sorted({machine(r) for r in rows}, key=lambda m: (m[0] != "cuda", m[1:]))


def slow_way(row: Row) -> bool:
    """Whether sdpa was called with `enable_gqa` alone, where torch has no fused kernel for that."""
    return row["sdpa"] is None and (row["kind"], row["dtype"]) == ("cuda", "float32")


def missed(row: Row) -> bool:
    """Whether a row has a target and is above it."""
    return row["target"] is not None and row["ratio"] > row["target"]


def targets(rows: Sequence[Row]) -> str:
    """Each family's target in each setting, its verdict and the largest ratio that decided it."""
    lines = []
    for family, name in FAMILIES.items():
        lines.append((name, *(_verdict(rows, setting, family) for setting in SETTINGS)))
    return table(("target, at most, of sdpa's time", *SETTINGS.values()), lines)


def held(rows: Iterable[Row], setting: tuple, family: str | None = None) -> list[Row]:
    """The rows that a setting's targets hold for, those of one family if it is named."""
    there = [r for r in rows if (r["kind"], r["mode"], r["dtype"], r["context"]) == setting]
    there = [r for r in there if r["target"] is not None]
    return [r for r in there if family in (None, operator_rows.family(parse(r["operator"])))]


def _verdict(rows: Sequence[Row], setting: tuple, family: str) -> str:
    bound, found = operator_rows.TARGETS[setting][family], held(rows, setting, family)
    if not found:
        return f"≤ {bound:g}: not measured"
    above, worst = [r for r in found if missed(r)], max(found, key=lambda r: r["ratio"])
    which = f"{ratio(worst)} `{worst['operator']}`"
    if above:
        count = "" if len(found) == 1 else f" by {len(above)} of {len(found)}, at most"
        return f"≤ {bound:g}: **missed**{count} {which}"
    met = "met against sdpa with `enable_gqa` alone" if any(map(slow_way, found)) else "met"
    return f"≤ {bound:g}: {met}{'' if len(found) == 1 else ', at most'} {which}"


def why(rows: Sequence[Row]) -> str:
    """For each setting with a target that is missed: which operators, and the reasons; a sentence where none is."""
    parts = []
    for setting, title in SETTINGS.items():
        kind, _, dtype, _ = setting
        above = [r for r in held(rows, setting) if missed(r)]
        if not above:
            continue
        reasons = {("cuda", "bfloat16"): REASONS, ("cuda", "float32"): dict.fromkeys(FAMILIES, FLOAT32)}
        known = reasons.get((kind, dtype), dict.fromkeys(FAMILIES, UNKNOWN))
        lines = [f"**{title}.** {_rate(above[0])}".rstrip(), ""]
        for family, name in FAMILIES.items():
            of = [r for r in above if operator_rows.family(parse(r["operator"])) == family]
            if of:
                shown = ", ".join(f"{code(r['operator'])} {ratio(r)}" for r in of)
                lines.append(f"- {name}, ≤ {of[0]['target']:g}: {shown}. {known[family]}")
        parts.append("\n".join(lines))
    if parts:
        return "\n\n".join(parts)
    return "No target that was measured is missed." if any(r["target"] for r in rows) else "No target was measured."


def _rate(row: Row) -> str:
    """How fast sdpa itself was, where the shape says it."""
    heads, _, dim = row["shape"]
    if not heads:
        return ""
    operations = 2 * row["context"] ** 2 * heads * dim  # two products, of which a causal mask leaves half
    rate = operations / (row["sdpa_ms"] / 1000) / 1e12
    return (
        f"sdpa's kernel, which torch chooses, runs at about {report.number(rate, 2)} TFLOP/s, with P rounded to the "
        "inputs' dtype."
    )


def ratio_tables(rows: Sequence[Row], found: tuple[str, str, int]) -> str:
    """A table of operators by context for each mode, dtype and backend of a machine."""
    own = [r for r in rows if machine(r) == found]
    parts = []
    for mode, title in MODES.items():
        for backend in sorted({r["backend"] for r in own}, key=lambda name: (name != "fused", name)):
            for dtype in ("float32", "bfloat16", "float16"):
                here = [r for r in own if (r["mode"], r["backend"], r["dtype"]) == (mode, backend, dtype)]
                if here:
                    heading = f"{title[0].upper()}{title[1:]}, {dtype}, backend {backend}"
                    parts.append(f":::{{dropdown}} {heading}{_open(backend)}\n{_table(here)}\n:::")
    return "\n\n".join(parts)


def _open(backend: str) -> str:
    return "\n:open:\n" if backend == "fused" else "\n"


def _table(rows: Sequence[Row]) -> str:
    contexts = sorted({r["context"] for r in rows})
    at = {(r["operator"], r["context"]): r for r in rows}
    operators = sorted(
        {r["operator"] for r in rows}, key=lambda o: median(r["ratio"] for r in rows if r["operator"] == o)
    )
    theirs = {n: median(r["sdpa_ms"] for r in rows if r["context"] == n) for n in contexts}
    lines = [("sdpa itself", *(f"{report.number(theirs[n])} ms" for n in contexts), "")]
    for operator in operators:
        cells = [ratio(at[operator, n]) if (operator, n) in at else report.MISSING for n in contexts]
        verdicts = [operator_rows.verdict(at[operator, n]) for n in contexts if (operator, n) in at]
        lines.append((code(operator), *cells, ", ".join(filter(None, verdicts))))
    notices = sorted({f"{code(r['operator'])}: {notice}" for r in rows for notice in r["notices"]})
    shown = table(("operator, times sdpa (spread)", *map(kilo, contexts), "target"), lines)
    return "\n\n".join([shown, *notices])


def ways(rows: Sequence[Row]) -> str:
    """In which way sdpa was called in each case of a GPU or CPU, and how long the other took."""
    cases = {(*machine(r), r["case"]): r for r in rows}
    lines, alone = [], []
    for r in cases.values():
        place = r["device"], MODES[r["mode"]], r["dtype"], kilo(r["context"])
        if r["sdpa"] is None:
            alone.append(r)
            lines.append((*place, sdpa.GROUPED, "not tried"))
            continue
        (other,) = set(sdpa.WAYS) - {r["sdpa"]}
        took, best = r["sdpa_trial"].get(other), r["sdpa_trial"].get(r["sdpa"])
        text = "memory does not hold it" if took is None else f"{took / best:.2f} times as long"
        lines.append((*place, r["sdpa"], text))
    text = table(("device", "timed", "dtype", "context", "sdpa is called", "the other way"), lines)
    flattered = sorted({f"{MODES[r['mode']]} at {kilo(r['context'])}" for r in alone if slow_way(r)})
    if flattered:
        text += (
            "\n\nWhere the other way was not tried and torch holds matrices of scores instead, **the ratio flatters "
            f"ours**: float32 on CUDA, {', '.join(flattered)}. These have to be measured again."
        )
    return text


def absent(rows: Sequence[Row]) -> list[str]:
    """What of the modes, dtypes and contexts that any machine has was not measured on each, in words."""
    contexts = {2048, 8192, 16384, 32768} | {r["context"] for r in rows}
    said = []
    for kind in ("cuda", "cpu"):
        own = [r for r in rows if r["kind"] == kind and r["backend"] == "fused"]
        name = {"cuda": "a GPU", "cpu": "the CPU"}[kind]
        if not own:
            said.append(f"Operators on {name}.")
            continue
        for mode, title in MODES.items():
            for dtype in ("float32", "bfloat16"):
                there = {r["context"] for r in own if (r["mode"], r["dtype"]) == (mode, dtype)}
                left = sorted(contexts - there)
                if not there:
                    said.append(f"On {name}: {title}, {dtype}.")
                elif left:
                    said.append(f"On {name}: {title}, {dtype}, at {', '.join(map(kilo, left))}.")
    return said
