"""Every chapter runs on a model that nobody made it for: two short blocks, from the cells that compute.

Papermill writes the parameters into a copy of the notebook (nbmake cannot pass any), and nbmake executes
the copy in a pytest of its own. Defaults read stored results, so these runs are what shows that a chapter
computes them too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import papermill
import pytest
from conftest import make_tiny_model

from softmaxlab import chapters
from softmaxlab.store import Store

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def execute(notebook: Path, folder: Path, parameters: dict, *, timeout: int = 600) -> subprocess.CompletedProcess:
    """Run a copy of the notebook, with these parameters, under nbmake in a process of its own."""
    known = papermill.inspect_notebook(notebook)
    given = {name: value for name, value in parameters.items() if name in known}
    copy = folder / notebook.name
    papermill.execute_notebook(notebook, copy, parameters=given, prepare_only=True, progress_bar=False)
    command = [sys.executable, "-m", "pytest", "--nbmake", f"--nbmake-timeout={timeout}", "-p", "no:cacheprovider"]
    with chapters.notebook_environment():
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        return subprocess.run(
            [*command, "--rootdir", str(folder), "-c", os.devnull, str(copy)],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )


def run_small(notebook: Path, folder: Path, model: str, *, context: int = 128, blocks: int = 2) -> None:
    results = folder / "results"
    small = {"model": model, "corpus": "pydoc", "context": context, "blocks": blocks, "device": "cpu"}
    small["kernel"] = "fa4(arch=simulated)"  # a chapter that runs a model through the kernel needs no GPU then
    # Chapters that by default only read what is stored compute here, and those over lengths take two.
    small |= {"compute": True, "contexts": f"{context // 2}, {context}"}
    kept = {"record": str(ROOT / "results")}  # what was compiled or timed once, which no run here makes again
    outcome = execute(notebook, folder, small | kept | {"results": str(results)})
    assert outcome.returncode == 0, outcome.stdout[-6000:] + outcome.stderr[-2000:]
    assert "1 passed" in outcome.stdout
    known = papermill.inspect_notebook(notebook)
    if {"results", "blocks"} <= set(known):
        frame = Store(results).frame()
        lengths = {context // 2, context} if "contexts" in known else {context}
        assert len(frame) and set(frame["context"]) == lengths and set(frame["block"]) <= set(range(blocks))


def test_there_are_chapters():
    assert NOTEBOOKS


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_on_a_tiny_random_model(notebook, tiny_model, tmp_path):
    if "kernel" in papermill.inspect_notebook(notebook):  # which takes head dimensions 64 and 128
        tiny_model = make_tiny_model(tmp_path / "wide", head_dim=64, num_attention_heads=2, num_key_value_heads=1)
    run_small(notebook, tmp_path, str(tiny_model))


def test_the_zero_shot_chapter_computes_where_it_is_given_documents(tiny_model, tmp_path):
    """Without them it shows what is stored, which is all that the test above can see."""
    pytest.importorskip("lm_eval")
    from test_zero_shot import make_documents

    (tmp_path / "documents").mkdir()
    data, results = make_documents(tmp_path / "documents"), tmp_path / "results"
    given = {"model": str(tiny_model), "data": str(data), "limit": 4, "device": "cpu", "results": str(results)}
    outcome = execute(ROOT / "notebooks" / "16_zero_shot.ipynb", tmp_path, given)
    assert outcome.returncode == 0, outcome.stdout[-6000:] + outcome.stderr[-2000:]
    assert len(list((results / "zero_shot").glob("*.parquet"))) == 36


# The other chapters call the same functions with more conditions; minutes on the real model would show nothing new.
@pytest.mark.model
@pytest.mark.parametrize("notebook", NOTEBOOKS[:2], ids=lambda path: path.stem)
def test_on_the_embedded_model(notebook, tmp_path):
    run_small(notebook, tmp_path, "smollm2-135m", context=64)


def test_a_failing_cell_fails(tmp_path):
    import nbformat

    cell = nbformat.v4.new_code_cell("blocks = 1", metadata={"tags": ["parameters"]})
    kernel = {"name": "python3", "language": "python", "display_name": "Python 3"}
    body = nbformat.v4.new_code_cell("assert blocks == 1")
    notebook = nbformat.v4.new_notebook(cells=[cell, body], metadata={"kernelspec": kernel})
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / "broken.ipynb"
    nbformat.write(notebook, path)
    assert execute(path, tmp_path, {"blocks": 1}).returncode == 0
    outcome = execute(path, tmp_path, {"blocks": 2})
    assert outcome.returncode == 1 and "AssertionError" in outcome.stdout
