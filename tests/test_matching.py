"""Matching: both directions, all targets together in few passes, and a plain word where a target cannot be had."""

import math

import numpy as np
import pytest

from softmaxlab import evaluate, matching, models, trajectory
from softmaxlab.errors import LabError
from softmaxlab.matching import DIRECTIONS, Target, solve_with, standard_targets
from softmaxlab.operators import PoT, Temperature


@pytest.fixture
def setting(tiny_model, text_file, tmp_path):
    return {
        "model": str(tiny_model),
        "corpus": str(text_file),
        "context": 48,
        "windows": 4,
        "device": "cpu",
        "results": str(tmp_path / "results"),
        "progress": False,
    }


class Simulated:
    """Divergences of a made-up model: rows of random scores, α from 0 to ∞, counting its passes."""

    def __init__(self, scale=2.0, seed=0):
        self.scores = np.random.default_rng(seed).normal(scale=scale, size=(40, 30))
        self.passes, self.alphas = 0, []

    def __call__(self, operators):
        self.passes += 1
        out = {}
        for name, op in operators.items():
            delta = self.scores.max(-1, keepdims=True) - self.scores
            if isinstance(op, Temperature):
                self.alphas.append(op.alpha)
                w = np.exp(-op.alpha * delta)
            elif isinstance(op, PoT):
                w = 2.0 ** -np.floor(delta / math.log(2) + 0.5)
            else:
                w = np.ones_like(delta) if name == "flatten" else (delta == 0).astype(float)
            out[name] = self.divergence(np.exp(-delta), w)
        return out

    @staticmethod
    def divergence(w, w_hat):
        p, q = (x / x.sum(-1, keepdims=True) for x in (w, w_hat))
        m = (p + q) / 2

        def part(x):
            return np.where(x > 0, x * np.log(np.where(x > 0, x, 1) / np.where(m > 0, m, 1)), 0).sum(-1)

        return {"jsd": float(np.mean(part(p) + part(q)) / 2), "tv": float(np.abs(p - q).sum(-1).mean() / 2)}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("scale", [0.7, 1.5, 2.5, 4.0])
def test_all_targets_are_hit_in_few_passes(scale, seed):
    model = Simulated(scale, seed)
    targets = standard_targets()
    assert len(targets) == 12
    solved = solve_with(model, targets, 1e-3)
    assert model.passes == solved.passes.iloc[0] <= 6
    reachable = solved[solved.status != "out of reach"]
    assert (reachable.status == "solved").all() and (reachable.error <= 1e-3).all()
    for _, row in reachable.iterrows():
        again = model({"x": Temperature(row.alpha)})["x"][row.metric]
        assert again == row.achieved == pytest.approx(row.level * row.reference, rel=1e-3)
        assert (row.alpha < 1) == (row.direction == "flatten")
    for _, row in solved[solved.status == "out of reach"].iterrows():
        assert row.target >= row.limit and math.isnan(row.alpha) and row.condition == ""
    # Harder targets need temperatures further from 1, in each direction and metric.
    for _, group in reachable.groupby(["metric", "direction"]):
        assert np.all(np.diff(np.abs(np.log(group.sort_values("level").alpha))) > 0)


@pytest.mark.parametrize("level", [1e-3, 0.02, 0.3, 17.0])
def test_levels_far_from_the_first_grid_are_found_too(level):
    targets = [Target(m, level, d) for m in ("jsd", "tv") for d in DIRECTIONS]
    solved = solve_with(Simulated(3.0), targets, 1e-4)
    for _, row in solved.iterrows():
        assert row.status == ("out of reach" if row.target >= row.limit else "solved")
    assert (solved.status == "solved").sum() >= 2 and solved.passes.iloc[0] <= matching.MAX_PASSES


def test_close_to_the_limit_a_target_is_still_found_and_beyond_it_is_not():
    model = Simulated(1.0)
    base = model({"reference": PoT(m=1), "flatten": None, "sharpen": None})
    levels = {d: base[d]["jsd"] / base["reference"]["jsd"] for d in DIRECTIONS}
    for factor, status in ((0.98, "solved"), (1.001, "out of reach")):
        targets = [Target("jsd", factor * levels[d], d) for d in DIRECTIONS]
        solved = solve_with(Simulated(1.0), targets, 1e-3)
        assert (solved.status == status).all() and solved.passes.iloc[0] <= matching.MAX_PASSES


def test_only_the_directions_asked_for_are_measured():
    model = Simulated()
    solve_with(model, [Target("tv", 1.0, "sharpen")], 1e-3)
    assert min(model.alphas) > 1


def test_what_does_not_converge_is_said():
    def stepping(operators):  # a metric that jumps over its target
        value = {n: 0.5 if abs(math.log(getattr(o, "alpha", 1))) > 0.3 else 0.1 for n, o in operators.items()}
        value |= {"reference": 0.3, "flatten": 0.9, "sharpen": 0.9}
        return {n: {"jsd": value[n], "tv": value[n]} for n in operators}

    target = Target("jsd", 1.0, "flatten")
    solved = solve_with(stepping, [target], 1e-3)
    assert solved.status.tolist() == ["not converged"] and solved.passes[0] == matching.MAX_PASSES
    with pytest.raises(LabError, match=r"flattening to 1 times the JSD of pot.* was matched to 67%, but at most 1%"):
        matching.condition(solved, target)


def test_a_reference_without_divergence_is_refused():
    def nothing(operators):
        return {n: {"jsd": 0.0, "tv": 0.0} for n in operators}

    with pytest.raises(LabError, match="causes no divergence"):
        solve_with(nothing, standard_targets(), 1e-3)


def test_on_a_model_the_achieved_value_is_the_trajectorys(setting):
    solved = matching.solve(**setting)
    assert (solved.status == "solved").all() and (solved.error <= 1e-3).all() and (solved.passes <= 6).all()
    measured = trajectory.measure(["pot(m=1)", *solved.condition], **setting).summary().set_index("operator")
    for _, row in solved.iterrows():
        assert measured.loc[row.condition][row.metric] == pytest.approx(row.achieved, rel=1e-6)
        assert measured.loc["pot(m=1)"][row.metric] * row.level == pytest.approx(row.target, rel=1e-6)
    # Flattening moves mass out of the set that carries 90% of it, sharpening moves mass in.
    leak = measured.loc[solved.condition]["leakage_0.9"].to_numpy()
    assert (np.sign(leak) == np.where(solved.direction == "flatten", 1, -1)).all()


def test_the_limits_are_those_of_extreme_temperatures(setting):
    solved = matching.solve([Target("jsd", 1.0, d) for d in DIRECTIONS], **setting)
    frame = trajectory.measure(["temperature(alpha=1e-6)", "temperature(alpha=100000)"], **setting).summary()
    assert solved.limit.tolist() == pytest.approx(frame.jsd.tolist(), rel=1e-4)


def test_out_of_reach_is_said_with_the_largest_value(setting):
    targets = [Target("tv", 1000.0, "sharpen"), Target("jsd", 1.0, "flatten")]
    solved = matching.solve(targets, **setting)
    assert solved.status.tolist() == ["out of reach", "solved"]
    with pytest.raises(LabError, match=r"sharpening to 1000 times the TV of .* out of reach") as error:
        matching.condition(solved, targets[0])
    assert f"{solved.limit[0]:.6g}" in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(LabError, match="not among"):
        matching.condition(solved, Target("tv", 1.0, "flatten"))


def test_conditions_can_be_evaluated(setting):
    target = Target("jsd", 3.0, "sharpen")
    solved = matching.solve([target], **setting)
    texts = [matching.condition(solved, target), matching.condition(solved, target, rescue=0.9)]
    assert texts[0] == f"temperature(alpha={float(solved.alpha[0])!r})"
    assert texts[1] == f"rescue(of={texts[0]})" and matching.condition(solved, target, rescue=0.8).endswith(",q=0.8)")
    run = {k: v for k, v in setting.items() if k != "windows"}
    frame = evaluate.losses(["softmax()", *texts], blocks=2, **run)
    assert frame.groupby("condition").nll.mean().nunique() == 3
    with pytest.raises(LabError, match=r"q is 1\.5"):
        matching.condition(solved, target, rescue=1.5)


def test_solutions_are_stored_and_only_open_targets_are_solved(setting, monkeypatch):
    first = matching.solve(standard_targets()[:4], **setting)
    solving = []
    monkeypatch.setattr(
        matching, "solve_with", lambda m, targets, tol: solving.append(len(targets)) or solve_with(m, targets, tol)
    )
    both = matching.solve(**setting)
    assert solving == [8] and both.iloc[:4].equals(first)
    monkeypatch.setattr(models, "load_model", None)
    assert matching.solve(**setting).equals(both)
    monkeypatch.undo()
    tighter = matching.solve(standard_targets()[:1], tolerance=1e-5, **setting)
    assert tighter.error[0] <= 1e-5


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("kl", 1.0, "flatten"), "metric is 'kl'"),
        (("jsd", 1.0, "up"), "direction is 'up'"),
        (("jsd", 0.0, "flatten"), "level .* is 0.0"),
        (("jsd", math.nan, "flatten"), "level .* is nan"),
    ],
)
def test_bad_targets_are_refused(arguments, match):
    with pytest.raises(LabError, match=match):
        Target(*arguments)


def test_bad_settings_are_refused(setting):
    with pytest.raises(LabError, match="no divergence target"):
        matching.solve([], **setting)
    with pytest.raises(LabError, match="tolerance is 0"):
        matching.solve(tolerance=0, **setting)
    with pytest.raises(LabError, match="context is 1"):
        matching.solve(**setting | {"context": 1})
