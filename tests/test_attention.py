"""Injection: the exact map is the model's own attention, masks arrive, what cannot be honoured is refused."""

import pytest
import torch
import transformers as T

from softmaxlab import backends, operators
from softmaxlab.attention import inject
from softmaxlab.backends import reference
from softmaxlab.conditions import Condition
from softmaxlab.errors import LabError
from softmaxlab.operators import Grid, MeanThreshold, Softmax, TopK

WINDOW = 16
COMMON = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
CONFIGS = {
    "llama": (T.LlamaConfig, {}),
    "qwen2": (T.Qwen2Config, {}),
    "mistral": (T.MistralConfig, {"sliding_window": WINDOW}),
    "gemma2": (T.Gemma2Config, {"head_dim": 16, "sliding_window": WINDOW, "attn_logit_softcapping": 2.0}),
    "gemma3": (T.Gemma3TextConfig, {"head_dim": 16, "sliding_window": WINDOW}),
}
WINDOWED = ["mistral", "gemma2", "gemma3"]


def build(name, **changes):
    torch.manual_seed(0)
    cls, extra = CONFIGS[name]
    # sdpa has no soft-capping: Gemma-2's own exact form is eager.
    attention = "eager" if name == "gemma2" else "sdpa"
    config = cls(**{**COMMON, **extra, **changes})
    return T.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def tokens(length, batch=2):
    return torch.randint(3, 97, (batch, length), generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("length", [1, WINDOW - 1, WINDOW, WINDOW + 1, 61])
@pytest.mark.parametrize("chunk", [0, 7])
def test_exact_map_gives_the_models_own_logits(name, length, chunk):
    model, x = build(name), tokens(length)
    with torch.no_grad():
        own = model(x).logits
        with inject(model, Softmax(), chunk=chunk) as injection:
            ours = model(x).logits
        injection.check_reached()
        after = model(x).logits
    torch.testing.assert_close(ours, own, atol=2e-6, rtol=1e-5)
    assert torch.equal(after, own), "the model is as it was"


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("operator", [Softmax(), TopK(f=0.25), MeanThreshold(), Grid(K=8, R=4.0)], ids=str)
@pytest.mark.parametrize("length", [WINDOW - 1, WINDOW, WINDOW + 1, 40])
def test_no_future_token_leaks(name, operator, length):
    model, x = build(name), tokens(length, batch=1)
    changed = x.clone()
    changed[0, -1] = (changed[0, -1] - 3 + 1) % 94 + 3
    with torch.no_grad(), inject(model, operator, chunk=5):
        a, b = model(x).logits, model(changed).logits
    assert torch.equal(a[:, :-1], b[:, :-1])
    assert not torch.equal(a[:, -1], b[:, -1])


@pytest.mark.parametrize("name", WINDOWED)
def test_a_token_outside_the_window_does_not_reach_a_single_layer(name):
    model = build(name, num_hidden_layers=1)
    if hasattr(model.config, "layer_types") and model.config.layer_types[0] != "sliding_attention":
        model = build(name, num_hidden_layers=1, layer_types=["sliding_attention"])
    x = tokens(WINDOW + 8, batch=1)
    changed = x.clone()
    changed[0, 0] = (changed[0, 0] - 3 + 1) % 94 + 3
    with torch.no_grad(), inject(model, Grid(K=8)):
        a, b = model(x).logits, model(changed).logits
    assert not torch.equal(a[:, WINDOW - 1], b[:, WINDOW - 1]), "the last query whose window still holds key 0"
    assert torch.equal(a[:, WINDOW:], b[:, WINDOW:])


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_gives_what_each_text_gives_alone(name, side):
    model = build(name)
    long, short = tokens(40, batch=1), tokens(23, batch=1)
    x = torch.full((2, 40), 2)
    visible = torch.zeros(2, 40, dtype=torch.long)
    place = slice(17, 40) if side == "left" else slice(0, 23)
    x[0], x[1, place] = long[0], short[0]
    visible[0], visible[1, place] = 1, 1
    positions = (visible.cumsum(-1) - 1).clamp(min=0)
    for operator in (Softmax(), TopK(f=0.25), MeanThreshold(), Grid(K=16, R=4.0)):
        with torch.no_grad(), inject(model, operator, chunk=9):
            both = model(x, attention_mask=visible, position_ids=positions).logits
            alone = model(short).logits
            solo = model(long).logits
        assert both.isfinite().all(), "rows that see no key are zeros, not NaN"
        torch.testing.assert_close(both[1, place], alone[0], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(both[0], solo[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_decoding_with_a_cache_continues_the_prefill(name):
    model, x = build(name), tokens(30)
    with torch.no_grad(), inject(model, Grid(K=64, R=4.0)):
        whole = model(x).logits
        first = model(x[:, :25], use_cache=True)
        rest = model(x[:, 25:], past_key_values=first.past_key_values).logits
    torch.testing.assert_close(rest, whole[:, 25:], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("operator", [Softmax(), TopK(f=0.15), MeanThreshold(weights="uniform"), Grid(K=21, R=4.0)])
def test_chunks_do_not_change_the_result(operator):
    torch.manual_seed(5)
    q, k, v = torch.randn(2, 4, 33, 8), torch.randn(2, 2, 33, 8), torch.randn(2, 2, 33, 8)
    whole = reference.attend(q, k, v, operator, scaling=0.7, chunk=33)
    for chunk in (1, 8, 32):
        torch.testing.assert_close(reference.attend(q, k, v, operator, scaling=0.7, chunk=chunk), whole)
    explicit = torch.ones(33, 33, dtype=torch.bool).tril()[None, None]
    torch.testing.assert_close(reference.attend(q, k, v, operator, scaling=0.7, mask=explicit), whole)


def test_attention_equals_the_definition_written_out():
    torch.manual_seed(6)
    q, k, v = torch.randn(1, 4, 9, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    operator, cap = Grid(K=5, R=4.0), 3.0
    out = reference.attend(q, k, v, operator, scaling=0.5, softcap=cap)
    for head in range(4):
        for i in range(9):
            s = cap * torch.tanh(0.5 * (k[0, head // 2, : i + 1] @ q[0, head, i]) / cap)
            p = operators.probabilities(operator, s, torch.ones(i + 1, dtype=torch.bool))
            torch.testing.assert_close(out[0, i, head], p @ v[0, head // 2, : i + 1])


def test_chunk_length_bounds_the_scores_in_memory():
    for shape, keys in [((1, 9, 2048, 64), 2048), ((1, 64, 16384, 128), 16384), ((8, 32, 300_000, 1), 300_000)]:
        chunk = reference.chunk_length(torch.empty(shape, device="meta"), keys)
        assert 1 <= chunk <= shape[2]
        assert chunk == 1 or shape[0] * shape[1] * chunk * keys <= max(reference.ELEMENTS.values())


def test_layers_that_are_not_named_stay_exact():
    model, x = build("llama"), tokens(40)
    with torch.no_grad():
        own = model.model(x, output_hidden_states=True).hidden_states
        with inject(model, Condition(Grid(K=2), (1,))):
            changed = model.model(x, output_hidden_states=True).hidden_states
    torch.testing.assert_close(changed[1], own[1], atol=2e-6, rtol=1e-5)
    assert (changed[2] - own[2]).abs().max() > 1e-4


def test_two_models_hold_different_operators_at_once_and_nothing_is_left_behind():
    a, b, x = build("llama"), build("qwen2"), tokens(20)
    before = set(T.AttentionInterface._global_mapping), set(T.AttentionMaskInterface._global_mapping)
    with torch.no_grad():
        with inject(a, Grid(K=2)):
            coarse = a(x).logits
            with inject(b, Softmax()):
                assert torch.equal(a(x).logits, coarse)
        with pytest.raises(RuntimeError, match="inside"), inject(a, Softmax()):
            raise RuntimeError("inside")
    assert (set(T.AttentionInterface._global_mapping), set(T.AttentionMaskInterface._global_mapping)) == before
    assert a.config._attn_implementation == b.config._attn_implementation == "sdpa"


def test_bfloat16_models_keep_float32_attention():
    model, x = build("llama").bfloat16(), tokens(20)
    with torch.no_grad():
        own = model(x).logits
        with inject(model, Softmax()):
            ours = model(x).logits
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours.float(), own.float(), atol=0.02, rtol=0.05)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: m.train(), "training mode"),
        (lambda m: setattr(m.config, "output_attentions", True), "output_attentions"),
        (lambda m: setattr(m.config, "kv_lora_rank", 8), "multi-head latent attention"),
        (lambda m: setattr(m.config, "add_cross_attention", True), "cross-attention"),
        (lambda m: setattr(m.model.layers[0].self_attn, "sinks", torch.zeros(4)), "attention sinks"),
        (lambda m: setattr(m.config, "layer_types", ["linear_attention"] * 3), "linear_attention"),
        (lambda m: setattr(type(m), "_supports_attention_backend", False), "AttentionInterface"),
    ],
)
def test_features_that_cannot_be_honoured_are_refused_by_name(change, says, monkeypatch):
    model = build("llama")
    monkeypatch.setattr(type(model), "_supports_attention_backend", True)
    if says == "output_attentions":
        model.set_attn_implementation("eager")  # transformers itself refuses output_attentions on sdpa
    change(model)
    with pytest.raises(LabError, match=says), inject(model, Softmax()):
        pass


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ({"output_attentions": True}, "output_attentions"),
        ({"attention_mask": torch.zeros(2, 1, 20, 20)}, "torch.float32"),
        ({"attention_mask": torch.ones(2, 1, 20, 19, dtype=torch.bool)}, "19"),
    ],
)
def test_calls_that_cannot_be_honoured_are_refused(call, says):
    model = build("llama")
    with torch.no_grad(), pytest.raises(LabError, match=says), inject(model, Softmax()):
        model(tokens(20), **call)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"s_aux": torch.zeros(4)}, "attention sinks"),
        ({"position_bias": torch.zeros(1)}, "position bias"),
        ({"cu_seq_lens_q": torch.zeros(2)}, "packed sequences"),
        ({"is_causal": False}, "not causal"),
        ({"dropout": 0.1}, "drops attention weights"),
        ({"sliding_window": 8}, "window of 8"),
    ],
)
def test_arguments_of_the_hook_that_cannot_be_honoured_are_refused(arguments, says):
    model = build("llama")
    module = model.model.layers[0].self_attn
    q, k = torch.randn(1, 4, 12, 16), torch.randn(1, 2, 12, 16)
    with inject(model, Softmax()):
        hook = T.AttentionInterface._global_mapping[model.config._attn_implementation]
        hook(module, q, k, k, None)
        with pytest.raises(LabError, match=says):
            hook(module, q, k, k, None, **arguments)
        with pytest.raises(LabError, match="no mask for 3 queries"):
            hook(module, q[:, :, :3], k, k, None)


def test_an_encoder_decoder_is_refused():
    config = T.T5Config(vocab_size=97, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    with pytest.raises(LabError, match="T5"), inject(T.T5ForConditionalGeneration(config).eval(), Softmax()):
        pass


def test_a_layer_beyond_the_model_is_named():
    says = "layer 3, but LlamaForCausalLM has layers 0–2"
    with pytest.raises(LabError, match=says), inject(build("llama"), Condition(Softmax(), (3,))):
        pass


def test_a_layer_that_is_never_reached_is_reported():
    model = build("llama")
    with pytest.raises(LabError, match="layer 0 did not go through"), inject(model, Softmax()) as injection:
        injection.check_reached()


@pytest.mark.parametrize("backend", ["reference", "fused", "online(tile=16,tau=8)"])
@pytest.mark.parametrize(
    ("shapes", "options", "says"),
    [
        (((1, 3, 8, 4), (1, 2, 8, 4)), {}, "3 query heads cannot share 2 key heads"),
        (((1, 2, 8, 4), (1, 2, 8, 6)), {}, "do not go together"),
        (((2, 2, 8, 4), (1, 2, 8, 4)), {}, "do not go together"),
        (((2, 8, 4), (2, 8, 4)), {}, "must have 4"),
        (((1, 2, 8, 4), (1, 2, 8, 4)), {"softcap": -3.0}, "softcap is -3.0"),
        (((1, 2, 8, 4), (1, 2, 8, 4)), {"softcap": 0.0}, "softcap is 0.0"),
        (((1, 2, 8, 4), (1, 2, 8, 4)), {"mask": torch.ones(3, 1, 8, 8, dtype=torch.bool)}, "the mask has shape"),
        (((1, 2, 8, 4), (1, 2, 8, 4)), {"mask": torch.ones(1, 1, 9, 8, dtype=torch.bool)}, "the mask has shape"),
    ],
)
def test_a_call_without_a_meaning_is_refused_by_every_backend(backend, shapes, options, says):
    q, k = (torch.randn(shape) for shape in shapes)
    with pytest.raises(LabError, match=says.replace("(", r"\(")):
        backends.get(backend)(q, k, k, Softmax(), scaling=0.5, **options)


def test_a_text_form_is_a_condition_too(tiny_model):
    tiny = T.AutoModelForCausalLM.from_pretrained(tiny_model).eval()
    ids = torch.arange(8)[None]
    with torch.no_grad():
        with inject(tiny, "grid(K=4)@0"):
            text = tiny(ids).logits
        with inject(tiny, Condition.parse("grid(K=4)@0")):
            assert torch.equal(tiny(ids).logits, text)


def test_an_empty_batch_gives_an_empty_output():
    q = torch.randn(0, 2, 8, 4)
    assert reference.attend(q, q, q, Softmax(), scaling=0.5).shape == (0, 8, 2, 4)
