"""Lagging rows are counted as a scalar walk over a model's scores would, stored, and read again."""

import math
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from softmaxlab import anchors, operators
from softmaxlab.attention import inject
from softmaxlab.backends import reference
from softmaxlab.errors import LabError
from softmaxlab.online import COUNTS
from softmaxlab.trajectory import Setting

CONTEXT, WINDOWS = 96, 2
SEMANTICS = ["online(tile=16,tau=0)", "online(tile=16,tau=0.75)", "online(tile=16,tau=4)"]


@pytest.fixture
def setting(tiny_model, text_file, tmp_path):
    return {
        "model": str(tiny_model),
        "corpus": str(text_file),
        "context": CONTEXT,
        "windows": WINDOWS,
        "device": "cpu",
        "results": str(tmp_path / "results"),
        "progress": False,
    }


def refuse(*_, **__):
    raise AssertionError("a model was loaded for counts that are stored")


def test_counts_that_are_stored_are_read_again(setting, monkeypatch):
    first = anchors.measure(SEMANTICS, **setting)
    monkeypatch.setattr(Setting, "load", refuse)
    pd.testing.assert_frame_equal(anchors.measure(SEMANTICS, **setting), first)
    # In another order and another spelling they are the same counts.
    (again,) = [anchors.measure(["online( tau=4.0, tile=16 )"], **setting)]
    want = first[first["semantics"] == SEMANTICS[2]].reset_index(drop=True)
    pd.testing.assert_frame_equal(again, want)
    for change in ({"operator": "h15()"}, {"windows": 1}, {"context": 64}):
        with pytest.raises(AssertionError, match="was loaded"):
            anchors.measure(SEMANTICS, **setting | change)
    with pytest.raises(AssertionError, match="was loaded"):
        anchors.measure(["online(tile=16,tau=5)"], **setting)


def test_only_what_is_missing_is_computed(setting, monkeypatch):
    first = anchors.measure(SEMANTICS[:1], **setting)
    simulated = []
    whole = anchors.Simulator
    monkeypatch.setattr(anchors, "Simulator", lambda s: simulated.append(str(s)) or whole(s))
    both = anchors.measure(SEMANTICS[:2], **setting)
    assert simulated == SEMANTICS[1:2]
    pd.testing.assert_frame_equal(both[both["semantics"] == SEMANTICS[0]], first)


def scores_of(setting):
    """(layer, score row) of every query of softmax's own pass: one list of valid scores, in nats, a query."""
    work = Setting(setting["model"], setting["corpus"], CONTEXT, WINDOWS, "float32", "stream").load("cpu")
    rows = []

    def record(query, key, value, operator, *, scaling, softcap=None, mask=None, layer=0, chunk=0):
        q = query.unflatten(1, (key.shape[1], -1)).float()
        s = reference.scores(q, key[:, :, None].float(), scaling=scaling, softcap=softcap).flatten(0, 2)
        rows.extend((layer, head[i, : i + 1].tolist()) for head in s for i in range(head.shape[0]))
        return reference.attend(query, key, value, operator, scaling=scaling, softcap=softcap, mask=mask)

    with torch.inference_mode(), inject(work.model, operators.Softmax(), backend=record):
        work.model.base_model(work.tokens, use_cache=False)
    return rows


def lags_and_moves(scores, tile, tau):
    """One row, key by key: whether its final anchor is below its maximum, and how often the anchor moved."""
    tiles = [scores[i : i + tile] for i in range(0, len(scores), tile)]
    anchor, moves = max(tiles[-1]), 0
    running = anchor
    for part in tiles[-2::-1]:
        running = max(running, *part)
        if (running - anchor) / math.log(2) > tau:
            anchor, moves = running, moves + 1
    return anchor < max(scores), moves


def test_shares_are_those_of_a_scalar_walk(setting):
    rows = scores_of(setting)
    table = anchors.measure(SEMANTICS, **setting)
    assert list(table.columns) == ["semantics", "layer", *COUNTS, "share"]
    for text, tau in zip(SEMANTICS, (0, 0.75, 4), strict=True):
        counted = table[table["semantics"] == text].set_index("layer")
        for layer in (0, 1, 2):
            walked = [lags_and_moves(s, 16, tau) for at, s in rows if at == layer]
            got = SimpleNamespace(**counted.loc[layer])
            assert got.rows == len(walked) == WINDOWS * 4 * CONTEXT
            assert got.lagging == sum(lag for lag, _ in walked)
            assert got.rescales == sum(n for _, n in walked)
            assert got.share == got.lagging / got.rows
            assert got.weights == WINDOWS * 4 * CONTEXT * (CONTEXT + 1) // 2
    shares = table.groupby("semantics")["share"].mean()
    assert shares[SEMANTICS[0]] == 0 and shares[SEMANTICS[1]] > 0, "the walk must have something to find"


def test_without_a_store_nothing_is_written(setting, tmp_path):
    table = anchors.measure(SEMANTICS[:1], **setting | {"results": ""})
    assert len(table) == 3 and not (tmp_path / "results").exists()
    stored = anchors.measure(SEMANTICS[:1], **setting)
    np.testing.assert_array_equal(table[list(COUNTS)], stored[list(COUNTS)])


def test_the_operator_runs_through_the_model(setting):
    soft, coarse = (anchors.measure(SEMANTICS[1:2], operator=o, **setting) for o in ("softmax()", "pot(m=1)"))
    assert soft.loc[0, "lagging"] == coarse.loc[0, "lagging"], "layer 0 sees the same scores"
    assert (soft["lagging"] != coarse["lagging"]).any(), "later layers see what the operator made"


@pytest.mark.parametrize(
    ("semantics", "change", "says"),
    [
        ([], {}, "no semantics was given"),
        (["reference"], {}, "not of the form online"),
        (["online(tile=0)"], {}, "tile is 0"),
        (["online(tau=-1)"], {}, "tau is -1"),
        (SEMANTICS[:1], {"operator": "grid(K=8)"}, "anchored at the row maximum"),
        (SEMANTICS[:1], {"operator": "nonsense()"}, "nonsense"),
        (SEMANTICS[:1], {"context": 1}, "at least 2 tokens"),
        (SEMANTICS[:1], {"windows": -1}, "cannot be negative"),
    ],
)
def test_bad_input_is_refused_in_one_sentence_and_leaves_nothing(setting, tmp_path, semantics, change, says):
    with pytest.raises(LabError) as caught:
        anchors.measure(semantics, **setting | change)
    assert says in str(caught.value) and "\n" not in str(caught.value)
    assert not list((tmp_path / "results").rglob("*.parquet"))
