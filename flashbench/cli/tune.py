"""`flashbench tune`: which block shapes are best on this GPU, measured, and the table in that order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from flashbench.errors import UsageError

T = TypeVar("T")


def register(app: typer.Typer) -> None:
    app.command("tune")(tune)


def tune(
    kernels: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KERNEL]...",
            help="Names in the table, such as 'flash-v2 forward', or their beginnings; all unless given.",
        ),
    ] = None,
    head_dim: Annotated[str, typer.Option(help="Head dimensions; 192/128 for head_dim/head_dim_v.")] = "64,128",
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16, fp32, tf32; bf16 unless given.")] = None,
    seq_len: Annotated[str, typer.Option(help="Lengths such as 512,1k,4k.")] = "4k,16k",
    mask: Annotated[str, typer.Option(help="none, causal, window:W.")] = "none,causal",
    device: Annotated[str, typer.Option(help="auto, cuda, cuda:1, or a GPU's UUID.")] = "auto",
    rounds: Annotated[int, typer.Option(min=1, help="Fresh processes that each time every shape.")] = 2,
    wide: Annotated[bool, typer.Option("--wide", help="Try a grid of shapes too, not the table's alone.")] = False,
    out: Annotated[Path, typer.Option(help="Folder that holds the results.")] = Path("results"),
    write: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write the order into FILE as well; 'package' is the table in use."),
    ] = None,
    check_only: Annotated[bool, typer.Option("--check-only", help="Check the shapes, time nothing.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be tried; run nothing.")] = False,
) -> None:
    """Check and time the block shapes of the project's own kernels on this GPU, and write the table in the order found."""
    from flashbench.cli import tuning
    from flashbench.config import scalars
    from flashbench.run.devices import find_device
    from flashbench.run.tune import TuningUnavailable, Wanted, entries

    if write is not None and (check_only or dry_run):
        raise UsageError("--write needs times to order the table by; leave out --check-only and --dry-run")
    found = find_device(device)
    if found.kind != "cuda" and not (check_only and found.triton_interpreter):
        raise TuningUnavailable(
            f"tuning times kernels on a CUDA GPU, and {found.name} is none; to check the shapes without one, "
            "set TRITON_INTERPRET=1 and use --check-only"
        )
    wanted = Wanted(
        kernels=tuning.kernels(kernels or ()),
        head_dims=_values("--head-dim", head_dim, scalars.pair),
        dtypes=_values("--dtype", dtype or ("bf16" if found.kind == "cuda" else "fp16"), scalars.dtype),
        seq_lens=_values("--seq-len", seq_len, scalars.length),
        masks=_values("--mask", mask, scalars.mask),
        wide=wide,
    )
    tuned = entries(wanted, found)
    if dry_run:
        tuning.print_plan(tuned, found, rounds, check_only)
        return
    target = None if write is None else tuning.target(write)
    raise typer.Exit(tuning.execute(tuned, found, out, rounds, check_only, target))


def _values(option: str, text: str, read: Callable[[object], T]) -> tuple[T, ...]:
    """The values of a comma-separated option; UsageError, which quotes the wrong one."""
    values = []
    for word in text.split(","):
        try:
            values.append(read(word.strip()))
        except ValueError as error:
            raise UsageError(f"{option}: '{word.strip()}' {error}") from None
    return tuple(dict.fromkeys(values))
