"""The packed exponential: arithmetic form, bit form and a scalar twin agree; its range, its sums, its refusals."""

import math

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import twins_packed as twin

from softmaxlab import operators, packed_bits
from softmaxlab.errors import LabError
from softmaxlab.online import Simulator, walk
from softmaxlab.operators import H15, SQ, Packed, Softmax
from softmaxlab.semantics import Semantics

ALL = packed_bits.operators()
LN2 = math.log(2)


def fields(operator):
    return {"k": operator.k, "sum_levels": operator.sum_levels, "p": operator.p}


# Definition


@pytest.mark.parametrize("operator", ALL, ids=str)
def test_text_form_and_parameters_of_the_format(operator):
    assert operators.parse(str(operator)) == operator
    assert operator.bias == twin.BIAS[operator.p] + twin.offset(operator.sum_levels, operator.p)
    assert operator.bias * 2**operator.k % 2 == 0  # the bias keeps a tie's parity
    assert operator.bias * 2**operator.k <= 2047


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("packed(k=0)", "k is 0, but must be one of 1, 2, 3, 4"),
        ("packed(k=5)", "k is 5"),
        ("packed(k=4,sum_levels=6)", "sum_levels is 6, but must be from 0 to 5"),
        ("packed(k=4,p=fp8)", "p is 'fp8', but must be one of bf16, fp16, e4m3"),
        ("packed(k=2,p=e4m3)", "k is 2, but must be 3"),
        ("packed()", "needs a value for k"),
    ],
)
def test_what_is_refused(text, said):
    with pytest.raises(LabError) as caught:
        operators.parse(text)
    assert said in str(caught.value)


@pytest.mark.parametrize("operator", ALL, ids=str)
def test_every_code_is_the_twins(operator):
    x = torch.arange(-(operator.bias + 2) * 2**operator.k, 1, dtype=torch.float64) / 2**operator.k
    for beside in (0, 0.25, 0.5, -0.5):
        at = x + beside / 2**operator.k
        at = at[at <= 0]
        assert operator.at(at.clone()).tolist() == [twin.packed_at(v, **fields(operator)) for v in at.tolist()]


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_in_bf16_it_is_the_papers_family_with_the_clamp_at_zero(k):
    x = torch.from_numpy(np.random.default_rng(0).uniform(-140, 0, 100_000))
    assert torch.equal(Packed(k).at(x.clone()), SQ(k=k, clamp="zero").at(x.clone()))
    assert Packed(k).envelope == SQ(k=k).envelope
    if k == 1:
        assert torch.equal(Packed(1).at(x.clone()), H15(clamp="zero").at(x.clone()))


@pytest.mark.parametrize("operator", ALL, ids=str)
def test_weights_are_numbers_of_the_format(operator):
    x = torch.linspace(-operator.bias - 1, 0, 50_000, dtype=torch.float64)
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16, "e4m3": torch.float8_e4m3fn}[operator.p]
    stored = operator.at(x) * 2.0**operator.offset
    assert torch.equal(stored.to(kind).float(), stored)
    assert stored.max() * 2.0**operator.sum_levels < 65504 or operator.p != "fp16"


def test_exponents_without_a_code_are_refused():
    for operator in (Packed(4), Packed(2, p="fp16"), Packed(3, p="e4m3")):
        with pytest.raises(LabError, match="leaves no codes for an exponent of 8 octaves"):
            operator.at(torch.tensor([-1.0, 8.0], dtype=torch.float64))
        with pytest.raises(LabError, match="has no weights above its anchor"):
            walk(torch.zeros(1, 8), torch.ones(1, 8, dtype=torch.bool), operator, Semantics(tau=8))
    assert Packed(3).at(torch.tensor([8.0], dtype=torch.float64)).item() == 256


# Bit form


def test_bit_form_equals_arithmetic_form_on_everything_that_fp32_holds():
    table = packed_bits.comparison()
    assert len(table) == 27 and table.compared.sum() > 17_000_000
    exact = table[table.inputs == "exact"]
    assert (exact.different == 0).all() and (table.unexplained == 0).all()
    # Scores a rounding of FP32 beside a tie: fewer than one in 10,000 of random ones.
    draws = table[table.inputs == "draws"]
    assert (draws.different < 1e-4 * draws.compared).all() and draws.different.sum() > 0


def test_the_conversion_is_fp16s_own():
    t = torch.cat([torch.arange(0, 2048.5, 0.25) * 2.0**-24, torch.tensor([-1.0, -0.0, 65519.0, 65520.0, 1e30])])
    got = packed_bits.convert(t)
    assert got[:8190].tolist() == [round(v / 4) for v in range(8190)]  # to nearest, ties to even
    assert got[-5:].tolist() == [0, 0, 0x7BFF, 0x7C00, 0x7C00]
    assert packed_bits.convert(torch.tensor([math.nan, -math.inf, math.inf])).tolist() == [0x7FFF, 0, 0x7C00]


@pytest.mark.parametrize("operator", ALL, ids=str)
def test_masked_keys_nan_and_neighbours(operator):
    table = packed_bits.special_cases(operator).set_index("case")
    assert table.weight["the anchor"] == 1 and table.code["the anchor"] == operator.bias * 2**operator.k
    assert (table.weight[["masked key", "no weight", "far below", "tie to zero"]] == 0).all()
    assert table.code["last code"] == 1 and table.weight["last code"] > 0
    assert math.isnan(table.weight["NaN"]) and table.code["NaN"] == 0x7FFF
    # A NaN in the low half stays in it but for bits of a row that is NaN anyway; in the high half it is alone.
    scores = torch.tensor([[0.0, math.nan, -1.0, 0.0]])
    assert packed_bits.weights(scores, operator).isnan().tolist() == [[False, True, False, False]]
    row = packed_bits.codes(torch.tensor([[0.0, math.nan] + [-1.0] * 6]), operator)
    assert packed_bits.row_sum(row, operator).isnan().all()


def test_headroom_for_an_anchor_that_lags():
    for k in (1, 2, 3):
        x = torch.arange(0, 127 * 2**k, dtype=torch.float32) / 2**k
        assert torch.equal(packed_bits.weights(x, Packed(k)), Packed(k).at(x.double()))
    # k = 4: exact as far as 2047 goes, 15 codes above the anchor, and wrong from 2049 on.
    x = torch.arange(0, 18, dtype=torch.float32) / 16
    right = packed_bits.weights(x, Packed(4)) == SQ(k=4, clamp="zero").at(x.double())
    assert right[:16].all() and not right[17]


def test_scale_and_row_maximum_in_one_fma():
    """Within 2^−22 of the scores' size in octaves, an element is the operator's; codes stay in range up to 2^22."""
    generator = torch.Generator().manual_seed(0)
    for size in (1.0, 16.0, 300.0, 1e5, 4e6):
        s = torch.randn(200, 64, generator=generator) * size / 4
        s[:, 0] = size
        c, top = torch.tensor(0.127517).item(), s.amax(-1, keepdim=True)
        n = packed_bits.codes(s, Packed(4), c, top)
        x = (s.double() - top.double()) * torch.tensor(c).double()
        off = (n - 16 * (x + 127)).where(x > -127, 0.0)
        assert off.abs().max() <= 0.5 + 16 * 2.0**-22 * max(size * c, 127) and n.max() <= 2047


# Row sums


@pytest.mark.parametrize("levels", range(6))
@pytest.mark.parametrize("p", ["bf16", "fp16", "e4m3"])
def test_row_sums_by_words_by_tensor_and_by_the_twin(p, levels):
    operator = Packed(3, levels, p)
    generator = torch.Generator().manual_seed(levels)
    for keys in (8, 80, 112, 128, 144):
        s = torch.randn(20, keys, generator=generator) * 4
        n = packed_bits.codes(s, operator, 1 / LN2, s.amax(-1, keepdim=True))
        w = packed_bits.stored(n, operator) * 2.0**-operator.offset
        by_words, by_tensor = packed_bits.row_sum(n, operator), operator.row_sum(w)
        torch.testing.assert_close(by_words, by_tensor, rtol=1e-6, atol=0)  # FP32 adds what is left in another order
        expected = torch.tensor([twin.row_sum(row, **fields(operator)) for row in w.tolist()])
        torch.testing.assert_close(by_tensor, expected, rtol=1e-6, atol=0)


@hypothesis.given(st.lists(st.floats(0, 90), min_size=1, max_size=70), st.sampled_from([1, 2, 3, 4]), st.integers(0, 5))
@hypothesis.settings(max_examples=200, deadline=None)
def test_the_bound_of_the_row_sum_holds(distances, k, levels):
    for p in ("bf16", "fp16"):
        operator = Packed(k, levels, p)
        w = operator.at(torch.tensor([0.0, *(-d for d in distances)], dtype=torch.float64))
        error = operator.row_sum(w).double() / w.double().sum() - 1
        assert abs(error) <= operator.row_sum_bound + 1e-6


def test_the_bound_is_reached_within_a_third():
    """One level: 1 + 2^−8 rounds by almost as much as it may."""
    operator = Packed(4, 1)
    w = torch.zeros(16)
    w[0], w[8] = 1.0, 2.0**-8
    error = (1 + 2.0**-8) / operator.row_sum(w) - 1
    assert 0.66 < error / operator.row_sum_bound <= 1.01


@pytest.mark.parametrize(("p", "bias", "largest"), [("bf16", 5e-4, 8e-3), ("fp16", 5e-5, 1.5e-3)])
def test_measured_bias_of_row_sums(p, bias, largest):
    table = packed_bits.row_sums(4, p)
    assert table.levels.tolist() == list(range(6)) and (table.bias.abs() < bias).all()
    assert (table.largest <= table.bound + 1e-6).all() and table.largest[3] < largest
    assert table.largest[0] < 1e-6


# In the simulator


def test_the_simulator_takes_the_kernels_row_sum():
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 2, 64, 16) * 2, torch.randn(1, 2, 64, 16) * 2, torch.randn(1, 2, 64, 16)
    outs = {n: Simulator(Semantics(tau=0))(q, k, v, Packed(4, n), scaling=0.4) for n in (0, 3)}
    family = Simulator(Semantics(tau=0))(q, k, v, SQ(k=4, clamp="zero"), scaling=0.4)
    torch.testing.assert_close(outs[0], family, rtol=1e-6, atol=1e-7)
    ratio = (outs[3] / outs[0]).median(-1).values - 1
    assert 1e-4 < ratio.abs().max() <= Packed(4, 3).row_sum_bound + 1e-6


def test_a_row_far_below_zero_survives_tiles_without_a_key():
    scores = torch.full((1, 16), -1000.0)
    valid = torch.arange(16) < 8
    rows = walk(scores.masked_fill(~valid, -torch.inf), valid, Softmax(), Semantics(tile=8, tau=0))
    assert (rows.weights * rows.scale[..., None]).sum() == 8
