# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# (across-models)=
# # Across models
#
# A finding on one small model may be that model's. This chapter puts every model that was measured here beside the
# paper's ten, contrast by contrast:
#
# 1. Which findings hold in **every** model?
# 2. Which depend on the model?
#
# It follows §4 and appendices D.1 to D.4 of {cite:t}`zhu2026softmax`: Table 3 and Tables D1 to D3. **Each model has its
# own line, its own blocks and its own interval; nothing is pooled or averaged over models.**

# %% tags=["parameters"]
models = ""  # names with commas between; empty: every model in the store
model = "smollm2-135m"  # what `compute` measures
corpus = "wikitext103"
context = 2048
blocks = 0
dtype = "float32"
device = "auto"
results = "results"
bos = "stream"
backend = "fused"
compute = False  # True: measure what is not stored

# %% tags=["hide-input"]
import math

import pandas as pd
from IPython.display import Markdown

from softmaxlab import backend_check, breadth, conditions, cross_model, figures, figures_distortion, paper, report
from softmaxlab import corpus as corpora

figures.style()

# %% [markdown]
# ## The models
#
# What was measured comes from the store, by name, so a model appears here as soon as somebody has measured it
# ({ref}`paper-models`). The weights of models that were read from GGUF files are quantised and were made float before
# anything was computed: such a model is **not** the one its name reminds of, and the list says which file it was.

# %%
setting = {"corpus": corpus, "bos": bos, "blocks": blocks, "results": results}
if compute:
    run = {"model": model, "dtype": dtype, "device": device, "backend": backend}
    breadth.measure_all(breadth.plan([context]), **run, **setting)
every = cross_model.every(context=context, only=models, **setting)
cells = cross_model.read(context=context, only=models, **setting)

# %% tags=["hide-input"]
core = set(conditions.core())
printed = paper.table("table3_cross_model")[["model", "params_b"]].drop_duplicates().astype({"params_b": float})
absent = sorted(set(cross_model.chosen(models)) - {cell.model for cell in cells})
others = {
    cell.model: [e.setting for e in every if e.model == cell.model and e.setting != cell.setting] for cell in cells
}

def lacks(cell):
    """What of this page a cell does not have, in words."""
    contrasts = [name for name in cross_model.CONTRASTS if cell.contrast(name) is None]
    parts = [f"{len(core - cell.conditions)} of the core set's {len(core)} conditions"] * bool(core - cell.conditions)
    parts += [f"the contrasts {', '.join(contrasts)}"] * bool(contrasts)
    return f". **Missing, or not on all of these blocks**: {'; '.join(parts)}" if parts else ""


Markdown(
    (
        f"In the store, {corpus}, blocks of {context:,} tokens, with the dtype and backend that are shown:\n\n"
        + "\n".join(
            f"- **{cell.model}**: {cell.setting}; {cell.size} blocks, {cell.predictions:,} predictions; {cell.weights}"
            + (f". Also stored, not shown: {'; '.join(others[cell.model])}" if others[cell.model] else "")
            + lacks(cell)
            + "."
            for cell in cells
        )
        if cells
        else "**Nothing is stored yet.**"
    )
    + (f"\n\nNot stored: {', '.join(absent)}." if absent else "")
    + f"\n\nPublished: {', '.join(f'{row.model} ({row.params_b:g} B)' for row in printed.sort_values('params_b').itertuples())}."
)

# %% [markdown]
# Of a model with several settings the page shows one: the one with most of the core set, then one with vocabulary
# output. Backend `fused` computes whole rows by definition, as `reference` does, with kernels of this project; whether
# the two agree is checked {ref}`below <models-backends>`. The chapters of parts one and two that show one model's
# losses have them of `reference`, and differ by what is found there; {ref}`vocabulary-output` and {ref}`zero-shot` have
# `fused`.

# %% [markdown]
# Filled and blue is **measured** here, hollow and vermilion is **published**. Models differ in size, training data and
# tokenizer, so that predictions and their losses are of other tokens: values may differ as they like, and what is
# compared is on which side of zero a contrast lies.


# %% tags=["hide-input"]
def columns(title, table, found, order=None):
    """Published rows above, measured rows below, one column a quantity."""
    rows = {}
    for name in order if order is not None else table["model"].drop_duplicates():
        rows[f"{name}, published"] = {what: value(name) for what, (_, value) in found.items()}
    for cell in cells:
        rows[f"{cell.label}, measured"] = {what: value(cell) for what, (value, _) in found.items()}
    return report.table(pd.DataFrame.from_dict(rows, orient="index").rename_axis("model"), title)


def shown(estimate, transform=float):
    return report.MISSING if estimate is None else report.interval(estimate, transform)


def contrast(metric, table, /, **filters):
    """The two value functions of one contrast: of a cell, and of one of the paper's models."""
    return (
        lambda cell: shown(cell.contrast(metric)),
        lambda name: report.text(report.published(table, model=name, **filters)),
    )


def panel(metric, table, /, **filters):
    """Published and measured rows of one contrast as the forest takes them."""
    rows = report.published_rows(table, **filters).merge(printed[["model", "params_b"]], on="model", suffixes=("_", ""))
    estimates = {cell.model: e for cell in cells if (e := cell.contrast(metric)) is not None}
    return rows.sort_values("params_b"), report.points(estimates.values(), model=list(estimates))


WORDS = {"positive": "resolved positive", "negative": "resolved negative", "unresolved": "unresolved"}
CODES = {"pos": "positive", "neg": "negative", "no": "unresolved"}


def counted(states):
    return ", ".join(f"{states.count(s)} {word}" for s, word in WORDS.items() if s in states) or "none"


def both(label, metric, table, /, **filters):
    ours = [e.resolved for e in (cell.contrast(metric) for cell in cells) if e is not None]
    theirs = report.published_rows(table, **filters)["resolved"].map(CODES).tolist()
    return f"**{label}**: measured, {counted(ours)}; published, {counted(theirs)}."


# %% [markdown]
# (table-3)=
# ## Table 3

# %% tags=["hide-input"]
COMMON, POT = "grid(K=32,R=4)", "rowmax_pot(K_max=20)"
ten = printed.sort_values("params_b")["model"].tolist()


def perplexity(condition, code):
    return (
        lambda cell: shown(cell.delta(condition), report.percent),
        lambda name: report.text(
            report.published("table3_cross_model", model=name, condition=code, metric="ppl_change")
        ),
    )


def agreement(cell):
    estimate = cell.mean_output(POT, "top1")
    return shown(estimate, lambda share: 100 * share)


columns(
    "Table 3: perplexity increases and top-1 agreement in percent, D_R(21) in nats; ours with 95 % intervals.",
    printed,
    {
        "K = 32, R = 4 (%)": perplexity(COMMON, "exp_K32_R4_nearest"),
        "D_R(21) (nats)": contrast("D_R(21)", "tableD1_allocation", metric="D_R21"),
        "Rowmax-PoT, 20 (%)": perplexity(POT, "rowmax_pot_Kmax20"),
        "Rowmax-PoT, 20: top-1 agreement (%)": (
            agreement,
            lambda name: report.text(
                report.published("table3_cross_model", model=name, condition="rowmax_pot_Kmax20", metric="top1_agree")
            ),
        ),
    },
    ten,
)


# %% tags=["hide-input"] mystnb={"figure": {"name": "fig-common-grid", "caption": "Perplexity increase of the grid with K = 32, R = 4, nearest edge. Upper panel: published (Table 3, no intervals printed), by size. Lower panel: measured here, 95 % intervals. The dotted line is 1 %. Counterpart of the paper's Figure 1C."}, "image": {"alt": "Dot plot of perplexity increases: ten published models by size above, our measured models with intervals below, with a reference line at one percent."}}
def increases(condition, code):
    theirs = report.published_rows("table3_cross_model", condition=code, metric="ppl_change").astype(
        {"params_b": float}
    )
    found = {cell.model: e for cell in cells if (e := cell.delta(condition)) is not None}
    return theirs, report.points(found.values(), report.percent, model=list(found))


figures.across_models(*increases(COMMON, "exp_K32_R4_nearest"))

# %% tags=["hide-input"] mystnb={"figure": {"name": "fig-rowmax-pot", "caption": "Perplexity increase of Rowmax-PoT with a largest exponent of 20. Upper panel: published (Table 3, no intervals printed), by size. Lower panel: measured here, 95 % intervals. The dotted line is 1 %."}, "image": {"alt": "Dot plot of perplexity increases under Rowmax-PoT: ten published models by size above, our measured models with intervals below, with a reference line at one percent."}}
figures.across_models(*increases(POT, "rowmax_pot_Kmax20"))


# %% tags=["hide-input"]
def below(condition, code, limit=1.0):
    theirs, ours = increases(condition, code)
    sure, over = (ours["high"] < limit).sum(), (ours["low"] > limit).sum()
    return (
        f"measured, {sure} of {len(ours)} models below {limit:g} % with the whole interval and {over} above it; "
        f"published, {(theirs['value'] < limit).sum()} of {len(theirs)} below as point estimates"
    )


Markdown(
    f"**K = 32, R = 4**: {below(COMMON, 'exp_K32_R4_nearest')}.\n\n**Rowmax-PoT**: {below(POT, 'rowmax_pot_Kmax20')}."
)

# %% [markdown]
# (table-d1)=
# ## Allocation (Table D1)
#
# Loss at $R = 1$ minus loss at $R = 4$ with the nearest edge, and how much more that is at 16 than at 32 intervals
# {eq}`eq-dr`.

# %% tags=["hide-input"] mystnb={"figure": {"name": "fig-models-allocation", "caption": "The allocation contrast at K = 21 and the interaction, in every model; right of zero, finer intervals near the row maximum lose less, and help more where there are fewer. Upper panels: published (Table D1), by size; for five models the paper prints the interaction. Lower panels: measured here. 95 % intervals. Counterpart of the paper's Figure 2C."}, "image": {"alt": "Two dot plots with intervals: the allocation contrast and the interaction in nats, published models above and measured models below, with a line at zero."}}
figures_distortion.forest(
    {
        "$D_R(21)$": panel("D_R(21)", "tableD1_allocation", metric="D_R21"),
        "$I_R = D_R(16) - D_R(32)$": panel("I_R", "tableD1_allocation", metric="I_R"),
    },
    xlabel="nats",
)

# %% tags=["hide-input"]
columns(
    "Table D1: allocation contrasts in nats per token, 95 % intervals where there are any.",
    printed,
    {
        name: contrast(name, "tableD1_allocation", metric=symbol)
        for name, symbol in (("D_R(21)", "D_R21"), ("D_R(16)", "D_R16"), ("D_R(32)", "D_R32"), ("I_R", "I_R"))
    },
    ten,
)

# %% [markdown]
# (table-d2)=
# ## Matched divergence (Table D2)
#
# Loss of the matched flattening minus loss of the matched sharpening {eq}`eq-dt`; each model has its own $J_0$ and its
# own temperatures.

# %% tags=["hide-input"] mystnb={"figure": {"name": "fig-models-direction", "caption": "Flattening minus sharpening at the same mean JSD, in every model; right of zero, flattening costs more. Upper panels: published (Table D2), by size. Lower panels: measured here. 95 % intervals; axes are linear around zero and logarithmic further out where values span decades. Counterpart of the paper's Figure 3B."}, "image": {"alt": "Two dot plots with intervals at J0 and at ten times J0: the contrast of the two directions in nats, published models above and measured models below, with a line at zero."}}
figures_distortion.forest(
    {
        "$D_T(J_0)$": panel("D_T(J0)", "tableD2_matched", metric="D_T", level="J0"),
        "$D_T(10\\,J_0)$": panel("D_T(10J0)", "tableD2_matched", metric="D_T", level="10J0"),
    },
    xlabel="nats",
)

# %% tags=["hide-input"]
columns(
    "Table D2: flattening minus sharpening in nats per token, 95 % intervals.",
    printed,
    {
        "D_T(J₀)": contrast("D_T(J0)", "tableD2_matched", metric="D_T", level="J0"),
        "D_T(10 J₀)": contrast("D_T(10J0)", "tableD2_matched", metric="D_T", level="10J0"),
    },
    ten,
)

# %% [markdown]
# (table-d3)=
# ## Mass restored (Table D3)
#
# The same contrast with the softmax mass of $\mathcal S_{0.9}$ put back, and the signed change $G_{\mathrm{gap}}$
# {eq}`eq-gap`.

# %% tags=["hide-input"] mystnb={"figure": {"name": "fig-models-rescue", "caption": "The contrast at 10 J\u2080 after rescue, and its signed change, above zero where the contrast falls, which is not always toward zero, in every model. Upper panels: published (Table D3), by size. Lower panels: measured here. 95 % intervals; axes are linear around zero and logarithmic further out where values span decades. Counterpart of the paper's Figure S6C."}, "image": {"alt": "Two dot plots with intervals at ten times J0: the contrast after rescue and the gap in nats, published models above and measured models below, with a line at zero."}}
figures_distortion.forest(
    {
        r"$D_{\mathrm{rescue}}(10\,J_0)$": panel("D_rescue(10J0)", "tableD3_rescue", metric="D_rescue", level="10J0"),
        r"$G_{\mathrm{gap}}(10\,J_0)$": panel("G_gap(10J0)", "tableD3_rescue", metric="G_gap", level="10J0"),
    },
    xlabel="nats",
)

# %% tags=["hide-input"]
columns(
    "Table D3: after rescue, and the difference, in nats per token, 95 % intervals.",
    printed,
    {
        "D_rescue(10 J₀)": contrast("D_rescue(10J0)", "tableD3_rescue", metric="D_rescue", level="10J0"),
        "G_gap(10 J₀)": contrast("G_gap(10J0)", "tableD3_rescue", metric="G_gap", level="10J0"),
    },
    ten,
)

# %% [markdown]
# (models-units)=
# ## The paper's own models
#
# Where a model of the paper was measured here too, the difference of the two values, in units of half our interval:
# up to 1, the published value lies inside our interval.

# %% tags=["hide-input"]
QUANTITIES = {
    "D_R(21)": ("D_R(21)", "tableD1_allocation", {"metric": "D_R21"}),
    "I_R": ("I_R", "tableD1_allocation", {"metric": "I_R"}),
    "D_T(J₀)": ("D_T(J0)", "tableD2_matched", {"metric": "D_T", "level": "J0"}),
    "D_T(10 J₀)": ("D_T(10J0)", "tableD2_matched", {"metric": "D_T", "level": "10J0"}),
    "D_rescue(10 J₀)": ("D_rescue(10J0)", "tableD3_rescue", {"metric": "D_rescue", "level": "10J0"}),
    "G_gap(10 J₀)": ("G_gap(10J0)", "tableD3_rescue", {"metric": "G_gap", "level": "10J0"}),
}


def apart(estimate, value):
    """Ours minus theirs in units of the half-width of our interval."""
    half = (estimate.high - estimate.low) / 2
    return (estimate.mean - value) / half if half > 0 else math.nan


repeated = {}
for cell in cells:
    own = report.published_model(cell.model, "table3_cross_model")
    if own.lower() != report.bare_name(cell.model):
        continue
    for label, (metric, table, filters) in QUANTITIES.items():
        estimate, value = cell.contrast(metric), report.published(table, model=own, **filters)
        if estimate is not None and value is not None:
            repeated[f"{own}, {label}"] = {
                "measured (nats)": report.interval(estimate),
                "published (nats)": report.text(value),
                "difference (half intervals)": report.number(apart(estimate, value.value), 2),
            }
report.table(
    pd.DataFrame.from_dict(repeated, orient="index").rename_axis("model, contrast"),
    "The same model, measured here and published.",
) if repeated else Markdown(
    "**None of the paper's ten models is in the store yet**, so there is nothing to compare value by value."
)

# %% [markdown]
# ## What holds in every model

# %% tags=["hide-input"]
Markdown("\n\n".join(both(label, metric, table, **filters) for label, (metric, table, filters) in QUANTITIES.items()))

# %% [markdown]
# (models-backends)=
# ## Do the fused kernels agree with the reference?
#
# Where a model was measured on both backends in the same dtype, block by block on the same text, the difference of the
# two $\Delta\mathrm{NLL}$ checks the fused kernels end to end: through every layer, on whole blocks. A last digit that
# differs stays a last digit where an operator is smooth. Where it rounds to a lattice or a grid, a score near an edge
# takes another step, and the layers above amplify that. So the yardstick is the {ref}`floor <floor>`: how far the
# reference and variants of itself, which split the rows or compute in float64, are apart. A model that is stored with
# one backend alone, or in two dtypes, is not checked here.

# %% tags=["hide-input"]
found = backend_check.checks(every, results, corpus=corpora.corpus_name(corpus), bos=bos)
backend_check.table(found) if found else Markdown(
    "No model is stored on both backends, so there is nothing to compare."
)

# %% tags=["hide-input"]
Markdown("\n\n".join(check.said for check in found) or "—")

# %% [markdown]
# ## What this page does not show
#
# - **No law of size.** The paper's models are sorted by size so that they can be found, ours by name. They differ in much else, and no trend is
#   drawn or tested.
# - **No vote.** That a contrast is resolved in most models is a count of models that somebody chose, not a test.
# - **No correction for many intervals.** Of a hundred intervals a few exclude zero by chance.
# - **One text.** Every model read the same WikiText, some of them surely in training.
