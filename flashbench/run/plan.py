"""What a sweep will do, before anything runs: the cases, those that cannot run with their reasons, rounds, time and memory."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flashbench.model.flops import useful_flops
from flashbench.model.memory import footprint, oom_reason
from flashbench.providers.spec import Provider
from flashbench.records import Case, Device, Problem, Row


@dataclass(frozen=True, slots=True)
class Skip:
    """A case that is not sent to the device: unsupported, or predicted to run out of memory."""

    case: Case
    status: str
    reason: str

    def row(self, round_index: int) -> Row:
        return Row(self.case, round_index, self.status, self.reason)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Plan:
    """Cases in the order listed, skips, and how often the whole is visited."""

    device: Device
    cases: tuple[Case, ...]
    skips: tuple[Skip, ...]
    rounds: int
    seed: int

    def order(self, round_index: int) -> list[Case]:
        """Cases of one round. With several rounds, problems are shuffled and providers inside a problem too, by a seed."""
        if self.rounds == 1:
            return list(self.cases)
        shuffle = random.Random(f"{self.seed} {round_index}").shuffle
        by_problem: dict[Problem, list[Case]] = {}
        for case in self.cases:
            by_problem.setdefault(case.problem, []).append(case)
        problems = list(by_problem.values())
        shuffle(problems)
        for cases in problems:
            shuffle(cases)
        return [case for cases in problems for case in cases]


def make_plan(cases: Sequence[Case], providers: Mapping[str, Provider], device: Device, rounds: int, seed: int) -> Plan:
    """Sort cases into those that will run and those that cannot."""
    runnable: list[Case] = []
    skips: list[Skip] = []
    for case in cases:
        provider = providers[case.provider]
        reason = provider.unsupported(case.problem, device)
        if reason:
            skips.append(Skip(case, "unsupported", reason))
            continue
        too_much = oom_reason(footprint(provider.algorithm, case.problem, provider.schedule), device)
        if too_much:
            skips.append(Skip(case, "oom", too_much))
        else:
            runnable.append(case)
    return Plan(device, tuple(runnable), tuple(skips), rounds, seed)


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a plan will cost: wall time as a typical and a longest figure, and the largest case's memory."""

    seconds: float
    longest_seconds: float
    memory_bytes: int


REFERENCE_FLOPS = {"cpu": 2e10, "cuda": 1e13}
"""Rough rate of the float64 reference and its companion in the case's dtype."""
OVERHEAD_SECONDS = {"cpu": 0.15, "cuda": 0.5}
"""Binding, first call, check and memory pass of an already compiled case."""
WORKER_SECONDS = 6.0


def estimate(plan: Plan, providers: Mapping[str, Provider], max_seconds: float, warmup_seconds: float) -> Estimate:
    """Time and memory of a plan; good to a factor of two, and worth knowing before a night's run."""
    kind = plan.device.kind
    fixed = OVERHEAD_SECONDS[kind] + warmup_seconds
    references = sum(2 * useful_flops(p) / REFERENCE_FLOPS[kind] for p in {c.problem for c in plan.cases})
    typical = WORKER_SECONDS + references + len(plan.cases) * (fixed + 0.3 * max_seconds)
    longest = WORKER_SECONDS + references + len(plan.cases) * (fixed + warmup_seconds * 3 + max_seconds)
    used = ((providers[c.provider], c.problem) for c in plan.cases)
    memory = max((footprint(p.algorithm, problem, p.schedule).total for p, problem in used), default=0)
    return Estimate(plan.rounds * typical, plan.rounds * longest, memory)
