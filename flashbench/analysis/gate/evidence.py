"""From the rounds of one case to numbers that can be compared, or to the verdict that says why they cannot."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashbench.analysis.gate.rules import Metric, Pairing, Rules
from flashbench.analysis.gate.shift import Shift, paired_shift, stored_shift, threshold
from flashbench.analysis.gate.verdict import Finding, percent
from flashbench.records import FAILED_STATUSES
from flashbench.store.side import Observation, Side, worst_status

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Evidence:
    """Rounds that can be compared, of one case or of the mean of a group. Logarithms are signed so that more is worse."""

    key: str
    rounds: tuple[tuple[int, ...], tuple[int, ...]]
    """Round numbers of the base and of the new side; the same ones when paired."""
    base_log: Array
    """One value a round."""
    new_log: Array
    anchored: bool = False
    """Whether the values are ratios to the reference kernel of the same round."""
    base: float | None = None
    """Medians of the two sides in the metric's unit; None for a group, which has no unit."""
    new: float | None = None
    clock_shift: float | None = None
    """Median log ratio of the SM clocks, new over base; None where a side could not read them."""
    members: tuple[str, ...] = ()
    """The cases whose mean this is; empty for a case."""


def usable(key: str, base: Side, new: Side, rules: Rules, pairing: Pairing) -> Evidence | Finding:
    """The evidence about a case that at least one side has, or the finding that ends it here."""
    import numpy as np

    early = _by_status(key, base, new, rules, pairing)
    if early is not None:
        return early
    ours, theirs = (
        sorted((seen for seen in side.cases[key] if seen.status == "ok"), key=lambda seen: seen.round)
        for side in (base, new)
    )
    anchors = _anchors(key, base, new) if pairing == "stored" and rules.metric.per_session else None
    if pairing == "paired":
        shared = {seen.round for seen in ours} & {seen.round for seen in theirs}
        ours, theirs = _in_rounds(ours, shared), _in_rounds(theirs, shared)
    elif anchors is not None:
        ours, theirs = _in_rounds(ours, anchors[0]), _in_rounds(theirs, anchors[1])
    early = _by_quality(key, ours, theirs, rules)
    if early is not None:
        return early

    sign = 1.0 if rules.metric.lower_is_better else -1.0
    values = [np.array([rules.metric.value(seen) for seen in side]) for side in (ours, theirs)]
    logs = [sign * np.log(side) for side in values]
    if anchors is not None:
        for index, side in enumerate((ours, theirs)):
            logs[index] -= np.log(np.array([anchors[index][seen.round] for seen in side]))
    return Evidence(
        key,
        (tuple(seen.round for seen in ours), tuple(seen.round for seen in theirs)),
        logs[0],
        logs[1],
        anchors is not None,
        float(np.median(values[0])),
        float(np.median(values[1])),
        _clock_shift(ours, theirs, pairing),
    )


def shift_of(evidence: Evidence, rules: Rules, pairing: Pairing) -> Shift:
    """The shift between the two sides, every field a scalar."""
    if pairing == "paired":
        return paired_shift(evidence.new_log - evidence.base_log, rules.alpha)
    session_sd = rules.session_sd if evidence.anchored else rules.unanchored_session_sd
    if not rules.metric.per_session:
        session_sd = 0.0
    return stored_shift(evidence.base_log, evidence.new_log, session_sd, rules.alpha)


def limit_of(evidence: Evidence, rules: Rules, pairing: Pairing) -> float:
    """The shift that a case has to exceed: both its relative and its absolute margin."""
    assert evidence.base is not None
    assert evidence.new is not None
    level = math.sqrt(evidence.base * evidence.new)
    return float(threshold(relative_margin(evidence, rules, pairing), rules.margins(evidence.key).absolute, level))


def relative_margin(evidence: Evidence, rules: Rules, pairing: Pairing) -> float:
    """The relative margin of a case: wider between sessions, and wider still between sessions that share no anchor."""
    margins = rules.margins(evidence.key)
    if pairing == "paired":
        return margins.paired
    if not evidence.anchored and rules.metric.per_session:
        return max(margins.stored, rules.unanchored_margin)
    return margins.stored


def is_throttled(seen: Observation) -> bool:
    """Whether heat or the hardware slowed this round. The software power cap alone is the normal state of a power-capped card."""
    return any("thermal" in reason or "hardware" in reason for reason in seen.throttle_reasons or ())


def clock_explains(evidence: Evidence, centre: float, limit: float, metric: Metric) -> str | None:
    """Why a change of time is the clock's and not the code's, or None.

    The cycles (time × clock, as measured, no anchor) must stay within the limit, and the clock must make up at least half of the change.
    """
    if metric.name != "time" or evidence.clock_shift is None or evidence.base is None or evidence.new is None:
        return None
    time = math.log(evidence.new / evidence.base)
    cycles = time + evidence.clock_shift
    if abs(cycles) > limit or abs(evidence.clock_shift) < abs(centre) / 2:
        return None
    return (
        f"clock, not code: time {percent(math.expm1(time))} but cycles {percent(math.expm1(cycles))}, "
        f"the SM clock moved by {percent(math.expm1(evidence.clock_shift))}; lock the clocks, or compare again"
    )


def _by_status(key: str, base: Side, new: Side, rules: Rules, pairing: Pairing) -> Finding | None:
    """The verdict on a case that one of the sides does not have, or that did not run on it."""
    if key not in new.cases:
        return Finding(
            key, "missing", "measured on the base side, not on the new one", excused=rules.may_be_missing(key)
        )
    after = worst_status(new.cases[key])
    if after in FAILED_STATUSES:
        return Finding(key, "failed", _told(new.cases[key], after))
    if key not in base.cases:
        return Finding(
            key, "new", "not in the base" if after == "ok" else f"not in the base; {_told(new.cases[key], after)}"
        )
    before = worst_status(base.cases[key])
    if pairing == "paired" and before in FAILED_STATUSES:
        return Finding(key, "failed", f"on the base side: {_told(base.cases[key], before)}")
    if pairing == "stored" and any(seen.status == "ok" for seen in base.cases[key]):
        before = "ok"
    if after == before == "ok":
        return None
    if after == "oom" and before in ("ok", "checked"):
        return Finding(key, "failed", f"ok in the base, now {_told(new.cases[key], after)}")
    if after == "unsupported" and before in ("ok", "checked"):
        told = _told(new.cases[key], after)
        return Finding(key, "missing", f"ok in the base, now {told}", excused=rules.may_be_missing(key))
    if after in ("ok", "checked") and before not in ("ok", "checked"):
        return Finding(key, "new", f"in the base it was {_told(base.cases[key], before)}")
    if "checked" in (after, before):
        return Finding(key, "inconclusive", "checked but not timed; measure without --check-only", untrusted=True)
    return Finding(key, "pass", f"{_told(new.cases[key], after)}, as in the base")


def _by_quality(key: str, ours: Sequence[Observation], theirs: Sequence[Observation], rules: Rules) -> Finding | None:
    """The verdict on a case whose numbers cannot be used, or were not taken in the same way."""
    for side, rounds in (("baseline", ours), ("new side", theirs)):
        for seen in rounds:
            value = rules.metric.value(seen)
            if value is None or not math.isfinite(value) or value <= 0:
                what = f"no {rules.metric.name}" if value is None else f"{value:g} {rules.metric.unit}"
                reason = f"{side} invalid: {what} in round {seen.round}; store or measure it again"
                return Finding(key, "inconclusive", reason, untrusted=True)
    for name, word in (("method", "timer"), ("l2", "L2 state"), ("regime", "load regime")):
        ways = [{getattr(seen, name) for seen in rounds} - {None} for rounds in (ours, theirs)]
        if all(ways) and ways[0] != ways[1]:
            told = " against ".join("/".join(sorted(way)) for way in ways)
            return Finding(key, "unlike machine", f"{word} {told}; use the base side's for both")
    fewest = min(len(ours), len(theirs))
    if fewest < max(rules.min_rounds, 2):
        reason = f"too few rounds: {fewest}, at least {max(rules.min_rounds, 2)} are needed"
        return Finding(key, "inconclusive", reason, untrusted=True)
    throttled = [sum(map(is_throttled, rounds)) for rounds in (ours, theirs)]
    if throttled[0] * len(theirs) != throttled[1] * len(ours):
        told = ", ".join(sorted({reason for seen in (*ours, *theirs) for reason in seen.throttle_reasons or ()}))
        reason = (
            f"throttled in {throttled[0]} of {len(ours)} rounds of the base and {throttled[1]} of {len(theirs)} of the new side "
            f"({told}); let the GPU cool and measure again"
        )
        return Finding(key, "inconclusive", reason)
    return None


def _told(rounds: Sequence[Observation], status: str) -> str:
    seen = next(seen for seen in rounds if seen.status == status)
    # One line, whatever a library put into its message: it ends in tables and annotations.
    return f"{status} in round {seen.round}" + (f": {' '.join(seen.reason.split())}" if seen.reason else "")


def _in_rounds(rounds: Sequence[Observation], wanted: Container[int]) -> list[Observation]:
    return [seen for seen in rounds if seen.round in wanted]


def _anchors(key: str, base: Side, new: Side) -> tuple[Mapping[int, float], Mapping[int, float]] | None:
    """Times by round of the anchor that a case goes with: the copy for decode, which reads memory, the GEMM for the rest; else the other one."""
    found = {}
    for name in sorted(base.anchors.keys() & new.anchors.keys()):
        sides = [
            {number: ms for number, ms in side.anchors[name].items() if ms is not None and math.isfinite(ms) and ms > 0}
            for side in (base, new)
        ]
        if all(sides):
            found[name] = (sides[0], sides[1])
    wanted = "copy" if f"{key} ".split(" ")[1] == "decode" else "gemm"
    return found.get(wanted) or next(iter(found.values()), None)


def _clock_shift(ours: Sequence[Observation], theirs: Sequence[Observation], pairing: Pairing) -> float | None:
    import numpy as np

    clocks = [[seen.sm_clock_mhz for seen in rounds] for rounds in (ours, theirs)]
    if any(not clock for side in clocks for clock in side):
        return None
    before, after = (np.log(np.array(side, dtype=float)) for side in clocks)
    if pairing == "paired":
        return float(np.median(after - before))
    return float(np.median(after) - np.median(before))
