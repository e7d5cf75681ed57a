"""The chapters: found, chosen, their pairs and parameters checked, executed, and looked at afterwards.

One chapter is a pair, `notebooks/NN_name.py` (the text that people edit) and `notebooks/NN_name.ipynb`
(the same cells, committed without outputs). Papermill executes the notebook into `book/executed/`.

Everything here fails closed. Papermill takes an unknown parameter with a mere message, Jupytext's own
check does not notice a pair that drifted apart, and an executed notebook may have no outputs: each is
looked for, and stops the build with one sentence.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import logging
import os
import platform
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from softmaxlab.errors import LabError

PACKAGE = Path(__file__).resolve().parent
#: Files of the package and the results that a chapter's outputs can depend on.
_INPUTS = {".py", ".csv", ".json", ".parquet"}


@dataclass(frozen=True)
class Chapter:
    """A chapter's files."""

    root: Path
    name: str

    @property
    def script(self) -> Path:
        return self.root / "notebooks" / f"{self.name}.py"

    @property
    def notebook(self) -> Path:
        return self.root / "notebooks" / f"{self.name}.ipynb"

    @property
    def executed(self) -> Path:
        return self.root / "book" / "executed" / f"{self.name}.ipynb"

    @property
    def running(self) -> Path:
        """Where the notebook is while it runs, and stays when it failed."""
        return self.executed.parent / "_running" / self.executed.name


def find_root(start: Path | None = None) -> Path:
    """The folder that holds `_toc.yml`: the working directory, one above it, or the checkout of this file."""
    start = Path.cwd() if start is None else start
    for folder in (start, *start.parents, PACKAGE.parent):
        if (folder / "_toc.yml").is_file() and (folder / "notebooks").is_dir():
            return folder
    raise LabError(f"no book at {start}: run this in a clone of the project, where _toc.yml is")


def find_chapters(root: Path) -> list[Chapter]:
    """All chapters, in the order of their numbers; a file without a number is somebody's own."""
    folder = root / "notebooks"
    names = sorted({path.stem for suffix in ("py", "ipynb") for path in folder.glob(f"[0-9][0-9]_*.{suffix}")})
    if not names:
        raise LabError(f"{folder} holds no chapter (NN_name.py with NN_name.ipynb)")
    return [Chapter(root, name) for name in names]


def choose(every: list[Chapter], names: list[str] | None) -> list[Chapter]:
    """The chapters that `names` mean, each by its whole name or an unambiguous beginning of it."""
    if names is None:
        return every
    chosen = []
    for name in names:
        stem = Path(name).stem
        found = [c for c in every if c.name == stem] or [c for c in every if stem and c.name.startswith(stem)]
        if len(found) != 1:
            known = ", ".join(c.name for c in every)
            raise LabError(f"{name!r} should name one chapter and names {len(found)}; there are: {known}")
        chosen += found
    return [c for c in every if c in chosen]


def check_parameters(chosen: list[Chapter], parameters: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Hold parameters against the chapters' `parameters` cells before anything runs.

    Returns:
        chapter name -> the parameters that this chapter knows.

    Raises:
        LabError: a name that none of the chapters knows, or a value of another type than the default.
    """
    if not parameters:
        return {}
    import papermill

    values: dict[str, dict[str, Any]] = {}
    known: dict[str, None] = {}
    for chapter in chosen:
        declared = papermill.inspect_notebook(ensure_notebook(chapter))
        known |= dict.fromkeys(declared)
        values[chapter.name] = {name: value for name, value in parameters.items() if name in declared}
        for name, value in values[chapter.name].items():
            check_type(chapter.name, name, value, declared[name]["default"])
    for name in parameters:
        if name not in known:
            where = ", ".join(chapter.name for chapter in chosen)
            raise LabError(f"no parameter {name!r} in {where}; there are: {', '.join(known) or 'none'}")
    return values


def check_type(chapter: str, name: str, value: Any, default_source: str) -> None:
    """Refuse `blocks="two"` now rather than minutes into a chapter; an int does for a float."""
    try:
        default = ast.literal_eval(default_source)
    except (ValueError, SyntaxError):
        return  # an expression: its type is not known without running it
    allowed = (int, float) if isinstance(default, float) else type(default)
    if default is None or (isinstance(value, allowed) and isinstance(value, bool) == isinstance(default, bool)):
        return
    kind = type(default).__name__
    raise LabError(f"parameter {name} of {chapter} is {value!r} and should be of type {kind}, as {default!r} is")


def ensure_notebook(chapter: Chapter) -> Path:
    """The chapter's .ipynb; written from the .py if it is missing."""
    import jupytext

    if not chapter.script.is_file():
        raise LabError(f"{chapter.notebook} has no text form: `jupytext --to py:percent {chapter.notebook}` makes it")
    if not chapter.notebook.is_file():
        jupytext.write(jupytext.read(chapter.script), chapter.notebook)
    return chapter.notebook


def check_pair(chapter: Chapter) -> None:
    """The .py and the .ipynb hold the same cells, or LabError. (`jupytext --check` does not notice.)"""
    import jupytext
    from jupytext.compare import NotebookDifference, compare_notebooks

    ensure_notebook(chapter)
    try:
        compare_notebooks(jupytext.read(chapter.notebook), jupytext.read(chapter.script), fmt="py:percent")
    except NotebookDifference as difference:
        files = f"{chapter.script.name} and {chapter.notebook.name}"
        first = " ".join(str(difference).split())[:160]
        raise LabError(
            f"{files} in {chapter.script.parent} differ; `jupytext --sync notebooks/{chapter.script.name}` "
            f"brings the older one in step with the newer one ({first})"
        ) from None


def fingerprint(chapter: Chapter) -> str:
    """sha256 of what a chapter's outputs depend on: its cells, the package, the results, the versions."""
    digest = hashlib.sha256()
    folders = (PACKAGE, chapter.root / "results")
    files = sorted(p for f in folders for p in f.rglob("*") if p.is_file() and p.suffix in _INPUTS)
    for path in (chapter.notebook, *files):
        name = path.name if path == chapter.notebook else os.path.relpath(path, chapter.root)
        digest.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\0".encode())
    for package in ("matplotlib", "numpy", "pandas", "scipy", "torch", "transformers"):
        digest.update(f"{package}=={importlib.metadata.version(package)}\0".encode())
    digest.update(platform.python_version().encode())
    return digest.hexdigest()


def is_current(chapter: Chapter) -> bool:
    """Whether the executed notebook was made, without parameters, from what is there now."""
    import nbformat

    if not chapter.executed.is_file():
        return False
    metadata = nbformat.read(chapter.executed, as_version=4).metadata.get("softmaxlab", {})
    return metadata.get("inputs") == fingerprint(chapter) and not metadata.get("parameters")


def run(chapter: Chapter, parameters: dict[str, Any], *, time_limit_s: int) -> None:
    """Execute one chapter into `book/executed/`; a failed one stays under `book/executed/_running/`."""
    import nbformat
    import papermill
    from nbclient.exceptions import CellTimeoutError, DeadKernelError
    from papermill.exceptions import PapermillExecutionError

    logging.getLogger("papermill").setLevel(logging.ERROR)
    inputs = fingerprint(chapter)
    chapter.running.parent.mkdir(parents=True, exist_ok=True)
    left = f"as far as it ran: {chapter.running.relative_to(chapter.root)}"
    try:
        with notebook_environment():
            papermill.execute_notebook(
                str(chapter.notebook),
                str(chapter.running),
                parameters=parameters,
                kernel_name="python3",
                cwd=str(chapter.notebook.parent),
                progress_bar=False,
                execution_timeout=time_limit_s,
            )
    except PapermillExecutionError as error:
        what = " ".join(f"{error.ename}: {error.evalue}".split())
        raise LabError(f"chapter {chapter.name} failed in cell {error.cell_index}: {what} ({left})") from None
    except CellTimeoutError:
        raise LabError(f"a cell of chapter {chapter.name} ran past {time_limit_s} s ({left})") from None
    except DeadKernelError:
        raise LabError(f"the kernel of chapter {chapter.name} died, often for want of memory ({left})") from None
    notebook = nbformat.read(chapter.running, as_version=4)
    for name in ("input_path", "output_path"):  # readers download this file: no folder of this machine in it
        notebook.metadata.papermill[name] = Path(notebook.metadata.papermill[name]).name
    notebook.metadata["softmaxlab"] = {"inputs": inputs, "parameters": parameters}
    nbformat.write(notebook, chapter.running)
    check_executed(chapter.running)
    os.replace(chapter.running, chapter.executed)


@contextmanager
def notebook_environment() -> Iterator[None]:
    """Environment of the kernels: this interpreter, this package, no progress bars, inline figures.

    A kernel named `python3` of the user's own, elsewhere, would win over the one of this environment; a
    kernel specification in a folder of JUPYTER_PATH wins over both.
    """
    from ipykernel.kernelspec import write_kernel_spec

    with tempfile.TemporaryDirectory() as folder:
        # Quiet: ipykernel else tells the terminal that it listens on a local port and that it was stopped.
        write_kernel_spec(Path(folder) / "kernels" / "python3", extra_arguments=["--log-level=CRITICAL"])
        changes = {
            "JUPYTER_PATH": os.pathsep.join(filter(None, [folder, os.environ.get("JUPYTER_PATH")])),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(PACKAGE.parent), os.environ.get("PYTHONPATH")])),
            "TQDM_DISABLE": "1",
            "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        }
        before = {name: os.environ.get(name) for name in changes}
        os.environ.update(changes)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def check_executed(path: Path) -> None:
    """The notebook was executed, has outputs and no error among them, or LabError."""
    import nbformat

    if not path.is_file():
        raise LabError(f"chapter {path.stem} was not executed yet: build the book with execution on")
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code" and cell.source]
    if not any(cell.outputs for cell in cells):
        raise LabError(f"chapter {path.stem} came out without outputs: every chapter shows what its cells computed")
    for number, cell in enumerate(cells, start=1):
        if cell.execution_count is None:
            raise LabError(f"code cell {number} of chapter {path.stem} was not executed")
        for output in cell.outputs:
            if output.output_type == "error":
                raise LabError(f"code cell {number} of chapter {path.stem} ended with {output.ename}: {output.evalue}")
