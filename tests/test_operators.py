"""Operators against their scalar twins, their analytic envelopes and their invariances."""

import dataclasses
import math

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import twins

from softmaxlab import conditions, operators
from softmaxlab.conditions import Condition, geometry, same_support, support
from softmaxlab.errors import LabError
from softmaxlab.operators import Grid, MeanThreshold, PoT, Rescue, RowmaxPoT, Softmax, Temperature, TopK
from softmaxlab.operators.grid import edge_fractions, interval_closed_form, interval_search
from softmaxlab.operators.support import kept_counts

GRIDS = [
    Grid(K=K, R=R, recon=recon, map=map_)
    for K in (1, 2, 16, 21, 64)
    for R in (0.25, 1.0, 4.0, 8.0)
    for recon in ("upper", "nearest", "lerp")
    for map_ in ("exp", "linear")
]
SUPPORTS = [TopK(f=f, weights=w) for f in (1.0, 0.5, 0.15, 0.0065) for w in ("softmax", "uniform")]
LATTICES = [
    *(PoT(m=m) for m in (0.5, 1.0, 1.5, 2.0, 4.0)),
    *(RowmaxPoT(K_max=k, tail=tail) for k in (1, 12, 48) for tail in ("clamp", "drop")),
]
TEMPERATURES = [Temperature(alpha=a) for a in (0.3, 0.95, 1.7)]
PLAIN = [Softmax(), *SUPPORTS, MeanThreshold(), MeanThreshold(weights="uniform"), *GRIDS, *LATTICES, *TEMPERATURES]
RESCUED = [Rescue(of=of, q=q) for of in (TopK(f=0.15), PoT(m=1.0), *TEMPERATURES) for q in (0.5, 0.9)]
ALL = [*PLAIN, *RESCUED]
# Weights relative to the row maximum: not those of the uniform and linear controls, nor renormalised ones.
EXPONENTIAL = [
    op for op in PLAIN if getattr(op, "weights", "softmax") == "softmax" and getattr(op, "map", "exp") == "exp"
]


def twin(operator, row):
    arguments = {f.name: getattr(operator, f.name) for f in dataclasses.fields(operator)}
    if operator.name == "rescue":
        arguments["of"] = twin(operator.of, row)
    return getattr(twins, operator.name)(row, **arguments)


def on_row(operator, row):
    scores = torch.tensor(row, dtype=torch.float32)
    return operator(scores, torch.ones(len(row), dtype=torch.bool))


def rows(rng):
    """Rows that meet the definitions' corners: lengths 1 to 400, narrow and wide, with ties."""
    for n in (1, 2, 3, 20, 100, 400):
        for scale in (0.01, 3.0, 40.0):
            yield (rng.standard_normal(n) * scale).astype(np.float32).astype(float).tolist()
    yield [1.5] * 7
    yield [0.0, 0.0, -1.0, -1.0, 2.0, 2.0]


@pytest.mark.parametrize("operator", ALL, ids=str)
def test_tensor_code_equals_scalar_twin(operator):
    rng = np.random.default_rng(1)
    for row in rows(rng):
        got = on_row(operator, row).double().numpy()
        want = np.array(twin(operator, row))
        if operator.name == "grid":
            # A level may differ by one interval where FP32 cannot tell on which side of an edge u lies.
            off = ~np.isclose(got, want, rtol=3e-5, atol=1e-7)
            assert off.sum() <= _near_an_edge(operator, row), (row, got[off], want[off])
        elif operator.name == "rescue":
            np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-12)
        else:
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-30)


def _near_an_edge(grid, row):
    """How many scores lie within FP32 rounding of an edge, or of a midpoint for the nearest edge."""
    u, C = np.array(row) - min(row), max(row) - min(row)
    edges = np.array(twins.grid_edges(C, grid.K, grid.R))
    marks = (edges[1:] + edges[:-1]) / 2 if grid.recon == "nearest" else edges
    return int((np.abs(u[:, None] - marks).min(1) <= 2e-6 * max(C, max(map(abs, row)))).sum())


@pytest.mark.parametrize("operator", ALL, ids=str)
def test_masked_keys_weigh_nothing_and_change_nothing(operator):
    torch.manual_seed(2)
    scores, valid = torch.randn(4, 30) * 5, torch.rand(4, 30) < 0.6
    valid[:, 3] = True
    valid[3] = False
    p = operators.probabilities(operator, scores, valid)
    assert (p[~valid.expand_as(p)] == 0).all()
    assert (p[3] == 0).all(), "a row without a key attends to nothing"
    torch.testing.assert_close(p[:3].sum(-1), torch.ones(3))
    for i in range(3):
        alone = operators.probabilities(operator, scores[i, valid[i]], torch.ones(1, dtype=torch.bool))
        torch.testing.assert_close(p[i, valid[i]], alone)
    poisoned = scores.masked_fill(~valid, torch.nan)
    assert torch.equal(operators.probabilities(operator, poisoned, valid), p)


@pytest.mark.parametrize("operator", ALL, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_scores_that_are_not_finite_are_never_hidden(operator, bad):
    scores = torch.tensor([[0.0, bad, 1.0], [0.0, 1.0, 2.0]])
    p = operators.probabilities(operator, scores, torch.ones(2, 3, dtype=torch.bool))
    assert p[0].isnan().all()
    assert p[1].isfinite().all()


@pytest.mark.parametrize("operator", ALL, ids=str)
@pytest.mark.parametrize("row", [[3.0], [2.0, 2.0, 2.0], [-7.0, -7.0]])
def test_one_key_and_equal_scores_are_uniform(operator, row):
    p = operators.probabilities(operator, torch.tensor(row), torch.ones(len(row), dtype=torch.bool))
    torch.testing.assert_close(p, torch.full((len(row),), 1 / len(row)))


@pytest.mark.parametrize("operator", EXPONENTIAL, ids=str)
def test_weights_lie_in_the_unit_interval_and_the_maximum_has_weight_one(operator):
    torch.manual_seed(3)
    scores = torch.randn(50, 200) * torch.logspace(-2, 2, 50)[:, None]
    w = operator(scores, torch.ones(200, dtype=torch.bool))
    assert ((w >= 0) & (w <= 1)).all()
    assert (w.gather(-1, scores.argmax(-1, keepdim=True)) == 1).all()


@hypothesis.given(
    row=st.lists(st.integers(-(2**12), 2**12), min_size=1, max_size=40),
    shift=st.integers(-(2**12), 2**12),
    which=st.integers(0, len(ALL) - 1),
)
@hypothesis.settings(deadline=None, max_examples=200)
def test_a_shift_of_the_row_changes_nothing(row, shift, which):
    # Multiples of 2^-8 up to 2^5 in size: the shift itself is exact in FP32, so equality can be exact too.
    operator = ALL[which]
    base = torch.tensor(row, dtype=torch.float32) / 256
    valid = torch.ones(len(row), dtype=torch.bool)
    assert torch.equal(operator(base, valid), operator(base + shift / 256, valid))


@hypothesis.given(
    row=st.lists(st.floats(-50, 50, width=32), min_size=2, max_size=40),
    R=st.sampled_from([0.25, 1.0, 4.0, 8.0]),
    recon=st.sampled_from(["upper", "nearest", "lerp"]),
    K=st.sampled_from([1, 2, 16, 64]),
)
@hypothesis.settings(deadline=None, max_examples=200)
def test_grid_errors_lie_in_their_envelopes(row, R, recon, K):
    """Paper A.5: 0 ≤ ε ≤ h for the upper edge, |ε| ≤ h/2 for the nearest, ε ≥ 0 for interpolation."""
    s = np.array(row)
    C = s.max() - s.min()
    w = on_row(Grid(K=K, R=R, recon=recon), row).double().numpy()
    kept = w > 1e-35  # below, FP32 weights are denormal and their logarithm is coarse
    epsilon = (np.log(w[kept]) - (s - s.max())[kept]) if kept.any() else np.zeros(0)
    h = np.diff(C * edge_fractions(K, R).numpy())
    u = (s - s.min())[kept]
    index = interval_search(torch.tensor(u / C if C else np.ones_like(u)), K, R).numpy()
    h = h[np.clip(index, 0, K - 1)]
    slack = 1e-5 * (1 + C)
    low, high = {"upper": (0, h), "nearest": (-h / 2, h / 2), "lerp": (0, np.maximum(h, 0))}[recon]
    # At an edge FP32 may put u into the interval below: one interval's envelope widened by its neighbour's.
    assert (epsilon >= low - slack).all()
    assert (epsilon <= high + slack).all()


@pytest.mark.parametrize("recon", ["upper", "nearest", "lerp"])
@pytest.mark.parametrize("R", [0.25, 1.0, 4.0])
def test_many_intervals_tend_to_softmax(recon, R):
    torch.manual_seed(4)
    scores, valid = torch.randn(8, 64) * 4, torch.ones(64, dtype=torch.bool)
    exact = operators.probabilities(Softmax(), scores, valid)
    errors = [
        (operators.probabilities(Grid(K=K, R=R, recon=recon), scores, valid) - exact).abs().max().item()
        for K in (4, 64, 1024, 16384)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 2e-3


@pytest.mark.parametrize("K", [1, 2, 3, 16, 21, 64, 1000])
@pytest.mark.parametrize("R", [0.01, 0.25, 1.0, 4.0, 8.0, 100.0])
def test_closed_form_agrees_with_a_search_over_the_edges(K, R):
    t = torch.cat([torch.rand(20_000, dtype=torch.float64), torch.tensor([0.0, 1.0], dtype=torch.float64)])
    assert torch.equal(interval_closed_form(t, K, R), interval_search(t, K, R))
    single = t.float()
    differ = interval_closed_form(single, K, R) != interval_search(single, K, R)
    near = (single[differ, None].double() - edge_fractions(K, R)).abs().amin(-1)
    assert (near < 1e-6).all(), "they may differ only where FP32 cannot tell the sides apart"
    assert interval_closed_form(torch.tensor([1.0]), K, R).item() == K - 1


def test_the_width_ratio_of_the_outer_intervals_is_R():
    for R in (0.25, 1.0, 4.0, 8.0):
        widths = edge_fractions(21, R).diff()
        assert (widths[0] / widths[-1]).item() == pytest.approx(R)
        assert widths.sum().item() == pytest.approx(1)


def test_kept_counts_are_exact_where_float32_is_not():
    n = torch.arange(1, 2049)
    exact = kept_counts(0.15, 2048)[1:]
    single = torch.ceil(n.float() * torch.tensor(0.15)).long().clamp(min=1)
    assert (exact != single).sum().item() == 39
    assert kept_counts(0.01, 100)[100].item() == 1, "0.01 means one hundredth, not the nearest binary float"


def test_pooled_densities_are_those_the_paper_reports():
    assert round(100 * operators.pooled_density(0.01, 2048), 2) == 1.05
    assert round(100 * operators.pooled_density(0.0065, 2048), 2) == 0.70


@hypothesis.given(
    row=st.lists(st.floats(-60, 60, width=32), min_size=1, max_size=40), m=st.sampled_from([0.5, 1.0, 2.0, 4.0])
)
@hypothesis.settings(deadline=None, max_examples=200)
def test_lattice_errors_lie_in_their_envelope(row, m):
    """Paper A.6: |ε| ≤ ln 2/(2m); the slack is FP32's rounding of Δ."""
    s = np.array(row)
    w = on_row(PoT(m=m), row).double().numpy()
    kept = w > 1e-37
    epsilon = np.log(w[kept]) - (s - s.max())[kept]
    assert (np.abs(epsilon) <= math.log(2) / (2 * m) + 1e-5).all()


def test_the_largest_clamp_is_the_lattice_without_one():
    torch.manual_seed(7)
    scores, valid = torch.randn(20, 100) * 3, torch.ones(100, dtype=torch.bool)
    assert torch.equal(RowmaxPoT(K_max=200)(scores, valid), PoT(m=1.0)(scores, valid))
    dropped = RowmaxPoT(K_max=5, tail="drop")(scores, valid)
    assert set(dropped.unique().tolist()) <= {0.0, *(2.0**-d for d in range(6))}


def test_rescue_restores_the_mass_of_both_sides():
    torch.manual_seed(8)
    scores, valid = torch.randn(30, 80) * 3, torch.ones(80, dtype=torch.bool)
    p = operators.probabilities(Softmax(), scores, valid)
    for q in (0.5, 0.9, 0.99):
        inside = operators.high_mass_set(p.double(), q)
        assert ((p * inside).sum(-1) >= q - 1e-6).all()
        smallest = p.masked_fill(~inside, 2).amin(-1)
        assert ((p * inside).sum(-1) - smallest < q).all(), "one key fewer would not reach q"
        rescued = operators.probabilities(Rescue(of=Temperature(alpha=0.5), q=q), scores, valid)
        torch.testing.assert_close((rescued * inside).sum(-1), (p * inside).sum(-1), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(operators.probabilities(Rescue(of=Softmax()), scores, valid), p)


def test_the_sets_of_conditions_are_canonical_and_as_many_as_the_paper_says():
    for name, section in conditions.SECTIONS.items():
        assert conditions.canonical(section()) == section(), name
    assert len(conditions.response_map()) == 56
    assert len(set(conditions.response_map())) == 56


def test_ties_at_the_last_kept_score_all_stay():
    assert on_row(TopK(f=0.25, weights="uniform"), [1.0, 1.0, 1.0, 0.0]).tolist() == [1, 1, 1, 0]


@pytest.mark.parametrize("operator", ALL, ids=str)
def test_text_form_parses_back(operator):
    assert operators.parse(str(operator)) == operator
    assert Condition.parse(f"{operator}@0-2,5") == Condition(operator, (0, 1, 2, 5))


@hypothesis.given(K=st.integers(1, 10**6), R=st.floats(1e-300, 1e300), f=st.floats(1e-300, 1))
def test_no_float_is_rounded_into_a_name(K, R, f):
    for operator in (Grid(K=K, R=R), TopK(f=f)):
        assert operators.parse(str(operator)) == operator
    assert (str(Grid(K=K, R=R)) == str(Grid(K=K, R=1.0))) == (R == 1)


def test_canonical_json_holds_every_field_and_tells_conditions_apart():
    assert Grid(K=32, R=4.0).json() == '{"K":32,"R":4.0,"map":"exp","operator":"grid","recon":"nearest"}'
    texts = [*support(), *geometry()[1:], *(t for pair in same_support(30) for t in pair)]
    assert len({Condition.parse(t).json() for t in texts}) == len(texts)
    assert [str(Condition.parse(t)) for t in texts] == texts


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("spline(K=3)", "unknown operator 'spline'"),
        ("grid(K=0)", "K is 0"),
        ("grid(K=2.5)", "'2.5'"),
        ("grid(K=4,R=0)", "R is 0"),
        ("grid(K=4,R=nan)", "finite"),
        ("grid(R=4)", "needs a value for K"),
        ("grid(K=4,k=3)", "no field 'k'"),
        ("grid(K=4,K=5)", "twice"),
        ("grid(K=4,recon=median)", "nearest, upper, lerp"),
        ("topk(f=0)", "(0, 1]"),
        ("topk(f=1.5)", "f is 1.5"),
        ("topk(f=half)", "'half'"),
        ("topk(0.5)", "field=value"),
        ("topk()", "needs a value for f"),
        ("softmax(q=1)", "it has none"),
        ("mean_threshold(weights=rel)", "softmax, uniform"),
        ("pot(m=0)", "m is 0.0"),
        ("pot(m=-1)", "m is -1.0"),
        ("rowmax_pot(K_max=0)", "K_max is 0"),
        ("rowmax_pot(K_max=5,tail=cut)", "clamp, drop"),
        ("temperature(alpha=0)", "alpha is 0.0"),
        ("temperature(alpha=1e-46)", "from 1e-30 to 1e+30"),
        ("temperature(alpha=1e308)", "from 1e-30 to 1e+30"),
        ("pot(m=1e308)", "at most 1,073,741,824"),
        ("rowmax_pot(K_max=99999999999999999999999)", "from 1 to 1,074"),
        ("rescue(of=softmax(),q=1)", "(0, 1)"),
        ("rescue(q=0.9)", "needs a value for of"),
        ("rescue(of=nothing())", "unknown operator 'nothing'"),
        ("softmax", None),
        ("softmax()@", "'softmax()@'"),
        ("softmax()@5-2", "'5-2'"),
        ("grid(K=4", "name(field=value"),
    ],
)
def test_bad_text_is_refused_in_one_sentence(text, says):
    if says is None:
        assert Condition.parse(text) == Condition(Softmax())
        return
    with pytest.raises(LabError) as caught:
        Condition.parse(text)
    assert says in str(caught.value)
    assert "for f, " not in str(caught.value), "a field with a default need not be given"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("R", [1e-308, 1e-100, 1e-20, 1e-9, 1e4, 1e8, 1e300])
@pytest.mark.parametrize("K", [2, 3, 21, 64])
def test_widths_that_differ_by_any_factor_keep_the_definition(K, R):
    """FP32 has no logarithm of such a position: the row maximum, where it is of 0, once took the lowest level."""
    fractions = edge_fractions(K, R)
    assert fractions[0] == 0 and fractions[-1] == 1 and (fractions.diff() >= 0).all()
    rho, step = -math.log(R) / (K - 1), math.log(10) / 40
    exact = [float(np.expm1(a * rho) / np.expm1(K * rho)) if K * rho < 600 else None for a in range(K + 1)]
    for found, expected in zip(fractions.tolist(), exact, strict=True):
        assert expected is None or math.isclose(found, expected, rel_tol=1e-12)
    row = torch.cat([torch.tensor([0.0, 6.0]), 6 * torch.exp(-step * torch.arange(1, 200))])[None]
    for recon in ("nearest", "upper", "lerp"):
        w = Grid(K, R, recon)(row, torch.ones_like(row, dtype=torch.bool))
        assert w[0, 1] == 1, "the row maximum"
        ordered = w[0, row[0].argsort()]
        assert (ordered.diff() >= 0).all()


def test_the_catalogue_lists_every_operator_once():
    names = [text.partition("(")[0] for text, _ in operators.catalogue()]
    assert len(names) == len(set(names))
    assert {"softmax", "topk", "mean_threshold", "grid"} <= set(names)
    assert all(summary for _, summary in operators.catalogue())
