"""The installed FlashAttention-4 as text: found and checked. And the cache of what is made from it.

Nothing is guessed: the version must be known, and the text of each method that is replaced must have the hash that was
read; else nothing is made and the error names what was off.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import platformdirs

from softmaxlab.errors import LabError

DISTRIBUTION = "flash-attn-4"
#: Of each known version: the SHA-256 of the methods' text, from the decorator to the last line.
KNOWN = {
    "4.0.0b36": {
        "SoftmaxSm100.scale_subtract_rowmax": "c3a469b2bafd804a1fbc0cdea5a7f0aca21fcd89ad293a42bb35a6cbb6ed9512",
        "SoftmaxSm100.apply_exp2_convert": "7f746ca43d77f115f5f3a66711a429ddb0cd9173974294d38b8b172d550d42de",
        "Softmax.online_softmax": "559f13567151d495e7ee3472907ddb834620e7eee152f93db5161c69996e97fb",
    }
}
METHODS = tuple(next(iter(KNOWN.values())))
INSTALL = f"pip install {DISTRIBUTION}=={next(iter(KNOWN))} (Linux on x86-64)"


def cache_dir() -> Path:
    """Where replacement methods and compiled kernels are kept: under `SOFTMAXLAB_CACHE`, or the user's cache."""
    root = os.environ.get("SOFTMAXLAB_CACHE") or platformdirs.user_cache_dir("softmaxlab")
    return Path(root).expanduser() / "fa4"


@contextlib.contextmanager
def cache() -> Iterator[Path]:
    """The cache's folder, for writing; an operating system's refusal in one sentence."""
    folder = cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
    except OSError as error:
        raise LabError(
            f"the cache {folder} cannot be written ({error.strerror or error}): set SOFTMAXLAB_CACHE to another folder"
        ) from None


def installed(package: Path | None = None) -> Path:
    """The folder flash_attn/cute, of the installed package or of a copy that `package` holds.

    Raises:
        LabError: it is not there.
    """
    if package is not None:
        folder = Path(package) / "flash_attn" / "cute"
    else:
        try:
            spec = importlib.util.find_spec("flash_attn.cute")
        except (ImportError, ValueError):  # also a foreign flash_attn that fails as it is imported
            spec = None
        if spec is None or spec.origin is None:
            raise LabError(f"FlashAttention-4 is not installed here: {INSTALL}")
        folder = Path(spec.origin).parent
    if not (folder / "softmax.py").is_file():
        raise LabError(f"no FlashAttention-4 is in {folder}: softmax.py is missing there")
    return folder


def version(package: Path | None = None) -> str:
    """Of FlashAttention-4; empty if its metadata is not found.

    A copy's is read beside it; where it bears no metadata of its own, it passes for a copy of the installed one.
    """
    if package is not None:
        for found in importlib.metadata.distributions(name=DISTRIBUTION, path=[str(package)]):
            return found.version
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return ""


def versions() -> dict[str, str]:
    """What determines the compiled code: the packages' versions, and CUDA's major version of CuTe's compiler."""
    found = {"flash-attn-4": version()}
    for name in ("nvidia-cutlass-dsl", "quack-kernels"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    for major in ("13", "12"):  # without a driver CuTe takes the newest that is installed
        try:
            importlib.metadata.version(f"nvidia-cutlass-dsl-libs-cu{major}")
        except importlib.metadata.PackageNotFoundError:
            continue
        return found | {"cuda": major}
    return found | {"cuda": ""}


def method(text: str, name: str) -> str:
    """The text of `Class.method` in a module's text, decorators included.

    Raises:
        LabError: it is not there, or not once.
    """
    owner, _, member = name.partition(".")
    found = [
        node
        for cls in ast.parse(text).body
        if isinstance(cls, ast.ClassDef) and cls.name == owner
        for node in cls.body
        if isinstance(node, ast.FunctionDef) and node.name == member
    ]
    if len(found) != 1:
        raise LabError(f"FlashAttention-4's softmax.py has {len(found)} methods {name}, but must have 1")
    first = min([found[0].lineno, *(d.lineno for d in found[0].decorator_list)])
    return "".join(text.splitlines(keepends=True)[first - 1 : found[0].end_lineno])


def checked(package: Path | None = None) -> dict[str, str]:
    """The text of each method, once version and hashes are known ones.

    Raises:
        LabError: an unknown version, or a method whose text is not the one that was read.
    """
    path = installed(package) / "softmax.py"
    found = version(package)
    if found not in KNOWN:
        raise LabError(f"{DISTRIBUTION} is {found or 'of no known version'}, but must be {', '.join(KNOWN)}: {INSTALL}")
    text = path.read_text(encoding="utf-8")
    texts = {name: method(text, name) for name in METHODS}
    for name, body in texts.items():
        sha = hashlib.sha256(body.encode()).hexdigest()
        if sha != KNOWN[found][name]:
            hint = "it was patched as text: revert that first" if "ELEMENT" in body else "it was changed"
            raise LabError(
                f"{name} in {path} has sha256 {sha[:16]}…, but in {DISTRIBUTION} {found} it has "
                f"{KNOWN[found][name][:16]}…: {hint}"
            )
    return texts


def fingerprint(package: Path | None = None) -> str:
    """SHA-256 over every Python source of FlashAttention-4."""
    folder = installed(package)
    return _fingerprint(folder, tuple((p, p.stat().st_mtime_ns) for p in sorted(folder.rglob("*.py"))))


@lru_cache(maxsize=8)
def _fingerprint(folder: Path, files: tuple[tuple[Path, int], ...]) -> str:
    digest = hashlib.sha256()
    for path, _ in files:
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()
