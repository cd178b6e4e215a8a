"""What ran on the GPU, and when, from PyTorch's profiler (CUPTI activity records)."""

from __future__ import annotations

from collections.abc import Callable

import torch


def gpu_activities(call: Callable[[], object]) -> list[tuple[int, int]]:
    """(start, end) in nanoseconds of everything that ran on the GPU during `call`, in order; empty where CUPTI gives nothing."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    # One cycle; without acc_events PyTorch warns that a next one would forget it.
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as trace:
        call()
        torch.cuda.synchronize()
    results = trace.profiler.kineto_results if trace.profiler is not None else None
    if results is None:
        return []
    spans = [
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in results.events()
        if event.device_type() == DeviceType.CUDA and event.duration_ns() > 0
    ]
    return sorted(spans)
