"""JUnit XML, which every CI system can show: one test case per case and per group."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

from flashbench.analysis.gate.groups import group_name
from flashbench.analysis.gate.verdict import Comparison, Finding, code_of, outcome, percent

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 cannot hold in any form, such as the colours of a terminal."""


def render_junit(comparison: Comparison) -> str:
    """A `testsuite`: `failure` for a regression, `error` for what else fails the job, `skipped` for what was not judged."""
    code, line = outcome(comparison)
    cases = [_testcase(finding, comparison) for finding in comparison.findings]
    counts = {tag: sum(case.find(tag) is not None for case in cases) for tag in ("failure", "error", "skipped")}
    suite = ET.Element(
        "testsuite",
        name="flashbench gate",
        tests=str(len(cases)),
        failures=str(counts["failure"]),
        errors=str(counts["error"]),
        skipped=str(counts["skipped"]),
    )
    facts = ET.SubElement(suite, "properties")
    for name, value in (
        ("outcome", line),
        ("exit_code", str(code)),
        ("base", comparison.base_label),
        ("new", comparison.new_label),
    ):
        ET.SubElement(facts, "property", name=name, value=_text(value))
    suite.extend(cases)
    ET.indent(suite)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(suite, encoding="unicode") + "\n"


def _testcase(finding: Finding, comparison: Comparison) -> ET.Element:
    place = "groups" if finding.members else group_name(finding.key).replace(" ", ".")
    case = ET.Element("testcase", classname=f"flashbench.{_text(place)}", name=_text(finding.key))
    if comparison.rules.metric.name == "time" and finding.new is not None:
        case.set("time", f"{finding.new / 1e3:.9f}")
    message = _text(finding.reason or finding.verdict)
    code = code_of(finding, comparison.rules)
    if finding.verdict == "regression" and code:
        ET.SubElement(case, "failure", type="PerformanceRegression", message=message).text = _evidence(finding)
    elif code:
        ET.SubElement(case, "error", type=finding.verdict, message=message).text = _evidence(finding)
    elif finding.verdict in ("missing", "inconclusive", "new"):
        ET.SubElement(case, "skipped", message=f"{finding.verdict}: {message}")
    elif finding.verdict != "pass":
        ET.SubElement(case, "system-out").text = f"{finding.verdict}: {message}"
    return case


def _evidence(finding: Finding) -> str:
    if finding.change is None or finding.low is None or finding.high is None:
        return _text(finding.reason)
    fresh = "fresh " if finding.confirmed else ""
    interval = f"90 % interval {percent(finding.low)} to {percent(finding.high)}"
    return f"{percent(finding.change)}, {interval}, {finding.rounds} {fresh}rounds"


def _text(text: str) -> str:
    return _NOT_XML.sub("", text)
