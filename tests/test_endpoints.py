"""The endpoints of part 2 are the linear combinations that the paper writes."""

import numpy as np
import pandas as pd
import pytest

from softmaxlab import conditions, endpoints, statistics
from softmaxlab.errors import LabError

FIXED = {"model": "m", "corpus": "c", "context": 8, "bos": "stream", "dtype": "float32", "backend": "reference"}


def losses(texts, n=6):
    rng = np.random.default_rng(1)
    frames = [pd.DataFrame(FIXED | {"condition": t, "block": range(n), "nll": rng.normal(3, 1, n)}) for t in texts]
    return pd.concat(frames, ignore_index=True)


def test_interaction_is_the_difference_of_two_allocation_contrasts_in_every_block():
    frame = losses(conditions.allocation())
    whole = statistics.combination(frame, endpoints.interaction())
    parts = [statistics.contrast(frame, *conditions.allocation_contrast(K)).per_block for K in (16, 32)]
    np.testing.assert_allclose(whole.per_block, parts[0] - parts[1])


def test_gap_is_the_contrast_less_the_rescued_one_in_every_block():
    pair = conditions.temperature(0.9), conditions.temperature(1.1)
    after = endpoints.restored(pair)
    assert after == ("rescue(of=temperature(alpha=0.9))", "rescue(of=temperature(alpha=1.1))")
    frame = losses([*pair, *after])
    change = statistics.combination(frame, endpoints.gap(pair))
    parts = [statistics.contrast(frame, *p).per_block for p in (pair, after)]
    np.testing.assert_allclose(change.per_block, parts[0] - parts[1])
    assert set(endpoints.gap(pair, q=0.8)) == {*pair, *endpoints.restored(pair, 0.8)} != set(endpoints.gap(pair))


def solutions():
    rows = [
        ("jsd", 1.0, "flatten", 0.9, 0.0005),
        ("jsd", 1.0, "sharpen", 1.1, 0.0005),
        ("jsd", 3.0, "flatten", 0.8, 0.0005),
        ("jsd", 3.0, "sharpen", 1.2, 0.011),  # missed by more than 1 %
        ("jsd", 10.0, "flatten", None, float("nan")),  # out of reach
        ("jsd", 10.0, "sharpen", 1.5, 0.0005),
        ("tv", 1.0, "sharpen", 1.12, 0.01),
        ("tv", 1.0, "flatten", 0.88, 0.01),
    ]
    frame = pd.DataFrame(rows, columns=["metric", "level", "direction", "alpha", "error"])
    return frame.assign(condition=["" if pd.isna(a) else conditions.temperature(a) for a in frame["alpha"]])


def test_matched_pairs_are_flattening_first_and_only_where_both_hit():
    pairs = endpoints.matched_pairs(solutions())
    assert pairs == {
        ("jsd", 1.0): ("temperature(alpha=0.9)", "temperature(alpha=1.1)"),
        ("tv", 1.0): ("temperature(alpha=0.88)", "temperature(alpha=1.12)"),
    }


def test_the_response_map_has_the_papers_four_kinds_and_number():
    kinds = pd.Series([endpoints.kind(t) for t in conditions.response_map()]).value_counts()
    assert kinds.to_dict() == {"grid": 31, "octave lattice": 7, "flattening": 9, "sharpening": 9}
    for text in ("softmax()", "temperature(alpha=1)", "topk(f=0.5)"):
        with pytest.raises(LabError, match="kinds of the response map"):
            endpoints.kind(text)


@pytest.mark.parametrize("context, blocks, n", [(2048, 0, 0), (2048, 97, 16), (2048, 4, 4), (65536, 3, 1), (128, 2, 2)])
def test_windows_are_the_papers_and_never_more_than_the_blocks(context, blocks, n):
    assert endpoints.windows(context, blocks) == n


def test_windows_of_a_measurement(tiny_model, text_file):
    from softmaxlab import trajectory

    path = trajectory.measure(
        ["pot(m=1)"], model=str(tiny_model), corpus=str(text_file), context=32, windows=3, device="cpu", results=""
    )
    assert endpoints.n_windows(path, 32) == 3
