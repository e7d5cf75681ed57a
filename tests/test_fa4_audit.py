"""The audit reads SASS rightly, refuses what it cannot answer, and gives the same row twice."""

import importlib.util
import json
import subprocess
import sys

import pytest

from softmaxlab.errors import LabError
from softmaxlab.fa4 import audit, flow, sass
from softmaxlab.fa4.compile import ARCHS, Request

installed = pytest.mark.skipif(
    importlib.util.find_spec("flash_attn") is None or sys.platform != "linux", reason="needs flash-attn-4"
)

# Written by hand in the disassembler's form: two warp roles behind a BRX, an outer loop, an inner loop over tiles
# with a wait that spins behind the code and jumps back into the loop's middle, and a guarded store to local memory.
SNIPPET = """
\t.section\t.text.kernel_a,"ax",@progbits
kernel_a:
.text.kernel_a:
        /*0000*/                   LDC R1, c[0x0][0x37c] ;
        /*0010*/                   BRX R4 -0x20    (*"BRANCH_TARGETS .L_x_1,.L_x_2"*);
.L_x_1:
        /*0020*/                   USETMAXREG.DEALLOC.CTAPOOL 0x38 ;
        /*0030*/                   UTMALDG.2D [UR4], [UR6] ;
        /*0040*/                   EXIT ;
.L_x_2:
        /*0050*/                   USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xc0 ;
.L_x_3:
        /*0060*/                   MOV R2, RZ ;
.L_x_4:
        /*0070*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R2 ;
        /*0080*/              @!P1 BRA `(.L_x_9) ;
.L_x_5:
        /*0090*/                   LDTM.x4 R8, tmem[UR5] ;
        /*00a0*/                   FMNMX3 R3, R8, R9, R10, !PT ;
        /*00b0*/                   FMNMX R3, R3, R11, !PT ;
        /*00c0*/                   FFMA2 R8, R8.F32x2.HI_LO, R12.F32x2.HI_LO, R14.F32x2.HI_LO ;
        /*00d0*/                   MUFU.EX2 R8, R8 ;
        /*00e0*/                   MUFU.EX2 R9, R9 ;
        /*00f0*/                   F2FP.BF16.F32.PACK_AB R8, R9, R8 ;
        /*0100*/                   SHFL.BFLY PT, R6, R8, 0x1, 0x1f ;
        /*0110*/                   SHF.L.U32 R6, R6, 0x16, RZ ;
        /*0120*/                   STTM.x2 tmem[UR5], R8 ;
        /*0130*/               @P0 BRA `(.L_x_4) ;
        /*0140*/               @P2 STL [R1+0x4], R8 ;
        /*0150*/                   BRA.U UP1, `(.L_x_3) ;
        /*0160*/                   EXIT ;
.L_x_9:
        /*0170*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R2 ;
        /*0180*/              @!P1 BRA `(.L_x_9) ;
        /*0190*/                   BRA `(.L_x_5) ;
        /*01a0*/                   NOP ;
"""


@pytest.fixture(scope="module")
def listing():
    return sass.Listing(SNIPPET)


def test_instructions_are_read_with_predicate_opcode_and_operands(listing):
    store = next(i for i in listing.instructions if i.opcode == "STL")
    assert (store.address, store.predicate, store.operands, store.kind) == (
        0x140,
        "@P2",
        "[R1+0x4], R8",
        "local memory",
    )
    assert len(listing.instructions) == 27
    assert sum(listing.counts.values()) == 26  # the padding is not counted


@pytest.mark.parametrize(
    ("opcode", "kind"),
    [
        ("MUFU.EX2", "MUFU.EX2"),
        ("MUFU.RCP", "MUFU other"),
        ("FFMA2", "FFMA2"),
        ("FFMA", "FFMA"),
        ("FADD2.RM", "FADD2"),
        ("FMNMX3", "FMNMX3"),
        ("FMNMX.NAN", "FMNMX"),
        ("SHFL.BFLY", "other"),
        ("SHF.L.U32", "SHF"),
        ("LEA", "LEA"),
        ("ULEA", "uniform"),
        ("IMAD.MOV.U32", "IMAD"),
        ("F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C", "F2FP"),
        ("UTCQMMA", "tensor"),
        ("UTCBAR", "uniform"),
        ("HGMMA.64x128x16.F32.BF16", "tensor"),
        ("HFMA2", "half"),
        ("LDTM.STAT.x32.MAX.F32", "tensor memory"),
        ("STL.64", "local memory"),
        ("BAR.ARV", "other"),
    ],
)
def test_each_opcode_has_one_class(opcode, kind):
    assert sass.Instruction(0, "", opcode, "").kind == kind


def test_loops_are_natural_loops_and_leave_spinning_waits_out(listing):
    spans = [(loop.first, loop.last) for loop in flow.Flow(listing).loops]
    assert spans == [(0x60, 0x150), (0x70, 0x130), (0x170, 0x180)]
    main = flow.main_loop(flow.Flow(listing))
    assert (main.loop.first, main.loop.last, main.elements, main.masked) == (0x70, 0x130, 4, None)
    assert len(main.loop.instructions) == 13
    assert main.per_element["MUFU.EX2"] == 0.5
    assert main.per_element["total"] == 13 / 4


def test_roles_are_told_by_what_runs_after_them(listing):
    # The range that LDTM.x4 R8 loads ends at R11; FFMA2 ... R14 reads the pair up to R15 but names R14 only.
    assert flow.Flow(listing).roles == [flow.Role("load", 56, 0), flow.Role("softmax", 192, 15)]


def test_digest_sees_an_operand_but_not_the_names_of_labels_and_symbols(listing):
    renamed = SNIPPET.replace("kernel_a", "other").replace(".L_x_", ".L_x_1")
    assert sass.Listing(renamed).digest == listing.digest
    assert sass.Listing(SNIPPET.replace("0x16, RZ", "0x15, RZ")).digest != listing.digest
    assert sass.Listing(SNIPPET.replace("@P2 STL", "@P3 STL")).digest != listing.digest


def test_hopper_scores_are_those_of_fresh_accumulators():
    text = "        /*0000*/                   MOV R1, RZ ;\n.L_x_0:\n"
    body = ["HGMMA.64x16x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT", "HGMMA.64x16x16.F32.BF16 R24, gdesc[UR8], R24"]
    body += ["HGMMA.64x32x16.F32.BF16 R40, R24, gdesc[UR8], R40"] + ["FMNMX R2, R3, R4, !PT"] * 8 + ["BRA `(.L_x_0)"]
    text += "".join(f"        /*{16 * (n + 1):04x}*/                   {line} ;\n" for n, line in enumerate(body))
    assert flow.main_loop(flow.Flow(sass.Listing(text))).elements == 8  # 64 × 16 scores over 128 threads


def test_text_without_instructions_or_loops_is_refused():
    with pytest.raises(LabError, match="holds no instruction"):
        sass.Listing("nothing here\n")
    with pytest.raises(LabError, match="no loop over key tiles"):
        flow.main_loop(flow.Flow(sass.Listing("        /*0000*/                   EXIT ;\n")))
    with pytest.raises(LabError, match="does not hold"):
        flow.Flow(sass.Listing("        /*0000*/                   BRA `(.L_x_7) ;\n"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"arch": "sm_75"}, "arch is 'sm_75'"),
        ({"arch": "sm_90a", "dtype": "fp8"}, "FP8 on sm_100a and sm_103a only"),
        ({"head_dim": 192}, "head_dim is 192"),
        ({"emulation": (7, 1)}, "even frequency"),
        ({"emulation": (16, -1)}, "even frequency"),
        ({"arch": "sm_90a", "emulation": (16, 1)}, "setting of the stock exponential"),
        ({"variant": "h15", "emulation": (16, 1)}, "setting of the stock exponential"),
        ({"variant": "exp"}, "unknown"),
    ],
)
def test_what_cannot_be_compiled_is_refused_before_anything_runs(arguments, said):
    with pytest.raises(LabError, match=said):
        audit.audit(**arguments)


@pytest.mark.parametrize("text", ["16", "16,1,2", "a,b", ""])
def test_emulation_is_two_numbers(text):
    with pytest.raises(LabError, match="FREQ,START"):
        audit.parse_emulation(text)


def test_predicate_gives_the_papers_shares_and_six_programs():
    from softmaxlab import paper

    table = paper.table("tableB5d_emulation", numbers=True)
    table = table[table["emulated_pct"].notna()]
    assert len(table) == len(audit.SETTINGS)
    for row in table.itertuples():
        start = 1 if row.start_frg != row.start_frg else int(row.start_frg)
        assert 100 * audit.emulated_share(int(row.freq), start) == row.emulated_pct
    assert len({audit.emulated_pairs(*s) for s in audit.SETTINGS}) == 6
    assert audit.emulated_pairs(2, 0) == audit.emulated_pairs(4, 0)


def test_grid_is_of_kernels_that_exist():
    requests = audit.grid()
    assert len(requests) == len(set(requests))
    assert {r.arch for r in requests} == set(ARCHS)
    assert {r.emulation for r in requests if r.emulation} == set(audit.SETTINGS)


def test_a_recorded_audit_is_read_back_and_a_broken_one_is_named(tmp_path):
    with pytest.raises(LabError, match="softmaxlab audit --all"):
        audit.stored(tmp_path)
    (tmp_path / "audit").mkdir()
    (tmp_path / "audit" / "kernels.json").write_text('{"kernels": 3}')
    with pytest.raises(LabError, match="holds no audit"):
        audit.stored(tmp_path)


@installed
@pytest.mark.parametrize("arch", ARCHS)
def test_stock_h15_and_s7_on_every_architecture(arch):
    rows = {v: audit.audit(arch, variant=v) for v in ("stock", "control", "h15", "s(7)")}
    stock, h15 = rows["stock"], rows["h15"]
    assert all((r["local"], r["stack"], r["ldl"], r["stl"]) == (0, 0, 0, 0) for r in rows.values())
    assert rows["control"]["digest"] == stock["digest"]  # the replacement path costs nothing
    assert h15["digest"] != stock["digest"] != rows["s(7)"]["digest"]
    assert stock["elements"] == h15["elements"] == (64 if arch == "sm_90a" else 128)
    # At least two exponentials a lane stay: the rescale of the accumulator is exact.
    assert stock["loop"]["MUFU.EX2"] > 0.8 * stock["elements"] > 4 >= h15["loop"]["MUFU.EX2"]
    assert h15["loop"]["LEA"] >= h15["elements"]  # one shift and add a score
    assert sum(rows["s(7)"]["loop"].values()) == sum(h15["loop"].values())
    assert h15["registers"] == stock["registers"]


@installed
def test_main_loop_on_hopper_is_what_was_measured_there():
    per_element = {
        v: sum(r["loop"].values()) / r["elements"]
        for v in ("stock", "fused7")
        for r in [audit.audit("sm_90a", variant=v)]
    }
    assert per_element["stock"] == pytest.approx(7.41, abs=0.1)
    assert per_element["fused7"] == pytest.approx(8.44, abs=0.1)


@installed
def test_the_audit_is_deterministic(tmp_path, monkeypatch):
    first = audit.audit("sm_90a", variant="h15")
    monkeypatch.setenv("SOFTMAXLAB_CACHE", str(tmp_path))
    again = audit.audit("sm_90a", variant="h15")
    assert (tmp_path / "fa4" / "audit").is_dir()
    assert again == first


@installed
def test_settings_with_one_predicate_are_one_program():
    two, four = (audit.audit(dtype="fp8", emulation=(f, 0)) for f in (2, 4))
    assert two["digest"] == four["digest"]
    assert two["loop"]["MUFU.EX2"] == 128 // 4 + 1  # three fragments of four, and the rescale


@installed
def test_command_line_prints_json_and_refuses_in_one_sentence():
    command = [sys.executable, "-m", "softmaxlab.cli", "audit", "--causal", "--variant", "h15", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == audit.audit(variant="h15")
    done = subprocess.run([*command, "--emulation", "16"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("softmaxlab: emulation '16' is not of the form FREQ,START")
    assert len(done.stderr.splitlines()) == 1


def test_requests_can_be_keys():
    assert Request(dtype="fp8") == Request(dtype="e4m3")
