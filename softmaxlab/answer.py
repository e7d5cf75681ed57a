"""The front page's answer in a few sentences, made from the store at every build.

A sentence whose numbers are not stored is left out, and which way a number points is said from the number.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from softmaxlab import findings_kernel, report
from softmaxlab.bench import gains
from softmaxlab.findings import Section, Stored, linked
from softmaxlab.statistics import Estimate

_GRIDS = Section("02", "resolution")
_FAMILY = Section("07", "ablation")
_TILES = Section("11", "table-2")
_MATCHED = Section("04", "matched")
_TIMES = Section("12", "time-cells")
_SPEED = Section("14", "packed-speed")
_LOSS = Section("14", "packed-loss")
SECTIONS = (_GRIDS, _FAMILY, _TILES, _MATCHED, _TIMES, _SPEED, _LOSS)

Sentence = Callable[[Stored, Path], str | None]


def write_page(root: Path, stored: Stored | None = None) -> Path:
    """Write the answer to `book/_generated/answer.md`, which the front page includes; `stored` spares reading again."""
    page = root / "book" / "_generated" / "answer.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(text(stored or Stored(str(root / "results")), root) + "\n", encoding="utf-8")
    return page


def text(stored: Stored, root: Path) -> str:
    """Markdown: a paragraph a question, with what is stored of it."""
    paragraphs = []
    for question, sentences in QUESTIONS.items():
        said = [found for make in sentences if (found := make(stored, root))]
        if said:
            paragraphs.append(f"**{question}** {' '.join(said)}")
    return "\n\n".join(paragraphs) or "Nothing is stored to answer from."


def change(ours: Estimate, what: str, shown: str) -> str:
    """`raises the loss by …`, or `changes the loss by …` where it is lower or not resolved, which is then said."""
    if ours.resolved == "positive":
        return f"raises {what} by {shown}"
    return f"changes {what} by {shown}" + (", not resolved from zero," if ours.resolved == "unresolved" else "")


def _nats(ours: Estimate, section: Section, root: Path) -> str:
    return linked(f"{report.interval(ours)} nats", section, root)


def _levels(stored: Stored, root: Path) -> str | None:
    fine, even = (stored.cell and stored.cell.delta(f"grid(K=32{more})") for more in (",R=4", ""))
    if fine is None or even is None:
        return None
    first, second = (linked(f"{report.interval(e, report.percent)} %", _GRIDS, root) for e in (fine, even))
    return (
        f"Rounding the scores of a row to a grid of 32 intervals {change(fine, 'perplexity', first)} where the grid is "
        f"finer near the row maximum, and {change(even, 'it', second)} where it is even."
    )


def _h15(stored: Stored, root: Path) -> str | None:
    whole, tiles = stored.cell and stored.cell.delta("h15()"), findings_kernel.losses(stored, "h15()")
    if whole is None or stored.model not in tiles:
        return None
    inside = tiles.pop(stored.model)
    first, second = _nats(whole, _FAMILY, root), _nats(inside, _TILES, root)
    said = (
        f"Rowmax-H15, an exponential of one addition and one shift, {change(whole, 'the loss', first)} on whole rows "
        f"and {change(inside, 'it', second)} in FlashAttention-4's kernel."
    )
    for model, e in tiles.items():
        said += f" In `{model}` the kernel {change(e, 'it', _nats(e, _TILES, root)).rstrip(',')}."
    return said


def _no_number(stored: Stored, root: Path) -> str | None:
    apart = stored.cell and stored.cell.contrast("D_T(J0)")
    if apart is None or apart.resolved == "unresolved":
        return None
    return (
        "How far the attention moves does not settle it: two changes of the same divergence, flatter than softmax and "
        f"sharper, lose amounts that differ by {_nats(apart, _MATCHED, root)}."
    )


def _paper_form(stored: Stored, root: Path) -> str | None:
    ours = findings_kernel.gain(stored, "h15")
    if ours is None:
        return None
    shown = linked(str(ours), _TIMES, root)
    return (
        f"On an {ours.gpu} attention with Rowmax-H15 in the paper's form is {_than_stock(ours)}: {shown} "
        f"({findings_kernel.SHAPE}); on a B200 the paper has +{findings_kernel.GAIN} %, published."
    )


def _packed(stored: Stored, root: Path) -> str | None:
    kernel = findings_kernel.PACKED
    ours = findings_kernel.gain(stored, kernel)
    source = findings_kernel.sources(stored).get(stored.model)
    cost = source and source.delta(kernel)
    if ours is None or cost is None:
        return None
    time = linked(str(ours), _SPEED, root)
    return (
        f"`{kernel}`, a form of our own that makes two weights of a finer lattice in four instructions, is "
        f"{_than_stock(ours)}: {time}; it {change(cost, 'the loss', _nats(cost, _LOSS, root)).rstrip(',')}."
    )


def _than_stock(ours: findings_kernel.Gain) -> str:
    return "not told apart from stock" if ours.verdict == gains.UNRESOLVED else f"{ours.verdict} than stock"


QUESTIONS: dict[str, tuple[Sentence, ...]] = {
    "How accurate must it be?": (_levels, _h15, _no_number),
    "What does a coarser one buy?": (_paper_form, _packed),
}
