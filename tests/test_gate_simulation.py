"""How often the gate is wrong, by simulation; and that what is simulated is the gate."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from gate_sides import H200, rounds
from scipy import stats

from flashbench.analysis.gate import simulation
from flashbench.analysis.gate.rules import Rules
from flashbench.analysis.gate.screening import conclude, confirm, screen
from flashbench.analysis.gate.simulation import Row, clopper_pearson_upper, simulate, simulate_row
from flashbench.analysis.gate.suites import Decisions, paired_suites, stored_suites
from flashbench.analysis.gate.verdict import Comparison
from flashbench.analysis.gate.worlds import Suite, World, session_effects
from flashbench.store.side import Side

GROUPS, CASES, SUITES = 2, 8, 60
KEYS = [f"flash-v{1 + i * GROUPS // CASES} forward bf16 b1 h16 s{1024 + i} d128" for i in range(CASES)]
NUMBER = {"regression": 1, "improvement": -1}


def random_times(rng: np.random.Generator, count: int, sd: float) -> np.ndarray:
    """Times (suites, cases, rounds) in ms around levels that differ by up to some per cent, on a coarse timer."""
    level = rng.uniform(0.02, 0.5, (1, CASES, 1))
    return np.round(level * np.exp(rng.normal(0, sd, (SUITES, CASES, count))), 4)


def made(times: np.ndarray, first: int = 0, anchors: np.ndarray | None = None) -> Side:
    cases = {key: rounds((float(ms) for ms in row), first) for key, row in zip(KEYS, times, strict=True)}
    gemm = {} if anchors is None else {"gemm": {first + i: float(ms) for i, ms in enumerate(anchors)}}
    return Side(cases, gemm, H200)


def same(comparison: Comparison, decisions: Decisions, suite: int) -> None:
    ours = [NUMBER.get(finding.verdict, 0) for finding in comparison.cases]
    assert ours == decisions.cases[suite].tolist()
    groups = {finding.key: NUMBER.get(finding.verdict, 0) for finding in comparison.groups}
    assert [groups.get(f"flash-v{g + 1} forward", 0) for g in range(GROUPS)] == decisions.groups[suite].tolist()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("confirmed", [True, False])
def test_simulated_ab_decides_as_the_gate_does(seed: int, confirmed: bool) -> None:
    rng, rules = np.random.default_rng(seed), Rules()
    shift = np.exp(
        rng.choice([0.0, 0.0, 0.012, 0.02, 0.03, -0.03], (SUITES, CASES, 1)) + rng.choice([0, 0.012], (SUITES, 1, 1))
    )
    sd = [0.003, 0.01, 0.02][seed % 3]
    base, new = random_times(rng, 6, sd), random_times(rng, 6, sd)
    new = base.mean(axis=-1, keepdims=True) / new.mean(axis=-1, keepdims=True) * new * shift
    fresh = base.mean(axis=-1, keepdims=True) * np.exp(rng.normal(0, sd, (2, SUITES, CASES, 12)))
    fresh[1] *= shift
    decisions = paired_suites((base, new), (fresh[0], fresh[1]) if confirmed else None, GROUPS, rules)
    for suite in range(SUITES):
        first = screen(made(base[suite]), made(new[suite]), rules, "paired")
        if confirmed:
            again = {key for key, flag in zip(KEYS, decisions.flagged[suite], strict=True) if flag}
            assert set(first.to_confirm) == again
            same(confirm(first, made(fresh[0][suite], 6), made(fresh[1][suite], 6)), decisions, suite)
        else:
            same(conclude(first), decisions, suite)
    assert np.abs(decisions.cases).sum() > 20
    assert np.abs(decisions.groups).sum() > 0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("anchored", [True, False])
@pytest.mark.parametrize("confirmed", [True, False])
def test_the_simulated_stored_gate_decides_as_the_gate_does(seed: int, anchored: bool, confirmed: bool) -> None:
    rng, rules = np.random.default_rng(100 + seed), Rules()
    sd = [0.003, 0.012][seed % 2]
    shift = np.exp(
        rng.choice([0.0, 0.0, 0.05, 0.08, 0.15, -0.15], (SUITES, CASES, 1)) + rng.choice([0, 0.03], (SUITES, 1, 1))
    )
    level = rng.uniform(0.05, 0.5, (1, CASES, 1))

    def draw(count: int, moved: np.ndarray | float) -> tuple[np.ndarray, np.ndarray]:
        times = level * moved * np.exp(rng.normal(0, sd, (SUITES, CASES, count)))
        return times, np.repeat(np.exp(rng.normal(0, sd, (SUITES, 1, count))), CASES, axis=1)

    base, new, fresh = draw(6, 1.0), draw(6, shift), draw(12, shift)
    decisions = stored_suites(base, new, fresh if confirmed else None, GROUPS, rules, anchored=anchored)
    for suite in range(SUITES):
        old, today, later = (
            made(times[suite], first, anchors[suite][0] if anchored else None)
            for (times, anchors), first in ((base, 0), (new, 0), (fresh, 6))
        )
        first = screen(old, today, rules, "stored")
        same(confirm(first, None, later) if confirmed else conclude(first), decisions, suite)
    assert np.abs(decisions.cases).sum() > 20


def test_the_upper_bound_is_that_of_clopper_and_pearson() -> None:
    for events, trials in ((0, 10_000), (3, 500), (499, 500)):
        exact = stats.binomtest(events, trials, alternative="less").proportion_ci(0.95, "exact").high
        assert clopper_pearson_upper(events, trials) == pytest.approx(exact)
    assert clopper_pearson_upper(5, 5) == 1.0


def test_without_margins_one_unchanged_case_in_twenty_passes_the_screening_test() -> None:
    rates = simulate("paired", World(0.006, drift=0.0), Suite(), 500, seed=2)
    assert rates.screened == pytest.approx(0.05, abs=0.005)


@pytest.mark.parametrize("correlation", [0.9, 0.5, 0.0])
def test_a_case_moves_with_its_session_and_its_anchor_as_much_as_stated(correlation: float) -> None:
    world = World(session_sd=0.015, anchor_correlation=correlation)
    anchors, cases = session_effects(world, np.array([0, 1]), 50_000, np.random.default_rng(3))
    assert cases.std() == pytest.approx(0.015, rel=0.02)
    for own in (0, 1):
        assert np.corrcoef(anchors[:, own], cases[:, own])[0, 1] == pytest.approx(correlation, abs=0.02)
        assert np.corrcoef(anchors[:, 1 - own], cases[:, own])[0, 1] == pytest.approx(0.0, abs=0.02)


def test_the_same_seed_gives_the_same_row_and_another_seed_another() -> None:
    rows = [simulate("paired", World(0.015, slow=0.1), Suite(), 200, seed) for seed in (1, 1, 2)]
    assert rows[0].measured_again == rows[1].measured_again
    assert rows[0].measured_again != rows[2].measured_again


def test_ab_cries_wolf_in_few_suites_and_finds_3_per_cent() -> None:
    quiet = simulate("paired", World(0.010, slow=0.1), Suite(), 2000, seed=1)
    assert quiet.upper < 0.01
    found = simulate("paired", World(0.006), Suite(slowdown=0.03, slowed=1), 1000, seed=2)
    assert found.found > 0.95


def test_the_stored_gate_cries_wolf_in_few_suites_and_finds_10_per_cent() -> None:
    quiet = simulate("stored", World(0.010, slow=0.1), Suite(30, 3), 2000, seed=1)
    assert quiet.upper < 0.02
    found = simulate("stored", World(0.010, slow=0.1), Suite(30, 3, 0.10, 1), 1000, seed=2)
    assert found.found > 0.95


def test_a_stored_gate_whose_anchors_say_nothing_cries_wolf() -> None:
    # The simulation can fail: with uncorrelated anchors the promise does not hold, and the table says so.
    assert simulate("stored", World(0.010, slow=0.1, anchor_correlation=0.0), Suite(30, 3), 400, seed=1).upper > 0.3


def test_the_simulation_is_a_command_that_prints_both_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-m", "flashbench.analysis.gate.simulation", "--suites", "3", "--seed", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    tables = [line for line in done.stdout.splitlines() if line.startswith("|") and "---" not in line]
    assert len(tables) == 2 + len(simulation.PAIRED_ROWS) + len(simulation.STORED_ROWS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pairing", "row"),
    [("paired", row) for row in simulation.PAIRED_ROWS] + [("stored", row) for row in simulation.STORED_ROWS],
)
def test_every_promise_of_the_documented_table_holds(pairing: str, row: Row) -> None:
    if row.most_false_alarms is None and row.least_found is None:
        pytest.skip("the table shows this row, the gate promises nothing there")
    unchanged, found, _ = simulate_row("paired" if pairing == "paired" else "stored", row, 10_000, seed=1)
    assert simulation.kept(row, unchanged, found), (unchanged, found)
