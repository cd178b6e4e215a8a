"""Roofs over points: which ceilings of a machine apply, where they meet, and which points lie above them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from flashbench.errors import UsageError
from flashbench.hardware.ceilings import Ceiling
from flashbench.model.flops import exponentials, useful_flops
from flashbench.records import Problem
from flashbench.report.figure import number_text
from flashbench.report.points import Point, RowOfPanels

Source = Literal["spec", "measured"]
SOURCES: tuple[Source, ...] = ("spec", "measured")


@dataclass(frozen=True, slots=True)
class Machine:
    """The ceilings of one device: that of the rows (`own`), or another one drawn for reference.

    `label` is the device's id, which is the catalogue's where there is one; `note` says in words what the footer should add (variant, clocks, power limit).
    """

    label: str
    ceilings: tuple[Ceiling, ...]
    own: bool
    note: str = ""


@dataclass(frozen=True, slots=True)
class Roof:
    """The classic roof (Williams, Waterman, Patterson 2009) of one machine, source and dtype; None where a part is not known."""

    source: Source
    dtype: str
    bandwidth_gbps: float | None
    peak_tflops: float | None

    @property
    def ridge(self) -> float | None:
        """Arithmetic intensity at which the two parts meet, in FLOP per byte."""
        if self.bandwidth_gbps is None or self.peak_tflops is None:
            return None
        return self.peak_tflops * 1e3 / self.bandwidth_gbps

    def at(self, intensity: float) -> float:
        """Attainable TFLOP/s at an intensity in FLOP/byte; infinite when nothing limits it."""
        slope = float("inf") if self.bandwidth_gbps is None else intensity * self.bandwidth_gbps / 1e3
        return min(slope, float("inf") if self.peak_tflops is None else self.peak_tflops)


def _best(ceilings: Sequence[Ceiling], source: Source, regime: str) -> Ceiling | None:
    """The highest of a source; among measured ones those taken under the rows' load regime, where there are any."""
    found = [c for c in ceilings if c.source == source]
    alike = [c for c in found if c.regime == regime]
    return max(alike or found, key=lambda c: c.value, default=None)


def bandwidth(machine: Machine, source: Source, regime: str = "", level: str = "hbm") -> Ceiling | None:
    """A memory's bandwidth in GB/s: `hbm` is HBM on a GPU and main memory on a CPU, `l2` the L2."""
    return _best([c for c in machine.ceilings if c.level == level], source, regime)


def peak(machine: Machine, dtype: str, source: Source, regime: str = "") -> Ceiling | None:
    """The peak of the matrix units at a dtype, in TFLOP/s."""
    return _best([c for c in machine.ceilings if c.level == "compute" and c.dtype == dtype], source, regime)


def roof(machine: Machine, dtype: str, source: Source, regime: str = "") -> Roof:
    slope, top = bandwidth(machine, source, regime), peak(machine, dtype, source, regime)
    return Roof(source, dtype, slope.value if slope else None, top.value if top else None)


def peaks(machine: Machine, dtypes: Sequence[str], source: Source, regime: str = "") -> dict[float, list[str]]:
    """Peaks in TFLOP/s, each with the dtypes that share it."""
    found: dict[float, list[str]] = {}
    for dtype in dtypes:
        ceiling = peak(machine, dtype, source, regime)
        if ceiling is not None:
            found.setdefault(ceiling.value, []).append(dtype)
    return found


def without_peak(machine: Machine, dtypes: Sequence[str]) -> list[str]:
    """The dtypes for which the machine has no peak, neither spec nor measured."""
    return [dtype for dtype in dtypes if all(peak(machine, dtype, source) is None for source in SOURCES)]


def exp_roof(machine: Machine, row: RowOfPanels, source: Source, regime: str = "") -> float | None:
    """TFLOP/s at which the exponential unit is busy all the time with one exp per score.

    A kernel that computes part of its exponentials on the FMA units can pass it (FlashAttention-4 does).
    """
    ceiling = _best([c for c in machine.ceilings if c.level == "exp"], source, regime)
    if ceiling is None:
        return None
    mode, head_dim, head_dim_v = row
    one_pair = Problem(1, 1, 1, 1, 1, head_dim, head_dim_v, "bf16", mode=mode)
    return ceiling.value * useful_flops(one_pair) / exponentials(one_pair)


def own_machine(machines: Sequence[Machine], device_id: str) -> Machine:
    """The machine whose ceilings the rows are held against.

    Raises UsageError when it has none: another card's ceilings never stand in for them.
    """
    owns = [m for m in machines if m.own]
    own = next((m for m in owns if m.label == device_id), owns[0] if owns else None)
    if own is None or not any(c.level in ("hbm", "compute") for c in own.ceilings):
        raise UsageError(
            f"no ceilings are known for '{own.label if own else device_id}': it is not in the catalogue and none were measured on it; "
            "run `flashbench ceilings` there, or give --gpu NAME to use the data sheet of a card that the catalogue knows"
        )
    return own


def machines_of(machines: Sequence[Machine], devices: Sequence[str]) -> dict[str, Machine]:
    """The own machine of each device. UsageError when one of several devices has none: it is never held to another's ceilings."""
    found = {device: own_machine(machines, device) for device in devices}
    strangers = [device for device, machine in found.items() if len(devices) > 1 and machine.label != device]
    if strangers:
        raise UsageError(
            f"these rows come from {len(devices)} devices ({', '.join(devices)}), and no ceilings of {', '.join(strangers)} are given; "
            "name runs of one device"
        )
    return found


def excess(point: Point, machine: Machine, sources: Collection[Source] = SOURCES) -> str | None:
    """Why a point cannot be held by the machine's roofs, in words; None when it lies under them.

    The intensity's upper end (compulsory bytes) is used, so that a point is above the bandwidth line only if no byte count explains it.
    """
    if point.tflops is None or point.intensity is None:
        return None
    intensity = point.intensity_high or point.intensity
    for source in sources:
        limit = roof(machine, point.dtype, source, point.regime)
        if limit.peak_tflops is not None and point.tflops > limit.peak_tflops:
            return f"{number_text(point.tflops)} TFLOP/s is above the {source} {point.dtype} peak of {number_text(limit.peak_tflops)}"
        if point.tflops > limit.at(intensity):
            gbps = point.tflops * 1e3 / intensity
            return (
                f"{number_text(gbps)} GB/s is above the {source} bandwidth of {number_text(limit.bandwidth_gbps or 0)}: "
                "cache resident, or fewer bytes than the model counts"
            )
    return None
