"""Backends compute an operator's attention; the operator's meaning is the same on each of them.

A backend is a function `attend(query, key, value, operator, *, scaling, softcap, mask, layer) -> Tensor`.
`reference` is the specification; every other backend is tested against it. The kernel's semantics are a family of
backends, named by their text form, e.g. `online(tile=128,tau=8)` (see `softmaxlab.online`).
"""

from collections.abc import Callable

from softmaxlab.errors import LabError

from . import reference, variants

BACKENDS: dict[str, Callable] = {
    "reference": reference.attend,
    "reference-search": variants.search,
    "reference-chunked": variants.chunked,
    "reference-float64": variants.float64,
}


def get(name: str) -> Callable:
    """The `attend` of a backend. Raises LabError on an unknown name."""
    if name.lstrip().startswith("online"):
        from softmaxlab import online  # which is built on the reference

        return online.Simulator(online.Semantics.parse(name))
    if name not in BACKENDS:
        raise LabError(f"unknown backend {name!r}: known are {', '.join(sorted(BACKENDS))}, online(tile=128,tau=8,…)")
    return BACKENDS[name]


def canonical(name: str) -> str:
    """The one name of a backend under which its results are kept. Raises LabError as `get`."""
    backend = get(name)
    return name if name in BACKENDS else str(backend.semantics)
