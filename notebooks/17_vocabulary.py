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
model = "smollm2-135m"  # shown in detail; the others of the store stand in the tables
corpus = "wikitext103"
context = 2048
blocks = 0
dtype = "float32"
device = "auto"
results = "results"
backend = "fused"
sections = "core"  # named sets of conditions, with commas between; see `softmaxlab evaluate --help`
temperatures = True  # also temperatures matched at J0 and 10 J0, with and without the softmax mass restored

# %% tags=["hide-input"]
import math

import pandas as pd
from IPython.display import Markdown, display

from softmaxlab import (
    breadth,
    conditions,
    cross_model,
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
# \mathrm{KL_{fwd}} &= \mathbb E_t\,\mathrm{KL}(b_t\,\|\,c_t), \\
# \mathrm{KL_{rev}} &= \mathbb E_t\,\mathrm{KL}(c_t\,\|\,b_t), \\
# \mathrm{JSD_{vocab}} &= \mathbb E_t\!\left[\tfrac12\mathrm{KL}(b_t\,\|\,m_t) + \tfrac12\mathrm{KL}(c_t\,\|\,m_t)\right], \\
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
    targets = breadth.Step("core", context, (1.0, 10.0)).targets
    pairs = endpoints.matched_pairs(matching.solve(targets, windows=endpoints.windows(context, blocks), **run))
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
stored = cross_model.read(results, corpus=corpus, context=context, blocks=blocks)
others = [cell for cell in stored if cell.model != name and len(cell.output)]
without = [cell.model for cell in stored if cell.model != name and not len(cell.output)]
measured = {f"{name} ({dtype}, {backend})": (losses, output)}
measured |= {cell.label: (cell.losses, cell.output) for cell in others}
tables = {who: vocabulary.summary(*frames) for who, frames in measured.items()}
core = [text for text in conditions.core() if text != conditions.BASELINE]
Markdown(
    report.setting(name, losses, reference)
    + f" {len(table)} conditions, backend `{backend}`, "
    + f"{losses[losses.condition == conditions.BASELINE].predictions.sum():,} predictions."
    + "".join(
        f"\n\nBeside it **{cell.model}**: {cell.setting}, {cell.size} blocks, {cell.weights}; "
        f"{len(tables[cell.label])} conditions"
        + (
            f", of the core set {len(lacking)} of {len(core)} not on all of these blocks"
            if (lacking := set(core) - set(tables[cell.label].index))
            else ""
        )
        + "."
        for cell in others
    )
    + (f"\n\nWithout vocabulary output: {', '.join(without)}." if without else "")
)

# %% [markdown]
# Every loss, divergence and agreement of our models is **measured**; the paper's are **published**. No model is pooled
# with another.

# %% [markdown]
# (vocabulary-loss)=
# ## Does the output move as the loss does?

# %% tags=["hide-input"] mystnb={"figure": {"name": "fig-vocabulary", "caption": "Loss increase against the divergence of the output distribution (left) and against the share of predictions whose most probable token is another one (right). Filled: one point a condition of the model above, measured, 95 % intervals of \u0394NLL. Hollow: the paper's ten models under Rowmax-PoT with a largest exponent of 20, published (Table 3), no intervals."}, "image": {"alt": "Two scatter plots on logarithmic axes, loss increase in nats against Jensen-Shannon divergence of the next-token distribution and against the percentage of changed most probable tokens, with one marker for each kind of approximation and hollow markers for ten published models."}}
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

# %% tags=["hide-input"] mystnb={"figure": {"name": "fig-vocabulary-models", "caption": "The same for every stored model, one panel each: loss increase against the divergence of the output distribution, one point a condition, measured, 95 % intervals of \u0394NLL. Marks as above; each model has its own matched temperatures. A loss below zero lies under the line."}, "image": {"alt": "Scatter plots, one for each stored model, of loss increase in nats against Jensen-Shannon divergence of the next-token distribution on a logarithmic axis."}}
figures_vocabulary.by_model(
    {
        who: report.points(statistics.delta_nll(measured[who][0], text) for text in one.index)
        .set_index(one.index)
        .assign(jsd=one["jsd"])
        for who, one in tables.items()
    }
)

# %% [markdown]
# Rank correlation (Spearman) asks whether the conditions come in the same order, Pearson whether they lie on a line.
# Both are taken over conditions, as the paper does. Conditions are not a sample of anything and span decades, so a
# coefficient near one says that large effects are large in both measures; it has no interval. ΔNLL has a sign and a
# divergence has none, so conditions below zero lower a coefficient.

# %% tags=["hide-input"]
found = vocabulary.correlations(table)
ranked = {who: vocabulary.correlations(one) for who, one in tables.items() if len(one) > 2}
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
rows = {}
for who, correlated in ranked.items():
    for stat in ("spearman", "pearson"):
        rows[f"{who}, measured", stat.capitalize()] = {
            "conditions": f"{correlated['n'].iloc[0]}",
            **{labels[m]: report.number(correlated.loc[m, stat]) for m in codes},
        }
for who in dict.fromkeys((reference, *large)):
    for stat in ("spearman", "pearson"):
        values = {
            labels[m]: report.published("c4_vocab", model=who, metric=code, stat=stat) for m, code in codes.items()
        }
        if any(value is not None for value in values.values()):
            count = c4.loc[(c4["model"] == who) & (c4["metric"] == codes["jsd"]), "n"].iloc[0]
            rows[f"{who}, published", stat.capitalize()] = {
                "conditions": str(count),
                **{what: report.text(value) for what, value in values.items()},
            }
report.table(
    pd.DataFrame.from_dict(rows, orient="index").rename_axis(["model", "ΔNLL with"]),
    "Correlation of ΔNLL with vocabulary output over the conditions of one model at a time.",
)

# %% tags=["hide-input"]
weakest = {
    metric: report.published("c4_vocab", model="ten_models", metric=codes[metric], stat=stat)
    for metric, stat in (("jsd", "spearman_min"), ("top1", "spearman_max"))
}


def small(who):
    """The rank correlation with JSD over the conditions with the smaller effects on the loss."""
    one = tables[who]
    part = one[one["dnll"].abs() < one["dnll"].abs().median()]
    if len(part) < 3:
        return f"- **{who}**: too few conditions."
    return (
        f"- **{who}**: {report.number(vocabulary.correlations(part).loc['jsd', 'spearman'])} over the {len(part)} "
        f"conditions; over all {len(one)}: {report.number(ranked[who].loc['jsd', 'spearman'])}."
    )


Markdown(
    f"Over the paper's ten models the rank correlation with JSD is at least {report.text(weakest['jsd'])}, and with "
    f"top-1 agreement at most {report.minus(report.text(weakest['top1']))}.\n\n**Among the small effects**, the "
    "conditions whose |ΔNLL| is below that model's median, the rank correlation with JSD is, measured,\n\n"
    + "\n".join(map(small, tables))
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


def point(who, text, metric):
    """Mean over blocks with its interval; agreement in percent, as the paper prints it."""
    if text not in tables[who].index:
        return report.MISSING
    found = measured[who][1]
    rows = found[found.condition == text][metric] * (100 if metric == "top1" else 1)
    return report.interval(statistics.bootstrap(rows.to_numpy())) if len(rows) > 1 else report.number(rows.iloc[0])


def span(code, metric):
    ends = [
        report.text(report.published("c4_vocab", model="ten_models", condition=code, metric=metric, stat=end))
        for end in ("min", "max")
    ]
    return " to ".join(ends)


headings = {metric: f"{labels[metric]}{' (%)' if metric == 'top1' else ' (nats)'}" for metric in metric_codes}
rows = {}
for text, code in operating.items():
    for who in tables:
        rows[text, f"{who}, measured"] = {head: point(who, text, metric) for metric, head in headings.items()}
    rows[text, "ten models, published"] = {head: span(code, metric_codes[m]) for m, head in headings.items()}
report.table(
    pd.DataFrame.from_dict(rows, orient="index").rename_axis(["condition", "model"]),
    "Vocabulary output at two operating points: ours with 95 % intervals over blocks, the paper's smallest and largest value.",
)

# %% [markdown]
# ## Does a small loss mean the same output?
#
# It need not: what one prediction loses another may win, and a mean of losses adds both with their signs. A divergence
# has no sign to cancel with.

# %% tags=["hide-input"]
gemma = {
    metric: paper.value("c4_vocab", model="Gemma-2-2B", metric=metric, stat="point")
    for metric in ("top1_agree", "ppl_change")
}


def quietest(who):
    """Of one model: the condition that moves the output most while its loss is not resolved from zero."""
    (found, _), one = measured[who], tables[who]
    estimates = {text: statistics.delta_nll(found, text) for text in one.index}
    open_ = [text for text, e in estimates.items() if e.resolved == "unresolved"]
    below = [f"`{text}` ({report.interval(e)})" for text, e in estimates.items() if e.resolved == "negative"]
    worst = one.loc[open_ or [one["dnll"].abs().idxmin()]]["top1"].idxmin()
    which = "Of the unresolved the one that moves the output most" if open_ else "The one with the smallest |ΔNLL|"
    gains = one.loc[[text for text, e in estimates.items() if e.resolved == "negative"]]
    return (
        f"- **{who}**: of {len(one)} conditions {len(open_)} have a ΔNLL that is not resolved from zero"
        + (f"; {len(below)} have one resolved below zero: {', '.join(below)}" if below else "")
        + f". {which} is "
        f"`{worst}`: at a ΔNLL of {report.interval(estimates[worst])} nats, "
        f"{report.number(100 * (1 - one.loc[worst, 'top1']))} % of the predictions have another most probable token, "
        f"and the output JSD is {report.number(one.loc[worst, 'jsd'])} nats."
        + (
            f" Of those below zero, `{gains['top1'].idxmin()}` lowers the loss and changes "
            f"{report.number(100 * (1 - gains['top1'].min()))} % of the most probable tokens."
            if len(gains)
            else ""
        )
    )


Markdown(
    "**Measured**:\n\n"
    + "\n".join(map(quietest, tables))
    + f"\n\n**Published**: Gemma-2-2B agrees with its own softmax in {gemma['top1_agree']} % of the most probable "
    f"tokens under Rowmax-PoT, the least of the ten models, at a perplexity increase of {gemma['ppl_change']} %."
)

# %% [markdown]
# (vocabulary-conditions)=
# ## Every condition
#
# One table a model; open the cell.


# %% tags=["hide-input", "hide-output"]
def conditions_of(who):
    one = tables[who]
    return report.table(
        pd.DataFrame(
            {
                "ΔNLL (nats)": [report.interval(statistics.delta_nll(measured[who][0], text)) for text in one.index],
                "forward KL (nats)": one["kl_forward"].map(report.number).tolist(),
                "reverse KL (nats)": one["kl_reverse"].map(report.number).tolist(),
                "JSD (nats)": one["jsd"].map(report.number).tolist(),
                "top-1 agreement (%)": [report.number(100 * a, 4) for a in one["top1"]],
            },
            index=pd.MultiIndex.from_arrays(
                [[figures_vocabulary.kind(t) for t in one.index], one.index], names=["kind", "condition"]
            ),
        ),
        f"All {len(one)} conditions of {who}, measured; ΔNLL with 95 % intervals.",
    )


for who in tables:
    display(conditions_of(who))

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
