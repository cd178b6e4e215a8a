"""The verdicts of a comparison for people and programs: a table, Markdown for a step summary or a comment, JSON."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from flashbench.analysis.gate.rules import Metric
from flashbench.analysis.gate.verdict import Comparison, Finding, outcome, percent
from flashbench.records import to_plain

COLUMNS = ("verdict", "case", "base", "new", "change", "90 % interval", "rounds", "smallest visible", "why")
STEP_SUMMARY_BYTES = 1024 * 1024
"""GitHub drops a larger summary of one step altogether (docs.github.com, "Workflow commands", job summaries)."""
COMMENT_CHARACTERS = 65_536
"""Longest comment on a pull request."""
SCHEMA_VERSION = 1


def table_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """One row of text per finding, worst first; the columns are `COLUMNS`, and what was not measured is empty."""
    return [_row(finding, comparison.rules.metric) for finding in comparison.findings]


def render_text(comparison: Comparison, *, passes: bool = True) -> str:
    """The table for a terminal, under one line that says how it came out; without the passing rows when `passes` is false."""
    code, line = outcome(comparison)
    rows = [row for row in table_rows(comparison) if passes or row[0] != "pass"]
    parts = [f"{line} (exit code {code})", *(f"note: {note}" for note in comparison.notes)]
    if rows:
        widths = [max(len(row[i]) for row in [COLUMNS, *rows]) for i in range(len(COLUMNS))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [COLUMNS, *rows]
        ]
        parts += ["", *(line.rstrip() for line in lines)]
    hidden = len(comparison.findings) - len(rows)
    return "\n".join(parts + ([f"{hidden} passing rows not shown"] if hidden else [])) + "\n"


def render_markdown(
    comparison: Comparison, *, limit_bytes: int = STEP_SUMMARY_BYTES, command: str | None = None
) -> str:
    """Markdown of at most `limit_bytes` bytes (UTF-8): what matters first, then every row, folded away; cut by whole rows.

    `command` is shown as the way to see this again. For a comment on a pull request, pass `COMMENT_CHARACTERS`.
    """
    code, line = outcome(comparison)
    sign = {0: "passed", 1: "regression", 3: "no trustworthy verdict", 4: "failed"}[code]
    metric, pairing = comparison.rules.metric.name, comparison.pairing
    head = [
        f"### flashbench gate: {sign} (exit code {code})",
        "",
        _safe(line),
        "",
        f"{_safe(comparison.new_label)} against {_safe(comparison.base_label)}, {metric}, {pairing} rounds",
        *(f"- {_safe(note)}" for note in comparison.notes),
        "",
    ]
    foot = ["", "Again: `" + command.replace("`", "'") + "`"] if command else []
    findings = comparison.findings
    notable = [finding for finding in findings if finding.verdict != "pass"]
    left = limit_bytes - _size([*head, *foot])
    body: list[str] = []
    if notable:
        body, left = _table(notable, comparison.rules.metric, left)
    if len(notable) < len(findings):
        fold = ["", f"<details><summary>All {len(findings)} rows</summary>", ""]
        close = ["", "</details>"]
        whole, _ = _table(findings, comparison.rules.metric, left - _size([*fold, *close]))
        body += [*fold, *whole, *close] if whole else []
    return _cut("\n".join([*head, *body, *foot]) + "\n", limit_bytes)


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Everything as plain data: fields that are None are left out, so that a reader never meets a 0 for "not measured"."""
    code, line = outcome(comparison)
    rules = comparison.rules
    return {
        "schema_version": SCHEMA_VERSION,
        "exit_code": code,
        "outcome": line,
        "pairing": comparison.pairing,
        "metric": {
            "name": rules.metric.name,
            "unit": rules.metric.unit,
            "lower_is_better": rules.metric.lower_is_better,
        },
        "base": comparison.base_label,
        "new": comparison.new_label,
        "counts": dict(comparison.counts),
        "levels": {"screening": rules.alpha, "family": rules.family_alpha},
        "fail_on": sorted(rules.fail_on),
        "notes": list(comparison.notes),
        "cases": [_plain(finding) for finding in comparison.findings if not finding.members],
        "groups": [_plain(finding) for finding in comparison.findings if finding.members],
    }


def title(finding: Finding) -> str:
    """How a finding is called where there is one line for it."""
    return f"{finding.key} (geometric mean of {len(finding.members)} cases)" if finding.members else finding.key


def _row(finding: Finding, metric: Metric) -> tuple[str, ...]:
    interval = ""
    if finding.low is not None and finding.high is not None:
        interval = f"{percent(finding.low)} to {percent(finding.high)}"
    rounds = "" if finding.rounds is None else f"{finding.rounds} fresh" if finding.confirmed else str(finding.rounds)
    effect = "" if finding.smallest_effect is None else percent(finding.smallest_effect)
    values = ("" if value is None else f"{value:.4g} {metric.unit}" for value in (finding.base, finding.new))
    change = "" if finding.change is None else percent(finding.change)
    return (finding.verdict, title(finding), *values, change, interval, rounds, effect, finding.reason)


def _plain(finding: Finding) -> dict[str, Any]:
    plain: dict[str, Any] = to_plain(finding)
    return {name: value for name, value in plain.items() if value not in ([], False, "")}


def _table(findings: Sequence[Finding], metric: Metric, limit_bytes: int) -> tuple[list[str], int]:
    """As many rows as fit, a line that counts the rest, and the bytes that are left."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    rows = ["| " + " | ".join(_safe(cell) for cell in _row(finding, metric)) + " |" for finding in findings]
    more = "\n... and {} more rows; the JSON report has them all"
    left = limit_bytes - _size([*lines, more.format(len(rows))])
    if left < 0:
        return [], limit_bytes
    for count, row in enumerate(rows):
        left -= _size([row])
        if left < 0:
            lines.append(more.format(len(rows) - count))
            break
        lines.append(row)
    return lines, max(left, 0)


def _safe(text: str) -> str:
    """Text that stays in its cell, and is text, whatever a library's error message holds."""
    return html.escape(" ".join(text.split()), quote=False).replace("|", "\\|").replace("`", "'")


def _size(lines: Sequence[str]) -> int:
    return sum(len(line.encode()) + 1 for line in lines)


def _cut(text: str, limit_bytes: int) -> str:
    """The last resort, for a limit that not even the heading fits in."""
    data = text.encode()
    return text if len(data) <= limit_bytes else data[:limit_bytes].decode(errors="ignore")
