"""Statistics of times: intervals that keep their promise, and no number where there are too few samples."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flashbench.analysis.statistics import (
    bimodal,
    median,
    median_interval,
    median_rank,
    over_rounds,
    quantile,
    relative_width,
    spread,
)

times = st.lists(st.floats(1e-3, 1e4), min_size=1, max_size=200)


def test_importing_needs_no_numpy_scipy_or_pandas() -> None:
    code = "import sys, flashbench.analysis.statistics; print({'numpy', 'scipy', 'pandas'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"


@pytest.mark.parametrize("statistic", [spread, median_interval, relative_width])
def test_one_sample_has_no_spread_and_no_interval(statistic) -> None:
    # TI-06: never 0, which reads as perfect
    assert statistic([1.0]) is None


@pytest.mark.parametrize("statistic", [median, spread, median_interval, relative_width, lambda s: quantile(s, 0.2)])
def test_no_samples_have_no_statistics(statistic) -> None:
    # TI-06
    assert statistic([]) is None


def test_no_samples_are_not_two_modes() -> None:
    assert bimodal([]) is False


@pytest.mark.parametrize("medians", [[], [1.0]])
def test_fewer_than_two_rounds_have_no_standard_deviation(medians: list[float]) -> None:
    assert over_rounds(medians)[1] is None


def test_the_deviation_over_rounds_is_that_of_a_round_not_of_the_mean() -> None:
    center, deviation = over_rounds([1.0, 2.0, 3.0])
    assert (center, deviation) == (2.0, 1.0)


def test_equal_samples_have_zero_spread_and_a_closed_interval() -> None:
    # GA-15: zero variance gives zero, no NaN and no division by it
    assert spread([2.0] * 10) == 0.0
    assert median_interval([2.0] * 10) == (2.0, 2.0)
    assert relative_width([2.0] * 10) == 0.0


@given(times, st.floats(0, 1))
def test_quantiles_are_those_of_numpy(samples: list[float], share: float) -> None:
    assert quantile(samples, share) == pytest.approx(np.quantile(samples, share), rel=1e-9)


@given(times)
def test_the_interval_holds_the_median_and_is_made_of_samples(samples: list[float]) -> None:
    interval = median_interval(samples)
    if interval is None:
        assert len(samples) < 6
        return
    center = median(samples)
    assert center is not None
    assert interval[0] <= center <= interval[1]
    assert set(interval) <= set(samples)


@example([9333.5, 0.001, 0.001], 2.5)
@given(times, st.floats(0.1, 10))
def test_a_change_of_unit_changes_no_relative_figure(samples: list[float], factor: float) -> None:
    scaled = [factor * sample for sample in samples]
    for statistic in (spread, relative_width):
        assert statistic(scaled) == (
            None if statistic(samples) is None else pytest.approx(statistic(samples), rel=1e-9, abs=1e-9)
        )


@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.99])
@pytest.mark.parametrize("count", [1, 2, 5, 6, 7, 8, 20, 21, 100, 999, 1000])
def test_the_rank_is_the_largest_that_keeps_the_confidence(count: int, confidence: float) -> None:
    from scipy.stats import binom

    def coverage(rank: int) -> float:
        return 1 - 2 * float(binom.cdf(rank - 1, count, 0.5))

    rank = median_rank(count, confidence) or 0
    assert rank == 0 or coverage(rank) >= confidence
    assert coverage(rank + 1) < confidence


@pytest.mark.parametrize("count", [1001, 1002, 5000, 20_001])
def test_the_rank_of_many_samples_agrees_with_the_binomial_too(count: int) -> None:
    from scipy.stats import binom

    rank = median_rank(count)
    assert rank is not None
    coverage, next_coverage = (1 - 2 * float(binom.cdf(r - 1, count, 0.5)) for r in (rank, rank + 1))
    assert next_coverage - 1e-4 < 0.95 < coverage + 1e-4


def test_the_interval_covers_the_true_median_as_often_as_it_says() -> None:
    # 2,000 trials at 95.9 % (n = 20, ranks 6 and 15): 93 % is more than six standard deviations away
    random = np.random.default_rng(7)
    truth = math.log(2)
    hits = 0
    for _ in range(2000):
        interval = median_interval(random.exponential(1.0, 20).tolist())
        assert interval is not None
        hits += interval[0] <= truth <= interval[1]
    assert 0.93 < hits / 2000 < 0.985


def shapes(name: str, count: int) -> list[float]:
    random = np.random.default_rng(3)
    noise = 0.005 * random.standard_normal(count)
    found = {
        "normal": 1 + noise,
        "skewed": np.exp(20 * noise),
        "drifting": 1 + noise + np.linspace(0, 0.05, count),
        "uniform": random.uniform(0.9, 1.1, count),
        "with a few outliers": 1 + noise + 0.5 * (np.arange(count) % 30 == 0),
        "two clocks": 1 + noise + 0.06 * (np.arange(count) % 3 == 0),
        "two clocks, one after the other": 1 + noise + 0.06 * (np.arange(count) > count / 2),
    }
    return [float(value) for value in found[name]]


@pytest.mark.parametrize("count", [60, 300])
@pytest.mark.parametrize("name", ["normal", "skewed", "drifting", "uniform", "with a few outliers"])
def test_one_hump_is_not_called_two_modes(name: str, count: int) -> None:
    assert not bimodal(shapes(name, count))


@pytest.mark.parametrize("count", [20, 60, 300])
@pytest.mark.parametrize("name", ["two clocks", "two clocks, one after the other"])
def test_two_clocks_are_two_modes(name: str, count: int) -> None:
    assert bimodal(shapes(name, count))


def test_two_steps_of_the_timer_are_not_two_modes() -> None:
    assert not bimodal([0.005, 0.0055] * 30)


def test_two_modes_closer_than_a_percent_are_of_no_account() -> None:
    assert not bimodal([10.0, 10.05] * 30)
