"""The calls that are timed: torch's kernels on a CPU, FlashAttention-4's compiled on fake tensors for a Hopper card."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from softmaxlab.bench import kernels, machine, turns
from softmaxlab.bench.cells import Cell
from softmaxlab.errors import LabError
from softmaxlab.fa4 import readings

needs_fa4 = pytest.mark.skipif(importlib.util.find_spec("flash_attn") is None, reason="FlashAttention-4 is missing")

TRACED = """
import sys
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from softmaxlab.backends.fa4 import attend
from softmaxlab.bench import kernels, machine
from softmaxlab.bench.cells import Cell
from softmaxlab.fa4 import Variant

cell = Cell.parse("bf16/causal/1024/h4/kv2/d64")
for name in ("stock", "h15"):
    with FakeTensorMode(), kernels.opened(name, cell) as call:
        shape = (1, 1024, 4, 64), (1, 1024, 2, 64), (1, 1024, 2, 64)
        out = call(*(torch.empty(s, dtype=torch.bfloat16, device="cuda") for s in shape))
        print(name, tuple(out.shape), out.dtype)
with FakeTensorMode():
    q, k, v = (torch.empty(1, h, 300, 64, dtype=torch.float16, device="cuda") for h in (4, 2, 2))
    out = attend(q, k, v, Variant.parse("h15"), scaling=0.3, softcap=None, mask=None, where="")
    print("model", tuple(out.shape), out.dtype)
"""


@pytest.mark.parametrize("name", ["sdpa-flash"])
@pytest.mark.parametrize("text", ["bf16/causal/64/h2/d64", "fp16/none/48/h4/kv2/d64/b2"])
def test_a_reference_computes_attention(name, text):
    cell = Cell.parse(text)
    where = machine.Rehearsal()
    generator = torch.Generator().manual_seed(0)
    q, k, v = machine.Cuda._one(where, cell, generator)
    assert q.shape == (cell.batch, cell.seq, cell.heads, cell.head_dim) and k.shape[2] == cell.kv_heads
    with kernels.opened(name, cell) as call:
        out = call(q, k, v)
    expected, _ = readings.simulated(q, k, v, variant="stock", causal=cell.causal)
    assert out.shape == q.shape and (out - expected).float().norm() < 0.01 * expected.float().norm()


def test_references_take_no_fp8():
    with (
        pytest.raises(LabError, match="sdpa-cudnn takes no e4m3"),
        kernels.opened("sdpa-cudnn", Cell("e4m3")),
    ):
        pytest.fail("it was opened")


@needs_fa4
def test_the_timed_call_and_the_models_compile_for_hopper(tmp_path):
    """Nothing is launched: FlashAttention-4 traces and compiles what it is called with, layouts and all."""
    target = {"CUTE_DSL_ARCH": "sm_90a", "FLASH_ATTENTION_ARCH": "sm_90", "FLASH_ATTENTION_NUM_SMS": "132"}
    target |= {"CUDA_VISIBLE_DEVICES": "", "SOFTMAXLAB_CACHE": str(tmp_path)}
    target["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"] = str(tmp_path / "jit")
    command = [sys.executable, "-c", TRACED]
    done = subprocess.run(command, env=turns.environment() | target, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-3:] == [
        "stock (1, 1024, 4, 64) torch.bfloat16",
        "h15 (1, 1024, 4, 64) torch.bfloat16",
        "model (1, 300, 4, 64) torch.float16",
    ]
    # What was compiled stays on disk, each variant's in a folder of its own.
    folders = {os.path.basename(os.path.dirname(p)) for p in map(str, (tmp_path / "jit").rglob("*.o"))}
    assert len(folders) == 2 and sum(f.startswith("softmaxlab-") for f in folders) == 1
