"""When a coarser exponential pays: the throughput model beside what was published and what was measured.

`fa4.throughput` holds the model for Blackwell. This module adds Hopper, where time was measured, and a third limit:

- **issue**: all else stays as measured, and a warpgroup's turn changes by one clock for each instruction that its warps
  issue more or less, whatever pipe the instruction goes to.

Like the exposed limit it is not fitted. A turn on Hopper is one pass of a softmax warpgroup over 64 rows and 128 keys.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

import pandas as pd

from softmaxlab.bench import kernels
from softmaxlab.bench.cells import Cell
from softmaxlab.errors import LabError
from softmaxlab.fa4 import audit, rates, throughput

HOPPER = "sm_90a"
#: Rows of a CTA's tile on Hopper by head dimension, and keys (flash-attn-4, `_tile_size_fwd_sm90`). A softmax
#: warpgroup takes 64 rows, so these are two and three warpgroups.
ROWS, KEYS, WARPGROUP = {64: 192, 128: 128}, 128, 64
LIMITS = ("overlapped", "exposed", "issue")
NAMES = {"bf16": "BF16", "fp16": "FP16", "e4m3": "FP8"}


def warpgroups(head_dim: int) -> int:
    """Softmax warpgroups of an SM on Hopper. Raises LabError for a head dimension that was not compiled."""
    if head_dim not in ROWS:
        raise LabError(f"tiles on Hopper are known for head dimensions {' and '.join(map(str, ROWS))}, not {head_dim}")
    return ROWS[head_dim] // WARPGROUP


def turns(cell: Cell, sms: int = rates.SMS["sm_90"].sms) -> int:
    """Turns on the SM that has the most to do; a CTA's tile after the other, the longest first, each to the idlest SM.

    Args:
        cell: what was timed; keys as many as rows.
        sms: SMs of the GPU.
    """
    groups, rows = warpgroups(cell.head_dim), ROWS[cell.head_dim]
    tiles, keys = -(-cell.seq // rows), -(-cell.seq // KEYS)
    each = [min(keys, -(-(i + 1) * rows // KEYS)) if cell.causal else keys for i in range(tiles)]
    load = [0] * sms
    for work in sorted(each * (cell.heads * cell.batch), reverse=True):
        heapq.heapreplace(load, load[0] + work)
    return groups * max(load)


def period(ms: float, clock_mhz: float, cell: Cell) -> float:
    """Clocks of an SM a turn, from a kernel's duration and its clock."""
    return ms * 1e3 * clock_mhz / turns(cell)


def limits(stock: Mapping, variant: Mapping, period: float, groups: int = throughput.STAGES) -> dict[str, float]:
    """Speed-up in percent by each of `LIMITS`.

    Args:
        stock, variant: audited kernels.
        period: clocks of an SM a turn, of the stock kernel; NaN leaves only the overlapped limit.
        groups: softmax warpgroups of an SM; a turn of one takes that many periods.
    """
    before, after = throughput.stages(stock), throughput.stages(variant)
    own = groups * period
    saved = {"exposed": throughput.serial(before) - throughput.serial(after), "issue": before["issue"] - after["issue"]}
    return {"overlapped": throughput.overlapped_gain(stock, variant)} | {
        name: 100 * (own / (own - clocks) - 1) for name, clocks in saved.items()
    }


def account(frame: pd.DataFrame, variant: str = "h15", causal: bool = True) -> pd.DataFrame:
    """Who waits for whom: clocks of a turn over the tensor cores', by architecture, dtype and head dimension.

    Args:
        frame: the audit (`audit.stored`).

    Returns:
        Columns label, arch, gpu, dtype, head_dim, tensor (clocks a turn); xu (exp2 of the stock kernel), issue (its
        instructions), busiest and busiest_issue (of the variant: its busiest pipe but the tensor cores, its
        instructions), all over tensor; pipe (which one that is); added (instructions a score, more than stock).
    """
    cells = frame[(frame["variant"] == "stock") & (frame["emulation"] == "") & (frame["gqa"] == 1)]
    rows = []
    for stock in cells[cells["causal"] == causal].to_dict("records"):
        key = {name: stock[name] for name in ("arch", "dtype", "head_dim")} | {"causal": causal}
        if stock["dtype"] == "fp16":  # the rates and the counts are those of BF16
            continue
        other = audit.pick(frame, variant=variant, **key)
        before, after = throughput.stages(stock), throughput.stages(other)
        pipes = {name: after[name] for name in ("xu", "fma", "alu")}
        pipe, clocks = throughput.binding(pipes)
        gpu = rates.sm(stock["arch"]).gpu
        rows.append(
            {"label": f"{gpu}, {NAMES[stock['dtype']]}, {stock['head_dim']}", "arch": stock["arch"], "gpu": gpu}
            | {"dtype": stock["dtype"], "head_dim": stock["head_dim"], "tensor": before["tensor"]}
            | {"xu": before["xu"] / before["tensor"], "issue": before["issue"] / before["tensor"]}
            | {"busiest": clocks / before["tensor"], "busiest_issue": after["issue"] / before["tensor"], "pipe": pipe}
            | {"added": other["per_element"] - stock["per_element"]}
        )
    order = {name: at for at, name in enumerate((HOPPER, "sm_100a", "sm_103a"))}
    rows.sort(key=lambda r: (order.get(r["arch"], len(order)), r["dtype"] != "bf16", -r["head_dim"]))
    return pd.DataFrame(rows)


def published(frame: pd.DataFrame) -> pd.DataFrame:
    """The paper's speed-ups of Rowmax-H15 on the B200 beside the limits: `throughput.compare` and a column issue."""
    table = throughput.compare(frame)
    issue = []
    for row in table.itertuples():
        key = {"arch": "sm_100a", "dtype": throughput.DTYPE[row.dtype], "head_dim": row.head_dim}
        key |= {"causal": row.mask == "causal", "gqa": 4 if row.cell == "gqa" else 1}
        stock, other = (audit.pick(frame, variant=v, **key) for v in ("stock", "h15"))
        issue.append(limits(stock, other, row.period)["issue"])
    return table.assign(issue=issue)


def measured(frame: pd.DataFrame, gains: pd.DataFrame) -> pd.DataFrame:
    """What was measured on Hopper beside the limits, one row a cell and kernel that was audited.

    Args:
        frame: the audit.
        gains: `bench.gains.table`, of one GPU.

    Returns:
        The rows of `gains` with the columns of `LIMITS`; period (clocks an SM a turn of the stock kernel); together
        (timed in the same windows as the stock kernel of that row); cycles (speed-up in percent of durations times
        clocks, as the clocks were read; NaN if not together); added (instructions a score that the
        kernel has more than stock). Kernels that are not FlashAttention-4's, stock and control are left out.
    """
    rows = []
    for _, group in gains.groupby("cell", sort=False):
        base = group[group["kernel"] == kernels.STOCK]
        if base.empty:
            continue
        base = base.iloc[0]
        cell = Cell.parse(base["cell"])
        key = {"arch": HOPPER, "dtype": cell.dtype, "causal": cell.causal, "head_dim": cell.head_dim, "gqa": cell.gqa}
        known = set(frame.loc[(frame["arch"] == HOPPER) & (frame["gqa"] == cell.gqa), "variant"])
        stock = audit.pick(frame, variant=kernels.STOCK, **key)
        taken = period(base["ms"], base["clock"], cell)
        for row in group.to_dict("records"):
            if row["kernel"] in (kernels.STOCK, kernels.CONTROL) or row["kernel"] not in known:
                continue
            other = audit.pick(frame, variant=row["kernel"], **key)
            together = row["window_ms"] == base["window_ms"]  # else the clocks are of two runs
            cycles = 100 * ((1 + row["stock"] / 100) * base["clock"] / row["clock"] - 1) if together else float("nan")
            rows.append(
                row
                | limits(stock, other, taken, warpgroups(cell.head_dim))
                | {
                    "period": taken,
                    "together": together,
                    "cycles": cycles,
                    "added": other["per_element"] - stock["per_element"],
                }
            )
    return pd.DataFrame(rows)


def counted(frame: pd.DataFrame, counts: pd.DataFrame) -> pd.DataFrame:
    """Profiler counters beside the audit, one row a cell and kernel (Hopper).

    Args:
        frame: the audit.
        counts: `bench.read.counts`, of one GPU.

    Returns:
        Columns cell, kernel, cycles (clocks of the GPU); gain (percent, of stock's over the kernel's); for each pipe of
        xu, alu, fma, issue and tensor: the counter (percent), and `… model` (percent: clocks a turn, times turns, over
        the measured cycles); instructions; price (clocks that the kernel takes longer than stock for an instruction
        that each scheduler issues more; NaN for stock and where hardly any is added or left out).
    """
    rows = []
    for name, group in counts.groupby("cell", sort=False):
        cell = Cell.parse(name)
        base = group[group["kernel"] == kernels.STOCK].iloc[0]
        slots = rates.SCHEDULERS * rates.sm(HOPPER).sms
        for row in group.to_dict("records"):
            key = {"arch": HOPPER, "dtype": cell.dtype, "causal": cell.causal, "head_dim": cell.head_dim}
            clocks = throughput.stages(audit.pick(frame, variant=row["kernel"], gqa=cell.gqa, **key))
            more = (row["instructions"] - base["instructions"]) / slots
            pipes = {p: row[f"{p} %"] for p in ("xu", "alu", "fma", "issue", "tensor")}
            models = {f"{p} model": 100 * clocks[p] * turns(cell) / row["cycles"] for p in pipes}
            small = abs(more) * slots < 0.01 * base["instructions"]
            rows.append(
                {"cell": name, "kernel": row["kernel"], "cycles": row["cycles"], "registers": row["registers"]}
                | {"gain": 100 * (base["cycles"] / row["cycles"] - 1), **pipes, **models}
                | {"instructions": row["instructions"]}
                | {"price": float("nan") if small else (row["cycles"] - base["cycles"]) / more}
            )
    return pd.DataFrame(rows)


def right_signs(table: pd.DataFrame, value: str, names: Sequence[str] = LIMITS, least: float = 0.5) -> pd.DataFrame:
    """In how many rows a limit has the sign of the value, and how far off it is.

    Args:
        table: rows with the columns `value` and `names`; rows without any of these are left out.
        least: percent; a limit closer to zero says nothing and is not right.

    Returns:
        A row a limit: columns limit, right, of, error (median distance, points).
    """
    rows = []
    for name in names:
        both = table[[value, name]].dropna()
        right = (both[name] * both[value] > 0) & (both[name].abs() >= least)
        error = float((both[name] - both[value]).abs().median())
        rows.append({"limit": name, "right": int(right.sum()), "of": len(both), "error": error})
    return pd.DataFrame(rows)
