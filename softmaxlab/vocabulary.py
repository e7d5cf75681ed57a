"""How far a condition moves the model's next-token distribution from softmax's (paper C.4).

At each position t the exact model has probabilities b over the vocabulary and the condition has c. Forward and
reverse KL, their Jensen–Shannon divergence and whether the most probable token stays the same are means over the
positions that predict, as the loss is. Both models see the same blocks in the same batch, on the same backend.

No logits are stored: a pass leaves its final hidden states, of a thousandth of the size, and the head is applied
again to a few positions at a time.
"""

from __future__ import annotations

import pandas as pd
import torch
from scipy import stats
from torch import Tensor
from transformers import PreTrainedModel

from softmaxlab.divergence import js_divergence
from softmaxlab.errors import LabError
from softmaxlab.forward import head_logits
from softmaxlab.losskey import VOCABULARY

METRICS = VOCABULARY.values  # kl_forward, kl_reverse and jsd in nats; top1, a share

#: Logits at once. About ten FP64 tensors of this size are alive; on a CPU they should not be far from the cache.
ELEMENTS = {"cpu": 2**21, "other": 2**25}


def divergences(exact: Tensor, logits: Tensor) -> Tensor:
    """KL(b‖c), KL(c‖b), JSD(b, c) and agreement of the largest entry, position by position (paper C.4).

    Args:
        exact: logits under softmax, (…, vocabulary), any float dtype.
        logits: logits under the condition, the same shape.

    Returns:
        float64, (4, …), in the order of `METRICS`: nats, nats, nats, 0 or 1. Log-probabilities and sums are float64
        from the logits on. Of equal largest logits the first counts.
    """
    log_b = torch.log_softmax(exact.double(), -1)
    log_c = torch.log_softmax(logits.double(), -1)
    b, c, ratio = log_b.exp(), log_c.exp(), log_b - log_c
    # Key by key: a difference of entropies would lose what two nearly equal distributions differ in.
    return torch.stack(
        [
            (b * ratio).sum(-1),
            -(c * ratio).sum(-1),
            js_divergence(b, c, log_b, log_c),
            (exact.argmax(-1) == logits.argmax(-1)).double(),
        ]
    )


def fidelity(model: PreTrainedModel, exact: Tensor, hidden: Tensor) -> Tensor:
    """Means of `divergences` over each block's predictions.

    Args:
        model: the model, for its head.
        exact: final hidden states under softmax, (batch, context, hidden).
        hidden: those under the condition, the same shape.

    Returns:
        float64, (batch, 4), on the CPU; the last position of a block predicts nothing and is left out.

    Raises:
        LabError: a device without float64.
    """
    check_device(hidden.device.type)
    vocabulary = model.get_output_embeddings().weight.shape[0]
    chunk = max(1, ELEMENTS["cpu" if hidden.device.type == "cpu" else "other"] // vocabulary)
    means = []
    for b in range(len(hidden)):
        pairs = zip(exact[b, :-1].split(chunk), hidden[b, :-1].split(chunk), strict=True)
        parts = [divergences(head_logits(model, x), head_logits(model, y)).sum(-1) for x, y in pairs]
        means.append(torch.stack(parts).sum(0) / (hidden.shape[1] - 1))
    return torch.stack(means).cpu()


def check_device(device: str) -> None:
    """Raise LabError if the device has no float64."""
    if device == "mps":
        raise LabError("device mps has no float64, which vocabulary output needs: use cpu or cuda")


def summary(losses: pd.DataFrame, output: pd.DataFrame, baseline: str = "softmax()") -> pd.DataFrame:
    """One row a condition: ΔNLL beside the means of the four metrics over the same blocks.

    Args:
        losses: tidy losses of one model and setting, with the baseline's.
        output: tidy vocabulary output of the same (`evaluate.vocabulary`).

    Returns:
        Indexed by condition in the order of `output`: dnll (nats, mean over blocks of paired differences),
        `METRICS`, blocks.

    Raises:
        LabError: a block of `output` has no loss of the condition or of the baseline.
    """
    nll = losses.set_index(["condition", "block"]).nll
    rows = {}
    for condition, mine in output.groupby("condition", sort=False):
        wanted = [(text, block) for text in (condition, baseline) for block in mine.block]
        missing = next((pair for pair in wanted if pair not in nll.index), None)
        if missing:
            raise LabError(f"block {missing[1]} of {missing[0]} has no loss, so there is no ΔNLL of {condition}")
        dnll = (nll[condition].loc[mine.block] - nll[baseline].loc[mine.block]).mean()
        rows[condition] = {"dnll": dnll, **mine[list(METRICS)].mean(), "blocks": len(mine)}
    frame = pd.DataFrame.from_dict(rows, orient="index", columns=["dnll", *METRICS, "blocks"])
    return frame.rename_axis("condition").astype({"blocks": "int64"})


def correlations(table: pd.DataFrame) -> pd.DataFrame:
    """How each metric goes with ΔNLL over the conditions of one model (paper C.4).

    Args:
        table: as `summary` gives it.

    Returns:
        Indexed by metric: spearman, pearson (NaN where a column does not vary), n conditions. In-sample, without
        intervals: conditions are no sample of anything.

    Raises:
        LabError: fewer than three conditions.
    """
    if len(table) < 3:
        raise LabError(f"a correlation over {len(table)} conditions says nothing: at least 3 are needed")
    rows = {}
    for metric in METRICS:
        varies = table[metric].nunique() > 1 and table["dnll"].nunique() > 1
        pair = table["dnll"], table[metric]
        rows[metric] = {
            "spearman": float(stats.spearmanr(*pair).statistic) if varies else float("nan"),
            "pearson": float(stats.pearsonr(*pair).statistic) if varies else float("nan"),
            "n": len(table),
        }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("metric").astype({"n": "int64"})
