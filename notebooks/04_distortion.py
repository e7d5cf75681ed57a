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
# (distortion)=
# # Distortion and loss
#
# An approximation changes the rows of attention. Put one number on the change, say its mean divergence from
# softmax: does that number determine the loss? This chapter asks it in two steps.
#
# 1. **Does it track the loss** over many interventions of different kinds?
# 2. **Does it fix the loss?** Two interventions are tuned to the same number, one that flattens the rows and one
#    that sharpens them. If the number were all that counts, their losses would be equal.
#
# Then it looks at what differs between the two directions: which way mass moves, what the local output makes of
# it, and what happens to the difference when the mass is put back.
#
# It follows §4.3 and appendices A.7, A.8, D.3 and D.4 of {cite:t}`zhu2026softmax`: Figure 3, Figures S5 and S6, and
# Tables C1, D2 and D3.

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
from functools import partial

import pandas as pd
from IPython.display import Markdown

from softmaxlab import (
    conditions,
    divergence,
    endpoints,
    evaluate,
    figures,
    figures_distortion,
    floor,
    matching,
    models,
    paper,
    report,
    response,
    statistics,
    trajectory,
)

figures.style()

# %% [markdown]
# ## The definitions
#
# **Divergence.** A row $p$ of softmax and what an operator makes of it, $\hat p$, differ by the Jensen–Shannon
# divergence {cite:p}`lin1991divergence` or by total variation,
#
# $$
# \begin{aligned}
# \mathrm{JSD}(p,\hat p) &= \tfrac12\,\mathrm{KL}(p\,\|\,m) + \tfrac12\,\mathrm{KL}(\hat p\,\|\,m),
# \quad m = \tfrac12(p+\hat p), \\
# \mathrm{TV}(p,\hat p) &= \tfrac12\sum_{j\in\mathcal V}|p_j-\hat p_j| ,
# \end{aligned}
# $$ (eq-jsd)
#
# in nats for the first. Both are averaged over the rows of all heads and layers, on the first blocks of the text,
# **along the path of exact softmax**: $p$ and $\hat p$ come from the same scores, and the model goes on with $p$.
#
# **Matched distortion.** The yardstick is $J_0$, the mean JSD of the octave lattice `pot(m=1)`
# ({ref}`reconstruction`). A temperature $A(\alpha)$ gives $\hat p_j \propto e^{\alpha s_j}$: flatter than softmax for
# $\alpha < 1$ ($A^-$), sharper for $\alpha > 1$ ($A^+$). For a level $J$, both $\alpha$ are solved so that the mean JSD
# is $J$; then
#
# $$
# D_T(J) = \mathbb E_b\!\left[\Delta\mathrm{NLL}_{b,A^-(J)} - \Delta\mathrm{NLL}_{b,A^+(J)}\right]
# $$ (eq-dt)
#
# is positive where flattening costs more. $D_{TV}$ is the same with TV matched in place of JSD. $D_T(J_0)$ and
# $D_T(10J_0)$ are primary endpoints of the paper (A.9).
#
# **Mass restoration.** $\mathcal S_q$ is the smallest set of keys that holds the mass $q$, and leakage $L_q$ the
# mass an operator moves out of it {eq}`eq-leakage`. Rescue scales the operator's probabilities inside $\mathcal
# S_{0.9}$ and outside it so that both sides have the mass that softmax gives them; proportions inside each side
# stay. $D_{\mathrm{rescue}}$ is $D_T$ of the rescued pair, and
#
# $$
# G_{\mathrm{gap}}(J) = D_T(J) - D_{\mathrm{rescue}}(J)
# $$ (eq-gap)
#
# is taken inside each block. $G_{\mathrm{gap}}(10J_0)$ is a primary endpoint too. It is a **signed** change: a
# positive value is not a smaller gap if $D_{\mathrm{rescue}}$ ends up on the other side of zero.

# %% [markdown]
# ## The run
#
# First the temperatures are solved, several in each pass over the text. Then losses and path measurements are read,
# or computed where they are missing.

# %%
run = {
    "model": model,
    "corpus": corpus,
    "context": context,
    "dtype": dtype,
    "device": device,
    "results": results,
}
windows = endpoints.windows(context, blocks)
solutions = matching.solve(windows=windows, **run)
pairs = endpoints.matched_pairs(solutions)
rescued = {level: endpoints.restored(pairs["jsd", level]) for level in (1.0, 10.0) if ("jsd", level) in pairs}

listed = conditions.response_map()
mapped = listed[: interventions or None]
matched = [text for pair in pairs.values() for text in pair]
losses = evaluate.losses(
    [conditions.BASELINE, *mapped, *matched, *(text for pair in rescued.values() for text in pair)],
    blocks=blocks,
    **run,
)
path = trajectory.measure([*mapped, *matched], windows=windows, **run)
floors = floor.floors(floor.differences(partial(evaluate.losses, blocks=blocks, **run)))

# %% tags=["hide-input"]
name = models.resolve(model).name
reference = report.published_model(name, "d3_response_map")
own = report.published_model(name, "tableD2_matched")
levels = {1.0: ("J₀", "J0"), 3.0: ("3 J₀", "3J0"), 10.0: ("10 J₀", "10J0")}
seen = path.summary().set_index("operator")
Markdown(
    report.setting(name, losses, reference)
    + f" Divergences and leakage are of the first {endpoints.n_windows(path, context):,} blocks."
)

# %% [markdown]
# Every loss, divergence and leakage below is **measured**. Columns and markers of the paper are **published**
# numbers. The column `floor` compares an effect with what equivalent implementations differ by ({ref}`floor`).

# %% [markdown]
# (response-map)=
# ## Does divergence track the loss?
#
# {numref}`fig-response` puts interventions of four kinds on one map: grids over $K$, $R$ and reconstruction,
# power-of-two lattices, flattenings and sharpenings. The paper names these four kinds and their number but not the list; **the
# list is ours** and is printed below. The line is least squares on the logarithms, so an intervention whose
# estimate is not positive cannot enter it; it is named.

# %% tags=["hide-input"] mystnb={"figure": {"name": "fig-response", "caption": "Loss increase against mean row-wise JSD, one point an intervention. Markers tell the four kinds apart. Solid: our least-squares fit on the logarithms. Dashed: the published fit (D.3), whose points are not printed. Points, measured; no intervals drawn. Counterpart of the paper's Figure 3A."}, "image": {"alt": "Scatter plot on logarithmic axes: loss increase in nats against mean Jensen-Shannon divergence in nats for grids, lattices, flattenings and sharpenings of our model, with our fitted line and the published one."}}
table = statistics.summary(losses, mapped).set_index("condition")
table["jsd"] = seen["jsd"].loc[mapped]
table["kind"] = [endpoints.kind(text) for text in mapped]
fit = response.fit(table.reset_index())
printed = {
    metric: report.published("d3_response_map", model=reference, metric=metric)
    for metric in ("slope", "intercept", "r2", "n_interventions")
}
paper_fit = response.Fit(
    printed["slope"].value,
    printed["intercept"].value,
    printed["r2"].value,
    int(printed["n_interventions"].value),
    (),
)
figures_distortion.response_map(
    table.rename(columns={"dnll": "value"}), fit, paper_fit, model=name, reference=reference
)

# %% tags=["hide-input"]
fit_rows = [
    ("slope", fit.slope, printed["slope"]),
    ("intercept (natural logarithm)", fit.intercept, printed["intercept"]),
    ("R²", fit.r2, printed["r2"]),
    ("interventions in the fit", str(fit.n), printed["n_interventions"]),
]
report.values(
    fit_rows,
    what="log ΔNLL on log JSD",
    ours=name,
    theirs=reference,
    caption="The fit over the interventions, in sample.",
)

# %% tags=["hide-input"]
absent = sorted({endpoints.kind(t) for t in listed} - set(table["kind"]))
low = [t for t in mapped if floor.below(table.loc[t, "dnll"], floor.of(t, floors))]
excluded = (
    f"Left out of the fit, {len(fit.excluded)}: {', '.join(fit.excluded)}."
    if fit.excluded
    else "None is left out."
)
Markdown(
    f"The map holds {len(mapped)} of the {len(listed)} interventions of the list"
    + (f", and none yet of: {', '.join(absent)}. " if absent else ". ")
    + f"{excluded} Below the floor, {len(low)} of {len(mapped)}{': ' + ', '.join(low) if low else ''}. "
    f"Unresolved, {int((table['resolved'] == 'unresolved').sum())} of {len(mapped)}."
)

# %% tags=["hide-input", "hide-output"]
report.table(
    pd.DataFrame(
        {
            "JSD (nats)": table["jsd"].map(report.number).tolist(),
            "ΔNLL (nats)": [report.interval(statistics.delta_nll(losses, t)) for t in mapped],
            "floor": [report.against_floor(table.loc[t, "dnll"], floor.of(t, floors)) for t in mapped],
        },
        index=pd.MultiIndex.from_arrays([table["kind"], mapped], names=["kind", "intervention"]),
    ),
    "All interventions of the map, measured, 95 % intervals.",
)

# %% [markdown]
# A high $R^2$ over decades still leaves room: at one divergence the losses differ by a factor of several, and the fit
# cannot say whether that spread is noise or a property of the kind. The next section holds the divergence and asks.

# %% [markdown]
# (matched)=
# ## The same divergence, two directions
#
# The temperatures, and how well they hit. A target that a direction cannot reach, because even a uniform or a
# one-hot row does not diverge that far on average, has no temperature; its row says how far it can go.

# %% tags=["hide-input"]
shown = solutions.assign(
    target=solutions["target"].map(report.number),
    achieved=solutions["achieved"].map(report.number),
    error=[report.number(100 * e) for e in solutions["error"]],
    alpha=[report.number(a, 5) for a in solutions["alpha"]],
    limit=solutions["limit"].map(report.number),
    level=[f"{level:g}" for level in solutions["level"]],
    metric=solutions["metric"].str.upper(),
)
report.table(
    shown.rename(columns={"alpha": "α", "error": "error (%)", "limit": "largest possible"}).set_index(
        ["metric", "level", "direction"]
    )[["target", "achieved", "error (%)", "α", "passes", "largest possible", "status"]],
    f"Temperatures of {name}, measured. Level in units of what pot(m=1) causes, JSD in nats.",
)

# %% tags=["hide-input"]
c1 = paper.table("tableC1_matched")
c1 = c1[c1["condition"] != "all"].astype({"context": int})
c1["column"] = (
    c1["condition"].replace({"pot_m1": "pot(m=1)"})
    + ", "
    + c1["metric"].replace({"rel_err": "error (%)", "achieved_jsd": "achieved"})
)
order = [
    "pot(m=1), J0",
    *(f"{side}, {what}" for side in ("flatten", "sharpen") for what in ("achieved", "error (%)")),
]
report.table(
    c1.pivot(index=["model", "context"], columns="column", values="value")[order].rename_axis(columns=None),
    "The matches that the paper prints, published (Table C1), JSD in nats.",
)

# %% tags=["hide-input"]
worst = solutions.loc[solutions["error"].idxmax()] if solutions["error"].notna().any() else None
unreached = solutions[solutions["status"] == "out of reach"]
Markdown(
    (
        f"Largest relative error of a match here: {report.number(100 * worst['error'])} %. "
        if worst is not None
        else ""
    )
    + f"Largest in Table C1: {c1.loc[c1['metric'] == 'rel_err', 'value'].max()} %. "
    + (
        f"Out of reach here, {len(unreached)} of {len(solutions)}."
        if len(unreached)
        else "All targets are in reach."
    )
    + f" {len(pairs)} pairs have both directions within 1 %."
)

# %% [markdown]
# Now the losses. First each side by itself, then the paired contrast.

# %% tags=["hide-input"]
sides = [
    (metric.upper(), f"{level:g}", direction, report.interval(statistics.delta_nll(losses, text)))
    for (metric, level), pair in pairs.items()
    for direction, text in zip(("flattening", "sharpening"), pair)
]
report.table(
    pd.DataFrame(sides, columns=["matched", "level", "direction", "ΔNLL (nats)"]).set_index(
        ["matched", "level", "direction"]
    ),
    f"Loss increase of the matched temperatures, {name}, measured, 95 % intervals.",
)

# %% tags=["hide-input"] mystnb={"figure": {"name": "fig-dt", "caption": "Loss of flattening minus loss of sharpening at the same mean JSD; right of zero, flattening costs more. Upper panels: published (Table D2; at 3 J₀ the paper prints one model). Lower panels: measured here. 95 % intervals. Axes are linear around zero and logarithmic further out where values span decades. Counterpart of the paper's Figure 3B."}, "image": {"alt": "Three dot plots with intervals, one for each level of matched divergence: the contrast D_T in nats of ten published models above and of our measured model below, with a line at zero."}}
found = {
    level: statistics.contrast(losses, *pairs["jsd", level]) for level in levels if ("jsd", level) in pairs
}
panels = {
    f"$J = {title.replace('₀', '_0').replace(' ', chr(92) + ',')}$": (
        report.published_rows("tableD2_matched", metric="D_T", level=key),
        report.points([found[level]] if level in found else [], model=[name] if level in found else []),
    )
    for level, (title, key) in levels.items()
}
figures_distortion.forest(panels, xlabel="$D_T$ (nats)")

# %% tags=["hide-input"]
contrast_rows, contrast_floors = [], []
for metric, symbol in (("jsd", "D_T"), ("tv", "D_TV")):
    for level, (title, key) in levels.items():
        if (metric, level) not in pairs:
            continue
        # The paper prints D_TV at "10J0" and not its TV there; ten times TV₀ is another target, so nothing is beside.
        same = metric == "jsd" or level == 1
        value = report.published("tableD2_matched", model=own, metric=symbol, level=key) if same else None
        label = f"{symbol}({title if metric == 'jsd' else title.replace('J', 'TV')})"
        contrast_rows.append((label, statistics.contrast(losses, *pairs[metric, level]), value))
        contrast_floors.append(report.floor_of(pairs[metric, level], floors))
report.beside(
    contrast_rows,
    what="contrast (nats)",
    ours=name,
    theirs=own,
    caption="Flattening minus sharpening at matched distortion, nats per token. TV₀ is the mean TV of pot(m=1).",
    floors=contrast_floors,
)

# %% tags=["hide-input"]
states = {"positive": "pos", "negative": "neg", "unresolved": "no"}
published_states = []
for key in ("J0", "10J0"):
    rows = report.published_rows("tableD2_matched", metric="D_T", level=key)
    counts = ", ".join(f"{int((rows['resolved'] == code).sum())} {word}" for word, code in states.items())
    published_states.append(f"at {key.replace('J0', ' J₀').strip()} {counts}")
Markdown(
    "**Measured**: "
    + ("; ".join(f"{label} is {e.resolved}" for label, e, _ in contrast_rows) or "no level has both directions")
    + f". **Published**, ten models, D_T: {'; '.join(published_states)}. "
    + report.floor_note(contrast_rows, contrast_floors)
)

# %% [markdown]
# The paper prints a second $D_{TV}$, at "10 J₀", without its total variation. TV grows about as the root of JSD, so at
# ten times $J_0$ it is about three times TV₀; ten times TV₀, here, is near the most that either direction can reach. The
# two are not set beside each other.
#
# Wherever $D_T$ is resolved and above its floor, two interventions with one and the same mean divergence have
# different losses: the scalar does not determine the loss. A match is exact only to its error, and where loss grows
# in proportion to divergence that error moves a side's $\Delta\mathrm{NLL}$ by the same share, which the table
# above lets one compare. Where $D_T$ is unresolved, nothing is shown either way. The paper finds both signs among
# its models.

# %% [markdown]
# (leakage)=
# ## Which way the mass moves
#
# Matching fixes how far a row moves, not where to. The left panel of {numref}`fig-redistribution` shows how much
# mass leaves $\mathcal S_{0.9}$; the right panel how much the output $pV$ of a head changes, as a relative root
# mean square before the output projection, per layer and averaged over layers.

# %% tags=["hide-input"] mystnb={"figure": {"name": "fig-redistribution", "caption": "Matched flattening (▼) and sharpening (▲). Left: mass that leaves the smallest set holding 90 %; below zero, mass moves in. Right: relative change of the local output. Markers: measured here, no intervals. Bars: published range over ten models (D.4). Counterpart of the paper's Figures S6A and S6B."}, "image": {"alt": "Two line plots over the matched levels: on the left leakage of the two directions with published ranges as bars, on the right the relative change of the local output for the two directions."}}
words = {"flatten": "flattening", "sharpen": "sharpening"}
by_direction = [
    (levels[level][0], direction, text)
    for (metric, level), pair in pairs.items()
    if metric == "jsd"
    for direction, text in zip(words.values(), pair)
]
redistribution = pd.DataFrame(by_direction, columns=["level", "direction", "operator"])
redistribution = redistribution.assign(
    leakage=[seen.loc[t, "leakage_0.9"] for t in redistribution["operator"]],
    change=[seen.loc[t, "output_change"] for t in redistribution["operator"]],
)
ranges = report.published_rows("d4_leakage", model="ten_models", metric="leakage_S0.9")
ranges = ranges.pivot(index=["level", "condition"], columns="stat", values="value").reset_index()
ranges = ranges.rename(columns={"min": "low", "max": "high"}).assign(
    direction=lambda t: t["condition"].map(words),
    level=lambda t: t["level"].map({key: title for title, key in levels.values()}),
)
figures_distortion.redistribution(
    redistribution.assign(value=redistribution["leakage"]),
    ranges,
    redistribution.assign(value=redistribution["change"]),
    model=name,
)

# %% tags=["hide-input"]
leakage_rows = []
for row in redistribution.itertuples():
    side = next(key for key, word in words.items() if word == row.direction)
    level = next(key for title, key in levels.values() if title == row.level)
    low, high = (
        report.published("d4_leakage", model="ten_models", condition=side, level=level, stat=end)
        for end in ("min", "max")
    )
    leakage_rows.append(
        (f"{row.direction}, {row.level}, q = 0.9", row.leakage, f"{low} to {high}" if low else None)
    )
for row in redistribution.itertuples():
    leakage_rows += [
        (f"{row.direction}, {row.level}, q = {q:g}", seen.loc[row.operator, f"leakage_{q}"], None)
        for q in divergence.LEAKAGE_Q
        if q != 0.9
    ]
report.values(
    leakage_rows,
    what="leakage (mass)",
    ours=name,
    theirs="range over ten models",
    caption="Mass that leaves the smallest set holding q of it; negative, mass moves in. No intervals.",
)

# %% tags=["hide-input"]
signs = {
    direction: set((redistribution[redistribution["direction"] == direction]["leakage"] > 0).tolist())
    for direction in words.values()
}
said = {frozenset({True}): "positive at every level", frozenset({False}): "negative at every level"}
out = [
    f"{d} leakage is {said.get(frozenset(s), 'not of one sign' if s else 'not measured')}"
    for d, s in signs.items()
]
Markdown(
    f"**Measured**: {' and '.join(out)}. **Published**: flattening moves mass out and sharpening moves it in, in all "
    f"ten models. The paper's leakage covers {report.published('d4_leakage', metric='blocks_used')} blocks; ours "
    f"covers the divergence windows, {endpoints.n_windows(path, context)} blocks."
)

# %% [markdown]
# If the two directions leak with opposite signs whatever the sign of $D_T$, the direction of the leakage does not
# decide which of them loses more. The local output is a control in the same sense. The paper prints two values a
# model for it without the level; which of the two is flattening is read off the order in which they stand.

# %% tags=["hide-input"]
change_rows = []
for level, (title, _) in levels.items():
    mine = redistribution[redistribution["level"] == title].set_index("direction")["change"]
    if mine.empty:
        continue
    change_rows += [(f"{direction}, {title}", value, None) for direction, value in mine.items()]
    relative = 100 * abs(mine["flattening"] - mine["sharpening"]) / mine.min()
    median, most = (
        report.published("d4_pv", condition="abs_diff_over_smaller", level=levels[level][1], stat=stat)
        for stat in ("median", "max")
    )
    printed_range = f"median {median}, at most {most}, ten models" if median else None
    change_rows.append((f"difference over the smaller, {title} (%)", relative, printed_range))
pv_model = report.published_model(name, "d4_pv")
change_rows += [
    (
        f"{pv_model}, {words[side]}, level not stated",
        None,
        report.published("d4_pv", model=pv_model, condition=side),
    )
    for side in words
]
report.values(
    change_rows,
    what="relative change of pV",
    ours=name,
    theirs="as said",
    caption="Relative RMS change of the local output pV, mean over layers. No intervals.",
)

# %% [markdown]
# By layer, the two directions at $J_0$ (or at the lowest level that both reach): the mean hides how unevenly the
# output changes.

# %% tags=["hide-input"] mystnb={"figure": {"name": "fig-output-layers", "caption": "Relative RMS change of the local output pV by layer, matched flattening and sharpening at the lowest matched level. Measured, no intervals. The paper shows the local output in its Figures S5 and S6B; its values by layer are not printed."}, "image": {"alt": "Line plot over layers: relative change of the local output for flattening and for sharpening."}}
layers = path.by_layer()
lowest = redistribution["level"].iloc[0] if len(redistribution) else None
chosen = redistribution[redistribution["level"] == lowest]
per_layer = layers.merge(chosen[["operator", "direction"]], on="operator")
figures_distortion.by_layer(
    per_layer.assign(value=per_layer["output_change"])[["direction", "layer", "value"]],
    ylabel="relative RMS change of $pV$",
    model=name,
)

# %% [markdown]
# (rescue)=
# ## Putting the mass back
#
# Rescue restores what softmax has inside $\mathcal S_{0.9}$ and outside it, at each layer, from the scores of the
# run in progress. If the split of mass were the whole difference between the directions, $D_{\mathrm{rescue}}$
# would be zero.

# %% tags=["hide-input"] mystnb={"figure": {"name": "fig-rescue", "caption": "At 10 J₀: the contrast, the contrast with the mass of the two sets restored, and the signed change. Upper panels: published (Tables D2, D3). Lower panels: measured here. 95 % intervals. Axes are linear around zero and logarithmic further out where values span decades. Counterpart of the paper's Figure S6C."}, "image": {"alt": "Three dot plots with intervals at ten times J0: the contrast D_T, the contrast after rescue, and their difference G_gap, for ten published models above and our measured model below."}}
gaps = {
    level: {
        "D_T": found[level],
        "D_rescue": statistics.contrast(losses, *pair),
        "G_gap": statistics.combination(losses, endpoints.gap(pairs["jsd", level])),
    }
    for level, pair in rescued.items()
}
symbols = {"D_T": "$D_T$", "D_rescue": r"$D_{\mathrm{rescue}}$", "G_gap": r"$G_{\mathrm{gap}}$"}
tables = {"D_T": "tableD2_matched", "D_rescue": "tableD3_rescue", "G_gap": "tableD3_rescue"}
mine = gaps.get(10.0, {})
figures_distortion.forest(
    {
        f"{symbol}, $10\\,J_0$": (
            report.published_rows(tables[metric], metric=metric, level="10J0"),
            report.points([mine[metric]] if mine else [], model=[name] if mine else []),
        )
        for metric, symbol in symbols.items()
    },
    xlabel="nats",
)

# %% tags=["hide-input"]
gap_rows, gap_floors = [], []
for level, three in gaps.items():
    title, key = levels[level]
    for metric, estimate in three.items():
        value = report.published(tables[metric], model=own, metric=metric, level=key)
        gap_rows.append((f"{metric}({title})", estimate, value))
    plain, after, change = pairs["jsd", level], rescued[level], endpoints.gap(pairs["jsd", level])
    gap_floors += [report.floor_of(weights, floors) for weights in (plain, after, change)]
report.beside(
    gap_rows,
    what="contrast (nats)",
    ours=name,
    theirs=own,
    caption="Before and after rescue, nats per token; G_gap is a paired difference inside each block.",
    floors=gap_floors,
)

# %% tags=["hide-input"]
outcomes = []
for level, three in gaps.items():
    before, after = (abs(three[m].mean) for m in ("D_T", "D_rescue"))
    outcomes.append(
        f"At {levels[level][0]} the gap is {'smaller' if after < before else 'not smaller'} in size after rescue, and "
        f"G_gap is {three['G_gap'].resolved}."
    )
ten = report.published_rows("tableD3_rescue", metric="G_gap", level="10J0")
rest = report.published_rows("tableD3_rescue", metric="D_rescue", level="10J0")
Markdown(
    f"**Measured**: {' '.join(outcomes) or 'no level has both directions.'} **Published**, at 10 J₀: G_gap above "
    f"zero in {int((ten['low'] > 0).sum())} of {len(ten)} models; D_rescue resolved positive in "
    f"{int((rest['resolved'] == 'pos').sum())}, negative in {int((rest['resolved'] == 'neg').sum())}, unresolved in "
    f"{int((rest['resolved'] == 'no').sum())}. {report.floor_note(gap_rows, gap_floors)}"
)

# %% [markdown]
# Rescue is a diagnostic, not a repair. It changes more than the one thing it is named after: the mass split of the
# later layers follows their own, changed scores.

# %% [markdown]
# ## What agrees, and what does not
#
# Only signs are compared, and only where our interval excludes zero.

# %% tags=["hide-input"]
Markdown(
    "\n\n".join(
        f"**{title}.** {report.verdict(rows)}"
        for title, rows in (("Matched contrasts", contrast_rows), ("Rescue", gap_rows))
    )
)

# %% [markdown]
# ## What this page does not show
#
# - **The fit predicts nothing.** It is in sample, over a list of interventions that we chose; another list has
#   another slope. Its points are not independent: they share model, text and blocks.
# - **Divergence on the exact path.** The temperatures are matched where every layer sees exact inputs. In the run
#   that gives the loss, later layers see changed ones, and the two directions need not diverge equally there.
# - **One average.** A mean over rows, heads and layers can be equal while its distribution differs.
# - **Temperature is one family.** Other ways to flatten or sharpen a row are not tried.
# - **No cause.** Neither leakage nor $pV$ nor rescue identifies why one direction loses more.
# - **Descriptive quantities have no intervals**, here as in the paper: divergence, leakage, $pV$.
# - **Not the paper's models, by default.** Re-run the page with `-p model qwen2.5-1.5b` to compare like with like.
