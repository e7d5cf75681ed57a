"""The fused simulator against the PyTorch one in Triton's interpreter, its kernel compiled, and who simulates."""

import importlib.util
import json
import math
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_triton import alone

from softmaxlab import backends, online
from softmaxlab.backends import fused, triton_online
from softmaxlab.errors import LabError
from softmaxlab.operators import H15, Grid, RowmaxAnchored, Softmax, parse
from softmaxlab.semantics import Semantics

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@needs_triton
@pytest.mark.parametrize(
    "case",
    [
        "every_operator(0, 2)",
        "every_operator(1, 2)",
        "layouts()",
        "rounded()",
        "adversarial()",
        "numbers_of_e4m3()",
        "dispatched()",
    ],
)
def test_agrees_with_the_pytorch_program(case):
    run = alone(f"import online_cases; online_cases.{case}")
    assert run.returncode == 0, run.stderr[-3000:]


@needs_triton
def test_every_operator_that_can_be_simulated_is_in_the_matrix():
    run = alone("import online_cases; print(*online_cases.OPERATORS)")
    held = {parse(text).name for text in run.stdout.split()}
    assert held == {c.name for c in RowmaxAnchored.__subclasses__() if c.__module__.startswith("softmaxlab.")}


@needs_triton
@pytest.mark.parametrize(
    "operator, semantics, dtype, mask",
    [
        ("h15()", "online(tile=128,tau=8,p=bf16)", "float32", False),
        ("softmax()", "online(tile=128,tau=8)", "float32", False),
        ("h15()", "online(tile=128,tau=0,p=e4m3,max_offset=8)", "float32", False),
        ("s()", "online(tile=128,tau=8,decision=warp)", "bfloat16", False),
        ("sq(k=3)", "online(tile=128,tau=0,p=bf16)", "bfloat16", True),
    ],
)
def test_the_kernel_fits_the_registers(operator, semantics, dtype, mask):
    run = alone(
        "import json, torch, cross_compile as c\n"
        f"print(json.dumps(c.report({operator!r}, dtype=torch.{dtype}, mask={mask}, semantics={semantics!r})))"
    )
    assert run.returncode == 0, run.stderr[-3000:]
    kernels = json.loads(run.stdout)
    assert any(name.startswith("simulate") and used.get("HGMMA") for name, used in kernels.items())
    for name, used in kernels.items():
        assert used["stack"] == 0 and "LDL" not in used and used["shared"] <= 227 * 1024, (name, used)


@pytest.mark.parametrize("tau", [0.0, 1e-30, 0.75, 2.0, 4.0, 8.0, 8.5, 37.3])
def test_the_bound_decides_as_the_definition_does(tau):
    bound = torch.tensor(triton_online.bound(tau))
    around = [bound]
    for _ in range(3):
        around = [around[0].nextafter(torch.tensor(-math.inf)), *around, around[-1].nextafter(torch.tensor(math.inf))]
    tops = torch.stack([torch.zeros(7), torch.stack(around)]).T.flip(-1)  # the last tile is seen first
    anchors, _ = online.running_anchors(tops, Semantics(tile=16, tau=tau))
    moved = (anchors[:, 0] != 0).tolist()
    assert moved == [bool(np.float32(d) > np.float32(bound)) for d in around]
    assert sum(moved) == 3


def operands(n=8, dtype=torch.float32):
    return [torch.zeros(1, 2, n, 16, dtype=dtype) for _ in range(3)]


def test_says_what_it_does_not_do(monkeypatch):
    q, k, v = operands()
    usual = Semantics(tau=0.0)
    if importlib.util.find_spec("triton") is None:
        assert "not installed" in triton_online.supports(q, k, v, Softmax(), usual)
        return
    assert "CUDA device" in triton_online.supports(q, k, v, Softmax(), usual)
    monkeypatch.setattr(triton_online.forward, "_interpreted", lambda: True)
    assert triton_online.supports(q, k, v, Softmax(), usual) is None
    assert "grid(K=8) is not anchored" in triton_online.supports(q, k, v, Grid(K=8), usual)
    assert "keys, not 100" in triton_online.supports(q, k, v, Softmax(), Semantics(tile=100))
    assert "tau is 70" in triton_online.supports(q, k, v, Softmax(), Semantics(tau=70.0))
    assert "float64" in triton_online.supports(*operands(dtype=torch.float64), Softmax(), usual)
    with pytest.raises(LabError, match="keys, not 100"):
        triton_online.attend(q, k, v, Softmax(), Semantics(tile=100), scaling=1.0)


def test_the_kernel_simulates_where_it_can_unless_told_otherwise(monkeypatch):
    there = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    arguments = (there, None, None, H15(), Semantics(), None)
    why = None
    monkeypatch.setattr(triton_online, "supports", lambda *args, **options: why)
    monkeypatch.setattr(fused, "told", set())
    monkeypatch.delenv(online.SWITCH, raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert online._has_kernel(*arguments)
        monkeypatch.setenv(online.SWITCH, "torch")
        assert not online._has_kernel(*arguments)
        monkeypatch.setenv(online.SWITCH, "fused")
        assert not online._has_kernel(*operands(), H15(), Semantics(), None), "on the CPU there is nothing to say"
    why = "a reason of its own"
    with pytest.warns(fused.FallbackNotice, match=why):
        assert not online._has_kernel(*arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # one notice for a reason
        assert not online._has_kernel(*arguments)
    monkeypatch.setenv(online.SWITCH, "off")
    with pytest.raises(LabError, match="is 'off' in the environment, but must be fused or torch"):
        online._has_kernel(*arguments)


def test_what_counts_stays_in_pytorch(monkeypatch):
    q, k, v = (torch.randn(1, 2, 20, 16) for _ in range(3))
    monkeypatch.setattr(online, "_has_kernel", lambda *args: True)
    kernels = torch.full((1, 20, 2, 16), 7.0)
    monkeypatch.setattr(triton_online, "attend", lambda *args, **options: kernels)
    counting = online.Simulator(Semantics(tile=16))
    assert counting(q, k, v, H15(), scaling=1.0) is not kernels
    assert counting.frame()["rows"].sum() == 2 * 20
    by_name = backends.get("online(tile=16,tau=8)")
    assert by_name(q, k, v, H15(), scaling=1.0) is kernels
    with pytest.raises(LabError, match="anchored at the row maximum"):
        by_name(q, k, v, Grid(K=8), scaling=1.0)
    with pytest.raises(LabError, match="counting=False"):
        by_name.frame()
    monkeypatch.undo()
    assert torch.equal(by_name(q, k, v, H15(), scaling=1.0), counting(q, k, v, H15(), scaling=1.0))
