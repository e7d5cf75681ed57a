"""Calls of the fused simulator in the interpreter, held to the PyTorch one; for processes of their own.

Scores are exact in FP32, as in `triton_cases`, and spread over many octaves, so that anchors stay and move; values
are the identity. Where P is a rounding of weights that are no numbers of its format, two FP32 roundings of a weight
may lie on both sides of a step: few do, and by one step.
"""

import interpreter  # noqa: F401  (first: Triton decides when it is imported)
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton_cases import TOLERANCE, operands, windows

from softmaxlab import backends, online
from softmaxlab.backends import triton as backend
from softmaxlab.backends import triton_online
from softmaxlab.backends.triton_walk import stored
from softmaxlab.operators import parse
from softmaxlab.semantics import Semantics

_OPERATORS = """
softmax() temperature(alpha=0.5) temperature(alpha=3)
h15() h15(clamp=zero) h15(clamp=none) sq(k=0) sq(k=3) sq(k=13,clamp=zero) s() s(clamp=none)
pot(m=0.5) pot(m=1) pot(m=2) pot(m=3) rowmax_pot(K_max=4) rowmax_pot(K_max=4,tail=drop) rowmax_pot(K_max=300)
fa4_poly(degree=1) fa4_poly(degree=2) fa4_poly(degree=3)
packed(k=2) packed(k=3,sum_levels=1) packed(k=3,p=e4m3) packed(k=4,p=fp16)
"""
OPERATORS = _OPERATORS.split()
FEW = ["softmax()", "h15()", "s()", "rowmax_pot(K_max=4)", "packed(k=3)"]
STORED = ["", ",p=bf16", ",p=e4m3"]
TAUS = ["0", "0.75", "8"]
SMALL = backend.Tile(32, 8, 4, 1)
#: One step of a format of P: relative, and of its smallest numbers.
STEPS = {"bf16": (2.0**-7, 0.0), "fp16": (2.0**-10, 2.0**-24), "e4m3": (2.0**-3, 2.0**-9)}


def compare(text: str, semantics: str, q: Tensor, k: Tensor, v: Tensor, **changes) -> tuple[Tensor, dict]:
    """Hold the kernel to the PyTorch program; its output, and what it counts."""
    operator, s, options = parse(text), Semantics.parse(semantics), {"scaling": 2.0} | changes
    tile = options.pop("tile", SMALL)
    simulator = online.Simulator(s)
    expected = simulator(q, k, v, operator, **options)
    got = triton_online.attend(q, k, v, operator, s, tile=tile, **options)
    assert got.dtype == expected.dtype and got.shape == expected.shape
    where = f"{text} {semantics} {changes.keys()}"
    assert torch.equal(got.isnan(), expected.isnan()), where
    got, want = got.float().nan_to_num(), expected.float().nan_to_num()
    rtol, atol = TOLERANCE[q.dtype]
    off = ~torch.isclose(got, want, rtol=rtol, atol=atol)
    if s.p != "none" and not backend.plan(operator).exact_p:
        relative, least = STEPS[s.p]
        assert torch.allclose(got, want, rtol=rtol + relative, atol=atol + least * 2.0**-s.max_offset), where
        assert off.float().mean() <= 0.01, (where, off.float().mean())
    else:
        assert not off.any(), (where, (got - want).abs().max())
    return expected, simulator.frame().sum().to_dict()


def every_operator(part: int, parts: int) -> None:
    q, k, v = operands(42, 42, heads=1)
    seen = {tau: [0, 0] for tau in TAUS}
    for text in OPERATORS[part::parts]:
        operator = parse(text)
        for tau in TAUS:
            if float(tau) > operator.headroom:
                continue
            for p in STORED:
                # E4M3 holds 2^8 and τ = 0.75, as on the FP8 path, but not τ = 8 beside it.
                offset = ",max_offset=8" if p.endswith("e4m3") and tau != "8" else ""
                _, counts = compare(text, f"online(tile=16,tau={tau}{p}{offset})", q, k, v)
                seen[tau][0] += counts["lagging"]
                seen[tau][1] += counts["rescales"]
    assert seen["0"][0] == 0 and all(moved for _, moved in seen.values()), seen
    assert seen["0.75"][0] and seen["8"][0], seen


def layouts() -> None:
    """Masks, dtypes, heads, votes of warps, FP8 operands, tiles of one or several products, one longer than the row."""
    window, left_padded = windows(41, 9)[None, None], windows(41, 41).expand(2, 1, 41, 41).clone()
    left_padded[1, :, :, :23] = False  # the first rows of the second sequence see no key
    scattered = torch.rand(1, 1, 7, 33, generator=torch.Generator().manual_seed(1)) < 0.4
    half = {"dtype": torch.bfloat16}
    for text in FEW:
        compare(text, "online(tile=16,tau=0.75)", *operands(41, 41, **half), mask=window)
        compare(text, "online(tile=32,tau=0.75,p=bf16)", *operands(41, 41, batch=2, dim=48), mask=left_padded)
        compare(text, "online(tile=16,tau=0,p=fp16)", *operands(41, 41, heads=4, kv_heads=2, batch=2))
        compare(text, "online(tile=16,tau=2)", *operands(40, 40, dtype=torch.float16), softcap=8.0)
        compare(text, "online(tile=16,tau=8,p=bf16)", *operands(7, 33, dim=96), mask=scattered)
        compare(text, "online(tile=128,tau=0.75)", *operands(50, 50, **half), tile=backend.Tile(32, 64, 4, 1))
        q, k, v = operands(75, 75, heads=1)
        compare(text, "online(tile=16,tau=0.75)", q, k, v, tile=SMALL._replace(n=16), scaling=0.3)
        _, together = compare(text, "online(tile=16,tau=8,decision=warp)", q, k, v, tile=SMALL._replace(m=64))
        _, alone = compare(text, "online(tile=16,tau=8)", q, k, v)
        assert together["rescales"] > alone["rescales"]
    for qkv in ("e4m3", "e4m3_tensor", "e4m3_head"):
        q, k, v = operands(40, 40)
        compare("h15()", f"online(tile=16,tau=0,qkv={qkv})", 1.5 * q, k, v)


def rounded() -> None:
    """Scores that are no exact numbers: a step, or an anchor, may differ where one is a rounding from an edge."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 40, 40, generator=g) for heads in (2, 1, 1))
    for text in OPERATORS[::5]:
        for semantics in ("online(tile=16,tau=0)", "online(tile=16,tau=0.75,p=bf16)"):
            operator, s = parse(text), Semantics.parse(semantics)
            if s.tau <= operator.headroom:
                expected = online.Simulator(s)(3 * q, k, v, operator, scaling=0.3)
                got = triton_online.attend(3 * q, k, v, operator, s, scaling=0.3, tile=SMALL)
                off = (got - expected).abs().amax(-1) > 2e-5
                assert off.float().mean() <= 0.02, (text, semantics, off.float().mean())


def adversarial() -> None:
    """NaN, infinity, rows without a key, equal rows, and huge scores."""
    for text in [*FEW, "h15(clamp=none)", "pot(m=0.5)", "rowmax_pot(K_max=4,tail=drop)"]:
        for semantics in ("online(tile=16,tau=0)", "online(tile=16,tau=8,p=bf16)", "online(tile=16,tau=0.75,p=e4m3)"):
            q, k, v = operands(40, 40, heads=1)
            compare(text, semantics, q, k[:, :, :1].expand_as(k), v, scaling=0.3)
            out, _ = compare(text, semantics, q * 64, k, v)
            assert out.isfinite().all()
            q, k, mask = q.clone(), k.clone(), windows(40, 40)[None, None].clone()
            q[0, 0, 3], k[0, 0, 15] = torch.nan, torch.nan
            q[0, 0, 7], k[0, 0, 2, 0] = 3e38, 2.0  # overflows to infinity
            mask[..., 15] = False  # a masked key does not count, whatever it is
            mask[..., 5, :] = False
            out, _ = compare(text, semantics, q, k, v, mask=mask)
            assert out[0, 3].isnan().all() and (out[0, 5] == 0).all() and out[0, 8:].isfinite().all()
            out, _ = compare(text, semantics, q, k, v)
            assert out[0, 15:].isnan().all() and out[0, 8:15].isfinite().all()


@triton.jit
def store_all(x, y, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y + at, stored(tl.load(x + at), "e4m3"))


def numbers_of_e4m3() -> None:
    """Every number of E4M3, the middles between them and their neighbours, and what saturates, rounds as in torch."""
    held = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (held[1:] + held[:-1]) / 2
    ends = torch.tensor([0.0, 1e-30, 2.0**-11, 448.0, 464.0, 465.0, 512.0, 3e38])
    x = torch.cat([held, middles, middles.nextafter(ends[:1]), middles.nextafter(ends[-1:]), ends])
    x = torch.cat([x, torch.zeros(1024 - len(x))])
    y = torch.empty_like(x)
    store_all[(1,)](x, y, N=1024)
    assert torch.equal(y, x.clamp(max=448.0).to(torch.float8_e4m3fn).float())


def dispatched() -> None:
    """The backend by its name takes the kernel, in the shape that it chooses itself."""
    taken = []

    def attend(*args, **options) -> Tensor:
        taken.append(args[4])
        return triton_attend(*args, **options)

    triton_attend, triton_online.attend = triton_online.attend, attend
    online._has_kernel = lambda *args: triton_online.supports(*args[:5], mask=args[5]) is None
    q, k, v = operands(50, 50)
    for text in ("online(tile=128,tau=8,p=bf16)", "online(tile=32,tau=0)", "online(tile=17,tau=0)"):
        simulator = backends.get(text)
        out = simulator(q, k, v, parse("h15()"), scaling=1.0)
        expected = online.Simulator(Semantics.parse(text))(q, k, v, parse("h15()"), scaling=1.0)
        torch.testing.assert_close(out, expected, rtol=3e-5, atol=2e-7)
    assert [s.tile for s in taken] == [128, 32]
