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
# (anchor)=
# # Anchor and resolution
#
# A lattice of weights has two properties: how far apart its points are, and where it is fixed. Quantizers of
# attention probabilities fix theirs at $p = 1$, a place that has nothing to do with the row
# {cite:p}`lin2022fqvit,li2023repqvit`. `pot` fixes it at the row maximum, as EXAQ does with another grid
# {cite:p}`shkolnik2024exaq`, so that the largest weight of every row is exact. When a lattice loses
# little, is it because it is **fine**, or because it is **anchored** in the right place?
#
# 1. What does each of the two cost, the other held fixed? Do the two effects add up?
# 2. Does the error follow the place of the row maximum between two lattice points, its *phase*?
# 3. Is it the anchor of all keys that counts, or the one weight at the maximum?
# 4. What do the published quantizers lose beyond that, at 4 bits and without renormalising?
#
# The first two follow §5.1 and appendix B.1 of {cite:t}`zhu2026softmax`: Figure 4A and Table B1. The others have no
# counterpart there.

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
import torch
from IPython.display import Markdown

from softmaxlab import (
    conditions,
    divergence,
    endpoints,
    evaluate,
    figures,
    figures_lattices,
    floor,
    lattice_endpoints,
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
# With $m$ steps an octave ($m = 1$: octaves, $m = 2$: half octaves), the lattice at $p = 1$ and the one at the row
# maximum are
#
# $$
# \texttt{log2p},\ \texttt{log\_sqrt2p}:\; \hat p_j \propto 2^{-q_j/m},\quad
# q_j = \operatorname{clip}\!\left(\operatorname{round}(-m\log_2 p_j),\, 0,\, 2^{\text{bits}} - 1\right);
# \qquad
# \texttt{pot(m)}:\; \hat w_j = 2^{-\operatorname{round}(m\Delta_j/\ln 2)/m} .
# $$ (eq-anchors)
#
# Both round in the same steps. Since $-\log_2 p_j = (\Delta_j + \log Z)/\ln 2$ with $Z = \sum_k e^{-\Delta_k}$, the
# first rounds $m\Delta_j/\ln 2 + y$ where the second rounds $m\Delta_j/\ln 2$, and $y = m\log_2 Z$ is the same for
# the whole row. What remains of $y$ after rounding is the **phase** of the row,
#
# $$
# \varphi = y - \operatorname{round}(y) \in [-\tfrac12, \tfrac12] ,
# $$ (eq-phase)
#
# the displacement of the row maximum from the nearest lattice point. Every key may be off by half a step under both
# lattices. But under the first the largest weight is off as well, by $\varphi$; under the second it never is.
#
# `ilpot` is the same octave lattice fixed at score 0, $\hat w_j = 2^{\operatorname{round}(s_j/\ln 2)}$, with
# $y = -s_{\max}/\ln 2$: another absolute anchor, so other phases. Weights are renormalised in all of them.

# %% [markdown]
# {numref}`fig-anchored-row` draws it for one row of six keys with made-up scores. On the right are 300 rows of 64
# random scores each, on both lattices, by their phase on the absolute one. Leakage is that of {eq}`eq-leakage`,
# $q = 0.9$.

# %% tags=["hide-input"] mystnb={"figure": {"name": "fig-anchored-row", "caption": "Left: six keys of one row on octave lattices (grey lines), fixed at score 0 and at the row maximum. The largest weight, at the right end, stays exact only below. Right: mass that leaves the keys which hold 90 % of it, in 300 random rows, against the phase of the row on the absolute lattice. An illustration; no model is involved."}, "image": {"alt": "Left: two rows of grey lattice lines with green points, the exact weights, and arrows to orange squares, the lattice weights; in the upper row the point at zero moves, in the lower it does not. Right: leakage against phase, a falling cloud of points for the absolute lattice and a narrower level one for the lattice at the row maximum."}}
row = torch.tensor([[3.3, 2.2, 1.6, 0.6, -0.3, -1.1]])
absolute, rowmax = operators.parse("ilpot()"), operators.parse("pot(m=1)")
everywhere = torch.ones_like(row, dtype=torch.bool)
top = row.max().double() / torch.tensor(2.0).double().log()
octaves = torch.arange(-7, 2)
lattices = {
    "at score 0\n(ilpot)": (octaves + torch.floor(top) - top, absolute(row, everywhere)[0].double().log2()),
    "at the row\nmaximum (pot)": (octaves[octaves <= 0], rowmax(row, everywhere)[0].double().log2()),
}
exact = divergence.exact_rows(row)
keys = (exact.p / exact.p.max()).log2()[0]

many = 3 * torch.randn(300, 64, generator=torch.Generator().manual_seed(0))
valid = torch.ones_like(many, dtype=torch.bool)
rows = divergence.exact_rows(many)
codes = divergence.set_codes(rows.p, [0.9])
moved = []
for label, op in (("at score 0", absolute), ("at the row maximum", rowmax)):
    weights = operators.probabilities(op, many, valid).double()
    (leaked,) = divergence.leakage(rows.p, weights, codes, 1)
    moved.append(pd.DataFrame({"series": label, "phase": absolute.phase(rows), "leakage": leaked}))
figures_lattices.anchored_row(keys, lattices, pd.concat(moved))

# %% [markdown]
# For $\varphi > 0$ the lattice point of the maximum lies above it: the largest weight is rounded up, its row gains
# mass where it has most of it, and leakage is negative. For $\varphi < 0$ it is the other way round. So an absolute
# lattice predicts a **negative correlation** of leakage and phase, and a lattice at the row maximum none.

# %% [markdown]
# ## The run
#
# Stored losses and measurements are read; missing ones are computed. Losses are of the model with the lattice in all
# layers. Divergence, leakage and phase are measured along the path of exact softmax, on the first blocks.

# %%
run = {
    "model": model,
    "corpus": corpus,
    "context": context,
    "dtype": dtype,
    "device": device,
    "results": results,
}
texts = [*conditions.anchor(), "ilpot_h_a()"]
losses = evaluate.losses(texts, blocks=blocks, **run)
path = trajectory.measure(texts[1:], windows=endpoints.windows(context, blocks), **run)
floors = floor.floors(floor.differences(partial(evaluate.losses, blocks=blocks, **run)))

# %% tags=["hide-input"]
name = models.resolve(model).name
table = "tableB1_anchor_resolution"
reference = report.published_model(name, table)
seen = path.summary().set_index("operator")
Markdown(
    report.setting(name, losses, reference)
    + f" Trajectories are of the first {endpoints.n_windows(path, context):,} blocks."
)

# %% [markdown]
# Losses, divergences, leakages and correlations of this model are **measured**; those of the paper's are
# **published**. The column `floor` compares an effect with what equivalent implementations differ by
# ({ref}`floor`).

# %% [markdown]
# (four-lattices)=
# ## Four lattices
#
# Two anchors by two spacings.

# %% tags=["hide-input"] mystnb={"figure": {"name": "fig-anchor", "caption": "Loss increase of four lattices by anchor and spacing. Left: measured here. Right: published (Table B1). 95 % intervals in both; one linear axis, on which parallel lines would mean that the two effects add up. Counterpart of the paper's Figure 4A."}, "image": {"alt": "Two panels with a common linear axis of loss increase: in each, one line for octave and one for half-octave spacing from the absolute anchor to the anchor at the row maximum."}}
four = lattice_endpoints.LATTICES
levels = [statistics.delta_nll(losses, one.condition) for one in four]
printed_levels = [report.published(table, model=reference, condition=one.code, metric="dnll") for one in four]
places = {"anchor": [one.anchor for one in four], "spacing": [one.spacing for one in four]}
theirs = pd.DataFrame(places | {end: [getattr(p, end) for p in printed_levels] for end in ("value", "low", "high")})
figures_lattices.anchor_and_spacing(report.points(levels, **places), theirs, model=name, reference=reference)

# %% tags=["hide-input"]
level_rows = [
    (f"{one.spacing}, {one.anchor} anchor: {one.condition}", estimate, printed)
    for one, estimate, printed in zip(four, levels, printed_levels)
]
level_floors = [report.floor_of([one.condition], floors) for one in four]
report.beside(
    level_rows,
    what="lattice",
    ours=name,
    theirs=reference,
    caption="ΔNLL against softmax in nats per token; absolute lattices with 8 bits, renormalised.",
    floors=level_floors,
)

# %% [markdown]
# ### One changed, the other held fixed
#
# Each line is a paired difference of two of the four, before minus after: positive is what the change saves. The last
# is how much more the anchor saves at octave than at half-octave spacing; it is zero where the effects add up.

# %% tags=["hide-input"]
pairs = lattice_endpoints.anchor_contrasts()
contrast_rows = [
    (
        f"{label}: {before} − {after}",
        statistics.contrast(losses, before, after),
        report.published(table, model=reference, condition=code, metric="dnll_reduction"),
    )
    for label, (before, after, code) in pairs.items()
]
contrast_floors = [report.floor_of([before, after], floors) for before, after, _ in pairs.values()]
additivity = lattice_endpoints.anchor_by_spacing()
together = statistics.combination(losses, additivity)
both_rows = [*contrast_rows, ("anchor, octave minus half octave", together, None)]
both_floors = [*contrast_floors, report.floor_of(additivity, floors)]
report.beside(
    both_rows,
    what="change",
    ours=name,
    theirs=reference,
    caption="Reduction of ΔNLL in nats per token.",
    floors=both_floors,
)

# %% tags=["hide-input"]
adding = {
    "positive": "They are **not additive**: the anchor saves more where the lattice is coarser",
    "negative": "They are **not additive**: the anchor saves more where the lattice is finer",
    "unresolved": "Whether they add up is **not resolved**",
}[together.resolved]
their_gains = [printed.value for _, _, printed in contrast_rows[:2]]
first, second = contrast_rows[0][1], contrast_rows[2][1]
states = {
    "positive": "saves",
    "negative": "adds",
    "unresolved": "changes, unresolved,",
}
Markdown(
    f"**Measured**: at octave spacing the better anchor {states[first.resolved]} {report.interval(first)} nats; at the "
    f"absolute anchor half the spacing {states[second.resolved]} {report.interval(second)}. {adding}, "
    f"{report.interval(together)} nats more. "
    f"**Published**: the difference of the two printed gains is {report.number(their_gains[0] - their_gains[1])} nats, "
    f"computed here; the paper prints no interval for it. "
    f"{report.floor_note(both_rows, both_floors)}"
)

# %% tags=["hide-input"]
loss_of = {text: statistics.delta_nll(losses, text) for text in texts[1:]}


def ratio(numerator: str, denominator: str) -> float | None:
    """Of mean losses; a ratio says nothing unless both lie above zero."""
    both = loss_of[numerator], loss_of[denominator]
    return both[0].mean / both[1].mean if all(e.low > 0 for e in both) else None


report.values(
    [
        (f"{a} / {b}", ratio(a, b), report.published(table, model=reference, condition=code))
        for a, b, code in lattice_endpoints.RATIOS
    ],
    what="ratio",
    ours=name,
    theirs=reference,
    caption="Ratios of mean ΔNLL, shown where both intervals lie above zero. No intervals of the ratio.",
)

# %% [markdown]
# ### Two absolute anchors
#
# `ilpot` and `log2p` are one lattice but for the phase of each row, and neither phase is better. If phases are spread
# alike, their losses should agree although no weight of one need be a weight of the other.

# %% tags=["hide-input"]
between = statistics.contrast(losses, "ilpot()", "log2p()")
limit = report.floor_of(["ilpot()", "log2p()"], floors)
share = ratio("ilpot()", "log2p()")
printed_share = report.published(table, model=reference, condition="ilpot_absolute/log2p_8bit")
said = f"ratio {report.number(share)}" if share else "no ratio, as the two are not both resolved above zero"
Markdown(
    f"**Measured**: {said}; paired difference {report.interval(between)} nats, {between.resolved} "
    f"(floor: {report.against_floor(between.mean, limit)}). "
    f"**Published**: ratio {report.text(printed_share)}."
)

# %% [markdown]
# (phase)=
# ## Leakage follows the phase
#
# Over the rows of all heads, layers and windows, Pearson's correlation $r$ of a row's leakage $L_{0.9}$ with its
# phase {eq}`eq-phase`. Lattices at the row maximum have none of their own; theirs is that of the octave lattice anchored
# at score 0. Rows of a single key are left out. The paper did not record `pot(m=2)`.

# %% tags=["hide-input"] mystnb={"figure": {"name": "fig-phase", "caption": "Correlation of leakage with row phase. Small points: one head each, measured; their height has no meaning. Large: over all rows. Hollow: published (Table B1). No intervals."}, "image": {"alt": "Strip plot: for each lattice the correlation of every head as a small point, widely spread at negative values for the lattices with an absolute anchor, and close to zero for those at the row maximum and for the absolute lattice with an exact maximum."}}
shown = ["log2p()", "log_sqrt2p()", "ilpot()", "ilpot_h_a()", "pot(m=1)", "pot(m=2)"]
chosen = trajectory.Trajectory(path.sums[path.sums["operator"].isin(shown)], path.shared)
heads = chosen.by_head().rename(columns={"phase_r": "r"})
code_of = {one.condition: one.code for one in four}
printed_r = {
    text: report.published(table, model=reference, condition=code_of[text], metric="pearson_r")
    for text in ("log2p()", "log_sqrt2p()", "pot(m=1)")
}
figures_lattices.phase_by_head(
    heads,
    pd.DataFrame({"operator": shown, "value": seen.loc[shown, "phase_r"].to_numpy()}),
    pd.DataFrame({"operator": printed_r.keys(), "value": [p.value for p in printed_r.values()]}),
    reference=reference,
)

# %% tags=["hide-input"]
report.values(
    [(text, seen.loc[text, "phase_r"], printed_r.get(text)) for text in shown],
    what="r of leakage and phase",
    ours=name,
    theirs=reference,
    caption="Pearson's r over all rows of several keys. No intervals.",
)

# %% tags=["hide-input"]
spread = lattice_endpoints.leakage_spread(path)
report.table(
    pd.DataFrame(
        {
            "ΔNLL (nats)": [report.number(loss_of[text].mean) for text in shown],
            "JSD (nats)": [report.number(seen.loc[text, "jsd"]) for text in shown],
            "leakage, mean": [report.number(seen.loc[text, "leakage_0.9"]) for text in shown],
            "leakage, RMS over rows": [report.number(spread[text]) for text in shown],
            "r² of leakage and phase": [report.number(seen.loc[text, "phase_r"] ** 2) for text in shown],
        },
        index=pd.Index(shown, name="lattice"),
    ),
    f"What the anchor changes in the rows of {name}, measured. No intervals.",
)

# %% tags=["hide-input"]
other = report.published(
    "tableB2_semantic_fidelity", condition="absolute_octave_lattice", metric="leakage_phase_pearson_r"
)
r2 = report.number(100 * seen.loc["log2p()", "phase_r"] ** 2)
wider = report.number(spread["log2p()"] / spread["pot(m=1)"])
negative = int((heads[heads["operator"] == "log2p()"]["r"] < 0).sum())
of_heads = int((heads["operator"] == "log2p()").sum())
Markdown(
    f"Under `log2p` a straight line in the phase accounts for {r2} % of the variance of leakage over rows; "
    f"r is negative in {negative} of {of_heads} heads. Its **mean** leakage, {report.number(seen.loc['log2p()', 'leakage_0.9'])}, compares with "
    f"{report.number(seen.loc['pot(m=1)', 'leakage_0.9'])} of `pot(m=1)`: rows that gain and rows that lose cancel "
    f"in it. Its root mean square over rows is {wider} times that of `pot(m=1)`. The paper's notes to Table B2 give "
    f"another r, {report.text(other)}, for “the absolute octave lattice”, without saying which of the two it is."
)

# %% [markdown]
# A negative correlation under absolute lattices and none under the others is what {numref}`fig-anchored-row` predicts.
# It does not prove that the loss comes from there: $r$ is measured on exact softmax and says nothing about which rows
# the model can do without.

# %% [markdown]
# (exact-maximum)=
# ## The anchor, or the one weight at the maximum?
#
# `ilpot_h_a` (Table B2 of the paper) is the absolute half-octave lattice with one exception: the weight of the row
# maximum is exact. All other keys lie on the wrong lattice, if an absolute anchor is wrong. It splits the step from
# `log_sqrt2p` to `pot(m=2)` in two.

# %% tags=["hide-input"]
steps = {
    "the maximum made exact": ("log_sqrt2p()", "ilpot_h_a()"),
    "the other keys moved to the row's lattice": ("ilpot_h_a()", "pot(m=2)"),
    "both": ("log_sqrt2p()", "pot(m=2)"),
}
step_rows = [(f"{label}: {a} − {b}", statistics.contrast(losses, a, b), None) for label, (a, b) in steps.items()]
step_floors = [report.floor_of(pair, floors) for pair in steps.values()]
ha = report.published("tableB2_semantic_fidelity", model=reference, condition="ilpot_h_a", metric="dnll")
ha_rows = [("ilpot_h_a(), ΔNLL", loss_of["ilpot_h_a()"], ha)]
report.beside(
    [*ha_rows, *step_rows],
    what="step",
    ours=name,
    theirs=reference,
    caption="Loss, and its reductions, in nats per token.",
    floors=[report.floor_of(["ilpot_h_a()"], floors), *step_floors],
)

# %% tags=["hide-input"]
whole, made_exact, rest = step_rows[2][1], step_rows[0][1], step_rows[1][1]
if whole.resolved == "positive":
    part = f"The exact maximum alone is {report.number(100 * made_exact.mean / whole.mean)} % of what the anchor saves"
else:
    part = "The anchor saves nothing that is resolved at this spacing"
Markdown(
    f"**Measured**: {part}; what the other keys add, {report.interval(rest)} nats, is {rest.resolved} "
    f"(floor: {report.against_floor(rest.mean, step_floors[1])}). The correlation with the phase is "
    f"{report.number(seen.loc['ilpot_h_a()', 'phase_r'])}. "
    f"**Published**: {report.text(ha)} for ilpot_h_a beside {report.text(printed_levels[3])} for pot(m=2); no paired "
    "difference is printed."
)

# %% [markdown]
# An anchor at the row maximum does two things at once: it makes the largest weight exact, and it moves all the others.
# If the second adds nothing, an absolute lattice is not worse as such; it is worse by one weight a row. A kernel
# whose anchor follows the running maximum gets that weight for nothing (one whose anchor lags does not:
# {ref}`kernel-semantics`); on an absolute lattice it would have to treat the key apart.

# %% [markdown]
# (four-bits)=
# ## Four bits, and no renormalising
#
# The published quantizers store $q$ in 4 bits and use $2^{-q/m}$ as the probability as it stands
# {cite:p}`lin2022fqvit,li2023repqvit`. Here each of the two is put back, alone, into a language model of rows up to
# the block length. A key beyond the largest $q$ keeps the smallest weight, as {eq}`eq-anchors` says (`tail=drop` sets it
# to zero instead, as the released code of FQ-ViT does). These are the lattices, not the quantizers: those were made
# for vision transformers with short rows.

# %% tags=["hide-input"]
variants = [text for text in conditions.anchor() if text.startswith("log") and not text.endswith("()")]
variant_rows = [(text, loss_of[text], None) for text in variants]
variant_floors = [report.floor_of([text], floors) for text in variants]


def smallest(text: str) -> str:
    lattice = operators.parse(text)
    return f"2^(−{(2**lattice.bits - 1) / lattice.steps:g})"


def sums_to_one(text: str, value: float) -> str:
    return report.number(value) if operators.parse(text).normalised else report.MISSING


report.table(
    pd.DataFrame(
        {
            "ΔNLL (nats)": [report.interval(e) for _, e, _ in variant_rows],
            "smallest weight": [smallest(text) for text in variants],
            "largest ε (nats)": [report.number(seen.loc[text, "max_abs_error"]) for text in variants],
            # Without renormalising p̂ does not sum to one: the formula is no divergence, and leakage holds the row sum.
            "JSD (nats)": [sums_to_one(text, seen.loc[text, "jsd"]) for text in variants],
            "leakage, mean": [sums_to_one(text, seen.loc[text, "leakage_0.9"]) for text in variants],
            "leakage, RMS": [sums_to_one(text, spread[text]) for text in variants],
            "floor": [report.against_floor(e.mean, limit) for (_, e, _), limit in zip(variant_rows, variant_floors)],
        },
        index=pd.Index(variants, name="lattice"),
    ),
    f"The lattices at p = 1 as the quantizers use them, {name}: ΔNLL with 95 % intervals, measured.",
)

# %% tags=["hide-input"]
mass = path.mass().set_index(["relation", "p_threshold"])
heavy = mass.loc[("ge", 0.01)]
short, finer = operators.parse("log2p(bits=4)"), operators.parse("log_sqrt2p(bits=4)")
worse = loss_of[str(finer)].mean > loss_of[str(short)].mean
ends = [2.0 ** (-(2**op.bits - 1) / op.steps) for op in (short, finer)]
Markdown(
    f"**Where the range of q ends.** Four bits hold 16 values: down to 2⁻¹⁵ in octaves, but only to 2^(−7.5) = "
    f"{report.number(ends[1])} in half octaves. A key below keeps that weight. Of the entries of this model "
    f"{report.number(100 * (1 - heavy['entry_share']))} % lie below p = 0.01, with "
    f"{report.number(100 * (1 - heavy['mass_share']))} % of the mass; {context:,} keys at the smallest weight weigh "
    f"{report.number(context * ends[1])} together, against 1 for the whole exact row (in octaves: "
    f"{report.number(context * ends[0])}). The finer lattice loses **{'more' if worse else 'less'}**, {report.interval(loss_of[str(finer)])} "
    f"against {report.interval(loss_of[str(short)])} nats{': half the spacing is half the range, and here range is short' if worse else ''}. "
    f"{report.number(100 * seen.loc[str(finer), 'leakage_0.9'])} % of the mass leaves "
    "the keys that held 90 %.\n\n"
    f"**Without renormalising** a row sums to anything between 2^(−1/2) and 2^(1/2) in octaves, 2^(−1/4) and "
    f"2^(1/4) in half octaves, set by the phase where one key dominates. The output of the head is scaled by that factor, row by "
    f"row. That costs {report.number(loss_of['log2p(renormalise=no)'].mean - loss_of['log2p()'].mean)} and "
    f"{report.number(loss_of['log_sqrt2p(renormalise=no)'].mean - loss_of['log_sqrt2p()'].mean)} nats on top of the "
    "same lattices renormalised."
)

# %% [markdown]
# The range is not a matter of the anchor: one that ends too early is as bad below the row maximum, and {ref}`rowmax-pot`
# asks that question for the lattice there. Leaving the sum as it is, is one: the phase sets the factor of a row. But a kernel
# divides by the sum of the weights that it used, so that renormalising costs it nothing.

# %% [markdown]
# ## What agrees, and what does not
#
# Only signs are compared, and only where our interval excludes zero. That an approximation costs something is what any
# damage does, so the agreement of such signs says little; a contrast of two approximations could have come out either way.

# %% tags=["hide-input"]
Markdown(
    "\n\n".join(
        f"**{title}.** {report.verdict(rows)}"
        for title, rows in (("Lattices", level_rows), ("Anchor and spacing", contrast_rows), ("Exact maximum", ha_rows))
    )
)

# %% [markdown]
# ## What this page does not show
#
# - **No mechanism.** The correlation of leakage and phase is what a phase effect predicts. It is no intervention: no
#   row's phase was changed with everything else fixed.
# - **No intervals for trajectories.** Correlations, leakages and divergences are sums over rows that are not
#   independent.
# - **Not the quantizers' own results.** Theirs are of vision transformers, with calibrated scales and quantized
#   operands.
# - **Whole rows.** The anchor is the maximum of the whole row. A kernel knows the maximum of the keys seen so far;
#   that is another anchor: {ref}`kernel-semantics`.
# - **Not the paper's reference model, by default.** Re-run the page with `-p model qwen2.5-1.5b` to compare like
#   with like.
