"""FP32 arithmetic that LLVM vectorises: what the row maps of the CPU backend are written in.

Numba turns a literal into FP64, so every constant here is an FP32 of its own. Nothing may be reassociated but the
sums that say so (`add`): the splits below rely on each rounding.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable
from pathlib import Path

import numba
import numpy as np
import platformdirs
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

F, I = np.float32, np.int32
ONE, ZERO, HALF = F(1), F(0), F(0.5)
MINUS_INF, INF = F(-np.inf), F(np.inf)
LOG2E, LN2 = F(1 / math.log(2)), F(math.log(2))
#: ln 2 in two parts: integers up to 2^9 times the first are exact.
LN2_HIGH = F(0.693359375)
LN2_LOW = F(math.log(2) - 0.693359375)
#: exp(x) is 0 below: FP32 ends its normal range at 2^−126.
LEAST = F(-126 * math.log(2))
_EXP = tuple(F(c) for c in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5))
_EXP2 = tuple(F(math.log(2) ** i / math.factorial(i)) for i in range(7, 0, -1))
_LOG = tuple(
    F(c)
    for c in (
        7.0376836292e-2,
        -1.1514610310e-1,
        1.1676998740e-1,
        -1.2420140846e-1,
        1.4249322787e-1,
        -1.6668057665e-1,
        2.0000714765e-1,
        -2.4999993993e-1,
        3.3333331174e-1,
    )
)
_TANH = tuple(
    F(c) for c in (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
)


def cache_dir() -> Path | None:
    """Where compiled code is kept: under `SOFTMAXLAB_CACHE`, or the user's cache; None where that is not writable.

    Each state of the sources has a folder: Numba itself sees a change of a function, but not of those that it calls.
    """
    sources = sorted(Path(__file__).parent.glob("cpu_*.py"))
    state = hashlib.sha256(b"".join(p.read_bytes() for p in sources)).hexdigest()[:16]
    root = Path(os.environ.get("SOFTMAXLAB_CACHE") or platformdirs.user_cache_dir("softmaxlab")).expanduser()
    folder = root / "numba" / state
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) else None


def compiled(function: Callable) -> Callable:
    """`function` compiled at its first call, or read from the cache; it runs without the interpreter's lock."""
    folder, before = cache_dir(), numba.config.CACHE_DIR
    try:
        if folder is not None and not before:
            numba.config.CACHE_DIR = str(folder)
        return numba.njit(nogil=True, cache=folder is not None or bool(before), error_model="numpy")(function)
    finally:
        numba.config.CACHE_DIR = before


inlined = numba.njit(nogil=True, error_model="numpy")


@intrinsic
def bits(typing, x):
    """The bits of an FP32 as INT32."""
    return types.int32(types.float32), lambda c, b, s, a: b.bitcast(a[0], ir.IntType(32))


@intrinsic
def number(typing, i):
    """The FP32 whose bits are an INT32."""
    return types.float32(types.int32), lambda c, b, s, a: b.bitcast(a[0], ir.FloatType())


@intrinsic
def fma(typing, x, y, z):
    """x·y + z, rounded once."""
    return types.float32(*3 * [types.float32]), lambda c, b, s, a: b.fma(*a)


@intrinsic
def add(typing, x, y):
    """x + y in a sum whose order is LLVM's: lanes of a vector, the same at every call."""
    return types.float32(types.float32, types.float32), lambda c, b, s, a: b.fadd(*a, flags=("reassoc",))


@intrinsic
def add64(typing, x, y):
    """As `add`, of FP64."""
    return types.float64(types.float64, types.float64), lambda c, b, s, a: b.fadd(*a, flags=("reassoc",))


def _rounding(name: str):
    def codegen(context, builder, signature, arguments):
        kind = arguments[0].type
        return builder.call(builder.module.declare_intrinsic(name, [kind]), arguments)

    return codegen


@intrinsic
def nearest(typing, x):
    """Rounded to a whole number, ties to even."""
    return x(x), _rounding("llvm.rint")


@intrinsic
def floor(typing, x):
    """The whole number at or below."""
    return x(x), _rounding("llvm.floor")


@inlined
def power(n):
    """2^n of a whole number n in FP32, −127 ≤ n ≤ 127; 0 at −127."""
    return number(I(I(I(n) + I(127)) << I(23)))


@inlined
def exp(x):
    """e^x for x ≤ 88, FP32, to about one unit in the last place; 0 where that is below FP32's normal range."""
    y = x if x > LEAST else LEAST
    n = nearest(y * LOG2E)
    r = fma(n, -LN2_LOW, fma(n, -LN2_HIGH, y))
    p = _EXP[0]
    p = fma(p, r, _EXP[1])
    p = fma(p, r, _EXP[2])
    p = fma(p, r, _EXP[3])
    p = fma(p, r, _EXP[4])
    p = fma(p, r, _EXP[5])
    w = fma(p, r * r, r) + ONE
    return w * power(n) if x >= LEAST else ZERO


@inlined
def exp2_fraction(f):
    """2^f for |f| ≤ 1/2, FP32."""
    p = _EXP2[0]
    p = fma(p, f, _EXP2[1])
    p = fma(p, f, _EXP2[2])
    p = fma(p, f, _EXP2[3])
    p = fma(p, f, _EXP2[4])
    p = fma(p, f, _EXP2[5])
    p = fma(p, f, _EXP2[6])
    return fma(p, f, ONE)


@inlined
def log1p(z):
    """log(1 + z) for −1 < z < 2^20, FP32, also where z is small."""
    u = ONE + z
    lost = (z - (u - ONE)) / u
    i = bits(u)
    e = I(I(i - I(0x3F3504F3)) >> I(23))  # so that the mantissa lies in [√½, √2)
    f = number(I(i - I(e << I(23)))) - ONE
    p = _LOG[0]
    p = fma(p, f, _LOG[1])
    p = fma(p, f, _LOG[2])
    p = fma(p, f, _LOG[3])
    p = fma(p, f, _LOG[4])
    p = fma(p, f, _LOG[5])
    p = fma(p, f, _LOG[6])
    p = fma(p, f, _LOG[7])
    p = fma(p, f, _LOG[8])
    q = f * f
    k = F(e)
    p = fma(p, f * q, k * LN2_LOW) - HALF * q
    return k * LN2_HIGH + (f + (p + lost))


@inlined
def tanh(x):
    """tanh, FP32."""
    a = x if x >= ZERO else -x
    e = exp(F(-2) * a)
    large = (ONE - e) / (ONE + e)
    q = x * x
    p = _TANH[0]
    p = fma(p, q, _TANH[1])
    p = fma(p, q, _TANH[2])
    p = fma(p, q, _TANH[3])
    p = fma(p, q, _TANH[4])
    small = fma(p * q, x, x)
    return small if a < F(0.625) else (large if x > ZERO else -large)


@inlined
def product(d, high, low):
    """d·(high + low) as an FP32 pair: the rounded product and what it lacks, together good to about 46 bits."""
    y = d * high
    return y, fma(d, low, fma(d, high, -y))


@inlined
def steps(d, high, low):
    """The whole number nearest to d·(high + low), and the distance from it, FP32.

    A tie of an irrational multiple of ln 2 does not occur but at d = 0, so that it does not matter where ties go.
    """
    y, rest = product(d, high, low)
    n = nearest(y)
    r = y - n  # exact, and so is r ∓ ½ where it is small: `rest` decides close to a tie
    up = ONE if (r - HALF) + rest > ZERO else ZERO
    down = ONE if (r + HALF) + rest < ZERO else ZERO
    return n + up - down, (r - up + down) + rest


def pair(c: float) -> tuple[np.float32, np.float32]:
    """A constant as the sum of two FP32."""
    high = F(c)
    return high, F(c - float(high))
