"""Facts about a machine that decide whether its times can be trusted: GPU settings, versions, host, files. Reads only, without torch.

What cannot be read is None. `doctor` judges the facts, so that the judgement is tested without a GPU.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashbench.measure.gpu_facts import GpuFacts, read_gpu, visible
from flashbench.measure.telemetry import gpu_uuids, load_bindings, shut_down, text


@dataclass(frozen=True, slots=True)
class DeviceLock:
    """A lock file of a GPU (run/lock.py). It is held only while its holder lives; the file itself stays."""

    path: str
    holder: int | None
    """The process that holds it now, or None when nobody does."""
    writable: bool


@dataclass(frozen=True, slots=True)
class Machine:
    """Everything that `doctor.examine` judges."""

    gpus: tuple[GpuFacts, ...] = ()
    nvml_problem: str | None = None
    driver_present: bool = False
    """The kernel module is loaded, whether or not NVML can be read."""
    driver: str | None = None
    driver_cuda: tuple[int, int] | None = None
    """The newest CUDA that the driver supports."""
    torch: str | None = None
    torch_cuda: tuple[int, int] | None = None
    """What torch was built for; None for a build without CUDA."""
    triton: str | None = None
    triton_wanted: str | None = None
    """The version that torch's own metadata pins."""
    old_pynvml: str | None = None
    """Version of the deprecated distribution `pynvml`, where it is installed."""
    governors: tuple[str, ...] | None = None
    load: float | None = None
    """Runnable processes, mean of one minute."""
    cores: int | None = None
    virtual: bool | None = None
    counters_for_admin_only: bool | None = None
    is_admin: bool = False
    ncu: str | None = None
    results: str = "results"
    free_bytes: int | None = None
    writable: bool = True
    locks: tuple[DeviceLock, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


def look(results: Path) -> Machine:
    """The facts of this machine; `results` is where rows would be written. Never raises for what cannot be read."""
    uuids, problem = gpu_uuids()
    gpus = [read_gpu(uuid) for uuid in uuids]
    driver, driver_cuda = _driver()
    torch_version = _version("torch")
    folder = _existing(results)
    return Machine(
        gpus=visible(gpus, os.environ),
        nvml_problem=problem,
        driver_present=Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists(),
        driver=driver,
        driver_cuda=driver_cuda,
        torch=torch_version,
        torch_cuda=_torch_cuda(),
        triton=_version("triton"),
        triton_wanted=_pinned("torch", "triton"),
        old_pynvml=_version("pynvml"),
        governors=_governors(),
        load=os.getloadavg()[0],
        cores=_cores(),
        virtual=_virtual(),
        counters_for_admin_only=_admin_only(_read("/proc/driver/nvidia/params")),
        is_admin=os.geteuid() == 0,
        ncu=shutil.which("ncu"),
        results=str(results),
        free_bytes=shutil.disk_usage(folder).free,
        writable=os.access(folder, os.W_OK),
        locks=tuple(_lock(path) for path in sorted(Path(tempfile.gettempdir()).glob("flashbench-*.lock"))),
        environment=dict(os.environ),
    )


def _driver() -> tuple[str | None, tuple[int, int] | None]:
    module, _ = load_bindings()
    if module is None:
        return None, None
    try:
        version: Any = module.nvmlSystemGetCudaDriverVersion()
        return text(module.nvmlSystemGetDriverVersion()), (version // 1000, version % 1000 // 10)
    except Exception:
        return None, None
    finally:
        shut_down(module)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _pinned(package: str, needed: str) -> str | None:
    """The exact version of `needed` in the metadata of `package`, or None where it pins none."""
    try:
        requirements = importlib.metadata.requires(package) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = [re.match(rf"{needed}\s*==\s*([\w.+]+)", line) for line in requirements]
    return next((match[1] for match in found if match), None)


def _torch_cuda() -> tuple[int, int] | None:
    """Read from torch's version file, because importing torch takes seconds and may itself be what is broken."""
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    match = re.search(r"^cuda\b.*?=\s*['\"](\d+)\.(\d+)", _read(Path(spec.origin).with_name("version.py")) or "", re.M)
    return (int(match[1]), int(match[2])) if match else None


def _governors() -> tuple[str, ...] | None:
    texts = [_read(path) for path in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_governor")]
    return tuple(sorted({text.strip() for text in texts if text})) or None


def _cores() -> int | None:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _virtual() -> bool | None:
    flags = re.search(r"^flags\s*:.*", _read("/proc/cpuinfo") or "", re.M)
    return " hypervisor" in flags[0] if flags else None


def _admin_only(parameters: str | None) -> bool | None:
    match = re.search(r"^RmProfilingAdminOnly:\s*(\d)", parameters or "", re.M)
    return match[1] != "0" if match else None


def _lock(path: Path) -> DeviceLock:
    """The holder by the process id that it wrote; taking the lock to see whether it is free could refuse a sweep that starts now."""
    import psutil

    words = (_read(path) or "").split()
    holder = int(words[0]) if words and words[0].isdigit() else None
    try:
        alive = holder is not None and "flashbench" in " ".join(psutil.Process(holder).cmdline())
    except psutil.Error:
        alive = False
    return DeviceLock(str(path), holder if alive else None, os.access(path, os.W_OK))


def _existing(path: Path) -> Path:
    """The path or the nearest folder above it that exists."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())


def _read(path: str | Path) -> str | None:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return None
