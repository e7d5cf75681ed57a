"""The batch-against-solo gate: no log-likelihood may depend on what a request was batched with (paper C.1).

A mask that does not arrive changes a custom attention silently: its rows then range over padding. Two checks, on
requests of mixed lengths, before anything is measured:

- **Other padding.** The batch again with another token as padding: the same shapes, so the same kernels, and the
  log-likelihoods must be the same. Exact under every operator; it sees any padding that has a weight or moves a row's
  statistics through its score.
- **Alone.** Every request in a pass of its own. Under exact softmax the two agree to rounding; this also sees wrong
  positions. A lattice turns a last digit into a step, and steps are amplified through the layers, so there the
  median over the requests is held to the bound and the largest is reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

from softmaxlab.conditions import BASELINE
from softmaxlab.errors import LabError

if TYPE_CHECKING:
    from softmaxlab.harness import FrozenLM, Pair

#: Largest allowed difference in nats a token, by dtype: of two paddings; of batch and alone under exact softmax (the
#: largest over requests), and under an operator (the median over requests). A logit of 16 to 32 has steps of 0.125 in
#: bfloat16, so there only the first check is sharp.
BOUNDS = {"float32": (1e-6, 1e-4, 1e-2), "bfloat16": (1e-6, 5e-1, 1e-1)}
REQUESTS = 8


@dataclass(frozen=True)
class Gate:
    """What the gate found, in nats a token of the continuation.

    Attributes:
        requests, shortest, longest: how many, and their lengths in tokens.
        padding: largest difference between two paddings of one batch.
        largest, median: difference between batch and alone, over the requests.
    """

    requests: int
    shortest: int
    longest: int
    padding: float
    largest: float
    median: float

    def entry(self) -> dict:
        """For the provenance of a result."""
        return asdict(self)


def mixed(pairs: Sequence[Pair], n: int = REQUESTS) -> list[Pair]:
    """Requests of evenly spread ranks of length, the shortest and the longest among them."""
    ranked = sorted(pairs, key=lambda pair: (len(pair[0]) + len(pair[1]), pair))
    places = np.linspace(0, len(ranked) - 1, min(n, len(ranked))).round().astype(int)
    return [ranked[i] for i in dict.fromkeys(places.tolist())]


def check(lm: FrozenLM, pairs: Sequence[Pair], *, condition: str, dtype: str) -> Gate:
    """Run the gate on a model that has the condition in it.

    Args:
        lm: the model as the harness sees it, inside `attention.inject`.
        pairs: token pairs to choose from (see `mixed`).
        condition: text form, for the bound and the message.
        dtype: of the model, for the bound.

    Raises:
        LabError: the numbers depend on the batch by more than rounding explains.
    """
    chosen = mixed(pairs)
    tokens = np.array([len(continuation) for _, continuation in chosen])
    lengths = [len(context) + len(continuation) for context, continuation in chosen]
    together, other = (_values(lm, chosen, fill) for fill in (0, lm.model.get_input_embeddings().num_embeddings - 1))
    alone = np.concatenate([_values(lm, [pair], 0) for pair in chosen])
    padding, solo = np.abs(together - other) / tokens, np.abs(together - alone) / tokens
    gate = Gate(
        len(chosen), min(lengths), max(lengths), float(padding.max()), float(solo.max()), float(np.median(solo))
    )
    same, exact, stepped = BOUNDS[dtype]
    if gate.padding > same:
        raise LabError(
            f"under {condition} with {lm.padding} padding, log-likelihoods depend on the padding token by up to "
            f"{gate.padding:.2g} nats a token (bound {same:g}): the mask does not reach the attention"
        )
    seen, bound, of = (
        (gate.largest, exact, "up to") if condition == BASELINE else (gate.median, stepped, "in the median")
    )
    if seen > bound:
        raise LabError(
            f"under {condition} with {lm.padding} padding, log-likelihoods in a batch and alone differ {of} {seen:.2g} "
            f"nats a token (bound {bound:g} in {dtype}): rows depend on what they are batched with"
        )
    return gate


def _values(lm: FrozenLM, pairs: Sequence[Pair], fill: int) -> np.ndarray:
    return np.array([value for value, _ in lm.score(pairs, fill=fill)])
