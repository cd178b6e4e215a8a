"""Slowdowns of known size: how much extra work makes a case slower by the wanted fraction, and by how much it really does.

The size is measured apart from what the gate sees: the case and its slowed twin take turns in one process of their own, so that
nothing but the extra work lies between the two times.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flashbench.analysis.statistics import median
from flashbench.errors import FlashbenchError, UsageError
from flashbench.model.masks import visible_pairs
from flashbench.providers.slowed import slowed_name
from flashbench.records import Case, Device
from flashbench.run.process import WorkerProcess
from flashbench.run.runner import visit_case

SEARCH_PAIRS, FINAL_PAIRS = 3, 7
TRIES = 4
NEAR = (0.9, 1.15)
"""A size between these times the wanted one is near enough; what counts is that it is known."""
STEP = 16
"""Keys are given in multiples of this, as the blocks of kernels are."""
SMALL = 0.1
"""Up to here the extra work is on a quarter of the queries, because a whole pass over a few keys already costs more."""


@dataclass(frozen=True, slots=True)
class Injection:
    """A case, its slowed twin and by how much that is slower, as measured."""

    case: Case
    slowed: Case
    asked: float
    size: float
    """Median of (slowed - plain) / plain over pairs of visits in one process."""
    low: float
    high: float
    """Least and largest of the pairs."""


def inject(case: Case, fraction: float, device: Device, settings: dict[str, Any], timeout_seconds: float) -> Injection:
    """The slowed twin of a case whose size comes closest to `fraction`; UsageError when the case cannot be slowed."""
    problem = case.problem
    queries = max(1, problem.seq_q // 4) if fraction <= SMALL else problem.seq_q
    pairs_of_case = visible_pairs(problem.mask, problem.seq_q, problem.seq_kv)
    worker = WorkerProcess().start(device, settings)

    def size(keys: int, pairs: int) -> list[float]:
        return _sizes(worker, case, _twin(case, queries, keys), pairs, timeout_seconds)

    try:
        keys = _whole(fraction * pairs_of_case / queries, problem.seq_kv)
        tried: dict[int, float] = {}
        while keys not in tried and len(tried) < TRIES:
            tried[keys] = statistics.median(size(keys, SEARCH_PAIRS))
            if NEAR[0] * fraction <= tried[keys] <= NEAR[1] * fraction:
                break
            keys = _whole(_next(tried, fraction), problem.seq_kv)
        best = min(tried, key=lambda keys: abs(tried[keys] - fraction))
        sizes = size(best, FINAL_PAIRS)
    finally:
        worker.stop()
    return Injection(case, _twin(case, queries, best), fraction, statistics.median(sizes), min(sizes), max(sizes))


def _twin(case: Case, queries: int, keys: int) -> Case:
    return Case(slowed_name(case.provider, queries, keys), case.problem)


def _whole(keys: float, most: int) -> int:
    return max(1, min(most, max(STEP, round(keys / STEP) * STEP)))


def _next(tried: dict[int, float], fraction: float) -> float:
    """Keys at which a straight line through what was tried, or through it and nothing, reaches the fraction."""
    nearest = sorted(tried, key=lambda keys: abs(tried[keys] - fraction))[:2]
    if len(nearest) == 2 and tried[nearest[0]] != tried[nearest[1]]:
        (one, two) = nearest
        return one + (fraction - tried[one]) * (two - one) / (tried[two] - tried[one])
    keys = nearest[0]
    return keys * min(4.0, max(0.25, fraction / tried[keys])) if tried[keys] > 0 else 4.0 * keys


def _sizes(worker: WorkerProcess, case: Case, twin: Case, pairs: int, timeout_seconds: float) -> list[float]:
    """Sizes of pairs of visits; the two take turns in going first."""
    found = []
    for pair in range(pairs):
        order: Sequence[Case] = (case, twin) if pair % 2 == 0 else (twin, case)
        times = {one: _time_ms(worker, one, timeout_seconds) for one in order}
        found.append(times[twin] / times[case] - 1)
    return found


def _time_ms(worker: WorkerProcess, case: Case, timeout_seconds: float) -> float:
    *_, last = visit_case(worker, case, 0, timeout_seconds)
    row = last.row
    time_ms = median(last.samples_ms)
    if row is None or row.status != "ok" or not time_ms:
        told = "no row" if row is None else f"{row.status}: {row.reason}"
        kind = UsageError if row is not None and row.status == "unsupported" else FlashbenchError
        raise kind(f"the self-test cannot slow '{case.key}': {told}")
    return time_ms
