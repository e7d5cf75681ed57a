"""A frozen model as lm-evaluation-harness sees it, with the padding side an explicit choice.

The harness tokenises requests and scores answers; the model object is given, and an operator is put into it around
the call (`attention.inject`). The harness's log-likelihoods pad on the right and know no other side, run the head
over the whole text, and wait for the device after every request; `FrozenLM.score` is that one step written anew.

The harness can cache a model's answers under the text of the request alone, which would serve one operator's numbers
to another. Nothing here goes through that cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm
from transformers import PreTrainedModel

from softmaxlab.errors import LabError
from softmaxlab.harness_tasks import quiet  # first: it says what to install where the harness is not

from lm_eval.models.huggingface import HFLM  # isort: skip

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

PADDING = ("right", "left")

Pair = tuple[list[int], list[int]]  # tokens of a context and of its continuation


class FrozenLM(HFLM):
    """The harness's view of a model that is loaded already, with the padding side an explicit choice.

    `right`: a row is followed by its padding, which no causal row can see, so no mask is needed; the harness's own
    way for log-likelihoods. `left`: the padding comes first and must be masked out, and the positions count from
    where the text begins (the paper's way, C.1). Only the logits of the continuations are computed, in the model's
    dtype; log-probabilities are float32 and sum in float64.

    Args:
        model, tokenizer: the frozen model.
        batch: requests a forward pass, of neighbouring lengths.
        padding: right or left.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: object, *, batch: int, padding: str) -> None:
        if padding not in PADDING:
            raise LabError(f"unknown padding side {padding!r}: use {' or '.join(PADDING)}")
        with quiet():
            super().__init__(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=batch)
        self.batch, self.padding = batch, padding
        self._encoded: dict[str, list[int]] = {}

    def tok_encode(self, string: str, *args: object, **options: object) -> list[int]:
        """Tokens of a text; those that `tokens` met are looked up."""
        if args or options or string not in self._encoded:
            return super().tok_encode(string, *args, **options)
        return self._encoded[string]

    def tokens(self, requests: Sequence[Instance]) -> list[Pair]:
        """Token pairs of requests with a context, as the harness makes them, with all texts tokenised in one call.

        One at a time, as the harness goes about it, the six tasks take a minute, and again for every condition.
        """
        texts = {text for context, continuation in (r.args for r in requests) for text in _texts(context, continuation)}
        bos = self.tokenizer.decode(self.prefix_token_id)
        # The harness adds no second BOS to a text that has one.
        plain = sorted(text for text in texts - self._encoded.keys() if not text.startswith(bos))
        if plain:
            self._encoded.update(zip(plain, self.tokenizer(plain)["input_ids"], strict=True))
        return [self._encode_pair(*request.args) for request in requests]

    def fault(self, pair: Pair) -> str:
        """Why a pair cannot be scored; empty if it can.

        A context that is too long loses its beginning, as in the harness. A continuation has nothing to lose.
        """
        context, continuation = pair
        if not context:
            return "its context has no token, and a continuation needs one to follow"
        if not continuation:
            return "its continuation adds no token to the context"
        if len(continuation) > self.max_length:
            return (
                f"a continuation of {len(continuation)} tokens does not fit into the {self.max_length} of the model's "
                f"context; shorten it or give a model that holds more"
            )
        return ""

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        # The harness's order: longest first, so that a batch has rows of nearly one length.
        pairs = [(context, continuation) for _, context, continuation in requests]
        order = sorted(range(len(pairs)), key=lambda i: (-sum(map(len, pairs[i])), [*pairs[i][0], *pairs[i][1]]))
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(pairs)
        size = override_bs or self.batch
        with tqdm(total=len(pairs), unit="request", disable=disable_tqdm or None, dynamic_ncols=True) as bar:
            for start in range(0, len(order), size):
                chosen = order[start : start + size]
                for i, answer in zip(chosen, self.score([pairs[i] for i in chosen]), strict=True):
                    answers[i] = answer
                bar.update(len(chosen))
        return answers

    @torch.inference_mode()
    def score(self, pairs: Sequence[Pair], *, fill: int = 0) -> list[tuple[float, bool]]:
        """Log-likelihood (nats) of each continuation and whether it is the greedy one, in one forward pass.

        Args:
            pairs: token pairs; a text longer than the model's context loses its beginning.
            fill: the token id that pads; no number may depend on it (see `padding_gate`).
        """
        # The last token is predicted and not read.
        rows = [(context + continuation)[-(self.max_length + 1) :][:-1] for context, continuation in pairs]
        longest = max(map(len, rows))
        ends = [longest if self.padding == "left" else len(row) for row in rows]
        ids = torch.full((len(rows), longest), fill, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for i, (row, end) in enumerate(zip(rows, ends, strict=True)):
            ids[i, end - len(row) : end] = torch.tensor(row)
            mask[i, end - len(row) : end] = 1
        targets = [continuation for _, continuation in pairs]
        # Positions that predict the continuation, counted from the end: the head is run from the first of them on.
        predict = [np.arange(end - len(target), end) - longest for end, target in zip(ends, targets, strict=True)]
        logits = self._logits(ids, mask, keep=-min(int(p[0]) for p in predict))
        at = [np.repeat(np.arange(len(rows)), [len(t) for t in targets]), np.concatenate(predict)]
        chosen = logits[tuple(torch.from_numpy(index).to(logits.device) for index in at)].float()
        wanted = torch.tensor([token for target in targets for token in target]).to(logits.device)
        found = torch.stack([-F.cross_entropy(chosen, wanted, reduction="none"), (chosen.argmax(-1) == wanted).float()])
        starts = np.cumsum([0, *(len(t) for t in targets)])[:-1]
        values, greedy = found.cpu().double().numpy()
        sums = np.add.reduceat(values, starts)
        if not np.isfinite(sums).all():
            raise LabError(f"a log-likelihood is {sums[~np.isfinite(sums)][0]}: the logits are not finite")
        return [(float(s), bool(g)) for s, g in zip(sums, np.minimum.reduceat(greedy, starts), strict=True)]

    def _logits(self, ids: Tensor, mask: Tensor, *, keep: int) -> Tensor:
        """Logits (rows, keep, vocabulary) of the last `keep` positions."""
        given: dict[str, Tensor] = {}
        if self.padding == "left" and not mask.all():
            given = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
        given = {name: tensor.to(self.device) for name, tensor in given.items()}
        output = self.model(ids.to(self.device), use_cache=False, logits_to_keep=keep, **given)
        return output.logits[:, -keep:]


def _texts(context: str, continuation: str) -> tuple[str, str]:
    """What the harness tokenises of a request: the whole, and the context without the spaces at its end."""
    return context + continuation, context.rstrip()
