"""Board energy of a forward pass, by a sustained loop (paper B.3, Table B4f), with the card's energy counter beside.

The power that a driver reports lags behind the board's: the first retained samples are still a ramp. What leaving
them out changes is computed, not applied.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from softmaxlab.bench import kernels, nvml, ranges, session, turns
from softmaxlab.bench.cells import Cell
from softmaxlab.bench.record import Entry
from softmaxlab.errors import LabError

FIRST, LAST = 20, 10  # samples that are dropped at either end
RAMP = 0.9  # of the median power: leading samples below are the ramp


@dataclass(frozen=True)
class Protocol:
    """Numbers of the loop. Defaults: the paper's.

    Attributes:
        seconds: of the loop.
        chunk: calls before each synchronization.
        warmup: calls before the samples begin.
        lead, tail: seconds of samples before and after the loop.
        interval: seconds between samples, as requested.
        first, last: samples that are dropped at either end.

    Raises:
        LabError: a number out of its range; a loop too short for its samples.
    """

    seconds: float = 45.0
    chunk: int = 50
    warmup: int = 30
    lead: float = 2.0
    tail: float = 1.0
    interval: float = 0.1
    first: int = FIRST
    last: int = LAST

    def __post_init__(self) -> None:
        for name, zero in {"seconds": False, "interval": False, "lead": True, "tail": True}.items():
            ranges.amount(f"energy: {name}", getattr(self, name), ranges.DAY, zero=zero)
        for name, least in {"chunk": 1, "warmup": 0, "first": 0, "last": 0}.items():
            ranges.count(f"energy: {name}", getattr(self, name), least)
        kept = (self.seconds + self.lead + self.tail) / self.interval - self.first - self.last
        if kept < 10:
            raise LabError(
                f"energy: a loop of {self.seconds:g} s leaves {max(0, int(kept))} samples at {self.interval:g} s, "
                "but at least 10 are needed: make it longer"
            )


REHEARSAL = Protocol(seconds=0.6, chunk=5, warmup=2, lead=0.2, tail=0.1, interval=0.01)


def run(
    cells: Iterable[str | Cell] = ("bf16/causal/16384",),
    names: Iterable[str] = (kernels.STOCK, kernels.CONTROL, "h15"),
    protocol: Protocol | None = None,
    *,
    rounds: int = 1,
    results: str = "results",
    rehearse: bool = False,
    limit: float = 0,
) -> turns.Outcome:
    """Loop each kernel in its own process while board power is sampled from this one.

    Args:
        protocol: of the loop; the paper's if None.
        rounds: loops a kernel, whose order alternates; the paper has one.
        cells, names, results, rehearse, limit: as `latency.run`.

    Raises:
        LabError: as `latency.run`.
    """
    ranges.count("rounds", rounds)
    protocol = protocol or (REHEARSAL if rehearse else Protocol())
    opened = session.opened(
        "energy", cells, names, vars(protocol), rounds=rounds, results=results, rehearse=rehearse, limit=limit
    )
    with opened as s, turns.Processes(rehearse, timeout=300 + protocol.seconds) as processes:

        def one(entry: Entry, kernel: str) -> dict[str, Any]:
            if s.budget.left() < protocol.seconds + protocol.lead + protocol.tail:
                raise turns.TimeIsUp
            processes.ask(kernel, {"do": "energy", "cell": entry.cell} | vars(protocol))
            with nvml.Sampler(s.machine.monitor, protocol.interval) as sampler:
                time.sleep(protocol.lead)
                found = processes.ask(kernel, {"go": True})
                time.sleep(protocol.tail)
            start = found.pop("start")
            samples = [[round(t - start, 4), *(round(x, 3) for x in row)] for t, *row in sampler.rows]
            return {"seconds": found.pop("stop") - start, "samples": samples} | found

        return turns.take(s.record, s.entries, rounds, one, s.budget)


def summary(turn: dict[str, Any], protocol: dict[str, Any]) -> dict[str, float]:
    """What one loop amounts to.

    Args:
        turn: `seconds`, `calls`, `counted_j`, `samples` of (s from the loop's start, W, instant W, MHz, °C).
        protocol: with `first` and `last`.

    Returns:
        calls; ms (loop time a call); power (W, mean of the retained samples); mj (mJ a call, power · time / calls);
        ramp (leading retained samples below `RAMP` of the median), mj_no_ramp; instant (W), mj_instant, by the power
        that is not averaged; mj_counter, by the energy counter; clock (MHz) and temperature (°C), medians.
    """
    kept = turn["samples"][protocol["first"] : len(turn["samples"]) - protocol["last"]]
    if not kept:
        raise LabError(f"energy: {len(turn['samples'])} samples leave none after the first and last are dropped")
    power = [row[1] for row in kept]
    floor = RAMP * statistics.median(power)
    ramp = next((i for i, p in enumerate(power) if p >= floor), len(power) - 1)
    seconds, calls = turn["seconds"], turn["calls"]

    def mj(watts: float) -> float:
        return 1e3 * watts * seconds / calls

    mean, instant = statistics.fmean(power), statistics.fmean(row[2] for row in kept)
    return {
        "calls": calls,
        "ms": 1e3 * seconds / calls,
        "power": mean,
        "mj": mj(mean),
        "ramp": ramp,
        "mj_no_ramp": mj(statistics.fmean(power[ramp:])),
        "instant": instant,
        "mj_instant": mj(instant),
        "mj_counter": 1e3 * turn["counted_j"] / calls,
        "clock": statistics.median(row[3] for row in kept),
        "temperature": statistics.median(row[4] for row in kept),
    }
