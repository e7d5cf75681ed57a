"""Send the packed kernel through its gates on this machine's GPU, or rehearse with the simulated one.

    python kernel/bench/packed_gates.py --out results/kernel/packed-gates.json
    python kernel/bench/packed_gates.py --rehearse --few

Exit code 1 if a gate is red.
"""

import argparse
import json
import math
import os
import sys
from pathlib import Path

from softmaxlab import files
from softmaxlab.errors import LabError
from softmaxlab.fa4 import doctor, packed_cases, packed_gates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="*", default=[f"packed({k},3)" for k in (1, 2, 3, 4)])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rehearse", action="store_true", help="a simulated kernel in place of the GPU's")
    parser.add_argument("--few", action="store_true", help="every 13th code and every eighth case")
    parser.add_argument("--processes", type=int, default=None, help="that share the work; on a GPU all cores but two")
    asked = parser.parse_args()
    if asked.processes is None:
        asked.processes = 0 if asked.rehearse else max(1, min(12, (os.cpu_count() or 1) - 2))
    cases = packed_cases.CASES[:: 8 if asked.few else 1]
    where = {"attend": packed_cases.simulated, "device": "cpu"} if asked.rehearse else {}
    try:
        frame = packed_gates.run(
            asked.variants, cases=cases, exhaustive=not asked.few, processes=asked.processes, **where
        )
    except LabError as error:
        sys.exit(f"error: {error}")
    red = frame[~frame.passed]
    if asked.out:
        rows = [
            {n: None if isinstance(v, float) and not math.isfinite(v) else v for n, v in row.items()}
            for row in frame.to_dict("records")
        ]
        head = {"kind": "simulated" if asked.rehearse else "measured", "environment": doctor.environment()}
        files.write_text(asked.out, json.dumps(head | {"readings": rows}, indent=0))
    print(frame.groupby("variant", sort=False).passed.agg(["size", "sum"]).to_string())
    print(red.to_string() if len(red) else "all gates are green")
    sys.exit(1 if len(red) else 0)


if __name__ == "__main__":
    main()
