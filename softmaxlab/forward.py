"""One forward pass: losses from logits, layers below a change shared, and where a NaN came from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from softmaxlab.attention import inject, text_config
from softmaxlab.conditions import Condition
from softmaxlab.errors import LabError
from softmaxlab.operators import Softmax

# Logits turned into float32 log-probabilities at once; bounds memory, changes no number.
_TOKENS = 2048


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The model's decoder layers, in order. Raises LabError if there is not exactly one such list."""
    n = text_config(model).num_hidden_layers
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == n]
    lists = [m for m in lists if any(hasattr(c, "layer_idx") for c in m[0].modules())]
    if len(lists) != 1:
        raise LabError(f"{type(model).__name__}: {len(lists)} lists of {n} decoder layers found, expected one")
    return lists[0]


def block_losses(logits: Tensor, tokens: Tensor) -> Tensor:
    """Mean next-token loss of each block, in nats (definition: §3.1, A.2).

    Args:
        logits: (batch, context, vocabulary), any float dtype.
        tokens: int64, (batch, context); token t+1 is predicted at position t.

    Returns:
        float64, (batch,): log-softmax in float32, accumulated in float64 over context − 1 predictions.
    """
    batch, context = tokens.shape
    total = torch.zeros(batch, dtype=torch.float64)
    for b in range(batch):
        for start in range(0, context - 1, _TOKENS):
            stop = min(start + _TOKENS, context - 1)
            part = nn.functional.cross_entropy(
                logits[b, start:stop].float(), tokens[b, start + 1 : stop + 1].to(logits.device), reduction="none"
            )
            total[b] += part.cpu().double().sum()
    return total / (context - 1)


@torch.inference_mode()
def evaluate_batch(
    model: PreTrainedModel,
    condition: Condition,
    tokens: Tensor,
    *,
    backend: str = "reference",
    prefix: SharedPrefix | None = None,
) -> Tensor:
    """Per-block losses of a batch under a condition.

    Args:
        model: the frozen model.
        condition: what stands in for softmax, and where.
        tokens: int64, (batch, context), on the model's device.
        backend: which backend computes attention.
        prefix: the exact pass of the same tokens, to start at the first layer that the condition changes.

    Returns:
        float64, (batch,), nats.

    Raises:
        LabError: the logits are not finite; the sentence names the first layer whose output is not.
    """
    first = condition.first_layer if prefix else 0
    with (
        prefix.resume(first) if prefix else nullcontext(),
        inject(model, condition, backend=backend) as injection,
    ):
        losses = block_losses(model(tokens, use_cache=False).logits, tokens)
        injection.calls.update(range(first))  # these went through the hook in the exact pass
        injection.check_reached()
        if not torch.isfinite(losses).all():
            raise LabError(_explain_nan(model, condition, tokens))
    return losses


def _explain_nan(model: PreTrainedModel, condition: Condition, tokens: Tensor) -> str:
    found: list[int] = []
    hooks = [
        layer.register_forward_hook(
            lambda _m, _args, out, i=i: None if torch.isfinite(_hidden(out)).all() else found.append(i)
        )
        for i, layer in enumerate(decoder_layers(model))
    ]
    try:
        model(tokens, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    where = f"first in the output of layer {found[0]}" if found else "after the last layer"
    return f"condition {condition} gives logits that are not finite, {where}"


def _hidden(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


@contextmanager
def final_hidden(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """While open, collects the hidden states that each forward pass hands to the model's head.

    Yields:
        The list they are put into, each (batch, context, hidden).
    """
    caught: list[Tensor] = []
    hook = model.base_model.register_forward_hook(lambda _m, _args, out: caught.append(out.last_hidden_state))
    try:
        yield caught
    finally:
        hook.remove()


@torch.inference_mode()
def head_logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """The logits that the model makes of final hidden states, with whatever scale and soft-cap it has.

    Args:
        hidden: (tokens, hidden).

    Returns:
        (tokens, vocabulary), in the model's dtype.
    """
    states = BaseModelOutputWithPast(last_hidden_state=hidden[None])
    with _returning(model.base_model, states):
        ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        return model(ids, use_cache=False).logits[0]


class SharedPrefix:
    """The exact-softmax forward pass of a batch, kept so that conditions can start at their first changed layer.

    A condition that leaves the layers below ℓ alone shares everything below ℓ with the baseline, so that part
    is computed once. `resume(ℓ)` makes the layers below ℓ return what they returned then, whatever they are
    given; embedding, head and everything around the layers run as the model defines them. The pass is the
    baseline's own: `losses` are those of softmax.

    Args:
        model, tokens, backend: as in `evaluate_batch`.
        depth: how many layers' outputs to keep, from the first; the largest ℓ of `resume`. None: all.
    """

    def __init__(self, model: PreTrainedModel, tokens: Tensor, backend: str, depth: int | None = None) -> None:
        self._layers = list(decoder_layers(model))
        self.outputs: list[Any] = [None] * len(self._layers[:depth])
        hooks = [
            layer.register_forward_hook(lambda _m, _args, out, i=i: self.outputs.__setitem__(i, out))
            for i, layer in enumerate(self._layers[:depth])
        ]
        try:
            self.losses = evaluate_batch(model, Condition(Softmax()), tokens, backend=backend)
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def resume(self, layer: int) -> Iterator[None]:
        """While open, the model's layers below `layer` only hand back what the exact pass stored."""
        with ExitStack() as stack:
            for module, output in zip(self._layers[:layer], self.outputs[:layer], strict=True):
                stack.enter_context(_returning(module, output))
            yield


@contextmanager
def _returning(module: nn.Module, output: Any) -> Iterator[None]:
    """While open, the module returns `output`. accelerate puts a forward of its own on a module: it comes back."""
    before = module.__dict__.get("forward")
    module.forward = lambda *_args, **_kwargs: output
    try:
        yield
    finally:
        if before is None:
            del module.__dict__["forward"]
        else:
            module.forward = before
