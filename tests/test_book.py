"""The book's driver: what it refuses, what it writes, and one whole build of a small book."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jupytext
import nbformat
import pandas as pd
import pytest

from softmaxlab import book, chapters, offline, status
from softmaxlab.errors import LabError

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.py"))

CHAPTER = """# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A chapter
#
# $$ y = e^x $$ (eq-small)
#
# See {eq}`eq-small` and {cite:t}`key`.

# %% tags=["parameters"]
blocks = 2
scale = 1.0
model = "small"

# %%
import os
import sys
import softmaxlab.errors
import matplotlib.pyplot as plt
print(sys.executable, blocks, scale, model, os.environ["TQDM_DISABLE"], file=sys.stdout)
print("no" + "ise", file=sys.stderr)
plt.plot([1, 2]);
"""


@pytest.fixture
def small_book(tmp_path, monkeypatch):
    """A book of one chapter, with this project's configuration, extension, style and template."""
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "results").mkdir()
    (tmp_path / "notebooks" / "01_small.py").write_text(CHAPTER, encoding="utf-8")
    for name in ("_ext", "_static", "_templates"):
        shutil.copytree(ROOT / "book" / name, tmp_path / "book" / name)
    shutil.copy(ROOT / "book" / "status-template.md", tmp_path / "book")
    shutil.copy(ROOT / "_config.yml", tmp_path)
    (tmp_path / "book" / "intro.md").write_text("# Small\n\n[](executed/01_small.ipynb)\n")
    (tmp_path / "book" / "references.md").write_text("# References\n\n```{bibliography}\n```\n")
    (tmp_path / "book" / "references.bib").write_text("@misc{key, title={T}, author={A, B}, year={2026}}\n")
    (tmp_path / "_toc.yml").write_text(
        "format: jb-book\nroot: book/intro\nparts:\n- caption: One\n  numbered: true\n  chapters:\n"
        "  - file: book/executed/01_small\n- caption: Two\n  chapters:\n"
        "  - file: book/references\n  - file: book/_generated/status\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def small_chapter(folder: Path) -> chapters.Chapter:
    (folder / "notebooks" / "draft.py").write_text("# no number: not a chapter\n")
    (chapter,) = chapters.find_chapters(folder)
    return chapter


def test_a_whole_build(small_book, monkeypatch, capfd):
    monkeypatch.setenv("SOFTMAXLAB_REPOSITORY_URL", "https://github.com/owner/name")
    index = book.build()
    assert index.is_file() and index.samefile(small_book / "book" / "_build" / "html" / "index.html")
    html = index.parent
    page = (html / "book" / "executed" / "01_small.html").read_text(encoding="utf-8")
    assert f"{sys.executable} 2 1.0 small 1" in page, "the kernel is this interpreter, without progress bars"
    assert "noise" not in page
    assert "A chapter" in page and "(1.1)" in page, "chapters and equations are numbered"
    assert 'src="../../_images/' in page
    # The source is in the book, linked, and what the edit button opens.
    assert (html / "_sources_py" / "01_small.py").read_text(encoding="utf-8") == CHAPTER
    assert page.count('href="../../_sources_py/01_small.py"') == 2
    assert "https://github.com/owner/name/edit/main/notebooks/01_small.py" in page
    assert (html / "_sources" / "book" / "executed" / "01_small.ipynb").is_file()
    # Everything comes from the book's own folder, MathJax too.
    assert "_static/mathjax/tex-chtml.js" in page
    assert (html / "_static" / "mathjax" / "tex-chtml.js").is_file()
    assert offline.external_loads(html) == []
    # The status page.
    state = (html / "book" / "_generated" / "status.html").read_text(encoding="utf-8")
    assert "A chapter</span></a>" in state and "No stored results." in state
    # No folder of this machine in the notebook that readers download, apart from what its cells print.
    executed = nbformat.read(small_chapter(small_book).executed, as_version=4)
    assert str(small_book) not in json.dumps(executed.metadata)
    assert "01_small: executing" in capfd.readouterr().out

    # A second build takes the notebook as it was executed; its page count and source do not change.
    before = small_chapter(small_book).executed.stat().st_mtime_ns
    monkeypatch.delenv("SOFTMAXLAB_REPOSITORY_URL")
    book.build()
    assert small_chapter(small_book).executed.stat().st_mtime_ns == before
    assert "as executed before" in capfd.readouterr().out
    page = (html / "book" / "executed" / "01_small.html").read_text(encoding="utf-8")
    assert "github.com/owner" not in page, "no repository is known: no buttons that lead nowhere"

    # A broken reference stops a strict build, on a page that would otherwise not be read again too.
    edit(small_book / "book" / "intro.md", "[](executed/01_small.ipynb)", "{ref}`nowhere`")
    for _ in range(2):
        with pytest.raises(LabError, match="Sphinx build failed"):
            book.build(execute=False)
    assert book.build(execute=False, strict=False).is_file()


def test_a_chapter_outside_the_table_of_contents_is_named(small_book):
    edit(small_book / "_toc.yml", "  - file: book/executed/01_small\n", "  - file: book/other\n")
    (small_book / "book" / "other.md").write_text("# Other\n")
    (small_book / "book" / "intro.md").write_text("# Small\n")
    with pytest.raises(LabError, match=r"no page was built for 01_small: name it in _toc\.yml"):
        book.build(strict=False)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"block": 3}, "no parameter 'block' in 01_small; there are: blocks, scale, model"),
        ({"blocks": "two"}, "parameter blocks of 01_small is 'two' and should be of type int, as 2 is"),
        ({"blocks": True}, "parameter blocks of 01_small is True and should be of type int, as 2 is"),
        ({"model": 3}, "parameter model of 01_small is 3 and should be of type str, as 'small' is"),
    ],
)
def test_wrong_parameters_are_refused_before_anything_runs(small_book, monkeypatch, parameters, message):
    monkeypatch.setattr(chapters, "run", lambda *_, **__: pytest.fail("a chapter ran"))
    with pytest.raises(LabError) as error:
        book.build(parameters=parameters)
    assert str(error.value) == message
    assert not (small_book / "book" / "executed").exists()


def test_parameters_reach_the_cells_and_the_next_build_undoes_them(small_book):
    chapter = small_chapter(small_book)
    values = chapters.check_parameters([chapter], {"blocks": 7, "scale": 3})
    chapters.run(chapter, values[chapter.name], time_limit_s=60)
    text = chapter.executed.read_text(encoding="utf-8")
    assert "7 3 small 1" in text
    assert not chapters.is_current(chapter), "it shows other parameters than the defaults"
    assert "`blocks = 7`, `scale = 3`" in status.chapter_row(chapter.executed)[3]


def test_an_executed_chapter_is_current_until_something_it_depends_on_changes(small_book):
    chapter = small_chapter(small_book)
    assert not chapters.is_current(chapter)
    chapters.ensure_notebook(chapter)
    chapters.run(chapter, {}, time_limit_s=60)
    assert chapters.is_current(chapter)
    (small_book / "results" / "new.json").write_text("{}")
    assert not chapters.is_current(chapter)
    (small_book / "results" / "new.json").unlink()
    assert chapters.is_current(chapter)
    edit(chapter.notebook, "scale = 1.0", "scale = 2.0")
    assert not chapters.is_current(chapter)


def test_chapters_are_chosen_by_name_or_its_beginning(tmp_path):
    every = [chapters.Chapter(tmp_path, name) for name in ("01_a", "02_b", "02_bc")]
    assert chapters.choose(every, None) == every
    assert [c.name for c in chapters.choose(every, ["02_b", "notebooks/01_a.ipynb"])] == ["01_a", "02_b"]
    for wrong in ("02", "03", ""):
        with pytest.raises(LabError, match="should name one chapter"):
            chapters.choose(every, [wrong])


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("pass", "chapter 01_small came out without outputs"),
        ("print(1)\n1 / 0", r"chapter 01_small failed in cell \d: ZeroDivisionError: division by zero"),
        ("import time\ntime.sleep(60)", "a cell of chapter 01_small ran past 2 s"),
        ("import os\nos._exit(1)", "the kernel of chapter 01_small died"),
    ],
)
def test_a_chapter_that_fails_or_shows_nothing_is_an_error(small_book, code, message):
    script = small_book / "notebooks" / "01_small.py"
    head, _, _ = CHAPTER.partition("# %%\n")
    script.write_text(f"{head}# %%\n{code}\n", encoding="utf-8")
    chapter = small_chapter(small_book)
    chapters.ensure_notebook(chapter)
    with pytest.raises(LabError, match=message):
        chapters.run(chapter, {}, time_limit_s=2)
    assert not chapter.executed.exists(), "a failed chapter never counts as executed"
    assert chapter.running.is_file(), "what there is of it can be looked at"
    with pytest.raises(LabError, match="was not executed yet"):
        book.build(execute=False)


def test_an_error_or_an_unexecuted_cell_in_an_executed_notebook_is_seen(tmp_path):
    shown = nbformat.v4.new_output("stream", text="1")
    wrong = nbformat.v4.new_output("error", ename="ValueError", evalue="no", traceback=[])
    cases = [
        ([nbformat.v4.new_code_cell("1", outputs=[shown], execution_count=1)], None),
        ([nbformat.v4.new_code_cell("1", outputs=[shown])], "code cell 1 of chapter x was not executed"),
        (
            [nbformat.v4.new_code_cell("1", outputs=[shown, wrong], execution_count=1)],
            "code cell 1 of chapter x ended with ValueError: no",
        ),
    ]
    for cells, message in cases:
        nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "x.ipynb")
        if message is None:
            chapters.check_executed(tmp_path / "x.ipynb")
            continue
        with pytest.raises(LabError) as error:
            chapters.check_executed(tmp_path / "x.ipynb")
        assert str(error.value) == message


def test_pairs(small_book):
    chapter = small_chapter(small_book)
    chapters.check_pair(chapter)  # makes the missing notebook
    assert jupytext.read(chapter.notebook).cells[1].source == jupytext.read(chapter.script).cells[1].source
    edit(chapter.script, "blocks = 2", "blocks = 3")
    with pytest.raises(LabError, match=r"01_small\.py and 01_small\.ipynb in .* differ"):
        chapters.check_pair(chapter)
    chapter.script.unlink()
    with pytest.raises(LabError, match="has no text form"):
        chapters.check_pair(chapter)


def test_a_folder_without_a_book_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(chapters, "PACKAGE", tmp_path / "elsewhere" / "softmaxlab")
    with pytest.raises(LabError, match="no book at"):
        chapters.find_root(tmp_path)


@pytest.mark.parametrize("script", NOTEBOOKS, ids=lambda path: path.stem)
def test_this_book_s_pairs_are_in_step_and_hold_no_outputs(script):
    chapter = chapters.Chapter(ROOT, script.stem)
    assert chapter.notebook.is_file(), "commit the notebook beside its text form"
    chapters.check_pair(chapter)
    cells = nbformat.read(chapter.notebook, as_version=4).cells
    assert not any(cell.get("outputs") for cell in cells)
    assert [cell for cell in cells if "parameters" in cell.metadata.get("tags", [])]


def test_this_book_s_chapters_are_in_its_table_of_contents():
    toc = (ROOT / "_toc.yml").read_text(encoding="utf-8")
    assert NOTEBOOKS
    for script in NOTEBOOKS:
        assert f"book/executed/{script.stem}" in toc


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.html", '<script src="https://host.test/x.js"></script>'),
        ("a.html", '<script src="//host.test/x.js"></script>'),
        ("a.html", '<link rel="stylesheet" href="https://host.test/x.css">'),
        ("a.html", '<link rel="preconnect" href="https://host.test/x">'),
        ("a.html", '<img src="HTTPS://host.test/x.png">'),
        ("a.html", '<img srcset="a.png 1x, https://host.test/x.png 2x">'),
        ("a.html", '<iframe src="http://host.test/x"></iframe>'),
        ("a.html", '<object data="https://host.test/x"></object>'),
        ("a.html", "<style>@import 'https://host.test/x.css';</style>"),
        ("a.html", '<p style="background: url(https://host.test/x.png)">'),
        ("a.html", '<script>import("https://host.test/x.js")</script>'),
        ("a.html", '<script type="module">import x from "https://host.test/x.js"</script>'),
        ("a.html", '<meta http-equiv="refresh" content="0; url=https://host.test/x">'),
        ("a.html", '<svg><image xlink:href="https://host.test/x.png"/></svg>'),
        ("a.css", "@font-face { src: url('https://host.test/x.woff') }"),
        ("a.css", '@import "//host.test/x.css";'),
        ("a.js", "s.src = 'https://host.test/x.js'"),
        ("a.js", 'fetch("https://host.test/x")'),
        ("a.js", 'var base = "https://cdn.jsdelivr.net/npm/x"'),
        ("a.svg", '<svg><image href="https://host.test/x.png"/></svg>'),
    ],
)
def test_what_would_load_from_another_host_is_found(tmp_path, name, content):
    (tmp_path / "index.html").write_text("<p>plain</p>")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / name).write_text(content)
    (found,) = offline.external_loads(tmp_path)
    assert found.startswith(f"sub/{name}: ") and found.split("//")[1].split("/")[0].lower() in {
        "host.test",
        "cdn.jsdelivr.net",
    }


def test_links_and_local_files_are_free(tmp_path):
    (tmp_path / "index.html").write_text(
        '<html xmlns="http://www.w3.org/1999/xhtml"><link rel="canonical" href="https://host.test/">'
        '<a href="https://host.test/x">read</a><script src="_static/x.js"></script>'
        '<img src="data:image/png;base64,//8=">'
        '<svg xmlns="http://www.w3.org/2000/svg"><use href="#a"/></svg>'
        '<script type="application/json">{"see": "https://cdn.jsdelivr.net/npm/x"}</script>'
    )
    (tmp_path / "x.js").write_text('var ns = "http://www.w3.org/2000/svg"; // see https://host.test/docs')
    assert offline.external_loads(tmp_path) == []
    with pytest.raises(LabError, match="holds no HTML file"):
        offline.external_loads(tmp_path / "nothing")


def test_status_tables(tmp_path, monkeypatch):
    assert status.table(("a", "b"), [("x|y", "two\nlines")]).splitlines() == [
        "| a | b |",
        "| --- | --- |",
        "| x\\|y | two lines |",
    ]
    rows = dict(status.machine_rows(tmp_path))
    assert rows["Source"] == "no git commit"
    assert rows["Python"].startswith("3.") and int(rows["Logical CPUs"]) == os.cpu_count()
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.test"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "first"], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout
    assert status.git_state(tmp_path) == f"commit {commit[:12]}"
    (tmp_path / "new").write_text("")
    assert status.git_state(tmp_path) == f"commit {commit[:12]} with changes"


def test_status_says_where_stored_results_came_from(tmp_path):
    from softmaxlab.losskey import LossKey
    from softmaxlab.store import Store

    names = {"model": "m", "model_id": "gguf:sha256:1", "corpus": "c", "corpus_id": "text:sha256:2", "context": 8}
    names |= {"bos": "stream", "dtype": "float32", "backend": "reference"}
    store = Store(tmp_path / "results")
    for condition, blocks, device in (("softmax()", 2, "GPU A"), ("topk(f=0.5)", 3, "GPU A"), ("softmax()@1", 1, "B")):
        key = LossKey(**names, condition=condition, condition_json=f'{{"condition":"{condition}"}}')
        rows = pd.DataFrame({"block": range(blocks), "nll": 1.5, "predictions": 7})
        store.append_losses(key, rows, {"device": device, "date": "2026-01-01"})
    text = status.results_table(tmp_path)
    runs, files = text.split(":::{dropdown} All 3 files")
    assert "| m | c | 8 | reference | 2 | 2 to 3 | GPU A | 2026-01-01 | float32 | stream |" in runs
    assert "| m | c | 8 | reference | 1 | 1 | B | 2026-01-01 | float32 | stream |" in runs
    assert "| `topk(f=0.5)` | 3 | `losses/m/c/8/" in files and files.count(".parquet`") == 3


def test_status_says_what_a_condition_cost(tmp_path):
    from softmaxlab.store import Store

    assert status.cost_table(tmp_path) == "No cost was recorded."
    key = {"model": "m", "context": 8, "dtype": "float32", "backend": "reference", "device": "GPU A", "batch": 4}
    frame = pd.DataFrame(
        {
            "condition": ["topk(f=0.5)", "softmax()", "softmax()@1"],
            "seconds_per_block": [0.03, 0.02, 0.01],
            "batches": [2, 2, 2],
        }
    )
    Store(tmp_path / "results").put_table("cost", key, frame, {})
    text = status.cost_table(tmp_path)
    assert "m, 8 tokens, float32, batch 4: GPU A, backend reference" in text
    assert text.index("| `softmax()` | 20.0 | 1.00 |") < text.index("| `topk(f=0.5)` | 30.0 | 1.50 |")
    assert "@1" not in text


def test_status_links_to_the_page_on_costs_where_there_is_one(tmp_path):
    assert status.elsewhere(tmp_path) == ""
    (tmp_path / "book").mkdir()
    shutil.copy(ROOT / "book" / "costs-template.md", tmp_path / "book")
    assert "{ref}`lab-costs`" in status.elsewhere(tmp_path)
