"""Scalar float64 twins of the operators: the second witness, written from the definitions and not from the code.

Each twin takes the valid scores of one row as a list of Python floats and returns their weights.
"""

import math
from fractions import Fraction


def softmax(row):
    top = max(row)
    return [math.exp(s - top) for s in row]


def topk(row, *, f, weights="softmax"):
    k = max(1, math.ceil(Fraction(str(f)) * len(row)))
    kth = sorted(row, reverse=True)[k - 1]
    return _on_support(row, [s >= kth for s in row], weights)


def mean_threshold(row, *, weights="softmax"):
    mean = math.fsum(row) / len(row)
    keep = [s > mean for s in row]
    return _on_support(row, keep if any(keep) else [True] * len(row), weights)


def _on_support(row, keep, weights):
    full = softmax(row) if weights == "softmax" else [1.0] * len(row)
    return [w if kept else 0.0 for w, kept in zip(full, keep, strict=True)]


def grid_edges(C, K, R):
    if K == 1 or R == 1:
        return [C * a / K for a in range(K + 1)]
    rho = R ** (-1 / (K - 1))
    return [C * (1 - rho**a) / (1 - rho**K) for a in range(K + 1)]


def grid(row, *, K, R=1.0, recon="nearest", map="exp"):
    low, C = min(row), max(row) - min(row)
    if C == 0:
        return [1.0] * len(row)
    edges = grid_edges(C, K, R)
    out = []
    for s in row:
        u = s - low
        a = max(i for i in range(K) if i == 0 or edges[i] <= u)
        lo, hi = edges[a], edges[a + 1]
        weight = (lambda level: math.exp(level - C)) if map == "exp" else (lambda level: level / C)
        if recon == "upper":
            out.append(weight(hi))
        elif recon == "nearest":
            out.append(weight(lo if u - lo < hi - u else hi))
        else:
            t = (u - lo) / (hi - lo)
            out.append((1 - t) * weight(lo) + t * weight(hi))
    return out


def pot(row, *, m):
    return [2 ** (-math.floor(m * d + 0.5) / m) for d in _octaves(row)]


def rowmax_pot(row, *, K_max, tail="clamp"):
    out = []
    for octaves in _octaves(row):
        d = math.floor(octaves + 0.5)
        out.append(2.0 ** -min(d, K_max) if tail == "clamp" or d <= K_max else 0.0)
    return out


def _octaves(row):
    return [(max(row) - s) / math.log(2) for s in row]


def temperature(row, *, alpha):
    return [math.exp(alpha * (s - max(row))) for s in row]


def rescue(row, *, of, q):
    """`of` is the twin's own result: the rescued operator's weights of the row."""
    p, p_hat = ([w / math.fsum(ws) for w in ws] for ws in (softmax(row), of))
    inside, mass = set(), 0.0
    for j in sorted(range(len(row)), key=lambda j: (-p[j], j)):
        if mass >= q:
            break
        inside.add(j)
        mass += p[j]
    out = [0.0] * len(row)
    for side in (inside, set(range(len(row))) - inside):
        exact, approximate = (math.fsum(x[j] for j in side) for x in (p, p_hat))
        for j in side:
            out[j] = p_hat[j] * exact / approximate if approximate > 0 else 0.0
    return out
