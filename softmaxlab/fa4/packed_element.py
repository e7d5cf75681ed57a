"""The packed exponential in CuTe, as the replacement methods call it while a kernel is traced.

What it computes is defined in `softmaxlab/operators/packed.py`, and the same steps stand in tensor arithmetic in
`softmaxlab/packed_bits.py`. Two scores cost two FMAs and one conversion, which leaves their integer codes in the
halves of a register (an FP16 subnormal is a fixed-point number); one shift makes two weights of them. FP8 needs no
shift: its code is the byte.

On Hopper the codes wait in the registers of the scores until the product with the values is done, because that
product still reads the registers of P: `codes` runs before the wait, `finish` after it. On Blackwell P goes through
tensor memory and nothing waits.

Row sums are taken of the weights as they are stored, in pairs: `levels` times, neighbours among the words of one
column of eight keys are added in the format of P; what is left is added in FP32.
"""

import struct
from contextvars import ContextVar
from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float16, Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

#: What P is stored as in the kernel that is being traced: FlashAttention-4's Softmax does not know it.
STORED: ContextVar[str] = ContextVar("softmaxlab_packed_stored")
TYPES = {"bf16": BFloat16, "fp16": Float16, "e4m3": Float8E4M3FN}

#: Octaves of a scaled row maximum, in magnitude, up to which rounding cannot take a code out of its range.
LARGEST = 2.0**22


@dataclass(frozen=True)
class Packed:
    """One packed exponential.

    Attributes:
        k: fractional bits of the exponent, 1 to 4.
        levels: of the row sum's additions in pairs, in the format of P.
        pinned: whether the conversions are kept before the wait, or the assembler places them.
    """

    k: int
    levels: int
    pinned: bool = True

    @property
    def _offset(self):
        """Octaves that the weights are scaled up by, to use the range of P."""
        # A sum of 2^levels weights of FP16 must stay below 2^16.
        return {"bf16": 0, "fp16": 15 - self.levels, "e4m3": 8}[STORED.get()]

    @property
    def _least(self):
        """Octaves below the anchor at which the code is 0: the bias of the format's exponent, and the offset."""
        return {"bf16": 127, "fp16": 15, "e4m3": 7}[STORED.get()] + self._offset

    @property
    def _shift(self):
        """From the code to the weight's bits."""
        return {"bf16": 7, "fp16": 10, "e4m3": 10}[STORED.get()] - self.k

    def scale_and_bias(self, scale_log2, row_max, max_offset=None):
        """Of the FMA s·scale + bias that makes the code, in units of FP16's subnormals, 2^−24."""
        unit = 2.0 ** (self.k - 24)
        scale = scale_log2 * unit
        return scale, _fma(-row_max, scale, Float32(self._least * unit))

    # Hopper

    def codes(self, scores, scale_log2, row_max):
        """A row's scores to codes: a vector that holds two of them in every other element, as bits."""
        scale, bias = self.scale_and_bias(scale_log2, row_max)
        held = cute.make_rmem_tensor(scores.shape, Float32)
        held.store(scores)
        for i in range(0, cute.size(scores.shape), 2):
            held[i] = _convert(_fma(held[i], scale, bias), _fma(held[i + 1], scale, bias))
        return held.load()

    def pin(self, codes):
        """Keep the conversions before what follows: the wait for the product with the values."""
        if self.pinned:
            _after(codes[0])

    def finish(self, codes, stored, rows, row_sum):
        """Codes to P, and P's row sums onto `row_sum`.

        Args:
            codes: of all rows of a thread in the order of `stored`; overwritten.
            stored: P.
            rows: the registers of `codes` as (row, key).
            row_sum: FP32, a number a row.
        """
        assert stored.element_type is TYPES[STORED.get()], f"P is {stored.element_type}, not {STORED.get()}"
        words = cute.recast_tensor(stored, Int32)
        for i in range(cute.size(words)):
            weights = _shifted(codes[2 * i], bits=self._shift)
            codes[2 * i] = weights
            words[i] = _integer(weights)
        for r in range(cute.size(row_sum)):
            row = rows[r, None]
            row_sum[r] = row_sum[r] + self._sum([row[i] for i in range(0, cute.size(row), 2)])

    def exact(self, row_max_scaled):
        """Factor of a row's results: NaN where the scores are too large for a code, 2^−offset elsewhere."""
        return _exact(row_max_scaled, factor=2.0**-self._offset)

    # Blackwell

    def pair(self, x, y):
        """Two codes or, where P has 16 bits, two weights, as bits in the place of the first element."""
        code = _convert(x, y)
        return (code if self._bytes else _shifted(code, bits=self._shift)), Float32(0.0)

    def store(self, pairs, stored):
        """What `pair` left to P."""
        assert stored.element_type is TYPES[STORED.get()], f"P is {stored.element_type}, not {STORED.get()}"
        words = cute.recast_tensor(stored, Int32)
        for i in range(cute.size(words)):
            words[i] = _bytes(pairs[4 * i], pairs[4 * i + 2]) if self._bytes else _integer(pairs[2 * i])

    def row_sum(self, pairs, before):
        """Row sum of a thread's row, which it holds whole, and of what it had before."""
        held = cute.make_rmem_tensor(pairs.shape, Float32)
        held.store(pairs)
        words = [held[i] for i in range(0, cute.size(pairs.shape), 2)]
        if self._bytes:  # a code of E4M3 in the place of FP16's exponent weighs 2^−8 of it
            words = [_shifted(w, bits=self._shift) for w in words]
        # Word i holds the keys 2i and 2i + 1: four words are eight keys, as a row of Hopper's threads has them.
        total = self._sum(words, columns=4)
        if self._bytes:
            return total * 256.0 if before is None else _fma(total, Float32(256.0), before)
        return total if before is None else total + before

    @property
    def _bytes(self):
        return STORED.get() == "e4m3"

    # Both

    def _sum(self, words, columns=1):
        bf16 = STORED.get() == "bf16"
        rest = []
        for column in range(columns):
            level = words[column::columns]
            for _ in range(self.levels):
                paired = [_add(a, b, bf16=bf16) for a, b in zip(level[::2], level[1::2], strict=False)]
                level = paired + level[len(level) - len(level) % 2 :]
            rest += level
        halves = [_half(w, high=high, bf16=bf16) for w in rest for high in (False, True)]
        total = halves[0]
        for x in halves[1:]:
            total = total + x
        return total


@dsl_user_op
def _fma(a, b, c, *, loc=None, ip=None):
    return Float32(_ptx("fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", (a, b, c), loc, ip))


@dsl_user_op
def _convert(x, y, *, loc=None, ip=None):
    """Codes of two elements: relu is the clamp at 0, the rounding to FP16's subnormals the lattice's.

    Volatile, as the wait for the product with the values is, so that it stays before that in PTX (see `_after`).
    """
    text = "{\n\t.reg .b32 n;\n\tcvt.rn.relu.f16x2.f32 n, $2, $1;\n\tmov.b32 $0, n;\n\t}\n"
    return Float32(_ptx(text, "=f,f,f", (x, y), loc, ip, volatile=True))


@dsl_user_op
def _after(word, *, loc=None, ip=None):
    """A branch of the whole warp that hangs on a code, never taken: no code is all ones.

    The assembler would move the wait for the product with the values before the conversions. It does not move them
    across a branch, and a vote keeps the branch uniform, without which addresses leave the uniform registers.
    """
    text = "{\n\t.reg .pred p;\n\t.reg .b32 n;\n\tmov.b32 n, $0;\n\tsetp.ne.b32 p, n, 0xFFFFFFFF;\n\t"
    text += "vote.sync.any.pred p, p, 0xFFFFFFFF;\n\t@!p trap;\n\t}\n"
    _ptx(text, "f", (word,), loc, ip, volatile=True, gives=False)


@dsl_user_op
def _shifted(word, *, bits, loc=None, ip=None):
    text = f"{{\n\t.reg .b32 n;\n\tmov.b32 n, $1;\n\tshl.b32 n, n, {bits};\n\tmov.b32 $0, n;\n\t}}\n"
    return Float32(_ptx(text, "=f,f", (word,), loc, ip))


@dsl_user_op
def _add(a, b, *, bf16, loc=None, ip=None):
    """Two pairs, each half rounded to nearest even."""
    name = "add.rn.bf16x2" if bf16 else "add.rn.f16x2"
    text = f"{{\n\t.reg .b32 a, b;\n\tmov.b32 a, $1;\n\tmov.b32 b, $2;\n\t{name} a, a, b;\n\tmov.b32 $0, a;\n\t}}\n"
    return Float32(_ptx(text, "=f,f,f", (a, b), loc, ip))


@dsl_user_op
def _half(word, *, high, bf16, loc=None, ip=None):
    """One half of a pair in FP32."""
    if bf16:
        move = "and.b32 n, n, 0xffff0000;" if high else "shl.b32 n, n, 16;"
        text = f"{{\n\t.reg .b32 n;\n\tmov.b32 n, $1;\n\t{move}\n\tmov.b32 $0, n;\n\t}}\n"
    else:
        text = "{\n\t.reg .b32 n;\n\t.reg .b16 x, y;\n\tmov.b32 n, $1;\n\tmov.b32 {x, y}, n;\n\t"
        text += f"cvt.f32.f16 $0, {'y' if high else 'x'};\n\t}}\n"
    return Float32(_ptx(text, "=f,f", (word,), loc, ip))


@dsl_user_op
def _bytes(low, high, *, loc=None, ip=None):
    """Four codes of one byte each."""
    text = "{\n\t.reg .b32 a, b;\n\tmov.b32 a, $1;\n\tmov.b32 b, $2;\n\tprmt.b32 $0, a, b, 0x6420;\n\t}\n"
    return Int32(_ptx(text, "=r,f,f", (low, high), loc, ip, T.i32()))


@dsl_user_op
def _exact(x, *, factor, loc=None, ip=None):
    """NaN where LARGEST < |x|, but for −∞, that of a row without a key; the factor elsewhere."""
    text = "{\n\t.reg .pred p;\n\t.reg .f32 a;\n\tabs.f32 a, $1;\n\t"
    text += f"setp.gt.f32 p, a, {_hex(LARGEST)};\n\tsetp.ne.and.f32 p, $1, 0fFF800000, p;\n\t"
    text += f"selp.f32 $0, 0f7FFFFFFF, {_hex(factor)}, p;\n\t}}\n"
    return Float32(_ptx(text, "=f,f", (x,), loc, ip))


def _hex(x):
    return "0f" + struct.pack(">f", x).hex().upper()


@dsl_user_op
def _integer(word, *, loc=None, ip=None):
    return Int32(_ptx("mov.b32 $0, $1;", "=r,f", (word,), loc, ip, T.i32()))


def _ptx(text, constraints, operands, loc, ip, kind=None, volatile=False, gives=True):
    return llvm.inline_asm(
        (kind or Float32.mlir_type) if gives else None,
        [Float32(x).ir_value(loc=loc, ip=ip) for x in operands],
        text,
        constraints,
        has_side_effects=volatile,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
