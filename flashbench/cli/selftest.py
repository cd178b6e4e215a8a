"""`--self-test`: slow some cases by a known size, and see whether the gate finds them and nothing else."""

from __future__ import annotations

import contextlib
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from flashbench.analysis.gate.rules import Pairing
from flashbench.analysis.gate.verdict import Comparison, percent
from flashbench.cli import sweeping
from flashbench.cli.gating import measuring, rules_of, watcher
from flashbench.errors import UsageError
from flashbench.records import Case, Problem, to_plain
from flashbench.report.verdicts import render_text

if TYPE_CHECKING:
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
    from flashbench.providers import slowed
    from flashbench.run.injection import inject
    from flashbench.run.rounds import Arm, Protocol, compare_rounds, measure_rounds

    request = sweeping.requested(path, options)
    rules = replace(rules_of(request.config, confirm_rounds)[0], overrides={}, allow_missing=())
    margin = rules.margin if pairing == "paired" else rules.stored_margin
    fractions = _sizes(sizes) if sizes is not None else [LARGER * margin]
    cases = _chosen(request.plan.cases, len(fractions))
    if dry_run:
        sweeping.print_plan(
            replace(request, plan=replace(request.plan, cases=tuple(cases), skips=(), rounds=rules.rounds))
        )
        for case, fraction in zip(_largest(cases, len(fractions)), fractions, strict=True):
            print(f"slowed by {percent(fraction)}: {case.key}")
        return 0
    settings, timeout = sweeping.settings_of(request), request.config.measure.timeout_seconds
    with contextlib.ExitStack() as stack:
        stack.enter_context(measuring(request))
        injections = []
        for case, fraction in zip(_largest(cases, len(fractions)), fractions, strict=True):
            print(f"sizing the extra work of {case.key}", file=sys.stderr, flush=True)
            injections.append(inject(case, fraction, request.plan.device, settings, timeout))
        twins = {injection.case: injection.slowed for injection in injections}
        base_plan = replace(request.plan, cases=tuple(cases), skips=(), rounds=rules.rounds)
        new_plan = replace(base_plan, cases=tuple(twins.get(case, case) for case in cases))
        pair = uuid.uuid4().hex[:12]
        arms = []
        for side, plan in (("base", base_plan), ("new", new_plan)):
            names = {twin.key: case.key for case, twin in twins.items()} if side == "new" else {}
            facts = {
                "label": f"self-test ({side})",
                "gate": {"screening_rounds": rules.rounds},
                "compared_as": names,
                "injections": [to_plain(injection) for injection in injections],
                **({"pair": pair, "side": side} if pairing == "paired" else {}),
            }
            providers = {**request.providers, **{twin.provider: slowed.get(twin.provider) for twin in twins.values()}}
            one = replace(request, plan=plan, providers=providers)
            writer = stack.enter_context(sweeping.opened(one, out, facts, f"self-test-{side}"))
            arms.append(Arm(plan, writer, compared_as=names))
        protocol = Protocol(settings, timeout, anchors=pairing == "stored")
        watch = watcher(arms[0].writer.path.parent, resumable=False)
        if pairing == "paired":
            comparison = compare_rounds(arms, None, [rules], pairing, protocol, watch)[0]
        else:
            watch(
                measure_rounds(arms[:1], range(rules.rounds), protocol), len(cases) * rules.rounds, "measuring the base"
            )
            base = arms[0].side()
            protocol.learn_timers(base)
            comparison = compare_rounds(arms[1:], base, [rules], pairing, protocol, watch)[0]
    table = render_text(comparison).partition("\n")[
        2
    ]  # without the line of the gate's own exit code, which is not this command's
    sys.stdout.write(table.lstrip("\n") + "\n")
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
