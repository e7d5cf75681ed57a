"""Tasks of lm-evaluation-harness, their documents from local JSON Lines files or from the hub.

The harness builds the requests and scores the answers. What is here is only what it has no switch for: documents that
are at hand already, and requests that are built once for all conditions. Its caches are not used: that of requests
knows the task's name and not its documents.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path

import numpy as np
import yaml

from softmaxlab import parquet
from softmaxlab.documents import file_of, read_documents
from softmaxlab.errors import LabError

try:
    import lm_eval.tasks
    from datasets import Dataset, DatasetDict
    from lm_eval.api.instance import Instance
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks import TaskManager
except ImportError as error:
    raise LabError(
        f"zero-shot tasks need lm-evaluation-harness ({error}): pip install 'softmaxlab[zero-shot]'"
    ) from error

_DEFINITIONS = resources.files("softmaxlab") / "data" / "zero_shot"


@dataclass(frozen=True)
class Document:
    """One question.

    Attributes:
        number: its place in the task.
        requests: the harness's, one a choice.
        lengths: characters of each choice, which acc_norm divides by.
        gold: index of the right choice.
    """

    number: int
    requests: list[Instance]
    lengths: np.ndarray
    gold: int


class LoadedTask:
    """A task of the harness with its requests built, once for all conditions.

    Args:
        name: the harness's name of the task.
        task: the harness's task object.
        limit: only the first so many documents; 0 means all.
        file: where the documents come from, one a line; None if that is the hub.
    """

    def __init__(self, name: str, task: ConfigurableTask, limit: int, file: Path | None = None) -> None:
        self.name, self.task, self.limit, self.file = name, task, limit, file
        # No caching of requests (cache_requests), no demonstrations: zero-shot.
        with quiet():
            task.set_config(key="num_fewshot", value=0)
            task.build_all_requests(limit=limit or None)
        grouped: dict[int, list[Instance]] = {}
        for instance in task.instances:
            grouped.setdefault(instance.doc_id, []).append(instance)
        self.documents = [
            self._document(number, sorted(requests, key=lambda request: request.idx))
            for number, requests in sorted(grouped.items())
        ]

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over what is asked: every document's number, requests and right choice."""
        return parquet.digest([[d.number, [list(r.args) for r in d.requests], d.gold] for d in self.documents])

    def where(self, number: int) -> str:
        """Where a document is to be looked for, for messages."""
        return f"document {number} of {self.name}" if self.file is None else f"line {number + 1} of {self.file}"

    def _document(self, number: int, requests: list[Instance]) -> Document:
        doc, task = requests[0].doc, self.task
        if task.OUTPUT_TYPE == "loglikelihood":
            return Document(number, requests, np.ones(1), 0)
        choices = task.doc_to_choice(doc)
        gold = task.doc_to_text(doc) if task.multiple_input else task.doc_to_target(doc)
        gold = choices.index(gold) if isinstance(gold, str) else int(gold)
        return Document(number, requests, np.array([float(len(choice)) for choice in choices]), gold)


def record(document: Document, answers: Sequence[tuple[float, bool]]) -> dict:
    """One row of a result: log-likelihoods, predictions, and the harness's acc and acc_norm of the document.

    `prediction` is the choice with the largest log-likelihood, `prediction_norm` that with the largest one a
    character. With a single request (LAMBADA) both are 0 if it is the greedy continuation, else −1.

    Args:
        document: the question.
        answers: log-likelihood (nats) and greediness of each choice.
    """
    lls = np.array([ll for ll, _ in answers], dtype=np.float64)
    if len(answers) == 1:
        prediction = normalised = 0 if answers[0][1] else -1
    else:
        prediction, normalised = int(np.argmax(lls)), int(np.argmax(lls / document.lengths))
    return {
        "document": document.number,
        "loglikelihoods": lls.astype(np.float32).tolist(),
        "prediction": prediction,
        "prediction_norm": normalised,
        "gold": document.gold,
        "acc": float(prediction == document.gold),
        "acc_norm": float(normalised == document.gold),
    }


def load_task(name: str, *, data: str = "", limit: int = 0) -> LoadedTask:
    """A task with its documents, from `<data>/<name>.jsonl`, or from the hub if no folder is given.

    Args:
        name: a task of the harness; from a folder, one that has a definition in the package.
        data: folder of JSON Lines files, one a task.
        limit: only the first so many documents; 0 means all.

    Raises:
        LabError: a file that is absent or has a line that is no such document; a hub that cannot be reached.
    """
    with quiet():
        if data:
            task = LocalTask(definition(name), read_documents(name, Path(data)))
            return LoadedTask(name, task, limit, file_of(name, Path(data)))
        try:
            task = manager(name).load([name])["tasks"][name]
        except Exception as error:  # the hub's client raises half a dozen kinds
            raise LabError(
                f"the documents of {name} are not in the local hub cache and cannot be fetched "
                f"({type(error).__name__}): give the folder that holds {name}.jsonl"
            ) from error
        return LoadedTask(name, task, limit)


def manager(name: str) -> TaskManager:
    """The harness's own definitions around one task; reading all of them takes seconds."""
    folder = Path(lm_eval.tasks.__file__).parent / name.split("_")[0]
    return TaskManager(include_path=str(folder), include_defaults=False)


def definition(name: str) -> dict:
    """The harness's configuration of a task whose documents come from a local file."""
    return yaml.safe_load((_DEFINITIONS / f"{name}.yaml").read_text(encoding="utf-8"))


class LocalTask(ConfigurableTask):
    """A task of the harness over documents that are already in memory."""

    def __init__(self, config: dict, documents: list[dict]) -> None:
        self._documents = documents
        super().__init__(config=config)

    def download(self, *_args: object, **_kwargs: object) -> None:
        self.dataset = DatasetDict({self.config.test_split: Dataset.from_list(self._documents)})


@contextmanager
def quiet() -> Iterator[None]:
    """The harness logs at length and counts progress on standard error; of that, only its errors pass."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
