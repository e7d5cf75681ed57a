"""The lattices against their scalar twins, their envelopes, their clamps, and what tells them from one another."""

import dataclasses
import math

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import twins_lattices as twins

from softmaxlab import divergence, operators
from softmaxlab.backends import reference
from softmaxlab.conditions import Condition
from softmaxlab.errors import LabError
from softmaxlab.operators import (
    H15,
    SQ,
    FA4Poly,
    ILPoT,
    ILPoTH15,
    ILPoTHA,
    Log2P,
    LogSqrt2P,
    PoT,
    RowmaxAnchored,
    RowmaxPoT,
    S,
    Softmax,
    Temperature,
)

CLAMPS = ("paper", "zero", "none")
FAMILY = [
    *(H15(clamp=c) for c in CLAMPS),
    *(S(clamp=c) for c in CLAMPS),
    *(SQ(k=k) for k in range(14)),
    *(SQ(k=k, clamp=c) for k in (0, 3) for c in ("zero", "none")),
]
POLYNOMIALS = [FA4Poly(degree=d) for d in (1, 2, 3)]
PROBABILITY = [
    cls(bits=bits, renormalise=r, tail=t)
    for cls in (Log2P, LogSqrt2P)
    for bits in (8, 4)
    for r in ("yes", "no")
    for t in ("clamp", "drop")
]
ABSOLUTE = [*PROBABILITY, ILPoT(), ILPoTHA(), ILPoTH15()]
NEW = [*FAMILY, *POLYNOMIALS, *ABSOLUTE]
OLD_ANCHORED = [
    Softmax(),
    Temperature(alpha=0.7),
    *(PoT(m=m) for m in (0.5, 1.0, 1.5, 2.0)),
    *(RowmaxPoT(K_max=12, tail=t) for t in ("clamp", "drop")),
]
ANCHORED = [*FAMILY, *POLYNOMIALS, *OLD_ANCHORED]
ENVELOPED = [op for op in [*NEW, *OLD_ANCHORED] if op.envelope is not None]
#: Doubling the weight with every octave, as 2^x does.
PERIODIC = [op for op in ANCHORED if not isinstance(op, Temperature | RowmaxPoT) and op not in (PoT(m=0.5), PoT(m=1.5))]


def fields(operator):
    return {f.name: getattr(operator, f.name) for f in dataclasses.fields(operator)}


def twin(operator, row):
    if operator.name in twins.ANCHORED:
        return twins.anchored(row, operator.name, fields(operator))
    return getattr(twins, operator.name)(row, **fields(operator))


def on_row(operator, row):
    return operator(torch.tensor(row, dtype=torch.float32), torch.ones(len(row), dtype=torch.bool))


def rows(rng):
    for n in (1, 2, 3, 20, 100, 400):
        for scale in (0.01, 3.0, 40.0):
            yield (rng.standard_normal(n) * scale).astype(np.float32).astype(float).tolist()
    yield [1.5] * 7
    yield [0.0, 0.0, -1.0, -1.0, 2.0, 2.0]


@pytest.mark.parametrize("operator", [*NEW, *OLD_ANCHORED], ids=str)
def test_tensor_code_equals_scalar_twin(operator):
    for row in rows(np.random.default_rng(1)):
        got = on_row(operator, row).double().numpy()
        np.testing.assert_allclose(got, twin(operator, row), rtol=1e-5, atol=1e-37)


@pytest.mark.parametrize("operator", ANCHORED, ids=str)
def test_the_weight_at_an_exponent_is_the_weight_of_the_row(operator):
    torch.manual_seed(1)
    x = -torch.rand(500, dtype=torch.float64) * 100
    x[0] = 0
    want = [twins.ANCHORED[operator.name](v, **fields(operator)) for v in x.tolist()]
    torch.testing.assert_close(operator.at(x).double(), torch.tensor(want, dtype=torch.float64), rtol=1e-6, atol=1e-37)
    scores = torch.randn(20, 30) * 8
    valid = torch.rand(20, 30) < 0.8
    valid[3] = False
    scores = scores.masked_fill(~valid, -torch.inf)
    by_hand = operator.at(operators.exponents(scores, operators.row_max(scores))).masked_fill(~valid, 0)
    got = operator(scores, valid)
    if isinstance(operator, Softmax | Temperature):
        torch.testing.assert_close(got, by_hand, rtol=2e-6, atol=1e-37)
    else:
        assert torch.equal(got, by_hand)


@pytest.mark.parametrize("operator", NEW, ids=str)
def test_masked_keys_weigh_nothing_and_change_nothing(operator):
    torch.manual_seed(2)
    scores, valid = torch.randn(4, 30) * 5, torch.rand(4, 30) < 0.6
    valid[:, 3] = True
    valid[3] = False
    p = operators.probabilities(operator, scores, valid)
    assert (p[~valid] == 0).all()
    assert (p[3] == 0).all(), "a row without a key attends to nothing"
    if operator.normalised:
        torch.testing.assert_close(p[:3].sum(-1), torch.ones(3))
    for i in range(3):
        alone = operators.probabilities(operator, scores[i, valid[i]], torch.ones(1, dtype=torch.bool))
        torch.testing.assert_close(p[i, valid[i]], alone)


@pytest.mark.parametrize("operator", NEW, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_scores_that_are_not_finite_are_never_hidden(operator, bad):
    scores = torch.tensor([[0.0, bad, 1.0], [0.0, 1.0, 2.0]])
    p = operators.probabilities(operator, scores, torch.ones(2, 3, dtype=torch.bool))
    assert p[0].isnan().all()
    assert p[1].isfinite().all()


@pytest.mark.parametrize("operator", [op for op in NEW if op.normalised], ids=str)
@pytest.mark.parametrize("row", [[3.0], [2.0, 2.0, 2.0], [-7.0, -7.0]])
def test_one_key_and_equal_scores_are_uniform(operator, row):
    p = operators.probabilities(operator, torch.tensor(row), torch.ones(len(row), dtype=torch.bool))
    torch.testing.assert_close(p, torch.full((len(row),), 1 / len(row)))


def log_weight_error(operator, scores):
    """ε of the keys of rows (…, n) whose weight the operator neither clamps nor FP32 denormalises."""
    exact = divergence.exact_rows(scores)
    offset = operator.anchor_offset(exact)[..., None] if hasattr(operator, "anchor_offset") else 0.0
    minus_delta = scores.double() - exact.top[..., None]
    w = operator(scores, torch.ones_like(scores, dtype=torch.bool)).double()
    kept = (minus_delta > -80) & (w > 0)
    if isinstance(operator, Log2P | LogSqrt2P):
        kept &= (exact.log_z[..., None] - minus_delta) / math.log(2) < (2**operator.bits - 1.5) / operator.steps
    return (torch.log(w) - minus_delta - offset)[kept]


@hypothesis.given(
    row=st.lists(st.floats(-90, 60, width=32), min_size=1, max_size=40), which=st.integers(0, len(ENVELOPED) - 1)
)
@hypothesis.settings(deadline=None, max_examples=1500)
def test_errors_lie_in_their_envelopes(row, which):
    operator = ENVELOPED[which]
    low, high = operator.envelope
    # FP32's rounding of the scores' difference, and of an absolute score, moves the lattice by this much.
    slack = 2e-6 + 2**-23 * max(map(abs, row))
    epsilon = log_weight_error(operator, torch.tensor(row, dtype=torch.float32))
    assert (epsilon >= low - slack).all()
    assert (epsilon <= high + slack).all()


@pytest.mark.parametrize("operator", ENVELOPED, ids=str)
def test_envelopes_are_attained(operator):
    """A bound that nothing comes near to would hold for any operator."""
    torch.manual_seed(3)
    epsilon = log_weight_error(operator, -torch.rand(8000, 6) * 7)
    low, high = operator.envelope
    assert epsilon.min().item() == pytest.approx(low, abs=3e-3)
    assert epsilon.max().item() == pytest.approx(high, abs=3e-3)


def test_envelopes_are_those_of_the_definitions():
    octaves = [e / math.log(2) for e in H15().envelope]
    assert octaves == pytest.approx([-0.25, math.log2(1.5) - 0.25])
    assert octaves[1] == pytest.approx(0.33496, abs=5e-6), "paper B.1"
    assert SQ(k=0).envelope == pytest.approx(PoT(m=1.0).envelope)
    widths = [high - low for low, high in (SQ(k=k).envelope for k in range(14))]
    assert widths == sorted(widths, reverse=True)
    assert SQ(k=13).envelope == pytest.approx(S().envelope, abs=1e-4)
    for degree, error in ((1, 3.9e-2), (2, 2.1e-3), (3, 8.8e-5)):
        worst = max(abs(math.expm1(e)) for e in FA4Poly(degree=degree).envelope)
        assert worst == pytest.approx(error, rel=0.02)
    assert RowmaxPoT(K_max=12).envelope is None
    assert Temperature(alpha=0.5).envelope is None


def test_rowmax_h15_is_the_member_k_1_and_s_the_limit():
    x = -torch.rand(20_000, dtype=torch.float64) * 130
    x[:520] = -torch.arange(520) / 4  # every tie of k = 0 and 1
    for clamp in CLAMPS:
        assert torch.equal(H15(clamp=clamp).at(x), SQ(k=1, clamp=clamp).at(x))
    assert SQ(k=0).at(torch.tensor([-0.5, -1.5, -2.5], dtype=torch.float64)).tolist() == [1, 0.25, 0.25]
    assert H15().at(torch.tensor([-0.25, -0.75, -1.25], dtype=torch.float64)).tolist() == [1, 0.5, 0.5]
    steep = x[x > -120]
    errors = [(SQ(k=k).at(steep).double() / S().at(steep).double()).log2().abs().max().item() for k in range(14)]
    assert all(e <= 2.0 ** -(k + 1) / math.log(2) + 1e-6 for k, e in enumerate(errors))
    assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize("operator", [H15, S, lambda clamp: SQ(k=3, clamp=clamp)])
def test_what_each_clamp_does(operator):
    x = torch.tensor([-126.0, -126.5, -127.0, -140.0, -1000.0, -torch.inf], dtype=torch.float64)
    least = 2.0**-126
    paper, zero, none = (operator(clamp=c).at(x).tolist() for c in CLAMPS)
    assert paper == [least] * 6
    assert zero == [least, least / 2, 0, 0, 0, 0]
    assert none[:3] == [least, 0.75 * least, least / 2]
    assert none[3] == 2.0**-140
    assert none[4:] == [0, 0]
    # The rows: one key far below, and none at all. A masked key is 0 whatever a kernel would make of it.
    scores = torch.tensor([[0.0, -200.0, -torch.inf], [-torch.inf] * 3])
    valid = scores > -torch.inf
    for clamp, far in (("paper", least), ("zero", 0.0), ("none", 0.0)):
        assert operator(clamp=clamp)(scores, valid).tolist() == [[1, far, 0], [0, 0, 0]]


@hypothesis.given(x=st.floats(-100, 8), octaves=st.integers(0, 8), which=st.integers(0, len(PERIODIC) - 1))
def test_a_lagging_anchor_sees_the_same_lattice_an_octave_up(x, octaves, which):
    """At positive exponents the operators go on as they stand: whole octaves double the weight."""
    operator = PERIODIC[which]
    x = round(x * 2**20) / 2**20  # so that the shift is exact
    low, high = operator.at(torch.tensor([x, x + octaves], dtype=torch.float64)).tolist()
    assert high == pytest.approx(low * 2**octaves, rel=1e-6)


def test_absolute_lattices_go_on_below_zero_and_can_exceed_the_maximum():
    n = list(range(-9, 4))
    row = [0.5 * math.log(2) * i * (1 + 1e-6) for i in n]
    w = on_row(ILPoTH15(), row).double()
    assert w.tolist() == [(1.5 if i % 2 else 1.0) * 2.0 ** (i // 2 - 1) for i in n]
    above = on_row(ILPoTHA(), [0.24 * math.log(2), 0.2501 * math.log(2), 0.26 * math.log(2)])
    assert above[1].item() > 1
    assert above[2].item() == 1


def test_log2_p_is_the_absolute_lattice_up_to_the_phase_of_the_row():
    torch.manual_seed(4)
    row = torch.randn(200).double() * 3
    log_p = (row - torch.logsumexp(row, -1)).float()
    valid = torch.ones(200, dtype=torch.bool)
    same = operators.probabilities(ILPoT(), log_p, valid)
    differ = ~torch.isclose(operators.probabilities(Log2P(), log_p, valid), same, rtol=1e-5)
    # Halves round up in −log2 p and in log2 p, so nothing but exact ties could differ.
    assert not differ.any()


@pytest.mark.parametrize("operator", [op for op in PROBABILITY if not op.normalised], ids=str)
def test_weights_that_are_not_renormalised_reach_the_values_as_they_are(operator):
    torch.manual_seed(5)
    q, k, v = torch.randn(1, 2, 40, 8) * 2, torch.randn(1, 1, 40, 8), torch.randn(1, 1, 40, 8)
    out = reference.attend(q, k, v, operator, scaling=0.5)
    row = (0.5 * q[0, 1, 39] @ k[0, 0].T).tolist()
    w = torch.tensor(twin(operator, row))
    assert abs(w.sum().item() - 1) > 1e-3
    torch.testing.assert_close(out[0, 39, 1], w.float() @ v[0, 0], rtol=1e-5, atol=1e-6)
    renormalised = dataclasses.replace(operator, renormalise="yes")
    scaled = reference.attend(q, k, v, renormalised, scaling=0.5)
    torch.testing.assert_close(scaled[0, 39, 1] * w.float().sum(), out[0, 39, 1], rtol=1e-4, atol=1e-5)


def test_four_bits_clamp_or_drop_the_tail():
    row = [0.0, -11.0, -12.0]  # −log2 p is 0.0, 15.9 and 17.3: q is 15 at most
    assert on_row(Log2P(bits=4), row).tolist() == [1, 2**-15, 2**-15]
    assert on_row(Log2P(bits=4, tail="drop"), row).tolist() == [1, 0, 0]


def test_the_phase_is_where_the_row_maximum_lies_on_the_lattice():
    torch.manual_seed(6)
    scores = torch.randn(300, 50) * 3
    exact = divergence.exact_rows(scores)
    for operator in (ILPoT(), Log2P(), LogSqrt2P(), ILPoTHA()):
        phase = operator.phase(exact)
        assert (phase.abs() <= 0.5).all()
        assert phase.std() > 0.2, "rows lie anywhere on an absolute lattice"
        if isinstance(operator, ILPoTHA):
            continue  # its maximum is set to 1
        # The weight of the row maximum is off by exactly its phase, in steps of the lattice.
        w = operator(scores, torch.ones(50, dtype=torch.bool)).double().amax(-1)
        offset = operator.anchor_offset(exact) if hasattr(operator, "anchor_offset") else 0.0
        steps = getattr(operator, "steps", 1)
        torch.testing.assert_close(phase, (torch.log2(w) - offset / math.log(2)) * steps, atol=2e-6, rtol=0)
    torch.testing.assert_close(ILPoT().phase(exact), divergence.absolute_octave_phase(exact))
    assert torch.equal(ILPoTH15().phase(exact), ILPoTHA().phase(exact))


@pytest.mark.parametrize("operator", NEW, ids=str)
def test_text_form_parses_back(operator):
    assert operators.parse(str(operator)) == operator
    assert Condition.parse(f"{operator}@0-2,5") == Condition(operator, (0, 1, 2, 5))


def test_names_are_distinct_and_defaults_are_the_papers():
    assert len({op.json() for op in NEW}) == len(NEW)
    assert [str(op) for op in (H15(), S(), SQ(k=1), Log2P())] == ["h15()", "s()", "sq(k=1)", "log2p()"]
    assert all(isinstance(op, RowmaxAnchored) for op in ANCHORED)
    assert not any(isinstance(op, RowmaxAnchored) for op in ABSOLUTE)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("sq(k=14)", "k is 14, but must be from 0 to 13"),
        ("sq(k=-1)", "k is -1"),
        ("sq()", "needs a value for k"),
        ("h15(clamp=hard)", "paper, zero, none"),
        ("s(clamp=)", "paper, zero, none"),
        ("log2p(bits=0)", "bits is 0"),
        ("log_sqrt2p(bits=9)", "bits is 9"),
        ("log2p(renormalise=maybe)", "yes, no"),
        ("log2p(tail=cut)", "clamp, drop"),
        ("fa4_poly(degree=4)", "degree is 4, but must be 1, 2 or 3"),
        ("fa4_poly()", "needs a value for degree"),
        ("ilpot(k=1)", "no field 'k'"),
    ],
)
def test_bad_text_is_refused_in_one_sentence(text, says):
    with pytest.raises(LabError) as caught:
        operators.parse(text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
