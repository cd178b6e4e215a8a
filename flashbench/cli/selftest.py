"""`--self-test`: slow some cases by a known size, and see whether the gate finds them and nothing else."""

from __future__ import annotations

import contextlib
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashbench.analysis.gate.rules import Pairing, Rules
from flashbench.analysis.gate.verdict import Comparison, percent
from flashbench.cli import sweeping
from flashbench.cli.gating import announced, confirm_rounds_of, measuring, rules_of, stages_of, watcher
from flashbench.cli.pairs import SIDES
from flashbench.errors import UsageError
from flashbench.records import Case, Problem, from_plain, to_plain
from flashbench.report.verdicts import render_text
from flashbench.store.read import Run

if TYPE_CHECKING:
    from flashbench.cli.sweeping import Request
    from flashbench.run.injection import Injection

MOST_CASES = 10
LARGER = 2.5
"""The slowdown to inject, in margins, where none is asked for."""


def run_self_test(
    path: Path | None,
    options: Mapping[str, str],
    pairing: Pairing,
    sizes: str | None,
    *,
    out: Path,
    confirm_rounds: int | None,
    dry_run: bool,
) -> int:
    """Measure plain cases against the same cases of which some do more work: 0 when exactly those are found, 3 otherwise."""
    from flashbench.run.injection import inject

    request = sweeping.requested(path, options)
    rules = _rules(request, confirm_rounds)
    margin = rules.margin if pairing == "paired" else rules.stored_margin
    fractions = _sizes(sizes) if sizes is not None else [LARGER * margin]
    cases = _chosen(request.plan.cases, len(fractions))
    request = replace(request, plan=replace(request.plan, cases=tuple(cases), skips=(), rounds=rules.rounds))
    slowed_cases = list(zip(_largest(cases, len(fractions)), fractions, strict=True))
    if dry_run:
        sweeping.print_plan(request)
        for case, fraction in slowed_cases:
            print(f"slowed by {percent(fraction)}: {case.key}")
        return 0
    settings, timeout = sweeping.settings_of(request), request.config.measure.timeout_seconds
    with measuring(request):
        injections = []
        for case, fraction in slowed_cases:
            print(f"sizing the extra work of {case.key}", file=sys.stderr, flush=True)
            injections.append(inject(case, fraction, request.plan.device, settings, timeout))
        comparison = _compared((request, _slowed(request, injections)), injections, rules, pairing, out)
    return _reported(comparison, injections)


def resume_self_test(base: Run, new: Run) -> int:
    """Go on with an interrupted `ab --self-test`, with the extra work that it had sized."""
    from flashbench.store.read import done

    request = announced(sweeping.resumed(base.path))
    injections = [_injection(plain) for plain in base.header["injections"]]
    rules = _rules(request, confirm_rounds_of(base.header))
    request = replace(request, plan=replace(request.plan, rounds=rules.rounds))
    after = replace(_slowed(request, injections), run=new.path, done=frozenset(done(new)))
    with measuring(request):
        comparison = _compared((request, after), injections, rules, "paired", base.path)
    return _reported(comparison, injections)


def _injection(plain: dict[str, Any]) -> Injection:
    from flashbench.run.injection import Injection

    twins = {name: from_plain(Case, plain[name]) for name in ("case", "slowed")}
    return from_plain(Injection, {**plain, **twins})


def _rules(request: Request, confirm_rounds: int | None) -> Rules:
    return replace(rules_of(request.config, confirm_rounds)[0], overrides={}, allow_missing=())


def _slowed(request: Request, injections: Sequence[Injection]) -> Request:
    """The request with each injection's slowed twin in place of its case."""
    from flashbench.providers import slowed

    twins = {injection.case: injection.slowed for injection in injections}
    providers = {**request.providers, **{twin.provider: slowed.get(twin.provider) for twin in twins.values()}}
    cases = tuple(twins.get(case, case) for case in request.plan.cases)
    return replace(request, plan=replace(request.plan, cases=cases), providers=providers)


def _compared(
    requests: tuple[Request, Request], injections: Sequence[Injection], rules: Rules, pairing: Pairing, out: Path
) -> Comparison:
    """Measure what plain and slowed side still lack, and judge."""
    from flashbench.run.rounds import Arm, Protocol, compare_rounds, measure_rounds

    names = {injection.slowed.key: injection.case.key for injection in injections}
    pair = uuid.uuid4().hex[:12]
    arms = []
    with contextlib.ExitStack() as stack:
        for side, request in zip(SIDES, requests, strict=True):
            compared_as = names if side == "new" else {}
            facts = {
                "label": f"self-test ({side})",
                "gate": stages_of(rules),
                "compared_as": compared_as,
                "injections": [to_plain(injection) for injection in injections],
                **({"pair": pair, "side": side} if pairing == "paired" else {}),
            }
            writer = stack.enter_context(sweeping.opened(request, out, facts, f"self-test-{side}"))
            arms.append(Arm(request.plan, writer, compared_as=compared_as, done=request.done))
        first = requests[0]
        protocol = Protocol(
            sweeping.settings_of(first), first.config.measure.timeout_seconds, anchors=pairing == "stored"
        )
        watch = watcher(arms[0].writer.path, resumable=pairing == "paired")
        if pairing == "paired":
            protocol.learn_timers(arms[0].side())
            return compare_rounds(arms, None, [rules], pairing, protocol, watch)[0]
        numbers = range(rules.rounds)
        watch(measure_rounds(arms[:1], numbers, protocol), arms[0].visits(numbers), "measuring the base")
        base = arms[0].side()
        protocol.learn_timers(base)
        return compare_rounds(arms[1:], base, [rules], pairing, protocol, watch)[0]


def _reported(comparison: Comparison, injections: Sequence[Injection]) -> int:
    """The table on stdout, without the line of the gate's own exit code, which is not this command's; then what came of it."""
    print(render_text(comparison).partition("\n")[2].lstrip("\n"))
    code, lines = judged(comparison, injections)
    print("\n".join(lines))
    return code


def judged(comparison: Comparison, injections: Sequence[Injection]) -> tuple[int, list[str]]:
    """Whether every injected slowdown was called a regression and nothing else was: 0 or 3, and what to say."""
    slowed = {injection.case.key for injection in injections}
    found = {finding.key: finding for finding in comparison.cases}
    lines, missed = [], 0
    for injection in injections:
        finding = found[injection.case.key]
        true = f"{percent(injection.size)} by itself ({percent(injection.low)} to {percent(injection.high)})"
        seen = "no change seen" if finding.change is None else f"the gate saw {percent(finding.change)}"
        missed += finding.verdict != "regression"
        word = "found" if finding.verdict == "regression" else f"not found ({finding.verdict})"
        lines.append(f"injected {percent(injection.asked)}: {true}, {seen}, {word}: {finding.key}")
    false = [
        finding.key
        for finding in (*comparison.cases, *comparison.groups)
        if finding.verdict == "regression" and finding.key not in slowed and not slowed & set(finding.members)
    ]
    quiet = len(comparison.cases) - len(slowed)
    lines += [f"false alarm: {key}" for key in false]
    if missed or false:
        lines.append(
            f"self-test failed: {missed} of {len(injections)} slowdowns missed, {len(false)} false alarms (exit code 3)"
        )
        return 3, lines
    lines.append(
        f"self-test passed: {len(injections)} of {len(injections)} slowdowns found, {quiet} unchanged cases quiet (exit code 0)"
    )
    return 0, lines


def _chosen(cases: Sequence[Case], slowed: int) -> list[Case]:
    """At most ten cases that can be slowed, spread evenly over the configuration's."""
    able = [case for case in cases if case.problem.mode in ("forward", "decode")]
    if len(able) < slowed + 1:
        raise UsageError(
            f"the self-test needs {slowed + 1} forward cases that can run here, {slowed} to slow and one to leave; "
            f"the configuration has {len(able)}"
        )
    if len(able) <= MOST_CASES:
        return able
    return [able[i * len(able) // MOST_CASES] for i in range(MOST_CASES)]


def _largest(cases: Sequence[Case], count: int) -> list[Case]:
    """Cases with the most work, in which a small share of it is still many blocks; of different problems where there are enough."""
    from flashbench.model.flops import useful_flops

    ordered = sorted(cases, key=lambda case: -useful_flops(case.problem))
    first: dict[Problem, Case] = {}
    for case in ordered:
        first.setdefault(case.problem, case)
    rest = [case for case in ordered if case not in first.values()]
    return [*first.values(), *rest][:count]


def _sizes(text: str) -> list[float]:
    """`3%,5%` or `0.03,0.05`."""
    found = []
    for word in (part.strip() for part in text.split(",")):
        try:
            value = float(word.removesuffix("%")) / (100 if word.endswith("%") else 1)
        except ValueError:
            value = -1.0
        if not 0 < value <= 1:
            raise UsageError(f"--inject: '{word}' is not a slowdown; write it like 5%, at most 100%")
        found.append(value)
    return found
