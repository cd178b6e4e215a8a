"""`flashbench gate`, `compare`, `ab`, `calibrate` and `simulate`: did anything get slower, said so that CI can act on it."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashbench.errors import UsageError

if TYPE_CHECKING:
    from flashbench.cli.verdicts import Reports

RESULTS = Path("results")
BASELINES = Path("results/baselines")

Markdown = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the verdicts as Markdown.")]
Junit = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write the verdicts as JUnit XML, a test case per case.")
]
Json = Annotated[Path | None, typer.Option(metavar="FILE", help="Write everything as JSON.")]
Out = Annotated[Path, typer.Option(help="Folder that holds the results.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the cases and an estimate; run nothing.")]
DeviceName = Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1, or a GPU's UUID.")]
Rounds = Annotated[str | None, typer.Option(help="Rounds of the screening, six unless the file says otherwise.")]
ConfirmRounds = Annotated[int | None, typer.Option(help="Fresh rounds of what was flagged (default: 12).")]
SelfTest = Annotated[
    bool,
    typer.Option("--self-test", help="Slow some cases by a known size; see whether they are found, and nothing else."),
]
Inject = Annotated[
    str | None, typer.Option(metavar="SIZES", help="Slowdowns of the self-test, like 3%,5%; 2.5 margins unless given.")
]


class Table(StrEnum):
    paired = "paired"
    stored = "stored"


def register(app: typer.Typer) -> None:
    app.command("gate")(gate)
    app.command("ab")(ab)
    app.command("compare")(compare)
    app.command("calibrate")(calibrate)
    app.command("simulate")(simulate)


def _given(**options: str | None) -> dict[str, str]:
    return {name: value for name, value in options.items() if value is not None}


def gate(
    config: Annotated[Path | None, typer.Argument(help="YAML file.")] = None,
    device: DeviceName = None,
    rounds: Rounds = None,
    confirm_rounds: ConfirmRounds = None,
    baselines: Annotated[Path, typer.Option(help="Folder of the stored baselines.")] = BASELINES,
    baseline: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A baseline's file, instead of this device's.")
    ] = None,
    out: Out = RESULTS,
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="An interrupted gate to finish.")] = None,
    markdown: Markdown = None,
    junit: Junit = None,
    json: Json = None,
    self_test: SelfTest = False,
    inject: Inject = None,
    dry_run: DryRun = False,
) -> None:
    """Measure, compare with this GPU model's stored baseline, confirm on fresh rounds: 0 passed, 1 regression, 3 no verdict, 4 failed."""
    from flashbench.cli import gating
    from flashbench.cli.verdicts import Reports

    given = _given(device=device, rounds=rounds)
    if self_test:
        from flashbench.cli.selftest import run_self_test

        raise typer.Exit(
            run_self_test(config, given, "stored", inject, out=out, confirm_rounds=confirm_rounds, dry_run=dry_run)
        )
    if inject is not None:
        raise UsageError("--inject belongs to --self-test")
    if (config is None) == (resume is None):
        raise UsageError(
            "give a configuration, or an interrupted run with --resume; `flashbench config init` writes the first"
        )
    code = gating.run_gate(
        config or Path(),
        given,
        out=out,
        baselines=baselines,
        baseline=baseline,
        resume=resume,
        confirm_rounds=confirm_rounds,
        reports=Reports(markdown, junit, json),
        dry_run=dry_run,
    )
    raise typer.Exit(code)


def ab(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Argument(help="YAML file; without one, the built-in default for this machine.")
    ] = None,
    base: Annotated[str | None, typer.Option(metavar="REF", help="Git revision to compare with.")] = None,
    new: Annotated[
        str | None, typer.Option(metavar="REF", help="The other revision; the working tree unless given.")
    ] = None,
    base_python: Annotated[str | None, typer.Option(metavar="PATH", help="Interpreter of the base side.")] = None,
    new_python: Annotated[str | None, typer.Option(metavar="PATH", help="Interpreter of the new side.")] = None,
    base_provider: Annotated[
        str | None, typer.Option(metavar="NAME", help="Provider, or file.py:function, of the base.")
    ] = None,
    new_provider: Annotated[str | None, typer.Option(metavar="NAME", help="The same of the new side.")] = None,
    provider: Annotated[str | None, typer.Option(help="Providers, comma-separated.")] = None,
    seq_len: Annotated[str | None, typer.Option(help="Lengths such as 512,1k,4k.")] = None,
    head_dim: Annotated[str | None, typer.Option(help="Head dimensions.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16, fp32, tf32, fp8.")] = None,
    mode: Annotated[str | None, typer.Option(help="forward, backward, forward_backward, decode.")] = None,
    mask: Annotated[str | None, typer.Option(help="none, causal, window:W.")] = None,
    batch: Annotated[str | None, typer.Option(help="Batch sizes (replaces tokens).")] = None,
    heads: Annotated[str | None, typer.Option(help="Heads; 32/8 for query/KV heads (replaces hidden).")] = None,
    device: DeviceName = None,
    rounds: Rounds = None,
    confirm_rounds: ConfirmRounds = None,
    out: Out = RESULTS,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Either side of an interrupted ab, or of its self-test, to finish."),
    ] = None,
    markdown: Markdown = None,
    junit: Junit = None,
    json: Json = None,
    self_test: SelfTest = False,
    inject: Inject = None,
    dry_run: DryRun = False,
) -> None:
    """Two sides in alternating rounds on one device: revisions, interpreters, providers or files. Sees much less than `gate` does."""
    from flashbench.cli.two_sides import Variants, run_ab
    from flashbench.cli.verdicts import Reports

    given = _given(
        provider=provider, seq_len=seq_len, head_dim=head_dim, dtype=dtype, mode=mode, mask=mask, batch=batch,
        heads=heads, device=device, rounds=rounds,
    )  # fmt: skip
    variants = Variants((base, new), (base_python, new_python), (base_provider, new_provider))
    if resume is not None:
        if beside := _given_beside(context, "resume", "markdown", "junit", "json"):
            raise UsageError(
                f"--resume {resume} goes on with that run's own folder, configuration and sides; "
                f"give it nothing but reports: leave out {', '.join(beside)}"
            )
        raise typer.Exit(_resumed_pair(resume, Reports(markdown, junit, json)))
    if self_test:
        from flashbench.cli.selftest import run_self_test

        if variants != Variants():
            raise UsageError("--self-test compares a provider with itself; leave out the options of the two sides")
        raise typer.Exit(
            run_self_test(config, given, "paired", inject, out=out, confirm_rounds=confirm_rounds, dry_run=dry_run)
        )
    if inject is not None:
        raise UsageError("--inject belongs to --self-test")
    reports = Reports(markdown, junit, json)
    code = run_ab(config, given, variants, out=out, confirm_rounds=confirm_rounds, reports=reports, dry_run=dry_run)
    raise typer.Exit(code)


def compare(
    base: Annotated[
        Path, typer.Argument(help="A run's folder (or any above: the newest inside), or a baseline's file.")
    ],
    new: Annotated[Path, typer.Argument(help="The run to judge.")],
    config: Annotated[Path | None, typer.Option(help="Take the rules from this file, not from the new run.")] = None,
    markdown: Markdown = None,
    junit: Junit = None,
    json: Json = None,
) -> None:
    """Judge two stored runs, without a GPU: the same verdicts and exit codes as `gate`; the two runs of an `ab` are compared in pairs."""
    from flashbench.cli import gating
    from flashbench.cli.verdicts import Reports

    raise typer.Exit(gating.compare(base, new, config, Reports(markdown, junit, json)))


def calibrate(
    config: Annotated[Path | None, typer.Argument(help="YAML file.")] = None,
    rounds: Annotated[
        int, typer.Option(help="Unchanged rounds to record; 36 also show the confirmed false alarms.")
    ] = 24,
    minutes: Annotated[float | None, typer.Option(help="Stop after so long; --resume goes on.")] = None,
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="A campaign to go on with.")] = None,
    stored: Annotated[
        Path | None, typer.Option("--from", metavar="RUN", help="Report on recorded rounds; measure nothing.")
    ] = None,
    write: Annotated[Path | None, typer.Option(metavar="FILE", help="A configuration to put the margins into.")] = None,
    device: DeviceName = None,
    out: Out = RESULTS,
    dry_run: DryRun = False,
) -> None:
    """A against A: this machine's rate of false alarms, the smallest slowdown that it can see, and a margin for each noisy case."""
    from flashbench.cli import noise

    code = noise.calibrate(
        config,
        _given(device=device),
        out=out,
        rounds=rounds,
        minutes=minutes,
        resume=resume,
        stored=stored,
        write=write,
        dry_run=dry_run,
    )
    raise typer.Exit(code)


def simulate(
    suites: Annotated[int, typer.Option(help="Suites a row.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Of the random numbers.")] = 1,
    only: Annotated[Table | None, typer.Option(help="One of the two tables.")] = None,
) -> None:
    """How often the gate's rules are wrong, from simulated suites: the tables of docs/gate.md, for whoever doubts them."""
    from flashbench.analysis.gate.simulation import main

    if suites < 1:
        raise UsageError(f"--suites: {suites} suites show nothing; give at least 1")
    arguments = ["--suites", str(suites), "--seed", str(seed)]
    raise typer.Exit(main(arguments if only is None else [*arguments, "--only", only.value]))


def _given_beside(context: typer.Context, *allowed: str) -> list[str]:
    """What the command line gave beside the parameters of these names: options by name, arguments by value."""
    return [
        parameter.opts[0] if parameter.param_type_name == "option" else f"'{context.params[parameter.name]}'"
        for parameter in context.command.params
        if parameter.name is not None
        and parameter.name not in allowed
        and getattr(context.get_parameter_source(parameter.name), "name", None) == "COMMANDLINE"
    ]


def _resumed_pair(path: Path, reports: Reports) -> int:
    """Finish an interrupted `ab` or its self-test; the exit code."""
    from flashbench.cli import pairs, selftest, two_sides

    base, new = pairs.runs_of_pair(path)
    if "injections" in base.header:
        return selftest.resume_self_test(base, new)
    return two_sides.resume_ab(base, new, reports)
