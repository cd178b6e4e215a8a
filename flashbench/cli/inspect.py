"""`flashbench providers` and `flashbench gpus`: what can run here, and which cards are known."""

from __future__ import annotations

from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command("providers")(providers)
    app.command("gpus")(gpus)


def providers(
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, or a GPU's UUID.")] = "auto",
    template: Annotated[bool, typer.Option("--template", help="Print a file for a kernel of your own.")] = False,
) -> None:
    """Which providers can run on this machine, and why the rest cannot."""
    from rich.console import Console
    from rich.table import Table

    from flashbench.providers.table import PROVIDERS
    from flashbench.records import Problem
    from flashbench.run.devices import find_device

    if template:
        from flashbench.providers.user import TEMPLATE

        typer.echo(TEMPLATE, nl=False)
        return
    found = find_device(device)
    dtype = "fp32" if found.kind == "cpu" else "bf16"
    usual = Problem(1, 16, 16, 1024, 1024, 64, 64, dtype)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("provider", "runs here", "traffic model", "what it is"):
        table.add_column(title, overflow="fold")
    for provider in PROVIDERS.values():
        reason = provider.unsupported(usual, found)
        table.add_row(provider.name, "yes" if reason is None else f"no: {reason}", provider.algorithm, provider.summary)
    console = Console(highlight=False, markup=False)
    console.print(f"on {found.name}, asked for '{usual.label}':")
    console.print(table)


def gpus() -> None:
    """The catalogue: dense peaks, bandwidth, ridge points and where the figures come from."""
    from rich.console import Console
    from rich.table import Table

    from flashbench.hardware.catalogue import catalogue

    table = Table(box=None, pad_edge=False, header_style="bold")
    titles = ("id", "SMs", "memory GB", "HBM GB/s", "bf16", "fp16", "tf32", "fp32", "fp8", "ridge", "source")
    for title in titles:
        table.add_column(title, justify="left" if title in ("id", "source") else "right", overflow="fold")
    for spec in catalogue():
        peaks = [spec.dense_tflops.get(dtype) for dtype in ("bf16", "fp16", "tf32", "fp32", "fp8")]
        ridge = spec.ridge("fp16")
        table.add_row(
            spec.id,
            str(spec.sm_count),
            f"{spec.memory_gb:g}",
            f"{spec.hbm_gbps:g}",
            *("-" if peak is None else f"{peak:g}" for peak in peaks),
            "-" if ridge is None else f"{ridge:.0f}",
            spec.source,
        )
    console = Console(highlight=False)
    console.print("Dense peaks in TFLOP/s with fp32 accumulation; ridge in FLOP/byte at fp16.")
    console.print(table)
