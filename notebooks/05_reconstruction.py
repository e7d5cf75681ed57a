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
# (reconstruction)=
# # Reconstruction and Rowmax-PoT
#
# Two questions about how a rounded score becomes a weight, and one about the numbers of this book:
#
# 1. **Reconstruction.** Given the interval of a score, which weight should stand for it: that of the upper edge, of
#    the nearer edge, or one interpolated between both?
# 2. **A lattice at the row maximum.** Can the grid over the full range be replaced by powers of two counted down
#    from the maximum, which needs no row minimum and no table of edges? And how far down must it go?
# 3. **The floor.** How small may an effect be before it may be one of rounding?
#
# The first two follow §4.4 and appendices A.5, A.6 and D.5 of {cite:t}`zhu2026softmax`, with Figure S7. The third
# has no counterpart there.

# %% tags=["parameters"]
model = "smollm2-135m"
corpus = "wikitext103"
context = 2048
blocks = 0
dtype = "float32"
device = "auto"
results = "results"
interventions = 0  # how many of the response map's list are used; 0: all

# %% tags=["hide-input"]
import math
from functools import partial

import pandas as pd
from IPython.display import Markdown

from softmaxlab import (
    backend_check,
    conditions,
    cross_model,
    endpoints,
    evaluate,
    figures,
    figures_distortion,
    floor,
    models,
    operators,
    paper,
    report,
    statistics,
    trajectory,
)
from softmaxlab import corpus as corpora

figures.style()

# %% [markdown]
# ## The definitions
#
# **Reconstruction.** A score lies at $u$ in an interval of the grid {eq}`eq-grid` with edges $e_{\mathrm{lo}}$ and
# $e_{\mathrm{hi}}$, width $h$; $t = (u - e_{\mathrm{lo}})/h$ is its place in it. The log error $\varepsilon =
# \log\hat w - \log w$ has an envelope for each rule:
#
# $$
# \text{upper: } 0\le\varepsilon\le h, \qquad
# \text{nearest: } |\varepsilon|\le h/2, \qquad
# \text{lerp: } \varepsilon = \log\!\left[(1-t) + t\,e^{h}\right] - t h \ge 0 ,
# $$ (eq-envelopes)
#
# where `lerp` is $\hat w = (1-t)\,e^{e_{\mathrm{lo}}} + t\,e^{e_{\mathrm{hi}}}$, up to the factor of the row. It
# uses the place inside the interval, so its weights do not come from a finite set.
#
# **Powers of two.** With $\Delta_j$ the distance from the row maximum,
#
# $$
# \texttt{pot(m)}:\; \hat w_j = 2^{-\lfloor m\Delta_j/\ln 2 + 1/2\rfloor/m}, \qquad |\varepsilon|\le \frac{\ln 2}{2m},
# $$ (eq-pot)
#
# $$
# \texttt{rowmax\_pot(K\_max)}:\; \hat w_j = 2^{-d_j}, \qquad
# d_j = \min\bigl(K_{\max}, \lfloor \Delta_j/\ln 2 + 1/2\rfloor\bigr) .
# $$ (eq-rowmax-pot)
#
# The second is `pot(m=1)` down to $2^{-K_{\max}}$. Beyond, the weight stays there (`clamp`) or is zero (`drop`).
# Logarithmic codes of this kind are old {cite:p}`miyashita2016log`; here the point is the anchor at the row
# maximum.

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
sections = ("support", "geometry", "allocation", "reconstruction", "power-of-two")
one_layer = conditions.same_support(models.n_layers(model))
everything = [text for section in sections for text in conditions.named(section)]
everything += conditions.response_map()[: interventions or None]
losses = evaluate.losses(
    conditions.canonical([*everything, *(text for pair in one_layer for text in pair)]), blocks=blocks, **run
)

grids = conditions.reconstruction()[1:]
lattices = [str(operators.PoT(m=float(m))) for m in conditions.POT_STEPS]
path = trajectory.measure([*grids, *lattices], windows=endpoints.windows(context, blocks), **run)

differences = floor.differences(partial(evaluate.losses, blocks=blocks, **run))
floors = floor.floors(differences)

# %% tags=["hide-input"]
name = models.resolve(model).name
reference = report.published_model(name, "d5_reconstruction")
seen = path.summary().set_index("operator")
Markdown(
    report.setting(name, losses, reference)
    + f" Errors of the weights are of the first {endpoints.n_windows(path, context):,} blocks."
)

# %% [markdown]
# Every loss and error below is **measured**. Columns and markers of the paper are **published** numbers. The column
# `floor` is explained in {ref}`floor`.

# %% [markdown]
# (reconstructions)=
# ## Three reconstructions of one grid
#
# $K = 21$, $R = 4$, in all layers.

# %% tags=["hide-input"]
rules = {
    "upper": ("upper edge", "upper_edge"),
    "nearest": ("nearest edge", "nearest"),
    "lerp": ("interpolated", "lerp_weight"),
}
by_rule = {operators.parse(text).recon: text for text in grids}
rule_rows = [
    (
        label,
        statistics.delta_nll(losses, by_rule[rule]),
        report.published("d5_reconstruction", model=reference, recon=code, metric="ppl_change"),
    )
    for rule, (label, code) in rules.items()
]
rule_floors = [report.floor_of([by_rule[rule]], floors) for rule in rules]
report.beside(
    rule_rows,
    what="K = 21, R = 4",
    ours=name,
    theirs=reference,
    caption="Perplexity increase in percent, by reconstruction.",
    transform=report.percent,
    floors=rule_floors,
)

# %% tags=["hide-input"]
steps = {
    f"{rules[a][0]} minus {rules[b][0]}": (
        statistics.contrast(losses, by_rule[a], by_rule[b]),
        (by_rule[a], by_rule[b]),
    )
    for a, b in (("upper", "nearest"), ("nearest", "lerp"))
}
step_rows = [(label, estimate, None) for label, (estimate, _) in steps.items()]
step_floors = [report.floor_of(pair, floors) for _, pair in steps.values()]
Markdown(
    "Paired differences of loss in nats, which the paper does not print: "
    + "; ".join(f"{label} {report.interval(e)}, {e.resolved}" for label, e, _ in step_rows)
    + f". {report.floor_note(rule_rows + step_rows, rule_floors + step_floors)}"
)

# %% [markdown]
# **The audit.** Each weight on the path of exact softmax is compared with its own envelope {eq}`eq-envelopes`.
# Weights are float32, so a small excess is rounding; we allow the absolute part of the paper's tolerance for its
# lattices.

# %% tags=["hide-input"]
relative, absolute = (
    paper.value("d5_pot_bounds", metric=f"tolerance_{part}") for part in ("rel_to_B", "abs_floor")
)
audit = [
    (rules[rule][0], seen.loc[text, "max_abs_error"], seen.loc[text, "excess"], absolute.value)
    for rule, text in by_rule.items()
]
report.table(
    pd.DataFrame(
        {
            "largest |ε| (nats)": [report.number(e) for _, e, _, _ in audit],
            "largest excess over the envelope (nats)": [report.number(x) for _, _, x, _ in audit],
            "tolerance (nats), published": [str(absolute)] * len(audit),
            "inside": ["yes" if x <= limit else "no" for _, _, x, limit in audit],
        },
        index=pd.Index([label for label, *_ in audit], name="K = 21, R = 4"),
    ),
    f"Local error of {name} against each rule's own envelope, measured. A negative excess is inside.",
)

# %% [markdown]
# The envelope bounds the error of one weight. It says nothing about the loss: two rules with envelopes of one width
# can differ in whether their errors cancel along a row {eq}`eq-error`.

# %% [markdown]
# (pot)=
# ## Powers of two, without a cutoff

# %% tags=["hide-input"]
pot_model = report.published_model(name, "tableB1_anchor_resolution")
pot_rows = [
    (
        f"m = {m:g}",
        statistics.delta_nll(losses, text),
        report.published("tableB1_anchor_resolution", model=pot_model, condition=f"pot_m{m:g}", metric="dnll"),
    )
    for m, text in zip(conditions.POT_STEPS, lattices)
]
pot_floors = [report.floor_of([text], floors) for text in lattices]
report.beside(
    pot_rows,
    what="steps an octave",
    ours=name,
    theirs=pot_model,
    caption="ΔNLL against softmax in nats per token, pot(m).",
    floors=pot_floors,
)

# %% [markdown]
# The audit of the bound in {eq}`eq-pot`, with the paper's tolerance: the larger of a share of the bound and an
# absolute floor.

# %% tags=["hide-input"]
bounds = {text: operators.parse(text).envelope[1] for text in lattices}
allowed = {text: max(relative.value * bound, absolute.value) for text, bound in bounds.items()}
report.table(
    pd.DataFrame(
        {
            "bound ln 2/(2m)": [f"{bounds[t]:.6f}" for t in lattices],
            "largest |ε|": [f"{seen.loc[t, 'max_abs_error']:.6f}" for t in lattices],
            "excess": [report.number(seen.loc[t, "excess"]) for t in lattices],
            "tolerance": [report.number(allowed[t]) for t in lattices],
            "inside": ["yes" if seen.loc[t, "excess"] <= allowed[t] else "no" for t in lattices],
        },
        index=pd.Index([f"{m:g}" for m in conditions.POT_STEPS], name="m"),
    ),
    f"Largest log error of {name}, in nats: measured, on the path of exact softmax.",
)

# %% tags=["hide-input"]
least, most = (
    paper.value("d5_pot_bounds", metric="fp32_excess_over_bound", stat=end) for end in ("min", "max")
)
zeros = max(seen.loc[t, "zero_share"] for t in lattices)
outside = [t for t in lattices if seen.loc[t, "excess"] > allowed[t]]
Markdown(
    f"**Measured**: {', '.join(outside) + ' outside' if outside else 'all inside'} the bound plus the tolerance. "
    f"**Published**, {reference}: the maxima exceed the bound by {least} to {most} nats. In ours the lattice is "
    "computed in float64 from float32 scores and only the weight is rounded, so that an excess is the rounding of one "
    "float32. Such a weight loses digits below 2⁻¹²⁶ and vanishes below 2⁻¹⁴⁹: "
    f"{report.number(100 * zeros)} % of the entries, at most, have weight zero for that reason and are left out."
)

# %% [markdown]
# (rowmax-pot)=
# ## How far down must the lattice go?

# %% tags=["hide-input"] mystnb={"figure": {"name": "fig-clamp", "caption": "Perplexity increase of the octave lattice at the row maximum against its largest exponent, with the tail clamped to the smallest weight or dropped. Filled: measured here, 95 % intervals. Hollow: published (D.5), no intervals printed."}, "image": {"alt": "Line plot: perplexity increase in percent against the largest exponent from 12 to 48, one line with the tail clamped and one with it dropped, for our model with intervals and for the paper's reference model."}}
tails = {"clamp": "tail clamped", "drop": "tail dropped"}
texts = {(tail, k): str(operators.RowmaxPoT(K_max=k, tail=tail)) for tail in tails for k in conditions.CLAMPS}
clamped = {key: statistics.delta_nll(losses, text) for key, text in texts.items()}
measured = report.points(
    clamped.values(),
    report.percent,
    series=[tails[tail] for tail, _ in clamped],
    K_max=[k for _, k in clamped],
)
printed = report.published_rows("d5_pot_clamp", model=reference)
printed = printed.assign(series=printed["tail"].map(tails), K_max=printed["K_max"].astype(float))
figures_distortion.clamp_sweep(measured, printed, model=name, reference=reference)

# %% tags=["hide-input"]
clamp_rows = [
    (
        f"{tails[tail]}, K_max = {k}",
        estimate,
        report.published("d5_pot_clamp", model=reference, tail=tail, K_max=k, metric="ppl_change"),
    )
    for (tail, k), estimate in clamped.items()
]
clamp_floors = [report.floor_of([text], floors) for text in texts.values()]
report.beside(
    clamp_rows,
    what="Rowmax-PoT",
    ours=name,
    theirs=reference,
    caption="Perplexity increase in percent, by largest exponent and tail.",
    transform=report.percent,
    floors=clamp_floors,
)

# %% tags=["hide-input"]
shallow, deep = conditions.CLAMPS[0], conditions.CLAMPS[-1]
tail_costs = [
    (
        f"clamped minus dropped, K_max = {k}",
        statistics.contrast(losses, texts["clamp", k], texts["drop", k]),
        None,
    )
    for k in conditions.CLAMPS
]
tail_floors = [report.floor_of([texts["clamp", k], texts["drop", k]], floors) for k in conditions.CLAMPS]
first, last = (e for label, e, _ in (tail_costs[0], tail_costs[-1]))
Markdown(
    f"What the clamp itself costs, clamped minus dropped: {report.interval(first)} nats at K_max = {shallow}, "
    f"{report.interval(last)} at {deep}. {report.floor_note(tail_costs, tail_floors)}"
)

# %% [markdown]
# A clamp gives every far key the weight $2^{-K_{\max}}$. There can be thousands of them in a row, and together they
# weigh up to $n\,2^{-K_{\max}}$, against a row sum of at least one: for a small $K_{\max}$ and a long row that is mass
# where softmax has almost none. Dropping the tail leaves those keys out instead, at the error of the mass they had.

# %% [markdown]
# ### One setting, model by model
#
# $K_{\max} = 20$ in the paper's ten models, and in the model of this page in a panel of its own.

# %% tags=["hide-input"] mystnb={"figure": {"name": "fig-rowmax-models", "caption": "Perplexity increase of Rowmax-PoT at K_max = 20, tail clamped. Upper panel: the paper's ten models, published (Table 3, no intervals printed). Lower panel: measured here, 95 % interval. The dotted line is 1 %. Counterpart of the paper's Figure S7."}, "image": {"alt": "Dot plot: published perplexity increases of ten models sorted by size in the upper panel, and our measured model with its interval in the lower panel, with a reference line at one percent."}}
ten = report.published_rows("table3_cross_model", condition="rowmax_pot_Kmax20", metric="ppl_change")
figures.across_models(
    ten.astype({"params_b": float}),
    report.points([clamped["clamp", 20]], report.percent, model=[name]),
    limit=1.0,
)

# %% tags=["hide-input"]
common = clamped["clamp", 20]
_, low, high = common.ppl_change
place = "below" if high < 1 else "above" if low > 1 else "not resolved against"
Markdown(
    f"**Measured**: {report.interval(common, report.percent)} %, {place} 1 %. **Published**: "
    f"{int((ten['value'] < 1).sum())} of {len(ten)} models below 1 % as point estimates."
)

# %% [markdown]
# (floor)=
# ## The reproducibility floor
#
# Two correct programs for the same operator need not give the same loss. Sums are taken in another order, a product
# has another last digit {cite:p}`goldberg1991floating`. With softmax, weights move by as little as the scores did.
# A grid or a lattice is different: where a score lies near the boundary of two levels, the last digit decides the
# level, the weight jumps by a whole step, and the layers above carry the jump on. Such flips can go either way,
# block by block.
#
# The spread of such flips over blocks is in the bootstrap interval already. What blocks of one program cannot show is
# whether another program has another **mean**. So we measure it: one condition of each family, on the same blocks, by
# three implementations that are equal to the reference on paper.

# %% tags=["hide-input"]
report.table(
    pd.DataFrame(
        list(floor.VARIANTS.items()), columns=["implementation", "what differs from the reference"]
    ).set_index(["implementation", "what differs from the reference"]),
    "The implementations. The first applies to grids alone.",
)

# %% tags=["hide-input"] mystnb={"figure": {"name": "fig-floor", "caption": "Difference of ΔNLL between an equivalent implementation and the reference, on the same blocks. Left: its standard deviation over blocks. Right: its mean, absolute value. Measured; no counterpart in the paper."}, "image": {"alt": "Two dot plots on logarithmic axes with one line an operator and one marker an implementation: on the left the standard deviation over blocks, on the right the absolute mean difference, both in nats."}}
figures_distortion.floor_spread(differences)

# %% tags=["hide-input"]
report.table(
    pd.DataFrame(
        {
            "mean (nats)": differences["mean"].map(report.number),
            "sd over blocks (nats)": differences["sd"].map(report.number),
            "largest of a block (nats)": differences["max"].map(report.number),
            "mean resolved": differences["resolved"],
        }
    ).set_index(
        pd.MultiIndex.from_arrays(
            [
                differences["condition"] + ": " + differences["family"],
                differences["variant"].str.removeprefix("reference-"),
            ],
            names=["condition: family", "variant"],
        )
    ),
    f"ΔNLL of equivalent implementations minus that of the reference, {name}, measured.",
)

# %% tags=["hide-input"]
stepped = differences[differences["family"] != "smooth"]
error = (stepped["sd"] / stepped["n_blocks"] ** 0.5).max()
fused = [
    check
    for check in backend_check.checks(
        cross_model.every(results, context=context, corpus=corpus, only=name),
        results,
        corpus=corpora.corpus_name(corpus),
        bos="stream",
    )
    if check.dtype == dtype
]
Markdown(
    f"Of {len(stepped)} differences with steps, {(stepped['resolved'] != 'unresolved').sum()} have a mean that is resolved "
    f"from zero; their standard errors are up to {report.number(error, 2)} nats. "
    + "".join(
        f"The fused backend, a program of its own, was held to the reference in the same way under {len(check.found)} "
        f"conditions on {check.blocks} blocks: its means differ by up to {report.number(check.found['mean'].abs().max(), 2)} nats, "
        f"{(check.found['resolved'] != 'unresolved').sum()} resolved. "
        for check in fused
    )
)

# %% [markdown]
# The **floor** of a family is the largest absolute mean difference that any of the three implementations shows in it.
# The floor of a contrast is the sum over its conditions. An effect is *below the floor* if it is smaller in size. A
# family that is not among the measured ones takes the largest floor of all: supports, rescue, temperatures far from 1
# (*smooth* was measured at $S$ and at $\alpha = 0.9$), and lattices of other spacings than those.

# %% tags=["hide-input"]
report.table(
    pd.DataFrame(
        {
            "floor (nats)": [report.number(v) for v in floors],
            "floor (% perplexity)": [report.number(report.percent(v)) for v in floors],
        },
        index=pd.Index([{"any": "any other"}.get(family, family) for family in floors.index], name="family"),
    ),
    f"The floor of each family, {name}, measured.",
)

# %% [markdown]
# A floor is an estimate of a mean that is itself mostly noise, from three implementations on one machine, and no bound:
# {ref}`models-backends` has programs that lie further apart. It is a reason to doubt an effect below it, and no proof of
# one above it.

# %% [markdown]
# ### Which effects of this book lie below it?
#
# All conditions of {ref}`support`, {ref}`allocation`, {ref}`response-map` and this page, against softmax; the
# same-support contrast at each layer; the allocation contrasts. The matched contrasts and those of rescue are
# marked where they stand ({ref}`matched`, {ref}`rescue`).

# %% tags=["hide-input"]
effects = [
    (section, text, statistics.delta_nll(losses, text), report.floor_of([text], floors))
    for section in sections
    for text in conditions.named(section)
    if text != conditions.BASELINE
]
effects += [
    ("same support, by layer", f"layer {i}", statistics.contrast(losses, *pair), report.floor_of(pair, floors))
    for i, pair in enumerate(one_layer)
]
effects += [
    (
        "allocation contrasts",
        f"D_R({K})",
        statistics.contrast(losses, *conditions.allocation_contrast(K)),
        report.floor_of(conditions.allocation_contrast(K), floors),
    )
    for K in (16, 21, 32)
]
effects.append(
    (
        "allocation contrasts",
        "I_R",
        statistics.combination(losses, endpoints.interaction()),
        report.floor_of(endpoints.interaction(), floors),
    )
)
effects = pd.DataFrame(effects, columns=["section", "effect", "estimate", "floor"])
effects["resolved"] = [e.resolved != "unresolved" for e in effects["estimate"]]
effects["unresolved"] = ~effects["resolved"]
effects["below"] = [floor.below(e.mean, limit) for e, limit in zip(effects["estimate"], effects["floor"])]
effects["resolved, yet below"] = effects["resolved"] & effects["below"]
counted = effects.groupby("section", sort=False)[["unresolved", "below", "resolved, yet below"]].sum()
counted.insert(0, "effects", effects["section"].value_counts())
report.table(
    counted.rename(columns={"below": "below the floor"}),
    f"Effects of {name} against the floor, measured. A condition may occur in more than one section.",
)

# %% tags=["hide-input"]
low = effects[effects["below"]].drop_duplicates("effect")
listed = report.table(
    pd.DataFrame(
        {
            "effect (nats)": [report.interval(e) for e in low["estimate"]],
            "resolved": [e.resolved for e in low["estimate"]],
            "floor (nats)": [report.number(v) for v in low["floor"]],
        }
    ).set_index(pd.MultiIndex.from_frame(low[["section", "effect"]])),
    f"Every effect below its floor, {name}, measured, 95 % intervals.",
)
listed if len(low) else Markdown("No effect is below its floor.")

# %% [markdown]
# (pot-discrepancy)=
# ### The paper's two values for one lattice
#
# The paper prints the loss of the octave lattice twice: as `pot(m=1)` in Table B1 and as Rowmax-PoT with
# $K_{\max} = 48$ in D.5. By definition they differ only in keys below $2^{-48}$ of the row maximum, whose
# clamped weights are together at most $n\,2^{-48}$ of the row sum.

# %% tags=["hide-input"]
without = paper.value("tableB1_anchor_resolution", condition="pot_m1", metric="dnll")
with_clamp = paper.value("d5_pot_clamp", tail="clamp", K_max=48, metric="ppl_change")
gap = math.log1p(with_clamp.value / 100) - without.value
ours = statistics.contrast(losses, texts["clamp", 48], "pot(m=1)")
equal = int((ours.per_block == 0).sum())
octave = floor.of("pot(m=1)", floors)
spread = differences[differences["condition"] == "pot(m=1)"]["sd"].max()
error = spread / ours.n_blocks**0.5
apart = gap / error
likely = (
    "about what two equivalent programs may differ by, if flips in the paper's model are as large as here"
    if apart < 2
    else "more than two equivalent programs would differ by here"
)
Markdown(
    f"- **Published**: {without} nats, {report.number(report.percent(without.value))} %, against {with_clamp} %. The "
    f"difference is {report.number(gap)} nats.\n"
    f"- **By definition**: at most {context} · 2⁻⁴⁸ = {report.number(context * 2.0**-48)} of a row's mass can move.\n"
    f"- **Measured**, same implementation: K_max = 48 minus pot(m=1) is {report.interval(ours)} nats; {equal} of "
    f"{ours.n_blocks} blocks have exactly equal losses.\n"
    f"- **Measured**, equivalent implementations of pot(m=1): means up to {report.number(octave)} nats apart, standard "
    f"deviation over blocks up to {report.number(spread)} nats, so that a mean over {ours.n_blocks} has a standard error "
    f"of {report.number(error)}.\n\n"
    f"The published difference is **{report.number(apart, 2)} such standard errors**: {likely}."
)

# %% [markdown]
# By its size the clamp cannot make the difference: at most it changes a last digit somewhere, and what last digits can
# do is in the standard error above. The two values stand in different parts of the paper and may come from different
# programs, but it does not say. The same reading applies to the last digits of its clamp sweep at large $K_{\max}$,
# where the operator hardly changes while the printed values do.

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
            ("Reconstruction", rule_rows),
            ("Powers of two", pot_rows),
            ("Rowmax-PoT", clamp_rows),
        )
    )
)

# %% [markdown]
# ## What this page does not show
#
# - **No best reconstruction.** One grid, one order. Interpolation needs the place inside the interval, which is
#   more to store and to compute than a level.
# - **No cost.** A power of two is cheap to write down; whether a kernel gains by it is another question. Nothing on
#   this page is about time, energy or bits.
# - **No best exponent.** The $K_{\max}$ are the paper's settings.
# - **The share of mass within a distance of the maximum**, which D.5 prints for one lattice, is not measured here.
# - **A floor from one machine.** Implementations are compared on the same device; a stored result of this page and
#   one of another device can differ by more.
# - **Not the paper's reference model, by default.** Re-run the page with `-p model qwen2.5-1.5b` to compare like
#   with like.
