"""Statistics of times that assume no distribution: medians, their confidence intervals, spread, and a warning of two modes.

Samples of one process are correlated (one clock, one memory layout), so an interval over them says how well *this round's* median is
known: enough to stop sampling, too little to compare two runs. Across runs the unit is the round, see `over_rounds`.
Standard library only and quick: the worker asks after every few samples whether to stop.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import lru_cache

MIN_SAMPLES_FOR_MODES = 20
EXACT_RANKS_UP_TO = 1000


def quantile(samples: Sequence[float], share: float) -> float | None:
    """The value below which `share` (0 to 1) of the samples lie, linear between samples (type 7 of Hyndman and Fan 1996); None of none."""
    if not len(samples):
        return None
    ordered = sorted(samples)
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def median(samples: Sequence[float]) -> float | None:
    """The middle sample, or the mean of the two middle ones; None of none."""
    return statistics.median(samples) if len(samples) else None


@lru_cache(maxsize=4096)
def median_rank(count: int, confidence: float = 0.95) -> int | None:
    """The rank r (from 1) for which the r-th smallest and r-th largest of `count` samples enclose the median with `confidence`.

    The number of samples below the median is binomial(count, 1/2) whatever the distribution, so the interval fails with probability
    2 P(B < r) (David and Nagaraja, Order Statistics, section 7.1). None when even the extremes are not enough: below 6 samples at 95 %.
    """
    allowed = (1 - confidence) / 2
    if count > EXACT_RANKS_UP_TO:
        z = statistics.NormalDist().inv_cdf(1 - allowed)
        return math.floor((count + 1 - z * math.sqrt(count)) / 2)  # normal, with correction for continuity
    below, term, rank = 0, 1, 0
    while rank < count:
        below += term  # 2^count times P(B <= rank)
        if below / 2**count > allowed:
            break
        term = term * (count - rank) // (rank + 1)
        rank += 1
    return rank or None


def median_interval(samples: Sequence[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """The confidence interval of the median from two order statistics, at least `confidence` wide; None for too few samples."""
    rank = median_rank(len(samples), confidence)
    if rank is None:
        return None
    ordered = sorted(samples)
    return ordered[rank - 1], ordered[-rank]


def relative_width(samples: Sequence[float], confidence: float = 0.95) -> float | None:
    """Width of the median's confidence interval over the median; None for too few samples."""
    interval = median_interval(samples, confidence)
    center = median(samples)
    return (interval[1] - interval[0]) / center if interval and center else None


def spread(samples: Sequence[float]) -> float | None:
    """The range from the 5th to the 95th percentile over the median; None for fewer than two samples, which have no spread to show."""
    center = median(samples)
    low, high = quantile(samples, 0.05), quantile(samples, 0.95)
    if len(samples) < 2 or not center or low is None or high is None:
        return None
    return (high - low) / center


def bimodal(samples: Sequence[float], resolution: float = 0.001) -> bool:
    """Whether the samples fall into two clear groups, as when a clock or an algorithm changed in between: one median hides that.

    The samples are split where the variance inside the two groups is least (Otsu 1979). They are two modes when each group holds a
    tenth of the samples and five, and the means lie further apart than 5 times the standard deviation inside the groups (Ashman's D,
    1994, asks for 2, but a uniform distribution cut in half already has 3.5), than 1 % of the median, and than twice the
    `resolution` of the timer (ms), whose steps look like modes. False below 20 samples.
    """
    count = len(samples)
    if count < MIN_SAMPLES_FOR_MODES:
        return False
    ordered = sorted(samples)
    center = statistics.median(ordered)
    shifted = [value - center for value in ordered]
    total, squares = math.fsum(shifted), math.fsum(value * value for value in shifted)
    left, best, split = 0.0, -1.0, 0
    for size, value in enumerate(shifted[:-1], start=1):
        left += value
        between = left * left / size + (total - left) ** 2 / (count - size)
        if between > best:
            best, split = between, size
    distance = statistics.fmean(shifted[split:]) - statistics.fmean(shifted[:split])
    within = math.sqrt(max(squares - best, 0.0) / count)
    return min(split, count - split) >= max(5, count / 10) and distance > max(5 * within, 0.01 * center, 2 * resolution)


def over_rounds(medians: Sequence[float]) -> tuple[float | None, float | None]:
    """The median of the rounds' medians and their standard deviation (n - 1, not of the mean); None for what so few rounds do not have."""
    return median(medians), statistics.stdev(medians) if len(medians) > 1 else None
