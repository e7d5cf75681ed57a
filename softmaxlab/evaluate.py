"""Per-block losses of a model under conditions: read what is stored, compute what is not, store it block by block.

Nothing is computed that is there already, and a model is not even loaded when everything is. A killed run
goes on at the block where it was.
"""

from __future__ import annotations

import datetime
import platform
import time
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median

import pandas as pd
import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from softmaxlab import backends, models
from softmaxlab import corpus as corpora
from softmaxlab.conditions import Condition, canonical
from softmaxlab.errors import LabError
from softmaxlab.forward import SharedPrefix, evaluate_batch
from softmaxlab.losskey import COLUMNS, ROW_TYPES, LossKey
from softmaxlab.store import Store

STREAM_TOKENS = 200_000  # of the corpus, as in the paper (C.1)
_BATCH_TOKENS = 16_384  # of one forward pass on a GPU; a CPU takes one block at a time


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


def losses(
    conditions: Iterable[str],
    *,
    model: str = models.EMBEDDED,
    corpus: str = "wikitext103",
    context: int = 2048,
    blocks: int = 0,
    dtype: str = "float32",
    device: str = "auto",
    results: str = "results",
    bos: str = "stream",
    backend: str = "reference",
    batch: int = 0,
    progress: bool = True,
) -> pd.DataFrame:
    """Per-block losses, computed where they are not stored (paper §3.1, A.2; blocks: C.1).

    Args:
        conditions: text forms, e.g. `grid(K=32,R=4)`, `mean_threshold()@3`.
        model, corpus: see `models.resolve` and `corpus.load_text`.
        context: tokens of a block.
        blocks: how many; 0 means all complete blocks of the first 200,000 tokens.
        dtype: of the weights and activations; attention itself is always float32.
        device: auto, cpu, cuda or mps.
        results: folder of the store; empty for a run that neither reads nor writes one.
        bos: stream, block or none (see `corpus.blocks`).
        backend: what computes attention.
        batch: blocks a forward pass; 0 chooses by device and context. It can change the last digits, so it is
            recorded with the result.
        progress: show a bar with the remaining time.

    Returns:
        Tidy frame, one row a condition and block: model, corpus, context, bos, dtype, backend, condition,
        block, nll (nats), predictions.

    Raises:
        LabError: bad input of any kind; losses that are not finite.
    """
    parsed = {text: Condition.parse(text) for text in canonical(list(conditions))}
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
    keys = {t: LossKey(**fixed, condition=t, condition_json=c.json()) for t, c in parsed.items()}
    store = Store(find_results(results)) if results else None
    rows = _stored(store, keys, blocks) if store else None
    if rows is None:
        if store:
            store.check_writable()  # before anything expensive
        work = prepare(model, corpus, keys, blocks=blocks, device=device, batch=batch)
        rows = _Run(work, keys, parsed, store).complete(progress)
    names = COLUMNS[: COLUMNS.index("block")]
    frames = [rows[t].assign(**{name: getattr(keys[t], name) for name in names}) for t in keys]
    return pd.concat(frames, ignore_index=True)[list(COLUMNS)]


def check_setting(dtype: str, bos: str, backend: str) -> str:
    """The canonical backend name. Raises LabError if dtype, BOS rule or backend is unknown."""
    models.check_dtype(dtype)
    corpora.check_bos(bos)
    return backends.canonical(backend)


def _check_layers(parsed: dict[str, Condition], model: str) -> None:
    named = {text: condition.layers[-1] for text, condition in parsed.items() if condition.layers}
    if named and (text := max(named, key=named.get)) and named[text] >= (n := models.n_layers(model)):
        raise LabError(f"condition {text} names layer {named[text]}, but {model} has layers 0–{n - 1}")


def _stored(store: Store, keys: dict[str, LossKey], blocks: int) -> dict[str, pd.DataFrame] | None:
    """All rows wanted, if the store holds every one of them."""
    found = {t: store.losses(key) for t, key in keys.items()}
    if not blocks:
        # How many complete blocks the stream has was recorded when it was tokenised.
        one = next(iter(keys.values()))
        table = store.provenance(model=one.model, corpus=one.corpus, context=one.context, digest=one.digest)
        if table.empty or "blocks_available" not in table:
            return None
        blocks = int(table["blocks_available"].iloc[0])
    found = {t: rows[rows.block < blocks] for t, rows in found.items()}
    return found if all(len(rows) == blocks for rows in found.values()) else None


@dataclass
class Work:
    """A loaded model and the blocks it is to be run on."""

    model: PreTrainedModel
    tokens: torch.Tensor
    batch: int
    provenance: dict[str, object]


def prepare(model: str, corpus: str, keys: dict[str, LossKey], *, blocks: int, device: str, batch: int) -> Work:
    """Load what a run needs, checking what is cheap to check before the weights are read."""
    key = next(iter(keys.values()))
    device = models.pick_device(device)
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
    loaded = models.load_model(model, dtype=key.dtype, device=device)
    batch = batch or (1 if device == "cpu" else max(1, _BATCH_TOKENS // key.context))
    provenance = {
        "blocks_available": available,
        "token_fingerprint": stream.fingerprint,
        "batch": batch,
        "date": datetime.date.today().isoformat(),
        **environment(device),
    }
    tokens = torch.as_tensor(stream.tokens[: blocks or available]).to(device)
    return Work(loaded.model, tokens, batch, provenance)


class _Run:
    """Computes the missing blocks of some conditions and stores them as they come."""

    def __init__(self, work: Work, keys: dict[str, LossKey], parsed: dict[str, Condition], store: Store | None) -> None:
        self.work, self.keys, self.parsed, self.store = work, keys, parsed, store
        nothing = pd.DataFrame({"block": [], "nll": [], "predictions": []}).astype(ROW_TYPES)
        self.rows = {t: store.losses(k) if store else nothing for t, k in keys.items()}
        self.seconds: dict[str, list[float]] = {t: [] for t in keys}

    def complete(self, progress: bool) -> dict[str, pd.DataFrame]:
        """Compute what is missing and return all rows of every condition, sorted by block."""
        # Conditions that start above layer 0 go through each batch together and share what is below.
        alone = [[t] for t, c in self.parsed.items() if c.first_layer == 0]
        together = [t for t, c in self.parsed.items() if c.first_layer > 0]
        plan = [(g, self._batches(g)) for g in [*alone, together] if g]
        total = sum(len(index) * len(g) for g, batches in plan for index in batches)
        # None leaves the choice to TQDM_DISABLE, which the book sets.
        quiet = None if progress and total else True
        with tqdm(total=total, unit="block", disable=quiet, dynamic_ncols=True) as bar:
            for group, batches in plan:
                bar.set_description(group[0] if len(group) == 1 else f"{len(group)} conditions")
                for index in batches:
                    self._batch(group, index, bar)
                self._record_cost(group)
        n = len(self.work.tokens)
        return {t: r[r.block < n].sort_values("block", ignore_index=True) for t, r in self.rows.items()}

    def _missing(self, text: str) -> set[int]:
        return set(range(len(self.work.tokens))) - set(self.rows[text].block)

    def _batches(self, group: list[str]) -> list[list[int]]:
        missing = sorted(set().union(*(self._missing(t) for t in group)))
        return [missing[i : i + self.work.batch] for i in range(0, len(missing), self.work.batch)]

    def _batch(self, group: list[str], index: list[int], bar: tqdm) -> None:
        model, tokens, backend = self.work.model, self.work.tokens[index], self.keys[group[0]].backend
        shared = self.parsed[group[0]].first_layer > 0
        prefix = SharedPrefix(model, tokens, backend) if shared else None
        for text in group:
            missing = self._missing(text).intersection(index)
            if missing:
                start = time.perf_counter()
                nll = evaluate_batch(model, self.parsed[text], tokens, backend=backend, prefix=prefix)
                self.seconds[text].append((time.perf_counter() - start) / len(index))
                new = pd.DataFrame({"block": index, "nll": nll.numpy(), "predictions": tokens.shape[1] - 1})
                self._keep(text, new[new.block.isin(missing)])
            bar.update(len(index))

    def _keep(self, text: str, new: pd.DataFrame) -> None:
        if self.store:
            self.store.append_losses(self.keys[text], new, self.work.provenance)
        self.rows[text] = pd.concat([self.rows[text], new], ignore_index=True)

    def _record_cost(self, group: list[str]) -> None:
        """Seconds a block of each condition, one table for a model, setting and device."""
        done = [t for t in group if self.seconds[t]]
        if not self.store or not done:
            return
        one, made = self.keys[group[0]], self.work.provenance
        key = {n: getattr(one, n) for n in ("model", "context", "dtype", "backend")} | {
            n: made[n] for n in ("device", "batch")
        }
        new = pd.DataFrame(
            {
                "condition": done,
                "seconds_per_block": [median(self.seconds[t]) for t in done],
                "batches": [len(self.seconds[t]) for t in done],
            }
        )
        old = self.store.get_table("cost", key)
        if old is not None:
            new = pd.concat([old[~old.condition.isin(done)], new], ignore_index=True)
        self.store.put_table("cost", key, new, made)


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
