"""Files that cannot be read stop; damaged ones count as absent, and are kept when they are written over."""

import errno
import os
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from test_store import DAMAGE, HERE, KEY, files, losses, truncate

from softmaxlab import parquet, zero_shot_records
from softmaxlab.errors import LabError
from softmaxlab.losskey import LOSSES, VOCABULARY
from softmaxlab.store import Store

REFUSALS = (errno.EACCES, errno.EIO, errno.ESTALE, errno.EMFILE)
LONG = "a" * 300  # more than a file system allows in a name


def refuse(monkeypatch, method, target, number=errno.EACCES):
    """Let the system refuse one path: permissions do not stop root."""
    real = getattr(Path, method)

    def refusing(self, *arguments, **options):
        if self == target:
            raise OSError(number, os.strerror(number), str(self))
        return real(self, *arguments, **options)

    monkeypatch.setattr(Path, method, refusing)


def one_sentence(error):
    return "\n" not in str(error.value)


# A file that the system does not let us read


@pytest.mark.parametrize("number", REFUSALS, ids=errno.errorcode.get)
def test_a_file_that_cannot_be_read_stops_and_is_left_as_it_is(tmp_path, monkeypatch, number):
    results = Store(tmp_path)
    path = results.append_losses(KEY, losses(*range(142)), HERE)
    before = path.read_bytes()
    with monkeypatch.context() as patched, warnings.catch_warnings():
        warnings.simplefilter("error")
        refuse(patched, "read_bytes", path, number)
        for act in (
            lambda: results.losses(KEY),
            results.frame,
            results.provenance,
            lambda: results.append_losses(KEY, losses(200, 201), HERE),
        ):
            with pytest.raises(LabError, match=rf"{path} cannot be read \({os.strerror(number)}\)") as error:
                act()
            assert one_sentence(error)
    assert path.read_bytes() == before
    assert files(tmp_path) == [path.relative_to(tmp_path).as_posix()]
    results.append_losses(KEY, losses(200), HERE)  # the lock was let go
    assert len(results.losses(KEY)) == 143


def test_a_table_that_cannot_be_read_stops_and_is_left_as_it_is(tmp_path, monkeypatch):
    results = Store(tmp_path)
    frame = pd.DataFrame({"condition": ["a"], "seconds": [1.0]})
    path = results.put_table("cost", {"model": "a"}, frame, HERE)
    before = path.read_bytes()
    with monkeypatch.context() as patched:
        refuse(patched, "read_bytes", path)
        for act in (
            lambda: results.get_table("cost", {"model": "a"}),
            lambda: results.tables("cost"),
            lambda: results.put_table("cost", {"model": "a"}, frame, HERE),
            lambda: results.update_table("cost", {"model": "a"}, frame, HERE, by="condition"),
        ):
            with pytest.raises(LabError, match="cannot be read"):
                act()
    assert path.read_bytes() == before


def test_what_is_no_file_at_all_is_not_replaced_either(tmp_path):
    """Without a stand-in for the system: a link to itself, and a folder in the place of the file."""
    results = Store(tmp_path)
    path = results.append_losses(KEY, losses(0), HERE)
    path.unlink()
    path.symlink_to(path)
    with pytest.raises(LabError, match="cannot be read"):
        results.append_losses(KEY, losses(1), HERE)
    assert path.is_symlink()
    path.unlink()
    path.mkdir()
    with pytest.raises(LabError, match="cannot be read"):
        results.append_losses(KEY, losses(1), HERE)


def test_a_memory_that_is_too_small_is_no_damage(tmp_path, monkeypatch):
    results = Store(tmp_path)
    path = results.append_losses(KEY, losses(0), HERE)

    def full(*_, **__):
        raise parquet.pa.ArrowMemoryError("malloc of size 64 failed")

    monkeypatch.setattr(parquet.StoredTable, "frame", full)
    with pytest.raises(LabError, match=r"memory does not hold it"):
        results.append_losses(KEY, losses(1), HERE)
    assert files(tmp_path) == [path.relative_to(tmp_path).as_posix()]


def test_a_run_stops_at_a_file_that_cannot_be_read(tmp_path, run, tiny_model, text_file, monkeypatch):
    arguments = ["evaluate", "softmax()", "--model", tiny_model, "--corpus", text_file, "--context", 16]
    arguments += ["--device", "cpu", "--results", tmp_path / "r"]
    assert run(*arguments, "--blocks", 4)[0] == 0
    (path,) = (tmp_path / "r" / "losses").rglob("*.parquet")
    before = path.read_bytes()
    refuse(monkeypatch, "read_bytes", path)
    code, out, err = run(*arguments, "--blocks", 6)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"{path} cannot be read (Permission denied)" in err
    monkeypatch.undo()
    assert path.read_bytes() == before


# Folders


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_a_folder_that_cannot_be_read_is_named(tmp_path, run, monkeypatch, level):
    results = Store(tmp_path)
    path = results.append_losses(KEY, losses(0), HERE)
    folder = path.parents[level]
    refuse(monkeypatch, "iterdir", folder)
    code, out, err = run("results", "--results", tmp_path)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"{folder} cannot be read (Permission denied)" in err
    assert len(results.losses(KEY)) == 1  # which needs no listing
    if level < 3:
        assert results.frame(model="another").empty  # a folder that is not asked for is not opened


def test_a_folder_of_tables_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    path = Store(tmp_path).put_table(zero_shot_records.KIND, {"model": "a"}, losses(0), HERE)
    refuse(monkeypatch, "iterdir", path.parent)
    for act in (lambda: Store(tmp_path).tables("zero_shot"), lambda: zero_shot_records.settings(str(tmp_path))):
        with pytest.raises(LabError, match=rf"{path.parent} cannot be read"):
            act()


def test_a_name_that_no_folder_can_have_is_one_sentence(tmp_path, run, tiny_model, text_file, monkeypatch):
    name = str(tmp_path / LONG)
    code, out, err = run(
        "evaluate", "softmax()", "--model", tiny_model, "--corpus", text_file, "--device", "cpu", "--results", name
    )
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"results folder {name} cannot be looked at (File name too long)" in err
    with pytest.raises(LabError, match="cannot be looked at"):
        zero_shot_records.settings(name)
    refuse(monkeypatch, "stat", tmp_path / "inside" / "results")
    with pytest.raises(LabError, match=r"cannot be looked at \(Permission denied\); give one that can"):
        Store(tmp_path / "inside" / "results")


# Damage


@pytest.mark.parametrize("damage, reason", DAMAGE, ids=[damage.__name__ for damage, _ in DAMAGE])
def test_a_bad_file_is_kept_when_it_is_written_over(tmp_path, damage, reason):
    results = Store(tmp_path)
    path = results.append_losses(KEY, losses(0, 1), HERE)
    damage(path)
    bad = path.read_bytes()
    kept = path.with_name(f"{path.name}.bad")
    with pytest.warns(UserWarning, match=rf"is kept as {kept.name} .*{reason}") as caught:
        results.append_losses(KEY, losses(5), HERE)
    assert len(caught) == 1 and Path(caught[0].filename).name == Path(__file__).name
    assert kept.read_bytes() == bad
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert results.frame()["block"].tolist() == results.losses(KEY)["block"].tolist() == [5]


def test_every_bad_file_is_kept_and_none_is_read(tmp_path):
    results = Store(tmp_path)
    key = {"model": "a"}
    truncate(results.put_table("kind", key, pd.DataFrame({"x": [1.0]}), HERE))
    for value, kept in ((2.0, "bad"), (3.0, "bad2")):
        with pytest.warns(UserWarning, match=rf"is kept as .*\.parquet\.{kept} "):
            path = results.put_table("kind", key, pd.DataFrame({"x": [value]}), HERE)
        truncate(path)
    with pytest.warns(UserWarning, match=r"is kept as .*\.parquet\.bad3 "):
        results.update_table("kind", key, pd.DataFrame({"x": [4.0]}), HERE, by="x")
    assert sorted(p.suffix for p in path.parent.iterdir()) == [".bad", ".bad2", ".bad3", ".parquet"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [frame["x"].tolist() for _, frame, _ in results.tables("kind")] == [[4.0]]


def test_a_write_that_fails_leaves_the_bad_file_in_its_place(tmp_path, monkeypatch):
    results = Store(tmp_path)
    path = results.append_losses(KEY, losses(0), HERE)
    truncate(path)
    before = path.read_bytes()

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(LabError, match="No space left"):
        results.append_losses(KEY, losses(1), HERE)
    assert files(tmp_path) == [path.relative_to(tmp_path).as_posix()]
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "segments",
    [5, None, "x", [1], [{}], {"blocks": [0]}, [{"blocks": [0]}, {}], [{"blocks": [0], "provenance": 5}]]
    + [[{"blocks": blocks, "provenance": {}}] for blocks in (None, 5, "0", ["0"], [True], [[0]])],
    ids=str,
)
def test_a_provenance_that_is_none_is_damage(tmp_path, segments):
    results = Store(tmp_path)
    path = results.append_losses(KEY, losses(0, 1), HERE)
    key, frame, _ = parquet.read(path)
    parquet.write(path, frame, key, segments)
    for look in (lambda: results.losses(KEY), results.frame, results.provenance):
        with pytest.warns(UserWarning, match="its provenance is no list of blocks and how they were made"):
            assert look().empty
    with pytest.warns(UserWarning, match=r"is kept as .*\.bad .*its provenance is no list"):
        results.append_losses(KEY, losses(2), HERE)
    assert parquet.read(path)[2] == [{"blocks": [2], "provenance": HERE}]


@pytest.mark.parametrize("provenance", [5, None, [1], [{}]], ids=str)
def test_a_table_with_a_provenance_that_is_none_is_damage(tmp_path, provenance):
    results = Store(tmp_path)
    path = results.put_table("kind", {"model": "a"}, losses(0), HERE)
    key, frame, _ = parquet.read(path)
    parquet.write(path, frame, key, provenance)
    with pytest.warns(UserWarning, match="its provenance is no mapping"):
        assert results.tables("kind") == []


@pytest.mark.parametrize(
    "column, said",
    [
        ([{"a": 1.0}, {"a": 2.0}], "nll struct<a: double>"),
        (["1.0", "2.0"], "nll (large_)?string"),
        ([[1.0], [2.0]], "nll list<"),
        ([True, False], "nll bool"),
        (np.array([1, 2], "datetime64[s]"), "nll timestamp"),
    ],
    ids=["struct", "text", "list", "bool", "time"],
)
def test_columns_of_another_type_are_damage(tmp_path, column, said):
    results = Store(tmp_path)
    path = results.append_losses(KEY, losses(0, 1), HERE)
    key, frame, provenance = parquet.read(path)
    parquet.write(path, frame.assign(nll=column), key, provenance)
    with pytest.warns(UserWarning, match=rf"its columns are block int64, {said}.* should be block int64, nll double"):
        assert results.losses(KEY).empty
    with pytest.warns(UserWarning, match=r"is kept as .*\.bad "):
        results.append_losses(KEY, losses(2), HERE)
    assert results.losses(KEY)["block"].tolist() == [2]


@pytest.mark.parametrize(
    "before, after", [(b'"numpy_type"', b'"numpy_tipe"'), (b'"numpy_type": "i', b'"numpy_type": "j')]
)
def test_damage_to_the_notes_that_pandas_left_is_found(tmp_path, before, after):
    """No checksum covers them: pandas itself stumbles, with a KeyError or a TypeError."""
    results = Store(tmp_path)
    path = results.put_table("kind", {"model": "a"}, losses(0), HERE)
    schema = parquet.pq.read_schema(path)
    metadata = schema.metadata | {b"pandas": schema.metadata[b"pandas"].replace(before, after)}
    assert metadata != schema.metadata
    parquet.pq.write_table(parquet.pq.read_table(path).replace_schema_metadata(metadata), path)
    with pytest.warns(UserWarning, match=r"its columns cannot be read \((Key|Type)Error"):
        assert results.tables("kind") == []


def test_a_name_that_is_no_unicode_is_refused(tmp_path):
    """As a file name that is not UTF-8 comes to Python."""
    with pytest.raises(LabError, match="cannot be stored as JSON"):
        Store(tmp_path).put_table("kind", {"corpus": "caf\udce9"}, losses(0), {})
    assert files(tmp_path) == []


@pytest.mark.parametrize("kind", [LOSSES, VOCABULARY], ids=lambda kind: kind.folder)
def test_what_is_committed_is_all_good(kind):
    root = Path(__file__).parents[1] / "results"
    if not root.is_dir():
        pytest.skip("the results are not here")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        paths = {root / path for path in Store(root, kind).provenance()["path"]}
    assert paths == set((root / kind.folder).rglob("*.parquet"))
    assert not list(root.rglob("*.bad*"))
