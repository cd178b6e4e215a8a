"""Verdicts on cases and groups, the comparison that holds them, and the exit code that they add up to."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal, get_args

from flashbench.analysis.gate.rules import Pairing, Rules

Verdict = Literal[
    "failed",
    "regression",
    "unlike machine",
    "no baseline",
    "missing",
    "inconclusive",
    "cleared",
    "new",
    "improvement",
    "pass",
]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
"""Worst first: the order of every report."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The verdict on one case, or on the geometric mean of a group of cases, with the evidence for it.

    `change`, `low` and `high` are fractions (new - base) / base of the metric, machine's own shift taken out where there were anchors;
    they are None where nothing was compared.
    """

    key: str
    verdict: Verdict
    reason: str = ""
    base: float | None = None
    """Median of the base side's rounds, in the metric's unit, as measured."""
    new: float | None = None
    change: float | None = None
    low: float | None = None
    high: float | None = None
    """Ends of the 90 % interval of the change: each end is a bound of 95 %."""
    shift: float | None = None
    """Log ratio signed so that positive is worse, for whatever the metric."""
    p: float | None = None
    """One-sided, in the direction of the change."""
    rounds: int | None = None
    confirmed: bool = False
    """Whether the figures come from fresh rounds, measured after the screening had flagged this; `rounds` then counts these."""
    margin: float | None = None
    """The change that had to be exceeded: the relative margin, or the absolute one as a fraction where that is larger."""
    smallest_effect: float | None = None
    """The smallest slowdown (fraction) that this comparison finds with about 90 %."""
    untrusted: bool = False
    """No number that could be judged: exit code 3 whatever `fail_on` says."""
    excused: bool = False
    """Missing, and allowed to be."""
    members: tuple[str, ...] = ()
    """Keys of a group's cases; empty for a case."""

    @property
    def judged(self) -> bool:
        """Whether there was evidence in which a slowdown could have shown."""
        return self.p is not None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Every verdict on two sides."""

    cases: tuple[Finding, ...]
    groups: tuple[Finding, ...]
    rules: Rules
    pairing: Pairing
    base_label: str = "base"
    new_label: str = "new"
    notes: tuple[str, ...] = ()
    """What a reader should know before trusting it: versions that differ, no anchors, thermal state."""

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Groups and cases, worst first: by verdict, then by the size of the change."""
        rank = {verdict: place for place, verdict in enumerate(VERDICTS)}
        return tuple(
            sorted(
                (*self.groups, *self.cases),
                key=lambda f: (rank[f.verdict], -(f.shift or 0.0), not f.members, f.key),
            )
        )

    @property
    def judged(self) -> int:
        """Number of cases in which a slowdown could have shown."""
        return sum(finding.judged for finding in self.cases)

    @property
    def counts(self) -> dict[Verdict, int]:
        """Cases by verdict, worst first, without the verdicts that none has."""
        found = Counter(finding.verdict for finding in self.cases)
        return {verdict: found[verdict] for verdict in VERDICTS if found[verdict]}


def code_of(finding: Finding, rules: Rules) -> int:
    """The exit code that one finding asks for."""
    if finding.verdict == "failed":
        return 4 if "failed" in rules.fail_on else 0
    if finding.verdict == "regression":
        return 1 if "regression" in rules.fail_on else 0
    if finding.verdict in ("unlike machine", "no baseline") or finding.untrusted:
        return 3
    return 3 if finding.verdict in rules.fail_on and not finding.excused else 0


def outcome(comparison: Comparison) -> tuple[int, str]:
    """Exit code and the one line that explains it: 4 before 1 before 3 before 0 (README, "Exit codes")."""
    codes = [(finding, code_of(finding, comparison.rules)) for finding in comparison.findings]
    for code in (4, 1, 3):
        asking = [finding for finding, asked in codes if asked == code]
        if asking:
            alike = [finding for finding in asking if finding.verdict == asking[0].verdict]
            return code, f"{asking[0].verdict}: {_count(alike)}, the worst: {asking[0].key}: {asking[0].reason}"
    common = sum(finding.verdict not in ("new", "missing") for finding in comparison.cases)
    if not common:
        return 3, "no case in common between the two sides; check that both ran the same configuration"
    needed = max(comparison.rules.min_cases, 1)
    if comparison.judged < needed:
        told = f"only {comparison.judged} of {common} cases in common could be judged, at least {needed} must be"
        why = next((f"; {f.key}: {f.reason}" for f in comparison.cases if f.verdict == "inconclusive"), "")
        return 3, told + why
    return 0, _quiet(comparison)


def _quiet(comparison: Comparison) -> str:
    effects = [finding.smallest_effect for finding in comparison.cases if finding.smallest_effect is not None]
    worst = f"; the least that every case would have shown: {percent(max(effects))}" if effects else ""
    counts = ", ".join(f"{count} {verdict}" for verdict, count in comparison.counts.items())
    return f"no regression in {comparison.judged} judged cases ({counts}){worst}"


def _count(findings: list[Finding]) -> str:
    cases = sum(not finding.members for finding in findings)
    groups = len(findings) - cases
    words = [f"{n} {noun}{'' if n == 1 else 's'}" for n, noun in ((cases, "case"), (groups, "group")) if n]
    return " and ".join(words)


def percent(fraction: float) -> str:
    """`+2.6 %`: always signed, with the sign that the wording has."""
    return f"{round(100 * fraction, 1) + 0.0:+.1f} %"
