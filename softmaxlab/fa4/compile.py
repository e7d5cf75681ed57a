"""FlashAttention-4's forward kernel compiled for a GPU that need not be there: PTX and cubin, seconds a kernel.

A request names a kernel. It is compiled in a process of its own (`tracing`) and kept under a hash of everything that
determines it: the sources of FlashAttention-4, the replacement methods, the versions of the compilers, the request.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock

import softmaxlab
from softmaxlab.errors import LabError
from softmaxlab.fa4 import edits, source
from softmaxlab.fa4.variants import Variant

#: Architectures: the kernel that FlashAttention-4 selects, and the SMs of the GPU that bears it.
ARCHS = {"sm_90a": ("sm_90", 132), "sm_100a": ("sm_100", 148), "sm_103a": ("sm_103", 148)}
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}
HEAD_DIMS = (64, 96, 128)


@dataclass(frozen=True)
class Request:
    """One kernel.

    Attributes:
        variant: text form (`softmaxlab.fa4.Variant`).
        arch: of `ARCHS`.
        dtype: of Q, K and V: bf16, fp16, and on Blackwell e4m3 (also named fp8) or e5m2.
        causal: whether under a causal mask.
        head_dim: 64, 96 or 128.
        gqa: query heads of a key-value head: 1, 2, 4, 8 or 16.
        emulation: (frequency, first fragment) of FA4's software exponential in place of its own setting, for stock
            and control on Blackwell; a frequency of 0 means none.
        softcap: of the scores, 0 for none.

    Raises:
        LabError: what FlashAttention-4 does not support, or an argument outside its range.
    """

    variant: str = "stock"
    arch: str = "sm_100a"
    dtype: str = "bf16"
    causal: bool = True
    head_dim: int = 128
    gqa: int = 1
    emulation: tuple[int, int] | None = None
    softcap: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "variant", str(Variant.parse(self.variant)))
        object.__setattr__(self, "dtype", "e4m3" if self.dtype == "fp8" else self.dtype)
        if self.emulation is not None:
            object.__setattr__(self, "emulation", tuple(int(n) for n in self.emulation))
        known = {"arch": ARCHS, "dtype": DTYPES, "head_dim": HEAD_DIMS, "gqa": (1, 2, 4, 8, 16)}
        for name, values in known.items():
            if getattr(self, name) not in values:
                raise LabError(
                    f"compile: {name} is {getattr(self, name)!r}, but must be one of {', '.join(map(str, values))}"
                )
        if self.arch == "sm_90a" and self.dtype in ("e4m3", "e5m2"):
            raise LabError(
                f"compile: dtype is {self.dtype}, but FlashAttention-4 takes FP8 on sm_100a and sm_103a only"
            )
        if self.emulation is not None:
            self._check_emulation()

    def _check_emulation(self) -> None:
        if self.arch == "sm_90a" or Variant.parse(self.variant).kind not in ("stock", "control"):
            raise LabError(
                f"compile: emulation is {self.emulation} for {self.variant} on {self.arch}, but it is a setting of the "
                "stock exponential on sm_100a and sm_103a: leave it out"
            )
        if len(self.emulation) != 2 or min(self.emulation) < 0 or self.emulation[0] % 2:
            raise LabError(
                f"compile: emulation is {self.emulation}, but must be an even frequency and a first fragment, as 16,1"
            )


@dataclass(frozen=True)
class Artifact:
    """A compiled kernel.

    Attributes:
        request: what was asked for.
        ptx, cubin: files, kept in the cache.
        kernel: the kernel's symbol in both.
        seconds: that compiling took.
        versions: of flash-attn-4, nvidia-cutlass-dsl, quack-kernels, and the toolkit that compiled (`cuda`).
        key: the hash under which it is kept.
    """

    request: Request
    ptx: Path
    cubin: Path
    kernel: str
    seconds: float
    versions: dict[str, str]
    key: str


def compile(
    variant: str | Variant = "stock",
    arch: str = "sm_100a",
    dtype: str = "bf16",
    causal: bool = True,
    head_dim: int = 128,
    *,
    gqa: int = 1,
    emulation: tuple[int, int] | None = None,
    softcap: float = 0.0,
    package: Path | None = None,
) -> Artifact:
    """Compile one kernel, or take it from the cache. Arguments as `Request`; `package` as `compile_many`."""
    request = Request(str(variant), arch, dtype, causal, head_dim, gqa, emulation, softcap)
    return compile_many([request], package=package)[0]


def compile_many(requests: Iterable[Request], *, package: Path | None = None) -> list[Artifact]:
    """Compile kernels, one process an architecture.

    Args:
        requests: any number; what is in the cache already is taken from there.
        package: folder that holds `flash_attn`, in place of the installed one; for a copy that was patched as text.

    Returns:
        Artifacts in the order of the requests.

    Raises:
        LabError: FlashAttention-4 is not installed, is another version, or refused to compile.
    """
    requests = list(requests)
    folders = [_folder(r, package) for r in requests]
    for arch in dict.fromkeys(r.arch for r in requests):
        if all(_complete(f) for f, r in zip(folders, requests, strict=True) if r.arch == arch):
            continue
        with _locked():
            missing = {f: r for f, r in zip(folders, requests, strict=True) if r.arch == arch and not _complete(f)}
            if missing:
                _in_process(arch, missing, package)
    return [_artifact(f) for f in folders]


def _folder(request: Request, package: Path | None) -> Path:
    parts = {"request": asdict(request), "source": source.fingerprint(package), "versions": source.versions()}
    parts |= {"replacement": edits.replacement_hash(Variant.parse(request.variant)), "format": 1}
    key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]
    return source.cache_dir() / "compiled" / key


def _complete(folder: Path) -> bool:
    return (folder / "artifact.json").is_file()


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    """One lock for the cache: two processes that want the same kernel compile it once."""
    with source.cache() as cache:
        (cache / "compiled").mkdir(exist_ok=True)
        lock = FileLock(cache / "compiled" / ".lock")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _artifact(folder: Path) -> Artifact:
    facts = json.loads((folder / "artifact.json").read_text(encoding="utf-8"))
    return Artifact(
        request=Request(**facts["request"]),
        ptx=folder / "kernel.ptx",
        cubin=folder / "kernel.cubin",
        kernel=facts["kernel"],
        seconds=facts["seconds"],
        versions=facts["versions"],
        key=folder.name,
    )


def _in_process(arch: str, missing: dict[Path, Request], package: Path | None) -> None:
    """Compile in a process of its own, whose environment names the target."""
    selected, sms = ARCHS[arch]
    with tempfile.TemporaryDirectory(prefix="softmaxlab-compile-") as dump:
        # Settings of the caller's environment would change what is compiled.
        clean = {n: v for n, v in os.environ.items() if not n.startswith(("CUTE_DSL_", "FLASH_ATTENTION_"))}
        clean |= {
            "CUTE_DSL_ARCH": arch,
            "FLASH_ATTENTION_ARCH": selected,
            "FLASH_ATTENTION_NUM_SMS": str(sms),
            "CUTE_DSL_KEEP": "ptx,cubin",
            "CUTE_DSL_DUMP_DIR": dump,
            "CUDA_VISIBLE_DEVICES": "",
        }
        here = str(Path(softmaxlab.__file__).parents[1])  # wherever this package was imported from
        clean["PYTHONPATH"] = os.pathsep.join(filter(None, [package and str(package), here, clean.get("PYTHONPATH")]))
        work = [
            {"folder": str(f), "request": asdict(r), "package": package and str(package)} for f, r in missing.items()
        ]
        done = subprocess.run(
            [sys.executable, "-m", "softmaxlab.fa4.tracing"],
            input=json.dumps(work),
            env=clean,
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise LabError(f"compiling for {arch} failed with exit code {done.returncode}: {last}")
