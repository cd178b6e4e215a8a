"""Timing methods with one signature: an operation and a rule in, samples in milliseconds out.

On a GPU each sample is: flush the L2 (when cold), a spin that keeps the stream busy while the host prepares, event, call, event.
The start event must still be waiting behind the spin when the last launch has returned; otherwise the time contains the host's
launching, and the sample does not count. Calls of a few microseconds are read from the profiler (CUPTI), because the gap
between two events is itself several microseconds long.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from flashbench.analysis.statistics import median
from flashbench.measure.sampling import Batch, Rule, Samples, collect, with_warnings
from flashbench.records import Device

Call = Callable[[], object]

SHORT_MS = 0.020
"""Below this the events' own gap (1 to 3 us) is too large a share, and the profiler is asked."""
BATCH_SECONDS = 0.02
"""Launches are queued for about this long between two synchronisations."""
MAX_BATCH = 50
FIRST_SPIN_CYCLES = 60_000
MAX_SPIN_CYCLES = 20_000_000
"""About 10 ms: a call whose host side takes longer is not waited for."""


@dataclass
class L2Flush:
    """Writes a buffer of four times the last-level cache, so that nothing of the inputs is left in it.

    Sized from the device; a machine that does not say gets 256 MiB on a GPU and 64 MiB on a CPU.
    """

    device: Device
    _buffer: torch.Tensor | None = field(default=None, repr=False)

    def __call__(self) -> None:
        if self._buffer is None:
            fallback = (64 if self.device.kind == "cuda" else 16) << 20
            size = 4 * (self.device.l2_bytes or fallback)
            self._buffer = torch.empty(size, dtype=torch.int8, device=torch.device(self.device.kind, self.device.index))
        self._buffer.zero_()


def _nothing() -> None:
    return None


def time_call(call: Call, rule: Rule, device: Device, observe: Call = _nothing) -> Samples:
    """Time `call` with the method that its duration asks for: wall clock on a CPU, events on a GPU, the profiler when short."""
    flush = L2Flush(device) if rule.l2 == "cold" else _nothing
    if device.kind == "cpu":
        return collect(lambda: _wall_batch(call, flush, observe), rule, "wall")
    events = EventTimer(call, flush, rule.regime, observe)
    estimate, _ = events.batch()
    estimate += events.batch()[0]
    typical_ms = median(estimate)
    if typical_ms is not None and typical_ms < SHORT_MS:
        return _time_short(call, flush, rule, events, observe)
    samples = collect(events.batch, rule, "events")
    if not samples.values_ms:
        return with_warnings(samples, "the host launches more slowly than the longest spin, so no sample counted")
    return samples


def _time_short(call: Call, flush: Call, rule: Rule, events: EventTimer, observe: Call) -> Samples:
    try:
        return collect(ProfilerTimer(call, flush, observe).batch, rule, "profiler")
    except ProfilerUnavailable as error:
        samples = collect(events.batch, rule, "events")
        return with_warnings(
            samples, f"shorter than {SHORT_MS * 1e3:.0f} us and {error}: the events' gap is part of the time"
        )


def _wall_batch(call: Call, flush: Call, observe: Call) -> Batch:
    values: list[float] = []
    started = time.perf_counter()
    while time.perf_counter() - started < BATCH_SECONDS and len(values) < MAX_BATCH:
        flush()
        before = time.perf_counter_ns()
        call()
        values.append((time.perf_counter_ns() - before) / 1e6)
    observe()
    return values, 0


class EventTimer:
    """CUDA events around single launches behind a spin. The spin grows until the host keeps ahead of the device."""

    def __init__(self, call: Call, flush: Call, regime: str = "isolated", observe: Call = _nothing) -> None:
        self.call = call
        self.flush = flush
        self.regime = regime
        self.observe = observe
        self.spin_cycles = FIRST_SPIN_CYCLES
        self.batch_size = 3

    def batch(self) -> Batch:
        """A batch of samples, and how many did not count."""
        pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        late = 0
        started = time.perf_counter()
        if self.regime == "sustained":
            torch.cuda._sleep(self.spin_cycles)
        for _ in range(self.batch_size):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self.flush()
            if self.regime == "isolated":
                torch.cuda._sleep(self.spin_cycles)
            start.record()
            self.call()
            end.record()
            if start.query():
                late += 1
            else:
                pairs.append((start, end))
        self.observe()  # while the queue still runs, so that the clock read is the clock under load
        torch.cuda.synchronize()
        elapsed = time.perf_counter() - started
        if late:
            self.spin_cycles = min(2 * self.spin_cycles, MAX_SPIN_CYCLES)
        self.batch_size = max(2, min(MAX_BATCH, round(self.batch_size * BATCH_SECONDS / max(elapsed, 1e-6))))
        return [start.elapsed_time(end) for start, end in pairs], late


class ProfilerUnavailable(Exception):
    """The profiler gives no kernel times here."""


class ProfilerTimer:
    """Kernel time from the profiler's activity records (CUPTI), in the same pattern of flush, spin and call as the events.

    Activities are told apart by order: those of a call lie between its spin and the next flush. A call's time runs from the start
    of its first activity to the end of its last.
    """

    BATCH = 25

    def __init__(self, call: Call, flush: Call, observe: Call = _nothing) -> None:
        self.call = call
        self.flush = flush
        self.observe = observe
        self.flush_activities = self._count(flush)
        self.call_activities = self._count(call)
        if self.call_activities == 0:
            raise ProfilerUnavailable("the profiler shows no GPU activity here")

    def batch(self) -> Batch:
        def pattern() -> None:
            for _ in range(self.BATCH):
                self.flush()
                torch.cuda._sleep(FIRST_SPIN_CYCLES)
                self.call()
            self.observe()

        activities = _gpu_activities(pattern)
        per_sample = self.flush_activities + 1 + self.call_activities
        if len(activities) != self.BATCH * per_sample:
            return [], self.BATCH
        values = []
        for sample in range(self.BATCH):
            first = sample * per_sample + self.flush_activities + 1
            own = activities[first : first + self.call_activities]
            values.append((max(end for _, end in own) - own[0][0]) / 1e6)
        return values, 0

    @staticmethod
    def _count(call: Call) -> int:
        # The first profile of a process starts CUPTI and may miss activities; the second does not.
        _gpu_activities(call)
        return len(_gpu_activities(call))


def _gpu_activities(call: Call) -> list[tuple[int, int]]:
    """(start, end) in nanoseconds of everything that ran on the GPU during `call`, in order."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        call()
        torch.cuda.synchronize()
    results = trace.profiler.kineto_results if trace.profiler is not None else None
    if results is None:
        return []
    spans = [
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in results.events()
        if event.device_type() == DeviceType.CUDA and event.duration_ns() > 0
    ]
    return sorted(spans)
