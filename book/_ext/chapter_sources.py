"""Sphinx extension: every page leads to the file a person would edit, and MathJax stays at home.

The book is built from executed notebooks that a program wrote (`book/executed/*.ipynb`). Somebody
who wants to change a chapter needs its text form (`notebooks/*.py`) instead. This extension

- copies the text forms into the built book under `_sources_py/`, so that they can be read and
  downloaded without any host;
- adds them to the download menu and to a line at the foot of the page;
- points the theme's edit button to them, once a repository is known. Its address comes from the
  environment variable SOFTMAXLAB_REPOSITORY_URL, for example `https://github.com/owner/name`;
- trims the copy of MathJax that sphinx-mathjax-offline puts into the book to what the pages use, and
  takes the addresses of other hosts out of it. They are fall-backs of its speech engine, for browsers
  without XPath and for a missing local path; a book that must not load from elsewhere has no use for them.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

EXECUTED = "book/executed/"
SOURCES = "_sources_py"
#: What tex-chtml.js, the one component that the pages load, may load in turn: fonts, TeX extensions, speech.
MATHJAX_USED = {"tex-chtml.js", "output/chtml", "input/tex", "a11y", "sre"}
MATHJAX_FALLBACKS = "https://cdn.jsdelivr.net/npm/"


def _source_file(pagename: str, suffix: str) -> str:
    """Path, from the repository's root, of the file to edit for a page."""
    if pagename.startswith(EXECUTED):
        return f"notebooks/{pagename.removeprefix(EXECUTED)}.py"
    return f"{pagename}{suffix}"


def use_repository(app, config) -> None:
    """Turn the theme's repository buttons on when the environment names a repository."""
    url = os.environ.get("SOFTMAXLAB_REPOSITORY_URL", "").rstrip("/")
    if url:
        buttons = ("use_repository_button", "use_edit_page_button", "use_issues_button")
        config.html_theme_options |= {"repository_url": url, **dict.fromkeys(buttons, True)}


def add_edit_target(app, pagename, templatename, context, doctree) -> None:
    """Make the edit button open the text form; runs after the theme has set its own target."""
    suffix = context.get("page_source_suffix")
    original = context.get("get_edit_provider_and_url")
    if not suffix or original is None or not pagename.startswith(EXECUTED):
        return

    def edit_provider_and_url():
        provider, url = original()
        return provider, url.replace(f"{pagename}{suffix}", _source_file(pagename, suffix))

    context["get_edit_provider_and_url"] = edit_provider_and_url


def add_source_line(app, pagename, templatename, context, doctree) -> None:
    """Tell the template at the foot of the page what this chapter is made from."""
    if pagename.startswith(EXECUTED) and context.get("page_source_suffix"):
        source = _source_file(pagename, ".py")
        context["chapter_source"] = {
            "file": source,
            "url": context["pathto"](f"{SOURCES}/{Path(source).name}", 1),
            "notebook": context["pathto"](f"_sources/{context['sourcename']}", 1),
        }


def add_download(app, pagename, templatename, context, doctree) -> None:
    """Offer the text form of a chapter beside the executed notebook in the theme's download menu."""
    for button in context.get("header_buttons", []):
        if button.get("label") == "download-buttons" and "chapter_source" in context:
            entry = {
                "type": "link",
                "url": context["chapter_source"]["url"],
                "text": ".py",
                "tooltip": "Download the chapter's source",
                "icon": "fas fa-file-code",
                "label": "download-script-button",
            }
            button["buttons"].insert(1, entry)


def copy_sources(app, exception) -> None:
    """Put the text forms into the built book."""
    if exception or app.builder.format != "html":
        return
    target = Path(app.outdir) / SOURCES
    target.mkdir(exist_ok=True)
    for script in (Path(app.srcdir) / "notebooks").glob("*.py"):
        shutil.copyfile(script, target / script.name)


def trim_mathjax(app, exception) -> None:
    """Remove MathJax's unused components and its fall-backs to another host from the built book."""
    folder = Path(app.outdir) / "_static" / "mathjax"
    if exception or app.builder.format != "html":
        return
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        name = path.relative_to(folder).as_posix()
        if not any(name == used or name.startswith(f"{used}/") for used in MATHJAX_USED):
            path.unlink()
        elif path.suffix == ".js":
            text = path.read_text(encoding="utf-8")
            path.write_text(text.replace(MATHJAX_FALLBACKS, "not-here/"), encoding="utf-8")


def setup(app):
    app.setup_extension("sphinx-mathjax-offline")  # copies MathJax at the end of a build, before we trim it
    # First: what a theme sets at the priority that we use too is there for us then.
    app.setup_extension("sphinx_book_theme")
    app.setup_extension("pydata_sphinx_theme")
    app.connect("config-inited", use_repository)
    # The theme drops templates that render to nothing at the default priority, 500: the line is set before.
    app.connect("html-page-context", add_source_line, priority=400)
    # The theme sets its edit target at 500, before us as it is loaded before; its buttons read it at 501.
    app.connect("html-page-context", add_edit_target, priority=500)
    app.connect("html-page-context", add_download, priority=502)
    app.connect("build-finished", copy_sources)
    app.connect("build-finished", trim_mathjax)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
