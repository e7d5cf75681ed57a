"""Small helpers of the chapters: the paper's number beside ours, in one table, with its kind named.

A number is **measured** (the language model computed it in this project), **simulated** (a model of the
kernel's arithmetic did) or **published** (read off the paper). Every column here says which.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping

import pandas as pd
from pandas.io.formats.style import Styler

from softmaxlab import paper
from softmaxlab.errors import LabError
from softmaxlab.paper import Published
from softmaxlab.statistics import Estimate

#: The model that the paper sweeps in detail; shown where the chapter's own model is not in the paper.
REFERENCE = "Qwen2.5-1.5B"
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


def published_model(model: str, table: str) -> str:
    """The name under which `table` lists the chapter's model, else the paper's reference model.

    Args:
        model: a short name or a hub id; organisation and revision do not count, nor does case.
    """
    listed = {str(m).lower(): str(m) for m in paper.table(table)["model"].unique()}
    return listed.get(_bare(model), REFERENCE)


def _bare(model: str) -> str:
    # A hub id is `org/name`, and `org--name` where it names a folder of results.
    return model.partition("@")[0].replace("--", "/").rsplit("/", 1)[-1].lower()


def published(table: str, **filters) -> Published | None:
    """The paper's value, or None where it prints none for these filters (`paper.value` raises)."""
    return paper.value(table, **filters) if len(_matching(table, filters)) else None


def published_rows(table: str, **filters) -> pd.DataFrame:
    """All rows of a table of the paper that match, with value, low and high as floats (NaN where absent)."""
    rows = _matching(table, filters).copy()
    rows["value"] = pd.to_numeric(rows["value"])
    for end, column in (("low", "ci_low"), ("high", "ci_high")):
        rows[end] = pd.to_numeric(rows[column]) if column in rows.columns else math.nan
    return rows


def _matching(table: str, filters: Mapping[str, object]) -> pd.DataFrame:
    rows = paper.table(table)
    for column, wanted in filters.items():
        if column not in rows.columns:
            raise LabError(f"table {table} has no column {column!r}: its columns are {', '.join(rows.columns)}")
        rows = rows[rows[column].astype(str) == str(wanted)]
    return rows


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
    if ours.resolved == "unresolved":
        return "ours unresolved"
    if theirs.low is not None and theirs.high is not None and theirs.low <= neutral <= theirs.high:
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
) -> Styler:
    """The paper's values beside ours: one row a quantity (a pandas Styler).

    Args:
        rows: label, our estimate (in nats), the paper's value (in the unit of the table) or None.
        what: heading of the label column.
        ours, theirs: names of the two models.
        transform: from nats to the unit of the table.
    """
    records = [
        {
            what: _unbroken(label),
            f"{ours}, {kind('measured')}": interval(estimate, transform),
            f"{theirs}, {kind('published')}": text(value),
            "signs": agreement(estimate, value, neutral=transform(0.0)),
        }
        for label, estimate, value in rows
    ]
    return table(pd.DataFrame(records).set_index(what), caption)


def _unbroken(label: str) -> str:
    # A label may break over lines, but not inside `K = 32` or `50 %`.
    return label.replace(" = ", "\u00a0=\u00a0").replace(" %", "\u00a0%")


def table(frame: pd.DataFrame, caption: str) -> Styler:
    """A frame as the book shows tables: a caption above, the text in the index, one heading row.

    Headings and index may break over lines, so that a table fits a page and, with less scrolling, a phone.
    """
    if frame.index.nlevels == 1:  # put the index's name into the heading row instead of a row of its own
        frame = frame.rename_axis(index=None, columns=frame.index.name)
    unique = hashlib.sha256(f"{caption}{list(frame.columns)}".encode()).hexdigest()[:8]
    styler = Styler(frame, uuid=unique, cell_ids=False, caption=caption)
    wrap = {"selector": "th", "props": "white-space: normal; max-width: 26rem; min-width: 3rem"}
    return styler.format(na_rep=MISSING).set_table_styles([wrap])


def verdict(rows: Iterable[tuple[str, Estimate, Published | None]], neutral: float = 0.0) -> str:
    """Sentences made from the data: which signs agree with the paper, which do not, which are open."""
    groups: dict[str, list[str]] = {}
    for label, ours, theirs in rows:
        groups.setdefault(agreement(ours, theirs, neutral), []).append(label)
    phrases = {
        "same sign": "Resolved here with the paper's sign",
        "opposite sign": "Resolved here with the opposite sign",
        "ours unresolved": "Unresolved here (our interval holds zero)",
        "paper unresolved": "Resolved here but not in the paper",
        MISSING: "Without a published value to compare",
    }
    found = [(text, groups[key]) for key, text in phrases.items() if key in groups]
    return " ".join(f"{text}, {len(labels)}: {'; '.join(labels)}." for text, labels in found)


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
        "model": _bare(model) != reference.lower(),
        "text": corpus != "wikitext103",
        "block length": context != length.value,
        "number of blocks": n_blocks != count.value,
    }
    head = f"This page shows **{model}** on **{corpus}**: {n_blocks} blocks of {context:,} tokens, {dtype}."
    scale = f"The paper's numbers are of **{reference}** on WikiText-103: {count} blocks of {length} tokens."
    differs = [what for what, is_so in differences.items() if is_so]
    if not differs:
        return f"{head} {scale} Model, text and blocks are the paper's."
    listed = differs[0] if len(differs) == 1 else f"{', '.join(differs[:-1])} and {differs[-1]}"
    return f"{head} {scale} Not the same: {listed}. Values need not agree; signs and orders may."


def published_grids(reference: str, linear: str, upper: str, nearest: str) -> pd.DataFrame:
    """The paper's values of Figure S4 as `figures.interval_sweep` takes them, in nats.

    Args:
        reference: the paper's model.
        linear, upper, nearest: the names of the three series.

    The linear map is printed as one range over all K; the nearest-edge values are printed as perplexity
    percentages and converted.
    """
    rows = published_rows("d1_geometry", model=reference)
    exp = rows[rows["weight_map"] == "exp"]
    exact = exp[(exp["recon"] == "upper_edge") & (exp["metric"] == "dnll")].assign(series=upper)
    near = exp[(exp["recon"] == "nearest") & (exp["metric"] == "ppl_change")].assign(series=nearest)
    near["value"] = near["value"].map(lambda change: math.log1p(change / 100))
    ends = rows[(rows["weight_map"] == "linear") & (rows["metric"] == "dnll")].set_index("stat")
    sizes = [int(k) for k in str(ends["K"].iloc[0]).split("|")]
    low, high = ends.loc["min", "value"], ends.loc["max", "value"]
    band = pd.DataFrame({"series": linear, "K": sizes, "value": math.nan, "low": low, "high": high})
    columns = ["series", "K", "value", "low", "high"]
    return pd.concat([exact[columns], near[columns], band], ignore_index=True).astype({"K": int})
