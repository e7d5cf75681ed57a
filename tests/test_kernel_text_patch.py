"""The text patch of an installed copy: applied whole or told apart, and taken out byte for byte."""

import importlib.util
import os
import runpy
import shutil
import sys
from pathlib import Path

import pytest

from softmaxlab.errors import LabError
from softmaxlab.fa4 import compile as compiler
from softmaxlab.fa4 import source, text_patch

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("flash_attn") is None, reason="FlashAttention-4 is not installed"
)
SCRIPT = Path(__file__).parents[1] / "kernel" / "patch_fa4.py"


@pytest.fixture
def copy(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("SOFTMAXLAB_CACHE", str(tmp_path / "cache"))
    shutil.copytree(
        source.installed(), tmp_path / "copy" / "flash_attn" / "cute", ignore=shutil.ignore_patterns("*.pyc")
    )
    return tmp_path / "copy"


def content(copy: Path) -> dict[str, bytes]:
    return {str(p.relative_to(copy)): p.read_bytes() for p in sorted(copy.rglob("*")) if p.is_file()}


@pytest.fixture
def script(copy, monkeypatch, capsys):
    """Run the script; gives its exit code, output and errors."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [SCRIPT.name, *arguments, "--package", str(copy)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        return ended.value.code, *capsys.readouterr()

    return run


def test_apply_and_revert_restore_every_byte(copy):
    before = content(copy)
    assert text_patch.status(copy).name == "clean"
    state = text_patch.apply("g(3)", copy)
    assert (state.name, state.variant, set(state.files.values())) == ("applied", "g(3)", {"patched"})
    changed = {n for n, b in content(copy).items() if before.get(n) != b}
    assert {Path(n).name for n in changed} == {
        text_patch.EDITED,
        text_patch.ADDED,
        text_patch.ORIGINAL,
        text_patch.MANIFEST,
    }
    compile((copy / "flash_attn" / "cute" / "softmax.py").read_text(), "softmax.py", "exec")
    assert text_patch.revert(copy).name == "clean" and content(copy) == before
    assert text_patch.revert(copy).name == "clean" and content(copy) == before


def test_a_second_apply_is_refused(copy):
    text_patch.apply("h15", copy)
    standing = content(copy)
    with pytest.raises(LabError, match=r"so g\(1\) was not applied: revert it first: applied \(h15\)"):
        text_patch.apply("g(1)", copy)
    assert content(copy) == standing
    with pytest.raises(LabError, match="it was patched as text: revert that first"):
        source.checked(copy)


@pytest.mark.parametrize("writes", range(4))
@pytest.mark.parametrize("command", ["apply", "revert"])
def test_an_interruption_is_named_and_repaired(copy, monkeypatch, writes, command):
    """Stop before each file that is written or removed; what is left is partial, and revert repairs it."""
    before = content(copy)
    if command == "revert":
        text_patch.apply("h15", copy)
    done = []

    def stop(real):
        def step(*arguments, **named):
            if len(done) == writes:
                raise KeyboardInterrupt
            done.append(arguments)
            return real(*arguments, **named)

        return step

    with monkeypatch.context() as interrupted:
        interrupted.setattr(text_patch, "_write", stop(text_patch._write))
        if command == "revert":
            interrupted.setattr(Path, "unlink", stop(Path.unlink))
        with pytest.raises(KeyboardInterrupt):
            text_patch.apply("h15", copy) if command == "apply" else text_patch.revert(copy)
    state = text_patch.status(copy)
    untouched = "clean" if command == "apply" else "applied"
    assert state.name == (untouched if writes == 0 else "partial"), state
    if state.name == "partial":
        assert "partial" in str(state) and text_patch.EDITED in str(state)
        with pytest.raises(LabError, match="revert it first: partial"):
            text_patch.apply("g(1)", copy)
    for leftover in copy.rglob("*.tmp"):
        pytest.fail(f"{leftover} was left")
    assert text_patch.revert(copy).name == "clean" and content(copy) == before


@pytest.mark.parametrize("command", ["apply", "revert"])
def test_a_kill_is_named_and_repaired(copy, monkeypatch, command):
    """End the process at each step, without any of its clean-up; what is left is told apart, and revert repairs it."""
    before, step, finished = content(copy), 0, False
    while not finished:
        if command == "revert":
            text_patch.apply("h15", copy)
        pid = os.fork()
        if not pid:
            done = []

            def killed(real, at=step, done=done):
                def call(*arguments, **named):
                    if len(done) == at:
                        os._exit(9)
                    done.append(0)
                    return real(*arguments, **named)

                return call

            for owner, name in ((os, "replace"), (os, "fsync"), (Path, "unlink")):
                setattr(owner, name, killed(getattr(owner, name)))
            try:
                text_patch.apply("h15", copy) if command == "apply" else text_patch.revert(copy)
            finally:
                os._exit(0)
        finished = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        state = text_patch.status(copy)
        assert state.name in ("partial", "applied" if command == "apply" else "clean"), state
        if state.name != "clean":
            with pytest.raises(LabError, match="revert it first"):
                text_patch.apply("g(1)", copy)
        assert text_patch.revert(copy).name == "clean" and content(copy) == before
        step += 1
    assert step > 5


def test_what_is_no_manifest_and_what_is_a_link_are_refused(copy):
    folder = copy / "flash_attn" / "cute"
    for text in ("", "[]", "{}", '{"variant": 1, "files": {}}'):
        (folder / text_patch.MANIFEST).write_text(text)
        with pytest.raises(LabError, match=r"softmaxlab-patch\.json is no manifest of a text patch: remove it"):
            text_patch.status(copy)
    (folder / text_patch.MANIFEST).unlink()
    (folder / text_patch.EDITED).rename(folder / "elsewhere.py")
    (folder / text_patch.EDITED).symlink_to(folder / "elsewhere.py")
    with pytest.raises(LabError, match=r"softmax\.py is a link to a file that others may use"):
        text_patch.apply("h15", copy)
    assert text_patch.status(copy).name == "clean"


def test_an_unknown_version_and_an_unknown_text_are_refused(copy, monkeypatch):
    before = content(copy)
    with monkeypatch.context() as other:
        other.setattr(source, "version", lambda package=None: "4.0.0b99")
        with pytest.raises(LabError, match=r"so h15 was not applied: reinstall it first: unknown .*is 4\.0\.0b99, but"):
            text_patch.apply("h15", copy)
    assert content(copy) == before
    path = copy / "flash_attn" / "cute" / "softmax.py"
    path.write_text(path.read_text().replace("ex2_emu_freq == 0", "ex2_emu_freq == 1"))
    with pytest.raises(LabError, match="reinstall it first: unknown"):
        text_patch.apply("h15", copy)
    with pytest.raises(LabError, match="changed by something else, so nothing was reverted"):
        text_patch.revert(copy)


def test_edits_of_others_and_a_lost_original_stop_revert(copy):
    text_patch.apply("h15", copy)
    folder = copy / "flash_attn" / "cute"
    patched = (folder / text_patch.EDITED).read_bytes()
    (folder / text_patch.EDITED).write_bytes(patched + b"# mine\n")
    assert text_patch.status(copy).name == "unknown"
    with pytest.raises(LabError, match="changed by something else"):
        text_patch.revert(copy)
    assert (folder / text_patch.EDITED).read_bytes() == patched + b"# mine\n"
    (folder / text_patch.EDITED).write_bytes(patched)
    original = (folder / text_patch.ORIGINAL).read_bytes()
    (folder / text_patch.ORIGINAL).write_bytes(original[:-1])
    with pytest.raises(LabError, match="is not the original that the manifest names"):
        text_patch.revert(copy)
    (folder / text_patch.ORIGINAL).write_bytes(original)
    assert text_patch.revert(copy).name == "clean"


def test_stock_has_nothing_to_apply(copy):
    before = content(copy)
    with pytest.raises(LabError, match="it has no replacement methods"):
        text_patch.apply("stock", copy)
    assert content(copy) == before


def test_the_script_says_what_it_did_and_exits_accordingly(copy, script):
    code, out, _ = script("status")
    assert code == 0 and out.startswith("clean in ")
    code, out, err = script("apply", "h15")
    assert code == 0 and out.startswith("applied (h15)") and "not offered for use" in err
    code, out, err = script("apply", "g(1)")
    assert (code, out) == (2, "") and err.startswith("error: ") and "revert it first" in err
    (copy / "flash_attn" / "cute" / text_patch.ADDED).unlink()
    code, out, _ = script("status")
    assert code == 1 and "partial" in out and f"{text_patch.ADDED} absent" in out
    assert script("revert")[1].startswith("clean in ")
    assert script("apply", "h99")[0] == 2


@pytest.mark.slow
def test_the_text_patch_gives_the_same_machine_code(copy):
    text_patch.apply("h15", copy)
    as_text = compiler.compile("stock", "sm_100a", package=copy)
    at_run_time, stock = compiler.compile_many(
        [compiler.Request("h15", "sm_100a"), compiler.Request("stock", "sm_100a")]
    )
    assert as_text.cubin.read_bytes() == at_run_time.cubin.read_bytes() != stock.cubin.read_bytes()
    assert as_text.key != at_run_time.key
