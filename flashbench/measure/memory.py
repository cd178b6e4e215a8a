"""Peak memory of one call, in a pass of its own, net of what was live before it."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable

import torch

from flashbench.records import Device, Memory


def measure_memory(call: Callable[[], object], device: Device) -> Memory | None:
    """Allocator figures of `call`; None where the allocator cannot be read."""
    return _cuda(call) if device.kind == "cuda" else _cpu(call)


def _cuda(call: Callable[[], object]) -> Memory:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    del result
    return Memory(before, peak)


def _cpu(call: Callable[[], object]) -> Memory | None:
    """The running sum of the profiler's allocation events: tracemalloc sees no tensors, and resident size only grows."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as trace:
        result = call()
    del result
    if trace.profiler is None:
        return None
    live = peak = 0
    for event in trace.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return Memory(0, peak)


def release() -> None:
    """Give back what the finished case left, so that the next one starts with clean memory."""
    gc.collect()
    if torch.cuda.is_available():
        with contextlib.suppress(RuntimeError):  # after a sticky error nothing works; `still_works` says so
            torch.cuda.empty_cache()
