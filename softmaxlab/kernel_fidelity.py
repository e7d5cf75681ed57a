"""What the kernel does to a model's loss: A1 − A0, measured, and what the simulator makes of the same blocks.

Stock kernel and patched ones are one backend, `fa4(arch=…)`, whose conditions choose the exponential (`backends.fa4`).
So A1 − A0 is a condition against `softmax()` of that backend, paired by block (paper §5.4, B.2.1). The simulator's
estimate is the same contrast through `online(…)` with that card's semantics: on Hopper the anchor follows every tile,
on Blackwell it lags by up to eight octaves.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

import pandas as pd

from softmaxlab import conditions, evaluate, floor
from softmaxlab.backends.fa4 import SIMULATED, Kernel
from softmaxlab.conditions import BASELINE, BF16_PATH, HOPPER_PATH
from softmaxlab.errors import LabError
from softmaxlab.floor import REFERENCE
from softmaxlab.semantic_endpoints import Arm, contrast, delta, shift
from softmaxlab.statistics import Estimate
from softmaxlab.store import Store

#: Backends of whole rows, as the wiring check names them.
WHOLE_ROWS = {REFERENCE: "whole rows", "fused": "whole rows, fused backend"}

#: In the order of the table. `s()` has no form in the kernel; the simulator alone has it.
CONDITIONS = ("h15()", "sq(k=2)", "sq(k=3)", "sq(k=7)", "sq(k=13)", "s()", "fa4_poly(degree=1)")
PACKED = tuple(f"packed(k={k})" for k in (1, 2, 3, 4))

STORED = "stored"


def twin(backend: str) -> str:
    """The simulator with the semantics of the card that a kernel's backend names. Raises LabError on any other."""
    return BF16_PATH if kernel(backend).arch in ("sm_100", "sm_103") else HOPPER_PATH


def kernel(backend: str) -> Kernel:
    """A kernel's backend as a value. Raises LabError on another backend."""
    if not re.match(r"\s*fa4\b", backend):
        raise LabError(f"{backend!r} is no kernel: its backend is named fa4(arch=sm_90)")
    return Kernel.parse(backend)


def kind(backend: str) -> str:
    """`measured` on whole rows and on a GPU's kernel, else `simulated`."""
    if backend.startswith("fa4"):
        return "simulated" if kernel(backend).arch == SIMULATED else "measured"
    return Arm(BASELINE, backend).kind


@dataclasses.dataclass(frozen=True)
class Run:
    """Losses of one model through one kernel, with those of the simulator and of whole rows beside them.

    Attributes:
        model: name.
        backend: of the kernel.
        losses: tidy, of one corpus, context, BOS rule and dtype.
        whole: tidy, softmax on whole rows in FP32, on the same blocks; may be empty.
    """

    model: str
    backend: str
    losses: pd.DataFrame
    whole: pd.DataFrame

    @property
    def conditions(self) -> list[str]:
        """Conditions that the kernel computed on all blocks, the baseline left out, in the order of the table."""
        there = self._computed() - self.incomplete.keys()
        known = [c for c in (*CONDITIONS, *PACKED) if c in there]
        return known + sorted(there - set(known))

    @property
    def incomplete(self) -> dict[str, int]:
        """Conditions that a stopped run left with fewer blocks than the baseline, and how many they have."""
        blocks = {c: len(self._rows(Arm(c, self.backend))) for c in self._computed()}
        return {c: n for c, n in sorted(blocks.items()) if n < len(self._rows(Arm(BASELINE, self.backend)))}

    def _computed(self) -> set[str]:
        return set(self.losses.loc[self.losses["backend"] == self.backend, "condition"]) - {BASELINE}

    def measured(self, condition: str) -> Estimate:
        """A1 − A0 in nats. Raises LabError as `semantic_endpoints.delta`."""
        return delta(self.losses, Arm(condition, self.backend))

    def simulated(self, condition: str) -> Estimate | None:
        """The simulator's estimate of the same contrast on the same blocks; None where it is not stored."""
        arm = Arm(condition, twin(self.backend))
        return delta(self.losses, arm) if self._whole_run(arm) else None

    def apart(self, condition: str) -> Estimate | None:
        """Measured minus simulated, each against its own softmax, paired by block, nats."""
        arm = Arm(condition, twin(self.backend))
        return contrast(self.losses, Arm(condition, self.backend), arm) if self._whole_run(arm) else None

    def simulated_blocks(self, condition: str) -> int:
        """Blocks of the kernel on which the simulator has a condition and its softmax: all, some or none are stored."""
        arm = Arm(condition, twin(self.backend))
        kept = [set(self._rows(a)["block"]) for a in (arm, arm.baseline, Arm(BASELINE, self.backend))]
        return len(set.intersection(*kept))

    def wiring(self) -> dict[str, Estimate]:
        """Stock kernel minus softmax elsewhere, by what it is held against; block 0 is `per_block[0]` (B.2.1).

        Whole rows in the run's dtype, by each backend of them, and in FP32, and the simulator; those that are stored.
        """
        stock = Arm(BASELINE, self.backend)
        found = {}
        for backend, name in (WHOLE_ROWS | {twin(self.backend): "simulator"}).items():
            if self._whole_run(arm := Arm(BASELINE, backend)):
                found[f"{name}, same dtype"] = shift(self.losses, stock, arm)
        if len(self.whole):
            # A difference across dtypes: what the check is about, and never part of a contrast.
            both = pd.concat([self._rows(stock), self.whole]).assign(dtype="several")
            found["whole rows, float32"] = shift(both, stock, Arm(BASELINE, REFERENCE))
        return found

    def beside_whole_rows(self) -> list[tuple[str, str, Estimate, Estimate, Estimate | None]]:
        """The kernel's cost beside that of the same exponential on whole rows, in the same dtype, nats.

        Returns:
            Condition, backend of the whole rows, their cost, the kernel's cost minus theirs and the simulator's minus
            theirs (None where it is not stored), all paired by block, each against its own softmax.
        """
        found = []
        for condition in self.conditions:
            for whole in (Arm(condition, backend) for backend in WHOLE_ROWS):
                if self._whole_run(whole):
                    tiles = [Arm(condition, self.backend), Arm(condition, twin(self.backend))]
                    apart = [contrast(self.losses, a, whole) if self._whole_run(a) else None for a in tiles]
                    found.append((condition, whole.backend, delta(self.losses, whole), *apart))
        return found

    def _rows(self, arm: Arm) -> pd.DataFrame:
        return self.losses[(self.losses["backend"] == arm.backend) & (self.losses["condition"] == arm.condition)]

    def _whole_run(self, arm: Arm) -> bool:
        """Whether an arm and its baseline are there on the kernel's blocks."""
        blocks = set(self._rows(Arm(BASELINE, self.backend))["block"])
        return all(set(self._rows(a)["block"]) == blocks for a in (arm, arm.baseline))


def stored(
    results: str = "results",
    *,
    corpus: str = "wikitext103",
    context: int = 2048,
    dtype: str = "bfloat16",
    bos: str = "stream",
    rehearsed: bool = False,
) -> list[Run]:
    """What a store holds of kernels in models: a run for each model and kernel, by name.

    Args:
        results: folder.
        corpus, context, dtype, bos: of the runs.
        rehearsed: those of the simulated kernel `fa4(arch=simulated)` instead of those of GPUs.
    """
    fixed = {"corpus": corpus, "context": context, "bos": bos}
    store = Store(evaluate.find_results(results))
    there = store.provenance(**fixed, dtype=dtype)
    found = there[there["backend"].astype(str).str.startswith("fa4")] if len(there) else there
    runs = []
    for model, backend in sorted({(r.model, r.backend) for r in found.itertuples()}):
        if (kernel(backend).arch == SIMULATED) != rehearsed:
            continue
        backends = [backend, twin(backend), *WHOLE_ROWS]
        losses = store.frame(**fixed, model=model, dtype=dtype, backend=backends)
        whole = store.frame(**fixed, model=model, dtype="float32", backend=REFERENCE, condition=BASELINE)
        kept = set(losses.loc[(losses["backend"] == backend) & (losses["condition"] == BASELINE), "block"])
        if not kept or set(losses.loc[losses["backend"] == backend, "condition"]) == {BASELINE}:
            continue
        whole = whole[whole["block"].isin(kept)]
        same = set(whole["block"]) == kept
        run = Run(model, backend, _same_blocks(losses, kept), whole if same else whole.iloc[:0])
        if run.conditions:
            runs.append(run)
    return runs


def reproducibility(model: str, results: str = "results", **setting: object) -> float | None:
    """Largest mean difference between implementations of one definition, nats (`floor`); None where it is not stored.

    Args:
        model: name.
        results: folder.
        setting: corpus and context. The study is of a model in FP32.
    """
    rows = Store(evaluate.find_results(results)).frame(model=model, dtype="float32", **setting)

    def losses(texts: Iterable[str], *, backend: str) -> pd.DataFrame:
        return rows[(rows["backend"] == backend) & rows["condition"].isin(list(texts))]

    wanted = conditions.canonical([BASELINE, *conditions.reproducibility()])
    grids = [c for c in wanted if c == BASELINE or floor.family(c) == "grid"]
    needed = dict.fromkeys((REFERENCE, *floor.VARIANTS), wanted) | {"reference-search": grids}
    if not all(set(texts) <= set(losses(texts, backend=b)["condition"]) for b, texts in needed.items()):
        return None
    return float(floor.floors(floor.differences(losses))["any"])


def compute(kernel_backend: str, *, packed: bool = True, **setting: object) -> None:
    """Evaluate what a run needs and store it: kernel, simulator and whole rows in the run's dtype.

    Args:
        kernel_backend: `fa4`, `fa4(arch=simulated)`, …
        packed: with the packed exponentials.
        setting: of `evaluate.losses`.
    """
    name = str(kernel(kernel_backend))
    simulated = conditions.canonical([BASELINE, *CONDITIONS, *(PACKED if packed else ())])
    evaluate.losses([c for c in simulated if c != "s()"], backend=name, **setting)
    evaluate.losses(simulated, backend=twin(name), **setting)
    evaluate.losses([BASELINE], backend=REFERENCE, **setting)


def table(run: Run) -> pd.DataFrame:
    """One row a condition of a run: measured, simulated, and whether they agree.

    Returns:
        Columns condition; dnll, low, high (measured, nats), resolved, ppl, ppl_low, ppl_high (percent); lower (blocks
        where the patched kernel has the lower loss) and n_blocks; sim, sim_low, sim_high (nats; NaN where not stored);
        sim_blocks (on which it is stored, complete or not); inside (the simulator's estimate lies in the measured
        interval; None where there is none), miss (nats by which it lies outside, with its sign; 0 inside), miss_share
        (percent of the measured value); apart, apart_low, apart_high (measured minus simulated, paired).

    Raises:
        LabError: blocks that are not those of the baseline, or losses that are not finite.
    """
    return pd.DataFrame([_row(run, c) for c in run.conditions])


def miss(simulated: float, measured: Estimate) -> float:
    """By how much a value lies outside the measured interval, signed; 0 inside or at an end."""
    return min(0.0, simulated - measured.low) + max(0.0, simulated - measured.high)


def _row(run: Run, condition: str) -> dict[str, object]:
    found, sim, apart = run.measured(condition), run.simulated(condition), run.apart(condition)
    outside = float("nan") if sim is None else miss(sim.mean, found)
    ppl = dict(zip(("ppl", "ppl_low", "ppl_high"), found.ppl_change, strict=True))
    row = {"condition": condition, "dnll": found.mean, "low": found.low, "high": found.high}
    row |= {"resolved": found.resolved, **ppl, "lower": int((found.per_block < 0).sum()), "n_blocks": found.n_blocks}
    row |= _ends("sim", sim) | {"sim_blocks": run.simulated_blocks(condition)}
    row |= {"inside": None if sim is None else outside == 0, "miss": outside}
    return row | {"miss_share": 100 * outside / abs(found.mean) if found.mean else float("nan")} | _ends("apart", apart)


def _ends(name: str, found: Estimate | None) -> dict[str, float]:
    values = (float("nan"),) * 3 if found is None else (found.mean, found.low, found.high)
    return dict(zip((name, f"{name}_low", f"{name}_high"), values, strict=True))


def _same_blocks(losses: pd.DataFrame, kept: Iterable[int]) -> pd.DataFrame:
    return losses[losses["block"].isin(set(kept))]
