"""Puts an operator into a frozen transformers model, and takes it out again.

The operator goes in through `AttentionInterface`; its mask function is registered in the same step. Without
one, transformers hands every custom attention the mask None, and the causal or window mask is silently lost.
What the hook cannot honour it refuses, naming the model's feature: a number from a model that was not
computed as its authors meant it is worse than none.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from softmaxlab import backends
from softmaxlab.conditions import Condition
from softmaxlab.errors import LabError
from softmaxlab.operators import Operator

# Arguments through which models pass features that change the attention map itself.
_UNHONOURED = {
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "position_bias": "an additive position bias",
    "cu_seq_lens_q": "packed sequences",
    "cu_seq_lens_k": "packed sequences",
    "output_attentions": "output_attentions",
}
_PLAIN_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
_numbers = itertools.count()


@dataclass
class Injection:
    """A condition while it is in a model. `calls` counts how often each layer's attention ran through it."""

    condition: Condition
    n_layers: int
    calls: Counter = field(default_factory=Counter)

    def check_reached(self) -> None:
        """Raise LabError unless every layer's attention has gone through the hook."""
        missed = [i for i in range(self.n_layers) if not self.calls[i]]
        if missed:
            raise LabError(
                f"the attention of layer {missed[0]} did not go through the operator: "
                f"{self.calls.total()} calls reached it, {len(missed)} of {self.n_layers} layers made none"
            )


def text_config(model: PreTrainedModel) -> Any:
    """The configuration of the model's language part."""
    return model.config.get_text_config()


def mask_function(*args: Any, **kwargs: Any) -> Tensor | None:
    """transformers' sdpa mask (bool, True = visible), or None only for a plain causal prefill.

    sdpa also leaves the mask out while decoding and for a static cache; those cases need knowledge of the
    kernel's alignment, so here they get an explicit mask.
    """
    prefill = kwargs.get("q_length") is not None and kwargs.get("q_length") == kwargs.get("kv_length")
    kwargs["allow_is_causal_skip"] = bool(prefill and kwargs.get("allow_is_causal_skip", True))
    kwargs["allow_is_bidirectional_skip"] = False
    return sdpa_mask(*args, **kwargs)


def check_supported(model: PreTrainedModel, condition: Condition) -> int:
    """The number of layers of a model that can take the condition.

    Raises:
        LabError: naming the model's feature, or the layer, that stands in the way.
    """
    name, config = type(model).__name__, text_config(model)
    if model.training:
        raise LabError(f"{name} is in training mode: call model.eval() first")
    if not getattr(model, "_supports_attention_backend", False):
        raise LabError(f"{name} does not route its attention through AttentionInterface")
    if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        raise LabError(f"{name} has cross-attention; only decoder-only models are supported")
    if getattr(config, "kv_lora_rank", None) is not None:
        raise LabError(f"{name} uses multi-head latent attention (kv_lora_rank); it is not supported")
    if config.output_attentions:
        raise LabError(f"{name} has output_attentions on; the weights are never stored, so turn it off")
    if any(hasattr(m, "sinks") for m in model.modules()):
        raise LabError(f"{name} has attention sinks, which add a term to the row sum; it is not supported")
    other = set(getattr(config, "layer_types", None) or ()) - _PLAIN_LAYERS
    if other:
        raise LabError(f"{name} has layers of type {', '.join(sorted(other))}, which are not softmax attention")
    n_layers = config.num_hidden_layers
    bad = [i for i in condition.layers or () if i >= n_layers]
    if bad:
        raise LabError(f"condition {condition} names layer {bad[0]}, but {name} has layers 0–{n_layers - 1}")
    return n_layers


@contextmanager
def inject(
    model: PreTrainedModel,
    condition: Condition | Operator | str,
    *,
    backend: str | Callable = "reference",
    **options: Any,
) -> Iterator[Injection]:
    """While the context is open, `model` computes its attention under `condition`.

    Args:
        model: a causal language model of transformers, in eval mode.
        condition: an operator for all layers, a condition that names layers, or the text form of either.
        backend: which backend computes it: its name, or a function with the signature of `reference.attend`.
        options: passed to the backend's `attend`, e.g. `chunk`.

    Yields:
        The injection, which counts the calls that reached it.

    Raises:
        LabError: what the model does cannot be honoured, at entry where it shows in the configuration, or at
            the call that shows it.
    """
    if isinstance(condition, str):
        condition = Condition.parse(condition)
    elif isinstance(condition, Operator):
        condition = Condition(condition)
    injection = Injection(condition, check_supported(model, condition))
    attend = backend if callable(backend) else backends.get(backend)

    def forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        softcap: float | None = None,
        sliding_window: int | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        _check_call(module, query, key, attention_mask, dropout, sliding_window, kwargs)
        layer = module.layer_idx
        injection.calls[layer] += 1
        out = attend(
            query,
            key,
            value,
            condition.at(layer),
            scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
            softcap=softcap,
            mask=attention_mask,
            layer=layer,
            **options,
        )
        return out, None

    # A name of its own for every injection: two models can hold different operators at the same time.
    name = f"softmaxlab_{next(_numbers)}"
    configs = {id(m.config): m.config for m in model.modules() if isinstance(m, PreTrainedModel)}
    before = {key: config._attn_implementation for key, config in configs.items()}
    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, mask_function)
    try:
        model.set_attn_implementation(name)
        yield injection
    finally:
        for key, config in configs.items():
            config._attn_implementation = before[key]
        AttentionInterface._global_mapping.pop(name, None)
        AttentionMaskInterface._global_mapping.pop(name, None)


def _check_call(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    dropout: float,
    window: int | None,
    kwargs: dict[str, Any],
) -> None:
    where = f"{type(module).__name__} (layer {getattr(module, 'layer_idx', '?')})"
    if module.training or dropout:
        raise LabError(f"{where} is in training mode or drops attention weights: only frozen inference is supported")
    if not getattr(module, "is_causal", True) or kwargs.get("is_causal") is False:
        raise LabError(f"{where} is not causal; only causal self-attention is supported")
    for argument, feature in _UNHONOURED.items():
        if kwargs.get(argument) is not None and kwargs[argument] is not False:
            raise LabError(f"{where} uses {feature}, which the hook cannot honour")
    n_queries, n_keys = query.shape[2], key.shape[2]
    if mask is None:
        if n_queries != n_keys:
            raise LabError(f"{where} got no mask for {n_queries} queries over {n_keys} keys")
        if window is not None and n_keys > window:
            raise LabError(f"{where} got no mask, but its window of {window} is shorter than {n_keys} keys")
    elif mask.dtype != torch.bool or mask.ndim != 4 or mask.shape[-2:] != (n_queries, n_keys):
        raise LabError(
            f"{where} got a mask of {mask.dtype} and shape {tuple(mask.shape)}; "
            f"a bool mask (batch, 1, {n_queries}, {n_keys}) is needed"
        )
