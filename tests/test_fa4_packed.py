"""The packed kernel: its patch, what falls back, what is compiled for GPUs that are not here, gates rehearsed."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from softmaxlab import fa4
from softmaxlab.errors import LabError
from softmaxlab.fa4 import (
    Variant,
    audit,
    edits,
    flow,
    gates,
    packed_cases,
    packed_edits,
    packed_gates,
    packed_support,
    readings,
    sass,
    source,
    text_patch,
)
from softmaxlab.fa4 import compile as compiler

needs_fa4 = pytest.mark.skipif(importlib.util.find_spec("flash_attn") is None, reason="FlashAttention-4 is missing")
PACKED = Variant.parse("packed")


# The variant


def test_text_forms():
    assert str(PACKED) == "packed(4,3)" == str(Variant.parse("packed(4)")) == str(Variant.parse(" packed( 4 , 3 ) "))
    assert PACKED.packed and Variant.parse("loose(4,3)").packed and not Variant().packed and PACKED.offered
    assert str(PACKED.operator()) == "packed(k=4)" and str(PACKED.operator("fp16")) == "packed(k=4,p=fp16)"
    for text, said in [
        ("packed(5,3)", "k is 5"),
        ("packed(4,6)", "sum_levels is 6"),
        ("packed(4,3,2)", "not of the form"),
    ]:
        with pytest.raises(LabError, match=re.escape(said)):
            Variant.parse(text)


# The patch


@needs_fa4
@pytest.mark.parametrize(("name", "number"), [(n, i) for n, e in packed_edits.EDITS.items() for i in range(len(e))])
def test_a_moved_anchor_is_refused_by_name(name, number):
    body = packed_edits.checked()[name]
    anchor = packed_edits.EDITS[name][number][0]
    for text, count in ((body.replace(anchor, "moved"), 0), (body + anchor, 2)):
        with pytest.raises(LabError, match=f"stands {count} times in {name}"):
            edits.edited(name, text, {name: (packed_edits.EDITS[name][number],)})
    assert edits.edited(name, body, packed_edits.EDITS) != body


@needs_fa4
@pytest.mark.parametrize("name", packed_edits.METHODS)
def test_a_changed_method_is_refused_by_its_hash(tmp_path, name):
    import shutil

    folder = tmp_path / "flash_attn" / "cute"
    shutil.copytree(source.installed(), folder, ignore=shutil.ignore_patterns("*.pyc"))
    path = folder / packed_edits.METHODS[name]
    body = source.method(path.read_text(), name)
    path.write_text(path.read_text().replace(body, body + "        # one more line\n        pass\n"))
    with pytest.raises(LabError, match=rf"{name.replace('.', '[.]')} in .* has sha256 "):
        packed_edits.checked(tmp_path)


@needs_fa4
def test_what_must_stay_exact_is_not_edited():
    texts = packed_edits.checked()
    softmax = edits.edited("Softmax.online_softmax", texts["Softmax.online_softmax"], packed_edits.EDITS)
    assert softmax.count("(row_max_prev - row_max_cur) * scale_log2, fastmath=True") == 1
    assert softmax.count("cute.math.exp2(") == 2  # the rescale, and in a comment
    finalize = edits.edited("Softmax.finalize", texts["Softmax.finalize"], packed_edits.EDITS)
    assert "row_sum[r] += cute.math.exp2(sink_val_cur * LOG2_E - row_max_scaled, fastmath=True)" in finalize


@needs_fa4
def test_methods_of_both_files_are_replaced_and_put_back(monkeypatch, tmp_path):
    monkeypatch.setenv("SOFTMAXLAB_CACHE", str(tmp_path))
    from flash_attn.cute import flash_fwd_sm90, softmax

    def state():
        found = [flash_fwd_sm90.FlashAttentionForwardSm90.mma_one_n_block_intrawg_overlap, softmax.Softmax.finalize]
        return [*found, softmax.Softmax.online_softmax, softmax.SoftmaxSm100.update_row_sum]

    stock = state()
    with fa4.variant("packed"):
        assert all(a is not b for a, b in zip(stock, state(), strict=True))
        with fa4.variant("g(1)"):
            assert [a is b for a, b in zip(stock, state(), strict=True)] == [True, True, False, True]
    assert state() == stock


@needs_fa4
def test_the_text_patch_refuses_what_falls_back_call_by_call():
    with pytest.raises(LabError, match=r"packed\(4,3\) was not applied: it falls back call by call"):
        text_patch.apply("packed")
    with pytest.raises(LabError, match="skip was not applied: it is for timing"):
        text_patch.apply("skip")


@needs_fa4
@pytest.mark.parametrize("kind", ["lazy", "skip"])
def test_rescales_by_one_are_skipped_and_others_kept(kind):
    """Machine code with one branch more: the products of the rescale in a block of their own, and a vote before it."""
    rows = {v: audit.audit("sm_90a", variant=v) for v in ("stock", "packed", kind)}
    base = rows["stock" if kind == "skip" else "packed"]
    assert rows[kind]["opcodes"]["VOTE.ANY"] == base["opcodes"].get("VOTE.ANY", 0) + 1
    listing = sass.Listing(sass.disassemble(compiler.compile(kind, "sm_90a").cubin))
    loop = flow.main_loop(flow.Flow(listing)).loop
    opcodes = [i.opcode for i in loop.instructions]
    last = len(opcodes) - opcodes[::-1].index("VOTE.ANY")
    assert sum(o == "FMUL" for o in opcodes[last:]) == 64
    first = last + opcodes[last:].index("FMUL")
    assert "BRA" in opcodes[last:first] and set(opcodes[first : first + 64]) == {"FMUL"}
    tested = next(i for i in loop.instructions[:last][::-1] if i.opcode.startswith("FSETP"))
    assert tested.opcode == "FSETP.NEU.AND"  # also where it is no number


# What falls back


def arguments(dims=(128, 128), dtype=torch.bfloat16, **more):
    q, v = (torch.empty(1, 8, 1, d, dtype=dtype, device="meta") for d in dims)
    return {"q": q, "k": q, "v": v, "softmax_scale": None, "num_splits": 1} | more


@pytest.mark.parametrize(
    ("variant", "arch", "given", "said"),
    [
        ("packed", 90, {"page_table": 1}, "paged keys are untested"),
        ("packed", 90, {"score_mod": abs}, "but for softcap"),
        ("packed", 90, {"mask_mod": abs}, "mask_mod"),
        ("packed", 90, {"block_sparse_tensors": 1}, "block sparsity"),
        ("packed", 90, {"softmax_scale": -1.0}, "softmax_scale is -1.0"),
        ("packed", 90, {"softmax_scale": float("nan")}, "softmax_scale is nan"),
        ("packed", 90, {"num_splits": 4}, "num_splits is 4"),
        ("packed", 90, {"dims": (80, 80)}, "the head dimension is 80"),
        ("packed", 90, {"dims": (128, 64)}, "the head dimension is (128, 64)"),
        ("packed", 90, {"dtype": torch.float8_e5m2}, "P would be torch.float8_e5m2"),
        ("packed", 100, {}, "k = 4 has no codes above it"),
        ("packed(3,3)", 103, {}, "never run"),
        ("packed(3,3)", 100, {"dtype": torch.float16}, "FP16's codes too few"),
        ("packed(2,3)", 100, {"dtype": torch.float8_e4m3fn}, "three fractional bits"),
    ],
)
def test_what_falls_back_and_why(variant, arch, given, said):
    assert said in packed_support.refusal(Variant.parse(variant), arch, arguments(**given))


@pytest.mark.parametrize("dims", packed_support.HEAD_DIMS["sm_90"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_is_offered_on_hopper(dims, dtype):
    for more in ({}, {"causal": True}, {"softcap": 15.0}, {"window_size_left": 9}, {"learnable_sink": 1}, {"lse": 1}):
        assert packed_support.refusal(PACKED, 90, arguments(dims, dtype, **more)) == ""
    assert packed_support.refusal(Variant.parse("packed(3,3)"), 100, arguments(), running=False) == ""


def test_a_notice_is_given_once(monkeypatch):
    monkeypatch.setattr(packed_support, "_noticed", set())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            packed_support.notice(PACKED, "this and that")
    assert [str(w.message) for w in caught] == ["packed(4,3) falls back to the stock exponential: this and that"]


# Compiled without a GPU


def codes_before_the_wait(loop):
    """Whether every conversion lies before the last wait of the loop, and every shift, sum and rescale after it."""
    at = {
        name: [n for n, i in enumerate(loop.instructions) if re.match(name, i.opcode)]
        for name in ("F2FP.RELU", "HADD2", "WARPGROUP.DEPBAR")
    }
    wait = at["WARPGROUP.DEPBAR"][-1]
    return max(at["F2FP.RELU"]) < wait < min(at["HADD2"])


@needs_fa4
@pytest.mark.parametrize("head_dim", [128, 64])
def test_main_loop_on_hopper(head_dim):
    rows = {v: audit.audit("sm_90a", head_dim=head_dim, variant=v) for v in ("stock", "packed", "packed(1,3)", "loose")}
    total = {v: sum(r["loop"].values()) / r["elements"] for v, r in rows.items()}
    assert total["packed"] < total["stock"] - 0.75 and abs(total["loose"] - total["packed"]) < 0.15
    for name in ("packed", "packed(1,3)", "loose"):
        row = rows[name]
        opcodes, n = row["opcodes"], row["elements"]
        assert opcodes["F2FP.RELU.F16.F32.PACK_AB"] == n // 2 and opcodes["MUFU.EX2"] == 2  # one a row: the rescale
        assert opcodes["HADD2.BF16_V2"] == 7 * n // 16  # seven for eight words
        assert not any(o.startswith("F2FP.BF16") for o in opcodes)
        assert (row["local"], row["stack"], row["ldl"], row["stl"]) == (0, 0, 0, 0)
        assert row["registers"] == rows["stock"]["registers"]
    if head_dim == 128:
        assert total["packed"] == pytest.approx(6.53, abs=0.1) and total["stock"] == pytest.approx(7.41, abs=0.1)
    for name, expected in (("packed", True), ("loose", False)):
        cubin = compiler.compile(name, "sm_90a", head_dim=head_dim).cubin
        loop = flow.main_loop(flow.Flow(sass.Listing(sass.disassemble(cubin)))).loop
        assert codes_before_the_wait(loop) == expected


@needs_fa4
def test_main_loop_in_fp16():
    row = audit.audit("sm_90a", "fp16", variant="packed")
    assert row["opcodes"]["F2FP.RELU.F16.F32.PACK_AB"] == 32 and row["opcodes"]["MUFU.EX2"] == 2
    assert row["opcodes"]["HADD2"] == 28


@needs_fa4
@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
@pytest.mark.parametrize("dtype", ["bf16", "e4m3"])
def test_main_loop_on_blackwell(arch, dtype):
    stock, packed = (audit.audit(arch, dtype, variant=v) for v in ("stock", "packed(3,3)"))
    opcodes, n = packed["opcodes"], packed["elements"]
    assert opcodes["F2FP.RELU.F16.F32.PACK_AB"] == n // 2 and opcodes["FFMA2"] == n // 2
    assert packed["loop"].get("MUFU.EX2", 0) <= 1  # the rescale
    assert packed["loop"]["half"] >= 7 * n // 16
    assert sum(packed["loop"].values()) < sum(stock["loop"].values())
    if dtype == "e4m3":
        assert opcodes["PRMT"] >= n // 4 and not any("E4M3" in o for o in opcodes)


TRACES = {
    "dim 192": {"dims": [192, 192], "causal": True},
    "dims 192 and 128": {"dims": [192, 128]},
    "dim 256, grouped": {"dims": [256, 256], "gqa": 8, "causal": True},
    "dim 96, P through shared memory": {"dims": [96, 96], "dtype": "float16"},
    "soft-cap": {"softcap": 15.0, "causal": True},
    "sinks, more queries than keys": {"sink": True, "causal": True, "lengths": [2048, 1024], "dtype": "float16"},
    "variable lengths": {"varlen": True, "causal": True},
    "window": {"window_size_left": 256, "window_size_right": 0},
    "no overlap": {"intra_wg_overlap": False, "causal": True},
    "not offered": {"dims": [80, 80]},
}


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    """Every case traced and compiled for Hopper, in one process."""
    dump, kept = tmp_path_factory.mktemp("dump"), tmp_path_factory.mktemp("kept")
    here = Path(__file__).parent
    clean = {n: v for n, v in os.environ.items() if not n.startswith(("CUTE_DSL_", "FLASH_ATTENTION_"))}
    target = {"CUTE_DSL_ARCH": "sm_90a", "FLASH_ATTENTION_ARCH": "sm_90", "FLASH_ATTENTION_NUM_SMS": "132"}
    target |= {"CUTE_DSL_KEEP": "ptx,cubin", "CUTE_DSL_DUMP_DIR": str(dump), "CUDA_VISIBLE_DEVICES": ""}
    target["PYTHONPATH"] = os.pathsep.join([str(here.parent), clean.get("PYTHONPATH", "")])
    text = "".join(json.dumps(case) + "\n" for case in TRACES.values())
    command = [sys.executable, str(here / "packed_traces.py"), str(kept)]
    done = subprocess.run(command, input=text, capture_output=True, text=True, env=clean | target, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(zip(TRACES, map(json.loads, done.stdout.splitlines()), strict=True))


@needs_fa4
@pytest.mark.parametrize("name", TRACES)
def test_every_offered_case_compiles_for_hopper(traces, name):
    row = traces[name]
    assert row["kernels"] == 1
    if name == "not offered":
        assert row["cvt.rn.relu.f16x2"] == 0 and row["ex2.approx"] > 100
        assert "the head dimension is 80" in row["notices"][0]
        return
    half = TRACES[name].get("dtype") == "float16"
    assert row["notices"] == [] and row["cvt.rn.relu.f16x2"] > 40 and row["ex2.approx"] <= 6
    assert (row["add.rn.f16x2"] > 0, row["add.rn.bf16x2"] > 0) == (half, not half)


# Gates, rehearsed


@pytest.mark.parametrize("variant", ["packed(4,3)", "packed(1,5)", "packed(3,0)"])
def test_gates_of_every_variant_are_green(variant):
    frame = gates.run([variant], attend=readings.simulated, cases=gates.smaller(queries=48), device="cpu")
    assert frame.passed.all() and frame.offered.all(), frame[~frame.passed].to_string()


FEW = packed_cases.CASES[::9]


def test_its_own_gates_are_green():
    frame = packed_gates.run(["packed(4,3)"], attend=packed_cases.simulated, cases=FEW, device="cpu", exhaustive=False)
    assert frame.passed.all(), frame[~frame.passed].to_string()
    assert {c.name for c in FEW} < set(frame.case)


def test_a_case_that_fails_is_a_red_gate():
    def attend(*_, **__):
        raise RuntimeError("the compiler gave up")

    frame = packed_gates.run(["packed(4,3)"], attend=attend, cases=FEW[:1], device="cpu", exhaustive=False)
    assert set(frame.case) == {"exact scores, bf16", "exact scores, fp16", FEW[0].name} and not frame.passed.any()
    assert frame.gate.str.contains("did not run: RuntimeError: the compiler gave up").all()


def wrong(change):
    def attend(q, k, v, *, variant, **more):
        other = change(variant, more) if variant.packed else variant
        return packed_cases.simulated(q, k, v, variant=other, **more)

    return attend


def test_another_order_of_the_row_sum_is_caught_by_the_log_sum_exp_alone():
    attend = wrong(lambda variant, _: Variant("packed", k=variant.k, levels=2))
    found = packed_gates.exact(PACKED, "bf16", attend, "cpu", 13)
    assert found["largest error of the log-sum-exp, nats"][0] > 1e-4


def test_halves_in_the_wrong_place_are_caught():
    def attend(q, k, v, *, variant, **more):
        swapped = v.unflatten(1, (-1, 2)).flip(2).flatten(1, 2)
        return packed_cases.simulated(q, k, swapped, variant=variant, **more)

    value, _, high = packed_gates.exact(PACKED, "bf16", attend, "cpu", 13)["weights of another code"]
    assert value > high


@pytest.mark.parametrize("k", [1, 2, 3])
def test_another_lattice_is_caught(k):
    attend = wrong(lambda variant, _: Variant("packed", k=k, levels=3))
    value, _, high = packed_gates.exact(PACKED, "fp16", attend, "cpu", 13)["weights of another code"]
    assert value > high


@pytest.mark.parametrize("lost", ["learnable_sink", "window_size", "softcap", "causal"])
def test_an_argument_that_is_lost_is_caught(lost):
    def attend(q, k, v, *, variant, **more):
        return packed_cases.simulated(q, k, v, variant=variant, **{n: a for n, a in more.items() if n != lost})

    name = {"learnable_sink": "sinks, bf16", "window_size": "window 100, bf16"}.get(lost, "soft-cap 15, bf16")
    case = next(c for c in packed_cases.CASES if c.name == name)
    readings_ = packed_gates.of_case(PACKED, case, attend, "cpu")
    assert any(not low <= value <= high for value, low, high in readings_.values())


@pytest.mark.gpu
@pytest.mark.skipif(
    importlib.util.find_spec("flash_attn") is None
    or not torch.cuda.is_available()
    or torch.cuda.get_device_capability()[0] != 9,
    reason="needs a Hopper GPU",
)
def test_every_gate_is_green_on_this_gpu():
    frame = packed_gates.run([f"packed({k},3)" for k in (1, 2, 3, 4)], processes=8)
    assert frame.passed.all(), frame[~frame.passed].to_string()
