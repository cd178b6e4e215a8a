"""`flashbench sweep`: what to run, the run itself, and what came out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flashbench.errors import UsageError

DEFAULT_ROOT = Path("results")


def register(app: typer.Typer) -> None:
    app.command("sweep")(sweep)


def sweep(
    config: Annotated[
        Path | None, typer.Argument(help="YAML file; without one, the built-in default for this machine.")
    ] = None,
    provider: Annotated[
        str | None, typer.Option(help="Providers, comma-separated; a file.py:function is one too.")
    ] = None,
    seq_len: Annotated[
        str | None, typer.Option(help="Lengths such as 512,1k,4k; 128/4k for query/key lengths.")
    ] = None,
    head_dim: Annotated[str | None, typer.Option(help="Head dimensions; 192/128 for head_dim/head_dim_v.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16, fp32, tf32, fp8.")] = None,
    mode: Annotated[str | None, typer.Option(help="forward, backward, forward_backward, decode.")] = None,
    mask: Annotated[str | None, typer.Option(help="none, causal, window:W.")] = None,
    batch: Annotated[str | None, typer.Option(help="Batch sizes (replaces tokens).")] = None,
    heads: Annotated[str | None, typer.Option(help="Heads; 32/8 for query/KV heads (replaces hidden).")] = None,
    tokens: Annotated[str | None, typer.Option(help="batch = tokens / seq_len, at least 1.")] = None,
    hidden: Annotated[str | None, typer.Option(help="heads = hidden / head_dim.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1, or a GPU's UUID.")] = None,
    l2: Annotated[str | None, typer.Option(help="cold flushes the L2 before each sample, warm does not.")] = None,
    rounds: Annotated[str | None, typer.Option(help="Fresh processes that each visit every case.")] = None,
    energy: Annotated[bool, typer.Option("--energy", help="Measure joules per call as well (2 s a case).")] = False,
    out: Annotated[Path, typer.Option(help="Folder that holds the results.")] = DEFAULT_ROOT,
    resume: Annotated[Path | None, typer.Option(help="A run to finish: what is missing, crashed or timed out.")] = None,
    repro: Annotated[
        str | None, typer.Option(metavar="KEY", help="Run one case alone, by its key; with CONFIG measured as it says.")
    ] = None,
    check_only: Annotated[bool, typer.Option("--check-only", help="Check the results, time nothing.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the cases and an estimate; run nothing.")] = False,
) -> None:
    """Check and measure every case: time, peak memory, error. Finished rows survive any interruption."""
    from flashbench.cli import sweeping

    options = {
        "provider": provider, "seq_len": seq_len, "head_dim": head_dim, "dtype": dtype, "mode": mode, "mask": mask,
        "batch": batch, "heads": heads, "tokens": tokens, "hidden": hidden, "device": device, "l2": l2, "rounds": rounds,
    }  # fmt: skip
    given = {name: value for name, value in options.items() if value is not None}
    if energy:
        given["energy"] = "true"
    if resume is not None:
        if given or config is not None or repro is not None:
            raise UsageError("--resume takes its configuration from the run; leave out CONFIG and the other options")
        request = sweeping.resumed(resume)
    elif repro is not None:
        axis = next((name for name in given if name not in ("device", "l2", "rounds", "energy")), None)
        if axis is not None:
            raise UsageError(f"--repro names the whole case; leave out --{axis.replace('_', '-')}")
        request = sweeping.reproduced(repro, config, given)
    else:
        request = sweeping.requested(config, given)
    if dry_run:
        sweeping.print_plan(request)
        return
    raise typer.Exit(sweeping.execute(request, out, check_only))
