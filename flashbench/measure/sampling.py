"""When to stop: samples are drawn in batches until the median is known well enough, or a budget ends.

The confidence interval of the median comes from order statistics, so it assumes no distribution (analysis/statistics). Warm-up
runs the same pattern as the measurement until its batch medians are steady.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from flashbench.analysis.statistics import median, relative_width

Batch = tuple[list[float], int]
"""Samples in milliseconds, and how many more were taken but do not count."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What the user asked of a measurement; see `measure:` in the configuration."""

    l2: str = "cold"
    regime: str = "isolated"
    timer: str = "auto"
    min_samples: int = 20
    confidence_width: float = 0.005
    max_seconds: float = 2.0
    warmup_seconds: float = 0.3


@dataclass(frozen=True, slots=True)
class Samples:
    """What a timing method returns: every sample in milliseconds, in the order taken."""

    values_ms: list[float]
    method: str
    warmup_ms: float
    discarded: int
    duty_cycle: float
    converged: bool
    warnings: tuple[str, ...] = ()


STEADY = 0.01
"""Warm-up ends when two batch medians in a row differ by less than this."""


def collect(
    batch: Callable[[], Batch],
    rule: Rule,
    method: str,
    clock: Callable[[], float] = time.perf_counter,
) -> Samples:
    """Warm up, then sample until the median's 95 % interval is narrower than `rule.confidence_width` or the budget ends.

    A method whose samples do not count (the host is slower than the spin) returns what it has: perhaps nothing.
    """
    warmup_ms = _warm_up(batch, rule, clock)
    values: list[float] = []
    discarded = 0
    converged = False
    start = clock()
    next_look = rule.min_samples
    while True:
        taken, lost = batch()
        values += taken
        discarded += lost
        elapsed = clock() - start
        if len(values) >= next_look:
            width = relative_width(values)
            converged = width is not None and width <= rule.confidence_width
            if converged:
                break
            next_look = len(values) + max(1, len(values) // 8)  # sorting at every batch would be quadratic
        if elapsed >= rule.max_seconds and len(values) >= rule.min_samples:
            break
        if elapsed >= 4 * rule.max_seconds and (len(values) > 1 or not taken):
            break  # a long call; but never at one sample, which has no spread
    if not converged:  # more may have come since the last look
        width = relative_width(values)
        converged = width is not None and width <= rule.confidence_width
    elapsed = clock() - start
    duty = min(1.0, sum(values) / 1e3 / elapsed) if elapsed > 0 else 0.0
    return Samples(values, method, warmup_ms, discarded, duty, converged)


def _warm_up(batch: Callable[[], Batch], rule: Rule, clock: Callable[[], float]) -> float:
    start = clock()
    previous: float | None = None
    recent: list[float] = []
    window_start = start
    while True:
        recent += batch()[0]
        now = clock()
        if now - window_start < rule.warmup_seconds / 3:
            continue
        current = median(recent) if recent else None
        steady = previous is not None and current is not None and abs(current - previous) < STEADY * previous
        elapsed = now - start
        if (elapsed >= rule.warmup_seconds and steady) or elapsed >= 4 * rule.warmup_seconds:
            return elapsed * 1e3
        previous, recent, window_start = current, [], now


def with_warnings(samples: Samples, *texts: str) -> Samples:
    return replace(samples, warnings=(*samples.warnings, *texts))
