"""The bit forms against the arithmetic form, and what they give where the paper did not look."""

from fractions import Fraction

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch

from softmaxlab import bits
from softmaxlab.errors import LabError
from softmaxlab.operators import SQ

LEAST = 2.0**-126


def test_the_papers_inputs_are_as_many_as_it_says():
    x = bits.paper_inputs()
    assert len(x) == 2_295_040
    assert x.dtype == torch.float32
    assert x.min() == -126
    assert x.max() == 0
    multiples = x[2_000_127:].double() * 2**14 / 7
    assert torch.equal(multiples, -torch.arange(294_913, dtype=torch.float64)), "exact in FP32, the last is −126"
    for k in range(14):
        doubled = multiples * 7 / 2**14 * 2 ** (k + 1)
        ties = (doubled == doubled.round()) & (doubled % 2 == 1)
        assert ties.any(), "they hold ties for every k, as the paper says"


def test_every_form_equals_the_arithmetic_form_on_the_papers_inputs():
    counts = bits.comparison()
    assert (counts.different == 0).all()
    assert (counts.compared == 2_295_040).all()
    assert (counts.equal == counts.compared).all()
    members = counts.groupby("form").k.apply(list).to_dict()
    assert members == {"paper": list(range(14)), "folded": list(range(1, 14)), "fused": [7]}


def test_every_form_equals_it_at_ties_across_the_clamps_and_above_the_anchor():
    counts = bits.comparison(inputs=("ties", "positive", "clamped"), clamps=("paper", "zero"))
    assert (counts.different == 0).all()
    ties = counts[(counts.inputs == "ties") & (counts.form == "paper")].groupby("k").compared.first()
    assert ties.to_dict() == {k: 134 * 2**k for k in range(14)}
    assert bits.positive_inputs().max() == 8


def test_a_wrong_constant_or_shift_is_seen():
    """The comparison is not blind: what the folded form refuses at k = 0 would differ at every other tie."""
    x = bits.tie_inputs(0)
    odd = ((x + (bits.MAGIC + 127)).view(torch.int32) << 23).view(torch.float32)
    assert (odd != SQ(k=0).at(x.double())).all()
    with pytest.raises(LabError, match="ties to odd"):
        bits.folded_form(x, 0)
    # With k = 14 a bit of the constant stays in the word.
    r = torch.tensor([0.0]) + bits.MAGIC
    assert ((r.view(torch.int32) << 9) + bits.ONE).view(torch.float32).item() != 1


def test_no_form_depends_on_how_integers_overflow():
    """The int32 operations wrap around, as those on Python's integers modulo 2^32 do."""
    x = torch.tensor([0.0, -0.5, -1.25, -125.5, -126.0, 7.75])
    for k in (0, 1, 7, 13):
        r = np.float32(bits.MAGIC) + (x.numpy() * np.float32(2**k))
        words = [((int(w) << (23 - k)) + bits.ONE) % 2**32 for w in r.view(np.uint32)]
        want = np.array(words, dtype=np.uint32).view(np.float32)
        np.testing.assert_array_equal(bits.paper_form(x, k).numpy(), want)


floats = st.floats(-(2.0**20), 2.0**20, width=32)


@hypothesis.given(a=floats, b=floats, c=st.floats(-(2.0**24), 2.0**24, width=32))
@hypothesis.settings(deadline=None, max_examples=500)
def test_the_fma_rounds_once(a, b, c):
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    hypothesis.assume(exact == 0 or abs(exact) > 2.0**-100)
    got = bits.fma(torch.tensor([a]), torch.tensor([b]), torch.tensor([c])).numpy()[0]
    below, above = np.nextafter(got, np.float32(-np.inf)), np.nextafter(got, np.float32(np.inf))
    error = abs(exact - Fraction(float(got)))
    for other in (below, above):
        further = abs(exact - Fraction(float(other)))
        assert error < further or (error == further and got.view(np.int32) % 2 == 0)


def test_the_fma_is_not_fooled_by_a_tie_that_fp64_makes():
    """The exact sum lies 2^-70 below the middle of two FP32 numbers; FP64 rounds it onto the middle."""
    a, b = torch.tensor([2.0**-12 * (1 + 2.0**-23)]), torch.tensor([2.0**-12 * (1 - 2.0**-23)])
    c = torch.tensor([1 + 2.0**-23])
    twice_rounded = (a.double() * b.double() + c.double()).float()
    assert twice_rounded.item() == 1 + 2.0**-22
    assert bits.fma(a, b, c).item() == 1 + 2.0**-23


@hypothesis.given(
    row=st.lists(st.floats(-300, 300, width=32), min_size=1, max_size=20), scale=st.floats(2.0**-6, 2.0, width=32)
)
@hypothesis.settings(deadline=None, max_examples=200)
def test_the_fused_form_is_the_lattice_shifted_by_less_than_a_step(row, scale):
    scores = torch.tensor(row)
    top = scores.max()
    got = bits.fused_form(scores, scale, top, clamp="zero")
    shift = bits.fused_shift(scale, top)
    assert abs(shift.item()) <= 2.0**-8
    # In exact arithmetic: n = RNE(2^7·(scale·(s − m) + shift)), and the weight is S(n/2^7).
    factor = Fraction(float(np.float32(scale * 2**7)))
    for s, w in zip(scores.tolist(), got, strict=True):
        n = round(factor * (Fraction(s) - Fraction(top.item())) + Fraction(shift.item()) * 2**7)
        want = SQ(k=7, clamp="zero").at(torch.tensor([n / 2**7], dtype=torch.float64))
        assert w.item() == want.item()


def table(k):
    return bits.special_cases(k).set_index(["case", "clamp"])


@pytest.mark.parametrize("k", [0, 1, 2, 7, 13])
def test_the_table_of_special_cases(k):
    cases = table(k)
    for case in ("tie, to the even neighbour above", "minus zero", "at the paper's clamp", "the kernel's largest lag"):
        for clamp in bits.CLAMPS:
            assert cases.loc[(case, clamp), "paper"] == cases.loc[(case, clamp), "arithmetic"]
    assert cases.loc[("the kernel's largest lag", "paper"), "paper"] == 256
    for form in ("paper", "folded") if k else ("paper",):
        value = cases[form]
        assert value["masked key", "paper"] == LEAST, "the paper's clamp gives masked keys weight"
        assert value["masked key", "zero"] == 0
        assert value["NaN", "paper"] == LEAST, "a clamp hides NaN"
        assert value["NaN", "zero"] == 0
        assert not 0 <= value["below both clamps", "none"] < LEAST, "without a clamp the exponent wraps around"
    assert cases.loc[("masked key", "none"), "paper"] == 1
    assert np.isnan(cases.loc[("NaN", "paper"), "arithmetic"])
    assert len(cases) == 14 * 3


def test_fully_masked_rows_by_clamp():
    rows = bits.masked_rows(1).set_index(["clamp", "form"])
    assert rows.output.to_dict() == {
        ("paper", "paper"): "mean of the values",
        ("paper", "folded"): "mean of the values",
        ("zero", "paper"): "0",
        ("zero", "folded"): "0",
        ("none", "paper"): "mean of the values",
        ("none", "folded"): "0",
    }
    assert set(bits.masked_rows(0).form) == {"paper"}


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: bits.paper_form(torch.zeros(1), 14), "k is 14, but must be from 0 to 13"),
        (lambda: bits.folded_form(torch.zeros(1), -1), "k is -1"),
        (lambda: bits.paper_form(torch.zeros(1, dtype=torch.float64), 1), "torch.float64"),
        (lambda: bits.paper_form(torch.zeros(1), 1, "hard"), "paper, zero, none"),
        (lambda: bits.fused_form(torch.zeros(1).half(), 1.0, 0.0), "torch.float16"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(call, says):
    with pytest.raises(LabError) as caught:
        call()
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
