"""The isolated exponentials: how their instructions are counted, and, where nvcc is, what the paper counts."""

import hashlib
import importlib.util
import shutil
from pathlib import Path

import pytest

from softmaxlab import paper
from softmaxlab.errors import LabError
from softmaxlab.fa4 import micro

FILE = Path(__file__).parents[1] / "kernel" / "micro" / "count.py"
_spec = importlib.util.spec_from_file_location("micro_count", FILE)
count = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(count)


def listing(*lines: str) -> list[str]:
    return [f"        /*{16 * i:04x}*/                   {line} ;" for i, line in enumerate(lines)]


def test_only_what_a_loaded_value_flows_through_is_counted():
    lines = listing(
        "LDC R1, c[0x0][0x28]",
        "LDG.E R2, desc[UR4][R2.64]",
        "IMAD.WIDE.U32 R4, R7, 0x4, R4",  # an address
        "FFMA R0, R2, R8, R9",
        "@P0 FMNMX R0, R0, -252, !PT",
        "FADD R3, R0, 12582912",
        "LEA R7, R0, R3, 0x16",
        "MOV R0, 0x1",
        "IADD3 R0, R0, 0x1, RZ",  # of a register that holds something else by now
        "STG.E desc[UR4][R4.64], R7",
        "EXIT",
    )
    assert count.flow(lines) == ({"FFMA": 1, "FMNMX": 1, "FADD": 1, "LEA": 1}, 4)


def test_packed_instructions_carry_both_halves():
    lines = listing(
        "LDG.E.128 R8, desc[UR4][R36.64]",
        "FFMA2.FTZ R4, R8.F32x2.HI_LO, UR6.F32, R3.reuse.F32",
        "FADD2.FTZ.RM R6, R4.F32x2.HI_LO, 12582912",
        "MUFU.EX2 R7, R7",
        "FMNMX R12, R11, -127, !PT",
        "STG.E.128 desc[UR4][R36.64], R4",
    )
    assert count.flow(lines) == ({"FFMA2": 1, "FADD2": 1, "MUFU.EX2": 1, "FMNMX": 1}, 3)


def _has(name: str) -> bool:
    return bool(
        shutil.which(name)
        or list(Path(importlib.util.find_spec("torch").origin).parents[1].glob(f"nvidia/*/bin/{name}"))
    )


@pytest.mark.skipif(not all(map(_has, ("nvcc", "nvdisasm", "cuobjdump"))), reason="nvcc or a disassembler is missing")
def test_the_papers_static_audit(tmp_path):
    """B.5, sm_86: eight instructions and a chain of eight for the cubic emulation, three and three for Rowmax-H15."""
    rows = {(r["exponential"], r["kernel"]): r for r in count.count("sm_86", tmp_path)}
    for kernel in count.ELEMENTS:
        assert (rows["poly3", kernel]["instructions"], rows["poly3", kernel]["chain"]) == (8, 8)
        assert (rows["h15", kernel]["instructions"], rows["h15", kernel]["chain"]) == (3, 3)
        assert (rows["fused7", kernel]["instructions"], rows["ex2", kernel]["opcodes"]) == (2, {"MUFU.EX2": 1})


def test_the_recorded_count_is_the_papers_and_of_this_source():
    frame, tools = micro.stored(FILE.parents[2] / "results")
    assert (
        tools["kind"] == "compiled" and tools["source sha256"] == hashlib.sha256(count.SOURCE.read_bytes()).hexdigest()
    )
    assert set(frame["arch"]) == set(count.ARCHS) and set(frame["kernel"]) == set(count.ELEMENTS)
    for name, kernel in {"poly3": "fa4_cubic", "h15": "h15"}.items():
        row = frame[(frame["arch"] == "sm_86") & (frame["exponential"] == name) & (frame["kernel"] == "single")].iloc[0]
        for ours, theirs in (("instructions", "instr_per_element"), ("floating", "fp_pipe_instr_per_element")):
            assert row[ours] == paper.value("audit", kernel=kernel, metric=theirs).value
        assert row["chain"] == paper.value("audit", kernel=kernel, metric="dependency_depth").value


def test_a_count_that_is_missing_or_none_is_one_sentence(tmp_path):
    with pytest.raises(LabError, match=r"there is no audit/micro\.json in .*: `python kernel/micro/count\.py --out"):
        micro.stored(tmp_path)
    (tmp_path / "audit").mkdir()
    for text in ("", "[]", '{"rows": []}', '{"rows": [{"arch": "sm_86"}]}'):
        (tmp_path / "audit" / "micro.json").write_text(text)
        with pytest.raises(LabError, match="holds no count of the isolated exponentials"):
            micro.stored(tmp_path)
