"""The store: what is written is whole or absent, keyed by what determines it, and never silently wrong."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from softmaxlab import losskey, parquet, store
from softmaxlab.errors import LabError
from softmaxlab.store import LossKey, Store

KEY = LossKey(
    model="smollm2-135m",
    model_id="gguf:sha256:aa",
    corpus="wikitext103",
    corpus_id="text:sha256:bb",
    context=2048,
    bos="stream",
    dtype="float32",
    backend="reference",
    condition="grid(K=32,R=4)",
    condition_json='{"K":32,"R":4}',
)
HERE = {"device": "cpu", "versions": {"torch": "2.11"}}

# A writer in another process: appends blocks FIRST, FIRST + STEP, … and says each one that is stored.
WRITER = """
import json, sys
import pandas as pd
from softmaxlab.store import LossKey, Store
root, key, first, step, n = json.loads(sys.argv[1])
{patch}
for block in range(first, n, step):
    rows = pd.DataFrame({{"block": [block], "nll": [block / 7], "predictions": [2047]}})
    Store(root).append_losses(LossKey(**key), rows, {{"writer": first}})
    print(block, flush=True)
"""


def losses(*blocks, shift=0.0):
    return pd.DataFrame({"block": blocks, "nll": [b / 7 + shift for b in blocks], "predictions": [2047] * len(blocks)})


def other(**changes):
    return dataclasses.replace(KEY, **changes)


def files(root):
    """Everything in the results folder but the lock."""
    return sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file() and p.name != ".lock")


def writer(root, first=0, step=1, n=10_000, patch=""):
    argument = json.dumps([str(root), dataclasses.asdict(KEY), first, step, n])
    return subprocess.Popen(
        [sys.executable, "-c", WRITER.format(patch=patch), argument],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(store.__file__).parents[1])},
    )


def test_round_trip_is_sorted_exact_and_typed(tmp_path):
    results = Store(tmp_path / "new" / "results")
    assert not results.root.exists() and results.losses(KEY).empty
    path = results.append_losses(KEY, losses(5, 1), HERE)
    results.append_losses(KEY, losses(0, 3), HERE)
    expected = losses(0, 1, 3, 5).astype({"block": "int64", "predictions": "int64"})
    pd.testing.assert_frame_equal(results.losses(KEY), expected, check_exact=True)
    assert list(results.losses(other(dtype="bfloat16")).columns) == ["block", "nll", "predictions"]
    name = f"grid-K=32-R=4-{KEY.digest[:12]}.parquet"
    assert path == results.root / "losses" / "smollm2-135m" / "wikitext103" / "2048" / name
    assert files(results.root) == [path.relative_to(results.root).as_posix()]


def test_key_and_provenance_live_in_the_file(tmp_path):
    path = Store(tmp_path).append_losses(KEY, losses(0), HERE)
    metadata = pq.read_schema(path).metadata
    assert json.loads(metadata[b"softmaxlab.key"]) == dataclasses.asdict(KEY) | {"protocol": losskey.PROTOCOL}
    assert json.loads(metadata[b"softmaxlab.provenance"]) == [{"blocks": [0], "provenance": HERE}]


def test_provenance_has_one_segment_for_each_way_of_making_rows(tmp_path):
    results = Store(tmp_path)
    for block, device in ((0, "cpu"), (1, "cuda"), (2, "cpu")):
        results.append_losses(KEY, losses(block), HERE | {"device": device})
    segments = parquet.read(results._path(KEY))[2]
    assert [(s["blocks"], s["provenance"]["device"]) for s in segments] == [([0, 2], "cpu"), ([1], "cuda")]
    table = results.provenance()
    row = table.iloc[0]
    assert row[["blocks", "device", "versions.torch", "digest"]].tolist() == [
        3,
        "cpu; cuda",
        "2.11",
        KEY.digest,
    ]
    assert row["condition"] == KEY.condition and row["model_id"] == KEY.model_id
    assert (tmp_path / row["path"]).is_file() and table.columns[-1] == "path"
    nothing = results.provenance(model="none")
    assert nothing.empty and {"digest", "blocks", "path"} <= set(nothing.columns)


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(LossKey)])
def test_digest_depends_on_what_determines_the_number_and_on_nothing_else(name):
    changed = other(**{name: 4096 if name == "context" else "another"})
    readable = name in ("model", "corpus", "condition")
    assert (changed.digest == KEY.digest) is readable


def test_digest_depends_on_the_protocol(monkeypatch):
    before = KEY.digest
    monkeypatch.setattr(losskey, "PROTOCOL", losskey.PROTOCOL + 1)
    assert KEY.digest != before


@pytest.mark.parametrize("changes", [{"context": "2048"}, {"context": True}, {"model_id": None}, {"bos": 1}])
def test_key_refuses_other_types(changes):
    with pytest.raises(LabError, match=f"{next(iter(changes))} of a loss key must be"):
        other(**changes)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("grid(K=32,R=4)", "grid-K=32-R=4"),
        ("softmax()", "softmax"),
        ("topk(f=0.5,weights=uniform)@0-5,7", "topk-f=0.5-weights=uniform-@0-5-7"),
        ("Qwen/Qwen2.5-1.5B", "Qwen-Qwen2.5-1.5B"),
        ("../../etc/passwd", "etc-passwd"),
        ("..", "unnamed"),
        ("", "unnamed"),
        ("日本", "unnamed"),
        ("a" * 300, "a" * 80),
    ],
)
def test_slug(text, expected):
    assert parquet.slug(text) == expected


def test_names_never_leave_the_folder(tmp_path):
    results = Store(tmp_path / "results")
    path = results.append_losses(other(model="../../up", corpus="/", condition="../x"), losses(0), {})
    assert results.root in path.resolve().parents
    assert results.frame(model="../../up")["nll"].tolist() == [0.0]


# Merging


def test_equal_blocks_are_ignored_and_others_refused(tmp_path):
    results = Store(tmp_path)
    path = results.append_losses(KEY, losses(0, 1), HERE)
    before = path.read_bytes()
    results.append_losses(KEY, losses(1), {"device": "elsewhere"})
    assert path.read_bytes() == before
    with pytest.raises(LabError, match=r"block 1 of grid\(K=32,R=4\).*loss 0\.1428.* given as 0\.2428"):
        results.append_losses(KEY, losses(1, 2, shift=0.1), HERE)
    with pytest.raises(LabError, match=r"over 2047 predictions and was now given as .* over 3"):
        results.append_losses(KEY, losses(1).assign(predictions=3), HERE)
    assert path.read_bytes() == before
    results.append_losses(KEY, losses(1, 2), HERE)
    assert results.losses(KEY)["block"].tolist() == [0, 1, 2]


def test_rows_that_contradict_each_other_are_refused(tmp_path):
    rows = pd.concat([losses(0), losses(0, shift=1)])
    with pytest.raises(LabError, match="block 0"):
        Store(tmp_path).append_losses(KEY, rows, HERE)
    Store(tmp_path).append_losses(KEY, pd.concat([losses(0), losses(0)]), HERE)
    assert len(Store(tmp_path).losses(KEY)) == 1


@pytest.mark.parametrize(
    "rows, words",
    [
        (losses(3, 4).assign(nll=[1.0, np.nan]), r"loss of grid\(K=32,R=4\) in block 4 is nan"),
        (losses(3).assign(nll=np.inf), "in block 3 is inf"),
        (losses(-1), "block must be integers of at least 0"),
        (losses(0).assign(block=[0.5]), "block must be integers"),
        (losses(0).assign(predictions=0), "predictions must be integers of at least 1"),
        (losses(0).drop(columns="nll"), "columns block, nll, predictions, and these have block, predictions"),
        (losses(0).assign(extra=1), "these have block, nll, predictions, extra"),
    ],
)
def test_rows_that_are_no_losses_write_nothing(tmp_path, rows, words):
    with pytest.raises(LabError, match=words):
        Store(tmp_path / "r").append_losses(KEY, rows, HERE)
    assert not (tmp_path / "r").exists()


def test_provenance_that_is_no_json_writes_nothing(tmp_path):
    for provenance in ({"device": object()}, {"seconds": float("nan")}):
        with pytest.raises(LabError, match="cannot be stored as JSON"):
            Store(tmp_path / "r").append_losses(KEY, losses(0), provenance)
    assert not (tmp_path / "r").exists()


# Killed writers, several writers


@pytest.mark.parametrize("delay", [0.0, 0.003, 0.011])
def test_kill_9_loses_nothing_that_was_acknowledged(tmp_path, delay):
    process = writer(tmp_path)
    said = [int(process.stdout.readline()) for _ in range(4)]
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    rest = process.stdout.read().split()
    assert process.wait() == -signal.SIGKILL
    said += map(int, rest)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stored = Store(tmp_path).losses(KEY)
    # The kill may fall between the rename and the word about it.
    assert stored["block"].tolist() in (said, [*said, len(said)])
    assert (stored["nll"] == stored["block"] / 7).all()
    Store(tmp_path).append_losses(KEY, losses(9000), HERE)  # the lock of the dead is free
    assert len(Store(tmp_path).losses(KEY)) == len(stored) + 1


@pytest.mark.parametrize("where", ["fsync", "replace"])
def test_kill_9_in_the_middle_of_a_write_leaves_the_old_file(tmp_path, where):
    """The process is stopped for certain inside the write: the third one hangs before `where`."""
    patch = f"""
import os, time
real, calls = os.{where}, []
def hang(*arguments):
    calls.append(1)
    if len(calls) == {5 if where == "fsync" else 3}:  # a write syncs its file and its folder
        print("hanging", flush=True)
        time.sleep(600)
    return real(*arguments)
os.{where} = hang
"""
    process = writer(tmp_path, patch=patch)
    assert [process.stdout.readline().strip() for _ in range(3)] == ["0", "1", "hanging"]
    process.kill()
    process.communicate()
    results = Store(tmp_path)
    assert [Path(name).suffix for name in files(tmp_path)] == [".tmp", ".parquet"]
    assert results.losses(KEY)["block"].tolist() == [0, 1]
    assert results.frame()["block"].tolist() == [0, 1]
    results.append_losses(KEY, losses(2), HERE)
    assert results.losses(KEY)["block"].tolist() == [0, 1, 2]
    assert [Path(name).suffix for name in files(tmp_path)] == [".parquet"]  # the leftover went with it


def test_two_writers_on_one_condition_lose_nothing(tmp_path):
    processes = [writer(tmp_path, first=i, step=2, n=40) for i in (0, 1)]
    for process in processes:
        process.communicate(timeout=120)
        assert process.returncode == 0
    results = Store(tmp_path)
    assert results.losses(KEY)["block"].tolist() == list(range(40))
    segments = {s["provenance"]["writer"]: s["blocks"] for s in parquet.read(results._path(KEY))[2]}
    assert segments == {i: list(range(i, 40, 2)) for i in (0, 1)}


def test_a_lock_that_is_not_freed_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "LOCK_TIMEOUT", 0.05)
    with parquet.locked(tmp_path), pytest.raises(LabError, match="another process has held"):
        Store(tmp_path).append_losses(KEY, losses(0), HERE)


def test_an_exception_in_the_write_leaves_no_temporary_file(tmp_path, monkeypatch):
    results = Store(tmp_path)
    path = results.append_losses(KEY, losses(0), HERE)
    before = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    for target in ("fsync", "replace"):
        with monkeypatch.context() as patched:
            patched.setattr(os, target, full)
            with pytest.raises(LabError, match="No space left on device"):
                results.append_losses(KEY, losses(1), HERE)
        assert files(tmp_path) == [path.relative_to(tmp_path).as_posix()]
        assert path.read_bytes() == before

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(pq, "write_table", interrupt)
        results.append_losses(KEY, losses(1), HERE)
    assert files(tmp_path) == [path.relative_to(tmp_path).as_posix()]
    results.append_losses(KEY, losses(1), HERE)  # the lock was let go


# Folders that cannot hold results


def test_a_file_is_no_results_folder(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(LabError, match=r"results folder .*file is a file"):
        Store(tmp_path / "file")
    below = Store(tmp_path / "file" / "results")
    assert below.losses(KEY).empty
    for act in (below.check_writable, lambda: below.append_losses(KEY, losses(0), HERE)):
        with pytest.raises(LabError, match="cannot be written to"):
            act()


def test_a_read_only_folder_can_be_read_and_not_written(tmp_path, monkeypatch):
    results = Store(tmp_path)
    results.append_losses(KEY, losses(0), HERE)

    def refuse(self, **_):
        raise PermissionError(13, "Permission denied", str(tmp_path))

    # Permissions do not stop root, so the refusal comes from the lock file's opening.
    monkeypatch.setattr(parquet.filelock.FileLock, "acquire", refuse)
    with pytest.raises(LabError, match=r"cannot be written to \(Permission denied\)"):
        results.append_losses(KEY, losses(1), HERE)
    with pytest.raises(LabError, match="Permission denied"):
        results.check_writable()
    assert results.losses(KEY)["block"].tolist() == [0]


def test_check_writable_makes_the_folder(tmp_path):
    Store(tmp_path / "a" / "b").check_writable()
    assert (tmp_path / "a" / "b").is_dir()


# Files that cannot be used


def truncate(path):
    path.write_bytes(path.read_bytes()[:-20])


def flip(path):
    """Change one bit of a stored loss; the file stays well-formed, so only a checksum can tell."""
    data = bytearray(path.read_bytes())
    column = pq.read_metadata(path).row_group(0).column(1)
    assert column.path_in_schema == "nll"
    data[column.data_page_offset - 1] ^= 1  # the last byte of the page of values
    path.write_bytes(bytes(data))
    assert (pq.read_table(path)["nll"].to_numpy() != [0, 1 / 7]).any()


def empty_file(path):
    path.write_bytes(b"")


def text_file(path):
    path.write_text("block,nll\n0,1.0\n")


def foreign_parquet(path):
    losses(0, 1).to_parquet(path)


def foreign_key(path):
    elsewhere = Store(path.parent / "elsewhere").append_losses(other(condition_json="{}"), losses(0, 9), {})
    shutil.move(elsewhere, path)
    shutil.rmtree(path.parent / "elsewhere")


def other_protocol(path):
    key, frame, provenance = parquet.read(path)
    parquet.write(path, frame, key | {"protocol": 0}, provenance)


def nan_inside(path):
    key, frame, provenance = parquet.read(path)
    parquet.write(path, frame.assign(nll=np.nan), key, provenance)


def twice(path):
    key, frame, provenance = parquet.read(path)
    parquet.write(path, pd.concat([frame, frame]), key, provenance)


def ill_typed_key(path):
    key, frame, provenance = parquet.read(path)
    parquet.write(path, frame, key | {"context": "2048"}, provenance)


DAMAGE = [
    (truncate, "cannot be read"),
    (flip, "cannot be read"),
    (empty_file, "cannot be read"),
    (text_file, "cannot be read"),
    (foreign_parquet, "not written by softmaxlab"),
    (foreign_key, "its key belongs to another file name"),
    (other_protocol, "it is of protocol 0"),
    (nan_inside, "is nan"),
    (twice, "its blocks repeat"),
    (ill_typed_key, "context of a loss key must be int"),
]


@pytest.mark.parametrize("damage, reason", DAMAGE, ids=[damage.__name__ for damage, _ in DAMAGE])
def test_a_bad_file_is_reported_not_used_and_replaced(tmp_path, damage, reason):
    results = Store(tmp_path)
    results.append_losses(other(condition="softmax()", condition_json="s"), losses(0, 1, 2), HERE)
    path = results.append_losses(KEY, losses(0, 1), HERE)
    damage(path)
    for look in (lambda: results.losses(KEY), lambda: results.frame(condition=KEY.condition)):
        with pytest.warns(UserWarning, match=reason) as caught:
            assert look().empty
        assert len(caught) == 1 and str(path) in str(caught[0].message)
    with pytest.warns(UserWarning, match=reason):
        assert results.frame()["condition"].unique().tolist() == ["softmax()"]
    with pytest.warns(UserWarning, match=reason):
        results.append_losses(KEY, losses(0, 1, shift=1), HERE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert results.losses(KEY)["nll"].tolist() == [1.0, 1 / 7 + 1]


def test_a_copied_or_renamed_file_is_foreign_where_it_lies(tmp_path):
    results = Store(tmp_path)
    path = results.append_losses(KEY, losses(0), HERE)
    for target in (
        path.with_name(f"softmax-{KEY.digest[:12]}.parquet"),
        tmp_path / "losses" / "another-model" / "wikitext103" / "2048" / path.name,
    ):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
        with pytest.warns(UserWarning, match="another file name"):
            assert len(results.frame()) == 1
        target.unlink()


def test_a_digest_that_agrees_in_its_name_only_is_not_used(tmp_path, monkeypatch):
    """Twelve digits stand in the name; the key inside decides."""
    results = Store(tmp_path)
    results.append_losses(KEY, losses(0), HERE)
    twin = other(model_id="gguf:sha256:cc")
    true_path = Store._path
    monkeypatch.setattr(Store, "_path", lambda self, key: true_path(self, KEY))
    assert results.losses(twin).empty


# Reading many


@pytest.fixture
def several(tmp_path):
    results = Store(tmp_path)
    for model in ("a", "b"):
        for context in (64, 128):
            for condition in ("softmax()", "topk(f=0.5)"):
                key = other(model=model, model_id=model, context=context)
                key = dataclasses.replace(key, condition=condition, condition_json=condition)
                results.append_losses(key, losses(1, 0, shift=context), HERE)
    return results


def test_frame_is_tidy(several):
    frame = several.frame()
    assert tuple(frame.columns) == store.COLUMNS and len(frame) == 16
    assert not frame.duplicated(["model", "context", "condition", "block"]).any()
    assert (frame["nll"] == frame["block"] / 7 + frame["context"]).all()
    assert frame["block"].tolist()[:4] == [0, 1, 0, 1]
    nothing = several.frame(model="c")
    assert nothing.empty and nothing.dtypes.equals(frame.dtypes)


@pytest.mark.parametrize(
    "filters, n",
    [
        ({"model": "a"}, 8),
        ({"model": ["a", "b"], "context": 64}, 8),
        ({"context": [64, 128], "condition": "softmax()"}, 8),
        ({"context": "64", "model": "b", "condition": ["topk(f=0.5)"]}, 2),
        ({"model_id": "a", "bos": "stream", "dtype": None}, 8),
        ({"dtype": "bfloat16"}, 0),
        ({"condition": []}, 0),
    ],
)
def test_filters(several, filters, n):
    frame = several.frame(**filters)
    assert len(frame) == n
    assert several.provenance(**filters)["blocks"].sum() == n
    for name, wanted in filters.items():
        if name in frame and wanted:
            assert set(map(str, frame[name])) <= set(map(str, wanted if isinstance(wanted, list) else [wanted]))


def test_unknown_filters_are_refused(several):
    with pytest.raises(LabError, match=r"unknown filter 'modell'; .*model, corpus, context"):
        several.frame(modell="a")


def test_two_revisions_under_one_name_are_not_mixed(tmp_path):
    results = Store(tmp_path)
    newer = other(model_id="gguf:sha256:cc")
    for key in (KEY, newer):
        results.append_losses(key, losses(0, shift=len(key.model_id)), HERE)
    with pytest.raises(LabError, match="same names and differ in model_id"):
        results.frame()
    assert len(results.frame(model_id=newer.model_id)) == 1
    assert len(results.frame(digest=KEY.digest)) == 1
    assert len(results.provenance()) == 2


def test_filters_on_names_open_only_their_folders(several, monkeypatch):
    opened = []
    real = parquet.opened
    monkeypatch.setattr(parquet, "opened", lambda path: opened.append(path) or real(path))
    several.frame(model="a", context=64)
    assert len(opened) == 2 and all("/a/wikitext103/64/" in p.as_posix() for p in opened)
    opened.clear()
    several.frame()
    assert len(opened) == len(set(opened)) == 8  # each file once


# Other tables


def test_tables_round_trip(tmp_path):
    results = Store(tmp_path)
    frame = pd.DataFrame({"layer": [0, 1], "jsd": [0.5, np.nan], "name": ["x", "y"]}, index=[7, 8])
    key = {"model": "a", "windows": (0, 1), "alpha": 0.1}
    path = results.put_table("divergences", key, frame, HERE)
    assert path.parent == tmp_path / "divergences" and path.name.startswith("0.1-a-0-1-")
    expected = frame.reset_index(drop=True)
    pd.testing.assert_frame_equal(results.get_table("divergences", key), expected)
    pd.testing.assert_frame_equal(results.get_table("divergences", dict(reversed(key.items()))), expected)
    assert results.get_table("divergences", key | {"alpha": 0.1 + 1e-16}) is None
    results.put_table("divergences", key | {"alpha": 0.2}, frame, HERE)
    results.put_table("divergences", key, frame[:1], {})
    assert [(k["alpha"], len(f), p) for k, f, p in results.tables("divergences")] == [
        (0.1, 1, {}),
        (0.2, 2, HERE),
    ]
    assert results.tables("nothing") == []
    assert results.frame().empty


def test_an_update_keeps_the_rows_of_other_writers(tmp_path):
    results = Store(tmp_path)

    def cost(**seconds):
        frame = pd.DataFrame({"condition": list(seconds), "seconds": list(seconds.values())})
        return results.update_table("cost", {"model": "a"}, frame, {"last": list(seconds)}, by="condition")

    cost(a=1.0, b=2.0)
    path = cost(b=3.0, c=4.0)
    assert results.get_table("cost", {"model": "a"}).to_dict("list") == {
        "condition": ["a", "b", "c"],
        "seconds": [1.0, 3.0, 4.0],
    }
    assert [made for _, _, made in results.tables("cost")] == [{"last": ["b", "c"]}]
    truncate(path)
    with pytest.warns(UserWarning, match="cannot be read"):
        cost(d=5.0)
    assert len(results.get_table("cost", {"model": "a"})) == 1


def test_bad_tables_are_reported(tmp_path):
    results = Store(tmp_path)
    key = {"model": "a"}
    path = results.put_table("kind", key, losses(0), {})
    shutil.copy(path, path.with_name("copy.parquet"))
    with pytest.warns(UserWarning, match=r"copy\.parquet is not used .*another file name"):
        assert len(results.tables("kind")) == 1
    truncate(path)
    with pytest.warns(UserWarning, match="cannot be read"):
        assert results.get_table("kind", key) is None


@pytest.mark.parametrize("kind", ["losses", "", "a/b", "..", "a b"])
def test_kinds_are_folder_names(tmp_path, kind):
    with pytest.raises(LabError, match="cannot name a kind of table"):
        Store(tmp_path).put_table(kind, {}, losses(0), {})


def test_what_no_file_can_hold_is_refused(tmp_path):
    results = Store(tmp_path)
    with pytest.raises(LabError, match="cannot be stored as JSON"):
        results.put_table("kind", {"x": object()}, losses(0), {})
    with pytest.raises(LabError, match="cannot be stored as Parquet"):
        results.put_table("kind", {}, pd.DataFrame({"x": [object()]}), {})
    assert files(tmp_path) == []
