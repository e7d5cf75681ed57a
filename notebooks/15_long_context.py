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
# (long-context)=
# # Long contexts
#
# A row of attention has as many keys as there are tokens before it. Four or eight times longer rows spread their mass
# over more keys, and a grid that spans the whole row has to cover a wider range of scores with the same number of
# intervals. This chapter asks, **within each block length**,
#
# 1. whether finer intervals near the row maximum still help, and
# 2. whether flattening and sharpening of equal divergence still differ.
#
# It follows §6 and appendices C.1 and C.2 of {cite:t}`zhu2026softmax`: Table C1 and Figure S3.

# %% tags=["parameters"]
models = ""  # names with commas between; empty: every model in the store
model = "smollm2-135m"  # what `compute` measures
corpus = "wikitext103"
contexts = "2048, 8192, 16384"
blocks = 0
dtype = "float32"
device = "auto"
results = "results"
bos = "stream"
backend = "fused"
compute = False  # True: measure what is not stored; long blocks want a GPU

# %% tags=["hide-input"]
import pandas as pd
from IPython.display import Markdown

from softmaxlab import breadth, conditions, cross_model, figures, figures_distortion, matching, paper, report

figures.style()

# %% [markdown]
# ## The definitions
#
# The text is the same stream of tokens, cut into fewer and longer blocks. **Each length is an experiment of its own**:
#
# - its softmax baseline is computed anew;
# - its yardstick $J_0$, the mean JSD of `pot(m=1)` {eq}`eq-jsd`, is measured on the first $\max(1, \lfloor 32768/L\rfloor)$
#   blocks of that length;
# - its two temperatures are solved for that $J_0$.
#
# The contrasts are those of other chapters: $D_R(21)$ is the loss of the grid with $K = 21$ at $R = 1$ minus that at
# $R = 4$ {eq}`eq-dr`, and $D_T(J_0)$ the loss of the matched flattening minus that of the matched sharpening
# {eq}`eq-dt`. Both are paired inside a block, so **no number here compares two lengths**: blocks differ, and so do
# $J_0$ and the temperatures.

# %% [markdown]
# ## The run

# %%
lengths = [int(text) for text in contexts.split(",")]
setting = {"corpus": corpus, "bos": bos, "blocks": blocks, "results": results}
if compute:
    run = {"model": model, "dtype": dtype, "device": device, "backend": backend}
    breadth.measure_all(breadth.long_steps(model, lengths), **run, **setting)
cells = {L: cross_model.read(context=L, only=models, **setting) for L in lengths}


# %% tags=["hide-input"]
def tokens(L):
    return f"{L // 1024}K" if L % 1024 == 0 else f"{L:,}"


names = cross_model.chosen(models) or sorted({cell.model for found in cells.values() for cell in found})
wanted = set(conditions.long())
limits = {name: cross_model.positions(results, name) or max(lengths) for name in names}


def lacks(name, L):
    """What of the page a model has not at a length it was made for, in words; empty if nothing."""
    cell = cross_model.of(cells[L], name)
    if cell is None:
        return "everything"
    parts = [f"{len(wanted - cell.conditions)} of {len(wanted)} conditions"] * bool(wanted - cell.conditions)
    parts += ["the matched temperatures"] * (cell.contrast("D_T(J0)") is None)
    parts += [f"blocks (it has {cell.size})"] * (cell.available is not None and cell.blocks < cell.available)
    return ", ".join(parts)


lines = []
for name in names:
    missing = {L: lacks(name, L) for L in lengths if L <= limits[name]}
    there = [tokens(L) for L in lengths if L <= limits[name] and not missing[L]]
    lines.append(
        f"- **{name}**: complete at {', '.join(there) or 'no length'}"
        + "".join(f"; at {tokens(L)} **missing**: {what}" for L, what in missing.items() if what)
        + (f"; made for at most {limits[name]:,} tokens" if limits[name] < max(lengths) else "")
        + "."
    )
Markdown(
    f"Corpus {corpus}; what the page shows of each model, all **measured**:\n\n" + "\n".join(lines)
    if names
    else "**Nothing is stored yet.**"
)

# %% [markdown]
# Other models, and what one lacks, are added by one command, `softmaxlab breadth`; see {ref}`paper-models`. Of a model with several
# settings the page shows one, as {ref}`across-models` does, where the weights are named and the backends compared.


# %% tags=["hide-input"]
PRINTED = sorted(set(paper.table("c2_long_context")["model"]) | set(paper.table("tableC1_matched")["model"]))


def by_length(columns, caption):
    """One row a model and length: ours measured, below them the paper's published values.

    columns: heading -> (value of a cell, value of a model of the paper at a length).
    """
    rows = {}
    for name in names:
        for L in lengths:
            if (cell := cross_model.of(cells[L], name)) is not None:
                rows[f"{name}, {tokens(L)}, measured"] = {what: ours(cell) for what, (ours, _) in columns.items()}
    for name in PRINTED:
        for L in lengths:
            row = {what: theirs(name, L) for what, (_, theirs) in columns.items()}
            if set(row.values()) != {report.MISSING}:
                rows[f"{name}, {tokens(L)}, published"] = row
    if not rows:
        return Markdown("Neither measured nor published at these lengths.")
    return report.table(pd.DataFrame.from_dict(rows, orient="index").rename_axis("model, length"), caption)


def printed_size(what):
    def value(model, L):
        found = report.published("tableC1_matched", model=model, context=L, metric=what)
        return report.MISSING if found is None else f"{found.value:,.0f}"

    return value


by_length(
    {
        "blocks": (lambda cell: cell.size, printed_size("blocks")),
        "predictions": (lambda cell: f"{cell.predictions:,}", printed_size("predictions")),
        "dtype, backend": (lambda cell: cell.setting, lambda model, L: report.MISSING),
    },
    "The text at each length.",
)

# %% [markdown]
# (long-matches)=
# ## The matches
#
# The counterpart of Table C1. A match that misses its target by more than 1 % would have no contrast below.


# %% tags=["hide-input"]
def solved(direction):
    """J0 of a cell (no direction), or a direction's temperature, what it achieved and its error in percent."""

    def value(cell):
        found = cell.solutions
        if not found.empty:
            found = found[(found["metric"] == "jsd") & (found["level"] == 1)]
            found = found[found["direction"] == direction] if direction else found
        if found.empty:
            return report.MISSING
        one = found.iloc[0]
        if not direction:
            return report.number(one["reference"], 4)
        achieved = f"{report.number(one['achieved'], 4)} ({report.number(100 * one['error'], 2)})"
        return f"{achieved}, α = {report.number(one['alpha'], 4)}"

    return value


def windows(cell):
    found = cell.solutions
    return report.MISSING if found.empty else str(found["windows"].iloc[0])


def matched(direction):
    def value(model, L):
        def printed(condition, metric):
            return report.published("tableC1_matched", model=model, context=L, condition=condition, metric=metric)

        if not direction:
            return report.text(printed("pot_m1", "J0"))
        found = printed(direction, "achieved_jsd")
        return report.MISSING if found is None else f"{found} ({printed(direction, 'rel_err')})"

    return value


by_length(
    {
        "J₀": (solved(""), matched("")),
        "flattening": (solved("flatten"), matched("flatten")),
        "sharpening": (solved("sharpen"), matched("sharpen")),
        "windows": (windows, lambda model, L: report.MISSING),
    },
    "Mean JSD in nats: J₀ and what the temperatures achieve, with the error in percent and, where we measured, α.",
)

# %% [markdown]
# (long-allocation)=
# ## Do finer intervals near the maximum still help?


# %% tags=["hide-input"] mystnb={"figure": {"name": "fig-long-allocation", "caption": "D_R(21), loss at R = 1 minus loss at R = 4, within each block length; right of zero, finer intervals near the row maximum lose less. Upper panels: published (C.2). Lower panels: measured here; a line is empty where nothing is stored, or beyond the length that a model was made for. 95 % intervals. The scales of the panels differ. Counterpart of the paper's Figure S3A."}, "image": {"alt": "Dot plots with intervals, one panel for each block length: the allocation contrast in nats of the paper's models above and of our measured models below, with a line at zero."}}
def panels(metric, symbol):
    found = {}
    for L in lengths:
        estimates = {cell.model: cell.contrast(metric) for cell in cells[L]}
        estimates = {name: e for name, e in estimates.items() if e is not None}
        printed = report.published_rows("c2_long_context", metric=symbol, context=L).dropna(subset=["value"])
        found[f"$L$ = {tokens(L)}"] = (printed, report.points(estimates.values(), model=list(estimates)))
    return found


figures_distortion.forest(panels("D_R(21)", "D_R21"), xlabel="$D_R(21)$ (nats)")


# %% tags=["hide-input"]
CODES = {"pos": "positive", "neg": "negative", "no": "unresolved"}


def value(metric, symbol):
    def ours(cell):
        estimate = cell.contrast(metric)
        return report.MISSING if estimate is None else report.interval(estimate)

    def theirs(model, L):
        rows = report.published_rows("c2_long_context", model=model, context=L, metric=symbol)
        if not len(rows):
            return report.MISSING
        if rows["value"].isna().all():
            return "not printed"
        return str(paper.value("c2_long_context", model=model, context=L, metric=symbol))

    return ours, theirs


def state(metric, symbol):
    def ours(cell):
        estimate = cell.contrast(metric)
        return report.MISSING if estimate is None else estimate.resolved

    def theirs(model, L):
        rows = report.published_rows("c2_long_context", model=model, context=L, metric=symbol)
        return CODES[rows["resolved"].iloc[0]] if len(rows) else report.MISSING

    return ours, theirs


plain, fine = conditions.allocation_contrast(21)


def removed(cell):
    part = cell.removed(plain, fine)
    return report.MISSING if part is None else report.number(part)


by_length(
    {
        "D_R(21) (nats)": value("D_R(21)", "D_R21"),
        "resolved": state("D_R(21)", "D_R21"),
        "removed (%)": (
            removed,
            lambda model, L: report.text(
                report.published("c2_long_context", model=model, context=L, metric="degradation_removed")
            ),
        ),
    },
    "Allocation, 95 % intervals. Removed: share of the loss of R = 1 that R = 4 takes away, a ratio of means.",
)

# %% [markdown]
# (long-direction)=
# ## Do the directions still differ?

# %% tags=["hide-input"] mystnb={"figure": {"name": "fig-long-direction", "caption": "D_T(J\u2080), loss of flattening minus loss of sharpening at that length's own J\u2080; right of zero, flattening costs more. Upper panels: published (C.2), which differ at 2K from Table D2 in {ref}`across-models`. Lower panels: measured here; a line is empty where nothing is stored, or beyond the length that a model was made for. 95 % intervals where there are any: for some of its models the paper prints values alone, or no value. The scales of the panels differ. Counterpart of the paper's Figure S3B."}, "image": {"alt": "Dot plots with intervals, one panel for each block length: the contrast of flattening and sharpening in nats of the paper's models above and of our measured models below, with a line at zero."}}
figures_distortion.forest(panels("D_T(J0)", "D_T_J0"), xlabel="$D_T(J_0)$ (nats)")

# %% tags=["hide-input"]
by_length(
    {"D_T(J₀) (nats)": value("D_T(J0)", "D_T_J0"), "resolved": state("D_T(J0)", "D_T_J0")},
    "Direction, 95 % intervals.",
)

# %% [markdown]
# (long-output)=
# ## The output distribution
#
# For its two largest models the paper also says, at its longest blocks, how far the next-token distribution moves
# ({ref}`vocabulary-output`).


# %% tags=["hide-input"]
def output(text, code, metric, symbol, scale):
    def ours(cell):
        estimate = cell.mean_output(text, metric)
        return report.MISSING if estimate is None else report.interval(estimate, lambda x: scale * x)

    def theirs(model, L):
        return report.text(report.published("c2_long_context", model=model, condition=code, metric=symbol, context=L))

    return ours, theirs


by_length(
    {
        f"{what}, R = {R}": output(text, f"K21_R{R}", metric, symbol, scale)
        for metric, symbol, scale, what in (
            ("jsd", "output_jsd", 1, "JSD (nats)"),
            ("top1", "top1_agree", 100, "top-1 (%)"),
        )
        for R, text in ((1, plain), (4, fine))
    },
    "Output distribution against softmax under the grids with K = 21; ours with 95 % intervals where measured.",
)

# %% [markdown]
# ## What agrees, and what does not


# %% tags=["hide-input"]
WORDS = {"positive": "resolved positive", "negative": "resolved negative", "unresolved": "unresolved"}


def counted(states):
    """Length → states of its models, as words."""
    return "; ".join(
        f"at {tokens(L)} "
        + (", ".join(f"{found.count(s)} {word}" for s, word in WORDS.items() if s in found) or "none")
        for L, found in states.items()
    )


def ours(metric):
    estimates = {L: [cell.contrast(metric) for cell in cells[L]] for L in lengths}
    return counted({L: [e.resolved for e in found if e is not None] for L, found in estimates.items()})


def theirs(symbol):
    rows = report.published_rows("c2_long_context", metric=symbol)
    return counted(
        {int(L): part["resolved"].map(CODES).tolist() for L, part in rows.groupby(rows["context"].astype(int))}
    )


Markdown(
    "\n\n".join(
        f"**{title}.** Measured: {ours(metric)}. Published: {theirs(symbol)}."
        for title, metric, symbol in (("D_R(21)", "D_R(21)", "D_R21"), ("D_T(J₀)", "D_T(J0)", "D_T_J0"))
    )
)

# %% [markdown]
# The paper's reading is that the benefit of allocation carries over to long contexts and that a direction does not
# carry over as a stable effect. It rests on the paper's models; the counts above keep ours apart.

# %% [markdown]
# ## What this page does not show
#
# - **No change with length.** Lengths are not compared, neither by a test nor by a trend. The predicted tokens are
#   almost the same at each length, but what stands before them is not.
# - **Few blocks.** 8K tokens leave 24 blocks and 16K a dozen; the ends of such intervals are themselves uncertain, and
#   one that ends close to zero decides nothing.
# - **Few windows for $J_0$.** It rests on four blocks at 8K tokens and on two at 16K.
# - **Prefill of a long text**, not generation, and no task that needs the far context.
