"""Cells read from a store by name: whole conditions only, the right setting, and the contrasts of Tables D1 to D3."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from softmaxlab import conditions, cross_model, endpoints, matching, operators, statistics
from softmaxlab.conditions import BASELINE, Condition
from softmaxlab.losskey import VOCABULARY, LossKey
from softmaxlab.store import Store

BLOCKS = 6
FLAT, SHARP = "temperature(alpha=0.9)", "temperature(alpha=1.1)"


def key(condition, **changes):
    fixed = {"model": "m", "model_id": "id", "corpus": "pydoc", "corpus_id": "c", "context": 2048, "bos": "stream"}
    fixed |= {"dtype": "float32", "backend": "reference"} | changes
    parsed = Condition.parse(condition)
    return LossKey(**fixed, condition=str(parsed), condition_json=parsed.json())


def nll(condition, blocks=BLOCKS):
    """A loss of its own for each condition and block."""
    seed = sum(map(ord, condition))
    return 3.0 + 0.01 * np.random.default_rng(seed).random(blocks) + seed % 7 / 100


def put(root, condition, blocks=BLOCKS, **changes):
    rows = pd.DataFrame({"block": range(blocks), "nll": nll(condition, blocks), "predictions": 2047})
    Store(root).append_losses(key(condition, **changes), rows, {})


def solved(root, level, direction, alpha, *, error=1e-4, windows=16, context=2048, model="m"):
    target = {"metric": "jsd", "level": level, "direction": direction}
    found = {"reference": 0.001, "target": 0.001 * level, "alpha": alpha, "achieved": 0.001 * level, "error": error}
    text = conditions.temperature(alpha)
    row = pd.DataFrame([target | found | {"passes": 3, "limit": 0.3, "status": "solved", "condition": text}])
    setting = {"model": model, "model_id": "id", "corpus": "pydoc", "corpus_id": "c", "context": context}
    setting |= {"bos": "stream", "dtype": "float32", "windows": windows, "protocol": matching.PROTOCOL}
    Store(root).put_table(matching.KIND, setting | target | {"tolerance": 1e-3}, row, {})


def read(root, **filters):
    return cross_model.read(str(root), corpus="pydoc", **filters)


def test_an_empty_store_has_no_cells(tmp_path):
    assert read(tmp_path) == [] and cross_model.of([], "m") is None


def test_contrasts_are_those_of_statistics(tmp_path):
    plain, fine = conditions.allocation_contrast(21)
    texts = [BASELINE, plain, fine, FLAT, SHARP, *endpoints.restored((FLAT, SHARP))]
    for text in texts:
        put(tmp_path, text)
    for direction, alpha in (("flatten", 0.9), ("sharpen", 1.1)):
        solved(tmp_path, 10.0, direction, alpha)
    (cell,) = read(tmp_path)
    assert (cell.model, cell.blocks, cell.predictions, cell.setting) == (
        "m",
        BLOCKS,
        BLOCKS * 2047,
        "float32, reference",
    )
    assert cell.contrast("D_R(21)").mean == pytest.approx((nll(plain) - nll(fine)).mean())
    assert cell.contrast("D_T(10J0)") == statistics.contrast(cell.losses, FLAT, SHARP)
    rescue = cell.contrast("D_rescue(10J0)").mean
    assert cell.contrast("G_gap(10J0)").mean == pytest.approx(cell.contrast("D_T(10J0)").mean - rescue)
    assert cell.contrast("D_T(J0)") is None, "no temperature was matched at J0"
    assert cell.contrast("I_R") is None and cell.delta("h15()") is None
    share = 100 * (1 - (nll(fine) - nll(BASELINE)).mean() / (nll(plain) - nll(BASELINE)).mean())
    assert cell.removed(plain, fine) == (pytest.approx(share) if cell.delta(plain).low > 0 else None)


def test_a_match_that_missed_its_target_has_no_contrast(tmp_path):
    for text in (BASELINE, FLAT, SHARP):
        put(tmp_path, text)
    solved(tmp_path, 1.0, "flatten", 0.9, error=0.02)
    solved(tmp_path, 1.0, "sharpen", 1.1)
    (cell,) = read(tmp_path)
    assert len(cell.solutions) == 2 and cell.pair(1.0) is None and cell.contrast("D_T(J0)") is None


def test_solutions_of_the_most_windows_count_and_those_of_other_contexts_do_not(tmp_path):
    put(tmp_path, BASELINE)
    solved(tmp_path, 1.0, "flatten", 0.8, windows=2)
    solved(tmp_path, 1.0, "flatten", 0.9, windows=16)
    solved(tmp_path, 1.0, "sharpen", 1.1, context=8192)
    solved(tmp_path, 1.0, "sharpen", 1.2, model="other")
    (cell,) = read(tmp_path)
    assert cell.solutions["alpha"].tolist() == [0.9]


def test_a_condition_that_lacks_blocks_is_left_out(tmp_path):
    put(tmp_path, BASELINE)
    put(tmp_path, "h15()", blocks=BLOCKS - 1)
    put(tmp_path, "s()", blocks=BLOCKS + 1)
    put(tmp_path, "pot(m=1)@0")
    (cell,) = read(tmp_path)
    assert cell.conditions == {BASELINE} and cell.delta("h15()") is None
    (cell,) = read(tmp_path, blocks=BLOCKS - 1)
    assert cell.conditions == {BASELINE, "h15()", "s()"} and cell.blocks == BLOCKS - 1


def test_a_model_without_softmax_has_no_cell(tmp_path):
    put(tmp_path, "h15()")
    assert read(tmp_path) == []


def test_of_several_settings_the_fullest_counts_and_the_kernels_semantics_never(tmp_path):
    put(tmp_path, BASELINE)
    for text in (BASELINE, "h15()"):
        put(tmp_path, text, dtype="bfloat16", backend="fused")
        put(tmp_path, text, backend="online(tile=128,tau=8)")
        put(tmp_path, text, model="n", model_id="n")
        put(tmp_path, text, model="n", model_id="n", dtype="bfloat16")
    m, n = read(tmp_path)
    assert (m.model, m.setting) == ("m", "bfloat16, fused") and (n.model, n.setting) == ("n", "float32, reference")
    assert cross_model.of([m, n], "n") is n


def test_output_counts_only_on_all_blocks(tmp_path):
    text = str(operators.RowmaxPoT(K_max=20))
    for condition in (BASELINE, text, "h15()"):
        put(tmp_path, condition)
    for condition, blocks in ((text, BLOCKS), ("h15()", BLOCKS - 1)):
        rows = pd.DataFrame({"block": range(blocks), "predictions": 2047, "top1": 0.9 + 0.01 * np.arange(blocks)})
        rows = rows.assign(kl_forward=0.1, kl_reverse=0.1, jsd=0.01)
        Store(tmp_path, VOCABULARY).append_losses(key(condition), rows, {})
    (cell,) = read(tmp_path)
    assert cell.mean_output(text, "top1").mean == pytest.approx(0.925)
    assert cell.mean_output("h15()", "top1") is None and cell.mean_output("s()", "top1") is None


def test_the_longest_context_is_what_a_run_recorded(tmp_path):
    rows = pd.DataFrame({"block": [0], "nll": [3.0], "predictions": 2047})
    Store(tmp_path).append_losses(key(BASELINE), rows, {"max_positions": 4096})
    put(tmp_path, BASELINE, model="n", model_id="n")
    assert cross_model.positions(str(tmp_path), "m") == 4096
    assert cross_model.positions(str(tmp_path), "n") is None
    assert cross_model.positions(str(tmp_path), "absent") is None


def test_a_cell_with_output_is_shown_and_every_other_listed(tmp_path):
    for backend in cross_model.BACKENDS:
        put(tmp_path, BASELINE, backend=backend)
        put(tmp_path, "h15()", backend=backend)
    assert [cell.backend for cell in read(tmp_path)] == ["reference"]
    rows = pd.DataFrame({"block": range(BLOCKS), "predictions": 2047, "top1": 0.9, "jsd": 0.01})
    rows = rows.assign(kl_forward=0.1, kl_reverse=0.1)
    Store(tmp_path, VOCABULARY).append_losses(key("h15()", backend="fused"), rows, {})
    assert [cell.backend for cell in read(tmp_path)] == ["fused"]
    assert [cell.backend for cell in read(tmp_path, backends=("reference",))] == ["reference"]
    every = cross_model.every(str(tmp_path), corpus="pydoc", only=" m ,absent")
    assert [cell.backend for cell in every] == ["fused", "reference"]
    assert cross_model.every(str(tmp_path), corpus="pydoc", only="absent") == []


def test_a_cell_names_its_weights_and_how_many_blocks_it_lacks(tmp_path):
    rows = pd.DataFrame({"block": range(BLOCKS), "nll": 3.0, "predictions": 2047})
    Store(tmp_path).append_losses(key(BASELINE, model_id="gguf:sha256:" + "ab" * 32), rows, {"blocks_available": 9})
    put(tmp_path, BASELINE, model="n", model_id="hub@1")
    m, n = read(tmp_path)
    assert (m.size, m.label) == ("6 of 9", "m (float32, reference, 6 of 9 blocks)")
    assert m.weights == "quantised weights of the file `m.gguf` (SHA-256 abababababab…), expanded to float32"
    assert (n.size, n.label, n.weights) == ("6", "n (float32, reference)", "weights `hub@1`")
    assert read(tmp_path, blocks=4)[0].size == "4 of 9"
