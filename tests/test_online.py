"""The kernel's semantics: exact maps stay softmax, one tile is the whole row, and a literal walk agrees."""

import dataclasses
import math
import time

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import twins_lattices as twins
from conftest import make_tiny_model

from softmaxlab import backends, operators
from softmaxlab.backends import reference
from softmaxlab.conditions import Condition
from softmaxlab.errors import LabError
from softmaxlab.evaluate import losses
from softmaxlab.forward import evaluate_batch
from softmaxlab.models import load_model
from softmaxlab.online import Simulator, walk
from softmaxlab.operators import H15, SQ, FA4Poly, PoT, RowmaxPoT, S, Softmax, Temperature
from softmaxlab.semantics import E4M3_MAX, Semantics, converted

LN2 = math.log(2)
SEMANTICS = [
    Semantics(),
    Semantics(tau=0.0),
    Semantics(tile=16, tau=0.75),
    Semantics(tile=7, tau=2.0),
    Semantics(tile=16, tau=4.0, decision="warp"),
    Semantics(tile=16, tau=0.0, max_offset=8),
    Semantics(tile=1, tau=8.0),
]
LATTICES = [H15(), S(), SQ(k=0), SQ(k=3), PoT(m=1.0), PoT(m=2.0), RowmaxPoT(K_max=12), FA4Poly(degree=1)]


def arguments(n=75, *, batch=2, spread=2.0, seed=0):
    torch.manual_seed(seed)
    q, k = torch.randn(batch, 4, n, 8) * spread, torch.randn(batch, 2, n, 8) * spread
    return q, k, torch.randn(batch, 2, n, 8)


def masks(n, batch=2):
    """The causal mask left out and written out, a window, and padding on the left that leaves rows without a key."""
    causal = torch.ones(n, n, dtype=torch.bool).tril()
    padded = causal.expand(batch, n, n).clone()
    padded[1, :, : n // 3] = False
    return {
        "none": None,
        "causal": causal[None, None],
        "window": (causal & ~causal.tril(-9))[None, None],
        "padding": padded[:, None],
    }


@pytest.mark.parametrize("semantics", SEMANTICS, ids=str)
@pytest.mark.parametrize("mask", ["none", "causal", "window", "padding"])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_the_exact_exponential_is_softmax(semantics, mask, softcap):
    q, k, v = arguments()
    call = {"scaling": 0.4, "softcap": softcap, "mask": masks(75)[mask]}
    exact = reference.attend(*(x.double() for x in (q, k, v)), Softmax(), dtype=torch.float64, **call)
    for chunk in (0, 20):
        out = Simulator(semantics)(q, k, v, Softmax(), **call, chunk=chunk)
        torch.testing.assert_close(out.double(), exact, atol=5e-6, rtol=1e-5)


def test_a_temperature_in_the_kernel_is_one_only_as_long_as_nothing_is_rescaled():
    """The rescale is exact and not the operator's, so that other bases than e do not survive it."""
    q, k, v = arguments()
    flat = reference.attend(q, k, v, Temperature(alpha=0.5), scaling=0.4)
    one = Simulator(Semantics(tile=75, tau=0.0))(q, k, v, Temperature(alpha=0.5), scaling=0.4)
    torch.testing.assert_close(one, flat, atol=5e-6, rtol=1e-5)
    several = Simulator(Semantics(tile=16, tau=0.0))(q, k, v, Temperature(alpha=0.5), scaling=0.4)
    assert (several - flat).abs().max() > 0.1


@pytest.mark.parametrize("semantics", SEMANTICS, ids=str)
def test_the_exact_exponential_is_softmax_key_by_key(semantics):
    torch.manual_seed(1)
    n = -(-60 // semantics.tile) * semantics.tile
    scores, valid = torch.randn(64, n) * 6, torch.rand(64, n) < 0.7
    valid[5] = False
    scores = scores.masked_fill(~valid, -torch.inf)
    rows = walk(scores, valid, Softmax(), semantics)
    final = (rows.weights * rows.scale[..., None]).flatten(-2)
    want = torch.exp(scores - torch.where(rows.anchors[:, :1] > -torch.inf, rows.anchors[:, :1], 0.0))
    torch.testing.assert_close(final, want, rtol=3e-6, atol=1e-37)
    assert (rows.top[5], final[5].sum()) == (-torch.inf, 0)
    lag = ((rows.top - rows.anchors[:, 0]) / LN2)[valid.any(-1)]
    assert (lag >= 0).all()
    assert (lag <= semantics.tau).all()


@pytest.mark.parametrize("operator", LATTICES, ids=str)
@pytest.mark.parametrize("mask", ["none", "window", "padding"])
def test_one_tile_with_an_anchor_that_follows_is_the_whole_row(operator, mask):
    q, k, v = arguments(61)
    call = {"scaling": 0.4, "mask": masks(61)[mask], "chunk": 61}
    offline = reference.attend(q, k, v, operator, **call)
    for tile in (61, 64, 1000):
        assert torch.equal(Simulator(Semantics(tile=tile, tau=0.0))(q, k, v, operator, **call), offline)
    # With more tiles the lattice moves with the anchor: the same would show that nothing was simulated.
    tiled = Simulator(Semantics(tile=8, tau=0.0))(q, k, v, operator, **call)
    assert (tiled - offline).abs().max() > 1e-3


@pytest.mark.parametrize("operator", LATTICES, ids=str)
def test_one_tile_weighs_each_key_as_the_operator_does(operator):
    torch.manual_seed(2)
    scores, valid = torch.randn(30, 50) * 9, torch.rand(30, 50) < 0.8
    scores = scores.masked_fill(~valid, -torch.inf)
    rows = walk(scores, valid, operator, Semantics(tile=50, tau=0.0))
    assert torch.equal(rows.weights.squeeze(-2), operator(scores, valid))
    assert (rows.scale == 1).all()


def stored_as(dtype):
    return lambda w: torch.tensor(w).clamp(max=E4M3_MAX if dtype == torch.float8_e4m3fn else math.inf).to(dtype).item()


WALKS = [
    (H15(), Semantics(tile=8, tau=8.0)),
    (H15(), Semantics(tile=8, tau=0.0)),
    (H15(), Semantics(tile=8, tau=1.5, decision="warp")),
    (S(), Semantics(tile=5, tau=0.75, p="bf16")),
    (SQ(k=5), Semantics(tile=16, tau=3.0, p="fp16")),
    (PoT(m=1.0), Semantics(tile=8, tau=0.75, p="e4m3", max_offset=8)),
    (FA4Poly(degree=2), Semantics(tile=8, tau=0.0, p="e4m3", max_offset=8)),
    (RowmaxPoT(K_max=6), Semantics(tile=8, tau=4.0, decision="warp", p="bf16")),
]


@pytest.mark.parametrize(("operator", "semantics"), WALKS, ids=lambda x: str(x))
@pytest.mark.parametrize("mask", ["none", "window", "padding"])
def test_a_literal_walk_over_the_tiles_agrees(operator, semantics, mask):
    n = 75
    q, k, v = arguments(n, seed=3)
    simulator, m = Simulator(semantics), masks(n)[mask]
    out = simulator(q, k, v, operator, scaling=0.3, mask=m, chunk=32)
    fields = {f.name: getattr(operator, f.name) for f in dataclasses.fields(operator)}
    formats = {"none": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "e4m3": torch.float8_e4m3fn}
    lagging = rescales = rows = 0
    for b, head in ((b, h) for b in range(2) for h in range(4)):
        s = 0.3 * (q[b, head] @ k[b, head // 2].T)
        valid = masks(n)["causal"][0, 0] if m is None else m[b % len(m), 0]
        s = s.masked_fill(~valid, -torch.inf)
        want, anchors, moved = twins.kernel(
            s.tolist(),
            v[b, head // 2, :, 0].tolist(),
            lambda x: twins.ANCHORED[operator.name](x, **fields),
            tile=semantics.tile,
            tau=semantics.tau,
            warp=32 if semantics.decision == "warp" else 1,
            stored=stored_as(formats[semantics.p]),
            offset=semantics.max_offset,
        )
        # FP32 scores of another product may lie on another side of a lattice's edge, or of a step of P's format.
        got = out[b, :, head, 0]
        off = ~torch.isclose(got, torch.tensor(want), rtol=2e-4, atol=1e-4)
        assert off.sum() <= 1, (got[off], torch.tensor(want)[off])
        tops = s.amax(-1)
        lagging += sum(a < t for a, t in zip(anchors, tops.tolist(), strict=True))
        rescales += sum(moved)
        rows += int((tops > -torch.inf).sum())
    counted = simulator.frame()[["rows", "lagging", "rescales"]].sum().tolist()
    assert counted == [rows, lagging, rescales]


def row_scores(*scores):
    """Arguments whose causal scores in the last row are those given, in octaves; one head, values 1, 2, …"""
    n = len(scores)
    k = torch.tensor(scores)[None, None, :, None] * LN2
    return torch.ones(1, 1, n, 1), k, torch.arange(1.0, n + 1)[None, None, :, None]


def test_the_anchor_stays_up_to_tau_and_moves_beyond():
    # The last tile is seen first. Its maximum is 0; the first tile's is 7 or 9 octaves higher.
    for height, lags in ((7.0, True), (9.0, False)):
        simulator = Simulator(Semantics(tile=2, tau=8.0))
        simulator(*row_scores(height, 0.0, 0.0, 0.0)[:3], Softmax(), scaling=1.0)
        counts = simulator.frame().iloc[0]
        assert counts.rows == 4
        assert counts.lagging == (2 if lags else 0), "the two rows that see both tiles"
        assert counts.rescales == (0 if lags else 2)
    follows = Simulator(Semantics(tile=2, tau=0.0))
    follows(*row_scores(7.0, 0.0, 0.0, 0.0), Softmax(), scaling=1.0)
    assert follows.frame().iloc[0].lagging == 0


def test_a_lagging_anchor_takes_the_row_maximum_off_the_lattice():
    # The maximum lies 0.3 octaves above the anchor: H15 gives it 2^0.5 → 1.5, where the offline row gives it 1.
    q, k, v = row_scores(0.3, 0.0)
    out = Simulator(Semantics(tile=1, tau=8.0))(q, k, v, H15(), scaling=1.0)[0, 1, 0, 0].item()
    assert out == pytest.approx((1.5 * 1 + 1 * 2) / 2.5)
    followed = Simulator(Semantics(tile=1, tau=0.0))(q, k, v, H15(), scaling=1.0)[0, 1, 0, 0].item()
    # Key 2 was weighed 1 at its own anchor and rescaled exactly.
    assert followed == pytest.approx((1 + 2.0**-0.3 * 2) / (1 + 2.0**-0.3))
    offline = reference.attend(q, k, v, H15(), scaling=1.0)[0, 1, 0, 0].item()
    assert offline == pytest.approx((1 + 2.0**-0.5 * 2 * 1.5 / 2 * 2**0.5) / 1.75)


def test_a_warp_follows_when_one_of_its_rows_must():
    n = 64
    k = torch.zeros(1, 1, n, 1)
    k[0, 0, 0] = 3 * LN2  # the first key, 3 octaves above all others
    q = torch.ones(1, 1, n, 1)
    q[0, 0, 40] = 5.0  # for this row 15 octaves
    v = torch.randn(1, 1, n, 1)
    counts = {}
    for decision in ("row", "warp"):
        simulator = Simulator(Semantics(tile=32, tau=8.0, decision=decision))
        simulator(q, k, v, H15(), scaling=1.0, chunk=5)
        counts[decision] = simulator.frame().iloc[0]
    # Rows 0 to 31 see the first tile only; of the others row 40 alone must move.
    assert (counts["row"].rescales, counts["row"].lagging) == (1, 31)
    assert (counts["warp"].rescales, counts["warp"].lagging) == (32, 0)


def test_saturation_is_counted_and_the_denominator_keeps_the_full_weight():
    # 0.7 octaves of lag: an octave lattice rounds that to 2, times 2^8, which E4M3 cannot hold.
    q, k, v = row_scores(0.7, 0.0)
    simulator = Simulator(Semantics(tile=1, tau=0.75, p="e4m3", max_offset=8))
    out = simulator(q, k, v, PoT(m=1.0), scaling=1.0)[0, 1, 0, 0].item()
    assert out == pytest.approx((448 * 1 + 256 * 2) / (512 + 256))
    counts = simulator.frame().iloc[0]
    assert (counts.p_saturated, counts.weights) == (1, 3)
    exact = Simulator(Semantics(tile=1, tau=0.75, p="e4m3", max_offset=8))
    exact(q, k, v, Softmax(), scaling=1.0)
    assert exact.frame().p_saturated.sum() == 0, "the kernel's range check holds for the exact exponential"


@pytest.mark.parametrize(("p", "error"), [("bf16", 2.0**-8), ("fp16", 2.0**-11), ("e4m3", 2.0**-4)])
def test_rounding_p_moves_the_output_by_its_precision(p, error):
    q, k, v = arguments(spread=1.0)
    offset = 8 if p == "e4m3" else 0
    call = {"scaling": 0.3}
    plain = Simulator(Semantics(tile=16, tau=0.0))(q, k, v, Softmax(), **call)
    rounded = Simulator(Semantics(tile=16, tau=0.0, p=p, max_offset=offset))(q, k, v, Softmax(), **call)
    most = reference.attend(q, k, v.abs(), Softmax(), **call)  # Σ p|v|, which the relative error of P multiplies
    difference = (rounded - plain).abs()
    assert difference.max() > error / 100
    assert (difference <= error * 1.01 * most + 1e-4).all()
    # Powers of two, and {1, 1.5} times them, are numbers of every format.
    coarse = Simulator(Semantics(tile=16, tau=0.0))(q, k, v, H15(), **call)
    stored = Simulator(Semantics(tile=16, tau=0.0, p=p, max_offset=offset))(q, k, v, H15(), **call)
    torch.testing.assert_close(stored, coarse, atol=1e-4 if p == "e4m3" else 1e-6, rtol=1e-5)


def test_fp8_operands_are_scaled_cut_off_and_counted():
    torch.manual_seed(4)
    x = torch.randn(2, 3, 40, 8)
    x[0, 0] *= 3e-5
    x[1, 2, 7, 1] = 700.0
    cast, n = converted(x, "e4m3")
    assert n.item() == 1
    assert cast[1, 2, 7, 1] == E4M3_MAX
    normal = (x.abs() > 2.0**-6) & (x.abs() < E4M3_MAX)
    assert ((cast - x).abs()[normal] <= x.abs()[normal] * 2.0**-4).all()
    errors = {}
    for kind in ("e4m3_tensor", "e4m3_head"):
        y, n = converted(x, kind)
        assert n.item() == 0
        assert y[1, 2, 7, 1] == pytest.approx(700.0)
        errors[kind] = ((y - x)[0, 0].norm() / x[0, 0].norm()).item()
    assert errors["e4m3_head"] < 0.04 < errors["e4m3_tensor"], "a small head drowns in the tensor's scale"
    assert torch.equal(converted(x, "none")[0], x)
    assert torch.equal(converted(torch.zeros(1, 1, 2, 2), "e4m3_head")[0], torch.zeros(1, 1, 2, 2))
    # A sequence's scale is its own: results do not depend on what else is in the batch.
    assert torch.equal(converted(x, "e4m3_tensor")[0][:1], converted(x[:1], "e4m3_tensor")[0])
    simulator = Simulator(Semantics(qkv="e4m3"))
    q, k, v = arguments()
    out = simulator(q * 200, k, v, Softmax(), scaling=0.001)
    counts = simulator.frame().iloc[0]
    assert 0 < counts.operands_saturated == (q * 200 > 448).sum() + (q * 200 < -448).sum()
    assert counts.operands == q.numel() + k.numel() + v.numel()
    parts = [converted(x, "e4m3")[0] for x in (q * 200, k, v)]
    torch.testing.assert_close(out, reference.attend(*parts, Softmax(), scaling=0.001), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("operator", [Softmax(), H15(), H15(clamp="none"), RowmaxPoT(K_max=3)], ids=str)
@pytest.mark.parametrize("semantics", SEMANTICS, ids=str)
def test_rows_without_a_key_are_zero_and_bad_scores_are_not_hidden(operator, semantics):
    q, k, v = arguments(40)
    mask = masks(40)["padding"]
    out = Simulator(semantics)(q, k, v, operator, scaling=0.4, mask=mask)
    assert (out[1, :13] == 0).all()
    assert out.isfinite().all()
    for bad in (math.nan, math.inf):
        poisoned = k.clone()
        poisoned[0, 0, 20] = bad
        out = Simulator(semantics)(q.abs(), poisoned, v, operator, scaling=0.4)
        assert out[0, 20:, :2].isnan().all()
        assert out[0, :20].isfinite().all()
        assert out[1].isfinite().all()


def test_only_operators_anchored_at_the_row_maximum_are_simulated():
    q, k, v = arguments(10)
    for text in ("grid(K=8)", "topk(f=0.5)", "mean_threshold()", "log2p()", "ilpot()", "rescue(of=softmax())"):
        with pytest.raises(LabError, match="anchored at the row maximum") as caught:
            Simulator(Semantics())(q, k, v, operators.parse(text), scaling=1.0)
        assert text in str(caught.value)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return load_model(str(make_tiny_model(tmp_path_factory.mktemp("online"), seed=1)), device="cpu")


@pytest.mark.parametrize("semantics", SEMANTICS, ids=str)
def test_a_models_losses_with_the_exact_exponential_are_those_of_softmax(tiny, semantics):
    tokens = torch.randint(3, 200, (3, 150), generator=torch.Generator().manual_seed(5))
    exact = evaluate_batch(tiny.model, Condition(Softmax()), tokens)
    simulated = evaluate_batch(tiny.model, Condition(Softmax()), tokens, backend=str(semantics))
    assert (simulated - exact).abs().max() <= 1e-6
    coarse = evaluate_batch(tiny.model, Condition(H15()), tokens, backend=str(semantics))
    assert (coarse - exact).abs().min() > 1e-5


def test_a_simulator_of_ones_own_counts_by_layer(tiny):
    tokens = torch.randint(3, 200, (2, 100), generator=torch.Generator().manual_seed(6))
    simulator = Simulator(Semantics(tile=16, tau=8.0, p="bf16"))
    evaluate_batch(tiny.model, Condition(H15(), (1,)), tokens, backend=simulator)
    frame = simulator.frame()
    assert frame.layer.tolist() == [0, 1, 2]
    assert (frame.rows == 2 * 4 * 100).all()
    assert (frame.weights == 2 * 4 * 100 * 101 // 2).all()
    assert (frame.p_saturated == 0).all()


def test_the_semantics_are_a_backend_by_name(tiny, text_file):
    folder = tiny.spec.source
    run = {"model": folder, "corpus": str(text_file), "context": 64, "blocks": 2, "device": "cpu", "results": ""}
    frame = losses(["softmax()", "h15()"], backend="online(tile=16,tau=8)", progress=False, **run)
    plain = losses(["softmax()", "h15()"], progress=False, **run)
    assert set(frame.backend) == {"online(tile=16,tau=8)"}
    difference = (frame.nll - plain.nll).abs()
    assert (difference[frame.condition == "softmax()"] <= 1e-6).all()
    assert (difference[frame.condition == "h15()"] > 1e-6).any()
    assert backends.canonical(" online( tau=8.0 ) ") == "online(tile=128,tau=8)"
    assert backends.canonical("reference") == "reference"


@hypothesis.given(
    tile=st.integers(1, 10**6),
    tau=st.floats(0, 8.5),
    decision=st.sampled_from(["row", "warp"]),
    p=st.sampled_from(["none", "bf16", "fp16"]),
    max_offset=st.integers(0, 7),
    qkv=st.sampled_from(["none", "e4m3", "e4m3_tensor", "e4m3_head"]),
)
def test_text_forms_parse_back(**fields):
    semantics = Semantics(**fields)
    assert Semantics.parse(str(semantics)) == semantics
    assert str(Semantics.parse(str(semantics))) == str(semantics)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("online(tile=0)", "tile is 0"),
        ("online(tile=-128)", "tile is -128"),
        ("online(tile=12.5)", "'12.5', but must be a whole number"),
        ("online(tau=-1)", "tau is -1.0"),
        ("online(tau=nan)", "tau is nan"),
        ("online(tau=inf)", "tau is inf"),
        ("online(tau=soon)", "'soon', but must be a number"),
        ("online(p=int8)", "p is 'int8', but must be one of none, bf16, fp16, e4m3"),
        ("online(qkv=e5m2)", "qkv is 'e5m2'"),
        ("online(decision=block)", "row, warp"),
        ("online(max_offset=-1)", "max_offset is -1"),
        ("online(p=e4m3,max_offset=8,tau=8)", "max_offset 8 + tau 8 must stay below 8.807"),
        ("online(tau=8,p=fp16,max_offset=8)", "below 16"),
        ("online(width=3)", "has the fields tile, tau"),
        ("online(tile=3,tile=4)", "gives it twice"),
        ("online(128)", "'128'"),
        ("online[128]", "online(tile=128,tau=8"),
        ("offline()", "unknown backend 'offline()'"),
    ],
)
def test_bad_names_are_refused_in_one_sentence(text, says):
    with pytest.raises(LabError) as caught:
        backends.get(text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_it_costs_at_most_four_evaluations_of_exact_attention():
    """Attention alone; in a model everything else is the same, so that the ratio of evaluations is smaller."""
    q, k, v = torch.randn(1, 6, 1024, 64), torch.randn(1, 2, 1024, 64), torch.randn(1, 2, 1024, 64)

    def seconds(attend, operator):
        start = time.perf_counter()
        attend(q, k, v, operator, scaling=0.125)
        return time.perf_counter() - start

    ratios = []
    for _ in range(5):
        exact = seconds(reference.attend, Softmax())
        ratios.append(seconds(Simulator(Semantics(tile=128, tau=8.0)), H15()) / exact)
    assert min(ratios) <= 4
