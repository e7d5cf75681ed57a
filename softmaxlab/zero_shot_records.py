"""Zero-shot records as they are stored: one table a task and condition, one row a document, and how they are read.

Reading needs neither the documents nor lm-evaluation-harness, so that a page can be built from what was measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import pandas as pd

from softmaxlab.conditions import canonical
from softmaxlab.errors import LabError
from softmaxlab.evaluate import find_results
from softmaxlab.store import Store

KIND = "zero_shot"

#: Part of every key. Raise it when the meaning of a stored record changes.
PROTOCOL = 1

#: The paper's tasks (C.1) and the metric of each in its Table C2.
METRICS = {
    "lambada_openai": "acc",
    "hellaswag": "acc_norm",
    "arc_easy": "acc_norm",
    "arc_challenge": "acc_norm",
    "piqa": "acc_norm",
    "winogrande": "acc",
}
TITLES = {
    "lambada_openai": "LAMBADA",
    "hellaswag": "HellaSwag",
    "arc_easy": "ARC-Easy",
    "arc_challenge": "ARC-Challenge",
    "piqa": "PIQA",
    "winogrande": "WinoGrande",
}
TASKS = tuple(METRICS)
#: Names that say what a record is of, in a tidy frame.
NAMES = ("model", "dtype", "backend", "padding", "batch", "limit", "condition", "task")
#: Columns of the tidy frame, one row a document.
COLUMNS = (*NAMES, "document", "loglikelihoods", "prediction", "prediction_norm", "gold", "acc", "acc_norm")


def check_tasks(tasks: Iterable[str]) -> list[str]:
    """The tasks without repetition; LabError on an unknown one."""
    wanted = list(dict.fromkeys(tasks))
    for name in wanted:
        if name not in METRICS:
            raise LabError(f"unknown task {name!r}: known are {', '.join(TASKS)}")
    if not wanted:
        raise LabError(f"no task was given: name at least one of {', '.join(TASKS)}")
    return wanted


def stored(
    names: Mapping[str, object],
    *,
    conditions: Sequence[str] | None = None,
    tasks: Iterable[str] = TASKS,
    results: str = "results",
) -> pd.DataFrame:
    """Records that are stored, whatever is there; needs neither documents nor the harness.

    Args:
        names: what must match of `NAMES`, e.g. `setting.names()`, or a row of `settings`.
        conditions: text forms, in the order wanted; None means all that are stored.
        tasks, results: as `evaluate`.

    Returns:
        Tidy frame as of `evaluate`; empty if nothing matches.

    Raises:
        LabError: two tables that the names cannot tell apart, e.g. of two versions of a task's documents.
    """
    return tidy((key, table) for key, table, _ in _tables(names, conditions, tasks, results))


def made(
    names: Mapping[str, object],
    *,
    conditions: Sequence[str] | None = None,
    tasks: Iterable[str] = TASKS,
    results: str = "results",
) -> pd.DataFrame:
    """How stored records were made: one row a condition and task, with key, provenance and gate. Raises as `stored`."""
    rows = []
    for key, _, provenance in _tables(names, conditions, tasks, results):
        gates = {f"gate_{name}": value for name, value in provenance["gate"].items()}
        rows.append(key | {n: v for n, v in provenance.items() if not isinstance(v, dict)} | gates)
    return pd.DataFrame(rows)


def settings(results: str = "results") -> pd.DataFrame:
    """The settings under which anything is stored: one row each, model, dtype, backend, padding, batch, limit."""
    names = [name for name in NAMES if name not in ("condition", "task")]
    rows = [{name: key[name] for name in names} for key, _, _ in _tables({}, None, TASKS, results, distinct=False)]
    return pd.DataFrame(rows, columns=names).drop_duplicates(ignore_index=True)


def _tables(
    names: Mapping[str, object],
    conditions: Sequence[str] | None,
    tasks: Iterable[str],
    results: str,
    *,
    distinct: bool = True,
) -> list[tuple[dict, pd.DataFrame, dict]]:
    wanted, only = check_tasks(tasks), None if conditions is None else canonical(list(conditions))
    root = find_results(results)
    tables, seen = [], {}
    for key, table, provenance in Store(root).tables(KIND):
        if key.get("protocol") != PROTOCOL or key["task"] not in wanted:
            continue
        if any(key[name] != value for name, value in names.items()):
            continue
        if only is not None and key["condition"] not in only:
            continue
        other = seen.setdefault((key["condition"], key["task"]), key)
        if distinct and other is not key:
            differs = [name for name in key if key[name] != other.get(name)]
            raise LabError(
                f"two results of {key['task']} under {key['condition']} differ in {' and '.join(differs)}: "
                f"name one of the two, or remove one from {root / KIND}"
            )
        tables.append((key, table, provenance))
    order = {name: i for i, name in enumerate(only or [])}
    return sorted(tables, key=lambda e: (order.get(e[0]["condition"], 0), wanted.index(e[0]["task"])))


def tidy(tables: Iterable[tuple[Mapping, pd.DataFrame]]) -> pd.DataFrame:
    """Keys and tables as one frame (`COLUMNS`)."""
    frames = [table.assign(**{name: key[name] for name in NAMES}) for key, table in tables]
    if not frames:
        return pd.DataFrame(columns=list(COLUMNS))
    return pd.concat(frames, ignore_index=True)[list(COLUMNS)]
