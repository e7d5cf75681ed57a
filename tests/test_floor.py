"""The reproducibility floor and the response fit: known answers, and the variants compute the same definition."""

import numpy as np
import pandas as pd
import pytest
import torch

from softmaxlab import backends, conditions, floor, operators, response
from softmaxlab.errors import LabError


@pytest.mark.parametrize("variant", floor.VARIANTS)
@pytest.mark.parametrize("text", conditions.reproducibility())
def test_variants_compute_the_same_definition(variant, text):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 130, 16), torch.randn(2, 2, 130, 16), torch.randn(2, 2, 130, 16)
    operator = operators.parse(text)
    expected = backends.get("reference")(q, k, v, operator, scaling=0.25)
    other = backends.get(variant)(q, k, v, operator, scaling=0.25)
    # A key may change its step where the scores differ in the last bit; almost all rows agree to rounding.
    close = torch.isclose(other, expected, atol=1e-5, rtol=1e-4).all(-1)
    assert close.float().mean() > 0.97


def fake_losses(shift):
    def losses(texts, *, backend):
        rows = [
            {"condition": t, "block": b, "nll": 3 + b + (t != "softmax()") * (0.1 + shift.get((backend, t), 0.0) * s)}
            for t in texts
            for b, s in enumerate((1.0, 3.0))
        ]
        return pd.DataFrame(rows)

    return losses


def test_differences_and_floors_are_what_was_planted():
    shift = {("reference-chunked", "grid(K=21)"): 1e-4, ("reference-float64", "pot(m=1)"): -5e-4}
    found = floor.differences(fake_losses(shift), ["grid(K=21)", "pot(m=1)"])
    row = found[(found.condition == "grid(K=21)") & (found.variant == "reference-chunked")].iloc[0]
    assert row["mean"] == pytest.approx(2e-4)
    assert row["max"] == pytest.approx(3e-4)
    assert row.sd == pytest.approx(np.std([1e-4, 3e-4], ddof=1))
    assert set(found[found.variant == "reference-search"].condition) == {"grid(K=21)"}
    floors = floor.floors(found)
    assert floors["grid"] == pytest.approx(2e-4)
    assert floors["octave"] == pytest.approx(1e-3)
    assert floors["any"] == floors["octave"]
    assert set(found.resolved) == {"positive", "negative", "unresolved"}
    assert floor.of("rowmax_pot(K_max=20)", floors) == floors["octave"]
    assert floor.of("topk(f=0.5)", floors) == floors["any"], "a family that was not measured takes the largest"
    assert floor.below(-9e-4, floors["octave"])
    assert not floor.below(1.1e-3, floors["octave"])


def test_families():
    expected = {
        "softmax()": "smooth",
        "grid(K=4)": "grid",
        "grid(K=4,recon=lerp)": "smooth",
        "pot(m=1)": "octave",
        "pot(m=2)": "half octave",
        "pot(m=8)": "fine lattice",
        "sq(k=3)": "fine lattice",
        "pot(m=4)": "other lattice",
        "pot(m=0.5)": "other lattice",
        "sq(k=2)": "other lattice",
        "rowmax_pot(K_max=12,tail=drop)": "octave",
        "temperature(alpha=0.9)": "smooth",
        "temperature(alpha=0.5)": "far temperature",
        "rescue(of=temperature(alpha=0.9))": "rescue",
        "topk(f=0.5)": "support",
        "mean_threshold()@3": "support",
    }
    assert {text: floor.family(text) for text in expected} == expected


def test_one_block_has_no_spread():
    def losses(texts, *, backend):
        return fake_losses({})(texts, backend=backend).query("block == 0")

    with pytest.raises(LabError, match="at least 2"):
        floor.differences(losses, ["grid(K=21)"])


def test_the_fit_recovers_a_power_law_and_names_what_it_leaves_out():
    jsd = np.logspace(-5, -1, 9)
    points = pd.DataFrame({"condition": [f"c{i}" for i in range(9)], "jsd": jsd, "dnll": 1.6 * jsd**1.05})
    points.loc[9] = ["negative", 1e-3, -1e-4]
    fit = response.fit(points)
    assert fit.slope == pytest.approx(1.05)
    assert fit.intercept == pytest.approx(np.log(1.6))
    assert fit.r2 == pytest.approx(1)
    assert (fit.n, fit.excluded) == (9, ("negative",))
    np.testing.assert_allclose(fit(jsd), points.dnll[:9])
    with pytest.raises(LabError, match="a fit needs 3"):
        response.fit(points.tail(3))
