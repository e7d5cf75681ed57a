"""Where the kernels run: the GPU, or a rehearsal of it on any machine.

Programs know only the interface that both share. A rehearsal computes small shapes in PyTorch, so that every call is
really made, and reads a clock that is made up from the shape's arithmetic: its times mean nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from softmaxlab.bench import kernels, nvml
from softmaxlab.bench.cells import FP8, Cell
from softmaxlab.bench.nvml import Reading
from softmaxlab.errors import LabError
from softmaxlab.fa4.variants import Variant

TORCH = {"bf16": "bfloat16", "fp16": "float16", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}
MAX_SETS = 16  # of inputs, between which calls rotate


class Cuda:
    """The GPU cuda:0.

    Raises:
        LabError: there is none, or one that FlashAttention-4's variants do not run on.
    """

    device = "cuda"
    kind = "measured"

    def __init__(self) -> None:
        from softmaxlab.fa4 import patch

        if not torch.cuda.is_available():
            raise LabError("no CUDA GPU is visible to torch: a bench needs a Hopper or Blackwell GPU, or --rehearse")
        self.major, minor = torch.cuda.get_device_capability()
        if self.major not in patch.SUPPORTED:
            raise LabError(
                f"the GPU is {torch.cuda.get_device_name()} (sm_{self.major}{minor}), but the variants are for Hopper "
                "and Blackwell: sm_90, sm_100, sm_103"
            )
        properties = torch.cuda.get_device_properties(0)
        self.uuid, self.name, self.cache = str(properties.uuid), properties.name, properties.L2_cache_size
        self.monitor = nvml.Monitor(self.uuid)

    def check(self, cells: Iterable[Cell]) -> None:
        """Raise LabError for a dtype that the card refuses and a cell that its memory cannot hold."""
        free = torch.cuda.mem_get_info()[0]
        for cell in cells:
            if cell.dtype in FP8 and self.major != 10:
                raise LabError(
                    f"cell {cell}: FlashAttention-4 takes {cell.dtype} on Blackwell only, not on {self.name}"
                )
            needed = 3 * cell.bytes + 2**30  # two sets of inputs, outputs in flight, and room to work
            if needed > free:
                raise LabError(f"cell {cell} needs about {needed / 2**30:.1f} GiB, but {free / 2**30:.1f} GiB are free")

    def facts(self) -> dict[str, str]:
        """What describes the machine and its software; a session is what has these in common."""
        from softmaxlab.fa4 import doctor

        uuid = hashlib.sha256(self.uuid.encode()).hexdigest()[:12]
        facts = doctor.environment() | self.monitor.facts() | {"GPU id": uuid}
        facts["cudnn"] = str(torch.backends.cudnn.version())
        return facts

    def source(self, name: str) -> str:
        """What of this package a kernel is made of; empty where it is as installed."""
        from softmaxlab.fa4 import edits

        return "" if kernels.is_reference(name) else edits.replacement_hash(Variant.parse(name))[:16]

    def inputs(self, cell: Cell, sets: int = 1, seed: int = 0) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Normal inputs from a fixed seed, (batch, length, heads, dim)."""
        generator = torch.Generator(device=self.device).manual_seed(seed)
        return [self._one(cell, generator) for _ in range(sets)]

    def _one(self, cell: Cell, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        shapes = [(cell.batch, cell.seq, heads, cell.head_dim) for heads in (cell.heads, cell.kv_heads, cell.kv_heads)]
        made = (torch.randn(s, generator=generator, device=self.device, dtype=torch.bfloat16) for s in shapes)
        return tuple(t.to(getattr(torch, TORCH[cell.dtype])) for t in made)

    def sets(self, cell: Cell) -> int:
        """As many sets of inputs as together exceed the cache twice, two at least."""
        return max(2, min(MAX_SETS, math.ceil(2 * self.cache / cell.bytes)))

    @contextlib.contextmanager
    def opened(self, name: str, cell: Cell) -> Iterator[kernels.Call]:
        """As `kernels.opened`."""
        with kernels.opened(name, cell) as call:
            yield call

    def synchronize(self) -> None:
        """Wait for the GPU."""
        torch.cuda.synchronize()

    def timed(self, work: Callable[[], Any]) -> float:
        """Milliseconds between two events around `work`, which is followed by a synchronization."""
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        stop.record()
        torch.cuda.synchronize()
        return start.elapsed_time(stop)

    def window(self, name: str, cell: Cell, work: Callable[[], Any], calls: int) -> float:
        """Milliseconds a call of `work`, which makes `calls` of them."""
        return self.timed(work) / calls

    def graph(self, work: Callable[[], Any]) -> Callable[[], None]:
        """`work` captured; the result replays it."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            work()
        return graph.replay

    def profiled(self) -> contextlib.AbstractContextManager:
        """What a profiler that waits for its start counts."""
        return torch.cuda.profiler.profile()

    def read(self) -> Reading:
        """Clock, temperature and power now."""
        return self.monitor.read()

    def release(self) -> None:
        """Give memory back that no tensor holds."""
        torch.cuda.empty_cache()


class Rehearsal(Cuda):
    """A machine without a GPU: small shapes, a simulated kernel, made-up times. Arguments as `Cuda`."""

    device = "cpu"
    kind = "rehearsed"

    def __init__(self) -> None:
        self.major, self.name, self.uuid, self.cache = 9, "rehearsal", "none", 2**25
        self.monitor = FakeMonitor()
        self._drawn: dict[tuple[str, str], random.Random] = {}

    def check(self, cells: Iterable[Cell]) -> None:
        """As `Cuda.check`, of a Hopper card with 80 GiB."""
        for cell in cells:
            if cell.dtype in FP8:
                raise LabError(
                    f"cell {cell}: FlashAttention-4 takes {cell.dtype} on Blackwell only, not on a {self.name}"
                )
            if 3 * cell.bytes > 80 * 2**30:
                raise LabError(f"cell {cell} needs about {3 * cell.bytes / 2**30:.1f} GiB, but 80.0 GiB are free")

    def facts(self) -> dict[str, str]:
        from softmaxlab.fa4 import doctor

        return doctor.environment() | {"GPU": self.name, "GPU id": "none"}

    def source(self, name: str) -> str:
        return ""

    def _one(self, cell: Cell, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        small = Cell(cell.dtype, cell.causal, min(cell.seq, 16), cell.gqa, 1, cell.head_dim)
        return super()._one(small, generator)

    @contextlib.contextmanager
    def opened(self, name: str, cell: Cell) -> Iterator[kernels.Call]:
        from softmaxlab.fa4 import readings

        variant = kernels.STOCK if kernels.is_reference(name) or kernels.is_bound(name) else name
        if kernels.is_reference(name) and cell.gqa > 1 and name == "sdpa-efficient":
            raise LabError(f"{name} takes no grouped heads")  # as on the GPU, so that the refusal is rehearsed
        yield lambda q, k, v: readings.simulated(q, k, v, variant=variant, causal=cell.causal)[0]

    def synchronize(self) -> None:
        pass

    def timed(self, work: Callable[[], Any]) -> float:
        start = time.perf_counter()
        work()
        return 1000 * (time.perf_counter() - start)

    def window(self, name: str, cell: Cell, work: Callable[[], Any], calls: int) -> float:
        work()
        draw = self._drawn.setdefault((name, str(cell)), random.Random(f"{name} {cell}"))
        share = 1.0 if name in (kernels.STOCK, kernels.CONTROL) else 0.95
        return 1e3 * cell.flops / 6e14 * share * draw.uniform(0.995, 1.005)

    def graph(self, work: Callable[[], Any]) -> Callable[[], None]:
        work()
        return lambda: None

    def profiled(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    def release(self) -> None:
        pass


class FakeMonitor:
    """Readings that are made up: power rises over the first tenth of a second from the first sample on."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def read(self) -> Reading:
        return Reading(1500.0, 55.0, self.instant())

    def instant(self) -> float:
        return 650.0 - 500.0 * math.exp(-10 * (time.monotonic() - self._start))

    def energy(self) -> float:
        return 600.0 * time.monotonic()

    def facts(self) -> dict[str, str]:
        return {"driver": "", "power limit W": "", "max SM clock MHz": ""}


def find(rehearse: bool) -> Cuda:
    """The machine to measure on."""
    return Rehearsal() if rehearse else Cuda()
