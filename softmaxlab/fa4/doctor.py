"""What of the kernel part works on this machine, and why the rest does not."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import torch

from softmaxlab.errors import LabError
from softmaxlab.fa4 import compile as compiler
from softmaxlab.fa4 import gates, patch, readings, source
from softmaxlab.fa4.variants import Variant

PACKAGES = (
    "torch",
    "flash-attn-4",
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-cu13",
    "nvidia-cutlass-dsl-libs-cu12",
    "quack-kernels",
    "apache-tvm-ffi",
    "triton",
    "nvidia-cuda-nvdisasm",
    "nvidia-cuda-cuobjdump",
)
CHECKED = Variant("g", k=1)  # of the tile that is compiled and checked


def environment() -> dict[str, str]:
    """Versions, GPU and driver, for the provenance of what is measured."""
    found = {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    found["torch"] = torch.__version__
    found["torch CUDA"] = torch.version.cuda or ""
    found["driver CUDA"] = _driver()
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found["GPU"] = properties.name
        found["architecture"] = f"sm_{properties.major}{properties.minor}"
        found["SMs"] = str(properties.multi_processor_count)
        found["memory GiB"] = f"{properties.total_memory / 2**30:.0f}"
    return found


def report(tile: bool = True) -> pd.DataFrame:
    """What is supported here.

    Args:
        tile: whether to compile a kernel and check one tile of it: on the GPU where there is one, else compiled for
            sm_100a and not run.

    Returns:
        One row a subject: subject, state (`ok`, `no`, or the value of a fact), detail (why not, and what would help).
    """
    rows = [(name, value or "no", "" if value else "not found") for name, value in environment().items()]
    rows += [_row(*check) for check in _checks(tile)]
    return pd.DataFrame(rows, columns=["subject", "state", "detail"])


def _checks(tile: bool) -> list[tuple[str, Callable[[], str]]]:
    checks: list[tuple[str, Callable[[], str]]] = [
        ("patch at run time", _patchable),
        ("kernels on this GPU", _gpu),
        ("FP8", _fp8),
        ("compiling without a GPU", _compilable),
        ("disassembly", _disassembly),
    ]
    return checks + ([("one tile", _tile)] if tile else [])


def _row(subject: str, check: Callable[[], str]) -> tuple[str, str, str]:
    try:
        return subject, "ok", check()
    except LabError as error:
        return subject, "no", str(error)
    except Exception as error:  # a foreign library's, which must not end the report
        return subject, "no", f"{type(error).__name__}: {error}".splitlines()[0]


def _patchable() -> str:
    source.checked()
    return f"version and hashes are known: {source.installed()}"


def _gpu() -> str:
    if not torch.cuda.is_available():
        raise LabError("no CUDA GPU is visible to torch: variants can be compiled and audited here, not run")
    major, minor = torch.cuda.get_device_capability()
    if major not in patch.SUPPORTED:
        raise LabError(
            f"the GPU is an sm_{major}{minor}: variants are for Hopper (sm_90) and Blackwell (sm_100, sm_103)"
        )
    return f"{torch.cuda.get_device_name()}: BF16 and FP16, forward only, head dimensions 64 to 128 are tested"


def _fp8() -> str:
    _gpu()
    if torch.cuda.get_device_capability()[0] != 10:
        raise LabError("FlashAttention-4 takes FP8 on Blackwell only")
    return "E4M3 and E5M2, forward only, output in BF16"


def _compilable() -> str:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise LabError(
            f"CuTe's compiler is not pinned for {platform.system()} on {platform.machine()}: use Linux on x86-64"
        )
    source.installed()
    cuda = source.versions()["cuda"]
    if not cuda:
        raise LabError("no compiler of CuTe is installed: pip install nvidia-cutlass-dsl-libs-cu13")
    return f"{', '.join(compiler.ARCHS)} with CUDA {cuda}"


def _disassembly() -> str:
    found = importlib.util.find_spec("nvidia")
    folders = [Path(p) for p in (found.submodule_search_locations if found else [])]
    missing = [t for t in ("nvdisasm", "cuobjdump") if not any(list(f.glob(f"*/bin/{t}")) for f in folders)]
    if missing:
        raise LabError(f"{' and '.join(missing)} not found: pip install nvidia-cuda-nvdisasm nvidia-cuda-cuobjdump")
    return "nvdisasm and cuobjdump"


def _tile() -> str:
    started = time.perf_counter()
    case = gates.CASES[0]
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] in patch.SUPPORTED:
        frame = gates.run([CHECKED], cases=[case])
        where = torch.cuda.get_device_name()
    else:
        artifact = compiler.compile(CHECKED, "sm_100a")
        frame = gates.run([CHECKED], attend=readings.simulated, cases=[case], device="cpu")
        where = f"simulated; compiled for sm_100a, {artifact.cubin.stat().st_size} bytes"
    red = frame[~frame.passed]
    if len(red):
        raise LabError(
            f"{CHECKED}, {case.name} ({where}): {len(red)} of {len(frame)} gates are red: {'; '.join(red.gate)}"
        )
    return f"{CHECKED}, {case.name} ({where}): {len(frame)} gates green in {time.perf_counter() - started:.0f} s"


def _driver() -> str:
    try:
        library = ctypes.CDLL("libcuda.so.1")
        version = ctypes.c_int()
        if library.cuDriverGetVersion(ctypes.byref(version)) == 0:
            return f"{version.value // 1000}.{version.value % 1000 // 10}"
    except (OSError, AttributeError):
        pass
    return ""


def main(*, tile: bool = True) -> None:
    """Say what of the kernel part works on this machine, and why the rest does not.

    Parameters
    ----------
    tile
        Compile a kernel and check one tile of it, in seconds.
    """
    for subject, state, detail in report(tile).itertuples(index=False):
        print(f"{subject:<30} {state:<14} {detail}".rstrip())


if __name__ == "__main__":
    main()
