"""The CPU backend against the reference, element by element.

Most inputs are multiples of 1/512, so small that every product q·k is exact in FP32 whatever the order of its sum, and
the values are one-hot, so that the output is the row of probabilities. Both backends then see the same scores, and a
lattice has no excuse for another step. Where they cannot see the same (soft-capping, grids whose interval is a
logarithm in FP32), a step may lie where it lies for scores one rounding apart.
"""

import os
import subprocess
import sys

import numba
import numpy as np
import pytest
import torch

from softmaxlab.attention import inject
from softmaxlab.backends import cpu, cpu_scalar, reference
from softmaxlab.operators import Rescue, Softmax, normaliser, parse

OPERATORS = (
    "softmax()",
    "temperature(alpha=0.37)",
    "temperature(alpha=3)",
    "pot(m=0.5)",
    "pot(m=1)",
    "pot(m=2)",
    "pot(m=0.7)",
    "pot(m=3)",
    "rowmax_pot(K_max=3)",
    "rowmax_pot(K_max=3,tail=drop)",
    "rowmax_pot(K_max=200)",
    "h15()",
    "h15(clamp=zero)",
    "sq(k=0)",
    "sq(k=4,clamp=none)",
    "sq(k=13)",
    "s()",
    "s(clamp=zero)",
    "packed(k=4)",
    "packed(k=2,p=fp16)",
    "packed(k=3,p=e4m3)",
    "fa4_poly(degree=1)",
    "fa4_poly(degree=2)",
    "fa4_poly(degree=3)",
    "mean_threshold()",
    "mean_threshold(weights=uniform)",
    "topk(f=0.15)",
    "topk(f=0.01,weights=uniform)",
    "topk(f=1)",
    "ilpot()",
    "ilpot_h_a()",
    "ilpot_h15()",
    "log2p()",
    "log2p(bits=3,tail=drop)",
    "log_sqrt2p(bits=4,renormalise=no)",
    "grid(K=1)",
    "grid(K=21)",
    "grid(K=21,recon=upper)",
    "grid(K=32,recon=lerp)",
    "grid(K=16,map=linear)",
    "grid(K=16,map=linear,recon=lerp)",
    "grid(K=21,R=4)",
    "grid(K=21,R=0.25,recon=upper)",
    "grid(K=64,R=1000,recon=lerp)",
    "grid(K=32,R=4,map=linear,recon=upper)",
)
LAYOUTS = {"one head, dim 64": (1, 1, 64), "grouped, dim 96": (4, 2, 96), "one key head, dim 256": (3, 1, 256)}
SCALING = 0.213
N = 75


def inputs(heads, kv_heads, dim, *, n=N, batch=2, dtype=torch.float32, seed=0):
    """q and k with exact products; one-hot values."""
    g = torch.Generator().manual_seed(seed)
    unit = 512 if dtype == torch.float32 else 128  # bfloat16 has eight bits
    q, k = (torch.randint(-unit // 2, unit // 2 + 1, (batch, h, n, dim), generator=g) / unit for h in (heads, kv_heads))
    v = torch.eye(n).expand(batch, kv_heads, n, n)
    return (4 * q).to(dtype), k.to(dtype), v.to(dtype)


def masks(n=N, batch=2):
    """Those that models make, and one with holes; the rows without a key are among them."""
    row, column = torch.arange(n)[:, None], torch.arange(n)
    causal = column <= row
    padded = causal & (column >= torch.tensor([0, 9])[:, None, None, None])
    holes = causal & (torch.rand(batch, 1, n, n, generator=torch.Generator().manual_seed(1)) < 0.7)
    return {
        "causal": None,
        "window": (causal & (column > row - 20))[None, None],
        "padding": padded,
        "holes": holes,
    }


def both(q, k, v, operator, **arguments):
    operator = parse(operator) if isinstance(operator, str) else operator
    assert cpu.supports(q, k, v, operator, mask=arguments.get("mask")) is None
    return tuple(
        backend(q, k, v, operator, **{"scaling": SCALING} | arguments) for backend in (cpu.attend, reference.attend)
    )


def assert_same(got, expected, around=()):
    """Equal to FP32 rounding; or, entry by entry, between what nearby inputs give."""
    low, high = expected, expected
    for other in around:
        low, high = torch.minimum(low, other), torch.maximum(high, other)
    slack = 4e-6 * high.abs() + 1e-12
    outside = (got < low - slack) | (got > high + slack) | (got.isnan() != expected.isnan())
    assert not outside.any(), f"{int(outside.sum())} of {got.numel()} differ, by {(got - expected).abs().max():.3g}"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mask", ("causal", "window", "padding", "holes"))
@pytest.mark.parametrize("operator", OPERATORS)
def test_probabilities_are_the_reference_s(operator, mask, layout):
    q, k, v = inputs(*LAYOUTS[layout])
    got, expected = both(q, k, v, operator, mask=masks()[mask])
    if "R=" not in operator or "map=linear,recon=lerp" in operator:
        assert_same(got, expected)
        return
    # A score at an edge of a logarithmic interval, where FP32 cannot tell the sides: either. Rows are compared relative
    # to their largest weight, which is an edge itself, so that one such key does not move the others.
    relative = [x / x.amax(-1, keepdim=True).clamp(min=1e-30) for x in (got, expected)]
    assert_same(*relative, around_edges(q, k, parse(operator), masks()[mask]))


def around_edges(q, k, operator, mask):
    """Weights of a grid for scores a little higher and lower, the row's ends as they are: (batch, n, heads, n)."""
    valid = torch.ones(N, N, dtype=torch.bool).tril()[None, None] if mask is None else mask
    s = reference.scores(q, k.repeat_interleave(q.shape[1] // k.shape[1], 1), scaling=SCALING, softcap=None)
    top = s.masked_fill(~valid, -torch.inf).amax(-1, keepdim=True)
    low = s.masked_fill(~valid, torch.inf).amin(-1, keepdim=True)
    for shift in (-(2.0**-22), 2.0**-22):
        near = torch.where((s == top) | (s == low), s, (s + shift * (top - low)).clamp(low, top))
        near = near.masked_fill(~valid, -torch.inf)
        weights = operator(near, valid)
        yield (weights / weights.amax(-1, keepdim=True).clamp(min=1e-30)).transpose(1, 2)


@pytest.mark.parametrize("operator", OPERATORS)
def test_bfloat16(operator):
    q, k, v = inputs(4, 2, 64, dtype=torch.bfloat16)
    got, expected = both(q, k, v, operator)
    assert got.dtype == torch.bfloat16
    assert torch.allclose(got.float(), expected.float(), rtol=2**-7, atol=1e-6)
    assert (got == expected).float().mean() > 0.998  # what is left rounds to the other neighbour


def test_soft_capping():
    q, k, v = inputs(4, 2, 64)
    for operator in (
        "softmax()",
        "temperature(alpha=2)",
        "mean_threshold()",
        "fa4_poly(degree=3)",
        "grid(K=8,recon=lerp)",
    ):
        got, expected = both(q, k, v, operator, softcap=5.0)
        assert_same(got, expected * (1 - 4e-6), [expected * (1 + 4e-6)])
    for operator in ("h15()", "pot(m=1)", "sq(k=3)"):
        got, expected = both(q, k, v, operator, softcap=5.0)
        assert torch.isclose(got, expected, rtol=1e-5).all(-1).float().mean() > 0.99


@pytest.mark.parametrize("operator", ("softmax()", "h15()", "grid(K=21)", "topk(f=0.1)", "mean_threshold()"))
def test_many_tiles_and_ordinary_values(operator, monkeypatch):
    monkeypatch.setattr(cpu, "ELEMENTS", 2**13)
    monkeypatch.setattr(cpu, "LEAST", 10)
    q, k, _ = inputs(4, 2, 64, n=333, batch=1)
    v = torch.randn(1, 2, 333, 80, generator=torch.Generator().manual_seed(3))
    causal = torch.ones(333, 333, dtype=torch.bool).tril()[None, None]
    for mask in (None, causal, causal & ~torch.ones(333, 333, dtype=torch.bool).tril(-50)):
        got, expected = both(q, k, v, operator, mask=mask)
        assert torch.allclose(got, expected, rtol=1e-5, atol=3e-6)


def test_as_transformers_hands_them_over():
    """Transposed views, as many keys as queries or more of them, a mask shared by the batch."""
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in inputs(4, 2, 64))
    later = torch.ones(N, N, dtype=torch.bool).tril()[None, None, -5:]
    for operator in ("softmax()", "sq(k=2)"):
        assert_same(*both(q, k, v, operator))
        assert_same(*both(q[:, :, -5:], k, v, operator, mask=later))
        assert_same(both(q[:, :, -5:], k, v, operator, mask=later)[0], both(q, k, v, operator)[1][:, -5:])


@pytest.mark.parametrize("operator", OPERATORS)
def test_adversarial_rows(operator):
    q, k, v = inputs(2, 1, 64, batch=1)
    k[:, :, 40:50] = k[:, :, 39:40]  # ties, among them at a threshold
    q[:, :, 20] = 0  # a constant row
    q[:, :, 21] = -0.0
    q[:, :, 60:64] *= 4096  # scores of some ten thousand: one key has all the weight
    v[..., -1, -1] = 1
    mask = torch.ones(N, N, dtype=torch.bool).tril()
    mask[30] = False  # no key
    mask[31] = torch.arange(N) == 7  # one key
    got, expected = both(q, k, v, operator, mask=mask[None, None], scaling=SCALING * 4)
    assert (got[:, 30] == 0).all()
    if "R=" in operator:
        same = torch.isclose(got, expected, rtol=1e-5, atol=1e-7).float().mean()
        assert same > 0.98  # a key at an edge moves its row's sum
        got, expected = got[:, [20, 21, 30, 31]], expected[:, [20, 21, 30, 31]]
    assert_same(got, expected)


@pytest.mark.parametrize("bad", (torch.nan, torch.inf, -torch.inf))
@pytest.mark.parametrize("operator", OPERATORS)
def test_what_is_not_finite_shows(operator, bad):
    q, k, v = inputs(2, 1, 64, batch=1)
    q[0, 1, 12, 3] = bad
    k[0, 0, 50, 5] = torch.nan
    got, expected = both(q, k, v, operator)
    assert (got.isnan().all(-1) == expected.isnan().all(-1)).all()
    assert got[0, 12, 1].isnan().all()
    assert got[0, 50:].isnan().all()
    assert not got[0, :12].isnan().any()


def test_a_masked_key_s_score_does_not_matter():
    q, k, v = inputs(2, 1, 64, batch=1)
    mask = torch.ones(N, N, dtype=torch.bool).tril()
    mask[:, 10] = False
    k[0, 0, 10] = torch.nan
    for operator in ("softmax()", "h15()", "topk(f=0.2)", "grid(K=9)"):
        got, expected = both(q, k, v, operator, mask=mask[None, None])
        assert got.isfinite().all()
        assert_same(got, expected)


def test_runs_and_numbers_of_threads_give_the_same_bits():
    q, k, v = inputs(6, 3, 64, n=300)
    v = torch.randn(2, 3, 300, 64, generator=torch.Generator().manual_seed(2))
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3, 2):
            torch.set_num_threads(threads)
            found.append(cpu.attend(q, k, v, parse("sq(k=3)"), scaling=SCALING))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_a_child_process_can_attend_too():
    code = (
        "import os, torch; from softmaxlab.backends import cpu; from softmaxlab.operators import Softmax\n"
        "torch.set_num_threads(2); x = torch.ones(1, 2, 240, 64)\n"
        "one = lambda: cpu.attend(x, x, x, Softmax(), scaling=0.1)[0, -1, -1, -1].item()\n"
        "first = one(); pid = os.fork()\n"
        "os._exit(0 if one() == first else 1) if pid == 0 else exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    )
    if not hasattr(os, "fork"):
        pytest.skip("this system has no fork")
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_what_it_does_not_do_it_says(monkeypatch):
    q, k, v = inputs(2, 1, 64)
    softmax = Softmax()
    assert "no map for rescue" in cpu.supports(q, k, v, Rescue(softmax))
    assert "no map for grid" in cpu.supports(q, k, v, parse("grid(K=100000)"))
    assert "no map for grid" in cpu.supports(q, k, v, parse("grid(K=2,R=1e9)"))
    assert "float32 or bfloat16" in cpu.supports(q.half(), k.half(), v.half(), softmax)
    assert "not causal" in cpu.supports(q[:, :, :5], k, v, softmax)
    assert "bool mask" in cpu.supports(q, k, v, softmax, mask=torch.zeros(1, 1, N, N))
    assert "gradients" in cpu.supports(q.requires_grad_(), k, v, softmax)
    with torch.no_grad():
        assert cpu.supports(q, k, v, softmax) is None
    monkeypatch.setattr(cpu, "_MISSING", "the CPU backend needs Numba")
    assert "Numba" in cpu.supports(q.detach(), k, v, softmax)


def test_in_a_model(tiny_model):
    from softmaxlab.models import load_model

    model = load_model(str(tiny_model), device="cpu").model
    tokens = torch.arange(120).reshape(2, 60)
    padding = torch.ones_like(tokens)
    padding[1, :7] = 0
    with torch.inference_mode():
        for operator in ("softmax()", "h15()", "topk(f=0.2)"):
            logits = []
            for backend in (cpu.attend, reference.attend):
                with inject(model, parse(operator), backend=backend) as injection:
                    logits.append(model(tokens, attention_mask=padding, use_cache=False).logits)
                    injection.check_reached()
            assert torch.allclose(*logits, rtol=1e-3, atol=1e-3)


# The arithmetic below the maps


def over(function):
    @numba.njit
    def loop(x, out):
        for i in range(x.size):
            out[i] = function(x[i])

    def call(x):
        out = np.empty_like(x)
        loop(x, out)
        return out

    return call


@pytest.mark.parametrize(
    ("name", "exact", "low", "high"),
    (("exp", np.exp, -87.0, 0.0), ("log1p", np.log1p, -0.9999, 50.0), ("tanh", np.tanh, -12.0, 12.0)),
)
def test_functions_are_good_to_their_last_place(name, exact, low, high):
    x = np.random.default_rng(0).uniform(low, high, 200_000).astype(np.float32)
    x = np.concatenate([x, x[:1000] * np.float32(1e-4), np.zeros(1, np.float32)])
    x = x[(x >= low) & (x <= high)]
    got, want = over(getattr(cpu_scalar, name))(x), exact(x.astype(np.float64))
    assert (np.abs(got - want) <= 3 * np.spacing(np.abs(want).astype(np.float32))).all()


@pytest.mark.parametrize("per_octave", (0.5, 1, 2, 3, 16, 2**13))
def test_steps_are_those_of_fp64(per_octave):
    high, low = cpu_scalar.pair(per_octave / np.log(2))

    @numba.njit
    def loop(d, out):
        for i in range(d.size):
            out[i] = cpu_scalar.steps(d[i], high, low)[0]

    d = np.random.default_rng(0).uniform(-90, 0, 300_000).astype(np.float32)
    edges = (-(np.arange(min(126 * per_octave, 50_000)) + 0.5) * np.log(2) / per_octave).astype(np.float32)
    d = np.concatenate([d, edges, np.nextafter(edges, np.float32(0)), np.nextafter(edges, np.float32(-1e9))])
    out = np.empty_like(d)
    loop(d, out)
    assert (out == -np.floor(-per_octave * (d.astype(np.float64) / np.log(2)) + 0.5)).all()


def test_row_sums_are_safe_at_both_ends():
    scores = torch.tensor([[-torch.inf, -torch.inf], [0.0, torch.nan]])
    assert normaliser(Softmax()(scores, scores > 0), scores)[0] == 1  # the reference's rule, which `tile` follows
    q = torch.zeros(1, 1, 2, 64)
    mask = torch.tensor([[False, False], [True, True]])[None, None]
    got = cpu.attend(q, q, torch.ones(1, 1, 2, 3), Softmax(), scaling=1.0, mask=mask)
    assert got[0, :, 0].tolist() == [[0, 0, 0], [1, 1, 1]]
