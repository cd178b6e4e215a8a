"""Energy of one call, in an opt-in pass of its own: back to back for two seconds, counter difference, idle power subtracted."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from flashbench.measure.telemetry import Nvml
from flashbench.records import Device

RUN_SECONDS = 2.0
IDLE_SECONDS = 0.5
BURST_SECONDS = 0.05
"""Short calls run back to back for about this long between two looks at the clock; a long one is looked at each time."""


@dataclass(frozen=True, slots=True)
class Energy:
    joules_per_call: float | None
    warnings: tuple[str, ...]


def measure_energy(call: Callable[[], object], device: Device, nvml: Nvml) -> Energy:
    """Joules per call above idle; None with a warning where the device has no energy counter."""
    if device.kind == "cpu" or nvml.energy_mj() is None:
        return Energy(None, ("no energy counter can be read here",))
    torch.cuda.synchronize()
    idle_w = _idle_power_w(nvml)
    started, before = time.perf_counter(), nvml.energy_mj()
    calls = 0
    burst = 1
    while time.perf_counter() - started < RUN_SECONDS:
        begun = time.perf_counter()
        for _ in range(burst):
            call()
        calls += burst
        torch.cuda.synchronize()
        if time.perf_counter() - begun < BURST_SECONDS:
            burst *= 2
    seconds = time.perf_counter() - started
    after = nvml.energy_mj()
    if idle_w is None or before is None or after is None:
        return Energy(None, ("the energy counter stopped answering",))
    joules = (after - before) / 1e3 - idle_w * seconds
    return Energy(joules / calls, (f"energy is above an idle power of {idle_w:.0f} W",))


def _idle_power_w(nvml: Nvml) -> float | None:
    time.sleep(IDLE_SECONDS)
    started, before = time.perf_counter(), nvml.energy_mj()
    time.sleep(IDLE_SECONDS)
    after = nvml.energy_mj()
    seconds = time.perf_counter() - started
    return None if before is None or after is None else (after - before) / 1e3 / seconds
