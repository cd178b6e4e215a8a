"""One case that was checked and timed: rates, intervals, modelled work and bytes, each worked out when it is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from flashbench.analysis import statistics
from flashbench.hardware.catalogue import GpuSpec
from flashbench.hardware.ceilings import Ceiling, choose
from flashbench.model.binding import Binding, bind
from flashbench.model.flops import PRODUCTS, executed_flops, exponentials, useful_flops
from flashbench.model.interval import Traffic
from flashbench.model.schedule import Schedule, as_launched
from flashbench.model.traffic import ALGORITHMS, Intensity, arithmetic_intensity, l2_partitions, traffic
from flashbench.records import Case, Device, Problem


def tflops(flop: float | None, time_ms: float | None) -> float | None:
    """Rate in TFLOP/s (1e12 per second): 1e12 FLOP in 1 ms are 1000."""
    return flop / (time_ms * 1e9) if flop is not None and time_ms else None


def gbps(moved_bytes: float | None, time_ms: float | None) -> float | None:
    """Rate in GB/s (1e9 bytes per second): 1e9 bytes in 1 ms are 1000."""
    return moved_bytes / (time_ms * 1e6) if moved_bytes is not None and time_ms else None


@dataclass(frozen=True)
class Measured:
    """One case that is ok, and what its metrics may look at."""

    row: Mapping[str, Any]
    """Its columns of the summary; None where unknown."""
    device: Device
    spec: GpuSpec | None
    ceilings: tuple[Ceiling, ...]
    model: tuple[str, Schedule] | None
    """The provider's algorithm (`flashbench.model.traffic`) and schedule; None: its bytes are not known."""
    reference_ms: float | None
    """Time of the reference provider on the same problem."""

    @cached_property
    def problem(self) -> Problem:
        return Case.from_key(self.row["key"]).problem

    @cached_property
    def round_medians(self) -> list[float]:
        return [float(m) for m in map(statistics.median, self.row["samples_ms"] or ()) if m is not None]

    @cached_property
    def time_ms(self) -> float | None:
        """The median of the rounds' medians."""
        return statistics.median(self.round_medians)

    @cached_property
    def interval_ms(self) -> tuple[float, float] | None:
        """95 % interval of the time: over rounds from six on; with fewer, from the lowest to the highest end of the rounds' own."""
        over = statistics.median_interval(self.round_medians)
        if over is not None:
            return over
        within = [statistics.median_interval(samples) for samples in self.row["samples_ms"] or ()]
        known = [interval for interval in within if interval is not None]
        if not known or len(known) < len(within):
            return None
        return min(low for low, _ in known), max(high for _, high in known)

    @cached_property
    def spread(self) -> float | None:
        """The median of the rounds' spreads: what changes from round to round is not in it."""
        found = (statistics.spread(samples) for samples in self.row["samples_ms"] or ())
        return statistics.median([value for value in found if value is not None])

    @property
    def rounds_sd(self) -> float | None:
        deviation = statistics.over_rounds(self.round_medians)[1]
        return deviation / self.time_ms if deviation is not None and self.time_ms else None

    @property
    def algorithm(self) -> str | None:
        return self.model[0] if self.model else None

    @property
    def computes(self) -> str:
        """attention, or of its two products alone: scores or values."""
        return PRODUCTS.get(self.algorithm or "", "attention")

    @property
    def tiles(self) -> dict[str, int] | None:
        """The tiles of the project's own kernels, as they were launched."""
        launch = self.row["launch"] or {}
        known = {name: launch[name] for name in ("block_q", "block_kv") if isinstance(launch.get(name), int)}
        return known if len(known) == 2 else None

    @cached_property
    def schedule(self) -> Schedule | None:
        """The provider's schedule, with the blocks that were launched where they are known."""
        return (
            as_launched(self.model[1], self.row["launch"], self.device.shared_bytes_per_block) if self.model else None
        )

    @cached_property
    def flops(self) -> int:
        return useful_flops(self.problem, self.algorithm)

    @property
    def tflops(self) -> float | None:
        return tflops(self.flops, self.time_ms)

    @property
    def executed(self) -> int | None:
        return executed_flops(self.problem, self.schedule) if self.schedule and self.tiles else None

    @cached_property
    def traffic(self) -> Traffic | None:
        """Modelled HBM bytes, None for a provider whose algorithm is not known or has no such pass."""
        if self.algorithm is None or self.problem.mode not in ALGORITHMS.get(self.algorithm, {self.problem.mode}):
            return None
        device = self.device
        return traffic(
            self.algorithm,
            self.problem,
            l2_bytes=self.l2_bytes,
            l2_partitions=l2_partitions(device),
            sm_count=device.sm_count,
            schedule=self.schedule,
        )

    @cached_property
    def intensity(self) -> Intensity | None:
        return arithmetic_intensity(self.flops, self.traffic) if self.traffic else None

    @property
    def hbm_gbps(self) -> float | None:
        return gbps(self.traffic.estimate, self.time_ms) if self.traffic else None

    @property
    def l2_bytes(self) -> int | None:
        return self.device.l2_bytes or (self.spec.l2_bytes if self.spec else None)

    @property
    def peak_tflops(self) -> float | None:
        """The data sheet's dense peak of this device at the case's dtype."""
        return self.spec.peak_tflops(self.problem.dtype) if self.spec else None

    def ceiling(self, level: str) -> Ceiling | None:
        """The ceiling of this device to hold the case to, measured in its own load regime where there is one."""
        return choose(self.ceilings, level, self.problem.dtype, self.row["regime"])

    @cached_property
    def binding(self) -> Binding | None:
        """Which ceiling holds the case; None without a time or modelled bytes."""
        if self.traffic is None or not self.time_ms:
            return None
        p, tiles, launch = self.problem, self.tiles, self.ceiling("launch")
        blocks = p.batch * p.heads_q * -(-p.seq_q // tiles["block_q"]) if tiles and p.mode == "forward" else None
        return bind(
            self.time_ms,
            p,
            self.traffic,
            self.flops,
            self.ceilings,
            regime=self.row["regime"],
            sm_count=self.device.sm_count,
            blocks=blocks,
            blocks_per_sm=self.schedule.blocks_per_sm if self.schedule else 1,
            launch_ms=launch.value / 1e3 if launch else None,
            exps=exponentials(p, self.algorithm),
        )

    @property
    def peak_net_bytes(self) -> int | None:
        """What the call took beyond what was there before it: inputs and what the provider keeps are not in it."""
        peak, before = self.row["peak_bytes"], self.row["before_bytes"]
        return None if peak is None or before is None else int(peak) - int(before)
