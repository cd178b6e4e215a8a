"""Anchors: a matrix product and a copy, timed in the process of the cases, so that two sessions have something in common.

What moves them between two sessions is the machine's, not the code's. Like the cases, they run on random data, under the same
state of the L2 and in the same load regime; they take about half a second each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from flashbench.measure.memory import release
from flashbench.measure.sampling import Rule
from flashbench.measure.telemetry import Nvml, Watch
from flashbench.measure.timer import time_call
from flashbench.measure.workload import matmul_precision
from flashbench.records import Device
from flashbench.store.anchors import Anchor

GEMM_SIZE = {"cuda": 4096, "cpu": 512}
"""About 0.2 ms on an H100 in bf16, some milliseconds on a CPU in fp32: as long as the cases that it stands for."""
COPY_BYTES = {"cuda": 512 << 20, "cpu": 32 << 20}
SECONDS = {"cuda": 0.3, "cpu": 0.2}
SAMPLES = 50
WIDTH = 0.002
"""The ratio to the anchor carries the anchor's error too, so it is known better than a case."""


def measure_anchors(device: Device, rule: Rule, nvml: Nvml) -> list[Anchor]:
    """Every anchor of this device; one that could not be timed is left out."""
    seconds = SECONDS[device.kind]
    own = replace(
        rule,
        timer="events" if device.kind == "cuda" else "auto",
        min_samples=SAMPLES if device.kind == "cuda" else SAMPLES // 5,
        confidence_width=WIDTH,
        max_seconds=seconds,
        warmup_seconds=min(rule.warmup_seconds, seconds),
    )
    found = []
    for name, call in _calls(device):
        watch = Watch(nvml)
        with matmul_precision("fp32"):
            samples = time_call(call, own, device, watch.observe)
        state = watch.state()
        if samples.values_ms:
            values = tuple(round(value, 6) for value in samples.values_ms)
            found.append(Anchor(name, values, samples.method, state.sm_clock_mhz if state else None))
        del call
        release()
    return found


def _calls(device: Device) -> Iterator[tuple[str, Callable[[], object]]]:
    where = torch.device(device.kind, device.index)
    size = GEMM_SIZE[device.kind]
    a, b = (torch.randn(size, size, device=where).to(_dtype(device)) for _ in range(2))
    yield "gemm", lambda: a @ b
    count = COPY_BYTES[device.kind] // 4
    source = torch.randn(count, device=where)
    target = torch.empty_like(source)
    yield "copy", lambda: target.copy_(source)


def _dtype(device: Device) -> torch.dtype:
    if device.kind == "cpu":
        return torch.float32
    return torch.float16 if device.capability is not None and device.capability < (8, 0) else torch.bfloat16
