"""Computes the blocks that are missing and stores each as it comes; several processes share the work.

A unit is a batch of blocks under the conditions that share the batch's exact pass: its layers below their first
changed one, and its final hidden states where vocabulary output is wanted. A condition that changes layer 0 and is
asked for its loss alone shares nothing, so it is a unit by itself and conditions are computed in their order.
Batches are cut from all blocks and not from the missing ones, so a block's neighbours, and with them its last
digits, are the same whoever computes it and whenever.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import groupby
from statistics import median

import pandas as pd
import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from softmaxlab import memory, ranks, vocabulary
from softmaxlab.attention import text_config
from softmaxlab.conditions import BASELINE, Condition
from softmaxlab.errors import LabError
from softmaxlab.forward import SharedPrefix, evaluate_batch, final_hidden
from softmaxlab.losskey import LOSSES, VOCABULARY, Kind, LossKey, empty
from softmaxlab.scaling import shape_of
from softmaxlab.store import Store

_PAUSE = 0.2  # seconds between looks at what other processes are computing


@dataclass
class Work:
    """A loaded model and the blocks it is to be run on."""

    model: PreTrainedModel
    tokens: torch.Tensor
    batch: int
    provenance: dict[str, object]


@dataclass(frozen=True)
class Unit:
    """Blocks that go through the model together, under conditions that share their exact pass."""

    texts: tuple[str, ...]
    index: tuple[int, ...]
    shared: bool


class Rows:
    """Rows of one kind, in memory, and in the store where there is one."""

    def __init__(self, kind: Kind, keys: Mapping[str, LossKey], store: Store | None) -> None:
        self.kind, self.keys, self.store = kind, keys, store
        self.frames = {text: empty(kind.row_types) for text in keys}
        self.read(keys)

    def read(self, texts: Iterable[str]) -> None:
        """Take in what this and other processes have stored."""
        for text in texts if self.store else ():
            self.frames[text] = self.store.losses(self.keys[text])

    def missing(self, text: str, index: Iterable[int]) -> set[int]:
        """The blocks of `index` that are not there."""
        return set(index) - set(self.frames[text].block)

    def keep(
        self, text: str, index: Iterable[int], values: Mapping[str, object], predictions: int, provenance: dict
    ) -> None:
        """Store the values of those blocks that are not there; the first writer of a block wins."""
        new = pd.DataFrame({"block": list(index), **values, "predictions": predictions})
        new = new[new.block.isin(self.missing(text, index))].astype(self.kind.row_types)
        if len(new) and self.store:
            self.store.append_losses(self.keys[text], new, provenance, keep_stored=True)
        self.frames[text] = pd.concat([self.frames[text], new], ignore_index=True)


class Run:
    """One evaluation.

    Args:
        work: the model and all blocks.
        keys, parsed: of the conditions wanted and of the baseline, by text form.
        wanted: the conditions that were asked for.
        stores: kinds of rows to compute, with their stores (None: memory alone).
    """

    def __init__(
        self,
        work: Work,
        keys: dict[str, LossKey],
        parsed: dict[str, Condition],
        wanted: list[str],
        stores: dict[Kind, Store | None],
    ) -> None:
        self.work, self.keys, self.parsed, self.wanted = work, keys, parsed, wanted
        self.rows = {kind: Rows(kind, keys, store) for kind, store in stores.items()}
        self.store = stores[LOSSES]
        self.claims = ranks.Claims(self.store.root if self.store else None)
        self.size = work.batch  # becomes less where memory does not hold it
        self.seconds: dict[str, list[float]] = {text: [] for text in keys}

    def complete(self, progress: bool) -> dict[Kind, dict[str, pd.DataFrame]]:
        """Compute what is missing, or see other processes do it; all rows wanted, sorted by block."""
        units = [unit for unit in self._units() if self._missing(unit)]
        total = sum(self._missing(unit) for unit in units)
        # None leaves the choice to TQDM_DISABLE, which the book sets.
        quiet = None if progress and total and ranks.rank() == 0 else True
        try:
            with tqdm(total=total, unit="block", disable=quiet, dynamic_ncols=True) as bar:
                while units:
                    units = self._sweep(units, bar)
        finally:
            self.claims.close()
        n, found = len(self.work.tokens), {}
        for kind, rows in self.rows.items():
            texts = self.having(kind, self.wanted)
            rows.read(texts)  # another process may have been first
            frames = {text: rows.frames[text] for text in texts}
            found[kind] = {t: f[f.block < n].sort_values("block", ignore_index=True) for t, f in frames.items()}
        return found

    def _units(self) -> list[Unit]:
        together = [t for t in self.wanted if self.parsed[t].first_layer > 0 or (VOCABULARY in self.rows)]
        if together and BASELINE in self.wanted and BASELINE not in together:
            together.insert(0, BASELINE)  # its pass is the one that the others share
        n, size = len(self.work.tokens), self.work.batch
        batches = [tuple(range(i, min(i + size, n))) for i in range(0, n, size)]
        groups = [((t,), False) for t in self.wanted if t not in together]
        groups += [(tuple(together), True)] if together else []
        return [Unit(texts, index, shared) for texts, shared in groups for index in batches]

    @staticmethod
    def having(kind: Kind, texts: Iterable[str]) -> list[str]:
        """The texts that have rows of a kind: softmax's output is not compared with itself."""
        return [t for t in texts if kind is not VOCABULARY or t != BASELINE]

    def _missing(self, unit: Unit) -> int:
        """How many blocks of how many conditions a unit still lacks."""
        return sum(len(self._lacking(text, unit.index)) for text in unit.texts)

    def _lacking(self, text: str, index: Iterable[int]) -> set[int]:
        return set().union(*(r.missing(text, index) for k, r in self.rows.items() if self.having(k, [text])))

    def _sweep(self, units: list[Unit], bar: tqdm) -> list[Unit]:
        """Compute every unit that no other process has; return those that another one has not finished."""
        others = []
        for texts, group in groupby(units, key=lambda unit: unit.texts):
            bar.set_description(texts[0] if len(texts) == 1 else f"{len(texts)} conditions")
            for unit in group:
                lacked = self._missing(unit)
                with self.claims.take(self._name(unit)) as mine:
                    if not mine:
                        others.append(unit)
                        continue
                    self._read(unit)  # another process may have finished it since
                    self._compute(unit)
                bar.update(lacked)
            self._record_cost(texts)
        if len(others) == len(units):
            time.sleep(_PAUSE)
        left = []
        for unit in others:
            lacked = self._missing(unit)
            self._read(unit)
            left += [unit] if self._missing(unit) else []
            bar.update(lacked - self._missing(unit))
        return left

    def _name(self, unit: Unit) -> str:
        digests = [self.keys[text].digest_of(kind) for kind in self.rows for text in unit.texts]
        return f"{sorted(digests)} {unit.index[0]}-{unit.index[-1]}"

    def _read(self, unit: Unit) -> None:
        for rows in self.rows.values():
            rows.read(unit.texts)

    def _compute(self, unit: Unit) -> None:
        """A unit in as many passes as memory asks for."""
        index = list(unit.index)
        while index:
            part = index[: self.size]
            if self._fits(unit, part):
                index = index[len(part) :]
            else:
                memory.release()
                self.size = len(part) // 2

    def _fits(self, unit: Unit, part: list[int]) -> bool:
        try:
            self._pass(unit, part)
        except RuntimeError as error:
            if not memory.exhausted(error):
                raise
            if len(part) > 1:
                return False
            context, reason = self.work.tokens.shape[1], str(error).splitlines()[0]
            raise LabError(
                f"one block of {context} tokens does not fit into the memory of the device ({reason}): "
                f"use a shorter context, bfloat16, or spread the model over several devices"
            ) from None
        return True

    def _pass(self, unit: Unit, part: list[int]) -> None:
        """Blocks through the model: once exactly, if anything shares that, then under each condition."""
        todo = [text for text in unit.texts if self._lacking(text, part)]
        if not todo:
            return
        model, backend = self.work.model, self.keys[BASELINE].backend
        tokens = self.work.tokens[part]
        output = VOCABULARY in self.rows
        prefix, exact = None, None
        if unit.shared and self._pays(todo):
            depth = max(self.parsed[text].first_layer for text in todo)
            with final_hidden(model) if output else nullcontext([None]) as caught:
                start = time.perf_counter()
                prefix = SharedPrefix(model, tokens, backend, depth)
                self._keep_losses(BASELINE, part, prefix.losses, start)
            exact = caught[-1]
        for text in [t for t in todo if prefix is None or t != BASELINE]:
            with final_hidden(model) if output else nullcontext([None]) as caught:
                start = time.perf_counter()
                nll = evaluate_batch(model, self.parsed[text], tokens, backend=backend, prefix=prefix)
                self._keep_losses(text, part, nll, start)
            if output:
                means = vocabulary.fidelity(model, exact, caught[-1])
                self._keep(VOCABULARY, text, part, dict(zip(vocabulary.METRICS, means.T.numpy(), strict=True)))

    def _pays(self, todo: list[str]) -> bool:
        """Whether an exact pass is wanted anyway, or costs fewer layers than it spares."""
        spared = sum(self.parsed[text].first_layer for text in todo)
        return VOCABULARY in self.rows or BASELINE in todo or spared > text_config(self.work.model).num_hidden_layers

    def _keep_losses(self, text: str, part: list[int], nll: torch.Tensor, start: float) -> None:
        self.seconds[text].append((time.perf_counter() - start) / len(part))
        self._keep(LOSSES, text, part, {"nll": nll.numpy()})

    def _keep(self, kind: Kind, text: str, part: list[int], values: Mapping[str, object]) -> None:
        predictions = self.work.tokens.shape[1] - 1
        self.rows[kind].keep(text, part, values, predictions, self.work.provenance | {"batch": self.size})

    def _record_cost(self, texts: tuple[str, ...]) -> None:
        """Seconds a block of each condition, one table for a model, setting and device."""
        done = [t for t in texts if self.seconds[t]]
        if not self.store or not done:
            return
        one, made = self.keys[BASELINE], self.work.provenance
        key = {n: getattr(one, n) for n in ("model", "context", "dtype", "backend")}
        key |= {"device": made["device"], "batch": self.size}
        new = pd.DataFrame(
            {
                "condition": done,
                "seconds_per_block": [median(self.seconds[t]) for t in done],
                "batches": [len(self.seconds[t]) for t in done],
            }
        )
        shape = shape_of(self.work.model)
        if shape:  # for estimates of what is too large to be measured
            made = made | {"shape": asdict(shape)}
        self.store.update_table("cost", key, new, made, by="condition")
