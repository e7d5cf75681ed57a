"""Kernels of FlashAttention-4 traced and compiled in a process of one architecture: `python -m softmaxlab.fa4.tracing`.

A fresh process, because CuTe and FlashAttention-4 read the target from the environment when they are imported. Inputs
are fake tensors; nothing is launched. Two things that the kernels ask of a driver are answered from a table: the number
of SMs, and how many clusters fit. Neither enters the code of the kernel. The work comes as JSON on standard input.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from softmaxlab.errors import LabError
from softmaxlab.fa4 import source
from softmaxlab.fa4.compile import DTYPES, HEAD_DIMS, Request

SEQUENCE, HEADS = 8192, 16  # of the inputs; they select tiles and schedulers, not instructions


def main() -> None:
    """Compile what standard input lists and keep each kernel in its folder."""
    work = json.loads(sys.stdin.read())
    _answer_without_driver()
    for item in work:
        request = Request(**item["request"])
        folder = Path(item["folder"])
        started = time.perf_counter()
        _trace(request, item["package"])
        _keep(request, folder, time.perf_counter() - started)


def _answer_without_driver() -> None:
    """Stand in for the driver's answers: SMs and clusters of the target (they set the grid of a launch)."""
    import cutlass.utils
    import cutlass.utils.hardware_info

    sms = int(os.environ["FLASH_ATTENTION_NUM_SMS"])

    class HardwareInfo:
        def __init__(self, device_id: int = 0) -> None:
            self.device_id = device_id

        def get_max_active_clusters(self, cluster_size: int, stream: Any = None) -> int:
            return sms // cluster_size

        def get_device_multiprocessor_count(self) -> int:
            return sms

    cutlass.utils.HardwareInfo = cutlass.utils.hardware_info.HardwareInfo = HardwareInfo


def _trace(request: Request, package: str | None) -> None:
    """Call the kernel on fake tensors: it is traced and compiled, and not launched."""
    import torch
    from flash_attn.cute import interface
    from torch._subclasses.fake_tensor import FakeTensorMode

    from softmaxlab.fa4 import patch

    if package and not Path(interface.__file__).resolve().is_relative_to(Path(package).resolve()):
        raise LabError(f"compile: flash_attn was imported from {interface.__file__}, but {package} was asked for")
    # A copy that was patched as text is compiled as it stands.
    standing = contextlib.nullcontext() if package else patch.variant(request.variant)
    with _emulation(request.emulation), standing, FakeTensorMode():
        dtype = getattr(torch, DTYPES[request.dtype])
        shape = (1, SEQUENCE, HEADS, request.head_dim)
        q = torch.empty(shape, dtype=dtype, device="cuda")
        k, v = (
            torch.empty(1, SEQUENCE, HEADS // request.gqa, request.head_dim, dtype=dtype, device="cuda") for _ in "kv"
        )
        interface._flash_attn_fwd.compile_cache.clear()
        interface.flash_attn_func(q, k, v, causal=request.causal, softcap=request.softcap)


@contextlib.contextmanager
def _emulation(setting: tuple[int, int] | None) -> Iterator[None]:
    """Put a setting of the software exponential into FA4's tables of tuning, for every mask and head dimension."""
    from flash_attn.cute import flash_fwd_sm100 as sm100

    if setting is None:
        yield
        return
    tables = (sm100._TUNING_CONFIG, sm100._FP8_TUNING_CONFIG)
    before = [{key: dict(entry) for key, entry in table.items()} for table in tables]
    wanted = {"ex2_emu_freq": setting[0], "ex2_emu_start_frg": setting[1]}
    keys = [(c, m, d, s) for c in (True, False) for m in (True, False) for d in HEAD_DIMS for s in (True, False)]
    try:
        for table in tables:
            for key in keys:
                table[key] = table.get(key, {}) | wanted
        yield
    finally:
        for table, entries in zip(tables, before, strict=True):
            table.clear()
            table.update(entries)


def _keep(request: Request, folder: Path, seconds: float) -> None:
    """Move the files of the one kernel into the cache, complete or not at all."""
    dump = Path(os.environ["CUTE_DSL_DUMP_DIR"])
    found = {kind: sorted(dump.rglob(f"*.{kind}")) for kind in ("ptx", "cubin")}
    for kind, files in found.items():
        if len(files) != 1:
            raise LabError(f"compile: {len(files)} .{kind} files came of one kernel, but there must be 1: {request}")
    ptx = found["ptx"][0].read_text(encoding="utf-8", errors="replace").rstrip("\0")
    names = [line.split(".entry", 1)[1].split("(")[0].strip() for line in ptx.splitlines() if ".entry" in line]
    if len(names) != 1:
        raise LabError(f"compile: {len(names)} kernels came of one request, but there must be 1: {request}")
    with source.cache(), tempfile.TemporaryDirectory(prefix=".new-", dir=folder.parent) as new:
        staged = Path(new) / "staged"
        staged.mkdir()
        (staged / "kernel.ptx").write_text(ptx, encoding="utf-8")
        shutil.move(found["cubin"][0], staged / "kernel.cubin")
        found["ptx"][0].unlink()
        facts = {"request": asdict(request), "kernel": names[0], "seconds": round(seconds, 2)}
        facts["versions"] = source.versions()
        (staged / "artifact.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(staged, folder)


if __name__ == "__main__":
    try:
        main()
    except LabError as error:
        sys.exit(str(error))
