"""A GPU's settings and what it says now, from NVML; and which GPUs CUDA would see. Reads only, without torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flashbench.measure.telemetry import THROTTLE_BITS, Nvml

APPLICATION_CLOCKS_BIT = 0x2
GRAPHICS_CLOCK = 0


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One GPU's settings and what it says at this moment."""

    name: str
    uuid: str
    persistence: bool | None = None
    other_processes: int | None = None
    power_limit_w: float | None = None
    default_power_limit_w: float | None = None
    max_power_limit_w: float | None = None
    application_clock_mhz: int | None = None
    default_application_clock_mhz: int | None = None
    max_sm_clock_mhz: int | None = None
    held_by_application_clocks: bool | None = None
    throttle_reasons: tuple[str, ...] | None = None
    ecc: bool | None = None
    mig: bool | None = None


def read_gpu(uuid: str) -> GpuFacts:
    """What NVML says of the GPU; a reading that it does not have is None."""
    nvml = Nvml.open(uuid)
    facts = nvml.facts()
    bits = nvml.read("nvmlDeviceGetCurrentClocksEventReasons")
    if bits is None:
        bits = nvml.read("nvmlDeviceGetCurrentClocksThrottleReasons")
    limits = nvml.read("nvmlDeviceGetPowerManagementLimitConstraints")
    default = nvml.read("nvmlDeviceGetPowerManagementDefaultLimit")
    processes = [nvml.read(f"nvmlDeviceGet{kind}RunningProcesses") for kind in ("Compute", "Graphics")]
    pids = {p.pid for known in processes if known is not None for p in known}
    gpu = GpuFacts(
        name=facts["name"] or "unnamed GPU",
        uuid=uuid,
        persistence=facts["persistence"],
        other_processes=len(pids - {os.getpid()}) if processes[0] is not None else None,
        power_limit_w=facts["power_limit_w"],
        default_power_limit_w=default / 1e3 if default is not None else None,
        max_power_limit_w=limits[1] / 1e3 if limits is not None else None,
        application_clock_mhz=nvml.read("nvmlDeviceGetApplicationsClock", GRAPHICS_CLOCK),
        default_application_clock_mhz=nvml.read("nvmlDeviceGetDefaultApplicationsClock", GRAPHICS_CLOCK),
        max_sm_clock_mhz=facts["max_sm_clock_mhz"],
        held_by_application_clocks=bool(bits & APPLICATION_CLOCKS_BIT) if bits is not None else None,
        throttle_reasons=tuple(r for bit, r in THROTTLE_BITS.items() if bits & bit) if bits is not None else None,
        ecc=facts["ecc"],
        mig=facts["mig"],
    )
    nvml.close()
    return gpu


def visible(gpus: Sequence[GpuFacts], environment: Mapping[str, str]) -> tuple[GpuFacts, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, in its order; all of them where it does not say which they are.

    A number means a GPU in CUDA's order, which is NVML's only when CUDA_DEVICE_ORDER says so or all the cards are alike.
    """
    setting = environment.get("CUDA_VISIBLE_DEVICES")
    if setting is None:
        return tuple(gpus)
    same_order = environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({gpu.name for gpu in gpus}) == 1
    chosen: list[GpuFacts] = []
    for word in (part.strip() for part in setting.split(",")):
        if word.startswith("GPU-"):
            found = [gpu for gpu in gpus if gpu.uuid.startswith(word)]
        elif word.isdigit() and same_order:
            found = list(gpus[int(word) : int(word) + 1])
        elif word.isdigit() or word.startswith("MIG-"):
            return tuple(gpus)
        else:
            found = []
        if not found:  # CUDA, too, stops reading at the first word that names no GPU
            break
        chosen += found
    return tuple(chosen)
