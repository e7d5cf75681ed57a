"""Build the book: execute the chapters, write the status page, let Sphinx make the pages.

Jupyter Book reads only notebooks that were executed before (`softmaxlab.chapters`), so that what a page
shows is what its cells printed. The pages are built strictly: a warning or an unresolved reference of
Sphinx, a chapter without a page, or a page that would load something from another host is an error.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from softmaxlab import chapters as notebooks
from softmaxlab import offline
from softmaxlab.chapters import Chapter
from softmaxlab.errors import LabError


def build(
    *,
    chapters: list[str] | None = None,
    parameters: dict[str, Any] | None = None,
    execute: bool = True,
    strict: bool = True,
    time_limit_s: int = 1800,
) -> Path:
    """Execute chapters and build the book.

    Args:
        chapters: the chapters to execute, by name or by the beginning of it (`02`); None: all. Another
            chapter is executed, with its defaults, only if it never was.
        parameters: values for the chapters' `parameters` cells. Each name must be known to one of the
            chosen chapters and is given to all that know it. With parameters a chapter always runs;
            without, it runs if its cells, the package, the results or the versions have changed.
        execute: False builds from the executed notebooks that are there.
        strict: warnings and unresolved references of Sphinx are errors.
        time_limit_s: seconds that one cell may take.

    Returns:
        The book's first page, `book/_build/html/index.html`.

    Raises:
        LabError: an unknown chapter or parameter (before anything runs), a pair that differs, a cell that
            fails or takes too long, a chapter without outputs, a failed Sphinx build, a page that
            would load something from another host.
    """
    from softmaxlab import answer, costs_page, findings, paper_models, scaling, status

    root = notebooks.find_root()
    every = notebooks.find_chapters(root)
    chosen = notebooks.choose(every, chapters)
    values = notebooks.check_parameters(chosen, parameters or {})
    for chapter in every if execute else ():
        notebooks.check_pair(chapter)
    for chapter in every if execute else ():
        given = values.get(chapter.name, {})
        wanted = chapter in chosen or not chapter.executed.is_file()
        if wanted and (given or not notebooks.is_current(chapter)):
            print(f"{chapter.name}: executing", flush=True)
            notebooks.run(chapter, given, time_limit_s=time_limit_s)
        else:
            print(f"{chapter.name}: as executed before", flush=True)
    for chapter in every:
        notebooks.check_executed(chapter.executed)
    status.write_page(root, [chapter.executed for chapter in every])
    scaling.write_page(root)
    paper_models.write_page(root)
    costs_page.write_page(root)
    stored = findings.Stored(str(root / "results"))
    answer.write_page(root, stored)
    findings.write_page(root, stored)
    html = run_sphinx(root, every, strict=strict)
    loads = offline.external_loads(html)
    if loads:
        raise LabError(f"the built book would load from other hosts and must not: {'; '.join(loads[:5])}")
    return html / "index.html"


def run_sphinx(root: Path, every: list[Chapter], *, strict: bool) -> Path:
    """Build the pages; return the folder of the HTML files."""
    # From scratch each time (seconds): a page that is not read again would not repeat its warnings, and
    # a page that left the table of contents would stay.
    shutil.rmtree(root / "book" / "_build", ignore_errors=True)
    program = "import sys; from jupyter_book.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "build", str(root), "--path-output", str(root / "book")]
    command += ["--all", "-q"]
    command += ["-W", "-n", "--keep-going"] if strict else []
    # Sphinx reads titles in the language and writes them in the encoding of the locale, unless told.
    outcome = subprocess.run(
        command, cwd=root, env={**os.environ, "PYTHONUTF8": "1"}, stdout=subprocess.DEVNULL, check=False
    )
    html = root / "book" / "_build" / "html"
    if outcome.returncode:
        raise LabError(f"the Sphinx build failed with exit code {outcome.returncode}: the lines above say why")
    pages = [html / "book" / "executed" / f"{chapter.name}.html" for chapter in every]
    missing = [page.stem for page in pages if not page.is_file()]
    if missing:
        raise LabError(f"no page was built for {', '.join(missing)}: name it in _toc.yml")
    return html
