"""Rounds of a comparison: one side that is measured against something stored, or two sides in alternating rounds on one device.

Six rounds screen every case; what they flag is measured again in twelve fresh rounds, which alone decide
(analysis/gate/screening.py). Everything is on disk when it is judged, so `compare` reaches the same verdicts from the two runs later.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flashbench.analysis.gate.rules import Pairing, Rules, turns
from flashbench.analysis.gate.stages import first_stage, judge
from flashbench.analysis.gate.verdict import Comparison
from flashbench.records import Case
from flashbench.run.plan import Plan
from flashbench.run.process import OWN, Launch
from flashbench.run.runner import Progress, run_round
from flashbench.run.spare import Spare
from flashbench.store.read import load_run
from flashbench.store.run import RunWriter
from flashbench.store.side import Side, side_of_run

GPU_TIMERS = frozenset({"events", "graph", "profiler"})


@dataclass(frozen=True)
class Arm:
    """One side of a comparison while it is being measured."""

    plan: Plan
    writer: RunWriter
    launch: Launch = OWN
    compared_as: Mapping[str, str] = field(default_factory=dict)
    """Key of a case -> key under which it is compared, where the two sides' providers differ."""
    done: frozenset[tuple[str, int]] = frozenset()
    """Visits that an interrupted run already has."""

    def key(self, case: Case) -> str:
        return self.compared_as.get(case.key, case.key)

    def wants(self, case: Case, number: int, only: Collection[str] | None) -> bool:
        """Whether a round has still to visit a case; `only` holds compared keys, None means all."""
        return (only is None or self.key(case) in only) and (case.key, number) not in self.done

    def visits(self, numbers: Sequence[int], only: Collection[str] | None = None) -> int:
        """How many visits rounds still have."""
        cases = [*self.plan.cases, *(skip.case for skip in self.plan.skips)]
        return sum(self.wants(case, number, only) for case in cases for number in numbers)

    def side(self) -> Side:
        """What has been measured so far, as it stands on the disk."""
        return side_of_run(load_run(self.writer.path))


@dataclass
class Protocol:
    """How rounds are measured, and what the base side has settled for both."""

    settings: dict[str, Any]
    timeout_seconds: float
    anchors: bool
    timers: dict[str, str] = field(default_factory=dict)
    """Method by compared key: the base side's, for both."""

    def learn_timers(self, base: Side) -> None:
        """Take over the methods by which a stored base was timed."""
        for key, rounds in base.cases.items():
            method = next((seen.method for seen in rounds if seen.method in GPU_TIMERS), None)
            if method is not None:
                self.timers[key] = method


def measure_rounds(
    arms: Sequence[Arm], numbers: Sequence[int], protocol: Protocol, only: Collection[str] | None = None
) -> Iterator[Progress]:
    """Measure rounds of one arm, or of a base and a new arm that take turns in going first (ABBA); `only` holds compared keys."""
    turn = [
        (arm, number)
        for number in numbers
        for arm in (arms if len(arms) == 1 or turns(number)[0] == "base" else arms[::-1])
    ]
    with Spare() as spare:
        for i, (arm, number) in enumerate(turn):
            coming = [later.launch for later, _ in turn[i + 1 :]]
            for step in _arm_round(arm, number, protocol, only, spare, coming):
                if arm is arms[0] and len(arms) > 1 and step.row is not None and step.row.timing is not None:
                    method = step.row.timing.method
                    if method in GPU_TIMERS:
                        protocol.timers.setdefault(arm.key(step.case), method)
                yield step


def _arm_round(
    arm: Arm,
    number: int,
    protocol: Protocol,
    only: Collection[str] | None,
    spare: Spare,
    coming: Sequence[Launch],
) -> Iterator[Progress]:
    for skip in arm.plan.skips:
        if arm.wants(skip.case, number, only):
            row = skip.row(number)
            arm.writer.append(row, ())
            yield Progress(skip.case, number, row=row)
    cases = [case for case in arm.plan.order(number) if arm.wants(case, number, only)]
    yield from run_round(
        cases,
        number,
        arm.plan.device,
        arm.writer,
        protocol.settings,
        protocol.timeout_seconds,
        spare,
        coming,
        launch=arm.launch,
        anchors=protocol.anchors,
        timers={case.key: protocol.timers[arm.key(case)] for case in cases if arm.key(case) in protocol.timers},
    )


Watch = Callable[[Iterator[Progress], int, str], None]
"""Draws the progress of so many visits, under a title."""


def compare_rounds(
    arms: Sequence[Arm], base: Side | None, rules: Sequence[Rules], pairing: Pairing, protocol: Protocol, watch: Watch
) -> list[Comparison]:
    """Measure, confirm and judge, once for each metric's rules. `base` is the stored side, or None for the first of two arms."""
    screening_rounds, confirm_rounds = rules[0].rounds, rules[0].confirm_rounds

    def measure(numbers: Sequence[int], only: Collection[str] | None, title: str) -> None:
        visits = sum(arm.visits(numbers, only) for arm in arms)
        if visits:  # none are left of a stage that an interrupted run has finished
            watch(measure_rounds(arms, numbers, protocol, only), visits, title)

    def sides() -> tuple[Side, Side]:
        return (base if base is not None else arms[0].side()), arms[-1].side()

    measure(range(screening_rounds), None, "screening")
    flagged = {key for one in rules for key in first_stage(*sides(), one, pairing, screening_rounds)[0].to_confirm}
    if flagged:
        fresh = range(screening_rounds, screening_rounds + confirm_rounds)
        measure(fresh, flagged, f"measuring {len(flagged)} flagged cases again")
    return [judge(*sides(), one, pairing, screening_rounds) for one in rules]
