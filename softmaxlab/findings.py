"""The front page's table: each finding, the paper's value, ours from the store, and whether they agree.

Every value of ours is computed here, at build time, by the functions that its chapter calls, and links to the section
whose cell shows it. A finding whose numbers are not stored says so; none is typed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from softmaxlab import breadth, cross_model, models, report
from softmaxlab.cross_model import Cell
from softmaxlab.floor import REFERENCE
from softmaxlab.paper import Published
from softmaxlab.statistics import Estimate

NOT_MEASURED = "not measured"

#: Badges of the kinds of numbers, as the front page explains them.
_BADGES = {"measured": "bdg-primary", "compiled": "bdg-info", "simulated": "bdg-success"}


@dataclass(frozen=True)
class Value:
    """Ours: as text, of which kind, and how it compares with the paper's."""

    text: str
    agreement: str
    kind: str = "measured"


@dataclass(frozen=True)
class Finding:
    """A row.

    Attributes:
        claim: what the paper says, or what is said here beyond it.
        paper: its value as text, with the model or GPU; a dash where it has none.
        chapter: number of the chapter that has the cell, e.g. `03`.
        label: of the section with the cell; the chapter's own label where it has no such section.
        value: makes ours from the store; None where something is not stored.
    """

    claim: str
    paper: str
    chapter: str
    label: str
    value: Callable[[Stored], Value | None]


class Section(NamedTuple):
    """Where a number comes from: the number of a chapter and a label in it."""

    chapter: str
    label: str


class Stored:
    """What the findings are made of: the results of the book's own model, read when first asked for.

    Args:
        results: folder of the store.
        model: by name.
    """

    def __init__(self, results: str, model: str = models.EMBEDDED) -> None:
        self.results, self.model = results, model

    @cached_property
    def cell(self) -> Cell | None:
        """The model at the default context on the reference, which the chapters on one model show."""
        return self._read(context=2048, backends=(REFERENCE,))

    @cached_property
    def fullest(self) -> dict[int, Cell | None]:
        """Context → the cell that the chapters over contexts and on vocabulary output show."""
        return {context: self._read(context=context) for context in breadth.CONTEXTS}

    @cached_property
    def others(self) -> dict[int, list[Cell]]:
        """Context → the cells of every other model, as the chapter across models shows them."""
        read = {context: cross_model.read(self.results, context=context) for context in breadth.CONTEXTS}
        return {context: [c for c in cells if c.model != self.model] for context, cells in read.items()}

    def _read(self, **filters) -> Cell | None:
        return cross_model.of(cross_model.read(self.results, only=self.model, **filters), self.model)


def compare(ours: Estimate, theirs: Published | None, transform: Callable[[float], float] = float) -> str:
    """How ours stands to one published value.

    Args:
        ours: in nats.
        theirs: in the unit of `transform`.
        transform: increasing, from nats to that unit.
    """
    if theirs is None:
        return "nothing published"
    mean, low, high = (transform(v) for v in (ours.mean, ours.low, ours.high))
    if low <= theirs.value <= high:
        return "within our interval" + (", which holds zero" if ours.resolved == "unresolved" else "")
    ratio = f"{report.number(mean / theirs.value, 2)} times the paper's" if theirs.value else "the paper has 0"
    return {
        "same sign": f"same sign, resolved; {ratio}",
        "paper unresolved": "differs: resolved here alone",
        "ours unresolved": "differs: not resolved here",
        "both unresolved": "not resolved here or in the paper",
        "opposite sign": "differs: opposite sign",
    }[report.agreement(ours, theirs, transform(0.0))]


def within_range(ours: Estimate, values: Iterable[float], transform: Callable[[float], float] = float) -> str:
    """How ours stands to the span of the paper's models, in the unit of `transform`."""
    values = list(values)
    mean = transform(ours.mean)
    if ours.resolved == "unresolved":
        return "differs: not resolved here"
    if min(values) <= mean <= max(values):
        return "same sign, resolved; inside the paper's range"
    if mean < min(values):
        return "differs: below the paper's range"
    return "differs: above the paper's range"


def elsewhere(estimates: Iterable[Estimate | None]) -> str:
    """In how many other models the same is resolved above zero, below it, or not; empty where none has it."""
    found = [e.resolved for e in estimates if e is not None]
    words = {"positive": "resolved above zero", "negative": "resolved below", "unresolved": "not resolved"}
    counts = [f"{found.count(code)} {said}" for code, said in words.items() if code in found]
    return f"; in {len(found)} other models: {', '.join(counts)}" if counts else ""


def estimated(
    ours: Estimate | None,
    theirs: Published | Iterable[float] | None,
    transform: Callable[[float], float] = float,
    *,
    unit: str = "nats",
    kind: str = "measured",
) -> Value | None:
    """Ours with its interval, compared with one published value or with the span of several; None stays None."""
    if ours is None:
        return None
    one = theirs is None or isinstance(theirs, Published)
    said = compare(ours, theirs, transform) if one else within_range(ours, theirs, transform)
    return Value(f"{report.interval(ours, transform)} {unit}", said, kind)


def printed(value: Published | Iterable[float] | None, unit: str, whose: str) -> str:
    """The paper's value, or the smallest and largest of several, with unit and whose it is."""
    if value is None:
        return report.MISSING
    if isinstance(value, Published):
        shown = str(value)
    else:
        values = list(value)
        shown = f"{min(values):g} to {max(values):g}"
    return f"{shown.replace('-', '−')} {unit} ({whose})"


def tables() -> dict[str, list[Finding]]:
    """The findings, by the part of the book that they belong to."""
    from softmaxlab import findings_kernel, findings_models

    return {
        "In frozen language models": findings_models.FINDINGS,
        "Inside the kernel": findings_kernel.FINDINGS,
    }


def rows(findings: Iterable[Finding], stored: Stored, root: Path) -> list[tuple[str, str, str, str]]:
    """Cells of the table in Markdown: claim, paper, ours, agreement."""
    found = []
    for one in findings:
        value = one.value(stored)
        if value is None:
            found.append((one.claim, one.paper, linked(NOT_MEASURED, one, root), report.MISSING))
        else:
            badge = f"{{{_BADGES[value.kind]}}}`{value.kind}`"
            found.append((one.claim, one.paper, f"{linked(value.text, one, root)} {badge}", value.agreement))
    return found


def linked(text: str, finding: Finding | Section, root: Path) -> str:
    """The text as a link to a section, to its chapter if there is no such section, else the text alone."""
    label = target(finding, root)
    return f"{{ref}}`{text} <{label}>`" if label else text


def target(finding: Finding | Section, root: Path) -> str | None:
    """The label that a link goes to, from the chapter's text; None if there is no such chapter."""
    for script in sorted((root / "notebooks").glob(f"{finding.chapter}_*.py")):
        labels = re.findall(r"^# \(([\w-]+)\)=$", script.read_text(encoding="utf-8"), re.MULTILINE)
        if labels:
            return finding.label if finding.label in labels else labels[0]
    return None


def write_page(root: Path, stored: Stored | None = None) -> Path:
    """Write the tables to `book/_generated/findings.md`, which the front page includes; `stored` spares a reading."""
    from softmaxlab.status import table

    stored = stored or Stored(str(root / "results"))
    head = ("finding", "the paper", "here", "agreement")
    parts = [f"### {title}\n\n{table(head, rows(found, stored, root))}" for title, found in tables().items()]
    page = root / "book" / "_generated" / "findings.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return page
