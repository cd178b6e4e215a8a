"""Which of several ways to do the same work is best over several problems."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

from flashbench.analysis.statistics import median

T = TypeVar("T", bound=Hashable)
P = TypeVar("P", bound=Hashable)


def rank(times_ms: Mapping[T, Mapping[P, Sequence[float]]]) -> list[tuple[T, float]]:
    """From candidate -> problem -> the times of its rounds: candidates, quickest first, each with the geometric mean over its problems
    of its time over the best one's.

    One that was timed on fewer problems stands behind all that were timed on more. Ratios are compared and not times, so that a long
    problem weighs no more than a short one (Fleming and Wallace 1986). Equals keep their order.
    """
    typical = {
        candidate: {problem: value for problem in found if (value := median(found[problem])) is not None}
        for candidate, found in times_ms.items()
    }
    problems = dict.fromkeys(problem for found in typical.values() for problem in found)
    best = {problem: min(found[problem] for found in typical.values() if problem in found) for problem in problems}
    ratios = {
        candidate: math.exp(sum(math.log(found[problem] / best[problem]) for problem in found) / len(found))
        for candidate, found in typical.items()
        if found
    }
    return sorted(ratios.items(), key=lambda item: (-len(typical[item[0]]), item[1]))
