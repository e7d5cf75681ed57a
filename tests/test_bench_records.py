"""The files of a bench: which entries they hold, that two benches share one, and what is no record."""

import json
import sys
from pathlib import Path

import pytest

from softmaxlab.bench import latency, operator_rows, record
from softmaxlab.bench.record import Record
from softmaxlab.errors import LabError

CELL = "bf16/causal/1024/h4/d64"
RESULTS = Path(__file__).resolve().parent.parent / "results"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SOFTMAXLAB_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def results(tmp_path) -> str:
    return str(tmp_path / "results")


def test_entries_of_other_kernels_or_sources_are_kept_apart(results):
    facts = {"GPU": "one"}
    with Record("latency", facts, "measured", results) as held:
        entries = [held.entry(CELL, k, p, 1) for k, p in ((["a"], {}), (["a", "b"], {}), (["a"], {"sources": "x"}))]
        assert len({e.key for e in entries}) == 3 and held.entry(CELL, ["a"], {}, 1) is entries[0]
        entries[0].turns.append({"round": 0, "kernel": "a"})
        held.save()
    with Record("latency", facts | {"driver": "2"}, "measured", results) as held:
        assert len(held.entries) == 1 and not held.entry(CELL, ["a"], {}, 1).turns


def add(cell: str, held: Record) -> None:
    held.entry(cell, ["stock"], {}, 1).turns.append({"round": 0, "kernel": "stock"})
    held.save()


def cells_of(held: Record) -> list[str]:
    return [e.cell for e in record.load(held.path)]


def test_a_bench_keeps_what_another_wrote_while_it_waited(results):
    facts = {"GPU": "one"}
    early, late = (Record("latency", facts, "measured", results) for _ in range(2))
    with early:
        add("bf16/1024", early)
    with late:
        add("bf16/2048", late)
    assert cells_of(late) == ["bf16/1024", "bf16/2048"]
    with early:  # the same object, opened again
        add("bf16/4096", early)
    assert cells_of(early) == ["bf16/1024", "bf16/2048", "bf16/4096"]


@pytest.mark.skipif(sys.platform == "win32", reason="the lock is flock's")
def test_a_bench_that_waited_for_the_lock_has_the_one_lock(results, monkeypatch):
    import fcntl

    monkeypatch.setattr(record, "PATIENCE", 0)
    held = Record("latency", {"GPU": "one"}, "measured", results)
    lock = held.path.with_name(f".{held.path.name}.lock")
    with held, pytest.raises(LabError, match="another bench writes"):
        Record("latency", {"GPU": "one"}, "measured", results).__enter__()
    with held:
        waits = lock.open("r+")
    with waits:
        fcntl.flock(waits, fcntl.LOCK_EX)  # it gets what it waited for …
        with pytest.raises(LabError, match="another bench writes"):  # … and nobody else has it
            Record("latency", {"GPU": "one"}, "measured", results).__enter__()
    with held:
        pass


def test_a_file_that_is_no_record_is_named_and_left_alone(results):
    path = record.folder(results) / "latency-one.json"
    path.parent.mkdir(parents=True)
    for text in ("{", "[]", json.dumps({"format": 99, "program": "latency"}), "[" * 100_000):
        path.write_text(text)
        for _ in range(2):  # the lock is free again
            with (
                pytest.raises(LabError, match=r"latency-one\.json holds no record"),
                Record("latency", {"GPU": "one"}, "measured", results),
            ):
                pytest.fail("it was opened")
        assert path.read_text() == text
    path.unlink()
    path.mkdir()
    with (
        pytest.raises(LabError, match=r"latency-one\.json holds no record of a bench \(Is a directory\)"),
        Record("latency", {"GPU": "one"}, "measured", results),
    ):
        pytest.fail("it was opened")


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory) -> str:
    """The text of a record of durations."""
    results = tmp_path_factory.mktemp("rehearsed")
    outcome = latency.duration([CELL], [], sweeps=2, results=str(results), rehearse=True)
    return outcome.path.read_text()


ENTRY = ("entries", 0)
TURN = (*ENTRY, "turns", 0)


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (["sessions"], [], "sessions is [], but must be an object"),
        (["sessions"], {}, "there is no session"),
        (["program"], "energy", "program energy"),
        (["entries"], [{}], "entries[0] has no key"),
        ([*ENTRY, "turns"], 5, "entries[0].turns is 5, but must be a list"),
        ([*ENTRY, "turns"], [5], "entries[0].turns[0] is 5, but must be an object"),
        ([*ENTRY, "turns"], [{}], "entries[0].turns[0] has no round"),
        ([*ENTRY, "kernels"], [], "entries[0].kernels is [], but must be a list of at least one"),
        ([*ENTRY, "total"], "x", 'entries[0].total is "x", but must be a whole number'),
        ([*ENTRY, "total"], True, "entries[0].total is true, but must be a whole number"),
        ([*ENTRY, "gates"], None, "entries[0].gates is null, but must be an object"),
        ([*ENTRY, "gates"], {"stock": {"failed": ""}}, "entries[0].gates.stock has no passed"),
        ([*ENTRY, "cell"], "bf32", "'bf32' cannot be read"),
        ([*ENTRY, "new"], 1, "new"),
        ([*TURN, "windows"], [], "windows is [], but must be a list of at least one"),
        ([*TURN, "windows"], [[1.0, 2]], "windows[0] is [1.0, 2], but must be a list of 4"),
        ([*TURN, "windows"], [[0, 1, 1, 1]], "windows[0][0] is 0, but must be a finite number above 0"),
    ],
)
def test_a_record_of_another_shape_is_named_and_left_alone(run, results, rehearsed, place, value, said):
    held = json.loads(rehearsed)
    inner = held
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    path = record.folder(results) / "duration-rehearsal.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(held))
    again = ("latency", "--graphs", "--rehearse", "--sweeps", 2, "--cells", CELL, "--kernels", "stock")
    for arguments in (("show", "duration"), again):
        code, out, err = run("bench", *arguments, "--results", results)
        assert code == 2 and not out and err.count("\n") == 1 and said in err and f"{path} holds no record" in err
        assert json.loads(path.read_text()) == held


def test_a_folder_in_the_place_of_a_record_is_one_sentence(run, results):
    (record.folder(results) / "latency-zzz.json").mkdir(parents=True)
    code, out, err = run("bench", "show", "latency", "--results", results)
    assert code == 2 and not out and err.count("\n") == 1 and "latency-zzz.json holds no record" in err


def test_the_stored_records_are_whole():
    files = list((RESULTS / record.FOLDER).glob("*-NVIDIA-*.json"))
    for program in record.PROGRAMS:
        entries = record.found(program, RESULTS)
        assert bool(entries) == any(path.name.startswith(f"{program}-") for path in files)
    for device in operator_rows.DEVICES:
        path = operator_rows.where(RESULTS, device)
        assert not path.exists() or operator_rows.load(path)
