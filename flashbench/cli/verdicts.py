"""Where the verdicts go: the terminal, files, and GitHub when it is the one that runs us."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from flashbench.analysis.gate.stages import overall
from flashbench.analysis.gate.verdict import Comparison
from flashbench.errors import UsageError
from flashbench.report.annotations import github_annotations
from flashbench.report.junit import render_junit
from flashbench.report.verdicts import STEP_SUMMARY_BYTES, as_json, render_markdown, render_text


@dataclass(frozen=True, slots=True)
class Reports:
    """The files that were asked for."""

    markdown: Path | None = None
    junit: Path | None = None
    json: Path | None = None

    def check(self) -> None:
        """UsageError for a file that cannot be written: before anything is measured."""
        for option, path in (("--markdown", self.markdown), ("--junit", self.junit), ("--json", self.json)):
            if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
                why = "is a folder" if path.is_dir() else "lies in a folder that does not exist"
                raise UsageError(f"{option}: '{path}' {why}")


def publish(comparisons: Sequence[Comparison], reports: Reports) -> int:
    """Print the tables on stdout, write the files, annotate under GitHub Actions; the exit code of all comparisons."""
    sys.stdout.write("\n".join(render_text(comparison) for comparison in comparisons))
    if reports.markdown is not None:
        _write(reports.markdown, _markdown(comparisons, STEP_SUMMARY_BYTES))
    if reports.junit is not None:
        _write(reports.junit, _junit(comparisons))
    if reports.json is not None:
        _write(reports.json, json.dumps(_plain(comparisons), indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if summary:
        _summarise(Path(summary), comparisons)
    if os.environ.get("GITHUB_ACTIONS") == "true":
        for comparison in comparisons:
            print(*github_annotations(comparison), sep="\n")
    sys.stdout.flush()
    return overall(comparisons)[0]


def _summarise(path: Path, comparisons: Sequence[Comparison]) -> None:
    """Add to the step's summary; GitHub drops a summary that is too long altogether, so what is there already counts."""
    there = path.stat().st_size if path.exists() else 0
    text = _markdown(comparisons, max(0, STEP_SUMMARY_BYTES - there))
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        # The verdict must not depend on it.
        print(f"note: the step summary '{path}' cannot be written ({error.strerror})", file=sys.stderr)


def _markdown(comparisons: Sequence[Comparison], limit_bytes: int) -> str:
    command = shlex.join(["flashbench", *sys.argv[1:]])
    share = limit_bytes // max(1, len(comparisons))
    return "".join(render_markdown(comparison, limit_bytes=share, command=command) for comparison in comparisons)


def _junit(comparisons: Sequence[Comparison]) -> str:
    documents = [render_junit(comparison) for comparison in comparisons]
    if len(documents) == 1:
        return documents[0]
    suites = ET.Element("testsuites")
    for comparison, document in zip(comparisons, documents, strict=True):
        suite = ET.fromstring(document)
        suite.set("name", f"flashbench gate, {comparison.rules.metric.name}")
        suites.append(suite)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(suites, encoding="unicode") + "\n"


def _plain(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    code, line = overall(comparisons)
    return {"schema_version": 1, "exit_code": code, "outcome": line, "comparisons": [as_json(c) for c in comparisons]}


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write '{path}' ({error.strerror})") from error
