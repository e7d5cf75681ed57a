"""Hardware counters of a kernel by Nsight Compute (ncu): the pipes of the exponential, and instructions in all.

The paper's runs were refused these (B.5); its predictions 1 to 3 and 6 need them. Metrics are taken from a list of
candidates as far as this ncu has them for this GPU; names differ between architectures.
"""

from __future__ import annotations

import csv
import glob
import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from softmaxlab.bench import kernels, ranges, session, turns
from softmaxlab.bench.cells import Cell
from softmaxlab.bench.record import Entry
from softmaxlab.errors import LabError
from softmaxlab.fa4.variants import Variant

#: What is read, by the name it has in our tables: the first of each list that this ncu knows.
WANTED: dict[str, tuple[str, ...]] = {
    "xu %": ("sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",),
    "alu %": ("sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active",),
    "fma %": (
        "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_active",
        "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active",
    ),
    "fma heavy %": ("sm__inst_executed_pipe_fmaheavy.avg.pct_of_peak_sustained_active",),
    "fp16 %": ("sm__inst_executed_pipe_fp16.avg.pct_of_peak_sustained_active",),
    "tensor %": (
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
        "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
    ),
    "tensor 16-bit %": (
        "sm__pipe_tensor_op_gmma_cycles_active.avg.pct_of_peak_sustained_active",
        "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",
        "sm__inst_executed_pipe_tensor_op_hmma.avg.pct_of_peak_sustained_active",
    ),
    "issue %": ("smsp__issue_active.avg.pct_of_peak_sustained_active",),
    "xu": ("sm__inst_executed_pipe_xu.sum",),
    "alu": ("sm__inst_executed_pipe_alu.sum",),
    "fma": ("sm__inst_executed_pipe_fma.sum",),
    "fp16": ("sm__inst_executed_pipe_fp16.sum",),
    "uniform": ("sm__inst_executed_pipe_uniform.sum",),
    "instructions": ("sm__inst_executed.sum", "smsp__inst_executed.sum"),
    "local loads": ("smsp__inst_executed_op_local_ld.sum",),
    "local stores": ("smsp__inst_executed_op_local_st.sum",),
    "cycles": ("sm__cycles_active.max", "sm__cycles_elapsed.max"),
    "time": ("gpu__time_duration.sum",),
    "registers": ("launch__registers_per_thread",),
}
FILTER = "regex:flash"
_PLACES = ("/usr/local/cuda/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu")


def run(
    cells: Iterable[str | Cell] = ("bf16/causal/8192",),
    names: Iterable[str] = kernels.DEFAULT,
    *,
    skip: int = 2,
    launches: int = 3,
    results: str = "results",
    rehearse: bool = False,
    limit: float = 0,
) -> turns.Outcome:
    """Count the kernels of a cell in one process under ncu, with the clocks as they are.

    Args:
        skip, launches: launches of the kernel before, and that are counted.
        cells, names, results, rehearse, limit: as `latency.run`; torch's kernels are left out.

    Raises:
        LabError: as `latency.run`; ncu is missing, or the driver refuses it.
    """
    ranges.count("skip", skip, 0)
    ranges.count("launches", launches)
    names = [n for n in kernels.parse_all(names) if not kernels.is_reference(n)]
    tool = "" if rehearse else find()
    opened = session.opened(
        "counters",
        cells,
        names,
        {"skip": skip, "launches": launches, "filter": FILTER, "lse": True},
        rounds=1,
        results=results,
        rehearse=rehearse,
        limit=limit,
    )
    with opened as s:
        offered = known(tool) if tool else {m.split(".")[0] for c in WANTED.values() for m in c}
        chosen, missing = choose(offered)
        facts = {"metrics": chosen, "missing": missing}
        facts |= {"offered": sorted(n for n in offered if "pipe" in n)} if missing else {}
        counted: dict[tuple[str, str], dict[str, list[float]] | str] = {}

        def one(entry: Entry, kernel: str) -> dict[str, Any]:
            if (entry.key, kernel) not in counted:
                wanted = [k for k in entry.kernels if k not in entry.refused and not entry.done(0, k)]
                program = turns.command(wanted, rehearse)
                program += ["--cell", entry.cell, "--skip", str(skip), "--launches", str(launches)]
                text, said = _ran(program, 120) if rehearse else _profiled(tool, list(chosen.values()), program)
                failed = {a["kernel"]: a["error"] for a in said if "error" in a}
                if rehearse:
                    text = rehearsed(chosen, [a["kernel"] for a in said], Cell.parse(entry.cell), launches)
                found = read(text, chosen, [a["kernel"] for a in said if "error" not in a], launches)
                counted.update({(entry.key, k): found.get(k, failed.get(k, f"{k} was not called")) for k in wanted})
            result = counted[entry.key, kernel]
            if isinstance(result, str):
                raise LabError(result)
            return {"counters": result} | facts

        return turns.take(s.record, s.entries, 1, one, s.budget)


def find() -> str:
    """The path of ncu. Raises LabError where it is not installed."""
    found = shutil.which("ncu") or next((p for place in _PLACES for p in sorted(glob.glob(place))), "")
    if not found:
        raise LabError("ncu (Nsight Compute) is not on the PATH: it comes with the CUDA toolkit, and counters need it")
    return found


def known(tool: str) -> set[str]:
    """Base names of the metrics that this ncu has for this machine's GPU."""
    done = subprocess.run([tool, "--query-metrics"], capture_output=True, text=True, check=False, timeout=120)
    names = {line.split()[0] for line in done.stdout.splitlines() if "__" in line[:40] and line.split()}
    if not names:
        raise LabError(
            refusal(done.stdout + done.stderr) or "ncu names no metrics for this GPU: is its version too old?"
        )
    return names


def choose(names: set[str]) -> tuple[dict[str, str], list[str]]:
    """Of `WANTED`: our name → metric, and what this ncu does not have. Launch facts are no metrics of its list."""
    chosen = {}
    for ours, candidates in WANTED.items():
        metric = next((m for m in candidates if m.split(".")[0] in names or m.startswith("launch__")), None)
        if metric:
            chosen[ours] = metric
    return chosen, [ours for ours in WANTED if ours not in chosen]


def _profiled(tool: str, metrics: list[str], program: list[str]) -> tuple[str, list[dict[str, Any]]]:
    """What ncu writes of a program, and what the program says."""
    with tempfile.TemporaryDirectory(prefix="softmaxlab-") as folder:
        log = Path(folder) / "counters.csv"
        command = [tool, "--clock-control", "none", "--cache-control", "none", "-k", FILTER]
        command += ["--profile-from-start", "off", "--metrics", ",".join(metrics)]
        command += ["--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log), *program]
        try:
            other, said = _ran(command, 400)
        finally:
            text = log.read_text(encoding="utf-8") if log.is_file() else ""
            refused = refusal(text)
            if refused:
                raise LabError(refused)
    return text + other, said


def _ran(command: list[str], seconds: float) -> tuple[str, list[dict[str, Any]]]:
    """Standard output without, and the answers that are in it."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=seconds, env=turns.environment()
        )
    except subprocess.TimeoutExpired:
        raise LabError(f"{command[0]} did not end within {seconds:g} s: {' '.join(command[-5:])}") from None
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    text = "\n".join(line for line in done.stdout.splitlines() if not line.startswith("{"))
    if done.returncode:
        last = ((done.stderr + text).strip() or "it said nothing").splitlines()[-1]
        why = next((a["error"] for a in said if "kernel" not in a), "") or refusal(text + done.stderr)
        raise LabError(why or f"{command[0]} ended with exit code {done.returncode}: {last}")
    return text, said


def refusal(text: str) -> str:
    """The sentence for a driver or tool that refuses; empty where nothing does."""
    if "ERR_NVGPUCTRPERM" in text:
        return (
            "the driver refuses the counters (ERR_NVGPUCTRPERM): its administrator must allow them "
            "(NVreg_RestrictProfilingToAdminUsers=0), or run as root"
        )
    if "LibraryNotLoaded" in text:
        return "ncu cannot load the driver's profiling library (LibraryNotLoaded): this machine has no counters"
    errors = [line for line in text.splitlines() if line.startswith("==ERROR==")]
    return f"ncu refuses: {errors[0].removeprefix('==ERROR==').strip()}" if errors else ""


def read(text: str, chosen: dict[str, str], names: list[str], launches: int) -> dict[str, dict[str, list[float]]]:
    """Counters from ncu's raw page as CSV.

    Args:
        text: the page.
        chosen: our name → metric.
        names: kernels in the order in which they were called.
        launches: of each.

    Returns:
        kernel → our name → value of each launch.

    Raises:
        LabError: it has another number of launches, or a metric is missing.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    rows = list(csv.reader(lines[start:])) if start is not None else [[]]
    found = [row for row in rows[2:] if len(row) == len(rows[0])]  # names, units, then launches
    if not found or len(found) != len(names) * launches:
        what = FILTER.removeprefix("regex:")
        raise LabError(
            f"ncu counted {len(found)} launches with {what!r} in the name, but {len(names) * launches} were made"
        )
    column = {name: i for i, name in enumerate(rows[0])}
    lost = [m for m in chosen.values() if m not in column]
    if lost:
        raise LabError(f"ncu did not give {lost[0]}")
    return {
        name: {
            ours: [_number(row[column[metric]]) for row in found[i * launches : (i + 1) * launches]]
            for ours, metric in chosen.items()
        }
        for i, name in enumerate(names)
    }


def _number(text: str) -> float:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return float("nan")


def rehearsed(chosen: dict[str, str], names: list[str], cell: Cell, launches: int) -> str:
    """A raw page as ncu writes it, with made-up counters: two warps' instructions a score."""
    scores = cell.flops / 4 / cell.head_dim / 32

    def value(kernel: str, ours: str) -> float:
        if ours == "xu":
            return 0.0 if Variant.parse(kernel).bits or kernels.is_bound(kernel) else scores
        return 40.0 if ours.endswith("%") else 168.0 if ours == "registers" else 7.4 * scores

    rows = [["ID", "Kernel Name", *chosen.values()], ["", "", *("" for _ in chosen)]]
    for kernel in names:
        for _ in range(launches):
            rows.append([str(len(rows) - 2), "kernel_flash", *(f"{value(kernel, o):,.2f}" for o in chosen)])
    quoted = (",".join(f'"{field}"' for field in row) for row in rows)
    return "\n".join(["==PROF== Connected to process 1", *quoted]) + "\n"
