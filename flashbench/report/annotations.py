"""GitHub annotations: the worst findings at the top of the job's page, and how many more there are.

GitHub shows ten annotations of a kind per step and silently drops the others, so that more than ten would hide that there are more.
"""

from __future__ import annotations

from flashbench.analysis.gate.verdict import Comparison, Finding, code_of, outcome
from flashbench.report.verdicts import title

MOST = 10


def github_annotations(comparison: Comparison, most: int = MOST) -> list[str]:
    """Workflow commands, one a line, worst first: errors for what fails the job, warnings for what a person should look at.

    A job that fails for no single case (nothing in common, too few cases) gets its reason as the one error.
    """
    code, line = outcome(comparison)
    told = [(level, finding) for finding in comparison.findings if (level := _level(finding, comparison))]
    told.sort(key=lambda item: item[0] != "error")
    lines = [_command(level, f"{finding.verdict}: {title(finding)}", finding.reason) for level, finding in told[:most]]
    if code and not any(level == "error" for level, _ in told):
        lines.insert(0, _command("error", "flashbench gate", line))
    if len(told) > most:
        errors = sum(level == "error" for level, _ in told[most:])
        rest = f"{len(told) - most} more findings ({errors} of them fail the job); the step summary has them all"
        lines.append(_command("notice", "flashbench gate", rest))
    return lines


def _level(finding: Finding, comparison: Comparison) -> str | None:
    if code_of(finding, comparison.rules):
        return "error"
    return "warning" if finding.verdict in ("failed", "regression", "missing", "inconclusive") else None


def _command(level: str, name: str, message: str) -> str:
    return f"::{level} title={_property(name)}::{_data(message or name)}"


def _data(text: str) -> str:
    """Escaped as the runner unescapes it: per cent first, or the other escapes would be escaped again."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    """In a property, colon and comma are syntax too."""
    return _data(text).replace(":", "%3A").replace(",", "%2C")
