"""The front page's table: how values are compared, what is not stored says so, and every link leads to a section."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from test_cross_model import key

from softmaxlab import findings, models, report
from softmaxlab.conditions import BASELINE
from softmaxlab.findings import Finding, Stored, compare, estimated, linked, printed, target, within_range
from softmaxlab.paper import Published
from softmaxlab.statistics import bootstrap
from softmaxlab.store import Store

ROOT = Path(__file__).resolve().parent.parent
EVERY = [one for found in findings.tables().values() for one in found]


def theirs(value, low=None, high=None):
    return Published(value, low, high, "nat", "Table 1", str(value))


@pytest.mark.parametrize(
    ("ours", "published", "said"),
    [
        ([1.0, 3.0], theirs(2.5), "within our interval"),
        ([4.4, 4.4], theirs(2.0, 1.5, 2.5), "same sign, resolved; 2.2 times the paper's"),
        ([4.0, 4.2], theirs(-2.0, -2.5, -1.5), "differs: opposite sign"),
        ([-1.0, 1.0], theirs(0.5), "within our interval, which holds zero"),
        ([-1.0, 1.0], theirs(5.0), "differs: not resolved here"),
        ([4.0, 4.2], theirs(2.0, -1.0, 5.0), "differs: resolved here alone"),
        ([4.0, 4.2], None, "nothing published"),
    ],
)
def test_agreement_says_how(ours, published, said):
    assert compare(bootstrap(np.array(ours)), published) == said


def test_agreement_is_in_the_unit_of_the_published_value():
    ours = bootstrap(np.array([0.010, 0.012]))
    assert compare(ours, theirs(1.1), report.percent) == "within our interval"
    assert compare(ours, theirs(0.011), report.percent) != "within our interval"


def test_a_range_has_an_inside_and_two_outsides():
    ours = bootstrap(np.array([0.010, 0.012]))
    assert within_range(ours, [0.5, 2.0], report.percent) == "same sign, resolved; inside the paper's range"
    assert within_range(ours, [2.0, 3.0], report.percent) == "differs: below the paper's range"
    assert within_range(ours, [0.1, 0.2]) == "differs: below the paper's range"
    assert within_range(ours, [0.001, 0.002]) == "differs: above the paper's range"
    assert within_range(bootstrap(np.array([-1.0, 1.0])), [0.0, 1.0]) == "differs: not resolved here"


def test_values_of_the_paper_keep_their_digits():
    assert printed(theirs(-0.0010), "nats", "M-1") == "−0.001 nats (M-1)"
    assert printed(pd.Series([0.052, 1.513]), "%", "ten models") == "0.052 to 1.513 % (ten models)"
    assert printed(None, "%", "M") == report.MISSING and estimated(None, theirs(1.0)) is None


def test_links_lead_to_a_section_else_to_the_chapter_else_nowhere(tmp_path):
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "03_some.py").write_text("# %% [markdown]\n# (some)=\n# # Some\n# (part)=\n# ## Part\n")
    there = Finding("c", "p", "03", "part", lambda _: None)
    assert linked("1.0", there, tmp_path) == "{ref}`1.0 <part>`"
    assert target(Finding("c", "p", "03", "elsewhere", there.value), tmp_path) == "some"
    assert linked("1.0", Finding("c", "p", "04", "part", there.value), tmp_path) == "1.0"


def test_every_finding_names_a_section_of_its_chapter():
    """A renamed section would else send the reader to the top of the chapter."""
    for one in EVERY:
        scripts = list((ROOT / "notebooks").glob(f"{one.chapter}_*.py"))
        if scripts and one.label:
            assert target(one, ROOT) == one.label, one.claim


def test_an_empty_store_measures_nothing(tmp_path):
    stored = Stored(str(tmp_path / "results"))
    for _, _, ours, agreement in findings.rows(EVERY, stored, tmp_path):
        assert (ours, agreement) == (findings.NOT_MEASURED, report.MISSING)


def test_ours_come_from_the_store(tmp_path):
    """A store with two conditions gives two findings, with the values of statistics."""
    losses = {BASELINE: [3.0, 3.1, 3.2], "h15()": [3.004, 3.105, 3.206], "topk(f=0.5)": [3.01, 3.11, 3.21]}
    for text, nll in losses.items():
        rows = pd.DataFrame({"block": range(3), "nll": nll, "predictions": 2047})
        setting = {"model": models.EMBEDDED, "corpus": "wikitext103"}
        Store(tmp_path / "results").append_losses(key(text, **setting), rows, {})
    found = {r[0]: r for r in findings.rows(EVERY, Stored(str(tmp_path / "results")), tmp_path)}
    measured = {claim: r for claim, r in found.items() if not r[2].startswith(findings.NOT_MEASURED)}
    assert set(measured) == {"Rowmax-H15 costs little", "Half of a row's keys are nearly enough (top-k)"}
    interval = report.interval(bootstrap(np.array([0.004, 0.005, 0.006])))
    assert measured["Rowmax-H15 costs little"][2] == f"{interval} nats {{bdg-primary}}`measured`"
    assert "times the paper's" in measured["Rowmax-H15 costs little"][3]


def test_other_models_through_the_kernel_are_named_and_not_pooled(tmp_path):
    h15 = {models.EMBEDDED: 0.002, "other": -0.0001}
    results = tmp_path / "results"
    for model, cost in h15.items():
        for text, shift in {BASELINE: 0.0, "h15()": cost, "packed(k=4)": 0.0005}.items():
            nll = [3.0 + shift, 3.1 + shift, 3.2 + 1.1 * shift]
            rows = pd.DataFrame({"block": range(3), "nll": nll, "predictions": 2047})
            fixed = {"model": model, "corpus": "wikitext103", "backend": "fa4(arch=sm_90)", "dtype": "bfloat16"}
            Store(results).append_losses(key(text, **fixed), rows, {})
    found = {r[0]: r for r in findings.rows(EVERY, Stored(str(results)), tmp_path)}
    _, _, ours, said = found["So does the patched kernel"]
    assert ours.startswith(report.interval(bootstrap(np.array([0.002, 0.002, 0.0022])))) and "`measured`" in ours
    assert said.startswith("same sign, resolved; inside") and "; other: −0.0001" in said
    assert said.endswith("nats, resolved below zero")
    assert found["`packed(4,3)` loses at most half of what Rowmax-H15 does"][3].endswith("target met; other: missed")
    alone = {r[0]: r for r in findings.rows(EVERY, Stored(str(results), "other"), tmp_path)}
    assert f"; {models.EMBEDDED}: 0.00207" in alone["So does the patched kernel"][3]
    absent = {r[0]: r for r in findings.rows(EVERY, Stored(str(results), "third"), tmp_path)}
    assert absent["So does the patched kernel"][2] == findings.NOT_MEASURED


def test_the_page_of_the_committed_results(tmp_path):
    """Every number of ours on it is a link, where its chapter exists."""
    (tmp_path / "results").symlink_to(ROOT / "results")
    shutil.copytree(ROOT / "notebooks", tmp_path / "notebooks")
    text = findings.write_page(tmp_path).read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.startswith("| ") and "---" not in line]
    assert len(lines) == len(EVERY) + len(findings.tables())
    chapters = {path.name[:2] for path in (tmp_path / "notebooks").glob("*.py")}
    for one in EVERY:
        (line,) = [line for line in lines if line.startswith(f"| {one.claim} |")]
        assert ("{ref}`" in line) == (one.chapter in chapters), line
        assert re.search(r"`(measured|simulated|compiled)`|not measured", line)
    for claim in ("Levels belong near the row maximum", "Rowmax-H15 makes a forward faster"):
        (line,) = [line for line in lines if claim in line]
        assert findings.NOT_MEASURED not in line


def test_claims_differ():
    assert len({one.claim for one in EVERY}) == len(EVERY)
