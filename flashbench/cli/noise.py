"""What `calibrate` does: the machine's noise, what it does to the gate, and the margins that it asks for."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashbench.analysis.gate.noise import SPLITS, NoiseModel, Rate, campaign_of, noise_model, overrides_of
from flashbench.analysis.gate.rules import Rules
from flashbench.cli import sweeping
from flashbench.cli.gating import announced, measuring, stored_rules, whole_run
from flashbench.errors import ConfigError, UsageError
from flashbench.store.read import Run, load_run
from flashbench.store.side import Side, side_of_run, staged

if TYPE_CHECKING:
    from flashbench.cli.sweeping import Request

MARGINS = "margins.yaml"


def calibrate(
    path: Path | None,
    options: Mapping[str, str],
    *,
    out: Path,
    rounds: int,
    minutes: float | None,
    resume: Path | None,
    stored: Path | None,
    write: Path | None,
    dry_run: bool,
) -> int:
    """Measure unchanged rounds (or take stored ones), print what their noise does to the gate, and write margins."""
    if sum(one is not None for one in (path, resume, stored)) != 1:
        raise UsageError(
            "give one of CONFIG (measures), --resume RUN (goes on measuring) and --from RUN (only reports)"
        )
    if write is not None and not write.is_file():
        raise UsageError(f"--write: there is no file '{write}'")
    measured = stored is None
    if stored is None:
        request = announced(sweeping.resumed(resume) if resume is not None else sweeping.requested(path, options))
        if resume is not None:
            header = load_run(resume).header
            rounds = int((header.get("calibrate") or {}).get("rounds") or rounds)
        if rounds < 2 * Rules().rounds:
            raise UsageError(f"--rounds: {rounds} rounds are no campaign; a screening alone takes {2 * Rules().rounds}")
        request = replace(request, plan=replace(request.plan, rounds=rounds))
        if dry_run:
            sweeping.print_plan(request)
            return 0
        stored, finished = _campaign(request, out, rounds, minutes)
        if not finished:
            print(f"not finished; go on with: flashbench calibrate --resume {stored}", file=sys.stderr)
            return 0
    run = whole_run(stored)
    rules = next((one for one in stored_rules(run.header) if one.metric.name == "time"), Rules())
    report_noise(run, rules, measured, write)
    return 0


def _campaign(request: Request, out: Path, rounds: int, minutes: float | None) -> tuple[Path, bool]:
    """The run's folder, and whether every round is in it."""
    from flashbench.cli.progress import Display
    from flashbench.run.rounds import Arm, Protocol, measure_rounds

    deadline = time.monotonic() + 60 * minutes if minutes is not None else None
    protocol = Protocol(sweeping.settings_of(request), request.config.measure.timeout_seconds, anchors=True)
    total = (len(request.plan.cases) + len(request.plan.skips)) * rounds - len(request.done)
    with measuring(request), sweeping.opened(request, out, {"calibrate": {"rounds": rounds}}) as writer:
        arm = Arm(request.plan, writer, done=request.done)
        with Display(total, writer.path) as display:
            for step in measure_rounds([arm], range(rounds), protocol):
                display.show(step)
                total -= step.row is not None
                if deadline is not None and step.row is not None and time.monotonic() > deadline and total:
                    return writer.path, False
    return writer.path, True


def report_noise(run: Run, rules: Rules, keep: bool, config: Path | None) -> None:
    """The report and its margins on stdout; the margins also in the run's folder when they are to be kept there, and in a configuration."""
    side = _whole_rounds(side_of_run(run))
    model = noise_model(campaign_of(side, rules), rules)
    overrides = overrides_of(model, rules)
    margins = (
        _yaml({"gate": {"overrides": _written(overrides)}}) if overrides else "# the rules' own margins are enough\n"
    )
    print(f"{render(model, rules)}\n\n{margins}", end="")
    places = []
    if keep:
        (run.path / MARGINS).write_text(margins, encoding="utf-8")
        places.append(str(run.path / MARGINS))
    if config is not None and overrides:
        add_overrides(config, overrides)
        places.append(str(config))
    where = f"; their margins are in {' and '.join(places)}" if overrides and places else ""
    print(f"{len(overrides)} of {len(model.cases)} cases ask for more than the rules' margin{where}", file=sys.stderr)


def render(model: NoiseModel, rules: Rules) -> str:
    """Rates first, then the cases, the noisiest first."""
    worst = max(case.smallest_effect for case in model.cases)
    median = sorted(case.smallest_effect for case in model.cases)[len(model.cases) // 2]
    confirmed = "not known: it takes twice as many rounds" if model.confirmed is None else _rate(model.confirmed)
    inside = model.screening.low <= model.simulated <= model.screening.high
    place = "inside the interval" if inside else "outside it: these rounds do not behave as the model of docs/gate.md"
    lines = [
        f"A against A: {len(model.cases)} cases, {model.rounds} rounds, screenings of {rules.rounds} pairs",
        f"screening with p < {100 * rules.alpha:g} % and no margin, per case: {_rate(model.screening)}",
        f"the same, simulated at this campaign's median process sd of {_percent(model.process_sd)} and drift of "
        f"{_percent(model.drift)} a screening: {_percent(model.simulated)}, {place}",
        f"screening at the rules' margins, per case (measured again): {_rate(model.flagged)}",
        f"false alarms, per case (flagged and confirmed): {confirmed}",
        f"smallest slowdown seen with about 90 %: {_percent(median)} in half of the cases, {_percent(worst)} in every case",
        "",
    ]
    rows: list[tuple[str, ...]] = [
        ("case", "time ms", "process sd", "worst A/A", "margin", "smallest visible", "flagged")
    ]
    for case in sorted(model.cases, key=lambda case: -case.worst_shift):
        figures = (case.process_sd, case.worst_shift, case.margin, case.smallest_effect, case.flagged)
        rows.append((case.key, f"{case.median_ms:.4g}", *map(_percent, figures)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += [f"left out, not ok in every round: {key}" for key in model.left_out]
    return "\n".join(lines)


def add_overrides(config: Path, overrides: Mapping[str, Mapping[str, float]]) -> None:
    """Put the margins into a configuration file; its comments and its other lines stay as they are."""
    from ruamel.yaml import YAML

    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 200
    data = yaml.load(config.read_text(encoding="utf-8"))
    if not isinstance(data.get("gate", {}), dict):
        raise ConfigError(f"{config}: gate: must be a mapping")
    gate = data.setdefault("gate", {})
    gate.setdefault("overrides", {}).update(_written(overrides))
    text = StringIO()
    yaml.dump(data, text)
    config.write_text(text.getvalue(), encoding="utf-8")


def _whole_rounds(side: Side) -> Side:
    """Without a last round that an interruption cut short."""
    by_case = [{seen.round for seen in rounds} for rounds in side.cases.values()]
    last = max(set().union(*by_case))
    return side if all(last in rounds for rounds in by_case) else staged(side, last)[0]


def _written(overrides: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, str]]:
    """As a person writes them: `margin: 3.4%`."""
    return {key: {name: f"{100 * value:g}%" for name, value in margins.items()} for key, margins in overrides.items()}


def _yaml(data: Any) -> str:
    from ruamel.yaml import YAML

    yaml = YAML()
    yaml.width = 200
    text = StringIO()
    yaml.dump(data, text)
    return text.getvalue()


def _rate(rate: Rate) -> str:
    if rate.high == 0:  # resampling cases of which none ever fired says nothing about how seldom they do
        return f"none in {SPLITS} splits of each case"
    return f"{_percent(rate.value)} (95 % bootstrap interval over cases {_percent(rate.low)} to {_percent(rate.high)})"


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.2f} %"
