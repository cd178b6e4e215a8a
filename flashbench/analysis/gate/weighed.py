"""Evidence weighed against its limit, and the findings that come of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flashbench.analysis.gate.evidence import Evidence, clock_explains, shift_of
from flashbench.analysis.gate.rules import Metric, Pairing, Rules
from flashbench.analysis.gate.shift import ROUNDING, Shift, beyond, smallest_effect
from flashbench.analysis.gate.verdict import Finding, Verdict, percent


@dataclass(frozen=True, slots=True)
class Weighed:
    """Evidence with its shift, limit and the direction (+1 worse, -1 better, 0) in which it stands out."""

    evidence: Evidence
    shift: Shift
    limit: float
    flag: int

    @property
    def key(self) -> str:
        return self.evidence.key


def weigh(evidence: Evidence, limit: float, rules: Rules, pairing: Pairing) -> Weighed:
    shift = shift_of(evidence, rules, pairing)
    return Weighed(evidence, shift, limit, int(beyond(shift, limit, rules.alpha)))


def without_fresh_rounds(item: Weighed, decision: int, rules: Rules) -> Finding:
    if not item.flag and not decision:
        return unflagged(item, rules)
    if decision:
        return _stands(item, decision, rules, confirmed=False)
    change = percent(_change(item, rules.metric))
    return _finding(item, rules, "inconclusive", f"{change} in one screening; fresh rounds would have to confirm it")


def after_fresh_rounds(first: Weighed, fresh: Weighed, decision: int, rules: Rules) -> Finding:
    if decision:
        return _stands(fresh, decision, rules, confirmed=True)
    before, after = (percent(_change(item, rules.metric)) for item in (first, fresh))
    rounds = len(fresh.evidence.rounds[1])
    reason = f"{before} in {len(first.evidence.rounds[1])} rounds, {after} in {rounds} fresh ones"
    return _finding(fresh, rules, "cleared", reason, confirmed=True)


def _stands(item: Weighed, decision: int, rules: Rules, *, confirmed: bool) -> Finding:
    """A change that the evidence supports, unless the clock explains it."""
    clock = clock_explains(item.evidence, float(item.shift.centre), item.limit, rules.metric)
    if clock is not None:
        return _finding(item, rules, "inconclusive", clock, confirmed=confirmed)
    verdict: Verdict = "regression" if decision > 0 else "improvement"
    return _finding(item, rules, verdict, _described(item, rules.metric), confirmed=confirmed)


def unflagged(item: Weighed, rules: Rules, failed: Finding | None = None) -> Finding:
    """Pass, when a slowdown of twice the margin would have been found and the centre is not beyond the margin itself."""
    if failed is not None:
        return failed
    effect = float(smallest_effect(item.shift, item.limit, rules.alpha))
    if float(item.shift.centre) > item.limit + ROUNDING:
        reason = f"{percent(_change(item, rules.metric))}, but the rounds disagree; measure more rounds"
        return _finding(item, rules, "inconclusive", reason)
    if effect > math.expm1(2 * item.limit):
        reason = f"too noisy: a slowdown below {percent(effect)} would not show; measure more rounds, or on a quieter machine"
        return _finding(item, rules, "inconclusive", reason)
    return _finding(item, rules, "pass", "")


def not_repeated(first: Weighed, fresh: Finding | None) -> Finding:
    """A flag whose fresh rounds could not be used: the failure itself, or no trustworthy verdict."""
    if fresh is not None and fresh.verdict == "failed":
        return fresh
    why = fresh.reason if fresh is not None and fresh.verdict != "missing" else "no fresh rounds of it"
    members = first.evidence.members
    untrusted = fresh is None or fresh.untrusted or fresh.verdict != "inconclusive"
    return Finding(
        first.key, "inconclusive", f"flagged, then not confirmed: {why}", untrusted=untrusted, members=members
    )


def failed_again(fresh: Evidence | Finding | None) -> Finding | None:
    """A case that was only measured again for its group still counts when it failed then."""
    return fresh if isinstance(fresh, Finding) and fresh.verdict == "failed" else None


def _finding(item: Weighed, rules: Rules, verdict: Verdict, reason: str, *, confirmed: bool = False) -> Finding:
    evidence, shift = item.evidence, item.shift
    sign = 1.0 if rules.metric.lower_is_better else -1.0
    centre, p_worse = float(shift.centre), float(shift.p_worse)
    ends = [math.expm1(sign * float(end)) for end in (shift.low, shift.high)]
    return Finding(
        key=evidence.key,
        verdict=verdict,
        reason=reason,
        base=evidence.base,
        new=evidence.new,
        change=_change(item, rules.metric),
        low=min(ends),
        high=max(ends),
        shift=centre,
        p=p_worse if centre >= 0 else 1 - p_worse,
        # Only the new side has fresh rounds between sessions: the base of both stages is what is stored.
        rounds=len(evidence.rounds[1]) if confirmed else min(map(len, evidence.rounds)),
        confirmed=confirmed,
        margin=math.expm1(item.limit),
        smallest_effect=float(smallest_effect(shift, item.limit, rules.alpha)),
        members=evidence.members,
    )


def _change(item: Weighed, metric: Metric) -> float:
    return math.expm1(float(item.shift.centre) * (1 if metric.lower_is_better else -1))


def _described(item: Weighed, metric: Metric) -> str:
    """Both values and the change of the metric, (new - base) / base; a factor only with the word that its sign asks for."""
    shift, change = float(item.shift.centre), percent(_change(item, metric))
    if item.evidence.members:
        return f"geometric mean of {len(item.evidence.members)} cases {change}"
    word = ("slower" if shift > 0 else "faster") if metric.name == "time" else ("worse" if shift > 0 else "better")
    values = f"from {item.evidence.base:.4g} to {item.evidence.new:.4g} {metric.unit}"
    anchored = ", relative to the anchor" if item.evidence.anchored else ""
    margin = f"margin {100 * math.expm1(item.limit):.3g} %"
    return f"{metric.name} {change} ({values}{anchored}, {math.exp(abs(shift)):.2f}x {word}, {margin})"
