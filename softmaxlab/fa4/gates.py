"""Gates of a patched kernel: what it computes, read from its output and held against what it should.

Paper B.2, Figure S1. One-hot values expose the probabilities. A first gate reads one tile of 128 keys, a second one
four tiles; others read outputs and log-sum-exp for grouped heads, head dimensions 64 and 128, BF16, FP16 and, on
Blackwell, FP8, a soft-cap, lengths that are no whole number of tiles, and rows whose keys are all masked, where the
stock kernel gives 0 and a variant that is offered must.

The kernel is an argument. Where there is no GPU `readings.simulated` takes its place, and everything else runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from softmaxlab.errors import LabError
from softmaxlab.fa4 import bounds, patch
from softmaxlab.fa4.readings import reference
from softmaxlab.fa4.variants import Variant
from softmaxlab.semantics import Semantics

Attend = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Case:
    """One input.

    Attributes:
        name: of the case.
        dtype: bf16, fp16, or on Blackwell e4m3.
        head_dim, heads, gqa: dimension of a head, query heads, and of these to a key-value head.
        queries, keys: lengths.
        causal, softcap: mask, aligned at the last query and key; soft-cap, 0 for none.
        onehot: whether the probabilities are read, too.
    """

    name: str
    dtype: str = "bf16"
    head_dim: int = 128
    heads: int = 2
    gqa: int = 1
    queries: int = 512
    keys: int = 512
    causal: bool = True
    softcap: float = 0.0
    onehot: bool = False


CASES = (
    Case("single tile", queries=128, keys=128, onehot=True),
    Case("several tiles", onehot=True),
    Case("masked rows", queries=320, keys=128),
    Case("other lengths", queries=333, keys=477),
    Case("grouped heads, dim 64", head_dim=64, heads=8, gqa=4, onehot=True),
    Case("fp16, no mask, grouped", dtype="fp16", heads=4, gqa=2, causal=False, keys=450, onehot=True),
    Case("soft-cap", softcap=15.0, onehot=True),
    Case("FP8, single tile", dtype="e4m3", queries=128, keys=128, onehot=True),
    Case("FP8, several tiles", dtype="e4m3", onehot=True),
)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "e4m3": torch.float8_e4m3fn}


def run(
    variants: Iterable[str | Variant],
    *,
    attend: Attend | None = None,
    semantics: Semantics | None = None,
    cases: Iterable[Case] | None = None,
    device: str = "cuda",
    processes: int = 0,
    seed: int = 0,
) -> pd.DataFrame:
    """Send variants through the gates.

    Args:
        variants: which; `identity` is refused.
        attend: the kernel, `attend(q, k, v, variant=…, causal=…, softcap=…)` giving output and log-sum-exp; the patched
            FlashAttention-4 if None.
        semantics: its tile and τ; from the GPU if None (Hopper: τ = 0, Blackwell: τ = 8). For FP8 τ is 0.
        cases: which inputs; those of `CASES` that the GPU takes if None.
        device: where the inputs lie.
        processes: that share the variants, for most of the time goes into compiling; 0 for this one alone.
        seed: of the inputs.

    Returns:
        One row a reading: variant, offered, case, gate, value, low, high, passed. A value passes if it lies in
        [low, high]. Attribute `attrs["distributions"]`: for each variant and one-hot case the histograms of Figure S1.

    Raises:
        LabError: no GPU that FlashAttention-4's variants support, and no `attend`; nothing to run; FP8 on Hopper; the
            stock kernel, or a process of the pool, failed. A variant that fails is a red gate, "did not run".
    """
    variants = [Variant.parse(v) for v in variants]
    if any(v.kind == "identity" for v in variants):
        raise LabError("gates: the variant identity is no exponential, so no gate is meant for it: leave it out")
    semantics = semantics or (Semantics(tau=0) if attend else _semantics())
    cases = list(cases) if cases is not None else [c for c in CASES if attend or _takes(c)]
    if not variants or not cases or processes < 0:
        raise LabError(f"gates: {len(variants)} variants, {len(cases)} cases, {processes} processes: nothing can run")
    if refused := [c.name for c in cases if not attend and not _takes(c)]:
        raise LabError(f"gates: {'; '.join(refused)}: FlashAttention-4 takes FP8 on Blackwell only")
    try:
        stock = {c.name: _probabilities(attend or kernel, c, Variant(), device, seed) for c in cases if c.onehot}
    except LabError:
        raise
    except Exception as error:
        raise LabError(f"gates: the stock kernel did not run: {_first_line(error)}") from error
    work = [(v, attend, semantics, cases, device, seed, stock) for v in variants]
    if processes:
        # Spawned: CUDA does not survive a fork.
        try:
            with ProcessPoolExecutor(min(processes, len(work)), mp_context=get_context("spawn")) as pool:
                parts = list(pool.map(_one, work))
        except BrokenProcessPool:
            raise LabError("gates: a process of the pool was ended, perhaps for want of memory: use fewer") from None
    else:
        parts = [_one(item) for item in work]
    frame = pd.concat([pd.DataFrame(rows) for rows, _ in parts], ignore_index=True)
    frame.attrs["distributions"] = [d for _, many in parts for d in many]
    return frame


def verdict(frame: pd.DataFrame) -> pd.DataFrame:
    """One row a variant: variant, offered, gates, passed, failed (the names of the gates that are red)."""
    rows = []
    for variant, part in frame.groupby("variant", sort=False):
        red = part[~part.passed]
        failed = "; ".join(f"{r.case}: {r.gate}" for r in red.itertuples())
        rows.append((variant, part.offered.all(), len(part), int(part.passed.sum()), failed))
    return pd.DataFrame(rows, columns=["variant", "offered", "gates", "passed", "failed"])


def kernel(
    q: Tensor, k: Tensor, v: Tensor, *, variant: Variant, causal: bool = False, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The patched FlashAttention-4."""
    return patch.flash_attn_func(q, k, v, variant=variant, causal=causal, softcap=softcap, return_lse=True)[:2]


def _semantics() -> Semantics:
    if not torch.cuda.is_available():
        raise LabError("gates: there is no GPU here: run them on a Hopper or Blackwell GPU, or pass attend")
    major = torch.cuda.get_device_capability()[0]
    if major not in patch.SUPPORTED:
        raise LabError(f"gates: the GPU is {torch.cuda.get_device_name()}, but variants are for Hopper and Blackwell")
    return Semantics(tau=8 if major == 10 else 0)


def _takes(case: Case) -> bool:
    """Whether this GPU's FlashAttention-4 takes a case."""
    return case.dtype != "e4m3" or torch.cuda.get_device_capability()[0] == 10


def _inputs(case: Case, device: str, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows from flat to peaked: the scores' standard deviation goes from 0.5 to 8 nats."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(1, case.queries, case.heads, case.head_dim, generator=generator)
    k, v = (torch.randn(1, case.keys, case.heads // case.gqa, case.head_dim, generator=generator) for _ in "kv")
    spread = torch.logspace(-1, 3, case.queries, base=2)[torch.randperm(case.queries, generator=generator)]
    return tuple(t.to(device, DTYPES[case.dtype]) for t in (q * spread[:, None, None], k, v))


def _probabilities(attend: Attend, case: Case, variant: Variant, device: str, seed: int) -> Tensor:
    """P̂ of every row, FP64 on the CPU, (heads, queries, keys): a slice of one-hot values for each batch entry."""
    q, k, _ = _inputs(case, device, seed)
    d = case.head_dim
    slices = -(-case.keys // d)
    eye = torch.eye(slices * d, device=q.device).to(q.dtype)[: case.keys]
    v = eye.view(case.keys, slices, d).transpose(0, 1)[:, :, None].expand(-1, -1, k.shape[2], -1).contiguous()
    q, k = (t.expand(slices, -1, -1, -1).contiguous() for t in (q, k))
    out, _ = attend(q, k, v, variant=variant, causal=case.causal, softcap=case.softcap)
    return out.permute(2, 1, 0, 3).flatten(2)[..., : case.keys].double().cpu()


def _one(work: tuple[Any, ...]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    variant, attend, semantics, cases, device, seed, stock = work
    attend = attend or kernel
    rows, distributions = [], []
    for case in cases:
        q, k, v = _inputs(case, device, seed)
        here = replace(semantics, tau=0) if case.dtype == "e4m3" else semantics
        expected = reference(q, k, v, variant, here, causal=case.causal, softcap=case.softcap)
        try:
            out, lse = attend(q, k, v, variant=variant, causal=case.causal, softcap=case.softcap)
            again, _ = attend(q, k, v, variant=variant, causal=case.causal, softcap=case.softcap)
            p = _probabilities(attend, case, variant, device, seed) if case.onehot else None
            readings = bounds.of_output(case.dtype, out, lse, expected)
            readings["reruns differ"] = (int((out.nan_to_num() != again.nan_to_num()).sum()), 0, 0)
        except LabError:
            raise
        except Exception as error:  # of a compiler or a driver: the other cases' readings must not be lost with it
            readings, p = {f"did not run: {_first_line(error)}": (1, 0, 0)}, None
        if p is not None:
            lags = here.tau > 0 and case.keys > here.tile
            more, seen = bounds.of_probabilities(case.dtype, p, stock[case.name], expected, variant, lags)
            readings |= more
            distributions.append({"variant": str(variant), "case": case.name} | seen)
        for gate, (value, low, high) in readings.items():
            inside = bool(low <= value <= high)
            row = {"variant": str(variant), "offered": variant.offered, "case": case.name, "gate": gate}
            rows.append(row | {"value": float(value), "low": float(low), "high": float(high), "passed": inside})
    return rows, distributions


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def smaller(cases: Iterable[Case] = CASES, queries: int = 96) -> list[Case]:
    """The same cases with fewer queries, for a rehearsal on a CPU; masked rows stay masked."""
    return [c if c.queries > c.keys else replace(c, queries=min(c.queries, queries)) for c in cases]
