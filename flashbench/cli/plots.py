"""`flashbench roofline`: where every case stands under the ceilings, and curves over the sequence length. No GPU and no torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashbench.errors import UsageError
from flashbench.hardware.catalogue import REFERENCE_GPUS

if TYPE_CHECKING:
    import pandas as pd

    from flashbench.report.roofs import Machine
    from flashbench.store.read import Run


class View(StrEnum):
    """What the picture shows; all but the roofline stand over the sequence length."""

    roofline = "roofline"
    time = "time"
    memory = "memory"
    traffic = "traffic"
    speedup = "speedup"


def register(app: typer.Typer) -> None:
    app.command("roofline")(roofline)


def roofline(
    runs: Annotated[list[Path] | None, typer.Argument(metavar="[RUN]...", help="Runs, or folders above them.")] = None,
    view: Annotated[View, typer.Option(help="The roofline, or a curve against sequence length.")] = View.roofline,
    reference: Annotated[
        str | None, typer.Option(help="The provider that speed-ups are over (--view speedup).")
    ] = None,
    gpu: Annotated[
        str, typer.Option(help="Cards whose data-sheet ceilings are drawn; see `flashbench gpus`.")
    ] = REFERENCE_GPUS,
    levels: Annotated[str, typer.Option(help="hbm, or hbm,l2 for the hierarchical roofline.")] = "hbm",
    out: Annotated[Path | None, typer.Option(help="FILE.png, .svg or .pdf; beside the run when left out.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Only these dtypes.")] = None,
    head_dim: Annotated[str | None, typer.Option(help="Only these head dimensions.")] = None,
    mask: Annotated[str | None, typer.Option(help="Only these masks.")] = None,
    mode: Annotated[str | None, typer.Option(help="Only these modes.")] = None,
    provider: Annotated[str | None, typer.Option(help="Only these providers.")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Print what holds each point back.")] = False,
) -> None:
    """Draw a roofline (useful FLOP/s against arithmetic intensity, with ridge points), or a curve against sequence length."""
    import pandas as pd

    from flashbench.cli.frames import derive_run, load
    from flashbench.report.figure import picture_path
    from flashbench.report.points import narrow

    if out is not None:
        picture_path(out)
    if view is View.speedup and reference is None:
        raise UsageError("--view speedup needs --reference PROVIDER: what the others are compared with")
    if explain and view is not View.roofline:
        raise UsageError("--explain says what holds a point of the roofline back; leave out --view")
    loaded = [load(path) for path in runs or [Path("results")]]
    frame = narrow(
        pd.concat([derive_run(run, reference) for run in loaded], ignore_index=True),
        provider=_words(provider),
        mode=_words(mode),
        dtype=_words(dtype),
        head_dim=_lengths(head_dim),
        mask=_words(mask),
    )
    path = out or loaded[0].path / f"{view.value}.png"
    if view is View.roofline:
        _roofline(frame, _machines(loaded, _words(gpu)), _words(levels), path, explain)
    else:
        _curve(frame, view.value, path)
    typer.echo(str(path))


def _machines(loaded: Sequence[Run], gpus: Sequence[str]) -> list[Machine]:
    """The machine of each run's device, once, and the cards asked for as a reference."""
    from flashbench.cli.frames import own_machine
    from flashbench.hardware.catalogue import get
    from flashbench.hardware.ceilings import spec_ceilings
    from flashbench.report.roofs import Machine

    owns = {machine.label: machine for machine in map(own_machine, loaded)}
    cards = [get(name) for name in gpus]
    return [
        *owns.values(),
        *(Machine(card.id, spec_ceilings(card), own=False) for card in cards if card.id not in owns),
    ]


def _roofline(
    frame: pd.DataFrame, machines: Sequence[Machine], levels: Sequence[str], path: Path, explain: bool
) -> None:
    from flashbench.report.figure import save
    from flashbench.report.roofline import roofline as draw
    from flashbench.report.roofline_text import explain as sentences
    from flashbench.report.roofline_text import notes

    save(draw(frame, machines, levels=levels), path)
    _tell(notes(frame, machines))
    if explain:
        for sentence in sentences(frame, machines):
            typer.echo(sentence)


def _curve(frame: pd.DataFrame, view: str, path: Path) -> None:
    from flashbench.report.curves import curves, notes
    from flashbench.report.figure import save

    save(curves(frame, view), path)
    _tell(notes(frame, view))


def _tell(lines: Sequence[str]) -> None:
    for line in lines:
        print(f"note: {line}", file=sys.stderr)


def _words(text: str | None) -> list[str]:
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def _lengths(text: str | None) -> list[int]:
    try:
        return [int(word) for word in _words(text)]
    except ValueError:
        raise UsageError(f"--head-dim takes whole numbers with commas between them, not '{text}'") from None
