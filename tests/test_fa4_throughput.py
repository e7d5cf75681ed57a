"""The throughput model: its rates, its arithmetic on kernels made by hand, and what it says of the recorded audit."""

import json
from pathlib import Path

import pytest

from softmaxlab import paper
from softmaxlab.errors import LabError
from softmaxlab.fa4 import audit, rates, throughput

RESULTS = Path(__file__).resolve().parent.parent / "results"


def kernel(opcodes, **changes):
    """A row as `audit` gives it, of one turn of 128 scores a thread."""
    row = {"arch": "sm_100a", "dtype": "bf16", "causal": True, "head_dim": 128, "elements": 128, "opcodes": opcodes}
    return row | changes


STOCK = kernel({"MUFU.EX2": 128, "FFMA2": 64, "FADD2": 64, "FMNMX3": 64, "F2FP.BF16.F32.PACK_AB": 64, "LDTM.x32": 4})
BITS = kernel({"FADD2": 128, "FFMA2": 64, "FMNMX3": 64, "FMNMX": 128, "LEA": 128, "F2FP.BF16.F32.PACK_AB": 64})


@pytest.fixture(scope="module")
def frame():
    if not (RESULTS / audit.FILE).is_file():
        pytest.skip("no audit is recorded")
    return audit.stored(RESULTS)[0]


def test_rates_agree_with_what_the_paper_quotes():
    for gpu, arch in (("B200", "sm_100"), ("B300", "sm_103")):
        assert rates.sm(arch).gpu == gpu
        assert rates.sm(arch).xu == paper.value("hw_external_claims", subject=gpu, metric="exp_ops_per_clk_sm").value
    tensor = paper.value("hw_external_claims", subject="B200", metric="tensor_ops_per_clk_sm").value
    assert rates.sm("sm_100a").tensor16 == tensor == rates.sm("sm_103").tensor16
    assert all(rates.sm(a).issue == 128 for a in rates.SMS)


@pytest.mark.parametrize("arch", ["sm_75", "sm_120", "", "gfx942"])
def test_an_architecture_without_rates_is_refused(arch):
    with pytest.raises(LabError, match="known are sm_80, sm_90, sm_100, sm_103"):
        rates.sm(arch)


@pytest.mark.parametrize(
    ("opcode", "pipe"),
    [
        ("MUFU.EX2", "xu"),
        ("FFMA", "fma"),
        ("FFMA2", "packed"),
        ("FADD2.RM", "packed"),
        ("IMAD.U32", "imad"),
        ("FMNMX3", "alu"),
        ("LEA", "alu"),
        ("SHF.L.U32", "alu"),
        ("SHFL.BFLY", "issue"),
        ("F2FP.BF16.F32.PACK_AB", "alu"),
        ("F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C", "fp8"),
        ("LDTM.x32", "issue"),
        ("UIADD3", "issue"),
        ("ULEA", "issue"),
    ],
)
def test_each_opcode_has_one_pipe(opcode, pipe):
    assert rates.pipe(opcode) == pipe


def test_clocks_are_instructions_over_rates():
    assert rates.cycles({"MUFU.EX2": 10}, "sm_100") == {"xu": 80, "fma": 0, "alu": 0, "issue": 10}
    assert rates.cycles({"MUFU.EX2": 10}, "sm_103")["xu"] == 40
    assert rates.cycles({"FFMA": 10}, "sm_80")["fma"] == 20
    assert rates.cycles({"FFMA": 10}, "sm_90")["fma"] == 10
    # Packed or not, an SM does 128 multiply-adds a clock.
    assert rates.cycles({"FFMA2": 5}, "sm_100")["fma"] == rates.cycles({"FFMA": 10}, "sm_100")["fma"]
    # IMAD has one half of the pipe to itself, and FFMA can use the other.
    assert rates.cycles({"IMAD": 10, "FFMA": 10}, "sm_100")["fma"] == 20
    pack = {"F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C": 8}
    assert rates.cycles(pack, "sm_100")["alu"] == 32
    assert rates.cycles(pack, "sm_100", fp8_conversion=64)["alu"] == 16


def test_tensor_and_exponential_clocks_of_a_tile_are_those_of_the_fa4_paper():
    clocks = throughput.stages(STOCK)  # FA4, Table 1: 1024 clocks each at 128 × 128 × 128
    assert clocks["tensor"] == clocks["xu"] == 1024
    assert throughput.stages(STOCK | {"dtype": "e4m3"})["tensor"] == 512
    assert throughput.stages(STOCK | {"head_dim": 64})["tensor"] == 512


def test_faster_exponentials_and_fewer_instructions_never_cost():
    assert throughput.overlapped_gain(STOCK, STOCK) == 0
    assert throughput.exposed_gain(STOCK, STOCK, 1500.0) == 0
    for opcode in STOCK["opcodes"]:
        less = STOCK | {"opcodes": {o: n for o, n in STOCK["opcodes"].items() if o != opcode}}
        assert throughput.overlapped_gain(STOCK, less) >= 0
        assert throughput.exposed_gain(STOCK, less, 1500.0) >= 0
    b200, b300 = (throughput.stages(STOCK | {"arch": a}) for a in ("sm_100a", "sm_103a"))
    assert all(b300[pipe] <= b200[pipe] for pipe in b200)


def test_a_tensor_bound_kernel_gains_nothing_if_all_overlaps():
    bits = throughput.stages(BITS)
    assert throughput.binding(bits) == ("tensor", 1024)
    assert throughput.overlapped_gain(STOCK, BITS) == 0
    eight = {"dtype": "e4m3"}
    assert throughput.binding(throughput.stages(STOCK | eight))[0] == "xu"
    assert throughput.overlapped_gain(STOCK | eight, BITS | eight) == pytest.approx(100 * (1024 / 768 - 1))


def test_exposed_gain_is_the_saved_clocks_over_a_warpgroups_turn():
    saved = throughput.serial(throughput.stages(STOCK)) - throughput.serial(throughput.stages(BITS))
    assert saved == (1024 + 256 + 256) - (384 + 768)
    assert throughput.exposed_gain(STOCK, BITS, 1500.0) == pytest.approx(100 * (3000 / (3000 - saved) - 1))


def test_turns_count_tiles_that_are_not_wholly_masked():
    shape = {"heads": 1, "batch": 1}
    assert throughput.turns(256, causal=False, **shape) == 4
    assert throughput.turns(256, causal=True, **shape) == 4  # both rows of tiles of a CTA go to its last key
    assert throughput.turns(512, causal=True, **shape) == 4 + 8
    assert throughput.turns(512, causal=False, **shape) == 16
    assert throughput.turns(8192, causal=True, heads=16, batch=4) == 64 * throughput.turns(8192, causal=True, **shape)
    with pytest.raises(LabError, match="multiple of 256"):
        throughput.turns(300, causal=True, **shape)


def test_period_turns_a_latency_into_clocks():
    shape = {"seq": 256, "heads": 37, "batch": 1, "causal": False}  # 148 turns: one an SM
    assert throughput.period(0.001, 2000, "sm_100", **shape) == pytest.approx(2000)


def test_clock_is_the_recorded_one_else_the_highest():
    assert throughput.clock("bf16", "causal", 16384) == 1672
    assert throughput.clock("fp8", "causal", 8192) == 1965
    assert throughput.clock("fp16", "causal", 16384) == 1965


def test_every_published_gain_of_the_tables_is_compared(frame):
    compared = throughput.compare(frame)
    printed = sum(
        (paper.table(name)["metric"] == "speedup").sum()
        for name in ("tableB5a_main", "tableB5c_noncausal", "tableB5e_shapes")
    )
    assert len(compared) == printed
    assert compared["overlapped"].notna().all()
    # Where the paper prints the stock latency, no pipe may be asked for more than the time there was.
    known = compared[compared["period"].notna()]
    assert len(known) >= 9 and (known["busy"] < 100).all()


def test_the_sweeps_settings_are_six_programs_without_spills(frame):
    sweep = throughput.sweep(frame)
    stock = sweep[sweep["share"].notna()]
    assert len(stock) == 8 and stock["program"].nunique() == 6
    assert (sweep["accesses"] == 0).all()
    assert sweep.loc[sweep["setting"] == "freq 8, start 1", ["overlapped", "exposed"]].to_numpy().tolist() == [
        [0.0, 0.0]
    ]
    # Equal machine code, equal share; a larger share takes exponentials off the XU and costs instructions.
    assert (stock.groupby("program")["share"].nunique() == 1).all()
    ordered = stock.drop_duplicates("program").sort_values("share")
    assert ordered["xu"].is_monotonic_decreasing and ordered["per_element"].is_monotonic_increasing


def test_stock_kernels_of_older_releases(frame):
    versions = audit.stored_versions(RESULTS)
    groups = versions.groupby(["version", "ptxas"])
    assert len(groups) >= 3
    for _, rows in groups:
        timed = rows[(rows["dtype"] == "e4m3") & rows["causal"] & (rows["emulation"] != "")]
        assert len(timed) == len(audit.SETTINGS) and timed["digest"].nunique() == 6 and not timed["accesses"].any()
    own = versions[(versions["emulation"] == "") & (versions["dtype"] == "bf16") & ~versions["causal"]]
    spilled = own.set_index("version")["in_loop"]
    assert (spilled[["4.0.0b27", "4.0.0b30"]] > 0).all() and (spilled[["4.0.0b36"]] == 0).all()


def test_exponentials_in_the_code_explain_the_published_counter(frame):
    counters = throughput.counters(frame)
    exponentials = counters[counters["pipe"] == "xu"]
    assert len(exponentials) == 4
    assert (exponentials["counted"] - exponentials["utilization"]).abs().max() < 0.5


def test_evidence_for_the_predictions(frame):
    rows = throughput.evidence(frame).set_index(["dtype", "mask"])
    assert (rows["ex2 h15"] < 0.01).all() and (rows["ex2 stock"] > 0.7).all()  # prediction 1
    fp8 = rows.loc[("e4m3", "causal")]
    assert fp8["fp32 h15"] < fp8["fp32 stock"]  # what prediction 2 did not see: H15 removes the polynomial too
    assert rows.loc[("bf16", "causal"), "fp32 h15"] > rows.loc[("bf16", "causal"), "fp32 stock"]
    assert (rows["launch h15"] == rows["launch stock"]).all() and (rows["asked h15"] == rows["asked stock"]).all()


def test_the_record_holds_the_grid_and_says_where_it_comes_from(frame):
    held = json.loads((RESULTS / audit.FILE).read_text())
    assert held["provenance"]["kind"] == "compiled"
    assert {"flash-attn-4", "nvidia-cutlass-dsl", "ptxas", "nvdisasm"} <= set(held["provenance"])
    assert len(frame) == len(audit.grid())
    assert not frame.duplicated(["variant", "arch", "dtype", "causal", "head_dim", "gqa", "emulation"]).any()
