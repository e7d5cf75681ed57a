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
# (vocabulary-output)=
# # Vocabulary output
#
# The loss looks at one token of each prediction, the one that came. An approximation may move the probabilities of
# all others and leave the loss where it was, for two reasons: what it takes from one token it may give to tokens that
# are never asked for, and what it loses at one position it may win at another. This chapter compares the whole
# next-token distributions.
#
# 1. **Does the output move as the loss does**, from one approximation to the next?
# 2. **Does a small loss mean the same output?** How often is the most probable token another one?
#
# It follows §6 and appendix C.4 of {cite:t}`zhu2026softmax`, with the last column of Table 3.

# %% tags=["parameters"]
model = "smollm2-135m"
corpus = "wikitext103"
context = 512
blocks = 4
dtype = "float32"
device = "auto"
results = "results"
backend = "fused"
sections = "core"  # named sets of conditions, with commas between; see `softmaxlab evaluate --help`
temperatures = False  # True: also temperatures matched to exact softmax, with and without rescue (`distortion`)

# %% tags=["hide-input"]
import math

import pandas as pd
from IPython.display import Markdown

from softmaxlab import (
    conditions,
    endpoints,
    evaluate,
    figures,
    figures_vocabulary,
    matching,
    models,
    paper,
    report,
    statistics,
    vocabulary,
)

figures.style()

# %% [markdown]
# ## The definitions
#
# At position $t$ the model with softmax gives the probabilities $b_t$ over the vocabulary, and with an operator in
# place $c_t$; $m_t = \tfrac12(b_t + c_t)$. Over all positions that predict,
#
# $$
# \begin{aligned}
# \mathrm{KL_{fwd}} &= \mathbb E_t\,\mathrm{KL}(b_t\,\|\,c_t), &
# \mathrm{KL_{rev}} &= \mathbb E_t\,\mathrm{KL}(c_t\,\|\,b_t), \\
# \mathrm{JSD_{vocab}} &= \mathbb E_t\!\left[\tfrac12\mathrm{KL}(b_t\,\|\,m_t) + \tfrac12\mathrm{KL}(c_t\,\|\,m_t)\right], &
# A_{\mathrm{top1}} &= \mathbb E_t\,\mathbf 1\{\arg\max b_t = \arg\max c_t\} .
# \end{aligned}
# $$ (eq-vocabulary)
#
# Divergences are in nats. $\mathrm{JSD_{vocab}}$ is **not** the JSD of {ref}`distortion`: that one compares rows of
# attention along the path of exact softmax {eq}`eq-jsd`, this one what comes out at the end, with the operator in every
# layer on the way.
#
# Both distributions come from the same blocks in the same batch, through the same backend and dtype. Log-probabilities
# and sums are float64 from the logits on. Of equally probable tokens the first counts. No logits are stored: the final
# hidden states of both passes are, for as long as a batch lasts, and the model's own head is applied to a few positions
# at a time.

# %% [markdown]
# ## The run

# %%
run = {
    "model": model,
    "corpus": corpus,
    "context": context,
    "dtype": dtype,
    "device": device,
    "results": results,
}
matched = []
if temperatures:
    pairs = endpoints.matched_pairs(matching.solve(windows=endpoints.windows(context, blocks), **run))
    matched = [text for level in (1.0, 10.0) for text in pairs.get(("jsd", level), ())]
rescued = [conditions.rescued(text) for text in matched]
named = [text for section in sections.split(",") for text in conditions.named(section.strip())]
texts = conditions.canonical([*named, *matched, *rescued])
output = evaluate.vocabulary(texts, blocks=blocks, backend=backend, **run)
losses = evaluate.losses([conditions.BASELINE, *texts], blocks=blocks, backend=backend, **run)

# %% tags=["hide-input"]
name = models.resolve(model).name
reference = report.published_model(name, "c4_vocab")
table = vocabulary.summary(losses, output)
Markdown(
    report.setting(name, losses, reference)
    + f" {len(table)} conditions, backend `{backend}`, "
    + f"{losses[losses.condition == conditions.BASELINE].predictions.sum():,} predictions."
)

# %% [markdown]
# Every loss, divergence and agreement of our model is **measured**; the paper's are **published**. By default this is a
# small run, a few short blocks on a CPU: enough to see which way things go, not to resolve small effects. The whole
# protocol is `-p context 2048 -p blocks 0 -p temperatures True`, on a GPU.

# %% [markdown]
# (vocabulary-loss)=
# ## Does the output move as the loss does?

# %% tags=["hide-input"] mystnb={"figure": {"name": "fig-vocabulary", "caption": "Loss increase against the divergence of the output distribution (left) and against the share of predictions whose most probable token is another one (right). Filled: one point a condition, measured, 95 % intervals of \u0394NLL. Hollow: the paper's ten models under Rowmax-PoT with a largest exponent of 20, published (Table 3), no intervals."}, "image": {"alt": "Two scatter plots on logarithmic axes, loss increase in nats against Jensen-Shannon divergence of the next-token distribution and against the percentage of changed most probable tokens, with one marker for each kind of approximation and hollow markers for ten published models."}}
changes = [statistics.delta_nll(losses, text) for text in table.index]
drawn = report.points(changes).set_index(table.index)
drawn = drawn.assign(jsd=table["jsd"], changed=100 * (1 - table["top1"]))
t3 = {
    metric: report.published_rows("table3_cross_model", condition="rowmax_pot_Kmax20", metric=metric).set_index(
        "model"
    )["value"]
    for metric in ("ppl_change", "top1_agree")
}
printed = pd.DataFrame(
    {"value": t3["ppl_change"].map(lambda x: math.log1p(x / 100)), "changed": 100 - t3["top1_agree"]}
)
figures_vocabulary.output_against_loss(drawn, printed, model=name)

# %% [markdown]
# Rank correlation (Spearman) asks whether the conditions come in the same order, Pearson whether they lie on a line.
# Both are taken over conditions, as the paper does. Conditions are not a sample of anything and span decades, so a
# coefficient near one says that large effects are large in both measures; it has no interval.

# %% tags=["hide-input"]
found = vocabulary.correlations(table)
codes = {
    "kl_forward": "dnll_vs_kl_fwd",
    "kl_reverse": "dnll_vs_kl_rev",
    "jsd": "dnll_vs_vocab_jsd",
    "top1": "dnll_vs_top1_agree",
}
labels = {
    "kl_forward": "forward KL",
    "kl_reverse": "reverse KL",
    "jsd": "JSD",
    "top1": "top-1 agreement",
}
c4 = paper.table("c4_vocab")
large = [m for m in c4["model"].unique() if m in ("Qwen2.5-72B", "Llama-3.1-70B")]
columns = {
    f"{name}, Spearman, measured": [report.number(found.loc[m, "spearman"]) for m in codes],
    f"{name}, Pearson, measured": [report.number(found.loc[m, "pearson"]) for m in codes],
    **{
        f"{who}, {stat.capitalize()}, published": [
            report.text(report.published("c4_vocab", model=who, metric=code, stat=stat))
            for code in codes.values()
        ]
        for who, stat in [
            (reference, "spearman"),
            (reference, "pearson"),
            *((m, "pearson") for m in large if m != reference),
        ]
    },
}
report.table(
    pd.DataFrame(columns, index=pd.Index([labels[m] for m in codes], name="ΔNLL with")),
    f"Correlation of ΔNLL with vocabulary output over {len(table)} conditions of {name} and the conditions of the paper.",
)

# %% tags=["hide-input"]
weakest = {
    metric: report.published("c4_vocab", model="ten_models", metric=codes[metric], stat=stat)
    for metric, stat in (("jsd", "spearman_min"), ("top1", "spearman_max"))
}
counts = {
    m: c4.loc[(c4["model"] == m) & (c4["metric"] == codes["jsd"]), "n"].iloc[0] for m in (reference, *large)
}
small = table[drawn["value"].abs() < drawn["value"].abs().median()]
inner = vocabulary.correlations(small) if len(small) > 2 else None
Markdown(
    "Conditions behind the published coefficients: "
    + ", ".join(f"{m} {n}" for m, n in counts.items())
    + f". Over the paper's ten models the rank correlation with JSD is at least {weakest['jsd']}, and with top-1 "
    f"agreement at most {weakest['top1']}. "
    + (
        f"**Among the small effects** the order is a weaker guide: over the {len(small)} conditions of {name} whose "
        f"|ΔNLL| is below the median, the rank correlation with JSD is "
        f"**{report.number(inner.loc['jsd', 'spearman'])}** (all {len(table)}: {report.number(found.loc['jsd', 'spearman'])}), measured."
        if inner is not None and inner.loc["jsd", "spearman"] < found.loc["jsd", "spearman"]
        else f"Among the {len(small)} conditions of {name} whose |ΔNLL| is below the median the rank correlation with JSD "
        f"is {report.number(inner.loc['jsd', 'spearman']) if inner is not None else '—'} (all {len(table)}: "
        f"{report.number(found.loc['jsd', 'spearman'])}), measured."
    )
)

# %% [markdown]
# (vocabulary-points)=
# ## Two operating points
#
# The grid with $K = 32$, $R = 4$ and Rowmax-PoT with a largest exponent of 20, beside the span of the paper's ten
# models.

# %% tags=["hide-input"]
operating = {
    "grid(K=32,R=4)": "exp_K32_R4_nearest",
    "rowmax_pot(K_max=20)": "rowmax_pot_Kmax20",
}
metric_codes = {
    "kl_forward": "kl_fwd",
    "kl_reverse": "kl_rev",
    "jsd": "vocab_jsd",
    "top1": "top1_agree",
}


def measured(text, metric):
    """Mean over blocks with its interval; agreement in percent, as the paper prints it."""
    if text not in table.index:
        return report.MISSING
    rows = output[output.condition == text][metric]
    scale = 100 if metric == "top1" else 1
    return (
        report.interval(statistics.bootstrap(rows.to_numpy() * scale))
        if len(rows) > 1
        else report.number(scale * rows.iloc[0])
    )


def span(code, metric):
    ends = [
        report.text(report.published("c4_vocab", model="ten_models", condition=code, metric=metric, stat=end))
        for end in ("min", "max")
    ]
    return " to ".join(ends)


cells = {
    (text, f"{labels[metric]}{' (%)' if metric == 'top1' else ' (nats)'}"): (
        measured(text, metric),
        span(code, metric_codes[metric]),
    )
    for text, code in operating.items()
    for metric in metric_codes
}
report.table(
    pd.DataFrame(
        cells.values(),
        index=pd.MultiIndex.from_tuples(cells, names=["condition", "quantity"]),
        columns=[f"{name}, measured", "ten models, published"],
    ),
    "Vocabulary output at two operating points: ours with 95 % intervals over blocks, the paper's smallest and largest value.",
)

# %% [markdown]
# ## Does a small loss mean the same output?
#
# It need not: what one prediction loses another may win, and a mean of losses adds both with their signs. A divergence
# has no sign to cancel with.

# %% tags=["hide-input"]
resolved = [e.resolved for e in changes]
gains = [t for t, e in zip(table.index, changes, strict=True) if e.mean <= 0]
open_ = [t for t, state in zip(table.index, resolved, strict=True) if state == "unresolved"]
quiet = table.loc[open_ or [table["dnll"].abs().idxmin()]]
worst = quiet["top1"].idxmin()
gemma = {
    metric: paper.value("c4_vocab", model="Gemma-2-2B", metric=metric, stat="point")
    for metric in ("top1_agree", "ppl_change")
}
Markdown(
    f"**Measured**: of {len(table)} conditions {len(open_)} have a ΔNLL that is not resolved from zero"
    + (f", and of {len(gains)} it is negative" if gains else "")
    + f". {'Of the unresolved' if open_ else 'Smallest in |ΔNLL|'}{', the one that moves the output most' if open_ else ''} is "
    f"`{worst}`: at a ΔNLL of "
    f"{report.interval(statistics.delta_nll(losses, worst))} nats, "
    f"{report.number(100 * (1 - table.loc[worst, 'top1']))} % of the predictions have another most probable token, and the output "
    f"JSD is {report.number(table.loc[worst, 'jsd'])} nats.\n\n"
    f"**Published**: Gemma-2-2B agrees with its own softmax in {gemma['top1_agree']} % of the most probable tokens under "
    f"Rowmax-PoT, the least of the ten models, at a perplexity increase of {gemma['ppl_change']} %."
)

# %% tags=["hide-input", "hide-output"]
report.table(
    pd.DataFrame(
        {
            "ΔNLL (nats)": [report.interval(e) for e in changes],
            "forward KL (nats)": table["kl_forward"].map(report.number).tolist(),
            "reverse KL (nats)": table["kl_reverse"].map(report.number).tolist(),
            "JSD (nats)": table["jsd"].map(report.number).tolist(),
            "top-1 agreement (%)": [report.number(100 * a, 4) for a in table["top1"]],
        },
        index=pd.MultiIndex.from_arrays(
            [[figures_vocabulary.kind(t) for t in table.index], table.index], names=["kind", "condition"]
        ),
    ),
    f"All {len(table)} conditions of {name}, measured; ΔNLL with 95 % intervals.",
)

# %% [markdown]
# ## What this page does not show
#
# - **No test.** The coefficients are over conditions that somebody chose, within one model. They predict nothing about
#   a condition that is not among them.
# - **No equivalence.** A small divergence is an average over positions. It does not say that no single prediction
#   changed much, and the share of changed most probable tokens counts changes between two near-equal candidates like any other.
# - **No text.** Predictions are made with the true text before them. What a model would write after its first changed
#   token is another question.
# - **Not the paper's reference model, by default.** Re-run the page with `-p model qwen2.5-1.5b` to compare like with
#   like, and with `-p sections "support,geometry,allocation,reconstruction,power-of-two,response-map,anchor,family"` for
#   as many conditions as the paper's.
