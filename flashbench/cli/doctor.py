"""`flashbench doctor`: what is wrong with this machine for measuring, what it costs, and what cures it. No torch, no GPU needed."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flashbench.measure.findings import Finding

COLOURS = {"problem": "bold red", "warning": "yellow", "info": "cyan", "ok": "green"}
STRICT_EXIT = 3


class Format(StrEnum):
    table = "table"
    json = "json"


def register(app: typer.Typer) -> None:
    app.command("doctor")(doctor)


def doctor(
    out: Annotated[Path, typer.Option(help="Folder that would hold the results.")] = Path("results"),
    format: Annotated[Format, typer.Option(help="How to print.")] = Format.table,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 3 when there is a warning or a problem.")] = False,
) -> None:
    """What is wrong with this machine for measuring: what it costs, and the command that cures it. Changes nothing."""
    from flashbench.measure.doctor import examine
    from flashbench.measure.findings import troubling
    from flashbench.measure.machine import look

    findings = examine(look(out))
    if format is Format.json:
        import json
        from dataclasses import asdict

        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2, ensure_ascii=False))
    else:
        _print(findings)
    if strict and troubling(findings):
        raise typer.Exit(STRICT_EXIT)


def _print(findings: Sequence[Finding]) -> None:
    """A grid: severity and finding, then cost and cure below it. A cure stays on one line, so that it can be copied."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    console = Console(highlight=False)
    for finding in findings:
        head = Text(f"{finding.severity:8} ", style=COLOURS[finding.severity]) + Text(finding.what, style="default")
        console.print(head, soft_wrap=True)
        if finding.cost is not None:
            console.print(Padding(Text(f"costs  {finding.cost}", style="dim"), (0, 0, 0, 9)))
        if finding.cure is not None:
            console.print(Text(f"{'':9}cure   {finding.cure}"), soft_wrap=True)
    counts = {s: sum(1 for f in findings if f.severity == s) for s in ("problem", "warning")}
    console.print(f"{counts['problem']} problem(s), {counts['warning']} warning(s); nothing was changed", style="bold")
