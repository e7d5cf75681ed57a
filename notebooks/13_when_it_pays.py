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
# (when-it-pays)=
# # When does a coarser exponential pay?
#
# On a B200 {cite:t}`zhu2026softmax` gain up to 28 % with Rowmax-H15, and explain it by the exponential unit,
# without counters. We measured the same replacement on a Hopper GPU, with counters. This chapter asks
#
# 1. when an attention kernel waits for its exponentials at all,
# 2. whether a throughput model predicts the published gains and the measured ones, and where it fails,
# 3. how the six predictions stand that the paper sealed before its first run, and
# 4. which exponential a reader should use on which card.
#
# It follows §5.5, B.3 to B.5. The counts come from {ref}`compiler`, which also settles what code alone can settle.

# %% tags=["parameters"]
record = "results"
gpu = "NVIDIA H200"
kernel_model = "smollm2-135m"

# %% tags=["hide-input"]
import pandas as pd
from IPython.display import Markdown

from softmaxlab import figures, figures_pays, kernel_fidelity, paper, pays, report
from softmaxlab.bench import gains, read
from softmaxlab.errors import LabError
from softmaxlab.fa4 import audit, throughput

figures.style()
frame, provenance = audit.stored(record)
timed = gains.table(record)
timed = timed[timed["gpu"] == gpu]
measured = pays.measured(frame, timed)
counts = read.counts(record)
counted = pays.counted(frame, counts[counts["gpu"] == gpu])
energy = read.energies(record)
energy = energy[energy["gpu"] == gpu]
published = pays.published(frame)
runs = {r.backend: r for r in kernel_fidelity.stored(record) if r.model == kernel_model}
if not runs:
    raise LabError(f"no losses of {kernel_model} through the kernel are stored in {record}: run chapter 11 on a GPU first")
run = runs.get("fa4(arch=sm_90)") or next(iter(runs.values()))  # of the card whose times stand beside them
CARD = gpu.removeprefix("NVIDIA ")
LENGTHS = {False: "no mask", True: "causal"}


def title(row):
    """Readable name of a cell."""
    return f"{LENGTHS[bool(row['causal'])]}, {row['seq'] // 1024}K, head dim {row['head_dim']}"


def signed(value, digits=1):
    return report.MISSING if pd.isna(value) else f"{value:+.{digits}f}".replace("-", "−")


def prose(table, caption):
    """A table whose cells are sentences: they break over lines."""
    look = {"white-space": "normal", "text-align": "left !important", "min-width": "8em", "vertical-align": "top"}
    heads = [{"selector": "th.col_heading", "props": [("text-align", "left !important")]}]
    return report.table(table, caption).set_properties(**look).set_table_styles(heads, overwrite=False)


def span(row, name="stock"):
    if pd.isna(row[f"{name}_low"]):
        return f"{signed(row[name])} (no interval)"
    return f"{signed(row[name])} [{signed(row[f'{name}_low'])}, {signed(row[f'{name}_high'])}]"


# %% [markdown]
# ## The definitions
#
# A **turn** is one pass of a softmax warpgroup through the kernel's main loop: 128 × 128 scores on Blackwell, 64 × 128
# on Hopper. It needs clocks of the tensor cores, for its two matrix products, and of the execution pipes (XU for exp2,
# FMA, ALU), counted in machine code. Several warpgroups share an SM: two on Blackwell and on Hopper at head dimension
# 128, three on Hopper at 64. While one takes exponentials, another can multiply.
#
# The model predicts a speed-up by three limits. None is fitted.
#
# | limit | assumes | a turn of an SM costs |
# | --- | --- | --- |
# | pipes overlap | everything runs at once | the clocks of the busiest pipe or of the tensor cores |
# | softmax exposed | nothing of a softmax overlaps anything | as measured for stock, changed by the summed clocks of XU, FMA and ALU |
# | issue slots | what counts is the number of instructions | as measured for stock, changed by one clock for each instruction of a warp |
#
# The second and third change a warpgroup's own turn, which takes as many periods of the SM as it has warpgroups:
# {eq}`eq-exposed`. The period of Hopper is the duration times the clock, over the turns of the SM with the most tiles.
#
# Numbers are **compiled** (counted, or computed from counts and NVIDIA's rates), **measured** (here, on the
# card named) or **published** (the paper's, on its B200). Gains are 100·(t₀/t₁ − 1) over the stock kernel; intervals
# are 95 %, over rounds. A kernel is called **faster** or **slower** only if its intervals against stock and against the
# control, the stock program timed again, both say so, and by more than the control itself moves.

# %% [markdown]
# ## Who waits for whom
#
# {numref}`fig-pays-account` holds the exponentials of a turn against its matrix products. Left of the dotted line the
# tensor cores need longer, and exponentials can in principle hide behind them. Right of it they cannot. The
# diamond is what Rowmax-H15 keeps busy instead.

# %% tags=["hide-input"] mystnb={"figure": {"name": "fig-pays-account", "caption": "Clocks of one turn over those of the tensor cores, causal kernels, by card, data type and head dimension. Circle: exp2 of the stock kernel. Diamond: the busiest other pipe once Rowmax-H15 has replaced it. Ticks: all instructions, one a clock. Compiled, with published rates; no time is in it."}, "image": {"alt": "Dot plot with a row for each of H200, B200 and B300, BF16 and FP8, head dimensions 128 and 64: the exponential unit's clocks over the tensor cores' from 0.5 to 3.5, the ALU's clocks of Rowmax-H15 and the clocks for issuing all instructions."}}
account = pays.account(frame)
figures_pays.account(account)

# %% tags=["hide-input"]
at = account.set_index("label")
waits = at[at["xu"] > 1]
busier = at[at["busiest"] > at["xu"]]
Markdown(
    f"Three things move a kernel to the right: a smaller head, FP8, and a newer tensor core. At 16 bits and head dimension "
    f"128 the exponentials take {at.loc[f'{CARD}, BF16, 128', 'xu']:.2f} of the products' clocks on Hopper and "
    f"{at.loc['B200, BF16, 128', 'xu']:.2f} on the B200; in FP8, {at.loc['B200, FP8, 128', 'xu']:.2f}. {len(waits)} of "
    f"{len(at)} rows lie right of the line.\n\n"
    f"**The replacement is not free.** It adds {at['added'].min():.1f} to {at['added'].max():.1f} instructions a score, and its ALU "
    f"work is more than the exp2 work that it took away in {len(busier)} of {len(at)} rows "
    f"({'; '.join(busier.index)}). Of the Blackwell cards the B300, whose exp2 is twice as fast, has the least to win."
)

# %% [markdown]
# ## Are the inputs right?
#
# Before the limits are blamed, their inputs can be checked: clocks of a pipe a turn, times turns, over the cycles that
# the profiler counted, must be that pipe's utilisation.

# %% tags=["hide-input"]
PIPES = {"xu": "XU", "alu": "ALU", "fma": "FMA", "issue": "issue slots", "tensor": "tensor cores"}
inputs = pd.DataFrame(
    [
        {"kernel": f"{row['kernel']}, {'causal' if '/causal/' in row['cell'] else 'no mask'}"}
        | {f"{said}, counter / compiled (%)": f"{row[p]:.1f} / {row[f'{p} model']:.1f}" for p, said in PIPES.items()}
        for row in counted.to_dict("records")
    ]
).set_index("kernel")
report.table(
    inputs,
    f"Utilisation of each pipe on the {CARD}, BF16, 8K, head dimension 128: measured by the profiler, and compiled clocks over measured cycles.",
)

# %% tags=["hide-input"]
off = {p: (counted[f"{p} model"] - counted[p]).abs().max() for p in PIPES}
Markdown(
    f"Without a fitted number they are within {off['xu']:.1f} points for the XU, {off['tensor']:.1f} for the tensor cores and "
    f"{max(off['alu'], off['issue']):.1f} for the ALU and the issue slots. The FMA pipe is off by up to {off['fma']:.1f} points, "
    f"most in {counted.loc[(counted['fma model'] - counted['fma']).abs().idxmax(), 'kernel']}; how IMAD and additions of packed BF16 load "
    f"its two halves may be what the model has wrong. The counts also hold what `lazy` skips at run time. What is left out (masked "
    f"tiles, prologue, epilogue) is small. If the model fails, it fails in how pipes add up to a time."
)

# %% [markdown]
# (pays-limits)=
# ## Does the model predict the gains?
#
# {numref}`fig-pays-limits` puts published and measured gains in panels of their own, each beside the three limits for
# that very kernel. On Hopper two kinds of gain are shown: in clocks, which is what a model of clocks can predict; and
# in time under sustained load.

# %% tags=["hide-input"] mystnb={"figure": {"name": "fig-pays-limits", "caption": "Gains over the stock kernel beside three limits of the throughput model (grey, compiled). Top: Rowmax-H15 on a B200, published (Tables B5a, c, e; two limits need a stock latency, which is not printed for every cell). Below: exponentials on an H200, BF16, measured, with intervals where there are rounds; clocks at head dimension 128 are the profiler's, the median of three launches. `identity` has no exponential at all, a bound; `lazy` also skips rescales. Counterpart of the paper's Figure 4C."}, "image": {"alt": "Three stacked dot plots. B200: published gains of Rowmax-H15 from 1 to 26 percent, all above zero, between limits that disagree. H200 at head dimensions 128 and 64: Rowmax-H15 and S(Q_7) slower than stock, packed exponentials faster, while the exposed limit predicts gains for all."}}
cells = published[~published["cell"].isin(["heads", "batch", "extension_run"])]
cells = cells[~((cells["cell"] == "no mask") & (cells["seq"] != 8192))]
cells = cells.sort_values(["head_dim", "mask", "dtype", "seq"], ascending=[False, True, True, True])
cells = cells.assign(
    label=[
        f"{r.dtype.upper()}, {'no mask' if r.mask == 'noncausal' else r.mask}, {r.seq // 1024}K, {r.head_dim}{', GQA' if r.cell == 'gqa' else ''}"
        for r in cells.itertuples()
    ]
)
ROWS = ["h15", "s(7)", "fused7", "packed(4,3)", "packed(1,3)", "lazy(4,3)", "identity"]


def gain(rows, name="stock"):
    """A series of the figure, in the order of ROWS."""
    rows = rows.drop_duplicates("kernel").set_index("kernel").reindex(ROWS)
    if f"{name}_low" not in rows:
        return rows[[name]].set_axis(["value"], axis=1)
    return rows[[name, f"{name}_low", f"{name}_high"]].set_axis(["value", "low", "high"], axis=1)


def sustained(head_dim, causal=True, seq=16384):
    rows = measured[(measured["head_dim"] == head_dim) & (measured["causal"] == causal) & (measured["seq"] == seq)]
    return rows[rows["together"]]


def steady(head_dim):
    """Of a cell whose clock was the same for every kernel: there time is clocks. The longest, causal first."""
    rows = measured[(measured["head_dim"] == head_dim) & measured["together"]]
    clocks = timed.groupby("cell")["clock"].agg(lambda c: c.max() / c.min() - 1)
    rows = rows[rows["cell"].map(clocks) < 0.002]
    rows = rows[rows["cell"].isin(rows.sort_values(["causal", "seq"], ascending=False)["cell"].head(1))]
    return rows


def limits_of(rows):
    return rows.drop_duplicates("kernel").set_index("kernel").reindex(ROWS)[list(pays.LIMITS)].assign(label=ROWS)


wide = measured[(measured["head_dim"] == 128) & measured["causal"] & (measured["seq"] == 8192)]
profiled = counted[counted["cell"] == wide["cell"].iloc[0]]
small = steady(64)
series = {
    128: [
        ("clocks, causal 8K, profiler", gain(profiled, "gain")),
        ("time, sustained, causal 16K", gain(sustained(128))),
    ],
    64: [("time, sustained, causal 16K", gain(sustained(64)))],
}
if len(small):
    series[64].insert(0, (f"time at a steady clock, {title(small.iloc[0]).rsplit(',', 1)[0]}", gain(small)))
narrow = small if len(small) else sustained(64)
either = pd.concat([narrow, sustained(64)])  # a kernel that the steady cell lacks has the limits of the other
theirs = [("call latency", cells[["published"]].set_axis(["value"], axis=1))]
figures_pays.limits(
    [
        ("B200, Rowmax-H15 (data type, mask, tokens, head dimension)", cells, theirs, "published"),
        (f"{CARD}, BF16, head dimension 128", limits_of(wide), series[128], "measured"),
        (f"{CARD}, BF16, head dimension 64", limits_of(either), series[64], "measured"),
    ]
)

# %% tags=["hide-input"]
resolved = measured[measured["verdict"] != gains.UNRESOLVED]
tests = {
    "B200, published": pays.right_signs(published, "published"),
    f"{CARD}, head dim 128, measured": pays.right_signs(resolved[resolved["head_dim"] == 128], "stock"),
    f"{CARD}, head dim 64, measured": pays.right_signs(resolved[resolved["head_dim"] == 64], "stock"),
}
SAID = {"overlapped": "pipes overlap", "exposed": "softmax exposed", "issue": "issue slots"}
signs = pd.DataFrame(
    [
        {"gains": card}
        | {
            f"{SAID[row.limit]}: right sign / median error (points)": f"{row.right} of {row.of} / {row.error:.1f}"
            for row in test.itertuples()
        }
        for card, test in tests.items()
    ]
).set_index("gains")
report.table(
    signs,
    "In how many cells a limit has the sign of the gain. Published: every printed cell of Rowmax-H15. Measured: every cell and kernel that is faster or slower by the rule. A prediction of no change counts as wrong.",
)

# %% tags=["hide-input"]
score = {(card, r.limit): r for card, test in tests.items() for r in test.itertuples()}
b200 = score["B200, published", "exposed"]
ours = [score[c, "exposed"] for c in list(tests)[1:]]
issue = [score[c, "issue"] for c in list(tests)[1:]]
b200_issue = score["B200, published", "issue"]
h15 = resolved[resolved["kernel"] == "h15"]
Markdown(
    f"**No limit holds on both cards.** (Two limits need a stock time and its clock, printed for {b200.of} cells; all published gains are positive, so there a sign tests little and the error more.) The exposed one has the sign right in {b200.right} of {b200.of} published cells "
    f"and in {sum(r.right for r in ours)} of {sum(r.of for r in ours)} measured ones; the issue limit in {b200_issue.right} of "
    f"{b200_issue.of} and {sum(r.right for r in issue)} of {sum(r.of for r in issue)}. On the {CARD} Rowmax-H15 is slower in "
    f"{int((h15['verdict'] == gains.SLOWER).sum())} of the {len(h15)} cells where the rule decides, by {signed(h15['stock'].max())} to "
    f"{signed(h15['stock'].min())} %, where an exposed softmax would have gained {h15['exposed'].min():.0f} to {h15['exposed'].max():.0f} %. "
    f"Even the right signs come with errors as large as the effects. A model that knows only how much work there is does not know "
    f"which of it is waited for."
)

# %% [markdown]
# ### Why it fails on Hopper
#
# `identity` leaves the exponential out and replaces it with nothing. What it gains is all that any exponential could gain
# without saving other instructions. {numref}`fig-pays-prices` shows it among the others, against the instructions that
# each adds or leaves out.

# %% tags=["hide-input"] mystnb={"figure": {"name": "fig-pays-prices", "caption": "Gain over stock against instructions a score that a kernel has more than stock, H200, BF16, measured: clocks of the profiler at head dimension 128 (median of three launches), time with intervals at head dimension 64. Line: the issue limit, compiled."}, "image": {"alt": "Two scatter plots of gain against added instructions: kernels that add instructions are slower than stock, those that leave some out are faster; at head dimension 128 packed exponentials lie well above no exponential at all, at 64 beside it."}}
NEEDED = ["h15", "fused7", "poly(2,all)", "packed(4,3)", "packed(1,3)", "lazy(4,3)", "identity"]
added = wide.drop_duplicates("kernel").set_index("kernel")
left = profiled[profiled["kernel"].isin(NEEDED)].set_index("kernel")
left = pd.DataFrame({"value": left["gain"], "added": added["added"], "issue": added["issue"]}).dropna()
right = narrow[narrow["kernel"].isin(NEEDED)].set_index("kernel")
right = right[["stock", "stock_low", "stock_high", "added", "issue"]].set_axis(
    ["value", "low", "high", "added", "issue"], axis=1
)
figures_pays.prices(
    [
        ("clocks, causal, 8K, head dim 128", left.rename_axis("kernel").reset_index()),
        (f"time, {title(narrow.iloc[0])}", right.rename_axis("kernel").reset_index()),
    ]
)

# %% tags=["hide-input"]
stock_xu = profiled.set_index("kernel").loc["stock"]
price = {m: counted[counted["cell"].str.contains(f"/{m}/")].set_index("kernel")["price"] for m in ("causal", "none")}
bound = {m: counted[counted["cell"].str.contains(f"/{m}/")].set_index("kernel")["gain"] for m in ("causal", "none")}


def priced(*names):
    values = [price[m][n] for m in price for n in names if n in price[m]]
    return f"{min(values):.1f} to {max(values):.1f}"


free64 = narrow.set_index("kernel").loc["identity"]
packed = [n for n in ("packed(4,3)", "lazy(4,3)") if n in bound["causal"]]
Markdown(
    f"At head dimension 128 the kernel without any exponential is only {signed(bound['causal']['identity'])} % (causal) and "
    f"{signed(bound['none']['identity'])} % (no mask) faster in clocks, although its XU utilisation falls from "
    f"{stock_xu['xu']:.0f} to {profiled.set_index('kernel').loc['identity', 'xu']:.0f} %. An instruction that each scheduler "
    f"issues more or less moves the SM by {priced('identity')} clocks if it is an exp2, and by {priced('h15', 's(7)', 'fused7')} if it "
    f"is one of those that replace it. **There, an exp2 is no dearer than the instructions that replace it**: the softmax of one warpgroup "
    f"runs beside the products of the other, which keep the tensor cores {stock_xu['tensor']:.0f} % busy. That what is waited for is a "
    f"chain of instructions, which Rowmax-H15 makes longer, is a guess.\n\n"
    f"At head dimension 64, where exp2 needs {at.loc[f'{CARD}, BF16, 64', 'xu']:.2f} of the products' clocks, leaving it out gains "
    f"{span(free64)} %. There it is on the critical path, and Rowmax-H15 still loses "
    f"({span(narrow.set_index('kernel').loc['h15'])} %): its instructions alone need "
    f"{at.loc[f'{CARD}, BF16, 64', 'busiest_issue']:.2f} of the products' clocks.\n\n"
    f"**On Hopper, added instructions always cost, and fewer can pay.** `packed(4,3)` and `lazy(4,3)` gain {signed(min(bound[m][n] for m in bound for n in packed))} to "
    f"{signed(max(bound[m][n] for m in bound for n in packed))} % in clocks at head dimension 128, *more than having no exponential at all*, although "
    f"`identity` executes fewer instructions still. So the count alone does not explain their gain: each instruction that they leave out "
    f"is worth {priced(*packed)} clocks, which no limit here gives. What they have and `identity` has not is P in its final form from the "
    f"conversion, and a row sum by packed BF16 additions. Those stand at the end of a turn, between the scores and the second "
    f"product; that they weigh more for it is a guess."
)

# %% [markdown]
# ### Clocks are not time
#
# At the card's power limit the clock gives way until the power fits. Then what a forward costs in time is its energy, over
# a constant power; a kernel that works its tensor cores harder is clocked lower, and one that makes them wait is clocked
# higher.

# %% tags=["hide-input"]
held = energy["cell"].iloc[0]
load = sustained(128)
load = load[load["cell"] == held].set_index("kernel")
base = timed[(timed["cell"] == held) & (timed["kernel"] == "stock")].iloc[0]
per_energy = energy.groupby("kernel")["vs_stock_counter"].mean()
power_rows = pd.DataFrame(
    [
        {
            "kernel": name,
            "gain in time (%)": span(row),
            "gain in clocks, time × clock (%)": signed(row["cycles"]),
            "gain in clocks, profiler, 8K (%)": signed(bound["causal"].get(name, float("nan"))),
            "clock against stock (%)": signed(100 * (row["clock"] / base["clock"] - 1)),
            "energy a forward (%)": signed(per_energy.get(name, float("nan"))),
            "gain that the energy implies (%)": signed(
                100 * (100 / (100 + per_energy[name]) - 1) if name in per_energy else float("nan")
            ),
        }
        for name, row in load.iterrows()
    ]
).set_index("kernel")
report.table(
    power_rows,
    f"{title(base)}, BF16, {CARD}, windows of {base['window_ms']:.0f} ms; the profiler's clocks and the energy, by the card's counter over a loop of its own, are of another board of the type. Measured. Stock runs at {base['clock']:.0f} MHz and {base['power']:.0f} W.",
)

# %% tags=["hide-input"]
both = [n for n in load.index if n in per_energy]
apart = max(abs(load.loc[n, "stock"] - 100 * (100 / (100 + per_energy[n]) - 1)) for n in both)
shrunk = load[load["cycles"].abs() > load["stock"].abs()]
Markdown(
    f"Gains in time are smaller than gains in clocks, either way, in {len(shrunk)} of {len(load)} rows. Where energy was "
    f"measured too ({' and '.join(both)}), time and energy, of two boards, agree within {apart:.1f} points. So a model of clocks, were it perfect, would still "
    f"overstate gains *and* losses under sustained load on this card; the paper's B200 ran its FP8 cells up to 8K at one clock, "
    f"and its long BF16 cells not (B.3)."
)

# %% [markdown]
# ### Why it fails on the B200
#
# There every gain of {numref}`fig-pays-limits` is positive, also where the tensor cores need longer than the exponentials
# ({numref}`fig-pays-account`). No counter was read. {ref}`gains` holds the first two limits against each cell. In short:
# causal FP8 is near the exposed limit, 16 bits far below it, and the cells without a mask, whose gain is twice as large
# at the same work a turn, fit neither. On Hopper a mask does nothing of the kind.

# %% tags=["hide-input"]
pairs = {}
for n in ("h15", "packed(4,3)", "identity"):
    pairs[n] = (bound["causal"][n], bound["none"][n])
fp8 = {
    m: report.published(t, dtype="fp8", seq="8192", metric="speedup")
    for m, t in (("causal", "tableB5a_main"), ("none", "tableB5c_noncausal"))
}
said = "; ".join(f"{n} {signed(a)} and {signed(b)} %" for n, (a, b) in pairs.items())
Markdown(
    f"Published for FP8 at 8K: {fp8['causal']} % causal and {fp8['none']} % without a mask. Measured on the {CARD} in clocks, causal and without: "
    f"{said}. So a mask alone need not double a gain; what does on the B200 is open."
)

# %% [markdown]
# At 16 bits, registers that spill in older versions of the stock kernel are a candidate ({ref}`stock-spills`). In FP8 the
# stock kernel spills in none of them, so there they are not.

# %% [markdown]
# (six-predictions)=
# ## The six predictions
#
# The paper sealed six predictions for the B200 before its first run. Two it could judge; four needed counters that it
# was refused. {ref}`sealed` reads those four in the code. Our counters are of another card, so they bear on the
# mechanism and not on the prediction itself.

# %% tags=["hide-input"]
evidence = throughput.evidence(frame)
evidence = evidence[evidence["dtype"].isin(["bf16", "e4m3"])]
profile = {m: counted[counted["cell"].str.contains(f"/{m}/")].set_index("kernel") for m in ("causal", "none")}


def counter(name, digits=1):
    return "; ".join(
        f"{profile[m].loc['stock', name]:.{digits}f} → {profile[m].loc['h15', name]:.{digits}f} ({said})"
        for m, said in (("causal", "causal"), ("none", "no mask"))
    )


near_zero = evidence["ex2 h15"].max() < 0.05
fp_up = [bool(profile[m].loc["h15", "fma"] > profile[m].loc["stock", "fma"]) for m in profile]
fp_work = evidence["fp32 h15"] > evidence["fp32 stock"]
longer = [100 * (profile[m].loc["h15", "cycles"] / profile[m].loc["stock", "cycles"] - 1) for m in profile]
same = all(profile[m].loc["h15", "registers"] <= profile[m].loc["stock", "registers"] for m in profile)
launch = bool((evidence["launch h15"] <= evidence["launch stock"]).all())
sealed = paper.table("predictions", numbers=True)
met, failed = (sealed[sealed["id"] == i] for i in ("4", "5"))
lo, hi = met.iloc[0][["pred_low", "pred_high"]]
top = failed.iloc[0]["pred_high"]
forward = measured[
    (measured["kernel"] == "h15")
    & measured["causal"]
    & (measured["head_dim"] == 128)
    & measured["seq"].isin([4096, 8192, 16384])
]
serial = 100 * (evidence["serial h15"] / evidence["serial stock"] - 1)
rows = [
    (
        "1: XU utilisation near zero",
        "met" if near_zero else "not met",
        f"{evidence['ex2 h15'].max():.3f} exp2 a score left, compiled",
        f"XU {counter('xu')} %",
    ),
    (
        "2: FP pipe utilisation up",
        "met" if fp_work.all() and all(fp_up) else "mixed" if fp_work.any() or any(fp_up) else "not met",
        f"FP32 work up in {int(fp_work.sum())} of {len(fp_work)} kernels, compiled: stock's own polynomial goes away",
        f"FMA {counter('fma')} %; the ALU rises more, {counter('alu')} %",
    ),
    (
        "3: softmax stage −35 to −50 %",
        "open",
        f"summed clocks of its pipes {signed(serial.max(), 0)} to {signed(serial.min(), 0)} %, compiled; no time",
        f"not seen: the whole kernel takes {signed(longer[0])} (causal) and {signed(longer[1])} % (no mask) more clocks",
    ),
    (
        f"4: FP8 causal gain {lo:g} to {hi:g} %",
        "met" if met["measured"].between(lo, hi).all() else "not met",
        "; ".join(f"{r.measured:g} % at {int(r.seq) // 1024}K" for r in met.itertuples()) + ", published",
        "no FP8 path in this kernel",
    ),
    (
        f"5: BF16 gain below {top:g} %",
        "failed" if (failed["measured"] >= top).any() else "met",
        "; ".join(f"{r.measured:g} % at {int(r.seq) // 1024}K" for r in failed.itertuples()) + ", published",
        f"{'holds' if (forward['stock'] < top).all() else 'fails'}, as H15 is no gain: {signed(forward['stock'].min())} to {signed(forward['stock'].max())} % at 4K to 16K",
    ),
    (
        "6: registers a thread not more",
        "met, but empty" if launch and same else "not met",
        "written in FA4's source, equal by construction, compiled",
        f"{counter('registers', 0)}, at launch",
    ),
]
predictions = pd.DataFrame(rows, columns=["prediction", "status", "evidence on the B200", f"on the {CARD}, measured"])
prose(
    predictions.set_index("prediction"),
    "The sealed predictions of B.5, their status for the B200, and what another card's counters add.",
)

# %% [markdown]
# The mechanism that the predictions describe is confirmed where it can be read: the exponential unit does fall idle (1).
# What was expected of it, that the softmax stage then gets shorter (3), does not follow. On Hopper the unit falls idle and the
# kernel gets slower.

# %% [markdown]
# ## Which exponential, on which card?
#
# Losses are of the patched kernel itself in a model; measured ones are of Hopper. They carry over to another card only
# as far as its kernel treats the anchor alike, which Blackwell's does not quite ({ref}`kernel-semantics`).

# %% tags=["hide-input"]
loss = kernel_fidelity.table(run).set_index("condition")


def cost(condition):
    """ΔNLL of the kernel, in thousandths of a nat, with its interval."""
    if condition not in loss.index:
        return report.MISSING
    row = loss.loc[condition]
    return f"{1000 * row['dnll']:.2f} [{1000 * row['low']:.2f}, {1000 * row['high']:.2f}], {run.model}, measured"


def on_card(kernel, head_dim):
    rows = sustained(head_dim)
    rows = rows[rows["kernel"] == kernel]
    return f"{span(rows.iloc[0])} %, measured" if len(rows) else report.MISSING


table2 = {
    m: paper.value("table2_fidelity", model=m, path="bf16_kernel", metric="dnll")
    for m in ("Qwen2.5-1.5B", "Llama-3.1-8B")
}
fp8_loss = paper.value("table2_fidelity", model="Qwen2.5-1.5B", path="fp8_semantic", metric="dnll")


def called(kernel):
    """What the rule calls a kernel in the cells of the guide."""
    found = {v: 0 for d in (128, 64) for v in sustained(d).set_index("kernel")["verdict"].get([kernel], [])}
    return " or ".join(found) or "not timed"


paper_loss = "BF16 " + "; ".join(f"{1000 * v.value:.2f}, {m}" for m, v in table2.items())
paper_loss += f"; FP8 {1000 * fp8_loss.value:.2f}, Qwen2.5-1.5B, in simulation; published"
pub = {k: report.published("tableB5a_main", dtype=k, seq="16384", metric="speedup") for k in ("bf16", "fp8")}
short = paper.value("tableB5b_seq_sweep", seq=2048, run="three_round", metric="speedup")
same_work = {
    d: all(
        throughput.stages(audit.pick(frame, arch="sm_100a", dtype=d, causal=True, head_dim=128, variant=v))
        == throughput.stages(audit.pick(frame, arch="sm_100a", dtype=d, causal=True, head_dim=128, variant="h15"))
        for v in ("s(7)",)
    )
    for d in ("bf16", "e4m3")
}
guide = pd.DataFrame(
    [
        (f"{CARD}, BF16: stock", "0", "0", "wherever the loss must not move"),
        (
            f"{CARD}, BF16: Rowmax-H15",
            f"128: {on_card('h15', 128)}; 64: {on_card('h15', 64)}",
            cost("h15()"),
            f"no: {called('h15')}, and coarser",
        ),
        (
            f"{CARD}, BF16: S(Q₇), fused",
            f"128: {on_card('fused7', 128)}; 64: {on_card('fused7', 64)}",
            cost("sq(k=7)") + ", in a form that is not fused",
            f"no: {called('fused7')}",
        ),
        (
            f"{CARD}, BF16: packed(4,3)",
            f"128: {on_card('packed(4,3)', 128)}; 64: {on_card('packed(4,3)', 64)}",
            cost("packed(k=4)"),
            f"{called('packed(4,3)')}: if its loss is acceptable",
        ),
        (
            f"{CARD}, BF16: packed(1,3)",
            f"128: {on_card('packed(1,3)', 128)}; 64: {on_card('packed(1,3)', 64)}",
            cost("packed(k=1)"),
            f"{called('packed(1,3)')}, but k = 4 has the same instructions and a smaller loss",
        ),
        (
            "B200, FP8 or BF16, 8K and more: Rowmax-H15",
            f"FP8 {pub['fp8']} %, BF16 {pub['bf16']} %, 16K causal, published",
            paper_loss,
            "yes, by the paper's numbers; not confirmed here",
        ),
        (
            "B200: S(Q₇)",
            f"{'the same clocks of every pipe as H15' if all(same_work.values()) else 'not the same clocks as H15'}, compiled; not timed",
            f"{cost('sq(k=7)')} on {CARD}",
            "before H15, if the time is confirmed",
        ),
        (
            "B200, FP8, 2K and less: any",
            f"H15 {signed(short.value)} %, published",
            paper_loss,
            "stock: the kernel gains and the call does not (B.4)",
        ),
        (
            "B300: any",
            "no time; exp2 twice as fast, so least to win, compiled",
            report.MISSING,
            "stock, until someone times it",
        ),
    ],
    columns=["card and exponential", "gain over stock", "ΔNLL (10⁻³ nats)", "use"],
).set_index("card and exponential")
prose(guide, f"A guide. Gains on the {CARD}: time, sustained, causal 16K, by head dimension, 95 % intervals. A loss is of the model named.")

# %% tags=["hide-input"]
four, one = (loss.loc[c, "dnll"] if c in loss.index else float("nan") for c in ("packed(k=4)", "packed(k=1)"))
best = sustained(128).set_index("kernel").loc["packed(4,3)"]
Markdown(
    f"In a sentence: **a coarser exponential pays where the kernel waits for exp2, or where the new form is shorter than the old "
    f"one.** The first is a property of the card and data type, and on the {CARD} at head dimension 128 it does not hold. The second is a property of the "
    f"code: the packed form gains {span(best)} % there for {1000 * four:.2f}·10⁻³ nats in {run.model}, against {1000 * one:.2f}·10⁻³ for its coarsest "
    f"relative. Here, giving up accuracy paid only where the code also became shorter; how much it pays a count of instructions does not foretell."
)

# %% tags=["hide-input"]
rival = timed[timed["kernel"] == "sdpa-cudnn"]
ahead = rival[rival["verdict"] == gains.FASTER]
Markdown(
    (
        f"One exact kernel belongs in the comparison. cuDNN's attention, as torch calls it, was timed in {len(rival)} cells on the "
        f"{CARD}: it is faster than the stock kernel in {len(ahead)}"
        + (f" ({'; '.join(f'{title(r)}: {span(r)} %' for r in ahead.to_dict('records'))})" if len(ahead) else "")
        + f" and slower in {int((rival['verdict'] == gains.SLOWER).sum())}. Where it is faster, it costs no loss at all."
    )
    if len(rival)
    else ""
)

# %% [markdown]
# ## What is not known
#
# - **Anything on a B200 beyond the paper.** We had none. Why its gain doubles without a mask, why 16 bits gain at all where
#   the tensor cores need longer, and what the packed form does there, are open.
# - **The critical path itself.** Neither counters nor counts show which instruction another waits for; the argument from
#   `identity` is about the sum of all exp2 and not about one.
# - **Other power limits.** Gains under sustained load hold for the limit of this card. With a higher one they move towards
#   those in clocks.
# - **Other shapes.** Head dimensions 64 and 128, one batch, 16 heads; no decode, no backward pass, no paged cache.
# - **The loss of other models** in the packed kernel. It is known of those in {ref}`packed-loss`, on one text; the guide
#   above has the smallest.
