"""Clock, temperature, power and energy of the GPU, by NVIDIA's management library (nvidia-ml-py).

The library itself rather than `zeus` (0.16): its monitor returns the same energy counter's difference
(nvmlDeviceGetTotalEnergyConsumption), so it would be no second witness, and it brings ten packages with it.
"""

from __future__ import annotations

import threading
import time
from typing import Any, NamedTuple

from softmaxlab.errors import LabError


class Reading(NamedTuple):
    """SM clock in MHz, temperature in °C, board power in W: the driver's average, nvidia-smi's power.draw."""

    clock: float
    temperature: float
    power: float


class Monitor:
    """The GPU that torch calls cuda:0.

    Args:
        uuid: of the GPU, as torch gives it, which sees through CUDA_VISIBLE_DEVICES.

    Raises:
        LabError: nvidia-ml-py is missing, or the driver refuses.
    """

    def __init__(self, uuid: str) -> None:
        try:
            import pynvml
        except ImportError:
            raise LabError(
                "nvidia-ml-py, which reads clock and power, is not installed: pip install nvidia-ml-py"
            ) from None
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(
                uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
            )
            self.read()
        except pynvml.NVMLError as error:
            raise LabError(f"NVIDIA's management library refuses to read the GPU {uuid}: {error}") from None

    def read(self) -> Reading:
        """SM clock, temperature and power now; NaN for what this GPU does not tell."""
        n, h = self._nvml, self._handle
        return Reading(
            self._value(lambda: n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_SM)),
            self._value(lambda: n.nvmlDeviceGetTemperature(h, n.NVML_TEMPERATURE_GPU)),
            self._value(lambda: n.nvmlDeviceGetPowerUsage(h) / 1000),
        )

    def instant(self) -> float:
        """Board power in W without the driver's averaging; NaN where there is no such field."""
        n = self._nvml

        def value() -> float:
            field = n.nvmlDeviceGetFieldValues(self._handle, [n.NVML_FI_DEV_POWER_INSTANT])[0]
            return field.value.uiVal / 1000 if field.nvmlReturn == 0 else float("nan")

        return self._value(value)

    def energy(self) -> float:
        """The energy counter in J since the driver was loaded; NaN where there is none."""
        return self._value(lambda: self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1000)

    def facts(self) -> dict[str, str]:
        """Driver, power limit in W, highest SM clock in MHz: for the provenance."""
        n, h = self._nvml, self._handle
        found = {
            "driver": lambda: n.nvmlSystemGetDriverVersion(),
            "power limit W": lambda: f"{n.nvmlDeviceGetEnforcedPowerLimit(h) / 1000:g}",
            "max SM clock MHz": lambda: str(n.nvmlDeviceGetMaxClockInfo(h, n.NVML_CLOCK_SM)),
        }
        values = {name: self._value(get, "") for name, get in found.items()}
        return {name: v.decode() if isinstance(v, bytes) else str(v) for name, v in values.items()}

    def _value(self, get: Any, missing: Any = float("nan")) -> Any:
        try:
            return get()
        except (self._nvml.NVMLError, AttributeError):
            return missing


class Sampler:
    """Samples of power, clock and temperature at an interval, from a thread of its own.

    Args:
        monitor: with `read` and `instant`.
        interval: seconds, as requested; the driver renews its numbers at a period of its own.

    Attributes:
        rows: (time.monotonic, power W, instant power W, SM clock MHz, temperature °C).
    """

    def __init__(self, monitor: Any, interval: float) -> None:
        self.rows: list[tuple[float, ...]] = []
        self._monitor, self._interval = monitor, interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        due = time.monotonic()
        while not self._stop.is_set():
            clock, temperature, power = self._monitor.read()
            self.rows.append((time.monotonic(), power, self._monitor.instant(), clock, temperature))
            due += self._interval
            self._stop.wait(max(0.0, due - time.monotonic()))
