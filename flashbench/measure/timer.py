"""Timing methods with one signature: each has `batch()`, which returns samples in milliseconds and how many did not count.

On a GPU a sample is: flush the L2 (when cold), a spin that keeps the stream busy while the host prepares, event, call, event.
The start event must still be waiting behind the spin when the last launch has returned; otherwise the time contains the host's
launching, and the sample does not count. Calls of a few microseconds are read from the profiler (CUPTI), because the gap
between two events is itself several microseconds long.

`isolated` leaves the card idle between samples for three times the call's own length, so that it is busy a quarter of the time
and keeps its clock where its power limit would otherwise lower it; `sustained` runs the calls back to back.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from flashbench.analysis.statistics import median
from flashbench.measure.profiler import gpu_activities
from flashbench.measure.sampling import Batch, Rule, Samples, collect, with_warnings
from flashbench.records import Device

Call = Callable[[], object]

SHORT_MS = 0.020
"""Below this the events' own gap (1 to 3 us) is too large a share, and the profiler is asked."""
CLEARLY_LONG_MS = 0.2
SETTLE_SECONDS = 0.1
BATCH_SECONDS = 0.02
"""A batch is as many samples as fit in about this time."""
MAX_BATCH = 50
FIRST_SPIN_CYCLES = 60_000
MAX_SPIN_CYCLES = 20_000_000
"""About 10 ms: a call whose host side takes longer is not waited for."""
IDLE_SHARE = 3.0
"""Idle time after an isolated sample, in lengths of the sample."""
LONGEST_IDLE_SECONDS = 0.05
"""A longer call settles at its own clock within itself, and waiting more would not help it."""
SHORTEST_IDLE_SECONDS = 0.0005
"""Below this the flush and the spin are idle time enough, and sleeping is not exact."""


class Timer(Protocol):
    """What all methods have in common."""

    def batch(self) -> Batch: ...


class TimerUnavailable(Exception):
    """A method that cannot be used for this call or on this machine, and why."""


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


def nothing() -> None:
    """A flush or an observer that does nothing."""


def time_call(call: Call, rule: Rule, device: Device, observe: Call = nothing) -> Samples:
    """Time `call` by the rule's method, or the one that its duration asks for: wall clock on a CPU, events on a GPU, the profiler when short.

    `observe` is called about once a batch, for telemetry.
    """
    flush = L2Flush(device) if rule.l2 == "cold" else nothing
    if device.kind == "cpu":
        return collect(WallTimer(call, flush, observe).batch, rule, "wall")
    methods: dict[str, Callable[[], Timer]] = {
        "events": lambda: EventTimer(call, flush, rule.regime, observe),
        "graph": lambda: GraphTimer(call, flush, rule, observe),
        "profiler": lambda: ProfilerTimer(call, flush, observe),
    }
    if rule.timer != "auto":
        return _collect(methods[rule.timer](), rule, rule.timer)
    events = EventTimer(call, flush, rule.regime, observe)
    typical_ms = _typical_ms(events)
    if typical_ms is None or typical_ms >= SHORT_MS:
        return _collect(events, rule, "events")
    reasons = []
    for method in ("profiler", "graph"):
        try:
            return _collect(methods[method](), rule, method)
        except TimerUnavailable as reason:
            reasons.append(str(reason))
    why = f"shorter than {SHORT_MS * 1e3:.0f} us, and {'; '.join(reasons)}: the events' own gap is part of the time"
    return with_warnings(_collect(events, rule, "events"), why)


def _typical_ms(events: EventTimer) -> float | None:
    """About how long a call takes. The first launches after a pause are several times slower, so a quick call is looked at for longer."""
    started = time.perf_counter()
    while True:
        found = median(events.batch()[0])
        elapsed = time.perf_counter() - started
        if (
            found is not None and (found > CLEARLY_LONG_MS or elapsed > SETTLE_SECONDS)
        ) or elapsed > 10 * SETTLE_SECONDS:
            return found


def _collect(timer: Timer, rule: Rule, method: str) -> Samples:
    samples = collect(timer.batch, rule, method)
    if not samples.values_ms:
        return with_warnings(samples, "the host launches more slowly than the longest spin, so no sample counted")
    return samples


class WallTimer:
    """The host's clock around a call that returns when it is done: a CPU."""

    def __init__(self, call: Call, flush: Call, observe: Call = nothing) -> None:
        self.call = call
        self.flush = flush
        self.observe = observe

    def batch(self) -> Batch:
        values: list[float] = []
        started = time.perf_counter()
        while time.perf_counter() - started < BATCH_SECONDS and len(values) < MAX_BATCH:
            self.flush()
            before = time.perf_counter_ns()
            self.call()
            values.append((time.perf_counter_ns() - before) / 1e6)
        self.observe()
        return values, 0


class EventTimer:
    """CUDA events around single launches behind a spin. The spin grows until the host keeps ahead of the device."""

    def __init__(self, call: Call, flush: Call, regime: str = "isolated", observe: Call = nothing) -> None:
        self.call = call
        self.flush = flush
        self.regime = regime
        self.observe = observe
        self.spin_cycles = FIRST_SPIN_CYCLES
        self.batch_size = 3

    def batch(self) -> Batch:
        """A batch of samples, and how many did not count."""
        started = time.perf_counter()
        values, late = self._isolated() if self.regime == "isolated" else self._sustained()
        elapsed = time.perf_counter() - started
        if late:
            self.spin_cycles = min(2 * self.spin_cycles, MAX_SPIN_CYCLES)
        self.batch_size = max(2, min(MAX_BATCH, round(self.batch_size * BATCH_SECONDS / max(elapsed, 1e-6))))
        return values, late

    def _isolated(self) -> Batch:
        values: list[float] = []
        late = 0
        for _ in range(self.batch_size):
            self.flush()
            torch.cuda._sleep(self.spin_cycles)
            start, end, in_time = self._launch()
            self.observe()  # while the queue still runs, so that the clock read is the clock under load
            torch.cuda.synchronize()
            sample_ms = start.elapsed_time(end)
            if in_time:
                values.append(sample_ms)
            else:
                late += 1
            idle = min(IDLE_SHARE * sample_ms / 1e3, LONGEST_IDLE_SECONDS)
            if idle > SHORTEST_IDLE_SECONDS:
                time.sleep(idle)
        return values, late

    def _sustained(self) -> Batch:
        torch.cuda._sleep(self.spin_cycles)
        launches = []
        for _ in range(self.batch_size):
            self.flush()
            launches.append(self._launch())
        self.observe()
        torch.cuda.synchronize()
        values = [start.elapsed_time(end) for start, end, in_time in launches if in_time]
        return values, len(launches) - len(values)

    def _launch(self) -> tuple[torch.cuda.Event, torch.cuda.Event, bool]:
        """One call between two events, and whether the first was still waiting when the last launch returned."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        self.call()
        end.record()
        return start, end, not start.query()


class GraphTimer:
    """Replays of a CUDA graph, which has no launch gaps inside. Warm: many copies of the call in one graph, and their mean.

    Cold: one copy, because a flush inside the graph would be timed with it.
    """

    WARM_COPIES = 20

    def __init__(self, call: Call, flush: Call, rule: Rule, observe: Call = nothing) -> None:
        self.copies = 1 if rule.l2 == "cold" else self.WARM_COPIES
        self.graph = _capture(call, self.copies)
        self.events = EventTimer(self.graph.replay, flush, rule.regime, observe)

    def batch(self) -> Batch:
        values, late = self.events.batch()
        return [value / self.copies for value in values], late


def _capture(call: Call, copies: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            for _ in range(copies):
                call()
    except RuntimeError as error:
        raise TimerUnavailable(f"a CUDA graph cannot hold the call ({str(error).splitlines()[0]})") from None
    return graph


class ProfilerTimer:
    """Kernel time from the profiler's activity records (CUPTI), in the same pattern of flush, spin and call as the events.

    Activities are told apart by order: those of a call lie between its spin and the next flush. A call's time runs from the start
    of its first activity to the end of its last.
    """

    BATCH = 25

    def __init__(self, call: Call, flush: Call, observe: Call = nothing) -> None:
        self.call = call
        self.flush = flush
        self.observe = observe
        self.flush_activities = _count(flush)
        self.call_activities = _count(call)
        if self.call_activities == 0:
            raise TimerUnavailable("the profiler shows no GPU activity here")

    def batch(self) -> Batch:
        def pattern() -> None:
            for _ in range(self.BATCH):
                self.flush()
                torch.cuda._sleep(FIRST_SPIN_CYCLES)
                self.call()
            self.observe()

        activities = gpu_activities(pattern)
        per_sample = self.flush_activities + 1 + self.call_activities
        if len(activities) != self.BATCH * per_sample:
            return [], self.BATCH
        values = []
        for sample in range(self.BATCH):
            first = sample * per_sample + self.flush_activities + 1
            own = activities[first : first + self.call_activities]
            values.append((max(end for _, end in own) - own[0][0]) / 1e6)
        return values, 0


def _count(call: Call) -> int:
    # The first profile of a process starts CUPTI and may miss activities; the second does not.
    gpu_activities(call)
    return len(gpu_activities(call))
