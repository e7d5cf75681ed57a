"""Backends compute an operator's attention; the operator's meaning is the same on each of them.

A backend is a function `attend(query, key, value, operator, *, scaling, softcap, mask, layer) -> Tensor`.
`reference` is the specification; every other backend is tested against it. `fused` is the fast one. The kernel's
semantics are a family of backends, named by their text form, e.g. `online(tile=128,tau=8)` (see
`softmaxlab.online`), and so is FlashAttention-4, e.g. `fa4(variant=h15,arch=sm_90)` (see `softmaxlab.backends.fa4`).
"""

from collections.abc import Callable

from softmaxlab.errors import LabError

from . import fused, reference, variants

BACKENDS: dict[str, Callable] = {
    "reference": reference.attend,
    "fused": fused.attend,
    "reference-search": variants.search,
    "reference-chunked": variants.chunked,
    "reference-float64": variants.float64,
}


def get(name: str) -> Callable:
    """The `attend` of a backend. Raises LabError on an unknown name."""
    if name.lstrip().startswith("online"):
        from softmaxlab import online  # which is built on the reference

        return online.Simulator(online.Semantics.parse(name), counting=False)
    if name.lstrip().startswith("fa4"):
        from softmaxlab.backends import fa4  # which is built on the patch

        return fa4.Kernel.parse(name)
    if name not in BACKENDS:
        known = ", ".join(sorted(BACKENDS))
        raise LabError(f"unknown backend {name!r}: known are {known}, online(tile=128,tau=8,…), fa4(variant=h15,…)")
    return BACKENDS[name]


def canonical(name: str) -> str:
    """The one name of a backend under which its results are kept. Raises LabError as `get`."""
    backend = get(name)
    return name if name in BACKENDS else str(getattr(backend, "semantics", backend))
