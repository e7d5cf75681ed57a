"""How far an operator's rows are from softmax's: pure functions of score rows, every quantity in FP64.

Paper A.7 and D.2–D.5. A row has exact probabilities p, an operator's weights ŵ and p̂ = ŵ/Σŵ. Divergence says
how different p̂ is from p; leakage says how much mass left the keys that carry most of it; the log-weight error
ε = log ŵ − log w says where the weights themselves are wrong.

All functions take rows along the last dimension. This is the specification; on a GPU the same functions run
compiled (`softmaxlab.fused`) or as kernels (`softmaxlab.rowkernels`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from softmaxlab.errors import LabError
from softmaxlab.operators import Grid, Operator, Rescue, row_max
from softmaxlab.operators.grid import edge_fractions, interval_closed_form

LEAKAGE_Q = (0.8, 0.9, 0.95, 0.99)  # masses of the sets S_q, ascending
PHASE_Q = 0.9  # the leakage that row phase is correlated with
MASS_THRESHOLDS = (0.1, 0.01, 0.001, 0.0001)  # of p, for the shares of entries and mass

#: FP32 weights below it are subnormal and keep fewer digits, whatever the operator: no envelope can be audited there.
SMALLEST_NORMAL = torch.finfo(torch.float32).tiny

#: Per-row sums that `row_statistics` returns, in its order.
SUMS = (
    "jsd",
    "tv",
    *(f"leakage_{q}" for q in LEAKAGE_Q),
    "error_squared",  # Σ ε²
    "error_squared_p",  # Σ p ε²
    "nonzero",  # entries with ŵ > 0
    "leak",  # of PHASE_Q, and φ, their squares and product: the moments of Pearson's r
    "leak_squared",
    "phase",
    "phase_squared",
    "phase_leak",
)


class Rows(NamedTuple):
    """The exact softmax of score rows.

    Attributes:
        p: probabilities, FP64, (…, n); 0 on masked keys and in rows without a key.
        top: the row maximum, FP64, (…); 0 in a row without a key.
        log_z: log Σ exp(−Δ), FP64, (…).
        keys: number of valid keys, int64, (…).
        weights: exp(−Δ) in FP32, (…, n): what the model's own forward pass uses.
    """

    p: Tensor
    top: Tensor
    log_z: Tensor
    keys: Tensor
    weights: Tensor


def exact_rows(scores: Tensor) -> Rows:
    """Softmax of rows of FP32 scores in nats, (…, n), whose masked entries are −inf."""
    top = row_max(scores)
    minus_delta = scores.double() - top.double()
    w = torch.exp(minus_delta)
    total = w.sum(-1, keepdim=True)
    total = torch.where(total == 0, 1.0, total)
    p = w * total.reciprocal()
    keys = (scores > -torch.inf).sum(-1)
    return Rows(p, top.double().squeeze(-1), torch.log(total).squeeze(-1), keys, torch.exp(scores - top))


def js_divergence(p: Tensor, q: Tensor, log_p: Tensor | None = None, log_q: Tensor | None = None) -> Tensor:
    """Jensen–Shannon divergence of each row in nats, with m = (p+q)/2 (paper A.7).

    Args:
        p, q: probabilities, FP64, (…, n). A key without mass in either adds nothing.
        log_p, log_q: their logarithms, where they are known better or already; what stands at p = 0 or q = 0
            does not matter.

    Returns:
        FP64, (…), between 0 and log 2.
    """
    m = (p + q) * 0.5
    log_m = torch.log(torch.where(m > 0, m, 1.0))
    log_p = torch.log(p) if log_p is None else log_p
    log_q = torch.log(q) if log_q is None else log_q
    # Key by key, so that nearly equal rows do not lose digits as a difference of entropies would.
    of_p = torch.where(p > 0, p * (log_p - log_m), 0.0)
    of_q = torch.where(q > 0, q * (log_q - log_m), 0.0)
    return 0.5 * (of_p + of_q).sum(-1)


def total_variation(p: Tensor, q: Tensor) -> Tensor:
    """Half the L1 distance of each row, (…)."""
    return 0.5 * (p - q).abs().sum(-1)


def set_codes(p: Tensor, qs: Sequence[float] = LEAKAGE_Q) -> Tensor:
    """In how many of the high-mass sets S_q each key is.

    The sets are nested, so the count names them: a key is in S_q of the i-th of the ascending `qs` if its code is
    at least len(qs) − i. Each set is `operators.high_mass_set(p, q)`; here one sort serves all of them.

    Args:
        p: FP64 probabilities, (…, n).
        qs: masses in (0, 1), ascending.

    Returns:
        uint8, (…, n).

    Raises:
        LabError: masses that are not such.
    """
    if not all(0 < q < 1 for q in qs) or list(qs) != sorted(set(qs)):
        raise LabError(f"the masses q are {tuple(qs)}, but must be in (0, 1), ascending and without repetition")
    ordered, order = p.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    code = sum(((before < q) & (ordered > 0)).to(torch.uint8) for q in qs)
    return torch.zeros_like(p, dtype=torch.uint8).scatter_(-1, order, code)


def leakage(p: Tensor, q: Tensor, codes: Tensor, n_sets: int = len(LEAKAGE_Q)) -> list[Tensor]:
    """L_q = p(S_q) − p̂(S_q) of each row and set: mass that left the set (paper A.8, D.4).

    Args:
        p, q: exact and approximate probabilities, FP64, (…, n).
        codes: from `set_codes` with `n_sets` masses.

    Returns:
        One FP64 tensor (…) for each mass.
    """
    moved = p - q
    return [torch.where(codes >= n_sets - i, moved, 0.0).sum(-1) for i in range(n_sets)]


def absolute_octave_phase(rows: Rows) -> Tensor:
    """Row phase on the absolute octave lattice: φ = y − round(y), y = −s_max/ln 2, in [−1/2, 1/2], (…)."""
    return lattice_phase(-rows.top / math.log(2))


def lattice_phase(y: Tensor) -> Tensor:
    """Displacement of a coordinate from the nearest lattice point (a tie goes up)."""
    return y - torch.floor(y + 0.5)


def row_divergence(scores: Tensor, rows: Rows, weights: Tensor, normalised: bool = True) -> Tensor:
    """JSD and TV only: what matching needs. Arguments as `row_statistics`; FP64, (2, …)."""
    q, log_q, _ = _probabilities(weights, normalised)
    log_p = scores.double() - rows.top[..., None] - rows.log_z[..., None]
    return torch.stack([js_divergence(rows.p, q, log_p, log_q), total_variation(rows.p, q)])


def row_statistics(
    scores: Tensor,
    rows: Rows,
    weights: Tensor,
    codes: Tensor,
    phase: Tensor,
    offset: Tensor,
    normalised: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Everything that is recorded of an operator's rows, in one function so that a compiler can fuse it.

    Args:
        scores: FP32, nats, (…, n), masked entries −inf.
        rows: their exact softmax.
        weights: the operator's ŵ, FP32, (…, n).
        codes: `set_codes` of rows.p.
        phase: φ of each row, (…).
        offset: by how much log ŵ of an exact row would exceed −Δ, nats, (…); 0 for weights relative to the row
            maximum.
        normalised: whether p̂ is ŵ/Σŵ, and not ŵ itself.

    Returns:
        Sums named by `SUMS`, FP64, (len(SUMS), …); the largest ε and −ε over entries with ŵ ≥ SMALLEST_NORMAL,
        FP64, (2, …), −∞ where there is none; and p̂ − p in FP32, (…, n), for the change of the output. The phase
        moments are 0 in rows with fewer than two keys, whose phase means nothing.
    """
    p, top, log_z, keys, _ = rows
    q, log_q, log_weight = _probabilities(weights, normalised)
    minus_delta = scores.double() - top[..., None]
    positive = weights > 0
    # ε = log ŵ − log w; log w is −Δ, no logarithm is taken.
    error = torch.where(positive, log_weight - minus_delta - offset[..., None], 0.0)
    squared = error * error
    leaks = leakage(p, q, codes)
    several = (keys > 1).double()
    leak, phase = leaks[LEAKAGE_Q.index(PHASE_Q)] * several, phase * several
    sums = [
        js_divergence(p, q, minus_delta - log_z[..., None], log_q),
        total_variation(p, q),
        *leaks,
        squared.sum(-1),
        (p * squared).sum(-1),
        positive.sum(-1).double(),
        leak,
        leak * leak,
        phase,
        phase * phase,
        phase * leak,
    ]
    normal = weights >= SMALLEST_NORMAL
    above = torch.where(normal, error, -torch.inf).amax(-1)
    below = torch.where(normal, -error, -torch.inf).amax(-1)
    return torch.stack(sums), torch.stack([above, below]), (q - p).float()


def _probabilities(weights: Tensor, normalised: bool) -> tuple[Tensor, Tensor, Tensor]:
    """p̂, log p̂ and log ŵ in FP64; where ŵ = 0 the logarithms are finite and of no use."""
    w = weights.double()
    log_w = torch.log(torch.where(w > 0, w, 1.0))
    if not normalised:
        return w, log_w, log_w
    total = w.sum(-1, keepdim=True)
    total = torch.where(total == 0, 1.0, total)
    return w * total.reciprocal(), log_w - torch.log(total), log_w


def row_mass(rows: Rows) -> Tensor:
    """Entries and mass at or above each of `MASS_THRESHOLDS`, of the exact softmax (paper D.2).

    Returns:
        FP64, (2·len(MASS_THRESHOLDS), …): the counts, then the masses.
    """
    above = [rows.p >= t for t in MASS_THRESHOLDS]
    counts = [a.sum(-1).double() for a in above]
    return torch.stack([*counts, *(torch.where(a, rows.p, 0.0).sum(-1) for a in above)])


def has_interval_envelope(operator: Operator) -> bool:
    """Whether ε is bounded by the width of the score's own interval (paper A.4)."""
    return isinstance(operator, Grid) and operator.map == "exp"


def has_log_weights(operator: Operator) -> bool:
    """Whether ε is defined: rescue gives probabilities, which are not relative to the row maximum."""
    return not isinstance(operator, Rescue)


def grid_excess(operator: Grid, scores: Tensor, valid: Tensor, weights: Tensor) -> Tensor:
    """How far ε leaves a grid's local envelope in each row, nats, FP64, (…); ≤ 0 is inside. Subnormal weights are
    left out.

    With h the width of the interval that holds the score: 0 ≤ ε ≤ h for `upper`, |ε| ≤ h/2 for `nearest`,
    ε ≥ 0 for `lerp`.
    """
    low = scores.masked_fill(~valid, torch.inf).amin(-1, keepdim=True)
    C = row_max(scores) - low
    C = torch.where(C > 0, C, 0.0)
    a = interval_closed_form(((scores - low) / torch.where(C > 0, C, 1.0)).clamp(0, 1), operator.K, operator.R)
    edges = edge_fractions(operator.K, operator.R).to(scores.device)
    return interval_excess(operator.recon, (edges[a + 1] - edges[a]) * C.double(), scores, weights)


def interval_excess(recon: str, widths: Tensor, scores: Tensor, weights: Tensor) -> Tensor:
    """`grid_excess` from the width h of each key's interval, FP64, nats, (…, n)."""
    w = weights.double()
    error = torch.log(torch.where(w > 0, w, 1.0)) - (scores.double() - row_max(scores).double())
    if recon == "nearest":
        excess = error.abs() - widths / 2
    elif recon == "upper":
        excess = torch.maximum(error - widths, -error)
    else:
        excess = -error
    return torch.where(weights >= SMALLEST_NORMAL, excess, -torch.inf).amax(-1)
