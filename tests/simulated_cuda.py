"""A CUDA stream in simulated time: the host and the device have clocks of their own, and events fire when the stream reaches them.

For machines without a GPU; tests/gpu holds the same questions asked of a real one.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from flashbench.measure import timer

LAUNCH_MS = 0.005
CYCLES_PER_MS = 1.98e6


class Stream:
    """`host_ms` is now; `busy_until_ms` is when everything launched so far is done. All lengths in milliseconds."""

    def __init__(self) -> None:
        self.host_ms = 0.0
        self.busy_until_ms = 0.0
        self.synchronised = 0

    def launch(self, length_ms: float, host_ms: float = LAUNCH_MS) -> None:
        self.host_ms += host_ms
        self.busy_until_ms = max(self.busy_until_ms, self.host_ms) + length_ms

    def wait(self) -> None:
        self.synchronised += 1
        self.host_ms = max(self.host_ms, self.busy_until_ms)

    def sleep(self, seconds: float) -> None:
        self.host_ms += seconds * 1e3


class Event:
    """Holds the time at which the stream reaches it."""

    stream: Stream

    def __init__(self, enable_timing: bool = False) -> None:
        self.at_ms = 0.0

    def record(self) -> None:
        self.at_ms = max(self.stream.busy_until_ms, self.stream.host_ms)

    def query(self) -> bool:
        return self.at_ms <= self.stream.host_ms

    def elapsed_time(self, other: Event) -> float:
        assert other.query(), "an event was read before the device reached it"
        return other.at_ms - self.at_ms


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """The timers run on this stream, and their clock is its host's."""
    stream = Stream()
    bound = type("BoundEvent", (Event,), {"stream": stream})
    monkeypatch.setattr(torch.cuda, "Event", bound)
    monkeypatch.setattr(torch.cuda, "synchronize", stream.wait)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: stream.launch(cycles / CYCLES_PER_MS), raising=False)
    clock = SimpleNamespace(perf_counter=lambda: stream.host_ms / 1e3, sleep=stream.sleep)
    monkeypatch.setattr(timer, "time", clock)
    return stream
