"""What an SM can do in a clock, by execution pipe, and which pipe an instruction needs.

Sources. Lanes of FP32, exp2, compare/min/max and integer: CUDA C++ Programming Guide 12.9 and Best Practices Guide
13, table "Throughput of Native Arithmetic Instructions" (columns 8.0, 9.0, 10.0, 10.3). Which pipe: Nsight Compute
Profiling Guide, "Pipelines". Tensor rates: the architectures' data sheets (dense peak over SMs and boost clock), and
for Blackwell FlashAttention-4 (Zadouri et al., 2026), which also gives exp2 at 16 and, on sm_103, 32 a clock; the
paper quotes both (§1, B.5).

What NVIDIA does not document, and is assumed here: a packed FP32 instruction (FFMA2) takes both halves of the FMA
pipe, so FP32 peaks at 128 FMA a clock packed or not, as the B200's data sheet has it; a three-input minimum counts as
one ALU instruction (the guide's 128 min/max a clock on 10.x are then 64 instructions); F2FP packs two values in one
ALU instruction. For F2FP to FP8 public micro-benchmarks on GB300 found half that rate: `fp8_conversion` below.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from softmaxlab.errors import LabError

WARP, SCHEDULERS = 32, 4  # threads of a warp; schedulers (sub-partitions) of an SM, each issues one warp instruction
PIPES = ("xu", "fma", "alu", "issue")


@dataclass(frozen=True)
class Sm:
    """Rates of one SM per clock.

    Attributes:
        gpu: a GPU that bears it. sms: how many it has.
        xu: exp2 results. fma: FP32 multiply-adds. alu: compares, minima, shifts, logic, packed conversions.
        fp8_conversion: instructions that pack two FP32 into FP8; 0 where FlashAttention-4 has no FP8.
        tensor16, tensor8: tensor-core operations (a multiply-add is two) on 16-bit and 8-bit operands; 0 for none.
    """

    gpu: str
    sms: int
    xu: int
    fma: int
    alu: int
    fp8_conversion: int
    tensor16: int
    tensor8: int

    @property
    def issue(self) -> int:
        """Thread instructions of all kinds."""
        return WARP * SCHEDULERS


SMS = {
    "sm_80": Sm("A100", 108, xu=16, fma=64, alu=64, fp8_conversion=0, tensor16=2048, tensor8=0),
    "sm_90": Sm("H200", 132, xu=16, fma=128, alu=64, fp8_conversion=0, tensor16=4096, tensor8=8192),
    "sm_100": Sm("B200", 148, xu=16, fma=128, alu=64, fp8_conversion=32, tensor16=8192, tensor8=16384),
    "sm_103": Sm("B300", 148, xu=32, fma=128, alu=64, fp8_conversion=32, tensor16=8192, tensor8=16384),
}

# The first pattern that matches the beginning of an opcode names its pipe; what matches none only takes issue slots:
# loads and stores, tensor memory, barriers, the uniform datapath.
_PIPES = (
    ("xu", re.compile(r"MUFU|F2I|POPC|FLO|BREV")),
    ("packed", re.compile(r"F(FMA|ADD|MUL)2")),
    ("imad", re.compile(r"IMAD|IDP")),
    ("fma", re.compile(r"F(FMA|ADD|MUL|SWZADD)\b|H(FMA2|ADD2|MUL2)")),
    ("fp8", re.compile(r"F2FP\.\S*E[45]M[23]")),
    (
        "alu",
        re.compile(
            r"F2FP|FMNMX|FSEL|FSET|HMNMX2|LEA|SHF\b|SHL|LOP3|PRMT|SEL\b|R2P|P2R|I(ADD|SETP|MNMX)|VI|MOV|CS2R|PLOP"
        ),
    ),
)


def sm(arch: str) -> Sm:
    """The rates of an architecture: sm_80, sm_90, sm_100, sm_103, with or without a letter at the end.

    Raises:
        LabError: another architecture.
    """
    found = SMS.get(arch.rstrip("af"))
    if found is None:
        raise LabError(f"rates of {arch!r} are not known: known are {', '.join(SMS)}")
    return found


def pipe(opcode: str) -> str:
    """The pipe of an opcode: xu, fma, packed (both halves of fma), imad (one half of fma), fp8, alu, or issue."""
    return next((name for name, pattern in _PIPES if pattern.match(opcode)), "issue")


def cycles(opcodes: Mapping[str, int], arch: str, *, fp8_conversion: int | None = None) -> dict[str, float]:
    """Clocks that one warp keeps each pipe of its scheduler busy.

    Args:
        opcodes: how many warp instructions of each opcode.
        arch: the architecture.
        fp8_conversion: FP8 packs a clock and SM, in place of `Sm.fp8_conversion`.

    Returns:
        Clocks by pipe, of `PIPES`. No pipe can be done sooner; how far they overlap is another question.
    """
    rates = sm(arch)
    counts = dict.fromkeys(("xu", "fma", "packed", "imad", "fp8", "alu", "issue"), 0)
    for opcode, count in opcodes.items():
        counts[pipe(opcode)] += count
    one = {name: WARP * SCHEDULERS / getattr(rates, name) for name in ("xu", "fma", "alu")}
    conversion = fp8_conversion or rates.fp8_conversion or rates.alu
    # IMAD runs in one half of the FMA pipe and packed instructions in both, so that half may bind before the whole.
    whole = one["fma"] * (counts["fma"] + 2 * counts["packed"] + counts["imad"])
    half = 2 * one["fma"] * (counts["packed"] + counts["imad"]) if rates.fma > rates.alu else 0.0
    return {
        "xu": one["xu"] * counts["xu"],
        "fma": max(whole, half),
        "alu": one["alu"] * counts["alu"] + WARP * SCHEDULERS / conversion * counts["fp8"],
        "issue": float(sum(opcodes.values())),
    }
