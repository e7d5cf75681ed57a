"""Equivalent implementations of the reference, to see how far its numbers reproduce.

Each computes the same definition by another route. What they differ by is not an effect: it is the floor
under which no effect can be told from rounding (`softmaxlab.floor`).
"""

import functools
from typing import Any

import torch
from torch import Tensor

from softmaxlab.operators import Grid, Operator
from softmaxlab.operators.grid import interval_search

from . import reference


def search(query: Tensor, key: Tensor, value: Tensor, operator: Operator, **arguments: Any) -> Tensor:
    """As the reference, with a grid's interval found by searching its edges instead of by the closed form."""
    if isinstance(operator, Grid):
        operator = functools.partial(operator, interval=interval_search)
    return reference.attend(query, key, value, operator, **arguments)


def chunked(query: Tensor, key: Tensor, value: Tensor, operator: Operator, **arguments: Any) -> Tensor:
    """As the reference, 96 queries at a time: other shapes, so other orders of summation in the products."""
    return reference.attend(query, key, value, operator, **arguments | {"chunk": 96})


def float64(query: Tensor, key: Tensor, value: Tensor, operator: Operator, **arguments: Any) -> Tensor:
    """As the reference, with scores, weights and products in float64."""
    return reference.attend(query, key, value, operator, **arguments | {"dtype": torch.float64})
