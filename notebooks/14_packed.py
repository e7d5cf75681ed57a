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
# (packed-exponential)=
# # A packed exponential
#
# The paper's bit trick {cite:p}`zhu2026softmax` trades one special-function instruction a score for others. On
# Blackwell, whose special-function unit is slow beside its tensor cores, that can pay; on Hopper it does not
# ({ref}`when-it-pays`). This chapter has another way to the same lattice. It needs fewer instructions than the
# stock exponential, not more, and is not in the paper.
#
# 1. How do bits of a score become bits of a weight?
# 2. What exactly is computed, and with which error?
# 3. What does the compiler make of it, and what does a GPU?
# 4. What do models lose?
# 5. Where can it fail, and what is not known?

# %% tags=["parameters"]
record = "results"
results = "results"

# %% tags=["hide-input"]
import math

import pandas as pd
from IPython.display import Markdown

from softmaxlab import figures, figures_kernel, figures_packed, packed_bits, packed_endpoints, report, scaling
from softmaxlab.bench import gains, read, targets
from softmaxlab.errors import LabError
from softmaxlab.evaluate import find_results
from softmaxlab.fa4 import audit, packed_cases, packed_record, packed_support, rates
from softmaxlab.operators import Packed

figures.style()

# %% [markdown]
# ## The definitions
#
# $x = (s - m)\log_2 e \le 0$ is a score's exponent in octaves below the row's anchor $m$. $Q_k(x)$ rounds it to a
# multiple of $2^{-k}$, half to even, and $S(q) = 2^{\lfloor q \rfloor}(1 + q - \lfloor q \rfloor)$ is the line between
# powers of two ({ref}`h15`). The **code** of a score is the integer $n = 2^k\,(Q_k(x) + 127)$, 0 where that is
# negative. `packed(k,levels)` is the kernel that makes weights from codes and adds them in BF16 for that many levels of
# pairs before it goes on in FP32; `packed` alone is `packed(4,3)`. `lazy(k,levels)` computes the same numbers and skips multiplications of
# the accumulator by 1; `skip` is the stock kernel with that alone.
#
# Numbers on this page are **measured** (on a GPU), **compiled** (counted in machine code) or **simulated** (the bit form
# in PyTorch); every table says which.

# %% [markdown]
# (packed-idea)=
# ## The idea
#
# **A subnormal FP16 number is an integer.** Its exponent field is 0, and its bits count units of $2^{-24}$; the first
# binade of normal numbers, up to 2047 such units, runs on with the same spacing and the same bits. So when a
# value is converted to FP16 and lands there, the conversion has rounded it to an integer, half to even, and the integer
# stands in the register. That is $Q_k$. Three instructions make use of it ({numref}`fig-packed-bits`):
#
# 1. one **fused multiply-add** a score gives $t = 2^{-24} \cdot 2^k (x + 127)$; scale and anchor go into its two
#    constants, so it takes the place of the one that every kernel has;
# 2. one **conversion** a pair packs two of them as FP16. Its `RELU` clamps at 0, so $-\infty$, a masked key, becomes the
#    code 0; the rounding is the lattice's; and the two codes lie side by side in one register;
# 3. one **shift** a pair by $7 - k$ puts the $k$ fractional bits of each code at the top of a BF16 fraction and the rest
#    into its exponent. A BF16 number is 1.fraction times a power of two, and that is $S$.
#
# The stock kernel's exponential is gone, and so are the clamp and the additions that the paper's bit form brings. The
# conversion of $P$ to 16 bits, which every kernel has, now also clamps and rounds to the lattice. What is new is half a
# shift a score.

# %% tags=["hide-input"] mystnb={"figure": {"name": "fig-packed-bits", "caption": "Two scores of a row on their way to P, with k = 4. Simulated by the bit form of the package, which is held to the definition bit by bit. The first score is in the low half of the register, on the right."}, "image": {"classes": "narrow", "alt": "A flow from top to bottom: two scores with their exponents, one fused multiply-add each, one conversion that packs both as 11-bit codes into a 32-bit register, one shift by three bits to the left, and the two BF16 weights with sign, exponent and fraction."}}
figures_packed.bits(packed_endpoints.pair((11.3, 9.6), 12.0, 1.0, k=4))

# %% [markdown]
# Each step in the code: {ref}`the multiply-add <code-packed-fma>`, {ref}`the conversion <code-packed-convert>`,
# {ref}`the shift <code-packed-shift>`, {ref}`the row sum <code-packed-sum>`, {ref}`what keeps their order
# <code-packed-order>`, {ref}`the guard <code-packed-guard>` and {ref}`what falls back <code-packed-support>`; and whole:
# {ref}`the operator <code-packed-operator>` (the definition), {ref}`the bit form <code-packed-bits>` in PyTorch,
# {ref}`the element in the kernel <code-packed-element>` in CuTe, and {ref}`the edits <code-packed-edits>` that put it
# into FlashAttention-4.

# %% [markdown]
# (packed-definition)=
# ## What it computes
#
# **Why it is exactly $S(Q_k(x))$.** FP16's numbers up to 2047 units of $2^{-24}$ are all the integers, so the conversion
# gives $n = \max(0, \mathrm{RNE}(2^k(x + 127)))$; as $2^k \cdot 127$ is even, ties go where $Q_k$ sends them, and
# $n = 2^k (Q_k(x) + 127)$. Let $n = 2^k E + f$ with $0 \le f < 2^k$. Shifted by $7 - k$, $E$ lies in BF16's exponent
# field and $f$ at the top of its seven fractional bits, and that number is
#
# $$
# 2^{E - 127}\,(1 + f/2^k) = 2^{\lfloor q \rfloor}(1 + q - \lfloor q \rfloor) = S(q)
# $$ (eq-packed)
#
# with $q = n/2^k - 127 = Q_k(x)$, for $E \ge 1$. At $E = 0$ the number is a subnormal of BF16, $2^{-126} f/2^k$: the line goes on to 0.

# %% tags=["hide-input"]
of_k = packed_endpoints.lattices().set_index("k")
report.table(
    pd.DataFrame(
        {
            "codes": [f"0 … {n}" for n in of_k["last code"]],
            "exponents that fit": ["x ≤ 0" if Packed(k).headroom == 0 else "x < 128" for k in of_k.index],
            "step": [f"1/{2**k}" for k in of_k.index],
            "standard deviation": [report.number(v) for v in of_k["deviation"]],
            "least … largest": [
                f"{report.number(a)} … {report.number(b)}" for a, b in zip(of_k["least"], of_k["largest"])
            ],
        },
        index=pd.Index([f"{k}{' (Rowmax-H15)' if k == 1 else ''}" for k in of_k.index], name="k"),
    ),
    "The lattices, simulated, in octaves: error (log₂ of the weight, minus x) over exponents spread evenly in an octave.",
)

# %% [markdown]
# $k \le 3$ leaves room for an anchor that lags behind the row maximum. $k = 4$ does not, so it needs Hopper's kernel,
# whose anchor follows every tile. In the last octave the code runs on to 0 along the line, and a masked key's weight is
# exactly 0: a row without a key gives 0 as the stock kernel's does, which the paper's clamp does not ({ref}`masked`).

# %% tags=["hide-input"]
compared = packed_bits.comparison()
shown = compared[["operator", "inputs", "compared", "equal", "different", "unexplained"]].set_index("operator")
report.table(
    shown.map(lambda v: f"{v:,}" if isinstance(v, int) else v),
    "Bit form against definition, simulated. Inputs: every code and its ties where FP32 holds the score exactly; scores a "
    "rounding beside a tie; and draws. A code differs where FP32's own rounding of t crosses a tie; unexplained would be any other.",
)

# %% [markdown]
# ### The row sum
#
# The sum of a row's weights need not be FP32 all the way. Pairs of packed weights are added as they are, two additions
# an instruction, for a few levels; then FP32 takes over. Each level rounds to BF16, to nearest even, so the sum of
# positive weights is off by at most $(1 + u)^L - 1$ with $u = 2^{-8}/(1+2^{-8})$ for $L$ levels.

# %% tags=["hide-input"]
sums = packed_bits.row_sums()
report.table(
    pd.DataFrame(
        {
            "levels": [f"{n}" for n in sums["levels"]],
            "bias, simulated": [report.number(v, 2) for v in sums["bias"]],
            "standard deviation, simulated": [report.number(v, 2) for v in sums["deviation"]],
            "largest error, simulated": [report.number(v, 2) for v in sums["largest"]],
            "bound": [report.number(v, 2) for v in sums["bound"]],
        }
    ).set_index("levels"),
    "Relative error of a tile's row sum, 128 keys, k = 4: random rows, and the bound that no row can exceed. Four levels "
    "pair all that a tile of 128 keys has, so a fifth does nothing there.",
)

# %% [markdown]
# (packed-compiled)=
# ## What the compiler makes of it

# %% tags=["hide-input"] mystnb={"figure": {"name": "fig-packed-instructions", "caption": "Instructions a score by execution pipe, causal BF16 kernel, head dimension 128. Compiled. Bars end with the total. The packed shift is compiled to an integer multiply-add (IMAD) and lies in the FMA bar."}, "image": {"alt": "Two panels of stacked bars, Hopper and B200: instructions a score of stock, control, h15, fused7, the packed kernels and no exponential, split into XU, FMA, ALU and the rest. The packed ones have the shortest bars but for no exponential."}}
frame, provenance = audit.stored(record)
LISTED = ["stock", "control", "h15", "fused7", "packed(1,3)", "packed(4,3)", "lazy(4,3)", "identity"]
CLASSES = ["MUFU.EX2", "FFMA2", "FFMA", "FADD2", "FADD", "FMUL", "FMNMX3", "FMNMX", "F2FP", "SHF", "LEA", "IMAD", "half"]


def counted(arch, names, classes, **cell):
    rows = []
    for name in names:
        try:
            row = audit.pick(frame, arch=arch, variant=name, **cell)
        except LabError:
            continue
        by_class = {c: row["loop"].get(c, 0) / row["elements"] for c in classes}
        rows.append({"kernel": name, "all": row["per_element"], **by_class})
    table = pd.DataFrame(rows).set_index("kernel")
    table = table.loc[:, (table > 0).any()]
    return table.map(lambda v: f"{v:.2f}" if v else report.MISSING)


PIPES = {"xu": "XU", "fma": "FMA", "alu": "ALU", "issue": "rest"}


def split(row):
    """Instructions a score by pipe."""
    found = dict.fromkeys(PIPES, 0.0)
    for opcode, count in row["opcodes"].items():
        pipe = rates.pipe(opcode)
        found[{"packed": "fma", "imad": "fma", "fp8": "alu"}.get(pipe, pipe)] += count / row["elements"]
    return found


def bars(arch, names):
    cell = {"arch": arch, "dtype": "bf16", "causal": True, "head_dim": 128}
    return pd.DataFrame([{"label": v} | split(audit.pick(frame, variant=v, **cell)) for v in names])


BLACKWELL = ["stock", "control", "h15", "fused7", "packed(3,3)", "identity"]
figures_kernel.instructions(
    {"Hopper (sm_90a)": bars("sm_90a", LISTED), "B200 (sm_100a): compiled, never run": bars("sm_100a", BLACKWELL)}
)

# %% tags=["hide-input"]
report.table(
    counted("sm_90a", LISTED, CLASSES, dtype="bf16", causal=True, head_dim=128),
    "Instructions a score on Hopper, compiled: one turn of the loop without a mask, BF16, causal kernel, head dimension 128. "
    "half is the addition of two packed weights; lazy also skips rescales by 1; identity has no exponential at all.",
)

# %% tags=["hide-input"]
report.table(
    counted("sm_100a", BLACKWELL, CLASSES, dtype="bf16", causal=True, head_dim=128),
    "The same for a B200: compiled, never run. There the packed kernel falls back to the stock one with a notice until it has passed its gates.",
)

# %% [markdown]
# (packed-gates)=
# ## Its gates
#
# The gates of every variant ({ref}`gates`) hold for this one too. It has more of its own: each code and its ties, one by
# one, from scores that FP32 holds exactly; head dimensions 64 to 256, masks, windows, soft-cap, sinks, grouped heads,
# variable lengths; scores times 16 and 300; NaN and infinities, which must come out where the stock kernel has them.

# %% tags=["hide-input"]
run = packed_record.stored(record) or packed_record.rehearse()
table = run.verdict()
groups = list(dict.fromkeys(table["group"]))
by_group = {
    (r.group, r.variant): f"{r.passed} of {r.gates}" + (f" ({r.failed})" if r.failed else "") for r in table.itertuples()
}
where = f"{run.kind}{' on an ' + run.environment['GPU'] if run.environment.get('GPU') else ''}"
report.table(
    pd.DataFrame(
        {v: [by_group.get((g, v), report.MISSING) for g in groups] for v in dict.fromkeys(table["variant"])},
        index=pd.Index(groups, name="gates green"),
    ),
    f"Gates of the packed kernel, {where}. Each case is run twice, and the two outputs are equal bit for bit.",
)

# %% [markdown]
# (packed-speed)=
# ## What a GPU makes of it
#
# A gain is taken against the stock kernel and against the **control**, which computes the stock exponential through the
# replaced path ({ref}`time-energy` has all cells). Two kinds of windows are kept apart. **Burst**: 20 ms a kernel, in
# turns with a dozen others. **Steady**: 200 ms a kernel, long enough for the card's clock to settle at its power limit.
# The targets were set beforehand, from bursts of a prototype.

# %% tags=["hide-input"]
try:
    timed = targets.entries(record)
except LabError:
    timed = []


def gained(gain, least):
    if not gain.rounds:
        return f"{report.MISSING} (target +{least:g})"
    return f"{gain.value:+.1f} [{gain.low:+.1f}, {gain.high:+.1f}] (+{least:g})"


rows = []
for windows in (targets.STEADY, targets.BURST):
    for kernel in (packed_endpoints.KERNEL, "packed(1,3)", *(["lazy(4,3)"] if windows == targets.STEADY else [])):
        for target, stock, control, verdict in packed_endpoints.held(timed, kernel, windows=windows):
            rows.append(
                {
                    "kernel, windows": f"{kernel}, {windows}",
                    "BF16 cell": target.label.replace("head dimension", "d"),
                    "over stock, % (target)": gained(stock, target.stock),
                    "over control, % (target)": gained(control, target.control),
                    "verdict": verdict,
                }
            )
report.table(
    pd.DataFrame(rows).set_index("kernel, windows"),
    "Gains with 95 % intervals over interleaved rounds, measured on an H200, against targets that were set beforehand (d: head dimension).",
)

# %% tags=["hide-input"]
verdicts = {
    w: [v for *_, v in packed_endpoints.held(timed, windows=w)] for w in (targets.STEADY, targets.BURST)
}
missing = [s.why for _, s, _, v in packed_endpoints.held(timed, windows=targets.BURST) if v == "not measured"]
steady = packed_endpoints.held(timed, windows=targets.STEADY)
short = [t.stock - s.value for t, s, _, _ in steady if s.rounds]
said = {w: ", ".join(f"{v.count(x)} {x}" for x in dict.fromkeys(v)) for w, v in verdicts.items()}
Markdown(
    (
        f"Of the {len(steady)} targets, **{said[targets.STEADY]} in the steady state**, and {said[targets.BURST]} in bursts. "
        + (
            f"In the steady state the gain over stock is between {min(short):.1f} and {max(short):.1f} points below its target. "
            if short and min(short) > 0
            else ""
        )
        + (
            f"One burst was not taken ({missing[0]}): in that session one bound of the gate was narrower than the "
            "definition allows where a score lies at a jump of the lattice; it is mended, and the later sessions are green."
            if missing
            else ""
        )
    )
    if timed
    else "**No times are stored.** `softmaxlab bench latency --graphs` on a Hopper GPU makes them."
)

# %% [markdown]
# (packed-power)=
# ### Clocks, and what they cost
#
# Hardware counters tell the two apart: clock cycles of the kernel, and time.

# %% tags=["hide-input"]
try:
    profile = read.counts(record)
    profile = profile[profile["kind"] == "measured"]
except LabError:
    profile = pd.DataFrame()
KEPT = ["stock", "control", "h15", "fused7", "packed(4,3)", "lazy(4,3)", "identity"]
rows, panels = [], {}
for cell, part in profile.groupby("cell", sort=False) if len(profile) else ():
    part = part.drop_duplicates("kernel").set_index("kernel")
    mask = "causal" if part["causal"].iloc[0] else "no mask"
    panels[f"{mask}, {part['seq'].iloc[0] // 1024}K"] = part.loc[
        [k for k in ("stock", "h15", "fused7", "packed(4,3)", "lazy(4,3)") if k in part.index]
    ].reset_index()
    for kernel in [k for k in KEPT if k in part.index]:
        row, base = part.loc[kernel], part.loc["stock"]
        rows.append(
            {
                "cell": mask,
                "kernel": kernel,
                "faster in cycles, %": f"{100 * (base['cycles'] / row['cycles'] - 1):+.1f}",
                "faster in the profiled launches' time, %": f"{100 * (base['time'] / row['time'] - 1):+.1f}",
                "clock, MHz": f"{1e3 * row['cycles'] / row['time']:.0f}",
                "instructions a score": report.number(row["per score"], 3),
                "tensor pipe, %": f"{row['tensor %']:.0f}",
                "XU, %": f"{row['xu %']:.0f}",
                "issue slots, %": f"{row['issue %']:.0f}",
            }
        )
report.table(
    pd.DataFrame(rows).set_index("cell") if rows else pd.DataFrame(columns=["nothing is stored"]),
    "Counters of one profile, medians of three launches at the profiler's clocks, BF16, 8K, head dimension 128, measured. The "
    "instructions are those of the whole kernel.",
)

# %% tags=["hide-input"]
spent = packed_endpoints.energy(read.energies(record)) if timed else []
e = spent[0] if spent else None
in_cycles = {
    mask: 100 * (p.set_index("kernel").loc["stock", "cycles"] / p.set_index("kernel").loc["packed(4,3)", "cycles"] - 1)
    for mask, p in panels.items()
}
busy = {m: (p.set_index("kernel").loc["stock", "tensor %"], p.set_index("kernel").loc["packed(4,3)", "tensor %"]) for m, p in panels.items()}
Markdown(
    (
        "In clock cycles the packed kernel is "
        + " and ".join(f"{v:.1f} % faster ({m})" for m, v in in_cycles.items())
        + ", and the tensor cores are busy "
        + " and ".join(f"{b:.0f} % of the time instead of {a:.0f} %" for a, b in busy.values())
        + ". More products a second draw more power, and a card at its limit answers with a lower clock: in time "
        "the gain is smaller. The slower variants show the same from the other side. "
        + (
            f"At the limit, time follows energy. A forward pass at causal 16K takes {-e.changes[0][0]:.1f} % less of it than "
            f"stock's (mean power; {-e.changes[0][2]:.1f} % by the card's own energy counter), the control differs by at most "
            f"{e.floor:.1f} %, and the sustained loop ran {e.faster:.1f} % faster: "
            + {"met": "less energy than stock by more than the control's own change", "missed": "no less energy than stock"}.get(
                e.verdict, "a difference that the control's own change does not allow to call"
            )
            + " (one loop a kernel, so no interval)."
            if e
            else ""
        )
        + " What is left to gain at head dimension 128 without a mask is little: the tensor cores are nearly always busy."
    )
    if panels
    else "**No counters are stored.**"
)

# %% tags=["hide-input"] mystnb={"figure": {"name": "fig-packed-pipes", "caption": "How busy each pipe is in the profiles of the table above, measured on an H200."}, "image": {"alt": "Two panels, causal and without a mask: percent busy of tensor, XU, FMA, ALU and issue for stock, h15, fused7, packed and lazy. The packed kernels have the busiest tensor pipe and an idle XU."}}
if panels:
    display(figures_packed.pipes(panels))

# %% [markdown]
# (packed-loss)=
# ## Speed against loss

# %% tags=["hide-input"] mystnb={"figure": {"name": "fig-packed-trade", "caption": "Gain over the stock kernel in the steady state, against what the model named above each panel loses (weights of 4-bit files, made float); both with 95 % intervals. Up and to the left is better; a loss whose interval holds zero is not resolved. The loss of fused7 is that of s(7), the same lattice in a form that is not fused."}, "image": {"alt": "Two scatter panels, causal 16K, head dimension 64 and 128, each with the losses of a model. A mark a kernel: packed kernels, Rowmax-H15, the fused form, stock and control, by loss to the right and gain upwards, with lines at zero."}}
sources = packed_endpoints.losses(str(find_results(results)))
sources.sort(key=lambda s: (scaling.head_dim(s.model) or math.inf, s.model))
KIND = {"h15": "h15", "fused7": "fused7", "packed(4,3)": "packed", "packed(1,3)": "packed", "stock": "stock", "control": "stock"}
CELLS = {64: "bf16/causal/16384/h16/d64", 128: "bf16/causal/16384/h16/d128"}


def drawn(source, cell):
    """Gain in a cell beside the loss of a model, one row a kernel."""
    points = []
    for kernel, kind in KIND.items():
        gain = targets.of(timed, cell, kernel) if kernel != "stock" else None
        loss = source.delta(kernel) if kind != "stock" else None
        if (gain is None or gain.rounds) and (loss or kind == "stock"):
            g = (gain.value, gain.low, gain.high) if gain else (0.0, 0.0, 0.0)
            n = (loss.mean, loss.low, loss.high) if loss else (0.0, 0.0, 0.0)
            points.append(
                {"kernel": kernel, "kind": kind}
                | dict(zip(("gain", "gain_low", "gain_high"), g))
                | dict(zip(("loss", "loss_low", "loss_high"), n))
            )
    return pd.DataFrame(points)


panels = {}
for d, cell in CELLS.items() if sources and timed else ():
    # A model of another head dimension stands in where there is none of this one; the title names the model.
    for source in [s for s in sources if scaling.head_dim(s.model) == d] or sources[:1]:
        panels[f"causal 16K, head dimension {d}\n{source.model}"] = drawn(source, cell)
if panels:
    display(figures_packed.trade(panels, " and ".join(dict.fromkeys(s.kind for s in sources))))

# %% tags=["hide-input"]
LOSING = ("packed(1,3)", "packed(2,3)", "packed(3,3)", "packed(4,3)", "h15", "s(7)", "s(13)", "poly(1,all)")
columns = {"condition": {k: " or ".join(dict.fromkeys(c for s in sources if (c := s.condition(k)))) for k in LOSING}}
for source in sources:
    found = {k: e for k in LOSING if (e := source.delta(k))}
    columns[f"{source.model}: ΔNLL, 10⁻³ nats, {source.kind}"] = {
        k: report.interval(e, lambda v: 1e3 * v) for k, e in found.items()
    }
    columns[f"{source.model}: resolved"] = {k: e.resolved for k, e in found.items()}
    columns[f"{source.model}: blocks where it is lower"] = {
        k: f"{(e.per_block < 0).sum()} of {e.n_blocks}" for k, e in found.items()
    }
made = "; ".join(f"{s.model} by {s.backend}, {s.dtype}" for s in sources)
(
    report.table(
        pd.DataFrame(columns).dropna(how="all", subset=list(columns)[1:]).fillna(report.MISSING).rename_axis("kernel"),
        f"Loss against the softmax of the same backend on the same blocks: {made}. 10⁻³ nats are 0.1 % of perplexity.",
    )
    if sources
    else Markdown("No losses of the kernel are stored.")
)

# %% [markdown]
# The target was set beforehand: on both models `packed(4,3)` loses at most half of what Rowmax-H15 does. It is held by
# the paired interval of its loss minus that half; met below zero, missed above. {ref}`kernel-fidelity`
# sets the same losses beside the simulator's.

# %% tags=["hide-input"]
def thousandths(e):
    return report.interval(e, lambda v: 1e3 * v)


rows = []
for source in sources:
    beyond = source.beyond_half()
    rows.append(
        {
            "model": source.model,
            "packed(4,3) minus half of h15, 10⁻³ nats": thousandths(beyond),
            "packed(4,3) minus h15, 10⁻³ nats": thousandths(source.apart(packed_endpoints.KERNEL, "h15")),
            "target": packed_endpoints.verdict_of(beyond),
        }
    )
if rows:
    display(report.table(pd.DataFrame(rows).set_index("model"), "At most half of the loss of Rowmax-H15: paired by block, with 95 % intervals."))

# %% tags=["hide-input"]
sentences = []
for source in sources:
    packed, h15, line = (source.delta(k) for k in (packed_endpoints.KERNEL, "h15", "s(13)"))
    state = packed_endpoints.verdict_of(source.beyond_half())
    text = f"**{source.model}**: the target is **{state}**. "
    if h15.resolved == "positive":
        text += f"Of the means, `packed(4,3)` loses {packed.mean / h15.mean:.2f} times what Rowmax-H15 does. "
    else:
        text += (
            "Rowmax-H15's own loss is not resolved from zero there, so half of it is no measure, and a ratio of the means "
            "says nothing. "
        )
    if packed.resolved == "unresolved":
        text += (
            f"Nor is that of `packed(4,3)`: {packed.n_blocks} blocks leave room for a loss of up to {report.number(1e3 * packed.high, 2)} · 10⁻³ "
            "nats. That is not a proof of none. "
        )
    if line and packed.resolved == line.resolved == "positive":
        finer = source.apart(packed_endpoints.KERNEL, "s(13)")
        text += (
            f"The line $S$ itself, k = 13, loses {thousandths(line)} · 10⁻³ nats; `packed(4,3)` minus it is {thousandths(finer)}, {finer.resolved}. "
            + (
                "So no gain of a finer lattice is seen: what is left at k = 4 may be the line between powers of two."
                if finer.resolved == "unresolved"
                else ""
            )
        )
    sentences.append(text)
Markdown("\n\n".join(sentences) or "No losses of the kernel are stored.")

# %% [markdown]
# (packed-limits)=
# ## Where it can fail, and what is not known
#
# - **Large scores.** Rounding in the fused multiply-add grows with the row maximum. Beyond the limit below the output is
#   NaN by construction, not a wrong number; the gates check that.
# - **A lagging anchor** needs codes above the anchor's own. $k \le 3$ has them in BF16; $k = 4$ and weights in FP16 do
#   not, and then the stock kernel runs, with a notice.
# - **FP16.** The weights are scaled up to use FP16's own range, which leaves fewer octaves below the anchor than BF16 has.
# - **Blackwell.** Compiled and counted only, and every call there runs the stock kernel, with a notice. E4M3 would need no
#   shift at all at $k = 3$: the code is the byte. The guard for large scores is part of Hopper's kernel alone; it must come
#   before the fall-back goes.
# - **Gradients** are refused. The backward pass recomputes the exact exponential.
# - **Two boards.** Bursts, counters and energy are of one H200, steady windows of another. `packed(1,3)`, the same
#   instructions with other bits, has the larger mean in each steady cell; whether it is faster is not resolved in all
#   of them, and why it should be is not known.

# %% tags=["hide-input"]
fp16 = Packed(4, p="fp16")
counted = {s.model: scaling.head_dim(s.model) for s in sources}
Markdown(
    (
        f"Losses are known of {len(counted)} model{'s' * (len(counted) > 1)}, "
        + " and ".join(f"{m} (head dimension {d})" if d else m for m, d in counted.items())
        + ", on short blocks of one text; of other models, and of the tasks that a model is used for, nothing is known. "
        if counted
        else ""
    )
    + f"The limit of a row maximum is {packed_cases.LARGEST:,.0f} octaves, {packed_cases.LARGEST * math.log(2):,.0f} nats. In FP16 a "
    f"weight is 0 from {fp16.bias} octaves below the anchor on, in BF16 from {Packed(4).bias}."
)

# %% [markdown]
# What a call offers is decided before it runs. The rest runs as installed, with one notice a reason and process, and
# `softmaxlab.backends.fa4`, which measures a model's loss, refuses it rather than take the stock kernel's loss for this
# one's.

# %% tags=["hide-input"]
heads = ", ".join(f"{a}" if a == b else f"{a} with values of {b}" for a, b in packed_support.HEAD_DIMS["sm_90"])
refused = ("qv", "gather_kv_indices")  # by the patch, for every variant
untested = {
    name: why.split(" is untested")[0].split(" are untested")[0] for name, why in packed_support.UNTESTED.items()
}
offered = [
    ("Hopper, P in BF16 or FP16", "packed"),
    (f"head dimensions {heads}", "packed"),
    ("causal or not, sliding window, soft-cap, sinks, grouped heads, variable lengths, more queries than keys", "packed"),
    ("other head dimensions, a scale below 0 or not finite", "stock, with a notice"),
    (", ".join(dict.fromkeys(w for n, w in untested.items() if n not in refused)), "stock, with a notice"),
    ("Blackwell", "stock, with a notice"),
    ("; ".join([*(untested[n] for n in refused), "an input that requires a gradient"]), "refused"),
]
report.table(
    pd.DataFrame(offered, columns=["call", "what runs"]).set_index("call"),
    "What each call runs, from the code. In a transformers model: causal self-attention, also in a sliding window, without padding or sinks.",
)

# %% [markdown]
# (packed-use)=
# ## Use it
#
# ```python
# from softmaxlab import fa4
#
# out, lse = fa4.flash_attn_func(q, k, v, causal=True, variant="packed")
# fa4.enable(model, variant="packed")  # a transformers model, one line
# ```
#
# and on a Hopper card, the numbers of this page's first speed table:
#
# ```bash
# softmaxlab bench latency --graphs --sweeps 15 --window-ms 200 --cells steady \
#     --kernels h15 fused7 "packed(4,3)" "packed(1,3)" sdpa-cudnn
# ```
