"""A against A: the rates that a campaign shows, and the margins that come of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from gate_sides import A, B, C, noisy, rounds, side
from hypothesis import given
from hypothesis import strategies as st

from flashbench.analysis.gate.noise import (
    Campaign,
    campaign_of,
    noise_model,
    overrides_of,
    split_pairs,
)
from flashbench.analysis.gate.rules import Rules
from flashbench.errors import StoreError, UsageError
from flashbench.store.read import load_run
from flashbench.store.side import side_of_run


def campaign(sd: float, cases: int = 30, count: int = 24, seed: int = 0, drift: float = 0.0) -> Campaign:
    rng = np.random.default_rng(seed)
    times = np.exp(rng.normal(0, sd, (cases, count)) + drift * np.arange(count) / count)
    return Campaign(tuple(f"naive forward fp32 b1 h1 s{i + 1} d64" for i in range(cases)), times)


@given(count=st.integers(12, 40), pairs=st.integers(1, 6), seed=st.integers(0, 1000))
def test_a_split_pairs_neighbours_uses_no_round_twice_and_takes_turns(count: int, pairs: int, seed: int) -> None:
    base, new = split_pairs(count, pairs, 20, np.random.default_rng(seed))
    assert (np.abs(base - new) == 1).all()
    assert ((base // 2) == (new // 2)).all()
    assert max(base.max(), new.max()) < count
    for first, second in zip(base, new, strict=True):
        assert len({*first, *second}) == 2 * pairs
        assert (np.diff(first < second) != 0).all()


def test_a_campaign_too_short_for_one_screening_is_refused() -> None:
    with pytest.raises(UsageError, match="record at least 12 rounds"):
        noise_model(campaign(0.01, count=10), Rules())


def test_the_screening_rate_of_a_normal_machine_is_the_nominal_one() -> None:
    covered = 0
    for seed in range(40):
        model = noise_model(campaign(0.006, seed=seed), Rules(), seed=seed)
        covered += model.screening.low <= model.simulated <= model.screening.high
        assert model.simulated == pytest.approx(0.05, abs=0.003)
    assert covered >= 34  # a 95 % interval misses two of forty; binomial P(< 34) is 0.3 %


def test_the_simulated_rate_is_that_of_the_drift_that_was_measured() -> None:
    # Half a process sd from one visit to the next: it widens the spread of the pairs, whose sides take turns in paying for it.
    drifting = noise_model(campaign(0.006, drift=24 * 0.003), Rules())
    assert drifting.drift == pytest.approx(12 * 0.003, rel=0.1)
    assert drifting.simulated < 0.045


def test_two_cases_are_enough_for_a_simulated_rate() -> None:
    assert noise_model(campaign(0.006, cases=2), Rules()).simulated == pytest.approx(0.05, abs=0.01)


def test_a_quiet_machine_keeps_the_default_margins() -> None:
    model = noise_model(campaign(0.002), Rules())
    assert {case.margin for case in model.cases} == {0.02}
    assert overrides_of(model, Rules()) == {}
    assert model.confirmed is not None
    assert model.confirmed.value == 0.0
    assert all(case.smallest_effect < 0.025 for case in model.cases)


def test_a_noisy_case_gets_a_margin_that_none_of_its_splits_exceeds() -> None:
    quiet = campaign(0.002)
    times = quiet.times_ms.copy()
    times[3] = np.exp(np.random.default_rng(9).normal(0, 0.03, 24))
    model = noise_model(Campaign(quiet.keys, times), Rules())
    assert list(overrides_of(model, Rules())) == [quiet.keys[3]]
    assert model.cases[3].margin > model.cases[3].worst_shift > 0.02
    again = dataclasses.replace(Rules(), overrides=overrides_of(model, Rules()))
    assert noise_model(Campaign(quiet.keys, times), again).flagged.value == 0.0


def test_the_smallest_visible_slowdown_is_that_of_one_screening_and_not_of_the_whole_campaign() -> None:
    rules = Rules(margin=0.05)  # wide enough that no case asks for more
    long = noise_model(campaign(0.01, count=120), rules)
    short = noise_model(campaign(0.01, count=12), rules)
    assert {case.margin for case in (*long.cases, *short.cases)} == {0.05}
    effects = [np.median([case.smallest_effect for case in model.cases]) for model in (long, short)]
    assert effects[0] == pytest.approx(effects[1], rel=0.05)
    assert effects[0] > 0.06


def test_the_process_spread_is_measured_whatever_the_drift() -> None:
    model = noise_model(campaign(0.004, count=200, drift=0.2), Rules())
    assert np.median([case.process_sd for case in model.cases]) == pytest.approx(0.004, rel=0.1)


def test_without_rounds_for_both_stages_the_confirmed_rate_is_not_invented() -> None:
    assert noise_model(campaign(0.006, count=18), Rules()).confirmed is None


RECORD = Path(__file__).parents[1] / "results" / "reference" / "h200-sxm-141gb" / "20261130T010250Z-ci"


def test_the_recorded_campaign_of_an_h200_shows_the_rates_that_are_simulated() -> None:
    # The figures of docs/gate.md, "On a real GPU".
    model = noise_model(campaign_of(side_of_run(load_run(RECORD, strict=True)), Rules()), Rules())
    assert (len(model.cases), model.rounds, model.left_out) == (30, 24, ())
    assert model.screening.low < model.simulated < model.screening.high
    assert model.confirmed is not None
    assert (model.flagged.value, model.confirmed.value) == (0.0, 0.0)
    assert max(case.process_sd for case in model.cases) < 0.003


def test_a_case_that_failed_in_one_round_is_left_out_and_named() -> None:
    broken = list(rounds(noisy(1.0, 12)))
    broken[4] = dataclasses.replace(broken[4], status="crashed", median_ms=None)
    found = campaign_of(side({A: noisy(1.0, 12), B: tuple(broken), C: noisy(3.0, 12)}), Rules())
    assert found.keys == (A, C)
    assert found.left_out == (B,)
    assert found.times_ms.shape == (2, 12)


def test_a_campaign_without_a_complete_case_is_an_error() -> None:
    with pytest.raises(StoreError, match="no case was ok in every round"):
        campaign_of(side({A: [1.0, None, 1.0]}), Rules())
