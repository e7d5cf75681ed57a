"""Per-block losses of a model under conditions: read what is stored, compute what is not, store it block by block.

Nothing is computed that is there already, and a model is not even loaded when everything is. A killed run
goes on at the block where it was, and several processes on one results folder share the work (see `runner`).
"""

from __future__ import annotations

import datetime
import platform
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

import pandas as pd
import torch

from softmaxlab import backends, memory, models, online, ranks
from softmaxlab import corpus as corpora
from softmaxlab.conditions import BASELINE, Condition, canonical
from softmaxlab.errors import LabError
from softmaxlab.losskey import LOSSES, NAMES, VOCABULARY, Kind, LossKey, empty
from softmaxlab.runner import Run, Work
from softmaxlab.store import Store
from softmaxlab.vocabulary import check_device as check_vocabulary_device

STREAM_TOKENS = 200_000  # of the corpus, as in the paper (C.1)


def find_results(results: str) -> Path:
    """The results folder. A relative one is looked for from the working directory upwards.

    A notebook runs in its own folder, papermill in the caller's, the command line anywhere in the project:
    all of them mean the folder at the project's root, which is the one that holds `_toc.yml`.
    """
    path = Path(results).expanduser()
    if path.is_absolute():
        return path
    for folder in (Path.cwd(), *Path.cwd().parents):
        if (folder / "_toc.yml").is_file():
            return folder / path
    return path


def losses(conditions: Iterable[str], **setting) -> pd.DataFrame:
    """Per-block losses, computed where they are not stored (paper §3.1, A.2; blocks: C.1).

    Args:
        conditions, setting: see `rows`.

    Returns:
        Tidy frame, one row a condition and block: model, corpus, context, bos, dtype, backend, condition,
        block, nll (nats), predictions.

    Raises:
        LabError: as `rows`.
    """
    return rows(conditions, (LOSSES,), **setting)[LOSSES]


def vocabulary(conditions: Iterable[str], **setting) -> pd.DataFrame:
    """Per-block distance of the output distribution from softmax's, computed where it is not stored (paper C.4).

    The losses of the same passes are stored too, so that `losses` then finds them.

    Args:
        conditions, setting: see `rows`.

    Returns:
        Tidy frame, one row a condition and block; in the place of `nll` the columns of `vocabulary.METRICS`, each
        a mean over the block's predictions. The baseline has none.

    Raises:
        LabError: as `rows`; a device without float64.
    """
    return rows(conditions, (LOSSES, VOCABULARY), **setting)[VOCABULARY]


def rows(
    conditions: Iterable[str],
    kinds: tuple[Kind, ...] = (LOSSES,),
    *,
    model: str = models.EMBEDDED,
    corpus: str = "wikitext103",
    context: int = 2048,
    blocks: int = 0,
    dtype: str = "float32",
    device: str = "auto",
    device_map: str | dict[str, str | int] = "",
    results: str = "results",
    bos: str = "stream",
    backend: str = "reference",
    batch: int = 0,
    progress: bool = True,
) -> dict[Kind, pd.DataFrame]:
    """Rows a block of one or more kinds from the same passes, computed where they are not stored.

    Args:
        conditions: text forms, e.g. `grid(K=32,R=4)`, `mean_threshold()@3`.
        kinds: what to measure; losses always are among it.
        model, corpus: see `models.resolve` and `corpus.load_text`.
        context: tokens of a block.
        blocks: how many; 0 means all complete blocks of the first 200,000 tokens.
        dtype: of the weights and activations; attention itself is always float32.
        device: auto, cpu, cuda or mps. Of several processes that a launcher started each has its own GPU.
        device_map: spread one model over several devices (see `models.load_model`).
        results: folder of the store; empty for a run that neither reads nor writes one.
        bos: stream, block or none (see `corpus.blocks`).
        backend: what computes attention.
        batch: blocks a forward pass; 0 chooses by device, memory and context. It can change the last digits, so
            it is recorded with the result.
        progress: show a bar with the remaining time.

    Returns:
        The tidy frame of each kind.

    Raises:
        LabError: bad input of any kind; losses that are not finite; a block that memory does not hold.
    """
    wanted = canonical([conditions] if isinstance(conditions, str) else list(conditions))
    parsed = {text: Condition.parse(text) for text in wanted}
    if not parsed:
        raise LabError("no condition was given: name at least one, e.g. softmax()")
    if context < 2:
        raise LabError(f"context is {context}, but a block needs at least 2 tokens to predict one")
    for name, value in (("blocks", blocks), ("batch", batch)):
        if value < 0:
            raise LabError(f"{name} is {value}, but cannot be negative; 0 leaves the choice to the program")
    backend = check_setting(dtype, bos, backend)
    models.check_device(device)
    _check_layers(parsed, model)
    fixed = {
        "model": models.resolve(model).name,
        "model_id": models.resolve(model).identity(),
        "corpus": corpora.corpus_name(corpus),
        "corpus_id": corpora.corpus_id(corpus),
        "context": context,
        "bos": bos,
        "dtype": dtype,
        "backend": backend,
    }
    parsed.setdefault(BASELINE, Condition.parse(BASELINE))
    keys = {t: LossKey(**fixed, condition=t, condition_json=c.json()) for t, c in parsed.items()}
    root = find_results(results) if results else None
    stores = {kind: Store(root, kind) if root else None for kind in kinds}
    found = _stored(stores, keys, wanted, blocks) if root else None
    if found is None:
        if root:
            stores[LOSSES].check_writable()  # before anything expensive
        if VOCABULARY in kinds:
            check_vocabulary_device(models.pick_device(device))
        work = prepare(model, corpus, keys, blocks=blocks, device=device, batch=batch, device_map=device_map)
        found = Run(work, keys, parsed, wanted, stores).complete(progress)
    return {kind: _frame(kind, keys, frames) for kind, frames in found.items()}


def _frame(kind: Kind, keys: dict[str, LossKey], found: dict[str, pd.DataFrame]) -> pd.DataFrame:
    frames = [frame.assign(**{name: getattr(keys[t], name) for name in NAMES}) for t, frame in found.items()]
    return pd.concat(frames, ignore_index=True)[list(kind.types)] if frames else empty(kind.types)


def check_setting(dtype: str, bos: str, backend: str) -> str:
    """The canonical backend name. Raises LabError if dtype, BOS rule or backend is unknown."""
    models.check_dtype(dtype)
    corpora.check_bos(bos)
    return backends.canonical(backend)


def _check_layers(parsed: dict[str, Condition], model: str) -> None:
    named = {text: condition.layers[-1] for text, condition in parsed.items() if condition.layers}
    if named and (text := max(named, key=named.get)) and named[text] >= (n := models.n_layers(model)):
        raise LabError(f"condition {text} names layer {named[text]}, but {model} has layers 0–{n - 1}")


def _stored(
    stores: dict[Kind, Store], keys: dict[str, LossKey], wanted: list[str], blocks: int
) -> dict[Kind, dict[str, pd.DataFrame]] | None:
    """All rows wanted, if the stores hold every one of them."""
    found = {}
    for kind, store in stores.items():
        if not blocks:
            # How many complete blocks the stream has was recorded when it was tokenised.
            one = keys[wanted[0]]
            table = stores[LOSSES].provenance(
                model=one.model, corpus=one.corpus, context=one.context, digest=one.digest
            )
            if table.empty or "blocks_available" not in table:
                return None
            blocks = int(table["blocks_available"].iloc[0])
        texts = Run.having(kind, wanted)
        frames = {t: store.losses(keys[t]) for t in texts}
        found[kind] = {t: frame[frame.block < blocks] for t, frame in frames.items()}
        if not all(len(frame) == blocks for frame in found[kind].values()):
            return None
    return found


def prepare(
    model: str,
    corpus: str,
    keys: dict[str, LossKey],
    *,
    blocks: int,
    device: str,
    batch: int,
    device_map: str | dict[str, str | int] = "",
) -> Work:
    """Load what a run needs, checking what is cheap to check before the weights are read."""
    key = next(iter(keys.values()))
    device = models.pick_device(device)
    if device_map and ranks.world() > 1:
        raise LabError(
            f"a device map spreads one model over all GPUs, but a launcher started {ranks.world()} processes: start "
            f"one, or several by hand that each see GPUs of their own (CUDA_VISIBLE_DEVICES)"
        )
    ranks.bind(device)
    text = corpora.load_text(corpus)
    positions = getattr(models.config(model), "max_position_embeddings", None)
    if positions and key.context > positions:
        raise LabError(f"context is {key.context}, but {model} was made for at most {positions} positions")
    stream = corpora.blocks(text, models.load_tokenizer(model), key.context, limit=STREAM_TOKENS, bos=key.bos)
    available = len(stream.tokens)
    if blocks > available:
        raise LabError(
            f"blocks is {blocks}, but the first {STREAM_TOKENS:,} tokens of {text.name} hold {available} "
            f"complete blocks of {key.context}"
        )
    net = models.load_model(model, dtype=key.dtype, device=device, device_map=device_map).model
    if (largest := int(stream.tokens.max())) >= (held := net.get_input_embeddings().num_embeddings):
        raise LabError(
            f"the tokenizer of {model} gives token {largest}, but its embedding holds {held}: they are not of one model"
        )
    batch = batch or memory.batch_size(net, key.context)
    used = models.devices(net)
    provenance = {
        "blocks_available": available,
        **({"max_positions": positions} if positions else {}),
        "token_fingerprint": stream.fingerprint,
        "batch": batch,
        "date": datetime.date.today().isoformat(),
        **environment(device),
        **({"devices": ", ".join(map(str, used))} if device_map else {}),
        **({"simulator": online.program(device)} if key.backend.startswith("online(") else {}),
    }
    return Work(
        net, torch.as_tensor(stream.tokens[: blocks or available]).to(models.input_device(net)), batch, provenance
    )


def environment(device: str) -> dict[str, str]:
    """What describes a result's making: device and versions."""
    name = torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} CPU"
    packages = {p: version(p) for p in ("torch", "transformers")}
    return {
        "device": name if device != "mps" else "Apple MPS",
        "python": platform.python_version(),
        **packages,
        "tf32": str(torch.backends.cuda.matmul.allow_tf32) if device == "cuda" else "n/a",
    }
