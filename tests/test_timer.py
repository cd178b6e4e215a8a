"""A timer reports the call's own time: not the flush's, not the host's, and not a multiple of it."""

from __future__ import annotations

import math
import time

import pytest
import torch
from simulated_cuda import LAUNCH_MS, Stream, stream  # noqa: F401 - `stream` is a fixture

from flashbench.analysis.statistics import median, quantile
from flashbench.measure.sampling import Rule, Samples, collect
from flashbench.measure.timer import MAX_SPIN_CYCLES, EventTimer, L2Flush, WallTimer, time_call
from flashbench.measure.workload import Inputs, make_inputs, make_operation, same_inputs
from flashbench.providers.spec import Bound
from flashbench.records import Device, Problem

CPU = Device("cpu", "a processor", 8 << 30, l2_bytes=1 << 20)
QUICK = Rule(l2="warm", min_samples=10, max_seconds=0.3, warmup_seconds=0.02, confidence_width=0.2)
TINY = Problem(1, 2, 2, 48, 48, 16, 16, "fp32")


# The wall clock, on a CPU


class Sleeper:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1
        time.sleep(self.seconds)


@pytest.mark.parametrize("min_samples", [6, 30])
def test_a_sleep_of_known_length_is_reported_once_however_many_samples_are_taken(min_samples: int) -> None:
    # TI-05: the number of samples enters nowhere.
    sleeper = Sleeper(0.004)
    samples = time_call(sleeper, Rule("warm", min_samples=min_samples, max_seconds=0.05, warmup_seconds=0.01), CPU)
    assert len(samples.values_ms) >= min_samples
    assert 4.0 <= min(samples.values_ms) < 6.0  # the quickest: on a busy machine some are late


def test_a_sample_is_one_call() -> None:
    sleeper = Sleeper(0.001)
    values, discarded = WallTimer(sleeper, lambda: None).batch()
    assert (len(values), discarded) == (sleeper.calls, 0)


def test_the_flush_runs_before_every_call_and_is_not_timed() -> None:
    call, flush = Sleeper(0.001), Sleeper(0.005)
    values, _ = WallTimer(call, flush).batch()
    assert flush.calls == call.calls
    assert min(values) < 4.0


def test_a_cold_flush_writes_four_times_the_cache_of_this_device_and_a_warm_rule_none() -> None:
    flush = L2Flush(CPU)
    flush()
    assert flush._buffer is not None
    assert flush._buffer.numel() == 4 << 20


def test_a_device_that_does_not_tell_its_cache_is_flushed_all_the_same() -> None:
    flush = L2Flush(Device("cpu", "a processor", 8 << 30))
    flush()
    assert flush._buffer is not None
    assert flush._buffer.numel() == 64 << 20


def test_the_clocks_are_observed_while_it_samples() -> None:
    seen = []
    time_call(Sleeper(0.001), QUICK, CPU, lambda: seen.append(1))
    assert len(seen) >= 2


def test_every_method_returns_the_same_kind_of_record_with_its_quantiles_in_order() -> None:
    # TI-09: never a float here and a tuple there.
    samples = time_call(Sleeper(0.001), QUICK, CPU)
    assert isinstance(samples, Samples)
    assert all(isinstance(value, float) and value > 0 for value in samples.values_ms)
    low, middle, high = (quantile(samples.values_ms, share) for share in (0.2, 0.5, 0.8))
    assert low <= middle <= high
    assert middle == median(samples.values_ms)


# Events on a stream in simulated time


def timed(timer: EventTimer, stream: Stream, rule: Rule = QUICK) -> Samples:  # noqa: F811
    return collect(timer.batch, rule, "events", lambda: stream.host_ms / 1e3)


@pytest.mark.parametrize("regime", ["isolated", "sustained"])
def test_a_flush_of_130_us_is_no_part_of_a_call_of_10_us(stream: Stream, regime: str) -> None:  # noqa: F811
    # TI-02. Two launch overheads at most lie between the events.
    timer = EventTimer(lambda: stream.launch(0.010), lambda: stream.launch(0.130), regime)
    assert median(timed(timer, stream).values_ms) == pytest.approx(0.010, abs=2 * LAUNCH_MS)


@pytest.mark.parametrize("regime", ["isolated", "sustained"])
def test_a_launch_of_5_us_that_ends_after_1_ms_takes_1_ms(stream: Stream, regime: str) -> None:  # noqa: F811
    # TI-04: Event.elapsed_time refuses an event that the device has not reached, so the device was waited for.
    timer = EventTimer(lambda: stream.launch(1.0), lambda: stream.launch(0.1), regime)
    assert median(timed(timer, stream).values_ms) == pytest.approx(1.0, rel=0.01)
    assert stream.synchronised > 0


def test_a_host_slower_than_the_spin_is_discarded_until_the_spin_has_grown(stream: Stream) -> None:  # noqa: F811
    timer = EventTimer(lambda: stream.launch(0.1, host_ms=2.0), lambda: None)
    values, late = timer.batch()
    assert (values, late) == ([], 3)
    for _ in range(8):
        values, late = timer.batch()
    assert late == 0
    assert median(values) == pytest.approx(0.1, rel=0.01)


def test_a_host_slower_than_the_longest_spin_gives_no_time_at_all(stream: Stream) -> None:  # noqa: F811
    # Rather none than the host's time under the kernel's name.
    timer = EventTimer(lambda: stream.launch(0.1, host_ms=40.0), lambda: None)
    samples = timed(timer, stream, Rule())
    assert samples.values_ms == []
    assert samples.discarded > 0
    assert timer.spin_cycles == MAX_SPIN_CYCLES


def test_an_isolated_card_is_busy_for_about_a_quarter_of_the_time(stream: Stream) -> None:  # noqa: F811
    timer = EventTimer(lambda: stream.launch(2.0), lambda: None, "isolated")
    assert timed(timer, stream).duty_cycle == pytest.approx(0.25, abs=0.03)


def test_a_sustained_card_is_busy_nearly_all_the_time(stream: Stream) -> None:  # noqa: F811
    timer = EventTimer(lambda: stream.launch(2.0), lambda: None, "sustained")
    assert timed(timer, stream).duty_cycle > 0.95


# TI-10: what is timed


def bits(inputs: Inputs) -> list[torch.Tensor]:
    return [t for t in (inputs.q, inputs.k, inputs.v, inputs.grad_out) if t is not None]


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_every_provider_of_a_problem_gets_the_same_bits(dtype: str) -> None:
    problem = Problem(1, 4, 2, 32, 48, 16, 16, dtype, mode="backward")
    first, second = (make_inputs(problem, 7, torch.device("cpu")) for _ in range(2))
    assert len(bits(first)) == 4
    assert all(torch.equal(a, b) for a, b in zip(bits(first), bits(second), strict=True))


def test_another_seed_gives_other_inputs() -> None:
    first, second = (make_inputs(TINY, seed, torch.device("cpu")) for seed in (0, 1))
    assert not any(torch.equal(a, b) for a, b in zip(bits(first), bits(second), strict=True))


def test_forward_and_backward_and_every_mask_see_the_same_q_k_and_v() -> None:
    dense = make_inputs(TINY, 0, torch.device("cpu"))
    causal = make_inputs(Problem(1, 2, 2, 48, 48, 16, 16, "fp32", "causal", "backward"), 0, torch.device("cpu"))
    assert all(torch.equal(a, b) for a, b in zip(bits(dense), bits(causal)[:3], strict=True))


def test_inputs_are_standard_normal_and_not_each_other() -> None:
    # Zeros, and equal operands, draw less power and run faster.
    inputs = make_inputs(Problem(4, 8, 8, 256, 256, 64, 64, "fp32", mode="backward"), 0, torch.device("cpu"))
    for tensor in bits(inputs):
        assert abs(float(tensor.mean())) < 0.01
        assert float(tensor.std()) == pytest.approx(1.0, abs=0.01)
        assert int((tensor == 0).sum()) < 10
    assert len({float(tensor.flatten()[0]) for tensor in bits(inputs)}) == 4


@pytest.mark.parametrize("which", ["q", "k", "v", "grad_out"])
def test_an_input_that_was_written_to_is_noticed(which: str) -> None:
    problem = Problem(1, 2, 2, 48, 48, 16, 16, "fp32", mode="backward")
    inputs = make_inputs(problem, 0, torch.device("cpu"))
    assert same_inputs(problem, 0, inputs)
    getattr(inputs, which)[0, 1, 47, 15] += 1e-3
    assert not same_inputs(problem, 0, inputs)


# TI-11: backward


class Attention:
    """Plain attention that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), dim=-1) @ v


def inputs_and_operation(mode: str):
    problem = Problem(1, 2, 2, 48, 48, 16, 16, "fp32", mode=mode)
    inputs = make_inputs(problem, 0, torch.device("cpu"))
    attention = Attention()
    return inputs, attention, make_operation(problem, Bound(attention), inputs)


def test_fifty_backward_calls_leave_one_backward_and_nothing_accumulated() -> None:
    inputs, _, operation = inputs_and_operation("backward")
    first = operation.results()
    for _ in range(50):
        operation.run()
    last = operation.results()
    assert all(torch.equal(first[name], last[name]) for name in ("dq", "dk", "dv"))
    leaves = [t.detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
    expected = torch.autograd.grad(Attention()(*leaves), leaves, inputs.grad_out)
    assert all(torch.allclose(last[name], g) for name, g in zip(("dq", "dk", "dv"), expected, strict=True))
    assert all(t.grad is None and not t.requires_grad for t in bits(inputs))


def test_forward_is_no_part_of_a_backward_call() -> None:
    _, attention, operation = inputs_and_operation("backward")
    for _ in range(50):
        operation.run()
    assert attention.calls == 1


def test_forward_and_backward_together_run_both_each_time() -> None:
    _, attention, operation = inputs_and_operation("forward_backward")
    for _ in range(5):
        operation.run()
    assert attention.calls == 5


def test_a_forward_call_records_no_graph_even_for_a_provider_with_parameters() -> None:
    # What autograd would keep for a backward pass is memory, and time, of another mode.
    scale = torch.ones((), requires_grad=True)
    inputs = make_inputs(TINY, 0, torch.device("cpu"))
    out = make_operation(TINY, Bound(lambda q, k, v: q * scale), inputs).run()
    assert isinstance(out, torch.Tensor)
    assert out.grad_fn is None
