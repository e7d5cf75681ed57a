"""The Triton kernels against the specification, in Triton's interpreter, so that they need no GPU.

Triton decides whether it interprets when it is imported, and other tests may have imported it: a process of its own.
"""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from softmaxlab import divergence, rowkernels

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def random_rows(n: int, rounded: bool = False) -> torch.Tensor:
    """Score rows with masked keys, a single key, no key, one tied pair, and one of equal scores."""
    scores = 4 * torch.randn(9, n, generator=torch.Generator().manual_seed(n))
    scores[1, n // 2 :] = -torch.inf
    scores[2, 1:] = -torch.inf
    scores[3] = -torch.inf
    scores[4, -1] = scores[4, 0]
    scores[5] = 0.7
    scores[6] *= 30  # weights down to FP32's subnormal numbers and 0
    return scores.bfloat16().float() if rounded else scores


def weights_of(scores: torch.Tensor) -> torch.Tensor:
    """Octave rounding with some weights set to 0, as by a dropped tail."""
    octaves = torch.floor((scores.double() - divergence.exact_rows(scores).top[:, None]) / 0.6931471805599453 + 0.5)
    return torch.where(octaves > -150, torch.exp2(octaves), 0.0).float()


def check(n: int) -> None:
    for rounded in (False, True):
        scores = random_rows(n, rounded)
        rows = divergence.exact_rows(scores)
        codes = divergence.set_codes(rows.p)
        got = rowkernels.set_codes(scores, rows)
        assert torch.equal(got, codes), (n, rounded, (got != codes).nonzero())
        assert rowkernels.set_codes(scores, rows, (0.3, 0.5)).max() <= 2
        phase, offset = divergence.absolute_octave_phase(rows), 0.01 * rows.top
        for normalised in (True, False):
            arguments = (scores, rows, weights_of(scores), codes, phase, offset, normalised)
            for a, b in zip(rowkernels.row_statistics(*arguments), divergence.row_statistics(*arguments), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-11 if a.dtype == torch.float64 else 1e-6, atol=1e-12)


@pytest.mark.parametrize("n", [3, 40, 700, 2048])
def test_kernels_agree_with_the_specification(n):
    run = subprocess.run(
        [sys.executable, "-c", f"import test_rowkernels; test_rowkernels.check({n})"],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr


def test_rows_beyond_a_program_go_to_the_specification():
    assert rowkernels.fit(torch.empty(1, rowkernels.MAX_KEYS)) and not rowkernels.fit(
        torch.empty(1, rowkernels.MAX_KEYS + 1)
    )
