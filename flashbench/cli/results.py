"""`flashbench show`: the rows of a run with what is derived from them, without a GPU and without torch."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Format(StrEnum):
    table = "table"
    csv = "csv"
    json = "json"
    md = "md"


def register(app: typer.Typer) -> None:
    app.command("show")(show)


def show(
    run: Annotated[Path, typer.Argument(help="A run's folder, or any folder above: the newest run inside.")] = Path(
        "results"
    ),
    format: Annotated[Format, typer.Option(help="How to print.")] = Format.table,
    columns: Annotated[str | None, typer.Option(help="Columns by name, comma-separated; 'all' for every one.")] = None,
    reference: Annotated[str | None, typer.Option(help="The provider that speed-ups are over.")] = None,
) -> None:
    """Rows of a run with derived columns: time, TFLOP/s, peak memory, HBM bytes, intensity, error, speed-up."""
    from flashbench.cli.frames import derived
    from flashbench.report import table

    frame = derived([run], reference)
    names = table.chosen(frame, columns)
    if format is Format.table:
        table.print_table(frame, names)
    else:
        typer.echo({"csv": table.csv, "json": table.json, "md": table.markdown}[format.value](frame, names), nl=False)
