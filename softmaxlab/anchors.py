"""How often a running anchor lags behind the row maximum in a model, and what its roundings saturate (paper B.2).

A lattice is exact at its anchor. When the anchor follows only jumps of more than τ octaves, the row maximum is on
the lattice no longer. How often that happens is a property of the scores of a model, layer by layer; it is counted
on the passes of an operator under a kernel's semantics.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import torch
from tqdm import tqdm

from softmaxlab import models, operators
from softmaxlab.attention import inject
from softmaxlab.errors import LabError
from softmaxlab.evaluate import find_results
from softmaxlab.online import Simulator
from softmaxlab.semantics import Semantics
from softmaxlab.store import Store
from softmaxlab.trajectory import Setting

KIND = "anchors"

#: Part of every key. Raise it when the meaning of a stored count changes.
PROTOCOL = 1


def measure(
    semantics: Sequence[str],
    *,
    operator: str = "softmax()",
    model: str = models.EMBEDDED,
    corpus: str = "wikitext103",
    context: int = 2048,
    windows: int = 0,
    dtype: str = "float32",
    device: str = "auto",
    results: str = "results",
    bos: str = "stream",
    progress: bool = True,
) -> pd.DataFrame:
    """Count rows whose anchor lags, one pass for each semantics; counts that are stored are read.

    Args:
        semantics: text forms, e.g. `online(tile=128,tau=8)`.
        operator: text form of what is in the place of softmax, anchored at the row maximum.
        model, corpus, context, windows, dtype, device, results, bos, progress: as `trajectory.measure`.

    Returns:
        One row a semantics and layer: semantics, layer, the counters `online.COUNTS`, and share, the lagging rows
        among the rows.

    Raises:
        LabError: bad input of any kind.
    """
    if not semantics:
        raise LabError("no semantics was given: name at least one, e.g. online(tile=128,tau=8)")
    wanted = {str(s): s for s in map(Semantics.parse, semantics)}
    of = operators.parse(operator)
    setting = Setting(model, corpus, context, windows, dtype, bos)
    fixed = {**setting.key(), "protocol": PROTOCOL, "operator": str(of), "operator_json": of.json()}
    keys = {text: {**fixed, "semantics": text} for text in wanted}
    store = Store(find_results(results)) if results else None
    found = {text: store.get_table(KIND, key) if store else None for text, key in keys.items()}
    missing = [text for text, table in found.items() if table is None]
    if missing:
        if store:
            store.check_writable()
        work = setting.load(device)
        for text in tqdm(missing, unit="pass", disable=None if progress else True, dynamic_ncols=True):
            simulator = Simulator(wanted[text])
            with torch.inference_mode(), inject(work.model, of, backend=simulator) as injection:
                for tokens in work.tokens.split(work.batch):
                    work.model.base_model(tokens, use_cache=False)
                injection.check_reached()
            found[text] = simulator.frame()
            if store:
                store.put_table(KIND, keys[text], found[text], work.provenance)
    table = pd.concat([found[text].assign(semantics=text) for text in keys], ignore_index=True)
    table["share"] = table["lagging"] / table["rows"]
    return table[["semantics", *table.columns.drop("semantics")]]
