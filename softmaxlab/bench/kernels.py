"""What is timed: FlashAttention-4 with a variant, or one of torch's own attention kernels, by name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from softmaxlab.bench.cells import FP8, Cell
from softmaxlab.errors import LabError
from softmaxlab.fa4.variants import Variant

STOCK, CONTROL = "stock", "control"
#: torch's kernels by the name of their backend in `torch.nn.attention.SDPBackend`. They compute exact softmax.
REFERENCES = {"sdpa-flash": "FLASH_ATTENTION", "sdpa-efficient": "EFFICIENT_ATTENTION", "sdpa-cudnn": "CUDNN_ATTENTION"}
#: What the issue's tables show; `f(7)` and the like are to be named.
DEFAULT = (STOCK, CONTROL, "h15", "s(3)", "s(7)", "fused7", "poly(1,all)", "poly(2,all)", "identity")

Call = Callable[[Tensor, Tensor, Tensor], Tensor]


def parse(text: str) -> str:
    """Canonical name. Raises LabError on one that is neither a reference nor a variant."""
    return text if text in REFERENCES else str(Variant.parse(text))


def parse_all(texts: Iterable[str]) -> list[str]:
    """Canonical names without repetition: stock and control first, which are always there; `references` names all.

    A speed-up is a ratio to stock, and what the replacement path alone does is the control's: neither can be left out.
    """
    texts = [t for text in texts for t in (REFERENCES if text == "references" else [text])]
    return list(dict.fromkeys([STOCK, CONTROL, *map(parse, texts)]))


def is_reference(name: str) -> bool:
    """Whether torch computes it."""
    return name in REFERENCES


def is_bound(name: str) -> bool:
    """Whether only its time means something."""
    return name == "identity"


@contextlib.contextmanager
def opened(name: str, cell: Cell) -> Iterator[Call]:
    """The kernel as a function of (batch, length, heads, dim) tensors on the GPU, giving the output.

    Everything that is set up once a process or a block is done at entry, so that a call pays for none of it.
    FlashAttention-4 is asked for the log-sum-exp: the kernel that is timed is then the one the gates have read.

    Raises:
        LabError: FlashAttention-4 cannot be patched here; a reference does not take the cell.
    """
    if is_reference(name):
        with _sdpa(name, cell) as call:
            yield call
        return
    from softmaxlab.fa4 import patch

    with patch.variant(name):
        from flash_attn.cute import interface

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return interface.flash_attn_func(q, k, v, causal=cell.causal, return_lse=True)[0]

        yield call


@contextlib.contextmanager
def _sdpa(name: str, cell: Cell) -> Iterator[Call]:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    if cell.dtype in FP8:
        raise LabError(f"{name} takes no {cell.dtype}: the references are timed with bf16 and fp16")

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = scaled_dot_product_attention(q, k, v, is_causal=cell.causal, enable_gqa=cell.gqa > 1)
        return out.transpose(1, 2)

    with sdpa_kernel(getattr(SDPBackend, REFERENCES[name])), torch.inference_mode():
        yield call
