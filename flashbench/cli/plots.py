"""`flashbench roofline`: where every case stands under the ceilings. No GPU and no torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

DEFAULT_GPUS = "a100-pcie-80gb,h100-sxm5-80gb"


def register(app: typer.Typer) -> None:
    app.command("roofline")(roofline)


def roofline(
    runs: Annotated[list[Path] | None, typer.Argument(metavar="[RUN]...", help="Runs, or folders above them.")] = None,
    gpu: Annotated[
        str, typer.Option(help="Cards whose data-sheet ceilings are drawn; see `flashbench gpus`.")
    ] = DEFAULT_GPUS,
    out: Annotated[Path | None, typer.Option(help="FILE.png, .svg or .pdf; beside the run when left out.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Only these dtypes.")] = None,
    head_dim: Annotated[str | None, typer.Option(help="Only these head dimensions.")] = None,
    mask: Annotated[str | None, typer.Option(help="Only these masks.")] = None,
    provider: Annotated[str | None, typer.Option(help="Only these providers.")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Print what holds each point back.")] = False,
) -> None:
    """Draw a roofline: useful FLOP/s against arithmetic intensity, with ridge points written."""
    from flashbench.cli.frames import derive_run, load, own_machine
    from flashbench.hardware.catalogue import get
    from flashbench.hardware.ceilings import spec_ceilings
    from flashbench.report.figure import save
    from flashbench.report.points import narrow
    from flashbench.report.roofline import roofline as draw
    from flashbench.report.roofline_text import explain as sentences
    from flashbench.report.roofline_text import notes
    from flashbench.report.roofs import Machine

    cards = [get(name) for name in _words(gpu)]
    loaded = [load(path) for path in runs or [Path("results")]]
    own = own_machine(loaded[0])
    others = [Machine(card.id, spec_ceilings(card), own=False) for card in cards if card.id != own.label]
    machines = (own, *others)
    import pandas as pd

    frame = narrow(
        pd.concat([derive_run(run, None) for run in loaded], ignore_index=True),
        provider=_words(provider),
        dtype=_words(dtype),
        head_dim=[int(word) for word in _words(head_dim)],
        mask=_words(mask),
    )
    path = out or loaded[0].path / "roofline.png"
    save(draw(frame, machines), path)
    for note in notes(frame, machines):
        print(f"note: {note}", file=sys.stderr)
    if explain:
        for sentence in sentences(frame, machines):
            typer.echo(sentence)
    typer.echo(str(path))


def _words(text: str | None) -> list[str]:
    return [word.strip() for word in (text or "").split(",") if word.strip()]
