"""`flashbench baseline update|show`: what the gate compares with, who stored it and why."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flashbench.cli.gates import BASELINES

Root = Annotated[Path, typer.Option("--baselines", help="Folder of the stored baselines.")]


def register(app: typer.Typer) -> None:
    baseline = typer.Typer(
        no_args_is_help=True, help="Store a run as the baseline of its device, or show what is stored."
    )
    baseline.command("update")(update)
    baseline.command("show")(show)
    app.add_typer(baseline, name="baseline")


def update(
    run: Annotated[Path, typer.Argument(help="The run to store: a folder, or any folder above (the newest inside).")],
    why: Annotated[str, typer.Option(help="Why the baseline changes: stands in its file.")],
    who: Annotated[str | None, typer.Option(help="Who says so; git's user.name unless given.")] = None,
    accept: Annotated[bool, typer.Option("--accept", help="Store it although something got worse.")] = False,
    name: Annotated[str | None, typer.Option(help="Name of the configuration, where it is not the run's.")] = None,
    baselines: Root = BASELINES,
) -> None:
    """Compare a run with what is stored, and store it; a regression, a failure or a missing case is refused without --accept."""
    from flashbench.cli.storing import store

    raise typer.Exit(store(run, why, who, accept=accept, name=name, root=baselines))


def show(
    baseline: Annotated[Path | None, typer.Argument(help="A baseline's file; without one, a line for each.")] = None,
    baselines: Root = BASELINES,
) -> None:
    """What is stored: device, configuration, cases, who, when and why; with a file, its cases too."""
    from flashbench.cli.storing import show_all, show_one

    typer.echo(show_all(baselines) if baseline is None else show_one(baseline))
