"""What an operator costs beside torch's own attention: ratios to sdpa in one run, and the memory on top.

A case is a mode, a dtype and a context. `model` is a forward pass of the embedded model on random tokens, `attention`
one call on normal queries, keys and values. In a round sdpa and everything that is asked of a case take their turn, so
that a drift of the clock meets all; a ratio is the median over the rounds of time over sdpa's time in the same round.
sdpa is called in the faster of two ways (`bench.sdpa`), which a short trial before the rounds picks.

Peak memory is what a call needs beyond what was there: on CUDA by torch's allocator. On the CPU by the resident set's
high-water mark of a process of its own, attention alone: a process that has run before keeps what it had freed.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from softmaxlab import backends, models
from softmaxlab.backends import fused
from softmaxlab.bench import operator_rows as stored
from softmaxlab.bench import ranges, sdpa
from softmaxlab.bench.cells import LENGTHS
from softmaxlab.bench.record import locked
from softmaxlab.bench.turns import Budget, Outcome, environment, interruptible
from softmaxlab.errors import LabError
from softmaxlab.memory import exhausted
from softmaxlab.operators import parse

FORMAT = 1
SDPA = "sdpa"
MODES = ("model", "attention")
OPERATORS = (
    "softmax()",
    "temperature(alpha=0.9)",
    "pot(m=1)",
    "rowmax_pot(K_max=16)",
    "h15()",
    "sq(k=3)",
    "fa4_poly(degree=3)",
    "grid(K=21)",
    "grid(K=21,R=4)",
    "mean_threshold()",
    "topk(f=0.1)",
    "ilpot()",
    "log2p()",
)
#: (heads, kv_heads, dim) of `attention`: on the CPU the embedded model's, on a GPU those of an 8B Llama.
SHAPES = {"cpu": (9, 3, 64), "cuda": (32, 8, 128)}
LEAST_ROUNDS = 3


@dataclass(frozen=True)
class Case:
    """What is timed: mode, dtype and context, and in the mode `attention` the heads."""

    mode: str
    dtype: str
    context: int
    heads: int = 0
    kv_heads: int = 0
    dim: int = 0

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise LabError(f"bench operators: mode is {self.mode!r}, but must be one of {', '.join(MODES)}")
        models.check_dtype(self.dtype)
        ranges.count("bench operators: context", self.context, 2, LENGTHS[1])

    def __str__(self) -> str:
        shape = f"h{self.heads}/kv{self.kv_heads}/d{self.dim}" if self.mode == "attention" else models.EMBEDDED
        return f"{self.mode}/{shape}/{self.dtype}/{self.context}"

    def inputs(self, device: str) -> tuple[Tensor, Tensor, Tensor]:
        """Normal q, k, v from a fixed seed: (1, heads, context, dim)."""
        generator = torch.Generator(device).manual_seed(0)
        shapes = [(1, h, self.context, self.dim) for h in (self.heads, self.kv_heads, self.kv_heads)]
        made = [torch.randn(s, generator=generator, device=device) for s in shapes]
        return tuple(t.to(models.DTYPES[self.dtype]) for t in made)


def run(
    *,
    device: str = "cpu",
    contexts: Iterable[int] = (2048,),
    dtypes: Iterable[str] = ("float32",),
    modes: Iterable[str] = MODES,
    operators: Iterable[str] = OPERATORS,
    names: Iterable[str] = ("fused",),
    rounds: int = 7,
    again: bool = False,
    memory: bool = True,
    limit: float = 0,
    results: str | Path = "results",
) -> Outcome:
    """Measure what is not stored yet and keep it, case by case.

    Args:
        device: cpu or cuda.
        contexts, dtypes, modes: of the cases, which are all of their combinations.
        operators: text forms.
        names: of backends.
        rounds: of each case, 3 at least; fewer are kept where the limit ends a case after its third.
        again: measure what is stored too.
        memory: read the peak too; on the CPU that takes a process for each.
        limit: seconds after which no further round begins; 0 for none.
        results: folder.

    Raises:
        LabError: an unknown device, dtype, mode, operator or backend; a number out of its range; another bench writes
            the file, or it holds something else; a case that memory does not hold, where those before it are kept.
    """
    if device not in SHAPES:
        raise LabError(f"bench operators: device is {device!r}, but must be one of {', '.join(SHAPES)}")
    models.pick_device(device)
    ranges.count("bench operators: rounds", rounds, LEAST_ROUNDS)
    grid = itertools.product(modes, dtypes, contexts)
    cases = _once(Case(m, d, c, *(SHAPES[device] if m == "attention" else ())) for m, d, c in grid)
    wanted = _once((backends.canonical(n), str(parse(t))) for n, t in itertools.product(names, operators))
    if not cases or not wanted:
        raise LabError(
            f"bench operators: {len(cases)} cases and {len(wanted)} operators with a backend were asked for, but there "
            "must be one of each at least"
        )
    budget, path = Budget(limit), stored.where(results, device)
    with locked(path), interruptible():
        rows, session = stored.load(path), stored.facts(device)
        done, why = 0, ""
        try:
            for case in cases:
                place = (str(case), session["device"], session["threads"])
                there = {(r["backend"], r["operator"]) for r in rows if stored.place(r) == place}
                missing = [pair for pair in wanted if again or pair not in there]
                with _fitting(case, device):
                    new = measure(case, missing, device, rounds, budget, memory) if missing else []
                if new:
                    rows = stored.merged(rows, [r | session for r in new])
                    stored.save(path, rows)
                done += len(wanted) - len(missing) + len(new)
                if len(new) < len(missing):
                    why = "the time limit is reached"
                    break
        except KeyboardInterrupt:
            why = "it was interrupted"
    return Outcome(path, done, len(cases) * len(wanted), why)


def _once(values: Iterable[Any]) -> list[Any]:
    """Without repetition: what has two text forms is one thing to measure."""
    return list(dict.fromkeys(values))


@contextlib.contextmanager
def _fitting(case: Case, device: str) -> Iterator[None]:
    """Say in a sentence that memory does not hold a case."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not exhausted(error):
            raise
        raise LabError(
            f"bench operators: {case} does not fit into the memory of {device}: ask for a shorter context; the cases "
            "before it are kept"
        ) from None


def measure(
    case: Case, pairs: list[tuple[str, str]], device: str, rounds: int, budget: Budget, memory: bool
) -> list[dict[str, Any]]:
    """The pairs (backend, operator) of a case beside sdpa; fewer of them, or none, where the time does not suffice."""
    with torch.inference_mode(), prepared(case, device) as call:
        if budget.left() <= 0:
            return []
        tried = sdpa.trial(lambda way: call((SDPA, way)), lambda function: timed(function, device))
        base = SDPA, sdpa.faster(tried)
        notices, spent = {}, {}
        chosen: list[tuple[str, str]] = []
        for pair in [base, *pairs]:  # what compiles, compiles here
            if budget.left() <= LEAST_ROUNDS * sum(spent.values()):
                break
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                fused.told.clear()  # so that each pair's own notice is seen
                timed(call(pair), device)
                spent[pair] = timed(call(pair), device)
            notices[pair] = sorted({str(w.message) for w in caught if issubclass(w.category, fused.FallbackNotice)})
            chosen.append(pair)
        while len(chosen) > 1 and budget.left() < 1.2 * LEAST_ROUNDS * sum(spent[p] for p in chosen):
            chosen.pop()
        if len(chosen) < 2:
            return []
        seconds: dict[tuple[str, str], list[float]] = {pair: [] for pair in chosen}
        for turn in range(rounds):
            if turn >= LEAST_ROUNDS and budget.left() < 1.2 * sum(spent[p] for p in chosen):
                break
            for pair in chosen if turn % 2 == 0 else chosen[::-1]:
                seconds[pair].append(timed(call(pair), device))
        peaks = {pair: peak(case, pair, device, call) if memory else None for pair in chosen}
    return [
        {
            "case": str(case),
            **asdict(case),
            "backend": pair[0],
            "operator": pair[1],
            "seconds": seconds[pair],
            "sdpa": base[1],
            "sdpa_trial": tried,
            "sdpa_seconds": seconds[base],
            "peak_bytes": peaks[pair],
            "sdpa_peak_bytes": peaks[base],
            "notices": notices[pair],
        }
        for pair in chosen[1:]
    ]


@contextlib.contextmanager
def prepared(case: Case, device: str) -> Iterator[Callable[[tuple[str, str]], Callable[[], Any]]]:
    """While open, gives for a pair (backend, operator), or (sdpa, way), the function to time."""
    if case.mode == "attention":
        q, k, v = case.inputs(device)
        yield lambda pair: _attention(pair, q, k, v)
        return
    from softmaxlab.attention import inject

    model = models.load_model(models.EMBEDDED, dtype=case.dtype, device=device).model
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.config.vocab_size, (1, case.context), generator=generator).to(device)

    def call(pair: tuple[str, str]) -> Callable[[], Any]:
        def plain() -> Any:  # with enable_gqa, as transformers calls it
            model.set_attn_implementation("sdpa")
            return model(tokens, use_cache=False)

        def repeated() -> Any:
            with inject(model, parse("softmax()"), backend=sdpa.attend_repeated):
                return model(tokens, use_cache=False)

        def hooked() -> Any:
            with inject(model, parse(pair[1]), backend=pair[0]):
                return model(tokens, use_cache=False)

        return {(SDPA, sdpa.GROUPED): plain, (SDPA, sdpa.REPEATED): repeated}.get(pair, hooked)

    yield call


def _attention(pair: tuple[str, str], q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    scaling = q.shape[-1] ** -0.5
    if pair[0] == SDPA:
        return lambda: sdpa.attention(q, k, v, pair[1])
    attend, operator = backends.get(pair[0]), parse(pair[1])
    return lambda: attend(q, k, v, operator, scaling=scaling)


def timed(function: Callable[[], Any], device: str) -> float:
    """Seconds of one call, the device's queue included."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


# Peak memory


def peak(case: Case, pair: tuple[str, str], device: str, call: Callable) -> int | None:
    """Bytes that a call needs beyond what is there, its result included; None where that cannot be read."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call(pair)()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    if case.mode == "model":
        return None
    request = json.dumps({"case": asdict(case), "pair": pair, "threads": torch.get_num_threads()})
    command = [sys.executable, "-m", "softmaxlab.bench.operators", request]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=900)
    return json.loads(done.stdout)["peak"] if done.returncode == 0 else None


def child(request: str) -> None:
    """Print the rise of this process's high-water mark in one call; a small call before it does what is done once."""
    asked = json.loads(request)
    case, pair = Case(**asked["case"]), tuple(asked["pair"])
    torch.set_num_threads(asked["threads"])
    with torch.inference_mode():
        _attention(pair, *Case(**asked["case"] | {"context": 64}).inputs("cpu"))()
        call = _attention(pair, *case.inputs("cpu"))
        before = _high_water(reset=True)
        call()
        print(json.dumps({"peak": max(0, _high_water() - before)}))


def _high_water(reset: bool = False) -> int:
    """Bytes; reset to what is resident now where the system can do that."""
    status = Path("/proc/self/status")
    if not status.is_file():
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    if reset:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
    line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    child(sys.argv[1])
