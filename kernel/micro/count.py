#!/usr/bin/env python3
"""Count the isolated exponentials (paper B.5): instructions an element, length of its chain, registers.

    python kernel/micro/count.py [--arch sm_86 sm_90 sm_100] [--out results/audit/micro.json]

Needs nvcc, nvdisasm and cuobjdump on PATH or from the PyPI packages nvidia-cuda-nvcc, nvidia-nvvm, nvidia-cuda-crt
(of one version), nvidia-cuda-nvdisasm and nvidia-cuda-cuobjdump, and a host compiler; no GPU. What is counted are
the instructions that a loaded score flows through, less those of the kernel that only scales it.
"""

import argparse
import functools
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

SOURCE = Path(__file__).with_name("exponentials.cu")
ARCHS = ("sm_86", "sm_90", "sm_100")
ELEMENTS = {"single": 1, "fragment": 32}
BASE = "identity"
_LINE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.a-z]*)\s*(.*?)\s*;")
_REGISTER = re.compile(r"\bR(\d+)((?:\.\w+)*)")


@functools.cache
def tool(name: str) -> str:
    """Path of one of NVIDIA's tools. Raises SystemExit where there is none."""
    spec = importlib.util.find_spec("nvidia")
    places = [p for root in (spec.submodule_search_locations if spec else []) for p in Path(root).glob(f"*/bin/{name}")]
    found = shutil.which(name) or (str(places[0]) if places else "")
    if not found:
        sys.exit(f"error: {name} is neither on PATH nor in a package nvidia-cuda-{name}: install one of them")
    return found


def output(*command: str) -> str:
    """What a command prints. Raises SystemExit with its last line where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        sys.exit(f"error: {Path(command[0]).name} failed: {last}")
    return done.stdout


def version(name: str) -> str:
    """Of one of the tools, as it says it."""
    return re.findall(r"V([\d.]+)", output(tool(name), "--version"))[-1]


def flow(lines: list[str]) -> tuple[Counter, int]:
    """Of straight-line SASS: the instructions that loaded values flow through, by opcode, and the longest chain."""
    depth: dict[int, int] = {}  # of the registers that hold something made of a loaded value
    counts: Counter = Counter()
    longest = 0
    for line in lines:
        match = _LINE.match(line)
        if not match:
            continue
        opcode, operands = match[1], match[2].split(", ")
        name = opcode.split(".")[0]
        registers = [[(int(n), suffix) for n, suffix in _REGISTER.findall(o)] for o in operands]
        if name == "LDG":
            width = int(opcode.rsplit(".", 1)[-1]) // 32 if opcode[-1].isdigit() else 1
            depth |= {registers[0][0][0] + i: 0 for i in range(width)}
            continue
        sources = [n + i for o in registers[1:] for n, s in o for i in range(2 if ".F32x2" in s else 1)]
        if name == "STG":
            first, width = registers[-1][0][0], int(opcode.rsplit(".", 1)[-1]) // 32 if opcode[-1].isdigit() else 1
            longest = max([longest, *(depth.get(first + i, 0) for i in range(width))])
            continue
        through = [depth[n] for n in sources if n in depth]
        if through:
            counts[opcode.split(".")[0] if name != "MUFU" else opcode] += 1
        if registers and registers[0]:
            written = [registers[0][0][0] + i for i in range(2 if name in ("FFMA2", "FADD2", "FMUL2") else 1)]
            for n in written:
                depth.pop(n, None)
                if through:
                    depth[n] = max(through) + 1
    return counts, longest


def count(arch: str, folder: Path) -> list[dict]:
    """Rows for one architecture: arch, exponential, kernel, instructions and chain an element, opcodes, registers."""
    cubin = folder / f"{arch}.cubin"
    output(tool("nvcc"), f"-arch={arch}", "-cubin", "-O3", "-o", str(cubin), str(SOURCE))
    sass = output(tool("nvdisasm"), "-c", str(cubin))
    usage = output(tool("cuobjdump"), "-res-usage", str(cubin))
    registers = {n: int(r) for n, r in re.findall(r"Function (\w+):\s+REG:(\d+)", usage)}
    bodies = dict(re.findall(r"^\.text\.(\w+):\n(.*?)(?=^\.text\.|\Z)", sass, re.DOTALL | re.MULTILINE))
    measured = {name: flow(body.splitlines()) for name, body in bodies.items()}
    rows = []
    for name in sorted(measured):
        kernel, _, exponential = name.partition("_")
        counts, chain = measured[name]
        base, base_chain = measured[f"{kernel}_{BASE}"]
        n = ELEMENTS[kernel]
        opcodes = {o: (counts[o] - base[o]) / n for o in sorted({*counts, *base}) if counts[o] != base[o]}
        rows.append(
            {
                "arch": arch,
                "exponential": exponential,
                "kernel": kernel,
                "instructions": sum(opcodes.values()),
                "chain": chain - base_chain,
                "opcodes": opcodes,
                "registers": registers[name],
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", default=list(ARCHS))
    parser.add_argument("--out", type=Path, default=None, help="a JSON file to write")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = [row for arch in arguments.arch for row in count(arch, Path(folder))]
    print(f"{'arch':<8}{'exponential':<12}{'kernel':<10}{'instr.':>7}{'chain':>6}{'reg.':>6}  opcodes an element")
    for r in rows:
        opcodes = "  ".join(f"{o} {n:g}" for o, n in r["opcodes"].items())
        head = f"{r['arch']:<8}{r['exponential']:<12}{r['kernel']:<10}{r['instructions']:>7.2f}"
        print(f"{head}{r['chain']:>6}{r['registers']:>6}  {opcodes}")
    if arguments.out:
        provenance = {"kind": "compiled", "paper": "B.5"}
        provenance |= {name: version(name) for name in ("nvcc", "nvdisasm", "cuobjdump")}
        provenance["source sha256"] = hashlib.sha256(SOURCE.read_bytes()).hexdigest()
        lines = ",\n".join(json.dumps(row) for row in rows)
        content = f'{{"provenance": {json.dumps(provenance)},\n"rows": [\n{lines}\n]}}\n'
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        staged = arguments.out.with_name(f".{arguments.out.name}.tmp")
        staged.write_text(content, encoding="utf-8")
        os.replace(staged, arguments.out)


if __name__ == "__main__":
    main()
