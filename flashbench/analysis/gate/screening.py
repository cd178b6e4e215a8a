"""Judging two sides: screen every case on the rounds at hand, measure the flagged ones again, and conclude.

    screening = screen(base, new, rules, "paired")
    if screening.to_confirm:                       # measure these again, rules.confirm_rounds fresh rounds
        comparison = confirm(screening, fresh_base, fresh_new)
    else:
        comparison = conclude(screening)

Without fresh rounds (two stored runs) `conclude` alone decides, by Holm's procedure over every case. The rates of false alarms
and of slowdowns found that these rules have are simulated in `simulation` and tabulated in docs/gate.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flashbench.analysis.gate.evidence import Evidence, limit_of, usable
from flashbench.analysis.gate.groups import group_evidence, group_limit
from flashbench.analysis.gate.rules import Pairing, Rules
from flashbench.analysis.gate.shift import decide, stacked
from flashbench.analysis.gate.verdict import Comparison, Finding
from flashbench.analysis.gate.weighed import (
    Weighed,
    after_fresh_rounds,
    failed_again,
    not_repeated,
    unflagged,
    weigh,
    without_fresh_rounds,
)
from flashbench.store.side import Side


@dataclass(frozen=True, slots=True)
class Screening:
    """What the first rounds say."""

    base: Side
    new: Side
    rules: Rules
    pairing: Pairing
    settled: tuple[Finding, ...]
    """Cases that no further round can change: missing, failed, not comparable."""
    cases: tuple[Weighed, ...]
    groups: tuple[Weighed, ...]
    notes: tuple[str, ...]

    @property
    def to_confirm(self) -> tuple[str, ...]:
        """Keys of the cases to measure again: those flagged, and the cases of flagged groups."""
        keys = {item.key for item in self.cases if item.flag}
        for group in self.groups:
            if group.flag:
                keys.update(group.evidence.members)
        return tuple(sorted(keys))


def screen(base: Side, new: Side, rules: Rules, pairing: Pairing) -> Screening:
    """Weigh every case that either side has; UsageError when a glob of the rules matches none of them."""
    keys = sorted(base.cases.keys() | new.cases.keys())
    rules.check_globs(keys)
    unlike = base.identity.differences(new.identity)
    if unlike:
        reason = f"another machine: {'; '.join(unlike)}; compare runs of one machine, or store a baseline for this one"
        settled = tuple(Finding(key, "unlike machine", reason) for key in keys)
        return Screening(base, new, rules, pairing, settled, (), (), ())
    found = [usable(key, base, new, rules, pairing) for key in keys]
    evidence = [item for item in found if isinstance(item, Evidence)]
    cases = [weigh(item, limit_of(item, rules, pairing), rules, pairing) for item in evidence]
    flagged = {item.key: item.flag for item in cases}
    groups = [
        weigh(group, group_limit(group, evidence, rules, pairing), rules, pairing)
        for group in group_evidence(evidence, flagged, rules)
    ]
    settled = tuple(item for item in found if isinstance(item, Finding))
    notes = _notes(base, new, evidence, rules, pairing)
    return Screening(base, new, rules, pairing, settled, tuple(cases), tuple(groups), notes)


def no_baseline(new: Side, rules: Rules, reason: str) -> Comparison:
    """The comparison of a run for which nothing is stored: `reason` says where it was looked for."""
    cases = tuple(Finding(key, "no baseline", reason) for key in sorted(new.cases))
    return Comparison(cases, (), rules, "stored", "no baseline", new.label)


def conclude(screening: Screening) -> Comparison:
    """The comparison when there are no fresh rounds: a flag stands when it falls in Holm's procedure over all cases and groups."""
    items = (*screening.cases, *screening.groups)
    decided: Any = ()
    if items:
        import numpy as np

        shift = stacked([item.shift for item in items])
        limits = np.array([item.limit for item in items])
        everyone = np.ones(len(items), dtype=np.int8)
        level = screening.rules.family_alpha
        decided = decide(shift, limits, everyone, level) + decide(shift, limits, -everyone, level)
    findings = [without_fresh_rounds(item, int(d), screening.rules) for item, d in zip(items, decided, strict=True)]
    return _comparison(screening, findings)


def confirm(screening: Screening, fresh_base: Side | None, fresh_new: Side) -> Comparison:
    """The comparison after fresh rounds of `screening.to_confirm`, which alone decide over what was flagged.

    `fresh_base` is None between sessions: the stored rounds are the base of both stages, and the fresh side has its own anchors.
    """
    rules, pairing = screening.rules, screening.pairing
    base = screening.base if fresh_base is None else fresh_base
    again = {key: usable(key, base, fresh_new, rules, pairing) for key in screening.to_confirm}
    usable_again = [item for item in again.values() if isinstance(item, Evidence)]
    pairs: list[tuple[Weighed, Weighed]] = []
    findings: list[Finding] = []
    for item in screening.cases:
        fresh = again.get(item.key) if item.flag else None
        if isinstance(fresh, Evidence):
            pairs.append((item, weigh(fresh, limit_of(fresh, rules, pairing), rules, pairing)))
        elif item.flag:
            findings.append(not_repeated(item, fresh))
        else:
            findings.append(unflagged(item, rules, failed_again(again.get(item.key))))
    for group in screening.groups:
        if not group.flag:
            findings.append(unflagged(group, rules))
            continue
        members = [item for item in usable_again if item.key in group.evidence.members]
        fresh_group = group_evidence(members, {}, rules)
        if len(fresh_group) == 1:
            pairs.append((group, weigh(fresh_group[0], group.limit, rules, pairing)))
        else:
            findings.append(not_repeated(group, None))
    if pairs:
        import numpy as np

        shift = stacked([fresh.shift for _, fresh in pairs])
        limits = np.array([fresh.limit for _, fresh in pairs])
        flags = np.array([first.flag for first, _ in pairs], dtype=np.int8)
        decided = decide(shift, limits, flags, rules.family_alpha)
        findings += [after_fresh_rounds(*pair, int(d), rules) for pair, d in zip(pairs, decided, strict=True)]
    return _comparison(screening, findings)


def _notes(base: Side, new: Side, evidence: Sequence[Evidence], rules: Rules, pairing: Pairing) -> tuple[str, ...]:
    notes = [
        f"{name} differs: {base.versions[name]} in the base, {new.versions[name]} in the new side"
        for name in sorted(base.versions.keys() & new.versions.keys())
        if base.versions[name] != new.versions[name]
    ]
    if pairing == "stored" and rules.metric.per_session and any(not item.anchored for item in evidence):
        notes.append(
            f"no anchor (GEMM or copy) in common between the two sessions: the margin is at least {100 * rules.unanchored_margin:g} %"
        )
    return tuple(notes)


def _comparison(screening: Screening, findings: Sequence[Finding]) -> Comparison:
    by_key: Mapping[str, Finding] = {f.key: f for f in (*screening.settled, *findings) if not f.members}
    return Comparison(
        cases=tuple(by_key[key] for key in sorted(by_key)),
        groups=tuple(sorted((f for f in findings if f.members), key=lambda f: f.key)),
        rules=screening.rules,
        pairing=screening.pairing,
        base_label=screening.base.label or "base",
        new_label=screening.new.label or "new",
        notes=screening.notes,
    )
