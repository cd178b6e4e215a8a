"""What `gate` and `compare` do once their options are parsed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashbench.analysis.gate.rules import METRICS, Pairing, Rules, rules_from_config
from flashbench.cli import sweeping
from flashbench.cli.verdicts import Reports, publish
from flashbench.errors import StoreError, UsageError
from flashbench.store.baseline import Baseline, baseline_path, read_baseline
from flashbench.store.read import HEADER, Run, load_run
from flashbench.store.side import Side, identity_of, side_of_run

if TYPE_CHECKING:
    from flashbench.cli.sweeping import Request
    from flashbench.config.schema import Config
    from flashbench.run.runner import Progress


def rules_of(config: Config, confirm_rounds: int | None = None) -> list[Rules]:
    """The configuration's rules, one for each of its metrics; the first metric's rounds are everyone's."""
    found = [rules_from_config(config.gate, metric) for metric in config.gate.metrics]
    if not found:
        raise UsageError(f"{config.where('gate', 'metrics')}names no metric (known: {', '.join(METRICS)})")
    rounds = config.measure.round_count(gate=True)
    fresh = found[0].confirm_rounds if confirm_rounds is None else confirm_rounds
    if fresh < found[0].min_rounds:
        raise UsageError(f"--confirm-rounds: {fresh} rounds confirm nothing; at least {found[0].min_rounds} do")
    return [replace(rules, rounds=rounds, confirm_rounds=fresh) for rules in found]


def run_gate(
    path: Path,
    options: Mapping[str, str],
    *,
    out: Path,
    baselines: Path,
    baseline: Path | None,
    resume: Path | None,
    confirm_rounds: int | None,
    reports: Reports,
    dry_run: bool,
) -> int:
    """Measure what the configuration asks for, compare with what is stored for this device, and return the exit code."""
    from flashbench.analysis.gate.screening import conclude, no_baseline, screen
    from flashbench.hardware.catalogue import device_id
    from flashbench.run.rounds import Arm, Protocol, compare_rounds, measure_rounds

    reports.check()
    request = announced(sweeping.resumed(resume) if resume is not None else sweeping.requested(path, options))
    rules = rules_of(request.config, confirm_rounds)
    request = replace(request, plan=replace(request.plan, rounds=rules[0].rounds))
    device = request.plan.device
    where = baseline or baseline_path(baselines, device_id(device), request.config.name)
    stored = read_baseline(where) if baseline is not None or where.exists() else None
    if dry_run:
        sweeping.print_plan(request)
        print(f"baseline: {where}" + ("" if stored else " (not there yet: the gate would end with code 3)"))
        return 0
    if stored is not None:
        identity = identity_of(device, device_id(device))
        if stored.side.identity.differences(identity):
            nothing = Side({}, identity=identity, label=device.name)
            print("nothing was measured, because it could not be compared", file=sys.stderr)
            return publish(
                [conclude(screen(stored.side, nothing, one.narrowed(stored.side.cases), "stored")) for one in rules],
                reports,
            )
        _check_globs(rules, request, stored.side)
    protocol = Protocol(sweeping.settings_of(request), request.config.measure.timeout_seconds, anchors=True)
    with measuring(request), sweeping.opened(request, out, {"gate": stages_of(rules[0])}) as writer:
        arm = Arm(request.plan, writer, done=request.done)
        watch = watcher(writer.path)
        if stored is not None:
            protocol.learn_timers(stored.side)
            comparisons = compare_rounds([arm], stored.side, rules, "stored", protocol, watch)
        else:
            visits = (len(request.plan.cases) + len(request.plan.skips)) * rules[0].rounds
            watch(measure_rounds([arm], range(rules[0].rounds), protocol), visits, "measuring")
            reason = _nothing_stored(where, baselines)
            comparisons = [no_baseline(arm.side(), one, reason) for one in rules]
    code = publish(comparisons, reports)
    print(f"{writer.path}\n{_next_step(code, stored, writer.path)}", file=sys.stderr)
    return code


def stages_of(rules: Rules) -> dict[str, int]:
    """What a run's header says of its stages, so that `compare` tells them apart."""
    return {"screening_rounds": rules.rounds, "confirm_rounds": rules.confirm_rounds}


def confirm_rounds_of(header: Mapping[str, Any]) -> int | None:
    """Fresh rounds that the command of a run asked for; None: as its configuration says."""
    found = (header.get("gate") or {}).get("confirm_rounds")
    return found if isinstance(found, int) else None


def announced(request: Request) -> Request:
    """The request, its notes told on stderr."""
    for note in request.notes:
        print(f"note: {note}", file=sys.stderr)
    return request


def _check_globs(rules: Iterable[Rules], request: Request, base: Side) -> None:
    """A glob that matches nothing is an error before the first round, not after the last one."""
    keys = {case.key for case in (*request.plan.cases, *(skip.case for skip in request.plan.skips))}
    for one in rules:
        one.check_globs(keys | base.cases.keys())


def _nothing_stored(where: Path, root: Path) -> str:
    others = sorted(path.parent.name for path in root.glob(f"*/{where.name}"))
    elsewhere = f" (this configuration is stored for {', '.join(others)})" if others else ""
    return f"nothing is stored at '{where}'{elsewhere}; `flashbench baseline update` stores this run"


def _next_step(code: int, stored: Baseline | None, run: Path) -> str:
    if stored is None:
        return f"next: flashbench baseline update {run} --why 'first baseline of this machine'"
    if code == 1:
        return (
            "next: flashbench ab --base REF finds the change; if it is meant, flashbench baseline update RUN --accept"
        )
    return f"next: flashbench show {run}"


def measuring(request: Request) -> Any:
    """Signals turned into interruptions, and the device's lock, for the length of the block."""
    import contextlib

    from flashbench.run.lock import device_lock
    from flashbench.run.signals import stop_on_signals

    stack = contextlib.ExitStack()
    stack.enter_context(stop_on_signals())
    stack.enter_context(device_lock(request.plan.device))
    return stack


def watcher(path: Path, resumable: bool = True) -> Callable[[Iterator[Progress], int, str], None]:
    """Draws the progress of each stage on stderr."""
    from flashbench.cli.progress import Display

    def watch(steps: Iterator[Progress], total: int, title: str) -> None:
        print(f"{title}: {total} visits", file=sys.stderr, flush=True)
        with Display(total, path, resumable) as display:
            for step in steps:
                display.show(step)

    return watch


def compare(base_path: Path, new_path: Path, config: Path | None, reports: Reports) -> int:
    """Judge two stored runs, or a baseline's file and a run; the exit code."""
    from flashbench.analysis.gate.stages import judge

    reports.check()
    (base, base_header), (new, new_header) = (side_at(path) for path in (base_path, new_path))
    keys = base.cases.keys() | new.cases.keys()
    if config is not None:
        from flashbench.config.load import load

        rules = rules_of(load(config), confirm_rounds_of(new_header))
    else:
        # The run's own configuration passed its check when it was measured; what the command line left out matches nothing now.
        rules = [one.narrowed(keys) for one in stored_rules(new_header or base_header)]
    pair = base_header.get("pair")
    pairing: Pairing = "paired" if pair is not None and pair == new_header.get("pair") else "stored"
    screening_rounds = (new_header.get("gate") or {}).get("screening_rounds")
    return publish([judge(base, new, one, pairing, screening_rounds) for one in rules], reports)


def side_at(path: Path) -> tuple[Side, dict[str, Any]]:
    """The side that a baseline's file or a run is, and the run's header; StoreError for a damaged one."""
    if path.is_file() and not (path.parent / HEADER).exists():
        return read_baseline(path).side, {}
    run = whole_run(path)
    return side_of_run(run), run.header


def whole_run(path: Path) -> Run:
    """The run at `path`, every line of it; what else is to say about it goes to stderr."""
    run = load_run(path, strict=True)
    for note in run.notes:
        print(f"note: {note}", file=sys.stderr)
    if not run.rows:
        raise StoreError(f"'{run.path}' holds no row; nothing can be said about it")
    return run


def stored_rules(header: Mapping[str, Any]) -> list[Rules]:
    """The rules of the configuration that a run carries; the defaults for a run without one."""
    from pydantic import ValidationError

    from flashbench.config.schema import Gate

    try:
        gate = Gate.model_validate((header.get("config") or {}).get("gate") or {})
    except ValidationError as error:
        raise StoreError(
            f"the gate of the stored configuration cannot be read ({error.errors()[0]['msg']}); give --config FILE"
        ) from None
    fresh = confirm_rounds_of(header) or Rules().confirm_rounds
    return [replace(rules_from_config(gate, metric), confirm_rounds=fresh) for metric in gate.metrics]
