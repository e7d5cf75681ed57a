"""The zero-shot chapter's tables, sentences and figure: what they show is what was recorded, and each number's kind."""

import numpy as np
import pandas as pd
import pytest

from softmaxlab import conditions, drawing, figures_zero_shot, lookup, paper, zero_shot
from softmaxlab import zero_shot_report as lab
from softmaxlab.conditions import BASELINE
from softmaxlab.losskey import LossKey
from softmaxlab.store import Store
from softmaxlab.zero_shot import Setting
from softmaxlab.zero_shot_records import COLUMNS

REFERENCE = "Qwen2.5-1.5B"


@pytest.fixture(scope="module")
def frame():
    """Forty documents a task; the grid loses the first three that softmax has right, h15 changes nothing."""
    rows = []
    for task, metric in zero_shot.METRICS.items():
        for condition in conditions.zero_shot():
            right = np.arange(40) % 2 == 0
            if condition == "grid(K=32,R=4)":
                right[:6] = False
            for number, good in enumerate(right):
                answer = 0 if good else 1
                rows.append(
                    {
                        **Setting().names(),
                        "condition": condition,
                        "task": task,
                        "document": number,
                        "loglikelihoods": [-1.0, -2.0] if good else [-3.0, -2.0],
                        "prediction": answer,
                        "prediction_norm": answer,
                        "gold": 0,
                        "acc": float(good),
                        "acc_norm": float(good) if metric == "acc_norm" else np.nan,
                    }
                )
    return pd.DataFrame(rows)[list(COLUMNS)]


@pytest.fixture(scope="module")
def found(frame):
    return lab.changes(frame)


def test_every_condition_of_the_papers_table_is_measured_under_its_name():
    assert set(lab.PUBLISHED) < set(conditions.zero_shot())
    assert set(lab.PUBLISHED.values()) == set(paper.table(lab.TABLE).query("metric == 'score'").condition)
    for task, metric in zero_shot.METRICS.items():
        given = lookup.published_rows(lab.TABLE, task=task, metric="score", model=REFERENCE)
        assert set(given.task_metric) == {metric}


def test_scores_and_changes_are_those_of_the_records(frame, found):
    table = lab.scores(frame, found, "m").data
    assert table.shape == (6, 6)
    assert table.loc["softmax()", "PIQA (acc_norm)"] == "50.00"
    assert table.loc["grid(K=32,R=4)", "LAMBADA (acc)"] == "42.50 (−7.50)"
    assert table.loc["h15()", "WinoGrande (acc)"] == "50.00 (+0.00)"


def test_the_papers_table_is_as_printed():
    table = lab.published_scores(REFERENCE).data
    assert table.loc["mean_threshold()", "ARC-Easy"] == "73.78 (+1.98)"
    assert table.loc["grid(K=64,R=4)", "ARC-Challenge"] == "44.37 (−0.85)"
    assert table.loc["softmax()", "HellaSwag"] == "67.90"


def test_the_tests_stand_beside_the_papers_change(found):
    table = lab.tests(found, "m", REFERENCE).data
    assert len(table) == 30
    row = table.loc[("grid(K=32,R=4)", "HellaSwag")]
    assert (row["gained"], row["lost"], row["McNemar p"]) == (0, 3, "0.25")
    assert row[f"change, {REFERENCE}, published"] == "−0.16"
    assert row["answers that differ"] == "7.5 %"
    assert table.loc[("h15()", "HellaSwag")][f"change, {REFERENCE}, published"] == "—"


def test_chance_is_said_beside_the_count(found):
    assert lab.tally(found) == "Of 30 tests, 0 have p < 0.05; without any effect at most 1.5 are expected."


def test_perplexities_have_the_papers_two_larger_models(frame):
    table = lab.perplexities(frame, "m").data
    # Softmax: 20 documents at −1 and 20 at −3; three of the former become −3.
    assert table.loc["softmax()", "perplexity, measured"] == f"{np.exp(2):.3f}"
    assert table.loc["grid(K=32,R=4)", "perplexity, measured"] == f"{np.exp(2.15):.3f}"
    assert table.loc["mean_threshold()", "change (%), Llama-3.1-70B, published"] == "11.649"
    assert table.loc["grid(K=32,R=4)", "change (%), m, measured"].startswith("16.2 [")


def test_the_sizes_of_change_are_over_the_six_tasks(found):
    part = {at: change for at, change in found.items() if at[1] != "piqa"}
    table = lab.sizes({"m": found, "n": part}).data
    # Of each task 3 of 40 answers change: by a coin that is ±3 or ±1, 1.5 of 40 on average.
    assert table.loc["m, measured"].tolist() == ["6 of 6", "7.50", "7.50", "3.75"]
    assert table.loc["n, measured", "tasks"] == "5 of 6" and table.loc["n, measured", ["mean", "largest"]].isna().all()
    assert table.loc["Qwen2.5-72B and Llama-3.1-70B, published"].tolist()[1:3] == ["0.114", "0.256"]


def test_known_copies_of_the_documents_are_named():
    made = pd.DataFrame({"requests": ["51762ddcb614" + "0" * 52, "f" * 64]})
    said = lab.copies(made)
    assert "HellaSwag: a text export" in said
    assert "PIQA" not in said
    assert lab.copies(pd.DataFrame({"requests": ["f" * 64]})) == lab.copies(pd.DataFrame()) == ""


def test_nothing_stored_is_said_in_a_sentence(tmp_path, monkeypatch):
    monkeypatch.delenv("SOFTMAXLAB_ZERO_SHOT", raising=False)
    frame = lab.records(conditions.zero_shot(), Setting(), results=str(tmp_path))
    assert frame.empty
    said = lab.told(frame, Setting(), "", REFERENCE)
    assert said.startswith("**Nothing is shown on this page:** no answers of **smollm2-135m**")
    assert lab.changes(frame) == {}
    assert lab.every(frame, Setting(), conditions.zero_shot(), results=str(tmp_path)) == {}


def test_what_is_missing_is_named(frame):
    part = frame[~((frame.condition == "h15()") & (frame.task == "piqa")) & (frame.condition != "mean_threshold()")]
    said = lab.missing(part, [BASELINE, "mean_threshold()", "h15()"])
    assert said == (
        "complete: `softmax()`; **missing** under `mean_threshold()`: every task; **missing** under `h15()`: PIQA."
    )
    assert lab.missing(frame, [BASELINE, "h15()"]) == "complete: `softmax()`, `h15()`."


def test_models_with_losses_and_no_answers_are_named(frame, tmp_path):
    assert lab.unanswered({"m": frame}, str(tmp_path)) == ""
    for model in ("smollm2-135m", "other"):
        key = LossKey(model, "id", "c", "c", 8, "stream", "float32", "reference", BASELINE, "{}")
        Store(tmp_path).append_losses(key, pd.DataFrame({"block": [0], "nll": [2.0], "predictions": [7]}), {})
    assert frame.model.unique().tolist() == ["smollm2-135m"]
    assert lab.unanswered({"m": frame}, str(tmp_path)) == "Of **other** losses are stored but no answers."


def test_every_stored_setting_stands_beside_the_chosen_one(frame, tmp_path):
    names = {"model": "n", "dtype": "bfloat16", "backend": "fused", "padding": "left", "batch": 4, "limit": 7}
    key = names | {"condition": BASELINE, "task": "piqa", "protocol": 1}
    rows = frame[(frame.condition == BASELINE) & (frame.task == "piqa")]
    Store(tmp_path).put_table("zero_shot", key, rows[[c for c in rows if c not in key]], {"gate": {}})
    found = lab.every(frame, Setting(model="smollm2-135m"), conditions.zero_shot(), results=str(tmp_path))
    first, second = found
    assert first == "smollm2-135m (float32, reference, batch 8)"
    assert second == "n (bfloat16, fused, batch 4, padded on the left, first 7)"
    assert found[second].document.tolist() == rows.document.tolist()


def test_two_models_have_marks_of_their_own(found):
    ours, theirs = lab.figure_data({"m": found, "n": found}, REFERENCE)
    figure = figures_zero_shot.changes(ours, theirs, list(zero_shot.TITLES.values()), reference=REFERENCE)
    (legend,) = figure.legends
    assert [text.get_text().split(":")[0] for text in legend.get_texts()] == ["m", "n", REFERENCE]
    lines = [line for line in figure.axes[0].lines if ":" in line.get_label()]
    assert len({line.get_marker() for line in lines}) == len(lines) == 3
    heights = [set(line.get_ydata().tolist()) for line in lines]
    assert not heights[0] & heights[1] and not heights[1] & heights[2]


def test_the_figure_draws_ours_with_intervals_and_the_papers_hollow(found):
    ours, theirs = lab.figure_data({"m": found}, REFERENCE)
    assert (len(ours["m"]), len(theirs)) == (30, 24)
    figure = figures_zero_shot.changes(ours, theirs, list(zero_shot.TITLES.values()), reference=REFERENCE)
    axes = {ax.get_title(loc="left"): ax for ax in figure.axes if ax.get_title(loc="left")}
    assert list(axes) == conditions.zero_shot()[1:]
    lines = {line.get_label().split(":")[0]: line for line in axes["grid(K=32,R=4)"].lines if ":" in line.get_label()}
    assert lines["m"].get_xdata().tolist() == pytest.approx([-7.5] * 6)
    assert lines["m"].get_markerfacecolor() == drawing.OURS
    assert lines[REFERENCE].get_xdata().tolist() == [0.02, -0.16, 0.04, 0.17, -0.16, 0.32]
    assert lines[REFERENCE].get_markerfacecolor() == "white"
    labelled = [title for title, ax in axes.items() if ax.get_xlabel()]
    assert labelled == conditions.zero_shot()[3:]  # the last of each column, also above an empty place
    assert lines["m"].get_ydata().round().tolist() == [0, -1, -2, -3, -4, -5]  # in the order of the table


def test_the_figure_has_the_papers_points_where_nothing_is_measured():
    ours, theirs = lab.figure_data({}, REFERENCE)
    figure = figures_zero_shot.changes(ours, theirs, list(zero_shot.TITLES.values()), reference=REFERENCE)
    assert sum(bool(ax.get_title(loc="left")) for ax in figure.axes) == 4
