"""`flashbench ceilings`: what this device reaches in practice, measured, beside its data sheet."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from flashbench.hardware.ceilings import Ceiling
    from flashbench.records import Device


def register(app: typer.Typer) -> None:
    app.command("ceilings")(ceilings)


def ceilings(
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, or a GPU's UUID.")] = "auto",
    out: Annotated[Path, typer.Option(help="Folder that holds the results.")] = Path("results"),
    show: Annotated[bool, typer.Option("--show", help="Print what is stored there; measure nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """Measure bandwidths, matrix products and exponentials on this device (under a minute), and keep them beside its runs."""
    from flashbench.hardware.ceilings import load
    from flashbench.records import to_plain
    from flashbench.run.ceilings import ceilings_path, measure_and_save
    from flashbench.run.devices import find_device
    from flashbench.run.lock import device_lock
    from flashbench.run.signals import stop_on_signals

    found = find_device(device)
    path = ceilings_path(out, found)
    if show:
        found, measured = load(path)
    else:
        with stop_on_signals(), device_lock(found):
            measured = measure_and_save(found, path, lambda stage: print(stage, file=sys.stderr, flush=True))
    if as_json:
        typer.echo(json.dumps([to_plain(c) for c in measured], indent=1, allow_nan=False))
    else:
        _print_table(found, measured)
    print(path, file=sys.stderr)


TITLES = ("level", "what", "dtype", "isolated", "sustained", "spec", "of spec", "unit", "SM clock MHz", "power W")


def _print_table(device: Device, measured: Sequence[Ceiling]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in TITLES:
        left = title in ("level", "what", "dtype", "unit")
        table.add_column(title, justify="left" if left else "right", no_wrap=True)
    for row in rows(device, measured):
        table.add_row(*row)
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    limit = f", power limit {device.power_limit_w:.0f} W" if device.power_limit_w else ""
    clock = f", SM clock up to {device.max_sm_clock_mhz} MHz" if device.max_sm_clock_mhz else ""
    console.print(
        f"{device.name}{limit}{clock}: measured isolated / sustained; 'of spec' is that of the higher of the two."
    )
    console.print(table)


def rows(device: Device, measured: Sequence[Ceiling]) -> list[list[str]]:
    """One row of text for each thing that was measured, in the order measured; pairs read isolated / sustained."""
    from flashbench.hardware.catalogue import match
    from flashbench.hardware.ceilings import spec_ceilings

    sheet = match(device)
    spec = {(c.level, c.dtype): c.value for c in (spec_ceilings(sheet) if sheet else ())}
    found = []
    for level, kind, dtype in dict.fromkeys((c.level, c.kind, c.dtype) for c in measured):
        both = {c.regime: c for c in measured if (c.level, c.kind, c.dtype) == (level, kind, dtype)}
        pair = [both.get(regime) for regime in ("isolated", "sustained")]
        values = [c.value for c in pair if c is not None]
        peak = spec.get((level, dtype))
        found.append(
            [
                level,
                kind,
                dtype or "",
                *("-" if c is None else _number(c.value) for c in pair),
                "-" if peak is None else _number(peak),
                "-" if peak is None else f"{100 * max(values) / peak:.0f} %",
                next(c.unit for c in pair if c is not None),
                _pair([c.sm_clock_mhz for c in pair if c is not None]),
                _pair([c.power_w for c in pair if c is not None]),
            ]
        )
    return found


def _number(value: float) -> str:
    return f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"


def _pair(values: Sequence[float | None]) -> str:
    return " / ".join("-" if v is None else f"{v:.0f}" for v in values) if any(v is not None for v in values) else "-"
