"""The trajectory against materialised attention maps, row by row in scalar loops; storage, masks and bad input."""

import math
from collections import defaultdict

import numpy as np
import pytest
import torch
from conftest import make_tiny_model
from scipy.stats import pearsonr
from test_divergence import scalar_row

from softmaxlab import models, operators, trajectory
from softmaxlab.attention import inject
from softmaxlab.backends import reference
from softmaxlab.divergence import LEAKAGE_Q, MASS_THRESHOLDS, SUMS, absolute_octave_phase
from softmaxlab.errors import LabError
from softmaxlab.operators import Softmax
from softmaxlab.recorder import SHARED, Recorder

TEXTS = ["pot(m=1)", "temperature(alpha=0.7)", "grid(K=6,R=4)", "rowmax_pot(K_max=3,tail=drop)", "topk(f=0.2)"]


@pytest.fixture
def setting(tiny_model, text_file, tmp_path):
    return {
        "model": str(tiny_model),
        "corpus": str(text_file),
        "context": 24,
        "windows": 2,
        "device": "cpu",
        "results": str(tmp_path / "results"),
        "progress": False,
    }


def materialised(setting):
    """Scores (windows, heads, queries, keys) and values (windows, heads, keys, dim) by layer, whole maps."""
    maps = defaultdict(list)

    def spy(query, key, value, operator, *, scaling, softcap=None, mask=None, layer=0):
        group = query.shape[1] // key.shape[1]
        s = scaling * query @ key.repeat_interleave(group, 1).mT
        maps[layer].append((s, value.repeat_interleave(group, 1)))
        return reference.attend(query, key, value, operator, scaling=scaling, softcap=softcap, mask=mask)

    work = trajectory.Setting(*(setting[k] for k in ("model", "corpus", "context", "windows")), "float32", "stream")
    work = work.load("cpu")
    with torch.inference_mode(), inject(work.model, Softmax(), backend=spy):
        work.model(work.tokens)
    return {layer: calls[0] for layer, calls in maps.items()}


def scalar_sums(s, v, text):
    """By head: the list of scalar rows, Σ|(p̂−p)V|², Σ|pV|², for one layer and operator."""
    operator, n = operators.parse(text), s.shape[-1]
    causal = torch.ones(n, n, dtype=torch.bool).tril()
    weights = operator(s.masked_fill(~causal, -torch.inf), causal.expand_as(s))
    heads = []
    for h in range(s.shape[1]):
        rows, change, output = [], 0.0, 0.0
        for b in range(s.shape[0]):
            values = v[b, h].double().numpy()
            for i in range(n):
                row = scalar_row(s[b, h, i, : i + 1].tolist(), weights[b, h, i, : i + 1].tolist()) | {"keys": i + 1}
                rows.append(row)
                for d in range(values.shape[1]):
                    change += math.fsum(m * values[j, d] for j, m in enumerate(row["moved"])) ** 2
                    output += math.fsum(m * values[j, d] for j, m in enumerate(row["p"])) ** 2
        heads.append((rows, change, output))
    return heads


def scalar_means(heads_by_layer):
    """The definitions of every mean, over lists of scalar rows; `heads_by_layer` is a list of lists of heads."""
    rows = [r for heads in heads_by_layer for head in heads for r in head[0]]
    entries, nonzero = sum(r["keys"] for r in rows), sum(r["nonzero"] for r in rows)
    several = [r for r in rows if r["keys"] > 1]

    def mean(name):
        return math.fsum(r[name] for r in rows) / len(rows)

    return {
        "jsd": mean("jsd"),
        "tv": mean("tv"),
        **{f"leakage_{q}": mean(f"leakage_{q}") for q in LEAKAGE_Q},
        "output_change": np.mean([math.sqrt(sum(h[1] for h in hs) / sum(h[2] for h in hs)) for hs in heads_by_layer]),
        "log_weight_rms": math.sqrt(math.fsum(r["error_squared"] for r in rows) / nonzero),
        "log_weight_rms_p": math.sqrt(mean("error_squared_p")),
        "zero_share": 1 - nonzero / entries,
        "max_abs_error": max(max(r["above"], r["below"]) for r in rows),
        "phase_r": pearsonr([r["phase"] for r in several], [r["leak"] for r in several]).statistic,
    }


@pytest.mark.parametrize("text", TEXTS)
def test_means_agree_with_materialised_maps(setting, text):
    result = trajectory.measure(TEXTS, **setting)
    heads = [scalar_sums(*layer, text) for _, layer in sorted(materialised(setting).items())]

    def check(row, want):
        assert {k: row[k] for k in want} == pytest.approx(want, rel=5e-5, abs=1e-5)

    summary = result.summary()
    assert summary.operator.tolist() == TEXTS
    check(summary[summary.operator == text].iloc[0], scalar_means(heads))
    by_layer, by_head = (f[f.operator == text] for f in (result.by_layer(), result.by_head()))
    assert len(by_layer) == 3 and len(by_head) == 12
    for layer in range(3):
        check(by_layer[by_layer.layer == layer].iloc[0], scalar_means([heads[layer]]))
        for head in range(4):
            row = by_head[(by_head.layer == layer) & (by_head["head"] == head)].iloc[0]
            check(row, scalar_means([[heads[layer][head]]]))


def test_mass_shares_agree_with_materialised_maps(setting):
    result = trajectory.measure(["softmax()"], **setting)
    maps = materialised(setting)
    for by, layers in (([], maps), (["layer"], [1])):
        p = [r["p"] for layer in layers for head in scalar_sums(*maps[layer], "softmax()") for r in head[0]]
        frame = result.mass(by)
        frame = frame[frame.layer == 1] if by else frame
        n, flat = len(p), [x for row in p for x in row]
        for _, row in frame.iterrows():
            chosen = [x for x in flat if (x >= row.p_threshold) == (row.relation == "ge")]
            assert row.entry_share == pytest.approx(len(chosen) / len(flat), abs=1e-12)
            assert row.mass_share == pytest.approx(math.fsum(chosen) / n, abs=1e-7)
        assert frame.relation.tolist() == ["ge", "ge", "ge", "lt"]
        assert frame.p_threshold.tolist() == list(MASS_THRESHOLDS)


def test_softmax_itself_changes_nothing_and_envelopes_hold(setting):
    texts = ["softmax()", "pot(m=2)", *(f"grid(K=5,R=3,recon={r})" for r in ("nearest", "upper", "lerp"))]
    frame = trajectory.measure([*texts, "temperature(alpha=2)"], **setting).summary().set_index("operator")
    exact = frame.loc["softmax()"]
    assert abs(exact[["jsd", "tv", "output_change", "log_weight_rms", "max_abs_error"]]).max() < 5e-6
    # text forms leave defaults out, so they are read back from the frame
    assert (frame.excess.iloc[1:5] < 2e-5).all() and frame.excess.iloc[1] > -0.02
    assert frame.excess.isna().tolist() == [False] * 5 + [True]


def test_lattices_anchored_elsewhere_bring_their_phase_and_offset(setting):
    texts = ["log2p()", "log_sqrt2p()", "ilpot()", "ilpot_h_a()", "ilpot_h15()"]
    frame = trajectory.measure([*texts, "log2p(renormalise=no)", "pot(m=1)"], **setting).summary().set_index("operator")
    low, high = zip(*(operators.parse(t).envelope for t in texts), strict=True)
    assert (abs(frame.excess.iloc[:5]) < 0.02).all() and (frame.excess.iloc[:5] < 1e-5).all()
    assert (frame.max_abs_error.iloc[:5] > 0.9 * np.minimum(np.abs(low), high)).all()
    # Log2-p and the absolute octave lattice are one lattice up to a phase of the row; leakage follows the phase
    # on them, and not on the lattice that is anchored at the row maximum.
    assert abs(frame.phase_r["log2p()"]) > 0.3 < abs(frame.phase_r["ilpot()"]) and abs(frame.phase_r["pot(m=1)"]) < 0.1
    raw, scaled = frame.loc["log2p(renormalise=no)"], frame.loc["log2p()"]
    assert raw.log_weight_rms == scaled.log_weight_rms and raw.tv != scaled.tv


def test_rescue_has_no_log_weights_and_no_leakage_at_its_own_mass(setting):
    frame = trajectory.measure(["rescue(of=temperature(alpha=0.5))", "temperature(alpha=0.5)"], **setting).summary()
    rescued, plain = frame.iloc[0], frame.iloc[1]
    assert rescued[["log_weight_rms", "log_weight_rms_p", "max_abs_error", "excess"]].isna().all()
    assert abs(rescued["leakage_0.9"]) < 1e-7 < 1e-3 < plain["leakage_0.9"]
    assert 0 < rescued.jsd < plain.jsd


@pytest.fixture
def attention_case():
    torch.manual_seed(5)
    # Multiples of 1/4, so that a score is the same number in whatever order it is added up.
    query, key = (torch.randn(2, heads, 13, 8).mul(4).round() / 4 for heads in (4, 2))
    value = torch.randn(2, 2, 13, 8)
    padded = torch.ones(2, 1, 13, 13, dtype=torch.bool).tril()
    padded[1, :, :, :3] = False  # left padding: the first three queries see nothing
    window = torch.ones(1, 1, 13, 13, dtype=torch.bool).tril().triu(-3)
    return (query, key, value), {"causal": None, "padded": padded, "window": window}


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("mask", ["causal", "padded", "window"])
@pytest.mark.parametrize("chunk", [0, 1, 5])
def test_the_recorder_is_softmax_attention(attention_case, mask, chunk, softcap):
    (q, k, v), masks = attention_case
    recorder = Recorder({"a": operators.PoT(m=1)}, device="cpu", chunk=chunk)
    settings = {"scaling": 0.4, "softcap": softcap, "mask": masks[mask]}
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
        args = [x.to(dtype) for x in (q, k, v)]
        want = reference.attend(*args, Softmax(), **settings)
        got = recorder(*args, None, **settings)
        assert got.dtype == dtype
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("mask", ["causal", "padded", "window"])
@pytest.mark.parametrize("chunk", [0, 1, 5])
def test_sums_see_only_valid_keys_whatever_the_chunk(attention_case, mask, chunk):
    (q, k, v), masks = attention_case
    recorder = Recorder({t: operators.parse(t) for t in TEXTS}, device="cpu", chunk=chunk)
    recorder(q, k, v, None, scaling=1.5, mask=masks[mask], layer=3)
    valid = torch.ones(13, 13, dtype=torch.bool).tril() if masks[mask] is None else masks[mask]
    valid = valid.expand(2, 4, 13, 13)
    s = ((q.unflatten(1, (2, 2)) @ k[:, :, None].mT) * 1.5).flatten(1, 2)
    totals = recorder.layers[3]
    assert set(recorder.layers) == {3}
    for i, text in enumerate(TEXTS):
        w = operators.parse(text)(s.masked_fill(~valid, -torch.inf), valid)
        for h in range(4):
            rows = []
            for b in range(2):
                for query in range(13):
                    at = valid[b, h, query]
                    if at.any():
                        rows.append(scalar_row(s[b, h, query, at].tolist(), w[b, h, query, at].tolist()))
            assert totals.shared[SHARED.index("rows"), h] == len(rows) == {"padded": 23}.get(mask, 26)
            assert totals.shared[SHARED.index("entries"), h] == valid[:, h].sum()
            for j, name in enumerate(SUMS):
                want = math.fsum(r[name] for r in rows)
                assert totals.sums[i, j, h].item() == pytest.approx(want, rel=1e-9, abs=1e-12), (name, text)
            assert totals.extremes[i, 0, h].item() == pytest.approx(max(r["above"] for r in rows), rel=1e-9, abs=1e-12)
            assert totals.extremes[i, 1, h].item() == pytest.approx(max(r["below"] for r in rows), rel=1e-9, abs=1e-12)


def test_divergence_alone_gives_the_same_divergence(attention_case):
    (q, k, v), masks = attention_case
    ops = {t: operators.parse(t) for t in TEXTS}
    full, short = (Recorder(ops, device="cpu", only_divergence=o) for o in (False, True))
    for recorder in (full, short):
        for layer in range(2):
            recorder(q, k, v, None, scaling=1.0, mask=masks["padded"], layer=layer)
    assert full.mean_divergence() == short.mean_divergence()
    frame = trajectory.Trajectory(*_frames(full)).summary()
    assert frame.jsd.tolist() == pytest.approx([d["jsd"] for d in short.mean_divergence().values()], rel=1e-12)


def _frames(recorder):
    import pandas as pd

    shared, tables = trajectory._tables(recorder)
    return pd.concat([t.assign(operator=o) for o, t in tables.items()]), shared


def test_an_operator_can_bring_its_own_phase(attention_case):
    (q, k, v), _ = attention_case

    class Shifted:
        def __call__(self, scores, valid):
            return operators.PoT(m=1)(scores, valid)

        def phase(self, rows):
            return absolute_octave_phase(rows) * 0 + rows.log_z

    recorder = Recorder({"a": Shifted(), "b": operators.PoT(m=1)}, device="cpu")
    recorder(q, k, v, None, scaling=1.0)
    s = (q.unflatten(1, (2, 2)) @ k[:, :, None].mT).flatten(1, 2).double()
    log_z = torch.stack(
        [(s[..., i, : i + 1] - s[..., i, : i + 1].amax(-1, True)).exp().sum(-1).log() for i in range(13)]
    )
    got = recorder.layers[0].sums[0, SUMS.index("phase")]
    torch.testing.assert_close(got, log_z.sum((0, 1)), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(got, recorder.layers[0].sums[1, SUMS.index("phase")])


def test_only_what_is_missing_is_measured(setting, monkeypatch):
    measured = []
    run = trajectory.run
    monkeypatch.setattr(
        trajectory, "run", lambda work, rec, **kw: measured.append(list(rec.operators)) or run(work, rec, **kw)
    )
    trajectory.measure(["pot(m=1)", "pot(m=1)", "grid(K=4, R=1)"], **setting)
    both = trajectory.measure(["grid(K=4)", "pot(m=2)", "pot(m=1)"], **setting)
    assert measured == [["pot(m=1)", "grid(K=4)"], ["pot(m=2)"]]
    monkeypatch.setattr(models, "load_model", None)  # nothing may be loaded from here on
    again = trajectory.measure(["grid(K=4)", "pot(m=2)", "pot(m=1)"], **setting)
    assert again.summary().equals(both.summary()) and again.mass().equals(both.mass())
    monkeypatch.undo()
    live = trajectory.measure(["grid(K=4)", "pot(m=2)", "pot(m=1)"], **setting | {"results": ""})
    assert np.allclose(live.summary().drop(columns="operator"), both.summary().drop(columns="operator"), equal_nan=True)


@pytest.mark.parametrize("change", [{"windows": 3}, {"context": 32}, {"dtype": "bfloat16"}, {"bos": "block"}])
def test_another_setting_is_another_key(setting, change, monkeypatch):
    first = trajectory.measure(["pot(m=1)"], **setting).summary()
    second = trajectory.measure(["pot(m=1)"], **setting | change).summary()
    assert first.jsd[0] != second.jsd[0]
    assert trajectory.measure(["pot(m=1)"], **setting).summary().equals(first)


def test_windows_default_to_the_papers_tokens_or_all_there_are(setting, tiny_model, text_file):
    assert trajectory.Setting("smollm2-135m", "pydoc", 2048, 0, "float32", "stream").key()["windows"] == 16
    assert trajectory.Setting("smollm2-135m", "pydoc", 16384, 0, "float32", "stream").key()["windows"] == 2
    assert trajectory.Setting("smollm2-135m", "pydoc", 65536, 0, "float32", "stream").key()["windows"] == 1
    whole = trajectory.Setting(str(tiny_model), str(text_file), 128, 0, "float32", "stream").load("cpu")
    assert len(whole.tokens) == whole.provenance["windows"] == whole.provenance["blocks_available"] < 256


@pytest.mark.parametrize(
    ("texts", "change", "match"),
    [
        ([], {}, "no operator was given"),
        (["nonsense()"], {}, "unknown operator 'nonsense'"),
        (["pot(m=0)"], {}, "m is 0.0, but must be"),
        (["rowmax_pot(K_max=0)"], {}, "K_max is 0"),
        (["rescue(of=pot(m=1),q=1)"], {}, "q is 1.0, but must be in"),
        (["rescue(q=0.9)"], {}, "needs a value for of"),
        (["pot(m=1)@1"], {}, "'pot\\(m=1\\)@1' names layers"),
        (["pot(m=1)"], {"context": 1}, "context is 1"),
        (["pot(m=1)"], {"windows": -1}, "windows is -1"),
        (["pot(m=1)"], {"windows": 10_000}, "blocks is 10000"),
        (["pot(m=1)"], {"device": "mps"}, "no float64"),
        (["pot(m=1)"], {"device": "tpu"}, "unknown device 'tpu'"),
    ],
)
def test_bad_input_is_said_in_one_sentence(setting, texts, change, match, tmp_path):
    with pytest.raises(LabError, match=match) as error:
        trajectory.measure(texts, **setting | change)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.glob("results/**/*.parquet"))


def test_scores_that_are_not_finite_are_refused(setting, tmp_path):
    folder = make_tiny_model(tmp_path / "broken")
    loaded = models.load_model(str(folder), device="cpu")
    loaded.model.model.layers[1].self_attn.q_proj.weight[0, 0] = float("nan")
    loaded.model.save_pretrained(folder)
    with pytest.raises(LabError, match="not finite in layer 1"):
        trajectory.measure(["pot(m=1)"], **setting | {"model": str(folder)})
    assert not list(tmp_path.glob("results/trajectory/*"))
