"""The published numbers: look-up, and that the tables agree with themselves within rounding."""

import math
from decimal import Decimal

import pytest

from softmaxlab import paper
from softmaxlab.errors import LabError


def printed_range(text):
    """The numbers that a printed decimal may stand for."""
    half = Decimal(1).scaleb(Decimal(text).as_tuple().exponent) / 2
    return float(Decimal(text) - half), float(Decimal(text) + half)


def with_intervals():
    for name in paper.tables():
        frame = paper.table(name)
        if "ci_low" in frame:
            for _, row in frame[frame["ci_low"] != ""].iterrows():
                yield name, row


def test_every_table_is_there_and_described():
    names = paper.tables()
    assert len(names) == 43 and names == sorted(names)
    readme = (paper._FOLDER / "README.md").read_text(encoding="utf-8")
    ranged = {n for n in names if n.startswith("tableB5")}  # the README names these as a range
    assert [n for n in names if n not in ranged and f"`{n}`" not in readme] == []
    assert {f"`{min(ranged)}`", f"`{max(ranged)}`"} <= set(readme.split())


def test_cells_are_as_printed():
    for name in paper.tables():
        frame = paper.table(name)
        assert len(frame) and all(isinstance(cell, str) for cell in frame.to_numpy().ravel())
        assert not frame.duplicated().any(), name
        assert (frame["source"] != "").all(), name
    kept = paper.value("table3_cross_model", model="Qwen2.5-1.5B", metric="D_R21")
    assert (kept.value, kept.low, kept.high, kept.unit) == (0.00351, 0.00282, 0.0042, "nat")
    assert str(kept) == kept.text == "0.00351 [0.00282, 0.00420]" and kept.source == "Table 3"


def test_a_changed_copy_does_not_change_the_table():
    copy = paper.table("protocol")
    copy.loc[0, "value"] = "changed"
    assert paper.table("protocol").loc[0, "value"] != "changed"


def test_values_without_interval_and_by_number():
    rms = paper.value("d2_R_sweep", K=21, R=0.25, metric="dnll")
    assert (rms.low, rms.high, str(rms)) == (None, None, "0.0161")
    density = paper.value("d1_support_sweep", target_kept_pct=0.65, metric="pooled_density")
    assert str(density) == "0.70" and density.value == 0.7
    kept = paper.value("d1_support_sweep", weights="softmax", target_kept_pct=None, metric="kept_fraction")
    assert kept.unit == "fraction"


def test_numbers_become_floats_and_labels_do_not():
    frame = paper.table("tableD1_allocation", numbers=True)
    assert {frame[c].dtype.kind for c in ("params_b", "value", "ci_low", "ci_high")} == {"f"}
    assert math.isnan(frame["ci_low"].iloc[1]) and frame["model"].iloc[0] == "Qwen2.5-0.5B"
    assert list(frame.columns) == list(paper.table("tableD1_allocation").columns)
    assert paper.table("tableB3_environment", numbers=True)["cuda"].iloc[2] == "13.0"
    assert paper.table("operator_constants", numbers=True)["value"].iloc[0] == "0x4B400000"


@pytest.mark.parametrize(
    "table, filters, message",
    [
        ("table9", {}, "unknown table 'table9' of the paper; there are audit, "),
        ("protocol", {"thing": 1}, "protocol has no column 'thing'; it has area, item, value, unit, source"),
        ("protocol", {"area": "eval"}, "10 rows of protocol match area='eval'; exactly one must"),
        (
            "protocol",
            {"area": "eval", "item": "nothing"},
            "0 rows of protocol match area='eval', item='nothing'",
        ),
        ("protocol", {}, "41 rows of protocol match no filter"),
        ("protocol", {"item": "fa4_commit"}, "is the text '0dc2cb48'"),
        ("tableB1_anchor_resolution", {"value": None}, "is not printed in the paper"),
        ("predictions", {"id": 1}, "predictions is a wide table"),
    ],
)
def test_lookups_that_do_not_give_one_number(table, filters, message):
    with pytest.raises(LabError, match=message):
        paper.value(table, **filters)


def test_intervals_contain_their_value_and_say_whether_they_are_resolved():
    seen = set()
    for name, row in with_intervals():
        low, value, high = (float(row[c]) for c in ("ci_low", "value", "ci_high"))
        assert low <= value <= high, (name, dict(row))
        expected = "pos" if low > 0 else "neg" if high < 0 else "no"
        assert row["resolved"] == expected, (name, dict(row))
        seen.add(expected)
    assert seen == {"pos", "neg", "no"}


def test_perplexity_change_follows_from_the_loss():
    """Wherever a table prints both for one condition."""
    compared = 0
    for name in paper.tables():
        frame = paper.table(name)
        if "metric" not in frame or not {"dnll", "ppl_change"} <= set(frame["metric"]):
            continue
        same = [c for c in frame if c not in ("metric", "value", "ci_low", "ci_high", "unit", "resolved", "source")]
        for _, group in frame.groupby(same, dropna=False):
            by_metric = group.drop_duplicates("metric").set_index("metric")["value"]
            if not {"dnll", "ppl_change"} <= set(by_metric.index):
                continue
            low, high = (100 * math.expm1(x) for x in printed_range(by_metric["dnll"]))
            printed_low, printed_high = printed_range(by_metric["ppl_change"])
            assert low <= printed_high + 1e-12 and printed_low <= high + 1e-12, (name, dict(by_metric))
            compared += 1
    assert compared >= 20


def test_protocol_matches_the_statistics_and_the_corpus():
    from softmaxlab import corpus, statistics

    def protocol(area, item):
        return paper.value("protocol", area=area, item=item).value

    assert protocol("bootstrap", "replicates") == statistics.REPLICATES
    assert protocol("bootstrap", "seed") == statistics.SEED
    assert protocol("bootstrap", "ci_level") == 100 * statistics.LEVEL
    assert protocol("eval", "stream_tokens") == corpus.STREAM_TOKENS
    for label, context in (("2K", 2048), ("8K", 8192), ("16K", 16384)):
        blocks = protocol("eval", f"blocks_{label}")
        assert blocks == corpus.STREAM_TOKENS // context
        assert blocks * (context - 1) == protocol("eval", f"predictions_{label}")
