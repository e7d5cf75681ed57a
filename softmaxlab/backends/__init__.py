"""Backends compute an operator's attention; the operator's meaning is the same on each of them.

A backend is a function `attend(query, key, value, operator, *, scaling, softcap, mask, layer) -> Tensor`.
`reference` is the specification; every other backend is tested against it.
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
    if name not in BACKENDS:
        raise LabError(f"unknown backend {name!r}: known are {', '.join(sorted(BACKENDS))}")
    return BACKENDS[name]
