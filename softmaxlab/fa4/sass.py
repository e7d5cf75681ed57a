"""Read what a cubin holds: its instructions by class, and what a launch of it reserves.

NVIDIA's own tools disassemble (`nvdisasm`, `cuobjdump`; PyPI packages nvidia-cuda-nvdisasm and
nvidia-cuda-cuobjdump); this module parses their text. Loops and warp roles are found in `flow`.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import re
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from softmaxlab.errors import LabError

#: Classes of opcodes in the order of tables. The first pattern that matches an opcode's beginning names its class.
CLASSES = {
    "MUFU.EX2": r"MUFU\.EX2",
    "MUFU other": r"MUFU",
    "FFMA2": r"FFMA2",
    "FADD2": r"FADD2",
    "FMUL2": r"FMUL2",
    "FFMA": r"FFMA",
    "FADD": r"FADD",
    "FMUL": r"FMUL",
    "FMNMX3": r"FMNMX3",
    "FMNMX": r"FMNMX",
    "FSEL/FSETP": r"FSEL|FSET",
    "half": r"H(FMA2|ADD2|MUL2|MNMX2)",
    "F2FP": r"F2FP",
    "IMAD": r"IMAD",
    "LEA": r"LEA",
    "SHF": r"SHF\b|SHL|SHR\b",
    "integer": r"IADD|VIADD|VIMNMX|IMNMX|ISETP|IABS|ISCADD",
    "logic": r"LOP3|R2P|PRMT|SEL\b|PLOP3|P2R",
    "MOV": r"MOV|CS2R",
    "tensor": r"UTC[A-Z]*MMA|[HQI]GMMA|[HQI]MMA",
    "tensor memory": r"LDTM|STTM",
    "local memory": r"LDL|STL",
    "uniform": r"U[A-Z]|R2UR|S2UR",
}
OTHER = "other"
_CLASSES = [(name, re.compile(pattern)) for name, pattern in CLASSES.items()]

_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][A-Z0-9_]*(?:\.\w+)*)\s*(.*)$")
_LABEL = re.compile(r"^([.$\w]+):\s*$")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")


@dataclass(frozen=True)
class Instruction:
    """One instruction: byte address, predicate ("" if none), opcode with its modifiers, operands."""

    address: int
    predicate: str
    opcode: str
    operands: str

    @property
    def kind(self) -> str:
        """Its class, of `CLASSES` or `other`."""
        return next((name for name, pattern in _CLASSES if pattern.match(self.opcode)), OTHER)


@dataclass(frozen=True)
class Usage:
    """What a launch reserves, from `cuobjdump -res-usage`: registers a thread; stack and local bytes a thread."""

    registers: int
    stack: int
    local: int


def tool(name: str) -> Path:
    """Path of `nvdisasm` or `cuobjdump`: of the PyPI packages, else on the PATH.

    Raises:
        LabError: it is in neither place.
    """
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations if spec else ():
        for path in sorted(Path(root).glob(f"*/bin/{name}"), reverse=True):
            return path
    if found := shutil.which(name):
        return Path(found)
    raise LabError(f"{name} was not found and is needed to read a cubin: pip install nvidia-cuda-{name}")


def disassemble(cubin: Path) -> str:
    """The SASS of a cubin as text."""
    return _run("nvdisasm", "-c", cubin)


def usage(cubin: Path) -> Usage:
    """What the one kernel of a cubin reserves."""
    found = _USAGE.findall(_run("cuobjdump", "-res-usage", cubin))
    if len(found) != 1:
        raise LabError(f"{cubin} reports the resources of {len(found)} kernels, but must hold 1")
    return Usage(*map(int, found[0]))


def compiler(cubin: Path) -> str:
    """Release of the ptxas that made a cubin, as it says itself; "" if it does not."""
    found = re.search(rb"release [\d.]+, V(\d+[\d.]*)", cubin.read_bytes())
    return found[1].decode() if found else ""


@functools.cache
def tool_version(name: str) -> str:
    """Release of a tool, as `13.5.37`."""
    found = re.search(r"V(\d[\d.]*)", _run(name, "--version"))
    return found[1] if found else "unknown"


def _run(name: str, *arguments: object) -> str:
    done = subprocess.run([tool(name), *map(str, arguments)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise LabError(f"{name} failed on {arguments[-1]}: {(done.stderr.strip() or 'no message').splitlines()[-1]}")
    return done.stdout


class Listing:
    """A disassembled kernel.

    Args:
        text: output of nvdisasm for a cubin of one kernel.

    Raises:
        LabError: there is no instruction in it.

    Attributes:
        instructions: in the order of the code.
        labels: label -> index of the instruction after it.
    """

    def __init__(self, text: str) -> None:
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}
        waiting: list[str] = []
        for line in text.splitlines():
            if label := _LABEL.match(line):
                waiting.append(label[1])
            elif found := _INSTRUCTION.match(line):
                self.labels |= dict.fromkeys(waiting, len(self.instructions))
                waiting = []
                address, predicate, opcode, operands = found.groups()
                operands = re.sub(r"\s+", " ", operands).rstrip(" ;")
                self.instructions.append(Instruction(int(address, 16), predicate or "", opcode, operands))
        if not self.instructions:
            raise LabError("the disassembly holds no instruction: it must be the output of nvdisasm for a kernel")

    @property
    def counts(self) -> Counter[str]:
        """Instructions of the whole kernel by class, padding (NOP) left out."""
        return Counter(i.kind for i in self.instructions if i.opcode != "NOP")

    @cached_property
    def digest(self) -> str:
        """Hash of all instructions with their operands; names of symbols and labels do not enter it."""
        names: dict[str, str] = {}
        hashed = hashlib.sha256()
        for i in self.instructions:
            operands = _TARGET.sub(lambda m: names.setdefault(m[1], f"L{len(names)}"), i.operands)
            operands = re.sub(r"`\([^)]*\)|\(\*.*?\*\)", "", operands)
            hashed.update(f"{i.predicate} {i.opcode} {operands}\n".encode())
        return hashed.hexdigest()
