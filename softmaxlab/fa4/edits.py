"""The edits that put another exponential into FlashAttention-4's methods, each at an anchor of the text.

Three methods are concerned. On Blackwell `SoftmaxSm100.scale_subtract_rowmax` makes the exponents and
`apply_exp2_convert` the weights; on Hopper `Softmax.online_softmax` does both, for the first tile and for later ones.
What must stay exact is left alone: the rescale of the accumulator and the learnable sink.

Each anchor must stand exactly once in its method. CuTe reads the source of what it compiles, so the edited methods
become a file: in the cache, not in the installed package.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

from softmaxlab.errors import LabError
from softmaxlab.fa4 import packed_edits, source
from softmaxlab.fa4.variants import Variant

_EXP2 = "acc_S_row_exp = cute.math.exp2(\n{0}acc_S_row * scale_log2 - row_max_cur_scaled, fastmath=True\n{1})\n{1}"
_SITE = _EXP2.format(" " * 20, " " * 16)
_ROW = "acc_S_row_exp = ELEMENT.row(acc_S_row, scale_log2, row_max_cur)\n" + " " * 16
_MIXTURE = "if cutlass.const_expr(ex2_emu_freq == 0):"
_PAIR = """if cutlass.const_expr(ELEMENT.replaces):
                    acc_S_row_frg[k, j], acc_S_row_frg[k + 1, j] = ELEMENT.pair(
                        acc_S_row_frg[k, j], acc_S_row_frg[k + 1, j], (j * frg_tile + k) // 2
                    )
                el"""

#: Of each method: anchors, and what stands there afterwards.
EDITS: dict[str, tuple[tuple[str, str], ...]] = {
    "SoftmaxSm100.scale_subtract_rowmax": (
        (
            "bias = max_offset - row_max_scaled",
            "scale_log2, bias = ELEMENT.scale_and_bias(self.scale_log2, row_max, max_offset)",
        ),
        ("(self.scale_log2, self.scale_log2),", "(scale_log2, scale_log2),"),
    ),
    "SoftmaxSm100.apply_exp2_convert": ((_MIXTURE, _PAIR + _MIXTURE),),
    "Softmax.online_softmax": (
        (_SITE + "acc_S_row_sum =", _ROW + "acc_S_row_sum ="),  # the first tile
        (_SITE + "# row_scale[r]", _ROW + "# row_scale[r]"),  # later ones
    ),
}


def edited(name: str, text: str, edits: dict[str, tuple[tuple[str, str], ...]] = EDITS) -> str:
    """A method with its edits made; `packed_edits.EDITS` are those of the packed variants.

    Raises:
        LabError: an anchor does not stand exactly once in it.
    """
    for anchor, replacement in edits[name]:
        count = text.count(anchor)
        if count != 1:
            first = anchor.splitlines()[0]
            raise LabError(
                f"the anchor {first!r} stands {count} times in {name}, but must stand once: nothing was patched"
            )
        text = text.replace(anchor, replacement)
    return text


def element(variant: Variant) -> str:
    """The expression that makes a variant's `Element`.

    Raises:
        LabError: the variant is stock, which replaces nothing.
    """
    if variant.bits:
        form, k, clamp = variant.bits
        return f"Element(form={form!r}, k={k}, clamp={ {'paper': -126, 'zero': -127}[clamp] })"
    if variant.kind == "poly":
        share = variant.share.as_integer_ratio()
        return f"Element(form='poly', degree={variant.degree}, share=Fraction{share})"
    if variant.packed:
        return f"Packed(k={variant.k}, levels={variant.levels}, pinned={variant.kind != 'loose'})"
    if variant.kind == "stock":
        raise LabError("the variant stock is the installed kernel: it has no replacement methods")
    if variant.kind == "skip":
        return "None"
    return f"Element(form={'stock' if variant.kind == 'control' else variant.kind!r})"


_IMPORTS = """from flash_attn.cute.softmax import *
from flash_attn.cute.softmax import Float32, cute, cutlass, layout_utils, utils

from softmaxlab.fa4.element import Element"""


def _of(variant: Variant) -> tuple[dict[str, tuple[tuple[str, str], ...]], str, str]:
    """The edits of a variant's kind, what its replacement methods import, and the file of its arithmetic."""
    if variant.packed or variant.kind == "skip":
        return packed_edits.of(variant.kind), packed_edits.IMPORTS, "packed_element.py"
    return EDITS, _IMPORTS, "element.py"


def replaced(variant: Variant) -> tuple[str, ...]:
    """The methods that a variant replaces."""
    return () if variant.kind == "stock" else tuple(_of(variant)[0])


def render(variant: Variant, texts: dict[str, str]) -> str:
    """The text of the module of replacement methods."""
    header = f'''"""{source.DISTRIBUTION} {source.version()} with the variant {variant}: by softmaxlab."""

from fractions import Fraction

{_of(variant)[1]}

ELEMENT = {element(variant)}
'''
    bodies = []
    for name, text in texts.items():
        lines = edited(name, text, _of(variant)[0]).splitlines(keepends=True)
        bodies.append("".join(line[4:] if line.startswith("    ") else line for line in lines))
    return header + "\n\n" + "\n\n".join(bodies)


def replacement_hash(variant: Variant) -> str:
    """What of this package determines a variant's kernel; empty for stock."""
    if variant.kind == "stock":
        return ""
    made, _, file = _of(variant)
    parts = [element(variant), repr(made), Path(__file__).with_name(file).read_text(encoding="utf-8")]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def replacement(variant: Variant) -> ModuleType:
    """The module of replacement methods, written into the cache and imported; FlashAttention-4 is imported too."""
    texts = source.checked() | packed_edits.checked()
    text = render(variant, {name: texts[name] for name in replaced(variant)})
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    name = f"softmaxlab_fa4_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    path = source.cache_dir() / "methods" / f"{name}.py"
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        with source.cache():
            path.parent.mkdir(exist_ok=True)
            staged = path.with_suffix(f".{os.getpid()}.tmp")
            staged.write_text(text, encoding="utf-8")
            os.replace(staged, path)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
