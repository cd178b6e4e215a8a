"""What an examination of a machine says: findings with what they cost and what cures them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Severity = Literal["ok", "info", "warning", "problem"]
SEVERITIES: tuple[Severity, ...] = ("problem", "warning", "info", "ok")
"""Worst first. A problem prevents a measurement, a warning makes it wrong or noisy, an info is to be known."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    severity: Severity
    what: str
    cost: str | None = None
    """With its figure and its source; None when it costs nothing."""
    cure: str | None = None
    """A command; None when nothing needs or can be done."""


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """By severity; within one, in the order given."""
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


def troubling(findings: Iterable[Finding]) -> list[Finding]:
    """The warnings and the problems."""
    return [finding for finding in findings if finding.severity in ("problem", "warning")]
