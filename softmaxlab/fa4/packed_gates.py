"""Gates of the packed kernel beyond those of every variant: its codes one by one, and every case that is offered.

`exact` puts scores that FP32 holds exactly into the kernel, so that its codes are known without any interval: every
code, its ties, and what lies a 64th of a code beside them. One-hot values show each weight, and a weight that is off
by one code is off by 3% at least, eight times what its output's rounding can hide. The log-sum-exp shows the row sum,
whose roundings tell in which order it was taken.

`of_case` runs head dimensions, masks, windows, lengths, sinks and large scores against the reference that walks the
tiles; `specials` sends NaN and ±∞ through, which must come out where the stock kernel has them.

As in `gates` the kernel is an argument: `packed_cases.simulated` takes its place where there is no GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from softmaxlab import packed_bits
from softmaxlab.errors import LabError
from softmaxlab.fa4 import bounds, readings
from softmaxlab.fa4.bounds import Reading
from softmaxlab.fa4.packed_cases import CASES, DTYPES, LN2, Case, inputs_of, masked_scores
from softmaxlab.fa4.variants import Variant
from softmaxlab.semantics import Semantics

Attend = Callable[..., tuple[Tensor, Tensor]]
KEYS = 128  # of a tile, and one-hot values of a head
UP = {"bf16": 2.0**100, "fp16": 2.0**14}  # of the values, so that no weight's output is subnormal


def run(
    variants: Iterable[str | Variant] = ("packed(4,3)",),
    *,
    attend: Attend | None = None,
    cases: Iterable[Case] = CASES,
    device: str = "cuda",
    exhaustive: bool = True,
    processes: int = 0,
) -> pd.DataFrame:
    """Send packed variants through these gates.

    Args:
        variants: which, all packed.
        attend: the kernel; the patched FlashAttention-4 if None. `attend(q, k, v, variant=…, **arguments)` with
            FlashAttention-4's arguments, and `cu_seqlens` for variable lengths.
        cases: which inputs.
        device: where they lie.
        exhaustive: every code; else every 13th.
        processes: that share the work, for most of the time goes into compiling; 0 for this one alone.

    Returns:
        One row a reading: variant, case, gate, value, low, high, passed. A case that fails is a red gate, "did not
        run".
    """
    parsed = [Variant.parse(v) for v in variants]
    for variant in parsed:
        if not variant.packed:
            raise LabError(f"packed_gates: {variant} is no packed exponential: its gates are `softmaxlab gates`")
    step = 1 if exhaustive else 13
    work = [(v, c, attend or kernel, device, step) for v in parsed for c in (*DTYPES, *cases)]
    if processes:
        with ProcessPoolExecutor(min(processes, len(work)), mp_context=get_context("spawn")) as pool:
            parts = list(pool.map(_one, work))
    else:
        parts = [_one(item) for item in work]
    return pd.DataFrame([row for part in parts for row in part])


def _one(work: tuple[Variant, Case | str, Attend, str, int]) -> list[dict[str, Any]]:
    """Rows of one variant and case, or of one variant's exact scores and special values in a dtype."""
    variant, case, attend, device, step = work
    found: list[tuple[str, dict[str, Reading]]] = []
    name = case if isinstance(case, str) else case.name
    try:
        if isinstance(case, str):
            name = f"exact scores, {case}"
            found.append((name, exact(variant, case, attend, device, step)))
            name = f"NaN and infinities, {case}"
            found.append((name, specials(variant, case, attend, device)))
        else:
            found.append((name, of_case(variant, case, attend, device)))
    except LabError:
        raise
    except Exception as error:  # of a compiler or a driver: the other cases' readings must not be lost with it
        first = f"{type(error).__name__}: {error}".splitlines()[0]
        found.append((name, {f"did not run: {first}": (1, 0, 0)}))
    return [
        {"variant": str(variant), "case": name, "gate": gate, "value": float(value)}
        | {"low": float(low), "high": float(high), "passed": bool(low <= value <= high)}
        for name, readings_ in found
        for gate, (value, low, high) in readings_.items()
    ]


def exact(variant: Variant, dtype: str, attend: Attend, device: str, step: int = 1) -> dict[str, Reading]:
    """Every code of the range and the ties around it, from scores that FP32 holds exactly."""
    operator = variant.operator(dtype)
    first = -operator.bias * 2**operator.k - 2
    points = torch.arange(first, 1, step, dtype=torch.float64)[:, None]
    # The code, a quarter beside it, its ties and a 64th beside each.
    beside = torch.tensor([0, 1 / 4, -1 / 4, 1 / 2 - 1 / 64, 1 / 2, 1 / 2 + 1 / 64], dtype=torch.float64)
    x = ((points + beside) / 2**operator.k).flatten()
    x = x[x <= 0]
    tiles = torch.full((-(-len(x) // (KEYS - 1)), KEYS), -math.inf, dtype=torch.float64)
    padded = torch.nn.functional.pad(x, (0, tiles.shape[0] * (KEYS - 1) - len(x)), value=float(-operator.bias - 3))
    tiles[:, 1:] = padded.view(-1, KEYS - 1)
    tiles[:, 0] = 0.0  # the row maximum, in another place of each tile
    order = (torch.arange(KEYS) + 37 * torch.arange(len(tiles))[:, None]) % KEYS
    x = tiles.gather(1, order)
    # Three parts of few bits, and a row's own displacement, which the anchor takes out again.
    whole = x.floor()
    coarse = ((x - whole) * 32).floor() / 32
    shift = (torch.arange(KEYS) % 17 - 8).double()
    k = torch.zeros(len(x), KEYS, 1, KEYS, dtype=torch.float64)
    k[..., 0, 0], k[..., 0, 1], k[..., 0, 2], k[..., 0, 3] = whole, coarse, x - whole - coarse, 1.0
    q = torch.zeros(len(x), KEYS, 1, KEYS, dtype=torch.float64)
    q[..., 0, :3], q[..., 0, 3] = 1.0, shift
    v = (torch.eye(KEYS) * UP[dtype])[None, :, None].expand(len(x), -1, -1, -1)
    inputs = [t.to(device, DTYPES[dtype]).contiguous() for t in (q, k, v)]
    assert all((t.cpu().double() == given).all() for t, given in zip(inputs, (q, k, v), strict=True))
    out, lse = attend(*inputs, variant=variant, softmax_scale=LN2)
    n = packed_bits.codes(x.float(), operator)
    weights = packed_bits.stored(n, operator).double() * 2.0**-operator.offset
    total = packed_bits.row_sum(n, operator).double()[:, None]
    got = out[:, :, 0].double().cpu() / UP[dtype]
    expected = (weights / total)[:, None].expand_as(got)
    # Half a spacing of the output's format, and what a reciprocal is off.
    off = (got - expected).abs() > expected * (torch.finfo(DTYPES[dtype]).eps / 2 + 2.0**-20)
    wanted = shift * LN2 + total.log()
    error = (lse[:, 0].double().cpu() - wanted).abs()
    return {
        "weights compared": (x.numel() * KEYS, 1, math.inf),
        "weights of another code": (int((off | got.isnan()).sum()), 0, 0),
        "largest error of the log-sum-exp, nats": (error.max().item(), 0.0, 1e-5),
    }


def specials(variant: Variant, dtype: str, attend: Attend, device: str) -> dict[str, Reading]:
    """NaN and ±∞ in a query, a key and a value: outputs are NaN where the stock kernel's are, finite elsewhere."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, 300, 2, 64, generator=generator) for _ in "qkv")
    for number, value in enumerate((math.nan, math.inf, -math.inf)):
        q[number, 50, 0, 3], k[number, 120, 1, 5], v[number, 200, 0, 7] = value, value, value
    inputs = [t.to(device, DTYPES[dtype]) for t in (q, k, v)]
    stock, _ = attend(*inputs, variant=Variant(), causal=True)
    out, _ = attend(*inputs, variant=variant, causal=True)
    again, _ = attend(*inputs, variant=variant, causal=True)
    return {
        "NaN in the stock kernel's output": (int(stock.isnan().sum()), 1, math.inf),
        "NaN in one of the two only": (int((out.isnan() != stock.isnan()).sum()), 0, 0),
        "infinite in one of the two only": (int((out.isinf() != stock.isinf()).sum()), 0, 0),
        "reruns differ": (int((out.nan_to_num() != again.nan_to_num()).sum()), 0, 0),
        "numbers from scores too large for a code": (_numbers_beyond(variant, dtype, attend, device), 0, 0),
    }


def _numbers_beyond(variant: Variant, dtype: str, attend: Attend, device: str) -> int:
    """Outputs that are no NaN though their row maximum is beyond `packed_element.LARGEST`."""
    q = torch.full((1, 64, 1, 64), 2.0**12)
    inputs = [t.to(device, DTYPES[dtype]) for t in (q, q, torch.ones_like(q))]
    out, _ = attend(*inputs, variant=variant, softmax_scale=1.0)  # scores of 2^30
    return int((~out.isnan()).sum())


def of_case(variant: Variant, case: Case, attend: Attend, device: str) -> dict[str, Reading]:
    """Output and log-sum-exp of a case against the reference that walks the tiles, and a rerun."""
    sequences, arguments = inputs_of(case, device)
    if len(sequences) > 1:
        joined = [torch.cat([s[i] for s in sequences], 1)[0] for i in range(3)]
        ends = [_ends([n[i] for n in case.lengths], device) for i in range(2)]
        arguments |= {"cu_seqlens": tuple(ends), "longest": tuple(max(n[i] for n in case.lengths) for i in range(2))}
        out, lse = attend(*joined, variant=variant, **arguments)
        again, _ = attend(*joined, variant=variant, **arguments)
        outs = [o[None] for o in out.split([m for m, _ in case.lengths])]
        lses = [x[None] for x in lse.split([m for m, _ in case.lengths], -1)]
    else:
        out, lse = attend(*sequences[0], variant=variant, **arguments)
        again, _ = attend(*sequences[0], variant=variant, **arguments)
        outs, lses = [out], [lse]
    worst: dict[str, Reading] = {"reruns differ": (int((out.nan_to_num() != again.nan_to_num()).sum()), 0, 0)}
    for (q, k, v), o, x in zip(sequences, outs, lses, strict=True):
        expected = _expected(variant, case, q, k, v, arguments.get("learnable_sink"))
        for gate, (value, low, high) in bounds.of_output(case.dtype, o, x, expected).items():
            held = worst.setdefault(gate, (value, low, high))
            if value - high > held[0] - held[2]:
                worst[gate] = (value, low, high)
    return worst


def _expected(variant: Variant, case: Case, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> readings.Reference:
    s, valid = masked_scores(q, k, case.causal, case.window, case.softcap)
    semantics = Semantics(tile=case.tile, tau=0)
    # The anchor's product with the scale, and FP32's sums of the scores, are off by parts of their size.
    slack = 2.0**-21 * s.masked_fill(~valid, 0.0).abs().max().item() / LN2
    found = readings.weighed(s, valid, v, variant, semantics, dtype=q.dtype, softcap=case.softcap, slack=slack)
    if sink is None:
        return found
    extra = sink.double()[None, :, None]
    lses = [torch.logaddexp(x, extra.to(x)) for x in (found.lse, found.lse_low, found.lse_high)]
    share = (found.lse - lses[0]).exp().transpose(1, 2)[..., None]
    return replace(
        found, out=found.out * share, open=found.open * share, lse=lses[0], lse_low=lses[1], lse_high=lses[2],
        valid=torch.ones_like(valid),
    )  # fmt: skip


def _ends(lengths: list[int], device: str) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)


def kernel(q: Tensor, k: Tensor, v: Tensor, *, variant: Variant, **arguments: Any) -> tuple[Tensor, Tensor]:
    """The patched FlashAttention-4."""
    from flash_attn.cute import interface

    from softmaxlab.fa4 import patch

    ends, longest = arguments.pop("cu_seqlens", None), arguments.pop("longest", None)
    with patch.variant(variant):
        if ends is None:
            return interface.flash_attn_func(q, k, v, return_lse=True, **arguments)[:2]
        lengths = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), ends, strict=True))
        lengths |= dict(zip(("max_seqlen_q", "max_seqlen_k"), longest, strict=True))
        return interface.flash_attn_varlen_func(q, k, v, return_lse=True, **lengths, **arguments)[:2]
