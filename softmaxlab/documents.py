"""Documents of zero-shot tasks in local JSON Lines files, one a line: read, and every line checked.

What passes here can be asked: each text has something to tokenise, and there is a choice between at least two.
"""

from __future__ import annotations

import json
from pathlib import Path

from softmaxlab.errors import LabError, refusal

#: Fields of a document, by task; those of the others are `_CHOICE`.
_FIELDS = {
    "lambada_openai": {"context": str, "continuation": str},
    "winogrande": {"context_options": list, "continuation": str, "gold": int},
}
_CHOICE = {"query": str, "choices": list, "gold": int}
_SAID = {str: "a text", list: "a list of texts", int: "an integer"}


def file_of(name: str, folder: Path) -> Path:
    """The file of a task's documents in a folder."""
    return folder / f"{name}.jsonl"


def read_documents(name: str, folder: Path) -> list[dict]:
    """The documents of a task, with the fields that it needs.

    Raises:
        LabError: a file that is absent, empty or cannot be read; the first line that is no document.
    """
    documents = []
    try:
        path = file_of(name, folder.expanduser())
        if not path.is_file():
            raise LabError(f"the documents of {name} are not at {path}: give a folder that holds {path.name}")
        # A byte that is not UTF-8 comes as half a surrogate pair, so that its line can be named.
        with path.open(encoding="utf-8", errors="surrogateescape") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    documents.append(_document(line, _FIELDS.get(name, _CHOICE)))
                except ValueError as error:
                    raise LabError(f"line {number} of {path} is no document of {name}: {error}") from None
    except (OSError, RuntimeError) as error:  # RuntimeError: a ~user that there is not
        raise LabError(
            f"the documents of {name} in {folder} cannot be read ({refusal(error)}): give a folder that holds "
            f"{name}.jsonl"
        ) from None
    if not documents:
        raise LabError(f"{path} holds no document")
    return documents


def _document(line: str, fields: dict[str, type]) -> dict:
    """The fields of a line; ValueError says what it has instead."""
    if not _is_unicode(line):
        raise ValueError("it is not UTF-8; convert the file first")
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"it should be a JSON object with {', '.join(fields)}")
    for name, kind in fields.items():
        if type(found.get(name)) is not kind:
            raise ValueError(f"its {name} should be {_SAID[kind]}, and is {_shown(found, name)}")
        texts = {name: found[name]} if kind is str else {}
        if kind is list:
            texts = {f"{name}[{i}]": text for i, text in enumerate(found[name])}
            if len(texts) < 2:
                raise ValueError(f"its {name} should be at least 2 to choose from, and are {len(texts)}")
        for place, text in texts.items():
            _check_text(place, text)
    options = next((found[name] for name, kind in fields.items() if kind is list), None)
    if options and not 0 <= found["gold"] < len(options):
        raise ValueError(f"its gold should be 0 to {len(options) - 1}, and is {_shown(found, 'gold')}")
    return {name: found[name] for name in fields}


def _check_text(place: str, text: object) -> None:
    if not isinstance(text, str):
        raise ValueError(f"its {place} should be a text, and is {_cut(json.dumps(text))}")
    if not text.strip():
        raise ValueError(f"its {place} should have more than spaces, and is {_cut(repr(text))}")
    if not _is_unicode(text):
        half = next(c for c in text if not _is_unicode(c))
        raise ValueError(f"its {place} should be Unicode, and has {half!r}, half of a surrogate pair")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shown(found: dict, name: str) -> str:
    return _cut(json.dumps(found[name])) if name in found else "missing"


def _cut(text: str) -> str:
    # JSON and repr are ASCII or printable and on one line; a whole document would bury the sentence.
    return text if len(text) <= 40 else f"{text[:40]}…"
