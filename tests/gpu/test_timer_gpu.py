"""The timers on a real GPU: two clocks agree, the flush is seen, and a late host is not taken for a slow kernel."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from flashbench.analysis.statistics import median
from flashbench.measure.crosscheck import cross_check
from flashbench.measure.device import describe, use
from flashbench.measure.profiler import gpu_activities
from flashbench.measure.sampling import Rule, Samples
from flashbench.measure.timer import FIRST_SPIN_CYCLES, EventTimer, L2Flush, time_call
from flashbench.measure.workload import make_inputs, make_operation
from flashbench.providers.table import get
from flashbench.records import Device, Problem

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and torch sees none"),
]

COLD = Rule(max_seconds=0.5, warmup_seconds=0.2)
WARM = Rule(l2="warm", max_seconds=0.5, warmup_seconds=0.2)


@pytest.fixture(scope="module")
def device() -> Device:
    found = describe("auto")
    use(found)
    return found


@pytest.fixture(scope="module")
def profiler(device: Device) -> None:
    x = torch.ones(1024, device="cuda")
    gpu_activities(lambda: x.add_(1))
    if not gpu_activities(lambda: x.add_(1)):
        pytest.skip("the profiler shows no GPU activity on this machine")


def middle(samples: Samples) -> float:
    found = median(samples.values_ms)
    assert found is not None, samples.warnings
    return found


def stream_of(target_ms: float, device: Device) -> Callable[[], object]:
    """A memory-bound call of about this length: the clock of the SMs does not change it."""

    def copy(elements: int) -> Callable[[], object]:
        x = torch.randn(elements, device="cuda")
        y = torch.empty_like(x)
        return lambda: torch.add(x, 1.0, out=y)

    elements = 32 << 20
    once = middle(time_call(copy(elements), Rule("warm", timer="events", max_seconds=0.1, warmup_seconds=0.1), device))
    return copy(int(elements * target_ms / once))


# TI-04: kernel time, not launch time


@pytest.mark.usefixtures("profiler")
@pytest.mark.parametrize("provider", ["naive", "sdpa-flash"])
@pytest.mark.parametrize("mode", ["forward", "backward", "forward_backward"])
def test_events_and_profiler_agree_on_the_same_launches(device: Device, provider: str, mode: str) -> None:
    problem = Problem(1, 16, 16, 8192, 8192, 64, 64, "fp16", mode=mode)
    inputs = make_inputs(problem, 0, torch.device("cuda"))
    operation = make_operation(problem, get(provider).bind(problem, device), inputs)
    for _ in range(3):
        operation.run()
    found = cross_check(operation.run, COLD, device)
    assert found["events_ms"] > 0.1
    assert found["events_ms"] == pytest.approx(found["profiler_ms"], rel=0.05)


@pytest.mark.parametrize("mode", ["forward", "backward"])
def test_the_time_is_not_shorter_than_what_the_host_sees_of_calls_it_waits_for(device: Device, mode: str) -> None:
    problem = Problem(1, 16, 16, 8192, 8192, 64, 64, "fp16", mode=mode)
    inputs = make_inputs(problem, 0, torch.device("cuda"))
    operation = make_operation(problem, get("naive").bind(problem, device), inputs)
    by_events = middle(time_call(operation.run, WARM, device))
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(20):
        operation.run()
    torch.cuda.synchronize()
    by_host = (time.perf_counter() - began) * 1e3 / 20
    # Back to back the clock may be lower, so the host may see more; it cannot see much less.
    assert by_events == pytest.approx(by_host, rel=0.25)


# TI-02: flush, and the methods beside one another


@pytest.mark.usefixtures("profiler")
def test_events_graph_and_profiler_agree_on_a_kernel_of_100_us(device: Device) -> None:
    found = cross_check(stream_of(0.1, device), COLD, device)
    assert found["profiler_ms"] == pytest.approx(0.1, rel=0.3)
    assert found["events_ms"] == pytest.approx(found["profiler_ms"], rel=0.05)
    assert found["graph_ms"] == pytest.approx(found["profiler_ms"], rel=0.05)


@pytest.mark.parametrize("regime", ["isolated", "sustained"])
def test_the_flush_is_no_part_of_the_time(device: Device, regime: str) -> None:
    # The call's data is far larger than the L2, so that cold and warm differ by nothing but the flush itself.
    call = stream_of(1.0, device)
    cold = middle(time_call(call, Rule("cold", regime, max_seconds=0.3, warmup_seconds=0.2), device))
    warm = middle(time_call(call, Rule("warm", regime, max_seconds=0.3, warmup_seconds=0.2), device))
    assert cold == pytest.approx(warm, rel=0.05)


@pytest.mark.usefixtures("profiler")
def test_data_that_fits_the_l2_is_read_faster_when_warm(device: Device) -> None:
    if device.l2_bytes is None:
        pytest.skip("this device does not tell the size of its L2")
    x = torch.randn(device.l2_bytes // 6 // 4, device="cuda")
    y = torch.empty_like(x)

    def read() -> object:
        return torch.add(x, 1.0, out=y)

    cold = middle(time_call(read, Rule("cold", timer="profiler", max_seconds=0.3), device))
    warm = middle(time_call(read, Rule("warm", timer="profiler", max_seconds=0.3), device))
    assert cold > 1.1 * warm


@pytest.mark.usefixtures("profiler")
def test_a_kernel_of_a_few_microseconds_is_read_from_the_profiler(device: Device) -> None:
    x = torch.ones(1024, device="cuda")
    samples = time_call(lambda: x.mul_(1.0), WARM, device)
    assert samples.method == "profiler"
    assert 0.0005 < middle(samples) < 0.020


def test_a_kernel_of_a_millisecond_is_timed_by_events(device: Device) -> None:
    assert time_call(stream_of(1.0, device), WARM, device).method == "events"


def test_samples_of_one_call_agree_with_themselves(device: Device) -> None:
    call = stream_of(0.5, device)
    first, second = (middle(time_call(call, COLD, device)) for _ in range(2))
    assert first == pytest.approx(second, rel=0.02)


# Late launches


def test_a_call_whose_host_side_takes_2_ms_counts_only_once_the_spin_has_grown(device: Device) -> None:
    x = torch.ones(1 << 20, device="cuda")

    def call() -> object:
        time.sleep(0.002)
        return x.mul_(1.0)

    timer = EventTimer(call, L2Flush(device))
    call()
    values, late = timer.batch()
    assert (values, late) == ([], 3)
    for _ in range(10):
        values, late = timer.batch()
    assert timer.spin_cycles > FIRST_SPIN_CYCLES
    assert values
    assert (median(values) or 0.0) < 0.5


def test_a_call_whose_host_side_outlasts_the_longest_spin_gives_no_time_and_a_reason(device: Device) -> None:
    x = torch.ones(1 << 20, device="cuda")

    def call() -> object:
        time.sleep(0.08)
        return x.mul_(1.0)

    samples = time_call(call, Rule(timer="events", max_seconds=0.3, warmup_seconds=0.2), device)
    assert samples.values_ms == []
    assert samples.discarded > 0
    assert any("the host launches more slowly" in warning for warning in samples.warnings)
