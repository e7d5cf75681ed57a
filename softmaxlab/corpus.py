"""Text to one token stream to aligned blocks.

A corpus is named "wikitext103" (the WikiText-103-raw test split), "pydoc" (the help topics of the running
Python, always at hand) or by the path of a UTF-8 text file. Its id is the hash of the exact text. It is
tokenised once, as one long text; the stream is cut into complete blocks that do not overlap.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from softmaxlab.errors import LabError, refusal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WIKITEXT = "wikitext103"
PYDOC = "pydoc"

#: Environment variable with the path of a local wiki.test.raw.
WIKITEXT_VARIABLE = "SOFTMAXLAB_WIKITEXT"

#: SHA-256 of the joined test split, UTF-8. Pinned, so that stored results are found without the text.
WIKITEXT_SHA256 = "696cca6b65a171b0a358a4be6732cdfdf2dd6164a32e20fd70e3c13fc4dfae83"

#: Tokens of the stream that are used (paper, C.1).
STREAM_TOKENS = 200_000

BOS_RULES = ("stream", "block", "none")

_HUB_DATASET, _HUB_CONFIG = "Salesforce/wikitext", "wikitext-103-raw-v1"
_HUB_TIMEOUT = 10.0  # seconds to find out whether the hub answers at all


@dataclass(frozen=True)
class Text:
    """A corpus: its readable name, its exact text, and its id "text:sha256:<hex of the UTF-8 bytes>"."""

    name: str
    text: str
    id: str


@dataclass(frozen=True)
class Blocks:
    """Aligned blocks of one token stream.

    Attributes:
        tokens: int64 (n, context).
        bos: the BOS rule that made them.
        fingerprint: hash of text id, block length, BOS rule and the tokens, hence of the tokenizer's work.
        n_tokens: length of the stream they were cut from, after the limit; the incomplete rest is left out.
    """

    tokens: np.ndarray
    bos: str
    fingerprint: str
    n_tokens: int


def load_text(corpus: str) -> Text:
    """The text of a corpus.

    Args:
        corpus: "wikitext103" (from the file that SOFTMAXLAB_WIKITEXT names, else from the Hugging Face
            hub), "wikitext103:<path of wiki.test.raw>", "pydoc", or the path of a UTF-8 text file.

    Raises:
        LabError: an unknown name, a file that is absent, empty or not UTF-8, a WikiText that is not the
            test split, or a hub that cannot be reached.
    """
    name = corpus_name(corpus)
    if name == WIKITEXT:
        path = corpus.partition(":")[2] or os.environ.get(WIKITEXT_VARIABLE, "")
        source = path or f"the dataset {_HUB_DATASET} on the hub"
        rows = wikitext_rows(_decoded(Path(path))) if path else _hub_rows()
        text = join_wikitext(rows)
        if _text_id(text) != f"text:sha256:{WIKITEXT_SHA256}":
            raise LabError(
                f"{source} is not the WikiText-103-raw test split: joined, its sha256 is "
                f"{_text_id(text).rpartition(':')[2]} and should be {WIKITEXT_SHA256}."
            )
    elif corpus == PYDOC:
        text = _pydoc_text()
    else:
        text = _decoded(Path(corpus))
    if not text.strip():
        raise LabError(f"the text {corpus} is empty; give one with at least one block of words.")
    return Text(name, text, _text_id(text))


def corpus_id(corpus: str) -> str:
    """The id of a corpus, without tokenising; that of wikitext103 is pinned and needs no text.

    Raises:
        LabError: as `load_text`, for the others.
    """
    return f"text:sha256:{WIKITEXT_SHA256}" if corpus == WIKITEXT else load_text(corpus).id


def corpus_name(corpus: str) -> str:
    """The readable name: "wikitext103", "pydoc", or the file's stem (its full name if the stem is taken)."""
    if not corpus:
        raise LabError(f"the corpus is empty; give {WIKITEXT}, {PYDOC} or the path of a text file.")
    if corpus in (WIKITEXT, PYDOC):
        return corpus
    if corpus.startswith(f"{WIKITEXT}:"):
        return WIKITEXT
    path = Path(corpus)
    return path.name if path.stem in (WIKITEXT, PYDOC) else path.stem


def check_bos(bos: str) -> None:
    """Raise LabError unless it is a BOS rule."""
    if bos not in BOS_RULES:
        raise LabError(f"unknown BOS rule {bos!r}; use one of {', '.join(BOS_RULES)}.")


def blocks(
    text: Text,
    tokenizer: PreTrainedTokenizerBase,
    context: int,
    *,
    limit: int = STREAM_TOKENS,
    bos: str = "stream",
) -> Blocks:
    """Cut a text into complete, aligned, non-overlapping blocks of tokens.

    Args:
        text: the corpus.
        tokenizer: of the model, from transformers.
        context: tokens in a block, at least 2; a block has context − 1 predictions.
        limit: how many tokens of the stream are used.
        bos: "stream", what the tokenizer emits for one long text, so at most one BOS, in block 0, counted
            among the tokens; "block", that stream with the first token of every block replaced by BOS, so
            that the predicted tokens stay the same; "none", without special tokens.

    Raises:
        LabError: a value that is not one of these, a text shorter than one block, or "block" with a
            tokenizer that has no BOS.
    """
    if isinstance(context, bool) or not isinstance(context, int | np.integer) or context < 2:
        raise LabError(f"context must be an integer of at least 2 tokens, and is {context!r}.")
    check_bos(bos)
    if bos == "block" and tokenizer.bos_token_id is None:
        raise LabError("the BOS rule 'block' needs a tokenizer with a BOS token, and this one has none.")
    if limit < context:
        raise LabError(f"a limit of {limit} tokens is less than one block of context {context}.")
    # verbose=False keeps the tokenizer from warning that the text is longer than the model's context: it
    # is meant to be, and is cut into blocks below.
    encoded = tokenizer(text.text, add_special_tokens=bos != "none", truncation=False, verbose=False)
    stream = np.asarray(encoded["input_ids"][:limit], dtype=np.int64)
    n = len(stream) // context
    if n == 0:
        raise LabError(
            f"the text {text.name} has {len(stream)} tokens, less than one block of context {context}; "
            f"give a longer text or a shorter context."
        )
    tokens = stream[: n * context].reshape(n, context)
    if bos == "block":
        tokens[:, 0] = tokenizer.bos_token_id
    header = f"{text.id} context={context} bos={bos} tokens=".encode()
    digest = hashlib.sha256(header + tokens.astype("<i8").tobytes()).hexdigest()
    return Blocks(tokens, bos, f"blocks:sha256:{digest}", len(stream))


def wikitext_rows(raw: str) -> list[str]:
    """The rows of a raw WikiText file as the hub has them: one a line, with its newline, empty ones as "".

    Only "\\n" ends a line: the text has other characters that `str.splitlines` would split at.
    """
    lines = [line + "\n" for line in raw.split("\n")]
    # What follows the last newline is a row only if there is something.
    return [line if line.strip() else "" for line in (lines[:-1] if raw.endswith("\n") else lines)]


def join_wikitext(rows: Iterable[str]) -> str:
    """The corpus as one text: rows joined by blank lines, as perplexity is usually measured on it.

    The paper does not say how it joined them; this is our choice, fixed by WIKITEXT_SHA256.
    """
    return "\n\n".join(rows)


def _hub_rows() -> list[str]:
    """The test split from the hub or its local cache, through `datasets`."""
    try:
        import datasets
    except ImportError:
        raise _no_wikitext("the package datasets is not installed") from None
    try:
        with _offline_if_unreachable(datasets):
            # Naming the file keeps `datasets` from fetching the training split, 200 times its size. Its own
            # checks would then miss the other splits; the text's hash is checked instead.
            split = datasets.load_dataset(
                _HUB_DATASET,
                _HUB_CONFIG,
                data_files={"test": f"{_HUB_CONFIG}/test-*"},
                split="test",
                verification_mode="no_checks",
            )
    # The hub's client raises errors of three libraries; whichever it is, the text is not to be had.
    except Exception as error:
        raise _no_wikitext(f"the Hugging Face hub gave {type(error).__name__}") from error
    return list(split["text"])


@contextlib.contextmanager
def _offline_if_unreachable(datasets: object) -> Iterator[None]:
    """Ask the hub once; if it does not answer, let `datasets` look into its cache only.

    Without this an offline machine waits through several retries, minutes where packets are dropped.
    """
    before = datasets.config.HF_HUB_OFFLINE
    if not before and not _hub_answers():
        datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = before


def _hub_answers() -> bool:
    import huggingface_hub

    try:
        huggingface_hub.get_session().head(huggingface_hub.constants.ENDPOINT, timeout=_HUB_TIMEOUT)
    except Exception:
        return False
    return True


def _no_wikitext(reason: str) -> LabError:
    return LabError(
        f"the text {WIKITEXT} is not at hand ({reason}); set {WIKITEXT_VARIABLE} to the path of a "
        f"wiki.test.raw of WikiText-103-raw, give {WIKITEXT}:PATH, or use the corpus {PYDOC}."
    )


def _pydoc_text() -> str:
    """The help topics of the running Python, sorted by name and joined by blank lines.

    The text depends on the Python version, and so does its id.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise LabError(
            f"this Python comes without its help topics, the corpus {PYDOC}; give the path of a text file."
        ) from None
    return "\n\n".join(topics[name] for name in sorted(topics))


def _decoded(path: Path) -> str:
    """A file's text, without translation of newlines."""
    try:
        path = path.expanduser()
        if not path.is_file():
            raise LabError(
                f"unknown corpus {path}: there is no such file; give {WIKITEXT}, {PYDOC} or the path of a text."
            )
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise LabError(f"the text {path} is not UTF-8 (byte {error.start}); convert it first.") from None
    except (OSError, RuntimeError) as error:  # RuntimeError: a ~user that there is not
        raise LabError(
            f"the text {path} cannot be read ({refusal(error)}); give {WIKITEXT}, {PYDOC} or the path of a text that "
            "can."
        ) from None


def _text_id(text: str) -> str:
    return f"text:sha256:{hashlib.sha256(text.encode()).hexdigest()}"
