"""Vocabulary output: the definitions against a scalar twin, the head against the model, the store against itself."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from softmaxlab import evaluate, forward, models, vocabulary
from softmaxlab.conditions import Condition
from softmaxlab.errors import LabError
from softmaxlab.losskey import LOSSES, VOCABULARY, LossKey
from softmaxlab.store import Store

GRID, LATTICE = "grid(K=4,R=4)", "pot(m=1)"


def twin(exact, logits):
    """KL(b‖c), KL(c‖b), JSD and top-1 agreement of one position, from the definitions, one token at a time."""

    def softmax(row):
        top = max(row)
        total = math.fsum(math.exp(x - top) for x in row)
        return [math.exp(x - top) / total for x in row], [x - top - math.log(total) for x in row]

    (b, log_b), (c, log_c) = softmax(exact), softmax(logits)
    forward_kl = math.fsum(p * (x - y) for p, x, y in zip(b, log_b, log_c, strict=True))
    reverse_kl = math.fsum(q * (y - x) for q, x, y in zip(c, log_b, log_c, strict=True))
    jsd = 0.0
    for p, q, x, y in zip(b, c, log_b, log_c, strict=True):
        m = (p + q) / 2
        jsd += (p * (x - math.log(m)) if p else 0.0) / 2 + (q * (y - math.log(m)) if q else 0.0) / 2
    return forward_kl, reverse_kl, jsd, float(exact.index(max(exact)) == logits.index(max(logits)))


# Logits are float32 or less in every model, so that equal ones are equal in both.
LOGITS = st.floats(-80, 80, width=32)


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 30).flatmap(lambda n: st.tuples(*[st.lists(LOGITS, min_size=n, max_size=n)] * 2)))
def test_divergences_are_those_of_the_scalar_twin(rows):
    exact, logits = rows
    got = vocabulary.divergences(torch.tensor(exact), torch.tensor(logits))
    assert got.dtype == torch.float64 and got.shape == (4,)
    np.testing.assert_allclose(got.numpy(), twin(exact, logits), rtol=1e-9, atol=1e-13)
    kl, reverse, jsd, top1 = got.tolist()
    assert kl >= -1e-12 and reverse >= -1e-12 and -1e-12 <= jsd <= math.log(2) + 1e-12 and top1 in (0, 1)


def test_small_differences_keep_their_digits():
    """A divergence of 1e-14 nats from logits that differ by 1e-7: the second-order term, p(1−p)δ²/2."""
    exact, delta = torch.tensor([0.3, -1.0], dtype=torch.float64), 1e-7
    moved = exact + torch.tensor([delta, 0.0], dtype=torch.float64)
    p = torch.softmax(exact, -1)
    want = (p[0] * p[1] * delta**2 / 2).item()
    kl, reverse, jsd, _ = vocabulary.divergences(exact, moved).tolist()
    assert kl == pytest.approx(want, rel=0.02) and reverse == pytest.approx(want, rel=0.02)
    assert jsd == pytest.approx(want / 4, rel=0.1)


def test_equal_logits_are_at_no_distance_and_of_equal_maxima_the_first_counts():
    rows = torch.randn(5, 40)
    assert vocabulary.divergences(rows, rows).tolist() == [[0.0] * 5] * 3 + [[1.0] * 5]
    tied = torch.tensor([1.0, 2.0, 2.0, 0.0])
    assert vocabulary.divergences(tied, torch.tensor([0.0, 3.0, 1.0, 0.0]))[3] == 1
    assert vocabulary.divergences(tied, torch.tensor([0.0, 1.0, 3.0, 0.0]))[3] == 0


@pytest.fixture
def capped(tmp_path):
    """A model whose head scales and caps its logits."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 60, "sliding_window": 16}
    config = Gemma2Config(**sizes, **heads, final_logit_softcapping=3.0, initializer_range=0.5)
    return Gemma2ForCausalLM(config).eval().requires_grad_(False)


def test_the_head_of_hidden_states_is_the_model_s_own(capped, tiny_model):
    for model in (capped, models.load_model(str(tiny_model), device="cpu").model):
        ids = torch.arange(40)[None] % 60
        with torch.inference_mode(), forward.final_hidden(model) as caught:
            logits = model(ids, use_cache=False).logits
        assert len(caught) == 1 and caught[0].shape == (1, 40, 32)
        head = forward.head_logits(model, caught[0][0])
        torch.testing.assert_close(head, logits[0], rtol=1e-5, atol=1e-5)
        with torch.inference_mode():
            assert torch.equal(model(ids, use_cache=False).logits, logits), "the model is whole again"
    assert 2.5 < forward.head_logits(capped, 100 * torch.randn(9, 32)).abs().max() <= 3.0


@pytest.fixture
def setting(tiny_model, text_file, tmp_path):
    return {
        "model": str(tiny_model),
        "corpus": str(text_file),
        "context": 64,
        "blocks": 4,
        "device": "cpu",
        "results": str(tmp_path / "results"),
        "progress": False,
    }


@pytest.mark.parametrize("text", [GRID, "mean_threshold()@1"])
def test_block_means_are_those_of_whole_logits(setting, monkeypatch, text):
    monkeypatch.setitem(vocabulary.ELEMENTS, "cpu", 3000)  # chunks of ten tokens: the last one is short
    frame = evaluate.vocabulary(["softmax()", text], **setting)
    assert list(frame.columns) == list(VOCABULARY.types) and set(frame.condition) == {text}
    assert frame.block.tolist() == [0, 1, 2, 3] and set(frame.predictions) == {63}
    loaded = models.load_model(setting["model"], device="cpu")
    stream = evaluate.corpora.blocks(
        evaluate.corpora.load_text(setting["corpus"]), loaded.tokenizer, 64, limit=200_000, bos="stream"
    )
    for row in frame.itertuples():
        ids = torch.as_tensor(stream.tokens[row.block : row.block + 1])
        both = []
        for condition in ("softmax()", text):
            with torch.inference_mode(), forward.inject(loaded.model, Condition.parse(condition)):
                both.append(loaded.model(ids, use_cache=False).logits[0, :-1].tolist())
        want = np.mean([twin(*pair) for pair in zip(*both, strict=True)], axis=0)
        got = [row.kl_forward, row.kl_reverse, row.jsd, row.top1]
        np.testing.assert_allclose(got[:3], want[:3], rtol=1e-4)
        assert got[3] == want[3]


def test_what_is_stored_is_read_and_the_losses_are_those_of_a_run_without(setting, tmp_path, monkeypatch):
    first = evaluate.vocabulary([GRID, LATTICE], **setting)
    plain = evaluate.losses(["softmax()", GRID, LATTICE], **setting | {"results": str(tmp_path / "plain")})
    monkeypatch.setattr(models, "load_model", lambda *_a, **_k: pytest.fail("the model was loaded"))
    pd.testing.assert_frame_equal(evaluate.vocabulary([GRID, LATTICE], **setting), first)
    pd.testing.assert_frame_equal(evaluate.losses(["softmax()", GRID, LATTICE], **setting), plain)
    fewer = evaluate.vocabulary([LATTICE], **setting | {"blocks": 2})
    assert fewer.jsd.tolist() == first[first.condition == LATTICE].jsd.tolist()[:2]


def test_losses_that_are_there_stay_and_get_their_output_beside_them(setting, tmp_path):
    evaluate.losses([GRID], **setting | {"blocks": 3})
    (path,) = (tmp_path / "results" / "losses").rglob("*.parquet")
    before = path.read_bytes()
    evaluate.vocabulary([GRID], **setting | {"blocks": 3})
    assert path.read_bytes() == before
    evaluate.vocabulary([GRID], **setting)
    output = Store(tmp_path / "results", VOCABULARY)
    assert output.frame().block.tolist() == [0, 1, 2, 3]
    made = output.provenance()
    assert made.blocks.tolist() == [4] and made.torch.tolist() == [torch.__version__]


def test_no_results_folder_and_the_baseline_alone(setting, tmp_path):
    frame = evaluate.vocabulary([GRID], **setting | {"results": ""})
    assert len(frame) == 4 and not (tmp_path / "results").exists()
    nothing = evaluate.vocabulary(["softmax()"], **setting)
    assert nothing.empty and list(nothing.columns) == list(VOCABULARY.types)


def test_a_device_without_float64_is_refused(setting, monkeypatch):
    monkeypatch.setattr(models, "pick_device", lambda _device: "mps")
    with pytest.raises(LabError, match="mps has no float64"):
        evaluate.vocabulary([GRID], **setting)


# The store keeps both kinds apart

KEY = LossKey("m", "m1", "c", "c1", 64, "stream", "float32", "reference", GRID, "{}")
ROWS = pd.DataFrame(
    {"block": [0], "kl_forward": [0.1], "kl_reverse": [0.2], "jsd": [0.03], "top1": [0.9], "predictions": [63]}
)


def test_a_file_of_one_kind_is_none_of_the_other(tmp_path):
    losses, output = Store(tmp_path), Store(tmp_path, VOCABULARY)
    path = output.append_losses(KEY, ROWS, {})
    assert path.parts[-5:-1] == ("vocabulary", "m", "c", "64") and losses.frame().empty
    assert KEY.digest_of(VOCABULARY) != KEY.digest_of(LOSSES) == KEY.digest
    pd.testing.assert_frame_equal(output.losses(KEY), ROWS)
    elsewhere = tmp_path / "losses" / "m" / "c" / "64" / path.name
    elsewhere.parent.mkdir(parents=True)
    elsewhere.write_bytes(path.read_bytes())
    with pytest.warns(UserWarning, match="holds no key of losses"):
        assert losses.frame().empty
    with pytest.raises(LabError, match="vocabulary have the columns block, kl_forward"):
        output.append_losses(KEY, pd.DataFrame({"block": [1], "nll": [1.0], "predictions": [63]}), {})
    with pytest.raises(LabError, match=r"the jsd of grid\(K=4,R=4\) in block 1 is nan"):
        output.append_losses(KEY, ROWS.assign(block=1, jsd=math.nan), {})
    with pytest.raises(LabError, match=r"block 0 .* kl_forward, kl_reverse, jsd, top1 0\.1, .* given as 0\.5, "):
        output.append_losses(KEY, ROWS.assign(kl_forward=0.5), {})
    output.append_losses(KEY, ROWS.assign(kl_forward=0.5), {}, keep_stored=True)
    assert output.losses(KEY).kl_forward.tolist() == [0.1], "the first writer wins"
    with pytest.raises(LabError, match="cannot name a kind of table"):
        losses.put_table("vocabulary", {}, ROWS, {})


def test_another_protocol_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setitem(VOCABULARY.tag, "vocabulary", 0)
    path = Store(tmp_path, VOCABULARY).append_losses(KEY, ROWS, {})
    monkeypatch.undo()
    path.rename(path.with_name(f"grid-K=4-R=4-{KEY.digest_of(VOCABULARY)[:12]}.parquet"))
    with pytest.warns(UserWarning, match="its vocabulary is of protocol 0, and this version writes 1"):
        assert Store(tmp_path, VOCABULARY).losses(KEY).empty


# Across conditions


def test_summary_and_correlations(setting):
    texts = [GRID, LATTICE, "grid(K=2)", "temperature(alpha=0.5)"]
    output = evaluate.vocabulary(texts, **setting)
    losses = evaluate.losses(["softmax()", *texts], **setting)
    table = vocabulary.summary(losses, output)
    assert table.index.tolist() == texts and table.blocks.tolist() == [4] * 4
    nll = losses.pivot(index="block", columns="condition", values="nll")
    assert table.loc[GRID, "dnll"] == pytest.approx((nll[GRID] - nll["softmax()"]).mean(), abs=1e-12)
    assert table.loc[GRID, "jsd"] == pytest.approx(output[output.condition == GRID].jsd.mean())
    found = vocabulary.correlations(table)
    assert found.index.tolist() == list(vocabulary.METRICS) and set(found.n) == {4}
    ranks = table.rank()
    for metric in vocabulary.METRICS:
        assert found.loc[metric, "spearman"] == pytest.approx(np.corrcoef(ranks.dnll, ranks[metric])[0, 1])
        assert found.loc[metric, "pearson"] == pytest.approx(np.corrcoef(table.dnll, table[metric])[0, 1])
    assert vocabulary.correlations(table.assign(top1=1.0)).loc["top1"].isna()[["spearman", "pearson"]].all()
    with pytest.raises(LabError, match="over 2 conditions"):
        vocabulary.correlations(table[:2])
    with pytest.raises(LabError, match=r"block 0 of softmax\(\) has no loss"):
        vocabulary.summary(losses[losses.condition != "softmax()"], output)
