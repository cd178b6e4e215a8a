"""Judging two sides whose rounds are all there: the screening's and the fresh ones, live or read from a disk, by the same function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flashbench.analysis.gate.rules import Pairing, Rules
from flashbench.analysis.gate.screening import Screening, conclude, confirm, screen
from flashbench.analysis.gate.verdict import Comparison, outcome
from flashbench.model.flops import useful_flops
from flashbench.records import Case
from flashbench.store.side import Side, staged, with_tflops


def first_stage(
    base: Side, new: Side, rules: Rules, pairing: Pairing, screening_rounds: int | None
) -> tuple[Screening, Side | None, Side]:
    """The screening, and the sides that hold the fresh rounds. Between sessions the stored rounds are the base of both stages."""
    if rules.metric.name == "tflops":
        base, new = _with_rates(base), _with_rates(new)
    first, fresh = staged(new, screening_rounds)
    if pairing == "stored":
        return screen(base, first, rules, pairing), None, fresh
    base_first, base_fresh = staged(base, screening_rounds)
    return screen(base_first, first, rules, pairing), base_fresh, fresh


def judge(base: Side, new: Side, rules: Rules, pairing: Pairing, screening_rounds: int | None = None) -> Comparison:
    """The verdicts. Rounds from `screening_rounds` on are fresh ones, which confirm if they hold every case that the screening flags."""
    screening, fresh_base, fresh = first_stage(base, new, rules, pairing, screening_rounds)
    wanted = set(screening.to_confirm)
    if not wanted or not fresh.cases:
        return conclude(screening)
    comparison = confirm(screening, fresh_base, fresh) if wanted <= fresh.cases.keys() else conclude(screening)
    fewest = min(_repeats(key, fresh_base, fresh) for key in wanted)
    if fewest >= rules.confirm_rounds:
        return comparison
    decide = "these alone decide" if fewest else "the first rounds alone decide"
    note = f"the confirmation is not finished: {fewest} of {rules.confirm_rounds} fresh rounds are there, and {decide}"
    return replace(comparison, notes=(*comparison.notes, note))


def _repeats(key: str, base: Side | None, new: Side) -> int:
    """Fresh rounds of a case, pairs where the base has fresh rounds too."""
    sides = (new,) if base is None else (base, new)
    return len(set.intersection(*({seen.round for seen in side.cases.get(key, ())} for side in sides)))


def overall(comparisons: Sequence[Comparison]) -> tuple[int, str]:
    """Exit code and line over the metrics: 4 before 1 before 3 before 0."""
    found = [outcome(comparison) for comparison in comparisons]
    order = (4, 1, 3, 0)
    return min(found, key=lambda item: order.index(item[0]))


def _with_rates(side: Side) -> Side:
    def work(key: str) -> float:
        case = Case.from_key(key)
        return useful_flops(case.problem, case.provider)  # a product alone is called as its algorithm is

    return with_tflops(side, work)
