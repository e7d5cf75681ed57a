"""A file is written whole or not at all."""

import os
import stat

import pytest

from softmaxlab import files


def test_a_file_is_written_for_all_to_read_and_nothing_is_left_beside_it(tmp_path):
    path = tmp_path / "folder" / "a.json"
    files.write_text(path, "½")
    files.write_text(path, "whole")
    assert path.read_bytes() == b"whole" and stat.S_IMODE(path.stat().st_mode) == 0o644
    assert os.listdir(path.parent) == ["a.json"]


def test_what_was_there_survives_a_failure(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    files.write_text(path, "before")

    def refuse(*_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="no space left"):
        files.write_text(path, "after")
    assert path.read_text() == "before" and os.listdir(tmp_path) == ["a.json"]
