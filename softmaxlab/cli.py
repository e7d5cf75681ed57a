"""The commands. No logic of their own: each calls the function of the package that bears its meaning."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Annotated

import cyclopts
from cyclopts import App, Parameter

from softmaxlab import __version__, cli_breadth, cli_kernel, cli_zero_shot
from softmaxlab.cli_options import (
    Backend,
    Batch,
    Blocks,
    Bos,
    Context,
    Corpus,
    Device,
    DeviceMap,
    Dtype,
    Model,
    Sections,
)
from softmaxlab.errors import LabError

Folder = Annotated[str, Parameter(name=["--results", "--folder"])]

app = App(name="softmaxlab", version=__version__, default_parameter=Parameter(negative=()))
app.help = "How accurate must the exponential in attention be, and what does a coarser one buy?"
cli_kernel.mount(app)
cli_zero_shot.mount(app)
cli_breadth.mount(app)


@app.command
def operators() -> None:
    """List every operator: its text form with all fields, and one line on what it does."""
    from softmaxlab.operators import catalogue

    rows = sorted(catalogue())
    width = max(len(text) for text, _ in rows)
    for text, summary in rows:
        print(f"{text:<{width}}  {summary}")


@app.command
def evaluate(
    *conditions: str,
    section: Sections = None,
    model: Model = "smollm2-135m",
    corpus: Corpus = "wikitext103",
    context: Context = 2048,
    blocks: Blocks = 0,
    dtype: Dtype = "float32",
    device: Device = "auto",
    device_map: DeviceMap = "",
    results: str = "results",
    bos: Bos = "stream",
    backend: Backend = "reference",
    batch: Batch = 0,
    vocabulary: bool = False,
) -> None:
    """Compute and store per-block losses; what is stored already is not computed again.

    Started by `torchrun --nproc-per-node N -m softmaxlab.cli evaluate …` (or `accelerate launch`), one process a
    GPU, the processes share the work.

    Parameters
    ----------
    conditions
        Text forms such as "softmax()" or "grid(K=32,R=4)@3". Prints each one's difference to softmax().
    results
        Folder of the stored losses.
    vocabulary
        Also measure how far the next-token distribution is from softmax's; costs the head twice more.
    """
    from softmaxlab import evaluate, ranks, statistics
    from softmaxlab.conditions import BASELINE, canonical, named
    from softmaxlab.losskey import LOSSES, VOCABULARY

    texts = canonical([*(t for name in section or () for t in named(name)), *conditions])
    setting = {
        "model": model,
        "corpus": corpus,
        "context": context,
        "blocks": blocks,
        "dtype": dtype,
        "device": device,
        "device_map": device_map,
        "results": results,
        "bos": bos,
        "backend": backend,
        "batch": batch,
    }
    found = evaluate.rows(texts, (LOSSES, VOCABULARY) if vocabulary else (LOSSES,), **setting)
    if ranks.rank():
        return  # every process has all the rows; one says them
    frame, output = found[LOSSES], None
    if vocabulary:
        output = found[VOCABULARY].groupby("condition")[list(VOCABULARY.values)].mean()
    means = frame.groupby("condition", sort=False).nll.agg(["mean", "count"])
    for text, (mean, count) in means.iterrows():
        line = f"{text}: NLL {mean:.6f} over {count:.0f} blocks"
        if BASELINE in texts and text != BASELINE and count > 1:
            line += f", ΔNLL {statistics.delta_nll(frame, text)}"
        if output is not None and text in output.index:
            forward, reverse, jsd, top1 = output.loc[text]
            line += f", KL {forward:.3g} and {reverse:.3g}, JSD {jsd:.3g}, top-1 {100 * top1:.2f} %"
        print(line)


@app.command
def results(
    *,
    folder: Folder = "results",
    model: Model | None = None,
    corpus: Corpus | None = None,
    context: Context | None = None,
    bos: Bos | None = None,
    dtype: Dtype | None = None,
    backend: Backend | None = None,
    condition: str | None = None,
    csv: bool = False,
) -> None:
    """Show what is stored: one line a condition, or with --csv one row a block.

    Parameters
    ----------
    folder
        Folder of the stored losses.
    condition
        A text form such as "softmax()"; the other options narrow the list in the same way.
    csv
        Tidy CSV on standard output: model, corpus, context, bos, dtype, backend, condition, block, nll, predictions.
    """
    from softmaxlab import corpus as corpora
    from softmaxlab import models
    from softmaxlab.conditions import Condition
    from softmaxlab.evaluate import check_setting

    store = _store(folder)
    condition = condition and str(Condition.parse(condition))
    checked = check_setting(dtype or "float32", bos or "stream", backend or "reference")
    backend = backend and checked
    # As they are stored, or as `evaluate` takes them: a path, a hub id.
    names = {
        "model": model and _either(model, lambda: models.resolve(model).name),
        "corpus": corpus and _either(corpus, lambda: corpora.corpus_name(corpus)),
    }
    frame = store.frame(**names, context=context, bos=bos, dtype=dtype, backend=backend, condition=condition)
    if csv:
        frame.to_csv(sys.stdout, index=False)
        return
    if frame.empty:
        print(f"nothing stored in {store.root} matches", file=sys.stderr)
        return
    names = list(frame.columns[: list(frame.columns).index("block")])
    table = frame.groupby(names, sort=False).nll.agg(blocks="count", nll="mean").reset_index()
    print(table.to_string(index=False))


@app.command
def contrast(
    plus: str,
    minus: str,
    /,
    *,
    folder: Folder = "results",
    model: Model = "smollm2-135m",
    corpus: Corpus = "wikitext103",
    context: Context = 2048,
    bos: Bos = "stream",
    dtype: Dtype = "float32",
    backend: Backend = "reference",
) -> None:
    """The paired difference of two stored conditions, with its 95% block-bootstrap interval.

    Parameters
    ----------
    plus
        The condition whose loss is taken, e.g. "grid(K=21)".
    minus
        The condition whose loss is subtracted, e.g. "grid(K=21,R=4)".
    folder
        Folder of the stored losses.
    """
    from softmaxlab import corpus as corpora
    from softmaxlab import models, statistics
    from softmaxlab.conditions import Condition
    from softmaxlab.evaluate import check_setting

    plus, minus = (str(Condition.parse(text)) for text in (plus, minus))
    backend = check_setting(dtype, bos, backend)
    frame = _store(folder).frame(
        model=models.resolve(model).name,
        corpus=corpora.corpus_name(corpus),
        context=context,
        bos=bos,
        dtype=dtype,
        backend=backend,
        condition=[plus, minus],
    )
    missing = [text for text in (plus, minus) if text not in set(frame.condition)]
    if missing:
        raise LabError(
            f"{missing[0]} is not stored in {folder} for {model}, {corpus}, context {context}, {dtype}, BOS {bos}, "
            f"backend {backend}: run `softmaxlab evaluate` with it first"
        )
    estimate = statistics.contrast(frame, plus, minus)
    percent, low, high = estimate.ppl_change
    print(f"{plus} − {minus}: {estimate} nats, {estimate.resolved}, {estimate.n_blocks} blocks")
    print(f"perplexity ratio: {percent:+.4g}% [{low:+.4g}, {high:+.4g}]")


@app.command
def book(
    *chapters: str,
    parameter: Annotated[list[str] | None, Parameter(name=["--parameter", "-p"])] = None,
    execute: Annotated[bool, Parameter(negative="--no-execute")] = True,
    strict: Annotated[bool, Parameter(negative="--no-strict")] = True,
    time_limit: int = 1800,
) -> None:
    """Execute the chapters and build the book.

    Parameters
    ----------
    chapters
        Names or numbers of the chapters to execute, e.g. 02; all if none is given.
    parameter
        name=value for the chapters' parameters cells; may be given several times.
    execute
        Execute the chapters whose inputs changed.
    strict
        Treat every warning of the build as an error.
    time_limit
        Seconds that a cell may take.
    """
    from softmaxlab.book import build

    page = build(
        chapters=list(chapters) or None,
        parameters=dict(_assignment(text) for text in parameter or []),
        execute=execute,
        strict=strict,
        time_limit_s=time_limit,
    )
    print(f"the book is at {page}")


def _assignment(text: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise LabError(f"parameter {text!r} is not of the form name=value")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value  # a bare word is text


def _either(name: str, canonical: Callable[[], str]) -> list[str]:
    try:
        return [name, canonical()]
    except LabError:  # what is stored may be of a model that is not here
        return [name]


def _store(folder: str):
    from softmaxlab.evaluate import find_results
    from softmaxlab.store import Store

    if not folder:
        raise LabError("the results folder is empty: name one, as --results results")
    store = Store(find_results(folder))
    if not store.root.exists():
        raise LabError(f"there is no results folder {store.root}: `softmaxlab evaluate` makes one")
    return store


def main() -> None:
    """Entry point: bad input is one sentence on standard error and exit code 2."""
    try:
        app(sys.argv[1:], exit_on_error=False, print_error=False)
    except (LabError, cyclopts.CycloptsError) as error:
        print(f"softmaxlab: {error}", file=sys.stderr)
        sys.exit(getattr(error, "exit_code", 2))
    except BrokenPipeError:  # `… | head` closed the pipe; that is the reader's right
        sys.stderr.close()
    except OSError as error:  # a file system that fails anywhere is not the program's fault; no traceback helps
        name = f"{str(error.filename)[:200]}: " if error.filename else ""
        print(f"softmaxlab: {name}{error.strerror or error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
