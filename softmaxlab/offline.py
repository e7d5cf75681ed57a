"""Does a built book load anything from another host?

A reader may be offline, and no third party should learn what is read. So every script, style sheet,
font, image or frame must come from the book's own folder; links that a reader may click are free. HTML
and CSS are parsed for what a browser fetches by itself. JavaScript cannot be, so its text is searched
for the forms in which scripts load other scripts and for the hosts that serve such files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

from softmaxlab.errors import LabError

#: Attributes that a browser fetches by itself, per element; None: on every element.
_FETCHED = {
    "src": None,
    "srcset": None,
    "poster": None,
    "data": {"object"},
    "background": None,
    "href": {"link", "use", "image", "feimage"},
    "xlink:href": {"use", "image", "feimage"},
    "data-jupyter-widgets-cdn": None,
}
#: Kinds of <link> that only tell an address and load nothing.
_TOLD = {
    "alternate",
    "author",
    "canonical",
    "help",
    "index",
    "license",
    "next",
    "prev",
    "search",
    "up",
    "top",
}
_REMOTE = re.compile(r"^\s*(?:https?:|wss?:|ftp:)?//", re.IGNORECASE)
_CSS = re.compile(r"""(?:url\(\s*|@import\s+)["']?\s*((?:https?:)?//[^"')\s;]+)""", re.IGNORECASE)
_JS = re.compile(
    r"""(?:\bimport\s*\(?\s*|\bfrom\s*|\bimportScripts\(\s*|\bfetch\(\s*|\.src\s*=\s*|\bsendBeacon\(\s*)["'`]"""
    r"""((?:https?:)?//[^"'`\s]+)"""
    r"""|["'`]((?:https?:)?//(?:[\w.-]+\.)?(?:jsdelivr\.net|unpkg\.com|cdnjs\.cloudflare\.com|cloudflareinsights\.com"""
    r"""|googleapis\.com|gstatic\.com|googletagmanager\.com|google-analytics\.com|bootstrapcdn\.com|jquery\.com"""
    r"""|fontawesome\.com|esm\.sh|skypack\.dev|cdn\.plot\.ly|cdn\.mathjax\.org|rawgit\.com|hypothes\.is|utteranc\.es)[^"'`\s]*)""",
    re.IGNORECASE,
)
_SCRIPT_TYPES = {"", "module", "text/javascript", "application/javascript"}


class _Page(HTMLParser):
    """Collects the addresses that one page makes a browser fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        for name, value in values.items():
            elements = _FETCHED.get(name, set())
            if elements is not None and tag not in elements:
                continue
            if tag == "link" and set(values.get("rel", "").lower().split()) <= _TOLD:
                continue
            # A srcset holds several addresses, each followed by a width.
            parts = value.split(",") if name == "srcset" else [value]
            self.found += [part.split()[0] for part in parts if _REMOTE.match(part)]
        self.found += _CSS.findall(values.get("style", ""))
        if tag == "meta" and values.get("http-equiv", "").lower() == "refresh":
            target = values.get("content", "").partition("=")[2].strip("'\" ")
            self.found += [target] if _REMOTE.match(target) else []
        if tag == "style" or (tag == "script" and values.get("type", "").lower() in _SCRIPT_TYPES):
            self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        if tag == self._inside:
            self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "style":
            self.found += _CSS.findall(data)
        elif self._inside == "script":
            self.found += list(_in_script(data))


def _in_script(text: str) -> Iterator[str]:
    for match in _JS.finditer(text):
        yield match[1] or match[2]


def external_loads(html: Path) -> list[str]:
    """What the files under a built book's folder would load from another host.

    Args:
        html: folder of the built book.

    Returns:
        "file: address" for each, sorted; empty if all is local.

    Raises:
        LabError: no HTML file is there, so that there is nothing to vouch for.
    """
    if not any(html.rglob("*.html")):
        raise LabError(f"{html} holds no HTML file: build the book first")
    loads = set()
    for path in html.rglob("*"):
        if path.suffix not in {".html", ".css", ".js", ".mjs", ".svg"} or not path.is_file():
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if path.suffix == ".css":
            found = _CSS.findall(text)
        elif path.suffix in {".js", ".mjs"}:
            found = list(_in_script(text))
        else:
            page = _Page()
            page.feed(text)
            page.close()
            found = page.found
        loads |= {f"{path.relative_to(html).as_posix()}: {address}" for address in found}
    return sorted(loads)
