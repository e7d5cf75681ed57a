"""The zero-shot chapter's records, tables and sentences (paper C.3): measured beside published, each named so."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pandas as pd
from pandas.io.formats.style import Styler

from softmaxlab import lookup, paired, report, zero_shot
from softmaxlab.conditions import BASELINE
from softmaxlab.paired import Change
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
        f"This page shows **{name}** in {setting.dtype}, batches of {setting.batch}, padded on the {setting.padding}. "
        f"{origin} {size}: {listed}. The paper's numbers are of **{reference}**."
    )


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


def sizes(found: Changes, model: str, condition: str = "grid(K=32,R=4)") -> Styler:
    """Mean and largest absolute change of a condition over the six tasks, beside the paper's (C.3)."""
    size = [abs(c.points) for (text, _), c in found.items() if text == condition]
    ours = {"mean": sum(size) / len(size), "largest": max(size)} if size else {}
    pair = "Qwen2.5-72B|Llama-3.1-70B"
    rows = {
        f"{model}, measured": {k: report.number(v) for k, v in ours.items()},
        "Qwen2.5-72B and Llama-3.1-70B, published": {
            "mean": report.text(lookup.published(TABLE, model=pair, metric="mean_abs_change")),
            "largest": report.text(lookup.published(TABLE, model=pair, metric="max_abs_change")),
        },
        "Qwen2.5-1.5B, published": {
            "mean": report.text(lookup.published(TABLE, model="Qwen2.5-1.5B", metric="mean_abs_change")),
        },
    }
    caption = f"Absolute change of the six scores under {condition}, in percentage points."
    return report.table(pd.DataFrame.from_dict(rows, orient="index").rename_axis("model"), caption)


def gates(made: pd.DataFrame) -> Styler:
    """What the batch-against-solo gate found, one row a condition."""
    rows = made.drop_duplicates("condition").set_index("condition")
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
    return report.table(shown, caption)


def figure_data(found: Changes, reference: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Measured and published changes as `figures_zero_shot.changes` takes them; if none is measured, the paper's."""
    ours = report.points(
        [c.change for c in found.values()],
        condition=[condition for condition, _ in found],
        task=[TITLES[task] for _, task in found],
    )
    conditions = dict.fromkeys([condition for condition, _ in found] or list(PUBLISHED)[1:])
    theirs = [
        {"condition": condition, "task": TITLES[task], "value": value.value}
        for condition in conditions
        for task in TASKS
        if (value := _published(condition, task, reference))
    ]
    return ours, pd.DataFrame(theirs, columns=["condition", "task", "value"])


def models(settings: Iterable[dict], results: str) -> Styler | None:
    """Change of every task's score under every condition, one row a stored setting and condition; none pooled."""
    rows = []
    for names in settings:
        frame = zero_shot.stored(names, results=results)
        found = changes(frame)
        for condition in dict.fromkeys(condition for condition, _ in found):
            cells = {
                TITLES[t]: f"{_signed(c)}{'*' if c.p < LEVEL else ''}" for (x, t), c in found.items() if x == condition
            }
            setting = f"{names['model']}, {names['dtype']}" + (f", first {names['limit']}" if names["limit"] else "")
            rows.append({"model": setting, "condition": condition} | cells)
    if not rows:
        return None
    caption = f"Change against softmax in percentage points, measured; * marks McNemar p < {LEVEL}, unadjusted."
    return report.table(pd.DataFrame(rows).set_index(["model", "condition"]), caption)


def _published(condition: str, task: str, model: str, metric: str = "change_vs_softmax") -> lookup.Published | None:
    return lookup.published(TABLE, model=model, condition=PUBLISHED.get(condition, "-"), task=task, metric=metric)


def _signed(change: Change) -> str:
    return f"{change.points:+.2f}".replace("-", "−")


def _plus(text: str) -> str:
    return (text if text.startswith("-") else f"+{text}").replace("-", "−")
