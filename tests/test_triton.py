"""The Triton backend against the reference in Triton's interpreter, and its kernels compiled for a GPU not there.

Triton decides whether it interprets when it is imported, and other tests may have imported it: processes of their own.
"""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch

from softmaxlab.backends import triton as backend
from softmaxlab.errors import LabError
from softmaxlab.operators import Grid, Operator, Rescue, Softmax, TopK, catalogue, parse

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def alone(code: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    "case",
    [
        "every_operator(0, 2)",
        "every_operator(1, 2)",
        "far_keys()",
        "layouts()",
        "adversarial()",
        "capped()",
        "rounded()",
        "large_values()",
        "sinks()",
        "far_apart()",
        "chunks()",
        "sets_of_a_mass()",
    ],
)
def test_agrees_with_the_reference(case):
    run = alone(f"import triton_cases; triton_cases.{case}")
    assert run.returncode == 0, run.stderr[-3000:]


def test_every_operator_is_in_the_matrix():
    run = alone("import triton_cases; print(*triton_cases.OPERATORS)")
    held = {parse(text).name for text in run.stdout.split()}
    assert held == {text.partition("(")[0] for text, _ in catalogue()}


@pytest.mark.parametrize(
    "operator, dtype, dim, mask",
    [
        ("softmax()", "bfloat16", 64, False),
        ("h15()", "float32", 64, False),
        ("grid(K=32,R=4)", "bfloat16", 128, False),
        ("mean_threshold()", "float32", 64, True),
        ("topk(f=0.1)", "float32", 64, False),
        ("rescue(of=temperature(alpha=0.5))", "float32", 64, False),
        ("rescue(of=h15())", "bfloat16", 128, True),
        ("softmax()", "float32", 256, False),
    ],
)
def test_kernels_fit_the_registers(operator, dtype, dim, mask):
    """Compiled for sm_90: nothing spilled, shared memory within the SM's 227 KiB, and products on the tensor cores
    that run on while others begin: where ptxas makes each wait, as it does of a loop that reads a mask, two WARPGROUP
    instructions are around it."""
    run = alone(
        "import json, torch, cross_compile as c\n"
        f"print(json.dumps(c.report({operator!r}, dtype=torch.{dtype}, dim={dim}, mask={mask})))"
    )
    assert run.returncode == 0, run.stderr[-3000:]
    kernels = json.loads(run.stdout)
    assert any(k.get("HGMMA") for k in kernels.values())
    for name, used in kernels.items():
        assert used["stack"] == 0 and "LDL" not in used and used["shared"] <= 227 * 1024, (name, used)
        assert mask or used.get("WARPGROUP", 0) <= used.get("HGMMA", 0), (name, used)


def operands(dtype=torch.float32, n=8, dim=16):
    return [torch.zeros(1, 2, n, dim, dtype=dtype) for _ in range(3)]


def test_says_what_it_does_not_do(monkeypatch):
    q, k, v = operands()
    assert "CUDA device" in backend.supports(q, k, v, Softmax())
    monkeypatch.setattr(backend, "_interpreted", lambda: True)
    assert backend.supports(q, k, v, Softmax()) is None
    assert "row maximum alone, and log2p() needs more" in backend.supports(q, k, v, Rescue(parse("log2p()")))
    assert "5000 intervals" in backend.supports(q, k, v, Rescue(Grid(K=5000)))
    assert "float64" in backend.supports(*operands(torch.float64), Softmax())
    assert "512" in backend.supports(*operands(dim=512), Softmax())
    assert "as many queries as keys" in backend.supports(q[:, :, :3], k, v, Softmax())
    assert "masks are bool" in backend.supports(q, k, v, Softmax(), mask=torch.zeros(1, 1, 8, 8))
    assert "5000 intervals" in backend.supports(q, k, v, Grid(K=5000))
    assert "factor of 2" in backend.supports(q, k, v, Grid(K=8, R=1.5))
    many = [x[:, :, :1].expand(1, 2, 40_000, 16) for x in (q, k, v)]
    assert "32768 keys" in backend.supports(*many, TopK(f=0.1))
    assert "32768 keys" in backend.supports(*many, Rescue(Softmax()))
    assert backend.supports(*many, Softmax()) is None

    class Mine(Softmax):
        def at(self, x):
            return x

    assert isinstance(Mine(), Operator) and "no map" in backend.supports(q, k, v, Mine())
    with pytest.raises(LabError, match="it rescues operators of the distance"):
        backend.attend(q, k, v, Rescue(TopK(f=0.1)), scaling=1.0)
    with pytest.raises(LabError, match="scaling is -1"):
        backend.attend(q, k, v, Softmax(), scaling=-1.0)
