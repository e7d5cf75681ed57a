"""Small helpers of the chapters: the paper's number beside ours, in one table, with its kind named.

A number is **measured** (the language model computed it in this project), **simulated** (a model of the
kernel's arithmetic did) or **published** (read off the paper). Every column here says which.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import pandas as pd
from pandas.io.formats.style import Styler

from softmaxlab import conditions, floor, paper
from softmaxlab.errors import LabError
from softmaxlab.lookup import REFERENCE as REFERENCE
from softmaxlab.lookup import bare_name
from softmaxlab.lookup import published as published
from softmaxlab.lookup import published_grids as published_grids
from softmaxlab.lookup import published_model as published_model
from softmaxlab.lookup import published_rows as published_rows
from softmaxlab.paper import Published
from softmaxlab.statistics import Estimate

KINDS = ("measured", "simulated", "published")
MISSING = "—"


def kind(name: str) -> str:
    """The kind's name if it is one of the three."""
    if name not in KINDS:
        raise LabError(f"a number's kind is one of {', '.join(KINDS)}, not {name!r}")
    return name


def number(value: float, digits: int = 3) -> str:
    """A value with `digits` significant digits, zeros kept, no exponent above 1e-5, a true minus sign."""
    if not math.isfinite(value):
        return MISSING
    if value == 0:
        return "0"
    rounded = float(f"{value:.{digits - 1}e}")
    exponent = math.floor(math.log10(abs(rounded)))
    style = f".{digits - 1}e" if exponent < -5 else f",.{max(0, digits - 1 - exponent)}f"
    return f"{rounded:{style}}".replace("-", "−")


def minus(text: str) -> str:
    """The text with a true minus sign before numbers; hyphens of names, dates and ranges stay."""
    return re.sub(r"(?<![\w.\]\)])-(?=\d)", "−", text)


def text(value: Published | None) -> str:
    """The paper's value with the digits it prints, or a dash."""
    return MISSING if value is None else str(value)


def interval(estimate: Estimate | Published, transform: Callable[[float], float] = float) -> str:
    """`value [low, high]`, or the value alone where there is no interval.

    Args:
        transform: an increasing function put on value and ends, e.g. nats to perplexity percent.
    """
    mean = estimate.mean if isinstance(estimate, Estimate) else estimate.value
    if estimate.low is None or estimate.high is None:
        return number(transform(mean))
    low, high = (number(transform(end)) for end in (estimate.low, estimate.high))
    return f"{number(transform(mean))} [{low}, {high}]"


def percent(nats: float) -> float:
    """ΔNLL in nats to the perplexity increase in percent (paper A.2)."""
    return 100 * math.expm1(nats)


def points(estimates: Iterable[Estimate], transform: Callable[[float], float] = float, **columns) -> pd.DataFrame:
    """Estimates as the figures take them: the given columns, then value, low, high (transformed)."""
    rows = [[transform(v) for v in (e.mean, e.low, e.high)] for e in estimates]
    frame = pd.DataFrame(rows, columns=["value", "low", "high"])
    return pd.concat([pd.DataFrame(columns), frame], axis=1)


def agreement(ours: Estimate, theirs: Published | None, neutral: float = 0.0) -> str:
    """Whether our sign is the paper's. Only signs are compared, and only resolved ones.

    Args:
        neutral: what no change is in the unit of the published value: 0, or 1 for a ratio.
    """
    if theirs is None:
        return MISSING
    open_there = theirs.low is not None and theirs.high is not None and theirs.low <= neutral <= theirs.high
    if ours.resolved == "unresolved":
        return "both unresolved" if open_there else "ours unresolved"
    if open_there:
        return "paper unresolved"
    same = (theirs.value > neutral) == (ours.resolved == "positive")
    return "same sign" if same else "opposite sign"


def tally(estimates: Iterable[Estimate]) -> str:
    """How many are resolved, e.g. `all 7 resolved above zero` or `5 resolved above zero, 2 unresolved (of 7)`."""
    found = [e.resolved for e in estimates]
    words = {
        "positive": "resolved above zero",
        "unresolved": "unresolved",
        "negative": "resolved below zero",
    }
    parts = [(found.count(state), text) for state, text in words.items() if state in found]
    if len(parts) == 1:
        return f"all {parts[0][0]} {parts[0][1]}"
    return f"{', '.join(f'{count} {text}' for count, text in parts)} (of {len(found)})"


def beside(
    rows: Iterable[tuple[str, Estimate, Published | None]],
    *,
    what: str,
    ours: str,
    theirs: str,
    caption: str,
    transform: Callable[[float], float] = float,
    floors: Sequence[float] | None = None,
) -> Styler:
    """The paper's values beside ours: one row a quantity (a pandas Styler).

    Args:
        rows: label, our estimate (in nats), the paper's value (in the unit of the table) or None.
        what: heading of the label column.
        ours, theirs: names of the two models.
        transform: from nats to the unit of the table.
        floors: the reproducibility floor of each row, in nats; adds a column that says whether our effect is
            above it (see `floor_of`).
    """
    rows = list(rows)
    neutral = transform(0.0)
    columns = {
        what: [_unbroken(label) for label, _, _ in rows],
        f"{ours}, {kind('measured')}": [interval(estimate, transform) for _, estimate, _ in rows],
        f"{theirs}, {kind('published')}": [text(value) for _, _, value in rows],
        "signs": [agreement(estimate, value, neutral) for _, estimate, value in rows],
    }
    if floors is not None:
        sizes = [estimate.mean for _, estimate, _ in rows]
        columns["floor"] = [against_floor(*pair, transform) for pair in zip(sizes, floors, strict=True)]
    return table(pd.DataFrame(columns).set_index(what), caption)


def floor_of(weights: Mapping[str, float] | Iterable[str], floors: pd.Series) -> float:
    """The floor of a contrast, in nats: what equivalent implementations moved its conditions by, added up.

    Args:
        weights: conditions of the contrast, with their weights where they are not ±1; softmax has no floor, as a
            ΔNLL is taken against it.
        floors: floor of each family (`floor.floors`).

    The sum is reached only if the two sides of a contrast move in opposite directions.
    """
    weights = weights if isinstance(weights, Mapping) else dict.fromkeys(weights, 1.0)
    return sum(abs(w) * floor.of(c, floors) for c, w in weights.items() if c != conditions.BASELINE)


def against_floor(value: float, limit: float, transform: Callable[[float], float] = float) -> str:
    """`above` or `below` and the floor itself, both given in nats, shown in the unit of `transform`."""
    shown = number(transform(limit) - transform(0.0))
    return f"{'below' if floor.below(value, limit) else 'above'} {shown}"


def floor_note(rows: Iterable[tuple[str, Estimate, object]], floors: Iterable[float]) -> str:
    """A sentence made from the data: which effects of a table may be of rounding."""
    rows = list(rows)
    low = [label for (label, e, _), limit in zip(rows, floors, strict=True) if floor.below(e.mean, limit)]
    if not low:
        return f"Below the floor: none of {len(rows)}."
    return f"Below the floor, {len(low)} of {len(rows)}: {'; '.join(low)}."


def values(
    rows: Iterable[tuple[str, float | str | None, Published | str | None]],
    *,
    what: str,
    ours: str,
    theirs: str,
    caption: str,
) -> Styler:
    """Values without intervals beside the paper's: one row a quantity.

    Args:
        rows: label, our value and the paper's; a text is shown as it is, None as a dash.
        what, ours, theirs, caption: as in `beside`.
    """
    rows = list(rows)
    columns = {
        what: [_unbroken(label) for label, _, _ in rows],
        f"{ours}, {kind('measured')}": [_shown(value, number) for _, value, _ in rows],
        f"{theirs}, {kind('published')}": [_shown(value, text) for _, _, value in rows],
    }
    return table(pd.DataFrame(columns).set_index(what), caption)


def _unbroken(label: str) -> str:
    # A label may break over lines, but not inside `K = 32` or `50 %`.
    return label.replace(" = ", "\u00a0=\u00a0").replace(" %", "\u00a0%")


def table(frame: pd.DataFrame, caption: str) -> Styler:
    """A frame as the book shows tables: a caption above, the text in the index, one heading row.

    Headings and index may break over lines, so that a table fits a page and, with less scrolling, a phone; names of
    rows not into single words.
    """
    if frame.index.nlevels == 1:  # put the index's name into the heading row instead of a row of its own
        frame = frame.rename_axis(index=None, columns=frame.index.name)
    unique = hashlib.sha256(f"{caption}{list(frame.columns)}".encode()).hexdigest()[:8]
    styler = Styler(frame, uuid=unique, cell_ids=False, caption=caption)
    wrap = {"selector": "th", "props": "white-space: normal; max-width: 26rem; min-width: 3rem"}
    longest = max((len(str(name)) for name in frame.index), default=0)
    names = {"selector": "th.row_heading", "props": f"min-width: {min(0.5 * longest, 9):g}rem"}
    return styler.format(_cell, na_rep=MISSING).set_table_styles([wrap, names])


def _cell(value: object) -> str:
    return f"{value:.6f}" if isinstance(value, float) else minus(str(value))


def _shown(value: object, style: Callable[..., str]) -> str:
    return MISSING if value is None else value if isinstance(value, str) else style(value)


def verdict(rows: Iterable[tuple[str, Estimate, Published | None]], neutral: float = 0.0) -> str:
    """Sentences made from the data: which signs agree with the paper, which do not, which are open."""
    groups: dict[str, list[str]] = {}
    for label, ours, theirs in rows:
        groups.setdefault(agreement(ours, theirs, neutral), []).append(label)
    phrases = {
        "same sign": "Resolved here with the paper's sign",
        "opposite sign": "Resolved here with the opposite sign",
        "ours unresolved": "Unresolved here, and in the paper resolved or without an interval",
        "both unresolved": "Unresolved here and in the paper",
        "paper unresolved": "Resolved here but not in the paper",
        MISSING: "Without a published value to compare",
    }
    found = [(text, groups[key]) for key, text in phrases.items() if key in groups]
    said = " ".join(f"{text}, {len(labels)}: {'; '.join(labels)}." for text, labels in found)
    return said or "Nothing was measured to compare."


def setting(model: str, losses: pd.DataFrame, reference: str) -> str:
    """Say which run the page shows and in what it differs from the paper's.

    Args:
        model: readable name of the chapter's model.
        losses: the tidy loss frame of the run.
        reference: the paper's model that the page compares with.
    """
    corpus, context = losses["corpus"].iloc[0], int(losses["context"].iloc[0])
    n_blocks, dtype = losses["block"].nunique(), losses["dtype"].iloc[0]
    length, count = (paper.value("protocol", area="eval", item=i) for i in ("context", "blocks_2K"))
    differences = {
        "model": bare_name(model) != reference.lower(),
        "text": corpus != "wikitext103",
        "block length": context != length.value,
        "number of blocks": n_blocks != count.value,
    }
    head = f"This page shows **{model}** on **{corpus}**: {n_blocks} blocks of {context:,} tokens, {dtype}."
    scale = f"The paper's numbers are of **{reference}** on WikiText-103: {count} blocks of {length.value:,.0f} tokens."
    differs = [what for what, is_so in differences.items() if is_so]
    if not differs:
        return f"{head} {scale} Model, text and blocks are the paper's."
    listed = differs[0] if len(differs) == 1 else f"{', '.join(differs[:-1])} and {differs[-1]}"
    return f"{head} {scale} The two runs differ in {listed}, so values need not agree; signs and orders may."
