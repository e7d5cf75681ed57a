"""The benchmark of operators: what it keeps, what it refuses, and that a stopped run goes on."""

import json

import pytest
import torch

from softmaxlab import backends
from softmaxlab.backends import fused
from softmaxlab.bench import operator_rows, operators, sdpa
from softmaxlab.bench.operators import SDPA
from softmaxlab.bench.turns import Budget
from softmaxlab.errors import LabError
from softmaxlab.operators import parse

SMALL = {"contexts": [64], "modes": ["attention"], "rounds": 3, "memory": False}


def test_rows_are_kept_and_not_measured_again(tmp_path, monkeypatch):
    run = lambda *texts, **more: operators.run(operators=texts, results=tmp_path, **SMALL | more)  # noqa: E731
    first = run("softmax()", "h15()")
    assert (first.done, first.total, first.partial) == (2, 2, False)
    rows = operator_rows.load(first.path)
    assert {r["operator"] for r in rows} == {"softmax()", "h15()"}
    assert all(len(r["seconds"]) == len(r["sdpa_seconds"]) == 3 for r in rows)
    assert all(r["torch"] == torch.__version__ and r["kind"] == "cpu" and len(r["source"]) == 12 for r in rows)

    measured = []
    real = operators.measure
    monkeypatch.setattr(operators, "measure", lambda case, pairs, *a: measured.append(pairs) or real(case, pairs, *a))
    run("softmax()", "pot(m=1)")
    assert measured == [[("fused", "pot(m=1)")]]
    run("softmax()", again=True, names=["reference", "fused"])
    assert measured[1] == [("reference", "softmax()"), ("fused", "softmax()")]
    assert len(operator_rows.load(first.path)) == 4
    # No half-written file; the lock stays, for to remove it would let two benches hold it.
    assert [p.name for p in first.path.parent.glob(".*")] == [".operators-cpu.json.lock"]


def test_the_limit_keeps_whole_cases(tmp_path, monkeypatch):
    stopped = operators.run(operators=["softmax()"], results=tmp_path, limit=1e-9, **SMALL)
    assert stopped.partial and stopped.done == 0 and not stopped.path.exists()
    case = operators.Case("attention", "float32", 32, 2, 1, 64)
    assert operators.measure(case, [("fused", "softmax()")], "cpu", 3, Budget(1e-9), False) == []

    # Let a call take a second, and let there be time for three rounds of two functions.
    monkeypatch.setattr(operators, "timed", lambda call, device: 1.0)
    budget = Budget(0)
    monkeypatch.setattr(budget, "left", lambda: 8.0)
    pairs = [("fused", text) for text in ("softmax()", "h15()", "s()", "pot(m=1)")]
    rows = operators.measure(case, pairs, "cpu", 7, budget, False)
    assert [r["operator"] for r in rows] == ["softmax()"]


def test_a_ratio_pairs_the_rounds():
    row = {"seconds": [2.0, 9.0, 4.0], "sdpa_seconds": [1.0, 3.0, 4.0], "peak_bytes": 2**20, "sdpa_peak_bytes": None}
    row |= {"mode": "model", "case": "", "dtype": "float32", "context": 2048, "backend": "fused", "notices": []}
    row |= {"operator": "h15()", "kind": "cpu", "device": "a CPU", "threads": 2, "heads": 0, "kv_heads": 0, "dim": 0}
    found = operator_rows.summary(row)
    assert (found["ratio"], found["low"], found["high"], found["rounds"]) == (2.0, 1.0, 3.0, 3)
    assert (found["ms"], found["peak_mib"], found["sdpa_peak_mib"]) == (4000.0, 1.0, None)
    assert operator_rows.verdict(found) == "≤ 1.4 missed"
    assert operator_rows.target(row | {"backend": "reference"}) is None
    assert operator_rows.target(row | {"context": 4096}) is None
    assert operator_rows.target(row | {"operator": "softmax()"}) == 1.1
    assert operator_rows.target(row | {"operator": "ilpot()"}) is None


def test_peak_memory_grows_linearly_with_the_context():
    call = None  # on the CPU a process of its own makes the call
    peaks = [
        operators.peak(operators.Case("attention", "float32", n, 4, 2, 64), ("fused", "softmax()"), "cpu", call)
        for n in (2048, 8192)
    ]
    matrix = 4 * 8192**2 * 4
    assert 2**20 < peaks[0] < peaks[1] < matrix / 8


@pytest.mark.parametrize(
    ("arguments", "named"),
    (
        (["--device", "tpu"], "tpu"),
        (["--dtype", "float8"], "float8"),
        (["--context", "1"], "context is 1"),
        (["--context", "99999999999999"], "context is 99999999999999, but must be a whole number from 2 to 131072"),
        (["--rounds", "2"], "rounds is 2"),
        (["--rounds", "0"], "rounds is 0"),
        (["--limit", "nan"], "limit is nan seconds"),
        (["--operators", "nonsense()"], "nonsense"),
        (["--backend", "nonsense"], "nonsense"),
        (["--limit", "-1"], "limit"),
    ),
)
def test_bad_input_is_one_sentence(run, tmp_path, arguments, named):
    code, out, err = run("bench", "operators", "--attention-only", "--results", tmp_path, *arguments)
    assert code == 2 and named in err and err.count("\n") == 1 and not out
    assert not list(tmp_path.rglob("*.json"))


def test_the_command_prints_what_is_stored(run, tmp_path):
    arguments = ["--attention-only", "--context", 64, "--rounds", 3, "--no-memory", "--results", tmp_path]
    code, out, _ = run("bench", "operators", *arguments, "--operators", "rescue(of=h15())", "--json")
    (row,) = json.loads(out)
    assert code == 0 and row["rounds"] == 3 and "no map for rescue" in row["notices"][0]
    code, out, _ = run("bench", "operators", *arguments, "--operators", "rescue(of=h15())", "--limit", 100)
    assert code == 0 and "no map for rescue" in out and "all 1 turns" in out


def test_what_has_two_text_forms_is_measured_once(tmp_path):
    found = operators.run(operators=["softmax()", "softmax( )"], results=tmp_path, **SMALL | {"contexts": [64, 64]})
    assert (found.done, found.total) == (1, 1)
    (row,) = operator_rows.load(found.path)
    assert len(row["seconds"]) == len(row["sdpa_seconds"]) == 3


@pytest.mark.parametrize("nothing", ({"contexts": []}, {"operators": []}, {"names": []}))
def test_to_ask_for_nothing_is_refused(tmp_path, nothing):
    with pytest.raises(LabError, match="must be one of each at least"):
        operators.run(results=tmp_path, **SMALL | nothing)


@pytest.mark.parametrize(
    "error", (torch.OutOfMemoryError("x"), MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory"))
)
def test_a_case_that_does_not_fit_is_one_sentence_and_those_before_are_kept(tmp_path, monkeypatch, error):
    real = operators.measure

    def measure(case, *rest):
        if case.context > 64:
            raise error
        return real(case, *rest)

    monkeypatch.setattr(operators, "measure", measure)
    with pytest.raises(LabError, match=r"attention/h9/kv3/d64/float32/128 does not fit into the memory of cpu"):
        operators.run(operators=["softmax()"], results=tmp_path, **SMALL | {"contexts": [64, 128]})
    assert [r["context"] for r in operator_rows.load(operator_rows.where(tmp_path, "cpu"))] == [64]
    monkeypatch.setattr(operators, "measure", lambda *_: [][0])
    with pytest.raises(IndexError):  # another error is not hidden
        operators.run(operators=["h15()"], results=tmp_path, **SMALL)


def whole(**changes):
    row = {"case": "c", "mode": "attention", "dtype": "float32", "context": 64, "heads": 9, "kv_heads": 3, "dim": 64}
    row |= {"backend": "fused", "operator": "softmax()", "seconds": [1.0] * 3, "sdpa_seconds": [1.0] * 3}
    row |= {"peak_bytes": None, "sdpa_peak_bytes": 5, "notices": [], "kind": "cpu", "device": "a CPU", "threads": 2}
    return json.dumps({"format": 1, "rows": [row | changes]})


@pytest.mark.parametrize(
    ("text", "said"),
    (
        ("{}", "it has no format"),
        ('{"format": 1, "rows": [5]}', "rows[0] is 5, but must be an object"),
        ('{"format": 1, "rows": [{}]}', "rows[0] has no case"),
        ('{"format": 1, "rows": {"a": 1}}', 'rows is {"a": 1}, but must be a list'),
        ('{"format": 1, "a": 1}', "it has no rows"),
        ('{"a": 1}', "it has no format"),
        (whole(seconds=["x"]), 'rows[0].seconds[0] is "x", but must be a finite number above 0'),
        (whole(seconds="x"), 'rows[0].seconds is "x", but must be a list'),
        (whole(sdpa_seconds=[1.0, 0, 1.0]), "rows[0].sdpa_seconds[1] is 0, but must be a finite number above 0"),
        (whole(seconds=[1.0]), "rows[0] has 1 seconds, but 3 of sdpa"),
        (whole(context=True), "rows[0].context is true, but must be a whole number"),
        (whole(peak_bytes="5"), 'rows[0].peak_bytes is "5", but must be a whole number or null'),
        (whole(threads=10**30), "rows[0].threads is 1000000000000000000000000000000, but must be a whole number"),
    ),
)
def test_another_file_is_left_alone(run, tmp_path, text, said):
    path = operator_rows.where(tmp_path, "cpu")
    path.parent.mkdir()
    path.write_text(text)
    arguments = ["--attention-only", "--context", 64, "--rounds", 3, "--no-memory", "--operators", "h15()"]
    code, out, err = run("bench", "operators", *arguments, "--results", tmp_path)
    assert code == 2 and not out and err.count("\n") == 1 and said in err and "move it away" in err
    assert path.read_text() == text


def test_a_folder_in_the_place_of_the_file_is_refused_before_anything_is_measured(tmp_path, monkeypatch):
    operator_rows.where(tmp_path, "cpu").mkdir(parents=True)
    monkeypatch.setattr(operators, "measure", lambda *_: pytest.fail("it measures"))
    with pytest.raises(LabError, match="holds no record of a bench"):
        operators.run(operators=["softmax()"], results=tmp_path, **SMALL)


def test_a_whole_row_is_read(tmp_path):
    path = operator_rows.where(tmp_path, "cpu")
    path.parent.mkdir()
    path.write_text(whole())
    (row,) = operator_rows.stored(tmp_path, ["cpu"])
    assert row["ratio"] == 1 and row["peak_mib"] is None


def test_the_page_on_costs_shows_them(tmp_path):
    from softmaxlab import costs_ratios

    operators.run(operators=["softmax()", "h15()"], results=tmp_path / "results", **SMALL)
    rows = operator_rows.stored(tmp_path / "results")
    assert "| `h15()` | " in costs_ratios.ratio_tables(rows, costs_ratios.machine(rows[0]))
    assert "| 64 | " in costs_ratios.ways(rows) and "not tried" not in costs_ratios.ways(rows)


def test_the_fused_backend_tells_once_of_what_it_does_not_do():
    q = torch.randn(1, 2, 8, 64)
    rescue = parse("rescue(of=h15())")
    fused.told.clear()
    with pytest.warns(fused.FallbackNotice, match="no map for rescue") as notices:
        got = [backends.get("fused")(q, q, q, rescue, scaling=0.1) for _ in range(2)]
    assert len(notices) == 1
    assert torch.equal(got[0], backends.get("reference")(q, q, q, rescue, scaling=0.1))
    assert backends.canonical("fused") == "fused"


@pytest.mark.parametrize("mask", (None, "window"))
def test_both_ways_to_call_sdpa_are_softmax(mask):
    q, k, v = torch.randn(2, 4, 9, 16), torch.randn(2, 2, 9, 16), torch.randn(2, 2, 9, 16)
    seen = None if mask is None else (torch.ones(9, 9).tril() * torch.ones(9, 9).triu(-3)).bool()[None, None]
    exact = backends.get("reference")(q, k, v, parse("softmax()"), scaling=0.3, mask=seen)
    for way in sdpa.WAYS:
        got = sdpa.attention(q, k, v, way, scaling=0.3, mask=seen)
        torch.testing.assert_close(got.transpose(1, 2), exact, atol=1e-5, rtol=1e-5)
    got = sdpa.attend_repeated(q, k, v, parse("softmax()"), scaling=0.3, mask=seen, layer=1, softcap=None)
    torch.testing.assert_close(got, exact, atol=1e-5, rtol=1e-5)


def test_the_faster_way_to_call_sdpa_is_the_one_that_is_compared_with(monkeypatch):
    case, real = operators.Case("attention", "float32", 32, 4, 2, 16), sdpa.attention

    def told(ways):
        monkeypatch.setattr(sdpa, "attention", lambda q, k, v, way: ways[way]() or real(q, k, v, way))
        monkeypatch.setattr(operators, "timed", lambda call, device: (call(), 1.0)[1])
        (row,) = operators.measure(case, [("fused", "softmax()")], "cpu", 3, Budget(0), False)
        return row

    def full():
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(sdpa, "trial", lambda call, timed: {"grouped": 2.0, "repeated": 1.0})
    called = []
    assert told({way: (lambda way=way: called.append(way)) for way in sdpa.WAYS})["sdpa"] == "repeated"
    assert set(called) == {"repeated"}
    monkeypatch.undo()
    row = told({"grouped": full, "repeated": lambda: None})
    assert (row["sdpa"], row["sdpa_trial"]) == ("repeated", {"grouped": None, "repeated": 1.0})
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        told({"grouped": full, "repeated": full})


@pytest.mark.model
def test_a_model_runs_in_both_ways():
    case = operators.Case("model", "float32", 16)
    with torch.inference_mode(), operators.prepared(case, "cpu") as call:
        grouped, repeated, ours = (
            call(pair)().logits for pair in ((SDPA, "grouped"), (SDPA, "repeated"), ("reference", "softmax()"))
        )
    torch.testing.assert_close(grouped, ours, atol=2e-3, rtol=1e-3)
    torch.testing.assert_close(repeated, ours, atol=2e-3, rtol=1e-3)
