"""The Device record, as torch and NVML tell it, and whether the device is still usable after an error."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import warnings
from pathlib import Path
from typing import Any

import psutil
import torch

from flashbench.errors import UsageError
from flashbench.measure.telemetry import Nvml
from flashbench.records import Device

SDPA_BACKENDS = {
    "math": "MATH",
    "flash": "FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
}


def describe(wanted: str) -> Device:
    """The device that `wanted` names: auto, cpu, cuda, cuda:N, or a GPU's UUID. UsageError when it is not here."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return _cpu()
    if not torch.cuda.is_available():
        raise UsageError(f"--device {wanted}: no CUDA GPU can be used here ({_why_no_cuda()}); use --device cpu")
    return _cuda(_index(wanted))


def use(device: Device) -> None:
    """Make `device` the current one of this process."""
    if device.kind == "cuda":
        torch.cuda.set_device(device.index or 0)


def still_works(device: Device) -> bool:
    """False after a sticky CUDA error: every later call of this process would fail."""
    if device.kind == "cpu":
        return True
    try:
        torch.cuda.synchronize()
        return bool((torch.ones(8, device="cuda") + 1).sum().item() == 16)
    except Exception:
        return False


def _why_no_cuda() -> str:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return "the driver shows no GPU"


def _index(wanted: str) -> int:
    count = torch.cuda.device_count()
    if wanted in ("auto", "cuda"):
        return int(torch.cuda.current_device())
    if wanted.startswith("cuda:") and wanted[5:].isdigit():
        index = int(wanted[5:])
        if index < count:
            return index
        raise UsageError(f"--device {wanted}: this machine has {count} GPU(s), cuda:0 to cuda:{count - 1}")
    uuids = [_uuid(i) for i in range(count)]
    bare = [_without_kind(uuid) for uuid in uuids]
    if _without_kind(wanted) and _without_kind(wanted) in bare:
        return bare.index(_without_kind(wanted))
    raise UsageError(
        f"--device {wanted}: not auto, cpu, cuda, cuda:N or the UUID of a GPU here ({', '.join(map(str, uuids))})"
    )


def _uuid(index: int) -> str | None:
    uuid = str(getattr(torch.cuda.get_device_properties(index), "uuid", "")) or None
    return f"GPU-{uuid}" if uuid and not uuid.startswith(("GPU-", "MIG-")) else uuid


def _without_kind(uuid: str | None) -> str:
    """A UUID as PyTorch writes it; GPU- and MIG- are NVML's."""
    return (uuid or "").removeprefix("GPU-").removeprefix("MIG-").lower()


def _cuda(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    nvml = Nvml.open(_uuid(index))
    facts = nvml.facts()
    nvml.close()
    return Device(
        kind="cuda",
        name=properties.name,
        memory_bytes=properties.total_memory,
        index=index,
        uuid=nvml.uuid,
        capability=(properties.major, properties.minor),
        sm_count=properties.multi_processor_count,
        l2_bytes=getattr(properties, "L2_cache_size", None) or None,
        shared_bytes_per_block=getattr(properties, "shared_memory_per_block_optin", None),
        max_sm_clock_mhz=facts["max_sm_clock_mhz"],
        memory_clock_mhz=facts["memory_clock_mhz"],
        memory_bus_bits=facts["memory_bus_bits"],
        power_limit_w=facts["power_limit_w"],
        mig=facts["mig"],
        sdpa_backends=_sdpa_backends(torch.device("cuda", index)),
        triton_interpreter=_interpreter(),
        versions=_versions({"driver": facts["driver"]}),
    )


def _cpu() -> Device:
    return Device(
        kind="cpu",
        name=_cpu_name(),
        memory_bytes=psutil.virtual_memory().total,
        l2_bytes=_last_level_cache_bytes(),
        sdpa_backends=_sdpa_backends(torch.device("cpu")),
        triton_interpreter=_interpreter(),
        versions=_versions({}),
    )


def _interpreter() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


def _versions(extra: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    for package in ("triton", "numpy"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    if torch.version.cuda is not None and torch.backends.cudnn.is_available():
        found["cudnn"] = str(torch.backends.cudnn.version())
    return {name: version for name, version in {**found, **extra}.items() if version is not None}


def _sdpa_backends(device: torch.device) -> tuple[str, ...]:
    """The backends that really run a small problem on this device."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    dtype = torch.float32 if device.type == "cpu" else torch.float16
    q = torch.zeros(1, 1, 64, 64, device=device, dtype=dtype)
    works = []
    for name, attribute in SDPA_BACKENDS.items():
        try:
            with warnings.catch_warnings(), sdpa_kernel(getattr(SDPBackend, attribute)):
                warnings.simplefilter("ignore")
                torch.nn.functional.scaled_dot_product_attention(q, q, q)
            works.append(name)
        except (RuntimeError, AttributeError):
            continue
    return tuple(works)


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown processor"


def _last_level_cache_bytes() -> int | None:
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        unit = {"K": 1024, "M": 1024**2}.get(text[-1:])
        if unit:
            sizes.append(int(text[:-1]) * unit)
    return max(sizes, default=None)
