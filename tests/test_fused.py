"""The fused backend and the simulator where a GPU has less than a kernel takes: the other route, with a notice."""

import pytest
import torch

from softmaxlab.backends import cpu, fused, reference, triton_online
from softmaxlab.online import Semantics, Simulator
from softmaxlab.operators import H15


class OutOfResources(Exception):
    """As Triton's."""


@pytest.fixture
def operands(monkeypatch):
    monkeypatch.setattr(fused, "told", set())
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, heads, 20, 16, generator=generator) for heads in (2, 1, 1)]


def fail(error):
    def attend(*args, **options):
        raise error

    return attend


def test_a_kernel_too_large_for_the_gpu_goes_to_the_reference(monkeypatch, operands):
    monkeypatch.setattr(cpu, "attend", fail(OutOfResources("shared memory, 164 KB of 99 KB")))
    with pytest.warns(fused.FallbackNotice, match=r"less than its kernel takes \(shared memory, 164 KB of 99 KB\)"):
        got = fused.attend(*operands, H15(), scaling=0.25)
    assert torch.equal(got, reference.attend(*operands, H15(), scaling=0.25))


def test_any_other_failure_is_one(monkeypatch, operands):
    monkeypatch.setattr(cpu, "attend", fail(RuntimeError("broken")))
    with pytest.raises(RuntimeError, match="broken"):
        fused.attend(*operands, H15(), scaling=0.25)


def test_a_simulator_too_large_for_the_gpu_runs_in_pytorch(monkeypatch, operands):
    monkeypatch.setattr("softmaxlab.online._has_kernel", lambda *args: True)
    monkeypatch.setattr(triton_online, "attend", fail(OutOfResources("registers")))
    with pytest.warns(fused.FallbackNotice, match="in PyTorch operations .* less than its kernel takes"):
        got = Simulator(Semantics(tile=16), counting=False)(*operands, H15(), scaling=0.25)
    assert torch.equal(got, Simulator(Semantics(tile=16))(*operands, H15(), scaling=0.25))
