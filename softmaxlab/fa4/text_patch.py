"""The same replacement as text in an installed copy of FlashAttention-4, for other people's processes.

One file is edited, softmax.py, and one is added, the element's arithmetic. Beside them stand the original and a
manifest with the hash of each file before and after. Each file is written whole or not at all. Original and manifest
are there before anything is edited, and go after everything is restored: whatever interrupts applying or reverting,
also a kill, leaves a state that `status` names and `revert` repairs, and a second patch is refused until then.

A process that has imported FlashAttention-4 and not yet compiled reads the file later, at line numbers of before:
apply and revert while none runs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from softmaxlab.errors import LabError
from softmaxlab.fa4 import edits, source
from softmaxlab.fa4.variants import Variant

EDITED, ADDED = "softmax.py", "softmaxlab_element.py"
ORIGINAL, MANIFEST = "softmax.py.softmaxlab-original", "softmaxlab-patch.json"
_IMPORTS = "from flash_attn.cute.utils import AuxData\n"  # the last of the module's imports


@dataclass(frozen=True)
class State:
    """What an installed copy is.

    Attributes:
        name: `clean`, `applied`, `partial` (interrupted: revert repairs it) or `unknown` (changed by someone else).
        variant: the one that is applied, or was being applied; empty when clean or unknown.
        files: of each file, what it holds: original, patched, absent, or changed; or that a half-written one is left.
        folder: flash_attn/cute.
        reason: why it is unknown; empty otherwise.
    """

    name: str
    variant: str
    files: dict[str, str]
    folder: Path
    reason: str = ""

    def __str__(self) -> str:
        parts = ", ".join(f"{file} {what}" for file, what in self.files.items())
        of = f" ({self.variant})" if self.variant else ""
        return f"{self.name}{of} in {self.folder}: {parts}{self.reason and f' ({self.reason})'}"


def status(package: Path | None = None) -> State:
    """The state of the installed copy, or of the copy that the folder `package` holds."""
    folder = source.installed(package)
    manifest = _manifest(folder)
    half = {staged.name: "half-written" for staged in _staged(folder)}
    if manifest is None:
        beside = {name: "patched" for name in (ADDED, ORIGINAL) if (folder / name).exists()} | half
        try:
            source.checked(package)
        except LabError as error:
            return State("unknown", "", {EDITED: "changed"} | beside, folder, str(error))
        return State("partial" if beside else "clean", "", {EDITED: "original"} | beside, folder)
    files = {EDITED: _content(folder / EDITED, manifest), ADDED: _content(folder / ADDED, manifest)}
    found = set(files.values()) | set(half.values())
    name = "unknown" if "changed" in found else "applied" if found == {"patched"} else "partial"
    reason = "" if name != "unknown" else "it was edited or replaced after it was patched"
    return State(name, manifest["variant"] if name != "unknown" else "", files | half, folder, reason)


def apply(variant: str | Variant, package: Path | None = None) -> State:
    """Put a variant's exponential into the installed copy.

    Raises:
        LabError: the copy is not clean, its version or text is unknown, an anchor is off, or it cannot be written.
    """
    variant = Variant.parse(variant)
    if variant.packed:
        raise LabError(f"{variant} was not applied: it falls back call by call, which only the run-time patch can do")
    if variant.kind == "skip":
        raise LabError(f"{variant} was not applied: it is for timing, and only the run-time patch makes it")
    with _writing(package) as folder:
        before = status(package)
        if before.name != "clean":
            advice = "revert it first" if before.name in ("applied", "partial") else "reinstall it first"
            raise LabError(f"FlashAttention-4 is not clean, so {variant} was not applied: {advice}: {before}")
        if (folder / EDITED).is_symlink():
            raise LabError(f"{folder / EDITED} is a link to a file that others may use: install a copy of its own")
        original = (folder / EDITED).read_bytes()
        files = {EDITED: _edited(variant, original.decode(), package).encode(), ADDED: _element()}
        hashes = {name: {"before": None, "after": _sha(content)} for name, content in files.items()}
        hashes[EDITED]["before"] = _sha(original)
        manifest = {"variant": str(variant), "version": source.version(package), "files": hashes}
        _write(folder / ORIGINAL, original)
        _write(folder / MANIFEST, json.dumps(manifest, indent=1).encode())
        _write(folder / ADDED, files[ADDED])
        _write(folder / EDITED, files[EDITED])
        return status(package)


def revert(package: Path | None = None) -> State:
    """Restore the installed copy byte for byte, also after an interruption; nothing to do when it is clean.

    Raises:
        LabError: the copy was changed by someone else, or the original that was kept is not what the manifest says.
    """
    with _writing(package) as folder:
        before = status(package)
        if before.name == "unknown":
            raise LabError(f"FlashAttention-4 was changed by something else, so nothing was reverted: {before}")
        manifest = _manifest(folder)
        if manifest is not None and before.files[EDITED] != "original":
            kept = folder / ORIGINAL
            if not kept.is_file() or _sha(kept.read_bytes()) != manifest["files"][EDITED]["before"]:
                raise LabError(f"{kept} is not the original that the manifest names: reinstall {source.INSTALL}")
            _write(folder / EDITED, kept.read_bytes())
        for staged in _staged(folder):
            staged.unlink(missing_ok=True)
        for name in (ADDED, ORIGINAL, MANIFEST):
            (folder / name).unlink(missing_ok=True)
            if name == ADDED:
                _forget_compiled(folder, name)
        return status(package)


def _edited(variant: Variant, text: str, package: Path | None) -> str:
    if text.count(_IMPORTS) != 1:
        raise LabError(
            f"the anchor {_IMPORTS.strip()!r} stands {text.count(_IMPORTS)} times in {EDITED}, but must once"
        )
    for name, body in source.checked(package).items():
        text = text.replace(body, edits.edited(name, body))
    lines = f"from fractions import Fraction\nfrom flash_attn.cute.{ADDED[:-3]} import Element\n"
    return text.replace(_IMPORTS, f"{_IMPORTS}{lines}\nELEMENT = {edits.element(variant)}  # softmaxlab: {variant}\n")


def _element() -> bytes:
    return Path(__file__).with_name("element.py").read_bytes()


def _manifest(folder: Path) -> dict | None:
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        edited, added = manifest["files"][EDITED], manifest["files"][ADDED]
        texts = (manifest["variant"], edited["before"], edited["after"], added["after"])
        if all(isinstance(text, str) for text in texts) and added["before"] is None:
            return manifest
    except (ValueError, KeyError, TypeError):
        pass
    raise LabError(f"{path} is no manifest of a text patch: remove it and reinstall: {source.INSTALL}")


def _content(path: Path, manifest: dict) -> str:
    known = manifest["files"][path.name]
    if not path.is_file():
        return "absent" if known["before"] is None else "changed"
    sha = _sha(path.read_bytes())
    return {known["before"]: "original", known["after"]: "patched"}.get(sha, "changed")


@contextlib.contextmanager
def _writing(package: Path | None) -> Iterator[Path]:
    """One process at a time; an operating system's refusal in one sentence."""
    folder = source.installed(package)
    with source.cache() as cache:
        lock = FileLock(cache / f"text-{_sha(str(folder.resolve()).encode())[:16]}.lock")
        lock.acquire()
    try:
        yield folder
    except OSError as error:
        raise LabError(f"{folder} cannot be changed ({error.strerror or error}): {_safe_status(package)}") from None
    finally:
        lock.release()


def _safe_status(package: Path | None) -> str:
    try:
        return str(status(package))
    except (LabError, OSError) as error:
        return f"its state cannot be told ({error})"


def _staged(folder: Path) -> list[Path]:
    """Files that a process which was killed had begun to write."""
    return sorted(s for name in (EDITED, ADDED, ORIGINAL, MANIFEST) for s in folder.glob(f".{name}.*.tmp"))


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all; the permissions of the file that was there stay."""
    staged = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with staged.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            staged.chmod(path.stat().st_mode)
        os.replace(staged, path)
    finally:
        staged.unlink(missing_ok=True)
    _forget_compiled(path.parent, path.name)


def _forget_compiled(folder: Path, name: str) -> None:
    # Python tells a stale .pyc by seconds and size, and two variants can agree in both.
    for compiled in (folder / "__pycache__").glob(f"{Path(name).stem}.*.pyc"):
        compiled.unlink(missing_ok=True)


def _sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
