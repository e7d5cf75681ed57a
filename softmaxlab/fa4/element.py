"""The exponential of one element in CuTe, as the replacement methods call it while a kernel is traced.

The paper's bit form and its relatives (paper B.1; the same in tensor arithmetic: `softmaxlab/bits.py`). With
t = 2^k·x, which the scale of the scores already contains, an element costs

- `paper`: max(t, least), + 12582912.0, and one shift-and-add of integers;
- `folded`: max(t, least), + 12582912.0 + 127·2^k, and one shift;
- `fused`, k = 7: the constant is part of the FMA that scales the scores; max(r, least) and one shift;
- `poly`: FlashAttention-4's own emulation at a chosen degree for a share of the elements, the hardware for the rest;
- `stock`: cute.math.exp2; on Blackwell the method's own mixture stays;
- `identity`: nothing.

On Blackwell two elements go through the packed FP32 instructions. This file stands alone: the text patch copies it
beside FlashAttention-4's own.
"""

from dataclasses import dataclass
from fractions import Fraction

import cutlass.cute as cute
import flash_attn.cute.utils as utils
from cutlass import Float32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

MAGIC = 12582912.0  # 2^23 + 2^22: added to t, it leaves the rounded integer in the low bits
ONE = 0x3F800000  # the bits of 1.0


@dataclass(frozen=True)
class Element:
    """One exponential.

    Attributes:
        form: stock, paper, folded, fused, poly or identity.
        k: fractional bits of the exponent (paper, folded; 7 for fused).
        clamp: least exponent in octaves.
        degree, share: of poly; the share of the element pairs that it computes.
    """

    form: str
    k: int = 0
    clamp: int = -127
    degree: int = 3
    share: Fraction = Fraction(1)

    @property
    def replaces(self) -> bool:
        """Whether Blackwell's mixture of hardware and emulation gives way."""
        return self.form != "stock"

    def scale_and_bias(self, scale_log2, row_max, max_offset):
        """Of the FMA s·scale + bias that makes the exponent, scaled by 2^k: exact, a power of two.

        Args:
            scale_log2: octaves of a unit of score.
            row_max: the anchor, in units of score.
            max_offset: octaves that the weights are scaled up by (FP8), a number or Float32.
        """
        if self.form == "fused":
            scale = scale_log2 * 128.0
            constant = MAGIC + 127.0 * 128.0 + max_offset * 128.0
            return scale, _fma(-row_max, scale, Float32(constant))
        bias = max_offset - row_max * scale_log2
        return (scale_log2 * 2.0**self.k, bias * 2.0**self.k) if self.k else (scale_log2, bias)

    def pair(self, x, y, index):
        """Two elements on Blackwell; `index` counts the pairs of the row."""
        if self.form == "identity":
            return x, y
        if self.form == "poly":
            if self._emulated(index):
                return utils.ex2_emulation_2(x, y, poly_degree=self.degree)
            return cute.math.exp2(x, fastmath=True), cute.math.exp2(y, fastmath=True)
        x, y = cute.arch.fmax(x, self._least), cute.arch.fmax(y, self._least)
        if self.form != "fused":
            x, y = cute.arch.add_packed_f32x2((x, y), (self._magic, self._magic))
        return self._shift(x), self._shift(y)

    def row(self, scores, scale_log2, row_max):
        """The elements of one row that a thread holds, on Hopper: a vector of scores in, one of weights out."""
        if self.form == "stock":
            return cute.math.exp2(scores * scale_log2 - row_max * scale_log2, fastmath=True)
        scale, bias = self.scale_and_bias(scale_log2, row_max, 0.0)
        held = cute.make_rmem_tensor(scores.shape, Float32)
        held.store(scores * scale + bias)
        for i in range(cute.size(scores.shape)):
            held[i] = self._one(held[i], i // 2)
        return held.load()

    def _one(self, x, index):
        if self.form == "identity":
            return x
        if self.form == "poly":
            if self._emulated(index):
                return utils.ex2_emulation(x, poly_degree=self.degree)
            return cute.math.exp2(x, fastmath=True)
        x = cute.arch.fmax(x, self._least)
        return self._shift(x if self.form == "fused" else x + self._magic)

    def _emulated(self, index):
        # Every pair at which the running total of the share passes a whole number: evenly spread, no phase to choose.
        return int((index + 1) * self.share) > int(index * self.share)

    @property
    def _magic(self):
        return MAGIC if self.form == "paper" else MAGIC + 127.0 * 2**self.k

    @property
    def _least(self):
        return MAGIC + (127.0 + self.clamp) * 128.0 if self.form == "fused" else self.clamp * 2.0**self.k

    def _shift(self, r):
        return _shifted(r, bits=23 - self.k, bias=ONE if self.form == "paper" else 0)


@dsl_user_op
def _fma(a, b, c, *, loc=None, ip=None):
    """a·b + c with one rounding; written out, so that it does not hang on a compiler's leave to contract."""
    operands = [Float32(x).ir_value(loc=loc, ip=ip) for x in (a, b, c)]
    return Float32(_ptx("fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", operands, loc, ip))


@dsl_user_op
def _shifted(r, *, bits, bias, loc=None, ip=None):
    """(r as an integer << bits) + bias, as a float. PTX, so that add.s32 reaches ptxas: it makes LEA of the two."""
    add = f"add.s32 n, n, {bias};\n\t" if bias else ""
    text = f"{{\n\t.reg .s32 n;\n\tmov.b32 n, $1;\n\tshl.b32 n, n, {bits};\n\t{add}mov.b32 $0, n;\n\t}}\n"
    return Float32(_ptx(text, "=f,f", [Float32(r).ir_value(loc=loc, ip=ip)], loc, ip))


def _ptx(text, constraints, operands, loc, ip):
    return llvm.inline_asm(
        Float32.mlir_type,
        operands,
        text,
        constraints,
        has_side_effects=False,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
