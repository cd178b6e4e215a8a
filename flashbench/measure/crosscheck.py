"""The same launches by two clocks: events and the profiler's kernel time; and a CUDA graph in the same pattern.

An opt-in pass (`measure: {cross_check: true}`) for whoever does not believe the times of a row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from flashbench.analysis.statistics import median
from flashbench.measure.profiler import gpu_activities
from flashbench.measure.sampling import Rule
from flashbench.measure.timer import FIRST_SPIN_CYCLES, GraphTimer, L2Flush, TimerUnavailable, nothing
from flashbench.records import Device

LAUNCHES = 15
LONG_SPIN_CYCLES = 30 * FIRST_SPIN_CYCLES
"""About a millisecond: under the profiler the host launches slowly, and autograd's thread later still."""


def cross_check(call: Callable[[], object], rule: Rule, device: Device) -> dict[str, float]:
    """Medians in milliseconds: `events_ms` and `profiler_ms` of the same launches, and `graph_ms` of replays where one can be made."""
    if device.kind == "cpu":
        return {}
    found = _same_launches(call, rule, device)
    try:
        graph = GraphTimer(call, L2Flush(device) if rule.l2 == "cold" else nothing, rule)
    except TimerUnavailable:
        return found
    replays: list[float] = []
    for _ in range(2 * LAUNCHES):  # the first replays may be late, until the spin is long enough
        replays += graph.batch()[0]
        if len(replays) >= LAUNCHES:
            break
    graph_ms = median(replays[len(replays) // 4 :])
    return found if graph_ms is None else {**found, "graph_ms": graph_ms}


def _same_launches(call: Callable[[], object], rule: Rule, device: Device) -> dict[str, float]:
    flush = L2Flush(device) if rule.l2 == "cold" else nothing
    gpu_activities(call)  # the first profile of a process may miss activities
    calls, flushes = len(gpu_activities(call)), len(gpu_activities(flush))
    events_ms: list[float] = []

    def pattern() -> None:
        for _ in range(LAUNCHES):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(FIRST_SPIN_CYCLES)
            flush()
            torch.cuda._sleep(LONG_SPIN_CYCLES)
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            events_ms.append(start.elapsed_time(end))

    activities = gpu_activities(pattern)
    per_launch = 1 + flushes + 1 + calls
    if len(activities) != LAUNCHES * per_launch:
        return {}
    kernel_ms = []
    for launch in range(LAUNCHES):
        own = activities[launch * per_launch + per_launch - calls : (launch + 1) * per_launch]
        kernel_ms.append((max(end for _, end in own) - own[0][0]) / 1e6)
    by_events, by_profiler = median(events_ms), median(kernel_ms)
    return {} if by_events is None or by_profiler is None else {"events_ms": by_events, "profiler_ms": by_profiler}
