"""The GPU backend: attention under an operator in one fused Triton kernel, without a matrix of scores.

Same meaning as `reference`: FP32 scores, weights, sums and products for inputs of every dtype. What differs is the
order of additions and, in the maps, FP32 where the reference has FP64 (`triton_maps` says how a lattice keeps its
cells). FP32 and FP16 products use the BF16 tensor cores on numbers split into parts, six products of the nine for
FP32, which leaves FP32's accuracy (`triton_tiles`); with BF16 inputs the products q·k are exact as they are. P is
FP32 for FP32 models, in three parts. For 16-bit ones it is exact where the operator's weights are BF16 numbers, as
those of every lattice of at most 7 fractional bits; else FP16 for BF16 models (2^−12 of a weight, an eighth of the
output's rounding, down to weights of 2^−29), and two BF16 parts for FP16 models and for `rescue`.

Infinite queries or keys give NaN here in some rows where the reference gives 0 weight.
"""

from __future__ import annotations

import importlib.util
import math
from contextlib import nullcontext
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from softmaxlab.backends.triton_plans import Plan, plan
from softmaxlab.errors import LabError
from softmaxlab.operators import Operator

PARTS = {torch.float32: 3, torch.float16: 2, torch.bfloat16: 1}
MAX_DIM = 256
#: Of batch · heads: what CUDA allows of a grid beyond its first axis.
MAX_HEADS = 65_535
#: Elements from a head's first key to its last, at most: their distances are 32-bit numbers.
MAX_REACH = 2**31
#: Keys of the longest row that a program can hold to select from.
MAX_SELECT = 32_768
#: Scores in the scratch buffer of top-k and rescue, but for 64 queries of every head at least.
SCRATCH = 2**26


class Tile(NamedTuple):
    """Shape of a launch.

    Attributes:
        m, n: queries and keys of a tile of scores.
        warps: of a program.
        stages: of its load pipeline.
        columns: of the values that a program takes at most: more leave registers for nothing else.
    """

    m: int
    n: int
    warps: int
    stages: int
    columns: int = 128


#: By parts of an operand and the padded head dimension.
TILES = {
    (1, 64): Tile(64, 64, 4, 3),
    (1, 128): Tile(64, 64, 4, 3),
    (1, 256): Tile(128, 32, 8, 2),
    (2, 64): Tile(128, 64, 8, 2),
    (2, 128): Tile(64, 32, 4, 2),
    (2, 256): Tile(64, 16, 4, 2),
    (3, 64): Tile(64, 32, 4, 2),
    (3, 128): Tile(64, 64, 4, 1),
    (3, 256): Tile(64, 16, 4, 2),
}


def supports(
    query: Tensor, key: Tensor, value: Tensor, operator: Operator, *, mask: Tensor | None = None
) -> str | None:
    """None where `attend` can compute these, else one clause that says why not. Arguments as there."""
    if not _installed():
        return "Triton is not installed"
    if not _interpreted():
        if query.device.type != "cuda":
            return f"it needs a CUDA device, and the tensors are on {query.device.type}"
        if torch.cuda.get_device_capability(query.device) < (8, 0):
            return "it needs tensor cores for bfloat16, compute capability 8.0 or later"
    if query.dtype not in PARTS or {key.dtype, value.dtype} != {query.dtype}:
        return f"it takes float32, float16 or bfloat16, one for all, not {query.dtype}, {key.dtype}, {value.dtype}"
    if max(query.shape[-1], value.shape[-1]) > MAX_DIM:
        return f"head dimensions {query.shape[-1]} and {value.shape[-1]} are beyond its {MAX_DIM}"
    if mask is not None and (mask.dtype != torch.bool or mask.ndim != 4 or mask.shape[1] != 1):
        return f"its masks are bool (batch or 1, 1, queries, keys), and this one is {mask.dtype} {tuple(mask.shape)}"
    if mask is None and query.shape[2] != key.shape[2]:
        return f"a causal mask needs as many queries as keys, not {query.shape[2]} and {key.shape[2]}"
    if query.shape[0] * query.shape[1] > MAX_HEADS:
        return f"it takes at most {MAX_HEADS:,} heads of all sequences, not {query.shape[0] * query.shape[1]:,}"
    if key.shape[2] * max(key.stride(2), value.stride(2)) > MAX_REACH:
        return f"the keys or values of a head reach over more than 2^31 elements, with {key.shape[2]:,} keys"
    found = plan(operator)
    if isinstance(found, str):
        return found
    if found.stats == "given" and key.shape[2] > MAX_SELECT:
        return f"it selects from rows of at most {MAX_SELECT} keys, and these have {key.shape[2]}"
    return None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    operator: Operator,
    *,
    scaling: float,
    softcap: float | None = None,
    mask: Tensor | None = None,
    layer: int = 0,
    tile: Tile | None = None,
    precision: str = "split",
) -> Tensor:
    """Attention with `operator` in the place of softmax; arguments and result as `reference.attend`, and two more.

    Args:
        tile: shape of the launch; None takes that of `TILES`.
        precision: of FP32 products: `split` (the module says how), or one that Triton's `dot` knows, e.g. `ieee`,
            to measure what it costs.

    Raises:
        LabError: `supports` gives a reason, or `scaling` is not above 0.
    """
    if reason := supports(query, key, value, operator, mask=mask):
        raise LabError(f"the Triton backend cannot compute this: {reason}")
    if not scaling > 0:
        raise LabError(f"scaling is {scaling}, but the Triton backend needs it above 0")
    # Triton launches on the current device, which need not be that of the tensors.
    with torch.cuda.device(query.device) if query.is_cuda else nullcontext():
        call = Call(query, key, value, plan(operator), scaling, softcap, mask, tile, precision)
        given = call.thresholds() if call.plan.stats == "given" else call.empty
        return call.forward(given)


@lru_cache(maxsize=1)
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@lru_cache(maxsize=1)
def _interpreted() -> bool:
    from triton import knobs

    return knobs.runtime.interpret


def _tile(plan: Plan, parts: int, dim: int) -> Tile:
    tile = TILES[parts, dim]
    # Two edges and two weights a key: a smaller tile keeps them in registers.
    return tile._replace(n=min(tile.n, 32)) if plan.flags.get("RECON") == "lerp" and dim > 64 else tile


class Call:
    """One call of `attend`: its operands as the kernels take them, and the launches."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        plan: Plan,
        scaling: float,
        softcap: float | None,
        mask: Tensor | None,
        tile: Tile | None,
        precision: str,
    ) -> None:
        from softmaxlab.backends import triton_tiles

        self.plan, self.softcap = plan, softcap
        query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
        self.query, self.key, self.value = query, key, value
        self.batch, self.heads, self.n_queries, self.dim = query.shape
        self.kv_heads, self.n_keys = key.shape[1:3]
        self.value_dim = value.shape[-1]
        self.empty = query.new_empty(0, dtype=torch.float32)
        self.block_dims = [max(16, 1 << (d - 1).bit_length()) for d in (self.dim, self.value_dim)]
        self.precision = "ieee" if precision == "split" else precision
        plain = precision != "split" and query.dtype == torch.float32
        self.parts = 1 if plain else PARTS[query.dtype]
        self.tile = tile or _tile(plan, 3 if plain else self.parts, max(64, *self.block_dims))
        # A power of two goes into the queries, exactly.
        self.fold = math.frexp(scaling)[0] == 0.5
        self.scaling = scaling
        if plain:
            self.dtype = "float32"
        else:
            self.dtype = "bfloat16"
        # One FP16 number keeps 11 bits of a weight, at half the products of two BF16 parts. Rescued weights can be as
        # large as the number of keys, and are two parts.
        self.half = query.dtype == torch.bfloat16 and not plan.exact_p and plan.rescued is None
        self.p_parts = 1 if plan.exact_p or plain or self.half else max(2, self.parts)
        if mask is None:
            self.mask, self.mask_strides, self.extents = self.empty, (0, 0), self.empty
        else:
            mask = mask.view(torch.uint8) if mask.stride(-1) == 1 else mask.contiguous().view(torch.uint8)
            self.mask, masks = mask, mask.shape[0]
            self.mask_strides = (mask.stride(0) if masks > 1 else 0, mask.stride(2))
            blocks = -(-self.n_queries // self.tile.m)
            self.extents = torch.empty(masks, blocks, 2, dtype=torch.int32, device=mask.device)
            triton_tiles.extents[(blocks, masks)](
                mask, self.extents, *self.mask_strides, self.n_queries, self.n_keys, M=self.tile.m, N=128, num_warps=4
            )
        self.k_part = self.v_part = 0
        self.largest = self.empty
        if self.parts > 1:
            self._split(triton_tiles.split)
        elif self.half:
            self._halve(triton_tiles.halve)

    def _split(self, kernel) -> None:
        d, dv = self.block_dims
        shape = (self.parts, self.batch, self.kv_heads, self.n_keys)
        k, v = (self.query.new_empty(*shape, block, dtype=torch.bfloat16) for block in (d, dv))
        rows = max(1, 8192 // max(d, dv))
        self.k_part, self.v_part = k.stride(0), v.stride(0)
        kernel[(-(-self.n_keys // rows), self.batch * self.kv_heads)](
            self.key, self.value, k, v, *self.key.stride()[:3], *self.value.stride()[:3], self.k_part, self.v_part,
            self.kv_heads, self.n_keys, PARTS=self.parts, D=self.dim, BLOCK_D=d, DV=self.value_dim, BLOCK_DV=dv, N=rows,
            num_warps=4,
        )  # fmt: skip
        self.key, self.value = k[0], v[0]

    def _halve(self, kernel) -> None:
        block = self.block_dims[1]
        rows, halved = max(1, 8192 // block), self.value.new_empty(*self.value.shape[:3], block, dtype=torch.float16)
        self.largest = torch.linalg.vector_norm(self.value, math.inf)
        kernel[(-(-self.n_keys // rows), self.batch * self.kv_heads)](
            self.value, self.largest, halved, *self.value.stride()[:3], self.kv_heads, self.n_keys,
            DV=self.value_dim, BLOCK_DV=block, N=rows, num_warps=4,
        )  # fmt: skip
        self.value = halved

    def common(self) -> dict:
        """Compile-time constants of every kernel that computes scores."""
        from triton import language as tl

        return {
            "MASKED": self.mask is not self.empty,
            "PARTS": self.parts,
            "DTYPE": getattr(tl, self.dtype),
            # A split operand is padded with zeros.
            "D": self.dim,
            "BLOCK_D": self.block_dims[0],
            "FOLD": self.fold,
            "SOFTCAP": self.softcap is not None,
            "PRECISION": self.precision,
            # Without products contracted into sums, equal scores stay equal.
            "enable_fp_fusion": False,
        }

    def _value_dtype(self):
        from triton import language as tl

        return tl.float16 if self.half else getattr(tl, self.dtype)

    def forward(self, given: Tensor) -> Tensor:
        """The fused walk; `given` holds the statistics of a plan that brings its own."""
        from softmaxlab.backends.triton_kernels import forward

        out = self.query.new_empty(self.batch, self.n_queries, self.heads, self.value_dim)
        columns = min(self.block_dims[1], self.tile.columns)
        forward[(self.batch * self.heads, -(-self.n_queries // self.tile.m), -(-self.value_dim // columns))](
            self.query, self.key, self.value, out, self.mask, self.extents, given, self.largest,
            self.k_part, self.v_part,
            *self.query.stride()[:3], *self.key.stride()[:3], *self.value.stride()[:3], out.stride(0), out.stride(1),
            *self.mask_strides, self.heads, self.heads // self.kv_heads, self.n_queries, self.n_keys,
            float(self.plan.n_intervals), self.scaling, self.softcap or 0.0, *self.plan.numbers,
            STATS=self.plan.stats, MAP=self.plan.map, ANCHOR=self.plan.anchor, NORMALISED=self.plan.normalised,
            M=self.tile.m, N=self.tile.n, P_PARTS=self.p_parts, P_DTYPE=self._value_dtype(), DV=self.value_dim,
            BLOCK_DV=columns,
            **self.plan.constants, **self.common(), num_warps=self.tile.warps, num_stages=self.tile.stages,
        )  # fmt: skip
        return out

    def thresholds(self) -> Tensor:
        """What the walk is given of each row: see `select` (top-k) and `select_mass` (rescue)."""
        from softmaxlab.backends import triton_rescue, triton_select

        z, masked = self.batch * self.heads, self.mask is not self.empty
        module = triton_select if self.plan.rescued is None else triton_rescue
        launch = module.launcher(self.plan, self.n_keys, self.query.device)
        out = self.query.new_empty(module.NUMBERS, z, self.n_queries, dtype=torch.float32)
        chunk = min(self.n_queries, max(64, SCRATCH // (z * self.n_keys) // 64 * 64))
        scratch = out.new_empty(z * chunk * self.n_keys)
        m, n = self.tile.m, self.tile.n
        for first in range(0, self.n_queries, chunk):
            n_rows = min(chunk, self.n_queries - first)
            width = self.n_keys if masked else first + n_rows
            triton_select.write_scores[(-(-width // n), -(-n_rows // m), z)](
                self.query, self.key, self.mask, scratch, self.k_part, *self.query.stride()[:3],
                *self.key.stride()[:3], *self.mask_strides, self.heads, self.heads // self.kv_heads, first, n_rows,
                self.n_queries, self.n_keys, width, self.scaling, self.softcap or 0.0,
                M=m, N=n, **self.common(), num_warps=self.tile.warps, num_stages=1,
            )  # fmt: skip
            for place, stop, block in _classes(first, n_rows, width, masked):
                launch(
                    (stop - place, z), scratch, out, place, first, n_rows, self.n_queries, self.n_keys, width,
                    MASKED=masked, BLOCK=block,
                )  # fmt: skip
        return out


def _classes(first: int, n_rows: int, width: int, masked: bool) -> list[tuple[int, int, int]]:
    """Rows of a chunk by the power of two that holds their keys: (first place, past the last, that power)."""
    largest = max(512, 1 << (width - 1).bit_length())
    if masked:
        return [(0, n_rows, largest)]
    found, block, place = [], 512, 0
    while place < n_rows:
        stop = min(n_rows, block - first)
        if stop > place:
            found.append((place, stop, block))
            place = stop
        block *= 2
    return found
