"""What `sweep` does once its options are parsed: plan, ceilings, run with progress, summary and exit code."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashbench.errors import FlashbenchError, StoreError, UsageError
from flashbench.providers.spec import Provider
from flashbench.records import FAILED_STATUSES, Case, Device, Row, from_plain, to_plain
from flashbench.run.plan import Plan, estimate, make_plan

if TYPE_CHECKING:
    from flashbench.config.schema import Config
    from flashbench.store.run import RunWriter


@dataclass(frozen=True)
class Request:
    """A sweep that has been read and planned, and has touched nothing yet."""

    config: Config
    plan: Plan
    providers: Mapping[str, Provider]
    notes: tuple[str, ...]
    run: Path | None = None
    """The run to resume, or None for a new one."""
    done: frozenset[tuple[str, int]] = frozenset()
    """Keys and rounds that the run to resume has."""
    check_only: bool = False
    """Whether the run to resume only checks."""


def requested(path: Path | None, options: Mapping[str, str]) -> Request:
    """A sweep from a file, or the machine's default, and the command line's options."""
    from flashbench.config.load import load

    if path is not None:
        config = load(path, options)
        return _request(config, _device(config))
    device = _find(options.get("device", "auto"))
    return _request(load(None, options, kind=device.kind), device)


def reproduced(key: str, path: Path | None, options: Mapping[str, str]) -> Request:
    """One case alone, measured as the file says, or as the machine's default does."""
    from flashbench.config.load import load

    case = Case.from_key(key)
    options = {**options, "provider": case.provider}
    if path is not None:
        config = load(path, options)
        device = _device(config)
    else:
        device = _find(options.get("device", "auto"))
        config = load(None, options, kind=device.kind)
    return _planned(config.model_copy(update={"name": "repro"}), device, (case,), ())


def resumed(path: Path) -> Request:
    """What is missing of an earlier run, with the configuration that the run carries."""
    from flashbench.config.schema import Config
    from flashbench.store.read import done, load_run

    run = load_run(path)
    try:
        config = Config.model_validate(run.header["config"])
        recorded = from_plain(Device, run.header["device"])
        cases = tuple(Case.from_key(key) for key in run.header["cases"])
    except (KeyError, TypeError, ValueError, UsageError) as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        raise StoreError(f"{run.path}: its run.json does not say what is missing ({reason}); start a new run") from None
    device = _find(recorded.uuid or recorded.kind)
    if (device.kind, device.name) != (recorded.kind, recorded.name):
        raise UsageError(
            f"--resume: the run was measured on {recorded.name}, this machine has {device.name}; start a new run"
        )
    before, now = recorded.versions, device.versions
    changed = [f"{name} {before.get(name)}, now {now.get(name)}" for name in before if before[name] != now.get(name)]
    notes = (f"versions differ from the rows that are there: {'; '.join(changed)}",) if changed else ()
    request = _planned(config, device, cases, notes)
    return replace(request, run=run.path, done=frozenset(done(run)), check_only=bool(run.header.get("check_only")))


def _find(wanted: str) -> Device:
    from flashbench.run.devices import find_device

    return find_device(wanted)


def _device(config: Config) -> Device:
    return _find(config.device)


def _request(config: Config, device: Device) -> Request:
    from flashbench.config.axes import expand
    from flashbench.providers.table import known_names

    expansion = expand(config, known_names())
    return _planned(config, device, expansion.cases, expansion.notes)


def _planned(config: Config, device: Device, cases: Sequence[Case], notes: tuple[str, ...]) -> Request:
    from flashbench.providers.table import get

    if not cases:
        raise UsageError("the configuration names no case at all; see its providers, problems and exclude")
    providers = {name: get(name) for name in dict.fromkeys(case.provider for case in cases)}
    plan = make_plan(cases, providers, device, config.measure.rounds or 1, config.measure.seed)
    return Request(config, plan, providers, notes)


def print_plan(request: Request) -> None:
    """`--dry-run`: the cases, what cannot run and why, and what it will cost."""
    from rich.console import Console

    plan = request.plan
    out = Console(highlight=False, markup=False, soft_wrap=True)
    out.print(f"{len(plan.cases)} cases on {plan.device.name}, {plan.rounds} round(s):")
    for case in plan.cases:
        out.print(f"  {case.key}")
    for status in ("unsupported", "oom"):
        skips = [s for s in plan.skips if s.status == status]
        if skips:
            out.print(f"{len(skips)} {status}:")
        for skip in skips:
            out.print(f"  {skip.case.key}: {skip.reason}", style="dim")
    rule = _rule(request.config, plan.device)
    cost = estimate(plan, request.providers, rule["max_seconds"], rule["warmup_seconds"])
    out.print(
        f"about {_minutes(cost.seconds)} (at most {_minutes(cost.longest_seconds)}); "
        f"the largest case needs {cost.memory_bytes / 2**30:.2f} GiB of {plan.device.memory_bytes / 2**30:.0f} GiB"
    )
    for note in request.notes:
        print(f"note: {note}", file=sys.stderr)


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def execute(request: Request, root: Path, check_only: bool) -> int:
    """Run the plan and return the exit code: 0, or 4 when a row is incorrect, invalid, crashed, timed out or in error."""
    from flashbench.cli.progress import Display
    from flashbench.run.lock import device_lock
    from flashbench.run.runner import run_plan
    from flashbench.run.signals import stop_on_signals

    check_only = check_only or request.check_only
    settings = settings_of(request, check_only)
    for note in request.notes:
        print(f"note: {note}", file=sys.stderr)
    with stop_on_signals(), device_lock(request.plan.device), _open(request, root, check_only) as writer:
        total = (len(request.plan.cases) + len(request.plan.skips)) * request.plan.rounds - len(request.done)
        rows: list[tuple[Row, tuple[float, ...]]] = []
        with Display(total, writer.path) as display:
            for step in run_plan(request.plan, writer, settings, request.config.measure.timeout_seconds, request.done):
                display.show(step)
                if step.row is not None:
                    rows.append((step.row, step.samples_ms))
    return _summary(rows, writer.path, request.providers)


WARMUP_SECONDS = {"cpu": 0.1, "cuda": 0.3}
"""Shortest warm-up where the configuration leaves it open; it goes on until the time is steady (measure/sampling.py)."""


def _rule(config: Config, device: Device) -> dict[str, Any]:
    """How every case is sampled; what the configuration leaves open depends on the device."""
    measure = config.measure
    return {
        "l2": measure.l2 or ("warm" if device.kind == "cpu" else "cold"),
        "regime": measure.regime,
        "timer": measure.timer,
        "min_samples": measure.min_samples,
        "confidence_width": measure.confidence_width,
        "max_seconds": measure.max_seconds,
        "warmup_seconds": WARMUP_SECONDS[device.kind] if measure.warmup_ms is None else measure.warmup_ms / 1e3,
    }


def settings_of(request: Request, check_only: bool = False) -> dict[str, Any]:
    """What a worker is told at its start."""
    measure = request.config.measure
    rule = _rule(request.config, request.plan.device)
    return {
        "rule": rule,
        "seed": measure.seed,
        "check_only": check_only,
        "energy": measure.energy,
        "cross_check": measure.cross_check,
    }


def _open(request: Request, root: Path, check_only: bool) -> RunWriter:
    writer = opened(request, root, {"check_only": True} if check_only else None)
    device = request.plan.device
    if request.run is None and not check_only and not device.triton_interpreter:
        _ensure_ceilings(device, root)
    return writer


def opened(request: Request, root: Path, facts: Mapping[str, Any] | None = None, name: str | None = None) -> RunWriter:
    """The run that the request goes on with, or a new one below `root` with `facts` added to its header."""
    from flashbench.hardware.catalogue import device_id
    from flashbench.store.run import RunWriter

    if request.run is not None:
        writer = RunWriter.resume(request.run)
        for note in writer.notes:
            print(f"note: {note}", file=sys.stderr)
        return writer
    header = {**header_of(request), **(facts or {})}
    return RunWriter.create(root, device_id(request.plan.device), name or request.config.name, header)


def header_of(request: Request) -> dict[str, Any]:
    """What a new run's header says of the request."""
    return {
        "command": shlex.join(["flashbench", *sys.argv[1:]]),
        "device": to_plain(request.plan.device),
        "config": request.config.resolved(),
        "cases": [c.key for c in (*request.plan.cases, *(s.case for s in request.plan.skips))],
        "models": {
            name: {"algorithm": provider.algorithm, "schedule": to_plain(provider.schedule)}
            for name, provider in request.providers.items()
        },
    }


def _ensure_ceilings(device: Device, root: Path) -> None:
    """A device that has no data sheet here needs measured ceilings for its roofline: once, kept beside its runs.

    For a card of the catalogue `flashbench ceilings` measures them when they are wanted.
    """
    from flashbench.hardware.catalogue import match
    from flashbench.run.ceilings import ceilings_path, measure_and_save

    path = ceilings_path(root, device)
    if match(device) is None and not path.exists():
        from rich.console import Console

        console = Console(stderr=True, highlight=False, markup=False)
        console.print(f"measuring this device's ceilings once, for {path}", soft_wrap=True)
        try:
            with console.status("starting") as status:  # quiet when stderr is no terminal
                measure_and_save(device, path, status.update)
        except UsageError:
            raise
        except FlashbenchError as error:  # the sweep is worth more than its roofline
            console.print(f"note: {error}; `flashbench ceilings` tries again", soft_wrap=True)


def _summary(rows: list[tuple[Row, tuple[float, ...]]], path: Path, providers: Mapping[str, Provider]) -> int:
    """The rows just measured as a table on stdout, the counts and the next step on stderr."""
    from rich.console import Console
    from rich.table import Table

    from flashbench.analysis.statistics import median
    from flashbench.model.flops import useful_flops

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("provider", "problem"):
        table.add_column(title, no_wrap=True)
    for title in ("time ms", "TFLOP/s", "peak MiB", "error"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("status", overflow="fold")
    for row, samples in rows:
        time_ms = median(samples) if row.status == "ok" else None
        flops = useful_flops(row.case.problem, providers[row.case.provider].algorithm)
        tflops = flops / time_ms / 1e9 if time_ms else None
        memory = (row.memory.peak_bytes - row.memory.before_bytes) / 2**20 if row.memory else None
        error = row.check.error_norm if row.check else None
        status = row.status if row.reason is None else f"{row.status}: {row.reason}"
        table.add_row(
            row.case.provider,
            row.case.problem.label,
            "-" if time_ms is None else f"{time_ms:.4g}",
            "-" if tflops is None else f"{tflops:.3g}",
            "-" if memory is None else f"{memory:.1f}",
            "-" if error is None else f"{error:.1e}",
            status,
        )
    # No markup: an exception's words may hold brackets.
    Console(width=None if sys.stdout.isatty() else 200, highlight=False, markup=False).print(table)
    counts = Counter(row.status for row, _ in rows)
    told = ", ".join(f"{n} {status}" for status, n in counts.most_common()) or "nothing was left to do"
    print(f"{told}\n{path}\nnext: flashbench show {path}  ·  flashbench roofline {path}", file=sys.stderr)
    return 4 if any(row.status in FAILED_STATUSES for row, _ in rows) else 0
