"""`flashbench explain`: the argument for flash attention as arithmetic that can be followed, from this tool's own models."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashbench.errors import UsageError
from flashbench.hardware.catalogue import REFERENCE_GPUS

if TYPE_CHECKING:
    from flashbench.hardware.catalogue import GpuSpec
    from flashbench.model.worksheet import Figure

Json = Annotated[bool, typer.Option("--json", help="Print as JSON.")]
Gpus = Annotated[str, typer.Option(help="Cards by id, comma-separated; see `flashbench gpus`.")]
DtypeName = Annotated[str, typer.Option(help="bf16, fp16, fp32, tf32, fp8.")]


def register(app: typer.Typer) -> None:
    explain = typer.Typer(no_args_is_help=True, help="The argument for flash attention, worked out step by step.")
    explain.command("work")(work)
    explain.command("softmax")(softmax)
    explain.command("kv-cache")(kv_cache)
    explain.command("paper")(paper)
    app.add_typer(explain, name="explain")


def work(
    seq_len: Annotated[int, typer.Option(help="Tokens N.")] = 8192,
    head_dim: Annotated[int, typer.Option(help="Head dimension d.")] = 64,
    dtype: DtypeName = "fp16",
    gpu: Gpus = REFERENCE_GPUS,
    as_json: Json = False,
) -> None:
    """Work, HBM traffic and arithmetic intensity of one head, and how much of a card's peak they allow."""
    from flashbench.model import worksheet

    problem = worksheet.head(seq_len, head_dim, dtype)
    figures, shares = worksheet.work(problem), worksheet.shares(problem, _specs(gpu))
    if as_json:
        _print_json(
            {"problem": problem.label, "figures": list(map(asdict, figures)), "gpus": list(map(asdict, shares))}
        )
        return
    typer.echo(f"One head, one batch: N = {seq_len:,}, d = {head_dim}, {dtype} (s = {problem.element_bytes} bytes).\n")
    _print_figures(figures)
    typer.echo("\nShare of a card's peak that an intensity allows: intensity / ridge, at most 100 %.\n")
    titles = (
        "card",
        f"{dtype} TFLOP/s, spec",
        "GB/s, spec",
        "ridge, spec",
        "materialised",
        f"QKᵀ, d = {head_dim}",
        "flash",
    )
    rows = [
        (
            s.gpu,
            _number(s.peak_tflops),
            _number(s.hbm_gbps),
            f"{s.ridge:.0f}",
            *(f"{v:.0%}" for v in (s.materialised, s.qk, s.flash)),
        )
        for s in shares
    ]
    _print_columns(titles, rows, left=1)
    missing = [spec.id for spec in _specs(gpu) if spec.id not in {s.gpu for s in shares}]
    if missing:
        typer.echo(f"\nNo {dtype} peak: {', '.join(missing)}.")


def softmax(
    scores: Annotated[str, typer.Option(help="One row of scores, comma-separated.")] = "1,3,2,4,1,0,5,2",
    values: Annotated[
        str | None, typer.Option(help="A value for each score; without them the weights are printed.")
    ] = None,
    block: Annotated[int, typer.Option(help="Scores that a block holds.")] = 2,
    as_json: Json = False,
) -> None:
    """The online softmax block by block: running maximum m, rescaling alpha, running sum l and output o."""
    from flashbench.model.online_softmax import online_softmax, weights

    row = _numbers("--scores", scores)
    steps = online_softmax(row, block, None if values is None else _numbers("--values", values))
    last = steps[-1]
    result = None if last.o is None else last.o / last.l
    if as_json:
        _print_json({"steps": list(map(asdict, steps)), "weights": weights(row, last), "result": result})
        return
    with_o = last.o is not None
    titles = ("block", "scores", "m", "alpha", "l", *(("o",) if with_o else ()))
    rows = [
        (
            str(number),
            " ".join(f"{score:g}" for score in step.scores),
            f"{step.m:g}",
            f"{step.alpha:.3f}",
            f"{step.l:.3f}",
            *((f"{step.o:.3f}",) if step.o is not None else ()),
        )
        for number, step in enumerate(steps, start=1)
    ]
    _print_columns(titles, rows, left=2)
    typer.echo(
        "\nm' = max(m, block), alpha = exp(m - m'), l' = alpha l + sum exp(s - m'), o' = alpha o + sum exp(s - m') v."
    )
    if result is not None:
        typer.echo(f"result: o / l = {result:.3f}")
    else:
        typer.echo("weights exp(s - m) / l: " + ", ".join(f"{w:.3f}" for w in weights(row, last)))


def kv_cache(
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 32,
    kv_heads: Annotated[int, typer.Option(help="Key/value heads of a layer.")] = 8,
    head_dim: Annotated[int, typer.Option(help="Head dimension.")] = 128,
    tokens: Annotated[int, typer.Option(help="Tokens in the cache.")] = 100_000,
    dtype: DtypeName = "fp16",
    gpu: Gpus = REFERENCE_GPUS,
    as_json: Json = False,
) -> None:
    """Size of a model's KV cache, and what reading it costs each token that is decoded."""
    from flashbench.model import worksheet

    if layers < 1:
        raise UsageError(f"--layers must be at least 1, not {layers}")
    figures = worksheet.kv_cache(layers, kv_heads, head_dim, tokens, dtype, _specs(gpu))
    if as_json:
        _print_json({"figures": list(map(asdict, figures))})
        return
    _print_figures(figures)
    typer.echo(
        "\nDecoding reads all of it for one row of queries: bound by bandwidth, which flash attention does not change."
    )


def paper(
    run: Annotated[bool, typer.Option("--run", help="Measure the same problem here as well (a GPU).")] = False,
    device: Annotated[str, typer.Option(help="auto, cuda, cuda:1, or a GPU's UUID.")] = "auto",
    out: Annotated[Path, typer.Option(help="Folder that holds the results of --run.")] = Path("results"),
    as_json: Json = False,
) -> None:
    """The FlashAttention paper's GPT-2 medium row beside the model's brackets, and beside a run on this machine."""
    from flashbench.model import worksheet

    forms = worksheet.paper()
    where, measured = _measure(device, out) if run else ("", {})
    if as_json:
        rows = [{**asdict(form), "measured_ms": measured.get(form.provider)} for form in forms]
        _print_json({"paper": worksheet.PAPER, "measured_on": where or None, "rows": rows})
        return
    typer.echo(f"{worksheet.PAPER}.\nProblem: {worksheet.GPT2_MEDIUM.label}.\n")
    titles = ["attention", "HBM GB, cited", "HBM GB, modelled", "ms, cited"]
    if run:
        titles.append(f"ms, measured on {where}")
    rows_of_text = []
    for form in forms:
        row = [
            form.name,
            f"{form.cited_gb}",
            f"[{form.modelled_gb[0]:.1f}, {form.modelled_gb[1]:.1f}]",
            f"{form.cited_ms}",
        ]
        if run:
            found = measured.get(form.provider)
            row.append("-" if found is None else f"{_number(found)} ({form.provider})")
        rows_of_text.append(row)
    _print_columns(titles, rows_of_text, left=1)
    plain, flash = forms
    typer.echo(
        f"\nCited: {plain.cited_gb / flash.cited_gb:.1f} times fewer bytes, {plain.cited_ms / flash.cited_ms:.1f} times faster, "
        f"{flash.cited_gflops / plain.cited_gflops - 1:+.1%} work ({plain.cited_gflops} to {flash.cited_gflops} GFLOPs)."
        f"\nModelled: {flash.modelled_gflop / plain.modelled_gflop:.3f} times the work "
        f"({plain.modelled_gflop:.1f} to {flash.modelled_gflop:.1f} GFLOP); the paper counts in another unit, so only ratios compare."
        "\nThe bracket of plain attention: without, and with, a mask and dropout in passes of their own. That of flash: everything"
        "\nmoved once, and no reuse with fp32 temporaries."
    )
    if run:
        typer.echo(
            "Measured: without mask and dropout, the L2 cold, from PyTorch on this machine's card: another card and another kernel."
        )


PAPER_OPTIONS = {
    "provider": "naive,sdpa-flash", "mode": "forward_backward", "dtype": "fp16", "seq_len": "1k", "head_dim": "64", "batch": "64",
    "heads": "16", "mask": "none",
}  # fmt: skip
"""The paper's problem, as the command line of a sweep would say it."""


def _measure(device: str, out: Path) -> tuple[str, dict[str, float]]:
    """The paper's problem through the ordinary sweep: the device's id, and the time of each provider in ms."""
    import contextlib

    from flashbench.cli import sweeping
    from flashbench.cli.frames import derived
    from flashbench.hardware.catalogue import device_id

    request = sweeping.requested(None, {**PAPER_OPTIONS, "device": device})
    if request.plan.device.kind != "cuda":
        raise UsageError(
            "explain paper --run: there is no GPU here, and the problem would take a CPU minutes; leave out --run"
        )
    with contextlib.redirect_stdout(sys.stderr):  # the sweep's own table is not the answer
        sweeping.execute(request, out, check_only=False)
    where = device_id(request.plan.device)
    frame = derived([out / where], None)
    ok = frame[frame["status"] == "ok"]
    return where, dict(zip(ok["provider"], ok["time_ms"].astype(float), strict=True))


def _specs(gpus: str) -> list[GpuSpec]:
    from flashbench.hardware.catalogue import get

    return [get(name.strip()) for name in gpus.split(",") if name.strip()]


def _numbers(option: str, text: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise UsageError(f"{option} takes numbers with commas between them, such as 1,3,2,4, not '{text}'") from None


def _number(value: float) -> str:
    """Four significant digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 or value == 0 else f"{value:.4g}"


def _print_figures(figures: Iterable[Figure]) -> None:
    rows = [(f.name, _number(f.value), f.unit, f.formula) for f in figures]
    _print_columns(("", "modelled", "unit", "from"), rows, left=1, right=2)


def _print_columns(titles: Sequence[str], rows: Sequence[Sequence[str]], left: int, right: int | None = None) -> None:
    from flashbench.report.aligned import aligned

    for line in aligned(titles, rows, left, right):
        typer.echo(line)


def _print_json(content: dict[str, Any]) -> None:
    typer.echo(json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False))
