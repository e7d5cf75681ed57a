"""What operators do to the rows of attention along the model's own path, with softmax everywhere (paper A.7, D.2–D.5).

Divergence, leakage, the change of the output and the log-weight error are measured by `recorder` as sums by layer
and head; this module runs the windows, stores the sums of each operator and turns them into means. Sums are
stored and not means, so that pooling over heads and layers stays exact.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

from softmaxlab import corpus as corpora
from softmaxlab import models, operators
from softmaxlab.attention import inject
from softmaxlab.divergence import LEAKAGE_Q, MASS_THRESHOLDS, SUMS, has_log_weights
from softmaxlab.errors import LabError
from softmaxlab.evaluate import Work, find_results, prepare
from softmaxlab.losskey import LossKey
from softmaxlab.operators import Operator, Softmax
from softmaxlab.recorder import CHANGE, EXTREMES, SHARED, Recorder
from softmaxlab.store import Store

#: Tokens of the divergence windows (paper A.7): 16 blocks of 2,048.
WINDOW_TOKENS = 32_768

#: Part of every key. Raise it when the meaning of a stored sum changes.
PROTOCOL = 2

KIND = "trajectory"


@dataclass(frozen=True)
class Setting:
    """What a measurement is of, besides the operator; arguments as in `measure`."""

    model: str
    corpus: str
    context: int
    windows: int
    dtype: str
    bos: str

    def __post_init__(self) -> None:
        if self.context < 2:
            raise LabError(f"context is {self.context}, but a block needs at least 2 tokens")
        if self.windows < 0:
            raise LabError(f"windows is {self.windows}, but cannot be negative; 0 takes 32,768 tokens' worth")

    def key(self) -> dict[str, Any]:
        """What determines the number, for the store; `windows` is what was asked for, short texts hold fewer."""
        spec = models.resolve(self.model)
        return {
            "model": spec.name,
            "model_id": spec.identity(),
            "corpus": corpora.corpus_name(self.corpus),
            "corpus_id": corpora.corpus_id(self.corpus),
            "context": self.context,
            "bos": self.bos,
            "dtype": self.dtype,
            "windows": self.windows or max(1, WINDOW_TOKENS // self.context),
            "protocol": PROTOCOL,
        }

    def load(self, device: str, device_map: str | dict[str, str | int] = "") -> Work:
        """The model, spread by `device_map` if given, and the first windows of the corpus."""
        if device == "mps" or (device == "auto" and models.pick_device(device) == "mps"):
            raise LabError("device mps has no float64, which divergences need: use cpu or cuda")
        names = {k: v for k, v in self.key().items() if k not in ("windows", "protocol")}
        exact = Softmax()
        key = LossKey(**names, backend="reference", condition=str(exact), condition_json=exact.json())
        # Refuses more windows than there are.
        work = prepare(
            self.model,
            self.corpus,
            {str(exact): key},
            blocks=self.windows,
            device=device,
            batch=0,
            device_map=device_map,
        )
        work.tokens = work.tokens[: self.key()["windows"]]
        work.provenance |= {"date": datetime.date.today().isoformat(), "windows": len(work.tokens)}
        return work


def parse_operators(texts: Sequence[str]) -> dict[str, Operator]:
    """Operators by canonical text, in order, without repetition.

    Raises:
        LabError: no operator; a text that is none; one that names layers.
    """
    if not texts:
        raise LabError("no operator was given: name at least one, e.g. pot(m=1)")
    for text in texts:
        if "@" in text:
            raise LabError(
                f"{text!r} names layers, but a trajectory is softmax's and records every layer: leave @… out"
            )
    parsed = [operators.parse(text) for text in texts]
    return {str(op): op for op in parsed}


def run(work: Work, recorder: Recorder, *, progress: bool) -> None:
    """Send the windows through the model with softmax, recording.

    Raises:
        LabError: scores that are not finite, or a layer that did not go through the hook.
    """
    with (
        torch.inference_mode(),
        inject(work.model, Softmax(), backend=recorder) as injection,
        tqdm(total=len(work.tokens), unit="window", disable=None if progress else True, dynamic_ncols=True) as bar,
    ):
        bar.set_description(f"{len(recorder.operators)} operators")
        for tokens in work.tokens.split(work.batch):
            work.model.base_model(tokens, use_cache=False)  # without the head: no logits are needed
            bar.update(len(tokens))
        injection.check_reached()
    if not recorder.finite():
        bad = [i for i, t in sorted(recorder.layers.items()) if not t.sums.isfinite().all()]
        raise LabError(f"the scores of softmax are not finite in layer {bad[0] if bad else 0}")


@dataclass(frozen=True)
class Trajectory:
    """Sums of a measurement and the means made from them.

    Attributes:
        sums: one row an operator, layer and head: sums over rows (see `recorder`), FP64.
        shared: one row a layer and head: sums that no operator has a part in.
    """

    sums: pd.DataFrame
    shared: pd.DataFrame

    def summary(self) -> pd.DataFrame:
        """Tidy, one row an operator: means over the rows of all heads, layers and windows (see `means`)."""
        return self._grouped([])

    def by_layer(self) -> pd.DataFrame:
        """The same for each operator and layer."""
        return self._grouped(["layer"])

    def by_head(self) -> pd.DataFrame:
        """The same for each operator, layer and head."""
        return self._grouped(["layer", "head"])

    def mass(self, by: Sequence[str] = ()) -> pd.DataFrame:
        """Shares of entries and of softmax mass by threshold of p (paper D.2), as fractions.

        Args:
            by: nothing to pool all, or `layer`, or `layer` and `head`.

        Returns:
            Columns of `by`, relation (`ge` or `lt`), p_threshold, entry_share, mass_share.
        """
        groups = self.shared.groupby(list(by), sort=True) if by else [((), self.shared)]
        rows = []
        for labels, group in groups:
            total, at = group.sum(numeric_only=True), dict(zip(by, labels, strict=True))
            for t in MASS_THRESHOLDS:
                entries, mass = total[f"entries_{t}"] / total["entries"], total[f"mass_{t}"] / total["rows"]
                if t == MASS_THRESHOLDS[-1]:
                    rows.append(at | dict(zip(_MASS, ("lt", t, 1 - entries, 1 - mass), strict=True)))
                else:
                    rows.append(at | dict(zip(_MASS, ("ge", t, entries, mass), strict=True)))
        return pd.DataFrame(rows)

    def _grouped(self, by: list[str]) -> pd.DataFrame:
        joined = self.sums.merge(self.shared, on=["layer", "head"], validate="many_to_one")
        rows = []
        for labels, group in joined.groupby(["operator", *by], sort=False):
            labels = dict(zip(["operator", *by], labels, strict=True))
            rows.append(labels | means(group, operators.parse(labels["operator"]).envelope))
        return pd.DataFrame(rows)


_MASS = ("relation", "p_threshold", "entry_share", "mass_share")


def means(group: pd.DataFrame, envelope: tuple[float, float] | None = None) -> dict[str, float]:
    """Means of one operator from its sums in some layers and heads.

    Args:
        group: rows of `Trajectory.sums` with the columns of `Trajectory.shared`.
        envelope: the operator's bounds on ε, if they are the same for all keys.

    Returns:
        jsd (nats), tv; leakage_q for each q; output_change: √(Σ|(p̂−p)V|²/Σ|pV|²) of each layer, mean over
        layers; log_weight_rms over entries with ŵ > 0 and log_weight_rms_p, weighted by p; zero_share of the
        entries; max_abs_error of ε; excess of ε over its envelope (negative inside, NaN where there is none);
        phase_r, Pearson's r of row phase and leakage (NaN where one does not vary). Quantities of ε are NaN
        for operators that have no log-weights.
    """
    total = group.sum(numeric_only=True)
    layers = group.groupby("layer")[[CHANGE, "output_squared"]].sum()
    above, below = group["error_above"].max(), group["error_below"].max()
    return {
        "jsd": total["jsd"] / total["rows"],
        "tv": total["tv"] / total["rows"],
        **{f"leakage_{q}": total[f"leakage_{q}"] / total["rows"] for q in LEAKAGE_Q},
        "output_change": float(np.sqrt(layers[CHANGE] / layers["output_squared"]).mean()),
        "log_weight_rms": float(np.sqrt(group["error_squared"].sum(skipna=False) / total["nonzero"])),
        "log_weight_rms_p": float(np.sqrt(group["error_squared_p"].sum(skipna=False) / total["rows"])),
        "zero_share": 1 - total["nonzero"] / total["entries"],
        "max_abs_error": max(above, below),
        "excess": max(above - envelope[1], below + envelope[0]) if envelope else group["excess"].max(),
        "phase_r": _pearson(total),
    }


def _pearson(total: pd.Series) -> float:
    n, x, y = (total[name] for name in ("phase_rows", "phase", "leak"))
    covariance = total["phase_leak"] - x * y / n
    spread = (total["phase_squared"] - x * x / n) * (total["leak_squared"] - y * y / n)
    # Below rounding of the sums there is no variation, and r would be noise.
    noise = (1e-12 * n) ** 2 * 1e-6
    return float(np.clip(covariance / np.sqrt(spread), -1, 1)) if n and spread > noise else float("nan")


def measure(
    operators: Sequence[str],
    *,
    model: str = models.EMBEDDED,
    corpus: str = "wikitext103",
    context: int = 2048,
    windows: int = 0,
    dtype: str = "float32",
    device: str = "auto",
    results: str = "results",
    bos: str = "stream",
    compiled: bool | None = None,
    progress: bool = True,
) -> Trajectory:
    """Measure operators along the exact-softmax forward pass; those that are stored are read.

    Args:
        operators: text forms; all that are missing go through one pass together.
        model, corpus, context, dtype, device, results, bos: as in `evaluate.losses`.
        windows: how many blocks from the start of the corpus; 0 means max(1, ⌊32768/context⌋), or all if the
            text has fewer.
        compiled: run the row functions through torch.compile; None does so on CUDA.
        progress: show a bar.

    Raises:
        LabError: bad input of any kind; scores that are not finite.
    """
    wanted = parse_operators(operators)
    setting = Setting(model, corpus, context, windows, dtype, bos)
    keys, shared_key = _keys(setting, wanted)
    store = Store(find_results(results)) if results else None
    found = {t: store.get_table(KIND, k) for t, k in keys.items()} if store else dict.fromkeys(keys)
    shared = store.get_table(KIND, shared_key) if store else None
    missing = {t: wanted[t] for t, table in found.items() if table is None}
    if missing or shared is None:
        if store:
            store.check_writable()
        work = setting.load(device)
        on = work.tokens.device.type
        recorder = Recorder(missing, device=on, compiled=on == "cuda" if compiled is None else compiled)
        run(work, recorder, progress=progress)
        shared, new = _tables(recorder)
        if store:
            store.put_table(KIND, shared_key, shared, work.provenance)
            for t, table in new.items():
                store.put_table(KIND, keys[t], table, work.provenance)
        found |= new
    sums = pd.concat([found[t].assign(operator=t) for t in keys], ignore_index=True)
    return Trajectory(sums[["operator", *sums.columns.drop("operator")]], shared)


def is_stored(operators: Sequence[str], setting: Setting, results: str = "results") -> bool:
    """Whether `measure` would find every one of these operators, so that it neither loads a model nor computes."""
    keys, shared = _keys(setting, parse_operators(operators))
    store = Store(find_results(results))
    return all(store.get_table(KIND, key) is not None for key in (shared, *keys.values()))


def _keys(setting: Setting, wanted: dict[str, Operator]) -> tuple[dict[str, dict], dict]:
    """The key of each operator's table, and of the one that all operators share."""
    fixed = setting.key()
    keys = {t: {**fixed, "operator": t, "operator_json": op.json()} for t, op in wanted.items()}
    return keys, {**fixed, "quantity": "shared"}


def _tables(recorder: Recorder) -> tuple[pd.DataFrame, dict[str, pd.DataFrame]]:
    """The sums as frames, one row a layer and head: those shared by all operators, and those of each."""
    layers = sorted(recorder.layers)
    heads = recorder.layers[layers[0]].shared.shape[-1]
    index = {"layer": np.repeat(layers, heads), "head": np.tile(np.arange(heads), len(layers))}

    def frame(names: Sequence[str], parts: list[torch.Tensor]) -> pd.DataFrame:
        values = torch.cat(parts, dim=-1).cpu().numpy()  # (names, layers · heads)
        return pd.DataFrame(index | dict(zip(names, values, strict=True)))

    totals = [recorder.layers[layer] for layer in layers]
    shared = frame(SHARED, [t.shared for t in totals])
    tables = {}
    for i, (text, operator) in enumerate(recorder.operators.items()):
        table = frame((*SUMS, CHANGE, *EXTREMES), [torch.cat([t.sums[i], t.extremes[i]]) for t in totals])
        table["excess"] = table["excess"].replace(-np.inf, np.nan)
        if not has_log_weights(operator):
            table[["error_squared", "error_squared_p", *EXTREMES]] = np.nan
        tables[text] = table
    return shared, tables
