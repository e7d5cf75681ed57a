#!/usr/bin/env python3
"""Put another exponential into an installed FlashAttention-4, for processes that are not one's own, and take it out.

    python kernel/patch_fa4.py status
    python kernel/patch_fa4.py apply "g(3)"
    python kernel/patch_fa4.py revert

`--package FOLDER` names a folder that holds flash_attn, in place of the copy that Python would import. Within one's
own process `with softmaxlab.fa4.variant("g(3)")` does the same and changes no file. `status` exits with 0 when the
copy is clean or patched, and with 1 when it is neither; a refusal exits with 2 and changes nothing.
"""

import argparse
import sys
from pathlib import Path

from softmaxlab.errors import LabError
from softmaxlab.fa4 import Variant, text_patch


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("apply", "revert", "status"):
        command = commands.add_parser(name)
        command.add_argument("--package", type=Path, default=None, help="a folder that holds flash_attn")
        if name == "apply":
            command.add_argument("variant", help="h15, s(7), f(1), g(3), fused7, poly(3,0.5), …")
    arguments = parser.parse_args()
    try:
        if arguments.command == "apply":
            variant = Variant.parse(arguments.variant)
            print(text_patch.apply(variant, arguments.package))
            if variant.why_not:
                print(f"note: {variant} is not offered for use: {variant.why_not}", file=sys.stderr)
            return 0
        state = getattr(text_patch, arguments.command)(arguments.package)
    except LabError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(state)
    return 0 if state.name in ("clean", "applied") else 1


if __name__ == "__main__":
    sys.exit(main())
