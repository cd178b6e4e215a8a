"""Rows as text: a terminal table, Markdown, CSV and JSON. What is missing is `-` for a reader and empty or null in a file, never 0."""

from __future__ import annotations

import csv as csv_format
import io
import itertools
import json as json_format
import math
import textwrap
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from flashbench.errors import UsageError
from flashbench.report.columns import DEFAULT_COLUMNS, NOT_TABULAR, Column, column, records
from flashbench.store.frame import COLUMNS, TEXT

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table


def chosen(frame: pd.DataFrame, text: str | None) -> tuple[str, ...] | None:
    """The columns named in `text`, comma-separated; `all` for every one, None for each format's own choice.

    Raises UsageError, with the nearest name, for an unknown one.
    """
    if text is None:
        return None
    if text.strip() == "all":
        return tuple(str(name) for name in frame.columns if name not in NOT_TABULAR)
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise UsageError(f"no column in '{text}'; name some of: {', '.join(DEFAULT_COLUMNS)}, or 'all'")
    for name in names:
        column(name, frame)
    return names


GAP = 2
"""Characters between columns: one of padding, one for the invisible line."""


def _cells(frame: pd.DataFrame, names: Iterable[str] | None) -> tuple[list[Column], list[list[str]], list[str]]:
    """The columns, the cells of each row, and the notes, to which cells refer by number; equal notes are one."""
    columns = [column(name, frame) for name in names or DEFAULT_COLUMNS]
    numbers: dict[str, int] = {}
    rows = []
    for record in records(frame):
        cells = []
        for c in columns:
            marks = [str(numbers.setdefault(note, len(numbers) + 1)) for note in c.notes(record)]
            cells.append(c.text(record) + (f" ({', '.join(marks)})" if marks else ""))
        rows.append(cells)
    return columns, rows, [f"({number}) {note}" for note, number in numbers.items()]


def table(
    frame: pd.DataFrame, columns: Iterable[str] | None = None, title: str | None = None, width: int | None = None
) -> Table:
    """The rows of a derived frame as a terminal table, its notes as the caption. UsageError names the nearest of an unknown column.

    Columns that `width` characters do not hold are left out from the end and named in the caption: a figure cut short is another figure.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    shown, rows, notes = _cells(frame, columns)
    widths = [max(map(len, [*c.heading.split(), *(row[i] for row in rows)])) for i, c in enumerate(shown)]
    ends = list(itertools.accumulate(widths, lambda total, size: total + size + GAP, initial=1))[1:]
    fitting = max(1, sum(width is None or end <= width for end in ends))
    if fitting < len(shown):
        left_out = ", ".join(c.heading for c in shown[fitting:])
        notes.append(f"not shown in {width} characters: {left_out}; choose with --columns, or write Markdown or CSV")
    # Text, not markup: a reason may hold brackets.
    caption = Text("\n".join(notes)) if notes else None
    result = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, GAP - 1, 0, 0),
        title=title,
        title_justify="left",
        caption=caption,
        caption_justify="left",
    )
    for c, size in zip(shown[:fitting], widths, strict=False):
        heading = Text("\n".join(textwrap.wrap(c.heading, size)))
        result.add_column(heading, justify="left" if c.is_text else "right", vertical="bottom", overflow="fold")
    for row in rows:
        result.add_row(*map(Text, row[:fitting]))
    return result


def print_table(frame: pd.DataFrame, columns: Iterable[str] | None = None, title: str | None = None) -> None:
    """Print the table: as wide as the terminal, and whole where the output is none."""
    from rich.console import Console

    console = Console()
    if console.is_terminal:
        console.print(table(frame, columns, title, console.width))
    else:
        Console(width=10_000).print(table(frame, columns, title))


def markdown(frame: pd.DataFrame, columns: Iterable[str] | None = None) -> str:
    """The same rows as a Markdown table, the notes below it."""
    shown, rows, notes = _cells(frame, columns)
    ruler = [":--" if c.is_text else "--:" for c in shown]
    lines = [[_escape(c.heading) for c in shown], ruler, *([_escape(cell) for cell in row] for row in rows)]
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return text + "".join(f"\n{_escape(note)}\n" for note in notes)


def _escape(text: str) -> str:
    return " ".join(text.replace("\\", "\\\\").replace("|", "\\|").split())


def _fields(frame: pd.DataFrame, columns: Iterable[str] | None) -> list[str]:
    """The frame's columns behind the named ones, all of them by default."""
    if columns is None:
        return [str(name) for name in frame.columns if name not in NOT_TABULAR]
    return list(dict.fromkeys(field for name in columns for field in column(name, frame).fields))


def json(frame: pd.DataFrame, columns: Iterable[str] | None = None) -> str:
    """The rows as a JSON array of objects in full precision and stored units; null where unknown, never NaN."""
    names = _fields(frame, columns)
    rows = [{name: record.get(name) for name in names} for record in records(frame)]
    return json_format.dumps(rows, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def csv(frame: pd.DataFrame, columns: Iterable[str] | None = None) -> str:
    """The rows as CSV with a heading, in full precision and stored units. An empty cell is unknown; `parse_csv` reads it back."""
    names = _fields(frame, columns)
    file = io.StringIO()
    writer = csv_format.writer(file, lineterminator="\n")
    writer.writerow(names)
    for record in records(frame):
        writer.writerow([_csv_cell(record.get(name)) for name in names])
    return file.getvalue()


def _csv_cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, (tuple, list)):
        return "; ".join(map(str, value))
    if isinstance(value, (dict, bool)):
        return json_format.dumps(value)
    return repr(value) if isinstance(value, float) else str(value)


def parse_csv(text: str) -> pd.DataFrame:
    """A frame from `csv`. A column is numbers only if every cell would be written back the same, so "NA", "null" and "007" stay text."""
    import pandas as pd

    header, *rows = csv_format.reader(io.StringIO(text))
    columns = {}
    for position, name in enumerate(header):
        cells = [row[position] or None for row in rows]
        known = [cell for cell in cells if cell is not None]
        kind = "object"
        if name not in COLUMNS or COLUMNS[name][0] != TEXT:
            kind = next((k for k, read in (("Int64", int), ("float64", float)) if _all_read_by(read, known)), "object")
        values = [None if cell is None else {"Int64": int, "float64": float}.get(kind, str)(cell) for cell in cells]
        columns[name] = pd.Series(values, dtype=kind)
    return pd.DataFrame(columns)


def _all_read_by(read: Callable[[str], float], cells: Iterable[str]) -> bool:
    try:
        return all(repr(read(cell)) == cell and math.isfinite(read(cell)) for cell in cells)
    except ValueError:
        return False
