"""Compiles the launches of a call for a GPU that is not there, and tells what each kernel takes of it.

python tests/cross_compile.py "h15()" --dtype bfloat16 --dim 64 --context 2048
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from softmaxlab.backends import triton as backend
from softmaxlab.backends import triton_online
from softmaxlab.operators import parse
from softmaxlab.semantics import Semantics

TARGET = GPUTarget("cuda", 90, 32)
TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.uint8: "*u8",
    torch.int32: "*i32",
}


def launches(call: Callable[[], object]) -> list[tuple[JITFunction, ASTSource, dict]]:
    """What `call` would launch: kernel, its source with types, and options; each once."""
    found = {}

    def record(self, *args, grid, warmup, **kwargs):
        names = [p.name for p in self.params]
        bound = dict(zip(names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in names}
        options = {k: v for k, v in kwargs.items() if k not in names}
        signature, constants, attributes = {}, {}, {}
        for i, p in enumerate(self.params):
            value = bound[p.name]
            if p.is_constexpr or (isinstance(value, int) and value == 1 and not p.do_not_specialize):
                signature[p.name], constants[(i,)] = "constexpr", value
                continue
            if isinstance(value, torch.Tensor):
                signature[p.name] = TYPES[value.dtype]
            else:
                signature[p.name] = "fp32" if isinstance(value, float) else "i32"
            if not p.do_not_specialize and (
                isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)
            ):
                attributes[(i,)] = [["tt.divisibility", 16]]
        key = (self.fn.__name__, str(signature), str(constants), str(options))
        found[key] = (self, ASTSource(self, signature, constants, attributes), options)

    with (
        mock.patch.object(JITFunction, "run", record),
        mock.patch.object(backend, "_interpreted", lambda: True),
    ):
        call()
    return list(found.values())


def resources(source: ASTSource, options: dict) -> dict:
    """Registers, spilled bytes, shared memory and tensor-core instructions of a kernel."""
    kernel = triton.compile(source, target=TARGET, options=options)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
        sass = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True)
    text = usage.stdout + usage.stderr
    found = {name.lower(): int(re.search(rf"{name}:(\d+)", text)[1]) for name in ("REG", "STACK", "LOCAL")}
    ops = re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z0-9]+)", sass.stdout, re.M)
    counted = ("HGMMA", "WARPGROUP", "HMMA", "MUFU", "FMUL", "FFMA", "FADD", "SHFL", "BAR", "LDL", "STL")
    count = {op: ops.count(op) for op in counted}
    return {
        "shared": kernel.metadata.shared,
        **found,
        "instructions": len(ops),
        **{k: v for k, v in count.items() if v},
    }


def report(
    operator: str, *, dtype=torch.float32, dim: int = 64, context: int = 2048, mask: bool = False, softcap=None,
    tile=None, precision: str = "split", semantics: str = "",
) -> dict[str, dict]:  # fmt: skip
    """Resources of every kernel that a call launches, by name; of the simulator of `semantics` where given."""
    q, k, v = (torch.empty(1, context, heads, dim, dtype=dtype).transpose(1, 2) for heads in (9, 3, 3))
    given = torch.ones(1, 1, context, context, dtype=torch.bool) if mask else None

    def call():
        options = {"scaling": dim**-0.5, "softcap": softcap, "mask": given, "tile": tile}
        if semantics:
            triton_online.attend(q, k, v, parse(operator), Semantics.parse(semantics), **options)
        else:
            backend.attend(q, k, v, parse(operator), **options, precision=precision)

    return {f"{kernel.fn.__name__}{i}": resources(source, o) for i, (kernel, source, o) in enumerate(launches(call))}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("operator", nargs="+")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--mask", action="store_true")
    parser.add_argument("--softcap", type=float)
    parser.add_argument("--precision", default="split")
    parser.add_argument("--semantics", default="", help='of the simulator, e.g. "online(tile=128,tau=8)"')
    parser.add_argument("--tile", type=lambda text: backend.Tile(*map(int, text.split(","))))
    args = parser.parse_args()
    for text in args.operator:
        found = report(
            text, dtype=getattr(torch, args.dtype), dim=args.dim, context=args.context, mask=args.mask,
            softcap=args.softcap, tile=args.tile, precision=args.precision, semantics=args.semantics,
        )  # fmt: skip
        for name, values in found.items():
            print(text, args.dtype, args.dim, name, values)
