"""When sampling stops, in simulated time: no order of providers, no noise and no slow call changes what is reported."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashbench.analysis.statistics import median
from flashbench.measure import sampling
from flashbench.measure.sampling import Batch, Rule, collect

BATCH_MS = 20.0


@dataclass
class SimulatedGpu:
    """A clock that only calls advance. A call's length depends on how much work the device has done since it was idle."""

    length_ms: Callable[[float], float]
    now_ms: float = 0.0
    worked_ms: float = 0.0
    calls: int = 0
    batches: list[int] = field(default_factory=list)

    def clock(self) -> float:
        return self.now_ms / 1e3

    def call(self) -> float:
        length = self.length_ms(self.worked_ms)
        self.now_ms += length
        self.worked_ms += length
        self.calls += 1
        return length

    def batch(self) -> Batch:
        values = [self.call()]
        while sum(values) < BATCH_MS and len(values) < 50:
            values.append(self.call())
        self.batches.append(len(values))
        return values, 0


def after(work_ms: float, slow: float = 11.2, fast: float = 8.8) -> Callable[[float], float]:
    return lambda worked: slow if worked < work_ms else fast


def falling(over_ms: float, slow: float = 11.2, fast: float = 8.8) -> Callable[[float], float]:
    return lambda worked: max(fast, slow - (slow - fast) * worked / over_ms)


def sequence(values: Iterator[float]) -> Callable[[float], float]:
    return lambda _worked: next(values)


# TI-03: a clock that is still rising


@pytest.mark.parametrize(
    "device", [after(150), falling(150), falling(600), falling(1000)], ids=["step", "150", "600", "1000"]
)
def test_the_first_provider_is_not_slower_for_being_first(device: Callable[[float], float]) -> None:
    def medians(scales: tuple[float, float]) -> dict[float, float]:
        gpu = SimulatedGpu(device)
        found = {}
        for scale in scales:
            scaled = SimulatedGpu(lambda worked, s=scale: s * device(worked), gpu.now_ms, gpu.worked_ms)
            found[scale] = median(collect(scaled.batch, Rule(), "events", scaled.clock).values_ms)
            gpu = scaled
        return found

    one_way, other_way = medians((1.0, 1.1)), medians((1.1, 1.0))
    for scale in (1.0, 1.1):
        assert one_way[scale] == pytest.approx(other_way[scale], rel=0.02)
        assert one_way[scale] == pytest.approx(8.8 * scale, rel=0.02)


def test_warm_up_lasts_as_long_as_asked_and_no_longer_when_the_time_is_steady() -> None:
    gpu = SimulatedGpu(lambda _worked: 1.0)
    samples = collect(gpu.batch, Rule(warmup_seconds=0.3), "events", gpu.clock)
    assert 300 <= samples.warmup_ms <= 300 + 3 * BATCH_MS + 100


def test_warm_up_that_never_gets_steady_ends_at_four_times_its_length() -> None:
    gpu = SimulatedGpu(sequence(1.001**n for n in itertools.count()))
    samples = collect(gpu.batch, Rule(warmup_seconds=0.1, max_seconds=0.1), "events", gpu.clock)
    assert 400 <= samples.warmup_ms <= 400 * 1.5


# TI-08: the confidence interval may never close


def test_times_that_alternate_stop_at_the_budget_and_say_that_they_did_not_converge() -> None:
    gpu = SimulatedGpu(sequence(itertools.cycle([0.010, 0.020])))
    rule = Rule(max_seconds=0.2, warmup_seconds=0.01)
    samples = collect(gpu.batch, rule, "events", gpu.clock)
    assert samples.converged is False
    assert gpu.now_ms <= 1e3 * (4 * rule.warmup_seconds + rule.max_seconds) + 2 * BATCH_MS
    assert set(samples.values_ms) == {0.010, 0.020}


def test_steady_times_stop_at_the_smallest_number_of_samples() -> None:
    gpu = SimulatedGpu(lambda _worked: 5.0)
    samples = collect(gpu.batch, Rule(min_samples=20), "events", gpu.clock)
    assert samples.converged is True
    assert 20 <= len(samples.values_ms) < 20 + max(gpu.batches)


def test_looking_at_the_interval_costs_in_proportion_to_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []

    def counted(values: list[float]) -> float | None:
        looked.append(len(values))
        return None

    monkeypatch.setattr(sampling, "relative_width", counted)
    gpu = SimulatedGpu(lambda _worked: 0.02)
    samples = collect(gpu.batch, Rule(max_seconds=2.0), "events", gpu.clock)
    assert len(samples.values_ms) > 90_000
    assert sum(looked) < 12 * len(samples.values_ms)


@given(
    lengths=st.lists(st.floats(0.001, 300.0), min_size=1, max_size=20),
    budget=st.floats(0.01, 3.0),
    min_samples=st.integers(2, 60),
)
@settings(max_examples=60)
def test_the_budget_is_kept_whatever_the_calls_do(lengths: list[float], budget: float, min_samples: int) -> None:
    gpu = SimulatedGpu(sequence(itertools.cycle(lengths)))
    rule = Rule(min_samples=min_samples, max_seconds=budget, warmup_seconds=0.05, confidence_width=0.0)
    samples = collect(gpu.batch, rule, "events", gpu.clock)
    # A batch that has begun is finished: at most 20 ms and a call.
    beyond_ms = BATCH_MS + max(lengths)
    sampled_ms = sum(samples.values_ms)
    assert sampled_ms <= 4e3 * budget + beyond_ms + max(lengths)
    assert len(samples.values_ms) >= min_samples or sampled_ms >= 4e3 * budget
    assert gpu.now_ms == pytest.approx(samples.warmup_ms + sampled_ms, rel=1e-6)


@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=30), st.integers(2, 40))
@settings(max_examples=60)
def test_every_sample_is_kept_once_and_in_order(lengths: list[float], min_samples: int) -> None:
    gpu = SimulatedGpu(sequence(itertools.cycle(lengths)))
    taken: list[float] = []

    def batch() -> Batch:
        values, lost = gpu.batch()
        taken.extend(values)
        return values, lost

    samples = collect(batch, Rule(min_samples=min_samples, max_seconds=0.1, warmup_seconds=0.01), "events", gpu.clock)
    assert samples.values_ms == taken[len(taken) - len(samples.values_ms) :]


# TI-06: few samples, or none


def test_a_method_whose_samples_never_count_ends_with_none_and_a_count_of_the_lost() -> None:
    gpu = SimulatedGpu(lambda _worked: 1.0)

    def batch() -> Batch:
        return [], len(gpu.batch()[0])

    samples = collect(batch, Rule(max_seconds=0.1, warmup_seconds=0.05), "events", gpu.clock)
    assert samples.values_ms == []
    assert samples.converged is False
    assert samples.discarded > 0
    assert gpu.now_ms <= 1e3 * 4 * (0.1 + 0.05) + 2 * BATCH_MS


def test_few_samples_never_count_as_converged() -> None:
    # Below six samples the median has no 95 % interval, however equal they are.
    gpu = SimulatedGpu(lambda _worked: 700.0)
    samples = collect(gpu.batch, Rule(max_seconds=0.5, min_samples=2, warmup_seconds=0.1), "wall", gpu.clock)
    assert 2 <= len(samples.values_ms) < 6
    assert samples.converged is False


def test_a_call_longer_than_the_whole_budget_is_still_sampled_twice() -> None:
    gpu = SimulatedGpu(lambda _worked: 10_000.0)
    assert len(collect(gpu.batch, Rule(max_seconds=2.0), "wall", gpu.clock).values_ms) == 2


def test_times_of_zero_end_the_sampling_like_any_other() -> None:
    now = itertools.count()
    samples = collect(
        lambda: ([0.0] * 10, 0), Rule(max_seconds=0.2, warmup_seconds=0.05), "events", lambda: next(now) / 1e3
    )
    assert set(samples.values_ms) == {0.0}
    assert samples.converged is False


def test_the_duty_cycle_is_the_share_of_the_time_in_which_calls_ran() -> None:
    gpu = SimulatedGpu(lambda _worked: 2.0)

    def with_idle_time() -> Batch:
        values, lost = gpu.batch()
        gpu.now_ms += 3 * sum(values)
        return values, lost

    assert collect(with_idle_time, Rule(), "events", gpu.clock).duty_cycle == pytest.approx(0.25, abs=0.01)


def test_an_interval_that_closed_after_the_last_look_counts_as_closed() -> None:
    wide = [*[9.0] * 13, 9.9, *[10.0] * 12, 10.1, *[11.0] * 13]  # the median's interval ends at 9.9 and 10.1
    batches = iter([[10.0], wide, [10.0] * 4])  # warm-up, the last look, and what still came within the budget
    ticks = itertools.count()
    rule = Rule(min_samples=40, confidence_width=0.01, max_seconds=2, warmup_seconds=0)
    samples = collect(lambda: (next(batches), 0), rule, "events", lambda: float(next(ticks)))
    assert len(samples.values_ms) == 44
    assert samples.converged
