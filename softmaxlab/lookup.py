"""The paper's values as the chapters ask for them: for a model, as rows, or None where nothing is printed.

`paper.value` wants exactly one row and raises otherwise; a chapter that runs on any model must also be told that
the paper has no value for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import pandas as pd

from softmaxlab import paper
from softmaxlab.errors import LabError
from softmaxlab.paper import Published

#: The model that the paper sweeps in detail; shown where the chapter's own model is not in the paper.
REFERENCE = "Qwen2.5-1.5B"


def published_model(model: str, table: str) -> str:
    """The name under which `table` lists the chapter's model, else the paper's reference model.

    Args:
        model: a short name or a hub id; organisation and revision do not count, nor does case.
    """
    listed = {str(m).lower(): str(m) for m in paper.table(table)["model"].unique()}
    return listed.get(bare_name(model), REFERENCE)


def bare_name(model: str) -> str:
    # A hub id is `org/name`, and `org--name` where it names a folder of results.
    return model.partition("@")[0].replace("--", "/").rsplit("/", 1)[-1].lower()


def relative(model: str, names: Iterable[str]) -> str | None:
    """The name whose family and size a model has, though it may be another checkpoint; None where there is none.

    `qwen2.5-coder-1.5b-instruct-q4_k` is a relative of `Qwen2.5-1.5B`: it has all words of that name.
    """
    words = set(bare_name(model).split("-"))
    return next((name for name in names if set(name.lower().split("-")) <= words), None)


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
