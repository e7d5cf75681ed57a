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
# (h15)=
# # Rowmax-H15 and its family
#
# Rowmax-H15 is the paper's operator for a kernel: weights $1$ and $1.5$ times powers of two, anchored at the row
# maximum, made by an addition, a shift and an addition of integers. It is one member of a family with $2^k$ weights an
# octave, whose limit is the interpolated power of two of {cite:t}`schraudolph1999exp`. This chapter asks
#
# 1. how a weight comes out of the bits, and how wrong it can be,
# 2. whether the bits give exactly what the formula says, and what they give where the formula does not apply,
# 3. what each member costs a model, and from which $k$ on more bits buy nothing, and
# 4. whether there are better ways to be that coarse.
#
# It follows §5.2, B.1 and the exponential-map ablation of B.2 of {cite:t}`zhu2026softmax`. Everything here is on whole
# rows, with the maximum of the whole row as the anchor; what a kernel does to that is in {ref}`kernel-semantics`.

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
from functools import partial

import numpy as np
import pandas as pd
import torch
from IPython.display import Markdown

from softmaxlab import (
    bits,
    conditions,
    endpoints,
    evaluate,
    figures,
    figures_family,
    floor,
    lattice_endpoints,
    models,
    operators,
    paper,
    report,
    statistics,
    trajectory,
)

figures.style()

# %% [markdown]
# ## The construction
#
# Let $x = -\Delta/\ln 2 \le 0$ be the base-two exponent of a key from the row maximum, so that the exact weight is
# $2^x$. With rounding to nearest, ties to even,
#
# $$
# n = \operatorname{round}_{\mathrm{RNE}}(2x), \qquad
# H(x) = \left(1 + \tfrac12 (n \bmod 2)\right) 2^{\lfloor n/2\rfloor}
# $$ (eq-h15)
#
# is Rowmax-H15, and
#
# $$
# S(x) = 2^{\lfloor x\rfloor}\left(1 + x - \lfloor x\rfloor\right), \qquad
# Q_k(x) = 2^{-k}\operatorname{round}_{\mathrm{RNE}}(2^k x), \qquad
# H(x) = S(Q_1(x))
# $$ (eq-family)
#
# put it into a family: $S$ joins the powers of two by straight lines, $Q_k$ rounds the exponent to $k$ fractional
# bits. (The paper writes $Q_{1/2}$, by the step; we count bits.) $k = 0$ gives powers of two, $k = 1$ is Rowmax-H15,
# and $S$ is the limit.
#
# In bits, FP32 is such a straight line already: its exponent field counts octaves and its mantissa goes evenly
# through one. Adding $2^{23} + 2^{22}$ to $t = 2^k x$ rounds $t$ to an integer, because there the spacing of FP32 is 1,
# and leaves $n$ in the lowest bits. A shift by $23 - k$ puts the $k$ fractional bits of $n$ at the top of the mantissa
# and the others into the exponent. The bits of $1.0$ supply the bias:

# %%
k, x = 1, -1.3
t = torch.tensor([2.0**k * x])
r = t + bits.MAGIC
moved = r.view(torch.int32) << (23 - k)
weight = (moved + bits.ONE).view(torch.float32)

# %% tags=["hide-input"] mystnb={"figure": {"name": "fig-bits", "caption": "From the exponent to the weight for k = 1: the 32 bits of each word of the cell above. Addition rounds, the shift splits n at its binary point into exponent and mantissa, the last addition sets the bias. What is shifted out at the top are bits of the constant."}, "image": {"alt": "Four rows of 32 cells with zeros and ones, divided into sign, exponent and mantissa: t, r with the bits of n at its right end, the shifted word with those bits at its left end, and the weight."}}
n = int(r.item() - bits.MAGIC)
words = [
    (f"t = {2**k} x", t.view(torch.int32).item(), -1, report.number(t.item(), 2)),
    (f"r = t + {bits.MAGIC:.0f}", r.view(torch.int32).item(), 0, f"n = {report.number(n, 1)}"),
    (f"shifted left by {23 - k}", moved.item(), 23 - k, "not a number yet"),
    (f"+ 0x{bits.ONE:X}", weight.view(torch.int32).item(), 23 - k, f"weight {weight.item():g}"),
]
figures_family.bit_fields(words, fraction=k)

# %% tags=["hide-input"]
constant = paper.table("operator_constants").set_index("item")["value"]
Markdown(
    f"At x = {report.number(x, 2)} the rounded exponent is {report.number(n / 2**k, 2)} and the "
    f"weight {weight.item():g}; exact is {report.number(2.0**x)}. The constant is the float with the bits "
    f"0x{torch.tensor(bits.MAGIC).view(torch.int32):X}, "
    f"published as {constant['magic_add_bits']}, with a shift by {constant['left_shift']} for k = 1."
)

# %% [markdown]
# (octave-error)=
# ## How wrong a weight can be
#
# In octaves the error is $\varepsilon_2 = \log_2\hat w - x$. With $q = Q_k(x)$ it splits into the rounding of the
# exponent and the chord of $S$ above the exponential,
#
# $$
# \varepsilon_2 = (q - x) + \left(\log_2 S(q) - q\right), \qquad
# -2^{-(k+1)} \;\le\; \varepsilon_2 \;\le\; 2^{-(k+1)} + \max_{i}\left[\log_2(1 + i/2^k) - i/2^k\right] .
# $$ (eq-family-envelope)
#
# The first part is even around zero; the second is never negative, and rounding finer does not remove it.
# Probabilities are another matter: an error that a whole row shares cancels in {eq}`eq-error`. If every weight of a
# row has $\varepsilon_2\in[a, b]$, then $\log_2 \hat p_j - \log_2 p_j$ lies in $[a-b, b-a]$, and may reach both ends.

# %% tags=["hide-input"] mystnb={"figure": {"name": "fig-octave", "caption": "Upper row: error of a weight over one octave, with its envelope. It repeats in every octave. Lower row: error of the normalised probability of each key of one row of 400 random scores, with the bound that follows. An illustration; no model is involved."}, "image": {"alt": "Five columns, k from 0 to 3 and S: saw-tooth errors of falling height on an arch that stays, inside green bands; below, clouds of points inside wider bands."}}
drawn = {f"k = {k}": operators.SQ(k=k) for k in range(4)} | {"S": operators.S()}
fine = torch.linspace(-1, 0, 2**12 + 1, dtype=torch.float64)
scores = 2 * torch.randn(1, 400, generator=torch.Generator().manual_seed(0))
valid = torch.ones_like(scores, dtype=torch.bool)
octaves = ((scores - scores.max()) / math.log(2))[0]
exact = torch.log_softmax(scores.double(), -1)
curves, bounds, probabilities = {}, {}, {}
for title, op in drawn.items():
    curves[title] = fine.numpy(), (op.at(fine.clone()).double().log2() - fine).numpy()
    bounds[title] = tuple(end / math.log(2) for end in op.envelope)
    shift = (operators.probabilities(op, scores, valid).double().log() - exact) / math.log(2)
    probabilities[title] = octaves.numpy(), shift[0].numpy()
figures_family.octave_errors(curves, bounds, probabilities)

# %% tags=["hide-input"]
family = lattice_endpoints.members()
limit = str(operators.S())
members = {f"k = {k}": operators.parse(text) for k, text in family.items()} | {"S": operators.S()}
dense = torch.linspace(-1, 0, 2**17 + 1, dtype=torch.float64)


def ends(op) -> tuple[float, float]:
    error = op.at(dense.clone()).double().log2() - dense
    return error.min().item(), error.max().item()


gate = [paper.value("gates", metric="log2_err_envelope", stat=stat) for stat in ("min", "max")]
report.table(
    pd.DataFrame(
        {
            "envelope (octaves)": [
                f"{report.number(op.envelope[0] / math.log(2))} to {report.number(op.envelope[1] / math.log(2))}"
                for op in members.values()
            ],
            "over one octave": [" to ".join(report.number(e) for e in ends(op)) for op in members.values()],
            "published": [f"{gate[0]} to {gate[1]}" if title == "k = 1" else None for title in members],
            "bound of a probability": [
                f"±{report.number((op.envelope[1] - op.envelope[0]) / math.log(2))}" for op in members.values()
            ],
        },
        index=pd.Index(members, name="member"),
    ),
    f"Octave error of the family: the envelope, and the least and largest value over {len(dense):,} exponents, computed on this page.",
)

# %% [markdown]
# (identity)=
# ### One identity, three programs
#
# $H = S \circ Q_1$ is an identity of formulas. Here are the two sides as written in {eq}`eq-h15` and {eq}`eq-family`,
# and the bit form, on the paper's inputs.

# %%
x = bits.paper_inputs()
n = torch.round(2 * x.double())  # to nearest, ties to even
H = (1 + torch.remainder(n, 2) / 2) * torch.exp2(torch.floor(n / 2))
S = operators.S().at(n / 2)
same = int(((H.float() == S) & (S == bits.paper_form(x, k=1))).sum())

# %% tags=["hide-input"]
counted = paper.value("exp_map_ablation", metric="bit_test_inputs")
Markdown(f"All three agree on {same:,} of {len(x):,} inputs. The paper's number of inputs is {counted.value:,.0f}.")

# %% [markdown]
# (bit-forms)=
# ## Bits against arithmetic
#
# Three bit forms are compared with the arithmetic form, 32 bits against 32 bits: the **paper's**; a **folded** one,
# with the bias inside the constant, which saves the last addition; and a **fused** one for $k = 7$, in which scale,
# subtraction of the row maximum and addition of the constant are one multiply-add. Folding is not possible at $k = 0$:
# the constant would be odd there and turn ties to even into ties to odd.

# %% tags=["hide-input"]
counts = bits.comparison()
printable = counts.assign(text=[f"{e:,} of {c:,}" for e, c in zip(counts["equal"], counts["compared"])])
wide = printable.pivot(index="k", columns="form", values="text")[list(bits.FORMS)]
draws = paper.value("exp_map_ablation", metric="bit_test_uniform_draws")
report.table(
    wide.where(wide.notna(), None),
    f"Inputs with equal bits, out of the paper's: {draws.value:,.0f} uniform draws, the integers and a grid in "
    "[−126, 0]. A dash: the form does not exist. Measured on this machine's processor.",
)

# %% tags=["hide-input"]
more = bits.comparison(inputs=("ties", "positive", "clamped"), clamps=("paper", "zero"))
what = {
    "ties": "every tie in [−126, 8]",
    "positive": "exponents in [0, 8], from an anchor that lags",
    "clamped": "exponents in [−160, −125], across both clamps",
}
summed = more.groupby("inputs", sort=False).agg(
    compared=("compared", "sum"), equal=("equal", "sum"), different=("different", "sum")
)
report.table(
    summed.map("{:,}".format).rename(index=what).rename_axis("inputs"),
    "What the paper did not test: all k, forms and clamps together. Computed on this page.",
)

# %% tags=["hide-input"]
wrong = int(counts["different"].sum() + more["different"].sum())
verdict = "**All bits are equal**" if wrong == 0 else f"**{wrong:,} results differ**"
complete = [k for k in range(14) if len(torch.unique((2.0**k * x).round_())) == 126 * 2**k + 1]
Markdown(
    f"{verdict}, in {int(counts['compared'].sum() + more['compared'].sum()):,} comparisons. What follows the rounding "
    f"depends on n alone, and up to k = {max(complete)} the paper's inputs reach every n of the range; which inputs "
    "round to it is sampled. It is a test of a pattern of operations and says nothing of what a compiler makes of it."
)

# %% [markdown]
# (clamps)=
# ### At the clamps and beyond
#
# The exponent field cannot go below zero: without a clamp the shift wraps around. The paper clamps $x$ at $-126$, so
# that the smallest weight is $2^{-126}$. Clamping at $-127$ instead, the same operation with another constant, makes the
# field zero and the weight exactly 0. Three clamps, and what they give at $k = 1$:

# %% tags=["hide-input"]
cases = bits.special_cases(k=1).set_index(["case", "x", "clamp"])


def shown(value: float) -> str:
    return f"{value:.4g}".replace("-", "−").replace("inf", "∞").replace("nan", "NaN")


columns = {f"clamp at {at}" if at else "no clamp": ("paper", clamp) for clamp, at in bits.CLAMPS.items()}
columns |= {"no clamp, folded": ("folded", "none"), "arithmetic, clamp at −126": ("arithmetic", "paper")}
rows = cases.index.droplevel("clamp").unique()
report.table(
    pd.DataFrame(
        {
            title.replace("-", "−"): [shown(cases.loc[(*row, clamp), form]) for row in rows]
            for title, (form, clamp) in columns.items()
        },
        index=pd.Index([f"{case}: x = {shown(x)}" for case, x in rows], name="case"),
    ),
    "Weights by the bit form, by clamp; and by the arithmetic form. Computed on this page.",
)

# %% [markdown]
# A clamp is a maximum, and CUDA's maximum of NaN and a number is the number: **both clamps turn NaN into the least
# weight**, so that a kernel no longer shows a broken score. Between $-126$ and $-127$ the zero clamp goes straight
# down from $2^{-126}$ to 0, where exact weights halve. Without a clamp weights below $2^{-127}$ are anything.
#
# A kernel masks a key by the score $-\infty$. Where a row has valid keys, $2^{-126}$ on the masked ones is far below
# rounding. Where it has none (the first rows, when a causal mask has more queries than keys) it is all there is:

# %% tags=["hide-input"]
masked = bits.masked_rows(k=1)
masked["clamp"] = [f"{'−' + str(-bits.CLAMPS[c]) if bits.CLAMPS[c] else 'none'}" for c in masked["clamp"]]
masked["weight"] = masked["weight"].map(shown)
report.table(
    masked.rename(columns={"weight": "weight of each key"}).set_index(["clamp", "form"]),
    "A row whose keys are all masked: what comes out, computed on this page. The exact kernel gives 0.",
)

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
texts = conditions.canonical([*conditions.family(), *conditions.anchor()])
losses = evaluate.losses(texts, blocks=blocks, **run)
path = trajectory.measure(texts[1:], windows=endpoints.windows(context, blocks), **run)
floors = floor.floors(floor.differences(partial(evaluate.losses, blocks=blocks, **run)))

# %% tags=["hide-input"]
name = models.resolve(model).name
table = "exp_map_ablation"
reference = report.published_model(name, table)
seen = path.summary().set_index("operator")
loss_of = {text: statistics.delta_nll(losses, text) for text in texts[1:]}
Markdown(
    report.setting(name, losses, reference)
    + f" Errors of the weights are of the first {endpoints.n_windows(path, context):,} blocks."
)

# %% [markdown]
# Losses and errors of this model are **measured**, those of the paper's **published**. The column `floor` compares an
# effect with what equivalent implementations differ by ({ref}`floor`).

# %% [markdown]
# (family-audit)=
# ## The audit, in a model
#
# Every weight on the path of exact softmax against the envelope of its operator: the family, the references and the
# lattices of {ref}`anchor` that have one. Weights that FP32 holds as subnormal numbers are left out, as they keep
# fewer digits whatever the operator.

# %% tags=["hide-input"]
deep = lattice_endpoints.deep_heads(path)
with_envelope = [t for t in texts[1:] if operators.parse(t).envelope and "bits=4" not in t]
audit = lattice_endpoints.audit(path, with_envelope, deep)
absolute = paper.value("d5_pot_bounds", metric="tolerance_abs_floor")
report.table(
    pd.DataFrame(
        {
            "envelope (nats)": [
                f"{report.number(a)} to {report.number(b)}" for a, b in zip(audit["low"], audit["high"])
            ],
            "least and largest ε (nats)": [
                f"{report.number(a)} to {report.number(b)}" for a, b in zip(audit["least"], audit["most"])
            ],
            "excess (nats)": audit["excess"].map(report.number).tolist(),
            "inside": ["yes" if e <= absolute.value else "no" for e in audit["excess"]],
            "heads": audit["heads"].tolist(),
        },
        index=pd.Index(audit["operator"], name="operator"),
    ),
    f"Local error of {name} against each operator's own envelope, measured; tolerance {absolute} nats, published (D.5). "
    "A negative excess is inside. Heads: in how many the upper side was looked at.",
)

# %% tags=["hide-input"]
n_heads = len(path.shared)
entries = path.shared["entries"].sum()
lifted = sum(deep.values())
where = ", ".join(f"layer {layer} head {head}" for layer, head in deep)
outside = audit.loc[audit["excess"] > absolute.value, "operator"].tolist()
clamp_note = (
    f"In {len(deep)} of {n_heads} heads ({where}) some keys lie so far below their row's maximum that the clamp lifts "
    f"them: {lifted:,} of {entries:,.0f}, by up to {report.number(seen.loc['h15()', 'max_abs_error'])} nats, to a weight "
    "of 2⁻¹²⁶. No envelope allows for that, so the upper side of the clamped operators is looked at in the other heads."
    if deep
    else f"In none of the {n_heads} heads do keys lie so far below their row's maximum that the clamp lifts them."
)
Markdown(
    f"**Measured**: {'outside are ' + ', '.join(outside) if outside else f'all {len(audit)} are inside'}. "
    f"The largest excess is {report.number(audit['excess'].max())} nats. Δ is a difference of two float32 scores, and "
    f"that rounding is of this size. {clamp_note}"
)

# %% [markdown]
# (ablation)=
# ## The exponential-map ablation
#
# Only the map from $x$ to a weight is changed. The paper's second column of intervals is the paired difference to
# Rowmax-H15.

# %% tags=["hide-input"]
ablation = lattice_endpoints.ABLATION
level_rows = [
    (label, loss_of[text], report.published(table, model=reference, operator=code, metric="dnll"))
    for label, (text, code) in ablation.items()
]
level_floors = [report.floor_of([text], floors) for text, _ in ablation.values()]
report.beside(
    level_rows,
    what="map",
    ours=name,
    theirs=reference,
    caption="ΔNLL against softmax in nats per token.",
    floors=level_floors,
)

# %% tags=["hide-input"]
against = {label: pair for label, pair in ablation.items() if pair[0] != "h15()"}
h15_rows = [
    (
        f"{label} minus Rowmax-H15",
        statistics.contrast(losses, text, "h15()"),
        report.published(table, model=reference, operator=code, metric="dnll_minus_h15"),
    )
    for label, (text, code) in against.items()
]
h15_floors = [report.floor_of([text, "h15()"], floors) for text, _ in against.values()]
report.beside(
    h15_rows,
    what="paired difference",
    ours=name,
    theirs=reference,
    caption="Paired differences of ΔNLL to Rowmax-H15 in nats per token; negative loses less.",
    floors=h15_floors,
)

# %% tags=["hide-input"]
gap = statistics.contrast(losses, limit, "h15()").per_block
better = int((gap < 0).sum())
their_better = report.published(
    table, model=reference, operator="schraudolph_unshifted", metric="blocks_lower_nll_than_h15"
)
ties = statistics.contrast(losses, family[0], "pot(m=1)")
equal = int((ties.per_block == 0).sum())
Markdown(
    f"S has the lower loss than Rowmax-H15 on {better} of {len(gap)} blocks here, on {report.text(their_better)} of "
    f"{paper.value('protocol', area='eval', item='blocks_2K')} in the paper. "
    f"{report.floor_note([*level_rows, *h15_rows], [*level_floors, *h15_floors])}\n\n"
    f"k = 0 and pot(m=1) differ in ties alone, which go to even in one and up in the other. Their losses are equal to the "
    f"last bit on {equal} of {ties.n_blocks} blocks."
)

# %% [markdown]
# ### The same weights on an absolute anchor
#
# `ilpot_h15` has the weights {1, 1.5}·2^i too, but fixed at score 0 (the condition `ilpot_h15_v1` of Table B2): the
# question of {ref}`anchor` for this lattice.

# %% tags=["hide-input"]
fidelity = "tableB2_semantic_fidelity"
fixed = report.published(fidelity, model=reference, condition="h15_absolute_lattice", metric="dnll")
anchored = report.published(fidelity, model=reference, condition="h15_offline_wholerow", metric="dnll")
anchor_rows = [
    ("anchored at score 0", loss_of["ilpot_h15()"], fixed),
    ("anchored at the row maximum", loss_of["h15()"], anchored),
    ("what the anchor saves", statistics.contrast(losses, "ilpot_h15()", "h15()"), None),
]
anchor_floors = [report.floor_of(pair, floors) for pair in (["ilpot_h15()"], ["h15()"], ["ilpot_h15()", "h15()"])]
report.beside(
    anchor_rows,
    what="{1, 1.5}·2^i",
    ours=name,
    theirs=reference,
    caption="ΔNLL, and the paired difference, in nats per token.",
    floors=anchor_floors,
)

# %% [markdown]
# (family-curve)=
# ## From k = 0 to the limit
#
# The paper measured $k = 1, 2, 3$ and $S$. Here is the curve, and its distance from the limit as a paired difference,
# which is what the rounding of the exponent costs alone.

# %% tags=["hide-input"] mystnb={"figure": {"name": "fig-family", "caption": "Left: loss increase along the family, with S as its limit. Filled: measured here; hollow and dashed: published (B.2), set a little to the right. Right: the paired difference of each member to S, and the floor of that difference. 95 % intervals."}, "image": {"alt": "Left: loss increase against k from 0 to 13, falling to the level of S; published points for k from 1 to 3. Right: paired differences to S against k on an axis of decades, with grey bars for the floor; the later ones lie inside."}}
ks = list(family)
ours = report.points([loss_of[text] for text in family.values()], k=ks)
gaps = {k: statistics.contrast(losses, text, limit) for k, text in family.items()}
gap_floors = {k: report.floor_of([text, limit], floors) for k, text in family.items()}
their_family = [
    (k, report.published(table, model=reference, k=k, metric="dnll"))
    for k in ks
    if report.published(table, model=reference, k=k, metric="dnll")
]
their_limit = report.published(table, model=reference, operator="schraudolph_unshifted", metric="dnll")
figures_family.family_curve(
    ours,
    pd.Series({end: getattr(loss_of[limit], end if end != "value" else "mean") for end in ("value", "low", "high")}),
    report.points(gaps.values(), k=ks).assign(floor=list(gap_floors.values())),
    pd.DataFrame([(k, p.value, p.low, p.high) for k, p in their_family], columns=["k", "value", "low", "high"]),
    their_limit.value if their_limit else math.nan,
    model=name,
    reference=reference,
)

# %% tags=["hide-input"]
gap_rows = [(f"k = {k}", estimate, None) for k, estimate in gaps.items()]
report.table(
    pd.DataFrame(
        {
            "ΔNLL (nats)": [report.interval(loss_of[text]) for text in family.values()],
            "minus S (nats)": [report.interval(e) for e in gaps.values()],
            "resolved": [e.resolved for e in gaps.values()],
            "floor": [report.against_floor(e.mean, gap_floors[k]) for k, e in gaps.items()],
        },
        index=pd.Index([f"k = {k}" for k in family], name="member"),
    ),
    f"The family of {name}, and its paired difference to S: 95 % intervals, measured.",
)

# %% tags=["hide-input"]
start = lattice_endpoints.first_within(gaps, gap_floors)
unresolved = [k for k, e in gaps.items() if e.resolved == "unresolved"]
sure = [k for k, e in gaps.items() if e.resolved == "positive" and not floor.below(e.mean, gap_floors[k])]
within = (
    f"From **k = {start}** on, every member lies within the reproducibility floor of S; k = {start} is "
    f"{report.number(gaps[start].mean)} above it, {gaps[start].resolved}, where the floor is {report.number(gap_floors[start])}. Whether "
    f"a bit beyond k = {start} buys anything cannot be told here"
    if start is not None
    else f"Up to k = {max(family)} no member stays within the reproducibility floor of S"
)
three = "lies within it" if start is not None and start <= 3 else "does not"
printed = {k: p for k, p in their_family}
theirs = (
    f"**Published**: k = 3 minus S is {report.number(printed[3].value - their_limit.value)} nats, computed here from the "
    "two printed losses, without an interval."
    if 3 in printed and their_limit
    else ""
)
own = loss_of[limit]
Markdown(
    f"**Measured**: {within}; k = 3 {three}. Resolved above S and above the floor: k = "
    f"{', '.join(map(str, sure)) or 'none'}; unresolved: k = {', '.join(map(str, unresolved)) or 'none'}. {theirs}\n\n"
    f"S itself costs {report.interval(own)} nats here, **{own.resolved}**"
    + (f"; in the paper {their_limit}" if their_limit else "")
    + ". Of the cost of Rowmax-H15 here "
    + (
        f"{report.number(100 * gaps[1].mean / loss_of['h15()'].mean)} % is the rounding of the exponent and the rest the "
        "straight lines."
        if gaps[1].resolved == own.resolved == "positive"
        else "no split into rounding and straight lines is resolved."
    )
)

# %% [markdown]
# The floor of every member from $k = 3$ on is that measured at $k = 3$. A finer lattice makes smaller jumps, so for larger
# $k$ it may be too high; $k = 2$ was not measured and has the largest of all. The first $k$ within it is to be read as
# "about".

# %% [markdown]
# (fa4-polynomials)=
# ## Another way to be coarse
#
# FlashAttention-4 computes a share of its exponentials with a polynomial for the fraction of $x$
# {cite:p}`zadouri2026fa4`, of degree 3; its code has coefficients of other degrees too. Degree 1 is a straight line as
# in S, but a fitted one: it starts at 1 with a slope below 1, lies above the exponential and below it in turn, and
# jumps between octaves. Here every exponential is replaced, not a share.

# %% tags=["hide-input"]
polynomials = {d: str(operators.FA4Poly(degree=d)) for d in (1, 2, 3)}
shown_maps = {f"FA4, degree {d}": text for d, text in polynomials.items()} | {"S": limit, "Rowmax-H15": "h15()"}
poly_rows = [(label, loss_of[text], None) for label, text in shown_maps.items()]
poly_floors = [report.floor_of([text], floors) for text in shown_maps.values()]
report.table(
    pd.DataFrame(
        {
            "ΔNLL (nats)": [report.interval(e) for _, e, _ in poly_rows],
            "resolved": [e.resolved for _, e, _ in poly_rows],
            "floor": [report.against_floor(e.mean, limit_) for (_, e, _), limit_ in zip(poly_rows, poly_floors)],
            "envelope (octaves)": [
                " to ".join(report.number(end / math.log(2)) for end in operators.parse(text).envelope)
                for text in shown_maps.values()
            ],
            "p-weighted RMS error (nats)": [
                report.number(seen.loc[text, "log_weight_rms_p"]) for text in shown_maps.values()
            ],
        },
        index=pd.Index(shown_maps, name="map"),
    ),
    f"Polynomials beside S, {name}: 95 % intervals, measured.",
)

# %% tags=["hide-input"]
line = statistics.contrast(losses, polynomials[1], limit)
part = (
    f"degree 1 costs {report.number(100 * loss_of[polynomials[1]].mean / own.mean)} % of what S costs"
    if own.resolved == loss_of[polynomials[1]].resolved == "positive"
    else "the costs of degree 1 and of S are not both resolved"
)
Markdown(
    f"**Measured**: {part}; the paired difference, degree 1 minus S, is {report.interval(line)} nats, {line.resolved} "
    f"(floor: {report.against_floor(line.mean, report.floor_of([polynomials[1], limit], floors))}). "
    f"{report.floor_note(poly_rows, poly_floors)} The paper has no value for any of the polynomials."
)

# %% tags=["hide-input"] mystnb={"figure": {"name": "fig-loss-error", "caption": "Loss increase against the probability-weighted RMS error of the log weights: the family with its limit S, the polynomial of degree 1 of FlashAttention-4, and lattices for comparison. Measured; 95 % intervals of the loss, no intervals of the error. No counterpart in the paper."}, "image": {"alt": "Scatter plot with logarithmic axes: loss increase against error; the family falls steeply to S, the polynomial of degree 1 lies below S."}}
series = [("family S(Q_k)", f"k = {k}" if k < 4 else "", text) for k, text in family.items()]
series += [("S", "", limit)]
series += [("FA4 polynomial, degree 1", "", polynomials[1])]
series += [("other lattices", text, text) for text in ("pot(m=2)", "ilpot_h_a()", "ilpot_h15()")]
figures_family.loss_against_error(
    report.points(
        [loss_of[text] for *_, text in series],
        series=[s for s, *_ in series],
        label=[label for _, label, _ in series],
        error=[seen.loc[text, "log_weight_rms_p"] for *_, text in series],
    ),
    model=name,
)

# %% [markdown]
# The errors of S have one sign: no weight is too light, the largest is exact, so that mass leaves the top of the row
# {eq}`eq-leakage`. Rounding the exponent adds errors of both signs.

# %% tags=["hide-input"]
leaks = {label: seen.loc[text, "leakage_0.9"] for label, text in (("Rowmax-H15", "h15()"), ("S", limit))}
turn = "yet loses less" if loss_of[limit].mean < loss_of["h15()"].mean else "and loses more"
more_or_less = "more" if leaks["S"] > leaks["Rowmax-H15"] else "less"
Markdown(
    f"**Measured**: S leaks {more_or_less} than Rowmax-H15, {report.number(leaks['S'])} against "
    f"{report.number(leaks['Rowmax-H15'])} of the mass, {turn}. Degree 1 leaks "
    f"{report.number(seen.loc[polynomials[1], 'leakage_0.9'])}."
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
        for title, rows in (
            ("Losses", level_rows),
            ("Against Rowmax-H15", h15_rows),
            ("Anchor", anchor_rows),
        )
    )
)

# %% [markdown]
# ## What this page does not show
#
# - **No cost.** Fewer instructions in a formula are not less time in a kernel. Nothing here is about speed, energy or
#   the load of any unit.
# - **No kernel.** Whole rows with the whole row's maximum, no tiles, no rounding of the weights to a storage format.
# - **No proof.** Equal bits on millions of inputs are a finite test, on a processor's integers and not a GPU's.
# - **No optimum.** The shift of Schraudolph's construction that balances its error is not tried, nor other
#   coefficients of a polynomial.
# - **Not the paper's reference model, by default.** Re-run the page with `-p model qwen2.5-1.5b` to compare like
#   with like.
