"""What `ab` does once its options are parsed: two sides, one device, alternating rounds, one verdict; and its self-test."""

from __future__ import annotations

import contextlib
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from flashbench.analysis.gate.rules import Rules
from flashbench.cli import sweeping
from flashbench.cli.gating import announced, confirm_rounds_of, measuring, rules_of, stages_of, watcher
from flashbench.cli.pairs import SIDES
from flashbench.cli.verdicts import Reports, publish
from flashbench.errors import StoreError, UsageError
from flashbench.records import Case
from flashbench.store.read import Run

if TYPE_CHECKING:
    from flashbench.cli.sweeping import Request
    from flashbench.run.process import Launch
    from flashbench.run.rounds import Arm


@dataclass(frozen=True, slots=True)
class Variants:
    """In what the two sides differ; each a pair of base and new."""

    refs: tuple[str | None, str | None] = (None, None)
    """Git revisions; the new one may be left out and is then the working tree."""
    pythons: tuple[str | None, str | None] = (None, None)
    providers: tuple[str | None, str | None] = (None, None)

    def check(self) -> None:
        """UsageError unless there is a difference to look for."""
        if self.refs[0] is None and self.refs[1] is not None:
            raise UsageError("--new needs --base, the revision to compare with")
        for name, (base, new) in (("python", self.pythons), ("provider", self.providers)):
            if (base is None) != (new is None):
                missing = "base" if base is None else "new"
                raise UsageError(f"--{missing}-{name} is missing; give both, --base-{name} and --new-{name}")
        if self.refs[0] is None and self.pythons[0] is None and self.providers[0] is None:
            raise UsageError(
                "nothing to compare: give --base REF, or --base-python and --new-python, or --base-provider and "
                "--new-provider (A against A is `flashbench calibrate`)"
            )
        for provider in self.providers:
            if provider is not None and self.refs[0] is not None and provider.startswith("/"):
                raise UsageError(f"'{provider}': name the file relative to here, so that each revision's own is taken")


def run_ab(
    path: Path | None,
    options: Mapping[str, str],
    variants: Variants,
    *,
    out: Path,
    confirm_rounds: int | None,
    reports: Reports,
    dry_run: bool,
) -> int:
    """Measure both sides in alternating rounds, judge, and return the exit code."""
    variants.check()
    reports.check()
    requests = [_request(path, options, provider) for provider in variants.providers]
    rules = rules_of(requests[1].config, confirm_rounds)
    if dry_run:
        for side, request in zip(SIDES, requests, strict=True):
            print(f"{side}:")
            sweeping.print_plan(_with_rounds(request, rules))
        return 0
    for note in dict.fromkeys(note for request in requests for note in request.notes):
        print(f"note: {note}", file=sys.stderr)
    rules = [one.narrowed(_keys(requests[1])) if requests[1].config.narrowed else one for one in rules]
    for one in rules:
        one.check_globs(_keys(requests[1]))
    return _measured(requests, rules, variants, out, reports)


def resume_ab(base: Run, new: Run, reports: Reports) -> int:
    """Go on with an interrupted `ab`: measure what is missing on either side, judge, and return the exit code."""
    reports.check()
    before, after = (run.header.get("variant") for run in (base, new))
    if not isinstance(before, dict) or not isinstance(after, dict):
        raise StoreError(f"'{base.path}': its run.json does not say what its sides are; start a new `ab`")
    variants = Variants((before.get("ref"), after.get("ref")), (before.get("python"), after.get("python")))
    if variants.refs[0] is not None and variants.refs[1] is None:
        print("note: the new side is the working tree as it is now", file=sys.stderr)
    requests = [announced(sweeping.resumed(run.path)) for run in (base, new)]
    rules = [one.narrowed(_keys(requests[1])) for one in rules_of(requests[1].config, confirm_rounds_of(new.header))]
    return _measured(requests, rules, variants, base.path, reports)


def _measured(
    requests: Sequence[Request], rules: Sequence[Rules], variants: Variants, out: Path, reports: Reports
) -> int:
    """Measure in turns what the requests still lack, judge and report."""
    from flashbench.run.rounds import Protocol, compare_rounds

    names = _names(requests)
    with contextlib.ExitStack() as stack:
        stack.enter_context(measuring(requests[0]))
        pair = uuid.uuid4().hex[:12]
        arms = []
        for number, (label, launch) in enumerate(_launches(variants, stack)):
            request = _launched(_with_rounds(requests[number], rules), launch)
            facts = {
                "label": f"{label} ({SIDES[number]})",
                "pair": pair,
                "side": SIDES[number],
                "variant": _variant(variants, number),
                "gate": stages_of(rules[0]),
                "compared_as": names if number == 0 else {},
            }
            arms.append(_arm(request, out, facts, f"{request.config.name}-{SIDES[number]}", launch, stack))
        protocol = Protocol(
            sweeping.settings_of(requests[0]), requests[0].config.measure.timeout_seconds, anchors=False
        )
        protocol.learn_timers(arms[0].side())
        comparisons = compare_rounds(arms, None, rules, "paired", protocol, watcher(arms[0].writer.path))
    code = publish([replace(c, notes=(*c.notes, *_measuring_notes(variants))) for c in comparisons], reports)
    base, new = (arm.writer.path for arm in arms)
    print(f"{base}\n{new}\nagain, without measuring: flashbench compare {base} {new}", file=sys.stderr)
    return code


def _variant(variants: Variants, number: int) -> dict[str, str | None]:
    """What `--resume` needs to make this side again: a commit, because a branch moves on."""
    from flashbench.run.checkout import commit_of

    ref = variants.refs[number]
    commit = None if ref is None else commit_of(ref, f"--{SIDES[number]}")
    return {"ref": commit, "python": variants.pythons[number]}


def _request(path: Path | None, options: Mapping[str, str], provider: str | None) -> Request:
    if provider is not None and "provider" in options:
        raise UsageError("--provider cannot be given with --base-provider and --new-provider")
    return sweeping.requested(path, {**options, "provider": provider} if provider is not None else options)


def _with_rounds(request: Request, rules: Sequence[Rules]) -> Request:
    return replace(request, plan=replace(request.plan, rounds=rules[0].rounds))


def _keys(request: Request) -> list[str]:
    return [case.key for case in _cases(request)]


def _cases(request: Request) -> list[Case]:
    return [*request.plan.cases, *(skip.case for skip in request.plan.skips)]


def _names(requests: Sequence[Request]) -> dict[str, str]:
    """Key of a base case -> key of the new side's case on the same problem, where their providers differ."""
    base, new = (_cases(request) for request in requests)
    by_problem = {case.problem: case.key for case in new}
    if len(by_problem) < len(new):  # several providers: the same ones on both sides
        return {}
    return {
        case.key: by_problem[case.problem]
        for case in base
        if case.problem in by_problem and case.key != by_problem[case.problem]
    }


def _launches(variants: Variants, stack: contextlib.ExitStack) -> list[tuple[str, Launch]]:
    """Label and launch of both sides; worktrees live as long as the stack."""
    from flashbench.run.checkout import checked_out
    from flashbench.run.process import OWN

    found = []
    for side, ref, python, provider in zip(SIDES, variants.refs, variants.pythons, variants.providers, strict=True):
        words, launch = [], OWN
        if variants.refs[0] is not None:
            checkout = stack.enter_context(checked_out(ref, f"--{side}"))
            words.append(checkout.label)
            launch = checkout.launch(python or OWN.python)
        elif python is not None:
            launch = replace(OWN, python=python)
        words += [word for word in (python, provider) if word is not None]
        found.append((", ".join(words), launch))
    return found


def _launched(request: Request, launch: Launch) -> Request:
    """The request on the device as this launch's interpreter sees it. What cannot run there, its own table of providers says."""
    from flashbench.run.devices import ask_device
    from flashbench.run.process import OWN

    if launch == OWN:
        return request
    device = ask_device(request.plan.device.uuid or request.plan.device.kind, launch)
    plan = request.plan
    skips = tuple(skip for skip in plan.skips if skip.status == "oom")
    asked = tuple(skip.case for skip in plan.skips if skip.status != "oom")
    return replace(request, plan=replace(plan, device=device, cases=(*plan.cases, *asked), skips=skips))


def _arm(
    request: Request, out: Path, facts: Mapping[str, object], name: str, launch: Launch, stack: contextlib.ExitStack
) -> Arm:
    from flashbench.run.rounds import Arm

    writer = stack.enter_context(sweeping.opened(request, out, facts, name))
    names = facts.get("compared_as")
    return Arm(request.plan, writer, launch, names if isinstance(names, dict) else {}, request.done)


def _measuring_notes(variants: Variants) -> list[str]:
    """Two revisions that also measure differently: a change may come from there."""
    from flashbench.run.checkout import measuring_differences

    if variants.refs[0] is None:
        return []
    files = measuring_differences(variants.refs[0], variants.refs[1])
    told = ", ".join(files[:3]) + (f" and {len(files) - 3} more" if len(files) > 3 else "")
    return [f"the two revisions also measure differently ({told}): a change may come from there"] if files else []
