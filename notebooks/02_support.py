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
# (support)=
# # Support, resolution and relative weights
#
# Softmax gives every valid key a weight, at full precision, in exponential proportion to its score. This
# chapter takes these three properties away one at a time, in a frozen model, and reads the loss:
#
# 1. **Support.** How many keys of a row must have a weight at all?
# 2. **Relative weights.** On one and the same set of keys, must the weights differ?
# 3. **Resolution and shape.** Into how many levels may the scores be rounded, and must the map from level to
#    weight be exponential?
#
# It follows §4.1 and appendix D.1 of {cite:t}`zhu2026softmax`: Figure 1A–C, Figure S4 and the numbers around
# them. The words used here are defined in {ref}`framework`.

# %% tags=["parameters"]
model = "smollm2-135m"
corpus = "wikitext103"
context = 2048
blocks = 0
dtype = "float32"
device = "auto"
results = "results"

# %% tags=["hide-input"]
import math

import pandas as pd
from IPython.display import Markdown

from softmaxlab import conditions, evaluate, figures, models, operators, report, statistics

figures.style()

# %% [markdown]
# ## The definitions
#
# A row has scores $s_j$ over its valid keys $\mathcal V$, $n = |\mathcal V|$ of them.
#
# **Top-k at a fraction $f$** keeps the $k = \max(1, \lceil f n\rceil)$ largest scores, together with any key
# that ties with the last of them. **Mean threshold** keeps the keys above the row's mean score. In both, the
# kept set $\mathcal M$ carries either softmax weights or equal ones:
#
# $$
# p^{\mathrm{rel}}_j = \frac{e^{s_j}\,\mathbf 1[j\in\mathcal M]}{\sum_{k\in\mathcal M} e^{s_k}},
# \qquad
# p^{\mathrm{unif}}_j = \frac{\mathbf 1[j\in\mathcal M]}{|\mathcal M|}.
# $$ (eq-rel-unif)
#
# **The full-range grid** keeps every key and rounds its score. With $C = s_{\max} - s_{\min}$ it cuts
# $[0, C]$ into $K$ intervals with the edges
#
# $$
# e_a = C\,\frac{1-\rho^a}{1-\rho^K}, \qquad \rho = R^{-1/(K-1)}, \qquad a = 0,\dots,K.
# $$ (eq-grid)
#
# $R$ is the width of the lowest interval over that of the highest: $R=1$ is uniform, $R>1$ is finer near the
# row maximum. `upper` replaces a score by the upper edge of its interval, `nearest` by the nearer edge. The
# weight is $e^{\text{level} - C}$; the **linear map**, a control, uses $\text{level}/C$ instead.
#
# All of these act in every layer and head at once, except for the control in {ref}`same-support`.

# %% [markdown]
# ## The run
#
# One call evaluates all conditions of this chapter on the same blocks. Losses that are already in the results
# folder are read; the others are computed and stored.

# %%
layers = models.n_layers(model)
pairs = conditions.same_support(layers)
single_layer = [condition for pair in pairs for condition in pair]
losses = evaluate.losses(
    [*conditions.support(), *conditions.geometry(), *single_layer],
    model=model, corpus=corpus, context=context, blocks=blocks,
    dtype=dtype, device=device, results=results,
)

# %% tags=["hide-input"]
name = models.resolve(model).name
reference = report.published_model(name, "d1_support_sweep")
Markdown(report.setting(name, losses, reference))

# %% [markdown]
# Every loss below is **measured**. The intervals are two-sided 95 % percentile intervals of the paired block
# bootstrap ({ref}`framework-statistics`). Columns and markers of the paper are **published** numbers.

# %% [markdown]
# (support-size)=
# ## Support: how many keys must have a weight?
#
# Top-k with softmax weights on what is kept, in all layers, at the paper's eight fractions.

# %% tags=["hide-input"] mystnb={"figure": {"name": "fig-support", "caption": "Perplexity increase against the kept fraction of each row, top-k with softmax weights in all layers. Filled: measured here, 95 % intervals. Hollow: published (D.1), no intervals printed. Counterpart of the paper's Figure 1A."}, "image": {"alt": "Line plot on logarithmic axes: perplexity increase in percent against the kept fraction of valid keys in percent, for our model with intervals and for the paper's reference model."}}
fractions = conditions.TOPK_FRACTIONS
kept = [100 * f for f in fractions]
topk = [statistics.delta_nll(losses, f"topk(f={f})") for f in fractions]
sweep = report.published_rows(
    "d1_support_sweep", model=reference, weights="softmax", rule="topk", metric="ppl_change"
)
sweep["kept"] = pd.to_numeric(sweep["target_kept_pct"])
figures.support_sweep(report.points(topk, report.percent, kept=kept), sweep, model=name, reference=reference)

# %% [markdown]
# The same values as a table, with the mean threshold below them. It has no fraction to set: the row's own mean
# decides.

# %% tags=["hide-input"]
mean_threshold = statistics.delta_nll(losses, "mean_threshold()")
softmax_rows = [
    (
        f"top-k, {percent:g} % kept",
        estimate,
        report.published(
            "d1_support_sweep",
            model=reference,
            weights="softmax",
            rule="topk",
            target_kept_pct=f"{percent:g}",
            metric="ppl_change",
        ),
    )
    for percent, estimate in zip(kept, topk)
]
softmax_rows.append(
    (
        "mean threshold",
        mean_threshold,
        report.published("d1_support_sweep", model=reference, rule="mean_threshold", metric="ppl_change"),
    )
)
report.beside(
    softmax_rows,
    what="softmax weights on",
    ours=name,
    theirs=reference,
    caption="Perplexity increase in percent, softmax weights on the kept keys.",
    transform=report.percent,
)

# %% tags=["hide-input"]
steps = [
    statistics.contrast(losses, f"topk(f={fewer})", f"topk(f={more})")
    for more, fewer in zip(fractions, fractions[1:])
]
Markdown(
    f"Each step to the next smaller fraction, as a paired difference of losses: {report.tally(steps)}. "
    f"The smallest support, {kept[-1]:g} %, changes perplexity by {report.interval(topk[-1], report.percent)} %; "
    f"the largest, {kept[0]:g} %, by {report.interval(topk[0], report.percent)} %."
)

# %% [markdown]
# ### What a nominal fraction really keeps
#
# Because $k$ is rounded up, short rows keep more than $f$. Over the causal rows $n = 1,\dots,L$ of a block the
# pooled density is $\sum_n \max(1,\lceil f n\rceil) \big/ \sum_n n$. No model is needed for it, and it is an
# exact check that our top-k is the paper's: at its block length, rounding to nearest gives other numbers.

# %% tags=["hide-input"]
length = report.published_rows("d1_support_sweep", metric="pooled_density")["context"].iloc[0]
densities = pd.DataFrame(
    {
        "target (%)": [f"{percent:g}" for percent in kept],
        f"calculated, L = {context}": [f"{100 * operators.pooled_density(f, context):.2f}" for f in fractions],
        f"published, L = {length}": [
            report.text(
                report.published(
                    "d1_support_sweep", rule="topk", target_kept_pct=f"{percent:g}", metric="pooled_density"
                )
            )
            for percent in kept
        ],
    }
)
report.table(
    densities.set_index("target (%)"),
    "Pooled density of top-k in percent: calculated from f and the block length, beside the published values.",
)

# %% [markdown]
# (relative-weights)=
# ## Relative weights: is the kept set enough?
#
# Now the same supports with equal weights, again in all layers. The loss changes so much in the paper that it
# prints factors of perplexity, and so do we; a factor of 1 is no change.

# %% tags=["hide-input"]
uniform_rows = [
    (
        "top-k, 50 % kept",
        statistics.delta_nll(losses, "topk(f=0.5,weights=uniform)"),
        report.published(
            "d1_support_sweep", model=reference, weights="uniform", rule="topk", metric="ppl_multiplier"
        ),
    ),
    (
        "mean threshold",
        statistics.delta_nll(losses, "mean_threshold(weights=uniform)"),
        report.published(
            "d1_support_sweep", model=reference, weights="uniform", rule="mean_threshold", metric="ppl_multiplier"
        ),
    ),
]
report.beside(
    uniform_rows,
    what="equal weights on",
    ours=name,
    theirs=reference,
    caption="Factor on perplexity, equal weights on the kept keys, all layers.",
    transform=math.exp,
)

# %% [markdown]
# An intervention in all layers at once does not isolate the weighting. Each layer receives what damaged layers
# below it produced, so the later layers' supports differ between the two conditions as well.

# %% [markdown]
# (same-support)=
# ## The same support, one layer at a time
#
# The strict control changes one target layer $\ell$. Both conditions use exact softmax below $\ell$, so they
# arrive with identical scores and an identical mean-threshold support. At $\ell$ one weighs the support by
# softmax, the other equally. Above $\ell$ both return to exact softmax. The contrast is
#
# $$
# D_W(\ell) = \mathbb E_b\!\left[\mathrm{NLL}_{b,\mathrm{unif},\ell} - \mathrm{NLL}_{b,\mathrm{rel},\ell}\right].
# $$ (eq-dw)
#
# $D_W$ is one of the paper's five primary endpoints (A.9).

# %% tags=["hide-input"] mystnb={"figure": {"name": "fig-same-support", "caption": "Uniform minus softmax weights on the same mean-threshold support, one layer at a time. Filled: measured here, pointwise 95 % intervals, not adjusted for the number of layers. Hollow and shaded: published (D.1); the paper prints layer 0 and the range of the others. Counterpart of the paper's Figure 1B."}, "image": {"alt": "Dot plot with intervals: the contrast D_W in nats for each target layer of our model, beside the published value of layer 0 and the published range of the other layers of the paper's reference model."}}
by_layer = [statistics.contrast(losses, uniform, softmax) for uniform, softmax in pairs]
low, high = (
    report.published("d1_same_support", model=reference, metric="D_W", stat=end) for end in ("min", "max")
)
first = report.published("d1_same_support", model=reference, metric="D_W", layers="0")
figures.same_support(
    report.points(by_layer, layer=list(range(layers))),
    model=name,
    reference=reference,
    published_range=(low.value, high.value),
    published_first=first.value,
)

# %% [markdown]
# The aggregate averages the layers inside each block before blocks are resampled, because the layers of a block
# are not independent. One layer can dominate such a mean, so we also give it without layer 0.

# %% tags=["hide-input"]
weight_rows = [
    ("layer 0", by_layer[0], first),
    (
        "mean, all layers",
        statistics.mean_over(losses, pairs),
        report.published("d1_same_support", model=reference, metric="D_W", stat="layer_mean"),
    ),
]
total = int(report.published_rows("d1_same_support", metric="layers_positive")["n_layers"].iloc[0])
if layers > 1:
    weight_rows.append(("mean, layers after the first", statistics.mean_over(losses, pairs[1:]), None))
report.beside(
    weight_rows,
    what="D_W (nats)",
    ours=name,
    theirs=reference,
    caption="Uniform minus softmax weights on the same support, in nats per token.",
)

# %% tags=["hide-input"]
counts = {
    metric: report.published("d1_same_support", model=reference, metric=metric)
    for metric in ("layers_positive", "layers_ci_above_zero")
}
largest = max(range(layers), key=lambda layer: by_layer[layer].mean)
others = (total * weight_rows[1][2].value - first.value) / (total - 1)
Markdown(
    f"**Measured**, {name}: {sum(e.mean > 0 for e in by_layer)} of {layers} point estimates are positive; of the "
    f"intervals, {report.tally(by_layer)}. **Published**, {reference}: {counts['layers_positive']} of {total} point "
    f"estimates positive, {counts['layers_ci_above_zero']} intervals above zero.\n\n"
    f"The largest estimate is {report.interval(by_layer[largest])} nats at layer {largest} here, and {first} nats at "
    f"layer 0 in the paper, where the other layers lie between {low} and {high}. From its mean and its layer 0 follows a "
    f"mean of {report.number(others)} over the other layers, computed here, without an interval"
    + (
        f": ours over those is {report.number(weight_rows[2][1].mean / others, 2)} times that, while over all layers it is "
        f"{report.number(weight_rows[1][1].mean / weight_rows[1][2].value, 2)} times the paper's."
        if layers > 1
        else "."
    )
)

# %% tags=["hide-input", "hide-output"]
report.table(
    pd.DataFrame(
        {
            "layer": range(layers),
            f"D_W (nats), {name}, measured": [report.interval(e) for e in by_layer],
            "resolved": [e.resolved for e in by_layer],
        }
    ).set_index("layer"),
    "Every layer: uniform minus softmax weights on the same support, pointwise 95 % intervals.",
)

# %% [markdown]
# (resolution)=
# ## Resolution: how many levels?
#
# Full support again; now the scores are rounded to the grid of {eq}`eq-grid`. A row of $K$ intervals has $K$ different
# weights with the upper edge, $K + 1$ with the nearest, and as many as it has scores with interpolation. {numref}`fig-intervals` varies the
# number of intervals $K$ for three families: exponential and linear map with the upper edge and uniform
# intervals, and the exponential map with the nearest edge and $R = 4$.

# %% tags=["hide-input"] mystnb={"figure": {"name": "fig-intervals", "caption": "Loss increase against the number of grid intervals. Filled: measured here, 95 % intervals. Hollow: published (D.1). Of the linear map the paper prints the range over K only, drawn as a band; its nearest-edge values are printed as perplexity percentages and converted to nats here. Counterpart of the paper's Figure S4."}, "image": {"alt": "Line plot on logarithmic axes: loss increase in nats against 16, 32 and 64 grid intervals for three families of grids, for our model with intervals and for the paper's reference model."}}
sizes = (16, 32, 64)
linear, upper, nearest = "linear map, upper edge, R = 1", "exp map, upper edge, R = 1", "exp map, nearest, R = 4"
families = {
    linear: "grid(K={},recon=upper,map=linear)",
    upper: "grid(K={},recon=upper)",
    nearest: "grid(K={},R=4)",
}
grids = {
    series: [statistics.delta_nll(losses, text.format(K)) for K in sizes] for series, text in families.items()
}
measured = pd.concat([report.points(found, series=[s] * 3, K=sizes) for s, found in grids.items()])
theirs = report.published_grids(reference, linear, upper, nearest)
figures.interval_sweep(measured, theirs, model=name, reference=reference)

# %% tags=["hide-input"]
upper_rows = [
    (
        f"exp map, K = {K}",
        estimate,
        report.published(
            "d1_geometry", model=reference, weight_map="exp", recon="upper_edge", K=K, metric="dnll"
        ),
    )
    for K, estimate in zip(sizes, grids[upper])
]
linear_rows = [(f"linear map, K = {K}", estimate, None) for K, estimate in zip(sizes, grids[linear])]
contrast_rows = [
    (
        "linear minus exp, K = 32",
        statistics.contrast(losses, families[linear].format(32), families[upper].format(32)),
        report.published("d1_geometry", model=reference, weight_map="linear-exp", metric="dnll_diff"),
    )
]
report.beside(
    [*upper_rows, *linear_rows, *contrast_rows],
    what="R = 1, upper edge",
    ours=name,
    theirs=reference,
    caption="ΔNLL in nats per token; the last row is a paired contrast of two grids.",
)

# %% tags=["hide-input"]
nearest_rows = [
    (
        f"K = {K}",
        estimate,
        report.published(
            "d1_geometry", model=reference, weight_map="exp", recon="nearest", K=K, metric="ppl_change"
        ),
    )
    for K, estimate in zip(sizes, grids[nearest])
]
report.beside(
    nearest_rows,
    what="R = 4, nearest edge",
    ours=name,
    theirs=reference,
    caption="Perplexity increase in percent, finer intervals near the row maximum.",
    transform=report.percent,
)

# %% tags=["hide-input"]
halving = [
    statistics.contrast(losses, families[s].format(a), families[s].format(b))
    for s in (upper, nearest)
    for a, b in zip(sizes, sizes[1:])
]
Markdown(
    "Loss of the coarser minus the finer grid, each doubling of K in the two exponential families: "
    f"{report.tally(halving)}."
)

# %% [markdown]
# ### The common point, model by model
#
# The paper evaluates one grid, $K=32$, $R=4$, nearest edge, in all ten of its models. {numref}`fig-models` shows
# these ten published values, and the model of this page in a panel of its own: the ten are read off the paper, this
# one was run here, and no trend is drawn through them.

# %% tags=["hide-input"] mystnb={"figure": {"name": "fig-models", "caption": "Perplexity increase of the grid with K = 32, R = 4, nearest edge. Upper panel: the paper's ten models, published (Table 3, no intervals printed). Lower panel: the model of this page, measured, 95 % interval. The dotted line is 1 %. Counterpart of the paper's Figure 1C."}, "image": {"alt": "Dot plot: published perplexity increases of ten models sorted by size in the upper panel, and our measured model with its interval in the lower panel, with a reference line at one percent."}}
common = statistics.delta_nll(losses, "grid(K=32,R=4)")
ten = report.published_rows("table3_cross_model", condition="exp_K32_R4_nearest", metric="ppl_change")
figures.across_models(
    ten.astype({"params_b": float}), report.points([common], report.percent, model=[name]), limit=1.0
)

# %% tags=["hide-input"]
own = report.published_model(name, "table3_cross_model")
same = report.published(
    "table3_cross_model", model=own, condition="exp_K32_R4_nearest", metric="ppl_change"
)
_, least, most = common.ppl_change
place = "below" if most < 1 else "above" if least > 1 else "not resolved against"
Markdown(
    f"**Measured**: {report.interval(common, report.percent)} %, {place} 1 %. "
    f"**Published**: {same} % for {own}; {sum(ten['value'] < 1)} of {len(ten)} models below 1 % as point estimates."
)

# %% [markdown]
# ## What agrees, and what does not
#
# Only signs are compared, and only where our interval excludes zero. That an approximation costs something is what any
# damage does, so the agreement of such signs says little; a contrast of two conditions could have come out either way. Equal values could be expected only of the same
# model on the same blocks. The lists are made from the tables above.

# %% tags=["hide-input"]
Markdown(
    "\n\n".join(
        f"**{title}.** {report.verdict(rows, neutral)}"
        for title, rows, neutral in (
            ("Support, softmax weights", softmax_rows, 0.0),
            ("Support, equal weights", uniform_rows, 1.0),
            ("Same support, one layer", weight_rows, 0.0),
            ("Grid, upper edge", [*upper_rows, *linear_rows, *contrast_rows], 0.0),
            ("Grid, nearest edge", nearest_rows, 0.0),
        )
    )
)

# %% [markdown]
# ## What this page does not show
#
# - **Not the paper's reference model, by default.** The paper's sweeps are of Qwen2.5-1.5B. Ours are of
#   SmolLM2-135M-Instruct, weights expanded from a 4-bit (Q4_1) file: smaller, instruction-tuned, quantised
#   once already. Re-run the page with `-p model qwen2.5-1.5b` to compare like with like.
# - **Loss on one kind of text.** ΔNLL per token at one block length; no downstream task, no long context.
# - **Nothing about speed.** A small support or a coarse grid saves time only where a kernel exploits it.
# - **No optimum.** The fractions, $K$ and $R$ are the paper's grid of settings, not the result of a search; the
#   linear map is one control and does not make the exponential map uniquely best.
# - **Pointwise intervals.** They are not adjusted for the number of layers or conditions, and they reflect the
#   choice of blocks from this text only, not another text, model or seed.
# - **No interval on the paper's side** for most points, so agreement in sign is all that is claimed.
# - **The kept fraction of the mean threshold** is not measured here; the paper prints one for its reference model.
