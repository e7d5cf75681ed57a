"""The command that measures everything the pages over models and contexts need. No logic of its own, as in `cli`."""

from __future__ import annotations

import tempfile
import time
from contextlib import nullcontext

from cyclopts import App

from softmaxlab.errors import LabError


def mount(app: App) -> None:
    """Put the command under the application's."""
    app.command(breadth)


def breadth(
    *models: str,
    contexts: tuple[int, ...] = (2048, 8192, 16384),
    corpus: str = "wikitext103",
    blocks: int = 0,
    dtype: str = "float32",
    device: str = "auto",
    device_map: str = "",
    results: str = "results",
    bos: str = "stream",
    backend: str = "reference",
    batch: int = 0,
    no_vocabulary: bool = False,
    rehearse: bool = False,
) -> None:
    """Measure the core set, matched temperatures with and without rescue, and long contexts of one or more models.

    In the order of worth, step by step; started again after a stop it goes on where it was. Contexts beyond what a
    model was made for are left out, and said so. A launcher such as torchrun shares the work as for `evaluate`.

    Parameters
    ----------
    models
        Short names, hub ids (org/name@revision), folders or .gguf files; without any, the embedded model.
    contexts
        Tokens of a block: the core set is measured at the first, what the paper compares over contexts at all.
    corpus
        wikitext103, pydoc (offline), or a text file.
    blocks
        How many blocks; 0: all of the first 200,000 tokens.
    dtype
        float32 or bfloat16.
    device
        auto, cpu, cuda or mps.
    device_map
        "auto" spreads a model over all visible GPUs, for models that one does not hold.
    results
        Folder of the stored results.
    bos
        stream, block or none.
    backend
        What computes attention, e.g. reference or fused; temperatures are always matched on the reference's rows.
    batch
        Blocks a forward pass; 0 chooses by device and memory.
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
        for model in models or (EMBEDDED,):
            fits, beyond = steps.reachable(model, contexts)
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
