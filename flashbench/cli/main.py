"""The command line: parse, call, render, exit code. Heavy libraries are imported inside the commands."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback

import typer

from flashbench.cli import (
    baselines,
    ceilings,
    configs,
    counters,
    doctor,
    explain,
    gates,
    inspect,
    plots,
    results,
    sweeps,
    tune,
)
from flashbench.errors import FlashbenchError

app = typer.Typer(
    name="flashbench",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Attention benchmarks that can be trusted: is it right, how fast, how much memory, how many bytes, what holds it back.",
)
for module in (sweeps, results, plots, explain, gates, baselines, ceilings, counters, doctor, inspect, tune, configs):
    module.register(app)


def version_option(wanted: bool) -> None:
    if wanted:
        from flashbench import __version__

        typer.echo(f"flashbench {__version__}")
        raise typer.Exit


@app.callback()
def options(
    _version: bool = typer.Option(
        False, "--version", callback=version_option, is_eager=True, help="Print the version."
    ),
    debug: bool = typer.Option(False, "--debug", help="Show the traceback of an internal error."),
) -> None:
    """Attention benchmarks that can be trusted."""
    if debug:
        os.environ["FLASHBENCH_DEBUG"] = "1"


def run() -> None:
    """The console script. A user error is one line and its exit code; an internal error is one line and a file."""
    try:
        app(standalone_mode=True)
    except FlashbenchError as error:
        print(f"flashbench: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # The reader of our output has gone (`| head`); point stdout at nothing so that the exit does not complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except KeyboardInterrupt:
        print("flashbench: interrupted", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        _report_internal(error)
        sys.exit(4)


def _report_internal(error: Exception) -> None:
    if os.environ.get("FLASHBENCH_DEBUG"):
        traceback.print_exc()
        return
    with tempfile.NamedTemporaryFile("w", prefix="flashbench-error-", suffix=".txt", delete=False) as file:
        traceback.print_exc(file=file)
    summary = f"{type(error).__name__}: {error}".splitlines()[0]
    print(f"flashbench: internal error: {summary}; the traceback is in {file.name} (or use --debug)", file=sys.stderr)
