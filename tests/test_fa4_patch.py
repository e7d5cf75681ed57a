"""The run-time patch: variants, what it refuses, what it leaves behind, and kernels compiled without a GPU."""

import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from softmaxlab import fa4
from softmaxlab.errors import LabError
from softmaxlab.fa4 import Variant, doctor, edits, patch, source
from softmaxlab.fa4 import compile as compiler

INSTALLED = importlib.util.find_spec("flash_attn") is not None
needs_fa4 = pytest.mark.skipif(not INSTALLED, reason="FlashAttention-4 is not installed")


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("SOFTMAXLAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def copy(tmp_path) -> Path:
    """A folder that holds a copy of FlashAttention-4."""
    shutil.copytree(
        source.installed(), tmp_path / "copy" / "flash_attn" / "cute", ignore=shutil.ignore_patterns("*.pyc")
    )
    return tmp_path / "copy"


# Variants


@pytest.mark.parametrize("text", [str(v) for v in fa4.variants()])
def test_text_form_and_what_is_offered(text):
    variant = Variant.parse(text)
    assert str(variant) == text and Variant.parse(f" {text} ") == variant
    assert variant.offered == (variant.why_not == "") and variant.summary
    # Offered means: a fully masked row weighs nothing. The operator's own arithmetic says so at x = −∞.
    if variant.kind != "identity":
        at_masked = variant.operator().at(torch.tensor([-torch.inf], dtype=torch.float64)).item()
        assert (at_masked == 0) == variant.offered


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("h16", "unknown"),
        ("s", "s(k)"),
        ("s(14)", "from 0 to 13"),
        ("", "unknown"),
        ("S(7)", "unknown"),
        ("poly(3,inf)", "from 0.0625 to 1"),
        ("poly(3,0.01)", "from 0.0625 to 1"),
        ("f(0)", "from 1 to 13"),
        ("s(one)", "a whole number"),
        ("poly(4,all)", "1, 2 or 3"),
        ("poly(3,0)", "from 0.0625 to 1"),
        ("poly(3,nan)", "from 0.0625 to 1"),
        ("poly(3,half)", "a number or all"),
        ("stock(1)", "not of the form stock"),
        ("s(1", "unknown"),
    ],
)
def test_variants_that_are_refused(text, said):
    with pytest.raises(LabError, match=f"(?s){text.split('(')[0]}.*") as caught:
        Variant.parse(text)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_variant_has_the_arguments_of_its_kind_and_no_others():
    with pytest.raises(LabError, match="h15 has no k"):
        Variant("h15", k=1)
    with pytest.raises(LabError, match="poly needs a share"):
        Variant("poly", degree=3)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"kind": "s", "k": 1.5}, "k is 1.5, but must be a whole number"),
        ({"kind": "s", "k": True}, "k is True"),
        ({"kind": "g", "k": "1"}, "k is '1'"),
        ({"kind": "poly", "degree": 2.0, "share": 1}, "degree is 2.0"),
        ({"kind": "poly", "degree": 2, "share": "all"}, "share is 'all'"),
    ],
)
def test_values_of_another_type_are_refused(arguments, said):
    with pytest.raises(LabError) as caught:
        Variant(**arguments)
    assert said in str(caught.value)
    with pytest.raises(LabError, match="named by a text, as 'g\\(3\\)', and this is 7"):
        Variant.parse(7)


# What is checked before anything is made


@needs_fa4
def test_an_unknown_version_is_refused(monkeypatch, cache):
    before = (
        dict(vars(sys.modules["flash_attn.cute.softmax"].SoftmaxSm100))
        if "flash_attn.cute.softmax" in sys.modules
        else None
    )
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda n: "4.0.0b99" if n == "flash-attn-4" else real(n))
    monkeypatch.setattr(patch, "_ready", {})
    with pytest.raises(LabError, match=r"flash-attn-4 is 4\.0\.0b99, but must be 4\.0\.0b36"), fa4.variant("h15"):
        pytest.fail("the block was entered")
    if before is not None:
        assert dict(vars(sys.modules["flash_attn.cute.softmax"].SoftmaxSm100)) == before
    assert fa4.active() == Variant()


def test_without_flash_attention_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LabError, match=r"pip install flash-attn-4==4\.0\.0b36"):
        source.checked()


@needs_fa4
def test_a_copy_of_an_unknown_version_is_refused(copy):
    """By its own metadata: bodies of the methods were the same in several versions."""
    source.checked(copy)
    (copy / "flash_attn_4-4.0.0b30.dist-info").mkdir()
    (copy / "flash_attn_4-4.0.0b30.dist-info" / "METADATA").write_text("Name: flash-attn-4\nVersion: 4.0.0b30\n")
    with pytest.raises(LabError, match=r"flash-attn-4 is 4\.0\.0b30, but must be 4\.0\.0b36"):
        source.checked(copy)


@needs_fa4
def test_what_cannot_be_imported_or_written_is_one_sentence(tmp_path):
    """A compiler that is missing, a foreign flash_attn that fails as it is imported, a cache that is no folder."""
    (tmp_path / "broken" / "flash_attn").mkdir(parents=True)
    (tmp_path / "broken" / "flash_attn" / "__init__.py").write_text("raise ImportError('no libcudart')\n")
    (tmp_path / "file").touch()
    cases = {
        "import sys; sys.modules['cutlass'] = None": r".* is installed, but cannot be imported \(.*cutlass",
        f"import sys; sys.path.insert(0, {str(tmp_path / 'broken')!r})": r"FlashAttention-4 is not installed here",
        f"import os; os.environ['SOFTMAXLAB_CACHE'] = {str(tmp_path / 'file')!r}": r"the cache .* cannot be written",
    }
    for before, said in cases.items():
        code = f"{before}\nfrom softmaxlab import fa4\nfrom softmaxlab.errors import LabError\n"
        code += "try:\n    fa4.variant('h15').__enter__()\nexcept LabError as error:\n    print(error)\n"
        done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
        assert len(done.stdout.splitlines()) == 1 and re.match(said, done.stdout), done.stdout


@needs_fa4
@pytest.mark.parametrize("name", source.METHODS)
def test_a_changed_method_is_refused_by_its_hash(copy, name):
    path = copy / "flash_attn" / "cute" / "softmax.py"
    text = path.read_text()
    body = source.method(text, name)
    path.write_text(text.replace(body, body + "        # one more line\n        pass\n"))
    with pytest.raises(LabError, match=rf"{name.replace('.', '[.]')} in .* has sha256 .* it was changed"):
        source.checked(copy)
    path.write_text(text)
    assert source.checked(copy)[name] == body


@needs_fa4
@pytest.mark.parametrize(("name", "number"), [(n, i) for n, e in edits.EDITS.items() for i in range(len(e))])
def test_a_moved_anchor_is_refused_by_name(name, number):
    body = source.checked()[name]
    anchor = edits.EDITS[name][number][0]
    for text, count in ((body.replace(anchor, "moved"), 0), (body + anchor, 2)):
        with pytest.raises(LabError, match=f"stands {count} times in {name}"):
            edits.edited(name, text)
    assert edits.edited(name, body) != body


@needs_fa4
def test_what_must_stay_exact_is_not_edited():
    """The rescale and the sink keep the stock exponential, word for word."""
    texts = source.checked()
    edited = edits.edited("Softmax.online_softmax", texts["Softmax.online_softmax"])
    rescale = (
        "row_scale[r] = cute.math.exp2(\n                    (row_max_prev - row_max_cur) * scale_log2, fastmath=True"
    )
    assert edited.count(rescale) == 1 and edited.count("ELEMENT.row(") == 2
    assert "acc_S_row_exp = cute.math.exp2(" not in edited
    concerned = set(source.METHODS)
    assert not concerned & {"SoftmaxSm100.update_row_max", "Softmax.finalize", "SoftmaxSm100.update_row_max_from_local"}


# At run time


@needs_fa4
def test_methods_are_replaced_and_put_back(cache):
    from flash_attn.cute import interface, softmax

    def state():
        members = [softmax.SoftmaxSm100.scale_subtract_rowmax, softmax.SoftmaxSm100.apply_exp2_convert]
        return [*members, softmax.Softmax.online_softmax, interface._flash_attn_fwd]

    stock, files = state(), source.fingerprint()
    with fa4.variant("h15") as outer:
        h15 = state()
        assert all(a is not b for a, b in zip(stock, h15, strict=True)) and fa4.active() == outer
        with fa4.variant("g(3)"):
            assert all(a is not b for a, b in zip(h15, state(), strict=True))
            with fa4.variant("stock"):
                assert state() == stock
            with fa4.variant("g(3)"):
                assert fa4.active() == Variant.parse("g(3)")
        assert state() == h15
    with pytest.raises(ZeroDivisionError), fa4.variant("fused7"):
        raise ZeroDivisionError
    assert state() == stock and fa4.active() == Variant() and source.fingerprint() == files


@needs_fa4
def test_each_variant_has_a_compile_cache_of_its_own(cache):
    from flash_attn.cute import interface

    own = interface._flash_attn_fwd.compile_cache
    seen = {}
    for text in ("h15", "s(1)", "g(1)", "h15"):
        with fa4.variant(text):
            seen.setdefault(text, interface._flash_attn_fwd.compile_cache)
            assert interface._flash_attn_fwd.compile_cache is seen[text] is not own
    assert len({id(c) for c in seen.values()}) == 3 and interface._flash_attn_fwd.compile_cache is own


@needs_fa4
def test_the_disk_cache_is_apart_too(cache, tmp_path, monkeypatch):
    from flash_attn.cute import cache_utils, interface

    monkeypatch.setattr(cache_utils, "CUTE_DSL_CACHE_ENABLED", True)
    monkeypatch.setattr(cache_utils, "CUTE_DSL_CACHE_DIR", str(tmp_path / "disk"))
    monkeypatch.setattr(patch, "_caches", {})
    monkeypatch.setattr(patch, "_ready", {})
    folders = [cache_utils.get_jit_cache("fwd").cache_path]
    for text in ("h15", "g(1)"):
        with fa4.variant(text):
            folders.append(interface._flash_attn_fwd.compile_cache.cache_path)
    assert len(set(folders)) == 3 and all(f.is_relative_to(tmp_path / "disk") for f in folders)


@needs_fa4
def test_another_thread_and_another_order_are_refused(cache):
    entered, leave = threading.Event(), threading.Event()

    def hold():
        with fa4.variant("g(1)"):
            entered.set()
            leave.wait(60)

    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(hold)
        assert entered.wait(60)
        with pytest.raises(LabError, match=r"g\(1\) stands in another thread"), fa4.variant("h15"):
            pytest.fail("the block was entered")
        leave.set()
        held.result()
    outer, inner = fa4.variant("h15"), fa4.variant("g(2)")
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(LabError, match=r"h15 is left while g\(2\) stands inside it"):
        outer.__exit__(None, None, None)
    inner.__exit__(None, None, None)
    assert fa4.active() == Variant("h15")
    patch._leave(patch._stack[-1])
    assert fa4.active() == Variant()


@needs_fa4
@pytest.mark.parametrize("when", ["entering", "leaving"])
def test_an_interrupted_assignment_is_never_taken_for_stock(cache, monkeypatch, when):
    """Ctrl-C between two assignments: the originals stand again, or the next block is refused."""
    from flash_attn.cute import softmax

    with fa4.variant("h15"):
        pass
    stock, done = softmax.Softmax.online_softmax, []

    def interrupted(owner, name, value, real=setattr):
        done.append(name)
        if len(done) == 2:
            raise KeyboardInterrupt
        real(owner, name, value)

    with monkeypatch.context() as broken:
        block = fa4.variant("h15")
        if when == "leaving":
            block.__enter__()
        broken.setattr(patch, "setattr", interrupted, raising=False)
        with pytest.raises(KeyboardInterrupt):
            block.__enter__() if when == "entering" else block.__exit__(None, None, None)
    if when == "entering":
        assert softmax.Softmax.online_softmax is stock and fa4.active() == Variant()
    else:
        assert fa4.active() == Variant("h15")
        with pytest.raises(LabError, match="was replaced by something else"), fa4.variant("g(1)"):
            pytest.fail("the block was entered")
        patch._leave(patch._stack[-1])
    with fa4.variant("g(1)"):
        assert softmax.Softmax.online_softmax is not stock
    assert softmax.Softmax.online_softmax is stock


@needs_fa4
def test_gradients_other_gpus_and_qv_are_refused(cache, monkeypatch):
    from flash_attn.cute import interface

    q = torch.zeros(1, 8, 1, 64, dtype=torch.bfloat16)
    with pytest.raises(LabError, match=r"requires a gradient, but the variant g\(1\) has none"):
        fa4.flash_attn_func(q.clone().requires_grad_(), q, q, variant="g(1)")
    monkeypatch.setattr(interface, "_get_device_arch", lambda: 80)
    with pytest.raises(LabError, match="the GPU is an sm_80, but variants are for Hopper and Blackwell"):
        fa4.flash_attn_func(q, q, q, variant="g(1)")
    with pytest.raises(LabError, match=r"latent attention \(qv\), .* the variant g\(1\) is not tested"):
        fa4.flash_attn_func(q, q, q, qv=q, variant="g(1)")
    bias = [torch.zeros(1, requires_grad=True)]
    with pytest.raises(LabError, match="requires a gradient"), fa4.variant("g(1)"):
        interface.flash_attn_func(q, q, q, score_mod=lambda *a: a[0], aux_tensors=bias)
    assert fa4.active() == Variant()


@needs_fa4
def test_something_else_that_patched_is_not_overwritten(cache):
    code = (
        "import flash_attn.cute.softmax as s\n"
        "from softmaxlab import fa4\n"
        "s.SoftmaxSm100.apply_exp2_convert = lambda *a: None\n"
        "s.SoftmaxSm100.apply_exp2_convert.__module__ = 'elsewhere'\n"
        "try:\n"
        "    fa4.variant('h15').__enter__()\n"
        "except fa4.patch.LabError as e:\n"
        "    print(e)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "SoftmaxSm100.apply_exp2_convert was replaced by elsewhere already" in done.stdout


@needs_fa4
def test_a_patch_that_came_later_is_not_lost(cache, monkeypatch):
    from flash_attn.cute import softmax

    with fa4.variant("g(1)"):
        pass
    with monkeypatch.context() as other:
        other.setattr(softmax.Softmax, "online_softmax", lambda *a: None)
        with (
            pytest.raises(LabError, match=r"Softmax\.online_softmax was replaced by something else"),
            fa4.variant("h15"),
        ):
            pytest.fail("the block was entered")
    with fa4.variant("h15"):
        assert fa4.active() == Variant("h15")


def _worker_variant(_):
    return str(fa4.active())


@needs_fa4
def test_a_spawned_worker_starts_stock_and_can_be_given_the_variant(cache):
    from multiprocessing import get_context

    with fa4.variant("h15"):
        with get_context("spawn").Pool(1) as pool:
            assert pool.map(_worker_variant, [0]) == ["stock"]
        with get_context("spawn").Pool(1, initializer=fa4.in_worker, initargs=("g(2)",)) as pool:
            assert pool.map(_worker_variant, [0]) == ["g(2)"]


# Compiled without a GPU


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"arch": "sm_80"}, "arch is 'sm_80'"),
        ({"arch": "sm_90a", "dtype": "fp8"}, "FP8 on sm_100a and sm_103a only"),
        ({"head_dim": 72}, "head_dim is 72"),
        ({"variant": "h15", "emulation": (16, 1)}, "a setting of the stock exponential"),
        ({"emulation": (15, 1)}, "an even frequency"),
        ({"gqa": 3}, "gqa is 3"),
    ],
)
def test_requests_that_are_refused(arguments, said):
    with pytest.raises(LabError) as caught:
        compiler.Request(**arguments)
    assert said in str(caught.value)


@pytest.mark.slow
@needs_fa4
@pytest.mark.parametrize("arch", compiler.ARCHS)
def test_kernels_are_compiled_for_gpus_that_are_not_here(arch, cache):
    texts = ("stock", "control", "h15", "s(7)")
    requests = [compiler.Request(t, arch) for t in texts]
    stock, control, h15, s7 = artifacts = compiler.compile_many(requests)
    for artifact in artifacts:
        assert artifact.cubin.read_bytes()[:4] == b"\x7fELF"
        assert f".target {arch}" in artifact.ptx.read_text() and artifact.kernel in artifact.ptx.read_text()
    # Per element one ex2 in the stock kernel; in the bit form only the rescale keeps one.
    ex2 = [a.ptx.read_text().count("ex2.approx") for a in artifacts]
    assert ex2[0] == ex2[1] > 100 and 0 < ex2[2] == ex2[3] < 20
    # The replacement path itself costs nothing: the same machine code.
    assert control.cubin.read_bytes() == stock.cubin.read_bytes()
    assert "shl.b32 \tn, n, 22" in _spaces(h15) or "shl.b32 n, n, 22" in _spaces(h15)
    assert "n, n, 16" in _spaces(s7)
    again = compiler.compile_many(requests)
    assert [a.key for a in again] == [a.key for a in artifacts] and again == artifacts


def _spaces(artifact):
    return " ".join(artifact.ptx.read_text().split())


@needs_fa4
def test_a_compilation_that_fails_says_so_and_keeps_nothing(cache, copy):
    (copy / "flash_attn" / "cute" / "interface.py").write_text("raise RuntimeError('broken copy')\n")
    with pytest.raises(LabError, match="compiling for sm_90a failed with exit code 1: RuntimeError: broken copy"):
        compiler.compile("stock", "sm_90a", package=copy)
    assert not list(cache.rglob("artifact.json"))


@needs_fa4
def test_compiling_into_a_cache_that_is_no_folder_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("SOFTMAXLAB_CACHE", str(tmp_path / "file"))
    with pytest.raises(LabError, match=r"cannot be written .*: set SOFTMAXLAB_CACHE to another folder"):
        compiler.compile("h15")


# The doctor


@needs_fa4
def test_doctor_reports_without_a_gpu(cache, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    table = doctor.report(tile=False).set_index("subject")
    assert table.state["flash-attn-4"] == "4.0.0b36" and table.state["patch at run time"] == "ok"
    assert table.state["kernels on this GPU"] == "no" and "no CUDA GPU" in table.detail["kernels on this GPU"]
    assert "sm_100a" in table.detail["compiling without a GPU"]
    doctor.main(tile=False)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == len(table) and any(line.startswith("flash-attn-4 ") and "4.0.0b36" in line for line in said)


def test_doctor_reports_without_flash_attention(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    table = doctor.report(tile=False).set_index("subject")
    assert table.state["patch at run time"] == "no" and "pip install" in table.detail["patch at run time"]
