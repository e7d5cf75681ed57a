"""The exponential of FlashAttention-4 replaced at run time, and put back.

    with fa4.variant("g(3)"):
        flash_attn.cute.flash_attn_func(q, k, v, causal=True)

Replacement methods are assigned to FlashAttention-4's classes and the originals assigned back; no installed file
changes, so both kernels live in one process. A compiled kernel must not outlive its variant: each variant has a
compile cache of its own, in memory, and in a folder of its own where FlashAttention-4's disk cache is on.

The assignment holds for the whole process. Blocks nest, in one thread; a second thread that enters is refused, and so
is leaving blocks out of order. Other threads that call the kernel meanwhile get the variant. Gradients are refused: the
backward pass recomputes the exact exponential and would not be the derivative of what ran. A spawned worker starts
with the stock kernel: make `patch.in_worker(text)` its initializer.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from softmaxlab.errors import LabError
from softmaxlab.fa4 import edits, packed_edits, packed_support, source
from softmaxlab.fa4.variants import Variant

_lock = threading.RLock()  # a block that the garbage collector leaves may do so inside another's entry
_stack: list[_Entry] = []
_caches: dict[str, Any] = {}  # in memory, by what determines the kernel
_ready: dict[Variant, tuple[dict[str, Callable], Callable]] = {}  # methods and forward function; stock's too

SUPPORTED = (9, 10)  # compute capabilities, major: Hopper and Blackwell


@dataclass(eq=False)
class _Entry:
    """A block that is entered."""

    variant: Variant
    thread: int


@contextlib.contextmanager
def variant(text: str | Variant) -> Iterator[Variant]:
    """FlashAttention-4 with another exponential inside the block.

    Args:
        text: a variant or its text form. `stock` puts the installed kernel back inside another block.

    Raises:
        LabError: FlashAttention-4 is missing, of an unknown version, or not as it was installed; or a block of
            another thread stands.
    """
    entry = _Entry(Variant.parse(text), threading.get_ident())
    try:
        _enter(entry)
        yield entry.variant
    finally:
        if entry in _stack:
            _leave(entry)


def in_worker(text: str) -> None:
    """Put a variant into this process for good. For workers: `Pool(initializer=in_worker, initargs=("g(3)",))`."""
    _enter(_Entry(Variant.parse(text), threading.get_ident()))


def active() -> Variant:
    """The variant that stands now; stock outside any block."""
    return _stack[-1].variant if _stack else Variant()


def flash_attn_func(q: Any, k: Any, v: Any, *, variant: str | Variant = "stock", **arguments: Any) -> Any:
    """`flash_attn.cute.flash_attn_func` with another exponential; its keyword arguments pass through.

    Args:
        q, k, v: (batch, length, heads, head_dim), on a Hopper or Blackwell GPU.
        variant: which exponential, also `stock`.

    Returns:
        As FlashAttention-4: output and log-sum-exp.

    Raises:
        LabError: as `variant`; or an input requires a gradient, or the inputs are those of latent attention (`qv`).
    """
    with globals()["variant"](variant):
        from flash_attn.cute import interface

        return interface.flash_attn_func(q, k, v, **arguments)


def _enter(entry: _Entry) -> None:
    wanted = entry.variant
    with _lock:
        if _stack and _stack[-1].thread != threading.get_ident():
            raise LabError(
                f"the variant {_stack[-1].variant} stands in another thread, and variants hold for the whole process: "
                f"leave it before entering {wanted}"
            )
        for needed in (Variant(), wanted):  # stock first: what is put back
            if needed not in _ready:
                _ready[needed] = _made(needed)
        _untouched()
        _stack.append(entry)  # first, so that an interrupted assignment is undone as the block is left
        _assign(wanted)


def _leave(entry: _Entry) -> None:
    with _lock:
        if not _stack or _stack[-1] is not entry:
            raise LabError(f"the variant {entry.variant} is left while {active()} stands inside it: leave that first")
        _assign(_stack[-2].variant if len(_stack) > 1 else Variant())
        _stack.pop()


def _assign(wanted: Variant) -> None:
    methods, forward = _ready[wanted]
    for name, slot in _slots().items():
        setattr(*slot, methods[name])
    _interface()._flash_attn_fwd = forward


def _untouched() -> None:
    """Nobody else has replaced what stands now."""
    methods, forward = _ready[active()]
    standing = {name: _get(*slot) for name, slot in _slots().items()}
    foreign = [name for name, method in standing.items() if method is not methods[name]]
    if foreign or _interface()._flash_attn_fwd is not forward:
        name = foreign[0] if foreign else "_flash_attn_fwd"
        raise LabError(f"{name} was replaced by something else, which would be lost: start a new process")


def _made(wanted: Variant) -> tuple[dict[str, Callable], Callable]:
    """The methods and the forward function of a variant; everything that can fail is done here."""
    source.checked()
    interface = _interface()
    if wanted.kind == "stock":
        imported, read = Path(interface.__file__).parent, source.installed()
        if imported.resolve() != read.resolve():
            raise LabError(
                f"flash_attn.cute was imported from {imported}, but is installed in {read}: start a new process"
            )
        originals = {name: _get(*slot) for name, slot in _slots().items()}
        for name, current in originals.items():
            if not current.__module__.startswith("flash_attn.cute."):
                raise LabError(f"{name} was replaced by {current.__module__} already: start a new process")
        return originals, interface._flash_attn_fwd
    module = edits.replacement(wanted)
    made = {name: getattr(module, name.split(".")[1]) for name in edits.replaced(wanted)}
    return _ready[Variant()][0] | made, _forward(wanted)


def _forward(wanted: Variant) -> Callable:
    """FA4's forward function with the variant's compile cache, which it looks up on itself by its global name."""
    original, interface = _ready[Variant()][1], _interface()

    @functools.wraps(original)
    def forward(q: Any, k: Any, v: Any, *rest: Any, **named: Any) -> Any:
        latent = (*rest[:1], named.get("qv"), named.get("gather_kv_indices"))
        if q is None or k is None or any(x is not None for x in latent):
            raise LabError(
                f"the inputs are those of latent attention (qv), for which the variant {wanted} is not tested"
            )
        if any(getattr(t, "requires_grad", False) for t in _flat((q, k, v, *rest, *named.values()))):
            raise LabError(f"an input requires a gradient, but the variant {wanted} has none: detach it first")
        arch = named.get("_arch") or interface._get_device_arch()
        if arch // 10 not in SUPPORTED:
            raise LabError(f"the GPU is an sm_{arch}, but variants are for Hopper and Blackwell: sm_90, sm_100, sm_103")
        if wanted.packed:
            return _packed(wanted, arch, inspect.signature(original).bind(q, k, v, *rest, **named))
        return original(q, k, v, *rest, **named)

    key = f"{wanted}|{edits.replacement_hash(wanted)}"
    if key not in _caches:
        _caches[key] = _new_cache(wanted)
    forward.compile_cache = _caches[key]
    return forward


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        yield from value if isinstance(value, list | tuple) else (value,)


def _packed(wanted: Variant, arch: int, call: inspect.BoundArguments) -> Any:
    """The packed kernel, or the stock one with a notice where a call is not offered."""
    from softmaxlab.fa4 import packed_element

    original, fake = _ready[Variant()][1], _interface().is_fake_mode()
    if why := packed_support.refusal(wanted, arch, call.arguments, running=not fake):
        packed_support.notice(wanted, why)
        _assign(Variant())
        try:
            return original(*call.args, **call.kwargs)
        finally:
            _assign(wanted)
    stored = packed_element.STORED.set(packed_support.DTYPES[call.arguments["q"].dtype])
    try:
        return original(*call.args, **call.kwargs)
    finally:
        packed_element.STORED.reset(stored)


def _new_cache(wanted: Variant) -> Any:
    from flash_attn.cute import cache_utils

    if not cache_utils.CUTE_DSL_CACHE_ENABLED:
        return cache_utils.JITCache()
    # FA4 names its folder by the installed sources, which a variant does not change.
    folder = cache_utils.get_cache_path() / cache_utils._compute_source_fingerprint()
    return cache_utils.JITPersistentCache(folder / f"softmaxlab-{edits.replacement_hash(wanted)[:24]}")


def _interface() -> Any:
    try:
        from flash_attn.cute import interface
    except ImportError as error:
        raise LabError(f"FlashAttention-4 is installed, but cannot be imported ({error}): {source.INSTALL}") from None
    return interface


def _slots() -> dict[str, tuple[type, str]]:
    """Class and attribute of each method that some variant replaces."""
    files = dict.fromkeys(source.METHODS, "softmax.py") | packed_edits.METHODS
    modules = {file: importlib.import_module(f"flash_attn.cute.{file[:-3]}") for file in set(files.values())}
    return {
        name: (getattr(modules[files[name]], owner), member)
        for name, owner, member in ((n, *n.split(".")) for n in files)
    }


def _get(owner: type, name: str) -> Callable:
    return owner.__dict__[name]
