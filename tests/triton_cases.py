"""Calls of the Triton backend in the interpreter, held to the reference; for processes of their own (`test_triton`).

Queries and keys are small multiples of 1/8, so that every score is exact in FP32 whatever the order of its sum, and
many are equal: weights then agree key by key, without a step of a lattice that differs. The values are the identity,
so that the output is p̂ itself.
"""

import interpreter  # noqa: F401  (first: Triton decides when it is imported)
import torch
from torch import Tensor

from softmaxlab.backends import reference
from softmaxlab.backends import triton as backend
from softmaxlab.operators import parse

_OPERATORS = """
softmax() temperature(alpha=0.5) temperature(alpha=3)
h15() h15(clamp=zero) h15(clamp=none) sq(k=0) sq(k=3) sq(k=13,clamp=zero) s() s(clamp=none)
pot(m=0.5) pot(m=1) pot(m=2) pot(m=3) pot(m=0.01) rowmax_pot(K_max=4) rowmax_pot(K_max=4,tail=drop)
rowmax_pot(K_max=300)
fa4_poly(degree=1) fa4_poly(degree=2) fa4_poly(degree=3) packed(k=2) packed(k=3,p=e4m3) packed(k=4,p=fp16)
ilpot() ilpot_h_a() ilpot_h15()
log2p() log2p(bits=3) log2p(bits=3,tail=drop) log2p(renormalise=no)
log_sqrt2p() log_sqrt2p(bits=4,tail=drop,renormalise=no)
grid(K=16) grid(K=7,recon=upper) grid(K=8,recon=lerp) grid(K=1) grid(K=16,R=4) grid(K=21,R=0.25,recon=upper)
grid(K=8,R=2,recon=lerp) grid(K=8,map=linear) grid(K=8,R=4,map=linear,recon=lerp) grid(K=8,R=4,map=linear,recon=upper)
mean_threshold() mean_threshold(weights=uniform) topk(f=0.1) topk(f=0.5,weights=uniform) topk(f=1)
rescue(of=softmax()) rescue(of=temperature(alpha=0.5)) rescue(of=temperature(alpha=2),q=0.5) rescue(of=h15(),q=0.99)
rescue(of=s()) rescue(of=fa4_poly(degree=3)) rescue(of=pot(m=0.01),q=0.01) rescue(of=packed(k=2))
rescue(of=rowmax_pot(K_max=2,tail=drop),q=0.7)
"""
OPERATORS = _OPERATORS.split()
#: One of each route and kind of map.
_FEW = "temperature(alpha=2) h15() s() log2p() ilpot_h_a() grid(K=32,R=4) mean_threshold() topk(f=0.15)"
FEW = [*_FEW.split(), "rescue(of=temperature(alpha=0.5))"]
SMALL = backend.Tile(32, 16, 4, 2)
TOLERANCE = {torch.float32: (3e-5, 2e-7), torch.float16: (2e-3, 1e-6), torch.bfloat16: (1.6e-2, 1e-6)}


def operands(
    queries: int, keys: int, *, heads: int = 2, kv_heads: int = 1, dim: int = 24, batch: int = 1, spread: int = 9,
    dtype=torch.float32, seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Queries and keys of multiples of 1/8 below `spread`/8 in size, and the identity as values."""
    g = torch.Generator().manual_seed(seed)

    def eighths(*shape: int) -> Tensor:
        return torch.randint(1 - spread, spread, shape, generator=g).to(dtype) / 8

    value = torch.eye(keys, dtype=dtype).expand(batch, kv_heads, keys, keys)
    # As transformers has them: (batch, queries, heads, dim), transposed.
    query, key = eighths(batch, queries, heads, dim), eighths(batch, keys, kv_heads, dim)
    return query.transpose(1, 2), key.transpose(1, 2), value


def compare(text: str, q: Tensor, k: Tensor, v: Tensor, **changes) -> Tensor:
    """Hold the backend to the reference; the reference's output."""
    operator, options = parse(text), {"scaling": 0.25} | changes
    assert backend.supports(q, k, v, operator, mask=options.get("mask")) is None, text
    expected = reference.attend(q, k, v, operator, **options)
    got = backend.attend(q, k, v, operator, tile=SMALL, **options)
    assert got.dtype == expected.dtype and got.shape == expected.shape
    rtol, atol = TOLERANCE[q.dtype]
    torch.testing.assert_close(
        got, expected, rtol=rtol, atol=atol, equal_nan=True, msg=lambda m: f"{text} {changes}: {m}"
    )
    return expected


def every_operator(part: int, parts: int) -> None:
    q, k, v = operands(34, 34)
    for text in OPERATORS[part::parts]:
        compare(text, q, k, v)


def far_keys() -> None:
    """Keys hundreds of octaves below the maximum, where an index would leave the exponent of an FP32 number."""
    q, k, v = operands(20, 20, heads=1)
    for text in OPERATORS:
        compare(text, q, k, v, scaling=64.0)


def windows(n: int, width: int) -> Tensor:
    at = torch.arange(n)
    distance = at[:, None] - at
    return (distance >= 0) & (distance < width)


def layouts() -> None:
    """Masks, dtypes and head layouts; lengths that no tile divides."""
    window = windows(41, 9)[None, None]
    left_padded = windows(41, 41).expand(2, 1, 41, 41).clone()
    left_padded[1, :, :, :23] = False  # the first rows of the second sequence see no key
    scattered = torch.rand(1, 1, 7, 33, generator=torch.Generator().manual_seed(1)) < 0.4
    one = torch.ones(1, 1, 1, 33, dtype=torch.bool)
    for text in FEW:
        compare(text, *operands(41, 41, dtype=torch.bfloat16), mask=window)
        compare(text, *operands(41, 41, heads=3, kv_heads=3, batch=2, dim=48, dtype=torch.float16), mask=left_padded)
        compare(text, *operands(7, 33, dim=96), mask=scattered)
        compare(text, *operands(1, 33, heads=4, dim=16, dtype=torch.bfloat16), mask=one)
        compare(text, *operands(20, 20, dtype=torch.bfloat16), scaling=0.3)


def adversarial() -> None:
    """Equal rows, huge scores, one key, no key, NaN and infinity."""
    for text in [
        *FEW,
        "pot(m=1)",
        "ilpot_h15()",
        "mean_threshold(weights=uniform)",
        "grid(K=5)",
        "rowmax_pot(K_max=9)",
        "rescue(of=h15())",
    ]:
        q, k, v = operands(20, 20)
        same = k[:, :, :1].expand_as(k)
        compare(text, q, same, v, scaling=0.3)  # every row constant, at a score that is rounded
        out = compare(text, q * 4096, k, v, scaling=1.0)
        assert out.isfinite().all()
        q = q.clone()
        q[0, 0, 3] = torch.nan
        q[0, 1, 7], k[0, 0, 2, 0] = 3e38, 2.0  # overflows to infinity, of either sign
        k[0, 0, 15] = torch.nan
        mask = windows(20, 20)[None, None].clone()
        mask[..., 15] = False  # a masked key does not count, whatever it is
        mask[..., 5, :] = False
        out = compare(text, q, k, v, mask=mask, scaling=1.0)
        assert out[0, 3, 0].isnan().all() and (out[0, 5, 1] == 0).all() and out[0, 12].isfinite().all()


def capped() -> None:
    """A soft-cap rounds, so that values and not steps are compared: maps that are continuous, other dims of V."""
    q, k, _ = operands(30, 30, dim=32)
    v = torch.randn(1, 1, 30, 20, generator=torch.Generator().manual_seed(0))
    for text in (
        "softmax()",
        "s()",
        "fa4_poly(degree=3)",
        "grid(K=8,R=4,recon=lerp)",
        "mean_threshold()",
        "topk(f=0.3)",
        "rescue(of=temperature(alpha=2))",
    ):
        compare(text, q, k, v, softcap=3.0)


def rounded() -> None:
    """Scores that are no exact numbers: a step may differ where a score is a rounding from an edge, in few rows."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 40, 40, generator=g) for heads in (2, 1, 1))
    for text in FEW:
        expected = reference.attend(3 * q, k, v, parse(text), scaling=0.3)
        for precision in ("split", "ieee"):
            got = backend.attend(3 * q, k, v, parse(text), scaling=0.3, tile=SMALL, precision=precision)
            off = (got - expected).abs().amax(-1) > 2e-5
            assert off.float().mean() <= 0.02, (text, precision, off.float().mean())


def large_values() -> None:
    """BF16 values that FP16 does not hold: they travel in units of the largest one."""
    q, k, _ = operands(30, 30, dtype=torch.bfloat16)
    v = torch.randn(1, 1, 30, 20, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    for text in ("softmax()", "s()", "grid(K=8,R=4)", "mean_threshold()", "topk(f=0.3)", "h15()", FEW[-1]):
        plain = backend.attend(q, k, v, parse(text), scaling=0.25, tile=SMALL)
        for power in (-60, -30, 20, 60):
            scaled = backend.attend(q, k, v * 2.0**power, parse(text), scaling=0.25, tile=SMALL)
            assert torch.equal(scaled, plain * 2.0**power), (text, power)
        assert (backend.attend(q, k, 0 * v, parse(text), scaling=0.25, tile=SMALL) == 0).all()


def sinks() -> None:
    """BF16: the maximum holds nearly all the weight and has no value, so that the smallest weights decide."""
    n = 40
    q, k = torch.zeros(1, 1, n, 16, dtype=torch.bfloat16), torch.zeros(1, 1, n, 16, dtype=torch.bfloat16)
    q[..., 0], k[:, :, 1:, 0] = 1.0, -1.0
    v = torch.ones(1, 1, n, 16, dtype=torch.bfloat16)
    v[:, :, 0] = 0.0
    for text in ("softmax()", "s()", "fa4_poly(degree=3)", "h15()", "rescue(of=temperature(alpha=0.5))"):
        for below in (8.0, 14.25, 17.375, 19.0):
            compare(text, q, k, v, scaling=below)


def far_apart() -> None:
    """Keys or values whose distances 32 bits do not hold are refused, and others are not."""
    near, far = (torch.empty_strided((1, 1, 4, 16), (0, 0, stride, 1), device="meta") for stride in (2**29, 2**30))
    softmax = parse("softmax()")
    assert backend.supports(near, near, near, softmax) is None
    for k, v in ((far, near), (near, far)):
        assert "more than 2^31 elements, with 4 keys" in backend.supports(near, k, v, softmax)


def chunks() -> None:
    """Top-k and rescue with a scratch buffer of several chunks."""
    backend.SCRATCH = 1
    q, k, v = operands(70, 70, heads=1)
    for text in ("topk(f=0.03)", "topk(f=0.5,weights=uniform)", FEW[-1]):
        compare(text, q, k, v)
    for text in ("topk(f=0.1)", FEW[-1]):
        compare(text, q, k, v, mask=windows(70, 40)[None, None])


def sets_of_a_mass() -> None:
    """Rescue: keys equal at the edge on both sides of it, a side without weight, weights that span FP32's exponents."""
    q, k, v = operands(30, 30, spread=3, dim=4)  # few different scores: nearly every edge parts keys that are equal
    for text in ("rescue(of=temperature(alpha=3))", "rescue(of=temperature(alpha=0.2),q=0.5)"):
        compare(text, q, k, v, scaling=1.0)
        compare(text, q.bfloat16(), k.bfloat16(), v.bfloat16(), scaling=0.5, mask=windows(30, 20)[None, None])
    for text in (
        "rescue(of=temperature(alpha=300))",
        "rescue(of=temperature(alpha=0.001))",
        "rescue(of=rowmax_pot(K_max=1,tail=drop),q=0.999)",
        "rescue(of=temperature(alpha=2),q=1e-6)",
    ):
        for scaling in (0.25, 16.0):
            compare(text, q, k, v, scaling=scaling)
