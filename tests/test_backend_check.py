"""The fused backend against the reference: what was planted is found, and nothing is compared that cannot be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from test_cross_model import BLOCKS, key, nll

from softmaxlab import backend_check, cross_model
from softmaxlab.conditions import BASELINE
from softmaxlab.store import Store

RESULTS = str(Path(__file__).resolve().parent.parent / "results")
SHIFTS = {"s()": 1e-6, "pot(m=1)": 2e-4, "rescue(of=s())": 0.0}


def put(root, text, backend, shift=0.0, blocks=BLOCKS):
    rows = pd.DataFrame({"block": range(blocks), "nll": nll(text, blocks) + shift, "predictions": 2047})
    Store(root).append_losses(key(text, backend=backend), rows, {})


def checks(root):
    cells = cross_model.every(str(root), corpus="pydoc")
    return backend_check.checks(cells, str(root), corpus="pydoc", bos="stream")


@pytest.fixture
def store(tmp_path):
    for backend in cross_model.BACKENDS:
        put(tmp_path, BASELINE, backend)
        for text, shift in SHIFTS.items():
            signs = np.where(np.arange(BLOCKS) % 2, 1.0, -0.5)
            put(tmp_path, text, backend, shift * signs * (backend == "fused"))
    return tmp_path


def test_differences_are_those_that_were_planted(store):
    put(store, BASELINE, "reference-chunked")
    put(store, "pot(m=1)", "reference-chunked", 3e-4)
    (check,) = checks(store)
    assert (check.model, check.dtype, check.blocks, check.handed) == ("m", "float32", BLOCKS, 1)
    found = check.found.set_index("condition")
    assert set(found.index) == {"s()", "pot(m=1)"}
    assert found.loc["pot(m=1)", "mean"] == pytest.approx(0.5e-4) and found.loc["pot(m=1)", "max"] == pytest.approx(
        2e-4
    )
    assert found.loc["pot(m=1)", "resolved"] == "unresolved"
    assert check.own["mean"].tolist() == pytest.approx([3e-4]) and check.own["resolved"].tolist() == ["positive"]
    table = backend_check.table([check]).data
    assert table.loc["m, float32: octave"].tolist() == ["1, 1", "0.000050", "0.00020", "0.00030", "0.00030"]
    assert table.loc["m, float32: smooth"].tolist()[3:] == ["—", "—"]
    assert "Of the 1 with one, 1 have a mean difference that is not resolved" in check.said
    assert "up to 0.00030 in the mean" in check.said and "1 conditions are equal bit for bit" in check.said


def test_without_variants_nothing_is_said_of_them(store):
    (check,) = checks(store)
    assert check.own.empty and "variants" not in check.said


def test_runs_over_other_blocks_are_not_compared(tmp_path):
    for backend, blocks in (("reference", BLOCKS), ("fused", BLOCKS - 1)):
        put(tmp_path, BASELINE, backend, blocks=blocks)
    assert checks(tmp_path) == []


def test_the_committed_fused_losses_agree_with_the_reference():
    """Kernels on a GPU against the specification, end to end; limits from what the reference's variants differ by."""
    cells = cross_model.every(RESULTS, only="smollm2-135m")
    (check,) = backend_check.checks(cells, RESULTS, corpus="wikitext103", bos="stream")
    even = check.found["family"].isin(backend_check.CONTINUOUS)
    assert check.blocks == 97 and even.sum() >= 5 and (~even).sum() >= 10
    assert check.found.loc[even, "max"].max() < 1e-4
    assert (check.found.loc[~even, "resolved"] == "unresolved").all()
    assert check.found.loc[~even, "mean"].abs().max() < 5e-4 and check.found.loc[~even, "max"].max() < 1e-2
