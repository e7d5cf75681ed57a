"""The commands as a user types them: output, exit codes, one sentence for bad input."""

import io
import subprocess
import sys

import pandas as pd
import pytest

from softmaxlab import cli


@pytest.fixture
def setting(tiny_model, text_file, tmp_path):
    return ["--model", tiny_model, "--corpus", text_file, "--context", 64]


def test_operators_are_listed_with_their_text_form(run):
    code, out, _ = run("operators")
    assert code == 0
    assert any(line.startswith("grid(K,R=1,recon=nearest,map=exp)  ") for line in out.splitlines())


def commands(app, path=()):
    """Every command and its path of names."""
    if app.default_command:
        yield " ".join(path), app
    for name in app:
        if not name.startswith("-"):
            yield from commands(app[name], (*path, name))


@pytest.mark.parametrize(("name", "command"), list(commands(cli.app)))
def test_every_command_and_every_option_is_described(name, command):
    arguments = [a for a in command.assemble_argument_collection(parse_docstring=True) if a.show]
    assert [a.name for a in arguments if not a.parameter.help] == []
    assert command.help or command.default_command.__doc__


def test_the_commands_are_found():
    assert {"evaluate", "results", "bench latency", "zero-shot", "breadth"} <= {name for name, _ in commands(cli.app)}


def test_the_package_runs_as_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "softmaxlab", "operators"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and "grid(K,R=1" in done.stdout


def test_evaluate_results_and_contrast_work_together(run, setting, tmp_path, text_file, tiny_model):
    folder = tmp_path / "results"
    code, out, _ = run("evaluate", "softmax()", "grid(K=4,R=4.0)", *setting, "--blocks", 3, "--results", folder)
    assert code == 0
    assert "grid(K=4,R=4): NLL" in out
    assert "ΔNLL" in out
    code, out, _ = run("results", "--results", folder, "--csv", "--condition", "grid(K=4,R=4.0)")
    frame = pd.read_csv(io.StringIO(out))
    assert code == 0
    assert frame.block.tolist() == [0, 1, 2]
    assert list(frame.columns)[:3] == ["model", "corpus", "context"]
    assert run("results", "--folder", folder)[1].count("grid(K=4,R=4)") == 1
    code, out, _ = run("contrast", "grid(K=4,R=4)", "softmax()", "--folder", folder, *setting)
    assert code == 0
    assert "3 blocks" in out
    assert "[" in out
    code, _, err = run("contrast", "grid(K=5)", "softmax()", "--folder", folder, *setting)
    assert code == 2
    assert "grid(K=5) is not stored" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["evaluate", "grid(K=0)"], "K is 0"),
        (["evaluate", "nonsense()"], "unknown operator 'nonsense'"),
        (["evaluate", "--section", "nothing"], "known are support"),
        (["evaluate", "softmax()", "--model", "nope"], "unknown model 'nope'"),
        (["evaluate", "softmax()", "--context", "many"], "many"),
        (["evaluate", "softmax()", "--contxt", "5"], "--contxt"),
        (["results", "--folder", "/nowhere/at/all"], "no results folder"),
        (["contrast", "softmax()"], "MINUS"),
        (["book", "-p", "novalue"], "name=value"),
        (["book", "-p", "no_such_parameter=3"], "no_such_parameter"),
        (["dance"], "dance"),
        (["evaluate", "softmax()", "grid(K=32)@99"], "layer 99, but smollm2-135m has layers 0–29"),
        (["contrast", "grid(K=32,R=4)", "softmax()", "--bos", "nonsense"], "unknown BOS rule 'nonsense'"),
        (["contrast", "grid(K=32,R=4)", "softmax()", "--dtype", "float16"], "unknown dtype 'float16'"),
        (["evaluate", "softmax()@0-999999999999"], "names a layer of more than 4 digits"),
        (["evaluate", "softmax()@" + "1" * 5000], "names a layer of more than 4 digits"),
        (["evaluate", "softmax()@5-3"], "'5-3' is not a layer number or a range"),
        (["evaluate", "softmax()@1-2-3"], "'1-2-3' is not a layer number or a range"),
        (["evaluate", "rescue(of=" * 2000 + "h15()" + ")" * 2000], "more than 20 operators inside each other"),
        (["evaluate", "grid(K=100000000000)"], "must be from 1 to 1,048,576"),
        (["breadth", "smollm2-135m", "nope", "--contexts", "64", "128"], "unknown model 'nope'"),
        (["results", "--results", ""], "the results folder is empty"),
        (["results", "--dtype", "float16"], "unknown dtype 'float16'"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(run, arguments, says):
    code, out, err = run(*arguments)
    assert code == 2
    assert out == ""
    assert says in err
    assert err.startswith("softmaxlab: ")
    assert err.count("\n") == 1


def test_results_are_found_under_the_names_that_evaluate_takes(run, setting, tmp_path):
    folder = tmp_path / "results"
    assert run("evaluate", "softmax()", *setting, "--blocks", 2, "--results", folder)[0] == 0
    code, out, _ = run("results", "--results", folder, *setting, "--backend", "reference")
    assert code == 0 and "softmax()" in out
    stored = pd.read_csv(io.StringIO(run("results", "--results", folder, "--csv")[1]))
    assert run("results", "--results", folder, "--model", stored.model[0], "--corpus", stored.corpus[0])[1] == out
    code, out, err = run("results", "--results", folder, "--model", "not-here")
    assert (code, out) == (0, "") and "nothing stored" in err


def test_a_file_system_that_fails_is_one_sentence(run, monkeypatch, tmp_path):
    def fails(*_args, **_kwargs):
        raise OSError(5, "Input/output error", str(tmp_path / "some"))

    monkeypatch.setattr("softmaxlab.evaluate.rows", fails)
    code, _, err = run("evaluate", "softmax()")
    assert code == 2 and err == f"softmaxlab: {tmp_path / 'some'}: Input/output error\n"


def test_it_can_be_run_as_a_module():
    done = subprocess.run([sys.executable, "-m", "softmaxlab.cli", "--version"], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.strip()
