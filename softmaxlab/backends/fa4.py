"""FlashAttention-4, stock and patched, as a backend: the operator inside the kernel (paper §5.4, B.2.1).

The text form is `fa4`. The operator of a condition says which kernel computes it: `softmax()` the stock one, `h15()`,
`sq(k=3)`, `fa4_poly(degree=1)` and the like the variant that stands for it. So A1 − A0 is a contrast of two conditions
of one backend, and `h15()@3` patches one layer. `fa4(variant=g(3))` names the variant where several stand for an
operator; `softmax()` is the stock kernel there too, but for `fa4(variant=control)`.

What a kernel does around its exponential differs between architectures, so the architecture is part of the name:
`fa4(arch=sm_90)`. Left out, it is the GPU's. `fa4(arch=simulated)` rehearses on any machine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from softmaxlab.errors import LabError
from softmaxlab.fa4 import packed_cases, packed_support, patch, readings
from softmaxlab.fa4.variants import Variant
from softmaxlab.operators import H15, SQ, Operator, Softmax
from softmaxlab.operators.schraudolph import K_MAX

ARCHS = {"sm_90": (9, 0), "sm_100": (10, 0), "sm_103": (10, 3)}
SIMULATED = "simulated"
HEAD_DIMS = (64, 128)  # that the gates of every variant cover; those of the packed ones cover packed_support.HEAD_DIMS
DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Kernel:
    """Attention by FlashAttention-4; has the signature of `reference.attend`.

    Attributes:
        variant: that stands for every operator but softmax; None takes it from the operator.
        arch: `sm_90`, `sm_100`, `sm_103`, or `simulated`.

    Raises:
        LabError: a variant that is no exponential, or an unknown architecture.
    """

    variant: Variant | None = None
    arch: str = "sm_90"

    def __post_init__(self) -> None:
        if self.variant is not None and self.variant.operator() is None:
            raise LabError(f"backend fa4: {self.variant} is no exponential, so a model cannot run with it")
        if self.arch not in (*ARCHS, SIMULATED):
            raise LabError(f"backend fa4: arch is {self.arch!r}, but must be one of {', '.join(ARCHS)}, {SIMULATED}")

    @classmethod
    def parse(cls, text: str) -> Kernel:
        """Read a text form: `fa4`, `fa4(variant=h15)`, `fa4(variant=poly(3,0.5),arch=sm_90)`.

        Raises:
            LabError: it is none; or no architecture is named and there is no GPU to take it from.
        """
        match = re.fullmatch(r"\s*fa4\s*(?:\((.*)\))?\s*", text)
        if not match:
            raise LabError(f"backend {text!r} is not of the form fa4(variant=h15,arch=sm_90)")
        values: dict[str, str] = {}
        for part in re.split(r",(?![^()]*\))", match[1] or ""):  # commas outside a variant's parentheses
            name, equals, value = (p.strip() for p in part.partition("="))
            if not part.strip():
                continue
            if name not in ("variant", "arch") or not equals or name in values:
                raise LabError(
                    f"backend {text!r}: {part.strip()!r} cannot be read, because fa4 has variant and arch, once"
                )
            values[name] = value
        variant = Variant.parse(values["variant"]) if "variant" in values else None
        return cls(variant, values.get("arch") or _gpu(text))

    def __str__(self) -> str:
        """Canonical text form."""
        return f"fa4({f'variant={self.variant},' if self.variant else ''}arch={self.arch})"

    def chosen(self, operator: Operator) -> Variant:
        """The variant that computes an operator.

        Raises:
            LabError: none does.
        """
        same = SQ(k=1, clamp=operator.clamp) if isinstance(operator, H15) else operator
        if self.variant is not None and self.variant.operator() == same:
            return self.variant
        if isinstance(operator, Softmax):
            return Variant()
        if self.variant is not None:
            raise LabError(f"backend {self} computes {self.variant.operator()} and softmax(), but not {operator}")
        for variant in _catalogue():
            if variant.operator() == same:
                return variant
        raise LabError(f"backend {self}: no variant of the kernel computes {operator}; the reference backend does")

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        operator: Operator,
        *,
        scaling: float,
        softcap: float | None = None,
        mask: Tensor | None = None,
        layer: int = 0,
    ) -> Tensor:
        """Attention with `operator` inside the kernel; arguments and result as `reference.attend`."""
        self._check_gpu()
        return attend(
            query,
            key,
            value,
            self.chosen(operator),
            scaling=scaling,
            softcap=softcap,
            mask=mask,
            where=f"layer {layer}",
            simulated=self.arch == SIMULATED,
        )

    def _check_gpu(self) -> None:
        if self.arch != SIMULATED and torch.cuda.is_available() and _capability() != ARCHS[self.arch]:
            major, minor = _capability()
            raise LabError(f"backend {self}: the GPU is an sm_{major}{minor}; leave arch out to compute on it")


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    variant: Variant,
    *,
    scaling: float,
    softcap: float | None,
    mask: Tensor | None,
    where: str,
    window: int | None = None,
    simulated: bool = False,
    fall_back: bool = False,
) -> Tensor:
    """Causal attention by the kernel with a variant, over all keys or a sliding window.

    Args:
        query: (batch, heads, queries, dim), BF16 or FP16; dim 64 or 128, with a packed variant or stock also what
            `packed_support.HEAD_DIMS` has (there the values' may differ).
        key, value: (batch, kv_heads, keys, dim); heads is a multiple of kv_heads, queries at most keys.
        variant: which exponential.
        scaling, softcap: as `reference.attend`.
        mask: must be None: plain causal, aligned at the last query and key.
        where: names the caller in errors.
        window: keys that a query sees, its own among them; None for all. With a packed variant or stock.
        simulated: by `fa4.readings.simulated` or `packed_cases.simulated`, on any machine.
        fall_back: run the stock kernel, with a notice, where a packed variant is not offered. For users: a
            measurement must not take the stock kernel's loss for the variant's.

    Returns:
        (batch, queries, heads, dim).

    Raises:
        LabError: what the kernel is not gated for.
    """
    if mask is not None:
        raise LabError(f"fa4, {where}: there is a mask (padding or a sliding window), but the kernel runs plain causal")
    if query.dtype not in DTYPES or key.dtype != query.dtype or value.dtype != query.dtype:
        raise LabError(f"fa4, {where}: the dtype is {query.dtype}, but must be bfloat16 or float16: load the model so")
    dims = (query.shape[-1], value.shape[-1])
    wide = dims not in [(d, d) for d in HEAD_DIMS]
    if wide and not variant.packed and (variant.kind != "stock" or dims not in packed_support.HEAD_DIMS["sm_90"]):
        raise LabError(f"fa4, {where}: head dimensions are {dims[0]} and {dims[1]}, but must be 64 or 128")
    window = None if window is None or key.shape[2] <= window else window  # which then holds every key
    if window is not None and not variant.packed and variant.kind != "stock":
        raise LabError(
            f"fa4, {where}: its window of {window} is shorter than {key.shape[2]} keys, but of the variants only the "
            f"packed ones are tested with windows, not {variant}"
        )
    if variant.packed:
        arch = 90 if simulated or not query.is_cuda else int("{}{}".format(*_capability()))
        why = packed_support.refusal(variant, arch, {"q": query, "v": value, "softmax_scale": scaling})
        if why and not fall_back:
            raise LabError(f"fa4, {where}: {variant} is not offered here: {why}")
        if why and simulated:  # on a GPU the patch itself falls back
            packed_support.notice(variant, why)
            variant = Variant()
    if query.shape[2] > key.shape[2]:
        raise LabError(
            f"fa4, {where}: {query.shape[2]} queries over {key.shape[2]} keys; there must be no more queries"
        )
    if not simulated and not query.is_cuda:
        raise LabError(
            f"fa4, {where}: the model is on {query.device.type}, but the kernel needs a Hopper or Blackwell GPU"
        )
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    # A window is passed in the form that the gates read: so many keys before the query's own, none after it.
    seen = {"causal": True} if window is None else {"causal": False, "window_size": (window - 1, 0)}
    arguments = {"variant": variant, **seen, "softmax_scale": scaling, "softcap": softcap or 0.0}
    if simulated and (wide or window is not None):
        return packed_cases.simulated(q, k, v, **arguments)[0]
    if simulated:
        q = (q.float() * scaling * q.shape[-1] ** 0.5).to(q.dtype)  # its own scale is 1/√dim
        return readings.simulated(q, k, v, variant=variant, causal=True, softcap=softcap or 0.0)[0]
    return patch.flash_attn_func(q, k, v, **arguments, return_lse=True)[0]


@lru_cache
def _catalogue() -> tuple[Variant, ...]:
    """One variant for each operator that some variant computes, the paper's form first."""
    texts = [f"s({k})" for k in range(K_MAX + 1)] + [f"g({k})" for k in range(K_MAX + 1)]
    texts += [f"poly({d},all)" for d in (1, 2, 3)]
    texts += [f"packed({k},{n})" for k in (1, 2, 3, 4) for n in range(6)]
    return tuple(Variant.parse(t) for t in texts)


@lru_cache
def _capability() -> tuple[int, int]:
    return torch.cuda.get_device_capability()


def _gpu(text: str) -> str:
    if not torch.cuda.is_available():
        raise LabError(
            f"backend {text!r}: there is no GPU to take the architecture from: name it, as fa4(arch=sm_90), to read "
            "what is stored"
        )
    for arch, capability in ARCHS.items():
        if capability == _capability():
            return arch
    major, minor = _capability()
    raise LabError(f"backend {text!r}: the GPU is an sm_{major}{minor}, but the variants are for {', '.join(ARCHS)}")
