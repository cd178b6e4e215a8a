"""How many calls the energy pass makes, in simulated time; tests/gpu asks a real counter."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from fake_nvml import H200, Card, FakeNvml
from simulated_cuda import Stream, stream  # noqa: F401 - a fixture

from flashbench.measure import energy
from flashbench.measure.energy import measure_energy
from flashbench.measure.telemetry import Nvml
from flashbench.records import Device

GPU = Device("cuda", "NVIDIA H200", 1 << 37, index=0, uuid="GPU-1")


@pytest.mark.parametrize(("length_ms", "least", "most"), [(5000, 1, 1), (300, 7, 8), (0.05, 20_000, 45_000)])
def test_the_pass_takes_about_two_seconds_whatever_a_call_takes(
    monkeypatch: pytest.MonkeyPatch,
    stream: Stream,  # noqa: F811
    length_ms: float,
    least: int,
    most: int,
) -> None:
    clock = SimpleNamespace(perf_counter=lambda: stream.host_ms / 1e3, sleep=stream.sleep)
    monkeypatch.setattr(energy, "time", clock)
    module, calls = FakeNvml(Card("GPU-1", H200)), []

    def call() -> None:
        calls.append(stream.launch(length_ms))

    measure_energy(call, GPU, Nvml("GPU-1", None, module, module.cards[0]))
    assert least <= len(calls) <= most
