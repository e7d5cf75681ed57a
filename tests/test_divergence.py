"""Row statistics against scalar loops written from the definitions; the fast routes against the plain ones."""

import math

import pytest
import torch

from softmaxlab import divergence, fused, operators
from softmaxlab.divergence import LEAKAGE_Q, SUMS
from softmaxlab.errors import LabError
from softmaxlab.operators import high_mass_set

OPERATORS = (
    "softmax()",
    "pot(m=0.5)",
    "pot(m=2)",
    "rowmax_pot(K_max=3)",
    "rowmax_pot(K_max=3,tail=drop)",
    "temperature(alpha=0.6)",
    "temperature(alpha=1.7)",
    "grid(K=1)",
    "grid(K=9)",
    "grid(K=21,R=4)",
    "grid(K=21,R=0.25)",
    "grid(K=9,R=4,recon=upper)",
    "grid(K=9,R=4,recon=lerp)",
    "grid(K=9,recon=lerp)",
    "grid(K=9,recon=upper,map=linear)",
    "grid(K=9,R=4,recon=lerp,map=linear)",
    "mean_threshold()",
    "mean_threshold(weights=uniform)",
    "topk(f=0.3)",
)


def scalar_row(scores, weights):
    """Everything that is recorded of one row, from its valid scores and their weights as Python floats."""
    n, top = len(scores), max(scores)
    z = math.fsum(math.exp(s - top) for s in scores)
    p = [math.exp(s - top) / z for s in scores]
    total = math.fsum(weights)
    q = [w / total for w in weights]
    jsd = 0.0
    for a, b in zip(p, q, strict=True):
        m = (a + b) / 2
        jsd += (a * math.log(a / m) if a > 0 else 0) / 2 + (b * math.log(b / m) if b > 0 else 0) / 2
    row = {"jsd": jsd, "tv": math.fsum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2}
    order = sorted(range(n), key=lambda j: (-p[j], j))
    for mass in LEAKAGE_Q:
        members, reached = [], 0.0
        for j in order:
            if reached >= mass:
                break
            members.append(j)
            reached += p[j]
        row[f"leakage_{mass}"] = math.fsum(p[j] for j in members) - math.fsum(q[j] for j in members)
    errors = [(math.log(w) - (s - top), a) for s, w, a in zip(scores, weights, p, strict=True) if w > 0]
    # Subnormal FP32 weights count in the means and not in the extremes.
    normal = [math.log(w) - (s - top) for s, w in zip(scores, weights, strict=True) if w >= 2.0**-126]
    y = -top / math.log(2)
    phase, leak = (y - math.floor(y + 0.5), row["leakage_0.9"]) if n > 1 else (0.0, 0.0)
    return row | {
        "error_squared": math.fsum(e * e for e, _ in errors),
        "error_squared_p": math.fsum(a * e * e for e, a in errors),
        "nonzero": len(errors),
        "leak": leak,
        "leak_squared": leak**2,
        "phase": phase,
        "phase_squared": phase**2,
        "phase_leak": phase * leak,
        "above": max(normal),
        "below": max(-e for e in normal),
        "moved": [b - a for a, b in zip(p, q, strict=True)],
        "p": p,
    }


def some_rows(n=40, seed=0):
    """Rows of many shapes: peaked, flat, with ties, one key, no key, holes in the mask."""
    torch.manual_seed(seed)
    scores = torch.randn(24, n) * torch.logspace(-3, 1.5, 24)[:, None] + torch.linspace(-60, 60, 24)[:, None]
    scores[3] = 1.25  # all equal
    scores[5] = scores[5].round()  # ties
    valid = torch.rand(24, n) < 0.7
    valid[:, 0] = True
    valid[7] = torch.arange(n) == 4  # one key
    valid[8] = False
    return scores.masked_fill(~valid, -torch.inf), valid


@pytest.mark.parametrize("text", OPERATORS)
def test_row_statistics_agree_with_scalar_loops(text):
    scores, valid = some_rows()
    weights = operators.parse(text)(scores, valid)
    rows = divergence.exact_rows(scores)
    codes, phase = divergence.set_codes(rows.p), divergence.absolute_octave_phase(rows)
    sums, errors, moved = divergence.row_statistics(scores, rows, weights, codes, phase, 0 * phase)
    pair = divergence.row_divergence(scores, rows, weights)
    assert sums.dtype == errors.dtype == torch.float64
    for r in range(len(scores)):
        keys = valid[r].nonzero().squeeze(-1).tolist()
        assert rows.keys[r] == len(keys)
        if not keys:
            assert not sums[:, r].any() and not moved[r].any() and not rows.p[r].any()
            continue
        want = scalar_row(scores[r, keys].tolist(), weights[r, keys].tolist())
        for i, name in enumerate(SUMS):
            assert sums[i, r].item() == pytest.approx(want[name], rel=1e-9, abs=1e-12), (name, r)
        assert errors[:, r].tolist() == pytest.approx([want["above"], want["below"]], rel=1e-12, abs=1e-12)
        assert rows.p[r, keys].tolist() == pytest.approx(want["p"], rel=1e-12, abs=0)
        assert moved[r, keys].tolist() == pytest.approx(want["moved"], rel=1e-6, abs=1e-12)
        assert not moved[r][~valid[r]].any()
        assert torch.equal(pair[:, r], sums[:2, r])


def test_an_offset_moves_the_error_and_raw_weights_are_taken_as_probabilities():
    scores, valid = some_rows()
    rows = divergence.exact_rows(scores)
    codes, phase = divergence.set_codes(rows.p), divergence.absolute_octave_phase(rows)
    w, factor = operators.parse("pot(m=1)")(scores, valid), torch.logspace(-1, 1, 24)
    plain = divergence.row_statistics(scores, rows, w, codes, phase, 0 * phase)
    # The same weights relative to something else: with the offset, nothing changes.
    offset = torch.log(factor.double())
    shifted = divergence.row_statistics(scores, rows, w * factor[:, None], codes, phase, offset)
    for a, b in zip(shifted, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    raw = divergence.row_statistics(scores, rows, w, codes, phase, 0 * phase, False)
    assert torch.equal(raw[2], (w.double() - rows.p).float())
    torch.testing.assert_close(raw[0][1], 0.5 * (w.double() - rows.p).abs().sum(-1))
    q = w.double()
    assert torch.equal(divergence.row_divergence(scores, rows, w, False), raw[0][:2])
    torch.testing.assert_close(raw[0][0], divergence.js_divergence(rows.p, q), rtol=1e-12, atol=1e-15)


def test_divergences_of_known_rows():
    p = torch.tensor([[0.5, 0.5, 0, 0], [0.25] * 4, [1.0, 0, 0, 0]], dtype=torch.float64)
    q = torch.tensor([[0, 0, 0.5, 0.5], [0.25] * 4, [0.5, 0.5, 0, 0]], dtype=torch.float64)
    last = (math.log(1 / 0.75) + 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)) / 2
    for a, b in ((p, q), (q, p)):
        assert divergence.js_divergence(a, b).tolist() == pytest.approx([math.log(2), 0, last])
        assert divergence.total_variation(a, b).tolist() == [1, 0, 0.5]


def test_divergence_keeps_its_digits_when_it_is_small():
    # For ε = δ·x with small δ the divergence is δ²·Var_p(x)/8; a difference of entropies would lose it at 1e-13.
    torch.manual_seed(1)
    p = torch.softmax(torch.randn(50, dtype=torch.float64), 0)
    x = torch.randn(50, dtype=torch.float64)
    q = p * torch.exp(1e-6 * x)
    variance = (p * x * x).sum() - (p * x).sum() ** 2
    assert divergence.js_divergence(p, q / q.sum()).item() == pytest.approx(1e-12 * variance.item() / 8, rel=1e-4)


def test_mass_counts_entries_and_mass_by_threshold():
    scores, _ = some_rows()
    rows = divergence.exact_rows(scores)
    got = divergence.row_mass(rows)
    for r, p in enumerate(rows.p.tolist()):
        for i, t in enumerate(divergence.MASS_THRESHOLDS):
            assert got[i, r] == sum(x >= t for x in p)
            assert got[4 + i, r].item() == pytest.approx(math.fsum(x for x in p if x >= t), abs=1e-15)


def test_set_codes_name_the_high_mass_sets():
    rows = divergence.exact_rows(some_rows()[0])
    codes = divergence.set_codes(rows.p)
    for i, q in enumerate(LEAKAGE_Q):
        assert torch.equal(codes >= len(LEAKAGE_Q) - i, high_mass_set(rows.p, q))


def test_a_set_stops_where_its_mass_is_reached_and_takes_ties_in_key_order():
    p = torch.tensor([[0.25, 0.5, 0.25]], dtype=torch.float64)
    assert divergence.set_codes(p, (0.5, 0.75, 0.76)).tolist() == [[2, 3, 1]]
    assert divergence.set_codes(p, (1e-12, 1 - 1e-12)).tolist() == [[1, 2, 1]]
    alone = torch.tensor([[0.0, 1.0]], dtype=torch.float64)
    assert divergence.set_codes(alone).tolist() == [[0, 4]]


@pytest.mark.parametrize("qs", [(0.0, 0.9), (0.9, 1.0), (0.9, 0.8), (0.9, 0.9), (float("nan"),)])
def test_masses_outside_the_unit_interval_are_refused(qs):
    with pytest.raises(LabError, match="must be in"):
        divergence.set_codes(torch.ones(1, 1, dtype=torch.float64), qs)


@pytest.mark.parametrize("R", [0.25, 1, 4])
@pytest.mark.parametrize("recon", ["nearest", "upper", "lerp"])
def test_grid_errors_stay_in_their_interval_and_excess_is_seen(recon, R):
    torch.manual_seed(2)
    scores = 6 * torch.randn(64, 90)
    valid = torch.rand(64, 90) < 0.8
    scores = scores.masked_fill(~valid, -torch.inf)
    grid = operators.Grid(K=11, R=R, recon=recon)
    w = grid(scores, valid)
    span = scores.amax(-1) - scores.masked_fill(~valid, torch.inf).amin(-1)
    excess = divergence.grid_excess(grid, scores, valid, w)
    assert excess.shape == (64,) and (excess < 1e-5 * span).all()
    # A weight wrong by more than the widest interval must show, whichever way it is wrong.
    widest = (span * operators.grid.edge_fractions(11, R).diff().max()).max().exp()
    for factor in (1 / widest, *([widest] if recon != "lerp" else [])):
        wrong = w.clone()
        wrong[:, 5] *= factor
        seen = divergence.grid_excess(grid, scores, valid, wrong) > 0.01
        assert seen[valid[:, 5]].all() and not seen[~valid[:, 5]].any()


def test_flat_rows_have_no_excess():
    grid = operators.Grid(K=4, recon="upper")
    scores, valid = torch.full((2, 3), 2.0), torch.ones(2, 3, dtype=torch.bool)
    assert divergence.grid_excess(grid, scores, valid, grid(scores, valid)).tolist() == [0, 0]


def test_lattice_errors_stay_within_their_bound():
    scores = 8 * torch.randn(200, 50, generator=torch.Generator().manual_seed(0))
    rows, valid = divergence.exact_rows(scores), torch.ones(200, 50, dtype=torch.bool)
    codes = divergence.set_codes(rows.p)
    for text in ("pot(m=0.5)", "pot(m=1)", "pot(m=4)", "rowmax_pot(K_max=9,tail=drop)"):
        op = operators.parse(text)
        _, errors, _ = divergence.row_statistics(scores, rows, op(scores, valid), codes, rows.top, 0 * rows.top)
        low, high = op.envelope
        assert 0.97 * high < errors[0].max() <= high + 1e-6 and 0.97 * low > -errors[1].max() >= low - 1e-6


@pytest.mark.parametrize("text", [t for t in OPERATORS if not t.startswith("topk")])
def test_the_family_of_an_operator_gives_its_weights(text):
    op = operators.parse(text)
    scores, valid = some_rows()
    function, parameters = fused._family(op, "cpu")
    weights, excess = function(scores, valid, *parameters)
    assert torch.equal(weights, op(scores, valid))
    assert (excess is not None) == divergence.has_interval_envelope(op)
    if excess is not None:
        assert torch.equal(excess, divergence.grid_excess(op, scores, valid, weights))


def test_one_graph_serves_all_operators_of_a_kind():
    for one, other in (("grid(K=5,R=2)", "grid(K=32,R=4)"), ("pot(m=1)", "pot(m=4)"), ("grid(K=5)", "grid(K=7)")):
        assert fused._family(operators.parse(one), "cpu")[0] is fused._family(operators.parse(other), "cpu")[0]
    assert fused._family(operators.parse("topk(f=0.5)"), "cpu") is None


def test_a_compiler_that_fails_is_reported_once_and_done_without(monkeypatch):
    def broken(*_args, **_kwargs):
        def fail(*_):
            raise RuntimeError("no compiler here\nwith a long story")

        return fail

    monkeypatch.setattr(torch, "compile", broken)
    run = fused.Compiled(divergence.total_variation)
    p, q = torch.tensor([[1.0, 0]]), torch.tensor([[0, 1.0]])
    with pytest.warns(UserWarning, match="total_variation runs uncompiled.*no compiler here$") as caught:
        assert run(p, q).item() == run(p, q).item() == 1
    assert len(caught) == 1


def test_errors_of_the_input_are_not_taken_for_a_failing_compiler(monkeypatch):
    def refusing(*_args, **_kwargs):
        def fail(*_):
            raise LabError("the input is wrong")

        return fail

    monkeypatch.setattr(torch, "compile", refusing)
    with pytest.raises(LabError):
        fused.Compiled(divergence.total_variation)(torch.ones(1), torch.ones(1))


@pytest.mark.slow
def test_compiled_functions_agree_with_eager_ones():
    scores, valid = some_rows(64)
    scores, valid = scores[None, None], valid[None, None]
    flat = scores[0, 0]
    rows = divergence.exact_rows(flat)
    codes, phase = divergence.set_codes(rows.p), divergence.absolute_octave_phase(rows)
    fast = fused.compiled(divergence.exact_rows)(flat)
    for a, b in zip(fast, rows, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6 if a.dtype == torch.float32 else 1e-12, atol=1e-15)
    for text in ("grid(K=21,R=4)", "grid(K=9,R=4)", "pot(m=1)", "rowmax_pot(K_max=5)", "temperature(alpha=0.7)"):
        op = operators.parse(text)
        w, _ = fused.weigher(op, compile=True, device="cpu")(scores, valid)
        plain = op(scores, valid)
        torch.testing.assert_close(w, plain, rtol=3e-5, atol=1e-30)
        for a, b in zip(
            fused.compiled(divergence.row_statistics)(flat, rows, plain[0, 0], codes, phase, 0 * phase),
            divergence.row_statistics(flat, rows, plain[0, 0], codes, phase, 0 * phase),
            strict=True,
        ):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-12)
    assert all(run._fast is not None for run in map(fused.compiled, (divergence.row_statistics, divergence.exact_rows)))
