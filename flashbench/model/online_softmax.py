"""The online softmax on numbers that can be followed by hand: running maximum, running sum, and what a new maximum rescales.

    m' = max(m, max of the block)      alpha = exp(m - m')
    l' = alpha l + sum exp(s - m')     o' = alpha o + sum exp(s - m') v          result: o / l

(Milakov and Gimelshein 2018; Dao et al. 2022, algorithm 1.) Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from flashbench.errors import UsageError


@dataclass(frozen=True, slots=True)
class Step:
    """The state after one block."""

    scores: tuple[float, ...]
    m: float
    """The largest score so far."""
    alpha: float
    """What everything before this block is multiplied by; 0 at the first, before which there is nothing."""
    l: float  # noqa: E741 - the papers' name
    """Sum of exp(s - m) over the scores so far."""
    o: float | None
    """Sum of exp(s - m) v, not yet divided by l; None without values."""


def online_softmax(scores: Sequence[float], block: int, values: Sequence[float] | None = None) -> tuple[Step, ...]:
    """One row of scores, `block` at a time, with a value each. UsageError for no scores, as many values as not, or what is not finite."""
    if not scores:
        raise UsageError("there are no scores; give at least one")
    if block < 1:
        raise UsageError(f"a block holds at least 1 score, not {block}")
    if values is not None and len(values) != len(scores):
        raise UsageError(f"{len(scores)} scores and {len(values)} values; each score needs one value")
    if not all(map(math.isfinite, (*scores, *(values or ())))):
        raise UsageError("every score and value must be a finite number")
    steps: list[Step] = []
    m, total, o = -math.inf, 0.0, 0.0
    for start in range(0, len(scores), block):
        part = tuple(scores[start : start + block])
        highest = max(m, *part)
        alpha = math.exp(m - highest)
        weights = [math.exp(score - highest) for score in part]
        m, total = highest, alpha * total + sum(weights)
        if values is not None:
            o = alpha * o + sum(w * v for w, v in zip(weights, values[start : start + block], strict=True))
        steps.append(Step(part, m, alpha, total, None if values is None else o))
    return tuple(steps)


def weights(scores: Sequence[float], last: Step) -> tuple[float, ...]:
    """The softmax of the scores, from the state after the last block."""
    return tuple(math.exp(score - last.m) / last.l for score in scores)
