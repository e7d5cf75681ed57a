"""Six zero-shot tasks of lm-evaluation-harness under an operator, kept document by document (paper C.1, C.3).

Each task and condition is one table, written in one step when the task is done, under a key of everything that
determines it: the weights, the operator and its layers, dtype and backend, what was asked, the harness's version,
the padding side and the batch. A killed run goes on at the first task that is missing.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
from tqdm import tqdm

from softmaxlab import backends, models
from softmaxlab.attention import check_supported, inject
from softmaxlab.conditions import BASELINE, Condition, canonical
from softmaxlab.errors import LabError, refusal
from softmaxlab.evaluate import environment, find_results
from softmaxlab.store import Store
from softmaxlab.zero_shot_records import KIND, PROTOCOL, TASKS, check_tasks, tidy
from softmaxlab.zero_shot_records import METRICS as METRICS
from softmaxlab.zero_shot_records import TITLES as TITLES
from softmaxlab.zero_shot_records import made as made
from softmaxlab.zero_shot_records import settings as settings
from softmaxlab.zero_shot_records import stored as stored

if TYPE_CHECKING:
    from softmaxlab.harness import FrozenLM
    from softmaxlab.harness_tasks import LoadedTask

BATCH = 8  # requests a forward pass, as in the paper (C.1)
PADDING = "right"  # the harness's own side for log-likelihoods; the paper pads on the left


@dataclass(frozen=True)
class Setting:
    """What all records of one comparison have in common.

    Attributes:
        model: see `models.resolve`.
        dtype: of weights and activations; attention itself is float32.
        backend: what computes attention.
        padding: right or left (see `harness.FrozenLM`).
        batch: requests a forward pass.
        limit: only the first so many documents of a task; 0 means all.
    """

    model: str = models.EMBEDDED
    dtype: str = "float32"
    backend: str = "reference"
    padding: str = PADDING
    batch: int = BATCH
    limit: int = 0

    def checked(self) -> Setting:
        """The setting with canonical names; LabError on anything that is none."""
        models.check_dtype(self.dtype)
        if self.padding not in ("right", "left"):
            raise LabError(f"unknown padding side {self.padding!r}: use right or left")
        if self.batch < 1:
            raise LabError(f"batch is {self.batch}, but a forward pass needs at least 1 request")
        if self.limit < 0:
            raise LabError(f"limit is {self.limit}, but cannot be negative; 0 means all documents")
        return Setting(**vars(self) | {"backend": backends.canonical(self.backend)})

    def names(self) -> dict:
        """The readable part of a key."""
        return vars(self) | {"model": models.resolve(self.model).name}


def data_folder(data: str = "") -> str:
    """The folder of local documents: the one given, else SOFTMAXLAB_ZERO_SHOT; empty means the hub.

    Raises:
        LabError: the folder is not there, or cannot be looked at.
    """
    folder = data or os.environ.get("SOFTMAXLAB_ZERO_SHOT", "")
    try:
        there = not folder or Path(folder).expanduser().is_dir()
    except (OSError, RuntimeError) as error:  # RuntimeError: a ~user that there is not
        raise LabError(f"the folder {folder} cannot be looked at ({refusal(error)}): give one that can") from None
    if not there:
        raise LabError(f"there is no folder {folder}: give one that holds files such as hellaswag.jsonl")
    return folder


def evaluate(
    conditions: Iterable[str],
    setting: Setting | None = None,
    *,
    tasks: Iterable[str] = TASKS,
    data: str = "",
    device: str = "auto",
    results: str = "results",
    progress: bool = True,
) -> pd.DataFrame:
    """Records of tasks under conditions, computed where they are not stored.

    Args:
        conditions: text forms, e.g. `grid(K=32,R=4)`.
        setting: model, dtype, backend, padding side, batch and limit.
        tasks: names of `TASKS`.
        data: see `data_folder`.
        device: auto, cpu, cuda or mps.
        results: folder of the store; empty for a run that neither reads nor writes one.
        progress: show a bar with the remaining time.

    Returns:
        Tidy frame (`COLUMNS`), one row a condition, task and document. Log-likelihoods in nats, one a choice.

    Raises:
        LabError: bad input of any kind, a document that the model cannot score among it; a batch-against-solo
            gate that fails (`padding_gate`).
    """
    setting = (setting or Setting()).checked()
    parsed = {text: Condition.parse(text) for text in canonical(list(conditions))}
    if not parsed:
        raise LabError("no condition was given: name at least one, e.g. softmax()")
    wanted, folder = check_tasks(tasks), data_folder(data)
    models.check_device(device)
    from softmaxlab import harness_tasks  # needs lm-evaluation-harness, which reading results does not

    identity = models.resolve(setting.model).identity()
    loaded = {name: harness_tasks.load_task(name, data=folder, limit=setting.limit) for name in wanted}
    keys = {
        (text, name): _key(setting, identity, condition, task)
        for text, condition in parsed.items()
        for name, task in loaded.items()
    }
    store = Store(find_results(results)) if results else None
    found = {at: store.get_table(KIND, key) if store else None for at, key in keys.items()}
    missing = [at for at, table in found.items() if table is None]
    if missing:
        if store:
            store.check_writable()  # before anything expensive
        run = _Run(setting, parsed, loaded, device, source="local files" if folder else "hub")
        for at in tqdm(missing, unit="task", disable=None if progress else True, dynamic_ncols=True):
            found[at], provenance = run.records(*at)
            if store:
                store.put_table(KIND, keys[at], found[at], provenance)
    return tidy((key, found[at]) for at, key in keys.items())


def _key(setting: Setting, identity: str, condition: Condition, task: LoadedTask) -> dict:
    return {
        "protocol": PROTOCOL,
        "task": task.name,
        "condition": str(condition),
        **setting.names(),
        "model_id": identity,
        "condition_json": condition.json(),
        "requests": task.fingerprint,
        "documents": len(task.documents),
        "lm_eval": importlib.metadata.version("lm_eval"),
    }


class _Run:
    """A loaded model that answers tasks under conditions; each condition passes the gate before its first task."""

    def __init__(
        self,
        setting: Setting,
        parsed: Mapping[str, Condition],
        tasks: Mapping[str, LoadedTask],
        device: str,
        source: str,
    ) -> None:
        from softmaxlab import harness

        self.setting, self.parsed, self.tasks = setting, parsed, tasks
        device = models.pick_device(device)
        work = models.load_model(setting.model, dtype=setting.dtype, device=device)
        for condition in parsed.values():
            check_supported(work.model, condition)
        self.lm: FrozenLM = harness.FrozenLM(work.model, work.tokenizer, batch=setting.batch, padding=setting.padding)
        asked = [(task, d, r) for task in tasks.values() for d in task.documents for r in d.requests]
        self.pairs = self.lm.tokens([request for *_, request in asked])
        for (task, document, _), pair in zip(asked, self.pairs, strict=True):
            if fault := self.lm.fault(pair):
                raise LabError(f"{task.where(document.number)} cannot be answered by {setting.model}: {fault}")
        bos = work.tokenizer.bos_token_id
        self.made = {
            "date": datetime.date.today().isoformat(),
            "datasets": importlib.metadata.version("datasets"),
            "source": source,
            "begins_with_bos": sum(context[0] == bos for context, _ in self.pairs),
            **environment(device),
        }
        self.gates: dict[str, dict] = {}
        self._gate(BASELINE, Condition.parse(BASELINE))  # the strict one, whatever is measured

    def records(self, text: str, name: str) -> tuple[pd.DataFrame, dict]:
        """The records of one task under one condition, and how they were made."""
        from softmaxlab.harness_tasks import record

        condition, documents = self.parsed[text], self.tasks[name].documents
        if text not in self.gates:
            self._gate(text, condition)
        with inject(self.lm.model, condition, backend=self.setting.backend) as injection:
            answers = iter(self.lm.loglikelihood([r for d in documents for r in d.requests], disable_tqdm=True))
            injection.check_reached()
        rows = [record(d, [next(answers) for _ in d.requests]) for d in documents]
        return pd.DataFrame(rows), {**self.made, "gate": self.gates[text], "gate_softmax": self.gates[BASELINE]}

    def _gate(self, text: str, condition: Condition) -> None:
        from softmaxlab import padding_gate

        with inject(self.lm.model, condition, backend=self.setting.backend):
            self.gates[text] = padding_gate.check(self.lm, self.pairs, condition=text, dtype=self.setting.dtype).entry()
