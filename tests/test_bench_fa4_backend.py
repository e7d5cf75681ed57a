"""FlashAttention-4 as a backend of the injection and as an attention implementation of transformers, without a GPU."""

import functools

import pytest
import torch
from conftest import make_tiny_model
from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM

from softmaxlab import backends, evaluate, fa4
from softmaxlab.attention import inject
from softmaxlab.backends.fa4 import Kernel, attend
from softmaxlab.conditions import Condition
from softmaxlab.errors import LabError
from softmaxlab.fa4 import Variant, packed_support, readings
from softmaxlab.operators import catalogue, parse

SIMULATED = "fa4(arch=simulated)"
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random model with grouped queries and heads of 64."""
    return make_tiny_model(
        tmp_path_factory.mktemp("tiny64"), hidden_size=64, head_dim=64, num_hidden_layers=2, num_key_value_heads=2
    )


@pytest.fixture
def model(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()


@pytest.fixture
def tokens():
    return torch.arange(160)[None] % 200


def tensors(heads=4, kv=2, queries=130, keys=130, dim=64, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, heads, queries, dim, generator=generator)
    k, v = (torch.randn(1, kv, keys, dim, generator=generator) for _ in "kv")
    return [t.to(dtype) for t in (q, k, v)]


# Names


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("fa4(arch=sm_90)", "fa4(arch=sm_90)"),
        (" fa4( variant = h15 , arch=sm_100 )", "fa4(variant=h15,arch=sm_100)"),
        ("fa4(arch=simulated,variant=poly(3,0.5))", "fa4(variant=poly(3,0.5),arch=simulated)"),
    ],
)
def test_the_name_has_one_canonical_form(text, canonical):
    assert backends.canonical(text) == canonical == backends.canonical(canonical)


def test_the_architecture_is_that_of_the_gpu(monkeypatch):
    from softmaxlab.backends import fa4 as backend

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(backend, "_capability", lambda: (9, 0))
    assert backends.canonical("fa4") == "fa4(arch=sm_90)"
    q, k, v = tensors()
    with pytest.raises(LabError, match="the GPU is an sm_90; leave arch out"):
        backends.get("fa4(arch=sm_100)")(q, k, v, parse("softmax()"), scaling=0.125)
    monkeypatch.setattr(backend, "_capability", lambda: (8, 0))
    with pytest.raises(LabError, match="the GPU is an sm_80, but the variants are for sm_90"):
        backends.canonical("fa4")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fa4(h15)", "'h15' cannot be read"),
        ("fa4(variant=h15,variant=h15,arch=sm_90)", "once"),
        ("fa4(variant=h16,arch=sm_90)", "h16"),
        ("fa4(variant=identity,arch=sm_90)", "identity is no exponential"),
        ("fa4(arch=sm_80)", "arch is 'sm_80'"),
        ("fa4(arch=sm_90", "not of the form"),
    ],
)
def test_names_that_are_refused(text, said):
    with pytest.raises(LabError) as caught:
        backends.get(text)
    assert said in str(caught.value) and "\n" not in str(caught.value)


@no_gpu
def test_without_a_gpu_the_architecture_must_be_named():
    with pytest.raises(LabError, match=r"no GPU to take the architecture from: name it, as fa4\(arch=sm_90\)"):
        backends.get("fa4")


# Which kernel computes an operator


@pytest.mark.parametrize(
    ("operator", "variant"),
    [
        ("softmax()", "stock"),
        ("h15()", "s(1)"),
        ("sq(k=3)", "s(3)"),
        ("sq(k=3,clamp=zero)", "g(3)"),
        ("fa4_poly(degree=1)", "poly(1,all)"),
    ],
)
def test_the_operator_chooses_the_variant(operator, variant):
    assert str(Kernel(None, "sm_90").chosen(parse(operator))) == variant


def test_a_named_variant_computes_its_operator_and_softmax_alone():
    kernel = Kernel(Variant.parse("h15"), "sm_90")
    assert str(kernel.chosen(parse("h15()"))) == "h15" and str(kernel.chosen(parse("softmax()"))) == "stock"
    with pytest.raises(LabError, match=r"computes sq\(k=1\) and softmax\(\), but not sq\(k=2\)"):
        kernel.chosen(parse("sq(k=2)"))
    assert str(Kernel(Variant.parse("control"), "sm_90").chosen(parse("softmax()"))) == "control"
    with pytest.raises(LabError, match=r"no variant of the kernel computes grid\(K=32"):
        Kernel(None, "sm_90").chosen(parse("grid(K=32)"))


def test_every_operator_of_a_variant_finds_a_kernel_that_computes_the_same():
    assert catalogue()
    for variant in fa4.variants():
        operator = variant.operator()
        if operator is not None:
            assert Kernel(None, "sm_90").chosen(operator).operator() == operator


# What it computes


@pytest.mark.parametrize("operator", ["softmax()", "h15()", "sq(k=3)"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_agrees_with_the_simulator_of_hoppers_semantics(operator, dtype):
    q, k, v = tensors(queries=300, keys=300, dtype=dtype)
    p = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    arguments = {"operator": parse(operator), "scaling": 0.125, "softcap": None, "mask": None}
    out = backends.get(SIMULATED)(q, k, v, **arguments)
    expected = backends.get(f"online(tile=128,tau=0,p={p})")(q, k, v, **arguments)
    error = (out.double() - expected.double()).norm() / expected.double().norm()
    # Scores differ by FP32 sums, which moves a few weights by a step of their lattice.
    assert out.shape == (1, 300, 4, 64) and out.dtype == dtype and error < {"bf16": 2e-3, "fp16": 1e-3}[p]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"mask": torch.ones(1, 1, 130, 130, dtype=torch.bool)}, "there is a mask"),
        ({"tensors": tensors(dtype=torch.float32)}, "the dtype is torch.float32"),
        ({"tensors": tensors(dim=80)}, "head dimensions are 80 and 80"),
        ({"tensors": tensors(queries=200)}, "200 queries over 130 keys"),
        ({"simulated": False}, "the model is on cpu"),
    ],
)
def test_what_the_kernel_is_not_gated_for_is_refused(change, said):
    change = dict(change)
    q, k, v = change.pop("tensors", None) or tensors()
    arguments = {"scaling": 0.1, "softcap": None, "mask": None, "where": "layer 3", "simulated": True} | change
    with pytest.raises(LabError) as caught:
        attend(q, k, v, Variant(), **arguments)
    assert "layer 3" in str(caught.value) and said in str(caught.value) and "\n" not in str(caught.value)


def test_the_kernel_is_called_with_the_models_scale_and_layout(monkeypatch):
    from softmaxlab.fa4 import patch

    seen = {}

    def kernel(q, k, v, **arguments):
        seen.update(arguments, shape=tuple(q.shape), kv=tuple(k.shape))
        return torch.zeros_like(q), None

    class OnGPU(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(patch, "flash_attn_func", kernel)
    q, k, v = (t.as_subclass(OnGPU) for t in tensors())
    attend(q, k, v, Variant.parse("g(3)"), scaling=0.3, softcap=15.0, mask=None, where="layer 0")
    assert seen["softmax_scale"] == 0.3 and seen["softcap"] == 15.0 and seen["causal"] is True
    assert str(seen["variant"]) == "g(3)" and seen["shape"] == (1, 130, 4, 64) and seen["kv"] == (1, 130, 2, 64)


# In a model


def off(a, b):
    return ((a - b).float().norm() / b.float().norm()).item()


def test_a_condition_patches_the_layers_that_it_names(model, tokens):
    def logits(text, backend=SIMULATED):
        with torch.no_grad(), inject(model, Condition.parse(text), backend=backend) as injection:
            out = model(tokens, use_cache=False).logits
            injection.check_reached()
        return out

    stock, one, both = logits("softmax()"), logits("h15()@1"), logits("h15()")
    assert not torch.equal(stock, one) and not torch.equal(one, both)
    exact = logits("softmax()", "reference")
    assert off(stock, exact) < 0.03 < off(both, exact)


def test_losses_pair_stock_and_patched_on_the_same_blocks(folder, text_file, tmp_path):
    from softmaxlab import statistics

    frame = evaluate.losses(
        ["softmax()", "h15()"],
        model=str(folder),
        corpus=str(text_file),
        context=64,
        blocks=3,
        dtype="bfloat16",
        device="cpu",
        results=str(tmp_path),
        backend=SIMULATED,
        progress=False,
    )
    assert set(frame.backend) == {SIMULATED}
    estimate = statistics.contrast(frame, "h15()", "softmax()")
    assert estimate.n_blocks == 3 and estimate.mean != 0


def test_a_float32_model_is_told_to_load_another_dtype(folder, tokens):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with inject(model, Condition.parse("h15()"), backend=SIMULATED), pytest.raises(LabError, match="load the model so"):
        model(tokens)


# For users of transformers


@pytest.fixture
def on_cpu(monkeypatch):
    from softmaxlab.backends import fa4 as backend

    monkeypatch.setattr(backend, "attend", functools.partial(attend, simulated=True))


def test_enable_and_disable(model, tokens, on_cpu):
    before = model.config._attn_implementation
    with torch.no_grad():
        exact = model(tokens).logits
        assert fa4.enable(model, variant="stock") is model
        stock = model(tokens).logits
        h15 = fa4.enable(model, variant="h15")(tokens).logits
        fa4.disable(model)
        assert model.config._attn_implementation == before and torch.equal(model(tokens).logits, exact)
    assert off(stock, exact) < 0.03 < off(h15, exact)
    fa4.disable(model)  # twice does no harm


def test_generation_with_a_growing_cache_is_that_of_a_forward_pass(model, tokens, on_cpu):
    fa4.enable(model, variant="g(3)")
    prompt = tokens[:, :20]
    with torch.no_grad():
        made = model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=250)
        step = model(made[:, :-1]).logits[0, 19:].float()
    chosen = step.gather(1, made[0, 20:, None])[:, 0]
    assert made.shape[1] == 24 and (step.amax(-1) - chosen < 0.1).all()  # equal but for BF16's rounding


def test_what_a_model_cannot_have_is_refused(model, tokens, on_cpu):
    with pytest.raises(LabError, match="identity is no exponential"):
        fa4.enable(model, variant="identity")
    fa4.enable(model, variant="g(3)")
    padded = torch.ones_like(tokens)
    padded[:, :3] = 0
    with pytest.raises(LabError, match="there is padding, which it does not skip"), torch.no_grad():
        model(tokens, attention_mask=padded)
    two = torch.cat([torch.arange(80), torch.arange(80)])[None]  # two sequences in a row, as packing makes them
    with pytest.raises(LabError, match="position_ids start anew"), torch.no_grad():
        model(tokens, position_ids=two, use_cache=False)
    model.train()
    model.config.attention_dropout = 0.1
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with pytest.raises(LabError, match=r"dropout is 0\.1"), torch.no_grad():
        model(tokens)


def test_a_variant_can_be_named_when_a_model_is_loaded(folder, tokens, on_cpu):
    name = fa4.register("g(3)")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation=name).eval()
    assert model.config._attn_implementation == name
    with torch.no_grad():
        assert torch.isfinite(model(tokens).logits).all()


def test_the_simulated_kernel_is_the_gates_own():
    q, k, v = tensors()
    out = attend(q, k, v, Variant.parse("s(3)"), scaling=0.125, softcap=None, mask=None, where="", simulated=True)
    same = readings.simulated(*(t.transpose(1, 2) for t in (q, k, v)), variant="s(3)", causal=True)[0]
    assert torch.equal(out, same)


# Head dimensions that only the packed kernel's gates cover


def wide(dims, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, 90, d, generator=generator) for h, d in ((4, dims[0]), (2, dims[0]), (2, dims[1])))
    return [t.to(dtype) for t in (q, k, v)]


SAID = {"scaling": 0.1, "softcap": None, "mask": None, "where": "layer 3", "simulated": True}


@pytest.mark.parametrize("dims", packed_support.HEAD_DIMS["sm_90"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_packed_takes_every_head_dimension_of_its_gates_and_stock_stands_beside_it(dims, dtype):
    q, k, v = wide(dims, dtype)
    exact = backends.get("reference")(q.float(), k.float(), v.float(), parse("softmax()"), scaling=0.1)
    stock, packed = (attend(q, k, v, Variant.parse(text), **SAID) for text in ("stock", "packed(4,3)"))
    assert packed.shape == (1, 90, 4, dims[1]) and packed.dtype == dtype
    assert off(stock.float(), exact) < 0.005 < off(packed.float(), exact) < 0.03


@pytest.mark.parametrize("text", ["h15", "g(3)", "poly(2,all)", "control"])
def test_other_variants_keep_to_the_dimensions_of_their_gates(text):
    with pytest.raises(LabError, match="head dimensions are 96 and 96, but must be 64 or 128"):
        attend(*wide((96, 96)), Variant.parse(text), **SAID)


def test_a_measurement_never_takes_stock_for_packed_and_a_user_gets_stock_with_a_notice(monkeypatch):
    monkeypatch.setattr(packed_support, "_noticed", set())
    q, k, v = tensors(dim=80)
    with pytest.raises(LabError, match=r"layer 3: packed\(4,3\) is not offered here: the head dimension is 80"):
        attend(q, k, v, Variant.parse("packed"), **SAID)
    with pytest.warns(RuntimeWarning, match=r"packed\(4,3\) falls back to the stock exponential: the head dimension"):
        out = attend(q, k, v, Variant.parse("packed"), fall_back=True, **SAID)
    exact = backends.get("reference")(q.float(), k.float(), v.float(), parse("softmax()"), scaling=0.1)
    assert off(out.float(), exact) < 0.005


def test_on_blackwell_packed_is_refused_to_measurements(monkeypatch):
    from softmaxlab.backends import fa4 as backend

    class OnGPU(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(backend, "_capability", lambda: (10, 0))
    q, k, v = (t.as_subclass(OnGPU) for t in tensors())
    with pytest.raises(LabError, match="never run"):
        attend(q, k, v, Variant.parse("packed(3,3)"), **SAID | {"simulated": False})


def test_a_model_with_heads_of_96_runs_packed(tmp_path, tokens, on_cpu):
    folder = make_tiny_model(tmp_path, hidden_size=96, head_dim=96, num_hidden_layers=2, num_key_value_heads=2)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        exact = model(tokens).logits
        packed = fa4.enable(model, variant="packed")(tokens).logits
    assert 0 < off(packed, exact) < 0.05


# Sliding windows


@pytest.mark.parametrize("text", ["stock", "packed(4,3)"])
def test_a_window_is_that_of_the_reference(text):
    q, k, v = tensors(queries=90, keys=130)
    own = torch.arange(90)[:, None] + 40
    keys = torch.arange(130)
    mask = ((keys <= own) & (keys > own - 24))[None, None]
    exact = backends.get("reference")(q.float(), k.float(), v.float(), parse("softmax()"), scaling=0.1, mask=mask)
    out, full = (attend(q, k, v, Variant.parse(text), window=w, **SAID) for w in (24, None))
    assert off(out.float(), exact) < (0.005 if text == "stock" else 0.03) and off(full.float(), exact) > 0.2
    assert torch.equal(attend(q, k, v, Variant.parse(text), window=130, **SAID), full), "a window of all keys is none"


def test_the_kernel_is_given_the_window_in_the_form_of_its_gates(monkeypatch):
    from softmaxlab.fa4 import patch

    seen = []

    def kernel(q, k, v, **arguments):
        seen.append(arguments)
        return torch.zeros_like(q), None

    class OnGPU(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(patch, "flash_attn_func", kernel)
    q, k, v = (t.as_subclass(OnGPU) for t in tensors())
    for window in (24, 130, None):
        attend(q, k, v, Variant(), window=window, **SAID | {"simulated": False})
    assert [(a["causal"], a.get("window_size")) for a in seen] == [(False, (23, 0)), (True, None), (True, None)]


@pytest.fixture
def windowed():
    """A random Mistral whose queries see 24 keys."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "head_dim": 64, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 300}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
    return MistralForCausalLM(MistralConfig(**sizes, **heads, sliding_window=24)).to(torch.bfloat16).eval()


def test_a_model_with_a_window_runs_packed_and_other_variants_refuse_it(windowed, tokens, on_cpu):
    with torch.no_grad():
        exact = windowed(tokens).logits
        stock = fa4.enable(windowed, variant="stock")(tokens).logits
        packed = fa4.enable(windowed, variant="packed")(tokens).logits
        made = windowed.generate(tokens[:, :40], max_new_tokens=4, do_sample=False, pad_token_id=250)
        step = windowed(made[:, :-1]).logits[0, 39:].float()
        fa4.enable(windowed, variant="g(3)")
        with pytest.raises(LabError, match=r"window of 24 is shorter than 160 keys, but .* not g\(3\)"):
            windowed(tokens)
        assert torch.isfinite(windowed(tokens[:, :24]).logits).all()
        fa4.disable(windowed)
        windowed.config.sliding_window = None
        full = windowed(tokens).logits
    assert off(stock, exact) < 0.05 and 0 < off(packed, exact) < 0.1 < off(full, exact)
    chosen = step.gather(1, made[0, 40:, None])[:, 0]
    assert (step.amax(-1) - chosen < 0.1).all()  # a cache that keeps the window alone changes nothing
