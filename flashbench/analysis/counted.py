"""Counters beside the byte model: how far the model's estimate is off, and whether the truth lies in its interval."""

from __future__ import annotations

from dataclasses import dataclass

from flashbench.errors import UsageError
from flashbench.model.interval import Traffic
from flashbench.model.schedule import Schedule, as_launched
from flashbench.model.traffic import l2_partitions, traffic
from flashbench.records import Device
from flashbench.store.counters import Counted

AGREES = 0.05
"""Share by which writes may differ from the model's before they are said to disagree."""
REPEATS = 0.01
"""Share by which counters of one call differ from those of the next: an end of the interval is no sharper than that."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One case's counters and the model's bytes; errors are the model's, as a share of what was counted."""

    counted: Counted
    model: Traffic | None
    """None for a provider or a mode without a byte model."""
    read_error: float | None = None
    inside: bool | None = None
    """Whether the bytes that moved lie between the model's `low` and `high`."""
    writes_agree: bool | None = None
    """Whether the writes counted, with what may have stayed dirty in the L2, are the model's."""


def compare(counted: Counted, device: Device, model: tuple[str, Schedule] | None) -> Comparison:
    """Set a case's counters beside the model of its provider (algorithm and schedule), with the tiles that were launched."""
    moved = _modelled(counted, device, model)
    read, written = counted.dram_read_bytes, counted.dram_write_bytes
    if moved is None or read is None or written is None:
        return Comparison(counted, moved)
    # A line written last may still lie in the L2 when the call ends. No more of it than the model has written.
    dirty = min(max(0.0, moved.written - written), device.l2_bytes or 0)
    return Comparison(
        counted,
        moved,
        read_error=moved.read / read - 1 if read else None,
        inside=moved.low * (1 - REPEATS) <= read + written + dirty and read + written <= moved.high * (1 + REPEATS),
        writes_agree=abs(written + dirty - moved.written) <= AGREES * moved.written,
    )


def _modelled(counted: Counted, device: Device, model: tuple[str, Schedule] | None) -> Traffic | None:
    if model is None:
        return None
    algorithm, schedule = model
    try:
        return traffic(
            algorithm,
            counted.case.problem,
            l2_bytes=device.l2_bytes,
            l2_partitions=l2_partitions(device),
            sm_count=device.sm_count,
            schedule=as_launched(schedule, counted.launch, device.shared_bytes_per_block),
        )
    except UsageError:  # the algorithm has no such pass
        return None
