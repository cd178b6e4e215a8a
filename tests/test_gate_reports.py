"""What CI and people are shown of a comparison: nothing hidden, nothing too long, nothing that breaks the format."""

from __future__ import annotations

import dataclasses
import json
import re
from xml.etree import ElementTree as ET

import pytest
from gate_sides import FEW, A, B, C, judged, rounds, side
from hypothesis import given, settings
from hypothesis import strategies as st

from flashbench.analysis.gate.rules import Rules
from flashbench.analysis.gate.screening import no_baseline
from flashbench.analysis.gate.verdict import VERDICTS, Comparison, Finding, outcome
from flashbench.report.annotations import github_annotations
from flashbench.report.junit import render_junit
from flashbench.report.verdicts import COLUMNS, STEP_SUMMARY_BYTES, as_json, render_markdown, render_text, table_rows

NASTY = "CUDA error: <illegal>, 50%0A | `x`\nline 2 \x1b[31mred\x1b[0m"
D = "naive backward fp16 b1 h1 s64 d64"


@pytest.fixture
def mixed() -> Comparison:
    """One of almost everything: failed, regression, missing, new, improvement, pass."""
    base = side({A: [1.0] * 3, B: [1.0] * 3, C: [1.0] * 3, D: [1.0] * 3, "a forward x": [1.0] * 3})
    new = side(
        {
            A: [1.12] * 3,
            B: rounds([None] * 3, status="crashed", reason=NASTY),
            C: [0.8] * 3,
            D: [1.0] * 3,
            "b forward x": [1.0] * 3,
        }
    )
    return judged(base, new)


def many(count: int, verdict: str = "regression") -> Comparison:
    cases = tuple(
        Finding(
            f"flash-v2 forward bf16 b1 h16 s{i + 1} d128",
            verdict,
            "time +3.0 %",
            1.0,
            1.03,
            0.03,
            0.02,
            0.04,
            0.03 + i / 1e4,
            0.001,
            6,
        )  # type: ignore[arg-type]
        for i in range(count)
    )
    return Comparison(cases, (), Rules(), "paired")


def test_the_table_is_worst_first(mixed: Comparison) -> None:
    verdicts = [row[0] for row in table_rows(mixed)]
    assert verdicts == ["failed", "regression", "missing", "new", "improvement", "pass"]
    assert verdicts == sorted(verdicts, key=[*VERDICTS].index)


def test_of_two_regressions_the_larger_stands_first() -> None:
    comparison = judged(side({A: [1.0] * 3, B: [1.0] * 3}), side({A: [1.1] * 3, B: [1.2] * 3}))
    assert [finding.key for finding in comparison.findings] == [B, A]


def test_a_row_shows_interval_rounds_verdict_and_what_would_have_shown(mixed: Comparison) -> None:
    row = dict(zip(COLUMNS, next(row for row in table_rows(mixed) if row[0] == "regression"), strict=True))
    assert row["change"] == "+12.0 %"
    assert row["90 % interval"] == "+12.0 % to +12.0 %"
    assert row["rounds"] == "3"
    assert row["base"] == "1 ms"
    assert row["smallest visible"] == "+2.0 %"


def test_what_was_not_measured_is_empty_and_never_zero(mixed: Comparison) -> None:
    row = dict(zip(COLUMNS, table_rows(mixed)[0], strict=True))
    assert row["verdict"] == "failed"
    assert [row[name] for name in ("base", "new", "change", "90 % interval", "rounds")] == [""] * 5


def test_the_terminal_says_first_how_it_came_out(mixed: Comparison) -> None:
    text = render_text(mixed)
    assert text.startswith(
        "failed: 1 case, the worst: flash-v2 forward bf16 b4 h16 s2048 d128 causal: crashed in round 0"
    )
    assert "(exit code 4)" in text.splitlines()[0]
    # GA-13: one failed case among others does not keep the rest from being shown.
    assert all(key in text for key in (A, B, C, D))


def test_passing_rows_can_be_left_out_and_are_counted(mixed: Comparison) -> None:
    text = render_text(mixed, passes=False)
    assert D not in text
    assert text.endswith("1 passing rows not shown\n")


def test_a_message_of_several_lines_stays_in_its_row(mixed: Comparison) -> None:
    lines = [line for line in render_markdown(mixed).splitlines() if line.startswith("|")]
    assert all(len(re.findall(r"(?<!\\)\|", line)) == len(COLUMNS) + 1 for line in lines)
    assert "<illegal>" not in render_markdown(mixed)
    assert len(render_text(mixed).splitlines()) == 1 + 1 + 1 + 6


def test_markdown_shows_what_matters_then_everything_folded_away_and_the_command(mixed: Comparison) -> None:
    text = render_markdown(mixed, command="flashbench gate configs/ci.yaml")
    top, _, folded = text.partition("<details>")
    assert text.startswith("### flashbench gate: failed (exit code 4)")
    assert D not in top
    assert D in folded
    assert text.endswith("Again: `flashbench gate configs/ci.yaml`\n")


@given(count=st.integers(0, 400), limit=st.integers(0, 60_000), verdict=st.sampled_from(["regression", "pass"]))
@settings(max_examples=60)
def test_markdown_is_never_longer_than_its_limit(count: int, limit: int, verdict: str) -> None:
    assert len(render_markdown(many(count, verdict), limit_bytes=limit, command="flashbench gate x").encode()) <= limit


def test_rows_that_do_not_fit_the_summary_are_counted() -> None:
    text = render_markdown(many(20_000))
    assert len(text.encode()) <= STEP_SUMMARY_BYTES
    shown = sum(line.startswith("| regression") for line in text.partition("<details>")[0].splitlines())
    assert shown > 1000
    assert f"... and {20_000 - shown} more rows" in text


def test_annotations_are_the_ten_worst_and_a_count() -> None:
    lines = github_annotations(many(25))
    assert len(lines) == 11
    assert sum(line.startswith("::error ") for line in lines) == 10
    assert "s25 " in lines[0]
    assert lines[-1].startswith("::notice title=flashbench gate::15 more findings (15 of them fail the job)")


def test_an_annotation_is_one_line_that_the_runner_reads_back_as_it_was(mixed: Comparison) -> None:
    lines = github_annotations(mixed)
    assert all("\n" not in line for line in lines)
    match = re.fullmatch(r"::error title=([^:,]*)::(.*)", lines[0])
    assert match is not None
    back = {"%0A": "\n", "%0D": "\r", "%3A": ":", "%2C": ",", "%25": "%"}
    title, message = (re.sub("%(?:0A|0D|3A|2C|25)", lambda m: back[m[0]], text) for text in match.groups())
    assert title == f"failed: {B}"
    assert message.startswith("crashed in round 0: CUDA error: <illegal>, 50%0A | `x` line 2")


def test_what_does_not_fail_the_job_is_a_warning_or_nothing() -> None:
    comparison = dataclasses.replace(many(3), rules=Rules(fail_on=frozenset()))
    assert all(line.startswith("::warning ") for line in github_annotations(comparison))
    assert github_annotations(many(3, "pass")) == []


def test_a_job_that_fails_for_no_single_case_says_why() -> None:
    rules = dataclasses.replace(FEW, allow_missing=("*",))
    lines = github_annotations(judged(side({A: [1.0] * 3}), side({B: [1.0] * 3}), rules))
    assert any(line.startswith("::error ") and "no case in common" in line for line in lines)


def test_junit_has_one_test_case_per_case_and_survives_control_characters(mixed: Comparison) -> None:
    suite = ET.fromstring(render_junit(mixed))
    cases = {case.get("name"): case for case in suite.iter("testcase")}
    assert set(cases) == {A, B, C, D, "a forward x", "b forward x"}
    assert [suite.get(name) for name in ("tests", "failures", "errors", "skipped")] == ["6", "1", "2", "1"]
    failure = cases[A].find("failure")
    assert failure is not None
    assert failure.get("type") == "PerformanceRegression"
    assert "+12.0 %" in (failure.get("message") or "")
    assert cases[D].find("*") is None
    assert cases[D].get("time") == "0.001000000"
    assert cases["b forward x"].find("skipped") is not None


def test_json_holds_every_figure_and_no_null_in_place_of_a_number(mixed: Comparison) -> None:
    data = json.loads(json.dumps(as_json(mixed), allow_nan=False))
    assert data["exit_code"] == outcome(mixed)[0]
    assert {case["key"] for case in data["cases"]} == {A, B, C, D, "a forward x", "b forward x"}
    regression = next(case for case in data["cases"] if case["verdict"] == "regression")
    assert {"base", "new", "change", "low", "high", "p", "rounds", "margin", "smallest_effect"} <= regression.keys()
    assert "base" not in next(case for case in data["cases"] if case["verdict"] == "failed")


@pytest.mark.parametrize(
    "comparison", [judged(side({}), side({})), no_baseline(side({A: [1.0] * 3}), Rules(), "none stored")]
)
def test_every_report_can_be_written_when_nothing_was_compared(comparison: Comparison) -> None:
    assert "exit code 3" in render_text(comparison)
    assert "exit code 3" in render_markdown(comparison)
    assert as_json(comparison)["exit_code"] == 3
    assert ET.fromstring(render_junit(comparison)).tag == "testsuite"
    assert github_annotations(comparison)[0].startswith("::error ")
