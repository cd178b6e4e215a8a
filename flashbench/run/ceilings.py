"""The measured ceilings of a device and their place beside its runs: `<root>/<device id>/ceilings.json`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flashbench.errors import UsageError
from flashbench.hardware.catalogue import device_id
from flashbench.hardware.ceilings import Ceiling, save
from flashbench.records import Device, from_plain
from flashbench.run.runner import measure_ceilings

FILE = "ceilings.json"
LONGEST_SECONDS = 600.0
SETTINGS: Mapping[str, Any] = {"rule": {}}
"""What a worker is started with; ceilings have a rule of their own for each regime."""


def ceilings_path(root: Path, device: Device) -> Path:
    return root / device_id(device) / FILE


def measure_and_save(device: Device, path: Path, stage: Callable[[str], None]) -> tuple[Ceiling, ...]:
    """Measure the device's ceilings in a worker of their own and write them to `path`. UsageError when that cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # before a minute of measuring, not after it
        raise UsageError(
            f"cannot write below '{path.parent}' ({error.strerror}); name another folder with --out"
        ) from None
    found = measure_ceilings(device, dict(SETTINGS), LONGEST_SECONDS, stage)
    ceilings = tuple(from_plain(Ceiling, {"dtype": None, **plain}) for plain in found)
    save(path, device, ceilings)
    return ceilings
