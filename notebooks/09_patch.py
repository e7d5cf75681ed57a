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
# (patch)=
# # The patch and its gates
#
# The chapters before this one compute what a kernel would compute. This one changes the kernel: FlashAttention-4
# {cite:p}`zadouri2026fa4`, as it is installed from its package, gets another exponential. A patch of somebody else's
# code can go wrong in two ways. It can land in the wrong place, when that code has changed; and it can compute
# something else than was meant, while the output still looks like attention. So the page asks
#
# 1. what is replaced, and what must stay exact,
# 2. which exponentials can stand there, and which of them may be used,
# 3. what stops the patch when the code is not the one that was read, and
# 4. what shows that the patched kernel computes what it should.
#
# It follows §5.2, §5.4, B.1, B.2 and the static audit in B.5 of {cite:t}`zhu2026softmax`: Figure S1 and the readings
# of its correctness gates.

# %% tags=["parameters"]
record = "results"
rehearsed = "stock h15 s(3) g(1) g(3) fused7 poly(3,0.5) packed(4,3)"

# %% tags=["hide-input"]
import math

import pandas as pd
from IPython.display import Markdown

from softmaxlab import figures, figures_gates, paper, report
from softmaxlab.errors import LabError
from softmaxlab.fa4 import Variant, bounds, edits, gate_record, gates, micro, source, variants

figures.style()

# %% [markdown]
# ## The definitions
#
# **A0** is the stock kernel, **A1** the patched one. A **variant** is what stands in the place of the exponential; its
# name is a text, as `h15` or `g(3)`. A **text anchor** is a piece of FlashAttention-4's source at which the patch edits;
# it has nothing to do with a row's anchor, its maximum. A **gate** is a reading of the kernel with bounds: it is green
# if the reading lies within them.
#
# Readings on this page are **measured** (by the patched kernel on a GPU), **simulated** (by a model of the kernel's
# arithmetic in PyTorch), **compiled** (counted in machine code) or **published**; every table says which.

# %% [markdown]
# ## The run
#
# Readings that were measured are stored with the book and read here. Where there are none, the same gates run now on a
# simulated kernel. The FP8 gates need a Blackwell GPU; for Rowmax-H15 they are simulated in any case.

# %%
stored = gate_record.stored(record)
run = stored or gate_record.rehearse(rehearsed.split(), gates.smaller(queries=64))
in_fp8 = gate_record.rehearse(["h15"], [case for case in gates.CASES if case.dtype == "e4m3"])

# %% tags=["hide-input"]
gpu = run.environment.get("GPU", "")
Markdown(
    f"The readings below were **measured** on an {gpu} with flash-attn-4 {run.environment['flash-attn-4']}: "
    f"{len(run.frame):,} readings of {run.frame['variant'].nunique()} variants in {run.seconds:.0f} s."
    if run.kind == "measured"
    else f"**No measured readings are stored yet.** What follows is a rehearsal: {len(run.frame):,} readings of "
    f"{run.frame['variant'].nunique()} variants by the simulated kernel, in {run.seconds:.0f} s on this machine. It "
    "shows what the gates read and that they tell right from wrong. It says nothing about a GPU. "
    "`softmaxlab gates` on a Hopper or Blackwell GPU makes the measured ones."
)

# %% [markdown]
# (sites)=
# ## What is replaced
#
# In one turn of its loop the kernel makes a tile of scores $S$ into weights, sums them, and multiplies them with the
# values. With $c = \log_2 e$ times the scale of the scores, a weight is $2^{(s - m)c}$, where $m$ is the row's anchor.
# {numref}`fig-sites` shows where.
#
# Two other exponentials stand in the loop or at its end. When the anchor moves, sum and output are **rescaled** by
# $2^{(m_\text{old} - m)c}$; and a learnable **sink** adds a weight of its own. Both must stay exact. A weight's error is
# made once and stays with its key. An error in the rescale would multiply everything that was summed before it, again
# with every tile that brings a new maximum: keys would weigh by the order in which tiles come.

# %% tags=["hide-input"] mystnb={"figure": {"name": "fig-sites", "caption": "One turn of the softmax in FlashAttention-4, left to right, and the methods that the patch replaces. On Hopper one method does everything, in one form for the first tile and another for later ones; on Blackwell two methods make exponents and weights, two scores at a time. The packed variants replace more: they take the conversion and the row sum too. Drawn from the source; nothing is measured."}, "image": {"alt": "Two rows of boxes, Hopper and Blackwell: scores, mask, row maximum, exponent, weight, row sum, conversion and product. Exponent and weight are filled blue as replaced; the rescale and the learnable sink stand below in green as exact."}}
FIRST = [
    ("$S=QK^T$", "kept"),
    ("mask", "kept"),
    ("row\nmaximum $m$", "kept"),
    ("exponent\n$t=2^k(s-m)c$", "replaced"),
    ("weight\nby bits", "replaced"),
]
SUM, TOTAL = ("row sum", "kept"), ("$O$ += $PV$", "kept")
EXACT = [("rescale of sum and $O$ as $m$ moves", "exact"), ("learnable sink, at the end", "exact")]
figures_gates.sites(
    [
        (
            "Hopper",
            [*FIRST, SUM, ("$P$ to\n16 bits", "kept"), TOTAL, *EXACT],
            [("Softmax.online_softmax (first tile, later tiles)", 2, 5)],
        ),
        (
            "Blackwell",
            [*FIRST, ("$P$ to 16\nor 8 bits", "kept"), SUM, TOTAL, *EXACT],
            [("scale_subtract_\nrowmax", 3, 3), ("apply_exp2_convert", 4, 5)],
        ),
    ]
)

# %% [markdown]
# The paper's bit form ({ref}`bit-forms`) takes the doubled exponent, $t = 2x$. It costs no instruction: $2^k$ is a power
# of two and goes into the FMA that subtracts the row maximum anyway, exactly. It must go into *that* FMA only. The same
# constants also serve the rescale, its threshold and the log-sum-exp, and doubling the shared ones would square the
# first, halve the second and corrupt the third.
#
# Then come, for each score,
#
# - **paper's form**: a maximum (the clamp), an addition of $2^{23} + 2^{22}$ (which rounds), and one integer instruction
#   that shifts and adds the bits of 1.0;
# - **folded**: the bias of the exponent is part of the constant, and a shift is enough;
# - **fused**, $k = 7$: the constant is part of the FMA as well, and a maximum and a shift are all;
# - **polynomial**: FA4's own emulation, at a chosen degree and for a chosen share of the scores;
# - **packed**: one FMA a score gives $2^k (x + 127)$ as a small integer, one conversion packs two of them as 16-bit
#   codes and clamps them at 0, and one shift a pair makes two BF16 weights of $S(Q_k)$. Their row sum adds pairs of
#   weights in BF16 for a few levels before FP32: `packed(k,levels)`. `lazy` also skips rescales by 1; `skip` is the
#   stock exponential with that skip alone.
#
# On Blackwell the additions take two scores at a time. {ref}`compiler` counts what becomes of them.

# %% [markdown]
# (variants)=
# ## The variants
#
# A variant is **offered** if it may stand in for the exponential: it is one, and a row whose keys are all masked gives
# 0, as the stock kernel does. The others are for measurement only.

# %% tags=["hide-input"]
catalogue = variants()
listing = pd.DataFrame(
    {
        "variant": [f"{v}" for v in catalogue],
        "what stands in the kernel": [v.summary for v in catalogue],
        "what it computes": [str(v.operator() or report.MISSING) for v in catalogue],
        "offered": ["yes" if v.offered else "measurement only" for v in catalogue],
    }
).set_index("variant")
report.table(listing, "Every variant that the book's tables show. Any other k or share can be named too.")

# %% tags=["hide-input"]
reasons = {}
for v in catalogue:
    if not v.offered:
        reasons.setdefault(v.why_not, []).append(f"`{v}`")
Markdown("\n".join(f"- {', '.join(names)}: {why}." for why, names in reasons.items()))

# %% [markdown]
# (fail-closed)=
# ## Failing closed
#
# FlashAttention-4 has no hook for this. (A `score_mod` runs before the row maximum; replacing `exp2` altogether would
# hit the rescale and the sink.) So its methods are edited as text, and that text may be another one tomorrow. Four
# things are checked before anything is made; if one is off, nothing is, and one sentence says what:
#
# 1. the version of the package is one whose source was read;
# 2. each method stands once in its module, and the SHA-256 of its text is the one that was read;
# 3. each text anchor stands exactly once in its method;
# 4. nobody else has replaced the methods already.

# %% tags=["hide-input"]
try:
    texts = source.checked()
    checked = (
        f"**Checked on this machine**: flash-attn-4 {source.version()} is installed, and all {len(texts)} methods are, "
        "byte for byte, those that were read."
    )
except LabError as error:
    texts = {}
    checked = f"**Not checked on this machine.** {error}. The table shows what would be checked."
known = source.KNOWN[next(iter(source.KNOWN))]
anchored = pd.DataFrame(
    {
        "method": list(source.METHODS),
        "GPU": ["Blackwell" if "Sm100" in name else "Hopper" for name in source.METHODS],
        "lines": [f"{len(texts[name].splitlines())}" if name in texts else report.MISSING for name in source.METHODS],
        "text anchors": [f"{len(edits.EDITS[name])}" for name in source.METHODS],
        "SHA-256 begins": [known[name][:12] for name in source.METHODS],
        "as installed here": ["the same" if name in texts else "not checked" for name in source.METHODS],
    }
).set_index("method")
report.table(anchored, f"The methods of flash-attn-4 {next(iter(source.KNOWN))} that the bit forms replace.")

# %% tags=["hide-input"]
n_anchors = sum(len(pairs) for pairs in edits.EDITS.values())
theirs = paper.table("operator_constants").set_index("item")["value"]["patch_anchors"]
Markdown(
    f"{checked}\n\nThat is {n_anchors} text anchors for two architectures. The paper's patch, for Blackwell, has {theirs} "
    "(published); where they lie is not."
)

# %% [markdown]
# What a refusal looks like:

# %%
def refused(attempt):
    try:
        attempt()
    except LabError as error:
        print("refused:", error)


refused(lambda: Variant.parse("s(14)"))
refused(lambda: gates.run(["identity"]))
if texts:
    name = source.METHODS[0]
    anchor = edits.EDITS[name][0][0]
    refused(lambda: edits.edited(name, texts[name].replace(anchor, "moved")))
    refused(lambda: edits.edited(name, texts[name] + anchor))

# %% [markdown]
# (two-ways)=
# ### Two ways in
#
# | | at run time | as text |
# | --- | --- | --- |
# | how | `with fa4.variant("g(3)"):` | `python kernel/patch_fa4.py apply "g(3)"` |
# | for | one's own process; A0 and A1 side by side | processes that are not one's own |
# | what changes | methods of FA4's classes, by assignment | one installed file, and three beside it |
# | installed files | untouched | edited; the original and a manifest of hashes are kept |
# | undone by | leaving the block | `revert`, byte for byte, checked by hash |
# | interrupted | the originals stand, or the next block is refused | `status` names the state, `revert` repairs it |
# | compiled kernels | a cache a variant, in memory and on disk | FA4's own cache, keyed by its sources |
# | refused | gradients, a second thread, GPUs other than Hopper and Blackwell | a second apply, an unknown version, a changed file |
#
# The edited methods are generated from the installed source, into a cache folder: no code of FlashAttention-4 is in
# this project. Both ways give the same machine code; a test compiles both for a B200 and compares the bytes. Gradients
# are refused because the backward pass recomputes the exact exponential, and would not be the derivative of what ran.

# %% [markdown]
# (gates)=
# ## The gates
#
# Outputs hide their probabilities. They come out when the values are **one-hot**: the value of key $j$ is 1 in column
# $j$ and 0 elsewhere, so that column $j$ of the output is $\hat p_j$. A head has 128 columns; for more keys, each 128 of
# them take an entry of the batch.
#
# What is read is held against a float64 reference that walks the same tiles, because a lattice hangs on the anchor
# ({ref}`kernel-semantics`). A score that lies at a jump of the lattice may be rounded to either side by the last bit of
# a sum. So each weight has an interval: the operator at the score, a little below and a little above.
#
# | gate | what it checks | bound |
# | --- | --- | --- |
# | weights, key by key | this operator, at this lattice, with this anchor in every tile | the interval, widened by the rounding of $P$ and of the output |
# | masked weights | nothing leaks through the mask | 0, within the least number of the format |
# | $L_1$ of a row, residual | the same, as the paper states it | rounding |
# | ratio to A0, normalised | the operator's envelope $[a, b]$, independent of our reference | $[a - b, b - a]$ |
# | ratio, less the shift at the row maximum | the same, unnormalised | $[a, b]$, what the operator is off next to its anchor, and rounding |
# | row sums | numerator and denominator use the same weights | 1, within rounding |
# | row maximum attained | the operator keeps the order | every row, up to what the operator is off next to its anchor |
# | output, random values | the whole path: GQA, both head dimensions, soft-cap, odd lengths | twice the stock kernel's own error, and what the intervals leave open |
# | log-sum-exp | the scale was put where it belongs, and only there | the interval |
# | fully masked rows | what a caller may rely on | output 0, log-sum-exp −∞ |
# | rerun | no race | equal bits |
#
# A rehearsal tests the gates themselves: with a simulated kernel that is right all are green, and tests feed them
# kernels that are wrong (another lattice, the exact exponential, one anchor for the whole row, a lost key, a wrong head,
# no soft-cap, a NaN) and see the right gate turn red.

# %% tags=["hide-input"]
table = gates.verdict(run.frame)
listed = pd.DataFrame(
    {
        "variant": table["variant"],
        "offered": ["yes" if o else "measurement only" for o in table["offered"]],
        f"gates green, {run.kind}": [f"{p} of {n}" for p, n in zip(table["passed"], table["gates"])],
        "red": [text or "none" for text in table["failed"]],
    }
).set_index("variant")
report.table(listed, f"All gates, by variant; {run.kind}{f' on an {gpu}' if run.kind == 'measured' else ''}.")

# %% tags=["hide-input"]
offered = table[table["offered"]]
bad = offered[offered["passed"] < offered["gates"]]
others = table[~table["offered"]]
only_masked = all(
    set(run.frame[(run.frame["variant"] == v) & ~run.frame["passed"]]["case"]) <= {"masked rows"} for v in others["variant"]
)
Markdown(
    (
        f"**All gates of the {len(offered)} offered variants are green** ({run.kind})."
        if not len(bad)
        else f"**Red among the offered variants** ({run.kind}): {'; '.join(f'{r.variant}: {r.failed}' for r in bad.itertuples())}."
    )
    + (
        f" Of the {len(others)} others, what is red is red on fully masked rows{'' if only_masked else ' and elsewhere'}."
        if len(others)
        else ""
    )
)

# %% tags=["hide-input"]
SHOWN = [v for v in ("stock", "h15", "g(1)", "g(3)", "fused7") if v in set(run.frame["variant"])]
several = run.frame[(run.frame["case"] == "several tiles") & run.frame["variant"].isin(SHOWN)]


def bounded(row):
    low, high = (report.number(v) for v in (row.low, row.high))
    kept = f"≤ {high}" if low == report.MISSING else f"≥ {low}" if high == report.MISSING else f"{low} … {high}"
    return f"{report.number(row.value, 4)} ({'0' if row.low == row.high == 0 else kept})"


readings = pd.DataFrame(
    {v: {r.gate: bounded(r) for r in several[several["variant"] == v].itertuples()} for v in SHOWN}
)
report.table(
    readings.rename_axis("several tiles, BF16"),
    f"Readings with their bounds in brackets, {run.kind}: 512 keys, causal, head dimension 128.",
)

# %% [markdown]
# (element-wise)=
# ## Element by element

# %% tags=["hide-input"] mystnb={"figure": {"name": "fig-gates", "caption": "Rowmax-H15 read off the kernel element by element, BF16. A: probability minus reference in the gate of one tile. B: the gate of several tiles. Filled: the normalised ratio to the stock kernel in octaves, which the grey band must hold. Line: the ratio less the shift at the row maximum, that is the unnormalised error, with the operator's envelope in green. Hollow: the least and largest published value, in FP8. Counterpart of the paper's Figure S1."}, "image": {"alt": "Left: a histogram of residuals around zero on a logarithmic axis. Right: histograms of ratio and error between minus 0.4 and 0.4 octaves inside the bands, with the published ranges as horizontal lines above."}}
def printed(metric, stat, gate="multi_tile"):
    return paper.value("gates", gate=gate, metric=metric, stat=stat)


RANGES = {"ratio": "norm_log2_ratio", "unnormalised": "unnorm_log2_err", "shift": "norm_shift_at_rowmax"}
figures_gates.element_wise(
    run.distribution("h15", "single tile"),
    run.distribution("h15", "several tiles"),
    {name: (printed(metric, "min").value, printed(metric, "max").value) for name, metric in RANGES.items()},
    kind=run.kind,
)

# %% [markdown]
# The published readings are of FP8 on a B200, with inputs that are not published. Ours go from flat rows to peaked
# ones: the standard deviation of a row's scores is from 0.5 to 8 nats.

# %% tags=["hide-input"]
def reading(held, case, gate):
    rows = held.frame[(held.frame["variant"] == "h15") & (held.frame["case"] == case) & (held.frame["gate"] == gate)]
    return rows["value"].iloc[0]


def column(held, prefix):
    one, many = (held.distribution("h15", f"{prefix}{name}") for name in ("single tile", "several tiles"))
    of = lambda gate, case="several tiles": reading(held, prefix + case, gate)
    return [
        f"{one['elements']:,}",
        of("L1 of a row, mean", "single tile"),
        of("L1 of a row, largest", "single tile"),
        f"{many['elements']:,}",
        of("normalised ratio, least, octaves"),
        of("normalised ratio, largest, octaves"),
        many["shift"]["low"],
        many["shift"]["high"],
        of("unnormalised error, least, octaves"),
        of("unnormalised error, largest, octaves"),
        of("row sum, least"),
        of("row sum, largest"),
        f"{many['rows'] - of('rows whose maximum is not attained'):,.0f} of {many['rows']:,}",
        f"{many['tied at the maximum']['median']:g}",
        f"{many['tied at the maximum']['largest']:g}",
    ]


def shown(value):
    return value if isinstance(value, str) else report.number(value, 4)


PUBLISHED = [
    ("one tile: elements", paper.table("gates")["n_elements"].iloc[0]),
    ("one tile: L1 of a row, mean", printed("l1_per_row", "mean", "single_tile")),
    ("one tile: L1 of a row, largest", printed("l1_per_row", "max", "single_tile")),
    ("several: elements", paper.table("gates").query("gate == 'multi_tile'")["n_elements"].iloc[0]),
    ("several: normalised ratio, least (octaves)", printed("norm_log2_ratio", "min")),
    ("several: normalised ratio, largest", printed("norm_log2_ratio", "max")),
    ("several: shift at the row maximum, least", printed("norm_shift_at_rowmax", "min")),
    ("several: shift at the row maximum, largest", printed("norm_shift_at_rowmax", "max")),
    ("several: unnormalised error, least", printed("unnorm_log2_err", "min")),
    ("several: unnormalised error, largest", printed("unnorm_log2_err", "max")),
    ("several: row sum, least", printed("row_sum", "min")),
    ("several: row sum, largest", printed("row_sum", "max")),
    ("several: rows whose maximum is attained", printed("rowmax_attained_rows", "count")),
    ("several: keys tied at the maximum, median", printed("lattice_ties", "median")),
    ("several: keys tied at the maximum, largest", printed("lattice_ties", "max")),
]
ours = f"BF16{f', {gpu}' if run.kind == 'measured' else ''}, {run.kind}"
compared = pd.DataFrame(
    {
        "reading": [label for label, _ in PUBLISHED],
        ours: [shown(value) for value in column(run, "")],
        "FP8, simulated": [shown(value) for value in column(in_fp8, "FP8, ")],
        "FP8, B200, published": [str(value) for _, value in PUBLISHED],
    }
).set_index("reading")
fewer = "" if run.kind == "measured" else "; in the rehearsal the BF16 column has only the last 64 queries of each"
report.table(compared, f"Rowmax-H15 in the paper's two gates. We read two heads, the paper one{fewer}.")

# %% tags=["hide-input"]
low, high = (printed("log2_err_envelope", stat, "analytic").value for stat in ("min", "max"))
within = all(
    row.passed
    for row in run.frame[(run.frame["variant"] == "h15") & run.frame["gate"].str.contains("ratio|unnormalised")].itertuples()
)
tolerance = printed("e4m3_tolerance", "abs").value
in_tiles = in_fp8.frame[(in_fp8.frame["case"] == "FP8, several tiles") & (in_fp8.frame["variant"] == "h15")]
least = in_tiles[in_tiles["gate"].str.contains("unnormalised error, least")].iloc[0]
weak = (
    f" Our FP8 bounds add such roundings at their worst (from {report.number(least.low)} octaves), so this gate is weak in FP8: "
    f"our least reading, {report.number(least.value)}, lies outside the paper's own allowance, {report.number(low - tolerance)}. "
    "There the key-by-key gate is what tests the lattice."
    if least.value < low - tolerance
    else ""
)
Markdown(
    f"The ratio and the unnormalised error of Rowmax-H15 keep their bounds in {'every' if within else 'not every'} gate "
    f"({run.kind}). The envelope itself is [{report.number(low)}, {report.number(high)}] octaves. What lies outside it is "
    "rounding, of two kernels' probabilities and of both their largest ones; E4M3 rounds by up to "
    f"{report.number(math.log2(1 + bounds.TOLERANCES['e4m3'][0]), 2)} octaves each time, and the paper allows "
    f"{printed('e4m3_tolerance', 'abs')} in all. The shift is where inputs show: it lies above 0 in rows whose weights are "
    "rounded down on the whole. The paper's inputs have no such row."
    + weak
)

# %% [markdown]
# (masked)=
# ## Rows that see no key
#
# With more queries than keys a causal mask leaves the first rows empty. The stock kernel gives 0 for them, and a
# log-sum-exp of −∞. The masked score is −∞. The hardware's exponential makes 0 of it; a bit form must clamp first. The
# paper clamps at −126 octaves, where the weight is $2^{-126}$: next to any key that is seen it is nothing, but in a row
# that sees none all weights are equal, and normalising makes them the mean of the values. A clamp at −127 costs the
# same, and there the bits are those of 0.

# %% tags=["hide-input"]
masked = run.frame[(run.frame["case"] == "masked rows") & (run.frame["gate"] == "largest output of masked rows")]
report.table(
    pd.DataFrame(
        {
            "variant": masked["variant"],
            "clamp, octaves": [
                {"paper": "−126", "zero": "−127"}[v.bits[2]] if v.bits else report.MISSING
                for v in map(Variant.parse, masked["variant"])
            ],
            f"largest output, {run.kind}": [report.number(v) for v in masked["value"]],
            "gate": ["green" if p else "red" for p in masked["passed"]],
        }
    ).set_index("variant"),
    f"Largest output of the {gates.CASES[2].queries - gates.CASES[2].keys} rows without a key, BF16, causal, {gates.CASES[2].queries} queries and {gates.CASES[2].keys} keys.",
)

# %% tags=["hide-input"]
failing = masked[~masked["passed"]]["variant"].tolist()
Markdown(
    f"**The paper's clamp fails this gate**: {', '.join(f'`{v}`' for v in failing)}. The paper does not report such rows; "
    "the shapes that it times have none. The same members with the clamp at −127 pass."
    if failing
    else "No variant that was read fails this gate."
)

# %% [markdown]
# (micro)=
# ## The operator alone
#
# The paper counts instructions of the exponential alone, in micro-kernels for sm_86. Ours are in `kernel/micro`; a
# kernel that only scales its input is subtracted. The chain is the longest sequence of instructions that wait for each
# other. The paper counts the maximum among those of the floating-point pipeline.

# %% tags=["hide-input"]
counted, tools = micro.stored(record)
NAMES = {
    "ex2": "exp2 of the hardware",
    "poly1": "polynomial, degree 1",
    "poly2": "polynomial, degree 2",
    "poly3": "FA4's cubic",
    "h15": "Rowmax-H15",
    "s7": "S(Q_7)",
    "folded1": "k = 1, folded",
    "folded7": "k = 7, folded",
    "fused7": "k = 7, fused",
}
PRINTED = {"poly3": "fa4_cubic", "h15": "h15"}
AUDITED = {"instructions": "instr_per_element", "floating": "fp_pipe_instr_per_element", "chain": "dependency_depth"}
alone = counted[counted["kernel"] == "fragment"].set_index(["arch", "exponential"])


def count_of(arch, name, metric):
    return report.number(alone.loc[(arch, name), metric], 2).removesuffix(".0")


rows = {}
for name, label in NAMES.items():
    rows[label] = {
        f"{arch}: instructions (chain), compiled": f"{count_of(arch, name, 'instructions')} ({count_of(arch, name, 'chain')})"
        for arch in ("sm_86", "sm_90", "sm_100")
    }
    kernel = PRINTED.get(name)
    rows[label]["sm_86, published"] = (
        f"{paper.value('audit', kernel=kernel, metric=AUDITED['instructions'])} "
        f"({paper.value('audit', kernel=kernel, metric=AUDITED['chain'])})"
        if kernel
        else report.MISSING
    )
report.table(
    pd.DataFrame(rows).T.rename_axis("exponential"),
    f"Instructions an element, and length of the chain, in a kernel of 32 elements a thread; nvcc {tools['nvcc']}.",
)

# %% tags=["hide-input"]
same = [
    alone.loc[("sm_86", name), metric] == paper.value("audit", kernel=kernel, metric=published).value
    for name, kernel in PRINTED.items()
    for metric, published in AUDITED.items()
]
registers = ", ".join(
    f"{NAMES[name]} {alone.loc[('sm_86', name), 'registers']} "
    f"({paper.value('audit', kernel=f'{kernel}_frag32', metric='registers_per_thread')})"
    for name, kernel in PRINTED.items()
)
Markdown(
    f"Of the {len(same)} published counts for sm_86 {'**all**' if all(same) else f'{sum(same)}'} come out the same: instructions, "
    f"those on the floating-point pipeline, and the chain. Registers a thread depend on the version of the compiler: {registers}, "
    "published in brackets. On Blackwell two additions are one instruction, and the polynomial gains more from that than "
    "the bits: the advantage in instructions shrinks from "
    f"{alone.loc[('sm_86', 'poly3'), 'instructions'] / alone.loc[('sm_86', 'h15'), 'instructions']:.1f} to "
    f"{alone.loc[('sm_100', 'poly3'), 'instructions'] / alone.loc[('sm_100', 'h15'), 'instructions']:.1f} times."
)

# %% [markdown]
# ## What this page does not show
#
# - **No proof.** Gates read some inputs. They would miss an error that these inputs do not provoke.
# - **No FP8 kernel of ours.** FlashAttention-4 takes FP8 on Blackwell only, and we had none: those gates stay simulated
#   even where others are measured.
# - **Not the paper's inputs.** They are not published, so readings agree in what they must and not in every digit.
# - **No time.** {ref}`compiler` counts instructions; nothing is timed yet.
# - **No gradients**, no latent attention (MLA), no GPU but Hopper and Blackwell: the patch refuses them.
