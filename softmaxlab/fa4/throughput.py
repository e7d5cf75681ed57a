"""A throughput model of the forward kernel, and how far it gets. Paper §5.5, B.4, B.5.

The unit is a **turn**: one pass of one softmax warpgroup through its main loop, that is one tile of scores. What a
turn needs of each pipe follows from the audited instructions (`audit`) and published rates (`rates`); what it needs
of the tensor cores from the tile's shape, 4·d operations a score. Two limits are made of that, and neither is fitted:

- **overlapped**: everything runs at once, so a turn costs the SM the busiest pipe's clocks;
- **exposed**: nothing of the softmax overlaps. A warpgroup's turn changes by the change of the summed clocks of its
  pipes, and all else stays as measured for the stock kernel. This one needs the stock kernel's latency.

Left out: the masked tiles at the diagonal, the correction warps, memory, barriers, launch, and waves of tiles that do
not fill the GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources

import pandas as pd

from softmaxlab import paper
from softmaxlab.errors import LabError
from softmaxlab.fa4 import audit, rates

TILE = 128  # rows and keys of a tile on Blackwell; a warpgroup has 128 threads
STAGES = 2  # softmax warpgroups, hence tiles in flight, of an SM
DTYPE = {"fp8": "e4m3", "bf16": "bf16", "fp16": "fp16"}  # the paper's names


def stages(row: Mapping, *, fp8_conversion: int | None = None) -> dict[str, float]:
    """Clocks that one turn keeps each pipe of an SM busy.

    Args:
        row: an audited kernel.
        fp8_conversion: as in `rates.cycles`.

    Returns:
        `tensor` and `rates.PIPES`.
    """
    sm = rates.sm(row["arch"])
    rate = sm.tensor8 if row["dtype"] in ("e4m3", "e5m2") else sm.tensor16
    tensor = 4 * row["head_dim"] * 128 * row["elements"] / rate
    return {"tensor": tensor} | rates.cycles(row["opcodes"], row["arch"], fp8_conversion=fp8_conversion)


def binding(clocks: Mapping[str, float]) -> tuple[str, float]:
    """The busiest pipe and its clocks: the least that a turn can cost an SM."""
    return max(clocks.items(), key=lambda pair: pair[1])


def serial(clocks: Mapping[str, float]) -> float:
    """Clocks of a turn's softmax if its pipes never work at the same time: XU, FMA and ALU one after the other."""
    return clocks["xu"] + clocks["fma"] + clocks["alu"]


def overlapped_gain(stock: Mapping, variant: Mapping, **options) -> float:
    """Speed-up in percent, `100·(t_stock/t_variant − 1)`, if all pipes overlap perfectly."""
    return 100 * (binding(stages(stock, **options))[1] / binding(stages(variant, **options))[1] - 1)


def exposed_gain(stock: Mapping, variant: Mapping, period: float, **options) -> float:
    """Speed-up in percent if nothing of the softmax overlaps.

    Args:
        period: clocks of an SM a turn, as measured for the stock kernel; a warpgroup's own turn takes `STAGES` times
            that.
    """
    saved = serial(stages(stock, **options)) - serial(stages(variant, **options))
    return 100 * (STAGES * period / (STAGES * period - saved) - 1)


def turns(seq: int, heads: int, batch: int, causal: bool) -> int:
    """Turns of one forward on Blackwell: tiles of 128 × 128 scores that are not wholly masked, two rows of tiles a CTA.

    Raises:
        LabError: a length that is no multiple of 256.
    """
    if seq % (STAGES * TILE):
        raise LabError(
            f"a sequence of {seq} does not fill the kernel's tiles: it must be a multiple of {STAGES * TILE}"
        )
    ctas = seq // (STAGES * TILE)
    keys = [STAGES * (i + 1) if causal else seq // TILE for i in range(ctas)]
    return STAGES * sum(keys) * heads * batch


def period(latency_ms: float, clock_mhz: float, arch: str, **shape) -> float:
    """Clocks of an SM a turn, from a latency; as if the tiles filled all SMs evenly. `shape` as in `turns`."""
    return latency_ms * 1e3 * clock_mhz * rates.sm(arch).sms / turns(**shape)


def compare(frame: pd.DataFrame, variant: str = "h15", **options) -> pd.DataFrame:
    """The paper's speed-ups on the B200 (Tables B5a, c, e; Table 2) beside the two limits.

    Args:
        frame: the audit (`audit.stored`).
        variant: what replaces stock.
        options: as in `stages`.

    Returns:
        Columns cell, dtype, mask, head_dim, seq, published, overlapped, exposed (percent; NaN where the paper prints
        no stock latency), binds_stock, binds_variant, period (clocks a turn, from the paper's stock latency), busy
        (percent of the period that the busiest pipe of the stock kernel needs), assumed (whether the paper prints no
        clock for the cell, so that period, exposed and busy are of the highest one and too low), source.
    """
    rows = []
    for cell in published().itertuples():
        key = {"arch": "sm_100a", "dtype": DTYPE[cell.dtype], "causal": cell.mask == "causal"}
        key |= {"head_dim": cell.head_dim, "gqa": cell.gqa}
        stock, other = audit.pick(frame, variant="stock", **key), audit.pick(frame, variant=variant, **key)
        before, after = stages(stock, **options), stages(other, **options)
        taken = float("nan")
        if pd.notna(cell.latency):
            shape = {"seq": cell.seq, "heads": cell.heads, "batch": cell.batch, "causal": key["causal"]}
            taken = period(cell.latency, clock(cell.dtype, cell.mask, cell.seq), "sm_100", **shape)
        rows.append(
            {
                "cell": cell.cell,
                "dtype": cell.dtype,
                "mask": cell.mask,
                "head_dim": cell.head_dim,
                "seq": cell.seq,
                "published": cell.value,
                "overlapped": overlapped_gain(stock, other, **options),
                "exposed": exposed_gain(stock, other, taken, **options),
                "binds_stock": binding(before)[0],
                "binds_variant": binding(after)[0],
                "period": taken,
                "busy": 100 * binding(before)[1] / taken,
                "assumed": printed_clock(cell.dtype, cell.mask, cell.seq) is None,
                "source": cell.source,
            }
        )
    return pd.DataFrame(rows)


def sweep(frame: pd.DataFrame, arch: str = "sm_100a", **options) -> pd.DataFrame:
    """FA4's own emulation settings (Table B5d) and Rowmax-H15: the programs, what they need, and the paper's speed-up.

    Returns:
        Columns setting, share (of elements by the predicate), program (a letter; equal machine code has the same),
        accesses (loads and stores of local memory in the code), used (registers of the softmax warps), per_element
        (instructions), xu, fma, alu, issue (clocks a turn), overlapped and exposed (speed-up against the stock
        setting), published (percent), session.
    """
    key = {"arch": arch, "dtype": "e4m3", "causal": True, "head_dim": 128}
    table = paper.table("tableB5d_emulation", numbers=True)
    table = table[table["metric"].str.startswith("speedup_vs_stock")]
    stock = audit.pick(frame, variant="stock", emulation="8,1", **key)
    latency = paper.value("tableB5a_main", dtype="fp8", seq=8192, kernel="A0", metric="latency").value
    taken = period(latency, clock("fp8", "causal", 8192), "sm_100", seq=8192, heads=16, batch=1, causal=True)
    programs: dict[str, str] = {}
    rows = []
    for entry in table.itertuples():
        freq, start = (int(n) if pd.notna(n) else 1 for n in (entry.freq, entry.start_frg))
        own = entry.kernel == "A0"
        row = audit.pick(frame, variant="stock", emulation=f"{freq},{start}", **key) if own else None
        row = audit.pick(frame, variant="h15", **key) if row is None else row
        clocks = stages(row, **options)
        rows.append(
            {
                "setting": f"freq {freq}, start {start}" if own and freq else "hardware only" if own else "Rowmax-H15",
                "share": 100 * audit.emulated_share(freq, start) if own else float("nan"),
                "program": programs.setdefault(row["digest"], "ABCDEFGHIJ"[len(programs)]),
                "accesses": row["ldl"] + row["stl"],
                "used": next(used for name, _, used in row["roles"] if name == "softmax"),
                "per_element": row["per_element"],
                **{name: clocks[name] for name in rates.PIPES},
                "overlapped": overlapped_gain(stock, row, **options),
                "exposed": exposed_gain(stock, row, taken, **options),
                "published": entry.value,
                "session": entry.session,
            }
        )
    return pd.DataFrame(rows)


def evidence(frame: pd.DataFrame, variant: str = "h15", arch: str = "sm_100a", head_dim: int = 128) -> pd.DataFrame:
    """What the code alone says of the paper's predictions 1, 2, 3 and 6 (B.5), by data type and mask.

    Returns:
        Columns dtype, mask, and for stock and the variant: ex2 (MUFU.EX2 a score); fp32 (clocks of FP32 arithmetic a
        turn); serial (clocks of a turn's softmax with nothing overlapped); issue (instructions a turn); launch
        (registers a thread at launch), asked (by the softmax warps, `setmaxnreg`), used (by their code).
    """
    rows = []
    cells = frame[(frame["arch"] == arch) & (frame["variant"] == "stock") & (frame["head_dim"] == head_dim)]
    cells = cells[(cells["gqa"] == 1) & (cells["emulation"] == "")]
    for stock in cells.to_dict("records"):
        key = {name: stock[name] for name in ("arch", "dtype", "causal", "head_dim")}
        row = {"dtype": stock["dtype"], "mask": "causal" if stock["causal"] else "none"}
        for name, kernel in (("stock", stock), (variant, audit.pick(frame, variant=variant, **key))):
            clocks = stages(kernel)
            asked, used = next((a, u) for role, a, u in kernel["roles"] if role == "softmax")
            row |= {
                f"ex2 {name}": kernel["loop"].get("MUFU.EX2", 0) / kernel["elements"],
                f"fp32 {name}": rates.cycles(_arithmetic(kernel["opcodes"]), arch)["fma"],
                f"serial {name}": serial(clocks),
                f"issue {name}": clocks["issue"],
                f"launch {name}": kernel["registers"],
                f"asked {name}": asked,
                f"used {name}": used,
            }
        rows.append(row)
    return pd.DataFrame(rows)


def _arithmetic(opcodes: Mapping[str, int]) -> dict[str, int]:
    return {o: n for o, n in opcodes.items() if o.startswith(("FFMA", "FADD", "FMUL"))}


def counters(frame: pd.DataFrame) -> pd.DataFrame:
    """Published profiler counters of the stock kernel beside what the instruction counts say of them.

    The counters (Dao-AILab/flash-attention, issue 2701; B200 and B300; shape not given, 128 per head assumed, no mask)
    are utilisations. Their ratios to the tensor pipe's do not depend on time, so the counts predict them outright.

    Returns:
        Columns gpu, dtype, pipe, utilization (percent), counted (percent: the tensor pipe's utilisation times the
        ratio from the audit; instructions of the softmax warps only), source.
    """
    file = resources.files("softmaxlab") / "data" / "counters" / "fa4_issue_2701.csv"
    with file.open(encoding="utf-8") as handle:
        table = pd.read_csv(handle)
    rows = []
    for (arch, dtype), group in table.groupby(["arch", "dtype"], sort=False):
        row = audit.pick(frame, arch=arch, dtype=dtype, causal=False, head_dim=128, variant="stock")
        clocks = stages(row)
        measured = group.set_index("pipe")["utilization_pct"]
        rows += [
            {
                "gpu": group["gpu"].iloc[0],
                "dtype": dtype,
                "pipe": name,
                "utilization": measured[name],
                "counted": measured["tensor"] * clocks[name] / clocks["tensor"],
                "source": group["source"].iloc[0],
            }
            for name in rates.PIPES
        ]
    return pd.DataFrame(rows)


def clock(dtype: str, mask: str, seq: int) -> float:
    """SM clock of the stock kernel in MHz as the paper records it (B.3); its highest where it records none."""
    return printed_clock(dtype, mask, seq) or float(_clocks()["value"].max())


def printed_clock(dtype: str, mask: str, seq: int) -> float | None:
    """The clock that the paper prints for a cell, or None. One row is of several lengths: FP8, causal, up to 8K."""
    table = _clocks()
    cell = table[(table["dtype"] == dtype) & (table["mask"] == mask)]
    own = cell[(cell["seq"] == seq) & cell["cell"].isin(["main_matrix", "noncausal_control_42windows"])]
    if own.empty and seq <= 8192:
        own = cell[cell["cell"] == "main_matrix_upto_8K"]
    return float(own["value"].iloc[0]) if len(own) else None


def _clocks() -> pd.DataFrame:
    table = paper.table("b3_clock_power_smoke", numbers=True)
    return table[(table["metric"] == "sm_clock") & table["kernel"].isin(["A0", "both"])]


def published() -> pd.DataFrame:
    """The paper's speed-ups of H15 over stock on the B200 (`value`, percent), with the stock latency where printed."""
    main = paper.table("tableB5a_main", numbers=True).assign(cell="main")
    without = paper.table("tableB5c_noncausal", numbers=True).assign(cell="no mask", head_dim=128)
    shapes = paper.table("tableB5e_shapes", numbers=True).rename(columns={"condition": "cell"})
    table = pd.concat([main, without, shapes], ignore_index=True)
    gains = table[table["metric"] == "speedup"].copy()
    latency = table[(table["metric"] == "latency") & (table["kernel"] == "A0")]
    keys = ["dtype", "mask", "seq", "head_dim", "cell"]
    gains = gains.merge(latency[[*keys, "value"]].rename(columns={"value": "latency"}), on=keys, how="left")
    at = (gains["mask"] == "noncausal") & (gains["dtype"] == "fp8") & (gains["seq"] == 8192)
    unmasked = {"dtype": "fp8", "mask": "noncausal", "seq": 8192, "kernel": "A0", "metric": "latency"}
    gains.loc[at, "latency"] = paper.value("table2_kernel", **unmasked).value
    gains["gqa"] = [int(h / k) if pd.notna(k) else 1 for h, k in zip(gains["heads"], gains["kv_heads"], strict=True)]
    gains["heads"] = gains["heads"].fillna(16)
    gains["batch"] = gains["batch"].fillna(1)
    return gains.astype({"seq": int, "head_dim": int, "heads": int, "batch": int})
