"""How often the gate is wrong: whole suites drawn from a stated model of noise and judged by the gate's own functions.

    python -m flashbench.analysis.gate.simulation --suites 10000

prints the tables of docs/gate.md. `worlds` holds the models of noise and draws from them, `suites` judges.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flashbench.analysis.gate.rules import Pairing, Rules
from flashbench.analysis.gate.worlds import Suite, World, draw_paired, draw_stored


@dataclass(frozen=True, slots=True)
class Rates:
    """What a simulated row says; every rate is a fraction."""

    suites: int
    false_alarms: int
    """Suites in which a case or group without any slowdown was called a regression."""
    found: float
    """Slowed cases that were called a regression; NaN where none was slowed."""
    group_found: float
    """Groups that were called a regression."""
    measured_again: float
    """Cases per suite."""
    screened: float
    """Unchanged cases with p < alpha in the screening."""
    inconclusive: float

    @property
    def upper(self) -> float:
        """Upper 95 % bound of the rate of suites with a false alarm."""
        return clopper_pearson_upper(self.false_alarms, self.suites)


def clopper_pearson_upper(events: int, trials: int, confidence: float = 0.95) -> float:
    """One-sided exact upper bound of a binomial rate (Clopper and Pearson 1934)."""
    from scipy.stats import beta

    return 1.0 if events >= trials else float(beta.ppf(confidence, events + 1, trials - events))


def simulate(
    pairing: Pairing,
    world: World,
    suite: Suite,
    suites: int,
    seed: int,
    rules: Rules | None = None,
    *,
    anchored: bool = True,
    confirmed: bool = True,
) -> Rates:
    """The rates of one row; the same seed gives the same row. A group with a slowed case in it is no false alarm."""
    import numpy as np

    rules = rules or Rules()
    rng = np.random.default_rng(seed)
    if pairing == "paired":
        chunks = draw_paired(world, suite, rules, suites, rng)
    else:
        chunks = draw_stored(world, suite, rules, suites, rng, anchored=anchored, confirmed=confirmed)
    slowed = suite.slowed
    clean_groups = -(-slowed * suite.groups // suite.cases)
    total = 0
    sums = np.zeros(6)
    for made in chunks:
        total += len(made.cases)
        false = (made.cases[:, slowed:] > 0).any(axis=1) | (made.groups[:, clean_groups:] > 0).any(axis=1)
        sums += [
            false.sum(),
            (made.cases[:, :slowed] > 0).mean(axis=1).sum() if slowed else np.nan,
            (made.groups > 0).mean(axis=1).sum(),
            made.flagged.sum(),
            made.screened[:, slowed:].mean(axis=1).sum() if slowed < suite.cases else np.nan,
            made.inconclusive.mean(axis=1).sum(),
        ]
    rates = sums / total
    return Rates(total, int(sums[0]), *(float(rate) for rate in rates[1:]))


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table: a world, and what the gate promises there."""

    world: World
    note: str = ""
    anchored: bool = True
    confirmed: bool = True
    most_false_alarms: float | None = None
    """The upper 95 % bound must not exceed it."""
    least_found: tuple[float, float] | None = None
    """(slowdown, share of slowed cases that must be found)."""


PAIRED_SUITE = Suite(cases=100, groups=5)
STORED_SUITE = Suite(cases=30, groups=3)
PAIRED_EFFECTS = (0.02, 0.03, 0.05)
STORED_EFFECTS = (0.07, 0.10, 0.15)
PAIRED_SHIFT, STORED_SHIFT = 0.015, 0.05
"""Slowdowns of every case at once."""

SLOW = 0.1
PAIRED_ROWS = (
    Row(World(0.003), most_false_alarms=0.01),
    Row(World(0.003, slow=SLOW), most_false_alarms=0.01),
    Row(World(0.006), most_false_alarms=0.01, least_found=(0.03, 0.9)),
    Row(World(0.006, slow=SLOW), most_false_alarms=0.01, least_found=(0.03, 0.9)),
    Row(World(0.006, slow=SLOW, slow_whole=True), "mode of the whole process", most_false_alarms=0.01),
    Row(World(0.006, quantum_ms=1e-3), "timer quantum 1 µs", most_false_alarms=0.01, least_found=(0.03, 0.9)),
    Row(World(0.006, drift=0.05), "drift 5 %", most_false_alarms=0.01, least_found=(0.03, 0.9)),
    Row(World(0.010), most_false_alarms=0.01),
    Row(World(0.010, slow=SLOW), most_false_alarms=0.01),
    Row(World(0.010, slow=SLOW, slow_whole=True), "mode of the whole process", most_false_alarms=0.01),
    Row(World(0.010, slow=SLOW, common=0.5), "half of the variance common", most_false_alarms=0.01),
    Row(World(0.010, common=1.0), "all of the variance common", most_false_alarms=0.01),
    Row(World(0.010, slow=SLOW, quantum_ms=1e-3), "timer quantum 1 µs", most_false_alarms=0.01),
    Row(World(0.010, slow=SLOW, drift=0.05), "drift 5 %", most_false_alarms=0.01),
    Row(World(0.015), most_false_alarms=0.02),
    Row(World(0.015, slow=SLOW), most_false_alarms=0.02),
    Row(World(0.015, slow=SLOW, slow_whole=True), "mode of the whole process", most_false_alarms=0.02),
    Row(World(0.025)),
    Row(World(0.025, slow=SLOW)),
)
STORED_ROWS = (
    Row(World(0.003), most_false_alarms=0.05, least_found=(0.10, 0.9)),
    Row(World(0.006), most_false_alarms=0.05, least_found=(0.10, 0.9)),
    Row(World(0.006, slow=SLOW), most_false_alarms=0.05, least_found=(0.10, 0.9)),
    Row(World(0.010), most_false_alarms=0.05, least_found=(0.10, 0.9)),
    Row(World(0.010, slow=SLOW), most_false_alarms=0.05, least_found=(0.10, 0.9)),
    Row(
        World(0.010, slow=SLOW, slow_whole=True),
        "mode of the whole process",
        most_false_alarms=0.05,
        least_found=(0.10, 0.9),
    ),
    Row(
        World(0.010, slow=SLOW, quantum_ms=1e-3), "timer quantum 1 µs", most_false_alarms=0.05, least_found=(0.10, 0.9)
    ),
    Row(World(0.010, slow=SLOW, drift=0.05), "drift 5 %", most_false_alarms=0.05, least_found=(0.10, 0.9)),
    Row(World(0.010, slow=SLOW), "no fresh rounds (`compare`)", confirmed=False),
    Row(World(0.010, slow=SLOW, anchor_correlation=0.95)),
    Row(World(0.010, slow=SLOW, anchor_correlation=0.8)),
    Row(World(0.010, slow=SLOW, anchor_correlation=0.7)),
    Row(World(0.010, slow=SLOW, anchor_correlation=0.5)),
    Row(World(0.010, slow=SLOW, anchor_correlation=0.0)),
    Row(World(0.010, slow=SLOW), "no anchors, margin 8 %", anchored=False),
    Row(World(0.015, slow=SLOW)),
    Row(World(0.025, slow=SLOW)),
)


def simulate_row(pairing: Pairing, row: Row, suites: int, seed: int) -> tuple[Rates, dict[float, Rates], Rates]:
    """Three kinds of suites: nothing slowed, one case slowed (by effect), and all cases slowed a little."""
    base = PAIRED_SUITE if pairing == "paired" else STORED_SUITE
    effects, shift = (PAIRED_EFFECTS, PAIRED_SHIFT) if pairing == "paired" else (STORED_EFFECTS, STORED_SHIFT)

    def run(slowdown: float, slowed: int) -> Rates:
        suite = Suite(base.cases, base.groups, slowdown, slowed)
        return simulate(pairing, row.world, suite, suites, seed, anchored=row.anchored, confirmed=row.confirmed)

    return run(0.0, 0), {effect: run(effect, 1) for effect in effects}, run(shift, base.cases)


def kept(row: Row, unchanged: Rates, found: dict[float, Rates]) -> bool:
    """Whether the row's promises hold."""
    quiet = row.most_false_alarms is None or unchanged.upper <= row.most_false_alarms
    return quiet and (row.least_found is None or found[row.least_found[0]].found >= row.least_found[1])


def table(pairing: Pairing, suites: int, seed: int) -> Iterator[str]:
    """The lines of one Markdown table, as they come; a row takes some seconds per 10,000 suites."""
    paired = pairing == "paired"
    effects, shift = (PAIRED_EFFECTS, PAIRED_SHIFT) if paired else (STORED_EFFECTS, STORED_SHIFT)
    names = ["process sd", "slow mode"] + ([] if paired else ["anchor correlation"]) + ["also"]
    names += ["suites with a false alarm", "upper 95 % bound"]
    names += [f"finds {100 * effect:g} %" for effect in effects]
    names += [f"{100 * shift:g} % across the board", "cases measured again", "p < 5 % alone", "inconclusive", "promise"]
    yield "| " + " | ".join(names) + " |"
    yield "|" + "---|" * len(names)
    for row in PAIRED_ROWS if paired else STORED_ROWS:
        unchanged, found, across = simulate_row(pairing, row, suites, seed)
        cells = [f"{100 * row.world.process_sd:.1f} %", f"{100 * row.world.slow:g} %" if row.world.slow else ""]
        if not paired:
            cells.append(f"{row.world.anchor_correlation:g}" if row.anchored else "")
        promised = row.most_false_alarms is not None or row.least_found is not None
        cells += [
            row.note,
            f"{unchanged.false_alarms} of {unchanged.suites}",
            f"{100 * unchanged.upper:.2f} %",
            *(f"{100 * found[effect].found:.1f} %" for effect in effects),
            f"{100 * across.group_found:.1f} %",
            f"{unchanged.measured_again:.1f}",
            f"{100 * unchanged.screened:.1f} %",
            f"{100 * unchanged.inconclusive:.1f} %",
            ("kept" if kept(row, unchanged, found) else "BROKEN") if promised else "none",
        ]
        yield "| " + " | ".join(cells) + " |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables; exit code 1 would mean a regression, so a broken promise is shown in its row only."""
    parser = argparse.ArgumentParser(
        prog="flashbench.analysis.gate.simulation", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--suites", type=int, default=10_000, help="suites a row (default: 10000)")
    parser.add_argument("--seed", type=int, default=1, help="of the random numbers (default: 1)")
    parser.add_argument("--only", choices=("paired", "stored"), help="one of the two tables")
    chosen = parser.parse_args(arguments)
    pairings: tuple[Pairing, ...] = ("paired", "stored")
    for pairing in pairings:
        if chosen.only in (None, pairing):
            suite = PAIRED_SUITE if pairing == "paired" else STORED_SUITE
            sys.stdout.write(
                f"{pairing}: suites of {suite.cases} cases in {suite.groups} groups, seed {chosen.seed}\n\n"
            )
            for line in table(pairing, chosen.suites, chosen.seed):
                sys.stdout.write(line + "\n")
                sys.stdout.flush()
            sys.stdout.write("\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
