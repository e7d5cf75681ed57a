"""FlashAttention-4 with another exponential in a transformers model, for its users:

    fa4.enable(model, variant="g(3)")
    model.generate(…)
    fa4.disable(model)

The model's attention becomes an entry of transformers' own register, `softmaxlab-fa4-g(3)`, which `from_pretrained`
also takes as `attn_implementation` once it is registered. Causal self-attention in BF16 or FP16, head dimensions 64
and 128 (packed variants on Hopper: also 96, 192 and 256, as `packed_support` has them), grouped heads, with a growing
cache or none; sliding windows with packed variants and stock; no padding, sinks, dropout or gradients. A call that a
packed variant does not offer runs the stock kernel, with a notice. To measure a model's loss use the backend instead
(`softmaxlab.backends.fa4`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from softmaxlab.errors import LabError
from softmaxlab.fa4.variants import Variant

_PREFIX = "softmaxlab-fa4-"  # without the word by which transformers knows its own kernels


def register(variant: str | Variant = "stock") -> str:
    """Register a variant with transformers; the name for `attn_implementation`.

    Raises:
        LabError: an unknown variant, or one that is no exponential.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flash_attention_mask

    variant = Variant.parse(variant)
    if variant.operator() is None:
        raise LabError(f"{variant} is no exponential: {variant.why_not}")

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
        return _forward(
            variant, module, query, key, value, attention_mask, scaling, dropout, softcap, sliding_window, kwargs
        )

    name = f"{_PREFIX}{variant}"
    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, flash_attention_mask)
    return name


def enable(model: Any, variant: str | Variant = "stock") -> Any:
    """Give a transformers model FlashAttention-4 with a variant, and return it.

    Args:
        model: whose attention goes through transformers' `AttentionInterface`.
        variant: text form, as `softmaxlab.fa4.Variant`.

    Raises:
        LabError: as `register`; a model whose attention cannot be replaced. What the kernel does not take is refused
            at the call that needs it.
    """
    name = register(variant)
    if not getattr(model, "_supports_attention_backend", False):
        raise LabError(f"{type(model).__name__} does not route its attention through AttentionInterface")
    before = model.config._attn_implementation
    if not before.startswith(_PREFIX):
        model._softmaxlab_before = before
    model.set_attn_implementation(name)
    return model


def disable(model: Any) -> Any:
    """Put back what `enable` replaced, and return the model."""
    before = model.__dict__.pop("_softmaxlab_before", None)
    if before is not None:
        model.set_attn_implementation(before)
    return model


def _forward(
    variant: Variant,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    dropout: float,
    softcap: float | None,
    window: int | None,
    more: dict[str, Any],
) -> tuple[Tensor, None]:
    from softmaxlab.backends import fa4

    where = f"{type(module).__name__} {getattr(module, 'layer_idx', '?')}"
    if dropout:
        raise LabError(f"fa4, {where}: dropout is {dropout}, but the kernel has none: call model.eval()")
    if not getattr(module, "is_causal", True) or more.get("is_causal") is False:
        raise LabError(f"fa4, {where}: it is not causal, but the variants are tested with causal self-attention")
    if mask is not None:
        raise LabError(f"fa4, {where}: there is padding, which it does not skip: give it sequences of one length")
    positions = more.get("position_ids")
    several = positions is not None and positions.dim() == 2 and positions.shape[-1] > 1
    if several and bool((positions.diff(dim=-1) < 0).any()):
        # transformers makes no mask of them for such an implementation, so that each would see the ones before it.
        raise LabError(f"fa4, {where}: position_ids start anew, but it takes one sequence a row: pass them one by one")
    for name in ("s_aux", "sinks", "position_bias", "cu_seq_lens_q", "cu_seq_lens_k"):
        if more.get(name) is not None:
            raise LabError(f"fa4, {where}: it passes {name}, which the variants are not tested with")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    options = {"scaling": scaling, "softcap": softcap, "mask": None, "window": window, "where": where}
    return fa4.attend(query, key, value, variant, fall_back=True, **options), None
