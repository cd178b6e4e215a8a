"""What the rounds say about a change, and the decisions taken on it: array functions, so that the simulation runs the very code of the gate.

A *shift* is the natural logarithm of (new / base), signed so that positive is worse. Logarithms make the two sides
interchangeable: swapping them turns every shift's sign and nothing else. The unit of evidence is the round, never the sample
inside a process, because samples of one process share its layout, clocks and luck.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

MEDIAN_SE_FACTOR = 1.2533141373155003
"""sqrt(pi / 2): standard error of a median over that of a mean, for many normal values."""
ROUNDING = 1e-9
"""Slack of a comparison with a margin, so that exactly 10 % is not above 10 % through the rounding of a logarithm."""
MANY = 1e6
"""Degrees of freedom of a normal distribution."""
POWER_Z = 1.6448536269514722
"""Normal quantile of 95 %: two stages that each see an effect with 95 % see it together with about 90 %."""


@dataclass(frozen=True, slots=True)
class Shift:
    """Evidence about arrays of cases: every field has the shape of the input without its last axis (the rounds)."""

    centre: Array
    """Median log ratio; one odd round does not move it, as it would a mean."""
    low: Array
    high: Array
    """Ends of the two-sided interval of level 1 - 2 alpha, so that each end is a one-sided bound of level 1 - alpha."""
    se: Array
    """Standard error that the test divides by."""
    centre_se: Array
    """Standard error of `centre`."""
    df: Array
    """Degrees of freedom behind `se`."""
    p_worse: Array
    """One-sided p of "the shift is not above 0"; that of "not below 0" is 1 - p_worse."""


def _one_sided(estimate: Array, se: Array, df: Any) -> Array:
    """P(T >= estimate / se) for Student's t; without any spread the sign decides, and 0 over 0 is no evidence at all."""
    import numpy as np
    from scipy.special import stdtr

    certain = np.select([estimate > 0, estimate < 0], [np.inf, -np.inf], 0.0)
    t = np.divide(estimate, se, out=certain, where=se > 0)
    p: Array = stdtr(df, -t)
    return p


def paired_shift(shifts: Array, alpha: float) -> Shift:
    """Evidence of rounds in which both sides ran: `shifts` (..., rounds), at least two rounds.

    Student's t on the rounds' log ratios; the pairing takes out whatever the two visits of a round share.
    """
    import numpy as np
    from scipy.special import stdtrit

    rounds = shifts.shape[-1]
    mean = shifts.mean(axis=-1)
    se = shifts.std(axis=-1, ddof=1) / np.sqrt(rounds)
    half = stdtrit(rounds - 1, 1 - alpha) * se
    df = np.full_like(se, rounds - 1)
    centre = np.median(shifts, axis=-1)
    p_worse = _one_sided(mean, se, rounds - 1)
    return Shift(centre, mean - half, mean + half, se, MEDIAN_SE_FACTOR * se, df, p_worse)


def stored_shift(base: Array, new: Array, session_sd: float, alpha: float) -> Shift:
    """Evidence of two sessions: log values `base` (..., rounds) and `new` (..., rounds), each side with its own rounds.

    Where there is an anchor, the values are ratios to the anchor of the same round. `session_sd` is the standard deviation of what
    remains between two sessions, which no number of rounds inside a session can show or remove. Degrees of freedom by Welch and
    Satterthwaite, with `session_sd` taken as known.
    """
    import numpy as np
    from scipy.special import stdtrit

    centre = np.median(new, axis=-1) - np.median(base, axis=-1)
    before, after = _median_variance(base), _median_variance(new)
    variance = before + after + session_sd**2
    se = np.sqrt(variance)
    spent = before**2 / (base.shape[-1] - 1) + after**2 / (new.shape[-1] - 1)
    df = np.where(spent > 0, variance**2 / np.where(spent > 0, spent, 1.0), MANY)
    half = stdtrit(df, 1 - alpha) * se
    return Shift(centre, centre - half, centre + half, se, se, df, _one_sided(centre, se, df))


def _median_variance(values: Array) -> Array:
    variance: Array = values.var(axis=-1, ddof=1) * MEDIAN_SE_FACTOR**2 / values.shape[-1]
    return variance


def threshold(margin: Array | float, margin_abs: Array | float, level: Array | float) -> Array:
    """The shift that a change has to exceed: above the relative *and* the absolute margin at this level of the metric.

    `level` is the geometric mean of the two sides' medians, which makes the absolute change 2 * level * sinh(shift / 2) and
    the threshold the same for a change and for its reverse.
    """
    import numpy as np

    limit: Array = np.maximum(np.log1p(margin), 2 * np.arcsinh(margin_abs / (2 * level)))
    return limit


def beyond(shift: Shift, limit: Array | float, alpha: float) -> Array:
    """+1 where the shift is worse than the limit with one-sided p < alpha, -1 where it is better, 0 elsewhere."""
    import numpy as np

    worse = (shift.centre > limit + ROUNDING) & (shift.p_worse < alpha)
    better = (shift.centre < -limit - ROUNDING) & (1 - shift.p_worse < alpha)
    return worse.astype(np.int8) - better.astype(np.int8)


def holm(p: Array, family: Array, alpha: float) -> Array:
    """Which hypotheses of each family fall at family-wise level alpha: `p` and `family` (..., hypotheses), `family` true for members.

    Holm (1979), "A simple sequentially rejective multiple test procedure": needs no independence.
    """
    import numpy as np

    members = np.where(family, p, np.inf)
    order = np.argsort(members, axis=-1, kind="stable")
    count = family.sum(axis=-1, keepdims=True)
    steps = np.maximum(count - np.arange(p.shape[-1]), 1)
    small = np.take_along_axis(members, order, axis=-1) < alpha / steps
    fallen = np.logical_and.accumulate(small, axis=-1)
    rejected = np.zeros_like(fallen)
    np.put_along_axis(rejected, order, fallen, axis=-1)
    return rejected


def decide(shift: Shift, limit: Array | float, flagged: Array, alpha: float) -> Array:
    """What fresh rounds confirm: `flagged` (..., hypotheses) holds the directions +1, -1 or 0 of the screening.

    A flag stands when the fresh rounds alone put the shift beyond the limit in the same direction and its p falls in
    Holm's procedure over the flags of that direction. The two directions are two families: slowdowns, of which the false-alarm
    rate is promised, pay nothing for the speed-ups beside them.
    """
    import numpy as np

    worse = (flagged > 0) & (shift.centre > limit + ROUNDING) & holm(shift.p_worse, flagged > 0, alpha)
    better = (flagged < 0) & (shift.centre < -limit - ROUNDING) & holm(1 - shift.p_worse, flagged < 0, alpha)
    return worse.astype(np.int8) - better.astype(np.int8)


def smallest_effect(shift: Shift, limit: Array | float, alpha: float) -> Array:
    """The smallest slowdown, as a fraction, that a comparison of this noise finds with about 90 %.

    The centre has to clear the limit and the test its quantile, each with 95 %; the fresh rounds, being more, rarely add to that.
    """
    import numpy as np
    from scipy.special import stdtrit

    clears_limit = limit + POWER_Z * shift.centre_se
    clears_test = (stdtrit(shift.df, 1 - alpha) + POWER_Z) * shift.se
    effect: Array = np.expm1(np.maximum(clears_limit, clears_test))
    return effect


def stacked(shifts: Sequence[Shift]) -> Shift:
    """Shifts one after the other along their last axis, so that one family can hold cases and groups."""
    import numpy as np

    names = [f.name for f in fields(Shift)]
    parts = {name: [np.atleast_1d(getattr(shift, name)) for shift in shifts] for name in names}
    return Shift(
        **{name: np.concatenate(columns, axis=-1) if columns else np.zeros(0) for name, columns in parts.items()}
    )
