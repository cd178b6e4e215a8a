"""Ceilings: what a memory level or a unit of a device can do, from its data sheet or measured on it; and their file."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flashbench.errors import StoreError
from flashbench.hardware.catalogue import GpuSpec
from flashbench.records import Device, from_plain, to_plain

Level = Literal["hbm", "l2", "compute", "exp", "launch"]
SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Ceiling:
    """One roof. `value` is in `unit`: GB/s (decimal), TFLOP/s, or Texp/s (1e12 exponentials per second); launch: us that a kernel
    without work takes."""

    level: Level
    dtype: str | None
    """Of compute ceilings; None for the others."""
    kind: str
    """What was run: copy, read, write, gemm, exp, empty; or peak, of a data sheet."""
    value: float
    unit: Literal["GB/s", "TFLOP/s", "Texp/s", "us"]
    source: Literal["spec", "measured"]
    regime: Literal["isolated", "sustained"] | None = None
    sm_clock_mhz: float | None = None
    power_w: float | None = None
    note: str | None = None


def spec_ceilings(spec: GpuSpec) -> tuple[Ceiling, ...]:
    """The data sheet's ceilings: HBM, L2 where published, each dtype's peak, the exponential unit. A dtype without a unit has none."""
    found = [Ceiling("hbm", None, "peak", spec.hbm_gbps, "GB/s", "spec", note=spec.notes)]
    clock = spec.tensor_clock_mhz
    if spec.l2_bytes_per_clk is not None:
        found.append(
            Ceiling("l2", None, "peak", spec.l2_bytes_per_clk * clock / 1000, "GB/s", "spec", sm_clock_mhz=clock)
        )
    for dtype, peak in spec.dense_tflops.items():
        quoted_at = spec.boost_clock_mhz if dtype == "fp32" else clock
        found.append(Ceiling("compute", dtype, "peak", peak, "TFLOP/s", "spec", sm_clock_mhz=quoted_at))
    if spec.texp_per_s is not None:
        found.append(
            Ceiling(
                "exp",
                None,
                "peak",
                spec.texp_per_s,
                "Texp/s",
                "spec",
                sm_clock_mhz=clock,
                note="hardware unit only; polynomial exponentials may pass it",
            )
        )
    return tuple(found)


def choose(
    ceilings: Iterable[Ceiling], level: str, dtype: str | None = None, regime: str | None = None
) -> Ceiling | None:
    """The ceiling to hold a point to: measured in the point's own load regime, else the data sheet's, else measured in any other.

    Of several measured ones (copy, read) the highest. None when there is none for this level and dtype.
    """
    fitting = [c for c in ceilings if c.level == level and (level != "compute" or c.dtype == dtype)]

    def rank(ceiling: Ceiling) -> tuple[int, float]:
        if ceiling.source == "measured":
            return (2 if regime is None or ceiling.regime in (regime, None) else 0), ceiling.value
        return 1, ceiling.value

    return max(fitting, key=rank, default=None)


def save(path: Path, device: Device, ceilings: Iterable[Ceiling]) -> None:
    """Write the ceilings measured on `device` as JSON, whole or not at all."""
    content = {"schema": SCHEMA, "device": to_plain(device), "ceilings": [to_plain(c) for c in ceilings]}
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1, allow_nan=False)
            file.write("\n")
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def load(path: Path) -> tuple[Device, tuple[Ceiling, ...]]:
    """The device and its ceilings from a file of `save`. StoreError when it is not there, damaged or of a newer schema."""
    again = "measure the ceilings again"
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
        schema = int(content["schema"])
        if schema > SCHEMA:
            raise StoreError(
                f"{path}: ceilings of schema {schema}; this version reads up to {SCHEMA}: upgrade flashbench, or {again}"
            )
        device = from_plain(Device, content["device"])
        ceilings = tuple(_ceiling(entry) for entry in content["ceilings"])
    except FileNotFoundError:
        raise StoreError(f"{path}: no ceilings measured yet; {again}") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise StoreError(f"{path}: damaged, cannot be read as ceilings ({reason}); {again}") from None
    return device, ceilings


def _ceiling(entry: dict[str, Any]) -> Ceiling:
    ceiling = from_plain(Ceiling, {"dtype": None, **entry})
    if not isinstance(ceiling.value, (int, float)) or not ceiling.value > 0:
        raise ValueError(f"a ceiling of {ceiling.value!r}")
    return ceiling
