"""The command that measures everything the pages over models and contexts need. No logic of its own, as in `cli`."""

from __future__ import annotations

import tempfile
import time
from contextlib import nullcontext
from typing import Annotated

from cyclopts import App, Parameter

from softmaxlab.cli_options import Backend, Batch, Blocks, Bos, Corpus, Device, DeviceMap, Dtype
from softmaxlab.errors import LabError


def mount(app: App) -> None:
    """Put the command under the application's."""
    app.command(breadth)


def breadth(
    *models: str,
    contexts: Annotated[tuple[int, ...], Parameter(consume_multiple=True)] = (2048, 8192, 16384),
    corpus: Corpus = "wikitext103",
    blocks: Blocks = 0,
    dtype: Dtype = "float32",
    device: Device = "auto",
    device_map: DeviceMap = "",
    results: str = "results",
    bos: Bos = "stream",
    backend: Backend = "reference",
    batch: Batch = 0,
    no_vocabulary: bool = False,
    rehearse: bool = False,
) -> None:
    """Measure the core set, matched temperatures with and without rescue, and long contexts of one or more models.

    In the order of worth, step by step; started again after a stop it goes on where it was. Contexts beyond what a
    model was made for are left out, and said so. A launcher such as torchrun shares the work as for `evaluate`.
    Temperatures are always matched on the reference's rows.

    Parameters
    ----------
    models
        Short names, hub ids (org/name@revision), folders or .gguf files; without any, the embedded model.
    contexts
        Tokens of a block: the core set is measured at the first, what the paper compares over contexts at all.
    results
        Folder of the stored results.
    no_vocabulary
        Losses alone, without the distance of the output distribution.
    rehearse
        Every step in miniature on the CPU, with a text that needs no download, into a folder that is then removed.
    """
    from softmaxlab import breadth as steps
    from softmaxlab import ranks
    from softmaxlab.models import EMBEDDED

    say = print if ranks.rank() == 0 else (lambda *_, **__: None)
    setting = {
        "corpus": corpus,
        "blocks": blocks,
        "dtype": dtype,
        "device": device,
        "device_map": device_map,
        "bos": bos,
        "backend": backend,
        "batch": batch,
        "vocabulary": not no_vocabulary,
    }
    if rehearse:
        if results != "results":
            raise LabError(f"a rehearsal stores nothing, so leave --results {results} out")
        setting |= {k: v for k, v in steps.REHEARSAL.items() if k in setting}
        contexts = steps.REHEARSAL["contexts"]
    with tempfile.TemporaryDirectory() if rehearse else nullcontext(results) as folder:
        # All are looked at before the first is measured, which may take hours.
        reach = {model: steps.reachable(model, contexts) for model in models or (EMBEDDED,)}
        for model, (fits, beyond) in reach.items():
            if beyond:
                say(f"{model}: made for fewer than {', '.join(map(str, beyond))} tokens, left out", flush=True)
            for step in steps.plan(fits):
                start = time.monotonic()
                losses = steps.measure(step, model=model, results=folder, **setting)
                took = time.monotonic() - start
                count = losses.groupby("condition").block.nunique()
                say(f"{model}: {step}: {len(count)} conditions, {count.min()} blocks, {took:.1f} s", flush=True)
    if rehearse:
        say("rehearsal complete; nothing was kept")
