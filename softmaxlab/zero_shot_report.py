"""The zero-shot chapter's records, tables and sentences (paper C.3): measured beside published, each named so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from pandas.io.formats.style import Styler
from scipy.stats import binom

from softmaxlab import lookup, paired, report, zero_shot
from softmaxlab.conditions import BASELINE
from softmaxlab.evaluate import find_results
from softmaxlab.paired import Change
from softmaxlab.store import Store
from softmaxlab.zero_shot import METRICS, TASKS, TITLES, Setting

Changes = dict[tuple[str, str], Change]  # by condition and task

TABLE = "tableC2_zero_shot"
LEVEL = 0.05

#: Our conditions by the names of the paper's table.
PUBLISHED = {
    BASELINE: "softmax",
    "mean_threshold()": "mean_threshold",
    "grid(K=32,R=4)": "exp_K32_R4",
    "grid(K=64,R=4)": "exp_K64_R4",
    "rowmax_pot(K_max=20)": "rowmax_pot_Kmax20",
}
#: What is known of copies of the documents that differ from the harness's own, by fingerprint of the whole task.
COPIES = {
    "51762ddcb614": "HellaSwag: a text export in which endings that began with a bracketed title lost the space that "
    "the harness leaves there",
    "2f0fe54278f5": "ARC-Easy: four questions of five choices have four (at most 0.17 points)",
    "4b72a94d8664": "ARC-Challenge: three questions of five choices have four (at most 0.26 points)",
    "591e3ca53841": "PIQA: spaces at the edges of 230 endings are gone (0.16 points of acc)",
}


def records(
    conditions: Sequence[str], setting: Setting, *, data: str = "", device: str = "auto", results: str = "results"
) -> pd.DataFrame:
    """What the chapter shows: computed where documents are at hand, else what is stored. Never asks the hub."""
    if zero_shot.data_folder(data):
        return zero_shot.evaluate(conditions, setting, data=data, device=device, results=results)
    return zero_shot.stored(setting.checked().names(), conditions=conditions, results=results)


def told(frame: pd.DataFrame, setting: Setting, data: str, reference: str) -> str:
    """Which records the page shows, or that there are none, and in what they differ from the paper's."""
    name = setting.names()["model"]
    if frame.empty:
        return (
            f"**Nothing is shown on this page:** no answers of **{name}** in {setting.dtype}, batch {setting.batch}, "
            f"{setting.padding} padding, are stored, and no folder of documents was given to compute any."
        )
    counts = frame.groupby("task", sort=False).document.nunique()
    listed = ", ".join(f"{TITLES[task]} {n:,}" for task, n in counts.items())
    origin = "Computed from the documents given." if zero_shot.data_folder(data) else "Stored answers are shown."
    size = "The full evaluation sets" if not setting.limit else f"The first {setting.limit:,} documents of each task"
    return (
        f"This page computes **{name}** in {setting.dtype}, batches of {setting.batch}, padded on the "
        f"{setting.padding}, and shows every stored model. {origin} {size}: {listed}. The paper's numbers are of "
        f"**{reference}** where no other model is named."
    )


def every(
    frame: pd.DataFrame, setting: Setting, wanted: Sequence[str], *, results: str = "results"
) -> dict[str, pd.DataFrame]:
    """Label → records of the wanted conditions: the chosen setting's first, then all others that are stored."""
    names = setting.checked().names()
    found = {label(names): frame}
    for other in zero_shot.settings(results).to_dict("records"):
        if other != names:
            found[label(other)] = zero_shot.stored(other, conditions=wanted, results=results)
    return {who: frame for who, frame in found.items() if len(frame)}


def label(names: Mapping) -> str:
    """Model, dtype and backend, with the batch, and padding and limit where they are not the usual ones."""
    more = [f"batch {names['batch']}"]
    more += [f"padded on the {names['padding']}"] * (names["padding"] != zero_shot.PADDING)
    more += [f"first {names['limit']}"] * bool(names["limit"])
    return f"{names['model']} ({', '.join([names['dtype'], names['backend'], *more])})"


def missing(frame: pd.DataFrame, wanted: Sequence[str]) -> str:
    """Which conditions have every task, and what the others lack; a task is stored whole or not at all."""
    there = set(frame[["condition", "task"]].itertuples(index=False, name=None))
    lacks = {c: [TITLES[t] for t in TASKS if (c, t) not in there] for c in wanted}
    whole = [f"`{c}`" for c in wanted if not lacks[c]]
    parts = [f"complete: {', '.join(whole) if whole else 'no condition'}"]
    parts += [
        f"**missing** under `{c}`: {'every task' if len(tasks) == len(TASKS) else ', '.join(tasks)}"
        for c, tasks in lacks.items()
        if tasks
    ]
    return "; ".join(parts) + "."


def unanswered(answered: Mapping[str, pd.DataFrame], results: str = "results") -> str:
    """Which models have losses stored and no answers; empty where there is none."""
    losses = Store(find_results(results)).provenance()
    there = {frame["model"].iloc[0] for frame in answered.values()}
    lacking = sorted(set(losses["model"]) - there) if len(losses) else []
    return f"Of {' and '.join(f'**{m}**' for m in lacking)} losses are stored but no answers." if lacking else ""


def copies(made: pd.DataFrame) -> str:
    """Sentences on documents that are known to differ from the harness's own; empty if none is."""
    prints = made["requests"].str[:12] if len(made) else []
    found = [text for fingerprint, text in COPIES.items() if fingerprint in set(prints)]
    if not found:
        return ""
    return (
        "The documents are local copies, and of these some differ from the harness's own, so that scores are close "
        f"to, not equal to, those of the hub's data. {'; '.join(found)}. LAMBADA and WinoGrande are the same request "
        "by request. Comparisons between conditions are not touched: all answered the same documents."
    )


def changes(frame: pd.DataFrame) -> Changes:
    """(condition, task) → change against softmax, for all that the frame has."""
    there = frame[["condition", "task"]].drop_duplicates().itertuples(index=False, name=None)
    baseline = set(frame.loc[frame.condition == BASELINE, "task"])
    return {
        (condition, task): paired.change(frame, task, condition)
        for condition, task in there
        if condition != BASELINE and task in baseline
    }


def scores(frame: pd.DataFrame, found: Changes, model: str) -> Styler:
    """Score and change of every task and condition, in the form of Table C2."""
    rows = {}
    for condition in dict.fromkeys(frame.condition):
        cells = {}
        for task in dict.fromkeys(frame.task):
            if not ((frame.task == task) & (frame.condition == condition)).any():
                continue
            score = f"{paired.score(frame, task, condition):.2f}"
            change = found.get((condition, task))
            cells[f"{TITLES[task]} ({METRICS[task]})"] = score if change is None else f"{score} ({_signed(change)})"
        rows[condition] = cells
    caption = f"{model}, measured: score in percent and change against softmax in percentage points."
    return report.table(pd.DataFrame.from_dict(rows, orient="index").rename_axis("condition"), caption)


def published_scores(reference: str) -> Styler:
    """The paper's scores of a model, in the same form."""
    rows = {}
    for condition, name in PUBLISHED.items():
        given = {"model": reference, "condition": name}
        cells = {}
        for task in TASKS:
            score = lookup.published(TABLE, task=task, metric="score", **given)
            change = lookup.published(TABLE, task=task, metric="change_vs_softmax", **given)
            cells[TITLES[task]] = f"{score.text}" if condition == BASELINE else f"{score.text} ({_plus(change.text)})"
        rows[condition] = cells
    caption = f"{reference}, published (Table C2): score in percent and change against softmax in percentage points."
    return report.table(pd.DataFrame.from_dict(rows, orient="index").rename_axis("condition"), caption)


def tests(found: Changes, model: str, reference: str) -> Styler:
    """The paired comparison of every condition and task with softmax, beside the paper's change."""
    rows = []
    for (condition, task), c in found.items():
        rows.append(
            {
                "condition": condition,
                "task": TITLES[task],
                f"change (points), {model}, measured": report.interval(c.change),
                "gained": c.gained,
                "lost": c.lost,
                "McNemar p": f"{c.p:.2g}" if c.p >= 1e-4 else "< 0.0001",
                "answers that differ": f"{100 * c.flipped / c.n:.1f} %",
                f"change, {reference}, published": report.text(_published(condition, task, reference)),
            }
        )
    caption = (
        "Every condition against softmax on the same documents: 95 % paired bootstrap over documents, documents that "
        "only the condition (gained) or only softmax (lost) answers right, McNemar's exact test, unadjusted."
    )
    return report.table(pd.DataFrame(rows).set_index(["condition", "task"]), caption)


def tally(found: Changes) -> str:
    """How many of the tests are below the level, and how many would be by chance."""
    small = [(at, c) for at, c in found.items() if c.p < LEVEL]
    listed = "; ".join(
        f"{condition} on {TITLES[task]} ({_signed(c)} points, p = {c.p:.2g})" for (condition, task), c in small
    )
    expected = report.number(LEVEL * len(found), 2)
    head = f"Of {len(found)} tests, {len(small)} have p < {LEVEL}; without any effect at most {expected} are expected."
    return f"{head} They are: {listed}." if small else head


def perplexities(frame: pd.DataFrame, model: str) -> Styler:
    """LAMBADA's perplexity and its change in percent, beside the paper's two larger models."""
    columns = ["Qwen2.5-72B", "Llama-3.1-70B"]
    rows = {}
    for condition in dict.fromkeys(frame[frame.task == "lambada_openai"].condition):
        cells = {"perplexity, measured": f"{paired.perplexity(frame, condition):.3f}"}
        if condition != BASELINE:
            change = paired.loglikelihood_change(frame, condition)
            cells[f"change (%), {model}, measured"] = report.interval(change, report.percent)
            for name in columns:
                value = _published(condition, "lambada_openai", name, "ppl_change")
                cells[f"change (%), {name}, published"] = report.text(value)
        rows[condition] = cells
    caption = "LAMBADA: perplexity of the last word, and its change against softmax with a paired 95 % interval."
    return report.table(pd.DataFrame.from_dict(rows, orient="index").rename_axis("condition"), caption)


def sizes(found: Mapping[str, Changes], condition: str = "grid(K=32,R=4)") -> Styler:
    """Mean and largest absolute change of a condition over the six tasks, beside the paper's (C.3).

    Args:
        found: label of a model → its changes; one that lacks a task has a dash.
    """
    rows = {}
    for who, mine in found.items():
        size = [abs(c.points) for (text, _), c in mine.items() if text == condition]
        whole = len(size) == len(TASKS)
        ours = {}
        if whole:
            coin = sum(_by_coin(c) for (text, _), c in mine.items() if text == condition) / len(size)
            means = {"mean": sum(size) / len(size), "largest": max(size), "mean by coin": coin}
            ours = {what: report.number(value) for what, value in means.items()}
        rows[f"{who}, measured"] = {"tasks": f"{len(size)} of {len(TASKS)}", **ours}
    pair = "Qwen2.5-72B|Llama-3.1-70B"
    rows["Qwen2.5-72B and Llama-3.1-70B, published"] = {
        "mean": report.text(lookup.published(TABLE, model=pair, metric="mean_abs_change")),
        "largest": report.text(lookup.published(TABLE, model=pair, metric="max_abs_change")),
    }
    rows["Qwen2.5-1.5B, published"] = {
        "mean": report.text(lookup.published(TABLE, model="Qwen2.5-1.5B", metric="mean_abs_change")),
    }
    caption = (
        f"Absolute change of the six scores under {condition}, in percentage points; only where all six are there."
    )
    frame = pd.DataFrame.from_dict(rows, orient="index", columns=["tasks", "mean", "largest", "mean by coin"])
    return report.table(frame.rename_axis("model"), caption)


def _by_coin(change: Change) -> float:
    """Expected size of a change, in points, if each answer that differs in being right fell either way by a coin."""
    n = change.gained + change.lost
    gained = np.arange(n + 1)
    return 100 / change.n * float(np.abs(2 * gained - n) @ binom.pmf(gained, n, 0.5))


def gates(made: Mapping[str, pd.DataFrame]) -> Styler:
    """What the batch-against-solo gate found, one row a model and condition.

    Args:
        made: label of a model → as `zero_shot.made` gives it.
    """
    rows = pd.concat({who: one.drop_duplicates("condition").set_index("condition") for who, one in made.items()})
    shown = pd.DataFrame(
        {
            "requests": rows["gate_requests"],
            "their lengths (tokens)": rows["gate_shortest"].astype(str) + "–" + rows["gate_longest"].astype(str),
            "other padding, largest": rows["gate_padding"].map(report.number),
            "alone, median": rows["gate_median"].map(report.number),
            "alone, largest": rows["gate_largest"].map(report.number),
        }
    )
    caption = "The gate, measured: differences of log-likelihood in nats a token of the continuation."
    return report.table(shown.rename_axis(["model", "condition"]), caption)


def figure_data(found: Mapping[str, Changes], reference: str) -> tuple[dict[str, pd.DataFrame], pd.DataFrame]:
    """Measured, by label, and published changes as `figures_zero_shot.changes` takes them.

    The published ones are of the conditions that any model has, or of all if none has one.
    """
    ours = {
        who: report.points(
            [c.change for c in mine.values()],
            condition=[condition for condition, _ in mine],
            task=[TITLES[task] for _, task in mine],
        )
        for who, mine in found.items()
    }
    have = {condition for mine in found.values() for condition, _ in mine}
    theirs = [
        {"condition": condition, "task": TITLES[task], "value": value.value}
        for condition in list(PUBLISHED)[1:]
        if condition in have or not have
        for task in TASKS
        if (value := _published(condition, task, reference))
    ]
    return ours, pd.DataFrame(theirs, columns=["condition", "task", "value"])


def _published(condition: str, task: str, model: str, metric: str = "change_vs_softmax") -> lookup.Published | None:
    return lookup.published(TABLE, model=model, condition=PUBLISHED.get(condition, "-"), task=task, metric=metric)


def _signed(change: Change) -> str:
    return f"{change.points:+.2f}".replace("-", "−")


def _plus(text: str) -> str:
    return (text if text.startswith("-") else f"+{text}").replace("-", "−")
