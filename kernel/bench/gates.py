#!/usr/bin/env python3
"""Every variant through the gates, on a Hopper or Blackwell GPU; readings and histograms as JSON.

    python kernel/bench/gates.py --out results/kernel/gates.json
    python kernel/bench/gates.py --out gates.json --rehearse          # no GPU: a simulated kernel, fewer queries

The same as `softmaxlab gates`, for a machine where only the folder was copied. Exits with 1 when a gate of a variant
that is offered is red. The variants that are not offered are read all the same: that their fully masked rows are not
0 is a result.
"""

import argparse
import sys
from pathlib import Path

from softmaxlab.errors import LabError
from softmaxlab.fa4 import gate_record, gates


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--variants", nargs="*", default=None)
    parser.add_argument("--processes", type=int, default=None)
    parser.add_argument("--rehearse", action="store_true", help="a simulated kernel in place of the GPU's")
    given = parser.parse_args()
    try:
        rehearsed = given.rehearse
        found = (
            gate_record.rehearse(given.variants) if rehearsed else gate_record.measure(given.variants, given.processes)
        )
        gate_record.write(found, given.out)
    except LabError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    table = gates.verdict(found.frame)
    print(table.to_string(index=False))
    return int((table.offered & (table.passed < table.gates)).any())


if __name__ == "__main__":
    sys.exit(main())
