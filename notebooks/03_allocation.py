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
# (allocation)=
# # Allocation of a fixed number of intervals
#
# A grid has $K$ intervals to spend on a row of scores. Should they all be as wide, or should those near the row
# maximum be narrower, at the cost of wider ones far below it? The number of intervals stays; only where they lie
# changes. This chapter asks
#
# 1. where along a row the attention mass is,
# 2. what the loss does when intervals move towards the maximum or away from it,
# 3. which measure of the weights' error moves with the loss, and
# 4. how the benefit depends on the number of intervals.
#
# It follows §4.2 and appendices A.4 and D.2 of {cite:t}`zhu2026softmax`: Figure 2A–C, Figure S6D and Table D1.

# %% tags=["parameters"]
model = "smollm2-135m"
corpus = "wikitext103"
context = 2048
blocks = 0
dtype = "float32"
device = "auto"
results = "results"

# %% tags=["hide-input"]
from functools import partial

import pandas as pd
from IPython.display import Markdown

from softmaxlab import (
    conditions,
    endpoints,
    evaluate,
    figures,
    figures_distortion,
    floor,
    models,
    operators,
    report,
    statistics,
    trajectory,
)

figures.style()

# %% [markdown]
# ## The definitions
#
# The grid is that of {eq}`eq-grid`, with the nearest edge. $R$ is the width of its lowest interval over that of
# its highest: $R = 1$ is uniform, $R > 1$ is finer near the row maximum, $R < 1$ is coarser there.
#
# Its error on a key is $\varepsilon_j = \log\hat w_j - \log w_j$, both weights taken relative to the row maximum.
# Two averages of it differ only in who counts:
#
# $$
# E = \sqrt{\frac{\sum_{\text{rows}}\sum_j \varepsilon_j^2}{\sum_{\text{rows}} n}},
# \qquad
# E_p = \sqrt{\frac{1}{\#\text{rows}}\sum_{\text{rows}}\sum_j p_j\,\varepsilon_j^2} .
# $$ (eq-rms)
#
# In $E$ every key counts alike, in $E_p$ by its softmax probability. The **allocation contrast** and its change
# with the number of intervals are
#
# $$
# D_R(K) = \mathbb E_b\!\left[\Delta\mathrm{NLL}_{b,K,R=1} - \Delta\mathrm{NLL}_{b,K,R=4}\right],
# \qquad
# I_R = D_R(16) - D_R(32) .
# $$ (eq-dr)
#
# $D_R > 0$ means that the finer intervals near the maximum lose less. $D_R(21)$ is one of the paper's five primary
# endpoints (A.9).
#
# Two kinds of measurement appear. **Losses** come from the model with the grid in every layer. **Errors of the
# weights** are measured along the path of exact softmax: the model goes on with softmax, and the grid's weights are
# only compared with it, on the first blocks of the text.

# %% [markdown]
# ## The run
#
# Stored losses and measurements are read; missing ones are computed.

# %%
run = {
    "model": model,
    "corpus": corpus,
    "context": context,
    "dtype": dtype,
    "device": device,
    "results": results,
}
losses = evaluate.losses(conditions.allocation(), blocks=blocks, **run)

contrasts = {K: conditions.allocation_contrast(K) for K in (16, 21, 32)}
grids = [text for text in conditions.allocation() if text.startswith("grid(K=21")]
ratios = [operators.parse(text).R for text in grids]
path = trajectory.measure(grids, windows=endpoints.windows(context, blocks), **run)

floors = floor.floors(floor.differences(partial(evaluate.losses, blocks=blocks, **run)))

# %% tags=["hide-input"]
name = models.resolve(model).name
reference = report.published_model(name, "d2_R_sweep")
Markdown(
    report.setting(name, losses, reference)
    + f" Errors of the weights are of the first {endpoints.n_windows(path, context):,} blocks."
)

# %% [markdown]
# Every loss and error below is **measured**. Columns and markers of the paper are **published** numbers. A column
# `floor` compares an effect with what equivalent implementations of the same operators differ by
# ({ref}`floor`): an effect *below* its floor may be one of rounding.

# %% [markdown]
# (concentration)=
# ## Where the mass is
#
# Trained language models tend to put most of a row's mass on a few keys, often the first of the text
# {cite:p}`xiao2024sinks`. The table counts the entries of all rows, heads and layers by their probability.

# %% tags=["hide-input"]
mass = path.mass()
mass_rows = [
    (
        f"{quantity}, p {'≥' if row.relation == 'ge' else '<'} {row.p_threshold:g}",
        100 * getattr(row, column),
        report.published(
            "d2_attention_mass",
            model=reference,
            relation=row.relation,
            p_threshold=f"{row.p_threshold:g}",
            metric=column,
        ),
    )
    for column, quantity in (("entry_share", "entries"), ("mass_share", "mass"))
    for row in mass.itertuples()
]
report.values(
    mass_rows,
    what="share of",
    ours=name,
    theirs=reference,
    caption="Share of valid entries, and of softmax mass, by probability, in percent. No intervals.",
)

# %% [markdown]
# A share of entries depends on the block length: the longer a row, the more of its keys are small. Where few
# entries hold most of the mass, an error on all the others hardly enters $E_p$, and fully enters $E$.

# %% [markdown]
# (r-sweep)=
# ## The loss along R
#
# Six grids with $K = 21$ intervals that differ in $R$ only.

# %% tags=["hide-input"] mystnb={"figure": {"name": "fig-allocation", "caption": "Loss increase of the grid with K = 21, nearest edge, against R. Right of the dotted line the intervals near the row maximum are the finer ones. Filled: measured here, 95 % intervals. Hollow: published (D.2), no intervals printed. Counterpart of the paper's Figure 2A."}, "image": {"alt": "Line plot: loss increase in nats on a logarithmic axis against R from 0.25 to 8 for our model with intervals and for the paper's reference model."}}
sweep = [statistics.delta_nll(losses, text) for text in grids]
theirs = report.published_rows("d2_R_sweep", model=reference, metric="dnll").astype({"R": float})
figures_distortion.allocation_sweep(report.points(sweep, R=ratios), theirs, model=name, reference=reference)

# %% tags=["hide-input"]
sweep_rows = [
    (f"R = {R:g}", e, report.published("d2_R_sweep", model=reference, R=f"{R:g}", metric="dnll"))
    for R, e in zip(ratios, sweep)
]
sweep_floors = [report.floor_of([text], floors) for text in grids]
report.beside(
    sweep_rows,
    what="K = 21",
    ours=name,
    theirs=reference,
    caption="ΔNLL against softmax in nats per token.",
    floors=sweep_floors,
)

# %% tags=["hide-input"]
steps = [statistics.contrast(losses, coarser, finer) for coarser, finer in zip(grids, grids[1:])]
rises = [f"{a:g} to {b:g}" for a, b, step in zip(ratios, ratios[1:], steps) if step.mean <= 0]
shape = f"does not fall from R = {', '.join(rises)}" if rises else "falls at every step"
Markdown(
    f"From R = {ratios[0]:g} to {ratios[-1]:g} the estimate of the loss **{shape}**. As paired differences, smaller "
    f"minus larger R, the {len(steps)} steps are: {report.tally(steps)}. In the paper it falls at "
    f"{int((theirs.sort_values('R')['value'].diff().dropna() < 0).sum())} of {max(0, len(theirs) - 1)} steps. "
    f"{report.floor_note(sweep_rows, sweep_floors)}"
)

# %% [markdown]
# (error-ratios)=
# ## Which error follows the loss?
#
# The same sweep, with the two errors of {eq}`eq-rms` beside the loss. All three are divided by their value at
# $R = 1$. The errors describe one layer at a time on exact inputs; the loss is of the grid in all layers at once.

# %% tags=["hide-input"] mystnb={"figure": {"name": "fig-errors", "caption": "Root-mean-square error of the log weights over all entries, the same weighted by probability, and the loss increase, each relative to R = 1; K = 21, nearest edge. Filled: measured here, no intervals. Hollow: published (D.2), printed for R = 4 and 8. Counterpart of the paper's Figure 2B."}, "image": {"alt": "Line plot: three ratios to their value at R equal to one against R, one line each for the unweighted error, the probability-weighted error and the loss, with published points at R equal to 4 and 8."}}
errors = path.summary().set_index("operator").loc[grids]
measures = {
    "unweighted RMS error": (errors["log_weight_rms"].tolist(), "rms_log_weight_err"),
    "p-weighted RMS error": (errors["log_weight_rms_p"].tolist(), "rms_log_weight_err_pweighted"),
    "ΔNLL": ([e.mean for e in sweep], "dnll"),
}
at_one = ratios.index(1.0)
measured = pd.concat(
    [
        pd.DataFrame({"series": series, "R": ratios, "value": [v / values[at_one] for v in values]})
        for series, (values, _) in measures.items()
    ]
)
printed = pd.concat(
    [
        report.published_rows("d2_R_sweep", model=reference, metric=f"ratio_to_R1_{metric}").assign(
            series=series
        )
        for series, (_, metric) in measures.items()
    ]
).astype({"R": float})
figures_distortion.error_ratios(measured, printed, model=name, reference=reference)

# %% tags=["hide-input"]
error_rows = [
    (
        f"{series}, R = {R:g}",
        value,
        report.published("d2_R_sweep", model=reference, R=f"{R:g}", metric=metric),
    )
    for series, (values, metric) in list(measures.items())[:2]
    for R, value in zip(ratios, values)
]
report.values(
    error_rows,
    what="K = 21",
    ours=name,
    theirs=reference,
    caption="Error of the log weights in nats, along the exact-softmax path. No intervals.",
)

# %% tags=["hide-input"]
at_four = ratios.index(4.0)
lines = []
for series, (values, metric) in measures.items():
    change = report.number(100 * (values[at_four] / values[at_one] - 1))
    printed_change = report.published("d2_R_sweep", model=reference, R="4", metric=f"change_vs_R1_{metric}")
    lines.append(f"- {series}: {change} % measured, {report.text(printed_change)} % published")
Markdown("From R = 1 to R = 4:\n\n" + "\n".join(lines))

# %% [markdown]
# If the loss goes the way of $E_p$ while $E$ goes the other way, a grid can be less accurate over all entries and
# yet serve the model better. Neither error is a prediction of the loss: they see the weights of one layer, not what
# later layers make of them.

# %% [markdown]
# (allocation-contrast)=
# ## The contrast, model by model
#
# {numref}`fig-dr` shows the paper's ten models and, in a panel of its own, the model of this page. Nothing is
# pooled and no trend is drawn.

# %% tags=["hide-input"] mystnb={"figure": {"name": "fig-dr", "caption": "The allocation contrast at K = 21: loss at R = 1 minus loss at R = 4; right of zero, finer intervals near the maximum lose less. Upper panel: published (Table D1), by size. Lower panel: measured here. 95 % intervals in both. Counterpart of the paper's Figure 2C."}, "image": {"alt": "Dot plot with intervals of the allocation contrast in nats: ten published models sorted by size in the upper panel, our measured model in the lower panel, with a line at zero."}}
contrast = {K: statistics.contrast(losses, *pair) for K, pair in contrasts.items()}
ten = (
    report.published_rows("tableD1_allocation", metric="D_R21")
    .astype({"params_b": float})
    .sort_values("params_b")
)
figures_distortion.forest(
    {"": (ten, report.points([contrast[21]], model=[name]))}, xlabel="$D_R(21)$, R = 1 minus R = 4 (nats)"
)

# %% tags=["hide-input"]
own = report.published_model(name, "tableD1_allocation")
contrast_rows = [
    (f"D_R({K})", contrast[K], report.published("tableD1_allocation", model=own, metric=f"D_R{K}"))
    for K in (21, 16, 32)
]
contrast_rows.append(
    (
        "I_R = D_R(16) − D_R(32)",
        statistics.combination(losses, endpoints.interaction()),
        report.published("tableD1_allocation", model=own, metric="I_R"),
    )
)
contrast_floors = [report.floor_of(contrasts[K], floors) for K in (21, 16, 32)]
contrast_floors.append(report.floor_of(endpoints.interaction(), floors))
report.beside(
    contrast_rows,
    what="contrast (nats)",
    ours=name,
    theirs=own,
    caption="Allocation contrasts in nats per token; the floor of a contrast is the sum over its conditions.",
    floors=contrast_floors,
)

# %% tags=["hide-input"]
resolved = int((ten["low"] > 0).sum())
removed = ""
if sweep[at_one].resolved == "positive":
    share = report.number(100 * (1 - sweep[at_four].mean / sweep[at_one].mean))
    removed = f"; R = 4 removes {share} % of the loss increase of R = 1"
Markdown(
    f"**Measured**: D_R(21) is {contrast[21].resolved}{removed}. **Published**: "
    f"{int((ten['value'] > 0).sum())} of {len(ten)} point estimates positive, {resolved} intervals above zero. {report.floor_note(contrast_rows, contrast_floors)}"
)

# %% [markdown]
# (allocation-leakage)=
# ## Is it retention of the top mass?
#
# Perhaps finer intervals near the maximum help because less mass leaves the keys that carry most of it. Let
# $\mathcal S_q$ be the smallest set of keys whose softmax mass reaches $q$. The **leakage** of an operator is the
# mass it moves out of that set,
#
# $$
# L_q = p(\mathcal S_q) - \hat p(\mathcal S_q),
# $$ (eq-leakage)
#
# averaged over rows; it is negative if mass moves in. If retention were the explanation, $R = 4$ would have to leak
# less than $R = 1$ wherever it loses less.

# %% tags=["hide-input"]
leakage = {R: errors.loc[text, "leakage_0.9"] for R, text in zip(ratios, grids)}
nine = [
    report.published("d4_leakage", model="nine_models", condition="K21_R4-K21_R1", stat=end)
    for end in ("min", "max")
]
large = report.published("d4_leakage", model="Llama-3.1-70B", condition="K21_R4-K21_R1")
leakage_rows = [
    (f"R = {R:g}", leakage[R], report.published("d4_leakage", model=reference, condition=f"K21_R{R:g}"))
    for R in ratios
]
leakage_rows += [
    (
        "R = 4 minus R = 1",
        leakage[4.0] - leakage[1.0],
        f"{nine[0]} to {nine[1]} in nine models, {large} in one",
    ),
]
report.values(
    leakage_rows,
    what="leakage, q = 0.9",
    ours=name,
    theirs=f"{reference} or as said",
    caption="Mass that leaves the smallest set holding 90 % of it, K = 21, nearest edge. No intervals.",
)

# %% tags=["hide-input"]
more = leakage[4.0] > leakage[1.0]
better = {
    "positive": "loses less",
    "negative": "loses more",
    "unresolved": "has no resolved difference in loss",
}[contrast[21].resolved]
Markdown(
    f"**Measured**, {name}: R = 4 leaks {'more' if more else 'less'} than R = 1 and {better}. **Published**: of the "
    f"ten models Llama-3.1-70B alone leaks less under R = 4; the point estimate of D_R(21) favours R = 4 in "
    f"{int((ten['value'] > 0).sum())} of {len(ten)}. "
    f"The paper's leakage is of {report.published('d4_leakage', metric='blocks_used')} blocks, ours of "
    f"{endpoints.n_windows(path, context)}."
)

# %% [markdown]
# ## What agrees, and what does not
#
# Only signs are compared, and only where our interval excludes zero. That an approximation costs something is what any
# damage does, so the agreement of such signs says little; a contrast of two approximations could have come out either way.

# %% tags=["hide-input"]
Markdown(
    "\n\n".join(
        f"**{title}.** {report.verdict(rows)}"
        for title, rows in (("Loss along R", sweep_rows), ("Contrasts", contrast_rows))
    )
)

# %% [markdown]
# ## What this page does not show
#
# - **No optimum.** $R = 4$ is one tested setting. Whether the loss still falls at the largest $R$ of the sweep says
#   nothing about the next.
# - **No law in size or in K.** $I_R$ compares two numbers of intervals; ten models of four families are listed, not
#   fitted.
# - **No cause.** The errors and the leakage are measured on the exact path and have no intervals. That one of them
#   moves with the loss over six grids does not make it the reason.
# - **Nothing about cost.** A grid over the full range needs both ends of a row before the first weight, which a
#   kernel that streams over keys does not have.
# - **Not the paper's reference model, by default.** Re-run the page with `-p model qwen2.5-1.5b` to compare like
#   with like.
