"""What NVML says about the GPU: clocks, power, temperature, throttle reasons, other processes.

Each reading is None on its own where it cannot be had (MIG, no permission, no driver, unified memory). The GPU is found by the
UUID that PyTorch reports, because NVML does not know CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from dataclasses import dataclass, field
from typing import Any

from flashbench.records import State

THROTTLE_BITS = {
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
"""nvmlClocksEventReasons; idle (0x1) and application clocks (0x2) are settings, not throttling."""


READ_EVERY_SECONDS = 0.1
"""A reading costs about a millisecond of host time."""


def text(value: str | bytes) -> str:
    """Old NVML bindings return bytes."""
    return value.decode() if isinstance(value, bytes) else value


def load_bindings() -> tuple[Any, str | None]:
    """The module `pynvml` of nvidia-ml-py, or None and the reason why it cannot be used. Never raises."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the deprecated package `pynvml` warns, which under -W error is fatal
            import pynvml
    except ModuleNotFoundError:
        return None, "nvidia-ml-py is not installed"
    except Exception as error:
        return None, f"the NVML bindings cannot be imported: {error}"
    try:
        pynvml.nvmlInit()
    except Exception as error:  # every NVML failure means the same here: no telemetry
        return None, f"NVML does not start: {error}"
    return pynvml, None


def shut_down(module: Any) -> None:
    with contextlib.suppress(Exception):
        module.nvmlShutdown()


def gpu_uuids() -> tuple[tuple[str, ...], str | None]:
    """UUIDs of all GPUs that NVML shows, in PCI order, and the reason when they cannot be read. Never raises."""
    module, problem = load_bindings()
    if module is None:
        return (), problem
    try:
        handles = [module.nvmlDeviceGetHandleByIndex(i) for i in range(module.nvmlDeviceGetCount())]
        return tuple(text(module.nvmlDeviceGetUUID(handle)) for handle in handles), None
    except Exception as error:
        return (), f"NVML cannot list the GPUs: {error}"
    finally:
        shut_down(module)


@dataclass
class Nvml:
    """An open NVML handle of one GPU, or the reason why there is none."""

    uuid: str | None
    """As NVML knows it: GPU-..., or MIG-... for an instance of a partitioned card."""
    problem: str | None = None
    _module: Any = None
    _handle: Any = None

    @classmethod
    def open(cls, uuid: str | None) -> Nvml:
        """Never raises: without NVML every reading is None, and `problem` says why."""
        if uuid is None:
            return cls(None, "this device has no UUID")
        module, problem = load_bindings()
        if module is None:
            return cls(uuid, problem)
        # PyTorch gives a MIG instance's UUID without its kind, so it is tried under that prefix too.
        names = [uuid, uuid.replace("GPU-", "MIG-", 1)] if uuid.startswith("GPU-") else [uuid]
        first: Exception | None = None
        for name in names:
            try:
                return cls(name, None, module, _by_uuid(module, name))
            except Exception as error:
                first = first or error
        shut_down(module)
        return cls(uuid, f"NVML does not know {uuid}: {first}")

    def close(self) -> None:
        if self._handle is not None:
            self._handle = None
            shut_down(self._module)

    def read(self, name: str, *arguments: Any) -> Any:
        """The result of an NVML call on this GPU by its name, or None where it is not supported or not allowed."""
        if self._handle is None:
            return None
        try:
            return getattr(self._module, name)(self._handle, *arguments)
        except Exception:  # NVMLError of any kind, or a call that an older binding lacks
            return None

    def clock_mhz(self) -> int | None:
        return _int(self.read("nvmlDeviceGetClockInfo", 1))

    def facts(self) -> dict[str, Any]:
        """What does not change during a run: maximum clocks, bus, power limit, MIG, ECC, persistence, name."""
        power = self.read("nvmlDeviceGetPowerManagementLimit")
        mig = self.read("nvmlDeviceGetMigMode")
        ecc = self.read("nvmlDeviceGetEccMode")
        name = self.read("nvmlDeviceGetName")
        return {
            "name": text(name) if name is not None else None,
            "max_sm_clock_mhz": _int(self.read("nvmlDeviceGetMaxClockInfo", 1)),
            "memory_clock_mhz": _int(self.read("nvmlDeviceGetMaxClockInfo", 2)),
            "memory_bus_bits": _int(self.read("nvmlDeviceGetMemoryBusWidth")),
            "power_limit_w": power / 1e3 if power is not None else None,
            "mig": True if (self.uuid or "").startswith("MIG-") else bool(mig[0]) if mig is not None else None,
            "ecc": bool(ecc[0]) if ecc is not None else None,
            "persistence": _flag(self.read("nvmlDeviceGetPersistenceMode")),
            "driver": self._driver(),
        }

    def _driver(self) -> str | None:
        if self._handle is None:
            return None
        try:
            return text(self._module.nvmlSystemGetDriverVersion())
        except Exception:
            return None

    def energy_mj(self) -> int | None:
        """Energy since the driver was loaded, in millijoules."""
        return _int(self.read("nvmlDeviceGetTotalEnergyConsumption"))


def _by_uuid(module: Any, uuid: str) -> Any:
    try:
        return module.nvmlDeviceGetHandleByUUID(uuid)
    except TypeError:  # old bindings pass what they get on to C
        return module.nvmlDeviceGetHandleByUUID(uuid.encode())


def _int(value: Any) -> int | None:
    return int(value) if value is not None else None


def _flag(value: Any) -> bool | None:
    return bool(value) if value is not None else None


@dataclass
class Watch:
    """Readings taken while a row is sampled, from between the batches."""

    nvml: Nvml
    sm_clocks: list[int] = field(default_factory=list)
    powers_w: list[float] = field(default_factory=list)
    reasons: set[str] = field(default_factory=set)
    readable: bool = False
    _last: float = 0.0

    def observe(self) -> None:
        """Take a reading, at most every `READ_EVERY_SECONDS`."""
        now = time.monotonic()
        if now - self._last < READ_EVERY_SECONDS:
            return
        self._last = now
        clock = self.nvml.clock_mhz()
        if clock is not None:
            self.sm_clocks.append(clock)
        power = self.nvml.read("nvmlDeviceGetPowerUsage")
        if power is not None:
            self.powers_w.append(power / 1e3)
        bits = self.nvml.read("nvmlDeviceGetCurrentClocksEventReasons")
        if bits is None:
            bits = self.nvml.read("nvmlDeviceGetCurrentClocksThrottleReasons")
        if bits is not None:
            self.readable = True
            self.reasons |= {reason for bit, reason in THROTTLE_BITS.items() if bits & bit}

    def state(self) -> State | None:
        """Summary of the readings; None where nothing at all could be read."""
        temperature = self.nvml.read("nvmlDeviceGetTemperature", 0)
        memory_clock = self.nvml.read("nvmlDeviceGetClockInfo", 2)
        state = State(
            sm_clock_mhz=(min(self.sm_clocks), max(self.sm_clocks)) if self.sm_clocks else None,
            memory_clock_mhz=_int(memory_clock),
            power_w=round(sum(self.powers_w) / len(self.powers_w), 1) if self.powers_w else None,
            temperature_c=_int(temperature),
            throttle_reasons=tuple(sorted(self.reasons)) if self.readable else None,
            other_processes=self._other_processes(),
        )
        return state if state != State() else None

    def _other_processes(self) -> int | None:
        processes = self.nvml.read("nvmlDeviceGetComputeRunningProcesses")
        return None if processes is None else sum(1 for p in processes if p.pid != os.getpid())
