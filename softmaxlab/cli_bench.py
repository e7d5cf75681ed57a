"""The commands of `softmaxlab bench`. No logic of their own, as in `cli`."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, TextIO

from cyclopts import App, Parameter

from softmaxlab.errors import LabError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from softmaxlab.bench.turns import Outcome

PARTIAL = 3  # exit code of a bench that was stopped; 2 is bad input, or that everything was refused

bench = App(name="bench", default_parameter=Parameter(negative=()))
bench.help = (
    "Time, energy and counters of FlashAttention-4's kernel with another exponential, on this machine's GPU; and the "
    "cost of operators beside torch's attention, on GPU or CPU."
)

Cells = Annotated[list[str] | None, Parameter(consume_multiple=True)]
Kernels = Annotated[list[str] | None, Parameter(consume_multiple=True)]


@Parameter(name="*")
@dataclass(kw_only=True)
class Options:
    """What every program on the kernel takes.

    Parameters
    ----------
    cells
        Sets (paper, hopper, calls, steady, quick) or shapes such as bf16/causal/8192/h32/kv8/d128.
    kernels
        Variants of FlashAttention-4 such as h15 "s(3)" "poly(2,all)", and sdpa-flash, sdpa-efficient, sdpa-cudnn
        (together: references). stock and control are always among them.
    results
        Folder of the record; a rehearsal writes into the cache unless one is named.
    limit
        Seconds after which it stops; the same command goes on from there.
    rehearse
        Without a GPU: a kernel in PyTorch and times that are made up.
    """

    cells: Cells = None
    kernels: Kernels = None
    results: str = "results"
    limit: float = 0
    rehearse: bool = False

    @property
    def folder(self) -> str:
        """Of the record."""
        from softmaxlab.bench.session import rehearsal_folder

        return rehearsal_folder() if self.rehearse and self.results == "results" else self.results

    def run(
        self, program: Callable[..., Outcome], name: str, cells: str, kernels: Sequence[str], *rest, **more
    ) -> None:
        """Run a program, with its own cells and kernels where none are named, and print what is then stored."""
        from softmaxlab.bench import read

        where = {"results": self.folder, "rehearse": self.rehearse}
        outcome = program(self.cells or [cells], self.kernels or kernels, *rest, **where, limit=self.limit, **more)
        _end(outcome, lambda: read.text(name, self.folder, rehearsed=self.rehearse))


def _end(outcome: Outcome, table: Callable[[], str], to: TextIO | None = None) -> None:
    """Print what is stored and how far a program came; say by the exit code if that is not what was asked."""
    print(table())
    if outcome.refused and not outcome.partial:
        raise LabError(str(outcome))
    print(outcome, file=to)
    if outcome.partial:
        sys.exit(PARTIAL)


_USUAL = Options()


@bench.command
def latency(options: Options = _USUAL, *, graphs: bool = False, sweeps: int = 0, window_ms: float = 0) -> None:
    """Call latency by the paper's protocol, or with --graphs the kernels' duration through CUDA graphs.

    Parameters
    ----------
    graphs
        One process, kernels interleaved, a graph of calls with rotating inputs: for calls that the host bounds.
    sweeps
        With --graphs: replays of each kernel; 0 for 21.
    window_ms
        With --graphs: about how long a replay takes; 0 for 20. Longer ones even out the clock of a GPU at its power
        limit.
    """
    from softmaxlab.bench import latency as programs
    from softmaxlab.bench.kernels import DEFAULT

    numbers = programs.REHEARSAL if options.rehearse and not graphs else {}
    for name, value in {"sweeps": sweeps, "window_ms": window_ms}.items():
        if value and not graphs:
            raise LabError(f"{name} is {value:g}, but goes with --graphs only")
        numbers |= {name: value} if value else {}
    program, name = (programs.duration, "duration") if graphs else (programs.run, "latency")
    options.run(program, name, "quick", DEFAULT, **numbers)


@bench.command
def energy(options: Options = _USUAL, *, seconds: float | None = None, rounds: int = 1) -> None:
    """Board energy of a forward pass: a sustained loop of each kernel, power sampled at 100 ms.

    The default cell is the paper's causal 16K.

    Parameters
    ----------
    seconds
        Of a loop: the paper's 45, or 0.6 in a rehearsal, if none are given.
    rounds
        Loops of each kernel, in alternating order.
    """
    from softmaxlab.bench import energy as programs

    protocol = programs.REHEARSAL if options.rehearse else programs.Protocol()
    if seconds is not None:
        protocol = replace(protocol, seconds=seconds)
    options.run(programs.run, "energy", "bf16/causal/16384", ["h15"], protocol, rounds=rounds)


@bench.command
def counters(options: Options = _USUAL) -> None:
    """Hardware counters by Nsight Compute: XU, ALU, FMA and tensor pipes, instructions, registers.

    The default cell is causal 8K.
    """
    from softmaxlab.bench import counters as programs
    from softmaxlab.bench.kernels import DEFAULT

    options.run(programs.run, "counters", "bf16/causal/8192", DEFAULT)


@bench.command
def timeline(options: Options = _USUAL) -> None:
    """Kernel duration, launch cost and call latency of a traced run, by torch's profiler."""
    from softmaxlab.bench import timeline as programs

    options.run(programs.run, "timeline", "quick", ["h15"], **(programs.REHEARSAL if options.rehearse else {}))


@bench.command
def operators(
    *,
    device: str = "cpu",
    backend: Kernels = None,
    context: Annotated[list[int] | None, Parameter(consume_multiple=True)] = None,
    dtype: Kernels = None,
    operators: Kernels = None,
    attention_only: bool = False,
    rounds: int = 7,
    again: bool = False,
    memory: Annotated[bool, Parameter(negative="--no-memory")] = True,
    limit: float = 0,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
    results: str = "results",
) -> None:
    """What each operator costs beside torch's sdpa, in interleaved rounds; what is stored is not measured again.

    Parameters
    ----------
    device
        cpu or cuda.
    backend
        fused, reference, …; fused if none is given.
    context
        Tokens, e.g. 2048 8192 16384 32768; 2048 if none is given.
    dtype
        float32, bfloat16; float32 if none is given.
    operators
        Text forms; a set of all families if none is given.
    attention_only
        Leave out the passes of the whole embedded model.
    rounds
        Of each case; the ratio is their median.
    again
        Measure what is stored too.
    memory
        Read peak memory.
    limit
        Seconds after which it stops; the same command goes on from there.
    as_json
        What is stored of the device, as JSON.
    results
        Folder of the record.
    """
    from softmaxlab.bench import operator_rows
    from softmaxlab.bench import operators as program

    outcome = program.run(
        device=device,
        contexts=context or [2048],
        dtypes=dtype or ["float32"],
        modes=["attention"] if attention_only else program.MODES,
        operators=operators or program.OPERATORS,
        names=backend or ["fused"],
        rounds=rounds,
        again=again,
        memory=memory,
        limit=limit,
        results=results,
    )
    rows = operator_rows.stored(results, [device])
    said = json.dumps(rows, indent=1) if as_json else operator_rows.text(rows)
    _end(outcome, lambda: said, sys.stderr if as_json else None)


@bench.command
def show(program: str, /, *, results: str = "results") -> None:
    """Print the table of what is stored.

    Parameters
    ----------
    program
        latency, duration, energy, counters or timeline.
    results
        Folder of the record.
    """
    from softmaxlab.bench import read

    print(read.text(program, results))
