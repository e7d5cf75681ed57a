"""The Triton backend on a GPU: agreement with the reference, time against sdpa, memory by context; a choice of tiles.
The part `simulator` does the first two for the fused simulator of `online(…)`, against the PyTorch one.

    python tests/benchmarks/fused_gpu.py --out fused_gpu.json [--sweep]
    python tests/benchmarks/fused_gpu.py --device cpu            (all of it, tiny, in Triton's interpreter)

Writes JSON and prints what matters as it goes. Kernels are compiled beforehand by several processes, through Triton's
cache on disk. Nothing is asserted here: a time is a measurement, not a test.
"""

# ruff: noqa: E402  (the interpreter comes before Triton)

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
if "cpu" in sys.argv:
    import interpreter  # noqa: F401
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from softmaxlab.backends import reference, triton_online
from softmaxlab.backends import triton as backend
from softmaxlab.conditions import BF16_PATH, FP8_PATH, HOPPER_PATH
from softmaxlab.evaluate import environment
from softmaxlab.files import write_text
from softmaxlab.online import Simulator
from softmaxlab.operators import parse
from softmaxlab.semantics import Semantics

_HELD = """
softmax() temperature(alpha=0.5) temperature(alpha=3) h15() h15(clamp=zero) sq(k=0) sq(k=3) sq(k=13) s() pot(m=0.5)
pot(m=1) pot(m=2) pot(m=3) rowmax_pot(K_max=12) rowmax_pot(K_max=4,tail=drop) fa4_poly(degree=1) fa4_poly(degree=2)
fa4_poly(degree=3) packed(k=2) packed(k=3,p=e4m3) packed(k=4,p=fp16) ilpot() ilpot_h_a() ilpot_h15() log2p()
log2p(bits=3,tail=drop) log2p(renormalise=no) log_sqrt2p() log_sqrt2p(bits=4,tail=drop,renormalise=no) grid(K=16)
grid(K=7,recon=upper) grid(K=8,recon=lerp) grid(K=32,R=4) grid(K=21,R=0.25,recon=upper) grid(K=8,R=2,recon=lerp)
grid(K=8,map=linear) grid(K=8,R=4,map=linear,recon=lerp) grid(K=8,R=4,map=linear,recon=upper) mean_threshold()
mean_threshold(weights=uniform) topk(f=0.1) topk(f=0.5,weights=uniform)
rescue(of=temperature(alpha=0.5)) rescue(of=temperature(alpha=2)) rescue(of=h15()) rescue(of=s(),q=0.5)
"""
HELD = _HELD.split()
TIMED = ["softmax()", "temperature(alpha=2)", "h15()", "sq(k=3)", "pot(m=1)", "pot(m=2)", "s()", "fa4_poly(degree=3)",
         "grid(K=32)", "grid(K=32,R=4)", "mean_threshold()", "topk(f=0.1)", "log2p()", "ilpot()",
         "rescue(of=temperature(alpha=2))"]  # fmt: skip
FEW = ["softmax()", "h15()", "grid(K=32,R=4)", "mean_threshold()", "topk(f=0.1)", "rescue(of=temperature(alpha=2))"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TILES = {
    "bfloat16": [(128, 64, 8, 3), (128, 64, 8, 2), (128, 128, 8, 2), (128, 128, 8, 3), (64, 64, 4, 3), (64, 128, 4, 2),
                 (128, 64, 4, 3), (128, 32, 4, 3), (64, 32, 4, 3)],
    "float32": [(128, 64, 8, 2), (128, 32, 8, 2), (128, 32, 8, 3), (64, 64, 4, 2), (64, 32, 4, 2), (64, 32, 4, 3),
                (128, 64, 8, 1), (64, 64, 4, 1)],
}  # fmt: skip
#: Context, dtype, head dimension and heads of the cases whose tiles are tried.
SWEPT = [(2048, "float32", 64, (36, 12)), (2048, "float32", 128, (32, 8)), (16384, "bfloat16", 64, (9, 3)),
         (8192, "bfloat16", 128, (32, 8))]  # fmt: skip
#: Operators by semantics of the part `simulator`.
SIMULATED = {
    BF16_PATH: ["softmax()", "h15()", "sq(k=3)", "sq(k=13)", "s()"],
    FP8_PATH: ["softmax()", "h15()", "sq(k=3)", "s()"],
    HOPPER_PATH: ["softmax()", "h15()", "fa4_poly(degree=1)", "packed(k=3)"],
    "online(tile=128,tau=0.75)": ["softmax()", "temperature(alpha=2)", "h15()", "pot(m=1)", "pot(m=3)", "s()"],
    "online(tile=128,tau=8,decision=warp)": ["softmax()", "h15()"],
    "online(tile=128,tau=8,p=fp16)": ["s()"],
    "online(tile=64,tau=8,p=bf16)": ["h15()"],
    "online(tile=128,tau=0,qkv=e4m3)": ["h15()"],
    "online(tile=128,tau=0,p=e4m3,max_offset=8,qkv=e4m3_tensor)": ["softmax()", "h15()"],
}
SIMULATOR_TILES = [(128, 32, 8, 1), (64, 32, 4, 1), (64, 64, 4, 1), (128, 64, 8, 1), (64, 32, 4, 2), (64, 64, 4, 2),
                   (64, 128, 4, 2), (128, 64, 8, 2), (128, 128, 8, 1)]  # fmt: skip
SIMULATOR_SWEPT = [(BF16_PATH, "h15()"), (BF16_PATH, "softmax()")]


class Case:
    """Random operands in a model's layout, and a mask."""

    def __init__(self, args, n: int, dtype: str, *, dim=64, heads=(9, 3), batch=1, mask="", softcap=None) -> None:
        self.describe = {"context": n, "dtype": dtype, "dim": dim, "heads": heads, "batch": batch, "mask": mask}
        g = torch.Generator(args.device).manual_seed(0)
        shape = partial(torch.randn, generator=g, device=args.device)
        q, k, v = (shape(batch, n, h, dim).transpose(1, 2).to(DTYPES[dtype]) for h in (heads[0], heads[1], heads[1]))
        self.operands = (3 * q, k, v)
        self.options = {"scaling": dim**-0.5, "softcap": softcap, "mask": None}
        at = torch.arange(n, device=args.device)
        distance = at[:, None] - at
        if mask:
            seen = (distance >= 0) & (distance < (n // 4 if mask == "window" else n))
            seen = seen.expand(batch, 1, n, n).clone()
            if mask == "padded":
                seen[-1, :, :, : n // 3] = False
            self.options["mask"] = seen

    def exact(self) -> Case:
        """The same with small multiples of 1/8 and a power of two as scaling: every score is exact in FP32."""
        case, (q, k, v) = copy.copy(self), self.operands
        eighths = tuple((8 * x).round().clamp(-8, 8) / 8 for x in (q / 3, k))
        case.operands = (*eighths, v)
        case.options = self.options | {"scaling": 2.0 ** round(math.log2(self.options["scaling"]))}
        return case

    def run(self, text: str, attend: Callable = backend.attend, value: Tensor | None = None, **changes) -> Tensor:
        q, k, v = self.operands
        return attend(q, k, v if value is None else value, parse(text), **self.options, **changes)


def small(args) -> dict:
    """The tile of the rehearsal."""
    return {"tile": backend.Tile(32, 16, 4, 2)} if args.device == "cpu" else {}


def agreement_cases(args) -> list[tuple[Case, list[str]]]:
    n = 40 if args.device == "cpu" else 2048
    cases = [(Case(args, n, dtype), HELD[:: 9 if args.device == "cpu" else 1]) for dtype in ("float32", "bfloat16")]
    for dtype in ("float32", "bfloat16"):
        cases += [
            (Case(args, n, dtype, dim=128, mask="window", heads=(8, 2)), FEW),
            (Case(args, n - 37, dtype, dim=96, mask="padded", heads=(4, 4), batch=2), FEW[:3]),
            (Case(args, n, dtype, dim=256, heads=(4, 1), softcap=30.0), FEW[:4]),
        ]
    return [*cases, (Case(args, n, "float16"), FEW)]


def agreement(args) -> list[dict]:
    """Largest error of each call, and the share of weights that lie in another cell, at random and at exact scores."""
    rows = []
    for case, texts in agreement_cases(args):
        q, k, v = case.operands
        n, dim = k.shape[2], v.shape[3]
        chosen = torch.linspace(0, n - 1, dim, device=q.device).long()
        one_hot = torch.zeros_like(v)
        one_hot[..., chosen, torch.arange(dim, device=q.device)] = 1  # the output is p̂ of the chosen keys
        exact = case.exact()
        for text in texts:
            try:
                expected, got = case.run(text, reference.attend), case.run(text, **small(args))
                error = (got.float() - expected.float()).abs()
                cells = {}
                for name, c in (("cells", case), ("cells_exact", exact)):
                    a, b = (
                        c.run(text, f, one_hot, **o).float()
                        for f, o in ((reference.attend, {}), (backend.attend, small(args)))
                    )
                    step = 1e-3 if q.dtype == torch.float32 else 2e-2
                    cells[name] = ((a - b).abs() > step * a.abs() + 1e-7).float().mean().item()
                row = {"operator": text, **case.describe, "softcap": case.options["softcap"],
                       "max_error": error.max().item(), "mean_error": error.mean().item(),
                       "scale": expected.float().abs().mean().item(), **cells}  # fmt: skip
            except Exception as problem:  # one kernel that fails must not hide the others
                row = {"operator": text, **case.describe, "failed": f"{type(problem).__name__}: {problem}"[:400]}
            rows.append(row)
            print({k: f"{v:.2e}" if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    return rows


def window(call: Callable[[], object], calls: int, device: str) -> float:
    """Milliseconds a call, of back-to-back calls."""
    if device == "cpu":
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return 1000 * (time.perf_counter() - start) / calls
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(calls):
        call()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / calls


def interleaved(calls: dict[str, Callable[[], object]], args) -> dict[str, list[float]]:
    """Times by name; every round runs all, so that a drift of the clock meets each. What fails is left out."""
    counts = {}
    for name, call in calls.items():
        try:
            window(call, 1, args.device)
            counts[name] = (
                1 if args.device == "cpu" else max(2, min(50, int(4 / max(window(call, 2, args.device), 1e-3))))
            )
        except Exception as problem:
            print(name, f"{type(problem).__name__}: {problem}"[:300], flush=True)
    times: dict[str, list[float]] = {name: [] for name in counts}
    for _ in range(args.rounds):
        for name, count in counts.items():
            times[name].append(window(calls[name], count, args.device))
    return times


def sdpa_calls(case: Case) -> dict[str, Callable[[], object]]:
    q, k, v = case.operands
    group = q.shape[1] // k.shape[1]
    scale = case.options["scaling"]
    repeated = [x.repeat_interleave(group, 1) for x in (k, v)]
    return {
        "sdpa(enable_gqa)": lambda: sdpa(q, k, v, is_causal=True, scale=scale, enable_gqa=True),
        "sdpa(repeated)": lambda: sdpa(q, *repeated, is_causal=True, scale=scale),
    }


def timed_cases(args) -> list[tuple[Case, list[str]]]:
    if args.device == "cpu":
        return [(Case(args, 40, dtype, heads=(2, 1)), FEW[:2]) for dtype in ("float32", "bfloat16")]
    return [
        (Case(args, 2048, "float32", batch=4), TIMED),
        (Case(args, 2048, "float32"), FEW),
        (Case(args, 16384, "bfloat16"), TIMED),
        (Case(args, 8192, "bfloat16", dim=128, heads=(32, 8)), FEW),
    ]


def timing(args) -> list[dict]:
    """Milliseconds of one layer's attention, and ratios to the faster of the two ways to call sdpa, round by round."""
    rows = []
    for case, texts in timed_cases(args):
        calls = sdpa_calls(case) | {text: partial(case.run, text, **small(args)) for text in texts}
        times = interleaved(calls, args)
        base = min((name for name in times if name.startswith("sdpa")), key=lambda name: median(times[name]))
        for name, values in times.items():
            ratios = [a / b for a, b in zip(values, times[base], strict=True)]
            rows.append({"call": name, **case.describe, "base": base, "ms": median(values), "ratio": median(ratios),
                         "ratio_least": min(ratios), "ratio_most": max(ratios)})  # fmt: skip
            print({k: f"{v:.3g}" if isinstance(v, float) else v for k, v in rows[-1].items()}, flush=True)
    return rows


def host(args) -> list[dict]:
    """Microseconds that the host needs for a call: of calls that are too small to keep the GPU busy."""
    rows = []
    for dtype in ("float32", "bfloat16"):
        case = Case(args, 16, dtype)
        calls = {"sdpa": sdpa_calls(case)["sdpa(repeated)"]}
        calls |= {text: partial(case.run, text, **small(args)) for text in (FEW[0], FEW[1], FEW[4])}
        times = interleaved(calls, args)
        rows += [{"call": name, "dtype": dtype, "us": 1000 * median(values)} for name, values in times.items()]
    print([(r["call"], r["dtype"], round(r["us"])) for r in rows], flush=True)
    return rows


def memory(args) -> list[dict]:
    """Bytes beyond the operands at the peak of a call."""
    rows = []
    if args.device == "cpu":
        return rows
    for dtype, n in itertools.product(("float32", "bfloat16"), (2048, 8192, 16384, 32768)):
        case = Case(args, n, dtype)
        for text in FEW:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            case.run(text)
            torch.cuda.synchronize()
            rows.append({"operator": text, "dtype": dtype, "context": n,
                         "bytes": torch.cuda.max_memory_allocated() - before})  # fmt: skip
    for text in FEW:
        print(
            text, {(r["dtype"], r["context"]): f"{r['bytes'] / 2**20:.0f} MiB" for r in rows if r["operator"] == text}
        )
    return rows


def sweep_cases(args) -> list[tuple[Case, list[str], list[dict]]]:
    if args.device == "cpu":
        return [(Case(args, 40, "float32", heads=(2, 1)), FEW[:1], [{"tile": backend.Tile(16, 16, 4, 2)}])]
    found = []
    for n, dtype, dim, heads in SWEPT:
        options = [{"tile": backend.Tile(*t)} for t in TILES[dtype]]
        if dtype == "float32" and dim == 64:
            options += [{"tile": backend.Tile(*t), "precision": p} for p in ("tf32x3", "ieee")
                        for t in ((128, 64, 8, 2), (64, 32, 4, 2))]  # fmt: skip
        found.append((Case(args, n, dtype, dim=dim, heads=heads), FEW, options))
    return found


def sweep(args) -> list[dict]:
    rows = []
    for case, texts, options in sweep_cases(args):
        calls = {
            json.dumps([text, list(o["tile"]), o.get("precision", "split")]): partial(case.run, text, **o)
            for text in texts
            for o in options
        }
        times = {name: median(values) for name, values in interleaved(calls, args).items()}
        for text in texts:
            own = sorted((t, n) for n, t in times.items() if json.loads(n)[0] == text)
            rows += [
                {**case.describe, "operator": text, "tile": json.loads(n)[1], "precision": json.loads(n)[2], "ms": t}
                for t, n in own
            ]
            print(text, case.describe["dtype"], [(f"{t:.3g}", *json.loads(n)[1:]) for t, n in own[:5]], flush=True)
    return rows


def simulator_cases(args) -> list[tuple[Case, dict[str, list[str]]]]:
    if args.device == "cpu":
        small_tiles = {s.replace("tile=128", "tile=32").replace("tile=64", "tile=32"): t for s, t in SIMULATED.items()}
        return [(Case(args, 40, "float32", heads=(2, 1)), {s: t[:1] for s, t in small_tiles.items()})]
    few = {s: ["softmax()", "h15()"] for s in (BF16_PATH, FP8_PATH, "online(tile=128,tau=8)")}
    cases = [(Case(args, 2048, dtype), SIMULATED) for dtype in ("float32", "bfloat16")]
    cases += [(Case(args, 2048, "float32", batch=4), few), (Case(args, 2048, "float16"), few)]
    for dtype in ("float32", "bfloat16"):
        cases += [
            (Case(args, 2048, dtype, dim=128, heads=(32, 8)), few),
            (Case(args, 2011, dtype, dim=96, mask="padded", heads=(4, 4), batch=2), few),
            (Case(args, 2048, dtype, dim=256, heads=(4, 1), softcap=30.0, mask="window"), few),
        ]
    return cases


def simulating(semantics: str) -> Callable:
    """The fused simulator as a function with the signature of `reference.attend`."""
    return lambda q, k, v, operator, **o: triton_online.attend(q, k, v, operator, Semantics.parse(semantics), **o)


def simulator(args) -> list[dict]:
    """Fused against PyTorch: largest errors, the share of weights off by a step, and milliseconds; tiles by --sweep."""
    rows = []
    for case, table in simulator_cases(args):
        _, k, v = case.operands
        chosen = torch.linspace(0, k.shape[2] - 1, v.shape[3], device=v.device).long()
        one_hot = torch.zeros_like(v)
        one_hot[..., chosen, torch.arange(v.shape[3], device=v.device)] = 1
        for semantics, texts in table.items():
            plain, fused = Simulator(Semantics.parse(semantics)), simulating(semantics)
            for text in texts:
                row = {"operator": text, "semantics": semantics, **case.describe}
                try:
                    expected, got = (case.run(text, f).float() for f in (plain, fused))
                    row |= {"max_error": (got - expected).abs().max().item(), "scale": expected.abs().mean().item()}
                    for name, c in (("cells", case), ("cells_exact", case.exact())):
                        a, b = (c.run(text, f, one_hot).float() for f in (plain, fused))
                        step = 1e-3 if v.dtype == torch.float32 else 2e-2
                        row[name] = ((a - b).abs() > step * a.abs() + 1e-7).float().mean().item()
                except Exception as problem:  # one kernel that fails must not hide the others
                    row["failed"] = f"{type(problem).__name__}: {problem}"[:400]
                calls = {"torch": partial(case.run, text, plain), "fused": partial(case.run, text, fused)}
                if args.sweep and args.device != "cpu" and (semantics, text) in SIMULATOR_SWEPT:
                    tiles = [backend.Tile(*t) for t in SIMULATOR_TILES]
                    calls |= {str(tuple(t)): partial(case.run, text, fused, tile=t) for t in tiles}
                row["ms"] = {name: median(values) for name, values in interleaved(calls, args).items()}
                rows.append(row)
                print({k: f"{v:.2e}" if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    return rows


def warm(args) -> None:
    """Compile in several processes what this one is going to run."""
    start = time.perf_counter()
    again = [sys.executable, __file__, "--device", args.device, "--only", args.only]
    again += ["--sweep"] if args.sweep else []
    workers = [subprocess.Popen([*again, "--part", f"{i}/{args.workers}"]) for i in range(args.workers)]
    for worker in workers:
        worker.wait()
    print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)


def compile_part(args) -> None:
    part, parts = map(int, args.part.split("/"))
    only, jobs = args.only.split(","), []
    if "agreement" in only or "timing" in only:
        calls = [(c, t) for c, texts in agreement_cases(args) + timed_cases(args) for t in texts]
        calls += [(c.exact(), t) for c, texts in agreement_cases(args) for t in texts if c.describe["dim"] in (96, 128)]
        jobs = [(c, t, {}) for c, t in calls]
    if "simulator" in only:
        for case, table in simulator_cases(args):
            for kind in (case, case.exact()):
                jobs += [(kind, t, {"attend": simulating(s)}) for s, texts in table.items() for t in texts]
            if args.sweep:
                for (s, text), t in itertools.product(SIMULATOR_SWEPT, SIMULATOR_TILES):
                    jobs.append((case, text, {"attend": simulating(s), "tile": backend.Tile(*t)}))
    if args.sweep and only != ["simulator"]:
        jobs += [(c, t, o) for c, texts, options in sweep_cases(args) for t in texts for o in options]
    for case, text, options in jobs[part::parts]:
        try:
            case.run(text, **options)
        except Exception:  # the run itself reports it
            torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--sweep", action="store_true", help="try tiles, of the parts' kernels")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--workers", type=int, default=14, help="processes that compile; 0: none")
    parser.add_argument("--only", default="agreement,timing,host,memory,simulator", help="parts to run")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    if args.device == "cpu":
        args.rounds, args.workers = 1, 0
    if args.part:
        return compile_part(args)
    if args.workers:
        warm(args)
    report = {"kind": "measured", **environment(args.device)}
    parts = {"agreement": agreement, "timing": timing, "host": host, "memory": memory, "simulator": simulator}
    with torch.inference_mode():
        for name in args.only.split(",") if args.only else []:
            start = time.perf_counter()
            report[name] = parts[name](args)
            print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
            if args.out:
                write_text(args.out, json.dumps(report, indent=1) + "\n")
        if args.sweep and args.only != "simulator":
            report["sweep"] = sweep(args)
    if args.out:
        write_text(args.out, json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
