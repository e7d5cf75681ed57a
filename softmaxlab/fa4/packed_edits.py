"""Which methods of FlashAttention-4 the packed exponential replaces, what they must be, and the edits.

On Hopper the conversion of P is no part of `online_softmax`: each of the three methods that call it converts the
weights afterwards, once the product with the values no longer reads P. So these are edited too, and `finalize`,
which divides by the row sum. On Blackwell three methods of `SoftmaxSm100` suffice.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from softmaxlab.errors import LabError
from softmaxlab.fa4 import source

#: Of each known version and file: the SHA-256 of the methods' text, from the decorator to the last line.
KNOWN = {
    "4.0.0b36": {
        "softmax.py": {
            "Softmax.online_softmax": "559f13567151d495e7ee3472907ddb834620e7eee152f93db5161c69996e97fb",
            "Softmax.finalize": "d4b5e308e76329f4bcd30781e0e4b53fbc6c5e482491d41df038a5f8819af2f0",
            "SoftmaxSm100.scale_subtract_rowmax": "c3a469b2bafd804a1fbc0cdea5a7f0aca21fcd89ad293a42bb35a6cbb6ed9512",
            "SoftmaxSm100.apply_exp2_convert": "7f746ca43d77f115f5f3a66711a429ddb0cd9173974294d38b8b172d550d42de",
            "SoftmaxSm100.update_row_sum": "4ef411868b0af709722cb51017110209a3dc919e580644374f22d2e417649285",
        },
        "flash_fwd_sm90.py": {
            "FlashAttentionForwardSm90.first_half_block_overlap": (
                "9b27ee3f86880029d563f3bf80d9f9dabc577b7076389f8edc307ad52551e4dc"
            ),
            "FlashAttentionForwardSm90.mma_one_n_block": (
                "e80a9a4888eb1c1680f5d4cdc1328a0a93f59b40260723abe270f523e8809610"
            ),
            "FlashAttentionForwardSm90.mma_one_n_block_intrawg_overlap": (
                "4b43004cc174afb98cf3f23ea13aa8dd50517de3d3906f3cbec80243e82da3ca"
            ),
        },
    }
}
#: The file of each method.
METHODS = {method: file for file, methods in next(iter(KNOWN.values())).items() for method in methods}

_SCALED = "row_max_cur_scaled = row_max_cur * scale_log2\n" + " " * 16
_EXP2 = (
    f"acc_S_row_exp = cute.math.exp2(\n{' ' * 20}acc_S_row * scale_log2 - row_max_cur_scaled, fastmath=True\n"
    f"{' ' * 16})\n{' ' * 16}"
)
_CODES = "acc_S_row_exp = ELEMENT.codes(acc_S_row, scale_log2, row_max_cur)\n" + " " * 16
_FIRST_SUM = "acc_S_row_sum = utils.fadd_reduce(acc_S_row_exp, init_val=None, arch=arch)"
_LATER_SUM = f"""acc_S_row_sum = utils.fadd_reduce(
{" " * 20}acc_S_row_exp, init_val=row_sum[r] * row_scale[r], arch=arch
{" " * 16})"""
_FINISH = "ELEMENT.finish(tOrP_acc, tOrP_cur, layout_utils.reshape_acc_to_mn(acc_S), softmax.row_sum)"
# The anchor ends a line: the same call stands in a comment before it in one of the methods.
_CONVERT = "        utils.cvt_f16(tOrP_acc, tOrP_cur)\n"

#: Of each method: anchors, and what stands there afterwards.
EDITS: dict[str, tuple[tuple[str, str], ...]] = {
    "Softmax.online_softmax": (
        (_SCALED + _EXP2 + _FIRST_SUM, _CODES + "acc_S_row_sum = Float32(0.0)"),  # the first tile
        (_SCALED + _EXP2 + "# row_scale[r]", _CODES + "# row_scale[r]"),  # later ones
        ("        return row_scale\n", "        ELEMENT.pin(acc_S)\n        return row_scale\n"),
        (_LATER_SUM, "acc_S_row_sum = row_sum[r] * row_scale[r]"),
    ),
    "Softmax.finalize": (
        (
            "            row_max_scaled = row_max[r] * scale_log2\n",
            "            row_max_scaled = row_max[r] * scale_log2\n"
            "            exact = ELEMENT.exact(row_max_scaled)\n"
            "            row_sum[r] = row_sum[r] * exact\n",
        ),
        (") * final_scale", ") * final_scale * exact"),
    ),
    "SoftmaxSm100.scale_subtract_rowmax": (
        (
            "bias = max_offset - row_max_scaled",
            "scale_log2, bias = ELEMENT.scale_and_bias(self.scale_log2, row_max)",
        ),
        ("(self.scale_log2, self.scale_log2),", "(scale_log2, scale_log2),"),
    ),
    "SoftmaxSm100.apply_exp2_convert": (
        (
            "if cutlass.const_expr(ex2_emu_freq == 0):",
            "if cutlass.const_expr(True):\n"
            "                    acc_S_row_frg[k, j], acc_S_row_frg[k + 1, j] = ELEMENT.pair(\n"
            "                        acc_S_row_frg[k, j], acc_S_row_frg[k + 1, j]\n"
            "                    )\n"
            "                elif cutlass.const_expr(ex2_emu_freq == 0):",
        ),
        (
            "acc_S_row_converted_frg[None, j].store(\n"
            "                acc_S_row_frg[None, j].load().to(acc_S_row_converted.element_type)\n"
            "            )",
            "ELEMENT.store(acc_S_row_frg[None, j], acc_S_row_converted_frg[None, j])",
        ),
    ),
    "SoftmaxSm100.update_row_sum": (
        (
            "self._compute_row_sum(acc_S_row_exp, init_val=init_val)",
            "ELEMENT.row_sum(acc_S_row_exp, init_val)",
        ),
    ),
    "FlashAttentionForwardSm90.first_half_block_overlap": (
        ("tOrP_cur.store(tOrP_acc.load().to(self.dtype))", _FINISH),
    ),
    "FlashAttentionForwardSm90.mma_one_n_block": ((_CONVERT, f"        {_FINISH}\n"),),
    "FlashAttentionForwardSm90.mma_one_n_block_intrawg_overlap": ((_CONVERT, f"        {_FINISH}\n"),),
}

_OVERLAPPED = "FlashAttentionForwardSm90.mma_one_n_block_intrawg_overlap"
#: A rescale of the accumulator by 1 changes nothing: a warp none of whose rows has a new maximum goes past it. Two rows
#: a thread, and factors of at most 1, so that their product is 1 only if both are; a NaN is not 1.
SKIP = {
    _OVERLAPPED: (
        (
            "            softmax.rescale_O(acc_O, row_scale)\n",
            "            if cute.arch.vote_any_sync(row_scale[0] * row_scale[1] != 1.0):\n"
            "                softmax.rescale_O(acc_O, row_scale)\n",
        ),
    )
}


def of(kind: str) -> dict[str, tuple[tuple[str, str], ...]]:
    """The edits of a kind of variants: packed, loose, lazy or skip."""
    if kind == "skip":
        return SKIP
    return EDITS | {_OVERLAPPED: EDITS[_OVERLAPPED] + SKIP[_OVERLAPPED]} if kind == "lazy" else EDITS


IMPORTS = """from flash_attn.cute.flash_fwd_sm90 import *
from flash_attn.cute.softmax import *
from flash_attn.cute.softmax import Float32, cute, cutlass, layout_utils, math, operator, utils

from softmaxlab.fa4.packed_element import Packed"""


def checked(package: Path | None = None) -> dict[str, str]:
    """The text of each method, as `source.checked`, of both files.

    Raises:
        LabError: an unknown version, or a method whose text is not the one that was read.
    """
    source.checked(package)
    version, texts = source.version(package), {}
    for file, methods in KNOWN[version].items():
        path = source.installed(package) / file
        text = path.read_text(encoding="utf-8")
        for name, known in methods.items():
            texts[name] = source.method(text, name)
            sha = hashlib.sha256(texts[name].encode()).hexdigest()
            if sha != known:
                raise LabError(
                    f"{name} in {path} has sha256 {sha[:16]}…, but in {source.DISTRIBUTION} {version} it has "
                    f"{known[:16]}…: it was changed"
                )
    return texts
