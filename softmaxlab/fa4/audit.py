"""The instruction audit: what the compiler makes of FlashAttention-4's forward kernel, per variant. Paper B.5.

Every number here is **compiled**: counted in machine code that was made without a GPU (`compile`) and read with
NVIDIA's disassembler (`sass`, `flow`). Nothing is timed. A row is kept under its kernel's hash.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from softmaxlab import files
from softmaxlab.errors import LabError
from softmaxlab.evaluate import find_results
from softmaxlab.fa4 import compile as compiler
from softmaxlab.fa4 import flow, sass, source
from softmaxlab.fa4.compile import ARCHS, Artifact, Request

FORMAT = 3
FILE = Path("audit") / "kernels.json"
FRAGMENT, EMULATED = 32, 4  # FA4's fragment of a row in registers, and the elements a period emulates (`ex2_emu_res`)

VARIANTS = ("stock", "control", "h15", "s(7)", "f(1)", "f(7)", "g(1)", "g(3)", "g(7)", "fused7")
VARIANTS += ("poly(1,all)", "poly(2,all)", "poly(3,all)", "poly(3,0.25)", "poly(3,0.5)", "identity")
#: The packed exponential, whose codes of E4M3 have three fractional bits; on Hopper also its other kinds.
PACKED = ("packed(3,3)",)
PACKED_HOPPER = ("packed(1,3)", "packed(4,3)", "loose(4,3)", "lazy(4,3)", "skip")
#: The eight stock settings of Table B5d as (frequency, first fragment); a frequency of 0 emulates nothing.
SETTINGS = ((0, 1), (16, 1), (8, 1), (8, 0), (2, 1), (4, 1), (2, 0), (4, 0))


def audit(
    arch: str = "sm_100a",
    dtype: str = "bf16",
    causal: bool = True,
    head_dim: int = 128,
    variant: str = "stock",
    *,
    gqa: int = 1,
    emulation: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """Audit one kernel. Arguments as `softmaxlab.fa4.compile.Request`.

    Returns:
        A row: the request; `registers` a thread at launch; `stack` and `local` bytes; `ldl` and `stl`, loads and
        stores of local memory in the code; `roles`, with registers asked for and used; `instructions` of the kernel;
        `digest`, equal for equal machine code; `elements` a thread handles in a turn of the main loop; `loop`,
        `masked` and `correction`, instructions by class in one turn (None where there is no such loop);
        `opcodes` of the main loop; `versions`.

    Raises:
        LabError: what FlashAttention-4 does not support; a package or tool that is missing.
    """
    return audit_many([Request(str(variant), arch, dtype, causal, head_dim, gqa, emulation)])[0]


def audit_many(requests: Iterable[Request], *, package: Path | None = None, batch: int = 16) -> list[dict[str, Any]]:
    """Audit kernels, in the order of the requests.

    Args:
        package: folder that holds another version of `flash_attn`, in place of the installed one; stock only.
        batch: kernels a compiling process.
    """
    requests = list(requests)
    rows: dict[Request, dict[str, Any]] = {}
    for arch in dict.fromkeys(r.arch for r in requests):
        ours = list(dict.fromkeys(r for r in requests if r.arch == arch))
        for start in range(0, len(ours), batch):
            part = ours[start : start + batch]
            rows |= {r: _row(a) for r, a in zip(part, compiler.compile_many(part, package=package), strict=True)}
    return [rows[r] for r in requests]


def grid() -> list[Request]:
    """What the book's tables show: every variant on three architectures, GQA, FP16, and FA4's emulation settings."""
    found = []
    for arch in ARCHS:
        dtypes = ("bf16",) if arch == "sm_90a" else ("bf16", "e4m3")
        cells = [(d, c) for d in dtypes for c in (True, False)]
        variants = VARIANTS + PACKED + (PACKED_HOPPER if arch == "sm_90a" else ())
        found += [Request(v, arch, d, c, h) for d, c in cells for h in (128, 64) for v in variants]
        found += [Request(v, arch, d, c, 128, 4) for d, c in cells for v in ("stock", "h15", "g(3)")]
        found += [Request(v, arch, "fp16", c, 128) for c in (True, False) for v in ("stock", "h15")]
        if arch != "sm_90a":
            swept = [(d, c) for d, c in cells if arch == "sm_100a" or (d, c) == ("e4m3", True)]
            found += [Request("stock", arch, d, c, 128, emulation=s) for d, c in swept for s in SETTINGS]
    return found


def record(results: str | Path = "results", package: Path | None = None) -> Path:
    """Audit and store; return the file.

    Args:
        results: folder, as everywhere; the file is `audit/kernels.json` in it.
        package: as in `audit_many`. Then only the stock kernel is audited, with FA4's emulation settings of Table B5d
            and with its own, and the file is named by the versions of FlashAttention-4 and of the compiler. Without,
            the whole grid is (twenty minutes).
    """
    others = [Request("stock", "sm_100a", "e4m3", True, 128, emulation=s) for s in SETTINGS]
    others += [Request("stock", "sm_100a", d, c, 128) for d in ("bf16", "fp16", "e4m3") for c in (True, False)]
    rows = audit_many(others if package else grid(), package=package)
    versions = _versions(rows)
    provenance = {"kind": "compiled", "paper": "B.5", **versions}
    path = find_results(str(results)) / FILE
    if package:
        path = path.with_name(f"stock-{versions['flash-attn-4']}-ptxas-{versions['ptxas']}.json")
    lines = ",\n".join(json.dumps({k: v for k, v in row.items() if k != "versions"}) for row in rows)
    files.write_text(path, f'{{"provenance": {json.dumps(provenance)},\n"kernels": [\n{lines}\n]}}\n')
    return path


def stored(results: str | Path = "results") -> tuple[pd.DataFrame, dict[str, str]]:
    """The recorded audit: one row a kernel, and its provenance.

    Raises:
        LabError: none is recorded, or the file does not hold one.
    """
    path = _file(results)
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        frame, provenance = table(held["kernels"]), held["provenance"]
    except FileNotFoundError:
        raise LabError(f"there is no recorded audit {path}: `softmaxlab audit --all` makes one") from None
    except (ValueError, KeyError, TypeError) as error:
        raise LabError(f"{path} holds no audit ({error}): `softmaxlab audit --all` makes it again") from error
    return frame, provenance


def stored_versions(results: str | Path = "results") -> pd.DataFrame:
    """The stock kernel for sm_100a, head dimension 128, in every recorded version: one row a kernel and version.

    Returns:
        Columns version, ptxas, dtype, causal, emulation ("" for its own), asked and used (registers of the softmax
        warps), stack (bytes), accesses (loads and stores of local memory in the code), in_loop (those in one turn of
        the main loop), digest, per_element.
    """
    found = [stored(results)]
    for path in sorted(_file(results).parent.glob("stock-*.json")):
        held = json.loads(path.read_text(encoding="utf-8"))
        found.append((table(held["kernels"]), held["provenance"]))
    rows = []
    for frame, provenance in found:
        stock = frame[(frame["variant"] == "stock") & (frame["arch"] == "sm_100a")]
        stock = stock[(stock["head_dim"] == 128) & (stock["gqa"] == 1)]
        for row in stock.to_dict("records"):
            asked, used = next((a, u) for name, a, u in row["roles"] if name == "softmax")
            rows.append(
                {"version": provenance["flash-attn-4"], "ptxas": provenance["ptxas"]}
                | {name: row[name] for name in ("dtype", "causal", "emulation")}
                | {"asked": asked, "used": used, "stack": row["stack"], "accesses": row["ldl"] + row["stl"]}
                | {"in_loop": row["loop"].get("local memory", 0)}
                | {name: row[name] for name in ("digest", "per_element")}
            )
    return pd.DataFrame(rows)


def table(rows: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """Rows of `audit` as a frame; `emulation` becomes a text (`16,1`, or "" for FA4's own), `per_element` is added."""
    frame = pd.DataFrame(list(rows))
    frame["emulation"] = [",".join(map(str, e)) if e else "" for e in frame["emulation"]]
    frame["per_element"] = [sum(loop.values()) / n for loop, n in zip(frame["loop"], frame["elements"], strict=True)]
    return frame


def pick(frame: pd.DataFrame, **wanted: object) -> pd.Series:
    """The one row with these values; `emulation` is "" and `gqa` 1 unless given.

    Raises:
        LabError: no row, or several.
    """
    wanted = {"emulation": "", "gqa": 1} | wanted
    keep = pd.Series(True, index=frame.index)
    for column, value in wanted.items():
        keep &= frame[column] == value
    if keep.sum() != 1:
        said = ", ".join(f"{k}={v!r}" for k, v in wanted.items())
        raise LabError(f"{keep.sum()} audited kernels match {said}; exactly one must")
    return frame[keep].iloc[0]


def emulated_share(freq: int, start: int, fragments: int = 4) -> float:
    """Share of a tile's elements that FA4's predicate gives to the polynomial.

    A pair k of fragment j takes it unless `k % freq < freq − 4`, or j is the last fragment, or `j < start`.

    Args:
        freq: the period in elements, even; 0 emulates nothing.
        start: the first fragment that emulates.
        fragments: of a row in registers; 4 at 128 keys.
    """
    return len(emulated_pairs(freq, start, fragments)) * 2 / (fragments * FRAGMENT)


def emulated_pairs(freq: int, start: int, fragments: int = 4) -> frozenset[tuple[int, int]]:
    """The (fragment, first element) of the pairs that take the polynomial; equal sets are the same program."""
    if freq == 0:
        return frozenset()
    pairs = ((j, k) for j in range(start, fragments - 1) for k in range(0, FRAGMENT, 2))
    return frozenset((j, k) for j, k in pairs if k % freq >= freq - EMULATED)


def parse_emulation(text: str) -> tuple[int, int]:
    """Read `FREQ,START`, as `16,1`."""
    try:
        freq, start = (int(part) for part in text.split(","))
    except ValueError:
        raise LabError(f"emulation {text!r} is not of the form FREQ,START, as 16,1") from None
    return freq, start


def describe(row: dict[str, Any]) -> str:
    """A row as text for the terminal."""
    mask = "causal" if row["causal"] else "not causal"
    own = f", emulation {row['emulation'][0]},{row['emulation'][1]}" if row["emulation"] else ""
    head = (
        f"{row['variant']} on {row['arch']}, {row['dtype']}, {mask}, head dim {row['head_dim']}, gqa {row['gqa']}{own}"
    )
    total = sum(row["loop"].values())
    lines = [head, f"registers {row['registers']} at launch, stack {row['stack']} B, local {row['local']} B"]
    lines += [f"local memory: {row['ldl']} loads, {row['stl']} stores; {row['instructions']} instructions in all"]
    lines += ["roles: " + ", ".join(f"{n} {r} ({used} used)" for n, r, used in row["roles"])]
    lines += [f"main loop: {total} instructions for {row['elements']} elements = {total / row['elements']:.2f} each"]
    counts = sorted(row["loop"].items(), key=lambda pair: -pair[1])
    return "\n".join(lines + [f"  {name:<14} {count:>5}  {count / row['elements']:.3f}" for name, count in counts])


def _file(results: str | Path) -> Path:
    """The recorded audit in a results folder; a relative one may also lie beside the package."""
    path = find_results(str(results)) / FILE
    beside = Path(__file__).parents[2] / results / FILE
    return beside if beside.is_file() and not path.is_file() else path


def _row(artifact: Artifact) -> dict[str, Any]:
    path = source.cache_dir() / "audit" / f"{artifact.key}-{FORMAT}-{sass.tool_version('nvdisasm')}.json"
    if path.is_file():
        return json.loads(path.read_text(encoding="utf-8"))
    listing = sass.Listing(sass.disassemble(artifact.cubin))
    code = flow.Flow(listing)
    main, correction, usage = flow.main_loop(code), flow.correction_loop(code), sass.usage(artifact.cubin)
    opcodes = [i.opcode for i in listing.instructions]
    request = asdict(artifact.request)
    del request["softcap"]
    row = request | {
        "registers": usage.registers,
        "stack": usage.stack,
        "local": usage.local,
        "ldl": sum(o.startswith("LDL") for o in opcodes),
        "stl": sum(o.startswith("STL") for o in opcodes),
        "roles": [[r.name, r.registers, r.used] for r in code.roles],
        "instructions": sum(listing.counts.values()),
        "digest": listing.digest,
        "elements": main.elements,
        "loop": _ordered(main.loop),
        "masked": main.masked and _ordered(main.masked),
        "correction": correction and _ordered(correction),
        "opcodes": main.loop.opcodes,
        "versions": artifact.versions | {"ptxas": sass.compiler(artifact.cubin)},
    }
    row["versions"]["nvdisasm"] = sass.tool_version("nvdisasm")
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_text(path, json.dumps(row))
    return json.loads(json.dumps(row))


def _ordered(loop: flow.Loop) -> dict[str, int]:
    counts = loop.counts
    return {name: counts[name] for name in (*sass.CLASSES, sass.OTHER) if counts[name]}


def _versions(rows: list[dict[str, Any]]) -> dict[str, str]:
    found = {json.dumps(row["versions"], sort_keys=True) for row in rows}
    if len(found) != 1:
        raise LabError(
            f"the audited kernels came of {len(found)} sets of versions, but must come of 1: {sorted(found)}"
        )
    return rows[0]["versions"]
