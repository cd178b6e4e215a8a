"""`flashbench roofline`: where every case stands under the ceilings. No GPU and no torch."""

from __future__ import annotations

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
) -> None:
    """Draw a roofline: useful FLOP/s against arithmetic intensity, with ridge points written."""
    from flashbench.cli.frames import draw_roofline

    draw_roofline(runs or [Path("results")], gpu, out)
