"""Triton's interpreter, which runs kernels on a CPU, with a GPU's arithmetic. Import it before what imports Triton.

Triton 3.6's own keeps BF16 numbers as their bits and multiplies those, truncates where hardware rounds to nearest,
rounds twice in an FMA, and lets NaN through a plain maximum.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, ReduceOps, TensorHandle

_patch, _cast = interpreter._patch_lang_tensor, InterpreterBuilder.cast_impl
_reduce = ReduceOps.apply_impl


def _patch_lang_tensor(tensor, scope):
    """It takes int() of an array of one element for a loop's bounds, which NumPy 2.4 refuses."""
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


def _float(x: TensorHandle) -> np.ndarray:
    if x.dtype.scalar == tl.bfloat16:
        return (x.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return x.data.astype(np.float32)


def _bfloat16(x: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded)


def _cast_impl(self, src, dst_type):
    if src.dtype.scalar == tl.bfloat16 and dst_type.scalar == tl.float32:
        return TensorHandle(_float(src), tl.float32)
    if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
        return TensorHandle(_bfloat16(src.data), tl.bfloat16)
    return _cast(self, src, dst_type)


def _fma(self, x, y, z):
    # FP64 holds the product of two FP32 numbers.
    total = x.data.astype(np.float64) * y.data + z.data
    return TensorHandle(total.astype(z.data.dtype), z.dtype.scalar)


def _dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    return TensorHandle(np.matmul(_float(a), _float(b)) + d.data, d.dtype.scalar)


def _reduce_impl(self, input):
    """A maximum that keeps NaN, without its own call for every number."""
    if self.combine_fn.__name__ == "larger":
        return self.min_max(input[0], val_reduce_op=np.max)
    return _reduce(self, input)


interpreter._patch_lang_tensor = _patch_lang_tensor
ReduceOps.apply_impl = _reduce_impl
InterpreterBuilder.cast_impl = _cast_impl
InterpreterBuilder.create_fma = _fma
InterpreterBuilder.create_dot = _dot
InterpreterBuilder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
InterpreterBuilder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)
