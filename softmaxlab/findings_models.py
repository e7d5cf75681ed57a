"""The findings about frozen language models, as the front page lists them (see `findings`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping

from softmaxlab import (
    breadth,
    conditions,
    lattice_endpoints,
    models,
    operators,
    report,
    response,
    statistics,
    trajectory,
    vocabulary,
    zero_shot_records,
    zero_shot_report,
)
from softmaxlab.conditions import BASELINE
from softmaxlab.cross_model import Cell
from softmaxlab.findings import Finding, Stored, Value, elsewhere, estimated, printed
from softmaxlab.floor import REFERENCE
from softmaxlab.lookup import REFERENCE as MODEL
from softmaxlab.lookup import published, published_rows
from softmaxlab.paper import Published
from softmaxlab.statistics import Estimate
from softmaxlab.store import Store

_COMMON, _POT = "grid(K=32,R=4)", str(operators.RowmaxPoT(K_max=20))
_PPL = "ppl_change"


def _of_cell(
    claim: str,
    chapter: str,
    label: str,
    ours: Callable[[Cell], Estimate | None],
    theirs: Published | Iterable[float] | None,
    *,
    percent: bool = False,
    context: int = 2048,
) -> Finding:
    """A finding that is one contrast of the model, beside one published value or those of the paper's ten models."""
    unit, transform = ("%", report.percent) if percent else ("nats", float)

    def value(stored: Stored) -> Value | None:
        cell = stored.cell if context == 2048 else stored.fullest[context]
        found = estimated(None if cell is None else ours(cell), theirs, transform, unit=unit)
        if found is None:
            return None
        return dataclasses.replace(found, agreement=found.agreement + elsewhere(map(ours, stored.others[context])))

    whose = MODEL if isinstance(theirs, Published) else "ten models"
    return Finding(claim, printed(theirs, unit, whose), chapter, label, value)


def _of(table: str, metric: str, **filters) -> Published | None:
    return published(table, model=MODEL, metric=metric, **filters)


def _ten(condition: str) -> Iterable[float]:
    return published_rows("table3_cross_model", condition=condition, metric=_PPL)["value"]


_LAYER_MEAN = _of("d1_same_support", "D_W", stat="layer_mean")
_LAYERS = int(published_rows("d1_same_support", metric="layers_positive")["n_layers"].iloc[0])
#: The paper's mean over the layers after the first, which it does not print.
_LATER_MEAN = (_LAYERS * _LAYER_MEAN.value - _of("d1_same_support", "D_W", layers="0").value) / (_LAYERS - 1)


def _same_support(stored: Stored) -> Value | None:
    pairs = conditions.same_support(models.EMBEDDED_LAYERS)  # single layers are not part of a cell
    texts = [text for pair in pairs for text in pair]
    frame = Store(stored.results).frame(
        model=stored.model,
        corpus="wikitext103",
        context=2048,
        bos="stream",
        dtype="float32",
        backend=REFERENCE,
        condition=texts,
    )
    if set(texts) - set(frame["condition"]):
        return None
    above = sum(statistics.contrast(frame, *pair).resolved == "positive" for pair in pairs)
    value = estimated(statistics.mean_over(frame, pairs), _LAYER_MEAN)
    later = statistics.mean_over(frame, pairs[1:]).mean / _LATER_MEAN
    return Value(
        f"{value.text}, mean of {len(pairs)} layers; {above} resolved above zero",
        f"{value.agreement}, of which layer 0 is most; without layer 0 {report.number(later, 2)} times",
    )


_R2, _SLOPE = (_of("d3_response_map", metric) for metric in ("r2", "slope"))


def _response(stored: Stored) -> Value | None:
    listed, cell = conditions.response_map(), stored.cell
    setting = trajectory.Setting(stored.model, "wikitext103", 2048, 0, "float32", "stream")
    if cell is None or not set(listed) <= cell.conditions:
        return None
    if not trajectory.is_stored(listed, setting, stored.results):
        return None
    seen = trajectory.measure(listed, model=stored.model, results=stored.results, progress=False).summary()
    table = statistics.summary(cell.losses, listed).set_index("condition")
    table["jsd"] = seen.set_index("operator")["jsd"].loc[listed]
    fit = response.fit(table.reset_index())
    side = "above" if fit.r2 > _R2.value else "below"
    return Value(
        f"R² {report.number(fit.r2)}, slope {report.number(fit.slope)}",
        f"R² {report.number(abs(fit.r2 - _R2.value), 2)} {side} the paper's; in sample",
    )


_LEAST = published("c4_vocab", model="ten_models", metric="dnll_vs_vocab_jsd", stat="spearman_min")


def _output(stored: Stored) -> Value | None:
    cell = stored.fullest[2048]
    if cell is None or cell.output.empty:
        return None
    listed = breadth.Step("core", 2048, (1.0, 10.0), rescue=True).conditions(cell.solutions)
    texts = {text for text in listed if text != BASELINE}
    output = cell.output[cell.output["condition"].isin(texts)]
    if set(output["condition"]) != texts or not texts <= cell.conditions:
        return None
    found = vocabulary.correlations(vocabulary.summary(cell.losses, output)).loc["jsd"]
    place = "above" if found["spearman"] >= _LEAST.value else "differs: below"
    return Value(
        f"Spearman {report.number(found['spearman'])} over {found['n']:.0f} conditions",
        f"{place} the least of the paper's ten models, {_LEAST}; in sample",
    )


_PAIR = "Qwen2.5-72B|Llama-3.1-70B"
_POINTS = published("tableC2_zero_shot", model=_PAIR, condition="exp_K32_R4", metric="mean_abs_change")


def _zero_shot(stored: Stored) -> Value | None:
    settings = zero_shot_records.settings(stored.results)
    read: dict[str, tuple[float, int]] = {}
    for setting in settings[settings["limit"] == 0].to_dict("records"):
        if found := _task_changes(setting, stored):
            read.setdefault(setting["model"], found)
    if stored.model not in read:
        return None
    mean, low = read.pop(stored.model)
    others = [f"; {model}: {report.number(points)} points, p below 0.05 in {n}" for model, (points, n) in read.items()]
    return Value(
        f"{report.number(mean)} points, mean size of {len(zero_shot_records.TASKS)} changes; p below 0.05 in {low}",
        f"{report.number(mean / _POINTS.value, 2)} times the paper's, which has no test{''.join(others)}",
    )


def _task_changes(setting: Mapping[str, object], stored: Stored) -> tuple[float, int] | None:
    """Mean size of the tasks' changes in points, and in how many McNemar's p is below 0.05; None where one lacks."""
    frame = zero_shot_records.stored(setting, conditions=[BASELINE, _COMMON], results=stored.results)
    changes = [c for (text, _), c in zero_shot_report.changes(frame).items() if text == _COMMON]
    if len(changes) != len(zero_shot_records.TASKS):
        return None
    return sum(abs(c.points) for c in changes) / len(changes), sum(c.p < 0.05 for c in changes)


_BEFORE, _AFTER, _ANCHOR = lattice_endpoints.anchor_contrasts()["anchor, octave spacing"]
_H15, _H15_CODE = lattice_endpoints.ABLATION["Rowmax-H15"]
_FINER, _FINER_CODE = lattice_endpoints.ABLATION["S(Q₃(x))"]

FINDINGS = [
    _of_cell(
        "Half of a row's keys are nearly enough (top-k)",
        "02",
        "support-size",
        lambda cell: cell.delta("topk(f=0.5)"),
        _of("d1_support_sweep", _PPL, weights="softmax", rule="topk", target_kept_pct=50),
        percent=True,
    ),
    Finding(
        "Equal weights on the same keys lose, at every layer: $D_W$",
        printed(_LAYER_MEAN, "nats", MODEL),
        "02",
        "same-support",
        _same_support,
    ),
    _of_cell(
        "32 intervals, finer near the maximum, are nearly enough",
        "02",
        "resolution",
        lambda cell: cell.delta(_COMMON),
        _ten("exp_K32_R4_nearest"),
        percent=True,
    ),
    _of_cell(
        "Levels belong near the row maximum: $D_R(21) > 0$",
        "03",
        "allocation-contrast",
        lambda cell: cell.contrast("D_R(21)"),
        _of("tableD1_allocation", "D_R21"),
    ),
    Finding(
        "The loss follows the divergence of attention",
        f"R² {_R2}, slope {_SLOPE} ({MODEL})",
        "04",
        "response-map",
        _response,
    ),
    _of_cell(
        "Divergence does not determine the loss: $D_T(J_0) \\ne 0$",
        "04",
        "matched",
        lambda cell: cell.contrast("D_T(J0)"),
        _of("tableD2_matched", "D_T", level="J0"),
    ),
    _of_cell(
        "Nor does it when ten times as large: $D_T(10J_0) \\ne 0$",
        "04",
        "matched",
        lambda cell: cell.contrast("D_T(10J0)"),
        _of("tableD2_matched", "D_T", level="10J0"),
    ),
    _of_cell(
        "Restoring the softmax mass lowers that contrast: $G_{\\mathrm{gap}}(10J_0) > 0$",
        "04",
        "rescue",
        lambda cell: cell.contrast("G_gap(10J0)"),
        _of("tableD3_rescue", "G_gap", level="10J0"),
    ),
    _of_cell(
        "Interpolated weights cost next to nothing",
        "05",
        "reconstructions",
        lambda cell: cell.delta("grid(K=21,R=4,recon=lerp)"),
        _of("d5_reconstruction", _PPL, recon="lerp_weight"),
        percent=True,
    ),
    _of_cell(
        "Powers of two from the row maximum cost little, but not nothing",
        "05",
        "rowmax-pot",
        lambda cell: cell.delta(_POT),
        _ten("rowmax_pot_Kmax20"),
        percent=True,
    ),
    _of_cell(
        "An octave lattice gains by hanging from the row maximum",
        "06",
        "four-lattices",
        lambda cell: cell.combination({_BEFORE: 1.0, _AFTER: -1.0}),
        _of("tableB1_anchor_resolution", "dnll_reduction", condition=_ANCHOR),
    ),
    _of_cell(
        "Rowmax-H15 costs little",
        "07",
        "ablation",
        lambda cell: cell.delta(_H15),
        _of("exp_map_ablation", "dnll", operator=_H15_CODE),
    ),
    _of_cell(
        "A finer member of its family costs less: $S(Q_3)$ minus H15",
        "07",
        "ablation",
        lambda cell: cell.combination({_FINER: 1.0, _H15: -1.0}),
        _of("exp_map_ablation", "dnll_minus_h15", operator=_FINER_CODE),
    ),
    _of_cell(
        "In long contexts too levels belong near the maximum: $D_R(21)$ at 8K",
        "15",
        "long-allocation",
        lambda cell: cell.contrast("D_R(21)"),
        _of("c2_long_context", "D_R21", context=8192),
        context=8192,
    ),
    Finding(
        "Zero-shot scores hardly move ($K = 32$, $R = 4$)",
        printed(_POINTS, "points", "70B and 72B models"),
        "16",
        "zero-shot-pairs",
        _zero_shot,
    ),
    Finding(
        "The output distribution moves as the loss does",
        f"Spearman {_of('c4_vocab', 'dnll_vs_vocab_jsd', stat='spearman')} ({MODEL})",
        "17",
        "vocabulary-loss",
        _output,
    ),
]
