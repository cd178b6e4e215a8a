"""The array form of `screening`: screen, confirm and conclude for many rectangular suites at once.

tests/test_gate_simulation.py proves its verdicts equal to those of `screening` on random suites.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashbench.analysis.gate.rules import Rules
from flashbench.analysis.gate.shift import (
    Shift,
    beyond,
    decide,
    paired_shift,
    smallest_effect,
    stacked,
    stored_shift,
    threshold,
)

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Decisions:
    """Verdicts as +1 (regression), -1 (improvement) and 0, with what it cost: arrays (suites, cases) and (suites, groups)."""

    cases: Array
    groups: Array
    flagged: Array
    """Cases measured again."""
    screened: Array
    """Whether p < alpha alone, without margins, in the screening."""
    inconclusive: Array


def paired_suites(
    rounds: tuple[Array, Array], fresh: tuple[Array, Array] | None, groups: int, rules: Rules
) -> Decisions:
    """Judge suites of paired rounds: `rounds` and `fresh` hold the base and the new side's times, each (suites, cases, rounds)."""
    import numpy as np

    def weigh(sides: tuple[Array, Array], flagged: Array | None) -> tuple[Shift, Shift, Array, Array]:
        base, new = sides
        logs = np.log(new) - np.log(base)
        shift = paired_shift(logs, rules.alpha)
        limit = _limits(base, new, rules.margin, rules)
        flagged = beyond(shift, limit, rules.alpha) if flagged is None else flagged
        return shift, paired_shift(_rest_mean(logs, flagged, groups), rules.alpha), limit, flagged

    return _two_stages(weigh, rounds, fresh, rules, rules.group_share * rules.margin, groups)


def stored_suites(
    base: tuple[Array, Array],
    new: tuple[Array, Array],
    fresh: tuple[Array, Array] | None,
    groups: int,
    rules: Rules,
    *,
    anchored: bool = True,
) -> Decisions:
    """Judge suites against stored rounds: each side a pair of times and of their anchors' times, both (suites, cases, rounds)."""
    import numpy as np

    margin = rules.stored_margin if anchored else max(rules.stored_margin, rules.unanchored_margin)
    session_sd = rules.session_sd if anchored else rules.unanchored_session_sd

    def logs(side: tuple[Array, Array]) -> Array:
        times, anchors = (np.log(values) for values in side)
        return times - anchors if anchored else times

    def weigh(side: tuple[Array, Array], flagged: Array | None) -> tuple[Shift, Shift, Array, Array]:
        before, after = logs(base), logs(side)
        shift = stored_shift(before, after, session_sd, rules.alpha)
        limit = _limits(base[0], side[0], margin, rules)
        flagged = beyond(shift, limit, rules.alpha) if flagged is None else flagged
        means = [_rest_mean(values, flagged, groups) for values in (before, after)]
        return shift, stored_shift(means[0], means[1], session_sd, rules.alpha), limit, flagged

    group_margin = rules.group_share * margin if anchored else margin
    return _two_stages(weigh, new, fresh, rules, group_margin, groups)


def _two_stages(
    weigh: Callable[[Any, Array | None], tuple[Shift, Shift, Array, Array]],
    first: Any,
    fresh: Any,
    rules: Rules,
    group_margin: float,
    groups: int,
) -> Decisions:
    import numpy as np

    shift, group, limit, flagged = weigh(first, None)
    group_limit = np.full(group.centre.shape, np.log1p(group_margin))
    size = flagged.shape[-1] // groups
    enough = (flagged.reshape(*flagged.shape[:-1], groups, size) == 0).sum(axis=-1) >= rules.group_cases
    group_flagged = np.where(enough, beyond(group, group_limit, rules.alpha), 0)
    limits = np.concatenate([limit, group_limit], axis=-1)
    if fresh is None:
        everyone = np.concatenate([np.ones_like(flagged), enough.astype(np.int8)], axis=-1)
        both = stacked([shift, group])
        decided = decide(both, limits, everyone, rules.family_alpha) + decide(
            both, limits, -everyone, rules.family_alpha
        )
        again = np.zeros(flagged.shape, dtype=bool)
    else:
        fresh_shift, fresh_group, fresh_limit, _ = weigh(fresh, flagged)
        limits = np.concatenate([fresh_limit, group_limit], axis=-1)
        flags = np.concatenate([flagged, group_flagged], axis=-1)
        decided = decide(stacked([fresh_shift, fresh_group]), limits, flags, rules.family_alpha)
        again = (flagged != 0) | (np.repeat(group_flagged != 0, size, axis=-1))
    cases = flagged.shape[-1]
    noisy = smallest_effect(shift, limit, rules.alpha) > np.expm1(2 * limit)
    doubtful = (flagged == 0) & (noisy | (shift.centre > limit))
    return Decisions(decided[..., :cases], decided[..., cases:], again, shift.p_worse < rules.alpha, doubtful)


def _limits(base: Array, new: Array, margin: float, rules: Rules) -> Array:
    import numpy as np

    floor = rules.metric.margin_abs if rules.margin_abs is None else rules.margin_abs
    return threshold(margin, floor, np.sqrt(np.median(base, axis=-1) * np.median(new, axis=-1)))


def _rest_mean(values: Array, flagged: Array, groups: int) -> Array:
    """Mean over the unflagged cases of each group: (suites, cases, rounds) to (suites, groups, rounds)."""
    import numpy as np

    suites, cases, rounds = values.shape
    rest = (flagged == 0).reshape(suites, groups, cases // groups, 1)
    total = (values.reshape(suites, groups, cases // groups, rounds) * rest).sum(axis=2)
    mean: Array = total / np.maximum(rest.sum(axis=2), 1)
    return mean
