"""The geometric mean of a provider's cases in a mode: shows a small slowdown across the board that no single case can show.

A group is judged by its *rest*: the cases that the screening did not flag by themselves. One case that got 30 % slower has its own
verdict, and must not condemn its neighbours as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from flashbench.analysis.gate.evidence import Evidence, relative_margin
from flashbench.analysis.gate.rules import Pairing, Rules


def group_name(key: str) -> str:
    """Provider and mode, with which every case key begins."""
    return " ".join(key.split()[:2])


def group_evidence(evidence: Iterable[Evidence], flagged: Mapping[str, int], rules: Rules) -> list[Evidence]:
    """For every group with enough unflagged cases, the mean of their log values per round.

    A mean over rounds needs the same cases in each of them, so cases that lack rounds which the others have are left out.
    """
    import numpy as np

    by_name: dict[str, list[Evidence]] = {}
    for item in evidence:
        if not flagged.get(item.key):
            by_name.setdefault(group_name(item.key), []).append(item)
    groups = []
    for name, rest in sorted(by_name.items()):
        shapes = Counter((item.rounds, item.anchored) for item in rest)
        shape = max(shapes, key=lambda s: (shapes[s], len(s[0][0]) + len(s[0][1])))
        rest = [item for item in rest if (item.rounds, item.anchored) == shape]
        if len(rest) < max(rules.group_cases, 1):
            continue
        groups.append(
            Evidence(
                name,
                shape[0],
                np.mean([item.base_log for item in rest], axis=0),
                np.mean([item.new_log for item in rest], axis=0),
                shape[1],
                members=tuple(item.key for item in rest),
            )
        )
    return groups


def group_limit(group: Evidence, members: Sequence[Evidence], rules: Rules, pairing: Pairing) -> float:
    """The shift that a group has to exceed: a share of its cases' mean relative margin, as a logarithm.

    Between sessions without an anchor the whole margin counts: the session moves all cases together, and no mean takes that out.
    """
    import numpy as np

    margins = [relative_margin(item, rules, pairing) for item in members if item.key in group.members]
    bare = pairing == "stored" and rules.metric.per_session and not group.anchored
    return float(np.log1p((1.0 if bare else rules.group_share) * np.mean(margins)))
