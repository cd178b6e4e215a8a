"""The parent's knowledge of devices: a worker describes one as JSON, and the answer is cached until something under it changes."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

from flashbench.errors import FlashbenchError, UsageError
from flashbench.measure.telemetry import Nvml
from flashbench.records import Device, from_plain, to_plain
from flashbench.run.process import OWN, Launch

DESCRIBE_SECONDS = 300


def find_device(wanted: str) -> Device:
    """The Device that `wanted` names (auto, cpu, cuda, cuda:N, a UUID). UsageError when it is not on this machine."""
    cached = _cache_path(wanted)
    known = _read(cached)
    if known is not None and _settings_hold(known):
        return known
    device = ask_device(wanted)
    _write(cached, device)
    return device


def ask_device(wanted: str, launch: Launch = OWN) -> Device:
    """The Device as a worker describes it, with the versions that this launch's interpreter has; never from the cache."""
    try:
        done = subprocess.run(
            launch.command("--describe", wanted),
            cwd=launch.folder,
            env=launch.environment,
            capture_output=True,
            text=True,
            timeout=DESCRIBE_SECONDS,
            check=False,
        )
    except OSError as error:
        raise UsageError(f"'{launch.python}' cannot be started ({error.strerror}); name a Python interpreter") from None
    except subprocess.TimeoutExpired:
        raise FlashbenchError(
            f"the device did not answer within {DESCRIBE_SECONDS} s; `nvidia-smi` may say why"
        ) from None
    try:
        answer = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise FlashbenchError(f"the device could not be described: {last}") from None
    if "error" in answer:
        raise UsageError(answer["error"])
    return from_plain(Device, answer["device"])


def _settings_hold(device: Device) -> bool:
    """Whether a cached GPU is still there with its power limit and MIG mode, which decide what a run may be compared with."""
    if device.uuid is None:
        return True
    nvml = Nvml.open(device.uuid)
    facts = nvml.facts()
    nvml.close()
    return (device.power_limit_w, device.mig) == (facts["power_limit_w"], facts["mig"])


def _cache_path(wanted: str) -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    facts = [
        wanted,
        platform.node(),  # the machines of a cluster share one home
        sys.executable,
        _driver(),
        *(_version(p) for p in ("flashbench", "torch", "triton", "nvidia-cudnn-cu13")),
    ]
    facts += [os.environ.get(name, "") for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "TRITON_INTERPRET")]
    digest = hashlib.sha256("\0".join(facts).encode()).hexdigest()[:16]
    return root / "flashbench" / f"device-{digest}.json"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _driver() -> str:
    try:
        version = Path("/proc/driver/nvidia/version").read_text()
        cards = sorted(p.name for p in Path("/proc/driver/nvidia/gpus").iterdir())
        return version + " ".join(cards)
    except OSError:
        return ""


def _read(path: Path) -> Device | None:
    try:
        return from_plain(Device, json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None  # not there, or not whole: the worker is asked again


def _write(path: Path, device: Device) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(to_plain(device)))
        partial.replace(path)
    except OSError:
        return  # a cache that cannot be written costs three seconds the next time, no more
