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
# (time-energy)=
# # Time and energy
#
# On a B200 the paper's Rowmax-H15 makes attention faster in nearly every cell {cite:p}`zhu2026softmax`. This chapter
# runs the same replacement on a Hopper card, whose kernel has no polynomial to relieve the exponential and whose
# tensor cores are slower, and asks
#
# 1. whether the paper's form is faster there, cell by cell, beyond what two runs of the same program differ by,
# 2. what the profiler's counters, which the paper was refused, say of the reason,
# 3. what a card at its power limit does to such a measurement, and
# 4. what becomes of the energy.
#
# It follows §5.5, B.3 and B.4: Figures 4C, 4D and S2, Tables B4 and B5a–g. Published numbers and ours stand beside each
# other, never in one column: they are of another card, in part of another dtype.

# %% tags=["parameters"]
record = "results"
gpu = ""

# %% tags=["hide-input"]
import statistics as st

import pandas as pd
from IPython.display import Markdown

from softmaxlab import figures, figures_time, paper, report
from softmaxlab.bench import cells, gains, read
from softmaxlab.bench.record import stored

figures.style()


def said(text):
    return Markdown(report.minus(text))

# %% [markdown]
# ## The definitions
#
# A **window** is a stretch of back-to-back launches from one CUDA graph, timed between two events; the kernel's duration
# is the window over its launches, without Python and without launch gaps. In a **round** every kernel has its windows
# within moments. The **speed-up** of kernel 1 over kernel 0 is $100\,(t_0/t_1 - 1)$ percent.
#
# The paper gives the ratio of pooled medians and the standard deviation of three rounds, "a spread, not a confidence
# interval". Here $\ln(t_0/t_1)$ is taken inside each round and rounds are resampled, which gives an **interval** and lets
# a drifting clock act on both sides alike. Both statistics are in the table below.
#
# The **control** is the stock exponential sent through the path by which all others come in; it compiles to the machine
# code of stock ({ref}`compiler`). Whatever the control "gains" over stock is noise: the **floor**. A kernel counts as
# *faster* or *slower* if its intervals against stock and against the control both lie on that side of zero, and both
# gains are larger than the floor. Else it is *unresolved*.
#
# The kernels: `h15`, `s(3)` and `s(7)` in the paper's bit form; `fused7`, S(Q₇) with scale, maximum and constant in one
# FMA; `poly(2,all)`, FA4's polynomial for every score; `packed(4,3)` and `lazy(4,3)`, forms of our own that are the
# subject of the chapter "A packed exponential"; `skip`, the control of `lazy`; `identity`, no exponential at all, which
# computes nonsense and bounds what leaving exp2 out could buy by itself. What is timed has passed its gates in the cell's
# shape; the paper's forms `h15` and `s(k)` fail one that no cell has, rows whose keys are all masked ({ref}`masked`).

# %% [markdown]
# ## The run

# %%
every = gains.table(record, every=True)
gpu = gpu or every["gpu"].value_counts().index[0]
every = every[every["gpu"] == gpu]
table = gains.table(record)
table = table[table["gpu"] == gpu]
counted = read.counts(record)
counted = counted[counted["gpu"] == gpu]
energy = read.energies(record)
energy = energy[energy["gpu"] == gpu]

# %% tags=["hide-input"]
entries = [(e, facts) for e, facts, kind in stored("duration", record) if kind == "measured" and facts["GPU"] == gpu]
facts = entries[0][1]
limit = float(facts.get("power limit W") or "nan")


def length(seq):
    return f"{seq // 1024}K"


def named(cell):
    """A cell as its label: mask, length, head dimension, and what is not the common shape."""
    c = cells.Cell.parse(cell) if isinstance(cell, str) else cell
    heads = "" if (c.heads, c.kv_heads) == (16, 16) else f", {c.heads}/{c.kv_heads} heads"
    dtype = "" if c.dtype == "bf16" else f"{c.dtype.upper()} "
    return f"{dtype}{'causal' if c.causal else 'no mask'} {length(c.seq)}, hd {c.head_dim}{heads}"


def ordered(frame):
    return frame.sort_values(["head_dim", "causal", "seq"], ascending=[False, False, True], kind="stable")


def ranged(row, what):
    middle, low, high = row[what], row[f"{what}_low"], row[f"{what}_high"]
    return f"{middle:+.1f}" + ("" if pd.isna(low) else f" [{low:+.1f}, {high:+.1f}]")


least, most = table["rounds"].min(), table["rounds"].max()
empty = sorted({named(e.cell) for e, _ in entries if not any(t["windows"] for t in e.turns)})
begun = sorted({named(e.cell) for e, _ in entries if e.partial and any(t["windows"] for t in e.turns)})
refused = {}
for e, _ in entries:
    for kernel, why in e.refused.items():
        if not len(table[(table["cell"] == e.cell) & (table["kernel"] == kernel)]):
            refused.setdefault((kernel, why), []).append(named(e.cell))
measured_dtypes = ", ".join(sorted({d.upper() for d in table["dtype"]}))
parts = [
    f"**{gpu}**, {facts['SMs']} SMs, at most {facts['max SM clock MHz']} MHz, power limit {limit:.0f} W, clock not locked, "
    f"driver {facts['driver']}; flash-attn-4 {facts['flash-attn-4']}, torch {facts['torch']}. {table['cell'].nunique()} "
    f"cells in {measured_dtypes}, 16 heads, batch 1, "
    f"{least}{f' to {most}' if most > least else ''} rounds."
]
ids = {what: {f["GPU id"] for e, f in entries if e.protocol.get("window_ms") == what} for what in sorted(set(every["window_ms"]))}
if len(set().union(*ids.values())) > 1:
    parts.append(
        "**Not all of it is one board**: windows of "
        + " and of ".join(f"{what:.0f} ms were timed on {', '.join(sorted(found))}" for what, found in ids.items())
        + " (the driver's ids, hashed). Every ratio is of one board and one session."
    )
if begun:
    parts.append(f"Begun in long windows and cut short: {'; '.join(begun)}.")
if empty:
    parts.append(f"Planned in long windows and not reached: {'; '.join(empty)}.")
for (kernel, why), where in refused.items():
    parts.append(f"`{kernel}` was left out in {'; '.join(where)}: {why}, in that session.")
if any("log-sum-exp" in why for _, why in refused):
    parts.append(
        "The bound of that gate was narrower then than the definition allows for a row with a score at a jump of the "
        "lattice. It is mended, and the kernel's later readings are green (chapter \"The patch and its gates\")."
    )
said(" ".join(parts))

# %% [markdown]
# (time-cells)=
# ## Cell by cell

# %% tags=["hide-input"] mystnb={"figure": {"name": "fig-time-cells", "caption": "Speed-up over the stock kernel by cell, 95 % intervals over rounds. Left: ours, measured, with what the stock program itself gains when it is run again (grey). Right: Rowmax-H15 on a B200, published, no intervals. Each cell is of the longest windows that have an interval. Counterpart of Figure 4C."}, "image": {"alt": "Two panels of speed-ups by cell. Left, on our card, Rowmax-H15 lies left of zero in every cell and the packed form right of it. Right, on the B200, published speed-ups of Rowmax-H15 are all positive."}}
COMPARED = {"h15": "Rowmax-H15", "fused7": "fused7", "packed(4,3)": "packed(4,3)"}
shown = ordered(table[table["kernel"].isin(COMPARED)]).assign(label=lambda f: f["cell"].map(named))
published_cells = pd.concat(
    [report.published_rows(t, metric="speedup") for t in ("tableB5a_main", "tableB5c_noncausal")], ignore_index=True
)
MASKS = {"causal": "causal", "noncausal": "no mask"}
published_cells["label"] = [
    f"{r.dtype.upper()} {MASKS[r.mask]} {length(int(r.seq))}" for r in published_cells.itertuples()
]
figures_time.gains(shown, published_cells, COMPARED, gpu)

# %% tags=["hide-input"]
def verdict_of(row):
    return f"{row['verdict']}" + ("" if row["gate"] == "green" else ", no gate")


h15 = ordered(table[table["kernel"] == "h15"])
report.table(
    pd.DataFrame(
        {
            "cell": h15["cell"].map(named),
            "stock (ms), measured": [
                f"{table[(table['cell'] == r.cell) & (table['kernel'] == 'stock')]['ms'].iloc[0]:.4f}" for r in h15.itertuples()
            ],
            "h15 (ms), measured": [f"{ms:.4f}" for ms in h15["ms"]],
            "against stock (%), measured": [ranged(r, "stock") for _, r in h15.iterrows()],
            "against control (%), measured": [ranged(r, "control") for _, r in h15.iterrows()],
            "control against stock (%), measured": [ranged(r, "floor") for _, r in h15.iterrows()],
            "the paper's statistic (%), measured": [f"{v:+.1f}" for v in h15["pooled"]],
            "windows (ms)": [f"{w:.0f}" for w in h15["window_ms"]],
            "verdict": [verdict_of(r) for _, r in h15.iterrows()],
        }
    ).set_index("cell"),
    f"Rowmax-H15 in the paper's bit form on {gpu}, BF16. Medians of windows; speed-ups inside rounds.",
)

# %% tags=["hide-input"]
counts_of = h15["verdict"].value_counts()
worst = h15.loc[h15["stock"].idxmin()]
mildest = h15.loc[h15["stock"].idxmax()]
of_type = {d: published_cells[published_cells["dtype"] == d]["value"] for d in published_cells["dtype"].unique()}
ranges = ", ".join(f"{d.upper()} {v.min():+.1f} to {v.max():+.1f} %" for d, v in of_type.items())
slower = int(counts_of.get("slower", 0))
said(
    f"Rowmax-H15 is **slower in {slower} of {len(h15)} cells**, faster in {int(counts_of.get('faster', 0))}, "
    f"unresolved in {int(counts_of.get('unresolved', 0))}: from {mildest['stock']:+.1f} % ({named(mildest['cell'])}) to "
    f"{worst['stock']:+.1f} % ({named(worst['cell'])}). "
    + (
        f"**The paper's result does not carry over to this card**: on the B200 it gains at head dimension 128 "
        f"({ranges}, published). "
        if slower > len(h15) / 2
        else f"The B200 gains at head dimension 128 ({ranges}, published). "
    )
    + "It is a measurement of what replaces what: Hopper's stock kernel computes all exponentials in hardware and spends "
    "few instructions on them, and on the B200 the paper's form also drives out a polynomial."
)

# %% tags=["hide-input"]
OTHERS = ["s(3)", "s(7)", "fused7", "poly(2,all)", "packed(4,3)", "lazy(4,3)", "skip", "identity"]
MARK = {"faster": " ▲", "slower": " ▼", "unresolved": ""}
rows = []
for cell in ordered(table)["cell"].drop_duplicates():
    here = table[table["cell"] == cell].set_index("kernel")
    control = here.loc["h15"] if "h15" in here.index else here.iloc[0]
    row = {"cell": named(cell), "control": ranged(control, "floor")}
    for kernel in OTHERS:
        found = here.loc[kernel] if kernel in here.index else None
        row[kernel] = report.MISSING if found is None else f"{ranged(found, 'stock')}{MARK[found['verdict']]}"
    rows.append(row)
report.table(
    pd.DataFrame(rows).set_index("cell"),
    f"Speed-up over stock (%) on {gpu}, measured. ▲ faster and ▼ slower by the rule, else unresolved; identity has no gate "
    "and is no exponential. The control is that of the main run of the cell; the rule takes each kernel's own.",
)

# %% tags=["hide-input"]
def tallied(kernel):
    rows = table[table["kernel"] == kernel]
    v = rows["verdict"].value_counts()
    return (
        f"`{kernel}` is faster in {int(v.get('faster', 0))}, slower in {int(v.get('slower', 0))} and unresolved in "
        f"{int(v.get('unresolved', 0))} of {len(rows)} cells ({rows['stock'].min():+.1f} to {rows['stock'].max():+.1f} %)"
    )


said(
    "; ".join(tallied(k) for k in ["fused7", "poly(2,all)", "identity", "packed(4,3)"] if k in set(table["kernel"]))
    + ". Of the forms, those with more instructions than stock are mostly slower: folding the constant and the maximum into one FMA takes "
    "most of the loss back, and a polynomial, which the B200's stock kernel runs for a share of its scores, would be the worst choice here."
)

# %% [markdown]
# (published-cells)=
# ## Tables B5a, B5c and B5e
#
# The paper's cells, with the same shape on our card beside them where it was measured.

# %% tags=["hide-input"]
def beside(dtype, mask, seq, head_dim, heads=16, kv_heads=16, batch=1):
    """Rowmax-H15 and its control in the paper's cell, on our card, if it was measured there."""
    shape = {"dtype": dtype, "causal": mask == "causal", "seq": seq, "head_dim": head_dim}
    shape |= {"heads": heads, "kv_heads": kv_heads, "batch": batch}
    rows = table[table["kernel"] == "h15"]
    for name, wanted in shape.items():
        rows = rows[rows[name] == wanted]
    missing = {f"{gpu} (%), measured": report.MISSING, "its control (%), measured": report.MISSING}
    if rows.empty:
        return missing
    return dict(zip(missing, (ranged(rows.iloc[0], "stock"), ranged(rows.iloc[0], "floor"))))


main = []
for name in ("tableB5a_main", "tableB5c_noncausal"):
    for r in report.published_rows(name, metric="speedup").itertuples():
        where = {"dtype": r.dtype, "mask": r.mask, "seq": int(r.seq)}
        spread = report.published(name, **{k: str(v) for k, v in where.items()}, metric="per_round_sd")
        main.append(
            {"cell": f"{r.dtype.upper()} {MASKS[r.mask]} {length(int(r.seq))}"}
            | {"B200 (%), published": f"{r.value:+.1f}", "sd of rounds (points), published": report.text(spread)}
            | {"rounds, published": r.rounds}
            | beside(**where, head_dim=128)
        )
report.table(pd.DataFrame(main).set_index("cell"), "Tables B5a and B5c: speed-up of Rowmax-H15 over stock, head dimension 128.")

# %% tags=["hide-input"]
shapes = []
for r in report.published_rows("tableB5e_shapes", metric="speedup").itertuples():
    heads, kv = int(r.heads), int(r.kv_heads or r.heads)
    label = f"{r.dtype.upper()} {MASKS[r.mask]} {length(int(r.seq))}, hd {int(r.head_dim)}, {heads}/{kv} heads, batch {int(r.batch)}"
    shapes.append(
        {"configuration": label, "B200 (%), published": f"{r.value:+.1f}"}
        | beside(r.dtype, r.mask, int(r.seq), int(r.head_dim), heads, kv, int(r.batch))
    )
report.table(pd.DataFrame(shapes).set_index("configuration"), "Table B5e: other shapes.")

# %% [markdown]
# FlashAttention-4 has no FP8 forward on Hopper (FlashAttention-3 has), and so there is no counterpart here. It is the dtype with the B200's largest gains: it
# doubles the tensor rate and leaves the softmax as it is.

# %% [markdown]
# (emulation-sweep)=
# ## Table B5d: FA4's own settings
#
# On Blackwell, FA4 computes a share of the exponentials by a polynomial. Hopper's kernel has no such emulation, so
# this sweep **cannot be measured here**; what stands in for it is `poly(2,all)` above, which no setting of the stock
# kernel offers. Table B5d and Figure 4D as published:

# %% tags=["hide-input"]
swept = report.published_rows("tableB5d_emulation", metric="speedup_vs_stock")
report.table(
    pd.DataFrame(
        {
            "kernel": [r.condition.replace("_", " ") for r in swept.itertuples()],
            "share emulated (%), published": [r.emulated_pct or report.MISSING for r in swept.itertuples()],
            "against the default setting (%), published": [f"{v:+.1f}" for v in swept["value"]],
            "session": swept["session"],
        }
    ).set_index("kernel"),
    "The paper's sweep: B200, FP8 causal 8K. Session S4's settings are compared with session S1's default.",
)

# %% [markdown]
# What those settings compile to, and that none of them spills, is in {ref}`compiler`.

# %% [markdown]
# (time-lengths)=
# ## Sequence length

# %% tags=["hide-input"] mystnb={"figure": {"name": "fig-time-lengths", "caption": "Speed-up against the sequence length, causal. Ours: kernel duration in BF16, windows of 20 ms, with the control's interval in grey. A kernel is shown where it was timed in those. Published: FP8 on a B200, call latency (Table B5b) and kernel duration (Table B4). Counterpart of Figure S2."}, "image": {"alt": "Three panels of speed-up against tokens: two measured ones, where Rowmax-H15 stays below zero at every length, and a published one, where call latency is negative at 1K and 2K and the kernel alone positive at all lengths."}}
shortest = every.groupby("cell")["window_ms"].transform("min")
brief = every[every["window_ms"] == shortest]


def by_length(head_dim):
    rows = brief[brief["causal"] & (brief["head_dim"] == head_dim) & brief["kernel"].isin(COMPARED) & (brief["dtype"] == "bf16")]
    rows = rows[(rows["heads"] == 16) & (rows["kv_heads"] == 16)]
    rows = rows.assign(order=rows["kernel"].map(list(COMPARED).index)).sort_values(["order", "seq"])
    named_ends = {"stock": "value", "stock_low": "low", "stock_high": "high"}
    return rows.assign(series=rows["kernel"].map(COMPARED)).rename(columns=named_ends)


latency_sweep = report.published_rows("tableB5b_seq_sweep", metric="speedup", run="three_round").assign(series="call latency")
traced = report.published_rows("tableB4_timeline", metric="kernel_speedup", mask="causal")
traced = traced[traced["stat"] == ""].assign(series="kernel duration")
theirs = pd.concat([latency_sweep, traced])[["seq", "series", "value"]].astype({"seq": float})
figures_time.lengths(
    [
        (f"{gpu}, head dim 128", by_length(128), True),
        (f"{gpu}, head dim 64", by_length(64), True),
        ("B200, FP8, head dim 128", theirs, False),
    ]
)

# %% tags=["hide-input"]
b4 = report.published_rows("tableB4_timeline")
listed = []
for (mask, seq), rows in b4[b4["stat"].isin(["", "median_250", "mean_200"]) & (b4["seq"] != "")].groupby(["mask", "seq"], sort=False):
    at = rows.set_index(["kernel", "metric"])["value"]
    listed.append(
        {
            "cell": f"FP8 {MASKS[mask]} {length(int(float(seq)))}",
            "kernel, stock (µs), published": f"{at['A0', 'kernel_duration']:.1f}",
            "kernel, H15 (µs), published": f"{at['A1', 'kernel_duration']:.1f}",
            "kernel (%), published": f"{at['A1_vs_A0', 'kernel_speedup']:+.1f}",
            "call (%), published": f"{at['A1_vs_A0', 'call_speedup']:+.1f}",
            "outside the kernel, stock (%), published": f"{at['A0', 'nonkernel_share']:.1f}",
        }
    )
sweep = report.published_rows("tableB5b_seq_sweep", metric="speedup")
by_run = {run: rows.set_index("seq")["value"] for run, rows in sweep.groupby("run")}
for row in listed:
    seq = next(s for s in by_run["three_round"].index if row["cell"] == f"FP8 causal {length(int(float(s)))}") if "causal" in row["cell"] else None
    row["call, Table B5b (%), published"] = report.MISSING if seq is None else f"{by_run['three_round'][seq]:+.1f}"
    ends = [report.published("tableB5b_seq_sweep", seq=seq, metric=f"round_{end}") for end in ("min", "max")]
    row["its rounds (%), published"] = report.MISSING if None in ends else " … ".join(f"{e.value:+.1f}" for e in ends)
    row["retest (%), published"] = f"{by_run['retest'][seq]:+.1f}" if seq in by_run["retest"].index else report.MISSING
report.table(pd.DataFrame(listed).set_index("cell"), "Tables B4 and B5b: kernel duration and call latency on the B200 by length.")

# %% [markdown]
# Below 4K a call on the B200 is bound by its launch, and the sign of the gain in call latency is that of the host. Our
# durations come from CUDA graphs and see the kernel alone; call latency was not measured on this card.

# %% [markdown]
# (power-limit)=
# ## Short windows, long windows and the power limit
#
# A long attention kernel would draw more than the board allows; its power management then lowers the clock, with a lag.
# In a short window
# a kernel meets the clock that its predecessor left behind; in a long one it meets its own. So the first is noisier
# and shows the kernel at a borrowed clock, and the second is what a sustained load gets.

# %% tags=["hide-input"] mystnb={"figure": {"name": "fig-time-spread", "caption": "How far stock and control, the same program, differ from round to round, against the board's power. Measured."}, "image": {"alt": "Scatter plot on a logarithmic axis: cells far below the power limit have a spread of a tenth of a point, cells at it of several points in short windows and of one to two points in long ones."}}
noise = every[(every["kernel"] == "stock") & (every["rounds"] >= gains.LEAST_ROUNDS)]
figures_time.spread(noise.assign(label=noise["cell"].map(named))[["label", "power", "spread", "window_ms"]], limit)

# %% tags=["hide-input"]
spans = every.groupby("cell")["window_ms"].nunique()
both = every[every["cell"].isin(spans[spans > 1].index) & every["kernel"].isin(["h15", "packed(4,3)", "lazy(4,3)"])]
stock_at = every[every["kernel"] == "stock"].set_index(["cell", "window_ms"])
listed = []
for (cell, kernel), rows in ordered(both).groupby(["cell", "kernel"], sort=False):
    row = {"cell and kernel": f"{named(cell)}: {kernel}"}
    for what, r in (("short", rows.loc[rows["window_ms"].idxmin()]), ("long", rows.loc[rows["window_ms"].idxmax()])):
        if what == "short" and rows["window_ms"].nunique() == 1:
            row |= {"short windows (%), measured": report.MISSING, "stock → it, short (MHz), measured": report.MISSING}
            continue
        base = stock_at.loc[(cell, r["window_ms"])]
        row[f"{what} windows (%), measured"] = ranged(r, "stock")
        row[f"control, {what} (%), measured"] = ranged(r, "floor")
        row[f"stock → it, {what} (MHz), measured"] = f"{base['clock']:.0f} → {r['clock']:.0f}"
    listed.append(row)
report.table(
    pd.DataFrame(listed).fillna(report.MISSING).set_index("cell and kernel"),
    f"The same cells in windows of {noise['window_ms'].min():.0f} and {noise['window_ms'].max():.0f} ms on {gpu}. Speed-up over stock, "
    "and the median clock after a window.",
)

# %% tags=["hide-input"]
quiet, loud = noise.loc[noise["power"].idxmin()], noise[noise["power"] > 0.93 * limit]
lengths = sorted(loud["window_ms"].unique())
middle = {w: loud[loud["window_ms"] == w]["spread"].median() for w in lengths}
steady = every[(every["window_ms"] == max(every["window_ms"])) & (every["rounds"] >= gains.LEAST_ROUNDS)]


def clocks(kernel):
    rows = steady[steady["kernel"] == kernel]
    ratios = [100 * (r.clock / stock_at.loc[(r.cell, r.window_ms)]["clock"] - 1) for r in rows.itertuples()]
    return f"{st.median(ratios):+.1f} %"


floors_of = every[(every["kernel"] == "control") & (every["rounds"] >= gains.LEAST_ROUNDS)]
strayed = int(((floors_of["floor_low"] > 0) | (floors_of["floor_high"] < 0)).sum())


def bursts(kernel, base="stock"):
    rows = every[(every["kernel"] == kernel) & (every["rounds"] >= gains.LEAST_ROUNDS)]
    wide = rows.pivot(index="cell", columns="window_ms", values=base).dropna()
    if wide.empty or wide.shape[1] < 2:
        return ""
    short, long = wide.columns.min(), wide.columns.max()
    return (
        f"{wide[short].median():+.1f} % in windows of {short:.0f} ms and {wide[long].median():+.1f} % in windows of {long:.0f} ms "
        f"for `{kernel}` ({len(wide)} cells)"
    )


said(
    f"Where the board stays at {quiet['power']:.0f} W ({named(quiet['cell'])}), stock and control agree to "
    f"{quiet['spread']:.2f} points. At the limit their spread is {middle[lengths[0]]:.1f} points in windows of {lengths[0]:.0f} ms"
    + (f" and {middle[lengths[-1]]:.1f} in windows of {lengths[-1]:.0f} ms (medians over cells). " if len(lengths) > 1 else ". ")
    + "The reason is in the clocks. In long windows every kernel draws "
    f"{steady['power'].min():.0f} to {steady['power'].max():.0f} W, whatever it computes; the clock is what differs: "
    f"{clocks('h15')} against stock for `h15`"
    + (f", {clocks('packed(4,3)')} for `packed(4,3)`" if "packed(4,3)" in set(steady["kernel"]) else "")
    + ". A kernel that keeps the tensor cores waiting draws less power a cycle and gets a faster clock for it; one that "
    "keeps them busy gets a slower one. **In these windows the clock works against each difference in cycles**, so a sustained "
    "gain or loss is smaller than one in cycles. It need not: how much power a cycle takes depends on what it computes. "
    "Bursts and long windows were timed on two boards. Over the "
    f"cells with both, the median against stock is {bursts('h15')}"
    + (f", and {bursts('packed(4,3)')}" if bursts("packed(4,3)") else "")
    + f"; against the control, {bursts('h15', 'control')}"
    + (f", and {bursts('packed(4,3)', 'control')}" if bursts("packed(4,3)") else "")
    + ". What stock's own clock did in a burst is in the first and not in the second: no systematic difference between bursts and "
    f"the steady state is resolved here. In {strayed} of {len(floors_of)} runs of a cell the control's interval does not hold zero, where "
    f"chance alone gives about {0.05 * len(floors_of):.0f}; that a gain must also exceed the control's is a precaution."
)

# %% [markdown]
# The paper recorded clocks after each window. In FP8, at 16K and 32K, its patched kernel ran at a lower clock than stock,
# as a faster one does here; in BF16 at 16K at a slightly higher one. It did not record the power limit.

# %% [markdown]
# (time-counters)=
# ## Counters: why it is slower
#
# Four of the paper's predictions needed a profiler's counters, which no instance of its authors allowed. Ours did.

# %% tags=["hide-input"] mystnb={"figure": {"name": "fig-time-counters", "caption": "Share of its peak that each pipe reaches, by kernel, from the profiler's counters at 8K, head dimension 128, BF16. Measured."}, "image": {"alt": "Two panels, causal and without a mask. The XU pipe is at about 40 % in the stock kernel and near 1 % in all others; Rowmax-H15 raises the ALU pipe and the issue slots and lowers the tensor cores, the packed form raises the tensor cores."}}
pipes = {"xu": "xu %", "alu": "alu %", "fma": "fma %", "issue": "issue %", "tensor": "tensor %"}
panels = {
    named(cell): rows[["kernel"]].assign(**{key: rows[column] for key, column in pipes.items()})
    for cell, rows in counted.groupby("cell", sort=False)
}
figures_time.counters(panels)

# %% tags=["hide-input"]
listed, cycle_gain = [], {}
for cell, rows in counted.groupby("cell", sort=False):
    stock = rows.set_index("kernel").loc["stock"]
    for _, r in rows.iterrows():
        cycle_gain[cell, r["kernel"]] = 100 * (stock["cycles"] / r["cycles"] - 1)
        timed = table[(table["cell"] == cell) & (table["kernel"] == r["kernel"])]
        listed.append(
            {
                "kernel": f"{named(cell)}: {r['kernel']}",
                "instructions a score, measured": f"{r['per score']:.2f}",
                "XU (%), measured": f"{r['xu %']:.1f}",
                "ALU (%), measured": f"{r['alu %']:.1f}",
                "FMA (%), measured": f"{r['fma %']:.1f}",
                "issue slots (%), measured": f"{r['issue %']:.1f}",
                "tensor (%), measured": f"{r['tensor %']:.1f}",
                "thousand cycles, measured": f"{r['cycles'] / 1e3:.0f}",
                "speed-up in cycles (%), measured": f"{cycle_gain[cell, r['kernel']]:+.1f}",
                "in time (%), measured": ranged(timed.iloc[0], "stock") if len(timed) else report.MISSING,
            }
        )
report.table(
    pd.DataFrame(listed).set_index("kernel"),
    f"Counters on {gpu}: medians over the profiled launches. The last column is of the timing run, at the clock that the board allowed.",
)

# %% tags=["hide-input"]
first = counted["cell"].iloc[0]
at = counted[counted["cell"] == first].set_index("kernel")
s, h = at.loc["stock"], at.loc["h15"]
in_cycles = [g for (_, k), g in cycle_gain.items() if k == "h15"]
controls = [g for (_, k), g in cycle_gain.items() if k == "control"]
free = [g for (_, k), g in cycle_gain.items() if k == "identity"]
own = [g for (_, k), g in cycle_gain.items() if k == "packed(4,3)"]
spilled = counted[["local loads", "local stores"]].to_numpy().sum()
text = (
    f"At head dimension 128 the exponential is **not the limit on this card**: the XU pipe, which computes it, is busy {s['xu %']:.0f} % of the "
    f"time in the stock kernel ({named(first)}), the tensor cores {s['tensor %']:.0f} %. Rowmax-H15 empties the XU pipe "
    f"({h['xu %']:.1f} %) and pays with instructions: {s['per score']:.2f} a score become {h['per score']:.2f}, on the ALU "
    f"({s['alu %']:.0f} → {h['alu %']:.0f} %) and in the issue slots ({s['issue %']:.0f} → {h['issue %']:.0f} %). The tensor cores "
    f"are busy less: {s['tensor %']:.0f} → {h['tensor %']:.0f} %. One warpgroup's softmax runs beside another's products, and even the longer one "
    f"needs fewer issue slots than those take; that its chain of dependent instructions is what is waited for is a guess. In cycles, which depend little on the clock, it is {min(in_cycles):+.1f} to {max(in_cycles):+.1f} % "
    f"(control: {min(controls, key=abs):+.1f} to {max(controls, key=abs):+.1f} %). "
)
if free:
    text += (
        f"No exponential at all (`identity`) gains {min(free):+.1f} to {max(free):+.1f} % in cycles: that is what "
        "leaving exp2 out, and nothing else, buys in these cells. "
    )
if own:
    text += (
        f"What gains more, {min(own):+.1f} to {max(own):+.1f} %, also changes what stands around the exponential: the chapter \"A packed "
        "exponential\" is about that form. "
    )
narrow = table[(table["kernel"] == "identity") & (table["head_dim"] == 64)]["stock"]
narrow_h15 = table[(table["kernel"] == "h15") & (table["head_dim"] == 64)]["stock"]
if len(narrow) and len(narrow_h15):
    text += (
        f"**At head dimension 64 it is another matter**: a score then has half the products and the same softmax, and no exponential at "
        f"all gains {narrow.min():+.1f} to {narrow.max():+.1f} % in time (measured above; no counters were read there). That much could "
        f"be had, and the paper's form still loses: {narrow_h15.min():+.1f} to {narrow_h15.max():+.1f} %. "
    )
text += "No kernel spills: no load or store of local memory was counted." if not spilled else "Some kernel spills."
said(text)

# %% tags=["hide-input"]
checked = []
for cell in dict.fromkeys(c for c, _ in cycle_gain):
    for kernel in ("h15", "fused7", "packed(4,3)", "lazy(4,3)"):
        r = steady[(steady["cell"] == cell) & (steady["kernel"] == kernel)]
        if (cell, kernel) in cycle_gain and len(r):
            r = r.iloc[0]
            ratio = r["clock"] / stock_at.loc[(cell, r["window_ms"])]["clock"]
            checked.append(
                {
                    "kernel": f"{named(cell)}: {kernel}",
                    "speed-up in cycles (%), measured": f"{cycle_gain[cell, kernel]:+.1f}",
                    "clock against stock (%), measured": f"{100 * (ratio - 1):+.1f}",
                    "their product (%)": f"{100 * ((1 + cycle_gain[cell, kernel] / 100) * ratio - 1):+.1f}",
                    "speed-up in time (%), measured": ranged(r, "stock"),
                }
            )
(
    report.table(
        pd.DataFrame(checked).set_index("kernel"),
        "Cycles and clock make the time: counters of one run, clocks and times in long windows of another.",
    )
    if checked
    else Markdown("No cell has both counters and long windows.")
)

# %% [markdown]
# (board-energy)=
# ## Energy
#
# The paper's loop: each kernel for 45 s, board power ten times a second, mean power times time over forwards done. No
# idle power is taken off. The power is the driver's average, which takes about a second to rise, so that its products are
# a little low; the card's own energy counter stands beside.

# %% tags=["hide-input"] mystnb={"figure": {"name": "fig-time-power", "caption": "Board power (the driver's average) and SM clock through the sustained loop of each kernel, BF16 causal 16K. Measured."}, "image": {"alt": "Two panels against seconds. Above, the board power of all kernels lies at the same level just below the power limit. Below, their clocks differ: the packed form lowest, Rowmax-H15 highest."}}
traces = {
    t["kernel"]: pd.DataFrame(t["samples"], columns=["seconds", "power", "instant", "clock", "temperature"])
    for e, f, kind in stored("energy", record)
    if kind == "measured" and f["GPU"] == gpu
    for t in e.turns
    if t["round"] == 0
}
figures_time.power(traces, limit)

# %% tags=["hide-input"]
report.table(
    pd.DataFrame(
        {
            "kernel": [f"{r.kernel}" for r in energy.itertuples()],
            "forwards, measured": [f"{r.calls:,}" for r in energy.itertuples()],
            "power (W), measured": [f"{r.power:.1f}" for r in energy.itertuples()],
            "clock (MHz), measured": [f"{r.clock:.0f}" for r in energy.itertuples()],
            "time a forward (ms), measured": [f"{r.ms:.4f}" for r in energy.itertuples()],
            "energy a forward (mJ), measured": [f"{r.mj:.1f}" for r in energy.itertuples()],
            "by the energy counter (mJ), measured": [f"{r.mj_counter:.1f}" for r in energy.itertuples()],
            "against stock (%), measured": [f"{r.vs_stock:+.2f}" for r in energy.itertuples()],
            "against control (%), measured": [f"{r.vs_control:+.2f}" for r in energy.itertuples()],
            "against stock, no ramp (%), measured": [f"{r.vs_stock_no_ramp:+.2f}" for r in energy.itertuples()],
            "against stock, energy counter (%), measured": [f"{r.vs_stock_counter:+.2f}" for r in energy.itertuples()],
        }
    ).set_index("kernel"),
    f"{gpu}, {named(energy['cell'].iloc[0])}; one loop a kernel, as in the paper, so no interval: the control is what a difference "
    "must exceed.",
)

# %% tags=["hide-input"]
b5f = report.published_rows("tableB5f_energy").set_index(["kernel", "metric"])["value"]
report.table(
    pd.DataFrame(
        [
            {
                "kernel": name,
                "forwards, published": f"{b5f[k, 'forwards']:,.0f}",
                "power (W), published": f"{b5f[k, 'mean_power']:.1f}",
                "time a forward (ms), published": f"{b5f[k, 'time_per_forward']:.4f}",
                "energy a forward (mJ), published": f"{b5f[k, 'energy_per_forward']:.1f}",
            }
            for k, name in (("A0", "stock"), ("A1", "Rowmax-H15"))
        ]
    ).set_index("kernel"),
    "Table B5f: B200, FP8 causal 16K, one loop a kernel.",
)

# %% tags=["hide-input"]
mean = energy.groupby("kernel")[["ms", "power", "mj", "vs_stock", "vs_control"]].mean()
floor = abs(mean.loc["control", "vs_stock"])


def told(kernel, name):
    if kernel not in mean.index:
        return ""
    r = mean.loc[kernel]
    time_change = 100 * (r["ms"] / mean.loc["stock", "ms"] - 1)
    beyond = "beyond" if min(abs(r["vs_stock"]), abs(r["vs_control"])) > floor else "not beyond"
    return (
        f"{name} changes the energy of a forward by {r['vs_stock']:+.1f} % against stock and {r['vs_control']:+.1f} % against the control, "
        f"its time by {time_change:+.1f} % ({beyond} the control's own {mean.loc['control', 'vs_stock']:+.2f} %). "
    )


apart = 100 * (mean["power"].max() / mean["power"].min() - 1)
said(
    told("h15", "**Rowmax-H15**")
    + told("packed(4,3)", "**`packed(4,3)`**")
    + f"The kernels' mean powers lie within {apart:.1f} % of each other, {mean['power'].mean():.0f} W under a limit of {limit:.0f} W: "
    "**at the power limit time is energy**, divided by a constant. The paper's own numbers say the same of the B200 "
    f"(energy {paper.value('tableB5f_energy', metric='energy_change').text} %, time "
    f"{paper.value('tableB5f_energy', metric='time_change').text} %, at equal mean power). So a loop at the limit cannot tell a kernel that "
    "is faster from one that needs less energy a cycle: the clock turns the second into the first."
)

# %% [markdown]
# (external)=
# ## External references
#
# Other programs of exact attention, in the same run as ours, as context: they differ in much more than the exponential.

# %% tags=["hide-input"]
number = int(facts.get("cudnn") or 0)
cudnn = f"{number // 10000}.{number // 100 % 100}.{number % 100}" if number else "of an unknown version"
REFERENCES = ["sdpa-flash", "sdpa-efficient", "sdpa-cudnn"]
rows = []
for cell in ordered(table[table["head_dim"] == 128])["cell"].drop_duplicates():
    here = table[table["cell"] == cell].set_index("kernel")
    row = {"cell": named(cell)}
    for k in ["stock", *REFERENCES]:
        row[f"{k} (ms), measured"] = f"{here.loc[k, 'ms']:.4f}" if k in here.index else report.MISSING
    row["stock against cuDNN (%), measured"] = (
        f"{100 / (1 + here.loc['sdpa-cudnn', 'stock'] / 100) - 100:+.1f}" if "sdpa-cudnn" in here.index else report.MISSING
    )
    rows.append(row)
report.table(
    pd.DataFrame(rows).set_index("cell"),
    f"torch's attention kernels on {gpu}, BF16, cuDNN {cudnn}. Speed-ups inside rounds.",
)

# %% tags=["hide-input"]
b5g = report.published_rows("tableB5g_external")
wide = b5g[b5g["metric"] == "latency"].pivot(index="seq", columns="backend", values="value")
wide = wide.loc[sorted(wide.index, key=float), ["fa4_A0", "h15_A1", "sdpa_flash", "sdpa_mem_efficient", "cudnn_9.24"]]
wide.index = pd.Index([f"causal {length(int(float(s)))}" for s in wide.index], name="cell")
wide.columns = [f"{c} (ms), published" for c in ("FA4 stock", "Rowmax-H15", "SDPA flash", "SDPA efficient", "cuDNN 9.24")]
report.table(wide.map(lambda v: f"{v:.4f}"), "Table B5g: B200, BF16, call latency.")

# %% [markdown]
# ## What this page does not show
#
# - **No B200.** None was at hand. The README has the command that produces these tables for one.
# - **No FP8 and no emulation**, which Hopper's forward kernel does not have. FP16, grouped heads and other batches: only where
#   the tables above have a row.
# - **No call latency, no timeline**: durations are of the kernel in a CUDA graph. A caller who launches a short kernel
#   from Python waits for the host, not for the exponential.
# - **No locked clock.** The board's limit and its driver are part of what is measured, as they are for anyone who uses
#   such a card. Cycles depend on it little.
# - **Two boards of one type.** Bursts, counters and energy are of one, long windows of the other; tables that put them
#   side by side say so. Another board may have another power limit and clock.
# - **No interval of an energy.** One loop a kernel, as in the paper.
