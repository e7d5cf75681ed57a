"""Every bench from end to end without a GPU, what it leaves when it is stopped, and what it refuses."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from softmaxlab.bench import counters, energy, gate, latency, machine, nvml, read, record, session, timeline, turns
from softmaxlab.bench.cells import Cell
from softmaxlab.errors import LabError

CELL = "bf16/causal/1024/h4/d64"
FAST = {"rounds": 3, "windows": 2, "calls": 2, "warmup": 1}
DRY = {"rehearse": True}
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SOFTMAXLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def results(tmp_path) -> str:
    return str(tmp_path / "results")


def one_entry(program: str, results: str) -> record.Entry:
    found = record.stored(program, results)
    assert len(found) == 1 and found[0][2] == "rehearsed"
    return found[0][0]


# Each program


def test_latency_has_a_process_for_each_kernel_and_stores_every_window(results):
    outcome = latency.run([CELL], ["h15"], results=results, **FAST, **DRY)
    assert (outcome.done, outcome.total, outcome.partial) == (9, 9, False)
    entry = one_entry("latency", results)
    told = [(t["round"], t["kernel"]) for t in entry.turns]
    assert told == list(turns.order(["stock", "control", "h15"], 3))
    assert all(len(t["windows"]) == 2 and len(w) == 4 and w[0] > 0 for t in entry.turns for w in t["windows"])
    frame = read.latency(results, rehearsed=True).set_index("kernel")
    assert frame.loc["h15", "windows"] == 6 and frame.loc["h15", "gate"] == "green"
    # The clock that is made up has the patched kernel take 95% of the time, within half a percent.
    assert 4 < frame.loc["h15", "vs_stock"] < 7 and abs(frame.loc["control", "vs_stock"]) < 1.1
    assert (frame.floor == frame.loc["control", "vs_stock"]).all() and frame.loc["stock", "vs_stock"] == 0
    again = latency.run([CELL], ["h15"], results=results, **FAST, **DRY)
    assert again.done == 9 and len(one_entry("latency", results).turns) == 9  # nothing is measured twice


def test_duration_interleaves_kernels_and_times_the_references(results):
    outcome = latency.duration(["bf16/2048/h8/kv2/d64"], ["h15", "references"], sweeps=3, results=results, **DRY)
    entry = one_entry("duration", results)
    assert entry.refused == {"sdpa-efficient": "its gate is red: sdpa-efficient takes no grouped heads"}
    assert outcome.done == outcome.total == 3 * 5 and not entry.partial
    assert len({tuple(t["kernel"] for t in entry.turns if t["round"] == r) for r in range(3)}) > 1  # drawn anew
    assert len({t["calls"] for t in entry.turns}) == 1
    said = read.text("duration", results, rehearsed=True)
    assert "not measured: bf16/causal/2048/h8/d64/kv2, sdpa-efficient" in said and "made up" in said


def test_energy_samples_before_and_after_the_loop(results):
    energy.run([CELL], ["h15"], energy.REHEARSAL, rounds=1, results=results, **DRY)
    entry = one_entry("energy", results)
    for turn in entry.turns:
        times = [row[0] for row in turn["samples"]]
        assert times[0] < -0.1 and times[-1] > turn["seconds"] and times == sorted(times)
        assert turn["calls"] % energy.REHEARSAL.chunk == 0 < turn["calls"] and turn["seconds"] >= 0.6
        assert turn["counted_j"] > 0
    frame = read.energies(results, rehearsed=True).set_index("kernel")
    assert (frame.mj > 0).all() and frame.loc["stock", "vs_stock"] == 0 and frame.loc["control", "vs_control"] == 0
    expected = 100 * (frame.loc["h15", "mj"] / frame.loc["stock", "mj"] - 1)
    assert frame.loc["h15", "vs_stock"] == pytest.approx(expected)


def test_timeline_reads_kernels_and_launches_from_a_trace(results):
    timeline.run([CELL], ["h15"], calls=6, warmup=2, results=results, **DRY)
    entry = one_entry("timeline", results)
    assert all(len(t["kernel_us"]) == len(t["launch_us"]) == 8 and t["call_us"] > 0 for t in entry.turns)
    frame = read.timelines(results, rehearsed=True).set_index("kernel")
    assert 4 < frame.loc["h15", "kernel_vs_stock"] < 7 and (frame.launch_us == 4.5).all()


def test_counters_of_all_kernels_come_from_one_profiled_process(results):
    counters.run([CELL], ["h15", "identity", "sdpa-flash"], results=results, **DRY)
    entry = one_entry("counters", results)
    assert [t["kernel"] for t in entry.turns] == ["stock", "control", "h15", "identity"]
    frame = read.counts(results, rehearsed=True).set_index("kernel")
    assert frame.loc["h15", "xu"] == 0 < frame.loc["stock", "xu"] and frame.loc["stock", "per score"] == pytest.approx(
        7.4
    )
    assert frame.loc["identity", "gate"] == "none"


# The gates


def test_a_cell_whose_gate_is_red_is_not_timed(results, monkeypatch):
    real = gate.check

    def check(name, cell, where):
        found = real(name, cell, where)
        return found | {"passed": False, "failed": "row sum, least"} if name == "h15" else found

    monkeypatch.setattr(gate, "check", check)
    latency.duration([CELL], ["h15", "s(3)"], sweeps=2, results=results, **DRY)
    entry = one_entry("duration", results)
    assert entry.refused == {"h15": "its gate is red: row sum, least"}
    assert {t["kernel"] for t in entry.turns} == {"stock", "control", "s(3)"}
    frame = read.latency(results, "duration", rehearsed=True).set_index("kernel")
    assert frame.loc["h15", "gate"] == "red" and frame.loc["h15", ["ms", "vs_stock"]].isna().all()
    monkeypatch.undo()
    monkeypatch.setenv("SOFTMAXLAB_CACHE", results)
    # A red gate is read again, and a sweep is made anew once it can hold every kernel.
    outcome = latency.duration([CELL], ["h15", "s(3)"], sweeps=2, results=results, **DRY)
    entry = one_entry("duration", results)
    assert entry.gates["h15"]["passed"] is True and outcome.done == outcome.total == 8 and not entry.partial
    told = sorted((t["round"], t["kernel"]) for t in entry.turns)
    assert told == sorted((r, k) for r in range(2) for k in entry.kernels)


def test_a_kernel_that_computes_something_else_has_a_red_gate(monkeypatch):
    from softmaxlab.fa4 import readings

    where, cell = machine.Rehearsal(), gate.gated(Cell.parse(CELL))
    assert gate.check("sdpa-flash", cell, where)["passed"] and gate.check("s(3)", cell, where)["passed"]
    real = readings.simulated
    monkeypatch.setattr(readings, "simulated", lambda q, k, v, **a: real(q, k, v, **a | {"variant": "s(2)"}))
    for name in ("sdpa-flash", "s(3)"):
        found = gate.check(name, cell, where)
        assert found["passed"] is False and found["failed"]


def test_no_gain_is_shown_without_the_control(results, monkeypatch):
    real = gate.check
    red = {"passed": False, "failed": "reruns differ", "readings": []}
    monkeypatch.setattr(gate, "check", lambda n, c, w: dict(red) if n == "control" else real(n, c, w))
    latency.duration([CELL], ["h15"], sweeps=2, results=results, **DRY)
    row = read.latency(results, "duration", rehearsed=True).set_index("kernel").loc["h15"]
    assert row.ms > 0 and row[["vs_stock", "sd_stock", "vs_control", "floor"]].isna().all()


# Stopped and started again


def test_a_killed_bench_keeps_its_turns_and_goes_on(results):
    command = [sys.executable, "-m", "softmaxlab.cli", "bench", "latency", "--rehearse", "--results", results]
    command += ["--cells", CELL, "--kernels", "h15"]
    path = record.folder(results) / "latency-rehearsal.json"
    # In a session of its own, so that nothing of it outlives the test.
    process = subprocess.Popen(command, env=turns.environment(), stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        until = time.monotonic() + 120
        while not (path.is_file() and len(record.load(path)) and len(record.load(path)[0].turns) >= 2):
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait()
    kept = record.load(path)[0].turns
    assert 2 <= len(kept) <= 9
    said = read.text("latency", results, rehearsed=True)
    assert len(kept) == 9 or f"partial: {Cell.parse(CELL)}, {len(kept)} of 9 turns" in said
    outcome = latency.run([CELL], ["h15"], results=results, **DRY, **latency.REHEARSAL)
    assert outcome.done == 9 and record.load(path)[0].turns[: len(kept)] == kept


def test_a_signal_ends_a_bench_with_what_it_has(results):
    with session.opened("latency", [CELL], ["h15"], {}, rounds=2, results=results, rehearse=True, limit=0) as s:

        def one(entry, kernel):
            if len(entry.turns) == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            return {"windows": [[1.0, 1500, 55, 600.0]]}

        outcome = turns.take(s.record, s.entries, 2, one, s.budget)
    assert outcome.partial and outcome.done == 2 and "partial, it was interrupted: 2 of 6" in str(outcome)
    assert len(one_entry("latency", results).turns) == 2


def test_the_time_limit_stops_before_a_turn_that_would_not_end(results):
    with session.opened("energy", [CELL], [], {}, rounds=3, results=results, rehearse=True, limit=600) as s:
        s.budget._end = time.monotonic() + 0.5

        def one(entry, kernel):
            time.sleep(0.2)
            return {"value": 1}

        outcome = turns.take(s.record, s.entries, 3, one, s.budget)
    assert outcome.done == 2 and "the time limit is reached" in outcome.why


def test_a_limit_gives_exit_code_3_and_the_table_of_what_is_there(run, results):
    arguments = [
        "bench",
        "latency",
        "--graphs",
        "--rehearse",
        "--cells",
        CELL,
        "--kernels",
        "h15",
        "--results",
        results,
    ]
    code, out, _ = run(*arguments, "--limit", 1e-3)
    assert code == 3 and "partial" in out
    code, out, _ = run(*arguments)
    assert code == 0 and "all 63 turns" in out and "h15" in out
    assert run("bench", "show", "duration", "--results", results)[0] == 2  # a rehearsal is no measurement


# Refusals


@no_gpu
@pytest.mark.parametrize("program", ["latency", "energy", "counters", "timeline"])
def test_without_a_gpu_or_its_profiler_there_is_one_sentence(run, program, monkeypatch):
    monkeypatch.setattr(counters, "find", lambda: "ncu")
    code, out, err = run("bench", program)
    assert code == 2 and not out and err.count("\n") == 1 and "no CUDA GPU is visible" in err


def test_doctor_is_a_command(run):
    code, out, _ = run("doctor", "--no-tile")
    assert code == 0 and "kernels on this GPU" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["latency", "--cells", "fp8"], "takes e4m3 on Blackwell"),
        (["latency", "--cells", "bf16/128k/h512/b8"], "needs about"),
        (["latency", "--cells", "nowhere"], "unknown set of cells 'nowhere'"),
        (["latency", "--kernels", "h16"], "h16"),
        (["latency", "--limit", "-1"], "limit is -1 seconds"),
        (["latency", "--limit", "nan"], "limit is nan seconds, but must be finite"),
        (["latency", "--limit", "inf"], "limit is inf seconds, but must be finite"),
        (["latency", "--sweeps", "3"], "sweeps is 3, but goes with --graphs only"),
        (["latency", "--graphs", "--sweeps", "-3"], "sweeps is -3, but must be a whole number from 1"),
        (["latency", "--graphs", "--window-ms", "-2"], "window_ms is -2, but must be above 0 and at most 60000"),
        (["latency", "--graphs", "--window-ms", "nan"], "window_ms is nan, but must be above 0"),
        (["latency", "--graphs", "--window-ms", "inf"], "window_ms is inf, but must be above 0"),
        (["latency", "--graphs", "--window-ms", "1e300"], "window_ms is 1e+300, but must be above 0"),
        (["energy", "--rounds", "0"], "rounds is 0, but must be a whole number from 1"),
        (["energy", "--rounds", "-3"], "rounds is -3, but must be a whole number from 1"),
        (["energy", "--seconds", "-5"], "energy: seconds is -5, but must be above 0"),
        (["energy", "--seconds", "nan"], "energy: seconds is nan, but must be above 0"),
        (["energy", "--seconds", "0.01"], "a loop of 0.01 s leaves 1 samples"),
        (["timeline", "--cells", "bf16/d80"], "head dimension is 80"),
        (["show", "nothing"], "unknown bench 'nothing'"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(run, arguments, says, results):
    more = [] if arguments[0] == "show" else ["--rehearse"]
    code, out, err = run("bench", *arguments, *more, "--results", results)
    assert code == 2 and not out and says in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("program", "number"),
    [
        (latency.run, {"rounds": 0}),
        (latency.run, {"windows": 0}),
        (latency.run, {"calls": 2.5}),
        (latency.run, {"warmup": -1}),
        (latency.duration, {"sweeps": True}),
        (latency.duration, {"window_ms": "20"}),
        (energy.run, {"rounds": "3"}),
        (timeline.run, {"calls": 0}),
        (counters.run, {"launches": 0}),
        (counters.run, {"limit": 10**400}),
    ],
)
def test_numbers_from_a_program_are_held_to_their_ranges_too(results, program, number):
    (name,) = number
    with pytest.raises(LabError, match=rf"^{name} is .*, but must be "):
        program([CELL], ["h15"], results=results, **number, **DRY)
    assert not os.path.exists(results)


def test_a_bench_that_measured_nothing_of_what_was_asked_is_no_success(run, results, monkeypatch):
    arguments = ("bench", "latency", "--graphs", "--rehearse", "--sweeps", 2, "--cells", "bf16/256/h2/kv1/d64")
    arguments += ("--results", results)
    # On grouped heads: stock and control are measured, what was asked is not.
    code, out, err = run(*arguments, "--kernels", "sdpa-efficient")
    assert code == 2 and err.count("\n") == 1 and "takes no grouped heads" in out
    assert "nothing of what was asked could be measured: every cell refuses sdpa-efficient" in err
    assert "4 turns of other kernels are in" in err and len(one_entry("duration", results).turns) == 4
    code, out, err = run(*arguments, "--kernels", "sdpa-efficient", "s(3)")  # one of two is something
    assert code == 0 and "all 6 turns" in out and not err

    def broken(self, name, cell):
        raise RuntimeError("no luck")

    monkeypatch.setattr(machine.Rehearsal, "opened", broken)
    code, out, err = run(*arguments, "--kernels", "h15")
    assert code == 2 and "every cell refuses h15" in err and "0 turns of other kernels" in err and "no luck" in out


def test_a_rehearsal_loops_as_long_as_it_is_told(run, monkeypatch):
    asked = []
    monkeypatch.setattr(energy, "run", lambda cells, names, protocol, **_: asked.append(protocol))
    monkeypatch.setattr("softmaxlab.cli_bench._end", lambda *_: None)
    for arguments in (["--rehearse"], ["--rehearse", "--seconds", 2], [], ["--seconds", 60]):
        assert run("bench", "energy", *arguments)[0] == 0
    assert [p.seconds for p in asked] == [0.6, 2, 45, 60] and [p.interval for p in asked] == [0.01, 0.01, 0.1, 0.1]


def test_a_gpu_of_another_generation_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    with pytest.raises(LabError, match=r"the GPU is NVIDIA A100 .sm_80., but the variants are for Hopper"):
        machine.Cuda()


def test_without_the_management_library_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(LabError, match="pip install nvidia-ml-py"):
        nvml.Monitor("GPU-0")


def test_a_missing_or_refused_profiler_is_one_sentence(monkeypatch):
    monkeypatch.setattr(counters.shutil, "which", lambda name: None)
    monkeypatch.setattr(counters.glob, "glob", lambda place: [])
    with pytest.raises(LabError, match=r"ncu .Nsight Compute. is not on the PATH"):
        counters.find()
    refused = "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission\n"
    assert "NVreg_RestrictProfilingToAdminUsers=0" in counters.refusal(refused)
    assert "no counters" in counters.refusal("==ERROR== Failed to initialize the profiler: LibraryNotLoaded")
    assert counters.refusal("==ERROR== Unknown metric x") == "ncu refuses: Unknown metric x"
    assert counters.refusal("==PROF== Connected") == ""
    with pytest.raises(LabError, match="the profiler saw no kernel"):
        timeline.read([("DeviceType.CPU", "cuLaunchKernelEx", 0.0, 4.0)], 1)
    with pytest.raises(LabError, match="saw 1 launches of k in 2 calls"):
        timeline.read([("DeviceType.CUDA", "k", 0.0, 4.0), ("DeviceType.CUDA", "Memcpy", 0.0, 9.0)], 2)


def test_counters_are_read_by_name_from_ncus_page_and_never_guessed():
    page = '==PROF== x\n"ID","Kernel Name","a.sum","b.avg"\n"","","inst","%"\n"0","k","1,200","3.5"\n"1","k","9","4"\n'
    assert counters.read(page, {"A": "a.sum", "B": "b.avg"}, ["stock", "h15"], 1) == {
        "stock": {"A": [1200.0], "B": [3.5]},
        "h15": {"A": [9.0], "B": [4.0]},
    }
    with pytest.raises(LabError, match=r"did not give c\.sum"):
        counters.read(page, {"C": "c.sum"}, ["stock", "h15"], 1)
    with pytest.raises(LabError, match="counted 2 launches with 'flash' in the name"):
        counters.read(page, {"A": "a.sum"}, ["stock", "h15"], 2)
    chosen, missing = counters.choose({"sm__inst_executed_pipe_xu", "smsp__inst_executed"})
    assert chosen["instructions"] == "smsp__inst_executed.sum" and "tensor %" in missing and "registers" in chosen


def test_a_process_that_dies_refuses_its_kernel_and_says_why(monkeypatch):
    monkeypatch.setattr(turns, "command", lambda names, rehearse: [sys.executable, "-c", "raise SystemExit('no luck')"])
    with (
        turns.Processes(rehearse=True) as processes,
        pytest.raises(LabError, match=r"the process of h15 ended .*no luck"),
    ):
        processes.ask("h15", {"do": "latency"})
