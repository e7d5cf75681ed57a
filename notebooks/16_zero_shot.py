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
# (zero-shot)=
# # Zero-shot tasks
#
# The other chapters read a loss. This one asks whether a model still answers questions when its softmax is replaced:
# six tasks of lm-evaluation-harness {cite:p}`eval-harness`, no demonstrations, nothing trained or adapted. It
# follows appendix C.1 and C.3 of {cite:t}`zhu2026softmax`, whose comparison is descriptive: scores and their
# differences. Every question of a task that is shown was answered under softmax and under the condition, so the
# differences can be tested **in pairs**, question by question, which the paper does not do.

# %% tags=["parameters"]
model = "smollm2-135m"  # computed where documents are at hand; all others that are stored stand beside it
data = ""
limit = 0
batch = 128
padding = "right"
dtype = "float32"
backend = "fused"
device = "auto"
results = "results"

# %% tags=["hide-input"]
import pandas as pd
from IPython.display import Markdown, display

from softmaxlab import conditions, figures, figures_zero_shot, report, zero_shot, zero_shot_report

figures.style()

# %% [markdown]
# ## The definitions
#
# A task is a set of documents. Each has a context and choices $c_1, \dots, c_m$ (WinoGrande: $m$ contexts and one
# continuation). The model's answer is the choice of the largest log-likelihood
#
# $$
# \ell_i = \sum_{t \in c_i} \log p(t \mid \text{context}, c_{i, <t}),
# \qquad \hat\imath = \arg\max_i \ell_i, \qquad \hat\imath_{\mathrm{norm}} = \arg\max_i \frac{\ell_i}{|c_i|},
# $$ (eq-zero-shot)
#
# with $|c_i|$ the number of characters. **acc** is the share of documents where $\hat\imath$ is right, **acc_norm**
# that where $\hat\imath_{\mathrm{norm}}$ is. LAMBADA has one continuation, the last word of a passage: acc is the
# share where every token of it is the model's first choice, and perplexity is $\exp(-\overline{\ell}\,)$. As in the
# paper, LAMBADA and WinoGrande are read in acc and the other four in acc_norm.
#
# **In pairs.** Let $g$ be the number of documents that only the condition answers right, and $l$ those that only
# softmax does. If the condition did nothing but shuffle close calls, each of the $g + l$ would be one or the other
# with probability ½; McNemar's exact test {cite:p}`mcnemar1947note` is the two-sided binomial test of that. The interval is the paired
# bootstrap of {ref}`framework-statistics` with the document in the place of the block. Tasks are not pooled, and no
# p-value is adjusted for their number.
#
# ### The batch-against-solo gate
#
# Questions differ in length, so a batch is padded. A mask that is lost on its way into a custom attention is lost
# silently: its rows then range over padding. The paper pads on the left after a gate; the harness's own
# log-likelihoods pad on the **right**, where no causal row can see the padding, and so does this page. Both sides are
# implemented, and before anything is measured a run must pass two checks on questions of mixed lengths:
#
# - with **another token as padding** every log-likelihood of the batch is the same, exactly;
# - **alone**, each question has the log-likelihood that it has in the batch. Under exact softmax they agree to the
#   rounding of the dtype: to 10⁻⁴ nats a token in float32, while in bfloat16 rounding alone moves a log-likelihood by
#   hundredths, and the bound is ½. A lattice turns a last digit into a step, and layers amplify steps, so there the
#   median is bounded, by 10⁻² and 0.1, and the largest difference reported. Where rounding is left out of account, in float64, they agree under every
#   condition of this page; the tests hold the code to that, on both sides.
#
# What is left is a reason to keep batch and order the same for all conditions. Here both are part of a result's key,
# so that two settings cannot be compared by accident.

# %% [markdown]
# ## The run
#
# With a folder of documents (`-p data …`, or the environment variable `SOFTMAXLAB_ZERO_SHOT`) the cell computes what
# is not stored. Without one it shows what is. A task under a condition is stored when all of its documents are
# answered, so **what is shown is whole**; what is not there is named and left out.

# %%
setting = zero_shot.Setting(model=model, dtype=dtype, backend=backend, padding=padding, batch=batch, limit=limit)
records = zero_shot_report.records(conditions.zero_shot(), setting, data=data, device=device, results=results)

# %% tags=["hide-input"]
wanted = conditions.zero_shot()
reference = report.published_model(setting.names()["model"], zero_shot_report.TABLE)
every = zero_shot_report.every(records, setting, wanted, results=results)
found = {who: zero_shot_report.changes(frame) for who, frame in every.items()}
paired = {who: changed for who, changed in found.items() if changed}  # with softmax to compare with
made = {
    who: zero_shot.made({name: frame[name].iloc[0] for name in setting.names()}, results=results)
    for who, frame in every.items()
}
Markdown(
    "\n\n".join(
        filter(
            None,
            [
                zero_shot_report.told(records, setting, data, reference),
                "\n".join(f"- **{who}**: {zero_shot_report.missing(frame, wanted)}" for who, frame in every.items()),
                zero_shot_report.unanswered(every, results),
                zero_shot_report.copies(pd.concat(made.values())) if made else "",
            ],
        )
    )
)

# %% [markdown]
# `smollm2-135m` and every model whose name ends in `q4_k` are read from files of 4-bit weights ({ref}`across-models`
# names them); none is one of the paper's.

# %% tags=["hide-input"]
zero_shot_report.gates(made) if made else Markdown("—")

# %% [markdown]
# (zero-shot-scores)=
# ## Scores
#
# **Measured** first, then the paper's table, **published**.

# %% tags=["hide-input"]
for who, frame in every.items():
    display(zero_shot_report.scores(frame, found[who], who))

# %% tags=["hide-input"]
zero_shot_report.published_scores(reference)

# %% tags=["hide-input"] mystnb={"figure": {"name": "fig-zero-shot", "caption": "Change of each task's score against softmax, one panel a condition. Filled: measured here, 95 % paired intervals over documents. Hollow: published (Table C2), no intervals. The paper has no such figure."}, "image": {"alt": "Small multiples, one for each condition: change of the score of six tasks in percentage points, ours with intervals and the paper's as points, around a line at zero."}}
ours, theirs = zero_shot_report.figure_data(paired, reference)
figures_zero_shot.changes(ours, theirs, list(zero_shot.TITLES.values()), reference=reference)

# %% [markdown]
# (zero-shot-pairs)=
# ## In pairs
#
# *Answers that differ* counts every document whose answer is another one, right or wrong. It can be large where the
# score does not move: gains and losses cancel in a score.

# %% tags=["hide-input"]
for who, changed in paired.items():
    display(zero_shot_report.tests(changed, who, reference))

# %% tags=["hide-input"]
Markdown("\n\n".join(f"**{who}.** {zero_shot_report.tally(c)}" for who, c in paired.items()) or "—")

# %% [markdown]
# ## Perplexity of LAMBADA
#
# A log-likelihood has a value where an answer is right or wrong, so it can resolve smaller changes. The paper prints this column for its two larger models.

# %% tags=["hide-input"]
for who in paired:
    display(zero_shot_report.perplexities(every[who], who))

# %% [markdown]
# ## How large is the change under the common grid?
#
# The paper sums up $K = 32$, $R = 4$ by the mean and the largest absolute change of the six scores. *By coin* is the
# mean that would be expected if every answer that softmax and the grid do not share fell to either with probability ½.

# %% tags=["hide-input"]
zero_shot_report.sizes(found)

# %% [markdown]
# ## What this page does not show
#
# - **No generation.** All six tasks compare log-likelihoods in one forward pass. Decoding, long answers, chat
#   templates and demonstrations are other uses of a model.
# - **Not what a score cannot see.** A score is a share of answers; a probability can move a long way before an answer
#   flips. {ref}`zero-shot-pairs` and the perplexity see more.
# - **No equivalence.** A large p-value does not say that two conditions are alike; the interval says how large a
#   difference the documents leave open.
# - **No correction for many tests.** Some small p-values come by chance; how many are expected stands beside their number.
# - **Not the paper's harness.** It used version 0.4.12 for its larger models, padded on the left and had batches of eight.
# - **Not the paper's reference model.** Re-run the page with `-p model qwen2.5-1.5b` and a folder of
#   documents to compare like with like.
