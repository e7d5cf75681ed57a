"""Several processes on one results folder, one a GPU, that share the work through that folder alone.

There is no process group and no collective, so nothing can wait for a process that is gone. A process claims
a unit of work by locking one byte of a file; the operating system lets the lock go when the process ends,
however it ends, and then the unit is anyone's again. What is finished lies in the store, where the others see
it. So it does not matter whether the processes came from `torchrun`, from `accelerate launch` or by hand, nor
when each of them began.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from softmaxlab.errors import LabError

try:
    import fcntl
except ImportError:  # Windows: every claim is granted, so processes do work twice, and the store keeps one of each
    fcntl = None

_FILE = ".claims"
_BUSY = {errno.EACCES, errno.EAGAIN}


class Claims:
    """Units of work that this process has to itself.

    Args:
        folder: the results folder that the processes share; None grants everything.
    """

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / _FILE
        # One descriptor for good: closing any descriptor of the file would drop all locks of the process.
        self._file: int | None = None

    @contextmanager
    def take(self, unit: str) -> Iterator[bool]:
        """While open, no other process has the unit; yields False at once if another one has it already.

        Raises:
            LabError: the folder's file system has no locks.
        """
        if self._path is None or fcntl is None:
            yield True
            return
        # The place of a unit's byte is its hash; nothing is ever written there.
        place = int.from_bytes(hashlib.sha256(unit.encode()).digest()[:7], "big")
        try:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
        except OSError as error:
            if error.errno not in _BUSY:
                raise LabError(f"{self._path} cannot be locked ({error.strerror}): put the results elsewhere") from None
            yield False
            return
        try:
            yield True
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, place)

    def close(self) -> None:
        """Let go of everything."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def rank() -> int:
    """Number of this process among those of its launcher; 0 without one."""
    return _number("RANK", 0)


def world() -> int:
    """How many processes the launcher started; 1 without one."""
    return _number("WORLD_SIZE", 1)


def bind(device: str) -> None:
    """Make `cuda` mean this process's own card, which is the one of its local rank.

    Raises:
        LabError: there are fewer cards than processes.
    """
    if device != "cuda" or world() == 1:
        return
    own, there = _number("LOCAL_RANK", 0), torch.cuda.device_count()
    if own >= there:
        raise LabError(f"process {own} of this machine has no GPU of its own: start at most {there}, one a GPU")
    torch.cuda.set_device(own)


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "").strip() or str(default)
    if not text.isdecimal():
        raise LabError(f"{name} is {text!r} in the environment, but a launcher sets it to a number")
    return int(text)
