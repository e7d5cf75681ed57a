"""Traces calls of the packed kernel for Hopper in a process of its own and prints what came of each, as JSON lines.

Run by test_fa4_packed.py: the target is read from the environment when FlashAttention-4 is imported.
"""

import json
import os
import sys
import warnings
from pathlib import Path

import torch
from flash_attn.cute import interface
from torch._subclasses.fake_tensor import FakeTensorMode

from softmaxlab.fa4 import patch, tracing

DIMS = {"dims": (128, 128), "dtype": "bfloat16", "gqa": 1, "lengths": (1024, 1024), "varlen": False, "sink": False}


def call(case):
    """One call of FlashAttention-4 on fake tensors."""
    made = {name: case.pop(name, default) for name, default in DIMS.items()}
    (d, dv), dtype, (m, n) = made["dims"], getattr(torch, made["dtype"]), made["lengths"]

    def tensor(length, heads, dim):
        shape = (2 * length, heads, dim) if made["varlen"] else (2, length, heads, dim)
        return torch.empty(shape, dtype=dtype, device="cuda")

    q, k, v = tensor(m, 8, d), tensor(n, 8 // made["gqa"], d), tensor(n, 8 // made["gqa"], dv)
    if made["sink"]:
        case["learnable_sink"] = torch.empty(8, dtype=torch.bfloat16, device="cuda")
    if made["varlen"]:
        ends = torch.empty(3, dtype=torch.int32, device="cuda")
        case |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": m, "max_seqlen_k": n}
    if "intra_wg_overlap" in case or "window_size_left" in case:
        return interface._flash_attn_fwd(q, k, v, **case)
    return (interface.flash_attn_varlen_func if made["varlen"] else interface.flash_attn_func)(q, k, v, **case)


def main():
    tracing._answer_without_driver()
    dump = Path(os.environ["CUTE_DSL_DUMP_DIR"])
    for line in sys.stdin:
        case = json.loads(line)
        variant = case.pop("variant", "packed(4,3)")
        with warnings.catch_warnings(record=True) as caught, patch.variant(variant), FakeTensorMode():
            warnings.simplefilter("always")
            call(case)
        files = {kind: sorted(dump.rglob(f"*.{kind}")) for kind in ("ptx", "cubin")}
        text = "".join(p.read_text(errors="replace") for p in files["ptx"])
        row = {name: text.count(name) for name in ("cvt.rn.relu.f16x2", "ex2.approx", "add.rn.bf16x2", "add.rn.f16x2")}
        row |= {"notices": [str(w.message) for w in caught if "falls back" in str(w.message)]}
        kept = Path(sys.argv[1]) / f"{len(list(Path(sys.argv[1]).iterdir()))}.cubin"
        kept.write_bytes(files["cubin"][0].read_bytes())
        print(json.dumps(row | {"kernels": len(files["cubin"]), "cubin": str(kept)}), flush=True)
        for path in (*files["ptx"], *files["cubin"]):
            path.unlink()


if __name__ == "__main__":
    main()
