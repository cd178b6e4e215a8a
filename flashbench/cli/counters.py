"""`flashbench counters`: bytes that the hardware counted, beside those that the model predicts, and how far the model is off."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashbench.errors import UsageError
from flashbench.records import Case

if TYPE_CHECKING:
    from flashbench.analysis.counted import Comparison
    from flashbench.cli.sweeping import Request


def register(app: typer.Typer) -> None:
    app.command("counters")(counters)


def counters(
    config: Annotated[Path | None, typer.Argument(help="YAML file of a sweep; each case is one call.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cuda, cuda:1, or a GPU's UUID.")] = None,
    out: Annotated[Path, typer.Option(help="Folder that holds the results.")] = Path("results"),
    show: Annotated[Path | None, typer.Option(metavar="FILE", help="Print stored counters; measure nothing.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """Count HBM and L2 bytes of each case with Nsight Compute, and print the byte model's error."""
    if (config is None) == (show is None):
        raise UsageError("give a CONFIG to count, or --show FILE to print what was counted")
    path = show or _count(config, device, out)
    compared = _compared(path)
    if as_json:
        typer.echo(json.dumps([_plain(c) for c in compared], indent=1, allow_nan=False))
    else:
        _print_table(compared)
    if show is None:
        print(f"{path}\nnext: flashbench counters --show {path}", file=sys.stderr)
        if any(c.counted.status == "error" for c in compared):
            raise typer.Exit(4)


def _count(config: Path | None, device: str | None, out: Path) -> Path:
    """Count every case of a configuration and return the file."""
    from flashbench.cli import sweeping
    from flashbench.run.counters import count_plan
    from flashbench.run.lock import device_lock
    from flashbench.run.nsight import CountersUnavailable, find_ncu
    from flashbench.run.signals import stop_on_signals
    from flashbench.store import counters as store

    request = sweeping.requested(config, {} if device is None else {"device": device})
    plan = request.plan
    if plan.device.kind != "cuda":
        raise CountersUnavailable(f"counters are read on a CUDA GPU, and {plan.device.name} is none")
    path = _new_file(out, request, find_ncu())
    total = len(plan.cases) + len(plan.skips)
    runs: Counter[str] = Counter()

    def announce(case: Case) -> None:
        runs[case.key] += 1
        if sys.stderr.isatty():
            print(f"pass {runs[case.key]}: {case.key}", file=sys.stderr, flush=True)

    print(f"counting {len(plan.cases)} cases, each once a pass of the counters", file=sys.stderr, flush=True)
    with stop_on_signals(), device_lock(plan.device):
        for number, counted in enumerate(count_plan(plan, request.config.measure.seed, announce), start=1):
            store.append(path, counted)
            reason = f": {counted.reason}" if counted.reason else ""
            print(f"{number}/{total} {counted.case.key} {counted.status}{reason}", file=sys.stderr, flush=True)
    return path


def _new_file(out: Path, request: Request, ncu: str) -> Path:
    import shlex
    from datetime import UTC, datetime

    from flashbench.hardware.catalogue import device_id
    from flashbench.run.nsight import METRICS, version
    from flashbench.store import counters as store

    now = datetime.now(UTC)
    device = request.plan.device
    path = out / device_id(device) / f"{now:%Y%m%dT%H%M%SZ}-{request.config.name}" / store.FILE
    models = {
        name: {"algorithm": provider.algorithm, "schedule": provider.schedule}
        for name, provider in request.providers.items()
    }
    header = {
        "command": shlex.join(["flashbench", *sys.argv[1:]]),
        "started": now.isoformat(timespec="seconds"),
        "device": device,
        "ncu": version(ncu),
        "metrics": METRICS,
        "models": models,
    }
    store.create(path, header)
    return path


def _compared(path: Path) -> list[Comparison]:
    from flashbench.analysis.counted import compare
    from flashbench.cli.frames import models
    from flashbench.records import Device, from_plain
    from flashbench.store import counters as store

    header, found = store.load(path)
    device = from_plain(Device, header["device"])
    known = models(header)
    return [compare(counted, device, known.get(counted.case.provider)) for counted in found]


def _plain(c: Comparison) -> dict[str, Any]:
    from flashbench.records import to_plain

    model = c.model and {
        "low_bytes": c.model.low,
        "estimate_bytes": c.model.estimate,
        "high_bytes": c.model.high,
        "read_bytes": c.model.read,
        "written_bytes": c.model.written,
    }
    verdict = {"read_error": c.read_error, "inside": c.inside, "writes_agree": c.writes_agree}
    return {"key": c.counted.case.key, "measured": to_plain(c.counted), "modelled": model, **verdict}


TITLES = (
    "provider",
    "problem",
    "read, counted",
    "read, modelled",
    "model error",
    "written, counted",
    "written, modelled",
    "all, modelled [low, high]",
    "inside",
    "L2, counted",
)


def _print_table(compared: Sequence[Comparison]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in TITLES:
        left = title in ("provider", "problem")
        table.add_column(title, justify="left" if left else "right", no_wrap=left)
    for c in compared:
        table.add_row(*_cells(c))
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False, markup=False)
    console.print(
        "HBM and L2 bytes of one call in GB (1e9). Counted: Nsight Compute, the L2 cold and clean before the call."
    )
    console.print(
        "The model's error is that of its reads. Writes may stay in the L2 when the call ends, and are not counted then."
    )
    console.print(table)
    for c in compared:
        if c.counted.status != "ok":
            console.print(f"{c.counted.case.key}: {c.counted.status}: {c.counted.reason}", soft_wrap=True)
    errors = [abs(c.read_error) for c in compared if c.read_error is not None]
    if errors:
        inside = sum(c.inside is True for c in compared)
        console.print(
            f"largest error of the reads {max(errors):.1%}; {inside} of {len(errors)} cases lie inside the model's interval"
        )


def _cells(c: Comparison) -> list[str]:
    counted, model = c.counted, c.model
    problem = counted.case.problem.label

    def gb(value: float | None) -> str:
        return "-" if value is None else f"{value / 1e9:.3g}" if value < 1e12 else f"{value / 1e9:,.0f}"

    disagree = "" if c.writes_agree in (True, None) else " !"
    return [
        counted.case.provider,
        problem if counted.status == "ok" else f"{problem} ({counted.status})",
        gb(counted.dram_read_bytes),
        gb(model.read if model else None),
        "-" if c.read_error is None else f"{c.read_error:+.1%}",
        gb(counted.dram_write_bytes) + disagree,
        gb(model.written if model else None),
        "-" if model is None else f"{gb(model.estimate)} [{gb(model.low)}, {gb(model.high)}]",
        {True: "yes", False: "no", None: "-"}[c.inside],
        gb(counted.l2_bytes),
    ]
