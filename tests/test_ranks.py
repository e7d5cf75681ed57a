"""Several processes: what one has claimed the others leave alone, and the dead hold nothing back."""

import collections
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from softmaxlab import evaluate, forward, models, ranks, runner
from softmaxlab.conditions import Condition
from softmaxlab.errors import LabError
from softmaxlab.forward import SharedPrefix, evaluate_batch
from softmaxlab.losskey import VOCABULARY
from softmaxlab.ranks import Claims
from softmaxlab.store import Store

TEXTS = ["softmax()", "grid(K=4,R=4)", "mean_threshold()@1", "mean_threshold(weights=uniform)@2"]

# One of two processes, which begin together and write down what they compute. With "die", rank 1 is killed inside
# its third pass, and the other one is slow enough to be met by it.
PROCESS = """
import json, os, signal, sys, time
from pathlib import Path
from softmaxlab import cli, forward, runner
arguments, log, die = json.loads(sys.argv[1])
real, calls, rank = runner.evaluate_batch, [], os.environ["RANK"]
def logged(model, condition, tokens, **more):
    if not calls:
        Path(log + rank).touch()
        while not all(Path(log + r).exists() for r in "01"):
            time.sleep(0.02)
    calls.append(1)
    if die and rank == "1" and len(calls) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.3 if die else 0.05)
    out = real(model, condition, tokens, **more)
    with open(log, "a") as file:
        file.write(json.dumps([rank, str(condition), tokens[:, :8].tolist()]) + chr(10))
    return out
runner.evaluate_batch = forward.evaluate_batch = logged
sys.argv = ["softmaxlab", "evaluate", *arguments, "--vocabulary"]
cli.main()
"""


@pytest.fixture
def setting(tiny_model, text_file, tmp_path, monkeypatch):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the other processes: the last digits depend on it
    yield {
        "model": str(tiny_model),
        "corpus": str(text_file),
        "context": 64,
        "blocks": 20,
        "batch": 3,
        "device": "cpu",
        "results": str(tmp_path / "results"),
        "progress": False,
    }
    torch.set_num_threads(threads)


def environment(**more):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "RANK", "WORLD_SIZE", "LOCAL_"))}
    here = str(Path(evaluate.__file__).parents[1])
    return kept | {"PYTHONPATH": here, "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"} | more


def process(tmp_path, setting, die):
    """The command of one process, without the interpreter."""
    (tmp_path / "process.py").write_text(PROCESS)
    options = [f"--{name}={value}" for name, value in setting.items() if name != "progress"]
    return [str(tmp_path / "process.py"), json.dumps([[*TEXTS, *options], str(tmp_path / "log"), die])]


def launch(tmp_path, setting, *, die=False):
    """Two processes under torchrun."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, *process(tmp_path, setting, die)]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300, check=False)


def log(tmp_path):
    """(rank, condition, first tokens of a block) of everything that was computed."""
    lines = (tmp_path / "log").read_text().splitlines()
    return [(r, text, tuple(block)) for r, text, blocks in map(json.loads, lines) for block in blocks]


def test_two_processes_share_the_work_and_give_the_numbers_of_one(setting, tmp_path):
    alone = evaluate.rows(TEXTS, (evaluate.LOSSES, VOCABULARY), **setting | {"results": str(tmp_path / "one")})
    outcome = launch(tmp_path, setting)
    assert outcome.returncode == 0, outcome.stderr[-3000:]
    assert [line.split(": NLL")[0] for line in outcome.stdout.splitlines()] == TEXTS, "one of them says the losses"
    # Nothing is computed now: all of it is in the store, and equal to the last digit.
    monkey = pytest.MonkeyPatch()
    monkey.setattr(models, "load_model", lambda *_a, **_k: pytest.fail("the model was loaded"))
    together = evaluate.rows(TEXTS, (evaluate.LOSSES, VOCABULARY), **setting)
    monkey.undo()
    for kind, frame in alone.items():
        assert frame.equals(together[kind])
    done = log(tmp_path)
    assert {rank for rank, *_ in done} == {"0", "1"}
    counts = collections.Counter((text, block) for _, text, block in done)
    assert len(counts) == 4 * 20 and set(counts.values()) == {1}, "no block was computed twice"


def test_a_rank_that_dies_leaves_its_blocks_and_the_next_run_does_the_rest(setting, tmp_path, monkeypatch):
    outcome = launch(tmp_path, setting, die=True)
    assert outcome.returncode != 0
    kept = Store(tmp_path / "results").frame()
    # torchrun ends the others, too, so that not everything is there.
    assert 0 < len(kept) < 4 * 20
    # A unit that was interrupted runs again, no unit that was complete runs at all.
    complete = kept.groupby("block").condition.nunique().eq(len(TEXTS)).sum()
    calls = []

    def counting(model, condition, tokens, **more):
        calls.append(len(tokens))
        return evaluate_batch(model, condition, tokens, **more)

    monkeypatch.setattr(forward, "evaluate_batch", counting)
    monkeypatch.setattr(runner, "evaluate_batch", counting)
    after = evaluate.losses(TEXTS, **setting)
    assert len(after) == len(Store(tmp_path / "results").frame()) == 4 * 20
    assert 0 < sum(calls) <= 4 * (20 - complete)
    both = after.merge(kept, on=["condition", "block"])
    assert len(both) == len(kept) and (both.nll_x == both.nll_y).all()


def test_the_survivor_of_two_processes_does_the_work_of_the_dead(setting, tmp_path):
    """Started by hand, without a launcher."""
    command = [sys.executable, *process(tmp_path, setting, True)]
    doomed = subprocess.Popen(command, env=environment(RANK="1"))
    survivor = subprocess.Popen(command, env=environment(RANK="0"))
    assert doomed.wait(timeout=120) == -signal.SIGKILL
    assert survivor.wait(timeout=120) == 0
    assert len(Store(tmp_path / "results").frame()) == 4 * 20
    assert len(Store(tmp_path / "results", VOCABULARY).frame()) == 3 * 20


HOLDER = """
import sys, time
from pathlib import Path
from softmaxlab.ranks import Claims
with Claims(Path(sys.argv[1])).take("unit") as mine:
    print(mine, flush=True)
    time.sleep(600)
"""


def test_a_claim_is_exclusive_and_ends_with_its_holder(tmp_path):
    claims = Claims(tmp_path)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment()
    )
    assert holder.stdout.readline().strip() == "True"
    with claims.take("unit") as mine:
        assert not mine
    with claims.take("another") as mine:
        assert mine
    holder.kill()
    holder.communicate()
    deadline = time.time() + 10
    while time.time() < deadline:
        with claims.take("unit") as mine:
            if mine:
                break
    assert mine
    claims.close()
    with Claims(None).take("unit") as mine:
        assert mine
    with (
        pytest.raises(LabError, match="cannot be locked"),
        Claims(tmp_path / ".claims" / "below").take("unit"),
    ):
        pass


def test_cuda_is_the_card_of_the_local_rank(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    ranks.bind("cuda")
    assert not chosen, "one process takes the current card"
    for name, value in {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "6"}.items():
        monkeypatch.setenv(name, value)
    ranks.bind("cpu")
    assert (ranks.rank(), ranks.world(), chosen) == (5, 6, [])
    ranks.bind("cuda")
    assert chosen == [1]
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(LabError, match="process 2 of this machine has no GPU of its own: start at most 2"):
        ranks.bind("cuda")
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(LabError, match="RANK is 'first'"):
        ranks.rank()


# One model over several devices


@pytest.fixture
def spread():
    """A map of the tiny model: its second layer waits on the disk and is loaded when its turn comes."""
    places = dict.fromkeys(["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"], "cpu")
    return places | {"model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "cpu"}


def test_a_model_that_is_spread_gives_the_same_losses(setting, spread, tmp_path):
    setting = setting | {"blocks": 3, "results": ""}
    whole = evaluate.rows(TEXTS, (evaluate.LOSSES, VOCABULARY), **setting)
    parts = evaluate.rows(TEXTS, (evaluate.LOSSES, VOCABULARY), **setting, device_map=spread)
    for kind, frame in whole.items():
        assert frame.equals(parts[kind])
    evaluate.losses(["softmax()"], **setting | {"device_map": spread, "results": str(tmp_path / "r")})
    assert Store(tmp_path / "r").provenance().devices.tolist() == ["cpu"]


def test_a_shared_prefix_leaves_the_hooks_of_a_spread_model_in_place(tiny_model, spread):
    loaded = models.load_model(str(tiny_model), device="cpu", device_map=spread).model
    layer = forward.decoder_layers(loaded)[1]
    assert next(layer.parameters()).device.type == "meta" and models.input_device(loaded).type == "cpu"
    hooked, ids = layer.forward, torch.arange(20)[None]
    condition = Condition.parse("grid(K=2)@2")
    prefix = SharedPrefix(loaded, ids, "reference")
    first = evaluate_batch(loaded, condition, ids, prefix=prefix)
    assert layer.forward is hooked
    assert first.item() == evaluate_batch(loaded, condition, ids).item()


def test_devices_of_a_model_are_those_its_layers_compute_on(tiny_model, spread):
    assert models.devices(models.load_model(str(tiny_model), device="cpu").model) == [torch.device("cpu")]
    loaded = models.load_model(str(tiny_model), device="cpu", device_map=spread).model
    forward.decoder_layers(loaded)[0]._hf_hook.execution_device = 1  # as accelerate names a GPU
    assert models.devices(loaded) == [torch.device("cpu"), torch.device("cuda", 1)]
    loaded.get_input_embeddings().weight = torch.nn.Parameter(torch.empty(3, 2, device="meta"))
    loaded.get_input_embeddings()._hf_hook.execution_device = 0
    assert models.input_device(loaded) == torch.device("cuda", 0)


def test_a_device_map_and_a_launcher_are_refused_together(setting, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(LabError, match="CUDA_VISIBLE_DEVICES"):
        evaluate.losses(["softmax()"], **setting, device_map="auto")
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(LabError, match="cannot be loaded"):
        evaluate.losses(["softmax()"], **setting, device_map="everywhere")
