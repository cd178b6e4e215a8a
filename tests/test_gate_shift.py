"""The statistics of the gate against scipy, by hand, and by simulation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats

from flashbench.analysis.gate.shift import beyond, decide, holm, paired_shift, smallest_effect, stored_shift, threshold

RNG = np.random.default_rng(4)


def test_the_paired_test_is_students_t() -> None:
    shifts = RNG.normal(0.01, 0.02, (50, 6))
    ours = paired_shift(shifts, alpha=0.05)
    theirs = stats.ttest_1samp(shifts, 0, axis=-1, alternative="greater")
    np.testing.assert_allclose(ours.p_worse, theirs.pvalue)
    interval = stats.ttest_1samp(shifts, 0, axis=-1).confidence_interval(0.90)
    np.testing.assert_allclose((ours.low, ours.high), interval)


def test_without_a_known_session_spread_the_stored_test_is_welchs_with_medians() -> None:
    base, new = RNG.normal(0, 0.02, (50, 6)), RNG.normal(0.01, 0.03, (50, 9))
    ours = stored_shift(base, new, session_sd=0.0, alpha=0.05)
    variance = [side.var(axis=-1, ddof=1) / side.shape[-1] * np.pi / 2 for side in (base, new)]
    np.testing.assert_allclose(ours.se, np.sqrt(variance[0] + variance[1]))
    theirs = stats.ttest_ind(new, base, axis=-1, equal_var=False)
    np.testing.assert_allclose(ours.df, theirs.df)
    np.testing.assert_allclose(ours.centre, np.median(new, axis=-1) - np.median(base, axis=-1))


def test_a_known_session_spread_is_not_averaged_away_by_rounds() -> None:
    base, new = RNG.normal(0, 0.001, 1000), RNG.normal(0, 0.001, 1000)
    shift = stored_shift(base, new, session_sd=0.02, alpha=0.05)
    assert float(shift.se) == pytest.approx(0.02, rel=0.01)
    assert float(shift.high - shift.centre) == pytest.approx(1.645 * 0.02, rel=0.01)


@pytest.mark.parametrize(("value", "p"), [(0.0, 0.5), (0.1, 0.0), (-0.1, 1.0)])
def test_rounds_without_spread_are_decided_by_their_sign(value: float, p: float) -> None:
    assert float(paired_shift(np.full(6, value), 0.05).p_worse) == pytest.approx(p, abs=1e-9)
    assert float(stored_shift(np.zeros(6), np.full(6, value), 0.0, 0.05).p_worse) == pytest.approx(p, abs=1e-9)


def test_a_threshold_is_the_larger_of_the_two_margins() -> None:
    assert threshold(0.02, 0.001, 1.0) == pytest.approx(np.log(1.02))
    level = np.sqrt(0.010 * 0.011)
    assert threshold(0.02, 0.001, level) == pytest.approx(np.log(1.1)), "from 10 to 11 µs is 1 µs exactly"


@given(
    p=hnp.arrays(float, st.tuples(st.integers(1, 4), st.integers(1, 8)), elements=st.floats(0, 1)),
    alpha=st.floats(0.001, 0.2),
    data=st.data(),
)
def test_holm_rejects_what_the_textbook_procedure_rejects(p: np.ndarray, alpha: float, data: st.DataObject) -> None:
    family = data.draw(hnp.arrays(bool, p.shape))
    ours = holm(p, family, alpha)
    for row in range(len(p)):
        members = sorted(np.flatnonzero(family[row]), key=lambda i, row=row: p[row, i])
        rejected = set()
        for step, index in enumerate(members):
            if p[row, index] >= alpha / (len(members) - step):
                break
            rejected.add(index)
        assert set(np.flatnonzero(ours[row])) == rejected


def test_a_flag_stands_only_in_its_own_direction() -> None:
    shift = paired_shift(np.array([[0.05, 0.051, 0.049, 0.05], [-0.05, -0.051, -0.049, -0.05]]), 0.05)
    assert decide(shift, 0.02, np.array([1, -1]), 0.05).tolist() == [1, -1]
    assert decide(shift, 0.02, np.array([-1, 1]), 0.05).tolist() == [0, 0]
    assert decide(shift, 0.02, np.array([0, 0]), 0.05).tolist() == [0, 0]


def test_speed_ups_do_not_weaken_the_search_for_slowdowns() -> None:
    rounds = np.tile(np.array([0.05, 0.01, 0.06, 0.05, 0.02, 0.06]), (41, 1))
    rounds[1:] *= -1
    shift = paired_shift(rounds, 0.05)
    alone = decide(shift, 0.02, np.array([1] + [0] * 40), 0.05)[0]
    among = decide(shift, 0.02, np.array([1] + [-1] * 40), 0.05)[0]
    assert alone == among == 1


@pytest.mark.parametrize("sd", [0.002, 0.006, 0.012])
def test_the_smallest_visible_effect_is_found_about_nine_times_out_of_ten(sd: float) -> None:
    limit, rng = np.log1p(0.02), np.random.default_rng(1)
    noise = rng.normal(0, sd * np.sqrt(2), (20_000, 6))
    typical = float(np.median(smallest_effect(paired_shift(noise, 0.05), limit, 0.05)))
    fresh = rng.normal(0, sd * np.sqrt(2), (20_000, 12)) + np.log1p(typical)
    screened = beyond(paired_shift(noise + np.log1p(typical), 0.05), limit, 0.05)
    found = (screened & beyond(paired_shift(fresh, 0.05), limit, 0.05)).mean()
    assert 0.85 < found < 1.0
